"""The cost of one horizon and its gradients as one kernel, for trainings."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hdnn import engine as engines
from hdnn.control import fused
from hdnn.control.loop import ClosedLoop
from hdnn.control.objective import WEIGHTS, Cost, rest
from hdnn.engine import jit
from hdnn.engine.kernels import loop_cost


class Priced(NamedTuple):
    """Terms by name, gradients of states and of K, b and G, and the smallest distance of pairs."""

    terms: dict[str, float]
    states: Tensor
    weights: dict[str, Tensor]
    nearest: float


def why_not(loop: ClosedLoop, cost: Cost, trajectory: Tensor) -> str:
    """Why the kernel cannot run; empty if it can."""
    if (loop.engine or engines.current().engine) == "reference":
        return "the engine is the reference"
    if type(cost) is not Cost:
        return "it is for a Cost, and for nothing that extends it"
    if len(trajectory) != loop.controller.steps + 1 or trajectory.ndim != 4:
        return "it is for one horizon of a batch"
    return fused.why_not(trajectory, loop.system())


def priced(loop: ClosedLoop, cost: Cost, trajectory: Tensor) -> Priced:
    """What `Cost.terms` and its gradients are, for a trajectory `(T + 1, B, N, n)`."""
    controller, plant, h = loop.controller, loop.plant, loop.step
    y = trajectory.detach().transpose(0, 1).contiguous().numpy()
    K, b, G = (t.detach().contiguous().numpy() for t in (controller.K, controller.b, controller.G))
    rows = tuple(t.contiguous().numpy() for t in (rest(plant), plant.A, plant.a))
    pairs = np.array(cost.pairs if cost.pairs is not None else _all(plant.agents), dtype=np.int64)
    prices = np.array(
        [
            *(h * cost.state, h * cost.effort, h * cost.barrier, cost.smoothness, cost.end),
            *(cost.distance**2, cost.dimensions),
        ]
    )
    discounts = cost.discount ** (h * np.arange(len(trajectory) - 1, -1, -1))
    B, pairs = len(y), pairs.reshape(-1, 2)
    groups, gy = fused.groups(B), np.empty_like(y)
    sums = [np.zeros((len(groups), *w.shape)) for w in (K, b, G, np.zeros(len(WEIGHTS)))]
    kernel, size = loop_cost.compiled(jit.compiled), fused.size_of(controller.states)
    later = np.where(np.arange(len(prices)) == loop_cost.SMOOTHNESS, 0.0, prices)  # is priced once
    near = [math.inf] * len(groups)

    def group(j: int, low: int, high: int) -> None:
        *to, terms = (each[j] for each in sums)
        given = (K, b, G), rows, pairs, later if j else prices, discounts, terms
        near[j] = kernel(size, y[low:high], B, *given, (gy[low:high], *to))

    fused.each_group(B, kernel, group)
    *gradients, terms = (fused.summed(each) for each in sums)
    found = {str(n): torch.from_numpy(g) for n, g in zip("KbG", gradients, strict=True)}
    by_name = {str(name): float(term) for name, term in zip(WEIGHTS, terms, strict=True)}
    return Priced(by_name, torch.from_numpy(gy).transpose(0, 1), found, math.sqrt(min(near)))


def _all(agents: int) -> Any:
    return np.stack(np.triu_indices(agents, 1), 1)
