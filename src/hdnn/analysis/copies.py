"""Copies of a network for analysis, so that the one in training is left alone, and states."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hdnn.errors import ShapeError
from hdnn.model import Model
from hdnn.networks import Network

Module = TypeVar("Module", bound=nn.Module)


def exact(module: Module) -> Module:
    """A copy in float64 on the CPU, also of networks with pruned or normalised weights."""
    return copied(module).to("cpu", torch.float64)


def copied(module: Module) -> Module:
    """A copy in the same dtype: calling it does not affect the original."""
    # Weights that hooks compute belong to a graph, and PyTorch does not copy such tensors.
    computed = {
        id(value): value.detach().clone()
        for part in module.modules()
        for value in vars(part).values()
        if isinstance(value, Tensor) and not value.is_leaf
    }
    return copy.deepcopy(module, computed)


def embedded(model: Model | Network, x: Tensor) -> tuple[Network, Tensor]:
    """The network of a Model and the states y_0 of inputs x; for a network, x are the states."""
    return (model.net, model.embed(x)) if isinstance(model, Model) else (model, x)


def rows(y: Tensor, width: int) -> Tensor:
    """Samples given as (*batch, width) as rows (B, width), in float64 on the CPU."""
    if not isinstance(y, Tensor) or y.ndim < 1 or y.shape[-1] != width or not y.numel():
        given = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
        raise ShapeError(f"y must be a tensor (*batch, {width}), but got {given}.")
    return y.detach().reshape(-1, width).to("cpu", torch.float64)


@torch.no_grad()
def lost_in_own_dtype(module: nn.Module, x: Tensor) -> Tensor:
    """Where y_N of a network or Model, or the output of another module, is not finite: (B,).

    In its own dtype: a copy in float64 can be finite where float32 or float16 overflow.
    """
    twin, weight = copied(module).eval(), next(module.parameters())
    out = (twin.features if isinstance(twin, Model) else twin)(x.to(weight))
    return ~out.isfinite().reshape(len(x), -1).all(1).cpu()


@torch.no_grad()
def entering(model: nn.Module, parts: Iterable[Module], x: Tensor) -> list[tuple[Module, Tensor]]:
    """Each of these parts with the states that enter it, as they are called when a model runs."""
    seen: list[tuple[Any, Tensor]] = []
    hooks = [
        part.register_forward_pre_hook(lambda part, given: seen.append((part, given[0])))
        for part in parts
    ]
    try:
        model(x)
    finally:
        for hook in hooks:
            hook.remove()
    return seen
