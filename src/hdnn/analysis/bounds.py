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
from hdnn.networks import Network, ODENetwork
from hdnn.networks.promise import own_methods
from hdnn.regularization import gradient_budget

TINY = 1e-300


@torch.no_grad()
def bsm_bound_paper(net: ODENetwork) -> Tensor:
    """The paper's upper bound on the norm of dy(T)/dy(t) in a network's ODE (lem:upper_bound).

    It is `sqrt(n) exp(Q T)` with `Q = S sqrt(n) max |K|^2 |J|`, where S is the largest slope of the
    activation. It is very loose. For MS1 and MS2, where `J K^T = I`, the smaller `S |K|` replaces
    `S |K|^2 |J|`.

    Args:
        net: a network that discretises an ODE.

    Returns:
        One number, as a tensor.

    Raises:
        OptionError: if this is no network, or one that discretises no ODE, as an MLP.

    Examples:
        >>> import hdnn
        >>> net = hdnn.H2(features=4, layers=8)
        >>> sharper = hdnn.analysis.bsm_bound_continuous(net)
        >>> bool(sharper < hdnn.analysis.bsm_bound_paper(net))
        True
    """
    _check(net)
    rates = net.field_rates()
    n = net.features
    return math.sqrt(n) * torch.exp(math.sqrt(n) * rates.max() * net.steps().sum())


@torch.no_grad()
def bsm_bound_continuous(net: ODENetwork) -> Tensor:
    """A sharper upper bound on the norm of dy(T)/dy(t), for the ODE of a network.

    It is `exp(1/2 S int |K|^2 |J| dt)`, without the 1/2 if the activation can decrease. For a
    monotone activation, `A = K^T D K J^T` is a product of a positive semidefinite and a skew
    matrix, whose symmetric part is at most half as large as itself.

    Args:
        net: a network that discretises an ODE.

    Returns:
        One number, as a tensor.

    Raises:
        OptionError: if this is no network, or one that discretises no ODE, as an MLP.

    Examples:
        >>> import hdnn, torch
        >>> net = hdnn.H2(features=4, layers=8, generator=torch.Generator().manual_seed(0))
        >>> ode = hdnn.analysis.ContinuousNetwork(net)
        >>> measured = hdnn.analysis.norms(ode.sensitivity(torch.randn(10, 4))).max()
        >>> bool(measured <= hdnn.analysis.bsm_bound_continuous(net))
        True
    """
    _check(net)
    rates = net.field_rates()
    half = 0.5 if activations.get(net.activation).monotone else 1.0
    return torch.exp(half * (net.steps() * rates).sum())


@torch.no_grad()
def bsm_bound_forward_euler(net: ODENetwork) -> Tensor:
    """An upper bound on the norms of all dy_N/dy_j in a network of forward Euler layers.

    It is `prod_j sqrt(1 + Q_j + Q_j^2)` with `Q_j = h_j S |K_j|^2 |J_j|` for a monotone activation,
    and `prod_j (1 + Q_j)` for others. It is about the layers themselves, not about their ODE.

    Args:
        net: an H1, MS2, or another network of forward Euler layers.

    Returns:
        One number, as a tensor.

    Raises:
        OptionError: if the layers are not those of forward Euler.

    Examples:
        >>> import hdnn, torch
        >>> net = hdnn.H1(features=4, layers=8)
        >>> Phi = hdnn.analysis.backward_sensitivity(net, torch.randn(10, 4))
        >>> bool(hdnn.analysis.norms(Phi).max() <= hdnn.analysis.bsm_bound_forward_euler(net))
        True
    """
    _check(net)
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


def _check(net: object) -> None:
    if not isinstance(net, Network):
        raise OptionError(
            f"bounds are those of a network, but got {type(net).__name__}; of a Model, its net."
        )


@torch.no_grad()
def gradient_bounds(net: ODENetwork) -> tuple[Tensor, Tensor]:
    """`exp(-B)` and `exp(B)`: the factors between which every gradient of an H2 shrinks or grows.

    All `|delta_j| / |delta_N|` of H2 and its relatives lie between these two, for every loss,
    sample and layer. B is `hdnn.regularization.gradient_budget`.

    Args:
        net: a network whose layers are shears: H2, MS1, MS3, Verlet, Yoshida.

    Returns:
        The lower and the upper bound, as tensors with one number each.

    Raises:
        OptionError: if the layers are not shears, or if this is no network.

    Examples:
        >>> import hdnn, torch
        >>> net = hdnn.H2(features=4, layers=8)
        >>> low, high = hdnn.analysis.gradient_bounds(net)
        >>> Phi = hdnn.analysis.backward_sensitivity(net, torch.randn(10, 4))
        >>> values = hdnn.analysis.singular_values(Phi)
        >>> bool(low <= values.min()), bool(values.max() <= high)
        (True, True)
    """
    B = gradient_budget(net)
    return torch.exp(-B), torch.exp(B)


@dataclass(frozen=True)
class Bound:
    """A bound computed from the weights alone, and the measured value if there is one.

    Attributes:
        name: where the bound comes from, such as "lem:upper_bound".
        of: what it bounds.
        side: "at most" or "at least".
        value: the bound.
        measured: what was found at some states; None if nothing was measured.
        rigorous: whether it holds for these layers, not only for the ODE that they discretise.
        slack: how far, relatively, rounding can have moved the two numbers.

    Examples:
        >>> import hdnn, torch
        >>> net = hdnn.H2(features=4, layers=8)
        >>> tightest = hdnn.analysis.bounds(net, torch.randn(10, 4))[-1]
        >>> tightest.name, tightest.side, tightest.holds
        ('budget exp(B)', 'at most', True)
    """

    name: str
    of: str
    side: str
    value: float
    measured: float | None = None
    rigorous: bool = True
    slack: float = 1e-9

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
    """All bounds on the gradients that are known for a network, the tightest last.

    Args:
        net: a network that discretises an ODE.
        y: states `(*batch, n)` at which to compare each bound with what is measured there, in
            float64. If a state is not finite, what is measured is NaN.
        measured: instead of y, the smallest and the largest singular value that you measured over
            all dy_N/dy_j. They may be off by the rounding of the network's dtype.

    Returns:
        A list of `Bound`; print one to read it.

    Raises:
        OptionError: if the network discretises no ODE, or if a subclass computes in its own way.
        ShapeError: if y does not fit the network.

    Examples:
        >>> import hdnn, torch
        >>> net = hdnn.H2(features=4, layers=8)
        >>> for bound in hdnn.analysis.bounds(net, torch.randn(10, 4)):
        ...     print(bound)
        norm(dy_N/dy_j) at most ... (lem:upper_bound): measured ...
        norm(dy_N/dy_j) at most ... (sharper form): measured ...
        |delta_j|/|delta_N| at least ... (budget exp(-B)): measured ..., holds
        |delta_j|/|delta_N| at most ... (budget exp(B)): measured ..., holds
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
