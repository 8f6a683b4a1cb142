"""Stacks in plain PyTorch, on any device and dtype: what the other kernels are tested against.

The forward pass is differentiable too, by autograd and by the transforms of `torch.func`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hdnn import activations
from hdnn.engine.kernels.protocol import Stack, Tensors, moved_by, order
from hdnn.interconnection import times_canonical


class PlainKernel:
    """A stack, step by step."""

    def __init__(self, stack: Stack) -> None:
        self.stack, self.sigma = stack, activations.get(stack.activation)
        self.order = order(stack.turns, stack.layers, stack.inverse)

    def forward(
        self, y: Tensor, tensors: Tensors, keep: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        parts, kept = list(y.chunk(self.stack.parts, -1)), []
        for (i, j), c in zip(self.order, tensors[-1], strict=True):
            K, b, V = moved_by(i, tensors)
            source = parts[i - 1]
            if keep:
                kept.append(source)
            z = self.sigma(source @ K[j].mT + b[j])
            parts[i] = parts[i] + c * out(z, K, V, j, self.stack.kind)
        return torch.cat(parts, -1), torch.stack(kept) if keep else None

    def backward(self, kept: Tensor, g: Tensor, tensors: Tensors) -> Tensors:
        return self.gradients(g, tensors, lambda s, part: kept[s], None)

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
        """All gradients; `source(s, part)` is the part of the state that step s reads.

        `undo`, if it is given, takes the state back step by step.
        """
        sigma, kind, coef = self.sigma, self.stack.kind, tensors[-1]
        grads = [part.clone() for part in g.chunk(self.stack.parts, -1)]
        found: Any = [None if t is None else torch.zeros_like(t) for t in tensors]
        for s in reversed(range(len(self.order))):
            (i, j), c = self.order[s], coef[s]
            (K, b, V), (d_K, d_b, d_V) = moved_by(i, tensors), moved_by(i, found)
            x, delta = source(s, i - 1), grads[i]
            a = x @ K[j].mT + b[j]
            z = sigma(a)
            moved = out(z, K, V, j, kind)
            if undo is not None:
                undo(i, c * moved)
            found[-1][s] = (moved * delta).sum()
            if kind == "canonical":
                delta = -times_canonical(delta)
            u = c * sigma.slope(a) * (delta if kind == "identity" else delta @ _V(K, V)[j].mT)
            d_K[j] += u.mT @ x
            d_b[j] += u.sum(0)
            if kind != "identity":
                _V(d_K, d_V)[j] += c * (z.mT @ delta)
            grads[i - 1] += u @ K[j]
        return torch.cat(grads, -1), *found

    @staticmethod
    def kept_size(stack: Stack, precision: str = "") -> int:
        return stack.steps * stack.samples * stack.width

    @staticmethod
    def why_not(dtype: torch.dtype, features: int) -> str:
        return ""


def out(z: Tensor, K: Tensor, V: Tensor | None, j: int, kind: str) -> Tensor:
    """z V for layer j."""
    if kind == "identity":
        return z
    moved = z @ _V(K, V)[j]
    return times_canonical(moved) if kind == "canonical" else moved


def _V(K: Tensor, V: Tensor | None) -> Tensor:
    return K if V is None else V
