"""Modules as an analysis runs them: copied, unwrapped, called; and results as JSON."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from hdnn.errors import DataError, HDNNError, OptionError, ShapeError
from hdnn.networks.network import hook_reason

Module = TypeVar("Module", bound=nn.Module)


def copied(module: Module) -> Module:
    """A copy in the same dtype, with hooks, also if hooks compute the module's weights."""
    computed = {}
    for submodule in module.modules():
        for value in vars(submodule).values():
            if isinstance(value, Tensor) and not value.is_leaf:
                # PyTorch does not copy these.
                computed[id(value)] = value.detach().clone()
    twin = copy.deepcopy(module, computed)
    for old, new in zip(module.parameters(), twin.parameters(), strict=True):
        if new.requires_grad:
            _copy_hooks(old, new)
    return twin


def _copy_hooks(old: Tensor, new: Tensor) -> None:
    """PyTorch does not copy the hooks of parameters."""
    for hook in (old._backward_hooks or {}).values():
        new.register_hook(hook)
    for hook in (old._post_accumulate_grad_hooks or {}).values():
        new.register_post_accumulate_grad_hook(hook)


def exact(module: Module) -> Module:
    """A copy in float64 on the CPU, in evaluation mode."""
    twin = copied(module)
    twin = twin.to("cpu", torch.float64)
    return twin.eval()


def unwrapped(model: Any) -> Any:
    """The module inside `torch.compile` and PyTorch's data-parallel classes.

    A wrapper with hooks, or of a user's own class, may change gradients, so it is not unwrapped.
    """
    if not isinstance(model, nn.Module):
        raise OptionError(
            f"the model must be an nn.Module, but got {type(model).__name__}."
        )
    children = dict(model.named_children())
    inner = children.get("_orig_mod", children.get("module"))
    ours = type(model).__module__.startswith("torch.")
    if inner is None or not ours or hook_reason(model):
        return model
    return unwrapped(inner)


def mapped(function: Any, value: Any) -> Any:
    """Apply a function to all tensors inside tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {name: mapped(function, each) for name, each in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(mapped(function, each) for each in value)
    return value


def call_module(module: nn.Module, inputs: Any) -> Any:
    """Run a module on inputs as users give them: a tensor, a tuple of arguments or a dict."""
    if isinstance(inputs, Mapping):
        return module(**inputs)
    if isinstance(inputs, (tuple, list)):
        return module(*inputs)
    return module(inputs)


@contextmanager
def running(module: nn.Module, name: str) -> Iterator[None]:
    """A context for running the user's code: any error there becomes a `DataError`."""
    try:
        yield
    except Exception as error:
        if isinstance(error, HDNNError):
            raise
        text = str(error).partition("\n")[0]
        raise DataError(
            f"this {type(module).__name__} does not run on {name} ({type(error).__name__}: "
            f"{text}); pass {name} as the module takes it: a tensor, a tuple of arguments, or a "
            "dict of named arguments."
        ) from error


def state_rows(y: Any, width: int) -> Tensor:
    """States (*batch, width) as rows (B, width) in float64 on the CPU."""
    shape = type(y).__name__
    fits = False
    if isinstance(y, Tensor):
        shape = tuple(y.shape)
        fits = shape[-1:] == (width,) and y.numel() > 0
    if not fits:
        raise ShapeError(
            f"y must be a tensor (*batch, {width}), but got {shape}."
        )
    check_finite(y)
    return exact_tensor(y).reshape(-1, width)


def check_finite(y: Tensor) -> None:
    """Refuse states that contain NaN or infinity."""
    if not bool(y.isfinite().all()):
        raise DataError("y has NaN or infinite values; remove or replace them.")


def exact_tensor(value: Tensor) -> Tensor:
    """A copy on the CPU, in float64 if it is a floating-point tensor."""
    dtype = value.dtype
    if value.is_floating_point():
        dtype = torch.float64
    return value.detach().clone().to("cpu", dtype)


def spread(count: int, most: int) -> list[int]:
    """Some of the numbers 0 .. count - 1, evenly spread, including the first and the last."""
    nearest = torch.linspace(0, count - 1, min(count, most)).round().long()
    return nearest.tolist()


def random_like(tensor: Tensor) -> Tensor:
    """Random numbers, always the same for tensors of this shape."""
    generator = torch.Generator()
    generator.manual_seed(tensor.numel())
    return torch.randn(tensor.shape, generator=generator).to(tensor)


class JSONResult:
    """A dataclass that can be written as JSON, with its properties that are named in `derived`."""

    derived: ClassVar[tuple[str, ...]] = ()

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values for JSON; a number that is not finite becomes None."""
        text = json.dumps(self, default=_values)
        return json.loads(text, parse_constant=lambda _: None)

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps(self.to_dict(), indent=2)


def _values(result: Any) -> dict[str, Any]:
    """The fields of a dataclass, and its properties that are named in `derived`."""
    names = [field.name for field in fields(result)]
    names += getattr(result, "derived", ())
    return {name: getattr(result, name) for name in names}
