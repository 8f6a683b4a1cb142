"""A whole stack as one step of autograd, whatever runs it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vjp

from hdnn.engine import fixed
from hdnn.engine.dispatch import batched, transformed
from hdnn.engine.drift import ReversalWarning, check_reversal, drift_of
from hdnn.engine.kernels import plain
from hdnn.engine.kernels.plain import Euler, Shears

__all__ = ["ReversalWarning", "Run", "Segment", "Stack", "ahead", "behind", "call", "last"]

_CPU = torch.device("cpu")


class Segment(NamedTuple):
    """Layers that run without a state stored between them, and the schedule of their shears."""

    first: int
    last: int
    half: Tensor
    layer: Tensor


@lru_cache(maxsize=256)
def schedule(
    turns: tuple[int, ...], layers: int, inverse: bool, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Which half moves in each shear of so many layers, and by whose weights."""
    order = torch.arange(layers).flip(0) if inverse else torch.arange(layers)
    half, layer = torch.tensor(turns).repeat(layers), order.repeat_interleave(len(turns))
    if device.type == "cpu":
        return half, layer
    return half.to(device, torch.int32), layer.to(device, torch.int32)


@dataclass(eq=False)
class Run:
    """How calls of certain sizes run: by which kernels, and from which states back.

    "stored": the forward pass keeps what each layer reads. "checkpoint": it keeps the state once
    every `segment` layers, and the backward pass runs one segment after the other again, to have
    what its layers read. "reversible": it keeps y_N, and the backward pass undoes the layers.
    """

    activation: str
    kind: str
    layers: int
    turns: tuple[int, ...] = ()  # which half moves (0: p, 1: q) in each shear; none: forward Euler
    inverse: bool = False  # last layer first
    backprop: str = "stored"
    kernels: Any = plain  # a module with split_forward and so on
    options: tuple[Any, ...] = ()  # what its forward kernels take besides
    backward_options: tuple[Any, ...] = ()
    segment: int | None = None  # layers between checkpoints
    grid: bool = False  # the state is fixed-point
    check: bool = True
    coef: Any = None  # what each shear, or each layer, moves by, if that is constant
    segments: tuple[Segment, ...] = ()
    start: Segment | None = None  # the layer that runs first

    def ready(self, device: torch.device) -> Run:
        """Lay out the segments, in the order in which they run."""
        N, size = self.layers, self.segment or self.layers
        if not self.options:  # only the GPU kernels read the schedule on their device
            device = _CPU
        cuts = [(first, min(first + size, N)) for first in range(0, N, size)]

        def segment(first: int, last: int) -> Segment:
            return Segment(first, last, *schedule(self.turns, last - first, self.inverse, device))

        self.segments = tuple(segment(*cut) for cut in (cuts[::-1] if self.inverse else cuts))
        self.start = segment(N - 1, N) if self.inverse else segment(0, 1)
        return self

    @property
    def whole(self) -> Segment:
        """All layers at once, for the reference."""
        return Segment(0, self.layers, *schedule(self.turns, self.layers, self.inverse, _CPU))

    def part(self, tensors: tuple[Any, ...], segment: Segment) -> Any:
        """The weights of a segment, and its schedule: `Shears` or `Euler`."""
        first, last, half, layer = segment
        *weights, coef = tensors
        coef = self.coef if coef is None else coef
        if last - first < (N := self.layers):
            weights = [None if w is None else w[first:last] for w in weights]
            begin, end = (N - last, N - first) if self.inverse else (first, last)
            each = len(self.turns) or 1
            coef = coef[begin * each : end * each]
        if self.turns:
            return Shears(*weights, half, layer, coef, self.activation, self.kind)  # pyright: ignore
        return Euler(*weights, coef, self.activation, self.kind)  # pyright: ignore

    def parts(self, tensors: tuple[Any, ...]) -> Iterator[Any]:
        """Those of all segments, in the order in which they run."""
        return (self.part(tensors, segment) for segment in self.segments)

    def reference(self, y: Tensor, tensors: tuple[Any, ...]) -> Tensor:
        """y_N by differentiable operations."""
        forward = plain.split_forward if self.turns else plain.euler_forward
        return forward(y, self.part(tensors, self.whole))[0]

    # The kernels

    def forward(self, y: Tensor, part: Any, keep: bool) -> tuple[Tensor, Any]:
        """y_N and, with `keep`, what `backward` needs of the states."""
        kernel = getattr(self.kernels, "split_forward" if self.turns else "euler_forward")
        if self.kernels is plain:
            return kernel(y, part, keep)
        return kernel(y, *part, *self.options, keep)

    def backward(self, kept: Tensor, g: Tensor, part: Any) -> Sequence[Any]:
        """The gradients of y_0 and of all tensors, from what `forward` has kept."""
        if self.turns:
            return self._split_backward(None, g, part, kept)[1:]
        if self.kernels is plain:
            return plain.euler_backward(kept, g, part)
        return self.kernels.euler_backward(kept, g, *part, *self.backward_options)

    def undo(self, y_N: Tensor, g: Tensor, part: Any) -> Sequence[Any]:
        """The rebuilt y_0, then the gradients, from y_N."""
        return self._split_backward(y_N, g, part, None)

    def _split_backward(self, y_N: Any, g: Tensor, part: Any, kept: Any) -> Sequence[Any]:
        if self.kernels is plain:
            return plain.split_backward(y_N, g, part, kept)
        return self.kernels.split_backward(y_N, g, *part, *self.backward_options, kept)


