"""The interconnection matrix J: canonical, from X, or any skew-symmetric matrix.

J = -J^T is what makes the ODE Hamiltonian. With J = [[0, -X^T], [X, 0]] (eq:implicit_euler_JKb)
the semi-implicit Euler layers are symplectic with respect to J.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hdnn.errors import InterconnectionError, ShapeError

__all__ = [
    "block_diagonal",
    "canonical",
    "check_skew",
    "from_X",
    "is_skew",
    "skew",
    "times_J",
    "times_X",
]


def canonical(
    n: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> Tensor:
    """J = [[0, -I], [I, 0]] (eq:J_simulations), for an even n."""
    if not isinstance(n, int) or n < 2 or n % 2:
        raise ShapeError(
            f"the canonical J needs an even number of features, but n = {n!r}; "
            "augment the features by a zero or give a skew-symmetric J of your own."
        )
    return from_X(torch.eye(n // 2, dtype=dtype, device=device))


def from_X(X: Tensor) -> Tensor:
    """J = [[0, -X^T], [X, 0]] for X of shape (..., m, m)."""
    return off_diagonal(-X.mT, X)


def off_diagonal(A: Tensor, B: Tensor) -> Tensor:
    """[[0, A], [B, 0]] for square A and B of one size."""
    zero = torch.zeros_like(A)
    return torch.cat([torch.cat([zero, A], -1), torch.cat([B, zero], -1)], -2)


def times_canonical(g: Tensor) -> Tensor:
    """J g for rows g (..., n): the canonical J swaps the halves and changes one sign."""
    g_p, g_q = g.chunk(2, -1)
    return torch.cat([-g_q, g_p], -1)


def block_diagonal(
    sizes: list[int] | tuple[int, ...], *, dtype: torch.dtype | None = None
) -> Tensor:
    """A canonical J inside every node of the given even sizes, and nothing between nodes."""
    return torch.block_diag(*(canonical(size, dtype=dtype) for size in sizes))


def upper_indices(n: int, *, device: torch.device | str | None = None) -> Tensor:
    """The positions of the entries i < j in an n x n matrix flattened row by row."""
    i, j = torch.triu_indices(n, n, 1, device=device)
    return i * n + j


def skew(upper: Tensor, n: int, index: Tensor | None = None) -> Tensor:
    """The skew-symmetric (..., n, n) whose entries above the diagonal are `upper` (..., k).

    `index` says where in the flattened matrix the k entries lie, default all of i < j.
    """
    index = upper_indices(n, device=upper.device) if index is None else index
    flat = upper.new_zeros(*upper.shape[:-1], n * n)
    A = flat.scatter(-1, index.expand(upper.shape), upper).unflatten(-1, (n, n))
    return A - A.mT


def is_skew(J: Tensor, *, tolerance: float | None = None) -> bool:
    """Whether J = -J^T, up to the rounding of its dtype; of a stack, whether every matrix is."""
    if tolerance is None:
        tolerance = 8 * torch.finfo(J.dtype).eps if J.is_floating_point() else 0.0
    defect, size = ((J + J.mT).abs().amax((-2, -1)), J.abs().amax((-2, -1)))
    return bool((defect <= tolerance * size).all())


def check_skew(J: Tensor) -> None:
    """Raise unless J is finite and skew-symmetric."""
    check_finite("J", J)
    if not is_skew(J):
        defect = float((J + J.mT).abs().max())
        raise InterconnectionError(
            f"J must be skew-symmetric (J = -J^T), but max |J + J^T| = {defect:.3g}; "
            "take J - J^T, or hdnn.interconnection.canonical(n)."
        )


def check_finite(name: str, value: Tensor) -> None:
    """Raise if a constant has a NaN or an infinity in it."""
    if not bool(torch.isfinite(value).all()):
        raise InterconnectionError(
            f"{name} has an entry that is NaN or infinite; all must be finite."
        )


def times_J(g: Tensor, J: Tensor | None) -> Tensor:
    """J g for rows g (..., n), by default with the canonical J."""
    return times_canonical(g) if J is None else g @ J.mT


def times_X(g: Tensor, X: Tensor | None, *, adjoint: bool = False) -> Tensor:
    """X g, or X^T g, for rows g (..., m)."""
    if X is None:
        return g
    return g @ (X if adjoint else X.mT)
