"""Problems of control: where agents start, what they cost, how they are kept."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from closed_loops import random_loop
from hdnn import control
from hdnn.base import tensorfile
from hdnn.control import costs
from hdnn.control.objective import rest
from hdnn.control.shares import shared_out
from hdnn.errors import (
    CheckpointError,
    DataError,
    OptionError,
    ShapeError,
    SparsityError,
    StepError,
)


def small(**options: object) -> control.LoopProblem:
    """Two robots that change places in ten steps."""
    z = torch.tensor([[-1.0, 0.0, 0.0, 0.5], [1.0, 0.0, 0.0, -0.5]])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        controller = control.Controller(2, 10, links=[(0, 1)], dissipation=[0.0, 0, 5, 5])
    loop = control.ClosedLoop(control.robots(-z[:, :2]), controller, 0.1)
    return control.LoopProblem(loop, z, **options)  # pyright: ignore


def test_the_crossing_is_the_problem_of_the_paper():
    problem = control.crossing("ring")
    q, target = problem.z[:, :2], rest(problem.loop.plant)
    assert sorted(q.tolist()) == sorted(
        [float(x), float(y)] for x in (-3, 3) for y in range(-5, 6, 2)
    )
    assert problem.z[:, 2].tolist() == [0.0] * 12
    assert torch.equal(problem.z[:, 3], 0.5 * q[:, 1].sign())
    assert torch.equal(target, torch.cat([-q, 0 * q], 1))
    assert problem.start()[:, 4:].tolist() == [[0.0, 0.0, 3.0, 3.0]] * 12
    assert problem.loop.controller.R.tolist() == [[0.0, 0.0, 12.0, 12.0]] * 12
    assert problem.loop.step * problem.loop.controller.steps == pytest.approx(5.0)
    degrees = torch.tensor(problem.loop.controller.links).flatten().bincount()
    assert degrees.tolist() == [2] * 12


def test_weights_follow_from_the_seed_and_the_global_random_state_is_left_alone():
    before = torch.random.get_rng_state()
    one, same, other = (control.crossing("ring", seed) for seed in (1, 1, 2))
    for a, b, c in zip(*(p.loop.controller.parameters() for p in (one, same, other)), strict=True):
        assert torch.equal(a, b)
        assert a.shape[0] == 100 or not torch.equal(a, c)
    assert torch.equal(torch.random.get_rng_state(), before)


@given(st.integers(1, 40), st.integers(0, 9))
@settings(max_examples=20)
def test_robots_of_a_crowd_change_places_with_those_they_hear(agents: int, seed: int):
    problem = control.crowd(agents, seed, steps=3)
    q, target = problem.z[:, :2], rest(problem.loop.plant)[:, :2]
    partner = torch.cdist(target, q).argmin(1).tolist()
    assert torch.allclose(q[partner], target, rtol=0, atol=1e-12)
    links = {*problem.loop.controller.links}
    assert {(min(i, k), max(i, k)) for i, k in enumerate(partner) if i != k} <= links
    pairs = {*(problem.cost.pairs or ())}
    wide = math.ceil(agents**0.5)
    apart = {(i, k): max(abs(i % wide - k % wide), abs(i // wide - k // wide)) for i, k in pairs}
    assert {pair for pair, places in apart.items() if places == 1} == links
    assert {*apart.values()} <= {1, 2}
    assert len(pairs) <= 12 * agents
    assert not costs.collisions(problem.starts(5, seed=seed)[None], problem.collision).any()


def test_agents_that_a_cost_names_are_neighbours_of_processes():
    problem = control.crowd(9, steps=5)
    pairs, links = {*(problem.cost.pairs or ())}, {*problem.loop.controller.links}
    assert (0, 8) in pairs - links
    plan = shared_out(problem, 9)
    assert {(i, k) for i, near in enumerate(plan.graph.used) for k in near if i < k} == pairs
    alone = dataclasses.replace(problem, cost=control.Cost())
    with pytest.raises(SparsityError, match="the cost compares agents 0 and 2, which no link"):
        shared_out(alone, 9)


def test_starts_lie_within_the_radius_and_are_those_of_their_seed_and_number():
    problem = control.crossing()
    square = problem.starts(500, seed=3, draw=7)
    off = square[..., :2] - problem.z[:, :2]
    assert torch.equal(square[..., 2:], problem.start()[..., 2:].expand(500, 12, 6))
    assert 0.49 < float(off.abs().amax()) <= 0.5
    assert abs(float(off.mean())) < 0.02
    disc = problem.starts(500, seed=3, shape="disc")[..., :2] - problem.z[:, :2]
    assert 0.49 < float(disc.norm(dim=-1).amax()) <= 0.5
    assert float((disc.norm(dim=-1) < 0.25).double().mean()) == pytest.approx(0.25, abs=0.05)
    assert torch.equal(problem.starts(500, seed=3, draw=7), square)
    assert not torch.equal(problem.starts(500, seed=3, draw=8), square)
    assert not torch.equal(problem.starts(500, seed=4, draw=7), square)
    assert not torch.equal(square[:, 0, 0] + 3, square[:, 6, 0] - 3)


def test_starts_in_collision_are_drawn_again():
    problem = dataclasses.replace(small(), collision=1.8, radius=0.4)
    y = problem.starts(200)
    free = small(collision=0.0, radius=0.4).starts(200)
    assert costs.collisions(free[None], 1.8).any()
    assert not costs.collisions(y[None], 1.8).any()
    kept = ~costs.collisions(free[None], 1.8)
    assert torch.equal(y[kept], free[kept])
    with pytest.raises(DataError, match="agents 0 and 1 start in a collision"):
        small(collision=2.1)
    problem.z, problem.radius = 0.5 * problem.z, 0.0
    with pytest.raises(DataError, match="however often they are drawn"):
        problem.starts(1)


@pytest.mark.parametrize("at", [0.0, 1e8])
def test_collisions_are_those_of_the_problem_as_it_is_now(at: float):
    z = torch.zeros(40, 4, dtype=torch.float64)
    z[:, 0] = 100 * torch.arange(40)
    z[1, 0] = 2
    loop = control.ClosedLoop(control.robots(z[:, :2]), control.Controller(40, 2))
    problem = control.LoopProblem(loop, z, radius=0.0)
    problem.starts(1)
    problem.z = z + at
    problem.radius, problem.collision = 0.4, 1.8
    assert not costs.collisions(problem.starts(200)[None], 1.8).any()


def test_a_cost_is_the_weighted_sum_of_its_terms():
    loop, normal = random_loop(0, 3, 1.0, 0.1, T=4)
    trajectory = loop(normal(2, 3, 7))
    cost = control.Cost(state=2, effort=3, barrier=4, smoothness=5, end=6, discount=0.9)
    h, z = loop.step, trajectory[..., :3]
    terms = cost.terms(loop, trajectory)
    target = rest(loop.plant)
    expected = {
        "state": 2 * costs.tracking(z, target, step=h, discount=0.9),
        "effort": 3 * costs.effort(loop.inputs(trajectory), step=h),
        "barrier": 4 * costs.barrier(trajectory, step=h, distance=1.2),
        "smoothness": 5 * costs.smoothness(loop.controller),
        "end": 6 * loop.energy(trajectory[-1], 3).mean(),
    }
    assert terms.keys() == expected.keys()
    for name, term in terms.items():
        assert torch.allclose(term, expected[name], rtol=1e-13), name
    assert torch.allclose(cost(loop, trajectory), sum(expected.values(), torch.tensor(0.0)))
    none = control.Cost(**dict.fromkeys(("state", "effort", "barrier", "smoothness", "end"), 0))
    assert float(none(loop, trajectory)) == 0


def test_what_comes_after_the_horizon_counts_in_full():
    problem = small(
        cost=control.Cost(discount=0.5, **dict.fromkeys(("barrier", "effort", "end"), 0))
    )
    trajectory = problem.loop(problem.start()[None], 3)
    later = trajectory[11:, ..., :4] - rest(problem.loop.plant)
    first, all_three = (problem.cost(problem.loop, t) for t in (trajectory[:11], trajectory))
    assert torch.allclose(all_three - first, 0.1 * later.square().sum())


def test_inputs_of_any_batch_are_the_reference():
    loop, normal = random_loop(4, 3, 1.0, 0.1, T=4)
    trajectory = loop(normal(2, 2, 3, 7), 2).detach()
    found, c = loop.inputs(trajectory), loop.controller
    assert found.shape == (8, 2, 2, 3, 2)
    for t in (0, 3, 7):
        for i in range(3):
            K, b = c.K[min(t, 3), i], c.b[min(t, 3), i]
            slope = K.T @ torch.tanh(K @ trajectory[t, 1, 0, i, 3:] + b)
            assert torch.allclose(found[t, 1, 0, i], -c.G[i].T @ slope, rtol=1e-12)
    assert torch.equal(loop.inputs(trajectory[:, 1, 0]), found[:, 1, 0])


def test_the_rest_is_where_the_energy_is_smallest():
    loop, normal = random_loop(1, 2, 1.0, 0.1)
    target = rest(loop.plant)
    least = float(loop.plant.energy(target))
    assert all(float(loop.plant.energy(target + 0.1 * normal(2, 3))) > least for _ in range(20))
    grid = control.oscillators([(0, 1), (1, 2)])
    assert rest(grid).tolist() == [[0.0] * grid.states] * 3


def test_a_problem_is_read_back_as_it_was_written(tmp_path: Path):
    loop, normal = random_loop(2, 4, 1.0, 0.1)
    cost = control.Cost(effort=0.3, pairs=[(0, 1), (2, 3)], dimensions=1)
    z = torch.arange(12.0).reshape(4, 3)
    problem = control.LoopProblem(loop, z, normal(4, 4), cost, radius=0.2, collision=0.0)
    file = problem.save(tmp_path / "new" / "folder")
    again = control.load_problem(tmp_path / "new" / "folder")
    assert file.name == "problem.safetensors"
    assert again.cost == problem.cost
    assert (again.radius, again.collision, again.loop.step) == (0.2, 0.0, loop.step)
    assert again.loop.plant.links == loop.plant.links
    assert again.loop.controller.links == loop.controller.links
    for (name, a), (other, b) in zip(
        loop.state_dict().items(), again.loop.state_dict().items(), strict=True
    ):
        assert name == other
        assert torch.equal(a, b)
    assert torch.equal(again.starts(3), problem.starts(3))


def test_the_engine_and_what_is_frozen_are_kept(tmp_path: Path):
    problem = control.crossing(steps=2, engine="reference")
    problem.loop.controller.G.requires_grad_(False)
    problem.save(tmp_path)
    loop = control.load_problem(tmp_path).loop
    assert loop.engine == "reference"
    frozen = [name for name, weight in loop.named_parameters() if not weight.requires_grad]
    assert frozen == ["controller.G"]


def test_files_of_earlier_versions_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    packed = tensorfile.packed

    def earlier(tensors: dict[str, torch.Tensor], key: str, about: dict[str, object]) -> bytes:
        later = ("engine", "frozen")
        return packed(tensors, key, {n: part for n, part in about.items() if n not in later})

    monkeypatch.setattr(tensorfile, "packed", earlier)
    small().save(tmp_path)
    assert torch.equal(control.load_problem(tmp_path).start(), small().start())


def test_a_cost_that_a_file_cannot_hold_is_not_written(tmp_path: Path):
    class Dearer(control.Cost):
        pass

    with pytest.raises(OptionError, match="whose cost is a Dearer cannot be kept in a file"):
        small(cost=Dearer()).save(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_bad_file_is_one_sentence(tmp_path: Path):
    with pytest.raises(CheckpointError, match="does not exist"):
        control.load_problem(tmp_path)
    file = small().save(tmp_path)
    good = file.read_bytes()
    for at in (len(good) // 2, len(good) - 3):
        file.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        with pytest.raises(CheckpointError, match="damaged"):
            control.load_problem(tmp_path)
    file.write_bytes(good[:100])
    with pytest.raises(CheckpointError, match="truncated, damaged or of another kind"):
        control.load_problem(tmp_path)
    file.write_bytes(b"")
    with pytest.raises(CheckpointError, match="truncated, damaged or of another kind"):
        control.load_problem(tmp_path)
    with pytest.raises(CheckpointError, match="cannot make the folder"):
        small().save(file / "below")
    with pytest.raises(CheckpointError, match=r"cannot make the folder .*null byte"):
        small().save("a\0b")
    with pytest.raises(CheckpointError, match=r"cannot make the folder .*null byte"):
        control.LoopTraining(small(), folder="a\0b")
    with pytest.raises(CheckpointError, match="a path must be a string"):
        control.LoopTraining(small(), folder=3)  # pyright: ignore[reportArgumentType]


def test_bad_problems_are_refused_in_a_sentence():
    problem = small()
    with pytest.raises(ShapeError, match=r"z must be \(2, 4\), a row an agent, but is \(4,\)"):
        dataclasses.replace(problem, z=torch.zeros(4))
    with pytest.raises(ShapeError, match="xi must be a number"):
        dataclasses.replace(problem, xi=torch.zeros(3))
    with pytest.raises(ShapeError, match="z has NaN or infinite entries"):
        dataclasses.replace(problem, z=torch.full((2, 4), torch.nan))
    with pytest.raises(ShapeError, match=r"pairs of the cost must be of the agents 0 .. 1"):
        dataclasses.replace(problem, cost=control.Cost(pairs=[(0, 2)]))
    with pytest.raises(ShapeError, match="5 of them are no position"):
        dataclasses.replace(problem, cost=control.Cost(dimensions=5))
    with pytest.raises(OptionError, match="radius must be finite and not negative"):
        dataclasses.replace(problem, radius=-1.0)
    with pytest.raises(OptionError, match="shape 'round' is not known"):
        problem.starts(1, shape="round")
    with pytest.raises(SparsityError, match=r"links must be pairs of two of the agents 0 .. 11"):
        control.crossing([(0, 12)])
    with pytest.raises(StepError, match="horizon must be finite and > 0"):
        control.crossing(horizon=0.0)
    with pytest.raises(ShapeError, match="agents must be a whole number >= 1"):
        control.crowd(0)
    with pytest.raises(SparsityError, match="\"ring\" or pairs of agents, but got 'star'"):
        control.crossing("star")


@pytest.mark.parametrize("name", ["z", "xi"])
@pytest.mark.parametrize("given", ["a", [[1.0], [1.0, 2.0]], None, 1j, object()])
def test_starts_that_are_no_numbers_are_refused_in_a_sentence(name: str, given: object):
    with pytest.raises(ShapeError, match=f"{name} must be"):
        dataclasses.replace(small(), **{name: given})  # pyright: ignore


@pytest.mark.parametrize("given", [0, 5, "x", lambda loop, y: y])
def test_what_is_no_cost_is_refused_in_a_sentence(given: control.Cost):
    for problem in (small, control.crossing, control.crowd):
        with pytest.raises(OptionError, match="cost must be a Cost, but got"):
            problem(cost=given)
    with pytest.raises(OptionError, match="cost must be a Cost, but got None"):
        small(cost=None)
    with pytest.raises(OptionError, match="loop must be a ClosedLoop, but got None"):
        dataclasses.replace(small(), loop=None)  # pyright: ignore


def test_a_crowd_keeps_the_class_of_its_cost():
    class Dearer(control.Cost):
        pass

    assert type(control.crowd(4, steps=2, cost=Dearer()).cost) is Dearer


def test_bad_costs_are_refused_in_a_sentence():
    with pytest.raises(OptionError, match="the weight effort must be finite and not negative"):
        control.Cost(effort=-1)
    with pytest.raises(OptionError, match="discount must be above 0 and at most 1"):
        control.Cost(discount=0)
    with pytest.raises(StepError, match="distance must be finite and > 0"):
        control.Cost(distance=0)
    with pytest.raises(ShapeError, match="pairs must be pairs of agents, but one is 3"):
        control.Cost(pairs=[3])  # pyright: ignore
    with pytest.raises(ShapeError, match="pairs must be pairs of agents, but got 5"):
        control.Cost(pairs=5)  # pyright: ignore
    with pytest.raises(OptionError, match="a cost is made of fields by name, but got 5"):
        control.Cost.from_dict(5)  # pyright: ignore
    with pytest.raises(ShapeError, match=r"pairs must be pairs of two agents, but one is \(1, 1\)"):
        control.Cost(pairs=[(1, 1)])
    with pytest.raises(OptionError, match="a cost has no 'speed'"):
        control.Cost.from_dict({"speed": 1})
    cost = control.Cost(pairs=[(0, 1)])
    assert control.Cost.from_dict(json.loads(json.dumps(cost.to_dict()))) == cost
