"""Derivatives of blocks of any modules at a state, as products with vectors.

As in `hdnn.networks.unit_derivatives`, but by automatic differentiation of what a block computes:
that its layers are shears is not taken for granted here. Undoing is the derivative of `inverse`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


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
