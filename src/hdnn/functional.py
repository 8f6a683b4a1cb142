"""The paper's layer equations, one function each, which check shapes and run the stack.

Every function is pure and differentiable, and runs N layers on states y `(*batch, n)`; the halves
of `y = (p, q)` have m = n/2 features. The functions share these arguments:

- `K ..`, `b ..`: weights `(N, r, n)` and biases `(N, r)`; weights for a half have m instead of n
  columns.
- `h`: the step: one number, or one for each layer as a list or a tensor `(N,)`.
- `X`: `(m, m)`, or `(N, m, m)` for one per layer; by default the identity.
- `a_p`, `a_q`: gains `(N, r)` of any sign, which multiply each row's sigma; by default 1.
- `J`: skew-symmetric, `(n, n)` or `(N, n, n)`; by default `[[0, -I], [I, 0]]`.
- `activation`: a name such as "tanh" (the default), or an `hdnn.activations.Activation`.
- `trajectory`: return all states `y_0 .. y_N` as `(N+1, *batch, n)`, in forward order.
- `inverse`: compute `y_0` from `y_N`; not for `h1`, `ms2` and `mlp`.
- `engine`, `backprop`: how an explicit stack runs; by default the settings of `hdnn.engine.use`.
- `tol`, `max_iter`: the options of an implicit layer's solver; see `hdnn.implicit.solve`.

The functions return `y_N` as `(*batch, n)`. Arguments that do not fit raise a `ShapeError`, a
`DtypeError` or an `OptionError`; the implicit functions raise a `ConvergenceError` if a layer has
no solution. Values are not checked. `hdnn.schemes` defines the computation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypedDict, Unpack

import torch
from torch import Tensor

from hdnn import activations, schemes
from hdnn.activations import Activation
from hdnn.engine import run as run_fast
from hdnn.errors import (
    DtypeError,
    OptionError,
    ShapeError,
    positive_float,
    positive_int,
)
from hdnn.schemes import Force, Scheme

__all__ = [
    "discrete_gradient",
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
    "run",
    "split",
    "verlet",
    "yoshida4",
]

Step = float | Tensor | Sequence[float]


class How(TypedDict, total=False):
    """Options of every stack."""

    activation: str | Activation
    trajectory: bool
    inverse: bool
    engine: str | None
    backprop: str | None


class Newton(How, total=False):
    """Options of an implicit stack."""

    tol: float | None
    max_iter: int


def energy(
    y: Tensor, K: Tensor, b: Tensor, *, activation: str | Activation = "tanh"
) -> Tensor:
    """The energy of one layer: `H(y) = sum_i s(K y + b)_i` with `s' = sigma`, `s(0) = 0`.

    Args:
        y: states `(*batch, n)`.
        K: weights `(r, n)`.
        b: biases `(r,)`.
        activation: sigma.

    Examples:
        >>> import torch
        >>> from hdnn import functional
        >>> y, K, b = torch.tensor([[0.0, 2.0]]), torch.eye(2), torch.zeros(2)
        >>> functional.energy(y, K, b, activation="identity")  # half the square of each entry
        tensor([2.])
    """
    if K.shape != (*b.shape, y.shape[-1]):
        raise ShapeError(
            f"energy: K has shape {tuple(K.shape)} and b {tuple(b.shape)}, but must have (r, n) "
            f"and (r,) with n = {y.shape[-1]}."
        )
    return activations.get(activation).integral(y @ K.mT + b).sum(-1)


def partial_H(y: Tensor, K: Tensor, b: Tensor, sigma: Activation) -> Tensor:
    """The gradient of the energy of one layer: `dH/dy = K^T sigma(K y + b)`."""
    return Force(K, b).at(y, sigma)


# Forward Euler


def h1(
    y: Tensor,
    K: Tensor,
    b: Tensor,
    h: Step,
    *,
    J: Tensor | None = None,
    **how: Unpack[How],
) -> Tensor:
    """Forward Euler: `y_{j+1} = y_j + h J K^T sigma(K y_j + b)`.

    Examples:
        >>> import torch
        >>> from hdnn import functional
        >>> y, K, b = torch.randn(32, 4), torch.randn(8, 6, 4), torch.zeros(8, 6)
        >>> functional.h1(y, K, b, h=0.1).shape
        torch.Size([32, 4])
        >>> functional.h1(y, K, b, h=0.1, trajectory=True).shape
        torch.Size([9, 32, 4])
    """
    return run(schemes.FORWARD_EULER, y, turned(K, b, J), h, **how)


def ms2(y: Tensor, K: Tensor, b: Tensor, h: Step, **how: Unpack[How]) -> Tensor:
    """The network MS2: `y_{j+1} = y_j + h sigma(K y_j + b)`, each K skew-symmetric, `(N, n, n)`."""
    return run(schemes.FORWARD_EULER, y, bare(K, b), h, **how)


def mlp(y: Tensor, K: Tensor, b: Tensor, **how: Unpack[How]) -> Tensor:
    """A multilayer perceptron: `y_{j+1} = sigma(K y_j + b)`, whose gradients vanish."""
    return run(schemes.PERCEPTRON, y, bare(K, b), 1.0, **how)


# p and q take turns


def h2(
    y: Tensor,
    K_p: Tensor,
    K_q: Tensor,
    b_p: Tensor,
    b_q: Tensor,
    h: Step,
    *,
    X: Tensor | None = None,
    a_p: Tensor | None = None,
    a_q: Tensor | None = None,
    **how: Unpack[How],
) -> Tensor:
    """Semi-implicit Euler with a block-diagonal K: explicit, symplectic, gradients never vanish.

        p_{j+1} = p_j - h X^T K_q^T sigma(K_q q_j + b_q), then
        q_{j+1} = q_j + h X K_p^T sigma(K_p p_{j+1} + b_p)

    Examples:
        >>> import torch
        >>> from hdnn import functional
        >>> y, K, b = torch.randn(4), torch.randn(64, 2, 2), torch.zeros(64, 2)
        >>> Phi = torch.autograd.functional.jacobian(
        ...     lambda y: functional.h2(y, K, K, b, b, h=0.1), y
        ... )
        >>> bool(torch.linalg.matrix_norm(Phi, 2) >= 1)  # norm(dy_N/dy_0)
        True
    """
    forces = coupled(K_p, K_q, b_p, b_q, X, a_p, a_q)
    return run(schemes.SEMI_IMPLICIT_EULER, y, forces, h, **how)


def h2_inverse(
    y: Tensor,
    K_p: Tensor,
    K_q: Tensor,
    b_p: Tensor,
    b_q: Tensor,
    h: Step,
    *,
    X: Tensor | None = None,
    a_p: Tensor | None = None,
    a_q: Tensor | None = None,
    **how: Unpack[How],
) -> Tensor:
    """The exact inverse of `h2`: `y_0` from `y_N`."""
    how["inverse"] = True
    return h2(y, K_p, K_q, b_p, b_q, h, X=X, a_p=a_p, a_q=a_q, **how)


def verlet(
    y: Tensor,
    K_p: Tensor,
    K_q: Tensor,
    b_p: Tensor,
    b_q: Tensor,
    h: Step,
    *,
    X: Tensor | None = None,
    a_p: Tensor | None = None,
    a_q: Tensor | None = None,
    **how: Unpack[How],
) -> Tensor:
    """Stoermer-Verlet: half a step of p, a step of q, half a step of p. Order 2, symplectic."""
    forces = coupled(K_p, K_q, b_p, b_q, X, a_p, a_q)
    return run(schemes.VERLET, y, forces, h, **how)


def yoshida4(
    y: Tensor,
    K_p: Tensor,
    K_q: Tensor,
    b_p: Tensor,
    b_q: Tensor,
    h: Step,
    *,
    X: Tensor | None = None,
    a_p: Tensor | None = None,
    a_q: Tensor | None = None,
    **how: Unpack[How],
) -> Tensor:
    """Yoshida's three Verlet steps, the middle one backwards in time. Order 4, symplectic."""
    forces = coupled(K_p, K_q, b_p, b_q, X, a_p, a_q)
    return run(schemes.YOSHIDA4, y, forces, h, **how)


