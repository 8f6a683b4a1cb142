"""A whole stack as one step of autograd, whatever runs it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import unwrap_if_dead
from torch.func import vjp

from hdnn.engine.backprop import Stored
from hdnn.engine.kernels.plain import PlainKernel
from hdnn.engine.kernels.protocol import Stack, Tensors
from hdnn.engine.tracing import batched, transformed


def run(y: Tensor, tensors: Tensors, method: Stored) -> Tensor:
    """y_N from y_0 (B, n), by the cheapest form of the function."""
    if transformed():
        return StackFunction.apply(y, *tensors, method)[0]  # pyright: ignore[reportOptionalSubscript]
    # What has outlived a transform still has its wrapper, and kernels need addresses.
    y = unwrap_if_dead(y)
    tensors = tuple([None if t is None else unwrap_if_dead(t) for t in tensors])
    if torch.is_grad_enabled():
        for t in (*tensors, y):
            if t is not None and t.requires_grad:
                return _apply(y, *tensors, method)
    return method.last(y, tensors)


def gradients(
    method: Stored, y: Tensor, kept: Tensor, g: Tensor, tensors: Tensors
) -> Sequence[Any]:
    """The gradients of y_0 and of all tensors, from that of y_N."""
    if torch.is_grad_enabled() or batched(g):  # for second derivatives, or many gradients at once
        return _by_definition(method.stack, g, y, tensors)
    g = g.contiguous()
    dtype = g.dtype
    for t in (y, kept, *tensors):
        if t is not None and (t.dtype is not dtype or not t.is_contiguous()):
            y, kept = _readable(y, g), _readable(kept, g)
            tensors = tuple([_readable(t, g) for t in tensors])
            break
    return method.backward(y, kept, g, tensors)


def _readable(t: Any, like: Tensor) -> Any:
    """A tensor as kernels need it: `saved_tensors_hooks` may change strides and dtypes."""
    if t is None:
        return t
    return t.to(like).contiguous() if t.is_floating_point() else t.contiguous()


# The stack by differentiable operations, for any number of samples.
_definition = lru_cache(maxsize=256)(PlainKernel)


def _by_definition(stack: Stack, g: Tensor, y: Tensor, tensors: Tensors) -> Sequence[Any]:
    def filled(present: Sequence[Any]) -> tuple[Any, ...]:
        rest = iter(present)
        return tuple(None if t is None else next(rest) for t in tensors)

    def function(y: Tensor, *present: Tensor) -> Tensor:
        return _definition(stack).forward(y, filled(present))[0]

    g_0, *grads = vjp(function, y, *(t for t in tensors if t is not None))[1](g)
    return g_0, *filled(grads)


class StackFunction(torch.autograd.Function):
    """y_N and what the backward pass needs, given y_0 and tensors, for `torch.func`."""

    @staticmethod
    def forward(y: Tensor, *rest: Any) -> Any:
        *tensors, method = rest
        return method.forward(y, tuple(tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.method = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        y, *tensors, kept = ctx.saved_tensors
        if grads[0] is None:
            return (None,) * (len(tensors) + 2)
        return *gradients(ctx.method, y, kept, grads[0], tuple(tensors)), None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        y, *tensors, method = args
        if all(d is None for d in in_dims[1:-1]):  # only samples are mapped: that is a larger batch
            y = y.movedim(in_dims[0], 0)
            flat = y.flatten(0, 1).contiguous()
            found: Any = StackFunction.apply(flat, *tensors, method.with_samples(len(flat)))
            return (found[0].reshape(y.shape), found[1]), (0, None)

        def one(y: Tensor, *tensors: Any) -> Tensor:
            return _definition(method.stack).forward(y, tensors)[0]

        y_N = torch.func.vmap(one, in_dims=tuple(in_dims[:-1]))(y, *tensors)
        return (y_N, y_N.new_empty(0)), (0, None)


class EagerStackFunction(torch.autograd.Function):
    """The same for ordinary autograd: PyTorch calls this form with less overhead."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, *rest: Any) -> Any:
        tensors, method = rest[:-1], rest[-1]
        ctx.method = method
        y_N, kept = method.forward(y, tensors)
        ctx.save_for_backward(y, kept, *tensors)
        return y_N

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        saved = ctx.saved_tensors
        return *gradients(ctx.method, saved[0], saved[1], grads[0], saved[2:]), None


# What `Function.apply` does before that is for transforms, under which this form never runs; it
# would take 5 of the 140 us of a small stack.
_apply = super(torch.autograd.Function, EagerStackFunction).apply  # pyright: ignore
