"""M K^T sigma(K s + b) and its adjoint for one part of a graph: rounds of messages with neighbours.

Forward: *gather* the neighbours' s, compute z = sigma(K s + b), *reduce* what K^T z contributes to
its owners, and where X or J links nodes, gather that along T. Backward: the same rounds with the
transposed matrices. All gradients of the weights come out where the weights are. While messages
travel, the rows that need no other part are computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hdnn.activations import Activation
from hdnn.distributed.graph.plan import Part, Round, Stencil
from hdnn.distributed.network.products import elementwise, products
from hdnn.distributed.transport import Message, Transport


class Neighbours:
    """Products with block-sparse matrices of one pattern, neighbours' rows fetched as needed."""

    def __init__(self, stencil: Stencil, transport: Transport) -> None:
        self.stencil, self.part, self.transport = stencil, stencil.part, transport
        self.by = products(stencil)

    def apply(self, K: Tensor, x: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """The own rows of K x, and x with the halo."""
        rows = self.part.rows
        whole = x.new_zeros(rows + self.stencil.halo_rows, x.shape[1])
        whole[:rows] = x
        gather = self.stencil.round(layer)[0]
        found = self._meanwhile(
            gather, whole, whole[rows:], lambda low, high: self.by.apply(K, whole, low, high)
        )
        return found, whole

    def adjoint(self, K: Tensor, z: Tensor, layer: int) -> Tensor:
        """The own rows of K^T z."""
        stencil = self.stencil
        edge, last = stencil.inner_contributions, stencil.contributions
        # The contributions of this part, a row of zeros, and those of others.
        given = z.new_zeros(last + 1 + stencil.received_rows, z.shape[1])
        if edge < last:
            given[edge:last] = self.by.give(K, z, edge, last)

        def add(low: int, high: int) -> Tensor:
            if low == 0 < edge:
                given[:edge] = self.by.give(K, z, 0, edge)
            return _sum_rows(given, stencil.gathered[:, low:high])

        return self._meanwhile(stencil.round(layer)[1], given, given[last + 1 :], add)

    def _meanwhile(
        self, round: Round, source: Tensor, target: Tensor, compute: Callable[[int, int], Tensor]
    ) -> Tensor:
        """What `compute(low, high)` finds for all own rows, with a round of messages.

        The rows that need no other part are computed while messages travel.
        """
        rows, inner = self.part.rows, self.part.inner
        out: list[Message] = [(part, source[places]) for part, places in round.out]
        into: list[Message] = []
        late: list[tuple[Tensor, Tensor]] = []
        for part, places in round.into:
            low, high = int(places[0]), int(places[-1]) + 1
            if high - low == len(places):
                into.append((part, target[low:high]))
            else:
                buffer = target.new_empty(len(places), target.shape[1])
                into.append((part, buffer))
                late.append((places, buffer))
        pending = self.transport.start_round(round, out, into)
        found = [compute(0, inner)] if inner else []
        pending.wait()
        for places, buffer in late:
            target[places] = buffer
        if inner < rows:
            found.append(compute(inner, rows))
        return torch.cat(found) if len(found) > 1 else found[0]


def _sum_rows(x: Tensor, rows: Tensor) -> Tensor:
    """sum_d x[rows[d]], one term after the other."""
    total = x[rows[0]]
    for row in rows[1:]:
        total += x[row]
    return total


@dataclass
class FieldTape:
    """What the adjoint of one evaluation needs: s with the halo, z = sigma(a) and sigma'(a)."""

    s: Tensor
    z: Tensor
    slope: Tensor


class Field:
    """M K^T sigma(K s + b), M = X, -X^T or J, with K in BlkSprs(R) and M in BlkSprs(T)."""

    def __init__(
        self, part: Part, R: Stencil, T: Stencil | None, transport: Transport, sigma: Activation
    ) -> None:
        self.part, self.sigma = part, sigma
        self.near = Neighbours(R, transport)
        self.across = None if T is None else Neighbours(T, transport)

    def forward(
        self, layer: int, K: Tensor, b: Tensor, M: Tensor | None, s: Tensor
    ) -> tuple[Tensor, FieldTape]:
        """The own rows of the field, and what its adjoint needs."""
        a, whole = self.near.apply(K, s, layer)
        a += b.unsqueeze(-1)
        z = elementwise(self.sigma, a)
        v = self.near.adjoint(K, z, layer)
        if M is not None:
            assert self.across is not None
            v, _ = self.across.apply(M, v, layer)
        return v, FieldTape(whole, z, elementwise(self.sigma.slope, a))

    def backward(
        self, layer: int, K: Tensor, M_adjoint: Tensor | None, kept: FieldTape, g: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Given the gradient of the field's rows: those of s, K and b."""
        if M_adjoint is not None:
            assert self.across is not None
            g, _ = self.across.apply(M_adjoint, g, layer)
        u, whole = self.near.apply(K, g, layer)
        u *= kept.slope
        gradient = self.near.by.gradient(kept.z, whole, u, kept.s)
        if self.near.stencil.free is not None:
            gradient *= self.near.stencil.free[layer]
        return self.near.adjoint(K, u, layer), gradient, u.sum(-1)
