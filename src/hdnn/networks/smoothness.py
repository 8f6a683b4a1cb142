"""R_K, the smoothness of weights over layers."""

from __future__ import annotations

from torch import Tensor

from hdnn.base.shapes import Step, layer_steps
from hdnn.errors import ShapeError


def smoothness(K: Tensor, b: Tensor, h: Step) -> Tensor:
    """R_K = h/2 sum_{j=1}^{N-1} |K_j - K_{j-1}|_F^2 + |b_j - b_{j-1}|^2 for K (N, r, n), b (N, r).

    Where each layer has its own step, h_j weighs the difference between layers j and j-1.
    """
    if K.shape[0] != b.shape[0]:
        raise ShapeError(f"K has {K.shape[0]} layers, but b has {b.shape[0]}; both must have N.")
    steps = layer_steps("R_K", h, len(K))
    jumps = K.diff(dim=0).square().flatten(1).sum(1) + b.diff(dim=0).square().flatten(1).sum(1)
    if isinstance(h, (int, float)):  # makes no tensor, so that a CUDA graph can record it
        return 0.5 * h * jumps.sum()
    h = h.expand(len(K)) if isinstance(h, Tensor) else K.new_tensor(steps)
    return 0.5 * (h[1:] * jumps).sum()
