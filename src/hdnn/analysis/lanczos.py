"""Golub-Kahan-Lanczos: extreme singular values of a matrix A that is only known by its products.

k steps from a random start make A V = U B and A^T U = V B^T + r, B bidiagonal (k, k), V and U with
orthonormal columns. The singular values of B lie between the extreme ones of A: the largest is a
lower bound, the smallest an upper bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]
SURE = 1e-3  # the chance that `shortfall` is exceeded


class Triple(NamedTuple):
    """A v = value u, and A^T u = value v but for `residual`.

    So A has a singular value no further than `residual` from `value`.
    """

    value: float
    u: Tensor
    v: Tensor
    residual: float


def bidiagonalise(
    forwards: Product, backwards: Product, n: int, steps: int, like: Tensor, seed: int = 0
) -> tuple[Triple, Triple, int]:
    """The triples of the smallest and of the largest singular value of B, and its k <= steps.

    `forwards` is v -> A v, `backwards` u -> A^T u, on vectors (n,). All vectors are kept, and kept
    orthogonal. It ends early where the vectors span all that A can reach from the start.
    """
    k = min(steps, n)
    V, U = (torch.zeros(k, n, dtype=like.dtype, device=like.device) for _ in range(2))
    matrix = torch.zeros(k, k, dtype=torch.float64)
    draw = torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    v, beta, done = draw.to(like) / draw.norm().to(like), 0.0, 0
    eps = torch.finfo(like.dtype).eps
    while done < k:
        V[done] = v
        u = _orthogonal(forwards(v), U[:done])
        alpha = float(u.norm())
        matrix[done, done] = alpha
        size = float(matrix.max())
        if alpha > 10 * eps * size:
            U[done] = u / alpha
        done += 1
        v = _orthogonal(backwards(U[done - 1]), V[:done])
        beta = float(v.norm())
        if done == k or alpha <= 10 * eps * size or beta <= 10 * eps * size:
            break
        matrix[done - 1, done] = beta
        v = v / beta
    P, values, Q = torch.linalg.svd(matrix[:done, :done])
    P, Q = P.mT.to(like), Q.to(like)
    low, high = (
        Triple(
            float(values[i]),
            P[i] @ U[:done],
            Q[i] @ V[:done],
            beta * abs(float(P[i, -1])),
        )
        for i in (-1, 0)
    )
    return low, high, done


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
