"""Bounds on the gradients that follow from the weights alone: the paper's, and sharper ones."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hdnn.analysis.modules import exact
from hdnn.analysis.sensitivity import (
    backward_sensitivity,
    singular_values,
    steps_of,
)
from hdnn.errors import OptionError
from hdnn.networks import Network

SHOWN = 1e6  # larger bounds are useless to a reader


@torch.no_grad()
def bsm_bound_paper(net: Network) -> Tensor:
    """The paper's upper bound on the norm of dy(T)/dy(t) in a network's ODE (lem:upper_bound).

    The bound is `sqrt(n) exp(Q T)` with `Q = S sqrt(n) max |K|^2 |J|`, where S is the largest slope
    of the activation. This bound is very loose.

    Args:
        net: a network that discretises an ODE.

    Returns:
        One number, as a tensor.

    Examples:
        >>> import hdnn
        >>> net = hdnn.H2(features=4, layers=8)
        >>> bool(hdnn.analysis.bsm_bound_continuous(net) < hdnn.analysis.bsm_bound_paper(net))
        True
    """
    T = steps_of(net).sum()
    root = math.sqrt(net.features)
    Q = root * net.field_rates().max()
    return root * torch.exp(Q * T)


@torch.no_grad()
def bsm_bound_continuous(net: Network) -> Tensor:
    """A sharper upper bound on the norm of dy(T)/dy(t) in a network's ODE.

    The bound is `exp(1/2 S int |K|^2 |J| dt)`, without the 1/2 if the activation can decrease or
    there are gains. For a monotone activation without gains, `A = K^T D K J^T` is a product of a
    positive semidefinite and a skew matrix, whose symmetric part is at most half as large as
    itself.

    Args:
        net: a network that discretises an ODE.

    Returns:
        One number, as a tensor.
    """
    convex = net.sigma.monotone and not getattr(net, "gains", False)
    half = 0.5 if convex else 1.0
    rates = steps_of(net) * net.field_rates()
    return torch.exp(half * rates.sum())


@torch.no_grad()
def bsm_bound_forward_euler(net: Network) -> Tensor:
    """An upper bound on the norms of all dy_N/dy_j in a network of forward Euler layers.

    The bound is `prod_j sqrt(1 + Q_j + Q_j^2)` with `Q_j = h_j S |K_j|^2 |J_j|` for a monotone
    activation, and `prod_j (1 + Q_j)` for other activations. It holds for the layers themselves,
    not for their ODE.

    Args:
        net: an H1, an MS2, or another network of forward Euler layers.

    Returns:
        One number, as a tensor.

    Examples:
        >>> import hdnn, torch
        >>> net = hdnn.H1(features=4, layers=8)
        >>> Phi = hdnn.analysis.backward_sensitivity(net, torch.randn(10, 4))
        >>> bool(hdnn.analysis.norms(Phi).max() <= hdnn.analysis.bsm_bound_forward_euler(net))
        True
    """
    steps = steps_of(net)
    if not net.forward_euler:
        raise OptionError(
            f"this bound is for forward Euler (H1, MS2), not for {type(net).__name__}; "
            "for H2 and its relatives use gradient_bounds."
        )
    Q = steps * net.field_rates()
    if net.sigma.monotone:
        return (1 + Q + Q.square()).sqrt().prod()
    return (1 + Q).prod()


@torch.no_grad()
def gradient_bounds(net: Network) -> tuple[Tensor, Tensor]:
    """The bounds `exp(-B)` and `exp(B)` on how much every gradient shrinks or grows.

    All `|delta_j| / |delta_N|` of H2 and its relatives lie between these two bounds, for every
    loss, sample and layer. Each p- or q-update is a shear `I + A`, whose singular values lie
    between `exp(-a)` and `exp(a)` with `a = asinh(|A|/2)`; B is the sum over all of them.

    Args:
        net: a network whose layers are shears: H2, MS1, MS3, Verlet, Yoshida.

    Returns:
        The lower and the upper bound, as tensors with one number each.

    Raises:
        OptionError: if the layers are not shears.

    Examples:
        >>> import hdnn, torch
        >>> net = hdnn.H2(features=4, layers=8)
        >>> low, high = hdnn.analysis.gradient_bounds(net)
        >>> values = hdnn.analysis.singular_values(
        ...     hdnn.analysis.backward_sensitivity(net, torch.randn(10, 4))
        ... )
        >>> bool(low <= values.min()), bool(values.max() <= high)
        (True, True)
    """
    norms = net.sigma.S * net.shear_norms()
    B = torch.asinh(0.5 * norms).sum()
    return torch.exp(-B), torch.exp(B)


@dataclass(frozen=True)
class Bound:
    """A bound on the growth or shrinkage of gradients, with the measured value.

    Attributes:
        name: "paper", "sharper", "forward Euler" or "budget".
        side: "at most" or "at least", as a factor of a gradient's size.
        value: the bound.
        measured: the extreme singular value of all dy_N/dy_j; None if nothing was measured.
        rigorous: True if the bound holds for these layers, not only for the ODE they discretise.
        slack: the relative error that rounding may have caused in both numbers.
    """

    name: str
    side: str
    value: float
    measured: float | None = None
    rigorous: bool = True
    slack: float = 0.0

    @property
    def holds(self) -> bool | None:
        """True if the measured value obeys the bound; None if unknown or only for the ODE."""
        if not self.rigorous or self.measured is None or self.slack >= 1:
            return None
        if not math.isfinite(self.measured) or not math.isfinite(self.value):
            return None
        if self.side == "at most":
            return self.measured <= self.value * (1 + self.slack)
        return self.measured >= self.value * (1 - self.slack)

    def __str__(self) -> str:
        if not 1 / SHOWN < self.value < SHOWN:
            return f"{self.name}: too loose to be useful"
        text = f"{self.name}: a gradient keeps {self.side} {self.value:.4g} of its size"
        if self.measured is None:
            return text
        scope = {
            True: "holds",
            False: "DOES NOT HOLD",
            None: "not known for these layers",
        }
        return f"{text}; measured {self.measured:.4g}, {scope[self.holds]}"


@torch.no_grad()
def bounds(net: Network, y: Tensor | None = None) -> list[Bound]:
    """All known bounds on the gradients of a network, the tightest last.

    Args:
        net: a network that discretises an ODE.
        y: states `(*batch, n)` at which gradients are measured in float64, to compare with each
            bound.

    Returns:
        A list of `Bound`; print one to read it.

    Examples:
        >>> import hdnn, torch
        >>> print(hdnn.analysis.bounds(hdnn.H2(features=4, layers=8), torch.randn(10, 4))[-1])
        budget: a gradient keeps at most ... of its size; measured ..., holds
    """
    if y is None:
        return compared_bounds(net)
    net = exact(net)
    Phi = backward_sensitivity(net, y.to("cpu", torch.float64))
    values = singular_values(Phi)
    return compared_bounds(net, float(values.min()), float(values.max()))


def compared_bounds(
    net: Network, smallest: float | None = None, largest: float | None = None
) -> list[Bound]:
    """The bounds, with the extreme singular values over all dy_N/dy_j."""
    eps = torch.finfo(steps_of(net).dtype).eps
    result = []

    def add(name: str, side: str, bound: Tensor, rigorous: bool = True) -> None:
        # Both numbers are products over layers of norms that are each off by n eps.
        value = float(bound)
        size = abs(math.log(value)) if 0 < value < math.inf else 0.0
        slack = 256 * net.features * eps * (net.layers + size)
        measured = largest
        if side == "at least":
            measured = smallest
            if smallest is not None and largest is not None:
                slack = slack * largest / max(smallest, 1e-300)
        result.append(Bound(name, side, value, measured, rigorous, slack))

    add("paper", "at most", bsm_bound_paper(net), net.forward_euler)
    add("sharper", "at most", bsm_bound_continuous(net), False)
    if net.forward_euler:
        add("forward Euler", "at most", bsm_bound_forward_euler(net))
    if net.scheme.halves:
        low, high = gradient_bounds(net)
        add("budget", "at least", low)
        add("budget", "at most", high)
    return result
