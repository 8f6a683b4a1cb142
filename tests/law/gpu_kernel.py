"""How the tests reach the GPU kernel of a stack, which no public name does without a GPU.

This is the one file that follows the code: it says how the kernel is called, and tests nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hdnn import activations, schemes
from hdnn.engine import backprop, gpu
from hdnn.engine.memory import Stack

SCHEMES = {"h2": schemes.SEMI_IMPLICIT_EULER, "verlet": schemes.VERLET}


def split(
    name: str, y: Tensor, K_p: Tensor, K_q: Tensor, b_p: Tensor, b_q: Tensor, h: float, g: Tensor,
    *, activation: str = "tanh", precision: str = "ieee",
) -> dict[str, tuple[Tensor, ...]]:  # fmt: skip
    """y_N, then the gradients of y, K_p, K_q, b_p, b_q for dL/dy_N = g: from kept states, and from
    states that are rebuilt from y_N."""
    tensors = (y.new_full((len(K_p),), h), K_p, b_p, None, K_q, b_q, None)
    found = {}
    for way in ("stored", "reversible"):
        values = _run(way, SCHEMES[name], y, tensors, g, activation, precision, ("same", "same"))
        y_N, g_y, _, g_K_p, g_b_p, _, g_K_q, g_b_q, _ = values
        found[way] = (y_N, g_y, g_K_p, g_K_q, g_b_p, g_b_q)
    return found


def euler(
    y: Tensor, K: Tensor, b: Tensor, h: float, g: Tensor,
    *, activation: str = "tanh", precision: str = "ieee",
) -> dict[str, tuple[Tensor, ...]]:  # fmt: skip
    """The same of H1 with the canonical J, for y, K and b."""
    half = K.shape[-1] // 2

    def turn(W: Tensor) -> Tensor:  # rows K J^T for J = [[0, -I], [I, 0]]
        return torch.cat([-W[..., half:], W[..., :half]], -1)

    tensors = (y.new_full((len(K),), h), K, b, turn(K).contiguous())
    scheme = schemes.FORWARD_EULER
    values = _run("stored", scheme, y, tensors, g, activation, precision, ("learned",))
    y_N, g_y, _, g_K, g_b, g_V = values
    return {"stored": (y_N, g_y, g_K - turn(g_V), g_b)}


def _run(way, scheme, y, tensors, g, activation, precision, outputs):
    rows = tuple(K.shape[1] for K in tensors[1::3])
    sigma = activations.get(activation)
    sizes = (len(tensors[0]), *y.shape, rows, outputs, y.dtype, y.device)
    stack = Stack(scheme, sigma, False, *sizes)
    method = backprop.METHODS[way](stack, lambda stack: gpu.Kernel(stack, precision))
    y_N, saved = method.forward(y, tensors)
    return y_N, *method.backward(y, saved, g, tensors)
