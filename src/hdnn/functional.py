"""The paper's layer equations, one function each, with checked arguments.

Every function runs a whole stack of N layers and is pure, differentiable and batched over any
leading axes: y is (*batch, n), weights lead with the layer: K is (N, r, n). The halves of
y = (p, q) have m = n/2 features. A layer acts on column vectors as K^T sigma(K y + b); for row
vectors that is sigma(y K^T + b) K. `h` is a float, or a tensor (N,) with a step for each layer.
`trajectory=True` returns all states y_0 .. y_N as (N+1, *batch, n). Where a scheme can be undone,
`inverse=True` takes y_N back to y_0, and a trajectory still comes in forward order.

Shapes are always checked, values of tensors never (the networks do that once, when made), so that
`torch.compile` and `vmap` see through every function. `hdnn.reference` defines what is computed;
`engine` and `backprop` only say how explicit stacks run (see `hdnn.engine`). A call with the shapes
and options of an earlier one needs no new check and goes straight to its kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from hdnn import activations, reference
from hdnn.activations import Activation
from hdnn.base.shapes import Shapes, Step, check_tolerance
from hdnn.engine import prepared
from hdnn.engine.call import Call
from hdnn.integrators import implicit, splitting
from hdnn.reference import partial_H

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


def energy(y: Tensor, K: Tensor, b: Tensor, *, activation: str | Activation = "tanh") -> Tensor:
    """H(y) = sum_i s(K y + b)_i with s' = sigma and s(0) = 0, for one layer (eq:nlH)."""
    sigma = activations.get(activation)
    _check("energy", y, {"K": "r n", "b": "r"}, (K, b))
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
    sigma, kind = activations.get(activation), "canonical" if J is None else "general"
    call = Call(None, kind, False, y, (K, b), J, h, sigma)
    return _run(call, "h1", FULL, reference.h1, trajectory, engine, backprop)


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
    call = Call(None, "identity", False, y, (K, b), None, h, sigma)
    return _run(call, "ms2", SQUARE, reference.ms2, trajectory, engine, backprop)


def mlp(
    y: Tensor,
    K: Tensor,
    b: Tensor,
    *,
    activation: str | Activation = "tanh",
    trajectory: bool = False,
) -> Tensor:
    """y_{j+1} = sigma(K_j y_j + b_j), the multilayer perceptron of fig:gradients; K (N, n, n)."""
    sigma = activations.get(activation)
    _check("mlp", y, SQUARE, (K, b))
    return reference.run(reference.mlp, y, (K, b), 1.0, None, sigma, trajectory=trajectory)


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
    weights = (K_p, K_q, b_p, b_q)
    return _split(y, weights, X, h, shears, activation, trajectory, inverse, engine, backprop)


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
    weights, shears = (K_p, K_q, b_p, b_q), splitting.SEMI_IMPLICIT_EULER
    return _split(y, weights, X, h, shears, activation, trajectory, False, engine, backprop)


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
    weights, shears = (K_p, K_q, b_p, b_q), splitting.SEMI_IMPLICIT_EULER
    return _split(y, weights, X, h, shears, activation, trajectory, True, engine, backprop)


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
    weights, shears = (K_p, K_q, b_p, b_q), splitting.VERLET
    return _split(y, weights, X, h, shears, activation, trajectory, inverse, engine, backprop)


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
    weights, shears = (K_p, K_q, b_p, b_q), splitting.YOSHIDA4
    return _split(y, weights, X, h, shears, activation, trajectory, inverse, engine, backprop)


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
    """H2 with both signs changed   (eq:MS3).

    p_{j+1} = p_j + h K_1^T sigma(K_1 q_j + b_1), then
    q_{j+1} = q_j - h K_2^T sigma(K_2 p_{j+1} + b_2); K_1, K_2 (N, r, m), b_1, b_2 (N, r).
    """
    weights, shears = (K_2, K_1, b_2, b_1), splitting.MS3
    return _split(y, weights, None, h, shears, activation, trajectory, inverse, engine, backprop)


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
    call = Call(splitting.MS1, "identity", inverse, y, (K_0, b_1, b_2), None, h, sigma)
    return _run(call, "ms1", OF_MS1, reference.ms1, trajectory, engine, backprop)


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
    sigma = activations.get(activation)
    _check("implicit_h2", y, FULL, (K, b), split=True, X=X).steps(h)
    check_tolerance("implicit_h2", tol, max_iter)
    layer = partial(reference.implicit_h2, inverse=inverse, tol=tol, max_iter=max_iter)
    stack, how = (range(len(K)), K, b), {"trajectory": trajectory, "inverse": inverse}
    return reference.run(layer, y, stack, h, X, sigma, halves=True, **how)


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
    _check("midpoint", y, FULL, (K, b), split=J is None, J=J).steps(h)
    check_tolerance("midpoint", tol, max_iter)
    layer = partial(reference.midpoint, inverse=inverse, tol=tol, max_iter=max_iter)
    stack, how = (range(len(K)), K, b), {"trajectory": trajectory, "inverse": inverse}
    return reference.run(layer, y, stack, h, J, sigma, **how)


# What all of them share


FULL, SQUARE = {"K": "N r n", "b": "N r"}, {"K": "N n n", "b": "N n"}
OF_MS1 = {"K_0": "N m m", "b_1": "N m", "b_2": "N m"}
LINKS = {"J": ("n n", "N n n"), "X": ("m m", "N m m")}


def _split(
    y: Tensor,
    weights: tuple[Tensor, ...],
    X: Tensor | None,
    h: Step,
    shears: tuple[splitting.Shear, ...],
    activation: str | Activation,
    trajectory: bool,
    inverse: bool,
    engine: str | None,
    backprop: str | None,
) -> Tensor:
    sigma, kind = activations.get(activation), "same" if X is None else "general"
    call = Call(shears, kind, inverse, y, weights, X, h, sigma)
    return _run(call, "", None, reference.split, trajectory, engine, backprop)


def _run(
    call: Call,
    name: str,
    specs: dict[str, str] | None,
    layer: Callable[..., Any],
    trajectory: bool,
    engine: str | None,
    backprop: str | None,
) -> Tensor:
    """An explicit stack: by kernels, or layer by layer, as is always so for a trajectory."""
    if not trajectory and (run := prepared.known(call, engine, backprop)):
        return run(call)
    shears, kind, inverse, y, weights, link, h, sigma = call
    halves = shears is not None
    if specs is None:
        name, specs = splitting.named(shears)  # pyright: ignore  # which refuses None
        name += "_inverse" * inverse
    links = {"X" if halves else "J": link}
    _check(name, y, specs, weights, split=halves or kind == "canonical", **links).steps(h)
    if not trajectory and (run := prepared.choose(call, engine, backprop)):
        return run(call)
    if shears is not None:
        layer = partial(layer, shears=splitting.inverse(shears) if inverse else shears)
    how = {"trajectory": trajectory, "inverse": inverse, "halves": halves}
    return reference.run(layer, y, weights, h, link, sigma, **how)


def _check(
    where: str,
    y: Tensor,
    specs: dict[str, str],
    weights: Sequence[Tensor],
    *,
    split: bool = False,
    **links: Tensor | None,
) -> Shapes:
    """Check the shapes of all tensors; those of weights are in the order of `specs`."""
    shapes, given = Shapes(where, y, split=split), dict(zip(specs, weights, strict=True))
    for letter in sorted(specs):  # as users give them
        shapes.check(letter, given[letter], specs[letter])
    for letter, link in links.items():
        if link is not None:
            shapes.check(letter, link, *LINKS[letter])
    return shapes
