"""Growing gradients: the two-dimensional example and its closed forms, and H2 at large steps."""

from __future__ import annotations

import math
import sys

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hdnn
from hdnn.analysis import backward_sensitivity, counterexample, norms
from hdnn.errors import MissingExtraError, OptionError, ShapeError, StepError

pytest.importorskip("scipy")

F64 = torch.float64
DIAGONAL, AXIS = torch.tensor([0.5**0.5] * 2, dtype=F64), torch.tensor([1.0, 0.0], dtype=F64)
speeds = st.sampled_from([1.0, 0.1, -3.0])
places = st.tuples(st.floats(0.1, 4.0), st.floats(-4.0, 4.0))


# Orbits


@settings(max_examples=15)
@given(places, speeds)
def test_the_measured_period_is_the_elliptic_integral(place, eps):
    y = torch.tensor(place, dtype=F64)
    exact = float(counterexample.period(y, eps))
    assert counterexample.measured_period(y, eps) == pytest.approx(exact, rel=1e-10)


def test_the_period_is_the_one_of_another_library():
    for y in (DIAGONAL, AXIS, torch.tensor([-7.0, 3.0], dtype=F64)):
        with mpmath.workdps(40):
            H = sum(mpmath.log(mpmath.cosh(x)) for x in y.tolist())
            expected = 4 * mpmath.ellipk(1 - mpmath.exp(-2 * H))
        assert float(counterexample.period(y)) == pytest.approx(float(expected), rel=1e-13)


def test_an_orbit_closes_after_one_period_and_keeps_its_energy():
    y = torch.tensor([1.3, -0.4], dtype=F64)
    P = float(counterexample.period(y, 0.5))
    states = counterexample.example(P, 0.5).trajectory(y, torch.linspace(0, P, 50, dtype=F64))
    torch.testing.assert_close(states[-1], y, rtol=1e-10, atol=1e-10)
    H = counterexample.energy(states)
    torch.testing.assert_close(H, H[0].expand(50), rtol=1e-10, atol=1e-10)
    distances = torch.cdist(states, states)
    assert float(distances.max()) == pytest.approx(float(counterexample.diameter(y)), rel=0.01)


def test_the_period_grows_with_the_energy_from_that_of_a_linear_oscillator():
    y = torch.tensor([[1e-4, 0.0], [0.5, 0.0], [1.0, 0.0], [3.0, 2.0]], dtype=F64)
    P = counterexample.period(y)
    assert float(P[0]) == pytest.approx(2 * math.pi, rel=1e-8)
    assert bool((P.diff() > 0).all())


# Linear growth


def test_the_norm_grows_along_a_line_whose_slope_is_known():
    t = torch.arange(0, 100, 0.05, dtype=F64)
    both = norms(counterexample.growth(torch.stack([DIAGONAL, AXIS]), t))
    for y, sizes, slope in zip((DIAGONAL, AXIS), both.T, (0.32826, 0.28517), strict=True):
        assert float(counterexample.envelope_slope(y)) == pytest.approx(slope, abs=1e-5)
        fitted, height = counterexample.fitted_envelope(t, sizes)
        assert fitted == pytest.approx(slope, rel=3e-3)
        assert abs(height) < 0.3
        assert bool((sizes <= slope * t + 1.1).all())  # nothing exponential


@settings(max_examples=4)
@given(places, st.sampled_from([0.2, -2.0]))
def test_only_the_product_of_eps_and_t_counts(place, eps):
    y, t = torch.tensor(place, dtype=F64), torch.linspace(0, 10, 5, dtype=F64)
    sign = torch.tensor([1.0, math.copysign(1.0, eps)], dtype=F64)  # q -> -q turns the flow round
    slow = counterexample.growth(y, t / abs(eps), eps)
    expected = sign[:, None] * counterexample.growth(sign * y, t) * sign
    torch.testing.assert_close(slow, expected, rtol=1e-8, atol=1e-8)


def test_growth_is_the_bsm_of_the_ode_and_the_limit_of_a_layered_network():
    y, T = torch.tensor([0.8, 0.5], dtype=F64), 5.0
    Phi = counterexample.growth(y, torch.tensor([T], dtype=F64))[0]
    torch.testing.assert_close(
        Phi, counterexample.example(T).sensitivity(y, 0.0)[0], rtol=1e-9, atol=1e-9
    )
    net = hdnn.HamiltonianNet(2, 200, "yoshida4", T=T, tied=True, dtype=F64)
    for name in ("K_p", "K_q"):
        net.assign(name, torch.ones(1, 1, 1, dtype=F64))
    torch.testing.assert_close(backward_sensitivity(net, y)[0], Phi, rtol=1e-5, atol=1e-5)


