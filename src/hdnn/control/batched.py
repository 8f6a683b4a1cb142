"""The substeps of `hdnn.control.step` in plain PyTorch, all agents or edges of a phase at once.

A phase is: agents by themselves, or edges that share no agent, those of one colour. Its equations
x = c + B chord(A y + a, A x + a) have matrices an agent and are solved together by Newton's
method; gradients come from the implicit function theorem at the solution. Where there may be
several solutions, or Newton's method finds none, the solver of the definition takes over for these
agents and samples alone. So states and gradients are those of the definition, to rounding.

Here agents lead, and samples come second: states are `(N, B, n)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hdnn.activations import Activation
from hdnn.control.fused import colours
from hdnn.control.links import Edges
from hdnn.control.step import TANH, System, pushed
from hdnn.integrators import implicit
from hdnn.integrators.chords import Chord
from hdnn.integrators.newton import HALVINGS, row_by_row

ROUNDING = 1e-12  # how far from semidefinite J - R may be, relative to its entries


def trajectory(
    system: System, y: Tensor, steps: int, first: int = 0, forces: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As `hdnn.control.step.trajectory`."""
    phases, y = _Phases(system), y.transpose(0, 1)
    pushes = [None] * steps
    if forces is not None:
        pushes = pushed(system, forces).transpose(1, 2).unbind(0)
    states, ends = [y], []
    for t, push in zip(range(first, first + steps), pushes, strict=True):
        if t % 2:
            y = phases.along_edges(y, t)
            ends.append(y)
            y = phases.by_themselves(y, t, push)
        else:
            y = phases.by_themselves(y, t, push)
            ends.append(y)
            y = phases.along_edges(y, t)
        states.append(y)
    found = torch.stack(states), torch.stack(ends) if ends else y.new_zeros(0, *y.shape)
    return found[0].transpose(1, 2), found[1].transpose(1, 2)


class _Phases:
    """The phases of each step, and what does not change from step to step."""

    def __init__(self, system: System) -> None:
        self.system, p = system, system.A.shape[2]
        self.own = system.h * system.own
        steady = self.own.detach().double()
        size = steady.abs().amax((-2, -1))
        self.sound = torch.isfinite(size)
        both = torch.where(self.sound[:, None, None], steady + steady.mT, 0)
        self.sound &= torch.linalg.eigvalsh(both)[:, -1] <= ROUNDING * size  # it makes no energy
        parts = (
            (system.plant_links, system.couplings, slice(0, p)),
            (system.links, system.C, slice(p, None)),
        )
        self.colours = [_Colour(system, *part, which) for part in parts for which in _shared(part)]

    def by_themselves(self, y: Tensor, t: int, push: Tensor | None) -> Tensor:
        """The substep of each agent with its controller; y and push are `(N, B, n)`."""
        system, (K, b) = self.system, self.system.at(t)
        A, a = _joined(system.A, K), torch.cat([system.a, b], -1)
        onto = self.own @ _joined(system.slopes, K.mT)
        rows = system.rows + (TANH,) * K.shape[-2]
        weights = None if system.weights is None else _with_ones(system.weights, K.shape[-2])
        unique = self.sound
        if not _monotone(rows):
            unique = _known(self.own @ A.mT, A, rows, weights)
        equations = Equations(unique, Chord(rows), lambda i: f"step {t}, agent {i}")
        return solved(equations, y, y if push is None else y + push, onto, A, a)

    def along_edges(self, y: Tensor, t: int) -> Tensor:
        """The substeps of all edges, colour by colour; in an odd step in reverse."""
        for colour in self.colours[::-1] if t % 2 else self.colours:
            y = colour.moved(y, t)
        return y


def _shared(part: tuple[Edges, Tensor, slice]) -> list[list[int]]:
    return colours(part[0])


