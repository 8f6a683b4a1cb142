"""K x, K^T z and the gradient of K for the rows of one part, sums in the order of the neighbours.

Two ways, the same for all parts of a graph: nodes of few features are multiplied all at once, entry
by entry, which never depends on the other nodes; large ones one by one, each by one `mm`.
Elementwise products and sums are kept apart: a fused multiply-add rounds differently, and is used
or not depending on a number's place in its tensor.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hdnn.distributed.graph.plan import Stencil

GROUP = 64  # entries: more than any processor takes at once
LARGE = 8  # features, from which nodes are multiplied one by one


def products(stencil: Stencil) -> Small | Large:
    """The products for this graph: chosen by its largest node, so that all parts choose alike."""
    return (Large if max(stencil.part.sizes.values()) >= LARGE else Small)(stencil)


class Small:
    """All nodes at once: one product and one sum for each neighbour's feature."""

    def __init__(self, stencil: Stencil) -> None:
        part, sizes = stencil.part, stencil.part.sizes
        slots = max(stencil.widths.values())
        self.columns = torch.zeros(slots, part.rows, dtype=torch.int64)
        self.entry = torch.full((slots, part.rows), stencil.entries)
        heights = max(sizes[i] for i in part.nodes)
        self.giver = torch.zeros(heights, stencil.contributions, dtype=torch.int64)
        self.given = torch.full((heights, stencil.contributions), stencil.entries)
        for i in part.nodes:
            row, first, width = part.first[i], stencil.entry[i], stencil.widths[i]
            begin = stencil.contribution[i]
            own = slice(begin, begin + width)
            for r in range(sizes[i]):
                entries = torch.arange(first + r * width, first + (r + 1) * width)
                self.columns[:width, row + r] = stencil.columns[i]
                self.entry[:width, row + r] = entries
                self.giver[r, own] = row + r
                self.given[r, own] = entries
        self.padded = bool((self.entry == stencil.entries).any())
        self.padded |= bool((self.given == stencil.entries).any())
        # The position of each entry's gradient among those ordered by slot and row.
        self.place = torch.zeros(stencil.entries + 1, dtype=torch.int64)
        self.place[self.entry.flatten()] = torch.arange(self.entry.numel())
        self.place = self.place[:-1]

    def _take(self, K: Tensor, entries: Tensor) -> Tensor:
        return (torch.cat([K, K.new_zeros(1)]) if self.padded else K)[entries]

    def apply(self, K: Tensor, x: Tensor, low: int, high: int) -> Tensor:
        """Rows low .. high of K x, where x has the halo too."""
        return _sum_of_products(
            self._take(K, self.entry[:, low:high]), x, self.columns[:, low:high]
        )

    def give(self, K: Tensor, z: Tensor, low: int, high: int) -> Tensor:
        """Contributions low .. high to K^T z: of each node to each feature of its neighbours."""
        return _sum_of_products(self._take(K, self.given[:, low:high]), z, self.giver[:, low:high])

    def gradient(self, z: Tensor, c: Tensor, u: Tensor, x: Tensor) -> Tensor:
        """z c^T + u x^T in the free entries, summed over the batch; c and x with the halo."""
        found = torch.stack(
            [(z * c[column]).sum(-1) + (u * x[column]).sum(-1) for column in self.columns]
        )
        return found.flatten()[self.place]


def elementwise(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """f(x), each entry computed the same way wherever it lies.

    PyTorch takes entries in groups, and what is left over at the end one by one, by another
    formula that may round differently: so tensors are padded until nothing is left over.
    """
    missing = -x.numel() % GROUP
    if not missing:
        return f(x)
    return f(torch.cat([x.flatten(), x.new_zeros(missing)]))[: x.numel()].view(x.shape)


def _sum_of_products(weights: Tensor, x: Tensor, rows: Tensor) -> Tensor:
    """sum_i weights[i] x[rows[i]], one term after the other."""
    total = x[rows[0]]
    total *= weights[0].unsqueeze(-1)
    for w, row in zip(weights[1:], rows[1:], strict=True):
        term = x[row]
        term *= w.unsqueeze(-1)
        total += term
    return total


class Large:
    """One node after the other: its block row, neighbours side by side, is one matrix.

    All factors are copies, because how a library multiplies depends on where in memory they begin.
    """

    def __init__(self, stencil: Stencil) -> None:
        self.stencil, self.part = stencil, stencil.part

    def _block(self, K: Tensor, i: int) -> Tensor:
        rows, width, first = self.part.sizes[i], self.stencil.widths[i], self.stencil.entry[i]
        return K[first : first + rows * width].view(rows, width).clone()

    def _own(self, z: Tensor, i: int) -> Tensor:
        return z[self.part.first[i] : self.part.first[i] + self.part.sizes[i]].clone()

    def _nodes(self, first: dict[int, int], low: int, high: int) -> list[int]:
        return [i for i in self.part.nodes if low <= first[i] < high]

    def apply(self, K: Tensor, x: Tensor, low: int, high: int) -> Tensor:
        nodes, columns = self._nodes(self.part.first, low, high), self.stencil.columns
        found = [self._block(K, i) @ x[columns[i]] for i in nodes]
        return torch.cat(found) if found else x[:0]

    def give(self, K: Tensor, z: Tensor, low: int, high: int) -> Tensor:
        nodes = self._nodes(self.stencil.contribution, low, high)
        found = [self._block(K, i).T @ self._own(z, i) for i in nodes]
        return torch.cat(found) if found else z[:0]

    def gradient(self, z: Tensor, c: Tensor, u: Tensor, x: Tensor) -> Tensor:
        found = []
        for i in self.part.nodes:
            columns = self.stencil.columns[i]
            outer = self._own(z, i) @ c[columns].T
            outer += self._own(u, i) @ x[columns].T
            found.append(outer.flatten())
        return torch.cat(found)
