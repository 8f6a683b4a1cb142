"""Each activation: its slope, its integral, and the range of the slope that the theory rests on."""

from __future__ import annotations

import dataclasses

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hdnn
from hdnn import activations, functional, implicit
from hdnn.activations import Activation
from hdnn.errors import OptionError

EIGHT = (
    "gelu",
    "identity",
    "relu",
    "sigmoid",
    "silu",
    "sin",
    "softplus",
    "tanh",
)
ALL = pytest.mark.parametrize("name", EIGHT)
GRID = torch.cat(
    [
        torch.linspace(-50, 50, 20001, dtype=torch.float64),
        torch.zeros(1).double(),
    ]
)


def arctan(name: str = "arctan") -> Activation:
    def integral(x):
        return x * torch.atan(x) - 0.5 * torch.log1p(x * x)

    return Activation(
        name, torch.atan, lambda x: 1 / (1 + x * x), integral, 0.0, 1.0
    )


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr(activations, "_REGISTRY", dict(activations._REGISTRY))
    return activations.register(arctan())


def test_there_are_eight_activations():
    assert activations.names() == EIGHT


@ALL
def test_slope_and_sigma_are_derivatives(name):
    sigma = activations.get(name)
    x = (GRID[GRID != 0] if name == "relu" else GRID).clone().requires_grad_()
    (slope,) = torch.autograd.grad(sigma(x).sum(), x)
    torch.testing.assert_close(sigma.slope(x), slope, rtol=1e-12, atol=1e-14)
    (derivative,) = torch.autograd.grad(sigma.integral(x).sum(), x)
    torch.testing.assert_close(derivative, sigma(x), rtol=1e-12, atol=1e-12)


@ALL
def test_the_integral_is_zero_at_zero_and_can_be_differentiated_twice_there(
    name,
):
    sigma = activations.get(name)
    zero = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    assert abs(sigma.integral(zero).item()) < 1e-15
    (first,) = torch.autograd.grad(
        sigma.integral(zero).sum(), zero, create_graph=True
    )
    if name not in ("relu", "identity"):
        (second,) = torch.autograd.grad(first.sum(), zero)
        torch.testing.assert_close(second, sigma.slope(zero))


INTEGRALS = {
    "gelu": lambda x: (
        0.25 + (x * (x * mpmath.ncdf(x) + mpmath.npdf(x)) - mpmath.ncdf(x)) / 2
    ),
    "identity": lambda x: x * x / 2,
    "relu": lambda x: max(x, 0) ** 2 / 2,
    "sigmoid": lambda x: mpmath.log1p(mpmath.exp(x)) - mpmath.log(2),
    "silu": lambda x: (
        x * mpmath.log1p(mpmath.exp(x)) - INTEGRALS["softplus"](x)
    ),
    "sin": lambda x: 1 - mpmath.cos(x),
    "softplus": lambda x: (
        -mpmath.polylog(2, -mpmath.exp(x)) - mpmath.pi**2 / 12
    ),
    "tanh": lambda x: mpmath.log(mpmath.cosh(x)),
}


@ALL
@settings(max_examples=25, deadline=None)
@given(st.floats(-14, 0.7), st.sampled_from([-1, 1]))
def test_integral_and_gradient_are_exact_to_rounding_of_their_own_size(
    name, exponent, sign
):
    x = sign * 10**exponent
    with mpmath.workdps(50):
        exact = float(INTEGRALS[name](mpmath.mpf(x)))
        slope = float(mpmath.diff(INTEGRALS[name], mpmath.mpf(x)))
    sigma = activations.get(name)
    y = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    integral = sigma.integral(y)
    assert float(integral.detach()) == pytest.approx(exact, rel=1e-14, abs=0)
    (gradient,) = torch.autograd.grad(integral, y)
    assert float(gradient) == pytest.approx(slope, rel=1e-13, abs=0)


@ALL
def test_the_slope_stays_in_its_range_and_nearly_reaches_both_ends(name):
    sigma = activations.get(name)
    slope = sigma.slope(GRID)
    assert sigma.s_min - 1e-12 <= float(slope.min()) <= sigma.s_min + 1e-6
    assert sigma.s_max - 1e-6 <= float(slope.max()) <= sigma.s_max + 1e-12
    assert max(-sigma.s_min, sigma.s_max) == sigma.S
    assert sigma.monotone == bool((sigma(GRID.sort().values).diff() >= 0).all())


@ALL
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_overflows_far_from_zero(name, dtype):
    x = torch.tensor([-1e15, -100.0, 100.0, 1e15], dtype=dtype)
    sigma = activations.get(name)
    for function in (sigma.sigma, sigma.slope, sigma.integral):
        assert torch.isfinite(function(x)).all()


@ALL
def test_the_check_accepts_what_is_built_in(name):
    activations.check(activations.get(name))


def test_a_registered_activation_serves_functions_networks_and_implicit_layers(
    registered,
):
    net = hdnn.ImplicitH2(4, 2, T=0.5, activation="arctan")
    y = torch.randn(3, 4)
    torch.testing.assert_close(net.inverse(net(y)), y, rtol=0, atol=1e-5)
    assert activations.get("arctan") is registered
    assert hdnn.H1(4, 2, activation="arctan").guarantee().holds
    with pytest.raises(OptionError, match="new name"):
        activations.register(arctan())