def split(
    y: Tensor,
    K_p: Tensor,
    K_q: Tensor,
    b_p: Tensor,
    b_q: Tensor,
    h: Step,
    *,
    shears: tuple[tuple[str, float], ...],
    X: Tensor | None = None,
    a_p: Tensor | None = None,
    a_q: Tensor | None = None,
    **how: Unpack[How],
) -> Tensor:
    """Any sequence of p- and q-updates as one layer, each by a fraction of the step.

    `shears` lists pairs: the half that moves, "p" or "q", and its fraction c:

        p <- p - c h X^T K_q^T sigma(K_q q + b_q)
        q <- q + c h X K_p^T sigma(K_p p + b_p)

    Any such sequence is symplectic, explicit and invertible.

    Examples:
        >>> import torch
        >>> from hdnn import functional
        >>> y, K, b = torch.randn(32, 4), torch.randn(8, 2, 2), torch.zeros(8, 2)
        >>> q_first = (("q", 0.5), ("p", 1.0), ("q", 0.5))  # Verlet with the halves swapped
        >>> z = functional.split(y, K, K, b, b, h=0.1, shears=q_first)
        >>> back = functional.split(z, K, K, b, b, h=0.1, shears=q_first, inverse=True)
        >>> torch.allclose(back, y, atol=1e-5)
        True
    """
    moves = tuple(
        (1, -fraction) if half == "p" else (0, fraction)
        for half, fraction in shears
    )
    forces = coupled(K_p, K_q, b_p, b_q, X, a_p, a_q)
    return run(Scheme("split", 1, moves), y, forces, h, **how)


