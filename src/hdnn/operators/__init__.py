"""What K can be: a linear map with its exact adjoint and its spectral norm, one kind a file."""

from hdnn.operators import block_sparse, conv, dense

__all__ = ["block_sparse", "conv", "dense"]