def test_only_functions_take_an_activation_that_is_not_registered():
    K = torch.randn(2, 2, 2)
    b = torch.zeros(2, 2)
    functional.h2(torch.randn(3, 4), K, K, b, b, 0.1, activation=arctan())
    with pytest.raises(OptionError, match="register"):
        hdnn.H2(4, 2, activation=arctan())
    with pytest.raises(OptionError, match="register"):
        hdnn.H2(4, 2, activation=arctan("tanh"))  # another under a known name
    with pytest.raises(OptionError, match="register"):
        functional.midpoint(torch.randn(3, 2), K, b, 0.1, activation=arctan())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"slope": lambda x: 1 / (1 + x.abs())}, "slope"),
        ({"integral": lambda x: x * torch.atan(x)}, "integral"),
        ({"integral": lambda x: arctan().integral(x) + 1}, "0 at 0"),
        ({"s_max": 0.9}, "s_max"),
        ({"s_max": 2.0}, "s_max"),
        ({"s_min": -1.0}, "s_min"),
        ({"sigma": lambda x: torch.atan(x) + (x > 1)}, "sigma"),
        ({"sigma": lambda x: torch.atan(x) / (x < 1e5)}, "finite"),
        ({"name": "tanh"}, "new name"),
        ({"name": ""}, "new name"),
    ],
)
def test_what_does_not_fit_together_is_refused(change, words):
    with pytest.raises(OptionError, match=words):
        activations.register(dataclasses.replace(arctan(), **change))


def test_rows_can_have_activations_of_their_own():
    sigma = activations.by_row(["tanh", "tanh", "identity"])
    x = torch.randn(5, 3, dtype=torch.float64)
    expected = torch.cat([torch.tanh(x[:, :2]), x[:, 2:]], -1)
    torch.testing.assert_close(sigma(x), expected)
    torch.testing.assert_close(
        activations.get(sigma.name).slope(x), sigma.slope(x)
    )
    assert (sigma.s_min, sigma.S) == (0.0, 1.0)
    A = 0.3 * torch.randn(3, 2, dtype=torch.float64)
    start = torch.randn(4, 2, dtype=torch.float64)
    end = implicit.solve_chord(start, A.mT, A, torch.zeros(3).double(), sigma)
    mean = implicit.chord(sigma, start @ A.mT, end @ A.mT)
    torch.testing.assert_close(end, start + mean @ A)


def test_a_misspelt_name_is_met_with_the_nearest():
    with pytest.raises(OptionError, match="Did you mean 'tanh'"):
        activations.get("tahn")


FUNCTIONS = [
    (torch.nn.ReLU(), "relu"),
    (torch.tanh, "tanh"),
    (torch.nn.functional.silu, "silu"),
    (torch.nn.Softplus(), "softplus"),
    (lambda x: 0.5 * x * (1 + torch.erf(x / 2**0.5)), "gelu"),
]


@pytest.mark.parametrize(("function", "name"), FUNCTIONS)
def test_a_function_with_the_values_of_an_activation_is_that_activation(
    function, name
):
    assert activations.get(function) is activations.get(name)
    assert hdnn.H2(4, 3, activation=function).activation == name


@pytest.fixture
def mish(monkeypatch):
    registry = dict(activations._REGISTRY)
    monkeypatch.setattr(activations, "_REGISTRY", registry)
    return torch.nn.Mish()


def test_networks_take_any_elementwise_module_and_its_exact_slope(mish):
    net = hdnn.H2(4, 3, activation=mish, dtype=torch.float64)
    y = torch.randn(5, 4, dtype=torch.float64)
    p, q = y.chunk(2, -1)
    for K_p, K_q in zip(net.K_p, net.K_q, strict=True):
        p = p - net.step * mish(q @ K_q.mT) @ K_q
        q = q + net.step * mish(p @ K_p.mT) @ K_p
    torch.testing.assert_close(net(y), torch.cat([p, q], -1))
    jacobian = torch.func.vmap(torch.func.jacrev(net))(y)
    product = torch.eye(4, dtype=torch.float64)
    for layer in net.layer_jacobians(net.trajectory(y)):
        product = product @ layer
    torch.testing.assert_close(product.mT, jacobian)
    assert net.guarantee().holds
    assert not hdnn.H1(4, 3, activation=mish).guarantee().holds
    assert "Mish()" not in activations.names()


def test_an_activation_without_an_integral_says_that_it_needs_one(mish):
    with pytest.raises(OptionError, match="integral of the activation"):
        functional.energy(
            torch.ones(2), torch.eye(2), torch.zeros(2), activation=mish
        )


@pytest.mark.parametrize(
    "function",
    [
        torch.nn.Softmax(-1),
        torch.nn.PReLU(),
        torch.nn.Dropout(),
        torch.nn.ReLU,
        torch.cumsum,
    ],
)
def test_functions_that_are_not_elementwise_are_refused(function):
    with pytest.raises(OptionError, match="must be a name, or an elementwise"):
        hdnn.H2(4, 3, activation=function)
