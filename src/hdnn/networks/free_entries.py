"""Weights stored by their free entries alone: `name_free`, for matrices called `name`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from hdnn.operators import block_sparse


def store(module: nn.Module, name: str, matrix: Tensor, free: Tensor) -> None:
    """Store the entries of a matrix where `free` is true, as a parameter of the module."""
    index = block_sparse.indices(free.expand(matrix.shape)).to(matrix.device)
    module.register_buffer(f"_{name}_index", index, persistent=False)
    module.register_parameter(f"{name}_free", nn.Parameter(block_sparse.values(matrix, index)))


def filled(module: nn.Module, name: str, shape: Sequence[int]) -> Tensor:
    """The matrices that the stored entries fill, zeros included."""
    values, index = getattr(module, f"{name}_free"), getattr(module, f"_{name}_index")
    return block_sparse.dense(values, index, shape)
