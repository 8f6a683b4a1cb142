"""Stacks of wide layers: matrix products by BLAS, and one pass over memory between them.

A step is z = sigma(x K^T + b), then a move by c z V. Kept are what each step reads, x, and what its
activation reads, x K^T, so that the backward pass has four products a step and the forward pass
two. All else that a step does with its activations is one compiled pass over their rows, spread
over threads like the tiles of `cpu.py`. With the canonical J, V is never made: J swaps halves.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hdnn.engine.kernels import cpu, lent
from hdnn.engine.kernels.protocol import ACTIVATIONS, Stack, Tensors, moved_by, order
from hdnn.engine.kernels.vectors import VECTOR_BYTES

GROUPS = 32  # at most so many groups of rows have sums of their own
ROWS = 16  # of a group, at least
WORK = 16  # products that take as long as an activation of one number


class _Places(NamedTuple):
    """Which of the states that are kept each step reads and writes."""

    kept: int  # how many
    first: tuple[int | None, ...]  # where each part of y_0 is kept; None where no step reads it
    reads: tuple[int, ...]
    writes: tuple[int | None, ...]


@lru_cache(maxsize=256)
def _places(turns: tuple[int, ...], layers: int, inverse: bool) -> _Places:
    """A part is kept once, however often it is read before it moves."""
    values = list(range(2 if turns else 1))
    first, reads, writes = tuple(values), [], []
    for s, (i, _) in enumerate(order(turns, layers, inverse)):
        reads.append(values[i - 1])
        values[i] = len(first) + s
        writes.append(values[i])
    place = {value: k for k, value in enumerate(sorted(set(reads)))}
    kept = [tuple(place.get(v) for v in each) for each in (first, writes)]
    return _Places(len(place), kept[0], tuple(place[v] for v in reads), kept[1])


def kept_size(stack: Stack, precision: str = "") -> int:
    """How many numbers a stack keeps: what its steps read, and what their activations read."""
    return stack.samples * (stack.steps * stack.width + stack.layers * sum(_rows(stack)))


def _rows(stack: Stack) -> list[int]:
    """Those of K in each step of a layer: p (0) moves by the weights of q (1), and q by p's."""
    return [stack.rows[1 - i] for i in stack.turns] if stack.turns else [stack.rows[0]]


