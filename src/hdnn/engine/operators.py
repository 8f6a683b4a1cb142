"""A whole stack as one operator of PyTorch, for `torch.compile`.

There, ask for it: `engine="fused"`, or a `backprop` other than "stored". With "auto" the compiler
sees the layers one by one, and so do exporters, whose formats know no such operator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hdnn.engine import Settings, calls, stacks
from hdnn.engine.plain import Euler
from hdnn.engine.stacks import Run


def _run(
    turns: Sequence[int], N: int, inverse: bool, y: Tensor, activation: str, kind: str, how: str
) -> Run:
    engine, backprop = how.split()
    return calls.lay_out(
        Run(activation, kind, N, tuple(turns), inverse, check=False),
        engine,
        backprop,
        Settings(),
        y,
        learned=True,
    )


@torch.library.custom_op("hdnn::split_stack", mutates_args=())
def split_stack(
    y: Tensor,
    K_p: Tensor,
    K_q: Tensor,
    b_p: Tensor,
    b_q: Tensor,
    V_p: Tensor | None,
    V_q: Tensor | None,
    coef: Tensor,
    turns: Sequence[int],
    inverse: bool,
    activation: str,
    kind: str,
    how: str,
) -> tuple[Tensor, Tensor]:
    run = _run(turns, len(K_p), inverse, y, activation, kind, how)
    return stacks.SplitStack.forward(y, K_p, K_q, b_p, b_q, V_p, V_q, coef, run)


@split_stack.register_fake
def _(y, K_p, K_q, b_p, b_q, V_p, V_q, coef, turns, inverse, activation, kind, how):
    segments = math.ceil(K_p.shape[0] / calls.ANCHOR) if how.endswith("checkpoint") else 1
    anchors = segments - 1
    shape = (anchors, *y.shape) if anchors else (0,)
    return torch.empty_like(y, memory_format=torch.contiguous_format), y.new_empty(shape)


@torch.library.custom_op("hdnn::split_stack_backward", mutates_args=())
def split_stack_backward(
    g: Tensor,
    y: Tensor,
    y_N: Tensor,
    anchors: Tensor,
    K_p: Tensor,
    K_q: Tensor,
    b_p: Tensor,
    b_q: Tensor,
    V_p: Tensor | None,
    V_q: Tensor | None,
    coef: Tensor,
    turns: Sequence[int],
    inverse: bool,
    activation: str,
    kind: str,
    how: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    run = _run(turns, len(K_p), inverse, y, activation, kind, how)
    tensors = (K_p, K_q, b_p, b_q, V_p, V_q, coef)
    grads = stacks.back(run, y, y_N, anchors, g.contiguous(), tensors)
    # Copies, because what a kernel returns may be pieces of one buffer, and an operator may not.
    found = [y.new_empty(0) if grad is None else grad.clone() for grad in grads]
    return (found[0], found[1], found[2], found[3], found[4], found[5], found[6], found[7])


@split_stack_backward.register_fake
def _(g, y, y_N, anchors, K_p, K_q, b_p, b_q, V_p, V_q, coef, *_):
    like = [torch.empty_like(t) for t in (y, K_p, K_q, b_p, b_q)]
    V = [y.new_empty(0) if t is None else torch.empty_like(t) for t in (V_p, V_q)]
    return (*like, *V, torch.empty_like(coef))


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.turns, ctx.inverse, ctx.activation, ctx.kind, ctx.how = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, g: Tensor, _: Any) -> Any:
    y, K_p, K_q, b_p, b_q, V_p, V_q, coef, y_N, anchors = ctx.saved_tensors
    how = (ctx.turns, ctx.inverse, ctx.activation, ctx.kind, ctx.how)
    g_0, *grads, d_coef = split_stack_backward(
        g, y, y_N, anchors, K_p, K_q, b_p, b_q, V_p, V_q, coef, *how
    )
    for k, V in ((4, V_p), (5, V_q)):
        if V is None:
            grads[k] = None
    return g_0, *grads, d_coef, *[None] * 5


split_stack.register_autograd(_backward, setup_context=_setup_context)


def _euler_run(K: Tensor, y: Tensor, activation: str, kind: str, how: str) -> Run:
    run = _run((), len(K), False, y, activation, kind, how)
    if run.segment is None:  # in a form that is the same for all kernels: y_0 and y_N
        run.segment = run.layers
    return run


@torch.library.custom_op("hdnn::euler_stack", mutates_args=())
def euler_stack(
    y: Tensor,
    K: Tensor,
    b: Tensor,
    V: Tensor | None,
    h: Tensor,
    activation: str,
    kind: str,
    how: str,
) -> tuple[Tensor, Tensor]:
    run = _euler_run(K, y, activation, kind, how)
    y_N, states = stacks.EulerStack.forward(y, K, b, V, h, run)
    return y_N.clone(), states


@euler_stack.register_fake
def _(y, K, b, V, h, activation, kind, how):
    N = K.shape[0]
    segments = math.ceil(N / calls.between(N)) if how.endswith("checkpoint") else 1
    out = torch.empty_like(y, memory_format=torch.contiguous_format)
    return out, y.new_empty(segments + 1, *y.shape)


@torch.library.custom_op("hdnn::euler_stack_backward", mutates_args=())
def euler_stack_backward(
    g: Tensor,
    y: Tensor,
    states: Tensor,
    K: Tensor,
    b: Tensor,
    V: Tensor | None,
    h: Tensor,
    activation: str,
    kind: str,
    how: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    run = _euler_run(K, y, activation, kind, how)
    stack = Euler(K, b, V, h, activation, kind)
    d_y, d_K, d_b, d_V, d_h = (
        y.new_empty(0) if grad is None else grad.clone()
        for grad in stacks.euler_back(run, y, states, g, stack)
    )
    return d_y, d_K, d_b, d_V, d_h


@euler_stack_backward.register_fake
def _(g, y, states, K, b, V, h, *_):
    d_V = y.new_empty(0) if V is None else torch.empty_like(V)
    return (*(torch.empty_like(t) for t in (y, K, b)), d_V, torch.empty_like(h))


def _euler_setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.activation, ctx.kind, ctx.how = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, output[1])


def _euler_backward(ctx: Any, g: Tensor, _: Any) -> Any:
    y, K, b, V, h, states = ctx.saved_tensors
    how = (ctx.activation, ctx.kind, ctx.how)
    d_y, d_K, d_b, d_V, d_h = euler_stack_backward(g, y, states, K, b, V, h, *how)
    return d_y, d_K, d_b, None if V is None else d_V, d_h, None, None, None


euler_stack.register_autograd(_euler_backward, setup_context=_euler_setup_context)
