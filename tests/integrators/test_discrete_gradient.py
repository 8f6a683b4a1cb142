"""The discrete gradient step keeps the energy of a layer, whatever its weights and its step."""

from __future__ import annotations

from itertools import pairwise

import mpmath as mp
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hdnn
from hdnn import activations, analysis, functional
from hdnn.activations import Activation
from hdnn.integrators.chords import chord, chord_sides, chord_slope
from law import oracle
from strategies import ACTIVATIONS, Random, seeds

F64 = torch.float64
MONOTONE = [name for name in ACTIVATIONS if activations.get(name).monotone]


def number(x: float) -> torch.Tensor:
    return torch.tensor(x, dtype=F64)


# Chords


@pytest.mark.parametrize("name", ACTIVATIONS)
@given(
    a=st.floats(-30, 30),
    size=st.integers(-12, 1),
    part=st.floats(0.1, 1).flatmap(lambda x: st.sampled_from([x, -x])),
)
@settings(max_examples=60)
def test_chords_have_all_digits_for_close_and_for_far_points(name, a, size, part):
    b = a + part * 10.0**size
    x, y, sigma = oracle.mp.mpf(a), oracle.mp.mpf(b), activations.get(name)
    if x == y:
        return
    exact = (oracle.INTEGRAL[name](y) - oracle.INTEGRAL[name](x)) / (y - x)
    found = float(chord(sigma, number(a), number(b)))
    assert abs(found - exact) <= 1e-14 * (1 + max(abs(a), abs(b)))
    slope = (oracle.SIGMA[name](y) - exact) / (y - x)
    assert abs(float(chord_slope(sigma, number(a), number(b))) - slope) <= 2e-14 * (1 + abs(a))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_chord_of_no_length_is_sigma_itself(name):
    sigma, x = activations.get(name), torch.linspace(-9, 9, 38, dtype=F64)
    torch.testing.assert_close(chord(sigma, x, x), sigma(x))
    torch.testing.assert_close(chord_slope(sigma, x, x), sigma.slope(x) / 2)


@pytest.mark.parametrize("name", ["softplus", "gelu", "silu", "relu", "sigmoid", "tanh"])
@pytest.mark.parametrize("a", [1e4, 1e8, 1e12])
def test_chords_far_from_0_are_those_of_the_straight_lines_there(name, a):
    """Their integrals are x^2 / 2 or x there, and a difference of these would lose all digits."""
    sigma, bent = activations.get(name), name not in ("sigmoid", "tanh")
    for low, high in ((a, a + 2), (a + 2, a), (a, a + 0.75 * a)):
        value, slope = (low + 0.5 * (high - low), 0.5) if bent else (1.0, 0.0)
        ends = number(low), number(high)
        assert float(chord(sigma, *ends)) == pytest.approx(value, rel=1e-15)
        assert float(chord_slope(sigma, *ends)) == pytest.approx(slope, abs=1e-14)
        assert [float(x) for x in chord_sides(sigma, *ends)] == pytest.approx(
            [value, slope, slope], rel=1e-14, abs=1e-14
        )
    across = float(chord(sigma, number(-a), number(a)))
    assert across == pytest.approx(a / 4 if bent else float(name == "sigmoid") / 2, rel=1e-7)


@pytest.mark.parametrize("b", [0.01, 0.002, 1e-5, 1e-9, -0.01])
def test_a_chord_sees_a_kink_close_to_its_end(b):
    leaky = Activation(
        "leaky at its end",
        lambda x: torch.where(x > 0, x, 0.1 * x),
        lambda x: torch.where(x > 0, 1.0, 0.1).to(x),
        lambda x: torch.where(x > 0, 0.5 * x * x, 0.05 * x * x),
        s_min=0.1,
        s_max=1.0,
    )
    for ends in ((-0.98, b), (b, -0.98)):
        rise = [0.5 * x * x if x > 0 else 0.05 * x * x for x in ends]
        wanted = (rise[1] - rise[0]) / (ends[1] - ends[0])
        assert float(chord(leaky, number(ends[0]), number(ends[1]))) == pytest.approx(
            wanted, rel=1e-13
        )


def test_a_chord_over_the_kink_of_an_activation_of_ones_own_is_exact():
    leaky = Activation(
        "leaky of this test",
        lambda x: torch.where(x > 0, x, 0.1 * x),
        lambda x: torch.where(x > 0, 1.0, 0.1).to(x.dtype),
        lambda x: torch.where(x > 0, 0.5 * x**2, 0.05 * x**2),
        0.1,
        1.0,
    )
    a, b = number(-0.1), number(0.2)
    assert float(chord(leaky, a, b)) == pytest.approx((0.02 - 0.0005) / 0.3, rel=1e-14)


# Layers


