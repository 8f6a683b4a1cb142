"""A whole stack as one step of autograd, whatever runs it."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vjp

from hdnn.engine import fixed, plain
from hdnn.engine.dispatch import transformed
from hdnn.engine.plain import Euler, Shears


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
    """How calls of certain sizes run: by which kernels, and from which states back."""

    activation: str
    kind: str
    layers: int
    turns: tuple[int, ...] = ()  # which half moves (0: p, 1: q) in each shear of a layer
    inverse: bool = False  # last layer first
    kernels: Any = plain  # a module with split_forward and so on
    options: tuple[Any, ...] = ()  # what its forward kernels take besides
    backward_options: tuple[Any, ...] = ()
    segment: int | None = None  # layers between stored states; None stores the last one only
    grid: bool = False  # the state is fixed-point
    check: bool = True
    coef: Any = None  # what each shear, or each layer, moves by, if that is constant
    segments: tuple[Segment, ...] = ()

    def ready(self, device: torch.device) -> Run:
        """Lay out the segments of a shear stack, in the order in which they run."""
        N, size = self.layers, self.segment or self.layers
        if not self.options:  # only the GPU kernels read the schedule on their device
            device = _CPU
        cuts = [(first, min(first + size, N)) for first in range(0, N, size)]
        self.segments = tuple(
            Segment(first, last, *schedule(self.turns, last - first, self.inverse, device))
            for first, last in (reversed(cuts) if self.inverse else cuts)
        )
        return self

    def shears(self, tensors: tuple[Any, ...], segment: Segment) -> Shears:
        """The weights and the schedule of a segment."""
        first, last, half, layer = segment
        K_p, K_q, b_p, b_q, V_p, V_q, coef = tensors
        if coef is None:
            coef = self.coef
        if last - first < (N := self.layers):
            part = slice(first, last)
            K_p, K_q, b_p, b_q = K_p[part], K_q[part], b_p[part], b_q[part]
            V_p, V_q = (None if V is None else V[part] for V in (V_p, V_q))
            begin, end = (N - last, N - first) if self.inverse else (first, last)
            coef = coef[begin * len(self.turns) : end * len(self.turns)]
        return Shears(K_p, K_q, b_p, b_q, V_p, V_q, half, layer, coef, self.activation, self.kind)

    def euler(self, K: Any, b: Any, V: Any, h: Any) -> Euler:
        """The weights of an Euler stack."""
        return Euler(K, b, V, self.coef if h is None else h, self.activation, self.kind)

    @property
    def whole(self) -> Segment:
        """All layers at once, for the reference."""
        return Segment(0, self.layers, *schedule(self.turns, self.layers, self.inverse, _CPU))


class Segment(NamedTuple):
    """Layers that run without a state stored between them."""

    first: int
    last: int
    half: Tensor
    layer: Tensor


_CPU = torch.device("cpu")


def _forward(run: Run, y: Tensor, tensors: tuple[Any, ...]) -> tuple[Tensor, Tensor | None]:
    """y_N, and what its reversal starts from besides: states in between, or integers."""
    if run.grid:
        Y = fixed.split_forward(y, run.shears(tensors, run.whole))
        return fixed.from_grid(Y, y.dtype), Y
    if len(run.segments) == 1:
        return run.kernels.split_forward(y, *_flat(run, run.shears(tensors, run.segments[0]))), None
    anchors = []
    for segment in run.segments:
        y = run.kernels.split_forward(y, *_flat(run, run.shears(tensors, segment)))
        anchors.append(y)
    return y, torch.stack(anchors[:-1])


def _backward(
    run: Run, y: Tensor, y_N: Tensor, anchors: Tensor | None, g: Tensor, tensors: tuple[Any, ...]
) -> Sequence[Any]:
    """The gradients of y_0 and of all tensors."""
    if torch.is_grad_enabled():  # a gradient of the gradient is wanted
        return _reference_vjp(run, g, y, *tensors)
    if run.grid:
        assert anchors is not None
        _, *found, d_coef = fixed.split_backward(anchors, g, run.shears(tensors, run.whole))
    else:
        *found, d_coef = back(run, y, y_N, anchors, g.contiguous(), tensors)
    return *found, None if tensors[-1] is None else d_coef


class SplitStack(torch.autograd.Function):
    """y_N and the states that gradients come back from, given y_0, weights and coefficients."""

    @classmethod
    def run(cls, y: Tensor, *rest: Any) -> Tensor:
        """y_N, by the form of this function that costs least here."""
        if transformed():
            return cls.apply(y, *rest)[0]
        if not torch.is_grad_enabled():
            return _forward(rest[-1], y, rest[:-1])[0]
        return EagerSplitStack.apply(y, *rest)  # pyright: ignore[reportReturnType]

    @staticmethod
    def ahead(run: Run, y: Tensor, tensors: tuple[Any, ...]) -> tuple[Tensor, Any]:
        """y_N, and what `behind` needs besides."""
        return _forward(run, y, tensors)

    @staticmethod
    def behind(
        run: Run, y: Tensor, y_N: Tensor, kept: Any, g: Tensor, tensors: tuple[Any, ...]
    ) -> Sequence[Any]:
        """The gradients of y_0 and of all tensors."""
        return _backward(run, y, y_N, kept, g, tensors)

    @staticmethod
    def forward(y, K_p, K_q, b_p, b_q, V_p, V_q, coef, run: Run):
        y_N, anchors = _forward(run, y, (K_p, K_q, b_p, b_q, V_p, V_q, coef))
        return y_N, y.new_empty(0) if anchors is None else anchors

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        *tensors, ctx.run = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        y, *tensors, y_N, anchors = ctx.saved_tensors
        if grads[0] is None:
            return (None,) * 9
        return *_backward(ctx.run, y, y_N, anchors, grads[0], tuple(tensors)), None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        *tensors, run = args
        if all(d is None for d in in_dims[1:8]):  # mapped samples are more samples
            y = tensors[0].movedim(in_dims[0], 0)
            y_N, anchors = SplitStack.apply(y.flatten(0, 1), *tensors[1:], run)
            return (y_N.reshape(y.shape), anchors), (0, None)

        def one(*tensors: Any) -> Tensor:
            return plain.split_forward(tensors[0], run.shears(tensors[1:], run.whole))

        y_N = torch.func.vmap(one, in_dims=tuple(in_dims[:8]))(*tensors)
        return (y_N, y_N.new_empty(0)), (0, None)


class EagerSplitStack(torch.autograd.Function):
    """The same for ordinary autograd: PyTorch calls this form with less ado."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        y, *tensors, ctx.run = inputs
        y_N, anchors = _forward(ctx.run, y, tuple(tensors))
        ctx.save_for_backward(y, *tensors, y_N, anchors)
        return y_N

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        y, *tensors, y_N, anchors = ctx.saved_tensors
        return *_backward(ctx.run, y, y_N, anchors, grads[0], tuple(tensors)), None


