"""Inside `torch.compile`, a stack that a kernel runs is one operator of the graph.

Exporters see the layers one by one: their formats have no such operator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hdnn import activations
from hdnn.engine import Settings, autograd, dispatch
from hdnn.engine.backprop import Stored, between
from hdnn.engine.call import Call, coefficients, with_V
from hdnn.engine.kernels.protocol import Stack
from hdnn.engine.tracing import transformed
from hdnn.errors import OptionError


def choose(call: Call, engine: str | None, backprop: str | None) -> Callable[[Call], Tensor] | None:
    """What runs the call as an operator, or None if the compiler is to see each layer.

    Exporters always see each layer.
    """
    if engine == "fused" and not hasattr(torch.compiler, "is_exporting"):
        raise OptionError(
            'engine="fused" cannot run inside torch.compile of a PyTorch before 2.7; use '
            'engine="auto", which compiles the layers one by one there.'
        )
    settings = Settings(engine=engine or "auto", backprop=backprop or "auto")
    traced = _exporting() or transformed() or not activations.is_registered(call.sigma)
    plan = dispatch.plan_of_call(settings, call, traced=traced)
    if plan.is_reference:
        return None
    one_half = call.turns and {*call.turns} != {0, 1}
    if one_half and call.y.is_cuda:
        return None
    # An operator of a graph cannot read whether a rebuilt state is right.
    backprop = "checkpoint" if plan.backprop == "checked" else plan.backprop
    return partial(_run, plan.engine, backprop)


def _exporting() -> bool:
    """Whether the graph is exported to another program, which has no such operator."""
    is_exporting = getattr(torch.compiler, "is_exporting", None)
    return True if is_exporting is None else is_exporting()  # PyTorch before 2.7 cannot tell


def _run(engine: str, backprop: str, call: Call) -> Tensor:
    """Like `prepared.PreparedCall`, but the compiler can trace it."""
    y, link = call.y, call.link
    wide = torch.float32 if engine == "fused" and y.dtype in dispatch.HALF else y.dtype
    turns = "".join([str(half) for half in call.turns]) or "euler"
    order = "backwards" if call.inverse else "forwards"
    precision = dispatch.precision(Settings(), y)
    name = "any"
    if engine == "fused":
        n, layers = y.shape[-1], len(call.weights[0])
        if y.is_cuda:
            name = dispatch.gpu_kernel_about(call.turns, precision, n, y.numel() // n, layers)
        else:
            name = dispatch.cpu_kernel_about(call.turns, wide, n, y.numel() // n)
    how = f"{turns} {order} {call.kind} {engine} {backprop} {name} {precision} {call.sigma.name}"
    # Kernels must not read products that autocast has rounded.
    with torch.autocast(y.device.type, enabled=False):
        link = None if link is None else link.to(wide)
        weights = with_V(tuple([w.to(wide) for w in call.weights]), link)
        sizes = (len(call.weights[0]), call.inverse, wide, y.device)
        coef = coefficients(call.fractions, call.h, *sizes)
        tensors = [t.contiguous() for t in (*weights, coef) if t is not None]
        flat = y.reshape(-1, y.shape[-1]).to(wide).contiguous()
        return stack(flat, tensors, how)[0].reshape(y.shape).to(y.dtype)


# The operator


def _described(y: Tensor, tensors: Sequence[Tensor], how: str) -> tuple[Stack, list[str]]:
    """The stack, and its engine, backprop, kernel and precision; `how` is as in `_run`."""
    turns, order, kind, *by, activation = how.split(" ", 7)
    (batch, n), (N, r, _) = y.shape, tensors[0].shape
    halves = () if turns == "euler" else tuple([int(half) for half in turns])
    rows, inverse = (r, tensors[1].shape[1]) if halves else (r,), order == "backwards"
    made = Stack(activation, kind, N, halves, inverse, batch, n, rows, y.dtype, y.device)
    return made, by


def _method(y: Tensor, tensors: Sequence[Tensor], how: str) -> Stored:
    described, (engine, backprop, name, precision) = _described(y, tensors, how)
    chosen = None if name == "any" else name
    return dispatch.method(described, engine, backprop, Settings(precision=precision), chosen)


def _all(tensors: Sequence[Tensor], stack: Stack) -> tuple[Tensor | None, ...]:
    """The tensors of a stack, with None for V unless it is given."""
    *weights, coef = tensors
    return *weights, *[None] * (3 * stack.parts - len(weights)), coef


@torch.library.custom_op("hdnn::stack", mutates_args=())
def stack(y: Tensor, tensors: Sequence[Tensor], how: str) -> tuple[Tensor, Tensor]:
    """y_N, and what the backward pass needs."""
    method = _method(y, tensors, how)
    return method.forward(y, _all(tensors, method.stack))


@stack.register_fake
def _(y, tensors, how):
    described, (_, backprop, name, precision) = _described(y, tensors, how)
    N = described.layers
    if backprop == "reversible":
        kept = y.shape
    elif backprop == "checkpoint":
        kept = (math.ceil(N / between(N)) - 1, *y.shape)
    else:
        kernels = dispatch.FUSED_KERNELS[y.device.type][0]
        kept = (kernels[name].kept_size(described, precision),)
    return torch.empty_like(y, memory_format=torch.contiguous_format), y.new_empty(kept)


@torch.library.custom_op(
    "hdnn::stack_backward",
    mutates_args=(),
    # PyTorch 2.6 cannot tell it from the types.
    schema="(Tensor g, Tensor y, Tensor kept, Tensor[] tensors, str how) -> Tensor[]",
)
def stack_backward(
    g: Tensor, y: Tensor, kept: Tensor, tensors: Sequence[Tensor], how: str
) -> list[Tensor]:
    """The gradients of y and of all tensors."""
    method = _method(y, tensors, how)
    with torch.no_grad():
        grads = autograd.gradients(method, y, kept, g, _all(tensors, method.stack))
    # Copies: a kernel may return pieces of one buffer, but an operator may not.
    return [grad.clone() for grad in grads if grad is not None]


@stack_backward.register_fake
def _(g, y, kept, tensors, how):
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (y, *tensors)]


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    y, tensors, ctx.how = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(y, output[1], *tensors)


def _backward(ctx: Any, g: Tensor, _: Any) -> Any:
    y, kept, *tensors = ctx.saved_tensors
    g_0, *grads = stack_backward(g, y, kept, tensors, ctx.how)
    return g_0, grads, None


stack.register_autograd(_backward, setup_context=_setup_context)
