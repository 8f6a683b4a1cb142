"""Stacks of few samples and wide layers: matrix products in place, a step at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hdnn import activations
from hdnn.engine.kernels import cpu
from hdnn.engine.kernels.protocol import Stack, Tensors, moved_by, order
from hdnn.interconnection import times_canonical


class BlasKernel:
    """A stack, step by step."""

    def __init__(self, stack: Stack) -> None:
        self.stack, self.order = stack, order(stack.turns, stack.layers, stack.inverse)

    @torch.no_grad()
    def forward(self, y: Tensor, tensors: Tensors, keep: bool) -> tuple[Tensor, Tensor | None]:
        weights, parts = self._weights(tensors), self._parts(y)
        room = [y.new_empty(len(y), K.shape[1]) for K, _, _ in weights]
        kept = y.new_empty(self.kept_size(self.stack)) if keep else None
        sources = None if kept is None else self._sources(kept, parts[0])
        for s, ((i, j), c) in enumerate(zip(self.order, tensors[-1].tolist(), strict=True)):
            K, b, V = weights[i]
            if sources is not None:
                sources[s].copy_(parts[i - 1])
            a = torch.addmm(b[j], parts[i - 1], K[j].mT, out=room[i])
            z, _ = _value_and_slope(a, self.stack.activation, slope=False)
            _move(parts[i], z, None if V is None else V[j], c)
        return torch.cat(parts, -1), kept

    @torch.no_grad()
    def backward(self, kept: Tensor, g: Tensor, tensors: Tensors) -> Tensors:
        return self._gradients([], kept, g, tensors)

    @torch.no_grad()
    def undo(self, y_N: Tensor, g: Tensor, tensors: Tensors) -> tuple[Tensor, Tensors]:
        parts = self._parts(y_N)
        gradients = self._gradients(parts, None, g, tensors)
        return torch.cat(parts, -1), gradients

    def _gradients(
        self, y: list[Tensor], kept: Tensor | None, g: Tensor, tensors: Tensors
    ) -> Tensors:
        """From what was kept or, without that, from the parts of y_N, which are undone to y_0."""
        weights, kind, grads = self._weights(tensors), self.stack.kind, self._parts(g)
        sources = None if kept is None else self._sources(kept, grads[0])
        room = [tuple(g.new_empty(2, len(g), K.shape[1])) for K, _, _ in weights]
        ones, coef = g.new_ones(len(g)), tensors[-1].tolist()
        found: Any = [None if t is None else torch.zeros_like(t) for t in tensors]
        # With the canonical J, the gradient of V becomes one of K at the end.
        d_V = torch.zeros_like(tensors[0]) if kind == "canonical" else None
        for s in reversed(range(len(self.order))):
            (i, j), c, (a, w) = self.order[s], coef[s], room[self.order[s][0]]
            (K, b, V), (d_K, d_b, d_out) = weights[i], moved_by(i, found)
            d_out = {"same": d_K, "canonical": d_V}.get(kind, d_out)
            x = y[i - 1] if sources is None else sources[s]
            a = torch.addmm(b[j], x, K[j].mT, out=a)
            z, slope = _value_and_slope(a, self.stack.activation)
            if y:
                _move(y[i], z, None if V is None else V[j], -c)
            w = w.copy_(grads[i]) if V is None else torch.mm(grads[i], V[j].mT, out=w)
            found[-1][s] = torch.dot(z.view(-1), w.view(-1))
            u = _times_slope(w, z, slope, self.stack.activation)
            d_b[j].addmv_(u.mT, ones, alpha=c)
            d_K[j].addmm_(u.mT, x, alpha=c)
            if d_out is not None:
                d_out[j].addmm_(z.mT, grads[i], alpha=c)
            grads[i - 1].addmm_(u, K[j], alpha=c)
        if d_V is not None:
            found[0] -= times_canonical(d_V)
        return torch.cat(grads, -1), *found

    def _parts(self, y: Tensor) -> list[Tensor]:
        """Copies of p and q, or of y: `contiguous()` would not copy the halves of one sample."""
        return [part.clone() for part in y.chunk(self.stack.parts, -1)]

    def _sources(self, kept: Tensor, part: Tensor) -> Tensor:
        """What each step reads, (steps, *part.shape), in the memory for it."""
        count = len(self.order)
        return kept[: count * part.numel()].view(count, *part.shape)

    def _weights(self, tensors: Tensors) -> list[tuple[Tensor, Tensor, Tensor | None]]:
        """K, b and V of the steps that move each part; no V where that is the identity."""
        made, kind = [], self.stack.kind
        for i in range(self.stack.parts):
            K, b, V = moved_by(i, tensors)
            if kind == "canonical":
                V = times_canonical(K)
            made.append((K, b, K if kind == "same" else V))
        return made

    # As much as the tiles keep, since a compiled graph does not know which kernel will run.
    kept_size = staticmethod(cpu.kept_size)
    why_not = staticmethod(cpu.why_not)


def _value_and_slope(
    a: Tensor, activation: str, *, slope: bool = True
) -> tuple[Tensor, Tensor | None]:
    """sigma(a) and, if asked for and not a function of that, sigma'(a). May overwrite a."""
    if activation == "tanh":
        return a.tanh_(), None
    if activation == "relu":
        return a.relu_(), None
    if activation == "identity":
        return a, None
    found = activations.get(activation)
    return found.sigma(a), found.slope(a) if slope else None


def _times_slope(w: Tensor, z: Tensor, slope: Tensor | None, activation: str) -> Tensor:
    """w sigma'(a), in place."""
    if activation == "tanh":
        return torch.ops.aten.tanh_backward.grad_input(w, z, grad_input=w)
    if activation == "relu":
        return torch.ops.aten.threshold_backward.grad_input(w, z, 0, grad_input=w)
    return w if slope is None else w.mul_(slope)


def _move(target: Tensor, z: Tensor, V: Tensor | None, c: float) -> None:
    """target += c z V."""
    if V is None:
        target.add_(z, alpha=c)
    else:
        target.addmm_(z, V, alpha=c)
