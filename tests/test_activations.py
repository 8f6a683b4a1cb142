"""Each activation: its slope, its energy, and the range of the slope that the theory rests on."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

import hdnn
from hdnn import activations, functional
from hdnn.activations import Activation
from hdnn.errors import OptionError
from strategies import ACTIVATIONS, Random, seeds

ALL = pytest.mark.parametrize("name", ACTIVATIONS)
GRID = torch.cat([torch.linspace(-50, 50, 20001, dtype=torch.float64), torch.zeros(1).double()])
KINK = {"relu"}  # no slope at 0


def bump(name: str) -> Activation:
    """An activation of one's own: arctan."""

    def integral(x):
        return x * torch.atan(x) - 0.5 * torch.log1p(x * x)

    return Activation(name, torch.atan, lambda x: 1 / (1 + x * x), integral, 0.0, 1.0)


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr(activations, "_REGISTRY", dict(activations._REGISTRY))
    return activations.register(bump("arctan"))


def test_the_eight_activations_are_known_by_name():
    paper = {"tanh", "relu", "sigmoid"}
    assert set(ACTIVATIONS) == paper | {"softplus", "gelu", "silu", "sin", "identity"}
    assert all(activations.get(name).name == name for name in ACTIVATIONS)


@ALL
def test_the_slope_is_the_derivative_of_sigma(name):
    sigma = activations.get(name)
    x = (GRID[GRID != 0] if name in KINK else GRID).clone().requires_grad_()
    (slope,) = torch.autograd.grad(sigma(x).sum(), x)
    torch.testing.assert_close(sigma.slope(x), slope, rtol=1e-12, atol=1e-14)


@ALL
def test_sigma_is_the_derivative_of_the_integral(name):
    sigma = activations.get(name)
    x = GRID.clone().requires_grad_()
    (derivative,) = torch.autograd.grad(sigma.integral(x).sum(), x)
    torch.testing.assert_close(derivative, sigma(x), rtol=1e-12, atol=1e-12)


