"""A whole stack as one step of autograd, whatever runs it."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp

from hdnn.engine import fixed, plain
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


@dataclass
class Run:
    """How one call runs: by which kernels, and from which states gradients come back."""

    activation: str
    kind: str
    turns: tuple[int, ...] = ()  # which half moves (0: p, 1: q) in each shear of a layer
    inverse: bool = False  # last layer first
    kernels: Any = plain  # a module with split_forward and so on
    options: tuple[Any, ...] = ()  # what its forward kernels take besides
    backward_options: tuple[Any, ...] = ()
    segment: int | None = None  # layers between stored states; None stores the last one only
    grid: bool = False  # the state is fixed-point
    check: bool = True

    def cuts(self, N: int) -> list[tuple[int, int]]:
        """The layers of each segment, in the order in which they run."""
        size = N if self.segment is None else self.segment
        cuts = [(start, min(start + size, N)) for start in range(0, N, size)]
        return cuts[::-1] if self.inverse else cuts

    def shears(self, tensors: tuple[Any, ...], cut: tuple[int, int] | None = None) -> Shears:
        """The stack, or a segment of it."""
        weights: list[Any]
        *weights, coef = tensors
        N, per = len(weights[0]), len(self.turns)
        first, last = cut or (0, N)
        if last - first < N:
            weights = [None if w is None else w[first:last] for w in weights]
            begin, end = (N - last, N - first) if self.inverse else (first, last)
            coef = coef[begin * per : end * per]
        device = coef.device if self.options else _CPU  # the GPU kernels read it there
        half, layer = schedule(self.turns, last - first, self.inverse, device)
        K_p, K_q, b_p, b_q, V_p, V_q = weights
        return Shears(K_p, K_q, b_p, b_q, V_p, V_q, half, layer, coef, self.activation, self.kind)


_CPU = torch.device("cpu")


class SplitStack(torch.autograd.Function):
    """y_N and the states that gradients come back from, given y_0, weights and coefficients."""

    @staticmethod
    def forward(y, K_p, K_q, b_p, b_q, V_p, V_q, coef, run: Run):
        tensors = (K_p, K_q, b_p, b_q, V_p, V_q, coef)
        if run.grid:
            Y = fixed.split_forward(y, run.shears(tensors))
            return fixed.from_grid(Y, y.dtype), Y
        anchors = []
        for cut in run.cuts(len(K_p)):
            y = run.kernels.split_forward(y, *_flat(run, run.shears(tensors, cut)))
            anchors.append(y)
        return y, torch.stack(anchors[:-1]) if len(anchors) > 1 else y.new_empty(0)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        *tensors, ctx.run = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (y, *tensors, y_N, anchors), run, g = ctx.saved_tensors, ctx.run, grads[0]
        if g is None:
            return (None,) * 9
        if torch.is_grad_enabled():  # a gradient of the gradient is wanted
            return *_reference_vjp(run, g, y, *tensors), None
        if run.grid:
            _, *result = fixed.split_backward(anchors, g, run.shears(tuple(tensors)))
        else:
            result = back(run, y, y_N, anchors, g.contiguous(), tuple(tensors))
        return *result, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        *tensors, run = args
        if all(d is None for d in in_dims[1:8]):  # mapped samples are more samples
            y = tensors[0].movedim(in_dims[0], 0)
            y_N, anchors = SplitStack.apply(y.flatten(0, 1), *tensors[1:], run)
            return (y_N.reshape(y.shape), anchors), (0, None)

        def one(*tensors: Any) -> Tensor:
            return plain.split_forward(tensors[0], run.shears(tensors[1:]))

        y_N = torch.func.vmap(one, in_dims=tuple(in_dims[:8]))(*tensors)
        return (y_N, y_N.new_empty(0)), (0, None)


class EagerSplitStack(torch.autograd.Function):
    """The same for ordinary autograd: PyTorch calls this form with less ado."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        output = SplitStack.forward(*inputs)
        SplitStack.setup_context(ctx, inputs, output)
        return output

    backward = SplitStack.backward


def _flat(run: Run, stack: Shears) -> tuple[Any, ...]:
    return (stack,) if run.kernels is plain else (*stack, *run.options)


def _reference_vjp(run: Run, g: Tensor, y: Tensor, *tensors: Any) -> tuple[Tensor | None, ...]:
    present = [t for t in tensors if t is not None]

    def function(y: Tensor, *present: Tensor) -> Tensor:
        rest = iter(present)
        return plain.split_forward(
            y, run.shears(tuple(None if t is None else next(rest) for t in tensors))
        )

    g_0, *grads = vjp(function, y, *present)[1](g)
    rest = iter(grads)
    return g_0, *(None if t is None else next(rest) for t in tensors)


