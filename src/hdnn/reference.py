"""The paper's layer equations as loops: the definition that everything faster is held to.

A stack runs layer by layer in plain PyTorch, and autograd does the rest. Nothing is checked here
and nothing here knows of an engine: `hdnn.functional` checks the arguments first.

y is (*batch, n), and weights lead with the layer: K is (N, r, n). The halves of y = (p, q) have
m = n/2 features. A layer acts on column vectors as K^T sigma(K y + b); for row vectors that is
sigma(y K^T + b) K.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from hdnn.activations import Activation
from hdnn.base.shapes import Step, layer_steps, per_layer
from hdnn.integrators import implicit, splitting
from hdnn.interconnection import times_J, times_X

Halves = tuple[Tensor, Tensor]


def partial_H(y: Tensor, K: Tensor, b: Tensor, sigma: Activation) -> Tensor:
    """dH/dy = K^T sigma(K y + b), the gradient of the energy of one layer (eq:partialH)."""
    return sigma(y @ K.mT + b) @ K


# Forward Euler


def h1(
    y: Tensor,
    K: Tensor,
    b: Tensor,
    h: Step,
    J: Tensor | None,
    sigma: Activation,
    trajectory: bool,
) -> Tensor:
    """y_{j+1} = y_j + h J_j K_j^T sigma(K_j y_j + b_j)   (eq:H-DNN_fE)."""

    def layer(y: Tensor, K: Tensor, b: Tensor, h, J: Tensor | None) -> Tensor:
        return y + h * times_J(partial_H(y, K, b, sigma), J)

    layers = _layers(K, b, layer_steps("h1", h, len(K)), per_layer(J, len(K)))
    return _run(layer, y, layers, trajectory)


def ms2(y: Tensor, K: Tensor, b: Tensor, h: Step, sigma: Activation, trajectory: bool) -> Tensor:
    """y_{j+1} = y_j + h sigma(K_j y_j + b_j)   (eq:MS2)."""

    def layer(y: Tensor, K: Tensor, b: Tensor, h) -> Tensor:
        return y + h * sigma(y @ K.mT + b)

    return _run(layer, y, _layers(K, b, layer_steps("ms2", h, len(K))), trajectory)


def mlp(y: Tensor, K: Tensor, b: Tensor, sigma: Activation, trajectory: bool) -> Tensor:
    """y_{j+1} = sigma(K_j y_j + b_j), the multilayer perceptron of fig:gradients."""

    def layer(y: Tensor, K: Tensor, b: Tensor) -> Tensor:
        return sigma(y @ K.mT + b)

    return _run(layer, y, _layers(K, b), trajectory)


# Semi-implicit Euler and its relatives: p and q take turns


def split(
    y: Tensor,
    K_p: Tensor,
    K_q: Tensor,
    b_p: Tensor,
    b_q: Tensor,
    h: Step,
    X: Tensor | None,
    shears: tuple[splitting.Shear, ...],
    sigma: Activation,
    trajectory: bool,
    inverse: bool,
) -> Tensor:
    """A layer is any sequence of p- and q-updates: see `hdnn.integrators.splitting`."""
    turns = splitting.inverse(shears) if inverse else shears

    def layer(y: Halves, K_p: Tensor, K_q: Tensor, b_p: Tensor, b_q: Tensor, h, X) -> Halves:
        p, q = y
        for half, fraction in turns:
            if half == "p":  # p - h X^T K_q^T sigma(K_q q + b_q)   (eq:p_update)
                p = p - (fraction * h) * times_X(partial_H(q, K_q, b_q, sigma), X, adjoint=True)
            else:  # q + h X K_p^T sigma(K_p p + b_p)   (eq:q_update)
                q = q + (fraction * h) * times_X(partial_H(p, K_p, b_p, sigma), X)
        return p, q

    N = len(K_p)
    layers = _layers(K_p, K_q, b_p, b_q, layer_steps("split", h, N), per_layer(X, N))
    return _run(layer, y, layers, trajectory, inverse=inverse, halves=True)


def ms1(
    y: Tensor,
    K_0: Tensor,
    b_1: Tensor,
    b_2: Tensor,
    h: Step,
    sigma: Activation,
    trajectory: bool,
    inverse: bool,
) -> Tensor:
    """q - h sigma(K_0^T p + b_1), then p + h sigma(K_0 q + b_2)   (eq:MS1)."""

    def layer(y: Halves, K_0: Tensor, b_1: Tensor, b_2: Tensor, h) -> Halves:
        p, q = y
        q = q - h * sigma(p @ K_0 + b_1)
        p = p + h * sigma(q @ K_0.mT + b_2)
        return p, q

    def undo(y: Halves, K_0: Tensor, b_1: Tensor, b_2: Tensor, h) -> Halves:
        p, q = y
        p = p - h * sigma(q @ K_0.mT + b_2)
        q = q + h * sigma(p @ K_0 + b_1)
        return p, q

    layers = _layers(K_0, b_1, b_2, layer_steps("ms1", h, len(K_0)))
    return _run(undo if inverse else layer, y, layers, trajectory, inverse=inverse, halves=True)


# Implicit schemes: each layer is solved by Newton's method


def implicit_h2(
    y: Tensor,
    K: Tensor,
    b: Tensor,
    h: Step,
    X: Tensor | None,
    sigma: Activation,
    trajectory: bool,
    inverse: bool,
    **newton: Any,
) -> Tensor:
    """y_{j+1} = y_j + h J K^T sigma(K (p_{j+1}, q_j) + b)   (eq:implicit_euler).

    The first half of the equation is solved for p_{j+1}; the second is then explicit.
    """

    def layer(y: Halves, j: int, K: Tensor, b: Tensor, h, X) -> Halves:
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

    N = len(K)
    layers = _layers(range(N), K, b, layer_steps("implicit_h2", h, N), per_layer(X, N))
    return _run(layer, y, layers, trajectory, inverse=inverse, halves=True)


def midpoint(
    y: Tensor,
    K: Tensor,
    b: Tensor,
    h: Step,
    J: Tensor | None,
    sigma: Activation,
    trajectory: bool,
    inverse: bool,
    **newton: Any,
) -> Tensor:
    """y_{j+1} = y_j + h J K^T sigma(K (y_j + y_{j+1})/2 + b): the implicit midpoint rule."""
    half = -0.5 if inverse else 0.5

    def layer(y: Tensor, j: int, K: Tensor, b: Tensor, h, J: Tensor | None) -> Tensor:
        B, where = (half * h) * times_J(K, J).mT, f"midpoint, layer {j}"
        undo = (None, -B, K) if inverse else None
        middle = implicit.solve(y, B, K, b, sigma, where=where, undo=undo, **newton)
        return 2 * middle - y

    N = len(K)
    layers = _layers(range(N), K, b, layer_steps("midpoint", h, N), per_layer(J, N))
    return _run(layer, y, layers, trajectory, inverse=inverse)


# How a stack runs


def _run(
    layer: Callable[..., Any],
    y: Tensor,
    layers: list[tuple[Any, ...]],
    trajectory: bool,
    *,
    inverse: bool = False,
    halves: bool = False,
) -> Tensor:
    """Apply `layer(state, *weights)` for each layer's weights, first to last or last to first."""
    state: Any = y.chunk(2, -1) if halves else y
    states: list[Any] = [state]
    for weights in reversed(layers) if inverse else layers:
        state = layer(state, *weights)
        if trajectory:
            states.append(state)
    if not trajectory:
        return torch.cat(state, -1) if halves else state
    ordered = reversed(states) if inverse else states
    return torch.stack([torch.cat(s, -1) if halves else s for s in ordered])


def _layers(*stacks: Tensor | Iterable[Any]) -> list[tuple[Any, ...]]:
    """The weights of one layer after the other."""
    # unbind, not indexing: the gradient of N selections of a stack costs N^2.
    unbound = [s.unbind(0) if isinstance(s, Tensor) else s for s in stacks]
    return list(zip(*unbound, strict=True))