def _flat(run: Run, stack: Shears) -> tuple[Any, ...]:
    return (stack,) if run.kernels is plain else (*stack, *run.options)


def _reference_vjp(run: Run, g: Tensor, y: Tensor, *tensors: Any) -> tuple[Tensor | None, ...]:
    present = [t for t in tensors if t is not None]

    def function(y: Tensor, *present: Tensor) -> Tensor:
        rest = iter(present)
        return plain.split_forward(
            y, run.shears(tuple(None if t is None else next(rest) for t in tensors), run.whole)
        )

    g_0, *grads = vjp(function, y, *present)[1](g)
    rest = iter(grads)
    return g_0, *(None if t is None else next(rest) for t in tensors)


def back(
    run: Run, y: Tensor, y_N: Tensor, anchors: Tensor | None, g: Tensor, tensors: tuple[Any, ...]
) -> list[Any]:
    """Segment by segment from the last that ran: undo it, and collect its layers' gradients."""
    if len(run.segments) == 1:
        look = run.check and y.numel() > 0 and not _recorded(y) and _due()
        y_0, *grads = _undo(run, y_N, g, run.shears(tensors, run.segments[0]), look)
        if look:
            _check_drift(y, y_0)
        return grads
    assert anchors is not None
    parts = []
    ends = [*anchors.unbind(0), y_N]
    for segment, y_end in zip(reversed(run.segments), reversed(ends), strict=True):
        _, g, *grads = _undo(run, y_end, g, run.shears(tensors, segment), False)
        parts.append(grads)
    ordered = parts if run.inverse else parts[::-1]  # by layer
    weights = [_join(pieces) for pieces in list(zip(*ordered, strict=True))[:-1]]
    return [g, *weights, _join([part[-1] for part in reversed(parts)])]


