"""Closed loops: their energy balance, their engines, their order, what they refuse."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from torch.autograd import gradcheck, gradgradcheck

import closed_loops
from closed_loops import random_loop
from hdnn import control, engine
from hdnn.control import step
from hdnn.engine import jit
from hdnn.errors import ConvergenceError, OptionError, ShapeError, StepError

fused = pytest.mark.skipif(not jit.installed(), reason="needs numba")


def state(loop, normal, *batch):
    return 3 * normal(*batch, loop.plant.agents, loop.plant.states + loop.controller.states)


@given(closed_loops.seeds, closed_loops.agents, closed_loops.scales, closed_loops.steps)
@settings(deadline=None)
def test_the_energy_falls_by_what_is_dissipated_for_any_weights_and_any_step(seed, N, scale, h):
    loop, normal = random_loop(seed, N, scale, h, T=6)
    balance = loop.balance(state(loop, normal, 3), horizons=2)
    assert balance.before.shape == (12, 3)
    assert float(balance.violation.amax()) < 1e-13
    assert float(balance.lost.amin()) >= 0
    # New weights change the energy within their bound, and after the horizon not at all.
    assert bool((balance.jumps.abs() <= balance.bounds * (1 + 1e-9) + 1e-9).all())
    assert float(balance.jumps[5:].abs().amax()) == 0
    assert torch.allclose(balance.after[:-1] + balance.jumps, balance.before[1:], rtol=1e-10)


@fused
@pytest.mark.parametrize("scale", [30.0, 300.0, 3000.0])
@pytest.mark.parametrize("h", [0.001, 0.05, 1.0])
def test_extreme_weights_are_solved_and_keep_the_balance(scale, h):
    loop, normal = random_loop(7, 4, 1.0, h, T=10, c=4, engine="fused")
    with torch.no_grad():
        loop.controller.K *= scale
        loop.controller.b *= scale
    balance = loop.balance(state(loop, normal, 8))
    assert float(balance.violation.amax()) < 1e-12
    assert float(balance.lost.amin()) >= 0


@fused
@given(closed_loops.seeds, closed_loops.agents, closed_loops.scales, closed_loops.steps)
@settings(deadline=None, max_examples=25)
def test_the_kernel_agrees_with_the_definition_in_values_and_gradients(seed, N, scale, h):
    loop, normal = random_loop(seed, N, min(scale, 2.0), h)
    y, weight = state(loop, normal, 2).requires_grad_(), None
    found = []
    for name in ("reference", "fused"):
        loop.engine = name
        trajectory = loop(y)
        weight = normal(*trajectory.shape) if weight is None else weight
        given_ = [y, *loop.controller.parameters()]
        grads = torch.autograd.grad((trajectory * weight).sum(), given_, allow_unused=True)
        kept = [g for g in grads if g is not None and g.numel()]
        found.append([trajectory.detach(), *kept])
    assert len(found[0]) == len(found[1])
    for want, got in zip(*found, strict=True):
        assert float((want - got).abs().amax()) <= 1e-11 * (1 + float(want.abs().amax()))


def test_gradients_of_the_definition_are_right_twice():
    loop, normal = random_loop(3, 2, 0.7, 0.3, T=2, c=2, engine="reference")
    loop.controller.links, loop.controller.C = ((0, 1),), torch.nn.Parameter(normal(1, 2, 2))
    system, y = loop.system(), state(loop, normal, 1).requires_grad_()
    weights = [t.detach().requires_grad_() for t in (system.K, system.b, system.G, system.C)]

    def run(y, K, b, G, C):
        new = {**vars(system), "K": K, "b": b, "G": G, "C": C}
        return step.trajectory(step.System(**new), y, 2)[0]

    assert gradcheck(run, (y, *weights))
    assert gradgradcheck(lambda y, K: run(y, K, *weights[1:]).sum(0), (y, weights[0]))


@fused
def test_gradients_of_the_kernel_are_right():
    loop, normal = random_loop(3, 3, 0.7, 0.3, T=3, engine="fused")
    y = state(loop, normal, 2).requires_grad_()
    weights = [*loop.controller.parameters()]
    assert gradcheck(lambda y, *_: loop(y), (y, *weights))


@pytest.mark.parametrize("name", ["reference", pytest.param("fused", marks=fused)])
def test_two_steps_together_are_of_order_two(name):
    loop, normal = random_loop(5, 3, 0.5, 0.1, T=1, engine=name)
    y = state(loop, normal) / 3
    ends = []
    for k in (16, 32, 64, 128):
        loop.step = 0.4 / k
        ends.append(loop.run(y, k)[0][-1].detach())
    errors = [float((a - b).norm()) for a, b in itertools.pairwise(ends)]
    rates = [a / b for a, b in itertools.pairwise(errors)]
    assert all(3.5 < rate < 4.5 for rate in rates), rates


@fused
def test_samples_do_not_depend_on_their_batch_or_on_threads():
    loop, normal = random_loop(11, 4, 1.0, 0.1, T=5, engine="fused")
    y = state(loop, normal, 20)
    whole = loop(y)
    assert torch.equal(whole[:, 3:7], loop(y[3:7]))
    assert torch.equal(whole[:, 19], loop(y[19]))
    weights = [*loop.controller.parameters()]
    wanted = torch.autograd.grad(whole.square().sum(), weights)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        again = loop(y)
        found = torch.autograd.grad(again.square().sum(), weights)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(whole, again)
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


@pytest.mark.parametrize("name", ["reference", pytest.param("fused", marks=fused)])
def test_a_run_can_go_on_from_any_step_with_the_same_bits(name):
    loop, normal = random_loop(2, 3, 1.0, 0.1, T=4, engine=name)
    whole = loop(state(loop, normal, 1), horizons=2).detach()
    rest = loop.run(whole[3], 5, first=3)[0]
    assert torch.equal(rest, whole[3:])


def test_a_mass_on_a_spring_keeps_its_energy_and_its_period():
    J = torch.tensor([[[0.0, 1.0], [-1.0, 0.0]]])
    plant = control.Plant(torch.eye(2)[None], J, 0 * J, torch.tensor([[[0.0], [1.0]]]))
    controller = control.Controller(1, 1, inputs=1)
    with torch.no_grad():
        controller.G.zero_()
    h = 0.2
    loop = control.ClosedLoop(plant, controller, h)
    found = loop.run(loop.start(torch.tensor([[1.0, 0.0]])), 50)[0][:, 0, :2]
    # The midpoint rule, by hand: each step turns the state by 2 atan(h / 2).
    angle = torch.arange(51).double() * 2 * torch.atan(torch.tensor(h / 2, dtype=torch.float64))
    wanted = torch.stack([angle.cos(), -angle.sin()], -1)
    assert torch.allclose(found, wanted, rtol=0, atol=1e-13)


def test_what_drives_the_plants_is_what_the_step_uses():
    loop, normal = random_loop(1, 2, 0.5, 1e-6, T=2)
    y = state(loop, normal)
    trajectory, p = loop(y), loop.plant.states
    u = loop.inputs(trajectory)
    assert u.shape == (2, 2, 2)
    assert loop.inputs(loop(y, horizons=3)).shape == (6, 2, 2)
    xi = y[..., p:].requires_grad_()
    (slope,) = torch.autograd.grad(loop.controller.energy(xi, 0).sum(), xi)
    wanted = -(loop.controller.G.mT @ slope.unsqueeze(-1)).squeeze(-1)
    assert torch.allclose(u[0], wanted, rtol=1e-12)


def test_batches_of_any_shape_and_float32_states_are_taken():
    loop, normal = random_loop(4, 2, 0.5, 0.1, T=2)
    y = state(loop, normal, 2, 3)
    assert torch.equal(loop(y)[:, 1, 2], loop(y[1, 2]))
    assert loop(y.float()).dtype == torch.float64
    assert loop(y[:0]).shape == (3, 0, 3, 2, 7)
    assert loop.energy(y, 0).shape == (2, 3)
    start = loop.start(y[..., :3].float(), torch.arange(4.0))
    assert start.shape == y.shape
    assert start[1, 2, 1, 6] == 3


def test_float32_controllers_run_where_the_kernel_cannot():
    plant = control.robots(torch.zeros(2, 2))
    controller = control.Controller(2, 2, links=[(0, 1)], dtype=torch.float32)
    loop = control.ClosedLoop(plant, controller)
    assert loop(loop.start(torch.ones(1, 2, 4))).dtype == torch.float32
    loop.engine = "fused"
    with pytest.raises(OptionError, match='engine="fused" cannot run here: it '):
        loop(loop.start(torch.ones(1, 2, 4)))


@pytest.mark.parametrize("name", ["reference", pytest.param("fused", marks=fused)])
def test_a_step_without_a_solution_names_the_step_and_the_agent(name):
    loop, normal = random_loop(4, 2, 0.5, 0.1, T=3, engine=name)
    with torch.no_grad():
        loop.controller.K[2, 1] = torch.nan
    with pytest.raises(ConvergenceError, match=r"step 2, agent 1: .* (NaN|infinite)"):
        loop(state(loop, normal, 1))


def test_the_engine_in_force_is_used():
    loop, normal = random_loop(4, 1, 0.5, 0.1, T=1)
    loop.engine = None
    with engine.use(engine="reference"):
        y = state(loop, normal, 1).requires_grad_()
        (first,) = torch.autograd.grad(loop(y).square().sum(), y, create_graph=True)
        assert torch.autograd.grad(first.sum(), y)[0].shape == y.shape


def test_bad_input_is_refused_in_a_sentence():
    plant = control.robots(torch.zeros(2, 2))
    controller = control.Controller(2, 3)
    with pytest.raises(ShapeError, match=r"the plant has 2 agents, but the controller is for 3"):
        control.ClosedLoop(plant, control.Controller(3, 3))
    with pytest.raises(ShapeError, match=r"2 inputs an agent, but the controller is for 1"):
        control.ClosedLoop(plant, control.Controller(2, 3, inputs=1))
    with pytest.raises(StepError, match="step must be finite and > 0"):
        control.ClosedLoop(plant, controller, step=0.0)
    with pytest.raises(OptionError, match="engine 'fast' is not known"):
        control.ClosedLoop(plant, controller, engine="fast")
    loop = control.ClosedLoop(plant, controller)
    with pytest.raises(ShapeError, match=r"y must be .* \(\*batch, 2, 8\)"):
        loop(torch.zeros(1, 2, 4))
    with pytest.raises(ShapeError, match=r"z must be .* \(\*batch, 2, 4\)"):
        loop.start(torch.zeros(1, 2, 8))
    with pytest.raises(ShapeError, match="horizons must be a whole number >= 1"):
        loop(torch.zeros(1, 2, 8), horizons=0)


@fused
def test_gradients_are_those_of_the_forward_pass_whatever_changes_afterwards():
    loop, normal = random_loop(3, 3, 0.7, 0.3, engine="fused")
    y, weights = state(loop, normal, 2), list(loop.controller.parameters())
    factor = normal(*loop(y).shape)
    wanted = torch.autograd.grad((factor * loop(y)).sum(), weights)
    found = loop(y)
    found.mul_(2)
    for one, other in zip(
        torch.autograd.grad((factor * found).sum(), weights), wanted, strict=True
    ):
        torch.testing.assert_close(one, 2 * other)
    loss = (factor * loop(y)).sum()
    with torch.no_grad():
        for w in weights:
            w.mul_(3)
    for one, other in zip(torch.autograd.grad(loss, weights), wanted, strict=True):
        assert torch.equal(one, other)


@fused
def test_gradients_of_gradients_are_those_of_the_definition():
    found = []
    for name in ("fused", "reference"):
        loop, normal = random_loop(3, 3, 0.7, 0.3, T=2, engine=name)
        y, weights = state(loop, normal, 1), list(loop.controller.parameters())
        first = torch.autograd.grad(loop(y).square().sum(), weights, create_graph=True)
        loss = sum((g.square().sum() for g in first), torch.tensor(0.0))
        found.append([*first, *torch.autograd.grad(loss, weights)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


def test_stiff_plants_are_solved_by_default():
    for seed in range(6):
        torch.manual_seed(seed)
        plant = control.microgrid([(0, 1), (1, 2), (0, 2)], capacitance=1e-9, inductance=1e-6)
        controller = control.Controller(3, 2, inputs=1, dissipation=1.0)
        loop = control.ClosedLoop(plant, controller, 0.01)
        y = loop.start(torch.randn(1, 3, plant.states), 0.2)
        assert bool(torch.isfinite(loop(y)).all())


@pytest.mark.parametrize("name", ["reference", pytest.param("fused", marks=fused)])
def test_states_and_steps_that_cannot_be_are_one_sentence(name):
    loop, normal = random_loop(4, 2, 0.5, 0.1, T=3, engine=name)
    y, plant, controller = state(loop, normal, 1), loop.plant, loop.controller
    for wrong in (
        lambda: loop.run(y, 1, -1000),
        lambda: loop.run(y, -1),
        lambda: loop.run(y, 2.5),
        lambda: loop.energy(y, -7),
        lambda: loop.energy(y[..., :3], 0),
        lambda: loop([[1.0]]),
        lambda: loop(y + 1j),
        lambda: loop.start([[1.0]]),
        lambda: loop.start(torch.zeros(2, 3), torch.ones(3)),
        lambda: loop.start(torch.zeros(2, 3), "a"),
        lambda: control.ClosedLoop(controller, plant),
    ):
        with pytest.raises(ShapeError):
            wrong()


@pytest.mark.parametrize("again", [False, True], ids=["once", "of gradients"])
@pytest.mark.parametrize("name", ["batched", pytest.param("fused", marks=fused)])
def test_inputs_that_depend_on_each_other_have_the_gradients_of_the_definition(name, again):
    """A run in two pieces, and a start that depends on weights: no way is followed twice."""
    loop, normal = random_loop(0, 4, 0.5, 0.1, T=4)
    y, c = state(loop, normal, 3), loop.controller

    def gradients(engine_: str) -> list[torch.Tensor]:
        loop.engine = engine_
        p = loop.plant.states
        start = torch.cat([y[..., :p], y[..., p:] + c.K.sum((0, -1))], -1)
        middle = loop.run(start, 2)[0][-1]
        end = loop.run(middle, 2, 2)[0][-1].square().sum()
        weights = [c.K, c.b, c.G, c.C]
        return [g.detach() for g in torch.autograd.grad(end, weights, create_graph=again)]

    for found, wanted in zip(gradients(name), gradients("reference"), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-9)


@fused
def test_plants_whose_rows_are_one_after_rounding_are_solved_by_default():
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    plant = control.Plant(one.expand(1, 2, 1), 0 * one, 1e18 * one, one)
    loop = control.ClosedLoop(plant, control.Controller(1, 4, states=2, inputs=1), 0.1)
    assert bool(torch.isfinite(loop(loop.start(one))).all())
    loop.engine = "fused"
    with pytest.raises(ConvergenceError, match="agent 0"):
        loop(loop.start(one))


def test_transforms_of_torch_func_see_the_definition():
    loop, normal = random_loop(0, 2, 0.5, 0.1)
    y = state(loop, normal, 3)
    whole = torch.func.vmap(loop)(y).transpose(0, 1)
    torch.testing.assert_close(whole, loop(y), rtol=1e-9, atol=1e-9)
    last = torch.func.jacrev(lambda each: loop(each)[-1])(y[0])
    wanted = torch.autograd.functional.jacobian(lambda each: loop(each)[-1], y[0])
    torch.testing.assert_close(last, wanted, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_certificates_need_no_gradients_of_whoever_asks(mode):
    loop, normal = random_loop(0, 2, 0.5, 0.1)
    y = state(loop, normal, 3)
    wanted = loop.certify(y)
    with mode():
        assert loop.certify(y) == wanted
    assert loop.certify(torch.ones_like(y).long()) == loop.certify(torch.ones_like(y))
    with pytest.raises(ShapeError, match="real tensor"):
        loop.certify([1, 2])


def test_complex_states_of_controllers_are_refused():
    loop, _ = random_loop(0, 2, 0.5, 0.1)
    with pytest.raises(ShapeError, match="xi must be a real number"):
        loop.start(torch.zeros(2, 3), 1 + 2j)
