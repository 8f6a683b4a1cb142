"""The paper's layer equations, one function each, with checked arguments.

Every function runs a whole stack of N layers and is pure, differentiable and batched over any
leading axes: y is `(*batch, n)`, weights lead with the layer: K is `(N, r, n)`. The halves of
`y = (p, q)` have `m = n/2` features. A layer acts on column vectors as `K^T sigma(K y + b)`; for
row vectors that is `sigma(y K^T + b) K`. `h` is a float, or a tensor `(N,)` with a step for each
layer. `trajectory=True` returns all states `y_0 .. y_N` as `(N+1, *batch, n)`. Where a scheme can
be undone, `inverse=True` takes `y_N` back to `y_0`, and a trajectory still comes in forward order.

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
from hdnn.integrators.implicit import SeveralSolutionsWarning
from hdnn.reference import partial_H

__all__ = [
    "SeveralSolutionsWarning",
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
    "split",
    "verlet",
    "yoshida4",
]


def energy(y: Tensor, K: Tensor, b: Tensor, *, activation: str | Activation = "tanh") -> Tensor:
    """The energy of one layer: `H(y) = sum_i s(K y + b)_i` with `s' = sigma`, `s(0) = 0` (eq:nlH).

    Args:
        y: states `(*batch, n)`.
        K: weights `(r, n)`.
        b: biases `(r,)`.
        activation: its name, such as "tanh", or an `hdnn.activations.Activation`.

    Returns:
        The energy of each state, `(*batch,)`.

    Raises:
        ShapeError: if y, K or b has the wrong shape, dtype or device.
        OptionError: if the activation is not known.

    Examples:
        >>> import torch
        >>> from hdnn import functional
        >>> y, K, b = torch.tensor([[0.0, 2.0]]), torch.eye(2), torch.zeros(2)
        >>> functional.energy(y, K, b, activation="identity")  # half the square of each entry
        tensor([2.])
    """
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
    """Forward Euler: `y_{j+1} = y_j + h J_j K_j^T sigma(K_j y_j + b_j)` (eq:H-DNN_fE).

    Args:
        y: states `(*batch, n)`.
        K: weights `(N, r, n)`.
        b: biases `(N, r)`.
        h: the step: one number for all layers, or one for each as a tensor `(N,)` or a list.
        J: a skew-symmetric `(n, n)`, or `(N, n, n)` for one a layer; by default the canonical
            `[[0, -I], [I, 0]]`, for an even n.
        activation: its name, such as "tanh", or an `hdnn.activations.Activation`.
        trajectory: return all states `y_0 .. y_N` rather than the last.
        engine: "auto", "fused" or "reference"; by default what `hdnn.engine.use` says.
        backprop: "auto", "stored" or "checkpoint"; by default as above.

    Returns:
        `y_N` as `(*batch, n)`, or with `trajectory` all states as `(N+1, *batch, n)`.

    Raises:
        ShapeError: if y, a weight or J has the wrong shape, dtype or device, or n is odd without a
            J.
        StepError: if h is no number > 0, or there is not one for each layer.
        OptionError: if activation, engine or backprop is not known, or cannot run these layers.

    Examples:
        >>> import torch
        >>> from hdnn import functional
        >>> y, K, b = torch.randn(32, 4), torch.randn(8, 6, 4), torch.zeros(8, 6)
        >>> functional.h1(y, K, b, h=0.1).shape
        torch.Size([32, 4])
        >>> functional.h1(y, K, b, h=0.1, trajectory=True).shape
        torch.Size([9, 32, 4])
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
    """The network MS2: `y_{j+1} = y_j + h sigma(K_j y_j + b_j)`, each K skew-symmetric (eq:MS2).

    That K is skew-symmetric is up to you: values are not checked.

    Args:
        y: states `(*batch, n)`.
        K: weights `(N, n, n)`, each `-K^T`.
        b: biases `(N, n)`.
        h: the step: one number for all layers, or one for each as a tensor `(N,)` or a list.
        activation: its name, such as "tanh", or an `hdnn.activations.Activation`.
        trajectory: return all states `y_0 .. y_N` rather than the last.
        engine: "auto", "fused" or "reference"; by default what `hdnn.engine.use` says.
        backprop: "auto", "stored" or "checkpoint"; by default as above.

    Returns:
        `y_N` as `(*batch, n)`, or with `trajectory` all states as `(N+1, *batch, n)`.

    Raises:
        ShapeError: if y, K or b has the wrong shape, dtype or device.
        StepError: if h is no number > 0, or there is not one for each layer.
        OptionError: if activation, engine or backprop is not known, or cannot run these layers.

    Examples:
        >>> import torch
        >>> from hdnn import functional
        >>> A = torch.randn(8, 3, 3)
        >>> functional.ms2(torch.randn(32, 3), A - A.mT, torch.zeros(8, 3), h=0.1).shape
        torch.Size([32, 3])
    """
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
    """A multilayer perceptron: `y_{j+1} = sigma(K_j y_j + b_j)`, whose gradients vanish.

    It is what the paper compares with (fig:gradients).

    Args:
        y: states `(*batch, n)`.
        K: weights `(N, n, n)`.
        b: biases `(N, n)`.
        activation: its name, such as "tanh", or an `hdnn.activations.Activation`.
        trajectory: return all states `y_0 .. y_N` rather than the last.

    Returns:
        `y_N` as `(*batch, n)`, or with `trajectory` all states as `(N+1, *batch, n)`.

    Raises:
        ShapeError: if y, K or b has the wrong shape, dtype or device.
        OptionError: if the activation is not known.

    Examples:
        >>> import torch
        >>> from hdnn import functional
        >>> y = torch.ones(1, 2, requires_grad=True)
        >>> K, b = 0.5 * torch.eye(2).expand(64, 2, 2), torch.zeros(64, 2)
        >>> functional.mlp(y, K, b).sum().backward()
        >>> bool(y.grad.norm() < 1e-15)  # after 64 layers nothing is left of the gradient
        True
    """
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
    """Any sequence of p- and q-updates as one layer, each by a fraction of the step.

    `h2`, `verlet` and `yoshida4` are such sequences. Any of them is symplectic, explicit and
    invertible. An update of p or q by a fraction c is

        p <- p - c h X^T K_q^T sigma(K_q q + b_q)
        q <- q + c h X K_p^T sigma(K_p p + b_p)

    Args:
        y: states `(*batch, n)`.
        K_p: weights of p, `(N, r_p, m)`.
        K_q: weights of q, `(N, r_q, m)`.
        b_p: biases `(N, r_p)`.
        b_q: biases `(N, r_q)`.
        h: the step: one number for all layers, or one for each as a tensor `(N,)` or a list.
        shears: a tuple of pairs: which half moves, "p" or "q", and its fraction c of h.
        X: `(m, m)`, or `(N, m, m)` for one a layer; by default the identity.
        activation: its name, such as "tanh", or an `hdnn.activations.Activation`.
        trajectory: return all states `y_0 .. y_N` rather than the last.
        inverse: take `y_N` back to `y_0`; a trajectory still comes in forward order.
        engine: "auto", "fused" or "reference"; by default what `hdnn.engine.use` says.
        backprop: "auto", "stored", "checkpoint" or "reversible"; by default as above.

    Returns:
        `y_N` as `(*batch, n)` (`y_0` with `inverse`), or with `trajectory` all states as
        `(N+1, *batch, n)`.

    Raises:
        ShapeError: if y, a weight or X has the wrong shape, dtype or device, or n is odd.
        StepError: if h is no number > 0, or there is not one for each layer.
        OptionError: if shears are no such pairs, or activation, engine or backprop is not known, or
            cannot run these layers.

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
        q_{j+1} = q_j + h X K_p^T sigma(K_p p_{j+1} + b_p)      (eq:q_update)

    Args:
        y: states `(*batch, n)`.
        K_p: weights of p, `(N, r_p, m)`.
        K_q: weights of q, `(N, r_q, m)`.
        b_p: biases `(N, r_p)`.
        b_q: biases `(N, r_q)`.
        h: the step: one number for all layers, or one for each as a tensor `(N,)` or a list.
        X: `(m, m)`, or `(N, m, m)` for one a layer; by default the identity.
        activation: its name, such as "tanh", or an `hdnn.activations.Activation`.
        trajectory: return all states `y_0 .. y_N` rather than the last.
        engine: "auto", "fused" or "reference"; by default what `hdnn.engine.use` says.
        backprop: "auto", "stored", "checkpoint" or "reversible"; by default as above.

    Returns:
        `y_N` as `(*batch, n)`, or with `trajectory` all states as `(N+1, *batch, n)`.

    Raises:
        ShapeError: if y, a weight or X has the wrong shape, dtype or device, or n is odd.
        StepError: if h is no number > 0, or there is not one for each layer.
        OptionError: if activation, engine or backprop is not known, or cannot run these layers.

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
    """The exact inverse of `h2`: `y_0` from `y_N`.

    Args:
        y: the last states `(*batch, n)`.
        K_p: weights of p, `(N, r_p, m)`.
        K_q: weights of q, `(N, r_q, m)`.
        b_p: biases `(N, r_p)`.
        b_q: biases `(N, r_q)`.
        h: the step: one number for all layers, or one for each as a tensor `(N,)` or a list.
        X: `(m, m)`, or `(N, m, m)` for one a layer; by default the identity.
        activation: its name, such as "tanh", or an `hdnn.activations.Activation`.
        trajectory: return all states `y_0 .. y_N` in forward order.
        engine: "auto", "fused" or "reference"; by default what `hdnn.engine.use` says.
        backprop: "auto", "stored", "checkpoint" or "reversible"; by default as above.

    Returns:
        `y_0` as `(*batch, n)`, or with `trajectory` all states as `(N+1, *batch, n)`.

    Raises:
        ShapeError: if y, a weight or X has the wrong shape, dtype or device, or n is odd.
        StepError: if h is no number > 0, or there is not one for each layer.
        OptionError: if activation, engine or backprop is not known, or cannot run these layers.

    Examples:
        >>> import torch
        >>> from hdnn import functional
        >>> y, K, b = torch.randn(32, 4), torch.randn(8, 2, 2), torch.zeros(8, 2)
        >>> z = functional.h2(y, K, K, b, b, h=0.1)
        >>> torch.allclose(functional.h2_inverse(z, K, K, b, b, h=0.1), y, atol=1e-5)
        True
    """
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
    """Stoermer-Verlet: half a step of p, one of q, half a step of p. Order 2, symplectic.

    The updates are those of `split`, which has their equations.

    Args:
        y: states `(*batch, n)`.
        K_p: weights of p, `(N, r_p, m)`.
        K_q: weights of q, `(N, r_q, m)`.
        b_p: biases `(N, r_p)`.
        b_q: biases `(N, r_q)`.
        h: the step: one number for all layers, or one for each as a tensor `(N,)` or a list.
        X: `(m, m)`, or `(N, m, m)` for one a layer; by default the identity.
        activation: its name, such as "tanh", or an `hdnn.activations.Activation`.
        trajectory: return all states `y_0 .. y_N` rather than the last.
        inverse: take `y_N` back to `y_0`; a trajectory still comes in forward order.
        engine: "auto", "fused" or "reference"; by default what `hdnn.engine.use` says.
        backprop: "auto", "stored", "checkpoint" or "reversible"; by default as above.

    Returns:
        `y_N` as `(*batch, n)` (`y_0` with `inverse`), or with `trajectory` all states as
        `(N+1, *batch, n)`.

    Raises:
        ShapeError: if y, a weight or X has the wrong shape, dtype or device, or n is odd.
        StepError: if h is no number > 0, or there is not one for each layer.
        OptionError: if activation, engine or backprop is not known, or cannot run these layers.

    Examples:
        >>> import torch
        >>> from hdnn import functional
        >>> y, K, b = torch.ones(1, 2).double(), torch.ones(1, 1).double(), torch.zeros(1).double()
        >>> def stack(N, scheme):  # N layers with the same weights, up to the time 1
        ...     K_N, b_N = K.expand(N, 1, 1), b.expand(N, 1)
        ...     return scheme(y, K_N, K_N, b_N, b_N, h=1 / N)
        >>> exact = stack(1000, functional.yoshida4)
        >>> error = [float((stack(N, functional.verlet) - exact).norm()) for N in (16, 32)]
        >>> round(error[0] / error[1])  # twice as many layers
        4
    """
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
    """Yoshida's composition of three Verlet steps, the middle one backwards. Order 4, symplectic.

    The updates are those of `split`, which has their equations.

    Args:
        y: states `(*batch, n)`.
        K_p: weights of p, `(N, r_p, m)`.
        K_q: weights of q, `(N, r_q, m)`.
        b_p: biases `(N, r_p)`.
        b_q: biases `(N, r_q)`.
        h: the step: one number for all layers, or one for each as a tensor `(N,)` or a list.
        X: `(m, m)`, or `(N, m, m)` for one a layer; by default the identity.
        activation: its name, such as "tanh", or an `hdnn.activations.Activation`.
        trajectory: return all states `y_0 .. y_N` rather than the last.
        inverse: take `y_N` back to `y_0`; a trajectory still comes in forward order.
        engine: "auto", "fused" or "reference"; by default what `hdnn.engine.use` says.
        backprop: "auto", "stored", "checkpoint" or "reversible"; by default as above.

    Returns:
        `y_N` as `(*batch, n)` (`y_0` with `inverse`), or with `trajectory` all states as
        `(N+1, *batch, n)`.

    Raises:
        ShapeError: if y, a weight or X has the wrong shape, dtype or device, or n is odd.
        StepError: if h is no number > 0, or there is not one for each layer.
        OptionError: if activation, engine or backprop is not known, or cannot run these layers.

    Examples:
        >>> import torch
        >>> from hdnn import functional
        >>> y, K, b = torch.ones(1, 2).double(), torch.ones(1, 1).double(), torch.zeros(1).double()
        >>> def stack(N, scheme):  # N layers with the same weights, up to the time 1
        ...     K_N, b_N = K.expand(N, 1, 1), b.expand(N, 1)
        ...     return scheme(y, K_N, K_N, b_N, b_N, h=1 / N)
        >>> exact = stack(1000, functional.yoshida4)
        >>> error = [float((stack(N, functional.yoshida4) - exact).norm()) for N in (16, 32)]
        >>> round(error[0] / error[1])  # twice as many layers
        16
    """
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
    """The network MS3: H2 with both signs changed (eq:MS3).

        p_{j+1} = p_j + h K_1^T sigma(K_1 q_j + b_1), then
        q_{j+1} = q_j - h K_2^T sigma(K_2 p_{j+1} + b_2)

    Args:
        y: states `(*batch, n)`.
        K_1: weights of q, `(N, r_1, m)`.
        K_2: weights of p, `(N, r_2, m)`.
        b_1: biases `(N, r_1)`.
        b_2: biases `(N, r_2)`.
        h: the step: one number for all layers, or one for each as a tensor `(N,)` or a list.
        activation: its name, such as "tanh", or an `hdnn.activations.Activation`.
        trajectory: return all states `y_0 .. y_N` rather than the last.
        inverse: take `y_N` back to `y_0`; a trajectory still comes in forward order.
        engine: "auto", "fused" or "reference"; by default what `hdnn.engine.use` says.
        backprop: "auto", "stored", "checkpoint" or "reversible"; by default as above.

    Returns:
        `y_N` as `(*batch, n)` (`y_0` with `inverse`), or with `trajectory` all states as
        `(N+1, *batch, n)`.

    Raises:
        ShapeError: if y or a weight has the wrong shape, dtype or device, or n is odd.
        StepError: if h is no number > 0, or there is not one for each layer.
        OptionError: if activation, engine or backprop is not known, or cannot run these layers.

    Examples:
        >>> import torch
        >>> from hdnn import functional
        >>> y, K, b = torch.randn(32, 4), torch.randn(8, 2, 2), torch.zeros(8, 2)
        >>> z = functional.ms3(y, K, K, b, b, h=0.1)
        >>> torch.allclose(functional.ms3(z, K, K, b, b, h=0.1, inverse=True), y, atol=1e-5)
        True
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
    """The network MS1: q moves first, and there is no `K^T` outside of sigma (eq:MS1).

        q_{j+1} = q_j - h sigma(K_0^T p_j + b_1), then
        p_{j+1} = p_j + h sigma(K_0 q_{j+1} + b_2)

    Args:
        y: states `(*batch, n)`.
        K_0: weights `(N, m, m)`.
        b_1: biases of the first update, `(N, m)`.
        b_2: biases of the second, `(N, m)`.
        h: the step: one number for all layers, or one for each as a tensor `(N,)` or a list.
        activation: its name, such as "tanh", or an `hdnn.activations.Activation`.
        trajectory: return all states `y_0 .. y_N` rather than the last.
        inverse: take `y_N` back to `y_0`; a trajectory still comes in forward order.
        engine: "auto", "fused" or "reference"; by default what `hdnn.engine.use` says.
        backprop: "auto", "stored", "checkpoint" or "reversible"; by default as above.

    Returns:
        `y_N` as `(*batch, n)` (`y_0` with `inverse`), or with `trajectory` all states as
        `(N+1, *batch, n)`.

    Raises:
        ShapeError: if y or a weight has the wrong shape, dtype or device, or n is odd.
        StepError: if h is no number > 0, or there is not one for each layer.
        OptionError: if activation, engine or backprop is not known, or cannot run these layers.

    Examples:
        >>> import torch
        >>> from hdnn import functional
        >>> y, K_0, b = torch.randn(32, 4), torch.randn(8, 2, 2), torch.zeros(8, 2)
        >>> functional.ms1(y, K_0, b, b, h=0.1).shape
        torch.Size([32, 4])
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
    """Semi-implicit Euler with a full K, solved by Newton's method (eq:implicit_euler).

        y_{j+1} = y_j + h J K^T sigma(K (p_{j+1}, q_j) + b),        J = [[0, -X^T], [X, 0]]

    The first half of the equation is solved for `p_{j+1}`; the second is then explicit. Gradients
    come from the solution itself, not through the iterations.

    Args:
        y: states `(*batch, n)`.
        K: weights `(N, r, n)`.
        b: biases `(N, r)`.
        h: the step: one number for all layers, or one for each as a tensor `(N,)` or a list.
        X: `(m, m)`, or `(N, m, m)` for one a layer; by default the identity.
        activation: its name, such as "tanh", or an `hdnn.activations.Activation`.
        trajectory: return all states `y_0 .. y_N` rather than the last.
        inverse: take `y_N` back to `y_0`; a trajectory still comes in forward order.
        tol: the largest error of an equation that counts as solved; by default near rounding.
        max_iter: the most Newton iterations that a layer may take.

    Returns:
        `y_N` as `(*batch, n)` (`y_0` with `inverse`), or with `trajectory` all states as
        `(N+1, *batch, n)`.

    Raises:
        ShapeError: if y, a weight or X has the wrong shape, dtype or device, or n is odd.
        StepError: if h is no number > 0, there is not one for each layer, tol is not > 0 or
            max_iter is below 1.
        OptionError: if the activation is not known, or not registered.
        ConvergenceError: if the equation of a layer has no solution that could be found.

    Examples:
        >>> import torch
        >>> from hdnn import functional
        >>> y, K, b = torch.randn(4), torch.randn(8, 4, 4), torch.zeros(8, 4)
        >>> Phi = torch.autograd.functional.jacobian(
        ...     lambda y: functional.implicit_h2(y, K, b, h=0.1), y
        ... )
        >>> bool(torch.linalg.matrix_norm(Phi, 2) >= 1)  # norm(dy_N/dy_0)
        True
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
    """The implicit midpoint rule: `y_{j+1} = y_j + h J K^T sigma(K (y_j + y_{j+1})/2 + b)`.

    Order 2, and Poisson (`Phi^T J Phi = J`) for any skew-symmetric J: full K, odd n and singular J
    included. Each layer is solved by Newton's method.

    Args:
        y: states `(*batch, n)`.
        K: weights `(N, r, n)`.
        b: biases `(N, r)`.
        h: the step: one number for all layers, or one for each as a tensor `(N,)` or a list.
        J: a skew-symmetric `(n, n)`, or `(N, n, n)` for one a layer; by default the canonical
            `[[0, -I], [I, 0]]`, for an even n.
        activation: its name, such as "tanh", or an `hdnn.activations.Activation`.
        trajectory: return all states `y_0 .. y_N` rather than the last.
        inverse: take `y_N` back to `y_0`; a trajectory still comes in forward order.
        tol: the largest error of an equation that counts as solved; by default near rounding.
        max_iter: the most Newton iterations that a layer may take.

    Returns:
        `y_N` as `(*batch, n)` (`y_0` with `inverse`), or with `trajectory` all states as
        `(N+1, *batch, n)`.

    Raises:
        ShapeError: if y, a weight or J has the wrong shape, dtype or device, or n is odd without a
            J.
        StepError: if h is no number > 0, there is not one for each layer, tol is not > 0 or
            max_iter is below 1.
        OptionError: if the activation is not known, or not registered.
        ConvergenceError: if the equation of a layer has no solution that could be found.

    Examples:
        >>> import torch
        >>> from hdnn import functional
        >>> J = torch.tensor([[0.0, 1.0, 2.0], [-1.0, 0.0, 3.0], [-2.0, -3.0, 0.0]])
        >>> y, K, b = torch.randn(32, 3), torch.randn(8, 3, 3), torch.zeros(8, 3)
        >>> z = functional.midpoint(y, K, b, h=0.1, J=J)
        >>> torch.allclose(functional.midpoint(z, K, b, h=0.1, J=J, inverse=True), y, atol=1e-4)
        True
    """
    newton = {"tol": tol, "max_iter": max_iter}
    rule = reference.midpoint
    return _solved("midpoint", rule, y, (K, b), h, J, activation, trajectory, inverse, newton)


