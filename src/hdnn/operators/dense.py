"""K as a matrix (..., r, n)."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "adjoint",
    "apply",
    "norm",
]


def apply(K: Tensor, y: Tensor) -> Tensor:
    """K y for rows y (*batch, n): (*batch, r)."""
    return y @ K.mT


def adjoint(K: Tensor, z: Tensor) -> Tensor:
    """K^T z for rows z (*batch, r): (*batch, n)."""
    return z @ K


def norm(K: Tensor) -> Tensor:
    """The largest singular value of each matrix: (...)."""
    work = torch.promote_types(K.dtype, torch.float32)  # no decompositions in half precision
    return torch.linalg.matrix_norm(K.to(work), 2).to(K.dtype)
