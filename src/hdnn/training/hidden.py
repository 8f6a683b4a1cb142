"""The hidden layers of a network in training: states, gradients, smoothness, and Adam.

A small network runs through a minibatch in some fifty microseconds, so that each call of PyTorch
around it counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hdnn import functional
from hdnn.engine.run import Call, Plan, method
from hdnn.engine.settings import current
from hdnn.networks import HamiltonianNet, Network
from hdnn.networks.network import HOOKS
from hdnn.schemes import Force

NUMPY = (torch.float32, torch.float64)


class HiddenLayers:
    """The last states of a network, and the gradients of its parameters.

    If one kernel runs all layers, it is called directly, and autograd only computes the kernel's
    weights from the parameters: for a small network, all the rest takes longer than the kernel.
    """

    def __init__(self, net: Any) -> None:
        self.net = net
        plain = getattr(net.forward, "__func__", None) is Network.forward
        simple = plain and has_constant_step(net) and not is_hooked(net)
        self.direct = simple and bool(net.scheme.moves)
        # V of H1 is K J^T: its gradient goes to K without autograd.
        own = type(net).forces is HamiltonianNet.forces and not net.linked
        self.turned = own and not net.scheme.halves
        self.plans: dict[int, Plan] = {}  # by number of samples
        self.last: tuple[Any, ...] = ()  # the last forward pass

    def forward(self, y_0: Tensor) -> Tensor:
        """y_N (B, n) of a minibatch."""
        plan = self.plans.get(len(y_0))
        if plan is None:
            y = self.net(y_0)
            self.last = (y,)
            return y.detach()
        tensors: list[Any] = [plan.h]
        for force in self._forces():
            tensors += [t if t is None else t.contiguous() for t in force]
        with torch.no_grad():
            y, saved = plan.kernel.forward(y_0, tuple(tensors))
        self.last = (plan.kernel, y_0, saved, tensors)
        return y

    def _forces(self) -> Sequence[Force]:
        if not self.turned:
            return self.net.forces()
        K, b = self.net.stacks()
        force = functional.turned(K.detach(), b)[0]
        return (force._replace(K=K),)

    def prepare(self, y_0: Tensor) -> None:
        """Plan how one kernel runs minibatches of this size, if one kernel can."""
        if not self.direct:
            return
        net = self.net
        forces = net.forces()
        engine = None if net.engine == "auto" else net.engine
        backprop = None if net.backprop == "auto" else net.backprop
        call = Call(net.scheme, y_0, forces, net.h, net.sigma, False)
        plan = Plan(current(engine, backprop), call)
        if plan.stack is not None and not plan.convert:
            plan.kernel = method(plan.stack, *plan.how)
            self.plans[len(y_0)] = plan

    def backward(self, g: Tensor) -> None:
        """Add to the gradients of all parameters, given the gradient of y_N."""
        if len(self.last) == 1:
            self.last[0].backward(g)
            return
        kernel, y_0, saved, tensors = self.last
        with torch.no_grad():
            gradients = kernel.backward(
                y_0, saved, g.contiguous(), tuple(tensors)
            )
            if self.turned and gradients[4] is not None:
                _, _, g_K, g_b, g_V = gradients
                g_K -= functional.turned(g_V, g_b)[0].output()
        computed = []
        theirs = []
        for t, gradient in zip(tensors, gradients[1:], strict=True):
            if gradient is None or not t.requires_grad:
                continue
            if t.is_leaf and t.grad is None:
                t.grad = gradient
            else:
                computed.append(t)
                theirs.append(gradient)
        if computed:
            torch.autograd.backward(computed, theirs)


class Descent:
    """Steps on the parameters, down the gradient of the loss plus alpha R_K.

    Adam (Kingma and Ba, 2015) on all parameters as one vector: PyTorch's Adam takes several times
    as long for the few weights of a small network. The norm of the gradient is limited first; then
    each parameter times its decay is added to its gradient.
    """

    def __init__(
        self, net: Any, parameters: Sequence[Any], decays: Sequence[float]
    ) -> None:
        self.net = net
        self.parameters = parameters
        flat = torch.cat([torch.zeros_like(p).flatten() for p in parameters])
        self.flat = flat  # the gradient, then the step
        self.g = numbers(flat)
        # 10 times the mean of g, and 1000 times that of g^2
        self.moments = numbers(torch.stack([flat, flat]))
        self.count = 0
        # The values of a parameter, its part of g, and its decay.
        self.entries: dict[Any, tuple[Any, Any, float]] = {}
        pieces = flat.split([p.numel() for p in parameters])
        for p, piece, decay in zip(parameters, pieces, decays, strict=True):
            g = numbers(piece.view(p.shape))
            self.entries[p] = (numbers(p), g, decay)
        # Stacks of weights that are parameters have a plain gradient of R_K.
        own = type(net).smoothness is not Network.smoothness
        self.plain = has_constant_step(net) and not own
        stacks = net._smooth() if self.plain else []
        self.plain &= all(isinstance(stack, nn.Parameter) for stack in stacks)
        # A stack can occur twice, or not be trained.
        self.stacks = [self.entries[p] for p in stacks if p in self.entries]

    def step(
        self, rate: float, alpha: float = 0.0, clip: float | None = None
    ) -> float:
        """Take a step; returns the norm of the gradient, before it is limited to `clip`."""
        if alpha and not self.plain:
            self._add_penalty(alpha)
        for p in self.parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        gradients = [p.grad.reshape(-1) for p in self.parameters]
        torch.cat(gradients, out=self.flat)
        if alpha and self.plain:
            self._add_jumps(alpha * self.net.h)
        g = self.g
        norm = math.sqrt(float(g @ g))
        if clip is not None and not norm <= clip:
            g *= clip / (norm + 1e-6)
        for values, piece, decay in self.entries.values():
            if decay:
                piece += decay * values
        self.count += 1
        m, v = self.moments
        m *= 0.9
        m += g
        g *= g
        v *= 0.999
        v += g
        second = math.sqrt(1000 * (1 - 0.999**self.count))
        root = v**0.5
        root += 1e-8 * second
        g[:] = m / root
        g *= 0.1 * rate * second / (1 - 0.9**self.count)
        for values, piece, _ in self.entries.values():
            values -= piece
        return norm

    def _add_penalty(self, alpha: float) -> None:
        """Add the gradient of alpha R_K by autograd."""
        if hasattr(self.net, "h"):
            penalty = alpha * self.net.smoothness()
            if penalty.requires_grad:
                penalty.backward()

    def _add_jumps(self, factor: float) -> None:
        """Add the gradient of factor/2 times the squared differences between layers."""
        for values, gradient, _ in self.stacks:
            jumps = values[1:] - values[:-1]
            jumps *= factor
            gradient[1:] += jumps
            gradient[:-1] -= jumps

    @torch.no_grad()
    def smoothness(self) -> float:
        """R_K itself."""
        return float(self.net.smoothness()) if hasattr(self.net, "h") else 0.0

    def state_dict(self) -> dict[str, Any]:
        moments = torch.as_tensor(self.moments)
        return {"state": {0: {"moments": moments, "count": self.count}}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        slots = state["state"][0]
        self.moments[:] = slots["moments"]
        self.count = int(slots["count"])


def has_constant_step(net: Any) -> bool:
    """True if a network has one step for all layers, which is not learned."""
    return isinstance(getattr(net, "h", None), float)


def is_hooked(net: nn.Module) -> bool:
    """True if a network or a parameter has a hook."""
    for owner in (net, *net.parameters()):
        for name in (*HOOKS, "_post_accumulate_grad_hooks"):
            if getattr(owner, name, None):
                return True
    return False


def numbers(t: Tensor) -> Any:
    """A tensor as a NumPy array that shares its memory, if possible: calls of NumPy are faster."""
    t = t.detach()
    return t.numpy() if t.is_cpu and t.dtype in NUMPY else t
