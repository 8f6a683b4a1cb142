"""Derivatives of units and blocks at a state. Until analysis is rewritten."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hdnn.errors import ConvergenceError
from hdnn.networks import HamiltonianUnit

TOLERANCE = 1e-4
Derivative = Any


class Products:
    """The derivative of a function at y: M^T u, and M v as the derivative of u -> M^T u."""

    def __init__(self, function: Callable[[Tensor], Tensor], y: Tensor) -> None:
        # Only this way of computing attention can be differentiated twice.
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            self.y = y.detach().clone().requires_grad_()
            self.found = function(self.y)
        self.out = self.found.detach()

    def backwards(self, u: Tensor) -> Tensor:
        return _product(self.found, self.y, u.reshape(self.out.shape))

    def forwards(self, v: Tensor) -> Tensor:
        return _product(*self._adjoint, v.reshape(self.y.shape))

    @cached_property
    def _adjoint(self) -> tuple[Tensor, Tensor]:
        """M^T u as a function of u: it is linear, so that any u will do."""
        u = torch.zeros_like(self.out).requires_grad_()
        with torch.enable_grad():
            return _product(self.found, self.y, u, create_graph=True), u


class BlockDerivative:
    """The derivative of one block, with further arguments, at a state y of any shape."""

    tolerance = 0.0

    def __init__(self, block: Any, y: Tensor, args: Any = (), options: Any = None) -> None:
        options = options or {}
        self.symplectic: bool = block.symplectic
        self.there = Products(lambda y: block(y, *args, **options), y)
        self.inverse = lambda y: block.inverse(y, *args, **options)
        self.forwards, self.backwards = self.there.forwards, self.there.backwards

    @property
    def out(self) -> Tensor:
        """The next state."""
        return self.there.out

    @cached_property
    def _back(self) -> Products:
        return Products(self.inverse, self.out)

    def undo(self, v: Tensor) -> Tensor:
        return self._back.forwards(v)

    def undo_backwards(self, u: Tensor) -> Tensor:
        return self._back.backwards(u)


def _product(found: Tensor, y: Tensor, direction: Tensor, *, create_graph: bool = False) -> Tensor:
    """The derivative of `found` by y, backwards along a direction; 0 where it does not depend."""
    if not found.requires_grad:
        return torch.zeros_like(y)
    how: dict[str, Any] = {"retain_graph": True, "create_graph": create_graph}
    (g,) = torch.autograd.grad(found, y, direction, allow_unused=True, **how)
    return torch.zeros_like(y) if g is None else g


class Unknown:
    """The derivative of a layer whose state is not finite: all products are NaN."""

    symplectic = False
    tolerance = 0.0

    def forwards(self, v: Tensor) -> Tensor:
        return v * torch.nan

    backwards = undo = undo_backwards = forwards


class _Layer:
    def __init__(self, unit: HamiltonianUnit, j: int) -> None:
        self.unit, self.j, self.symplectic = unit, j, unit.network == "h2"

    def __call__(self, y: Tensor) -> Tensor:
        return self.unit.layer(y, self.j)

    def inverse(self, y: Tensor) -> Tensor:
        raise ConvergenceError("a layer alone has no inverse here.")


def layer_derivatives(net: Any, y: Tensor, *args: Any, **options: Any) -> list[Any]:
    """The derivatives of all layers of a unit, or blocks of a stack, along the trajectory of y."""
    layers = [net]
    if isinstance(net, HamiltonianUnit):
        if not bool(net.trajectory(y).isfinite().all()):
            return [Unknown()] * net.layers
        layers = [_Layer(net, j) for j in range(net.layers)]
    elif hasattr(net, "blocks"):
        layers = list(net)
    found: list[Any] = []
    for layer in layers:
        found.append(BlockDerivative(layer, found[-1].out if found else y, args, options))
    return found