def ms3(
    y: Tensor,
    K_1: Tensor,
    K_2: Tensor,
    b_1: Tensor,
    b_2: Tensor,
    h: Step,
    **how: Unpack[How],
) -> Tensor:
    """The network MS3: H2 with both signs changed.

    p_{j+1} = p_j + h K_1^T sigma(K_1 q_j + b_1), then
    q_{j+1} = q_j - h K_2^T sigma(K_2 p_{j+1} + b_2)
    """
    forces = coupled(K_2, K_1, b_2, b_1)
    return run(schemes.MS3, y, forces, h, **how)


def ms1(
    y: Tensor,
    K_0: Tensor,
    b_1: Tensor,
    b_2: Tensor,
    h: Step,
    **how: Unpack[How],
) -> Tensor:
    """The network MS1: q moves first, and there is no `K^T` outside of sigma; K_0 is `(N, m, m)`.

    q_{j+1} = q_j - h sigma(K_0^T p_j + b_1), then
    p_{j+1} = p_j + h sigma(K_0 q_{j+1} + b_2)
    """
    forces = bare(K_0.mT, b_1) + bare(K_0, b_2)
    return run(schemes.MS1, y, forces, h, **how)


# Implicit schemes: each layer is solved by Newton's method


def implicit_h2(
    y: Tensor,
    K: Tensor,
    b: Tensor,
    h: Step,
    *,
    X: Tensor | None = None,
    **how: Unpack[Newton],
) -> Tensor:
    """Semi-implicit Euler with a full K: symplectic.

    y_{j+1} = y_j + h J K^T sigma(K (p_{j+1}, q_j) + b),        J = [[0, -X^T], [X, 0]]
    """
    J = None if X is None else from_X(X)
    return _solved(schemes.ImplicitEuler, y, turned(K, b, J), h, **how)


def midpoint(
    y: Tensor,
    K: Tensor,
    b: Tensor,
    h: Step,
    *,
    J: Tensor | None = None,
    **how: Unpack[Newton],
) -> Tensor:
    """The implicit midpoint rule: `y_{j+1} = y_j + h J K^T sigma(K (y_j + y_{j+1})/2 + b)`.

    Order 2, and Poisson (`Phi^T J Phi = J`) for any skew-symmetric J, including one of odd n or a
    singular one.
    """
    return _solved(schemes.Midpoint, y, turned(K, b, J), h, **how)