@given(
    seed=seeds,
    name=st.sampled_from(MONOTONE),
    n=st.integers(1, 6),
    r=st.integers(1, 6),
    h=st.sampled_from([1e-3, 0.1, 1.0]),
    scale=st.sampled_from([0.1, 1.0, 10.0]),
)
@settings(max_examples=60, deadline=None)
def test_each_layer_keeps_its_energy_for_any_weights_and_step(seed, name, n, r, h, scale):
    normal = Random(seed)
    K, b, J = scale * normal(2, r, n), scale * normal(2, r), normal(n, n)
    y = functional.discrete_gradient(
        normal(3, n), K, b, h, J=J - J.mT, activation=name, trajectory=True
    )
    for j in range(2):
        before, after = (functional.energy(y[k], K[j], b[j], activation=name) for k in (j, j + 1))
        terms = activations.get(name).integral(y[j] @ K[j].mT + b[j]).abs().sum(-1)
        slopes = activations.get(name)(y[j + 1] @ K[j].mT + b[j]).abs() @ K[j].abs()
        room = 1e-13 * (1 + terms + (slopes * (1 + y[j + 1].abs())).sum(-1))
        assert bool(((after - before).abs() <= room).all())


@pytest.mark.parametrize("name", ["sin", "gelu", "silu"])
def test_activations_that_decrease_keep_it_too(name):
    normal = Random(3)
    K, b, y = normal(1, 4, 4), normal(1, 4), normal(20, 4)
    z = functional.discrete_gradient(y, K, b, 0.5, activation=name)
    before, after = (functional.energy(x, K[0], b[0], activation=name) for x in (y, z))
    torch.testing.assert_close(after, before, rtol=1e-13, atol=1e-13)


def test_the_energy_of_2000_layers_is_kept_to_1e_12():
    net = hdnn.HamiltonianNet(
        6, 2000, "discrete_gradient", T=200.0, tied=True, dtype=F64, init="paper",
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    field = net.field()
    with torch.no_grad():
        H = functional.energy(net.trajectory(Random(1)(2, 6)), field["K"][0], field["b"][0])
    assert float(((H - H[0]) / H[0]).abs().max()) < 1e-12


def test_it_is_of_order_2():
    normal = Random(0)
    K, b, y = normal(1, 4, 4), normal(1, 4), normal(4)

    def end(N):
        return functional.discrete_gradient(y, K.expand(N, 4, 4), b.expand(N, 4), 1 / N)

    exact = end(320)
    errors = [float((end(N) - exact).norm()) for N in (10, 20, 40)]
    orders = [float(mp.log(a / b, 2)) for a, b in pairwise(errors)]
    assert orders == pytest.approx([2, 2], abs=0.05)


def test_it_is_its_own_inverse_backwards_in_time():
    normal = Random(1)
    K, b, y = normal(3, 4, 4), normal(3, 4), normal(5, 4)
    z = functional.discrete_gradient(y, K, b, 0.7)
    torch.testing.assert_close(functional.discrete_gradient(z, K, b, 0.7, inverse=True), y)


@pytest.mark.parametrize("name", ["tanh", "relu", "silu", "identity"])
def test_gradients_are_right_and_can_be_differentiated_again(name):
    normal = Random(2)
    J = normal(3, 3)
    given = [t.requires_grad_() for t in (normal(2, 3), normal(2, 4, 3), normal(2, 4), J - J.mT)]

    def run(y, K, b, J):
        return functional.discrete_gradient(y, K, b, 0.3, J=J, activation=name)

    assert torch.autograd.gradcheck(run, given, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(run, given)


def test_identity_makes_it_the_midpoint_rule():
    normal = Random(4)
    K, b, y = normal(2, 4, 4), normal(2, 4), normal(5, 4)
    there = functional.discrete_gradient(y, K, b, 0.3, activation="identity")
    torch.testing.assert_close(there, functional.midpoint(y, K, b, 0.3, activation="identity"))


# What is promised


def test_no_norm_is_promised_because_one_below_1_exists():
    net = hdnn.HamiltonianNet(
        2, 2, "discrete_gradient", step=2.0, dtype=F64, init="paper",
        generator=torch.Generator().manual_seed(21),
    )  # fmt: skip
    assert not net.guarantee().holds
    assert "keeps the energy" in net.guarantee().why
    generator = torch.Generator().manual_seed(5)
    low = 1.0
    for _ in range(30):
        with torch.no_grad():
            net.K.copy_(2 * torch.randn(net.K.shape, generator=generator, dtype=F64))
            net.b.copy_(3 * torch.randn(net.b.shape, generator=generator, dtype=F64))
        y = 3 * torch.randn(100, 2, generator=generator, dtype=F64)
        low = min(low, float(analysis.norms(analysis.backward_sensitivity(net, y)).min()))
    assert low < 0.99