def test_a_finite_perturbation_grows_as_the_bsm_does_until_it_spans_the_orbit():
    t = torch.arange(0, 100, 0.5, dtype=F64)
    tiny = counterexample.finite_growth(DIAGONAL, t[:20], 1e-6)
    rows = counterexample.growth(DIAGONAL, t[:20]).norm(dim=-1)  # both directions
    torch.testing.assert_close(tiny, rows, rtol=1e-4, atol=1e-4)
    gamma = 0.2
    largest = counterexample.finite_growth(DIAGONAL, t, gamma).max()
    end = float(counterexample.diameter(DIAGONAL)) / gamma
    assert float(largest) == pytest.approx(end, rel=0.15)


def test_along_the_orbit_nothing_grows():
    t = torch.arange(0, 60, 0.5, dtype=F64)
    outwards, along = counterexample.finite_growth(AXIS, t, 1e-3).amax(0)
    assert float(outwards) > 10
    assert float(along) < 1.2


# Exponential growth


@settings(max_examples=15)
@given(st.floats(2.05, 4.0), st.floats(0.05, 2.0))
def test_past_h_k_squared_of_two_every_layer_multiplies_the_gradient(load, h):
    found = counterexample.layer_growth(h, math.sqrt(load / h), layers=100)
    trace = abs(2 - load**2)
    radius = trace / 2 + math.sqrt(trace**2 / 4 - 1)
    assert found.exact == pytest.approx(math.log(radius), rel=1e-9)
    assert found.rate == pytest.approx(found.exact, rel=1e-6)
    assert math.isinf(found.bound)
    assert found.sizes.shape == (101,)


@settings(max_examples=15)
@given(st.floats(0.01, 1.99), st.floats(0.05, 2.0))
def test_below_h_k_squared_of_two_no_depth_makes_the_gradient_grow(load, h):
    found = counterexample.layer_growth(h, math.sqrt(load / h), layers=300)
    assert found.exact == 0
    assert abs(found.rate) < 0.02
    assert 1 - 1e-12 <= found.largest <= found.bound * (1 + 1e-9)
    assert found.bound == pytest.approx(math.sqrt((2 + load) / (2 - load)))


def test_no_random_numbers_are_used_up():
    state = torch.get_rng_state()
    counterexample.layer_growth(0.5, 1.0)
    counterexample.example(1.0)
    assert torch.equal(torch.get_rng_state(), state)


def test_at_h_k_squared_of_two_growth_is_linear():
    found = counterexample.layer_growth(0.5, 2.0, layers=128)
    assert found.exact == 0
    assert float(found.sizes[128] / found.sizes[64]) == pytest.approx(2, rel=1e-3)


# Mistakes


@pytest.mark.parametrize(
    ("error", "words", "call"),
    [
        (StepError, "eps must be", lambda: counterexample.period(AXIS, 0)),
        (StepError, "eps must be", lambda: counterexample.example(1.0, math.nan)),
        (StepError, "T must be", lambda: counterexample.example(-1.0)),
        (ShapeError, r"\(\*batch, 2\)", lambda: counterexample.energy(torch.ones(3))),
        (ShapeError, "but got list", lambda: counterexample.period([1.0, 0.0])),
        (ShapeError, "other than the origin", lambda: counterexample.measured_period(0 * AXIS)),
        (ShapeError, "one state", lambda: counterexample.measured_period(AXIS[None])),
        (StepError, "gamma", lambda: counterexample.finite_growth(AXIS, AXIS, 0.0)),
        (StepError, "k must be", lambda: counterexample.layer_growth(0.5, -1.0)),
        (ShapeError, r"\(k,\)", lambda: counterexample.fitted_envelope(AXIS, AXIS[:1])),
        (OptionError, "longer t", lambda: counterexample.fitted_envelope(AXIS, AXIS)),
    ],
)
def test_mistakes_are_one_sentence(error, words, call):
    with pytest.raises(error, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_the_slope_at_the_origin_is_zero():
    assert float(counterexample.envelope_slope(0 * AXIS)) == 0


def test_without_scipy_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.special", None)
    with pytest.raises(MissingExtraError, match=r"hdnn\[science\]"):
        counterexample.period(AXIS)
