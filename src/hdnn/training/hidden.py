"""The hidden layers of a network in a training: states, gradients, smoothness, and Adam.

A small network runs through a minibatch in some twenty microseconds, so that each call of PyTorch
around it counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hdnn.engine.run import Call, Plan, method
from hdnn.engine.settings import current
from hdnn.networks import Network

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_post_accumulate_grad_hooks",
)
NUMPY = (torch.float32, torch.float64)


class HiddenLayers:
    """The last states of a network, and the gradients of its parameters.

    Where one kernel runs all layers it is called directly, and autograd is left with what computes
    its weights from the parameters: for a small network the rest takes longer than the kernel.
    """

    def __init__(self, net: Any) -> None:
        self.net = net
        owners = [net, *net.parameters()]
        hooked = False
        for owner in owners:
            for name in HOOKS:
                hooked |= bool(getattr(owner, name, None))
        plain = getattr(net.forward, "__func__", None) is Network.forward
        constant = isinstance(getattr(net, "h", None), float)
        simple = plain and constant and not hooked
        self.direct = simple and bool(net.scheme.moves)
        self.plans: dict[int, Plan] = {}  # by number of samples
        self.last: tuple[Any, ...] = ()  # the last forward pass
        self.has_smoothness = hasattr(net, "smoothness") and hasattr(net, "h")
        # Stacks of weights that are parameters have a plain gradient of R_K: by layers, in memory.
        self.stacks: list[tuple[nn.Parameter, Any]] = []
        if constant and type(net).smoothness is Network.smoothness:
            self.stacks = self._plain_stacks()

    def _plain_stacks(self) -> list[tuple[nn.Parameter, Any]]:
        """The stacks of weights in memory, if all of them are parameters."""
        stacks: list[Any] = self.net._smooth()
        if not all(isinstance(stack, nn.Parameter) for stack in stacks):
            return []
        return [(stack, numbers(stack)) for stack in stacks]

    def forward(self, y_0: Tensor) -> Tensor:
        """y_N (B, n) of a minibatch."""
        plan = self.plans.get(len(y_0))
        if plan is None:
            y = self.net(y_0)
            self.last = (y,)
            return y.detach()
        tensors: list[Any] = [plan.h]
        for force in self.net.forces():
            tensors += [t if t is None else t.contiguous() for t in force]
        with torch.no_grad():
            y, saved = plan.kernel.forward(y_0, tuple(tensors))
        self.last = (plan.kernel, y_0, saved, tensors)
        return y

    def prepare(self, y_0: Tensor) -> None:
        """Plan how one kernel runs minibatches of this size, where one does."""
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
        """Add to the gradients of all parameters, from that of y_N."""
        if len(self.last) == 1:
            self.last[0].backward(g)
            return
        kernel, y_0, saved, tensors = self.last
        with torch.no_grad():
            gradients = kernel.backward(
                y_0, saved, g.contiguous(), tuple(tensors)
            )
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

    def add_smoothness(self, alpha: float) -> None:
        """Add the gradient of alpha R_K, the differences between neighbouring layers."""
        if not self.has_smoothness or alpha == 0:
            return
        if not self.stacks:
            penalty = alpha * self.net.smoothness()
            if penalty.requires_grad:
                penalty.backward()
        for p, values in self.stacks:
            if p.grad is not None:
                jumps = values[1:] - values[:-1]
                jumps *= alpha * self.net.h
                gradient = numbers(p.grad)
                gradient[1:] += jumps
                gradient[:-1] -= jumps

    def smoothness(self) -> float:
        """R_K itself."""
        if not self.has_smoothness:
            return 0.0
        if not self.stacks:
            return float(self.net.smoothness().detach())
        total = 0.0
        for _, values in self.stacks:
            jumps = (values[1:] - values[:-1]).reshape(-1)
            total += float(jumps @ jumps)
        return 0.5 * self.net.h * total


class Adam:
    """Adam (Kingma and Ba, 2015) on all parameters as one vector.

    PyTorch's own takes five times as long for the few weights of a small network. A parameter is
    added to its gradient, times its decay, after the norm of all gradients was limited.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], decays: Sequence[float]
    ) -> None:
        self.parameters = parameters
        self.decays = decays
        self.values = [numbers(p) for p in parameters]
        self.places: list[slice] = []  # of the parameters in the vector
        end = 0
        for p in parameters:
            start = end
            end += p.numel()
            self.places.append(slice(start, end))
        zeros = torch.cat([torch.zeros_like(p).flatten() for p in parameters])
        self.m = numbers(zeros)
        self.v = numbers(zeros.clone())
        self.count = 0

    def step(self, rate: float, clip: float | None = None) -> float:
        """Take a step; returns the norm of the gradient, before it is limited to `clip`."""
        pieces = []
        for p in self.parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            pieces.append(p.grad.reshape(-1))
        g = numbers(torch.cat(pieces))
        norm = math.sqrt(float(g @ g))
        if clip is not None and not norm <= clip:
            g *= clip / (norm + 1e-6)
        for values, place, decay in zip(
            self.values, self.places, self.decays, strict=True
        ):
            if decay:
                g[place] += decay * values.reshape(-1)
        self.count += 1
        self.m *= 0.9
        self.m += 0.1 * g
        g *= g
        g *= 0.001
        self.v *= 0.999
        self.v += g
        root = self.v**0.5
        second = 1 - 0.999**self.count
        root *= second**-0.5
        root += 1e-8
        move = self.m / root
        first = 1 - 0.9**self.count
        move *= rate / first
        for values, place in zip(self.values, self.places, strict=True):
            change = move[place]
            values -= change.reshape(values.shape)
        return norm

    def state_dict(self) -> dict[str, Any]:
        slots = {
            "m": torch.as_tensor(self.m),
            "v": torch.as_tensor(self.v),
            "count": torch.tensor(self.count),
        }
        return {"state": {0: slots}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        slots = state["state"][0]
        self.m[:] = slots["m"]
        self.v[:] = slots["v"]
        self.count = int(slots["count"])


def numbers(t: Tensor) -> Any:
    """A tensor in its own memory, as an array of NumPy where that has one: its calls are short."""
    t = t.detach()
    return t.numpy() if t.is_cpu and t.dtype in NUMPY else t