class _Colour:
    """Edges that share no agent, of plants or of controllers: these are a part of the states."""

    def __init__(
        self, system: System, links: Edges, couplings: Tensor, part: slice, which: list[int]
    ) -> None:
        self.system, self.part, self.links = system, part, [links[e] for e in which]
        ends = torch.tensor(self.links, device=couplings.device)
        self.i, self.k, self.both = ends[:, 0], ends[:, 1], ends.mT.reshape(-1)
        C = couplings[which]
        none = torch.zeros_like(C)
        sides = torch.cat([none, C], -1), torch.cat([-C.mT, none], -1)
        self.G = system.h * torch.cat(sides, -2)
        self.of_plants = part.start == 0
        self.unique = torch.isfinite(self.G).all(-1).all(-1)
        if self.of_plants and not _monotone(system.rows):
            A, rows = self._pairs(system.A), system.rows * 2
            self.unique = _known(self.G @ A.mT, A, rows, self._weights())

    def moved(self, y: Tensor, t: int) -> Tensor:
        """States `(N, B, n)` after the substeps of these edges."""
        system, part = self.system, self.part
        K, b = system.at(t)
        rows, offsets, slopes, kinds = K, b, K.mT, (TANH,)
        if self.of_plants:
            rows, offsets, slopes, kinds = system.A, system.a, system.slopes, system.rows * 2
        A, a = self._pairs(rows), torch.cat([offsets[self.i], offsets[self.k]], -1)
        B, moving = self.G @ self._pairs(slopes), y[..., part]
        pair = torch.cat([moving[self.i], moving[self.k]], -1)
        equations = Equations(self.unique, Chord(kinds), lambda e: f"step {t}, {self._name(e)}")
        pair = solved(equations, pair, pair, B, A, a)
        moving = moving.index_copy(0, self.both, torch.cat(pair.chunk(2, -1)))
        p = system.A.shape[2]
        whole = (moving, y[..., p:]) if self.of_plants else (y[..., :p], moving)
        return torch.cat(whole, -1)

    def _name(self, e: int) -> str:
        i, k = self.links[e]
        return f"link ({i}, {k})"

    def _pairs(self, each: Tensor) -> Tensor:
        return _joined(each[self.i], each[self.k])

    def _weights(self) -> Tensor | None:
        weights = self.system.weights
        return None if weights is None else torch.cat([weights[self.i], weights[self.k]], -1)


def _joined(one: Tensor, other: Tensor) -> Tensor:
    """Matrices `(E, r, k)` and `(E, s, l)` as blocks on the diagonal, `(E, r + s, k + l)`."""
    pad = torch.nn.functional.pad
    return torch.cat([pad(one, (0, other.shape[-1])), pad(other, (one.shape[-1], 0))], -2)


def _with_ones(weights: Tensor, count: int) -> Tensor:
    return torch.nn.functional.pad(weights, (0, count), value=1.0)


def _monotone(rows: Sequence[Activation]) -> bool:
    return all(sigma.monotone for sigma in rows)


def _known(B: Tensor, A: Tensor, rows: Sequence[Activation], weights: Tensor | None) -> Tensor:
    """Which equations are known to have one solution; B is that without the weights of rows."""
    B, A = B.detach(), A.detach()
    low, high = (
        A.new_tensor([getattr(sigma, side) / 2 for sigma in rows]) for side in ("s_min", "s_max")
    )
    if weights is not None:
        low, high = weights.detach() * low, weights.detach() * high
    return row_by_row(A @ B, low, high)


