"""The saved states of a backward pass: all states, checkpoints, or only the last state.

A kernel runs a stack: `forward(y, tensors, save)` gives y_N and, with `save`, what
`backward(y, saved, g, tensors)` needs besides y_0. A kernel by itself is "stored"; the other
methods are kernels built from kernels for fewer layers. The saved tensors never include y_N itself,
so changing y_N in place changes no gradient.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hdnn.engine.memory import Stack, Tensors
from hdnn.errors import OptionError, ReversalWarning

WORTHLESS = 0.1  # relative error of a rebuilt state
UNDONE = 16  # layers that are undone at a time
ZERO = 128  # number of roundings within which an entry may still be 0
ADVICE = (
    'use backprop="auto" or "checkpoint", which give the gradients of stored states, '
    "or use smaller steps or weights"
)


class Definition:
    """The plain loop as a kernel: autograd does the rest."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack

    def forward(
        self, y: Tensor, tensors: Tensors, save: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        with torch.no_grad():
            out = self.stack.definition(y, tensors)
        return out, y.new_empty(0) if save else None

    def backward(
        self, y: Tensor, saved: Tensor, g: Tensor, tensors: Tensors
    ) -> list[Tensor | None]:
        inputs = [y, *tensors]
        leaves = [
            None if t is None else t.detach().requires_grad_() for t in inputs
        ]
        with torch.enable_grad():
            out = self.stack.definition(leaves[0], leaves[1:])
        present = [t for t in leaves if t is not None]
        grads = iter(torch.autograd.grad(out, present, g, allow_unused=True))
        return [None if t is None else next(grads) for t in leaves]


class Segments:
    """A stack in segments of several layers, each with its own kernel."""

    def __init__(self, stack: Stack, make: Callable[[Stack], Any]) -> None:
        self.stack = stack
        self.make = make
        self.kernels: dict[tuple[int, bool], Any] = {}

    def kernel(self, layers: int, undo: bool = False) -> Any:
        """The kernel for so many layers of the stack, or for undoing these layers."""
        key = (layers, undo)
        if key not in self.kernels:
            inverse = self.stack.inverse != undo
            segment = replace(self.stack, layers=layers, inverse=inverse)
            self.kernels[key] = self.make(segment)
        return self.kernels[key]

    def spans(self) -> list[slice]:
        """The layers of each segment, in the order in which they run."""
        bounds = self.bounds(self.stack.layers)
        if self.stack.inverse:
            N = self.stack.layers
            bounds = [(N - end, N - start) for start, end in bounds]
        return [slice(start, end) for start, end in bounds]

    @staticmethod
    def bounds(N: int) -> list[tuple[int, int]]:
        """The bounds of segments, in the order in which layers run."""
        raise NotImplementedError

    def again(
        self,
        y: Tensor,
        g: Tensor,
        tensors: Tensors,
        span: slice,
        grads: list[Any],
    ) -> tuple[Tensor, Tensor]:
        """Run a segment forwards and back from its first state y; the last state and y's gradient.

        The gradients of its weights go into `grads`.
        """
        part = cut(tensors, span)
        kernel = self.kernel(span.stop - span.start)
        end, saved = kernel.forward(y, part)
        g, *others = kernel.backward(y, saved, g, part)
        for k, grad in enumerate(others):
            if grad is not None:
                if grads[k] is None:
                    grads[k] = torch.empty_like(tensors[k])  # pyright: ignore[reportArgumentType]
                grads[k][span] = grad
        return end, g


class Checkpoint(Segments):
    """Save the state once every sqrt(N) layers; the layers in between run a second time."""

    @staticmethod
    def bounds(N: int) -> list[tuple[int, int]]:
        return segments(0, N, max(1, math.isqrt(N)))

    def forward(
        self, y: Tensor, tensors: Tensors, save: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        spans = self.spans()
        saved = y.new_empty(len(spans) - 1, *y.shape) if save else None
        for k, span in enumerate(spans):
            if k and saved is not None:
                saved[k - 1] = y
            kernel = self.kernel(span.stop - span.start)
            y, _ = kernel.forward(y, cut(tensors, span), False)
        return y, saved

    def backward(
        self, y: Tensor, saved: Tensor, g: Tensor, tensors: Tensors
    ) -> list[Any]:
        grads: list[Any] = [None] * len(tensors)
        starts = [y, *saved.unbind(0)]
        segments = list(zip(self.spans(), starts, strict=True))
        for span, start in reversed(segments):
            _, g = self.again(start, g, tensors, span, grads)
        return [g, *grads]


class Reversal(Segments):
    """Save only y_N; undo the layers, a few at a time, down to y_1.

    The result is compared with the true y_1. The first layer reads y_0 itself.
    """

    @staticmethod
    def bounds(N: int) -> list[tuple[int, int]]:
        return [(0, 1), *segments(1, N, UNDONE)]

    def forward(
        self, y: Tensor, tensors: Tensors, save: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        y_N, _ = self.kernel(self.stack.layers).forward(y, tensors, False)
        return y_N, y_N.clone() if save else None

    def backward(
        self, y: Tensor, saved: Tensor, g: Tensor, tensors: Tensors
    ) -> list[Any]:
        grads: list[Any] = [None] * len(tensors)
        first, *others = self.spans()
        state = saved
        for span in reversed(others):
            kernel = self.kernel(span.stop - span.start, undo=True)
            state, _ = kernel.forward(state, cut(tensors, span), False)
            state = _zeros_restored(state, y)
            _, g = self.again(state, g, tensors, span, grads)
        y_1, g = self.again(y, g, tensors, first, grads)
        # If the last state is not finite, nothing can be rebuilt.
        finite = saved.isfinite().all()
        error = torch.where(finite, drift(state, y_1), torch.nan)
        return check_drift(error, [g, *grads])


def _zeros_restored(state: Tensor, y: Tensor) -> Tensor:
    """A rebuilt state, set to 0 where y_0 is 0 and rounding explains the difference.

    An entry that has not moved yet is exactly 0. Rounding must not take it across the kink that
    ReLU has there.
    """
    size = state.abs()
    rounding = ZERO * torch.finfo(state.dtype).eps * size.amax(-1, True)
    return state.masked_fill((y == 0) & (size <= rounding), 0)


METHODS: dict[str, Callable[[Stack, Callable[[Stack], Any]], Any]] = {
    "stored": lambda stack, make: make(stack),
    "checkpoint": Checkpoint,
    "reversible": Reversal,
}


def segments(start: int, end: int, size: int) -> list[tuple[int, int]]:
    """The numbers from `start` to before `end`, so many at a time."""
    return [(a, min(a + size, end)) for a in range(start, end, size)]


def cut(tensors: Tensors, span: slice) -> Tensors:
    """The tensors of some layers."""
    return tuple([None if t is None else t[span] for t in tensors])


# Drift: rounding grows as layers are undone, so each reversal is checked


def drift(rebuilt: Tensor, original: Tensor) -> Tensor:
    """The relative error of a rebuilt state for its worst sample, along the first axis.

    Each sample is measured by its own largest entry. The error is infinite if the rebuilt state is
    not finite.
    """
    if original.numel() == 0:
        return original.new_zeros(())
    off = (rebuilt - original).abs().flatten(1).amax(1)
    size = original.abs().flatten(1).amax(1)
    relative = torch.where(off == 0, 0.0, off / size)
    return relative.nan_to_num(torch.inf, torch.inf).max()


def check_drift(drift: Tensor, grads: list[Any]) -> list[Any]:
    """The gradients; warn if the drift is noticeable, raise if the gradients would be worthless.

    In a CUDA graph, where no value can be read, and if y_N is not finite, the gradients become NaN
    instead.
    """
    capturing = drift.is_cuda and torch.cuda.is_current_stream_capturing()
    size = math.nan if capturing else float(drift)  # a value is read once
    if math.isnan(size):
        return [
            None if g is None else torch.where(drift < WORTHLESS, g, torch.nan)
            for g in grads
        ]
    if size <= torch.finfo(drift.dtype).eps ** 0.5:
        return grads
    advice = ADVICE if drift.dtype == torch.float64 else f"{ADVICE}, or float64"
    event = f'backprop="reversible" rebuilt the states; the first is off by {size:.2g} of its size'
    if size >= WORTHLESS:
        raise OptionError(
            f"{event}, so the gradients would be worthless; {advice}."
        )
    warnings.warn(
        f"{event}, so the gradients are inexact; {advice}.",
        ReversalWarning,
        stacklevel=2,
    )
    return grads
