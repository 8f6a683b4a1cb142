"""Learned flow maps: symplectic for any weights, and honest about their data."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hdnn
from hdnn.dynamics import FlowMap
from hdnn.errors import DriftWarning, HDNNError

DT = 0.5


def made(features=4, layers=6, *, seed=0, **options):
    small = {"rows": 8, "substeps": 1}
    options = {"dt": DT, "dtype": torch.float64, **small, **options}
    generator = torch.Generator().manual_seed(seed)
    flow = FlowMap(features, layers, generator=generator, **options)
    with torch.no_grad():
        flow.scale.copy_(torch.tensor([0.5, 3.0]))
        flow.centre.fill_(0.7)
    return flow


def spring(count, steps, *, dt=DT, damping=0.0, seed=0, times=None):
    """Exact trajectories of masses on springs, with all momenta damped."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randn(count, 2, generator=generator, dtype=torch.float64)
    matrix = torch.tensor([[-damping, -1.0], [1.0, 0.0]], dtype=torch.float64)
    if times is None:
        times = torch.full((steps,), dt, dtype=torch.float64)
    states = [y]
    for step in times:
        states.append(states[-1] @ torch.matrix_exp(matrix * step).mT)
    return torch.stack(states)


@given(
    half=st.integers(1, 5),
    layers=st.integers(1, 9),
    rows=st.integers(1, 9),
    integrator=st.sampled_from(["semi_implicit_euler", "verlet", "yoshida4"]),
    damped=st.booleans(),
    inputs=st.integers(0, 2),
    substeps=st.integers(1, 3),
)
def test_any_map_is_conformally_symplectic_and_can_be_undone(
    half, layers, rows, integrator, damped, inputs, substeps
):
    flow = made(
        2 * half,
        layers,
        rows=rows,
        integrator=integrator,
        damped=damped,
        inputs=inputs,
        substeps=substeps,
    )
    with torch.no_grad():
        for name, p in flow.named_parameters():
            if "net" not in name:
                p.copy_(0.3 * torch.randn(p.shape).double())
    y = torch.randn(2 * half, dtype=torch.float64)
    u = torch.randn(inputs, dtype=torch.float64) if inputs else None
    M = torch.func.jacrev(lambda y: flow(y, u, 0.3))(y)
    J = hdnn.functional.from_X(torch.eye(half, dtype=torch.float64))
    shrinking = math.exp(-flow.damping * 0.3)
    size = M.detach().norm() ** 2
    assert (M.mT @ J @ M - shrinking * J).norm() < 1e-13 * size
    back = flow.inverse(flow(y, u, 0.3), u, 0.3)
    assert torch.allclose(back, y, atol=1e-10)


def test_a_map_learns_a_spring_and_keeps_its_energy():
    y = spring(40, 30)
    flow = made(2, 8)
    history = flow.fit(y, steps=1500)
    assert history.error < 0.02
    assert history.loss[-1] < history.loss[0]
    report = flow.report(y[0], 2000, lambda y: y.square().sum(-1) / 2)
    assert report.drift < 0.05
    assert report.defect < 1e-14
    assert report.volume < 1e-13
    H = flow.energy(y[0])
    exact = y[0].square().sum(-1) / 2
    assert torch.allclose(H - H.mean(), exact - exact.mean(), atol=0.05)
    after = flow.energy(flow.rollout(y[0], 500)[-1])
    assert torch.allclose(after, H, rtol=0.02, atol=0.02)


def test_training_again_gives_the_same_bits():
    weights = []
    for _ in range(2):
        flow = made(2, 3)
        flow.fit(spring(5, 20), steps=20)
        weights.append(flow.state_dict())
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name])


def test_rollout_is_the_map_again_and_again():
    flow = made()
    y = torch.randn(3, 4, dtype=torch.float64)
    states = flow.rollout(y, 6)
    assert torch.allclose(states[2], flow(flow(y)), atol=1e-12)
    assert torch.equal(flow.rollout(y, 6, every=3), states[::3])


