"""The parts of an image network in which all states have one shape, and dy_N/dy_j along them.

A stage is one Hamiltonian unit, or the blocks of a ResNet between two that have a stride.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from hdnn.analysis import Extremes, chain_extremes, unit_extremes
from hdnn.base.files import finite
from hdnn.experiments.runner import Job
from hdnn.models import ResNet
from hdnn.networks.unit import HamiltonianUnit

Stage = list[Any]  # one unit, or blocks


def stages(model: Any) -> list[Stage]:
    """The parts of a network in which all states have one shape."""
    if not isinstance(model, ResNet):
        return [[unit] for unit in model.units]
    found: list[Stage] = [[]]
    for block in model.blocks:
        if block.added:
            found.append([])  # and without this block, which has a stride
        else:
            found[-1].append(block)
    return found


def depth(stage: Stage) -> int:
    """N, the number of layers or blocks."""
    return stage[0].layers if isinstance(stage[0], HamiltonianUnit) else len(stage)


@torch.no_grad()
def entering(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The states that enter each stage, from images x."""
    seen: list[Tensor] = []
    firsts = [stage[0] for stage in stages(model)]
    hooks = [m.register_forward_pre_hook(lambda _, y: seen.append(y[0])) for m in firsts]
    try:
        model(x)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def extremes(stage: Stage, y: Tensor, j: int, steps: int) -> Extremes:
    """The extreme singular values of dy_N/dy_j, from the states y that enter the stage."""
    if isinstance(stage[0], HamiltonianUnit):
        return unit_extremes(stage[0], y, layers=[j], steps=steps)
    with torch.no_grad():
        for block in stage[:j]:
            y = block(y)
    return chain_extremes(stage[j:], y, layers=[0], steps=steps)


class Work:
    """The networks with their images on one device: called with a job, it is done."""

    def __init__(self, models: dict[str, Any], x: Tensor) -> None:
        self.models = {name: model.to(x) for name, model in models.items()}
        self.y = {name: entering(model, x) for name, model in self.models.items()}

    def __call__(self, job: Job) -> Job:
        start = time.perf_counter()
        k, name = job["stage"] - 1, job["network"]
        found = extremes(stages(self.models[name])[k], self.y[name][k], job["j"], job["steps"])
        values = {
            key: value[0].tolist() for key, value in found._asdict().items() if key != "layers"
        }
        return {**finite(values), "seconds": round(time.perf_counter() - start, 2)}

    def rows(self, name: str) -> list[dict[str, Any]]:
        """What is known of each stage beforehand."""
        found = []
        for k, (stage, y) in enumerate(zip(stages(self.models[name]), self.y[name], strict=True)):
            first = stage[0]
            row = {"network": name, "stage": k + 1, "layers": depth(stage)}
            row["entries"] = y[0].numel()
            if isinstance(first, HamiltonianUnit):
                promise = first.guarantee()
                row |= {"promised": promise.holds, "why": promise.why, "zeros": 0.0}
            else:
                with torch.no_grad():
                    for block in stage:
                        y = block(y)
                why = "no theorem is known for blocks with ReLU"
                row |= {"promised": False, "why": why, "zeros": float((y == 0).double().mean())}
            found.append(row)
        return found
