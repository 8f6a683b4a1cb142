"""Upper bounds on norm(dy_N/dy_j)_2: the paper's, and sharper ones."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hdnn import activations
from hdnn.analysis.sensitivity import backward_sensitivity, singular_values
from hdnn.errors import HDNNError, OptionError
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


@dataclass(frozen=True)
class Bound:
    """A bound that the weights alone give, and what was measured beside it."""

    name: str
    of: str  # what it bounds
    side: str  # "at most" or "at least"
    value: float
    measured: float | None = None
    rigorous: bool = True  # of these layers; else of the ODE that they discretise

    @property
    def holds(self) -> bool | None:
        """None where nothing was measured, or where the bound is one of the ODE."""
        if self.measured is None or not self.rigorous:
            return None
        slack = 1e-9
        if self.side == "at most":
            return self.measured <= self.value * (1 + slack)
        return self.measured >= self.value * (1 - slack)

    def __str__(self) -> str:
        text = f"{self.of} {self.side} {self.value:.4g} ({self.name})"
        if self.measured is None:
            return text
        word = {True: "holds", False: "DOES NOT HOLD", None: "a bound of the ODE, not of layers"}
        return f"{text}: measured {self.measured:.4g}, {word[self.holds]}"


@torch.no_grad()
def bounds(
    net: ODENetwork, y: Tensor | None = None, *, measured: tuple[float, float] | None = None
) -> list[Bound]:
    """All bounds that are known for a network, tightest last.

    With states y, or the smallest and largest singular value over all dy_N/dy_j that were
    `measured`, each has that beside it.
    """
    if not isinstance(net, ODENetwork):
        raise OptionError(f"{type(net).__name__} is no discretised ODE: no bound is known for it.")
    if y is not None and measured is None:
        values = singular_values(backward_sensitivity(net, y))
        measured = values[..., -1].min().item(), values[..., 0].max().item()
    least, most = measured or (None, None)
    euler = isinstance(net, MS2) or (
        isinstance(net, HamiltonianNet) and net.integrator == "forward_euler"
    )
    norm, gradient = "norm(dy_N/dy_j)", "|delta_j|/|delta_N|"
    found = []
    try:
        paper, sharper = bsm_bound_paper(net).item(), bsm_bound_continuous(net).item()
        found.append(Bound("lem:upper_bound", norm, "at most", paper, most, rigorous=euler))
        found.append(Bound("sharper form", norm, "at most", sharper, most, rigorous=False))
    except HDNNError:  # it has no field
        pass
    if euler:
        discrete = bsm_bound_forward_euler(net).item()
        found.append(Bound("forward Euler", norm, "at most", discrete, most))
    try:
        low, high = (bound.item() for bound in gradient_bounds(net))
    except HDNNError:  # its layers are no shears
        return found
    found.append(Bound("budget exp(-B)", gradient, "at least", low, least))
    found.append(Bound("budget exp(B)", gradient, "at most", high, most))
    return found
