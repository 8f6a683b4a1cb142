"""How the tests reach the GPU kernel of a stack, which no public name does without a GPU.

This is the one file that follows the code: it says how the kernel is called, and tests nothing.
"""

from __future__ import annotations

from torch import Tensor

from hdnn.engine.kernels.protocol import Stack
from hdnn.engine.kernels.triton import TritonEuler, TritonShears

MOVES = {  # the half that moves (0 is p), and the fraction of h by which
    "h2": ((0, -1.0), (1, 1.0)),
    "verlet": ((0, -0.5), (1, 1.0), (0, -0.5)),
}


def split(
    name: str, y: Tensor, K_p: Tensor, K_q: Tensor, b_p: Tensor, b_q: Tensor, h: float, g: Tensor,
    *, activation: str = "tanh", precision: str = "ieee",
) -> dict[str, tuple[Tensor, ...]]:  # fmt: skip
    """y_N, then the gradients of y, K_p, K_q, b_p, b_q for dL/dy_N = g: from kept states, and from
    states that are rebuilt from y_N."""
    turns = tuple(turn for turn, _ in MOVES[name])
    rows = (K_p.shape[1], K_q.shape[1])
    call = Stack(activation, "same", len(K_p), turns, False, *y.shape, rows, y.dtype, y.device)
    kernel = TritonShears(call, precision, False)
    coef = y.new_tensor([h * part for _, part in MOVES[name]] * len(K_p))
    tensors = (K_p, K_q, b_p, b_q, None, None, coef)
    y_N, kept = kernel.forward(y, tensors, True)
    stored = kernel.backward(kept, g, tensors)
    _, rebuilt = kernel.undo(y_N, g, tensors)
    return {"stored": (y_N, *stored[:5]), "reversible": (y_N, *rebuilt[:5])}


def euler(
    y: Tensor, K: Tensor, b: Tensor, h: float, g: Tensor,
    *, activation: str = "tanh", precision: str = "ieee",
) -> dict[str, tuple[Tensor, ...]]:  # fmt: skip
    """The same of H1 with the canonical J, for y, K and b."""
    sizes = (*y.shape, (K.shape[1],), y.dtype, y.device)
    kernel = TritonEuler(
        Stack(activation, "canonical", len(K), (), False, *sizes), precision, False
    )
    tensors = (K, b, None, y.new_full((len(K),), h))
    y_N, kept = kernel.forward(y, tensors, True)
    return {"stored": (y_N, *kernel.backward(kept, g, tensors)[:3])}
