"""The hidden layers during a training: their forward pass, their gradients, and their steps."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from hdnn.engine.direct import DirectGradients
from hdnn.errors import TrainingError
from hdnn.model import Model
from hdnn.networks import ODENetwork
from hdnn.training import small_steps
from hdnn.training.processes.parallel import Team
from hdnn.training.smooth import Smoothness


class HiddenLayers:
    """The layers of a model and their optimiser; with solver "joint" also that of its output layer.

    Gradients are computed without autograd where possible. `options` are those of `fit`.
    """

    def __init__(self, model: Model, y_0: Tensor, options: dict[str, Any], members: Team) -> None:
        self.net, self.team, self.clip, self.y = model.net, members, options["clip"], y_0
        groups = _parameter_groups(model, options)
        self.trained: list[nn.Parameter] = [p for group in groups for p in group["params"]]
        output = set(model.head.parameters())
        self.inner = [p for p in self.trained if p not in output]
        direct = DirectGradients(model.net)
        self.direct = direct if direct.usable(y_0) else None
        self.optimizer = optimizer_of(options["optimizer"], groups, options["learning_rate"])
        smooth = [model.net] if isinstance(model.net, ODENetwork) else []
        self.smooth = Smoothness(smooth, options["smoothness"])

    def forward(self, y_0: Tensor) -> Tensor:
        """y_N, of the minibatches of all processes."""
        for p in self.trained:
            p.grad = None
        return self.team.features(self._forward, y_0)

    def backward(self, g: Tensor) -> None:
        """Set the gradient of each parameter, given that of y_N."""
        self.team.gradients(self._backward, g, self.inner)
        self.smooth.add_gradient()

    def _forward(self, y_0: Tensor) -> Tensor:
        if self.direct is not None:
            return self.direct.forward(y_0)
        self.y = self.net(y_0)
        return self.y.detach()

    def _backward(self, g: Tensor) -> None:
        if self.direct is not None:
            self.direct.backward(g)
        elif self.y.requires_grad:
            self.y.backward(g)

    def step(self, rate: float, measured: bool) -> float:
        """Descend; returns the norm of the unclipped gradient, NaN if it was not measured."""
        small = self.optimizer if isinstance(self.optimizer, small_steps.CompiledAdam) else None
        norm, clip = math.nan, self.clip
        if clip is not None or (small is None and measured):
            grads = [p.grad for p in self.trained if p.grad is not None]
            norm = float(nn.utils.get_total_norm(grads)) if small is None else small.norm(grads)
            if clip is not None and norm > clip:
                for grad in grads:
                    grad *= clip / norm
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if small is None:
            self.optimizer.step()
            return norm
        descended = small.descend()  # which knows the norm anyway
        return descended if clip is None else norm


def _parameter_groups(model: Model, options: dict[str, Any]) -> list[dict[str, Any]]:
    """What is trained: the hidden layers and, jointly, the output layer with its own decay."""
    head = set(model.head.parameters())
    free = [p for p in model.parameters() if p.requires_grad]
    hidden, output = [p for p in free if p not in head], [p for p in free if p in head]
    groups: list[dict[str, Any]] = [{"params": hidden, "weight_decay": options["weight_decay"]}]
    if options["solver"] == "joint":
        groups.append({"params": output, "weight_decay": options["ridge"]})
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise TrainingError(
            "the hidden layers have no parameter that requires a gradient; unfreeze some with "
            "net.unfreeze() or requires_grad_(), or train the output layer alone with "
            'solver="joint".'
        )
    return groups


def optimizer_of(name: str, groups: list[dict[str, Any]], rate: float) -> torch.optim.Optimizer:
    """Adam, or SGD with Nesterov momentum, for these groups of parameters."""
    if name == "sgd":
        return torch.optim.SGD(groups, lr=rate, momentum=0.9, nesterov=True)
    if small_steps.usable([p for group in groups for p in group["params"]]):
        return small_steps.CompiledAdam(groups, lr=rate)
    return torch.optim.Adam(groups, lr=rate)
