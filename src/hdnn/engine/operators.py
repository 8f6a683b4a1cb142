"""A whole stack as one operator of PyTorch, for `torch.compile`.

Exporters see the layers one by one: their formats know no such operator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hdnn.engine import Settings, calls, stacks
from hdnn.engine.stacks import Run


def _run(
    y: Tensor,
    tensors: Sequence[Tensor],
    turns: str,
    inverse: bool,
    activation: str,
    kind: str,
    how: str,
) -> Run:
    engine, backprop = how.split()
    halves = tuple(int(half) for half in turns)
    run = Run(activation, kind, len(tensors[0]), halves, inverse)
    return calls.lay_out(run, engine, backprop, Settings(), y, learned=True)


def _all(tensors: Sequence[Tensor], turns: str) -> tuple[Tensor | None, ...]:
    """The tensors of a stack, with None for V where it is K or nothing."""
    *weights, coef = tensors
    full = 6 if turns else 3
    return *weights, *[None] * (full - len(weights)), coef


@torch.library.custom_op("hdnn::stack", mutates_args=())
def stack(
    y: Tensor,
    tensors: Sequence[Tensor],
    turns: str,
    inverse: bool,
    activation: str,
    kind: str,
    how: str,
) -> tuple[Tensor, Tensor]:
    """y_N, and what gradients come back from; `turns` is "01" if p moves first, then q."""
    run = _run(y, tensors, turns, inverse, activation, kind, how)
    return stacks.ahead(run, y, _all(tensors, turns))


@stack.register_fake
def _(y, tensors, turns, inverse, activation, kind, how):
    _, backprop = how.split()
    N, (batch, n) = tensors[0].shape[0], y.shape
    if backprop == "reversible":
        kept = y.shape
    elif backprop == "checkpoint":
        kept = (math.ceil(N / calls.between(N)) - 1, *y.shape)
    else:
        kernels, split = calls.kernels(y.device.type), bool(turns)
        steps, width = (N * len(turns), n // 2) if split else (N, n)
        kept = (kernels.kept_size(split, steps, batch, width, y.dtype),)
    return torch.empty_like(y, memory_format=torch.contiguous_format), y.new_empty(kept)


@torch.library.custom_op("hdnn::stack_backward", mutates_args=())
def stack_backward(
    g: Tensor,
    y: Tensor,
    kept: Tensor,
    tensors: Sequence[Tensor],
    turns: str,
    inverse: bool,
    activation: str,
    kind: str,
    how: str,
) -> list[Tensor]:
    """The gradients of y and of all tensors."""
    run = _run(y, tensors, turns, inverse, activation, kind, how)
    with torch.no_grad():
        grads = stacks.behind(run, y, kept, g, _all(tensors, turns))
    # Copies, because what a kernel returns may be pieces of one buffer, and an operator may not.
    return [grad.clone() for grad in grads if grad is not None]


@stack_backward.register_fake
def _(g, y, kept, tensors, *_):
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (y, *tensors)]


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    y, tensors, *ctx.how = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(y, output[1], *tensors)


def _backward(ctx: Any, g: Tensor, _: Any) -> Any:
    y, kept, *tensors = ctx.saved_tensors
    g_0, *grads = stack_backward(g, y, kept, tensors, *ctx.how)
    return g_0, grads, *[None] * 5


stack.register_autograd(_backward, setup_context=_setup_context)
