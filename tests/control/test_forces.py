"""Forces from outside: what they supply, and how much they can move."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import closed_loops
from closed_loops import random_loop
from hdnn import activations, control
from hdnn.activations import Activation
from hdnn.control.certificate import balance_of
from hdnn.control.gains import gain_of
from hdnn.errors import OptionError, ShapeError


def state(loop, normal, *batch):
    return normal(*batch, loop.plant.agents, loop.plant.states + loop.controller.states)


def robot(damping: float = 0.2, steps: int = 10, **options) -> control.ClosedLoop:
    plant = control.robots(torch.tensor([[1.0, 2.0]]), damping=damping)
    return control.ClosedLoop(plant, control.Controller(1, steps), **options)


@given(
    *(closed_loops.seeds, closed_loops.agents, closed_loops.scales, closed_loops.steps),
    closed_loops.rows,
)
@settings(deadline=None, max_examples=8)
def test_the_energy_changes_by_what_is_supplied_and_dissipated(seed, N, scale, h, rows):
    loop, normal = random_loop(seed, N, scale, h, T=2, activation=rows)
    forces = 5 * normal(2, 2, N, 2)
    balance = loop.balance(3 * state(loop, normal, 2), forces=forces)
    assert float(balance.violation.amax()) < 1e-12
    assert float(balance.lost.amin()) >= 0
    assert balance.outputs.shape == forces.shape
    wanted = h * (forces * balance.outputs).sum((-2, -1))
    torch.testing.assert_close(balance.supplied, wanted)


@given(closed_loops.seeds, closed_loops.agents, closed_loops.scales, st.floats(0.01, 1.0))
@settings(deadline=None, max_examples=8)
def test_no_force_moves_outputs_more_than_the_gain_for_any_weights(seed, N, scale, h):
    rows = ["relu", "tanh", "identity", "softplus"]
    loop, normal = random_loop(seed, N, scale, h, T=5, activation=rows)
    forces = 3 * normal(5, 4, N, 2)
    balance, r = loop.balance(state(loop, normal, 4), forces=forces), 1 / loop.gain
    assert 0 < r < math.inf  # R of these plants is definite
    H_0 = balance.before[0] - loop.plant.lowest + balance.jumps.clamp(min=0).sum(0)
    w, y = (h**0.5 * t.square().sum((0, -2, -1)).sqrt() for t in (forces, balance.outputs))
    assert bool((y <= (w / r + (H_0 / r).sqrt()) * (1 + 1e-9)).all())
    left = h * r * (y / h**0.5).square()
    assert bool((left <= (H_0 + balance.supplied.sum(0)) * (1 + 1e-9) + 1e-9).all())


def test_from_rest_with_weights_that_stay_the_same_the_gain_itself_is_the_bound():
    torch.manual_seed(0)
    plant = control.robots(torch.zeros(3, 2))
    for scale in (0.0, 3.0):
        controller = control.Controller(3, 60, links=[(0, 1), (1, 2)], dissipation=1.0)
        with torch.no_grad():
            controller.G.mul_(scale)
        loop = control.ClosedLoop(plant, controller, 0.1)
        found = loop.balance(loop.start(torch.zeros(5, 3, 4)), forces=torch.randn(60, 5, 3, 2))
        assert loop.gain == pytest.approx(5.0, rel=1e-12)
        assert bool((found.gain <= 5.0).all())
        assert bool((found.gain > 0).all())


def test_a_force_in_resonance_nearly_reaches_the_gain():
    loop, h, steps = robot(step=0.5), 0.5, 600
    with torch.no_grad():
        loop.controller.G.zero_()
    turn = 2 * math.atan(h / 2)  # the angle by which one step of the free robot turns
    forces = torch.cos(turn * torch.arange(steps, dtype=torch.float64)).view(-1, 1, 1)
    forces = forces * torch.tensor([1.0, 0.0])
    y = loop.start(torch.tensor([[1.0, 2.0, 0.0, 0.0]]))
    found = loop.balance(y, horizons=steps // 10, forces=forces)
    assert 4.8 < float(found.gain) <= 5.0


def test_gains_of_ready_plants_are_those_of_their_damping():
    links = [(0, 1), (1, 2)]
    for plant, wanted in (
        (control.oscillators(links, damping=0.4), 2.5),
        (control.microgrid(links, load=7.0), 7.0),
        (control.pendulums(links, damping=0.5), 2.0),
        (control.robots(torch.zeros(2, 2), damping=0.0), math.inf),
        (control.pendulums(links, damping=0.0), math.inf),
    ):
        loop = control.ClosedLoop(plant, control.Controller(plant.agents, 3, inputs=plant.inputs))
        assert loop.gain == pytest.approx(wanted, rel=1e-12)
        certificate = loop.certify(loop.start(torch.ones(1, plant.agents, plant.states)), samples=0)
        assert certificate.holds
        assert certificate.gain == loop.gain
        text = "the gain is at most" if wanted < math.inf else "There is no bound on the gain"
        assert text in str(certificate)


@given(closed_loops.seeds, st.integers(1, 4), st.integers(1, 3), st.floats(-6, 6))
@settings(deadline=None)
def test_the_gain_is_the_least_for_which_R_is_above_the_ports(seed, p, m, power):
    normal = closed_loops.Random(seed)
    some = normal(1, p, p)
    R, g, rows = 10**power * some @ some.mT, normal(1, p, m), torch.eye(p).double()[None]
    gain = gain_of(R, g, rows)
    if gain < 1e4 * float(torch.linalg.matrix_norm(g, 2)) ** 2 / float(R.abs().amax()):
        below, above = (
            torch.linalg.eigvalsh(R - g @ g.mT / (factor * gain))[0, 0] / R.abs().amax()
            for factor in (1 - 1e-3, 1 + 1e-3)
        )
        assert float(below) < 0 <= float(above) + 1e-12
    one = torch.zeros_like(R)
    one[:, 0, 0] = 10**power
    port = torch.zeros(1, p, 1).double()
    port[:, 0] = 1
    assert gain_of(one, port, rows) == pytest.approx(10**-power)
    if p > 1:
        port[:, 1] = 1e-6  # a little of it acts where nothing is damped
        assert gain_of(one, port, rows) == math.inf
    assert gain_of(0 * one, port, rows) == math.inf
    assert gain_of(0 * one, 0 * port, rows) == 0


def test_a_port_that_is_hardly_undamped_counts_where_the_energy_is_stiff():
    A, R = (torch.diag(torch.tensor(d)).double()[None] for d in ([1e13, 1.0], [0.0, 1.0]))
    plant = control.Plant(A, 0 * R, R, torch.tensor([[[5e-13], [1.0]]]).double())
    loop = control.ClosedLoop(
        plant, control.Controller(1, steps=50, states=2, inputs=1), 0.1, engine="batched"
    )
    with torch.no_grad():
        loop.controller.G.zero_()
    measured = loop.balance(loop.start(torch.zeros(1, 2).double()), forces=1.0).gain
    assert float(measured) > 50
    assert loop.gain == math.inf


@pytest.mark.parametrize("size", [1e-9, 1e-14, 1e-18, 1e-25, 1e-60])
@pytest.mark.parametrize("engine", ["reference", "batched"])
def test_small_states_keep_the_balance_as_large_ones_do(size, engine):
    """Nothing is small by itself: a microgrid has charges of 1e-15."""
    torch.manual_seed(0)
    plant = control.oscillators([(0, 1)])
    loop = control.ClosedLoop(
        plant, control.Controller(2, steps=6, states=2, inputs=1), 0.5, engine=engine
    )
    y = size * torch.randn(1, 2, plant.states + 2, dtype=torch.float64)
    balance, certificate = loop.balance(y), loop.certify(y, samples=0)
    assert float((balance.after / balance.before).amax()) <= 1 + 1e-12
    assert certificate.holds
    off = balance.after - balance.before + balance.lost
    assert float((off.abs() / balance.before).amax()) < 1e-12


def test_the_certificate_denies_a_wrong_balance_of_small_states():
    torch.manual_seed(0)
    plant = control.robots(torch.zeros(1, 2))
    loop = control.ClosedLoop(plant, control.Controller(1, steps=4, dissipation=1.0), 0.5)
    y = 1e-14 * torch.randn(1, 1, 8, dtype=torch.float64)
    states, ends = loop.run(y, 4)
    with torch.no_grad():
        wrong = balance_of(loop.system(), torch.cat([states[:1], 1.01 * states[1:]]), ends)
    assert float(wrong.violation.amax()) > 1e-4


def test_a_plant_without_a_lower_bound_promises_nothing(monkeypatch):
    monkeypatch.setattr(activations, "_REGISTRY", {**activations._REGISTRY})
    name = "drift"
    activations.register(
        Activation(
            name,
            sigma=lambda x: 2 + torch.sin(x),
            slope=torch.cos,
            integral=lambda x: 2 * x + 2 * torch.sin(x / 2) ** 2,
            s_min=-1.0,
            s_max=1.0,
        )
    )
    eye, J = torch.eye(2)[None], torch.tensor([[[0.0, 1.0], [-1.0, 0.0]]])
    plant = control.Plant(eye, J, eye, torch.ones(1, 2, 1), activation=[name, "identity"])
    assert plant.lowest == -math.inf
    loop = control.ClosedLoop(plant, control.Controller(1, 3, inputs=1))
    certificate = loop.certify(loop.start(torch.ones(1, 1, 2)), samples=0)
    assert certificate.holds
    assert certificate.gain == math.inf
    assert "passive" not in str(certificate)
    assert "no lower bound" in str(certificate)


@pytest.mark.parametrize("name", ["auto", "reference", "batched"])
def test_forces_expand_and_no_force_changes_nothing(name):
    loop, y = robot(steps=4, engine=name), torch.ones(3, 1, 8).double()
    for given_ in (1.0, torch.ones(2), torch.ones(4, 1, 1, 2), [[1.0, 1.0]]):
        torch.testing.assert_close(loop(y, forces=given_), loop(y, forces=torch.ones(4, 3, 1, 2)))
    torch.testing.assert_close(loop(y, forces=0.0), loop(y), rtol=1e-12, atol=1e-12)
    assert loop(y[:0], forces=1.0).shape == (5, 0, 1, 8)
    late = torch.zeros(8, 1, 1, 2)
    late[4:] = 1.0
    assert torch.equal(loop(y, 2, late)[:5], loop(y, forces=0.0))
    assert bool(torch.isnan(loop.balance(y).gain).all())
    assert bool(torch.isnan(loop.balance(y, forces=0.0).gain).all())


def test_bad_forces_are_refused_in_a_sentence():
    loop, y = robot(steps=4), torch.ones(3, 1, 8)
    for given_, shown in (
        (torch.ones(3), r"\(3,\)"),
        (torch.ones(5, 3, 1, 2), r"\(5, 3, 1, 2\)"),
        (torch.ones(2) * 1j, "complex"),
        ("strong", "'strong'"),
    ):
        text = rf"forces must be real numbers that expand to .* = \(4, 3, 1, 2\), but are {shown}"
        with pytest.raises(ShapeError, match=text):
            loop(y, forces=given_)
    for value in (math.nan, math.inf):
        with pytest.raises(ShapeError, match="forces have NaN or infinite entries"):
            loop.run(y, 2, forces=value)
    loop.engine = "fused"
    with pytest.raises(OptionError, match=r'engine="fused" cannot run here: it (knows|needs)'):
        loop(y, forces=1.0)