def _undo(run: Run, y: Tensor, g: Tensor, stack: Shears, state: bool) -> Any:
    """The gradients of a segment, after the state it began with, which only the CPU leaves out."""
    if run.kernels is plain:
        return plain.split_backward(y, g, stack)
    if run.options:
        return run.kernels.split_backward(y, g, *stack, *run.backward_options)
    return run.kernels.split_backward(y, g, *stack, *run.backward_options, state)


def _join(pieces: Sequence[Tensor | None]) -> Tensor | None:
    present = [piece for piece in pieces if piece is not None]
    return torch.cat(present) if present else None


_reversals = itertools.count(1)


def _due() -> bool:
    """Whether to look at this reversal: the 1st, 2nd, 4th, 8th ... since looking takes time."""
    count = next(_reversals)
    return count & (count - 1) == 0


def _recorded(y: Tensor) -> bool:
    """Whether a CUDA graph is being recorded, in which nothing can be looked at."""
    return y.is_cuda and torch.cuda.is_current_stream_capturing()


def _check_drift(y: Tensor, y_0: Tensor) -> None:
    """Warn if the reversal came back elsewhere."""
    drift = float((y_0 - y).abs().max() / y.abs().max().clamp_min(1e-30))
    if drift > 10 * torch.finfo(y.dtype).eps ** 0.5:
        warnings.warn(
            f"the reversal of this stack drifted by {drift:.2g} relative to its input, so its "
            'gradients are inexact: use hdnn.engine.use(state="fixed"), backprop="checkpoint", '
            "float64, or smaller steps; check=False turns this check off.",
            ReversalWarning,
            stacklevel=2,
        )


class ReversalWarning(UserWarning):
    """A reversible stack whose rebuilt states are no longer those that it passed through."""


def _euler_forward(run: Run, y: Tensor, stack: Euler) -> tuple[Tensor, Tensor]:
    """y_N and the states to store."""
    if run.segment is None:
        return _euler_states(run, y, stack)
    anchors = [y]
    for start in range(0, run.layers, run.segment):
        part = _layers(stack, start, start + run.segment)
        anchors.append(_euler_last(run, anchors[-1], part))
    return anchors[-1], torch.stack(anchors)


def euler_back(
    run: Run, y: Tensor, states: Tensor, g: Tensor, stack: Euler
) -> Sequence[Tensor | None]:
    """The gradients of y_0, K, b, V and h."""
    if torch.is_grad_enabled():
        K, b, V, h, activation, kind = stack

        def function(y: Tensor, *tensors: Tensor) -> Tensor:
            K, b, h, *rest = tensors
            V = rest[0] if rest else None
            return plain.euler_forward(y, Euler(K, b, V, h, activation, kind))[-1]

        given = (K, b, h) if V is None else (K, b, h, V)
        d_y, d_K, d_b, d_h, *d_V = vjp(function, y, *given)[1](g)
        return d_y, d_K, d_b, d_V[0] if d_V else None, d_h
    g = g.contiguous()
    if run.segment is None:
        return _euler_back(run, states, g, stack)
    parts = []
    for k in reversed(range(len(states) - 1)):
        part = _layers(stack, k * run.segment, (k + 1) * run.segment)
        g, *grads = _euler_back(run, _euler_states(run, states[k], part)[1], g, part)
        parts.append(grads)
    return g, *[_join(pieces[::-1]) for pieces in zip(*parts, strict=True)]


