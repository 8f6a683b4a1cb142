"""Upper bounds on norm(dy_N/dy_j)_2: the paper's, and sharper ones."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hdnn import activations
from hdnn.analysis.copies import exact, rows
from hdnn.analysis.measured import MeasuredNetwork
from hdnn.errors import HDNNError, OptionError
from hdnn.networks import ODENetwork
from hdnn.networks.promise import own_methods
from hdnn.regularization import gradient_budget

TINY = 1e-300


@torch.no_grad()
def bsm_bound_paper(net: ODENetwork) -> Tensor:
    """sqrt(n) exp(Q T), Q = S sqrt(n) max |K|^2 |J|, for the ODE of the network (lem:upper_bound).

    Very loose, and for the continuous-time BSM. For MS1 and MS2, where J K^T = I, the smaller S |K|
    replaces S |K|^2 |J|.
    """
    rates = net.field_rates()
    n = net.features
    return math.sqrt(n) * torch.exp(math.sqrt(n) * rates.max() * net.steps().sum())


@torch.no_grad()
def bsm_bound_continuous(net: ODENetwork) -> Tensor:
    """exp(1/2 S int |K|^2 |J|) for the ODE of the network; without the 1/2 if sigma decreases.

    For a monotone activation A = K^T D K J^T is a product of a positive semidefinite and a skew
    matrix, whose symmetric part is at most half as large as itself.
    """
    rates = net.field_rates()
    half = 0.5 if activations.get(net.activation).monotone else 1.0
    return torch.exp(half * (net.steps() * rates).sum())


@torch.no_grad()
def bsm_bound_forward_euler(net: ODENetwork) -> Tensor:
    """prod_j sqrt(1 + Q_j + Q_j^2), Q = h S |K|^2 |J|, for the layers of H1 themselves.

    That is for a monotone activation; for others prod_j (1 + Q_j).
    """
    if not net.forward_euler:
        raise OptionError(
            f"this bound is for forward Euler (H1, MS2), not for {type(net).__name__}; "
            "for networks of shears use gradient_bounds."
        )
    rates = net.field_rates()
    Q = net.steps() * rates
    if activations.get(net.activation).monotone:
        return (1 + Q + Q.square()).sqrt().prod()
    return (1 + Q).prod()


@torch.no_grad()
def gradient_bounds(net: ODENetwork) -> tuple[Tensor, Tensor]:
    """(exp(-B), exp(B)): all |delta_j| / |delta_N| of H2 and its relatives lie between these."""
    B = gradient_budget(net)
    return torch.exp(-B), torch.exp(B)


@dataclass(frozen=True)
class Bound:
    """A bound computed from the weights alone, and the measured value if there is one."""

    name: str
    of: str  # what it bounds
    side: str  # "at most" or "at least"
    value: float
    measured: float | None = None
    rigorous: bool = True  # for these layers, not only for the ODE that they discretise
    slack: float = 1e-9  # relative: how far rounding can have moved the two

    @property
    def known(self) -> bool:
        """Whether bound and measurement can be compared: both known, and not hidden by rounding."""
        pair = (self.value, self.measured)
        if any(x is None or math.isnan(x) for x in pair) or not self.slack < 1:
            return False
        return not all(x == math.inf for x in pair) and not all(x == 0 for x in pair)

    @property
    def holds(self) -> bool | None:
        """None if nothing was measured, rounding hides it, or the bound is for the ODE only."""
        if self.measured is None or not self.rigorous or not self.known:
            return None
        if self.side == "at most":
            return self.measured <= self.value * (1 + self.slack)
        return self.measured >= self.value * (1 - self.slack)

    def __str__(self) -> str:
        text = f"{self.of} {self.side} {self.value:.4g} ({self.name})"
        if self.measured is None:
            return text
        if not self.rigorous:
            word = "a bound of the ODE, not of layers"
        else:
            word = {True: "holds", False: "DOES NOT HOLD", None: "cannot be told"}[self.holds]
        return f"{text}: measured {self.measured:.4g}, {word}"


@torch.no_grad()
def bounds(
    net: ODENetwork, y: Tensor | None = None, *, measured: tuple[float, float] | None = None
) -> list[Bound]:
    """All bounds that are known for a network, tightest last.

    Give states y, or the smallest and largest singular value that were `measured` over all
    dy_N/dy_j, to compare each bound with its measured value. At states y all is computed in float64
    (NaN if a state is not finite); `measured` may be off by the rounding of the network's dtype.
    """
    if not isinstance(net, ODENetwork):
        raise OptionError(f"{type(net).__name__} is no discretised ODE: no bound is known for it.")
    if own_methods(net):
        raise OptionError(f"no bound is known for {type(net).__name__}: {net.guarantee().why}.")
    if y is not None and measured is None:
        net = exact(net)
        return bounds_of(net, MeasuredNetwork(net, rows(y, net.features)).singular_range())
    # Numbers given by the user come from matrices, whose rounding is relative to the larger one.
    return bounds_of(
        net, measured, 1.0 if measured is None else measured[1] / max(measured[0], TINY)
    )


def bounds_of(
    net: ODENetwork, measured: tuple[float, float] | None, condition: float = 1.0
) -> list[Bound]:
    """`bounds`, with `condition` times more rounding in the smallest singular value."""
    (least, most), eps = measured or (None, None), torch.finfo(next(net.parameters()).dtype).eps
    norm, gradient = "norm(dy_N/dy_j)", "|delta_j|/|delta_N|"
    found: list[Bound] = []

    def add(name: str, of: str, side: str, value: Tensor, rigorous: bool = True) -> None:
        # Both sides are products over layers of norms that are each off by n eps. A layer has
        # up to 7 shears, hence the large factor.
        number = value.item()
        size = abs(math.log(number)) if 0 < number < math.inf else 0.0
        slack = 256 * net.features * eps * (net.layers + size)
        seen, slack = (least, slack * condition) if side == "at least" else (most, slack)
        found.append(Bound(name, of, side, number, seen, rigorous, slack))

    try:
        paper, sharper = bsm_bound_paper(net), bsm_bound_continuous(net)
        add("lem:upper_bound", norm, "at most", paper, net.forward_euler)
        add("sharper form", norm, "at most", sharper, False)
    except HDNNError:  # the network has no field
        pass
    if net.forward_euler:
        add("forward Euler", norm, "at most", bsm_bound_forward_euler(net))
    try:
        low, high = gradient_bounds(net)
    except HDNNError:  # its layers are not made of shears
        return found
    add("budget exp(-B)", gradient, "at least", low)
    add("budget exp(B)", gradient, "at most", high)
    return found
