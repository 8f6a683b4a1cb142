"""A copy of a network to look at: in float64, on the CPU, and apart from the one that trains."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import Tensor, nn

Module = TypeVar("Module", bound=nn.Module)


def exact(module: Module) -> Module:
    """A copy in float64 on the CPU, of networks with pruned or normalised weights too."""
    # What hooks compute before a call carries a graph, and PyTorch does not copy such tensors.
    computed = {
        id(value): value.detach().clone()
        for part in module.modules()
        for value in vars(part).values()
        if isinstance(value, Tensor) and not value.is_leaf
    }
    return copy.deepcopy(module, computed).to("cpu", torch.float64)
