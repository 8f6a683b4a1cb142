"""Activations by name: sigma, its slope sigma', its integral, and the range of its slope.

The Hamiltonian of a layer is the sum of `integral(K y + b)` (eq:nlH), so an activation is fully
described by its energy. The slope range [s_min, s_max] decides which guarantees hold: S bounds
every gradient from above (eq:sigma_bound), and a monotone sigma (s_min >= 0) keeps the gradients
of forward Euler from vanishing too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from hdnn.errors import OptionError, choose

Elementwise = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Activation:
    """An activation sigma with everything that the theory needs to know of it."""

    name: str
    sigma: Elementwise
    slope: Elementwise  # sigma', itself differentiable
    integral: Elementwise  # of sigma, zero at zero
    s_min: float
    s_max: float

    @property
    def S(self) -> float:
        """The bound |sigma'| <= S of eq:sigma_bound."""
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
    """Make an activation known by its name to every function, network and checkpoint."""
    if activation.name in _REGISTRY:
        raise OptionError(
            f"an activation named {activation.name!r} exists already; choose another name."
        )
    _REGISTRY[activation.name] = activation
    return activation


def get(activation: str | Activation) -> Activation:
    """The activation of that name."""
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
    """The known activations."""
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
    register(_activation)