class BlasKernel:
    """A stack, step by step."""

    def __init__(self, stack: Stack) -> None:
        self.stack, self.order = stack, order(stack.turns, stack.layers, stack.inverse)
        self.places = _places(stack.turns, stack.layers, stack.inverse)
        self.code = ACTIVATIONS.index(stack.activation)
        self.groups = groups = max(1, min(GROUPS, stack.samples // ROWS))
        self.rows = stack.rows[::-1]  # by the part that moves
        self.lanes = lanes = VECTOR_BYTES // stack.dtype.itemsize
        vectors = [-(-r // lanes) for r in self.rows]
        self.sums = [(v + 1) * lanes for v in vectors]  # of a group, see `tiles._rows_backward`
        # The steps that move each part, and the number of each step among those.
        self.steps = [
            [s for s, (i, _) in enumerate(self.order) if i == part] for part in range(stack.parts)
        ]
        self.nth = {s: k for steps in self.steps for k, s in enumerate(steps)}
        self.all_move = all(self.steps)
        # Backwards, these steps are the first to add to the gradients of their weights.
        self.fresh = {*{move: s for s, move in enumerate(self.order)}.values()}
        self.ahead, self.behind = (
            [cpu.Spread(name, lines * v, work * v * lanes, groups, stack.dtype) for v in vectors]
            for name, lines, work in (
                ("rows forward", 2, WORK * stack.samples),
                ("rows backward", 4, 2 * WORK * stack.samples),
            )
        )

    @torch.no_grad()
    def forward(self, y: Tensor, tensors: Tensors, keep: bool) -> tuple[Tensor, Tensor | None]:
        weights, y_N, kept = self._weights(tensors), y.clone(), None
        last = y_N.chunk(self.stack.parts, -1)  # where the parts are but for those that are kept
        parts, into = list(last), [last[i] for i, _ in self.order]
        room = [y.new_empty(len(y), r) for r in self.rows]
        before = [room[i] for i, _ in self.order]
        if keep:
            kept = lent.empty(kept_size(self.stack), y.dtype)
            states, before = self._kept(kept, len(y))
            used = states.numel() + sum(each.numel() for each in before)
            kept[used:].zero_()  # an operator gives the same whenever it is called
            for i, place in enumerate(self.places.first):
                if place is not None:
                    parts[i] = states[place].copy_(parts[i])
            for s, place in enumerate(self.places.writes):
                if place is not None:
                    into[s] = states[place]
        for s, ((i, j), c) in enumerate(zip(self.order, tensors[-1].tolist(), strict=True)):
            (K, b, V), z = weights[i], room[i]
            a = torch.mm(parts[i - 1], K[j].mT, out=before[s])
            at = (a.data_ptr(), b[j].data_ptr(), z.data_ptr())
            self.ahead[i].run(*z.shape, *at, self.code)
            parts[i] = self._move(parts[i], z, V[j], c, into[s])
        for part, end in zip(parts, last, strict=True):
            if part is not end:
                end.copy_(part)
        return y_N, kept

    @torch.no_grad()
    def backward(self, kept: Tensor, g: Tensor, tensors: Tensors) -> Tensors:
        return self._gradients((), kept, g, tensors)

    @torch.no_grad()
    def undo(self, y_N: Tensor, g: Tensor, tensors: Tensors) -> tuple[Tensor, Tensors]:
        y_0 = y_N.clone()
        return y_0, self._gradients(y_0.chunk(2, -1), None, g, tensors)

    def _gradients(
        self, y: Sequence[Tensor], kept: Tensor | None, g: Tensor, tensors: Tensors
    ) -> Tensors:
        """From what was kept or, without that, from the parts of y_N, which are undone to y_0."""
        weights, kind, coef, g_0 = self._weights(tensors), self.stack.kind, tensors[-1], g.clone()
        by, grads = coef.tolist(), g_0.chunk(self.stack.parts, -1)
        states, before = ([], []) if kept is None else self._kept(kept, len(g))
        room = [tuple(g.new_empty(2, len(g), r)) for r in self.rows]
        turned = torch.empty_like(g) if kind == "canonical" else None
        sums = [
            g.new_empty(len(steps), self.groups, size)
            for steps, size in zip(self.steps, self.sums, strict=True)
        ]
        new = torch.empty_like if self.all_move else torch.zeros_like
        found: Any = [None if t is None else new(t) for t in tensors]
        for s in reversed(range(len(self.order))):
            (i, j), c, (z, u) = self.order[s], by[s], room[self.order[s][0]]
            (K, b, V), (d_K, _, d_V) = weights[i], moved_by(i, found)
            x = states[self.places.reads[s]] if kept is not None else y[i - 1]
            a = before[s] if kept is not None else torch.mm(x, K[j].mT, out=z)
            delta = grads[i] if turned is None else _turned(grads[i], turned)
            w = u.copy_(delta) if kind == "identity" else torch.mm(delta, V[j].mT, out=u)
            at = [t.data_ptr() for t in (a, b[j], w, z, u, coef[s], sums[i][self.nth[s]])]
            self.behind[i].run(*u.shape, *at, self.code)
            if kept is None:
                self._move(y[i], z, V[j], -c, y[i])
            beta = float(s not in self.fresh)
            d_K[j].addmm_(u.mT, x, beta=beta)
            if kind == "general":
                d_V[j].addmm_(z.mT, delta, beta=beta, alpha=c)
            elif kind != "identity":
                d_K[j].addmm_(z.mT, delta, alpha=c)
            grads[i - 1].addmm_(u, K[j])
        self._collect(sums, found)
        return g_0, *found

    def _collect(self, sums: list[Tensor], found: list[Any]) -> None:
        """Put the gradients of b and c, summed over groups of rows, into `found`."""
        along = found[-1] if self.stack.learned else None
        for i, (steps, each) in enumerate(zip(self.steps, sums, strict=True)):
            if steps:
                total = each.sum(1)
                layers = torch.tensor([self.order[s][1] for s in steps], device=total.device)
                d_b = moved_by(i, found)[1]
                d_b.zero_().index_add_(0, layers, total[:, : self.rows[i]])
                if along is not None:
                    along[steps] = total[:, -self.lanes :].sum(1)
        found[-1] = along

    def _move(self, y: Tensor, z: Tensor, V: Tensor, c: float, into: Tensor) -> Tensor:
        """y + c z V, where V is K if it is K J^T."""
        kind = self.stack.kind
        if kind == "identity":
            return torch.add(y, z, alpha=c, out=into)
        if kind != "canonical":
            return torch.addmm(y, z, V, alpha=c, out=into)
        (y_p, y_q), (V_p, V_q), (into_p, into_q) = (t.chunk(2, -1) for t in (y, V, into))
        torch.addmm(y_p, z, V_q, alpha=-c, out=into_p)
        torch.addmm(y_q, z, V_p, alpha=c, out=into_q)
        return into

    def _kept(self, kept: Tensor, samples: int) -> tuple[Any, list[Tensor]]:
        """In the memory for it: the states that steps read, and what each activation reads."""
        count, m, rows = self.places.kept, self.stack.width, [self.rows[i] for i, _ in self.order]
        more = (len(rows) - count) * m  # states that several steps read
        states, *before, _ = kept.split([samples * k for k in (count * m, *rows, more)])
        activated = [a.view(samples, r) for a, r in zip(before, rows, strict=True)]
        return states.view(count, samples, m), activated

    def _weights(self, tensors: Tensors) -> list[tuple[Tensor, Tensor, Tensor]]:
        """K, b and V of the steps that move each part; V is K unless it is given."""
        made = [moved_by(i, tensors) for i in range(self.stack.parts)]
        return [(K, b, K if V is None else V) for K, b, V in made]

    kept_size = staticmethod(kept_size)
    why_not = staticmethod(cpu.why_not)


def _turned(g: Tensor, into: Tensor) -> Tensor:
    """J^T g, with the canonical J."""
    (g_p, g_q), (into_p, into_q) = g.chunk(2, -1), into.chunk(2, -1)
    into_p.copy_(g_q)
    torch.neg(g_p, out=into_q)
    return into
