"""Derivatives of a unit's layers at a state, as products with vectors.

M = dy_{j+1}/dy_j of one layer, here as a Jacobian: `forwards` is M v, `backwards` M^T u, `undo`
M^-1 v and `undo_backwards` M^-T u. All are in closed form, except the inverse of an H1 layer,
which solves linear equations. Vectors have the shape of the state (1, ...), or (k, ...).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from hdnn.errors import ConvergenceError
from hdnn.networks.shears import Kind, ShearWeights, shear, turned

Map = Callable[[Tensor], Tensor]
ITERATIONS = 2000  # of a solve, at most
TOLERANCE = 1e-4  # of its residual; values come out to about 1e-5


class Derivative(Protocol):
    """The derivative of one layer, which can be undone."""

    symplectic: bool
    tolerance: float  # of undoing, relatively, beside rounding

    def forwards(self, v: Tensor, /) -> Tensor: ...

    def backwards(self, u: Tensor, /) -> Tensor: ...

    def undo(self, v: Tensor, /) -> Tensor: ...

    def undo_backwards(self, u: Tensor, /) -> Tensor: ...


class Unknown:
    """The derivative of a layer whose state is not finite: all products are NaN."""

    symplectic = False
    tolerance = 0.0

    def forwards(self, v: Tensor) -> Tensor:
        return v * torch.nan

    backwards = undo = undo_backwards = forwards


class ShearDerivative:
    """v -> B^T D A v and its transpose, with D the slopes of sigma at A s + a."""

    def __init__(self, s: Tensor, part: ShearWeights, kind: Kind) -> None:
        x = kind.apply(part.A, s, part.a)
        self.A, self.B, self.kind = part.A, part.B, kind
        self.slope = kind.sigma.slope(x)

    def forwards(self, v: Tensor) -> Tensor:
        return self.b_T(self.slope * self.a(v))

    def backwards(self, u: Tensor) -> Tensor:
        return self.a_T(self.slope * self.b(u))

    def a(self, v: Tensor) -> Tensor:
        return self.kind.apply(self.A, v)

    def a_T(self, z: Tensor) -> Tensor:
        return self.kind.adjoint(self.A, z)

    def b(self, u: Tensor) -> Tensor:
        return self.kind.apply(self.B, -turned(u) if self.kind.swap else u)

    def b_T(self, z: Tensor) -> Tensor:
        f = self.kind.adjoint(self.B, z)
        return turned(f) if self.kind.swap else f


class H1Derivative:
    """M = I + B^T D A. Its inverse by Woodbury, with D = R S R, R = |D|^1/2 and S its signs:

    M^-1 = I - B^T R (S + R A B^T R)^-1 R A. A and B are multiples of K and K J^T, so for D >= 0 the
    matrix in the middle is I plus a skew-symmetric one: such equations are quickly solved.
    """

    symplectic = False
    tolerance = TOLERANCE

    def __init__(self, s: Tensor, part: ShearWeights, kind: Kind) -> None:
        self.shear = ShearDerivative(s, part, kind)
        self.root, self.sign = self.shear.slope.abs().sqrt(), self.shear.slope.sign()
        self.sign[self.sign == 0] = 1

    def forwards(self, v: Tensor) -> Tensor:
        return v + self.shear.forwards(v)

    def backwards(self, u: Tensor) -> Tensor:
        return u + self.shear.backwards(u)

    def undo(self, v: Tensor) -> Tensor:
        z = _solved(self._middle, self._middle_T, self.root * self.shear.a(v))
        return v - self.shear.b_T(self.root * z)

    def undo_backwards(self, u: Tensor) -> Tensor:
        z = _solved(self._middle_T, self._middle, self.root * self.shear.b(u))
        return u - self.shear.a_T(self.root * z)

    def _middle(self, z: Tensor) -> Tensor:
        return self.sign * z + self.root * self.shear.a(self.shear.b_T(self.root * z))

    def _middle_T(self, z: Tensor) -> Tensor:
        return self.sign * z + self.root * self.shear.b(self.shear.a_T(self.root * z))


class H2Derivative:
    """p + f(q), then q + f(p): undone by subtracting in the other order."""

    symplectic = True
    tolerance = 0.0

    def __init__(self, s: Tensor, parts: tuple[ShearWeights, ShearWeights], kind: Kind) -> None:
        p, q = s.chunk(2, 1)
        self.of_q = ShearDerivative(q, parts[0], kind)
        self.of_p = ShearDerivative(p + shear(q, parts[0], kind)[0], parts[1], kind)

    def forwards(self, v: Tensor) -> Tensor:
        p, q = v.chunk(2, 1)
        p = p + self.of_q.forwards(q)
        return torch.cat([p, q + self.of_p.forwards(p)], 1)

    def backwards(self, u: Tensor) -> Tensor:
        p, q = u.chunk(2, 1)
        p = p + self.of_p.backwards(q)
        return torch.cat([p, q + self.of_q.backwards(p)], 1)

    def undo(self, v: Tensor) -> Tensor:
        p, q = v.chunk(2, 1)
        q = q - self.of_p.forwards(p)
        return torch.cat([p - self.of_q.forwards(q), q], 1)

    def undo_backwards(self, u: Tensor) -> Tensor:
        p, q = u.chunk(2, 1)
        q = q - self.of_q.backwards(p)
        return torch.cat([p - self.of_p.backwards(q), q], 1)


def _solved(N: Map, N_T: Map, c: Tensor) -> Tensor:
    """N z = c by conjugate gradients on the normal equations (CGNR)."""
    z, r = torch.zeros_like(c), c
    s = p = N_T(r)
    gamma, enough = _square(s), TOLERANCE * float(c.norm())
    for _ in range(ITERATIONS):
        if float(r.norm()) <= enough:
            return z
        q = N(p)
        alpha = gamma / _square(q)
        z, r = z + alpha * p, r - alpha * q
        s, before = N_T(r), gamma
        gamma = _square(s)
        p = s + (gamma / before) * p
    raise ConvergenceError(
        f"an H1 layer could not be inverted in {ITERATIONS} iterations; it is close to singular."
    )


def _square(x: Tensor) -> float:
    return float(x.square().sum())
