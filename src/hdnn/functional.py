"""The paper's layer equations, one function each: the definition that everything else is held to.

Every function runs a whole stack of N layers and is pure, differentiable and batched over any
leading axes: y is (*batch, n), weights lead with the layer: K is (N, r, n). The halves of
y = (p, q) have m = n/2 features. A layer acts on column vectors as K^T sigma(K y + b); for row
vectors that is sigma(y K^T + b) K. `h` is a float, or a tensor (N,) with a step for each layer.
`trajectory=True` returns all states y_0 .. y_N as (N+1, *batch, n). Where a scheme can be undone,
`inverse=True` takes y_N back to y_0, and a trajectory still comes in forward order.

Shapes are always checked, values of tensors never (the networks do that once, when made), so that
`torch.compile` and `vmap` see through every function. `engine` and `backprop` say how explicit
stacks run (see `hdnn.engine`), never what they compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from hdnn import activations
from hdnn.activations import Activation
from hdnn.base.shapes import Shapes, Step, check_tolerance, layer_steps, per_layer
from hdnn.engine.calls import Way
from hdnn.integrators import implicit, splitting
from hdnn.interconnection import times_J, times_X

__all__ = [
    "energy",
    "h1",
    "h2",
    "h2_inverse",
    "implicit_h2",
    "midpoint",
    "mlp",
    "ms1",
    "ms2",
    "ms3",
    "partial_H",
    "split",
    "verlet",
    "yoshida4",
]


def partial_H(y: Tensor, K: Tensor, b: Tensor, sigma: Activation) -> Tensor:
    """dH/dy = K^T sigma(K y + b), the gradient of the energy of one layer (eq:partialH)."""
    return sigma(y @ K.mT + b) @ K


def energy(y: Tensor, K: Tensor, b: Tensor, *, activation: str | Activation = "tanh") -> Tensor:
    """H(y) = sum_i s(K y + b)_i with s' = sigma and s(0) = 0, for one layer (eq:nlH)."""
    sigma, shapes = activations.get(activation), Shapes("energy", y)
    shapes.check("K", K, "r n")
    shapes.check("b", b, "r")
    return sigma.integral(y @ K.mT + b).sum(-1)


# Forward Euler


def h1(
    y: Tensor,
    K: Tensor,
    b: Tensor,
    h: Step,
    *,
    J: Tensor | None = None,
    activation: str | Activation = "tanh",
    trajectory: bool = False,
    engine: str | None = None,
    backprop: str | None = None,
) -> Tensor:
    """y_{j+1} = y_j + h J_j K_j^T sigma(K_j y_j + b_j)   (eq:H-DNN_fE).

    K (N, r, n), b (N, r), J (n, n) or (N, n, n), by default the canonical [[0, -I], [I, 0]].
    """
    sigma = activations.get(activation)
    way = Way("h1", y, (K, b, J), h, sigma, engine, backprop, trajectory)
    if way.call is None:
        _check_full("h1", y, K, b, h, J)
        way.plan("canonical" if J is None else "general", len(K))
    if way.call is not None:
        return way.call(y, (K, b), J, h)

    def layer(y: Tensor, K: Tensor, b: Tensor, h, J: Tensor | None) -> Tensor:
        return y + h * times_J(partial_H(y, K, b, sigma), J)

    layers = _zip(K, b, layer_steps("h1", h, len(K)), per_layer(J, len(K)))
    return _run(layer, y, layers, trajectory)


def ms2(
    y: Tensor,
    K: Tensor,
    b: Tensor,
    h: Step,
    *,
    activation: str | Activation = "tanh",
    trajectory: bool = False,
    engine: str | None = None,
    backprop: str | None = None,
) -> Tensor:
    """y_{j+1} = y_j + h sigma(K_j y_j + b_j) with K_j (N, n, n) skew-symmetric   (eq:MS2)."""
    sigma = activations.get(activation)
    way = Way("ms2", y, (K, b), h, sigma, engine, backprop, trajectory)
    if way.call is None:
        shapes = Shapes("ms2", y)
        shapes.check("K", K, "N n n")
        shapes.check("b", b, "N n")
        shapes.steps(h)
        way.plan("identity", shapes.N)
    if way.call is not None:
        return way.call(y, (K, b), None, h)

    def layer(y: Tensor, K: Tensor, b: Tensor, h) -> Tensor:
        return y + h * sigma(y @ K.mT + b)

    return _run(layer, y, _zip(K, b, layer_steps("ms2", h, len(K))), trajectory)


