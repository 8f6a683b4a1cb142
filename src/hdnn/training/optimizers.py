"""What is trained, and by which optimiser."""

from __future__ import annotations

from typing import Any

import torch

from hdnn.errors import TrainingError
from hdnn.model import Model
from hdnn.training import small_steps


def parameter_groups(model: Model, solver: str, ridge: float, decay: float) -> list[dict[str, Any]]:
    """What is trained: the hidden layers and, jointly, the output layer with its own decay."""
    head = set(model.head.parameters())
    free = [p for p in model.parameters() if p.requires_grad]
    hidden, output = [p for p in free if p not in head], [p for p in free if p in head]
    groups: list[dict[str, Any]] = [{"params": hidden, "weight_decay": decay}]
    if solver == "joint":
        groups.append({"params": output, "weight_decay": ridge})
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise TrainingError(
            "the hidden layers have no parameter that requires a gradient; unfreeze some with "
            'requires_grad_(), or train the output layer alone with solver="joint".'
        )
    return groups


def optimizer_of(name: str, groups: list[dict[str, Any]], rate: float) -> torch.optim.Optimizer:
    """Adam, or SGD with Nesterov momentum, for these groups of parameters."""
    if name == "sgd":
        return torch.optim.SGD(groups, lr=rate, momentum=0.9, nesterov=True)
    if small_steps.usable([p for group in groups for p in group["params"]]):
        return small_steps.CompiledAdam(groups, lr=rate)
    return torch.optim.Adam(groups, lr=rate)