@dataclass(frozen=True, eq=False)
class Equations:
    """x = c + B chord(A y + a, A x + a) for several agents or edges, whose matrices are given."""

    unique: Tensor  # (E,): whether there is known to be one solution
    chord: Chord
    where: Callable[[int], str]

    def solve(self, y: Tensor, c: Tensor, B: Tensor, A: Tensor, a: Tensor) -> Tensor:
        """The x `(E, S, k)`."""
        z = y @ A.mT + a.unsqueeze(-2)
        x, found = self._newton(z, c, B, A, a)
        lost = ~(found & self.unique.unsqueeze(-1))
        if bool(lost.any()):
            for e in lost.any(-1).nonzero()[:, 0].tolist():
                s = lost[e].nonzero()[:, 0]
                options = {"c": c[e, s], "where": self.where(e)}
                x[e, s] = implicit.solve_chord(y[e, s], B[e], A[e], a[e], self.chord, **options)
        return x

    def _newton(
        self, z: Tensor, c: Tensor, B: Tensor, A: Tensor, a: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Damped Newton steps, as `hdnn.integrators.newton` takes them, and which converged."""
        chord, a, tol = self.chord, a.unsqueeze(-2), 4 * torch.finfo(c.dtype).eps
        slack = 8 * tol
        eye = torch.eye(c.shape[-1], dtype=c.dtype, device=c.device)
        A_T, B_T = A.mT, B.mT
        A_abs, B_abs = A_T.abs(), B_T.abs()
        fixed = a.abs() + z.abs()
        least = torch.finfo(c.dtype).tiny / torch.finfo(c.dtype).eps  # below, nothing is relative

        def look(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            """The residual, the slope of chords, and the residual relative to its terms."""
            value, slope, _ = chord.sides(z, x @ A_T + a)
            F = x - c - value @ B_T
            terms = value.abs() + slope.abs() * (x.abs() @ A_abs + fixed)
            size = least + x.abs().amax(-1) + (terms @ B_abs).amax(-1)
            return F, slope, F.abs().amax(-1) / size

        x = c + chord.between(z, c @ A_T + a) @ B_T
        F, slope, error = look(x)
        active = error > tol  # where it is NaN, nothing helps
        for _ in range(implicit.MAX_ITER):
            if not bool(active.any()):
                break
            M = eye - (B.unsqueeze(1) * slope.unsqueeze(-2)) @ A.unsqueeze(1)
            dx = torch.linalg.solve_ex(M, -F.unsqueeze(-1))[0].squeeze(-1)
            dx = torch.where(active.unsqueeze(-1), dx, 0)
            size, share, last, there = F.norm(dim=-1), torch.ones_like(error), error, x
            for _ in range(HALVINGS):
                there = x + share.unsqueeze(-1) * dx
                F, slope, error = look(there)
                worse = active & ~(F.norm(dim=-1) < (1 - 1e-4 * share) * size)
                worse &= ~(error <= slack)  # rounding, which no smaller step takes away
                if not bool(worse.any()):
                    break
                share = torch.where(worse, 0.5 * share, share)
            x = there
            active = (error > tol) & ~((error <= slack) & (error > 0.5 * last))
        return x, error <= slack


def solved(equations: Equations, y: Tensor, c: Tensor, B: Tensor, A: Tensor, a: Tensor) -> Tensor:
    """The x `(E, S, k)` with gradients in all that is given."""
    found: Any = _Solve.apply(y, c, B, A, a, equations)
    return found


class _Solve(torch.autograd.Function):
    """Gradients by the implicit function theorem; they have gradients themselves."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        y, c, B, A, a, equations = given
        x = equations.solve(y, c, B, A, a)
        ctx.chord = equations.chord
        ctx.save_for_backward(y, B, A, a, x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """With slopes D of chords at the end and D' at the start: v = (I - B D A)^-T g, dc = v."""
        (y, B, A, a, x), chord = ctx.saved_tensors, ctx.chord
        before, after = (t @ A.mT + a.unsqueeze(-2) for t in (y, x))
        value, end, start = chord.sides(before, after)
        eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
        M = eye - (B.unsqueeze(1) * end.unsqueeze(-2)) @ A.unsqueeze(1)
        v = torch.linalg.solve(M.mT, grads[0].unsqueeze(-1)).squeeze(-1)
        pull = v @ B
        end, start = end * pull, start * pull
        to_A = end.mT @ x + start.mT @ y
        return start @ A, v, v.mT @ value, to_A, (end + start).sum(-2), None