def test_a_damped_map_learns_the_damping():
    y = spring(40, 30, damping=0.2)
    flow = made(2, 8, damped=True)
    flow.fit(y, steps=1500)
    assert flow.damping == pytest.approx(0.2, rel=0.1)
    assert not flow.guarantee().holds
    with pytest.raises(HDNNError, match="no energy is conserved"):
        flow.energy(y[0])


def test_a_conservative_map_warns_of_data_that_lose_energy():
    with pytest.warns(DriftWarning, match=r"lose energy.*damping of 0\.[12]"):
        made(2, 8).fit(spring(40, 30, damping=0.2), steps=1000)


def test_a_batch_in_front_of_the_time_is_noticed():
    with pytest.warns(DriftWarning, match="Time must be the first axis"):
        made(2, 8).fit(spring(40, 30).transpose(0, 1), steps=300)


def test_uneven_times_are_noticed_unless_they_are_said():
    times = DT * torch.tensor([0.6, 1.0, 1.4]).double()
    times = times[torch.randint(3, (30,))]
    y = spring(40, 30, times=times)
    with pytest.warns(DriftWarning, match="times between states"):
        made(2, 8).fit(y, steps=1000)
    flow = made(2, 8)
    assert flow.fit(y, dt=times, steps=1500).error < 0.05


def test_inputs_push_the_momenta():
    flow = made(2, 4, inputs=1)
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(20, 30, 1, generator=generator, dtype=torch.float64)
    states = [torch.randn(30, 2, generator=generator, dtype=torch.float64)]
    target = made(2, 4, inputs=1)
    with torch.no_grad():
        target.port.fill_(0.5)
        for k in range(20):
            states.append(target(states[-1], u[k]))
    flow.fit(torch.stack(states), inputs=u, steps=600)
    assert (
        flow.report(states[0], 20, lambda y: y.square().sum(-1)).defect < 1e-13
    )
    push = flow.port * flow.scale[0]
    assert float(push.detach()) == pytest.approx(0.25, rel=0.2)


def test_several_steps_at_once_and_lists_of_trajectories():
    y = spring(6, 30)
    flow = made(2, 4)
    history = flow.fit([y[:, 0], y[:20, 1:]], horizon=4, steps=300)
    assert history.error < 0.5


def test_a_map_survives_a_file(tmp_path):
    flow = made(2, 4, damped=True, inputs=1)
    hdnn.save(flow, tmp_path / "flow.safetensors")
    again = hdnn.load(tmp_path / "flow.safetensors")
    y = torch.randn(3, 2, dtype=torch.float64)
    u = torch.ones(3, 1, dtype=torch.float64)
    assert torch.equal(again(y, u), flow(y, u))


def test_memory_of_a_training_can_be_flat_in_depth():
    stored = made(4, 16)
    flat = made(4, 16, backprop="reversible")
    y = torch.cat([spring(20, 10, seed=k) for k in range(2)], -1)
    y = y[..., [0, 2, 1, 3]]
    stored.fit(y, steps=5)
    flat.fit(y, steps=5)
    for a, b in zip(stored.parameters(), flat.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-9)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: FlowMap(3), "as many momenta as positions"),
        (lambda: FlowMap(4, dt=-1), "dt must be a finite number > 0"),
        (lambda: made(2).fit(torch.ones(1, 2)), "2 or more states"),
        (lambda: made(2).fit(torch.ones(9, 3)), "must be .steps.1"),
        (lambda: made(2).fit(torch.full((9, 2), math.nan)), "NaN"),
        (lambda: made(2).fit(torch.ones(9, 2)), "never change"),
        (lambda: made(2).fit(spring(2, 9), dt=[0.1, 0.2]), "9 of them"),
        (
            lambda: made(2).fit(spring(2, 9), inputs=torch.ones(9, 1)),
            "inputs of this map",
        ),
        (lambda: made(2, inputs=1).fit(spring(2, 9)), "inputs of this map"),
        (lambda: made(2, inputs=1)(torch.ones(2)), "u is missing"),
        (
            lambda: made(2, inputs=1).rollout(torch.ones(2), 9),
            "inputs are missing",
        ),
    ],
)
def test_mistakes_are_one_clear_sentence(call, message):
    with pytest.raises(HDNNError, match=message):
        call()
