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
        stack, N, size = self.stack, self.stack.layers, self._size()
        cuts = [(first, min(first + size, N)) for first in range(0, N, size)]
        lengths = {b - a for a, b in cuts}
        kernels = {count: self.make(replace(stack, layers=count)) for count in lengths}
        # In the order in which they run.
        self.segments = [(a, b, kernels[b - a]) for a, b in (cuts[::-1] if stack.inverse else cuts)]

    def _size(self) -> int:
        return between(self.stack.layers)

    def last(self, y: Tensor, tensors: Tensors) -> Tensor:
        for first, last, kernel in self.segments:
            y = kernel.forward(y, self.stack.part(tensors, first, last), False)[0]
        return y

    def forward(self, y: Tensor, tensors: Tensors) -> tuple[Tensor, Tensor]:
        states = []
        for first, last, kernel in self.segments:
            states.append(y)
            y = kernel.forward(y, self.stack.part(tensors, first, last), False)[0]
        return y, torch.stack(states[1:]) if len(states) > 1 else y.new_empty(0, *y.shape)

    def backward(self, y: Tensor, kept: Tensor, g: Tensor, tensors: Tensors) -> Sequence[Any]:
        whole, starts = Whole(self.stack, tensors), [y, *kept.unbind(0)]
        for (first, last, kernel), start in reversed([*zip(self.segments, starts, strict=True)]):
            part = self.stack.part(tensors, first, last)
            states = kernel.forward(start, part, True)[1]
            g, *grads = kernel.backward(states, g, part)
            del states
            whole.put(grads, first, last)
        return g, *whole.found


class Reversible(Stored):
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
        # How segments run again; all but the last have the same length.
        lengths = {last - first for first, last, _ in self.segments}
        self.again = {
            count: Checkpoints(replace(self.stack, layers=count), self.make) for count in lengths
        }

    def _size(self) -> int:
        return max(1, -(-self.stack.layers // SPANS))

    def forward(self, y: Tensor, tensors: Tensors) -> tuple[Tensor, Tensor]:
        y_N, kept = super().forward(y, tensors)
        return y_N, torch.cat([kept, y_N[None]])

    def backward(self, y: Tensor, kept: Tensor, g: Tensor, tensors: Tensors) -> Sequence[Any]:
        whole, states = Whole(self.stack, tensors), [y, *kept.unbind(0)]
        undoing = y.numel() > 0 and not transformed() and not recorded(y)
        for k in reversed(range(len(self.segments))):
            first, last, kernel = self.segments[k]
            part, grads = self.stack.part(tensors, first, last), None
            if undoing and k:  # the first layers read y_0 itself: what is 0 there stays 0
                rebuilt, grads = kernel.undo(states[k + 1], g, part)
                if not float(strict_drift_of(states[k], rebuilt, states[k + 1])) <= self.limit:
                    grads, undoing = None, False
            if grads is None:
                again = self.again[last - first]
                grads = again.backward(states[k], again.forward(states[k], part)[1], g, part)
            g, *others = grads
            whole.put(others, first, last)
        return g, *whole.found


SPANS = 8
"""States that `Checked` keeps at most, besides y_0."""

METHODS = {
    "stored": Stored,
    "checkpoint": Checkpoints,
    "reversible": Reversible,
    "checked": Checked,
}


def between(N: int) -> int:
    """Layers from one checkpoint to the next."""
    return max(1, math.isqrt(N))


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