def discrete_gradient(
    y: Tensor,
    K: Tensor,
    b: Tensor,
    h: Step,
    *,
    J: Tensor | None = None,
    **how: Unpack[Newton],
) -> Tensor:
    """Layers that each keep their energy `H(y) = sum s(K y + b)` to rounding, for any h.

        y_{j+1} = y_j + h J K^T (s(K y_{j+1} + b) - s(K y_j + b)) / (K (y_{j+1} - y_j))

    Order 2, but not symplectic: `norm(dy_N/dy_j) >= 1` is not promised.

    Examples:
        >>> import torch
        >>> from hdnn import functional
        >>> K, b = torch.randn(1, 4, 4).double().expand(50, 4, 4), torch.zeros(50, 4).double()
        >>> y = functional.discrete_gradient(torch.randn(4).double(), K, b, h=0.5, trajectory=True)
        >>> H = functional.energy(y, K[0], b[0])  # the same weights in all layers
        >>> torch.allclose(H, H[0], rtol=1e-12)
        True
    """
    return _solved(schemes.DiscreteGradient, y, turned(K, b, J), h, **how)


# Forces: X and J are folded into V


def coupled(
    K_p: Tensor,
    K_q: Tensor,
    b_p: Tensor,
    b_q: Tensor,
    X: Tensor | None = None,
    a_p: Tensor | None = None,
    a_q: Tensor | None = None,
) -> tuple[Force, ...]:
    """The forces `X K_p^T sigma(K_p p + b_p)` on q and `X^T K_q^T sigma(K_q q + b_q)` on p.

    Gains `a_p` and `a_q` multiply sigma.
    """
    on_q = Force(K_p, b_p)
    on_p = Force(K_q, b_q)
    if X is not None:
        _check_square("X", X, K_p)
        on_q = Force(K_p, b_p, _product(K_p, X.mT))
        on_p = Force(K_q, b_q, _product(K_q, X))
    return _scaled(on_q, a_p), _scaled(on_p, a_q)


def _scaled(force: Force, a: Tensor | None) -> Force:
    """A force with gains a."""
    if a is None:
        return force
    if a.shape != force.b.shape:
        raise ShapeError(
            f"gains have shape {tuple(a.shape)}, but must be {tuple(force.b.shape)}, the same as b."
        )
    return force._replace(V=a if force.V is None else a.unsqueeze(-1) * force.V)


def turned(K: Tensor, b: Tensor, J: Tensor | None = None) -> tuple[Force, ...]:
    """The force `J K^T sigma(K y + b)` on the whole state."""
    if J is not None:
        _check_square("J", J, K)
        return (Force(K, b, _product(K, J.mT)),)
    if K.shape[-1] % 2:
        raise ShapeError(
            f"the canonical J needs an even number of features, but n = {K.shape[-1]}; add a zero "
            "(hdnn.heads.Augment), or give a skew-symmetric J."
        )
    K_p, K_q = K.chunk(2, -1)
    V = torch.cat([-K_q, K_p], -1)
    return (Force(K, b, V),)


def bare(K: Tensor, b: Tensor) -> tuple[Force, ...]:
    """The force `sigma(K y + b)`: V is the identity."""
    N, rows, _ = K.shape
    eye = torch.eye(rows, dtype=K.dtype, device=K.device)
    return (Force(K, b, eye.expand(N, -1, -1)),)


def from_X(X: Tensor) -> Tensor:
    """The skew-symmetric `J = [[0, -X^T], [X, 0]]`."""
    zero = torch.zeros_like(X)
    return blocks(zero, -X.mT, X, zero)