def mlp(
    y: Tensor,
    K: Tensor,
    b: Tensor,
    *,
    activation: str | Activation = "tanh",
    trajectory: bool = False,
) -> Tensor:
    """y_{j+1} = sigma(K_j y_j + b_j), the multilayer perceptron of fig:gradients; K (N, n, n)."""
    sigma, shapes = activations.get(activation), Shapes("mlp", y)
    shapes.check("K", K, "N n n")
    shapes.check("b", b, "N n")

    def layer(y: Tensor, K: Tensor, b: Tensor) -> Tensor:
        return sigma(y @ K.mT + b)

    return _run(layer, y, _zip(K, b), trajectory)


# Semi-implicit Euler and its relatives: p and q take turns


def split(
    y: Tensor,
    K_p: Tensor,
    K_q: Tensor,
    b_p: Tensor,
    b_q: Tensor,
    h: Step,
    *,
    shears: tuple[splitting.Shear, ...],
    X: Tensor | None = None,
    activation: str | Activation = "tanh",
    trajectory: bool = False,
    inverse: bool = False,
    engine: str | None = None,
    backprop: str | None = None,
) -> Tensor:
    """Any sequence of p- and q-updates as one layer: see `hdnn.integrators.splitting`."""
    sigma = activations.get(activation)
    where = ("split", shears, inverse)
    way = Way(where, y, (K_p, K_q, b_p, b_q, X), h, sigma, engine, backprop, trajectory)
    if way.call is None:
        name, letters = splitting.NAMES.get(shears, ("split", splitting.WEIGHTS))
        shapes = Shapes(name + "_inverse" * inverse, y, split=True)
        specs = ((K_p, "N r_p m"), (K_q, "N r_q m"), (b_p, "N r_p"), (b_q, "N r_q"))
        for letter, k in sorted((letter, k) for k, letter in enumerate(letters)):  # as given
            shapes.check(letter, *specs[k])
        if X is not None:
            shapes.check("X", X, "m m", "N m m")
        shapes.steps(h)
        way.plan("same" if X is None else "general", shapes.N, shears, inverse)
    if way.call is not None:
        return way.call(y, (K_p, K_q, b_p, b_q), X, h)
    N = len(K_p)
    layers = _zip(K_p, K_q, b_p, b_q, layer_steps("split", h, N), per_layer(X, N))
    turns = splitting.inverse(shears) if inverse else shears

    def layer(y: Halves, K_p: Tensor, K_q: Tensor, b_p: Tensor, b_q: Tensor, h, X) -> Halves:
        p, q = y
        for half, fraction in turns:
            if half == "p":  # p - h X^T K_q^T sigma(K_q q + b_q)   (eq:p_update)
                p = p - (fraction * h) * times_X(partial_H(q, K_q, b_q, sigma), X, adjoint=True)
            else:  # q + h X K_p^T sigma(K_p p + b_p)   (eq:q_update)
                q = q + (fraction * h) * times_X(partial_H(p, K_p, b_p, sigma), X)
        return p, q

    return _run(layer, y, layers, trajectory, inverse=inverse, halves=True)


def h2(
    y: Tensor,
    K_p: Tensor,
    K_q: Tensor,
    b_p: Tensor,
    b_q: Tensor,
    h: Step,
    *,
    X: Tensor | None = None,
    activation: str | Activation = "tanh",
    trajectory: bool = False,
    engine: str | None = None,
    backprop: str | None = None,
) -> Tensor:
    """Semi-implicit Euler with a block-diagonal K: explicit, symplectic, never vanishing gradients.

    p_{j+1} = p_j - h X^T K_q^T sigma(K_q q_j + b_q)        (eq:p_update), then
    q_{j+1} = q_j + h X K_p^T sigma(K_p p_{j+1} + b_p)      (eq:q_update).

    K_p, K_q (N, r, m), b_p, b_q (N, r), X (m, m) or (N, m, m), by default the identity.
    """
    options: dict[str, Any] = {"activation": activation, "trajectory": trajectory}
    options |= {"shears": splitting.SEMI_IMPLICIT_EULER, "engine": engine, "backprop": backprop}
    return split(y, K_p, K_q, b_p, b_q, h, X=X, **options)


