"""The reference systems: their equations, their starts, and the errors that are stated."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from scipy.special import ellipk

import hdnn
from hdnn.dynamics import systems
from hdnn.errors import DataError, OptionError, ShapeError

KEPLER = systems.kepler()
every_system = pytest.mark.parametrize("name", systems.SYSTEMS)


def tensor(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


@every_system
def test_a_field_is_J_times_the_slope_of_the_energy(name):
    system = systems.get(name)
    y = system.starts(3, torch.Generator().manual_seed(1))
    shift = 1e-5 * torch.eye(system.features, dtype=torch.float64)
    above = system.energy(y[:, None] + shift)
    below = system.energy(y[:, None] - shift)
    by_p, by_q = ((above - below) / 2e-5).chunk(2, -1)
    slope = torch.cat([-by_q, by_p], -1)
    assert torch.allclose(system.field(y), slope, atol=1e-7)


@every_system
def test_trajectories_keep_their_energy_and_can_be_run_back(name):
    system = systems.get(name)
    states = system.trajectories(4, 10, seed=2)
    assert states.dtype == torch.float64
    energies = system.energy(states)
    assert (energies - energies[0]).abs().max() < 1e-11
    mirror = tensor(-1, 1).repeat_interleave(system.features // 2)
    back = system.trajectories(mirror * states[-1], 10)
    assert (mirror * back.flip(0) - states).abs().max() < 1e-11


def test_a_seed_decides_the_starts():
    draw = KEPLER.trajectories
    assert torch.equal(draw(3, 2, seed=5), draw(3, 2, seed=5))
    assert not torch.equal(draw(3, 2, seed=5), draw(3, 2, seed=6))


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [("pendulum", -1, 0.6), ("double_pendulum", -3, -1.4), ("henon_heiles", 0, 1 / 8)],
)  # fmt: skip
def test_starts_fill_a_range_of_energies_and_stay_spread(name, least, most):
    system = systems.get(name)
    states = system.trajectories(1000, 2)
    energies = system.energy(states[0])
    assert least <= energies.min() < 0.7 * least + 0.3 * most
    assert 0.1 * least + 0.9 * most < energies.max() <= most
    assert torch.allclose(states[0].std(0), states[-1].std(0), rtol=0.08)


def test_a_planet_returns_after_a_period():
    start = KEPLER.starts(1, torch.Generator().manual_seed(0))
    period = 2 * math.pi * float(-2 * KEPLER.energy(start)) ** -1.5
    end = KEPLER.trajectories(start, 4, dt=period / 4)[-1]
    assert (end - start).abs().max() < 1e-11


@pytest.mark.parametrize("swing", [0.01, 1.0, 2.2])
def test_a_pendulum_returns_after_its_elliptic_period(swing):
    start = tensor(0, swing)[None]
    period = 4 * ellipk(math.sin(swing / 2) ** 2)
    end = systems.pendulum().trajectories(start, 3, dt=period / 3)[-1]
    assert (end - start).abs().max() < 1e-12


def test_inputs_and_damping_move_a_small_pendulum_as_a_linear_one():
    a, u, t = 1e-4, 2e-5, 3.0
    system = systems.pendulum(damping=0.2)
    torques = torch.full((6, 1, 1), u)
    end = system.trajectories(tensor(0, a)[None], 6, inputs=torques)[-1, 0]
    w = math.sqrt(1 - 0.1**2)
    decay = (a - u) * math.exp(-0.1 * t)
    q = decay * (math.cos(w * t) + 0.1 / w * math.sin(w * t)) + u
    p = -decay / w * math.sin(w * t)
    assert torch.allclose(end, tensor(p, q), atol=1e-11)


def test_damping_shrinks_canonical_areas_by_its_exponential():
    system = dataclasses.replace(systems.double_pendulum(), damping=0.3)
    shift = 1e-4 * torch.eye(4, dtype=torch.float64)
    y = 0.3 + torch.cat([shift, -shift])
    ends = system.trajectories(y, 2)[-1]
    M = ((ends[:4] - ends[4:]) / 2e-4).mT
    J = hdnn.functional.from_X(torch.eye(2, dtype=torch.float64))
    shrunk = math.exp(-0.3 * 2 * system.dt) * J
    assert torch.allclose(M.mT @ J @ M, shrunk, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "squares"),
    [
        ("double_pendulum", tensor(2 - 2**0.5, 2 + 2**0.5)),
        ("chain", 2 - 2 * (math.pi / 17 * torch.arange(1, 17)).cos().double()),
    ],
)
def test_small_vibrations_have_their_frequencies(name, squares):
    system = systems.get(name)
    y = torch.zeros(system.features, dtype=torch.float64)
    rates = torch.linalg.eigvals(torch.func.jacrev(system.field)(y))
    positive = rates.imag.sort().values[len(squares) :]
    assert torch.allclose(positive.square(), squares, atol=1e-6)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: systems.get("keppler"), OptionError, "mean 'kepler'"),
        (lambda: systems.chain(0), OptionError, "masses must be a whole"),
        (lambda: KEPLER.trajectories(0, 5), OptionError, "count must"),
        (lambda: KEPLER.trajectories(torch.ones(4), 5), ShapeError, "starts"),
        (lambda: KEPLER.trajectories(3, 5, inputs=tensor(1)), ShapeError, "inputs"),
        (lambda: KEPLER.trajectories(tensor(0, 0, 1, 0)[None], 9), DataError, "collide"),
        (lambda: KEPLER.trajectories(0 * torch.ones(1, 4), 9), DataError, "finite"),
    ],
)  # fmt: skip
def test_mistakes_are_one_clear_sentence(call, error, message):
    with pytest.raises(error, match=message):
        call()
