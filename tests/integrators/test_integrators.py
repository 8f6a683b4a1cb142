"""Integrators on one field: order of convergence, drift of the energy, and how they compose."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

import hdnn
from hdnn import functional
from hdnn.errors import OptionError
from hdnn.integrators import splitting
from hdnn.networks.hamiltonian import SCHEMES
from strategies import Random, randomise

EXPLICIT = ("semi_implicit_euler", "verlet", "yoshida4")


def network(integrator: str, N: int, T: float, activation: str = "tanh") -> hdnn.HamiltonianNet:
    """The same ODE for every integrator: constant weights, a random X, a block-diagonal K."""
    normal, m = Random(5), 3
    X = normal(m, m)
    K_p, K_q, b_p, b_q = normal(1, m, m), normal(1, m, m), normal(1, m), normal(1, m)
    scheme = SCHEMES[integrator]
    J = hdnn.interconnection.from_X(X)
    constant = {"X": X} if scheme.interconnection == "X" else {"J": J}
    net = hdnn.HamiltonianNet(
        2 * m, N, integrator, T=T, activation=activation, tied=True, dtype=torch.float64, **constant
    )
    if scheme.layout == "split":
        weights = {"K_p": K_p, "K_q": K_q, "b_p": b_p, "b_q": b_q}
    else:
        K = torch.block_diag(K_p[0], K_q[0])[None]
        weights = {"K": K, "b": torch.cat([b_p, b_q], -1)}
    for name, value in weights.items():
        net.assign(name, value)
    return net.requires_grad_(False)


@pytest.mark.parametrize("integrator", SCHEMES)
@pytest.mark.parametrize("activation", ["tanh", "sin", "softplus"])
def test_the_measured_order_of_convergence_is_the_one_promised(integrator, activation):
    y, T = Random(1)(4, 6), 0.5
    exact = network("yoshida4", 2000, T, activation)(y)
    counts = (16, 32, 64)
    errors = [float((network(integrator, N, T, activation)(y) - exact).norm()) for N in counts]
    orders = [math.log2(a / b) for a, b in pairwise(errors)]
    assert orders[-1] == pytest.approx(SCHEMES[integrator].order, abs=0.2)


def energy_drift(integrator: str, N: int, h: float) -> float:
    net = network(integrator, N, N * h)
    field = net.field()
    H = functional.energy(net.trajectory(Random(1)(4, 6)), field["K"][0], field["b"][0])
    return float((H - H[0]).abs().max() / H[0].abs().max())


def test_energy_drift_over_2000_layers_falls_from_scheme_to_scheme():
    drift = {name: energy_drift(name, 2000, 0.02) for name in (*EXPLICIT, "forward_euler")}
    assert drift["semi_implicit_euler"] < 0.2
    assert drift["verlet"] < drift["semi_implicit_euler"] / 10
    assert drift["yoshida4"] < drift["verlet"] / 10
    assert drift["forward_euler"] > 5 * drift["semi_implicit_euler"]


@pytest.mark.parametrize("integrator", ["semi_implicit_euler_full", "midpoint"])
def test_implicit_schemes_keep_the_energy_too(integrator):
    assert energy_drift(integrator, 500, 0.02) < 0.2


def test_the_fractions_of_each_scheme_add_up_to_one_step():
    for shears in (splitting.SEMI_IMPLICIT_EULER, splitting.VERLET, splitting.YOSHIDA4):
        for half in ("p", "q"):
            assert sum(part for which, part in shears if which == half) == pytest.approx(1)
        assert splitting.inverse(splitting.inverse(shears)) == shears


def test_verlet_and_yoshida_are_their_own_inverses_backwards_in_time():
    for shears in (splitting.VERLET, splitting.YOSHIDA4):
        turned = tuple((half, -part) for half, part in shears)
        for (half, part), (other, inverse) in zip(turned, splitting.inverse(shears), strict=True):
            assert half == other
            assert part == pytest.approx(inverse)


def test_two_steps_of_semi_implicit_euler_and_its_adjoint_are_a_verlet_step():
    """Kick, drift, kick: half a step of p, then H2 with the second half of p moved behind it."""
    normal, m, h = Random(0), 2, 0.3
    K_p, K_q, b_p, b_q = normal(1, 3, m), normal(1, 3, m), normal(1, 3), normal(1, 3)
    y, X = normal(5, 2 * m), normal(m, m)
    one = functional.verlet(y, K_p, K_q, b_p, b_q, h, X=X)
    shears = (("p", 0.5), ("q", 0.5)), (("q", 0.5), ("p", 0.5))
    for part in shears:
        y = functional.split(y, K_p, K_q, b_p, b_q, h, shears=part, X=X)
    torch.testing.assert_close(y, one)


def test_any_composition_can_be_brought_along_and_undone():
    normal = Random(0)
    ruth3 = (
        ("p", 7 / 24),
        ("q", 2 / 3),
        ("p", 3 / 4),
        ("q", -2 / 3),
        ("p", -1 / 24),
        ("q", 1.0),
    )
    weights = normal(3, 4, 2), normal(3, 4, 2), normal(3, 4), normal(3, 4)
    y = normal(5, 4)
    out = functional.split(y, *weights, 0.1, shears=ruth3)
    back = functional.split(out, *weights, 0.1, shears=ruth3, inverse=True)
    torch.testing.assert_close(back, y)


@pytest.mark.parametrize("shears", [(), [("p", 1.0)], (("x", 1.0),), (("p",),), "pq", None])
def test_what_is_no_sequence_of_shears_is_refused(shears):
    normal = Random(0)
    weights = normal(3, 4, 2), normal(3, 4, 2), normal(3, 4), normal(3, 4)
    with pytest.raises(OptionError, match="shears must be a tuple of pairs"):
        functional.split(normal(5, 4), *weights, 0.1, shears=shears)


def test_H1_and_H2_are_special_cases_not_copies():
    for kind, integrator in (
        (hdnn.H1, "forward_euler"),
        (hdnn.H2, "semi_implicit_euler"),
        (hdnn.ImplicitH2, "semi_implicit_euler_full"),
    ):
        named = kind(4, 3, generator=torch.Generator().manual_seed(0))
        general = hdnn.HamiltonianNet(4, 3, integrator, generator=torch.Generator().manual_seed(0))
        y = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
        assert isinstance(named, hdnn.HamiltonianNet)
        assert torch.equal(named(y), general(y))


def test_weights_of_2000_layers_may_differ_and_the_stack_is_still_reversible():
    normal = Random(2)
    net = hdnn.HamiltonianNet(6, 2000, "yoshida4", T=4.0, X=normal(3, 3), dtype=torch.float64)
    randomise(net, normal, 0.4)
    y = normal(4, 6)
    torch.testing.assert_close(net.inverse(net(y)), y, rtol=1e-9, atol=1e-9)
