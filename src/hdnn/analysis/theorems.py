"""The paper's claims as numbers: how far off are they?

Symplecticity, Phi^T J Phi = J, is what keeps gradients from vanishing. In continuous time, results
are differences relative to the sizes of what is compared, so a claim that holds gives numbers near
the tolerance of the solver.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from hdnn import activations
from hdnn.analysis.bounds import bsm_bound_continuous, bsm_bound_paper
from hdnn.analysis.continuous import ContinuousNetwork, Times
from hdnn.analysis.sensitivity import norms
from hdnn.errors import OptionError, ShapeError, positive_int
from hdnn.networks import Network, ODENetwork

NORMS = ("2", "1", "inf", "fro")
FLOOR = 1e-11  # relative: the flow of an ODE is not known more accurately

# Layers


def symplectic_defect(Phi: Tensor, J: Tensor) -> Tensor:
    """How far matrices are from symplectic, `Phi^T J Phi = J`: `|Phi^T J Phi - J| / (|Phi|^2 |J|)`.

    Relative to the sizes of the factors, so that it is a multiple of the rounding error.

    Args:
        Phi: matrices `(..., n, n)` in denominator layout, such as dy_N/dy_j.
        J: one skew-symmetric matrix (n, n).

    Returns:
        A number for each matrix `(...)`; NaN if it is not finite.

    Raises:
        ShapeError: if J is not one matrix of the size of Phi.

    Examples:
        >>> import hdnn, torch
        >>> net = hdnn.H2(features=4, layers=8)
        >>> Phi = hdnn.analysis.backward_sensitivity(net, torch.randn(10, 4))
        >>> bool((hdnn.analysis.symplectic_defect(Phi, net.field()["J"]) < 1e-5).all())
        True
    """
    if Phi.shape[-2:] != J.shape[-2:] or J.ndim != 2:
        raise ShapeError(
            f"J has shape {tuple(J.shape)}, but a single matrix {tuple(Phi.shape[-2:])} is needed: "
            "a stack of BSMs is symplectic with respect to one constant J."
        )
    tiny = torch.finfo(Phi.dtype).tiny
    size, unit = norms(Phi).clamp_min(tiny)[..., None, None], J / norms(J).clamp_min(tiny)
    P = Phi / size  # so that no square is too large
    return norms(P.mT @ unit @ P - unit / size / size)


def is_symplectic(Phi: Tensor, J: Tensor, *, tolerance: float | None = None) -> bool:
    """Whether every matrix is symplectic with respect to J, up to the rounding of its dtype.

    Args:
        Phi: matrices `(..., n, n)` in denominator layout, such as dy_N/dy_j.
        J: one skew-symmetric matrix (n, n).
        tolerance: the largest `symplectic_defect`, by default 64 n times the rounding of the dtype.

    Returns:
        True or False; False if a matrix is not finite.

    Raises:
        ShapeError: if J is not one matrix of the size of Phi.

    Examples:
        >>> import hdnn, torch
        >>> J = hdnn.H2(features=4, layers=8).field()["J"]
        >>> for net in hdnn.H2(features=4, layers=8), hdnn.H1(features=4, layers=8):
        ...     Phi = hdnn.analysis.backward_sensitivity(net, torch.randn(10, 4))
        ...     print(hdnn.analysis.is_symplectic(Phi, J))
        True
        False
    """
    if tolerance is None:
        tolerance = 64 * Phi.shape[-1] * torch.finfo(Phi.dtype).eps
    return bool((symplectic_defect(Phi, J) <= tolerance).all())


@torch.no_grad()
def energy_along(net: ODENetwork, y: Tensor) -> Tensor:
    """The energy `H_j(y_j)` of each layer at its own input, along the trajectory.

    At y_N with the weights of the last layer. Where all layers have the same weights, a symplectic
    integrator keeps it close to constant; forward Euler lets it grow.

    Args:
        net: a network that discretises an ODE.
        y: states `(*batch, n)`.

    Returns:
        Energies `(N+1, *batch)`.

    Raises:
        OptionError: if this is no network, or one that discretises no ODE, as an MLP.
        ShapeError: if y does not fit the network.

    Examples:
        >>> import hdnn, torch
        >>> net = hdnn.H2(features=4, layers=64, T=3.0)
        >>> with torch.no_grad():
        ...     for weight in net.parameters():  # the weights of layer 0 in all layers
        ...         weight[:] = weight[:1].clone()
        >>> H = hdnn.analysis.energy_along(net, torch.randn(10, 4))
        >>> H.shape, bool((H - H[0]).abs().max() < 0.05)
        (torch.Size([65, 10]), True)
    """
    _check(net, "field")
    field, states = net.field(), net.trajectory(y)
    K, b = (torch.cat([field[name], field[name][-1:]]) for name in ("K", "b"))
    flat = states.reshape(net.layers + 1, -1, net.features)
    integral = activations.get(net.activation).integral
    return integral(flat @ K.mT + b[:, None]).sum(-1).reshape(states.shape[:-1])


@torch.no_grad()
def reconstruction_error(net: Network, y: Tensor) -> Tensor:
    """What rounding costs when a network is undone: `|inverse(net(y)) - y| / |y|`.

    Args:
        net: a network that has an inverse.
        y: states `(*batch, n)`.

    Returns:
        A number for each sample `(*batch)`.

    Raises:
        OptionError: if this is no network.
        NotInvertibleError: if the network has no inverse.
        ShapeError: if y does not fit the network.

    Examples:
        >>> import hdnn, torch
        >>> net = hdnn.H2(features=4, layers=64)
        >>> bool(hdnn.analysis.reconstruction_error(net, torch.randn(10, 4)).max() < 1e-4)
        True
    """
    _check(net, "inverse")
    back = net.inverse(net(y))
    return (back - y).norm(dim=-1) / y.norm(dim=-1).clamp_min(torch.finfo(y.dtype).tiny)


def _check(net: object, method: str) -> None:
    if not hasattr(net, method):
        raise OptionError(
            f"a network is needed, but a {type(net).__name__} has no {method}; of a Model, give "
            "its net."
        )


# Continuous time


def gradient_dynamics(
    ode: ContinuousNetwork, y: Tensor, delta_T: Tensor, t: Times = None
) -> Tensor:
    """How far delta(t) by its own ODE is from `dy(T)/dy(t) delta_T` (lem:grad_dynamics).

    Args:
        ode: the network in continuous time.
        y: states `(*batch, n)` at t = 0.
        delta_T: gradients dL/dy(T) at the end `(*batch, n)`.
        t: times in 0 .. T, by default those where layers meet.

    Returns:
        Differences `(len(t), *batch)`, relative to the sizes of what is compared.

    Raises:
        ShapeError: if y does not fit the network, or delta_T has another shape.
        DataError: if y or delta_T is not finite.
        StepError: if a time is not in 0 .. T.
        ConvergenceError: if the ODE cannot be solved.

    Examples:
        >>> import hdnn, torch
        >>> ode = hdnn.analysis.ContinuousNetwork(hdnn.H2(features=4, layers=2))
        >>> y, delta_T = torch.randn(2, 3, 4)
        >>> bool((hdnn.analysis.gradient_dynamics(ode, y, delta_T) < 1e-8).all())
        True
    """
    delta = ode.gradients(y, delta_T, t)
    Phi = ode.sensitivity(y, t)
    product = (Phi @ delta_T.to(Phi).unsqueeze(-1)).squeeze(-1)
    size = norms(Phi) * torch.linalg.vector_norm(delta_T.to(Phi), dim=-1)
    return _relative(torch.linalg.vector_norm(delta - product, dim=-1), size)


def chain_rule(ode: ContinuousNetwork, y: Tensor, t: Times = None) -> Tensor:
    """How far `dy(t)/dy(0) dy(T)/dy(t)` is from `dy(T)/dy(0)`.

    One factor is solved forwards and one backwards: this would reveal a wrong sign or layout of
    eq:BackwardGradientDynamics, which the symmetries of Phi alone cannot.

    Args:
        ode: the network in continuous time.
        y: states `(*batch, n)` at t = 0.
        t: times in 0 .. T, by default those where layers meet.

    Returns:
        Differences `(len(t), *batch)`, relative to the sizes of what is compared.

    Raises:
        ShapeError: if y does not fit the network.
        DataError: if y is not finite.
        StepError: if a time is not in 0 .. T.
        ConvergenceError: if the ODE cannot be solved.

    Examples:
        >>> import hdnn, torch
        >>> ode = hdnn.analysis.ContinuousNetwork(hdnn.H2(features=4, layers=2))
        >>> bool((hdnn.analysis.chain_rule(ode, torch.randn(3, 4)) < 1e-8).all())
        True
    """
    F, Phi = ode.forward_sensitivity(y, t), ode.sensitivity(y, t)
    whole = ode.forward_sensitivity(y, ode.T)
    return _relative(norms(F @ Phi - whole), norms(F) * norms(Phi))


def generalized_symplecticity(ode: ContinuousNetwork, y: Tensor, t: Times = None) -> Tensor:
    """How far the matrices `Phi = dy(T)/dy(t)` are from symplectic, `Phi^T J Phi = J`.

    (le:generalized_symplecticity) J may be any constant skew-symmetric matrix, also singular or of
    odd size.

    Args:
        ode: the network in continuous time.
        y: states `(*batch, n)` at t = 0.
        t: times in 0 .. T, by default those where layers meet.

    Returns:
        The `symplectic_defect` of each matrix `(len(t), *batch)`.

    Raises:
        ShapeError: if y does not fit the network, or if J differs from layer to layer.
        DataError: if y is not finite.
        StepError: if a time is not in 0 .. T.
        ConvergenceError: if the ODE cannot be solved.

    Examples:
        >>> import hdnn, torch
        >>> ode = hdnn.analysis.ContinuousNetwork(hdnn.H1(features=4, layers=2))
        >>> bool((hdnn.analysis.generalized_symplecticity(ode, torch.randn(3, 4)) < 1e-8).all())
        True
    """
    return symplectic_defect(ode.sensitivity(y, t), ode.J.to(y.device))


def smallest_norms(ode: ContinuousNetwork, y: Tensor, t: Times = None) -> dict[str, float]:
    """The smallest norm of dy(T)/dy(t) over samples and times: none is below 1.

    (th:nonvanishing_gradients) More holds: A, a symmetric times a skew matrix, has no trace, so
    `det dy(T)/dy(t) = 1` even where J changes in time. Hence every sub-multiplicative norm is at
    least 1, and the Frobenius norm at least `sqrt(n)`.

    Args:
        ode: the network in continuous time.
        y: states `(*batch, n)` at t = 0.
        t: times in 0 .. T, by default those where layers start; at T itself the matrix is I.

    Returns:
        The smallest 2-, 1-, inf- and Frobenius norm, as "2", "1", "inf" and "fro".

    Raises:
        ShapeError: if y does not fit the network.
        DataError: if y is not finite.
        StepError: if a time is not in 0 .. T.
        ConvergenceError: if the ODE cannot be solved.

    Examples:
        >>> import hdnn, torch
        >>> ode = hdnn.analysis.ContinuousNetwork(hdnn.H2(features=4, layers=2))
        >>> found = hdnn.analysis.smallest_norms(ode, torch.randn(3, 4))
        >>> all(norm >= 1 for norm in found.values()), found["fro"] >= 2
        (True, True)
    """
    Phi = ode.sensitivity(y, ode.times[:-1] if t is None else t)
    return {order: float(norms(Phi, order).min()) for order in NORMS}


def upper_bounds(ode: ContinuousNetwork, y: Tensor, t: Times = None) -> dict[str, float]:
    """The largest 2-norm of dy(T)/dy(t) beside its two bounds (lem:upper_bound).

    Args:
        ode: the network in continuous time.
        y: states `(*batch, n)` at t = 0.
        t: times in 0 .. T, by default those where layers meet.

    Returns:
        What was "measured", the bound "continuous" of `bsm_bound_continuous`, and the bound of the
        "paper".

    Raises:
        OptionError: if the weights are not constant in each step.
        ShapeError: if y does not fit the network.
        DataError: if y is not finite.
        StepError: if a time is not in 0 .. T.
        ConvergenceError: if the ODE cannot be solved.

    Examples:
        >>> import hdnn, torch
        >>> ode = hdnn.analysis.ContinuousNetwork(hdnn.H2(features=4, layers=2))
        >>> found = hdnn.analysis.upper_bounds(ode, torch.randn(3, 4))
        >>> found["measured"] <= found["continuous"] <= found["paper"]
        True
    """
    if ode.weights != "constant":
        raise OptionError(
            f"the bounds are for weights that are constant in each step, but these are "
            f"{ode.weights}; give weights='constant'."
        )
    return {
        "measured": float(norms(ode.sensitivity(y, t)).max()),
        "continuous": float(bsm_bound_continuous(ode.net)),
        "paper": float(bsm_bound_paper(ode.net)),
    }


def _relative(difference: Tensor, size: Tensor) -> Tensor:
    return difference / size.clamp_min(torch.finfo(size.dtype).tiny)


# Layers against the flow of their ODE


@dataclass(frozen=True)
class Convergence:
    """Errors of a network against the flow of its ODE, from coarse to fine.

    Attributes:
        layers: of each refined network.
        steps: h of each, T / layers.
        errors: the largest `|y_N - y(T)|` of all samples.
        orders: the observed order between neighbours.
        order: that of the finest two networks whose errors exceed that of the flow; NaN if unknown.

    Examples:
        >>> import hdnn, torch
        >>> net = hdnn.H2(features=4, layers=2).double()
        >>> found = hdnn.analysis.convergence(net, torch.randn(3, 4), refinements=(1, 2, 4))
        >>> found.layers
        (2, 4, 8)
        >>> found.errors[0] > found.errors[1] > found.errors[2]
        True
    """

    layers: tuple[int, ...]
    steps: tuple[float, ...]
    errors: tuple[float, ...]
    orders: tuple[float, ...]
    order: float


@torch.no_grad()
def convergence(
    net: ODENetwork, y: Tensor, refinements: Sequence[int] = (1, 2, 4, 8, 16)
) -> Convergence:
    """The order at which the layers of a network come closer to the flow of its ODE.

    The network runs with k times its layers at h/k, by its own integrator. The ODE has each layer's
    weights on that layer's step, so it is the same for every k. A smooth activation is needed for
    orders above 2.

    Args:
        net: a network that discretises an ODE.
        y: states `(*batch, n)`.
        refinements: the k, two or more.

    Returns:
        A `Convergence`, with errors and orders; `hdnn.plotting.convergence` draws it.

    Raises:
        OptionError: if the network discretises no ODE.
        ShapeError: if y does not fit the network, or if there are fewer than two refinements.
        DataError: if weights or y are not finite.
        ConvergenceError: if the ODE cannot be solved.

    Examples:
        >>> import hdnn, torch
        >>> net = hdnn.HamiltonianNet(features=4, layers=2, integrator="verlet")
        >>> found = hdnn.analysis.convergence(net, torch.randn(3, 4), refinements=(4, 8, 16))
        >>> round(found.order)
        2
    """
    ode = ContinuousNetwork(net, rtol=1e-13, atol=1e-15)
    factors = sorted({positive_int("refinements", k) for k in refinements})
    if len(factors) < 2:
        raise ShapeError(
            f"an order needs two or more different refinements, but got {refinements}."
        )
    exact = ode.flow(y)
    states = y.to(exact)
    fine = [ode.net.refine(k) for k in factors]
    errors = [_largest(each(states.cpu()).to(exact) - exact) for each in fine]
    steps = [ode.T / each.layers for each in fine]
    orders = [_order(*pair) for pair in zip(pairwise(steps), pairwise(errors), strict=True)]
    floor = FLOOR * max(1.0, _largest(exact))
    known = [order for order, error in zip(orders, errors[1:], strict=True) if error > floor]
    return Convergence(
        layers=tuple(each.layers for each in fine),
        steps=tuple(steps),
        errors=tuple(errors),
        orders=tuple(orders),
        order=known[-1] if known else math.nan,
    )


def _largest(states: Tensor) -> float:
    return float(torch.linalg.vector_norm(states, dim=-1).max())


def _order(steps: tuple[float, float], errors: tuple[float, float]) -> float:
    if not all(errors):
        return math.nan
    return math.log(errors[0] / errors[1]) / math.log(steps[0] / steps[1])
