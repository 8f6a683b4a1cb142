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
    """|Phi^T J Phi - J| / (|Phi|^2 |J|) for each BSM of (..., n, n), in denominator layout.

    Relative to the sizes of the factors, so that it is a multiple of the rounding error. NaN for a
    matrix that is not finite.
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
    """Whether every BSM is symplectic with respect to J, up to the rounding of its dtype."""
    if tolerance is None:
        tolerance = 64 * Phi.shape[-1] * torch.finfo(Phi.dtype).eps
    return bool((symplectic_defect(Phi, J) <= tolerance).all())


@torch.no_grad()
def energy_along(net: ODENetwork, y: Tensor) -> Tensor:
    """H_j(y_j) along the trajectory, (N+1, *batch): the energy of each layer at its own input.

    At y_N with the weights of the last layer. Where all layers have the same weights, a symplectic
    integrator keeps it close to constant; forward Euler lets it grow.
    """
    field, states = net.field(), net.trajectory(y)
    K, b = (torch.cat([field[name], field[name][-1:]]) for name in ("K", "b"))
    flat = states.reshape(net.layers + 1, -1, net.features)
    integral = activations.get(net.activation).integral
    return integral(flat @ K.mT + b[:, None]).sum(-1).reshape(states.shape[:-1])


@torch.no_grad()
def reconstruction_error(net: Network, y: Tensor) -> Tensor:
    """|inverse(net(y)) - y| / |y| for each sample, (*batch): what rounding costs."""
    back = net.inverse(net(y))
    return (back - y).norm(dim=-1) / y.norm(dim=-1).clamp_min(torch.finfo(y.dtype).tiny)


# Continuous time


def gradient_dynamics(
    ode: ContinuousNetwork, y: Tensor, delta_T: Tensor, t: Times = None
) -> Tensor:
    """delta(t) by its own ODE against dy(T)/dy(t) delta_T (lem:grad_dynamics): (len(t), *batch)."""
    delta = ode.gradients(y, delta_T, t)
    Phi = ode.sensitivity(y, t)
    product = (Phi @ delta_T.to(Phi).unsqueeze(-1)).squeeze(-1)
    size = norms(Phi) * torch.linalg.vector_norm(delta_T.to(Phi), dim=-1)
    return _relative(torch.linalg.vector_norm(delta - product, dim=-1), size)


def chain_rule(ode: ContinuousNetwork, y: Tensor, t: Times = None) -> Tensor:
    """dy(t)/dy(0) dy(T)/dy(t) against dy(T)/dy(0): (len(t), *batch).

    One factor is solved forwards and one backwards: this would reveal a wrong sign or layout of
    eq:BackwardGradientDynamics, which the symmetries of Phi alone cannot.
    """
    F, Phi = ode.forward_sensitivity(y, t), ode.sensitivity(y, t)
    whole = ode.forward_sensitivity(y, ode.T)
    return _relative(norms(F @ Phi - whole), norms(F) * norms(Phi))


def generalized_symplecticity(ode: ContinuousNetwork, y: Tensor, t: Times = None) -> Tensor:
    """Phi^T J Phi against J, for Phi = dy(T)/dy(t) and a constant J: (len(t), *batch).

    (le:generalized_symplecticity) J may be any skew-symmetric matrix, also singular or of odd size.
    """
    return symplectic_defect(ode.sensitivity(y, t), ode.J.to(y.device))


def smallest_norms(ode: ContinuousNetwork, y: Tensor, t: Times = None) -> dict[str, float]:
    """The smallest norm of dy(T)/dy(t) over samples and times, in the 2-, 1-, inf- and F-norm.

    None is below 1 (th:nonvanishing_gradients). More holds: A, a symmetric times a skew matrix, has
    no trace, so det dy(T)/dy(t) = 1 even where J changes in time. Hence every sub-multiplicative
    norm is at least 1, and the Frobenius norm at least sqrt(n). By default over all layers' starts,
    without T itself, where the matrix is I.
    """
    Phi = ode.sensitivity(y, ode.times[:-1] if t is None else t)
    return {order: float(norms(Phi, order).min()) for order in NORMS}


def upper_bounds(ode: ContinuousNetwork, y: Tensor, t: Times = None) -> dict[str, float]:
    """The largest 2-norm of dy(T)/dy(t), the sharper bound on it, and the paper's.

    (lem:upper_bound, and `bsm_bound_continuous`.)
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
    """Errors of a network against the flow of its ODE, from coarse to fine."""

    layers: tuple[int, ...]
    steps: tuple[float, ...]  # T / layers
    errors: tuple[float, ...]  # the largest |y_N - y(T)| of all samples
    orders: tuple[float, ...]  # between neighbours
    order: float  # of the finest two networks whose errors exceed that of the flow


@torch.no_grad()
def convergence(
    net: ODENetwork, y: Tensor, refinements: Sequence[int] = (1, 2, 4, 8, 16)
) -> Convergence:
    """The observed order of the network's own integrator, with k times the layers at h/k.

    The ODE has each layer's weights on that layer's step, so it is the same for every k. A smooth
    activation is needed for orders above 2.
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
