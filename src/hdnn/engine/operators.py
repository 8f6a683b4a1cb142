"""A whole stack as one operator of PyTorch, for `torch.compile`.

There, ask for it: `engine="fused"`, or a `backprop` other than "stored". With "auto" the compiler
sees the layers one by one, and so do exporters, whose formats know no such operator.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hdnn.engine import dispatch, stacks
from hdnn.engine.stacks import Run


def _run(
    half: Tensor, layer: Tensor, device: str, activation: str, kind: str, fused: bool, segment: int
) -> Run:
    run = Run(half, layer, activation, kind, check=False, segment=segment or None)
    if fused:
        run.kernels = dispatch.kernels(device)
        if device == "cuda":
            run.options, run.backward_options = ("ieee",), ("ieee", False)
    return run


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
    half: Tensor,
    layer: Tensor,
    activation: str,
    kind: str,
    fused: bool,
    segment: int,
) -> tuple[Tensor, Tensor]:
    run = _run(half, layer, y.device.type, activation, kind, fused, segment)
    return stacks.SplitStack.forward(y, K_p, K_q, b_p, b_q, V_p, V_q, coef, run)


@split_stack.register_fake
def _(y, K_p, K_q, b_p, b_q, V_p, V_q, coef, half, layer, activation, kind, fused, segment):
    anchors = math.ceil(half.shape[0] / segment) - 1 if segment else 0
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
    half: Tensor,
    layer: Tensor,
    activation: str,
    kind: str,
    fused: bool,
    segment: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    run = _run(half, layer, y.device.type, activation, kind, fused, segment)
    tensors = (K_p, K_q, b_p, b_q, V_p, V_q, coef)
    grads = stacks.back(run, y, y_N, anchors, g.contiguous(), tensors)
    found = [y.new_empty(0) if grad is None else grad for grad in grads]
    return (found[0], found[1], found[2], found[3], found[4], found[5], found[6], found[7])


@split_stack_backward.register_fake
def _(g, y, y_N, anchors, K_p, K_q, b_p, b_q, V_p, V_q, coef, *_):
    like = [torch.empty_like(t) for t in (y, K_p, K_q, b_p, b_q)]
    V = [y.new_empty(0) if t is None else torch.empty_like(t) for t in (V_p, V_q)]
    return (*like, *V, torch.empty_like(coef))


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.activation, ctx.kind, ctx.fused, ctx.segment = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, g: Tensor, _: Any) -> Any:
    y, K_p, K_q, b_p, b_q, V_p, V_q, coef, half, layer, y_N, anchors = ctx.saved_tensors
    how = (half, layer, ctx.activation, ctx.kind, ctx.fused, ctx.segment)
    g_0, *grads, d_coef = split_stack_backward(
        g, y, y_N, anchors, K_p, K_q, b_p, b_q, V_p, V_q, coef, *how
    )
    for k, V in ((4, V_p), (5, V_q)):
        if V is None:
            grads[k] = None
    return g_0, *grads, d_coef, *[None] * 6


split_stack.register_autograd(_backward, setup_context=_setup_context)
