"""Golub-Kahan-Lanczos: extreme singular values of a matrix A that is only known by its products.

k steps from a random start make A V = U B and A^T U = V B^T + r, B bidiagonal (k, k), V and U with
orthonormal columns. The singular values of B lie between the extreme ones of A: the largest is a
lower bound, the smallest an upper bound, each up to a few eps times the largest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]
SURE = 1e-3  # the chance that `shortfall` is exceeded


class Singular(NamedTuple):
    """A has a singular value no further than `residual` from `value`."""

    value: float
    residual: float


UNKNOWN = Singular(math.nan, math.inf)


def bidiagonalise(
    forwards: Product,
    backwards: Product,
    n: int,
    steps: int,
    state: Tensor,
    seed: int = 0,
    rows: int | None = None,
) -> tuple[Singular, Singular, int]:
    """The smallest and the largest singular value of B, and its k <= steps.

    `forwards` is v -> A v, `backwards` u -> A^T u, on vectors (n,) of the dtype and device of
    `state`. A is square, or has `rows` >= n. All vectors are kept, and kept orthogonal. Where they
    span all that A can reach from the start, up to rounding, it goes on from a new direction: what
    the start does not reach may hold the smallest value. Values are NaN where a product is not
    finite.
    """
    k = min(steps, n)
    V, U = (
        torch.zeros(k, m, dtype=state.dtype, device=state.device) for m in (n, max(n, rows or n))
    )
    matrix = torch.zeros(k, k, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    v, beta, eps = _direction(V[:0], generator), 0.0, torch.finfo(state.dtype).eps
    for i in range(k):
        V[i] = v
        u = _orthogonal(forwards(v), U[:i])
        alpha = float(u.norm())
        if not math.isfinite(alpha):
            return UNKNOWN, UNKNOWN, i + 1
        matrix[i, i] = alpha
        size = float(matrix.max())
        U[i] = u / alpha if alpha > 10 * eps * size else _direction(U[:i], generator)
        v = _orthogonal(backwards(U[i]), V[: i + 1])
        beta = float(v.norm())
        if i + 1 == k:
            break
        if beta > 10 * eps * size:
            matrix[i, i + 1] = beta
            v = v / beta
        else:
            v = _direction(V[: i + 1], generator)
    if not bool(matrix.isfinite().all()):
        return UNKNOWN, UNKNOWN, k
    P, values, _ = torch.linalg.svd(matrix)
    last = P[-1].to(state.dtype)
    low, high = (Singular(float(values[i]), beta * abs(float(last[i]))) for i in (-1, 0))
    return low, high, k


def _direction(basis: Tensor, generator: torch.Generator) -> Tensor:
    """A random unit vector orthogonal to the rows of `basis`."""
    draw = torch.randn(basis.shape[1], dtype=torch.float64, generator=generator)
    x = _orthogonal((draw / draw.norm()).to(basis), basis)
    return x / x.norm()


def _orthogonal(x: Tensor, basis: Tensor) -> Tensor:
    """x without its parts along the rows of `basis`; twice, since rounding leaves some."""
    for _ in range(2 if len(basis) else 0):
        x = x - (basis @ x) @ basis
    return x


def shortfall(n: int, steps: int) -> float:
    """How far the largest singular value can be missed, relatively, with probability 0.999.

    For any A and a start that is random, by Theorem 4.1 of Kuczynski and Wozniakowski, Estimating
    the largest eigenvalue by the power and Lanczos algorithms with a random start (1992).
    """
    if steps >= n:
        return 0.0
    eps = (math.log(1.648 * math.sqrt(n) / SURE) / (2 * steps - 1)) ** 2
    return 1.0 if eps >= 1 else 1 - math.sqrt(1 - eps)