# Forwards and backwards


def last(run: Run, y: Tensor, tensors: tuple[Any, ...]) -> Tensor:
    """y_N alone."""
    if run.grid:
        return fixed.from_grid(fixed.split_forward(y, run.part(tensors, run.whole)), y.dtype)
    for part in run.parts(tensors):
        y, _ = run.forward(y, part, False)
    return y


def ahead(run: Run, y: Tensor, tensors: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """y_N, and what gradients come back from besides y_0.

    None of it is y_N itself: whoever changes that in place changes no gradient.
    """
    if run.grid:
        Y = fixed.split_forward(y, run.part(tensors, run.whole))
        return fixed.from_grid(Y, y.dtype), Y
    if run.backprop == "reversible":
        y_N = last(run, y, tensors)
        return y_N, y_N.clone()
    if run.backprop == "stored":
        return run.forward(y, next(run.parts(tensors)), True)
    states = []
    for part in run.parts(tensors):
        states.append(y)
        y, _ = run.forward(y, part, False)
    return y, torch.stack(states[1:]) if len(states) > 1 else y.new_empty(0, *y.shape)


def behind(run: Run, y: Tensor, kept: Tensor, g: Tensor, tensors: tuple[Any, ...]) -> Sequence[Any]:
    """The gradients of y_0 and of all tensors."""
    if torch.is_grad_enabled() or batched(g):  # a gradient of the gradient is wanted, or many
        return _reference_vjp(run, g, y, *tensors)
    g = g.contiguous()
    y = _readable(y, g)
    tensors = tuple([_readable(t, g) for t in tensors])
    kept = kept.contiguous() if run.grid else _readable(kept, g)
    if run.grid:
        _, *found = fixed.split_backward(kept, g, run.part(tensors, run.whole))
    elif run.backprop == "reversible":
        found = _undone(run, y, kept, g, tensors)
    elif run.backprop == "stored":
        found = [*run.backward(kept, g, next(run.parts(tensors)))]
    else:
        found = _from_checkpoints(run, [y, *kept.unbind(0)], g, tensors)
    if tensors[-1] is None:
        found[-1] = None
    return found


def _readable(t: Any, like: Tensor) -> Any:
    """A tensor as kernels read it: `saved_tensors_hooks` may give back other strides and dtypes."""
    if t is None or (t.dtype is like.dtype and t.is_contiguous()):
        return t
    return t.to(like).contiguous()


def _undone(run: Run, y: Tensor, y_N: Tensor, g: Tensor, tensors: tuple[Any, ...]) -> list[Any]:
    """From y_N back to y_1, which is known since y_0 is: so the reversal can be checked.

    The layer that ran first reads y_0 itself: what is exactly 0 there stays so.
    """
    assert run.start is not None
    each, (begin, end, *_) = len(run.turns), run.start
    first = run.part(tensors, run.start)
    y_1, kept = run.forward(y, first, True)
    whole = next(run.parts(tensors))
    others = whole._replace(**{name: getattr(whole, name)[each:] for name in SCHEDULED})
    rebuilt, g, *found = run.undo(y_N, g, others)
    g, *of_first = run.backward(kept, g, first)
    *weights, d_coef = found
    for grad, more in zip(weights, of_first[:-1], strict=True):
        if grad is not None:
            grad[begin:end] = more
    found = [g, *weights, _join([of_first[-1], d_coef])]
    if run.check and y.numel():
        found = check_reversal(drift_of(y_1, rebuilt, y_N), found)
    return found


SCHEDULED = ("half", "layer", "coef")  # what a shear stack has for each shear


def _from_checkpoints(
    run: Run, starts: list[Tensor], g: Tensor, tensors: tuple[Any, ...]
) -> list[Any]:
    """Segment by segment from the last that ran: run it again, then back."""
    found = []
    for part, start in reversed([*zip(run.parts(tensors), starts, strict=True)]):
        kept = run.forward(start, part, True)[1]
        g, *grads = run.backward(kept, g, part)
        del kept
        found.append(grads)
    ordered = found if run.inverse else found[::-1]  # by layer
    *weights, _ = (_join(pieces) for pieces in zip(*ordered, strict=True))
    return [g, *weights, _join([grads[-1] for grads in reversed(found)])]


def _join(pieces: Sequence[Tensor | None]) -> Tensor | None:
    present = [piece for piece in pieces if piece is not None]
    return torch.cat(present) if present else None


def _reference_vjp(run: Run, g: Tensor, y: Tensor, *tensors: Any) -> tuple[Tensor | None, ...]:
    def filled(present: Sequence[Any]) -> tuple[Any, ...]:
        rest = iter(present)
        return tuple(None if t is None else next(rest) for t in tensors)

    def function(y: Tensor, *present: Tensor) -> Tensor:
        return run.reference(y, filled(present))

    g_0, *grads = vjp(function, y, *(t for t in tensors if t is not None))[1](g)
    return g_0, *filled(grads)


# For autograd


def call(y: Tensor, tensors: Sequence[Any], run: Run) -> Tensor:
    """y_N, by the form that costs least here."""
    if transformed():
        return Stack.apply(y, *tensors, run)[0]  # pyright: ignore[reportOptionalSubscript]
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (y, *tensors)):
        return EagerStack.apply(y, *tensors, run)  # pyright: ignore[reportReturnType]
    return last(run, y, tuple(tensors))


