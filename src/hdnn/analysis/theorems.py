"""The paper's claims for networks in continuous time: how far are they off numerically?

Results are differences relative to the sizes of what is compared, so a claim that holds gives
numbers near the tolerance of the solver.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hdnn.analysis.bounds import bsm_bound_continuous, bsm_bound_paper
from hdnn.analysis.continuous import ContinuousNetwork, Times
from hdnn.analysis.sensitivity import norms
from hdnn.analysis.symplectic import symplectic_defect
from hdnn.errors import OptionError

NORMS = ("2", "1", "inf", "fro")


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
