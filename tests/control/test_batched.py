"""All agents of a phase at once: the states and gradients of the definition, on any plant."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

import closed_loops
from closed_loops import random_loop
from hdnn import control
from hdnn.control import batched, fused, step
from hdnn.errors import ConvergenceError, OptionError
from hdnn.integrators import implicit


def state(loop, normal, *batch):
    return 2 * normal(*batch, loop.plant.agents, loop.plant.states + loop.controller.states)


def both_ways(loop, normal, y, forces=None):
    """States and gradients by the definition, then of all agents at once."""
    given_ = [y, *loop.controller.parameters(), *([] if forces is None else [forces])]
    found, weight = [], None
    for name in ("reference", "batched"):
        loop.engine = name
        trajectory = loop(y, forces=forces)
        weight = normal(*trajectory.shape) if weight is None else weight
        grads = torch.autograd.grad((trajectory * weight).sum(), given_, allow_unused=True)
        found.append([trajectory.detach(), *(g for g in grads if g is not None and g.numel())])
    assert len(found[0]) == len(found[1])
    return zip(*found, strict=True)


@given(
    *(closed_loops.seeds, closed_loops.agents, closed_loops.scales, closed_loops.steps),
    closed_loops.rows,
    st.sampled_from([(), (1,), (2, 1)]),
    st.booleans(),
)
@settings(deadline=None, max_examples=8)
def test_states_and_gradients_are_those_of_the_definition(seed, N, scale, h, rows, batch, pushed):
    loop, normal = random_loop(seed, N, min(scale, 1.5), min(h, 0.3), T=2, activation=rows)
    y = state(loop, normal, *batch).requires_grad_()
    forces = normal(2, *batch, N, 2).requires_grad_() if pushed else None
    for want, got in both_ways(loop, normal, y, forces):
        assert float((want - got).abs().amax()) <= 1e-9 * (1 + float(want.abs().amax()))


@pytest.mark.parametrize("rows", ["identity", ["sin", "tanh", "softplus", "identity"]])
def test_gradients_are_right_twice_in_states_weights_plants_and_forces(rows):
    loop, normal = random_loop(3, 2, 0.7, 0.1, T=2, c=2, activation=rows)
    loop.controller.links, loop.controller.C = ((0, 1),), torch.nn.Parameter(normal(1, 2, 2))
    system, y = loop.system(), state(loop, normal, 2).requires_grad_()
    names = ["K", "b", "G", "C", "A", "a", "R", "g"]
    names += [] if system.weights is None else ["weights"]
    values = [getattr(system, name).detach().clone().requires_grad_() for name in names]
    forces = normal(2, 2, 2, 2).requires_grad_()

    def run(y, forces, *values):
        same = replace(system, **dict(zip(names, values, strict=True)))
        return batched.trajectory(same, y, 2, 0, forces)[0]

    assert gradcheck(run, (y, forces, *values), fast_mode=True)
    small = y.detach()[:1].requires_grad_()
    assert gradgradcheck(
        lambda y, K: run(y, forces[:, :1].detach(), K, *values[1:]).sum(0),
        (small, values[0]),
        fast_mode=True,
    )


@pytest.mark.parametrize("h", [0.05, 3.0])
def test_where_newtons_method_fails_the_definition_takes_over_for_these_alone(h, monkeypatch):
    loop, normal = random_loop(8, 3, 1.0, h, T=2, activation=["sin", "sin", "tanh", "identity"])
    y = state(loop, normal, 3)
    loop.engine = "reference"
    wanted = loop(y).detach()
    loop.engine = "batched"
    torch.testing.assert_close(loop(y).detach(), wanted, rtol=1e-9, atol=1e-9)
    monkeypatch.setattr(implicit, "MAX_ITER", 1)  # of the batch; the definition has its own
    asked = []
    solve = implicit.solve_chord

    def counted(*args, **options):
        asked.append(options["where"])
        return solve(*args, max_iter=50, **options)

    monkeypatch.setattr(implicit, "solve_chord", counted)
    torch.testing.assert_close(loop(y).detach(), wanted, rtol=1e-9, atol=1e-9)
    assert asked


def test_a_plant_that_the_kernel_cannot_run_is_run_by_default():
    loop, normal = random_loop(5, 3, 1.0, 0.1, T=2, activation="tanh")
    y = state(loop, normal, 2)
    assert "quadratic energy only" in fused.why_not(y, loop.system())
    default = loop(y)
    loop.engine = "batched"
    assert torch.equal(loop(y), default)
    loop.engine = "fused"
    with pytest.raises(OptionError, match='engine="fused" cannot run here: it is for plants of a'):
        loop(y)
    loop.engine = "reference"
    torch.testing.assert_close(loop(y), default, rtol=1e-11, atol=1e-11)


def test_gradients_of_plants_come_by_default():
    loop, normal = random_loop(5, 2, 0.5, 0.1, T=2)
    loop.plant.A.requires_grad_()
    y = state(loop, normal, 2)
    (found,) = torch.autograd.grad(loop(y).square().sum(), loop.plant.A)
    loop.engine = "reference"
    (wanted,) = torch.autograd.grad(loop(y).square().sum(), loop.plant.A)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def test_float32_is_as_close_to_float64_as_it_can_be():
    found = []
    for dtype in (torch.float64, torch.float32):
        torch.manual_seed(0)
        controller = control.Controller(3, 20, inputs=1, links=[(0, 1), (1, 2)], dissipation=2.0)
        loop = control.ClosedLoop(control.pendulums([(0, 1), (1, 2)]), controller.to(dtype))
        y = loop.start(torch.ones(2, 3, 3), 0.2)
        assert y.dtype == loop(y).dtype == dtype
        found.append(loop(y).double())
        assert loop.certify(y, samples=0).holds
    assert float((found[0] - found[1]).detach().abs().amax()) < 1e-4


@pytest.mark.parametrize("name", ["reference", "batched"])
def test_any_number_of_agents_links_samples_and_steps_is_taken(name):
    for N, links in ((1, []), (3, []), (2, [(0, 1)])):
        plant = control.pendulums(links, agents=N)
        controller = control.Controller(N, 3, inputs=1, links=links)
        loop = control.ClosedLoop(plant, controller, engine=name)
        n = plant.states + 4
        assert loop(torch.zeros(0, N, n)).shape == (4, 0, N, n)
        assert loop(torch.ones(N, n)).shape == (4, N, n)
        states, ends = loop.run(torch.ones(2, N, n), 0)
        assert (states.shape, ends.shape) == ((1, 2, N, n), (0, 2, N, n))
        later = loop.run(torch.ones(2, N, n), 3, first=2)[0]
        again = loop.run(loop.run(torch.ones(2, N, n), 1, first=2)[0][-1], 2, first=3)[0]
        torch.testing.assert_close(later[1:], again, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", ["reference", "batched"])
def test_a_step_without_a_solution_names_the_step_and_who_takes_it(name):
    loop, normal = random_loop(4, 2, 0.5, 0.1, T=3, activation="sin", engine=name)
    y = state(loop, normal, 2)
    with torch.no_grad():
        loop.controller.K[2, 1] = torch.nan
    with pytest.raises(ConvergenceError, match=r"step 2, agent 1: .* (NaN|infinite)"):
        loop(y)
    y[1, 0, 0] = torch.inf
    with pytest.raises(ConvergenceError, match=r"step 0, agent 0: .* (NaN|infinite)"):
        loop(y)


def test_two_steps_together_are_of_order_two_for_pendulums():
    plant = control.pendulums([(0, 1), (1, 2)], gravity=3.0)
    torch.manual_seed(1)
    controller = control.Controller(3, 1, inputs=1, links=[(0, 2)], dissipation=1.0)
    loop = control.ClosedLoop(plant, controller, engine="batched")
    y, ends = loop.start(torch.ones(3, plant.states), 0.5), []
    for k in (16, 32, 64, 128):
        loop.step = 0.8 / k
        ends.append(loop.run(y, k)[0][-1].detach())
    errors = [float((a - b).norm()) for a, b in itertools.pairwise(ends)]
    assert all(3.5 < a / b < 4.5 for a, b in itertools.pairwise(errors)), errors


def test_the_phases_of_a_trajectory_are_those_of_the_definition():
    loop, normal = random_loop(6, 4, 0.8, 0.2, T=3, activation=["relu", "gelu", "silu", "sigmoid"])
    y = state(loop, normal, 2)
    for first in (0, 1):
        wanted = step.trajectory(loop.system(), y, 2, first)
        found = batched.trajectory(loop.system(), y, 2, first)
        for want, got in zip(wanted, found, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_loops_run_on_a_gpu(dtype):
    problem = control.crossing("ring", steps=20, engine="batched")
    loop = problem.loop.to(dtype)
    forces = 0.1 * torch.ones(20, 3, 12, 2, dtype=dtype)
    y, found = problem.starts(3).to(dtype), []
    for device in ("cpu", "cuda"):
        loop.to(device)
        trajectory = loop(y.to(device), forces=forces.to(device))
        cost = problem.cost(loop, trajectory)
        grads = torch.autograd.grad(cost, [*loop.controller.parameters()])
        found.append([t.detach().cpu() for t in (trajectory, cost, *grads)])
        assert trajectory.device.type == device
        assert loop.certify(y.to(device), samples=1).holds
    near = {torch.float64: 1e-8, torch.float32: 1e-2}[dtype]
    for one, other in zip(*found, strict=True):
        assert float((one - other).abs().amax()) <= near * (1 + float(one.abs().amax()))
    training = control.LoopTraining(problem, iterations=2, batch=2)
    training.run(progress=False)
    assert training.done == 2
    assert all(p.device.type == "cuda" for p in loop.parameters())
