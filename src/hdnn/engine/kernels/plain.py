"""Stacks in plain PyTorch, on any device and dtype: what the other kernels are tested against.

The forward passes are differentiable too, by autograd and by the transforms of `torch.func`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hdnn import activations, interconnection
from hdnn.engine.kernels.protocol import Stack, Tensors, schedule


class PlainShears:
    """A shear stack, shear by shear."""

    def __init__(self, stack: Stack) -> None:
        self.stack, self.sigma = stack, activations.get(stack.activation)
        half, layer = schedule(stack.turns, stack.layers, stack.inverse)
        self.order = list(zip(half.tolist(), layer.tolist(), strict=True))

    def forward(
        self, y: Tensor, tensors: Tensors, keep: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        halves, kept, kind = list(y.chunk(2, -1)), [], self.stack.kind
        for (half, j), c in zip(self.order, tensors[-1], strict=True):
            K, b, V = moved_by(half, tensors)
            if keep:
                kept.append(halves[1 - half])
            z = self.sigma(halves[1 - half] @ K[j].mT + b[j])
            halves[half] = halves[half] + c * out(z, K, V, j, kind)
        return torch.cat(halves, -1), torch.stack(kept) if keep else None

    def backward(self, kept: Tensor, g: Tensor, tensors: Tensors) -> Tensors:
        return self.gradients(g, tensors, lambda s, half: kept[s], None)

    def undo(self, y_N: Tensor, g: Tensor, tensors: Tensors) -> tuple[Tensor, Tensors]:
        halves = [half.clone() for half in y_N.chunk(2, -1)]

        def undo(half: int, increment: Tensor) -> None:
            halves[half] -= increment

        gradients = self.gradients(g, tensors, lambda s, half: halves[half], undo)
        return torch.cat(halves, -1), gradients

    def gradients(
        self,
        g: Tensor,
        tensors: Tensors,
        source: Callable[[int, int], Tensor],
        undo: Callable[[int, Tensor], None] | None,
    ) -> Tensors:
        """All gradients; `source(s, half)` is what shear s reads.

        `undo`, if it is given, takes the state back shear by shear.
        """
        sigma, kind, coef = self.sigma, self.stack.kind, tensors[-1]
        grads = [half.clone() for half in g.chunk(2, -1)]
        found: Any = [None if t is None else torch.zeros_like(t) for t in tensors]
        d_K_p, d_K_q, d_b_p, d_b_q, d_V_p, d_V_q, d_coef = found
        # Indexed by the half that they move.
        d_K, d_b, d_V = (d_K_q, d_K_p), (d_b_q, d_b_p), (d_V_q, d_V_p)
        for s in reversed(range(len(self.order))):
            (half, j), c = self.order[s], coef[s]
            K, b, V = moved_by(half, tensors)
            other, delta = source(s, 1 - half), grads[half]
            a = other @ K[j].mT + b[j]
            z = sigma(a)
            moved = out(z, K, V, j, kind)
            if undo is not None:
                undo(half, c * moved)
            d_coef[s] = (moved * delta).sum()
            u = c * sigma.slope(a) * _out_adjoint(delta, K, V, j, kind)
            d_K[half][j] += u.mT @ other
            d_b[half][j] += u.sum(0)
            d_out = d_K[half] if kind == "same" else d_V[half]
            if d_out is not None:
                d_out[j] += c * (z.mT @ delta)
            grads[1 - half] += u @ K[j]
        return torch.cat(grads, -1), *found

    @staticmethod
    def kept_size(stack: Stack) -> int:
        return stack.steps * stack.samples * stack.width

    @staticmethod
    def why_not(dtype: torch.dtype, features: int) -> str:
        return ""


class PlainEuler:
    """An Euler stack, layer by layer."""

    def __init__(self, stack: Stack) -> None:
        self.stack, self.sigma = stack, activations.get(stack.activation)

    def forward(
        self, y: Tensor, tensors: Tensors, keep: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        (K, b, V, h), states = tensors, []
        for j in range(len(K)):
            if keep:
                states.append(y)
            z = self.sigma(y @ K[j].mT + b[j])
            y = y + h[j] * out(z, K, V, j, self.stack.kind)
        return y, torch.stack(states) if keep else None

    def backward(self, kept: Tensor, g: Tensor, tensors: Tensors) -> Tensors:
        (K, b, V, h), sigma, kind = tensors, self.sigma, self.stack.kind
        g = g.clone()
        d_K, d_b, d_h = torch.zeros_like(K), torch.zeros_like(b), torch.zeros_like(h)
        d_V = None if V is None else torch.zeros_like(V)
        for j in reversed(range(len(K))):
            a = kept[j] @ K[j].mT + b[j]
            z = sigma(a)
            d_h[j] = (out(z, K, V, j, kind) * g).sum()
            u = h[j] * sigma.slope(a) * _out_adjoint(g, K, V, j, kind)
            d_K[j] = u.mT @ kept[j]
            d_b[j] = u.sum(0)
            if d_V is not None:
                d_V[j] = h[j] * (z.mT @ g)
            elif kind == "canonical":
                d_K[j] += h[j] * (z.mT @ -interconnection.times_canonical(g))
            g += u @ K[j]
        return g, d_K, d_b, d_V, d_h

    kept_size = staticmethod(PlainShears.kept_size)
    why_not = staticmethod(PlainShears.why_not)


def moved_by(half: int, tensors: Tensors) -> tuple[Tensor, Tensor, Tensor | None]:
    """K, b and V of the shears that move p (0), which are weights of q, or q (1)."""
    K_p, K_q, b_p, b_q, V_p, V_q, _ = tensors
    return (K_p, b_p, V_p) if half else (K_q, b_q, V_q)


def out(z: Tensor, K: Tensor, V: Tensor | None, j: int, kind: str) -> Tensor:
    """z V for layer j."""
    if kind == "identity":
        return z
    if kind == "canonical":
        return interconnection.times_canonical(z @ K[j])
    return z @ (K if V is None else V)[j]


def _out_adjoint(delta: Tensor, K: Tensor, V: Tensor | None, j: int, kind: str) -> Tensor:
    if kind == "identity":
        return delta
    if kind == "canonical":
        return -interconnection.times_canonical(delta) @ K[j].mT
    return delta @ (K if V is None else V)[j].mT
