"""The interconnection matrix J: canonical, from X, or any skew-symmetric matrix.

`J = -J^T` is what makes the ODE Hamiltonian. With `J = [[0, -X^T], [X, 0]]`
(eq:implicit_euler_JKb) the semi-implicit Euler layers are symplectic with respect to J.
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
    """The canonical `J = [[0, -I], [I, 0]]` (eq:J_simulations), for an even n.

    Args:
        n: how many features a state has.
        dtype: of the result; by default PyTorch's.
        device: of the result; by default PyTorch's.

    Returns:
        J as `(n, n)`.

    Raises:
        ShapeError: if n is not an even number >= 2.

    Examples:
        >>> from hdnn import interconnection
        >>> interconnection.canonical(2)
        tensor([[ 0., -1.],
                [ 1.,  0.]])
    """
    if not isinstance(n, int) or n < 2 or n % 2:
        raise ShapeError(
            f"the canonical J needs an even number of features, but n = {n!r}; "
            "augment the features by a zero or give a skew-symmetric J of your own."
        )
    return from_X(torch.eye(n // 2, dtype=dtype, device=device))


def from_X(X: Tensor) -> Tensor:
    """The skew-symmetric `J = [[0, -X^T], [X, 0]]` (eq:implicit_euler_JKb).

    Args:
        X: square matrices `(..., m, m)`.

    Returns:
        J as `(..., 2m, 2m)`.

    Examples:
        >>> import torch
        >>> from hdnn import interconnection
        >>> J = interconnection.from_X(torch.randn(3, 3))
        >>> J.shape, interconnection.is_skew(J)
        (torch.Size([6, 6]), True)
    """
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
    """A canonical J inside every node, and nothing between nodes.

    Args:
        sizes: how many features each node has, all even.
        dtype: of the result; by default PyTorch's.

    Returns:
        J as `(n, n)`, where n is the sum of the sizes.

    Raises:
        ShapeError: if a size is not an even number >= 2.

    Examples:
        >>> from hdnn import interconnection
        >>> interconnection.block_diagonal([2, 4]).shape
        torch.Size([6, 6])
    """
    return torch.block_diag(*(canonical(size, dtype=dtype) for size in sizes))


def upper_indices(n: int, *, device: torch.device | str | None = None) -> Tensor:
    """The positions of the entries i < j in an n x n matrix flattened row by row."""
    i, j = torch.triu_indices(n, n, 1, device=device)
    return i * n + j


def skew(upper: Tensor, n: int, index: Tensor | None = None) -> Tensor:
    """The skew-symmetric matrices that have given entries above the diagonal.

    Args:
        upper: the entries `(..., k)`, row by row.
        n: how many rows the matrices have.
        index: where in the flattened matrix the k entries lie; by default everywhere above the
            diagonal, so that `k = n (n - 1) / 2`.

    Returns:
        The matrices, `(..., n, n)`.

    Examples:
        >>> import torch
        >>> from hdnn import interconnection
        >>> interconnection.skew(torch.tensor([1, 2, 3]), n=3)
        tensor([[ 0,  1,  2],
                [-1,  0,  3],
                [-2, -3,  0]])
    """
    index = upper_indices(n, device=upper.device) if index is None else index
    flat = upper.new_zeros(*upper.shape[:-1], n * n)
    A = flat.scatter(-1, index.expand(upper.shape), upper).unflatten(-1, (n, n))
    return A - A.mT


def is_skew(J: Tensor, *, tolerance: float | None = None) -> bool:
    """Whether `J = -J^T`, up to the rounding of its dtype; of a stack, whether every matrix is.

    Args:
        J: matrices `(..., n, n)`.
        tolerance: how large `J + J^T` may be beside J; by default 8 roundings.

    Returns:
        Whether all are skew-symmetric.

    Examples:
        >>> import torch
        >>> from hdnn import interconnection
        >>> A = torch.randn(3, 3)
        >>> interconnection.is_skew(A - A.mT), interconnection.is_skew(A)
        (True, False)
    """
    if tolerance is None:
        tolerance = 8 * torch.finfo(J.dtype).eps if J.is_floating_point() else 0.0
    defect, size = ((J + J.mT).abs().amax((-2, -1)), J.abs().amax((-2, -1)))
    return bool((defect <= tolerance * size).all())


def check_skew(J: Tensor) -> None:
    """Raise unless J is finite and skew-symmetric.

    Args:
        J: matrices `(..., n, n)`.

    Raises:
        InterconnectionError: if J has a NaN or an infinity in it, or is not `-J^T`.

    Examples:
        >>> import torch
        >>> from hdnn import interconnection
        >>> interconnection.check_skew(torch.eye(2))
        Traceback (most recent call last):
        hdnn.errors.InterconnectionError: J must be skew-symmetric (J = -J^T), but ...
    """
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
    """Apply J to rows: `J g`.

    Args:
        g: rows `(..., n)`.
        J: `(n, n)`, or a stack that broadcasts; None for the canonical one.

    Returns:
        The rows `J g`, `(..., n)`.

    Examples:
        >>> import torch
        >>> from hdnn import interconnection
        >>> interconnection.times_J(torch.tensor([1, 2, 3, 4]), None)  # (-q, p)
        tensor([-3, -4,  1,  2])
    """
    return times_canonical(g) if J is None else g @ J.mT


def times_X(g: Tensor, X: Tensor | None, *, adjoint: bool = False) -> Tensor:
    """Apply X or its transpose to rows: `X g` or `X^T g`.

    Args:
        g: rows `(..., m)`.
        X: `(m, m)`, or a stack that broadcasts; None for the identity.
        adjoint: apply the transpose.

    Returns:
        The rows, `(..., m)`.

    Examples:
        >>> import torch
        >>> from hdnn import interconnection
        >>> X, g = torch.tensor([[1, 2], [3, 4]]), torch.tensor([1, 0])
        >>> interconnection.times_X(g, X), interconnection.times_X(g, X, adjoint=True)
        (tensor([1, 3]), tensor([1, 2]))
    """
    if X is None:
        return g
    return g @ (X if adjoint else X.mT)
