"""Extreme singular values of dy_N/dy_j where the matrix is too large to be made, as for images.

Golub-Kahan-Lanczos: k steps from a random start make A V = U B, B bidiagonal (k, k), V and U with
orthonormal columns. The largest singular value of B is a lower bound of that of A, the smallest an
upper bound. Derivatives are products with vectors, by automatic differentiation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hdnn.analysis.modules import random_like
from hdnn.analysis.sensitivity import chosen_layers
from hdnn.errors import OptionError, ShapeError, positive_int
from hdnn.networks import HamiltonianUnit

Function = Callable[[Tensor], Tensor]
STEPS = 48
CHANCE = 1e-3  # that `shortfall` is exceeded


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
        return torch.autograd.grad(self.graph, self.y, u, retain_graph=True)[0]

    def forwards(self, v: Tensor) -> Tensor:
        return torch.autograd.grad(
            self.pulled, self.probe, v, retain_graph=True
        )[0]


class Chain:
    """The derivatives of some layers along the trajectory of y, and their product."""

    def __init__(self, functions: Iterable[Function], y: Tensor) -> None:
        self.layers: list[Derivative] = []
        for function in functions:
            M = Derivative(function, y)
            if M.out.shape != y.shape:
                raise ShapeError(
                    f"all states must have the same shape, but {tuple(y.shape)} became "
                    f"{tuple(M.out.shape)}; leave pooling and strides out."
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
        """The product of their transposes with u: a gradient on its way back."""
        for M in reversed(self.layers[first:]):
            u = M.backwards(u)
        return u

    def extremes(self, start: Tensor, first: int, steps: int) -> Ritz:
        """The extreme singular values of dy_N/dy_j for j = first."""
        return bidiagonalise(
            lambda v: self.forwards(v, first),
            lambda u: self.backwards(u, first),
            start,
            steps,
        )


class Ritz(NamedTuple):
    """The extreme singular values of B; `complete` if the start reaches nothing more."""

    smallest: float
    largest: float
    complete: bool


@torch.no_grad()
def bidiagonalise(
    forwards: Function, backwards: Function, start: Tensor, steps: int
) -> Ritz:
    """Lanczos from a start vector, which `forwards` (v -> A v) and `backwards` (A^T u) can take.

    All vectors are kept, and kept orthogonal. Values are NaN where a product is not finite.
    """
    eps = torch.finfo(start.dtype).eps
    V = [start / start.norm()]
    U: list[Tensor] = []
    B = torch.zeros(steps, steps, dtype=torch.float64)
    k = 0
    complete = False
    while k < steps and not complete:
        u = _orthogonal(forwards(V[k]), U)
        B[k, k] = u.norm()
        U.append(u / u.norm().clamp_min(1e-300))
        v = _orthogonal(backwards(U[k]), V)
        beta = v.norm()
        k += 1
        complete = k == start.numel() or bool(beta <= 10 * k * eps * B.max())
        if k < steps and not complete:
            B[k - 1, k] = beta
            V.append(v / beta)
    if not bool(B.isfinite().all()):
        return Ritz(math.nan, math.nan, False)
    values = torch.linalg.svdvals(B[:k, :k])
    return Ritz(float(values[-1]), float(values[0]), complete)


def _orthogonal(x: Tensor, basis: list[Tensor]) -> Tensor:
    """x without its components along the basis; twice, since rounding leaves some."""
    for _ in range(2):
        for b in basis:
            x = x - (b * x).sum() * b
    return x


def shortfall(n: int, steps: int) -> float:
    """The relative distance by which the largest value is missed, with probability 0.999.

    For any A and a random start, by Theorem 4.1 of Kuczynski and Wozniakowski, Estimating the
    largest eigenvalue by the power and Lanczos algorithms with a random start (1992).
    """
    if steps >= n:
        return 0.0
    eps = (math.log(1.648 * math.sqrt(n) / CHANCE) / (2 * steps - 1)) ** 2
    return 1.0 if eps >= 1 else 1 - math.sqrt(1 - eps)


class Extremes(NamedTuple):
    """The extreme singular values of dy_N/dy_j for some layers j and each sample.

    Attributes:
        layers: the j.
        smallest: (layers, B), upper bounds, which can be far too large; one over `largest` where
            the layers are symplectic.
        largest: (layers, B), lower bounds; NaN where a product is not finite.
        missed: the relative distance of the true largest values, with probability 0.999.
    """

    layers: list[int]
    smallest: Tensor
    largest: Tensor
    missed: float


def chain_extremes(
    functions: Sequence[Function],
    y: Tensor,
    *,
    layers: Iterable[int] | None = None,
    steps: int = STEPS,
    symplectic: bool = False,
) -> Extremes:
    """Extreme singular values of dy_N/dy_j, for any layers that keep the shape of a state.

    Args:
        functions: the layers, each from states (1, ...) to states (1, ...).
        y: states (B, ...).
        layers: the j to compute, by default 0 .. N-1.
        steps: of Lanczos.
        symplectic: the layers are symplectic by the canonical J, so that singular values come in
            pairs s, 1/s.

    Returns:
        `Extremes`, with the values for each layer and sample.

    Raises:
        ShapeError: if a layer changes the shape of its states, or if there is no such layer.

    Examples:
        >>> import torch, hdnn
        >>> halves = [torch.nn.Linear(4, 4), lambda y: y / 2]
        >>> values = hdnn.analysis.chain_extremes(halves, torch.randn(3, 4), layers=[1])
        >>> values.largest
        tensor([[0.5000, 0.5000, 0.5000]], ...)
    """
    positive_int("steps", steps)
    chosen = chosen_layers(layers, len(functions) - 1)
    smallest = torch.zeros(len(chosen), len(y), dtype=torch.float64)
    largest = torch.zeros_like(smallest)
    for i, state in enumerate(y.split(1)):
        chain = Chain(functions, state)
        for row, j in enumerate(chosen):
            ritz = chain.extremes(random_like(state), j, steps)
            largest[row, i] = ritz.largest
            smallest[row, i] = ritz.smallest
    if symplectic:
        smallest = 1 / largest
    missed = shortfall(y[0].numel(), steps)
    return Extremes(chosen, smallest, largest, missed)


def unit_extremes(
    unit: HamiltonianUnit,
    y: Tensor,
    *,
    layers: Iterable[int] | None = None,
    steps: int = STEPS,
) -> Extremes:
    """Extreme singular values of dy_N/dy_j in a unit, along the trajectory of images.

    y_N is the state after its layers, before a normalisation that follows them. The arguments are
    those of `chain_extremes`, with images (B, channels, height, width) as y.

    Examples:
        >>> import torch, hdnn
        >>> unit = hdnn.HamiltonianUnit(4, 8)
        >>> values = hdnn.analysis.unit_extremes(unit, torch.randn(1, 4, 6, 6), layers=[0, 4])
        >>> values.layers, bool((values.largest >= 1 - 1e-5).all())
        ([0, 4], True)
    """
    if not isinstance(unit, HamiltonianUnit):
        raise OptionError(
            f"a HamiltonianUnit is needed, but got {type(unit).__name__}; "
            "for other layers use chain_extremes."
        )
    functions = unit_layers(unit)
    symplectic = unit.network == "h2"
    return chain_extremes(
        functions, y, layers=layers, steps=steps, symplectic=symplectic
    )


def unit_layers(unit: HamiltonianUnit) -> list[Function]:
    """The layers of a unit, one function each."""
    return [
        lambda y, j=j: unit.run_layers(y, slice(j, j + 1))
        for j in range(unit.layers)
    ]
