"""The hidden layers of a network in a training: gradients, smoothness, and Adam.

A minibatch of a small network is run within some ten calls of PyTorch or NumPy, so that each call
counts.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hdnn.engine.run import Call, Plan
from hdnn.engine.settings import current
from hdnn.networks import Network
from hdnn.schemes import Force

NUMPY = (torch.float32, torch.float64)


class Passes:
    """The last states of a network, and the gradients of its parameters from those of the states.

    Where one kernel runs all layers it is called directly, and autograd is left with what computes
    its weights from the parameters: for a small network the rest takes longer than the kernel.
    """

    def __init__(self, net: Any) -> None:
        self.net = net
        plain = getattr(net.forward, "__func__", None) is Network.forward
        self.direct = (
            plain
            and isinstance(getattr(net, "h", None), float)
            and not _hooked(net)
        )
        self.direct = self.direct and bool(net.scheme.moves)
        self.plans: dict[int, Plan] = {}  # by number of samples
        self.last: tuple[Any, ...] = ()  # the last forward pass

    def forward(self, y_0: Tensor) -> Tensor:
        if not self.direct:
            return self._by_autograd(y_0)
        forces = self.net.forces()
        plan = self.plans.get(len(y_0)) or self._plan(y_0, forces)
        if plan.method is None or plan.convert:
            return self._by_autograd(y_0)
        tensors = [plan.h]
        for force in forces:
            tensors += [t if t is None else t.contiguous() for t in force]
        with torch.no_grad():
            y, saved = plan.method.forward(y_0, tuple(tensors))
        self.last = (plan.method, y_0, saved, tensors)
        return y

    def _by_autograd(self, y_0: Tensor) -> Tensor:
        y = self.net(y_0)
        self.last = (y,)
        return y.detach()

    def _plan(self, y_0: Tensor, forces: Sequence[Force]) -> Plan:
        net = self.net
        choices = [
            None if name == "auto" else name
            for name in (net.engine, net.backprop)
        ]
        plan = Plan(
            current(*choices),
            Call(net.scheme, y_0, forces, net.h, net.sigma, False),
        )
        self.plans[len(y_0)] = plan
        return plan

    def backward(self, g: Tensor) -> None:
        """Add to the gradients of all parameters, given that of the last states."""
        if len(self.last) == 1:
            self.last[0].backward(g)
            return
        method, y_0, saved, tensors = self.last
        with torch.no_grad():
            gradients = method.backward(
                y_0, saved, g.contiguous(), tuple(tensors)
            )[1:]
        roots = []
        theirs = []
        for t, gradient in zip(tensors, gradients, strict=True):
            if gradient is None or not t.requires_grad:
                continue
            if t.is_leaf and t.grad is None:
                t.grad = gradient
            else:
                roots.append(t)
                theirs.append(gradient)
        if roots:
            torch.autograd.backward(roots, theirs)


class Smoothness:
    """The regulariser R_K of a network, and its gradient.

    For most networks the gradient in each parameter is a multiple of its second difference from
    layer to layer. Whether it is, and which multiple, is measured once at random weights; then the
    differences take a small part of the time of autograd.
    """

    def __init__(self, net: Any, trained: Sequence[nn.Parameter]) -> None:
        self.net = net
        self.trained = trained
        self.active = hasattr(net, "smoothness") and hasattr(
            net, "h"
        )  # not an MLP
        # By the number of a parameter.
        self.factors: list[tuple[int, Any, float]] | None = None
        if self.active:
            self.factors = self._measured()

    def _measured(self) -> list[tuple[int, Any, float]] | None:
        try:
            probe = copy.deepcopy(self.net).double().requires_grad_()
        except (
            RuntimeError
        ):  # weights that PyTorch computes, as after pruning, have no copy
            return None
        weights = list(probe.parameters())
        generator = torch.Generator().manual_seed(0)
        for p in weights:
            p.data.copy_(torch.randn(p.shape, generator=generator))
        gradients = torch.autograd.grad(
            probe.smoothness(), weights, allow_unused=True
        )
        places = {p: k for k, p in enumerate(self.trained)}
        factors = []
        for mine, p, gradient in zip(
            self.net.parameters(), weights, gradients, strict=True
        ):
            p = p.detach()
            if gradient is None or len(p) < 2:
                return None
            difference = -p.diff(dim=0, prepend=p[:1], append=p[-1:]).diff(
                dim=0
            )
            factor = float(
                (gradient * difference).sum() / difference.square().sum()
            )
            if not torch.allclose(gradient, factor * difference):
                return None
            if mine in places:
                factors.append((places[mine], numbers(mine), factor))
        return factors

    def value(self) -> float:
        return float(self.net.smoothness().detach()) if self.active else 0.0

    def gradients(self, alpha: float) -> list[Any]:
        """The gradients of all trained parameters, that of alpha R_K included, in their memory."""
        active = alpha > 0 and self.active
        if active and self.factors is None:
            penalty = alpha * self.net.smoothness()
            if penalty.requires_grad:
                penalty.backward()
        gradients = []
        for p in self.trained:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            gradients.append(numbers(p.grad))
        if active and self.factors is not None:
            for place, values, factor in self.factors:
                gradient = gradients[place]
                jumps = values[1:] - values[:-1]
                jumps *= alpha * factor
                gradient[1:] += jumps
                gradient[:-1] -= jumps
        return gradients


class Adam:
    """Adam (Kingma and Ba, 2015) on all parameters as one vector.

    PyTorch's own takes several times as long for the few weights of a small network. A parameter is
    added to its gradient, times its decay.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], decays: Sequence[float]
    ) -> None:
        self.values = [numbers(p) for p in parameters]
        self.sizes = [p.numel() for p in parameters]
        self.decays = decays
        flat = torch.cat([torch.zeros_like(p).flatten() for p in parameters])
        self.m = numbers(flat)
        self.v = numbers(flat.clone())
        self.count = 0

    def step(self, gradients: Sequence[Any], rate: float) -> None:
        self.count += 1
        pieces = []
        for gradient, values, decay in zip(
            gradients, self.values, self.decays, strict=True
        ):
            if decay:
                gradient = gradient + decay * values
            pieces.append(gradient.reshape(-1))
        g: Any = (
            np.concatenate(pieces)
            if isinstance(self.m, np.ndarray)
            else torch.cat(pieces)
        )
        self.m *= 0.9
        self.m += 0.1 * g
        g *= g
        g *= 0.001
        self.v *= 0.999
        self.v += g
        root = self.v**0.5
        root *= (1 - 0.999**self.count) ** -0.5
        root += 1e-8
        move = self.m / root
        move *= rate / (1 - 0.9**self.count)
        start = 0
        for values, size in zip(self.values, self.sizes, strict=True):
            end = start + size
            values -= move[start:end].reshape(values.shape)
            start = end

    def state_dict(self) -> dict[str, Any]:
        slots = {"m": torch.as_tensor(self.m), "v": torch.as_tensor(self.v)}
        return {"state": {0: {**slots, "count": torch.tensor(self.count)}}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        slots = state["state"][0]
        self.m[:] = slots["m"]
        self.v[:] = slots["v"]
        self.count = int(slots["count"])


def numbers(t: Tensor) -> Any:
    """A tensor in its own memory, as an array of NumPy where that has one: its calls are short."""
    if t.requires_grad:
        t = t.detach()
    return t.numpy() if t.is_cpu and t.dtype in NUMPY else t


def clip_norm(gradients: Sequence[Any], most: float | None) -> float:
    """The norm of all gradients, which are then scaled so that it is at most `most`."""
    norm = math.sqrt(float(sum((g * g).sum() for g in gradients)))
    if most is not None and not norm <= most:
        for g in gradients:
            g *= most / (norm + 1e-6)
    return norm


def _hooked(net: nn.Module) -> bool:
    """True if a network or its parameters have hooks, which a direct call would skip."""
    names = (
        "_forward_hooks",
        "_forward_pre_hooks",
        "_backward_hooks",
        "_backward_pre_hooks",
    )
    names += ("_post_accumulate_grad_hooks",)
    owners = [net, *net.parameters()]
    return any(getattr(owner, name, None) for owner in owners for name in names)
