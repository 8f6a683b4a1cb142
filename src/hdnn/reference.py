"""The paper's layer equations, one function each: the definition that everything faster is held to.

A layer takes the state, its weights, its step h, its J or X (None for the canonical one) and sigma.
`run` applies one layer after the other in plain PyTorch, and autograd does the rest. Nothing is
checked here and nothing here knows of an engine: `hdnn.functional` checks the arguments first.

y is `(*batch, n)`; its halves p and q have `m = n/2` features. A layer acts on column vectors as
`K^T sigma(K y + b)`; for row vectors that is `sigma(y K^T + b) K`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hdnn.activations import Activation
from hdnn.base.shapes import Step, layer_steps, per_layer
from hdnn.integrators import implicit, splitting
from hdnn.integrators.chords import Chord
from hdnn.interconnection import times_J, times_X

__all__ = [
    "discrete_gradient",
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
    """The gradient of the energy of one layer: `dH/dy = K^T sigma(K y + b)` (eq:partialH).

    Args:
        y: states `(*batch, n)`.
        K: weights `(r, n)`.
        b: biases `(r,)`.
        sigma: an `Activation`, such as `hdnn.activations.get("tanh")`.

    Returns:
        The gradients, `(*batch, n)`.

    Examples:
        >>> import torch
        >>> from hdnn import activations, reference
        >>> sigma = activations.get("tanh")
        >>> y, K, b = torch.randn(3, 4), torch.randn(6, 4), torch.zeros(6)
        >>> slope = torch.func.grad(lambda y: sigma.integral(y @ K.mT + b).sum())(y)
        >>> torch.allclose(reference.partial_H(y, K, b, sigma), slope, atol=1e-5)
        True
    """
    return sigma(y @ K.mT + b) @ K


def perceptron(y: Tensor, K: Tensor, b: Tensor, sigma: Activation) -> Tensor:
    """A perceptron without a step: `sigma(K y + b)`.

    Args:
        y: states `(*batch, n)`.
        K: weights `(r, n)`.
        b: biases `(r,)`.
        sigma: an `Activation`, such as `hdnn.activations.get("tanh")`.

    Returns:
        Its values, `(*batch, r)`.

    Examples:
        >>> import torch
        >>> from hdnn import activations, reference
        >>> sigma = activations.get("tanh")
        >>> reference.perceptron(torch.zeros(3, 4), torch.ones(6, 4), torch.zeros(6), sigma).shape
        torch.Size([3, 6])
    """
    return sigma(y @ K.mT + b)


# Forward Euler


def h1(
    y: Tensor, K: Tensor, b: Tensor, h: float | Tensor, J: Tensor | None, sigma: Activation
) -> Tensor:
    """One layer of forward Euler: `y + h J K^T sigma(K y + b)` (eq:H-DNN_fE).

    Args:
        y: states `(*batch, n)`.
        K: weights `(r, n)`.
        b: biases `(r,)`.
        h: the step.
        J: skew-symmetric, `(n, n)`; None for the canonical one.
        sigma: an `Activation`, such as `hdnn.activations.get("tanh")`.

    Returns:
        The next states, `(*batch, n)`.

    Examples:
        >>> import torch
        >>> from hdnn import activations, reference
        >>> sigma = activations.get("identity")
        >>> y, K, b = torch.tensor([[0.0, 5.0]]), torch.eye(2), torch.zeros(2)
        >>> reference.h1(y, K, b, 0.1, None, sigma)  # p moves by -h q
        tensor([[-0.5000,  5.0000]])
    """
    return y + h * times_J(partial_H(y, K, b, sigma), J)


def ms2(y: Tensor, K: Tensor, b: Tensor, h: float | Tensor, _: None, sigma: Activation) -> Tensor:
    """One layer of MS2: `y + h sigma(K y + b)` with a skew-symmetric K (eq:MS2).

    Args:
        y: states `(*batch, n)`.
        K: weights `(n, n)`.
        b: biases `(n,)`.
        h: the step.
        sigma: an `Activation`, such as `hdnn.activations.get("tanh")`.

    Returns:
        The next states, `(*batch, n)`.

    Examples:
        >>> import torch
        >>> from hdnn import activations, reference
        >>> sigma = activations.get("tanh")
        >>> K = torch.tensor([[0.0, 1.0], [-1.0, 0.0]])
        >>> reference.ms2(torch.zeros(3, 2), K, torch.zeros(2), 0.1, None, sigma).shape
        torch.Size([3, 2])
    """
    return y + h * perceptron(y, K, b, sigma)


def mlp(y: Tensor, K: Tensor, b: Tensor, h: float | Tensor, _: None, sigma: Activation) -> Tensor:
    """One layer of a multilayer perceptron, which has no step: `sigma(K y + b)` (fig:gradients).

    Args:
        y: states `(*batch, n)`.
        K: weights `(n, n)`.
        b: biases `(n,)`.
        h: not used; all layers are called alike.
        sigma: an `Activation`, such as `hdnn.activations.get("tanh")`.

    Returns:
        The next states, `(*batch, n)`.

    Examples:
        >>> import torch
        >>> from hdnn import activations, reference
        >>> sigma = activations.get("tanh")
        >>> reference.mlp(torch.zeros(3, 2), torch.eye(2), torch.zeros(2), None, None, sigma).shape
        torch.Size([3, 2])
    """
    return perceptron(y, K, b, sigma)


# Semi-implicit Euler and its relatives: p and q take turns


def split(
    y: Halves,
    K_p: Tensor,
    K_q: Tensor,
    b_p: Tensor,
    b_q: Tensor,
    h: float | Tensor,
    X: Tensor | None,
    sigma: Activation,
    *,
    shears: tuple[splitting.Shear, ...],
    force: Callable[..., Tensor] = partial_H,
) -> Halves:
    """One layer in which p and q take turns, by the fractions c of the step that `shears` lists.

        p <- p - c h X^T K_q^T sigma(K_q q + b_q)      (eq:p_update)
        q <- q + c h X K_p^T sigma(K_p p + b_p)        (eq:q_update)

    Args:
        y: the halves `(p, q)` of the states, each `(*batch, m)`.
        K_p: weights of p, `(r_p, m)`.
        K_q: weights of q, `(r_q, m)`.
        b_p: biases `(r_p,)`.
        b_q: biases `(r_q,)`.
        h: the step.
        X: `(m, m)`; None for the identity.
        sigma: an `Activation`, such as `hdnn.activations.get("tanh")`.
        shears: pairs of the half that moves, "p" or "q", and its fraction c.
        force: what moves a half, given the other: a function such as `partial_H`.

    Returns:
        The halves `(p, q)` of the next states.

    Examples:
        >>> import torch
        >>> from hdnn import activations, reference
        >>> sigma = activations.get("identity")
        >>> p, q, K, b = torch.ones(1, 2), torch.zeros(1, 2), torch.eye(2), torch.zeros(2)
        >>> h2 = (("p", 1.0), ("q", 1.0))  # semi-implicit Euler
        >>> reference.split((p, q), K, K, b, b, 0.5, None, sigma, shears=h2)
        (tensor([[1., 1.]]), tensor([[0.5000, 0.5000]]))
    """
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
    h: float | Tensor,
    _: None,
    sigma: Activation,
    *,
    shears: tuple[splitting.Shear, ...],
) -> Halves:
    """One layer of MS1: `q - h sigma(K_0^T p + b_1)`, then `p + h sigma(K_0 q + b_2)` (eq:MS1).

    Args:
        y: the halves `(p, q)` of the states, each `(*batch, m)`.
        K_0: weights `(m, m)`.
        b_1: biases of the first update, `(m,)`.
        b_2: biases of the second, `(m,)`.
        h: the step.
        sigma: an `Activation`, such as `hdnn.activations.get("tanh")`.
        shears: `hdnn.integrators.splitting.MS1`, or what undoes it.

    Returns:
        The halves `(p, q)` of the next states.

    Examples:
        >>> import torch
        >>> from hdnn import activations, reference
        >>> sigma = activations.get("tanh")
        >>> from hdnn.integrators import splitting
        >>> p, q, K_0, b = torch.ones(1, 2), torch.zeros(1, 2), torch.eye(2), torch.zeros(2)
        >>> p, q = reference.ms1((p, q), K_0, b, b, 0.1, None, sigma, shears=splitting.MS1)
        >>> torch.allclose(q, -0.1 * torch.tanh(torch.ones(1, 2)))
        True
    """
    return split(y, K_0.mT, K_0, b_1, b_2, h, None, sigma, shears=shears, force=perceptron)


# Implicit schemes: each layer is solved by Newton's method


def implicit_h2(
    y: Halves,
    j: int,
    K: Tensor,
    b: Tensor,
    h: float | Tensor,
    X: Tensor | None,
    sigma: Activation,
    *,
    inverse: bool,
    **newton: Any,
) -> Halves:
    """One layer of semi-implicit Euler with a full K (eq:implicit_euler).

        y_{j+1} = y_j + h J K^T sigma(K (p_{j+1}, q_j) + b)

    The first half of the equation is solved for `p_{j+1}`; the second is then explicit.

    Args:
        y: the halves `(p, q)` of the states, each `(*batch, m)`.
        j: the number of the layer, for messages.
        K: weights `(r, n)`.
        b: biases `(r,)`.
        h: the step.
        X: `(m, m)`; None for the identity.
        sigma: an `Activation`, such as `hdnn.activations.get("tanh")`.
        inverse: undo the layer.
        **newton: `tol` and `max_iter`, as in `hdnn.functional.implicit_h2`.

    Returns:
        The halves `(p, q)` of the next states.

    Raises:
        ConvergenceError: if the equation has no solution that could be found.
        OptionError: if sigma is not registered.

    Examples:
        >>> import torch
        >>> from hdnn import activations, reference
        >>> sigma = activations.get("tanh")
        >>> p, q, K, b = torch.ones(1, 1), torch.zeros(1, 1), torch.ones(1, 2), torch.zeros(1)
        >>> new_p, new_q = reference.implicit_h2((p, q), 0, K, b, 0.1, None, sigma, inverse=False)
        >>> torch.allclose(new_p, p - 0.1 * torch.tanh(new_p + q))
        True
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
    h: float | Tensor,
    J: Tensor | None,
    sigma: Activation,
    *,
    inverse: bool,
    **newton: Any,
) -> Tensor:
    """One layer of the implicit midpoint rule, solved for the next state y'.

        y' = y + h J K^T sigma(K (y + y')/2 + b)

    Args:
        y: states `(*batch, n)`.
        j: the number of the layer, for messages.
        K: weights `(r, n)`.
        b: biases `(r,)`.
        h: the step.
        J: skew-symmetric, `(n, n)`; None for the canonical one.
        sigma: an `Activation`, such as `hdnn.activations.get("tanh")`.
        inverse: undo the layer.
        **newton: `tol` and `max_iter`, as in `hdnn.functional.midpoint`.

    Returns:
        The next states, `(*batch, n)`.

    Raises:
        ConvergenceError: if the equation has no solution that could be found.
        OptionError: if sigma is not registered.

    Examples:
        >>> import torch
        >>> from hdnn import activations, reference
        >>> sigma = activations.get("identity")
        >>> y, K, b = torch.randn(1, 2), torch.eye(2), torch.zeros(2)
        >>> z = reference.midpoint(y, 0, K, b, 0.1, None, sigma, inverse=False)
        >>> torch.allclose(z.norm(), y.norm())  # a rotation
        True
    """
    B = ((-0.5 if inverse else 0.5) * h) * times_J(K, J).mT
    undo = (None, -B, K) if inverse else None
    where = f"midpoint, layer {j}"
    return 2 * implicit.solve(y, B, K, b, sigma, where=where, undo=undo, **newton) - y


