"""Activations by name: sigma, its slope sigma', its integral, and the range of its slope.

The Hamiltonian of a layer is the sum of `integral(K y + b)` (eq:nlH), so an activation is fully
described by its energy. The slope range `[s_min, s_max]` decides which guarantees hold: S bounds
every gradient from above (eq:sigma_bound), and a monotone sigma (`s_min >= 0`) keeps the gradients
of forward Euler from vanishing too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from hdnn.errors import OptionError, choose, quoted

__all__ = [
    "Activation",
    "check",
    "get",
    "names",
    "register",
]

Elementwise = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Activation:
    """An activation sigma with everything that the theory needs to know of it.

    Args:
        name: by which networks, functions and files know it, once it is registered.
        sigma: the function itself, of tensors of any shape, entry by entry.
        slope: its derivative; at a kink any value between those of both sides.
        integral: of sigma from 0 on, so that it is zero at zero.
        s_min: the infimum of the slope: the largest number that it is never below.
        s_max: the supremum of the slope: the smallest number that it is never above.

    Examples:
        >>> import torch
        >>> from hdnn import activations
        >>> tanh = activations.get("tanh")
        >>> tanh(torch.zeros(2)), tanh.slope(torch.zeros(2))
        (tensor([0., 0.]), tensor([1., 1.]))
        >>> tanh.S, tanh.monotone
        (1.0, True)
    """

    name: str
    sigma: Elementwise
    slope: Elementwise  # sigma', itself differentiable
    integral: Elementwise  # of sigma, zero at zero
    s_min: float
    s_max: float

    @property
    def S(self) -> float:
        """The bound `|sigma'| <= S` of eq:sigma_bound."""
        return max(abs(self.s_min), abs(self.s_max))

    @property
    def monotone(self) -> bool:
        """Whether sigma never decreases."""
        return self.s_min >= 0

    def __call__(self, x: Tensor) -> Tensor:
        return self.sigma(x)


def _magnitude(x: Tensor) -> Tensor:
    # Not abs: its derivative at 0 is 0, which would spoil second derivatives of even integrals.
    return torch.where(x < 0, -x, x)


def _softplus(x: Tensor) -> Tensor:
    # The default threshold of 20 cuts off at 2e-9, far above the rounding of float64.
    return F.softplus(x, threshold=40.0)


def _normal_cdf(x: Tensor) -> Tensor:
    return 0.5 * torch.erfc(-x * math.sqrt(0.5))


def _normal_pdf(x: Tensor) -> Tensor:
    return torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def _tanh_slope(x: Tensor) -> Tensor:
    z = torch.tanh(x)
    return 1 - z * z


def _tanh_integral(x: Tensor) -> Tensor:
    a = _magnitude(x)
    return a + _softplus(-2 * a) - math.log(2)  # log cosh x without overflow


def _sigmoid_slope(x: Tensor) -> Tensor:
    return torch.sigmoid(x) * torch.sigmoid(-x)


# Li2(1 - exp(-u)) = u - u^2/4 + sum_k B_2k u^(2k+1) / (2k+1)!, B_2k the Bernoulli numbers:
# for |u| <= log 2 each term is 80 times smaller than the one before.
_BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510)
_DEBYE = tuple(B / math.factorial(2 * k + 1) for k, B in enumerate(_BERNOULLI, start=1))


def _dilogarithm_of_minus_exp(x: Tensor) -> Tensor:
    """Li2(-exp(x)) for x <= 0."""
    u = -_softplus(x)
    square = u * u
    series = torch.zeros_like(u)
    for coefficient in reversed(_DEBYE):
        series = (series + coefficient) * square
    return u * (1 + series) - 0.25 * square


def _softplus_integral(x: Tensor) -> Tensor:
    left = -_dilogarithm_of_minus_exp(torch.where(x > 0, -x, x)) - math.pi**2 / 12
    return torch.where(x > 0, 0.5 * x * x - left, left)


def _gelu_slope(x: Tensor) -> Tensor:
    return _normal_cdf(x) + x * _normal_pdf(x)


def _gelu_integral(x: Tensor) -> Tensor:
    Phi = _normal_cdf(x)
    return 0.5 * (x * (x * Phi + _normal_pdf(x)) - Phi) + 0.25  # no x^2, which may overflow


def _silu_slope(x: Tensor) -> Tensor:
    return torch.sigmoid(x) * (1 + x * torch.sigmoid(-x))


_GELU_S_MAX = 0.5 * math.erfc(-1.0) + math.exp(-1.0) / math.sqrt(math.pi)  # at sqrt(2)
_SILU_S_MAX = 0.5 + 2.3993572805154677 / 4  # at the x with x tanh(x / 2) = 2

_REGISTRY: dict[str, Activation] = {}


def register(activation: Activation) -> Activation:
    """Make an activation known by its name to every function, network and checkpoint.

    Guarantees and bounds are read from its slope, its integral and the range of its slope. So these
    are compared with sigma in float64, at 13,600 points from -1e6 to 1e6, many of them near 0, and
    refused where they do not fit.

    Args:
        activation: the activation, under a name that is not taken.

    Returns:
        The same activation.

    Raises:
        OptionError: if it is no `Activation`, its name is taken or empty, or its functions and its
            range do not fit together.

    Examples:
        >>> import hdnn
        >>> algebraic = hdnn.activations.Activation(
        ...     "algebraic",
        ...     sigma=lambda x: x * (1 + x * x) ** -0.5,
        ...     slope=lambda x: (1 + x * x) ** -1.5,
        ...     integral=lambda x: (1 + x * x).sqrt() - 1,
        ...     s_min=0.0,
        ...     s_max=1.0,
        ... )
        >>> _ = hdnn.activations.register(algebraic)
        >>> print(hdnn.H2(features=4, layers=2, activation="algebraic", T=1.0))
        H2(4 features, 2 layers, algebraic, h = 0.5, T = 1, 24 parameters)
    """
    if not isinstance(activation, Activation):
        raise OptionError(
            f"register takes a hdnn.activations.Activation, but got {quoted(activation)}."
        )
    if not (isinstance(activation.name, str) and activation.name):
        raise OptionError(f"an activation needs a name, but got {quoted(activation.name)}.")
    if activation.name in _REGISTRY:
        raise OptionError(
            f"an activation named {activation.name!r} exists already; choose another name."
        )
    check(activation)
    _REGISTRY[activation.name] = activation
    return activation


LOOSE = 0.01  # by which the slope range may be wider than what the slope is seen to be
# Relative, to which derivatives must agree with differences near kinks and where all is smooth:
# not closer than `torch.nn.functional.softplus`, which is x from 20 on.
CLOSE, EXACT = 1e-5, 3e-9
STEPS = [0.08 / 2**k for k in range(16)]  # of differences where a function is smooth
ROUNDING = 32 * torch.finfo(torch.float64).eps  # of a value, relative to its size or to 1


@torch.no_grad()
def check(activation: Activation) -> None:
    """Raise if slope, integral or slope range do not fit sigma, and say where and by how much.

    Args:
        activation: what `register` would check.

    Raises:
        OptionError: if a function fails or is not finite, a derivative is wrong, or the range of
            the slope is not the tightest.

    Examples:
        >>> import torch
        >>> from hdnn import activations
        >>> zero = torch.zeros_like
        >>> wrong = activations.Activation("wrong", torch.sin, zero, zero, s_min=0.0, s_max=0.0)
        >>> activations.check(wrong)
        Traceback (most recent call last):
        hdnn.errors.OptionError: activation 'wrong': at x = ... the slope is given as 0, but ...
    """
    # Fewer than the 2^15 points from which on PyTorch would wait for threads.
    some = torch.logspace(-8, 6, 2801, dtype=torch.float64, device="cpu")
    even = torch.arange(-4000, 4001, dtype=torch.float64, device="cpu") / 200  # with 0 itself
    x = torch.cat([-some, even, some]).sort().values
    d = 1e-6 * x.abs().clamp_min(1) ** (1 / 3)
    left, right = x - d, x + d
    found = {}
    for name in ("sigma", "slope", "integral"):
        function = getattr(activation, name)
        found[name] = [_values(activation, name, function, at) for at in (left, x, right)]
    for name, of in (("slope", "sigma"), ("sigma", "integral")):
        whole, rate = found[of], found[name][1]
        sides = (whole[1] - whole[0]) / (x - left), (whole[2] - whole[1]) / (right - x)
        middle, half = (sides[0] + sides[1]) / 2, (sides[0] - sides[1]).abs() / 2
        exact, error = _derivative(getattr(activation, of), x, whole[1], rate)
        rough, fine = half + CLOSE * (1 + rate.abs()), 10 * error + EXACT * (1 + rate.abs())
        smooth = error < 1e-2 * (1 + exact.abs())
        expected, room = torch.where(smooth, exact, middle), torch.where(smooth, fine, rough)
        beyond = (rate - expected).abs() / room
        if bool((beyond > 1).any()):
            k = int(beyond.argmax())
            _refuse_derivative(activation, name, x[k], rate[k], expected[k])
    zero = activation.integral(torch.zeros(1, dtype=torch.float64, device="cpu")).item()
    if not abs(zero) <= 1e-12:
        raise OptionError(
            f"activation {activation.name!r}: integral must be 0 at 0, but is {zero:.6g} there; "
            f"subtract {zero:.6g}."
        )
    _check_range(activation, x, found["slope"][1])
    _check_steps(activation, x, found["sigma"][1])


def _derivative(
    function: Elementwise, x: Tensor, at: Tensor, rate: Tensor
) -> tuple[Tensor, Tensor]:
    """The derivative by differences of fourth order, and its error, infinite near kinks.

    Each point has the step at which halving it twice changes least, if it agrees with the smaller
    ones. A kink is seen where both sides of a point do not come to the same slope.
    """
    sides = [(function(x + d), function(x - d)) for d in STEPS]
    central = [(right - left) / (2 * d) for (right, left), d in zip(sides, STEPS, strict=True)]
    rates = [(4 * near - far) / 3 for far, near in pairwise(central)]
    gaps = [(r - at + (q - at)).abs() / d for (r, q), d in zip(sides, STEPS, strict=True)]
    size = ROUNDING * (1 + at.abs() + (x * rate).abs())
    expected, least = rate.clone(), torch.full_like(x, math.inf)
    for k in reversed(range(len(rates) - 2)):
        noise = size / STEPS[k + 3]
        error = torch.maximum(*[(rates[k + 1] - rates[m]).abs() for m in (k, k + 2)]) + noise
        smooth = [gaps[m + 1] <= 0.7 * gaps[m] + noise for m in range(k, k + 3)]
        agrees = (rates[k + 1] - expected).abs() <= 10 * least
        better = (error < least) & agrees & smooth[0] & smooth[1] & smooth[2]
        least = torch.where(better, error, least)
        expected = torch.where(better, rates[k + 1], expected)
    return expected, least


def _values(activation: Activation, name: str, function: Elementwise, x: Tensor) -> Tensor:
    try:
        found = function(x)
    except Exception as error:
        raise OptionError(
            f"activation {activation.name!r}: {name} fails for a float64 tensor of shape "
            f"{tuple(x.shape)}: {error}"
        ) from error
    if not isinstance(found, Tensor) or found.shape != x.shape or found.dtype != x.dtype:
        what = type(found).__name__
        if isinstance(found, Tensor):
            what = f"{str(found.dtype)[6:]} {tuple(found.shape)}"
        raise OptionError(
            f"activation {activation.name!r}: {name} must give a tensor of the shape and dtype of "
            f"its argument, float64 {tuple(x.shape)}, but gives {what}."
        )
    if not bool(found.isfinite().all()):
        k = int((~found.isfinite()).nonzero()[(~found.isfinite()).sum() // 2])
        raise OptionError(
            f"activation {activation.name!r}: {name} is {float(found[k])} at x = {x[k]:.6g}, but "
            "must be finite; write it so that nothing overflows on the way."
        )
    return found


def _refuse_derivative(
    activation: Activation, name: str, x: Tensor, given: Tensor, expected: Tensor
) -> None:
    where = f"activation {activation.name!r}: at x = {float(x):.6g} "
    if name == "slope":
        raise OptionError(
            f"{where}the slope is given as {float(given):.12g}, but sigma has the slope "
            f"{float(expected):.12g} there."
        )
    raise OptionError(
        f"{where}sigma is {float(given):.12g}, but the integral given has the slope "
        f"{float(expected):.12g} there; its derivative must be sigma."
    )


def _check_range(activation: Activation, x: Tensor, slope: Tensor) -> None:
    name, room = activation.name, LOOSE * max(1.0, float(slope.abs().max()))
    for side in ("s_min", "s_max"):
        if not isinstance(given := getattr(activation, side), (int, float)):
            raise OptionError(
                f"activation {name!r}: {side} must be an int or a float, but got {quoted(given)}."
            )
    for side, given, seen, at in (
        ("s_min", activation.s_min, slope.min(), slope.argmin()),
        ("s_max", activation.s_max, slope.max(), slope.argmax()),
    ):
        value = float(seen)
        beyond = value < given - 1e-9 if side == "s_min" else value > given + 1e-9
        if beyond or not math.isfinite(given):
            word = "down" if side == "s_min" else "up"
            raise OptionError(
                f"activation {name!r}: {side} is given as {given}, but the slope goes {word} to "
                f"{value:.9g}, at x = {float(x[at]):.6g}."
            )
        if abs(given - value) > room:
            most = "smallest" if side == "s_min" else "largest"
            raise OptionError(
                f"activation {name!r}: {side} is given as {given}, but the {most} slope from "
                f"x = -1e6 to 1e6 is {value:.9g}; give the tightest range, bounds are read from it."
            )


def _check_steps(activation: Activation, x: Tensor, sigma: Tensor) -> None:
    """From one point to the next, sigma rises as a slope in the range allows: it has no jumps."""
    dx, rise = x.diff(), sigma.diff()
    size = torch.maximum(sigma[1:].abs(), sigma[:-1].abs())
    room = CLOSE * (1 + activation.S) * dx + 1e-14 * size
    bad = (rise < activation.s_min * dx - room) | (rise > activation.s_max * dx + room)
    if bool(bad.any()):
        k = int(bad.nonzero()[0])
        raise OptionError(
            f"activation {activation.name!r}: from x = {float(x[k]):.6g} to {float(x[k + 1]):.6g} "
            f"sigma changes by {float(rise[k]):.6g}, which no slope from {activation.s_min} to "
            f"{activation.s_max} does; a sigma with jumps is no activation here."
        )


def get(activation: str | Activation) -> Activation:
    """The activation of that name.

    Args:
        activation: a name that `names` lists, or an `Activation`, which is returned as it is.

    Returns:
        The activation.

    Raises:
        OptionError: if there is none of that name.

    Examples:
        >>> from hdnn import activations
        >>> activations.get("sigmoid").S
        0.25
        >>> activations.get("tahn")
        Traceback (most recent call last):
        hdnn.errors.OptionError: activation 'tahn' is not known; ... Did you mean 'tanh'?
    """
    if isinstance(activation, str) and activation in _REGISTRY:  # `choose` takes far longer
        return _REGISTRY[activation]
    if isinstance(activation, Activation):
        return activation
    return _REGISTRY[choose("activation", activation, _REGISTRY)]


def is_registered(activation: Activation) -> bool:
    """Whether this very activation is known by its name."""
    return _REGISTRY.get(activation.name) is activation


def registered(activation: str | Activation) -> Activation:
    """The activation, if it is registered under its name, as networks and files need."""
    found = get(activation)
    if not is_registered(found):
        raise OptionError(
            f"networks, implicit layers and files find activations by name, but {found.name!r} "
            + ("is the name of another" if found.name in _REGISTRY else "is not registered")
            + "; call hdnn.activations.register(...) on yours, under a name of its own."
        )
    return found


def names() -> tuple[str, ...]:
    """The names of all known activations, those that were registered included.

    Returns:
        The names, in alphabetical order.

    Examples:
        >>> from hdnn import activations
        >>> "tanh" in activations.names()
        True
    """
    return tuple(sorted(_REGISTRY))


for _activation in (
    Activation("tanh", torch.tanh, _tanh_slope, _tanh_integral, 0.0, 1.0),
    Activation(
        "relu",
        torch.relu,
        lambda x: (x > 0).to(x.dtype),
        lambda x: 0.5 * torch.relu(x) ** 2,
        0.0,
        1.0,
    ),
    Activation(
        "sigmoid", torch.sigmoid, _sigmoid_slope, lambda x: _softplus(x) - math.log(2), 0.0, 0.25
    ),
    Activation("softplus", _softplus, torch.sigmoid, _softplus_integral, 0.0, 1.0),
    Activation("gelu", F.gelu, _gelu_slope, _gelu_integral, 1 - _GELU_S_MAX, _GELU_S_MAX),
    Activation(
        "silu",
        F.silu,
        _silu_slope,
        lambda x: x * _softplus(x) - _softplus_integral(x),
        1 - _SILU_S_MAX,
        _SILU_S_MAX,
    ),
    Activation("sin", torch.sin, torch.cos, lambda x: 2 * torch.sin(0.5 * x) ** 2, -1.0, 1.0),
    Activation("identity", lambda x: x, torch.ones_like, lambda x: 0.5 * x * x, 1.0, 1.0),
):
    _REGISTRY[_activation.name] = _activation  # which tests check, so that imports need not
