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

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from hdnn import activations, interconnection
from hdnn import engine as engines
from hdnn.activations import Activation
from hdnn.integrators import implicit, splitting
from hdnn.shapes import Shapes, Step, check_tolerance, per_layer

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
    steps = _full_steps("h1", y, K, b, h, J)

    def layer(y: Tensor, K: Tensor, b: Tensor, h, J: Tensor | None) -> Tensor:
        return y + h * _times_J(partial_H(y, K, b, sigma), J)

    if not trajectory and (plan := _planned(y, sigma, engine, backprop)) is not None:
        V, kind = (None, "canonical") if J is None else (_times_J(K, J), "general")
        return plan.euler(y, K, b, V, steps, kind)
    return _run(layer, y, _zip(K, b, steps, per_layer(J, len(K))), trajectory)


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
    sigma, shapes = activations.get(activation), Shapes("ms2", y)
    shapes.check("K", K, "N n n")
    shapes.check("b", b, "N n")

    steps = shapes.steps(h)

    def layer(y: Tensor, K: Tensor, b: Tensor, h) -> Tensor:
        return y + h * sigma(y @ K.mT + b)

    if not trajectory and (plan := _planned(y, sigma, engine, backprop)) is not None:
        return plan.euler(y, K, b, None, steps, "identity")
    return _run(layer, y, _zip(K, b, steps), trajectory)


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
    where, names = splitting.NAMES.get(shears, ("split", splitting.WEIGHTS))
    shapes = Shapes(where + "_inverse" * inverse, y, split=True)
    specs = ((K_p, "N r_p m"), (K_q, "N r_q m"), (b_p, "N r_p"), (b_q, "N r_q"))
    for name, k in sorted((name, k) for k, name in enumerate(names)):  # as the caller gave them
        shapes.check(name, *specs[k])
    if X is not None:
        shapes.check("X", X, "m m", "N m m")
    steps = shapes.steps(h)
    if not trajectory and (plan := _planned(y, sigma, engine, backprop, True)) is not None:
        V = (_times_X(K_p, X), _times_X(K_q, X, adjoint=True)) if X is not None else (None, None)
        kind = "same" if X is None else "general"
        return plan.split(y, (K_p, K_q, b_p, b_q), V, steps, shears, kind, inverse)
    layers = _zip(K_p, K_q, b_p, b_q, steps, per_layer(X, shapes.N))
    turns = splitting.inverse(shears) if inverse else shears

    def layer(y: Halves, K_p: Tensor, K_q: Tensor, b_p: Tensor, b_q: Tensor, h, X) -> Halves:
        p, q = y
        for half, fraction in turns:
            if half == "p":  # p - h X^T K_q^T sigma(K_q q + b_q)   (eq:p_update)
                p = p - (fraction * h) * _times_X(partial_H(q, K_q, b_q, sigma), X, adjoint=True)
            else:  # q + h X K_p^T sigma(K_p p + b_p)   (eq:q_update)
                q = q + (fraction * h) * _times_X(partial_H(p, K_p, b_p, sigma), X)
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
    sigma, shapes = activations.get(activation), Shapes("ms1", y, split=True)
    shapes.check("K_0", K_0, "N m m")
    shapes.check("b_1", b_1, "N m")
    shapes.check("b_2", b_2, "N m")

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

    steps = shapes.steps(h)
    if not trajectory and (plan := _planned(y, sigma, engine, backprop, True)) is not None:
        weights = (K_0.mT, K_0, b_1, b_2)
        return plan.split(y, weights, (None, None), steps, splitting.MS1, "identity", inverse)
    layers = _zip(K_0, b_1, b_2, steps)
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
        if inverse:
            a = p @ K_p.mT + b
            q = implicit.solve(q, -h * _times_X(K_p, X).mT, K_q, a, sigma, where=where, **newton)
            p = p + h * _times_X(sigma(a + q @ K_q.mT) @ K_q, X, adjoint=True)
        else:
            a = q @ K_q.mT + b
            B = -h * _times_X(K_q, X, adjoint=True).mT
            p = implicit.solve(p, B, K_p, a, sigma, where=where, **newton)
            q = q + h * _times_X(sigma(a + p @ K_p.mT) @ K_p, X)
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
    steps = _full_steps("midpoint", y, K, b, h, J)
    check_tolerance("midpoint", tol, max_iter)
    newton: dict[str, Any] = {"tol": tol, "max_iter": max_iter}
    half = -0.5 if inverse else 0.5

    def layer(y: Tensor, j: int, K: Tensor, b: Tensor, h, J: Tensor | None) -> Tensor:
        B = (half * h) * _times_J(K, J).mT
        middle = implicit.solve(y, B, K, b, sigma, where=f"midpoint, layer {j}", **newton)
        return 2 * middle - y

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


def _full_steps(
    where: str, y: Tensor, K: Tensor, b: Tensor, h: Step, J: Tensor | None
) -> Sequence[Any]:
    """Check the arguments of a scheme with a full K, and return its step for each layer."""
    shapes = Shapes(where, y, split=J is None)
    shapes.check("K", K, "N r n")
    shapes.check("b", b, "N r")
    if J is not None:
        shapes.check("J", J, "n n", "N n n")
    return shapes.steps(h)


_LAYER_BY_LAYER = engines.Settings(engine="reference", backprop="stored")


def _planned(
    y: Tensor,
    sigma: Activation,
    engine: str | None,
    backprop: str | None,
    reversible: bool = False,
) -> Any:
    """How a stack runs other than layer by layer here, or None."""
    if torch.compiler.is_compiling():  # the compiler sees each layer, unless it is told not to
        if engine != "fused" and backprop not in ("checkpoint", "reversible"):
            return None
        from hdnn.engine import compiled

        return compiled.prepare(sigma.name, engine, backprop, reversible)
    settings = engines.current(engine=engine, backprop=backprop)
    if settings == _LAYER_BY_LAYER:
        return None
    from hdnn.engine import dispatch

    return dispatch.prepare(settings, y, sigma, reversible)


def _times_J(g: Tensor, J: Tensor | None) -> Tensor:
    """J g for rows g (..., n), by default with the canonical J."""
    return interconnection.times_canonical(g) if J is None else g @ J.mT


def _times_X(g: Tensor, X: Tensor | None, *, adjoint: bool = False) -> Tensor:
    """X g, or X^T g, for rows g (..., m)."""
    if X is None:
        return g
    return g @ (X if adjoint else X.mT)
