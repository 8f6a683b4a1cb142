"""Whether PyTorch compiles, traces, transforms or watches a call."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

Function = TypeVar("Function", bound=Callable[..., Any])


def constant(function: Function) -> Function:
    """Mark a function that `torch.compile` calls while it traces, instead of tracing it too.

    `torch.compiler.assume_constant_result` does the same, but imports the compiler. A PyTorch that
    does not know the mark takes every call for a transform, and compiles layer by layer.
    """
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return function


def eagerly(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function without `torch.compile`, also from a compiled one.

    The decorator `torch.compiler.disable` does the same, but imports the compiler at once.
    """
    global _call_eagerly
    if _call_eagerly is _call and "torch._dynamo" in sys.modules:
        _call_eagerly = torch.compiler.disable(_call)  # pyright: ignore
    return _call_eagerly(function, *args)


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


_call_eagerly: Callable[..., Any] = _call


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself, which `torch.compile` then leaves as it is; it must call no Python.

    Cheaper than `eagerly`, which switches the compiler off and on.
    """
    compiler: Any = sys.modules.get("torch._dynamo")
    if compiler is not None and function.__code__ not in _left:
        compiler.decorators.skip(function)
        _left.add(function.__code__)
    return function


_left: set[Any] = set()  # code that the compiler was told to leave as it is

eagerly._torchdynamo_disable = True  # pyright: ignore[reportFunctionMemberAccess]


def traced(*tensors: Tensor | None) -> bool:
    """Whether PyTorch is compiling or transforming the call, or some tensor is not a plain one."""
    plain = (Tensor, nn.Parameter, type(None))
    return (
        torch.compiler.is_compiling()
        or any(type(t) not in plain or (t is not None and t.is_meta) for t in tensors)
        or watched()
        or transformed()
    )


def watched() -> bool:
    """Whether PyTorch sees each operation: to trace it, count it, or differentiate forwards."""
    return (
        forward_ad._current_level >= 0
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
    )


@constant
def transformed() -> bool:
    """Whether the call is inside of `vmap`, `torch.func.grad` and the like."""
    return torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore[reportAttributeAccessIssue]


@constant
def hooked() -> bool:
    """Whether someone else keeps what autograd wants to keep, which `torch.func` cannot bear."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None  # pyright: ignore


def batched(g: Tensor) -> bool:
    """Whether g is many gradients at once, by `vmap` or `torch.autograd.grad(is_grads_batched)`."""
    return transformed() or torch._C._functorch.is_legacy_batchedtensor(g)  # pyright: ignore[reportAttributeAccessIssue]


def valueless(t: Tensor) -> bool:
    """Whether a tensor has a shape but no values: on the meta device, or in `FakeTensorMode`."""
    if torch.compiler.is_compiling():
        return False
    fake: Any = sys.modules.get("torch._subclasses.fake_tensor")
    return t.is_meta or (fake is not None and isinstance(t, fake.FakeTensor))
