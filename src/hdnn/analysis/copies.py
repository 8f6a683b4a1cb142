"""Copies of a network to look at, apart from the one that trains."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import Tensor, nn

from hdnn.model import Model

Module = TypeVar("Module", bound=nn.Module)


def exact(module: Module) -> Module:
    """A copy in float64 on the CPU, of networks with pruned or normalised weights too."""
    return apart(module).to("cpu", torch.float64)


def apart(module: Module) -> Module:
    """A copy as it is: a call of it leaves the one that trains alone."""
    # What hooks compute before a call carries a graph, and PyTorch does not copy such tensors.
    computed = {
        id(value): value.detach().clone()
        for part in module.modules()
        for value in vars(part).values()
        if isinstance(value, Tensor) and not value.is_leaf
    }
    return copy.deepcopy(module, computed)


@torch.no_grad()
def lost_in_own_dtype(module: nn.Module, x: Tensor) -> Tensor:
    """Where y_N of a network or Model, or the output of another module, is not finite: (B,).

    As it is used: its copy in float64 can be fine where float32 or float16 overflow.
    """
    twin, like = apart(module).eval(), next(module.parameters())
    out = (twin.features if isinstance(twin, Model) else twin)(x.to(like))
    return ~out.isfinite().reshape(len(x), -1).all(1).cpu()