def back(
    run: Run, y: Tensor, y_N: Tensor, anchors: Tensor, g: Tensor, tensors: tuple[Any, ...]
) -> list[Any]:
    """Segment by segment from the last that ran: undo it, and collect its layers' gradients."""
    cuts, parts = run.cuts(len(tensors[0])), []
    ends = [*anchors.unbind(0), y_N] if anchors.numel() else [y_N]
    y_0: Any = y_N
    for cut, y_end in zip(reversed(cuts), reversed(ends), strict=True):
        stack = run.shears(tensors, cut)
        if run.kernels is plain:
            y_0, g, *grads = plain.split_backward(y_end, g, stack)  # pyright: ignore[reportAssignmentType]
        else:
            y_0, g, *grads = run.kernels.split_backward(y_end, g, *stack, *run.backward_options)
        parts.append(grads)
    if len(parts) == 1:
        if run.check and y.numel():
            _check_drift(y, y_0)
        return [g, *parts[0]]
    ordered = parts if run.inverse else parts[::-1]  # by layer
    weights = [_join(pieces) for pieces in list(zip(*ordered, strict=True))[:-1]]
    return [g, *weights, _join([part[-1] for part in reversed(parts)])]


def _join(pieces: Sequence[Tensor | None]) -> Tensor | None:
    present = [piece for piece in pieces if piece is not None]
    return torch.cat(present) if present else None


_reversals = itertools.count(1)


def _check_drift(y: Tensor, y_0: Tensor) -> None:
    """Warn if the reversal came back elsewhere; looked at less and less often, since it waits."""
    if not math.log2(next(_reversals)).is_integer():
        return
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


class EulerStack(torch.autograd.Function):
    """y_N and the stored states of an Euler stack."""

    @staticmethod
    def forward(y, K, b, V, h, run: Run):
        stack = Euler(K, b, V, h, run.activation, run.kind)
        if run.segment is None:
            states = _euler_states(run, y, stack)
            return states[-1].clone(), states
        anchors = [y]
        for start in range(0, len(K), run.segment):
            part = _layers(stack, start, start + run.segment)
            anchors.append(_euler_states(run, anchors[-1], part)[-1])
        return anchors[-1].clone(), torch.stack(anchors)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        *tensors, ctx.run = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (y, K, b, V, h, states), run, g = ctx.saved_tensors, ctx.run, grads[0]
        if g is None:
            return (None,) * 6
        stack = Euler(K, b, V, h, run.activation, run.kind)
        if torch.is_grad_enabled():

            def function(y: Tensor, *tensors: Tensor) -> Tensor:
                K, b, h, *rest = tensors
                V = rest[0] if rest else None
                return plain.euler_forward(y, Euler(K, b, V, h, run.activation, run.kind))[-1]

            given = (K, b, h) if V is None else (K, b, h, V)
            d_y, d_K, d_b, d_h, *d_V = vjp(function, y, *given)[1](g)
            return d_y, d_K, d_b, d_V[0] if d_V else None, d_h, None
        g = g.contiguous()
        if run.segment is None:
            return *_euler_back(run, states, g, stack), None
        parts = []
        for k in reversed(range(len(states) - 1)):
            part = _layers(stack, k * run.segment, (k + 1) * run.segment)
            back = _euler_back(run, _euler_states(run, states[k], part), g, part)
            g = back[0]
            parts.append(back[1:])
        joined = [
            None if pieces[0] is None else torch.cat(pieces[::-1])
            for pieces in zip(*parts, strict=True)
        ]
        return g, *joined, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        *tensors, run = args
        if all(d is None for d in in_dims[1:5]):
            y = tensors[0].movedim(in_dims[0], 0)
            y_N, states = EulerStack.apply(y.flatten(0, 1), *tensors[1:], run)
            return (y_N.reshape(y.shape), states), (0, None)

        def one(y: Tensor, K: Tensor, b: Tensor, V: Tensor | None, h: Tensor) -> Tensor:
            return plain.euler_forward(y, Euler(K, b, V, h, run.activation, run.kind))[-1]

        y_N = torch.func.vmap(one, in_dims=tuple(in_dims[:5]))(*tensors)
        return (y_N, y_N.new_empty(0)), (0, None)


class EagerEulerStack(torch.autograd.Function):
    """The same for ordinary autograd."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        output = EulerStack.forward(*inputs)
        EulerStack.setup_context(ctx, inputs, output)
        return output

    backward = EulerStack.backward


def _layers(stack: Euler, start: int, end: int) -> Euler:
    K, b, V, h, activation, kind = stack
    part = slice(start, end)
    return Euler(K[part], b[part], None if V is None else V[part], h[part], activation, kind)


def _euler_states(run: Run, y: Tensor, stack: Euler) -> Tensor:
    if run.kernels is plain:
        return plain.euler_forward(y, stack)
    return run.kernels.euler_forward(y, *stack, *run.options, True)


def _euler_back(run: Run, states: Tensor, g: Tensor, stack: Euler) -> tuple[Any, ...]:
    if run.kernels is plain:
        return plain.euler_backward(states, g, stack)
    return run.kernels.euler_backward(states, g, *stack, *run.backward_options)
