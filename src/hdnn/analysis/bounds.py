"""Upper bounds on norm(dy_N/dy_j)_2: the paper's, and sharper ones."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hdnn import activations
from hdnn.errors import OptionError
from hdnn.networks import MS1, MS2, HamiltonianNet, ODENetwork
from hdnn.operators import dense
from hdnn.regularization import gradient_budget


def _rates(net: ODENetwork) -> Tensor:
    """A bound on the derivative of the field in each layer: S |K_j|^2 |J_j|, (N,)."""
    S = activations.get(net.activation).S
    if isinstance(net, (MS1, MS2)):  # J K^T = I
        return S * dense.norm(net.weights()[net.stacked[0]])
    field = net.field()
    return S * dense.norm(field["K"]).square() * dense.norm(field["J"])


@torch.no_grad()
def bsm_bound_paper(net: ODENetwork) -> Tensor:
    """sqrt(n) exp(Q T), Q = S sqrt(n) max |K|^2 |J|, for the ODE of the network (lem:upper_bound).

    Very loose, and for the continuous-time BSM. For MS1 and MS2, where J K^T = I, S |K| stands for
    S |K|^2 |J|, which is larger.
    """
    rates = _rates(net)
    n = net.features
    return math.sqrt(n) * torch.exp(math.sqrt(n) * rates.max() * net.steps().sum())


@torch.no_grad()
def bsm_bound_continuous(net: ODENetwork) -> Tensor:
    """exp(1/2 S int |K|^2 |J|) for the ODE of the network; without the 1/2 if sigma decreases.

    For a monotone activation A = K^T D K J^T is a product of a positive semidefinite and a skew
    matrix, whose symmetric part is at most half as large as itself.
    """
    rates = _rates(net)
    half = 0.5 if activations.get(net.activation).monotone else 1.0
    return torch.exp(half * (net.steps() * rates).sum())


@torch.no_grad()
def bsm_bound_forward_euler(net: ODENetwork) -> Tensor:
    """prod_j sqrt(1 + Q_j + Q_j^2), Q = h S |K|^2 |J|, for the layers of H1 themselves.

    That is for a monotone activation; for others prod_j (1 + Q_j).
    """
    euler = isinstance(net, HamiltonianNet) and net.integrator == "forward_euler"
    if not (euler or isinstance(net, MS2)):
        raise OptionError(
            f"this bound is for forward Euler (H1, MS2), not for {type(net).__name__}; "
            "for networks of shears use gradient_bounds."
        )
    rates = _rates(net)
    Q = net.steps() * rates
    if activations.get(net.activation).monotone:
        return (1 + Q + Q.square()).sqrt().prod()
    return (1 + Q).prod()


@torch.no_grad()
def gradient_bounds(net: ODENetwork) -> tuple[Tensor, Tensor]:
    """(exp(-B), exp(B)): between these lie all |delta_j| / |delta_N| of H2 and its relatives."""
    B = gradient_budget(net)
    return torch.exp(-B), torch.exp(B)