def discrete_gradient(
    y: Tensor,
    j: int,
    K: Tensor,
    b: Tensor,
    h: float | Tensor,
    J: Tensor | None,
    sigma: Activation,
    *,
    inverse: bool,
    **newton: Any,
) -> Tensor:
    """One layer that keeps its energy `H = sum s(K y + b)`, solved for the next state y'.

        y' = y + h J K^T (s(K y' + b) - s(K y + b)) / (K (y' - y))

    The quotient is taken entry by entry, and is sigma where the denominator is 0.

    Args:
        y: states `(*batch, n)`.
        j: the number of the layer, for messages.
        K: weights `(r, n)`.
        b: biases `(r,)`.
        h: the step.
        J: skew-symmetric, `(n, n)`; None for the canonical one.
        sigma: an `Activation`, such as `hdnn.activations.get("tanh")`.
        inverse: undo the layer.
        **newton: `tol` and `max_iter`, as in `hdnn.functional.discrete_gradient`.

    Returns:
        The next states, `(*batch, n)`.

    Raises:
        ConvergenceError: if the equation has no solution that could be found.
        OptionError: if sigma is not registered.

    Examples:
        >>> import torch
        >>> from hdnn import activations, reference
        >>> sigma = activations.get("identity")
        >>> y, K, b = torch.randn(1, 2), torch.eye(2), torch.zeros(2)
        >>> z = reference.discrete_gradient(y, 0, K, b, 0.1, None, sigma, inverse=False)
        >>> torch.allclose(z.norm(), y.norm())  # H = |y|^2 / 2
        True
    """
    B, where = ((-h if inverse else h) * times_J(K, J)).mT, f"discrete_gradient, layer {j}"
    solved = {"where": where, "inverse": inverse, **newton}
    return implicit.solve_chord(y, B, K, b, Chord((sigma,)), **solved)


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

    Args:
        layer: one of the functions above, with its own options bound by `functools.partial`.
        y: states `(*batch, n)`.
        weights: of all layers, `(N, ...)` each, in the order that the layer takes them.
        h: the step: a number, or one for each layer.
        link: J or X, for all layers or `(N, ...)`; None for the canonical one.
        sigma: an `Activation`, such as `hdnn.activations.get("tanh")`.
        trajectory: return all states rather than the last.
        inverse: the layers are inverses, to be applied from the last to the first.
        halves: the layer takes and returns `(p, q)`.

    Returns:
        The last states as `(*batch, n)`, or with `trajectory` all states as `(N+1, *batch, n)`.

    Raises:
        StepError: if a step is not > 0, or there is not one for each layer.

    Examples:
        >>> import torch
        >>> from hdnn import activations, reference
        >>> sigma = activations.get("tanh")
        >>> y, K, b = torch.randn(3, 4), torch.randn(8, 4, 4), torch.zeros(8, 4)
        >>> reference.run(reference.h1, y, (K, b), 0.1, None, sigma, trajectory=True).shape
        torch.Size([9, 3, 4])
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
