"""K in BlkSprs(R): blocks of a matrix that are zero by construction.

Only the free entries are stored, as one vector; `index` says where they go in the flattened stack
of matrices. So no optimiser can move a masked entry, and none is counted as a parameter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hdnn.operators import dense as _dense

__all__ = [
    "adjoint",
    "apply",
    "block_pattern",
    "dense",
    "indices",
    "mask",
    "norm",
    "values",
]


def mask(R: Tensor, rows: Sequence[int], columns: Sequence[int]) -> Tensor:
    """The free entries of a matrix with blocks of these sizes and the pattern R (..., M, M)."""
    by_rows = R.bool().repeat_interleave(torch.tensor(rows, device=R.device), dim=-2)
    return by_rows.repeat_interleave(torch.tensor(columns, device=R.device), dim=-1)


def block_pattern(A: Tensor, rows: Sequence[int], columns: Sequence[int]) -> Tensor:
    """The smallest pattern R (..., M, M) with A in BlkSprs(R)."""
    blocks = [
        torch.stack([block.ne(0).any(-1).any(-1) for block in row.split(list(columns), -1)], -1)
        for row in A.split(list(rows), -2)
    ]
    return torch.stack(blocks, -2)


def indices(free: Tensor) -> Tensor:
    """Where the free entries of a mask lie once it is flattened."""
    return free.flatten().nonzero()[:, 0]


def dense(values: Tensor, index: Tensor, shape: Sequence[int]) -> Tensor:
    """The matrices that have `values` in their free entries and exact zeros elsewhere."""
    flat = values.new_zeros(torch.Size(shape).numel())
    return flat.scatter(0, index, values).view(*shape)


def values(K: Tensor, index: Tensor) -> Tensor:
    """The free entries of K; the exact adjoint of `dense`."""
    return K.reshape(-1)[index]


def apply(values: Tensor, index: Tensor, shape: Sequence[int], y: Tensor) -> Tensor:
    """K y for rows y (*batch, n)."""
    return _dense.apply(dense(values, index, shape), y)


def adjoint(values: Tensor, index: Tensor, shape: Sequence[int], z: Tensor) -> Tensor:
    """K^T z for rows z (*batch, r)."""
    return _dense.adjoint(dense(values, index, shape), z)


def norm(values: Tensor, index: Tensor, shape: Sequence[int]) -> Tensor:
    """The largest singular value of each matrix."""
    return _dense.norm(dense(values, index, shape))
