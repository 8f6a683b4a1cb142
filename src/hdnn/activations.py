"""Activations by name: sigma, its slope, its integral, and the range of its slope.

The energy of a layer is the sum of `integral(K y + b)`, so an activation is fully described by its
integral. The range of the slope decides which guarantees hold: S bounds every gradient from above,
and a monotone sigma keeps the gradients of forward Euler from vanishing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hdnn.errors import OptionError, choose

__all__ = [
    "Activation",
    "by_row",
    "check",
    "get",
    "names",
    "register",
    "registered",
]

Elementwise = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Activation:
    """An activation sigma, with the facts that the theory needs.

    Args:
        name: the name in networks, functions and files, once it is registered.
        sigma: the function, applied to tensors of any shape entry by entry.
        slope: its derivative, itself differentiable; at a kink any value between the two sides.
        integral: the integral of sigma, zero at zero.
        s_min: the infimum of the slope.
        s_max: the supremum of the slope.

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
    slope: Elementwise
    integral: Elementwise
    s_min: float
    s_max: float

    @property
    def S(self) -> float:
        """The bound `|slope| <= S`."""
        return max(abs(self.s_min), abs(self.s_max))

    @property
    def monotone(self) -> bool:
        """True if sigma never decreases."""
        return self.s_min >= 0

    def __call__(self, x: Tensor) -> Tensor:
        return self.sigma(x)


# The eight built-in activations


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
    """log cosh x, without overflow, to rounding of its value even where that is tiny."""
    size = _magnitude(x)
    near = 0.5 * torch.log1p(torch.sinh(x.clamp(-1, 1)) ** 2)
    far = size + _softplus(-2 * size) - math.log(2)
    return torch.where(size < 1, near, far)


def _relu_slope(x: Tensor) -> Tensor:
    return (x > 0).to(x.dtype)


def _sigmoid_slope(x: Tensor) -> Tensor:
    return torch.sigmoid(x) * torch.sigmoid(-x)


def _sigmoid_integral(x: Tensor) -> Tensor:
    near = 0.5 * x + _tanh_integral(0.5 * x)
    return torch.where(x > -1, near, _softplus(x) - math.log(2))


# The Bernoulli numbers B_2, B_4, .., for two series of the integral of softplus:
# far from 0, Li2(1 - exp(-u)) = u - u^2/4 + sum_k B_2k u^(2k+1) / (2k+1)! with |u| <= log 2;
# near 0, where differences of Li2 lose digits, that of the integral of log cosh(x/2).
_BERNOULLI = (
    1 / 6,
    -1 / 30,
    1 / 42,
    -1 / 30,
    5 / 66,
    -691 / 2730,
    7 / 6,
    -3617 / 510,
)
_DILOGARITHM = [
    B / math.factorial(2 * k + 1) for k, B in enumerate(_BERNOULLI, 1)
]
_LOG_COSH = [
    (4**k - 1) / (2 * k) * term for k, term in enumerate(_DILOGARITHM, 1)
]
# x phi(x) - (Phi(x) - 1/2) = -x^3/sqrt(2 pi) sum_k (-x^2/2)^k / (k! (2k+3)), in powers of x^2.
_NORMAL = [
    -((-0.5) ** k) / (math.factorial(k) * (2 * k + 3) * math.sqrt(2 * math.pi))
    for k in range(10)
]


def _odd_series(coefficients: Sequence[float], x: Tensor) -> Tensor:
    """The sum of `coefficients[k] x^(2k+3)`."""
    square = x * x
    total = torch.zeros_like(x)
    for coefficient in reversed(coefficients):
        total = total * square + coefficient
    return total * square * x


def _near_zero(x: Tensor, near: Tensor, far: Tensor) -> Tensor:
    return torch.where(_magnitude(x) < 0.5, near, far)


def _softplus_integral(x: Tensor) -> Tensor:
    u = -_softplus(torch.where(x > 0, -x, x))
    dilogarithm = u - 0.25 * u * u + _odd_series(_DILOGARITHM, u)
    left = -dilogarithm - math.pi**2 / 12  # the first is Li2(-exp(-|x|))
    far = torch.where(x > 0, 0.5 * x * x - left, left)
    small = x.clamp(-0.5, 0.5)
    series = _odd_series(_LOG_COSH, small)
    near = math.log(2) * small + 0.25 * small * small + series
    return _near_zero(x, near, far)


def _gelu_slope(x: Tensor) -> Tensor:
    return _normal_cdf(x) + x * _normal_pdf(x)


def _gelu_integral(x: Tensor) -> Tensor:
    Phi = _normal_cdf(x)
    # No x^2, which may overflow.
    far = 0.5 * (x * (x * Phi + _normal_pdf(x)) - Phi) + 0.25
    small = x.clamp(-0.5, 0.5)
    near = 0.5 * (small * small * Phi + _odd_series(_NORMAL, small))
    return _near_zero(x, near, far)


