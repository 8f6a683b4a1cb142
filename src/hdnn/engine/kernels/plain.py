"""The stack forwards and backwards in plain PyTorch, on any device and dtype, without autograd.

The interface that the kernels share. A *shear stack* is a schedule of shears: `half` says which
half moves (0: p, by weights of q; 1: q, by weights of p), `layer` whose weights it uses, `coef` by
how much: target += coef sigma(source K^T + b) V. V is K itself ("same"), nothing ("identity"), or
given ("general"). An *Euler stack* is y += h sigma(y K^T + b) V, layer by layer; there V may also
be K J^T with the canonical J ("canonical").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hdnn import activations, interconnection


class Shears(NamedTuple):
    """The weights and the schedule of a shear stack."""

    K_p: Tensor
    K_q: Tensor
    b_p: Tensor
    b_q: Tensor
    V_p: Tensor | None
    V_q: Tensor | None
    half: Tensor  # (M,) int64, on the CPU
    layer: Tensor  # (M,) int64, on the CPU
    coef: Tensor  # (M,)
    activation: str
    kind: str  # "same", "identity" or "general"

    def part(self, half: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """K, b and V of the shears that move p (0), which are weights of q, or q (1)."""
        if half == 0:
            return self.K_q, self.b_q, self.V_q
        return self.K_p, self.b_p, self.V_p


class Euler(NamedTuple):
    """The weights of an Euler stack."""

    K: Tensor
    b: Tensor
    V: Tensor | None
    h: Tensor  # (N,)
    activation: str
    kind: str  # "identity", "general" or "canonical"


def split_forward(y: Tensor, stack: Shears, keep: bool = False) -> tuple[Tensor, Tensor | None]:
    """y_N from y_0 (B, n) and, with `keep`, the half that each shear reads: (M, B, m).

    Also differentiable: autograd may look through it.
    """
    sigma = activations.get(stack.activation)
    parts, kept = list(y.chunk(2, -1)), []
    for half, j, c in zip(stack.half.tolist(), stack.layer.tolist(), stack.coef, strict=True):
        K, b, V = stack.part(half)
        if keep:
            kept.append(parts[1 - half])
        z = sigma(parts[1 - half] @ K[j].mT + b[j])
        parts[half] = parts[half] + c * out(z, K, V, j, stack.kind)
    return torch.cat(parts, -1), torch.stack(kept) if keep else None


def split_backward(
    y: Tensor | None, g: Tensor, stack: Shears, kept: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    """y_0, g_0, dK_p, dK_q, db_p, db_q, dV_p, dV_q and dcoef, from g_N and what was kept.

    Or from g_N and y_N: then the shears are undone, down to y_0, which is None otherwise.
    """
    if y is None:
        assert kept is not None
        return None, *split_gradients(g, stack, lambda s, half: kept[s], None)
    parts = [half.clone() for half in y.chunk(2, -1)]

    def undo(half: int, increment: Tensor) -> None:
        parts[half] -= increment

    gradients = split_gradients(g, stack, lambda s, half: parts[half], undo)
    return torch.cat(parts, -1), *gradients


def split_gradients(
    g: Tensor,
    stack: Shears,
    source: Callable[[int, int], Tensor],
    undo: Callable[[int, Tensor], None] | None,
) -> tuple[Tensor | None, ...]:
    """The gradients g_0 .. dcoef; `source(s, half)` is what shear s reads.

    `undo`, if it is given, takes the state back shear by shear.
    """
    sigma = activations.get(stack.activation)
    grads = [half.clone() for half in g.chunk(2, -1)]
    d_K = [torch.zeros_like(stack.K_p), torch.zeros_like(stack.K_q)]
    d_b = [torch.zeros_like(stack.b_p), torch.zeros_like(stack.b_q)]
    d_V = [None if V is None else torch.zeros_like(V) for V in (stack.V_p, stack.V_q)]
    d_coef = torch.zeros_like(stack.coef)
    steps = list(zip(stack.half.tolist(), stack.layer.tolist(), stack.coef, strict=True))
    for s in reversed(range(len(steps))):
        half, j, c = steps[s]
        K, b, V = stack.part(half)
        other, delta = source(s, 1 - half), grads[half]
        a = other @ K[j].mT + b[j]
        z = sigma(a)
        moved = out(z, K, V, j, stack.kind)
        if undo is not None:
            undo(half, c * moved)
        d_coef[s] = (moved * delta).sum()
        u = c * sigma.slope(a) * _out_adjoint(delta, K, V, j, stack.kind)
        d_K[1 - half][j] += u.mT @ other
        d_b[1 - half][j] += u.sum(0)
        d_out = d_K[1 - half] if stack.kind == "same" else d_V[1 - half]
        if d_out is not None:
            d_out[j] += c * (z.mT @ delta)
        grads[1 - half] += u @ K[j]
    return torch.cat(grads, -1), *d_K, *d_b, *d_V, d_coef


def euler_forward(y: Tensor, stack: Euler, keep: bool = False) -> tuple[Tensor, Tensor | None]:
    """y_N and, with `keep`, the states that the layers read: (N, B, n). Also differentiable."""
    sigma, states = activations.get(stack.activation), []
    for j in range(len(stack.K)):
        if keep:
            states.append(y)
        z = sigma(y @ stack.K[j].mT + stack.b[j])
        y = y + stack.h[j] * out(z, stack.K, stack.V, j, stack.kind)
    return y, torch.stack(states) if keep else None


def euler_backward(states: Tensor, g: Tensor, stack: Euler) -> tuple[Tensor | None, ...]:
    """From the states and g_N: g_0, dK, db, dV and dh."""
    K, b, V, h, activation, kind = stack
    sigma, g = activations.get(activation), g.clone()
    d_K, d_b, d_h = torch.zeros_like(K), torch.zeros_like(b), torch.zeros_like(h)
    d_V = None if V is None else torch.zeros_like(V)
    for j in reversed(range(len(K))):
        a = states[j] @ K[j].mT + b[j]
        z = sigma(a)
        d_h[j] = (out(z, K, V, j, kind) * g).sum()
        u = h[j] * sigma.slope(a) * _out_adjoint(g, K, V, j, kind)
        d_K[j] = u.mT @ states[j]
        d_b[j] = u.sum(0)
        if d_V is not None:
            d_V[j] = h[j] * (z.mT @ g)
        elif kind == "canonical":
            d_K[j] += h[j] * (z.mT @ -interconnection.times_canonical(g))
        g += u @ K[j]
    return g, d_K, d_b, d_V, d_h


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
