"""A whole stack as one step of autograd, whatever runs it."""

from __future__ import annotations

import itertools
import math
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp

from hdnn.engine import fixed, plain
from hdnn.engine.plain import Euler, Shears


@dataclass
class Run:
    """How one call runs: by which kernels, and from which states gradients come back."""

    half: Tensor
    layer: Tensor
    activation: str
    kind: str
    kernels: Any = plain  # a module with split_forward and so on
    options: tuple[Any, ...] = ()  # what its forward kernels take besides
    backward_options: tuple[Any, ...] = ()
    segment: int | None = None  # shears between stored states; None stores the last one only
    grid: bool = False  # the state is fixed-point
    check: bool = True

    def shears(self, tensors: tuple[Any, ...], start: int = 0, end: int | None = None) -> Shears:
        K_p, K_q, b_p, b_q, V_p, V_q, coef = tensors
        half, layer = self.half[start:end], self.layer[start:end]
        schedule = (half, layer, coef[start:end], self.activation, self.kind)
        return Shears(K_p, K_q, b_p, b_q, V_p, V_q, *schedule)

    def cuts(self) -> list[tuple[int, int]]:
        """Where the schedule is cut into segments."""
        M = len(self.half)
        size = M if self.segment is None else self.segment
        return [(start, min(start + size, M)) for start in range(0, M, size)]


class SplitStack(torch.autograd.Function):
    """y_N and the states that gradients come back from, given y_0, weights and coefficients."""

    @staticmethod
    def forward(y, K_p, K_q, b_p, b_q, V_p, V_q, coef, run: Run):
        tensors = (K_p, K_q, b_p, b_q, V_p, V_q, coef)
        if run.grid:
            Y = fixed.split_forward(y, run.shears(tensors))
            return fixed.from_grid(Y, y.dtype), Y
        anchors = []
        for start, end in run.cuts():
            y = run.kernels.split_forward(y, *_flat(run, run.shears(tensors, start, end)))
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
    """Segment by segment from the last: undo, and add up the gradients."""
    cuts, total, d_coef = run.cuts(), [], []
    ends = [*anchors.unbind(0), y_N] if anchors.numel() else [y_N]
    y_0: Any = y_N
    for (start, end), y_end in zip(reversed(cuts), reversed(ends), strict=True):
        stack = run.shears(tensors, start, end)
        if run.kernels is plain:
            y_0, g, *grads, d_c = plain.split_backward(y_end, g, stack)  # pyright: ignore[reportAssignmentType]
        else:
            back = run.kernels.split_backward(y_end, g, *stack, *run.backward_options)
            y_0, g, *grads, d_c = back
        d_coef.append(d_c)
        total = [_sum(a, b) for a, b in zip(total, grads, strict=True)] if total else grads
    if run.check and len(cuts) == 1 and y.numel():
        _check_drift(y, y_0)
    return [g, *total, torch.cat(d_coef[::-1])]


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return None if a is None or b is None else a + b


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
