"""A step of a closed loop: the definition, in plain PyTorch.

All agents and their controllers are one system y' = (J - R) dH/dy. A step of size h is taken in
substeps, each by the average discrete gradient f of the energy in a part of J - R:

    x = y + h (J - R)_part f(y, x),        f(y, x) = A^T (weights * chord(A y + a, A x + a))

First every agent moves with its controller; then both ends of every edge move, first for edges of
plants, then for edges of controllers. Every second step runs in reverse order, so two steps
together are symmetric. The chords make f^T (x - y) the change of the energy, so the energy falls by
h f^T R f in the agents' own substeps and does not change along edges, for any weights and any h.
Forces w from outside act in the agents' own substeps, to which h g w is added; the forces supply
the energy h w^T g^T f.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hdnn import activations, implicit
from hdnn.control.plant import blocks, colours

if TYPE_CHECKING:
    from hdnn.control.loop import ClosedLoop


class Substeps(NamedTuple):
    """Equations `x = y + F A^T (weights * chord(A y + a, A x + a))` of E agents or edges."""

    # (E, k): the entries of the flattened state (N n,) that move.
    entries: Tensor
    flow: Tensor  # (E, k, k): F, h times a part of J - R
    A: Tensor  # (T, E, r, k), for each step
    a: Tensor  # (T, E, r)
    weights: Tensor  # (E, r)
    rows: tuple[str, ...]  # the activation of each row
    # Equations that share no entry are solved together.
    groups: tuple[slice, ...]

    def solve(self, y: Tensor, t: int, push: Tensor | None = None) -> Tensor:
        """The states `(S, N n)` after the substeps of step t, from y; `push` is added."""
        groups = self.groups[::-1] if t % 2 else self.groups
        t = min(t, len(self.A) - 1)
        sigma = activations.by_row(self.rows)
        for group in groups:
            index = self.entries[group]
            start = y[:, index]
            pushed = None
            if push is not None:
                pushed = start + push[:, index]
            A = self.A[t, group]
            slopes = A.mT * self.weights[group].unsqueeze(-2)
            moved = implicit.solve_chord(
                start,
                self.flow[group] @ slopes,
                A,
                self.a[t, group],
                sigma,
                c=pushed,
                max_iter=1000,
                where=f"step {t} of a closed loop",
            )
            entries = index.flatten()
            y = y.index_copy(1, entries, moved.flatten(1))
        return y


class System(NamedTuple):
    """The substeps of a closed loop: for agents, edges of plants and edges of controllers."""

    own: Substeps
    plant_edges: Substeps
    controller_edges: Substeps

    def trajectory(
        self,
        y: Tensor,
        steps: int,
        first: int,
        push: Tensor | None,
    ):
        """States `(steps + 1, S, N n)`, and those between the agents' substeps and the edges."""
        states = [y]
        middles = []
        for n in range(steps):
            t = first + n
            force = None if push is None else push[n]
            if t % 2:
                y = self.controller_edges.solve(y, t)
                y = self.plant_edges.solve(y, t)
                middles.append(y)
                y = self.own.solve(y, t, force)
            else:
                y = self.own.solve(y, t, force)
                middles.append(y)
                y = self.plant_edges.solve(y, t)
                y = self.controller_edges.solve(y, t)
            states.append(y)
        trajectory = torch.stack(states)
        if not middles:
            return trajectory, trajectory[:0]
        return trajectory, torch.stack(middles)


def system(loop: ClosedLoop) -> System:
    """The substeps of a loop, with gradients for the weights of its controllers."""
    plant = loop.plant
    controller = loop.controller
    K = controller.K
    T, N, c, _ = K.shape
    p = plant.states
    n = p + c
    index = torch.arange(N * n, device=K.device)
    index = index.view(N, n)
    A = plant.A.to(K)[None]
    a = plant.a.to(K)[None]
    weights = plant.weights.to(K)
    ones = torch.ones_like(controller.R).to(K)
    tanh = ("tanh",) * c
    own = Substeps(
        index,
        loop.step * _interconnection(loop),
        _diagonal(A.expand(T, -1, -1, -1), K),
        torch.cat([a.expand(T, -1, -1), controller.b], -1),
        torch.cat([weights, ones], -1),
        plant.activation + tanh,
        (slice(None),),
    )
    plant_edges = _edges(
        loop.step,
        index[:, :p],
        plant.links,
        plant.couplings.to(K),
        (A, a, weights),
        plant.activation,
    )
    controller_edges = _edges(
        loop.step,
        index[:, p:],
        controller.links,
        controller.C,
        (K, controller.b, ones),
        tanh,
    )
    return System(own, plant_edges, controller_edges)


def _interconnection(loop: ClosedLoop) -> Tensor:
    """J - R of each agent with its controller, `(N, n, n)`: the port G joins them."""
    plant = loop.plant
    controller = loop.controller
    G = controller.G
    port = G @ plant.g.to(G).mT
    damping = torch.diag_embed(controller.R)
    damped = (controller.J - damping).to(G)
    moved = (plant.J - plant.R).to(G)
    return blocks([[moved, -port.mT], [port, damped]])


def _edges(h, index, links, couplings, rows, names) -> Substeps:
    """The substeps of edges (i, k), in which C moves i by k and -C^T moves k by i."""
    A, a, weights = rows
    ends = torch.tensor(links, dtype=torch.long, device=index.device)
    i, k = ends.view(-1, 2).mT
    zero = torch.zeros_like(couplings)
    skew = blocks([[zero, couplings], [-couplings.mT, zero]])
    groups = []
    first = 0
    for group in colours(links):
        last = first + len(group)
        groups.append(slice(first, last))
        first = last
    a = [a.index_select(1, end) for end in (i, k)]
    weights = [weights[end] for end in (i, k)]
    return Substeps(
        torch.cat([index[i], index[k]], -1),
        h * skew,
        _diagonal(A.index_select(1, i), A.index_select(1, k)),
        torch.cat(a, -1),
        torch.cat(weights, -1),
        names * 2,
        tuple(groups),
    )


def _diagonal(first: Tensor, second: Tensor) -> Tensor:
    """Matrices `(..., r, k)` and `(..., s, l)` as blocks on the diagonal."""
    top = pad(first, (0, second.shape[-1]))
    bottom = pad(second, (first.shape[-1], 0))
    return torch.cat([top, bottom], -2)
