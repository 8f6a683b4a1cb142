"""What the backward pass of a stack starts from: stored states, checkpoints, or y_N alone.

Each method runs a stack forwards (`last`: y_N alone; `forward`: with what must be kept) and
backwards. What is kept is never y_N itself, so changing y_N in place changes no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hdnn.engine.drift import check_reversal, drift_of, recorded, strict_drift_of
from hdnn.engine.kernels.protocol import Stack, Tensors
from hdnn.engine.tracing import transformed

MakeKernel = Callable[[Stack], Any]


class Stored:
    """Keeps what every layer reads."""

    def __init__(
        self, stack: Stack, make: MakeKernel, *, check: bool = True, limit: float = 0.0
    ) -> None:
        self.stack, self.make, self.check, self.limit = stack, make, check, limit
        self._prepare()

    def _prepare(self) -> None:
        self.kernel = self.make(self.stack)

    def with_samples(self, samples: int) -> Stored:
        """The same for another number of samples."""
        more = replace(self.stack, samples=samples)
        return type(self)(more, self.make, check=self.check, limit=self.limit)

    def last(self, y: Tensor, tensors: Tensors) -> Tensor:
        """y_N from y_0 (B, n)."""
        return self.kernel.forward(y, tensors, False)[0]

    def forward(self, y: Tensor, tensors: Tensors) -> tuple[Tensor, Tensor]:
        """y_N, and what the backward pass needs besides y_0."""
        return self.kernel.forward(y, tensors, True)

    def backward(self, y: Tensor, kept: Tensor, g: Tensor, tensors: Tensors) -> Sequence[Any]:
        """The gradients of y_0 and of all tensors."""
        return self.kernel.backward(kept, g, tensors)


class Checkpoints(Stored):
    """Keeps the state once every few layers, and runs those between a second time."""

    def _prepare(self) -> None:
        N, cuts = self.stack.layers, self._spans(self.stack.layers)
        self.kernels = {count: self._kernel(count) for count in {b - a for a, b in cuts}}
        if self.stack.inverse:  # which runs the last layer first
            cuts = [(N - b, N - a) for a, b in cuts]
        self.segments = [(a, b, self.kernels[b - a]) for a, b in cuts]

    def _spans(self, N: int) -> list[tuple[int, int]]:
        """The layers of each segment, counted as they run."""
        return spans(0, N, between(N))

    def _kernel(self, count: int) -> Any:
        return self.make(replace(self.stack, layers=count))

    def last(self, y: Tensor, tensors: Tensors) -> Tensor:
        for first, last, kernel in self.segments:
            y = kernel.forward(y, self.stack.part(tensors, first, last), False)[0]
        return y

    def forward(self, y: Tensor, tensors: Tensors) -> tuple[Tensor, Tensor]:
        kept = y.new_empty(max(0, len(self.segments) - 1), *y.shape)
        for k, (first, last, kernel) in enumerate(self.segments):
            if k:
                kept[k - 1].copy_(y)
            y = kernel.forward(y, self.stack.part(tensors, first, last), False)[0]
        return y, kept

    def backward(self, y: Tensor, kept: Tensor, g: Tensor, tensors: Tensors) -> Sequence[Any]:
        whole, starts = Whole(self.stack, tensors), [y, *kept.unbind(0)]
        for (first, last, kernel), start in reversed([*zip(self.segments, starts, strict=True)]):
            part = self.stack.part(tensors, first, last)
            states = kernel.forward(start, part, True)[1]
            g, *grads = kernel.backward(states, g, part)
            del states
            whole.put(grads, first, last)
        return g, *whole.found


class Undone(Stored):
    """Keeps y_N, and undoes the layers down to y_1, which is compared with the true y_1.

    The first layer reads y_0 itself: what is exactly 0 there stays 0.
    """

    def _prepare(self) -> None:
        super()._prepare()
        sizes = (1, self.stack.layers - 1)
        self.first, self.others = (self.make(replace(self.stack, layers=k)) for k in sizes)

    def forward(self, y: Tensor, tensors: Tensors) -> tuple[Tensor, Tensor]:
        y_N = self.last(y, tensors)
        return y_N, y_N.clone()

    def backward(self, y: Tensor, kept: Tensor, g: Tensor, tensors: Tensors) -> Sequence[Any]:
        N, y_N, part = self.stack.layers, kept, self.stack.part
        spans = ((N - 1, N), (0, N - 1)) if self.stack.inverse else ((0, 1), (1, N))
        of_first, of_others = (part(tensors, *span) for span in spans)
        y_1, states = self.first.forward(y, of_first, True)
        rebuilt, (g, *late) = self.others.undo(y_N, g, of_others)
        g, *early = self.first.backward(states, g, of_first)
        whole = Whole(self.stack, tensors)
        for grads, span in zip((early, late), spans, strict=True):
            whole.put(grads, *span)
        found = [g, *whole.found]
        if self.check and y.numel():
            found = check_reversal(drift_of(y_1, rebuilt, y_N), found)
        return found


class Checked(Checkpoints):
    """Keeps a few states, however many layers there are, and undoes the layers between them.

    Where that does not lead back to the state that was kept, rounding has grown, and these layers
    run again from there: gradients are those of stored states, for any weights. So they do where
    nothing can be compared: in a CUDA graph, and under the transforms of `torch.func`.
    """

    def _prepare(self) -> None:
        super()._prepare()
        lengths = {last - first for first, last, _ in self.segments}
        # How a segment runs again, and how many of its layers are undone at a time, so that what
        # their weights and gradients are copied to takes little memory.
        self.again = {
            count: Checkpoints(replace(self.stack, layers=count), self.make) for count in lengths
        }
        self.pieces = {count: spans(0, count, self._piece()) for count in lengths}
        for count in {b - a for pieces in self.pieces.values() for a, b in pieces}:
            self.kernels.setdefault(count, self._kernel(count))

    def _spans(self, N: int) -> list[tuple[int, int]]:
        # The first layer reads y_0 itself: what is 0 there stays 0.
        return [(0, 1), *spans(1, N, -(-(N - 1) // (SPANS - 1)))] if N else []

    def _piece(self) -> int:
        one = sum(self.stack.rows) * self.stack.width * self.stack.dtype.itemsize
        return max(1, PIECE_BYTES // one) if one else self.stack.layers

    def forward(self, y: Tensor, tensors: Tensors) -> tuple[Tensor, Tensor]:
        kept = y.new_empty(len(self.segments), *y.shape)
        for k, (first, last, kernel) in enumerate(self.segments):
            y = kernel.forward(y, self.stack.part(tensors, first, last), False)[0]
            kept[k].copy_(y)
        return y, kept

    def backward(self, y: Tensor, kept: Tensor, g: Tensor, tensors: Tensors) -> Sequence[Any]:
        whole, states = Whole(self.stack, tensors), [y, *kept.unbind(0)]
        undoing = y.numel() > 0 and not transformed() and not recorded(y)
        for k in reversed(range(len(self.segments))):
            first, last, _ = self.segments[k]
            before = None
            if undoing and k:
                rebuilt, before = self._undo(first, last, states[k + 1], g, tensors, whole)
                if not float(strict_drift_of(states[k], rebuilt, states[k + 1])) <= self.limit:
                    before, undoing = None, False
            if before is None:
                again, part = self.again[last - first], self.stack.part(tensors, first, last)
                start = again.forward(states[k], part)[1]
                before, *grads = again.backward(states[k], start, g, part)
                whole.put(grads, first, last)
                del start, grads  # before the next segment needs as much
            g = before
        return g, *whole.found

    def _undo(
        self, first: int, last: int, y: Tensor, g: Tensor, tensors: Tensors, whole: Whole
    ) -> tuple[Tensor, Tensor]:
        """The state and its gradient before some layers, from those behind them."""
        pieces = [(first + a, first + b) for a, b in self.pieces[last - first]]
        for begin, end in pieces if self.stack.inverse else reversed(pieces):
            part = self.stack.part(tensors, begin, end)
            y, (g, *grads) = self.kernels[end - begin].undo(y, g, part)
            whole.put(grads, begin, end)
        return y, g


SPANS = 9
"""States that `Checked` keeps at most, besides y_0."""

PIECE_BYTES = 64 * 2**20
"""Of the weights that `Checked` undoes at a time."""

METHODS = {
    "stored": Stored,
    "checkpoint": Checkpoints,
    "reversible": Undone,
    "checked": Checked,
}


def between(N: int) -> int:
    """Layers from one checkpoint to the next."""
    return max(1, math.isqrt(N))


def spans(first: int, last: int, size: int) -> list[tuple[int, int]]:
    """The numbers from `first` to before `last`, so many at a time."""
    return [(a, min(a + size, last)) for a in range(first, last, max(1, size))]


class Whole:
    """The gradients of whole stacks, to which those of their parts are copied one by one."""

    def __init__(self, stack: Stack, tensors: Tensors) -> None:
        self.stack = stack
        self.room = tuple(None if t is None else torch.empty_like(t) for t in tensors)
        self.found: list[Tensor | None] = [None] * len(tensors)

    def put(self, grads: Sequence[Tensor | None], first: int, last: int) -> None:
        """Take the gradients of the layers from `first` to before `last`."""
        for k, (grad, at) in enumerate(
            zip(grads, self.stack.part(self.room, first, last), strict=True)
        ):
            if grad is not None:
                at.copy_(grad)
                self.found[k] = self.room[k]