@ALL
def test_the_integral_can_be_differentiated_twice_also_at_zero(name):
    sigma = activations.get(name)
    x = torch.tensor([-3.0, -1e-9, 0.0, 1e-9, 2.0], dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(sigma.integral(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    smooth = x != 0 if name in KINK else x == x
    torch.testing.assert_close(second[smooth], sigma.slope(x)[smooth], rtol=1e-9, atol=1e-12)


@ALL
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_integral_vanishes_at_zero(name, dtype):
    value = activations.get(name).integral(torch.zeros(1, dtype=dtype))
    assert abs(float(value)) <= 2 * torch.finfo(dtype).eps


@ALL
def test_the_slope_stays_in_its_range_and_reaches_both_ends(name):
    sigma = activations.get(name)
    slope = sigma.slope(GRID)
    assert sigma.s_min - 1e-15 <= float(slope.min())
    assert float(slope.max()) <= sigma.s_max + 1e-15
    assert float(slope.min()) == pytest.approx(sigma.s_min, abs=1e-4)
    assert float(slope.max()) == pytest.approx(sigma.s_max, abs=1e-4)


@ALL
def test_S_bounds_every_difference_quotient(name):
    sigma = activations.get(name)
    x = GRID[:-1]
    quotient = sigma(x).diff() / x.diff()
    assert float(quotient.abs().max()) <= sigma.S * (1 + 1e-9)
    assert max(abs(sigma.s_min), abs(sigma.s_max)) == sigma.S


@ALL
def test_monotone_means_never_decreasing(name):
    sigma = activations.get(name)
    falls = bool((sigma(GRID[:-1]).diff() < -1e-12).any())
    assert sigma.monotone == (not falls)


def test_the_paper_s_activations_and_bounds():
    assert activations.get("tanh").S == activations.get("relu").S == 1.0
    assert activations.get("sigmoid").S == 0.25
    monotone = {name for name in ACTIVATIONS if activations.get(name).monotone}
    assert monotone == {"tanh", "relu", "sigmoid", "softplus", "identity"}


@ALL
@pytest.mark.parametrize("x", [-1e4, -300.0, -88.0, 88.0, 300.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_nothing_overflows_far_from_zero(name, x, dtype):
    sigma = activations.get(name)
    x = torch.tensor([x], dtype=dtype, requires_grad=True)
    for function in (sigma.sigma, sigma.slope, sigma.integral):
        value = function(x)
        assert value.dtype == dtype
        assert torch.isfinite(value).all()
    (gradient,) = torch.autograd.grad(sigma.integral(x).sum(), x)
    assert torch.isfinite(gradient).all()


@given(seeds, st.sampled_from(ACTIVATIONS), st.floats(0.1, 30))
def test_the_integral_is_what_quadrature_gives(seed, name, scale):
    sigma = activations.get(name)
    end = scale * Random(seed)(4)
    t = torch.linspace(0, 1, 4001, dtype=torch.float64)
    values = sigma(end[:, None] * t)
    h = end / 4000
    simpson = (
        values[:, 0] + values[:, -1] + 4 * values[:, 1:-1:2].sum(1) + 2 * values[:, 2:-1:2].sum(1)
    )
    torch.testing.assert_close(sigma.integral(end), h / 3 * simpson, rtol=1e-6, atol=1e-6)


@ALL
def test_activations_can_be_vmapped_and_keep_any_shape(name):
    sigma = activations.get(name)
    x = Random(0)(2, 3, 4)
    for function in (sigma.sigma, sigma.slope, sigma.integral):
        assert torch.equal(torch.func.vmap(function)(x), function(x))
        assert function(x[..., :0]).shape == (2, 3, 0)


# Activations of one's own


def test_a_registered_activation_serves_functions_networks_and_implicit_layers(registered):
    y = Random(1)(3, 4)
    for net in (
        hdnn.H2(4, 3, activation="arctan", dtype=torch.float64),
        hdnn.H1(4, 3, activation=registered, dtype=torch.float64),
        hdnn.ImplicitH2(4, 3, activation="arctan", dtype=torch.float64),
    ):
        assert net.activation == "arctan"
        assert "arctan" in repr(net)
        assert torch.isfinite(net(y)).all()
    K, b = Random(2)(4, 4), Random(3)(4)
    by_name = functional.energy(y, K, b, activation="arctan")
    assert torch.equal(by_name, functional.energy(y, K, b, activation=registered))


def test_a_name_is_registered_once(registered):
    for taken in ("tanh", "arctan"):
        with pytest.raises(OptionError, match=f"'{taken}' exists already"):
            activations.register(bump(taken))
    assert "arctan" in activations.names()


def test_functions_take_an_activation_that_is_not_registered():
    K, b, y = Random(0)(2, 4, 4), Random(1)(2, 4), Random(2)(3, 4)
    out = functional.h1(y, K, b, 0.1, activation=bump("mine"))
    assert torch.isfinite(out).all()
    assert not torch.equal(out, functional.h1(y, K, b, 0.1))


def test_implicit_layers_ask_for_an_activation_to_be_registered():
    K, b, y = 0.1 * Random(0)(2, 4, 4), Random(1)(2, 4), Random(2)(3, 4)
    for name in ("mine", "tanh"):
        with pytest.raises(OptionError, match=name):
            functional.implicit_h2(y, K, b, 0.1, activation=bump(name))


def test_networks_ask_for_an_activation_to_be_registered_when_they_are_made():
    with pytest.raises(OptionError, match=r"mine.*register"):
        hdnn.H2(4, 2, activation=bump("mine"))


def test_networks_never_take_a_known_activation_for_another_of_the_same_name():
    with pytest.raises(OptionError, match="tanh"):
        hdnn.H2(4, 2, activation=bump("tanh"))


def test_the_integral_of_silu_and_softplus_agree_with_their_closed_forms():
    # int_0^x log(1 + e^t) dt at x -> -oo is -pi^2 / 12, and silu's is +pi^2 / 12.
    x = torch.tensor([-700.0], dtype=torch.float64)
    assert float(activations.get("softplus").integral(x)) == pytest.approx(-(math.pi**2) / 12)
    assert float(activations.get("silu").integral(x)) == pytest.approx(math.pi**2 / 12)


# What `register` checks


def changed(**parts) -> Activation:
    """An arctangent of which something is wrong."""
    return dataclasses.replace(bump("mine"), **parts)


@pytest.mark.parametrize("name", [*activations.names(), "arctan"])
def test_all_known_activations_pass_the_check_of_register(name, registered):
    assert activations.check(activations.get(name)) is None


KINKED = Activation(
    "leaky",
    lambda x: torch.where(x > 0, x, 0.1 * x),
    lambda x: torch.where(x > 0, 1.0, 0.1).to(x.dtype),
    lambda x: 0.5 * x * torch.where(x > 0, x, 0.1 * x),
    0.1,
    1.0,
)
SHARP = Activation(
    "sharp",
    lambda x: torch.tanh(1e3 * x),
    lambda x: 1e3 / torch.cosh((1e3 * x).clamp(-300, 300)) ** 2,
    lambda x: activations.get("tanh").integral(1e3 * x) / 1e3,
    0.0,
    1e3,
)


JUMP = {
    "sigma": lambda x: (x > 0.3333).to(x.dtype),  # between two of the points that are looked at
    "slope": torch.zeros_like,
    "integral": lambda x: torch.relu(x - 0.3333),
    "s_min": 0,
    "s_max": 0,
}


WAVES = Activation(
    "waves",
    lambda x: torch.sin(1e4 * x) / 1e4,
    lambda x: torch.cos(1e4 * x),
    lambda x: 2 * torch.sin(5e3 * x) ** 2 / 1e8,
    -1.0,
    1.0,
)
CUT = Activation(  # torch's softplus is x from 20 on
    "cut", F.softplus, torch.sigmoid, activations.get("softplus").integral, 0.0, 1.0
)


@pytest.mark.parametrize("sound", [KINKED, SHARP, WAVES, CUT], ids=lambda sound: sound.name)
def test_kinks_and_sharp_turns_are_fine(sound):
    assert activations.check(sound) is None


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            {"slope": lambda x: 1.001 / (1 + x * x)},
            r"at x = .* the slope is given as 1.001, but .* 1 ",
        ),
        (
            {"slope": lambda x: 1 / (1 + x * x) - 1e-8 * torch.exp(-((x - 1) ** 2))},
            r"at x = .* the slope is given as 0\.\d{11,}, but sigma has the slope 0\.\d{11,} there",
        ),
        (
            {"integral": lambda x: bump("a").integral(x) * (1 + 1e-7)},
            r"sigma is .*, but the integral given has the slope",
        ),
        (
            {"slope": lambda x: -1 / (1 + x * x)},
            "the slope is given as -1, but sigma has the slope 1",
        ),
        (
            {"integral": lambda x: torch.atan(x)},
            "sigma is .*, but the integral given has the slope",
        ),
        ({"integral": lambda x: bump("a").integral(x) + 1}, "must be 0 at 0, but is 1 there"),
        ({"s_max": 0.9}, "s_max is given as 0.9, but the slope goes up to 1, at x = "),
        ({"s_max": 2.0}, "s_max is given as 2.0, but the largest slope .* is 1; give the tightest"),
        ({"s_min": 0.1}, "s_min is given as 0.1, but the slope goes down to"),
        ({"s_min": -1.0}, "s_min is given as -1.0, but the smallest slope"),
        ({"s_max": math.nan}, "s_max is given as nan"),
        ({"s_min": None}, "s_min must be an int or a float, but got None"),
        ({"s_max": torch.ones(())}, "s_max must be an int or a float, but got tensor"),
        (JUMP, "from x = 0.33.* to 0.33.* sigma changes by 1, which no slope from 0 to 0 does"),
        ({"s_max": math.inf}, "s_max is given as inf"),
        ({"sigma": lambda x: torch.exp(x), "slope": torch.exp}, "sigma is inf at x = .*finite"),
        ({"sigma": torch.sign, "slope": torch.zeros_like}, "the slope is given as 0, but sigma"),
        ({"sigma": lambda x: x.sum()}, r"sigma must give a tensor .* but gives float64 \(\)"),
        ({"slope": lambda x: 1.0}, "slope must give a tensor of the shape .* but gives float"),
        ({"sigma": lambda x: x.float()}, "but gives float32"),
        ({"integral": None}, "integral fails for a float64 tensor"),
        ({"name": ""}, "needs a name"),
    ],
)
def test_what_does_not_fit_is_refused_and_said(wrong, words):
    before = activations.names()
    with pytest.raises(OptionError, match=words):
        activations.register(changed(**wrong))
    assert activations.names() == before


def test_only_activations_are_registered():
    with pytest.raises(OptionError, match="register takes a hdnn"):
        activations.register(torch.tanh)
