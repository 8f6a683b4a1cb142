"""The smoothness regulariser in training: alpha R_K, and its gradient by hand where possible."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hdnn.training import small_steps

_torch: Any = torch  # whose functions of many tensors at once have no public names


class Smooth(Protocol):
    """A part of a network that has an R_K; it may also have `h` and `smooth_leaves()`."""

    def smoothness(self) -> Tensor: ...


class Smoothness:
    """alpha R_K of some parts of a network, and its gradient.

    R_K is mostly a sum over the jumps of parameters from layer to layer (`smooth_leaves`). Its
    gradient is then computed from these jumps directly, in fewer passes than autograd needs.
    """

    def __init__(self, parts: Iterable[Smooth], alpha: float) -> None:
        self.parts, self.alpha = list(parts), alpha
        self.others: list[Smooth] = []  # parts whose gradient comes from autograd
        self.leaves: list[nn.Parameter] = []
        self.weights: list[float | Tensor] = []
        for part in self.parts:
            found = _leaves(part)
            self.others += [] if found else [part]
            for p, weight in found:
                if p.requires_grad and len(p) > 1:
                    self.leaves.append(p)
                    self.weights.append(weight)
        self.fixed = all(isinstance(weight, float) for weight in self.weights)
        self.small: list[Any] = []
        if self.fixed and small_steps.usable(self.leaves):
            self.small = [small_steps.by_layer(p) for p in self.leaves]

    def value(self) -> float:
        return sum(float(part.smoothness().detach()) for part in self.parts)

    def add_gradient(self) -> None:
        """Add the gradient of alpha R_K to those of the parameters."""
        if not self.alpha:
            return
        for part in self.others:
            R_K = part.smoothness()
            if R_K.requires_grad:
                (self.alpha * R_K).backward()
        grads = [self._grad(p) for p in self.leaves]
        if self.small:
            smooth = small_steps.kernels()[0]
            for layers, grad, weight in zip(self.small, grads, self.weights, strict=True):
                smooth(layers, grad.numpy().reshape(layers.shape), self.alpha * weight)
        elif grads:
            self._add(grads)

    @torch.no_grad()
    def _add(self, grads: list[Tensor]) -> None:
        weights = [self.alpha * weight for weight in self.weights]
        jumps = _torch._foreach_sub([p[1:] for p in self.leaves], [p[:-1] for p in self.leaves])
        if self.fixed:
            _torch._foreach_mul_(jumps, weights)
        else:
            for jump, weight in zip(jumps, weights, strict=True):
                jump *= weight
        _torch._foreach_add_([grad[1:] for grad in grads], jumps)
        _torch._foreach_sub_([grad[:-1] for grad in grads], jumps)

    def _grad(self, p: nn.Parameter) -> Tensor:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        elif self.small and not p.grad.is_contiguous():
            p.grad = p.grad.contiguous()
        return p.grad


def _leaves(part: Any) -> list[tuple[nn.Parameter, float | Tensor]]:
    """The parameters whose jumps R_K sums up, with their factors, if R_K is such a sum.

    It is not where a weight is not a parameter itself: sparse, or parametrised by PyTorch.
    """
    named = part.smooth_leaves() if hasattr(part, "smooth_leaves") else []
    found = [(part._parameters.get(name), times) for name, times in named]
    if any(p is None for p, _ in found):
        return []
    return [(p, _weight(part.h, times, p)) for p, times in found]


def _weight(h: Any, times: float, p: Tensor) -> float | Tensor:
    """The factor of a parameter's jumps: one number, or one for each jump (N-1, 1, ..)."""
    steps = torch.as_tensor(h, dtype=p.dtype, device=p.device)
    if not steps.ndim:
        return times * float(steps)
    return times * steps[1:].view(-1, *[1] * (p.ndim - 1))