def discrete_gradient(
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
    """Layers that each keep their energy `H_j(y) = sum s(K_j y + b_j)` to rounding.

        y_{j+1} = y_j + h J K^T (s(K y_{j+1} + b) - s(K y_j + b)) / (K (y_{j+1} - y_j))

    The quotient, entry by entry, makes the average discrete gradient of H, whose product with
    `y_{j+1} - y_j` is the change of H. As J is skew-symmetric, that is 0, for any weights and any
    h. Order 2 and symmetric, but not symplectic: `norm(dy_N/dy_j) >= 1` is not promised. Each layer
    is solved by Newton's method; for a monotone activation there is exactly one solution.

    Args:
        y: states `(*batch, n)`.
        K: weights `(N, r, n)`.
        b: biases `(N, r)`.
        h: the step: one number for all layers, or one for each as a tensor `(N,)` or a list.
        J: a skew-symmetric `(n, n)`, or `(N, n, n)` for one a layer; by default the canonical
            `[[0, -I], [I, 0]]`, for an even n.
        activation: its name, such as "tanh", or an `hdnn.activations.Activation`.
        trajectory: return all states `y_0 .. y_N` rather than the last.
        inverse: take `y_N` back to `y_0`; a trajectory still comes in forward order.
        tol: the largest error of an equation that counts as solved; by default near rounding.
        max_iter: the most Newton iterations that a layer may take.

    Returns:
        `y_N` as `(*batch, n)` (`y_0` with `inverse`), or with `trajectory` all states as
        `(N+1, *batch, n)`.

    Raises:
        ShapeError: if y, a weight or J has the wrong shape, dtype or device, or n is odd without a
            J.
        StepError: if h is no number > 0, there is not one for each layer, tol is not > 0 or
            max_iter is below 1.
        OptionError: if the activation is not known, or not registered.
        ConvergenceError: if the equation of a layer has no solution that could be found.

    Examples:
        >>> import torch
        >>> from hdnn import functional
        >>> K, b = torch.randn(1, 4, 4).double().expand(50, 4, 4), torch.zeros(50, 4).double()
        >>> y = functional.discrete_gradient(torch.randn(4).double(), K, b, h=0.5, trajectory=True)
        >>> H = functional.energy(y, K[0], b[0])  # the same weights in all layers
        >>> torch.allclose(H, H[0], rtol=1e-12)
        True
    """
    newton = {"tol": tol, "max_iter": max_iter}
    name, rule = "discrete_gradient", reference.discrete_gradient
    return _solved(name, rule, y, (K, b), h, J, activation, trajectory, inverse, newton)


# What all of them share


def _solved(
    name: str,
    rule: Callable[..., Tensor],
    y: Tensor,
    weights: tuple[Tensor, Tensor],
    h: Step,
    J: Tensor | None,
    activation: str | Activation,
    trajectory: bool,
    inverse: bool,
    newton: dict[str, Any],
) -> Tensor:
    """Implicit layers with a full K and any J."""
    sigma = activations.get(activation)
    _check(name, y, FULL, weights, split=J is None, J=J).steps(h)
    check_tolerance(name, **newton)
    layer, stack = partial(rule, inverse=inverse, **newton), (range(len(weights[0])), *weights)
    how = {"trajectory": trajectory, "inverse": inverse}
    return reference.run(layer, y, stack, h, J, sigma, **how)


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
