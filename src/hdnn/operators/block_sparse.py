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
    """The free entries of a matrix with the block pattern R.

    Args:
        R: a pattern `(..., M, M)` of 0 and 1.
        rows: how many rows the blocks of each node have.
        columns: how many columns.

    Returns:
        True where an entry is free, `(..., sum(rows), sum(columns))`.

    Examples:
        >>> import torch
        >>> from hdnn.operators import block_sparse
        >>> block_sparse.mask(torch.tensor([[1, 0], [1, 1]]), rows=[1, 1], columns=[2, 1]).int()
        tensor([[1, 1, 0],
                [1, 1, 1]], dtype=torch.int32)
    """
    by_rows = R.bool().repeat_interleave(torch.tensor(rows, device=R.device), dim=-2)
    return by_rows.repeat_interleave(torch.tensor(columns, device=R.device), dim=-1)


def block_pattern(A: Tensor, rows: Sequence[int], columns: Sequence[int]) -> Tensor:
    """The smallest pattern R with A in BlkSprs(R).

    Args:
        A: matrices `(..., sum(rows), sum(columns))`.
        rows: how many rows the blocks of each node have.
        columns: how many columns.

    Returns:
        R as `(..., M, M)`, true where a block has an entry that is not zero.

    Examples:
        >>> import torch
        >>> from hdnn.operators import block_sparse
        >>> A = torch.tensor([[0.0, 2.0, 0.0], [1.0, 0.0, 3.0]])
        >>> block_sparse.block_pattern(A, rows=[1, 1], columns=[2, 1]).int()
        tensor([[1, 0],
                [1, 1]], dtype=torch.int32)
    """
    blocks = [
        torch.stack([block.ne(0).any(-1).any(-1) for block in row.split(list(columns), -1)], -1)
        for row in A.split(list(rows), -2)
    ]
    return torch.stack(blocks, -2)


def indices(free: Tensor) -> Tensor:
    """Where the free entries of a mask lie once it is flattened.

    Args:
        free: a mask of any shape.

    Returns:
        Their positions, `(k,)`, in ascending order.

    Examples:
        >>> import torch
        >>> from hdnn.operators import block_sparse
        >>> block_sparse.indices(torch.tensor([[True, False], [True, True]]))
        tensor([0, 2, 3])
    """
    return free.flatten().nonzero()[:, 0]


def dense(values: Tensor, index: Tensor, shape: Sequence[int]) -> Tensor:
    """The matrices that have `values` in their free entries and exact zeros elsewhere.

    Args:
        values: the free entries, `(k,)`.
        index: where they lie in the flattened matrix, `(k,)`, as `indices` finds it.
        shape: of the matrices.

    Returns:
        The matrices, of that shape.

    Examples:
        >>> import torch
        >>> from hdnn.operators import block_sparse
        >>> free = torch.tensor([[True, False], [True, True]])
        >>> index, values = block_sparse.indices(free), torch.tensor([1.0, 2.0, 3.0])
        >>> block_sparse.dense(values, index, (2, 2))
        tensor([[1., 0.],
                [2., 3.]])
    """
    flat = values.new_zeros(torch.Size(shape).numel())
    return flat.scatter(0, index, values).view(*shape)


def values(K: Tensor, index: Tensor) -> Tensor:
    """The free entries of K: the exact adjoint of `dense`.

    Args:
        K: matrices of any shape.
        index: where they lie in the flattened matrix, `(k,)`, as `indices` finds it.

    Returns:
        The entries, `(k,)`.

    Examples:
        >>> import torch
        >>> from hdnn.operators import block_sparse
        >>> index = torch.tensor([0, 2, 3])
        >>> block_sparse.values(torch.tensor([[1, 9], [2, 3]]), index)
        tensor([1, 2, 3])
    """
    return K.reshape(-1)[index]


def apply(values: Tensor, index: Tensor, shape: Sequence[int], y: Tensor) -> Tensor:
    """The product `K y`.

    Args:
        values: the free entries, `(k,)`.
        index: where they lie in the flattened matrix, `(k,)`, as `indices` finds it.
        shape: of the matrix, `(r, n)`.
        y: rows `(*batch, n)`.

    Returns:
        The rows `K y`, `(*batch, r)`.

    Examples:
        >>> import torch
        >>> from hdnn.operators import block_sparse
        >>> free = torch.tensor([[True, False], [True, True]])
        >>> index, values = block_sparse.indices(free), torch.tensor([1.0, 2.0, 3.0])
        >>> block_sparse.apply(values, index, (2, 2), torch.tensor([1.0, 1.0]))
        tensor([1., 5.])
    """
    return _dense.apply(dense(values, index, shape), y)


def adjoint(values: Tensor, index: Tensor, shape: Sequence[int], z: Tensor) -> Tensor:
    """The product with the transpose, `K^T z`.

    Args:
        values: the free entries, `(k,)`.
        index: where they lie in the flattened matrix, `(k,)`, as `indices` finds it.
        shape: of the matrix, `(r, n)`.
        z: rows `(*batch, r)`.

    Returns:
        The rows `K^T z`, `(*batch, n)`.

    Examples:
        >>> import torch
        >>> from hdnn.operators import block_sparse
        >>> free = torch.tensor([[True, False], [True, True]])
        >>> index, values = block_sparse.indices(free), torch.tensor([1.0, 2.0, 3.0])
        >>> block_sparse.adjoint(values, index, (2, 2), torch.tensor([1.0, 1.0]))
        tensor([3., 3.])
    """
    return _dense.adjoint(dense(values, index, shape), z)


def norm(values: Tensor, index: Tensor, shape: Sequence[int]) -> Tensor:
    """The spectral norm: the largest singular value of each matrix.

    Args:
        values: the free entries, `(k,)`.
        index: where they lie in the flattened matrix, `(k,)`, as `indices` finds it.
        shape: of the matrices, `(..., r, n)`.

    Returns:
        The norms, `(...)`.

    Examples:
        >>> import torch
        >>> from hdnn.operators import block_sparse
        >>> index = torch.tensor([0, 3])  # the diagonal
        >>> block_sparse.norm(torch.tensor([3.0, -5.0]), index, (2, 2))
        tensor(5.)
    """
    return _dense.norm(dense(values, index, shape))