def h2_inverse(
    y: Tensor,
    K_p: Tensor,
    K_q: Tensor,
    b_p: Tensor,
    b_q: Tensor,
    h: Step,
    *,
    X: Tensor | None = None,
    activation: str | Activation = "tanh",
    trajectory: bool = False,
    engine: str | None = None,
    backprop: str | None = None,
) -> Tensor:
    """y_0 from y_N: the exact inverse of `h2`. A trajectory is in forward order, y_0 .. y_N."""
    options: dict[str, Any] = {"activation": activation, "trajectory": trajectory}
    options |= {"shears": splitting.SEMI_IMPLICIT_EULER, "engine": engine, "backprop": backprop}
    return split(y, K_p, K_q, b_p, b_q, h, X=X, inverse=True, **options)


def verlet(
    y: Tensor,
    K_p: Tensor,
    K_q: Tensor,
    b_p: Tensor,
    b_q: Tensor,
    h: Step,
    *,
    X: Tensor | None = None,
    activation: str | Activation = "tanh",
    trajectory: bool = False,
    inverse: bool = False,
    engine: str | None = None,
    backprop: str | None = None,
) -> Tensor:
    """Stoermer-Verlet: half a step of p, one of q, half a step of p. Order 2, symplectic."""
    options: dict[str, Any] = {"activation": activation, "trajectory": trajectory}
    options |= {"inverse": inverse, "engine": engine, "backprop": backprop}
    return split(y, K_p, K_q, b_p, b_q, h, shears=splitting.VERLET, X=X, **options)


def yoshida4(
    y: Tensor,
    K_p: Tensor,
    K_q: Tensor,
    b_p: Tensor,
    b_q: Tensor,
    h: Step,
    *,
    X: Tensor | None = None,
    activation: str | Activation = "tanh",
    trajectory: bool = False,
    inverse: bool = False,
    engine: str | None = None,
    backprop: str | None = None,
) -> Tensor:
    """Yoshida's composition of three Verlet steps. Order 4, symplectic."""
    options: dict[str, Any] = {"activation": activation, "trajectory": trajectory}
    options |= {"inverse": inverse, "engine": engine, "backprop": backprop}
    return split(y, K_p, K_q, b_p, b_q, h, shears=splitting.YOSHIDA4, X=X, **options)


def ms3(
    y: Tensor,
    K_1: Tensor,
    K_2: Tensor,
    b_1: Tensor,
    b_2: Tensor,
    h: Step,
    *,
    activation: str | Activation = "tanh",
    trajectory: bool = False,
    inverse: bool = False,
    engine: str | None = None,
    backprop: str | None = None,
) -> Tensor:
    """H2 with both signs turned   (eq:MS3).

    p_{j+1} = p_j + h K_1^T sigma(K_1 q_j + b_1), then
    q_{j+1} = q_j - h K_2^T sigma(K_2 p_{j+1} + b_2); K_1, K_2 (N, r, m), b_1, b_2 (N, r).
    """
    options: dict[str, Any] = {"activation": activation, "trajectory": trajectory}
    options |= {"inverse": inverse, "engine": engine, "backprop": backprop}
    return split(y, K_2, K_1, b_2, b_1, h, shears=splitting.MS3, **options)


def ms1(
    y: Tensor,
    K_0: Tensor,
    b_1: Tensor,
    b_2: Tensor,
    h: Step,
    *,
    activation: str | Activation = "tanh",
    trajectory: bool = False,
    inverse: bool = False,
    engine: str | None = None,
    backprop: str | None = None,
) -> Tensor:
    """q first, and no K^T outside of sigma   (eq:MS1).

    q_{j+1} = q_j - h sigma(K_0^T p_j + b_1), then
    p_{j+1} = p_j + h sigma(K_0 q_{j+1} + b_2); K_0 (N, m, m), b_1, b_2 (N, m).
    """
    sigma = activations.get(activation)
    way = Way(("ms1", inverse), y, (K_0, b_1, b_2), h, sigma, engine, backprop, trajectory)
    if way.call is None:
        shapes = Shapes("ms1", y, split=True)
        shapes.check("K_0", K_0, "N m m")
        shapes.check("b_1", b_1, "N m")
        shapes.check("b_2", b_2, "N m")
        shapes.steps(h)
        way.plan("identity", shapes.N, splitting.MS1, inverse)
    if way.call is not None:
        return way.call(y, (K_0.mT, K_0, b_1, b_2), None, h)

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

    layers = _zip(K_0, b_1, b_2, layer_steps("ms1", h, len(K_0)))
    return _run(undo if inverse else layer, y, layers, trajectory, inverse=inverse, halves=True)