def blocks(A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
    """The matrix `[[A, B], [C, D]]`."""
    upper = torch.cat([A, B], -1)
    lower = torch.cat([C, D], -1)
    return torch.cat([upper, lower], -2)


def _product(A: Tensor, B: Tensor) -> Tensor:
    """A B, in full precision also under autocast."""
    if A.is_meta:  # which has no autocast
        return A @ B
    with torch.autocast(A.device.type, enabled=False):
        return A @ B


def _check_square(name: str, matrix: Tensor, K: Tensor) -> None:
    N, _, size = K.shape
    if matrix.shape not in ((size, size), (N, size, size)):
        raise ShapeError(
            f"{name} has shape {tuple(matrix.shape)}, but must be ({size}, {size}), or ({N}, "
            f"{size}, {size}) for one matrix per layer."
        )


# Shared by all functions


def _solved(
    rule: type[schemes.Implicit],
    y: Tensor,
    forces: tuple[Force, ...],
    h: Step,
    *,
    tol: float | None = None,
    max_iter: int = schemes.MAX_ITER,
    **how: Unpack[How],
) -> Tensor:
    tol = None if tol is None else positive_float("tol", tol)
    scheme = rule(tol=tol, max_iter=positive_int("max_iter", max_iter))
    return run(scheme, y, forces, h, **how)


def run(
    scheme: Scheme,
    y: Tensor,
    forces: Sequence[Force],
    h: Step,
    *,
    activation: str | Activation = "tanh",
    trajectory: bool = False,
    inverse: bool = False,
    engine: str | None = None,
    backprop: str | None = None,
) -> Tensor:
    """The result of a stack of any scheme, checked and run by an engine.

    Args:
        scheme: how a layer steps.
        y: states `(*batch, n)`.
        forces: the forces of all layers; `forces[i]` reads half i.
        h: the step.
        activation: sigma.
        trajectory: return all states.
        inverse: compute the first state from the last.
        engine: the engine that runs the layers.
        backprop: which saved states the backward pass starts from.
    """
    sigma = activations.get(activation)
    _check(scheme, y, forces)
    if inverse and not scheme.invertible:
        raise OptionError(
            f"{scheme.name} has no inverse; use a scheme with halves, such as h2."
        )
    if isinstance(h, float) and 0 < h < math.inf:
        step = h
    else:
        step = _step(h, y, len(forces[0].K))
    how = {"trajectory": trajectory, "inverse": inverse}
    if not scheme.moves:  # implicit layers and perceptrons run one by one
        return schemes.run(scheme, y, forces, step, sigma, **how)
    return run_fast(
        scheme, y, forces, step, sigma, engine=engine, backprop=backprop, **how
    )


def _check(scheme: Scheme, y: Tensor, forces: Sequence[Force]) -> None:
    """Raise unless the state and all weights fit together."""
    if not isinstance(y, Tensor) or not y.is_floating_point():
        kind = getattr(y, "dtype", type(y).__name__)
        raise DtypeError(
            f"y must be a floating-point tensor (*batch, n), but got {kind}."
        )
    if y.ndim < 1:
        raise ShapeError("y must be (*batch, n), but is a single number.")
    n = y.shape[-1]
    if scheme.halves and n % 2:
        raise ShapeError(
            f"y has {n} features, but (p, q) needs an even number; add a zero (hdnn.heads.Augment)."
        )
    size = n // 2 if scheme.halves else n
    K = forces[0].K
    N = len(K)
    for K, b, _ in forces:
        if K.shape != (*b.shape, size) or b.shape[:1] != (N or 1,):
            raise ShapeError(
                f"K has shape {tuple(K.shape)} and b {tuple(b.shape)}, but must have (N, r, "
                f"{size}) and (N, r) for states of n = {n} features, with N >= 1 layers."
            )
    cast = y.is_meta or torch.is_autocast_enabled(y.device.type)
    if K.device != y.device:
        raise ShapeError(
            f"y is on {y.device}, but the weights are on {K.device}; use .to() to make them match."
        )
    if K.dtype != y.dtype and not cast:
        raise DtypeError(
            f"y is {y.dtype}, but the weights are {K.dtype}; use .to() to make them match."
        )


def _step(h: Step, y: Tensor, N: int) -> float | Tensor:
    """The step as one number, or as a tensor with one number per layer."""
    if isinstance(h, (list, tuple)):
        h = torch.tensor(
            [positive_float("h", step) for step in h],
            dtype=y.dtype,
            device=y.device,
        )
    if not isinstance(h, Tensor):
        return positive_float("h", h)
    if h.shape not in ((), (N,)):
        raise ShapeError(
            f"h must be one number or have shape ({N},), but has {tuple(h.shape)}."
        )
    return h
