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
    call = Call(None, "canonical" if J is None else "general", False, y, (K, b), J, h, sigma)
    if not trajectory and (run := prepared.known(call, engine, backprop)):
        return run(call)
    _check_full("h1", y, K, b, h, J)
    if not trajectory and (run := prepared.choose(call, engine, backprop)):
        return run(call)
    return reference.h1(y, K, b, h, J, sigma, trajectory)


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
    if not trajectory and (run := prepared.known(call, engine, backprop)):
        return run(call)
    shapes = Shapes("ms2", y)
    shapes.check("K", K, "N n n")
    shapes.check("b", b, "N n")
    shapes.steps(h)
    if not trajectory and (run := prepared.choose(call, engine, backprop)):
        return run(call)
    return reference.ms2(y, K, b, h, sigma, trajectory)


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
    return reference.mlp(y, K, b, sigma, trajectory)


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


def _split(
    y: Tensor,
    weights: tuple[Tensor, Tensor, Tensor, Tensor],
    X: Tensor | None,
    h: Step,
    shears: tuple[splitting.Shear, ...],
    activation: str | Activation,
    trajectory: bool,
    inverse: bool,
    engine: str | None,
    backprop: str | None,
) -> Tensor:
    sigma = activations.get(activation)
    call = Call(shears, "same" if X is None else "general", inverse, y, weights, X, h, sigma)
    if not trajectory and (run := prepared.known(call, engine, backprop)):
        return run(call)
    name, letters = splitting.NAMES.get(shears, ("split", splitting.WEIGHTS))
    shapes = Shapes(name + "_inverse" * inverse, y, split=True)
    given = zip(letters, weights, ("N r_p m", "N r_q m", "N r_p", "N r_q"), strict=True)
    for letter, tensor, spec in sorted(given, key=lambda one: one[0]):  # as the user gives them
        shapes.check(letter, tensor, spec)
    if X is not None:
        shapes.check("X", X, "m m", "N m m")
    shapes.steps(h)
    if not trajectory and (run := prepared.choose(call, engine, backprop)):
        return run(call)
    return reference.split(y, *weights, h, X, shears, sigma, trajectory, inverse)


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
    if not trajectory and (run := prepared.known(call, engine, backprop)):
        return run(call)
    shapes = Shapes("ms1", y, split=True)
    shapes.check("K_0", K_0, "N m m")
    shapes.check("b_1", b_1, "N m")
    shapes.check("b_2", b_2, "N m")
    shapes.steps(h)
    if not trajectory and (run := prepared.choose(call, engine, backprop)):
        return run(call)
    return reference.ms1(y, K_0, b_1, b_2, h, sigma, trajectory, inverse)


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
    shapes.steps(h)
    options = (X, sigma, trajectory, inverse)
    return reference.implicit_h2(y, K, b, h, *options, tol=tol, max_iter=max_iter)


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
    options = (J, sigma, trajectory, inverse)
    return reference.midpoint(y, K, b, h, *options, tol=tol, max_iter=max_iter)


def _check_full(where: str, y: Tensor, K: Tensor, b: Tensor, h: Step, J: Tensor | None) -> None:
    """Check the arguments of a scheme with a full K."""
    shapes = Shapes(where, y, split=J is None)
    shapes.check("K", K, "N r n")
    shapes.check("b", b, "N r")
    if J is not None:
        shapes.check("J", J, "n n", "N n n")
    shapes.steps(h)
