"""Adam for the weights of nodes: the same bits however the nodes are shared out."""

from __future__ import annotations

import math

import torch
from torch import Tensor

BETAS, EPS = (0.9, 0.999), 1e-8


class NodeAdam:
    """Adam with each product and each sum rounded by itself.

    PyTorch's Adam multiplies and adds in one rounding, or not, depending on where in a tensor a
    number lies: a weight's bits would depend on which nodes share its tensor.
    """

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.weights, self.count = weights, 0
        self.m = {name: torch.zeros_like(w) for name, w in weights.items()}
        self.v = {name: torch.zeros_like(w) for name, w in weights.items()}

    def step(self, gradients: dict[str, Tensor], rate: float) -> None:
        self.count += 1
        (b1, b2), k = BETAS, self.count
        for name, g in gradients.items():
            m, v = self.m[name], self.v[name]
            m.mul_(b1).add_(g * (1 - b1))
            v.mul_(b2).add_(g * g * (1 - b2))
            size = (v.sqrt() / math.sqrt(1 - b2**k)).add_(EPS)
            self.weights[name].sub_(m / size * (rate / (1 - b1**k)))