def _silu_slope(x: Tensor) -> Tensor:
    return torch.sigmoid(x) * (1 + x * torch.sigmoid(-x))


def _silu_integral(x: Tensor) -> Tensor:
    far = x * _softplus(x) - _softplus_integral(x)
    small = x.clamp(-0.5, 0.5)
    series = _odd_series(_LOG_COSH, small)
    tail = small * _tanh_integral(0.5 * small) - series
    return _near_zero(x, 0.25 * small * small + tail, far)


# The slope at sqrt(2)
_GELU = 0.5 * math.erfc(-1.0) + math.exp(-1.0) / math.sqrt(math.pi)
# The slope at the x with x tanh(x / 2) = 2
_SILU = 0.5 + 2.3993572805154677 / 4

_REGISTRY = {
    activation.name: activation
    for activation in (
        Activation("tanh", torch.tanh, _tanh_slope, _tanh_integral, 0.0, 1.0),
        Activation(
            "relu",
            torch.relu,
            _relu_slope,
            lambda x: 0.5 * torch.relu(x) ** 2,
            0.0,
            1.0,
        ),
        Activation(
            "sigmoid",
            torch.sigmoid,
            _sigmoid_slope,
            _sigmoid_integral,
            0.0,
            0.25,
        ),
        Activation(
            "softplus", _softplus, torch.sigmoid, _softplus_integral, 0.0, 1.0
        ),
        Activation(
            "gelu", F.gelu, _gelu_slope, _gelu_integral, 1 - _GELU, _GELU
        ),
        Activation(
            "silu", F.silu, _silu_slope, _silu_integral, 1 - _SILU, _SILU
        ),
        Activation(
            "sin",
            torch.sin,
            torch.cos,
            lambda x: 2 * torch.sin(0.5 * x) ** 2,
            -1.0,
            1.0,
        ),
        Activation(
            "identity",
            lambda x: x,
            torch.ones_like,
            lambda x: 0.5 * x * x,
            1.0,
            1.0,
        ),
    )
}


# By name


def get(activation: str | Activation | Elementwise) -> Activation:
    """The activation for a name in `names()`, or for an elementwise function or module.

    A function that agrees with a registered activation becomes that activation. Any other is
    registered under its own name: autograd computes its slope, the range of its slope counts as
    unknown, and the activation has no integral. An `Activation` is returned as it is.

    Examples:
        >>> import torch
        >>> from hdnn import activations
        >>> activations.get("sigmoid").S
        0.25
        >>> activations.get(torch.nn.ReLU()).name
        'relu'
        >>> activations.get("tahn")
        Traceback (most recent call last):
        hdnn.errors.OptionError: activation 'tahn' is not known; ... Did you mean 'tanh'?
    """
    if isinstance(activation, Activation):
        return activation
    if isinstance(activation, str) and "," in activation:
        return by_row(activation.split(","))
    if callable(activation):
        return _of_function(activation)
    if activation not in _REGISTRY:
        choose("activation", activation, names())
    return _REGISTRY[activation]


def _of_function(function: Elementwise) -> Activation:
    """The registered activation that equals a function; a new function is registered."""
    x = _points()
    value = x
    try:
        with torch.no_grad():
            value = function(x.clone())
            pieces = function(x[:6000].view(60, 100))
        elementwise = torch.allclose(pieces.flatten(), value[:6000])
    except (
        Exception
    ):  # any error of a function that does not accept such tensors
        elementwise = False
    weights = function.parameters() if isinstance(function, nn.Module) else ()
    if not elementwise or any(True for _ in weights):
        raise OptionError(
            "activation must be a name, or an elementwise function without weights or random "
            f"numbers, but got {function!r:.80}; choose one of {', '.join(names())}."
        )
    for activation in _REGISTRY.values():
        if torch.allclose(activation(x), value, rtol=1e-12, atol=1e-8):
            return activation
    name = getattr(function, "__name__", repr(function)).replace(",", "")
    while name in _REGISTRY:  # another function of that name
        name += "'"

    def slope(x: Tensor) -> Tensor:
        return torch.func.vjp(function, x)[1](torch.ones_like(x))[0]

    def integral(x: Tensor) -> Tensor:
        raise OptionError(
            f"the integral of the activation {name!r} is not known, but energies and discrete "
            "gradients need it; register an activation that has one with hdnn.activations.register."
        )

    new = Activation(name, function, slope, integral, -math.inf, math.inf)
    _REGISTRY[name] = new
    return new


def names() -> tuple[str, ...]:
    """The names of all registered activations, in alphabetical order."""
    known = [s.name for s in _REGISTRY.values() if math.isfinite(s.S)]
    return tuple(sorted(known))


