"""The norm of dy_N/dy_j if the matrix is too large to build, as for images.

Golub-Kahan-Lanczos: k steps from a random start make A V = U B, B bidiagonal (k, k), V and U with
orthonormal columns. The largest singular value of B is a lower bound of the largest singular value
of A. Derivatives are products with vectors, by automatic differentiation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from hdnn.errors import ShapeError

Function = Callable[[Tensor], Tensor]


class Derivative:
    """The derivative M of a function at states y, as products with vectors."""

    def __init__(self, function: Function, y: Tensor) -> None:
        with torch.enable_grad():
            self.y = y.detach().clone().requires_grad_()
            self.graph = function(self.y)
            self.probe = torch.zeros_like(self.graph, requires_grad=True)
            # u -> M^T u is linear: its own derivative, backwards, is v -> M v.
            (self.pulled,) = torch.autograd.grad(
                self.graph, self.y, self.probe, create_graph=True
            )
        self.out = self.graph.detach()

    def backwards(self, u: Tensor) -> Tensor:
        (product,) = torch.autograd.grad(
            self.graph, self.y, u, retain_graph=True
        )
        return product

    def forwards(self, v: Tensor) -> Tensor:
        (product,) = torch.autograd.grad(
            self.pulled, self.probe, v, retain_graph=True
        )
        return product


class Chain:
    """The derivatives of some layers along the trajectory of y, and their product."""

    def __init__(self, functions: Iterable[Function], y: Tensor) -> None:
        self.layers: list[Derivative] = []
        for function in functions:
            M = Derivative(function, y)
            if M.out.shape != y.shape:
                before = tuple(y.shape)
                after = tuple(M.out.shape)
                raise ShapeError(
                    f"all states must have the same shape, but {before} became {after}; remove "
                    "pooling and strides."
                )
            self.layers.append(M)
            y = M.out
        self.end = y

    def forwards(self, v: Tensor, first: int = 0) -> Tensor:
        """The product of the derivatives from layer `first` on with v."""
        for M in self.layers[first:]:
            v = M.forwards(v)
        return v

    def backwards(self, u: Tensor, first: int = 0) -> Tensor:
        """The product of the transposed derivatives with u: a gradient on its way back."""
        for M in reversed(self.layers[first:]):
            u = M.backwards(u)
        return u

    @torch.no_grad()
    def norm(self, start: Tensor, first: int, steps: int) -> tuple[float, bool]:
        """The norm of dy_N/dy_j for j = first by Lanczos's method, and True if the norm is exact.

        The norm is exact if the start vector reaches no further direction; otherwise it is a lower
        bound. All vectors are stored and made orthogonal. The norm is NaN if a product is not
        finite.
        """
        eps = torch.finfo(start.dtype).eps
        V = [start / start.norm()]
        U: list[Tensor] = []
        B = torch.zeros(steps, steps, dtype=torch.float64)
        complete = False
        for k in range(steps):
            u = self.forwards(V[k], first)
            u = _orthogonal(u, U)
            alpha = u.norm()
            B[k, k] = alpha
            U.append(u / alpha.clamp_min(1e-300))
            v = self.backwards(U[k], first)
            v = _orthogonal(v, V)
            beta = v.norm()
            count = k + 1
            rounding = 10 * count * eps * B.max()
            complete = count == start.numel() or bool(beta <= rounding)
            if complete or count == steps:
                break
            B[k, count] = beta
            V.append(v / beta)
        if not bool(B.isfinite().all()):
            return math.nan, False
        return float(torch.linalg.matrix_norm(B, 2)), complete


def _orthogonal(x: Tensor, basis: list[Tensor]) -> Tensor:
    """x without its components along the basis; twice, since rounding leaves some."""
    for _ in range(2):
        for b in basis:
            x = x - (b * x).sum() * b
    return x
