"""The paper's layer equations, one function each: the definition that everything faster is held to.

A layer takes the state, its weights, its step h, its J or X (None for the canonical one) and sigma.
`run` applies one layer after the other in plain PyTorch, and autograd does the rest. Nothing is
checked here and nothing here knows of an engine: `hdnn.functional` checks the arguments first.

y is (*batch, n); its halves p and q have m = n/2 features. A layer acts on column vectors as
K^T sigma(K y + b); for row vectors that is sigma(y K^T + b) K.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hdnn.activations import Activation
from hdnn.base.shapes import Step, layer_steps, per_layer
from hdnn.integrators import implicit, splitting
from hdnn.interconnection import times_J, times_X

__all__ = [
    "h1",
    "implicit_h2",
    "midpoint",
    "mlp",
    "ms1",
    "ms2",
    "partial_H",
    "perceptron",
    "run",
    "split",
]

Halves = tuple[Tensor, Tensor]


def partial_H(y: Tensor, K: Tensor, b: Tensor, sigma: Activation) -> Tensor:
    """dH/dy = K^T sigma(K y + b), the gradient of the energy of one layer (eq:partialH)."""
    return sigma(y @ K.mT + b) @ K


def perceptron(y: Tensor, K: Tensor, b: Tensor, sigma: Activation) -> Tensor:
    """sigma(K y + b)."""
    return sigma(y @ K.mT + b)


# Forward Euler


def h1(y: Tensor, K: Tensor, b: Tensor, h, J: Tensor | None, sigma: Activation) -> Tensor:
    """y + h J K^T sigma(K y + b)   (eq:H-DNN_fE)."""
    return y + h * times_J(partial_H(y, K, b, sigma), J)


def ms2(y: Tensor, K: Tensor, b: Tensor, h, _: None, sigma: Activation) -> Tensor:
    """y + h sigma(K y + b)   (eq:MS2)."""
    return y + h * perceptron(y, K, b, sigma)


def mlp(y: Tensor, K: Tensor, b: Tensor, h, _: None, sigma: Activation) -> Tensor:
    """sigma(K y + b), the multilayer perceptron of fig:gradients, which has no step."""
    return perceptron(y, K, b, sigma)


# Semi-implicit Euler and its relatives: p and q take turns


def split(
    y: Halves,
    K_p: Tensor,
    K_q: Tensor,
    b_p: Tensor,
    b_q: Tensor,
    h,
    X: Tensor | None,
    sigma: Activation,
    *,
    shears: tuple[splitting.Shear, ...],
    force: Callable[..., Tensor] = partial_H,
) -> Halves:
    """Any sequence of p- and q-updates: see `hdnn.integrators.splitting`."""
    p, q = y
    for half, fraction in shears:
        if half == "p":  # p - h X^T K_q^T sigma(K_q q + b_q)   (eq:p_update)
            p = p - (fraction * h) * times_X(force(q, K_q, b_q, sigma), X, adjoint=True)
        else:  # q + h X K_p^T sigma(K_p p + b_p)   (eq:q_update)
            q = q + (fraction * h) * times_X(force(p, K_p, b_p, sigma), X)
    return p, q


def ms1(
    y: Halves,
    K_0: Tensor,
    b_1: Tensor,
    b_2: Tensor,
    h,
    _: None,
    sigma: Activation,
    *,
    shears: tuple[splitting.Shear, ...],
) -> Halves:
    """q - h sigma(K_0^T p + b_1), then p + h sigma(K_0 q + b_2)   (eq:MS1)."""
    return split(y, K_0.mT, K_0, b_1, b_2, h, None, sigma, shears=shears, force=perceptron)


# Implicit schemes: each layer is solved by Newton's method


def implicit_h2(
    y: Halves,
    j: int,
    K: Tensor,
    b: Tensor,
    h,
    X: Tensor | None,
    sigma: Activation,
    *,
    inverse: bool,
    **newton: Any,
) -> Halves:
    """y + h J K^T sigma(K (p_{j+1}, q_j) + b)   (eq:implicit_euler).

    The first half of the equation is solved for p_{j+1}; the second is then explicit.
    """
    p, q = y
    K_p, K_q = K.chunk(2, -1)
    where = f"implicit_h2, layer {j}"
    B = -h * times_X(K_q, X, adjoint=True).mT
    if inverse:
        a, B_q = p @ K_p.mT + b, -h * times_X(K_p, X).mT
        q = implicit.solve(q, B_q, K_q, a, sigma, where=where, undo=(p, B, K_p), **newton)
        p = p + h * times_X(sigma(a + q @ K_q.mT) @ K_q, X, adjoint=True)
    else:
        a = q @ K_q.mT + b
        p = implicit.solve(p, B, K_p, a, sigma, where=where, **newton)
        q = q + h * times_X(sigma(a + p @ K_p.mT) @ K_p, X)
    return p, q


def midpoint(
    y: Tensor,
    j: int,
    K: Tensor,
    b: Tensor,
    h,
    J: Tensor | None,
    sigma: Activation,
    *,
    inverse: bool,
    **newton: Any,
) -> Tensor:
    """The y' = y + h J K^T sigma(K (y + y')/2 + b): the implicit midpoint rule."""
    B = ((-0.5 if inverse else 0.5) * h) * times_J(K, J).mT
    undo = (None, -B, K) if inverse else None
    where = f"midpoint, layer {j}"
    return 2 * implicit.solve(y, B, K, b, sigma, where=where, undo=undo, **newton) - y


# How a stack runs


def run(
    layer: Callable[..., Any],
    y: Tensor,
    weights: Sequence[Any],
    h: Step,
    link: Tensor | None,
    sigma: Activation,
    *,
    trajectory: bool,
    inverse: bool = False,
    halves: bool = False,
) -> Tensor:
    """Apply N layers, first to last or, if they are inverses, last to first.

    The weights lead with the layer, (N, ...). With `halves`, a layer takes and returns (p, q).
    """
    N = len(weights[0])
    # unbind, not indexing: the gradient of N selections of a stack costs N^2.
    each = [w.unbind(0) if isinstance(w, Tensor) else w for w in weights]
    layers = list(zip(*each, layer_steps("run", h, N), per_layer(link, N), strict=True))
    state: Any = y.chunk(2, -1) if halves else y
    states: list[Any] = [state]
    for given in reversed(layers) if inverse else layers:
        state = layer(state, *given, sigma)
        if trajectory:
            states.append(state)
    if not trajectory:
        return torch.cat(state, -1) if halves else state
    ordered = reversed(states) if inverse else states
    return torch.stack([torch.cat(s, -1) if halves else s for s in ordered])