class EulerStack(torch.autograd.Function):
    """y_N and the stored states of an Euler stack."""

    @classmethod
    def run(cls, y: Tensor, *rest: Any) -> Tensor:
        """y_N, by the form of this function that costs least here."""
        if transformed():
            return cls.apply(y, *rest)[0]
        if not torch.is_grad_enabled():
            K, b, V, h, run = rest
            return _euler_last(run, y, run.euler(K, b, V, h))
        return EagerEulerStack.apply(y, *rest)  # pyright: ignore[reportReturnType]

    @staticmethod
    def ahead(run: Run, y: Tensor, tensors: tuple[Any, ...]) -> tuple[Tensor, Any]:
        """y_N, and what `behind` needs besides."""
        return _euler_forward(run, y, run.euler(*tensors))

    @staticmethod
    def behind(
        run: Run, y: Tensor, y_N: Tensor, kept: Any, g: Tensor, tensors: tuple[Any, ...]
    ) -> Sequence[Any]:
        """The gradients of y_0 and of all tensors."""
        *found, d_h = euler_back(run, y, kept, g, run.euler(*tensors))
        return *found, None if tensors[-1] is None else d_h

    @staticmethod
    def forward(y, K, b, V, h, run: Run):
        return _euler_forward(run, y, run.euler(K, b, V, h))

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        *tensors, ctx.run = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (y, K, b, V, h, states), run = ctx.saved_tensors, ctx.run
        if grads[0] is None:
            return (None,) * 6
        return *EulerStack.behind(run, y, y, states, grads[0], (K, b, V, h)), None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        *tensors, run = args
        if all(d is None for d in in_dims[1:5]):
            y = tensors[0].movedim(in_dims[0], 0)
            y_N, states = EulerStack.apply(y.flatten(0, 1), *tensors[1:], run)
            return (y_N.reshape(y.shape), states), (0, None)

        def one(y: Tensor, K: Tensor, b: Tensor, V: Tensor | None, h: Tensor) -> Tensor:
            return plain.euler_forward(y, run.euler(K, b, V, h))[-1]

        y_N = torch.func.vmap(one, in_dims=tuple(in_dims[:5]))(*tensors)
        return (y_N, y_N.new_empty(0)), (0, None)


class EagerEulerStack(torch.autograd.Function):
    """The same for ordinary autograd."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        y, K, b, V, h, run = inputs
        ctx.run = run
        y_N, states = _euler_forward(run, y, run.euler(K, b, V, h))
        ctx.save_for_backward(y, K, b, V, h, states)
        return y_N

    backward = EulerStack.backward


def _layers(stack: Euler, start: int, end: int) -> Euler:
    K, b, V, h, activation, kind = stack
    part = slice(start, end)
    return Euler(K[part], b[part], None if V is None else V[part], h[part], activation, kind)


def _euler_last(run: Run, y: Tensor, stack: Euler) -> Tensor:
    if run.kernels is plain:
        return plain.euler_forward(y, stack)[-1]
    last = run.kernels.euler_forward(y, *stack, *run.options, False)
    return last[0] if isinstance(last, tuple) else last


def _euler_states(run: Run, y: Tensor, stack: Euler) -> tuple[Tensor, Tensor]:
    """y_N, and the states as the kernels keep them."""
    if run.kernels is plain:
        states = plain.euler_forward(y, stack)
    else:
        states = run.kernels.euler_forward(y, *stack, *run.options, True)
        if isinstance(states, tuple):
            return states
    return states[-1].clone(), states


def _euler_back(run: Run, states: Tensor, g: Tensor, stack: Euler) -> tuple[Any, ...]:
    if run.kernels is plain:
        return plain.euler_backward(states, g, stack)
    return run.kernels.euler_backward(states, g, *stack, *run.backward_options)