def registered(activation: str | Activation | Elementwise) -> Activation:
    """The activation, if it is registered under its name, as files and implicit layers require."""
    sigma = get(activation)
    if "," not in sigma.name and _REGISTRY.get(sigma.name) is not sigma:
        raise OptionError(
            "networks, implicit layers and files find activations by name, but this activation is "
            f"not registered as {sigma.name!r}; call hdnn.activations.register(...) with it first."
        )
    return sigma


def by_row(rows: Sequence[str | Activation]) -> Activation:
    """An activation that applies a different registered activation to each row (the last axis).

    Its name consists of their names, separated by commas.
    """
    each = [registered(row) for row in rows]
    if len(set(each)) == 1:
        return each[0]
    runs = [(sigma, len(list(same))) for sigma, same in groupby(each)]
    sizes = [size for _, size in runs]

    def apply(which: str) -> Elementwise:
        def function(x: Tensor) -> Tensor:
            pieces = zip(runs, x.split(sizes, -1), strict=True)
            return torch.cat(
                [getattr(sigma, which)(piece) for (sigma, _), piece in pieces],
                -1,
            )

        return function

    return Activation(
        ",".join(sigma.name for sigma in each),
        apply("sigma"),
        apply("slope"),
        apply("integral"),
        min(sigma.s_min for sigma in each),
        max(sigma.s_max for sigma in each),
    )


def register(activation: Activation) -> Activation:
    """Register an activation, so every function, network and file knows its name.

    Args:
        activation: the activation; `check` must accept it, and its name must be new.

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
    name = activation.name
    if not name or "," in name or name in _REGISTRY:
        raise OptionError(
            f"an activation needs a new name without commas, but got {name!r}."
        )
    check(activation)
    _REGISTRY[name] = activation
    return activation


def _points() -> Tensor:
    """6,001 numbers from -1e6 to 1e6 in float64, most of them near 0."""
    far = torch.logspace(-8, 6, 1000, dtype=torch.float64, device="cpu")
    near = torch.linspace(-20, 20, 4001, dtype=torch.float64, device="cpu")
    near = near + 1e-4  # off kinks
    return torch.cat([-far, near, far]).sort().values


def check(activation: Activation) -> None:
    """Raise an `OptionError` if slope, integral or slope range does not fit sigma.

    Guarantees and bounds depend on these functions, so they are compared with sigma in float64 at
    6,000 points from -1e6 to 1e6: derivatives by autograd, and jumps by differences.
    """
    x = _points().requires_grad_()
    sigma = activation.sigma(x)
    slope = activation.slope(x)
    integral = activation.integral(x)
    values = {"sigma": sigma, "slope": slope, "integral": integral}
    for name, value in values.items():
        if not bool(value.isfinite().all()):
            reason = f"{name} is not finite everywhere from -1e6 to 1e6"
            _refuse(activation, reason)
    _check_derivative(activation, "slope", "sigma", x, slope, sigma)
    _check_derivative(activation, "sigma", "integral", x, sigma, integral)
    start = float(activation.integral(x.new_zeros(1)))
    if abs(start) > 1e-12:
        _refuse(activation, f"its integral must be 0 at 0, but is {start:.6g}")
    _check_range(activation, slope.detach())
    dx = x.detach().diff()
    z = sigma.detach()
    room = 1e-5 * (1 + activation.S) * dx + 1e-14 * z[1:].abs()
    too_slow = z.diff() < activation.s_min * dx - room
    too_fast = z.diff() > activation.s_max * dx + room
    if bool((too_slow | too_fast).any()):
        reason = "sigma jumps, or changes faster than its slope range allows"
        _refuse(activation, reason)


def _check_derivative(
    activation: Activation,
    name: str,
    source: str,
    x: Tensor,
    value: Tensor,
    function: Tensor,
) -> None:
    (exact,) = torch.autograd.grad(function.sum(), x, retain_graph=True)
    error = (value.detach() - exact).abs() / (1 + exact.abs())
    k = int(error.argmax())
    if error[k] > 1e-7:
        _refuse(
            activation,
            f"at x = {x[k].item():.6g} the {name} is given as {value[k].item():.9g}, but the "
            f"derivative of {source} is {exact[k].item():.9g}",
        )


def _check_range(activation: Activation, slope: Tensor) -> None:
    room = 0.01 * max(1.0, float(slope.abs().max()))
    low = float(slope.min())
    high = float(slope.max())
    # Neither outside the range, nor far from its ends.
    if not -1e-9 <= low - activation.s_min <= room:
        reason = f"s_min is given as {activation.s_min}, but the slope reaches {low:.9g}"
        _refuse(activation, reason)
    if not -1e-9 <= activation.s_max - high <= room:
        reason = f"s_max is given as {activation.s_max}, but the slope reaches {high:.9g}"
        _refuse(activation, reason)


def _refuse(activation: Activation, reason: str) -> None:
    raise OptionError(f"activation {activation.name!r}: {reason}.")
