"""A step of a closed loop: the definition, in plain PyTorch, one agent or edge after the other.

All agents and their controllers are one system y' = (J - R) dH/dy. A step of size h is taken in
substeps, each by the average discrete gradient f of the energy in a part of J - R:

    x = y + h (J - R)_part f(y, x),        f(y, x) = A^T (weights * chord(A y + a, A x + a))

First every agent moves with its controller; then both ends of every edge, those of the plants
before those of the controllers. Every second step does so in reverse, so that two steps together
are symmetric. The chords make f^T (x - y) the change of the energy, so that it falls by h f^T R f
in the agents' own substeps and stays the same along edges: for any weights and any h. Forces w from
outside act in the agents' own substeps, which h g w is added to: they supply h w^T g^T f.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hdnn import activations
from hdnn.activations import Activation
from hdnn.control.links import Edges
from hdnn.integrators import implicit
from hdnn.integrators.chords import Chord

TANH = activations.get("tanh")


@dataclass(frozen=True, eq=False)
class System:
    """All that a step needs: the plant, the controllers' weights and h, in one dtype."""

    A: Tensor
    a: Tensor
    J: Tensor
    R: Tensor
    g: Tensor
    plant_links: Edges
    couplings: Tensor
    K: Tensor
    b: Tensor
    G: Tensor
    J_c: Tensor
    R_c: Tensor
    links: Edges
    C: Tensor
    h: float
    activation: tuple[str, ...] = ()  # of each row of the plants' energies; identity if empty
    weights: Tensor | None = None  # of these rows, (N, r); 1 if None

    @property
    def rows(self) -> tuple[Activation, ...]:
        """The activation of each row of the plants' energies."""
        names = self.activation or ("identity",) * self.A.shape[1]
        return tuple(activations.get(name) for name in names)

    @property
    def slopes(self) -> Tensor:
        """A^T times the weights of its rows: from chords to discrete gradients, `(N, p, r)`."""
        return self.A.mT if self.weights is None else self.A.mT * self.weights.unsqueeze(-2)

    @property
    def own(self) -> Tensor:
        """J - R of each agent with its controller, `(N, n, n)`."""
        port = self.G @ self.g.mT
        controller = self.J_c - torch.diag_embed(self.R_c)
        top = torch.cat([self.J - self.R, -port.mT], -1)
        return torch.cat([top, torch.cat([port, controller], -1)], -2)

    def at(self, t: int) -> tuple[Tensor, Tensor]:
        """K and b of step t; after the last one they stay."""
        t = min(t, len(self.K) - 1)
        return self.K[t], self.b[t]


def trajectory(
    system: System, y: Tensor, steps: int, first: int = 0, forces: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """States `(steps + 1, B, N, n)`, and the other ends of the agents' own substeps.

    Forces are `(steps, B, N, m)`.
    """
    states, ends = [y], []
    pushes = [None] * steps if forces is None else pushed(system, forces).unbind(0)
    for t, push in zip(range(first, first + steps), pushes, strict=True):
        if t % 2:
            y = along_edges(system, y, t)
            ends.append(y)
            y = by_themselves(system, y, t, push)
        else:
            y = by_themselves(system, y, t, push)
            ends.append(y)
            y = along_edges(system, y, t)
        states.append(y)
    return torch.stack(states), torch.stack(ends) if ends else y.new_zeros(0, *y.shape)


def pushed(system: System, forces: Tensor) -> Tensor:
    """h g w, what forces `(*batch, N, m)` add to the agents' states: `(*batch, N, n)`."""
    moved = system.h * (system.g @ forces.unsqueeze(-1)).squeeze(-1)
    return torch.nn.functional.pad(moved, (0, system.K.shape[-1]))


def by_themselves(system: System, y: Tensor, t: int, push: Tensor | None = None) -> Tensor:
    """The substep of each agent with its controller; y and push are `(*batch, N, n)`."""
    (K, b), own, slopes = system.at(t), system.own, system.slopes
    sigma, moved = Chord(system.rows + (TANH,) * K.shape[-2]), []
    for i in range(y.shape[-2]):
        A = torch.block_diag(system.A[i], K[i])
        a = torch.cat([system.a[i], b[i]])
        B = (system.h * own[i]) @ torch.block_diag(slopes[i], K[i].mT)
        c = None if push is None else (y + push)[..., i, :]
        options = {"c": c, "where": f"step {t}, agent {i}"}
        moved.append(implicit.solve_chord(y[..., i, :], B, A, a, sigma, **options))
    return torch.stack(moved, -2)


def along_edges(system: System, y: Tensor, t: int) -> Tensor:
    """The substeps of all edges: of plants, then of controllers; in an odd step in reverse."""
    (K, b), p = system.at(t), system.A.shape[2]
    plant = slice(0, p), system.A, system.a, system.slopes, Chord(system.rows * 2)
    controller = slice(p, None), K, b, K.mT, Chord((TANH,))
    all_edges = [
        *((plant, *each) for each in zip(system.plant_links, system.couplings, strict=True)),
        *((controller, *each) for each in zip(system.links, system.C, strict=True)),
    ]
    agents = list(y.unbind(-2))
    for (part, rows, offsets, slopes, sigma), (i, k), C in all_edges[::-1] if t % 2 else all_edges:
        none = torch.zeros_like(C)
        G = torch.cat([torch.cat([none, C], 1), torch.cat([-C.mT, none], 1)])
        A, a = torch.block_diag(rows[i], rows[k]), torch.cat([offsets[i], offsets[k]])
        pair = torch.cat([agents[i][..., part], agents[k][..., part]], -1)
        B = (system.h * G) @ torch.block_diag(slopes[i], slopes[k])
        where = f"step {t}, link ({i}, {k})"
        pair = implicit.solve_chord(pair, B, A, a, sigma, where=where)
        for agent, moved in zip((i, k), pair.chunk(2, -1), strict=True):
            whole = [agents[agent][..., :p], agents[agent][..., p:]]
            whole[0 if part.start == 0 else 1] = moved
            agents[agent] = torch.cat(whole, -1)
    return torch.stack(agents, -2)