# Implicit schemes: each layer is solved by Newton's method


def implicit_h2(
    y: Tensor,
    K: Tensor,
    b: Tensor,
    h: Step,
    *,
    X: Tensor | None = None,
    activation: str | Activation = "tanh",
    trajectory: bool = False,
    inverse: bool = False,
    tol: float | None = None,
    max_iter: int = implicit.MAX_ITER,
) -> Tensor:
    """Semi-implicit Euler with a full K: y_{j+1} = y_j + h J K^T sigma(K (p_{j+1}, q_j) + b).

    (eq:implicit_euler) K (N, r, n), b (N, r), X (m, m) or (N, m, m). The first half of the
    equation is solved for p_{j+1}; the second is then explicit.
    """
    sigma, shapes = activations.get(activation), Shapes("implicit_h2", y, split=True)
    shapes.check("K", K, "N r n")
    shapes.check("b", b, "N r")
    if X is not None:
        shapes.check("X", X, "m m", "N m m")
    check_tolerance("implicit_h2", tol, max_iter)
    newton: dict[str, Any] = {"tol": tol, "max_iter": max_iter}

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

    layers = _zip(range(shapes.N), K, b, shapes.steps(h), per_layer(X, shapes.N))
    return _run(layer, y, layers, trajectory, inverse=inverse, halves=True)


def midpoint(
    y: Tensor,
    K: Tensor,
    b: Tensor,
    h: Step,
    *,
    J: Tensor | None = None,
    activation: str | Activation = "tanh",
    trajectory: bool = False,
    inverse: bool = False,
    tol: float | None = None,
    max_iter: int = implicit.MAX_ITER,
) -> Tensor:
    """y_{j+1} = y_j + h J K^T sigma(K (y_j + y_{j+1})/2 + b): the implicit midpoint rule.

    Order 2, and Poisson (`Phi^T J Phi = J`) for any skew J: full K, odd n and singular J included.
    Arguments as in `h1`.
    """
    sigma = activations.get(activation)
    _check_full("midpoint", y, K, b, h, J)
    check_tolerance("midpoint", tol, max_iter)
    newton: dict[str, Any] = {"tol": tol, "max_iter": max_iter}
    half = -0.5 if inverse else 0.5

    def layer(y: Tensor, j: int, K: Tensor, b: Tensor, h, J: Tensor | None) -> Tensor:
        B, where = (half * h) * times_J(K, J).mT, f"midpoint, layer {j}"
        undo = (None, -B, K) if inverse else None
        middle = implicit.solve(y, B, K, b, sigma, where=where, undo=undo, **newton)
        return 2 * middle - y

    steps = layer_steps("midpoint", h, len(K))
    layers = _zip(range(len(K)), K, b, steps, per_layer(J, len(K)))
    return _run(layer, y, layers, trajectory, inverse=inverse)


# How a stack runs

Halves = tuple[Tensor, Tensor]


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


def _zip(*stacks: Tensor | Iterable[Any]) -> list[tuple[Any, ...]]:
    """The weights of one layer after the other."""
    # unbind, not indexing: the gradient of N selections of a stack costs N^2.
    unbound = [s.unbind(0) if isinstance(s, Tensor) else s for s in stacks]
    return list(zip(*unbound, strict=True))


def _check_full(where: str, y: Tensor, K: Tensor, b: Tensor, h: Step, J: Tensor | None) -> None:
    """Check the arguments of a scheme with a full K."""
    shapes = Shapes(where, y, split=J is None)
    shapes.check("K", K, "N r n")
    shapes.check("b", b, "N r")
    if J is not None:
        shapes.check("J", J, "n n", "N n n")
    shapes.steps(h)