class Stack(torch.autograd.Function):
    """y_N and what gradients come back from, given y_0, weights and coefficients."""

    @staticmethod
    def forward(y: Tensor, *rest: Any) -> Any:
        *tensors, run = rest
        return ahead(run, y, tuple(tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.run = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        y, *tensors, kept = ctx.saved_tensors
        if grads[0] is None:
            return (None,) * (len(tensors) + 2)
        return *behind(ctx.run, y, kept, grads[0], tuple(tensors)), None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        y, *tensors, run = args
        if all(d is None for d in in_dims[1:-1]):  # mapped samples are more samples
            y = y.movedim(in_dims[0], 0)
            found: Any = Stack.apply(y.flatten(0, 1), *tensors, run)
            return (found[0].reshape(y.shape), found[1]), (0, None)

        def one(y: Tensor, *tensors: Any) -> Tensor:
            return run.reference(y, tensors)

        y_N = torch.func.vmap(one, in_dims=tuple(in_dims[:-1]))(y, *tensors)
        return (y_N, y_N.new_empty(0)), (0, None)


class EagerStack(torch.autograd.Function):
    """The same for ordinary autograd: PyTorch calls this form with less ado."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        y, *tensors, ctx.run = inputs
        y_N, kept = ahead(ctx.run, y, tuple(tensors))
        ctx.save_for_backward(y, *tensors, kept)
        return y_N

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        y, *tensors, kept = ctx.saved_tensors
        return *behind(ctx.run, y, kept, grads[0], tuple(tensors)), None
