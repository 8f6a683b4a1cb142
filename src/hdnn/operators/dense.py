"""K as a matrix `(..., r, n)`."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "adjoint",
    "apply",
    "norm",
]


def apply(K: Tensor, y: Tensor) -> Tensor:
    """The product `K y`.

    Args:
        K: a matrix `(r, n)`, or a stack of them that broadcasts.
        y: rows `(*batch, n)`.

    Returns:
        The rows `K y`, `(*batch, r)`.

    Examples:
        >>> import torch
        >>> from hdnn.operators import dense
        >>> dense.apply(torch.tensor([[1, 2], [3, 4]]), torch.tensor([1, 0]))
        tensor([1, 3])
    """
    return y @ K.mT


def adjoint(K: Tensor, z: Tensor) -> Tensor:
    """The product with the transpose, `K^T z`.

    Args:
        K: a matrix `(r, n)`, or a stack of them that broadcasts.
        z: rows `(*batch, r)`.

    Returns:
        The rows `K^T z`, `(*batch, n)`.

    Examples:
        >>> import torch
        >>> from hdnn.operators import dense
        >>> K, y, z = torch.randn(5, 3), torch.randn(3), torch.randn(5)
        >>> torch.allclose(dense.apply(K, y) @ z, y @ dense.adjoint(K, z), atol=1e-5)
        True
    """
    return z @ K


def norm(K: Tensor) -> Tensor:
    """The spectral norm: the largest singular value of each matrix.

    Args:
        K: matrices `(..., r, n)`, in half precision too.

    Returns:
        The norms, `(...)`.

    Examples:
        >>> import torch
        >>> from hdnn.operators import dense
        >>> dense.norm(torch.diag(torch.tensor([3.0, -5.0])))
        tensor(5.)
    """
    work = torch.promote_types(K.dtype, torch.float32)  # no decompositions in half precision
    return torch.linalg.matrix_norm(K.to(work), 2).to(K.dtype)
