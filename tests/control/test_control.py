"""Closed loops: exact balance of energy, gradients, costs, problems, trainings."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import hdnn
from hdnn import control, io
from hdnn.control import kernel
from hdnn.errors import DataError, OptionError, ShapeError

seeds = st.integers(0, 10_000)


def random_loop(
    seed: int, agents: int = 3, step: float = 0.2, scale: float = 1.0
):
    """Agents with random matrices and links, their states, and a source of numbers."""
    source = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source, dtype=torch.float64)

    links = [(i, i + 1) for i in range(agents - 1)]
    heat = normal(agents, 3, 3)
    skew = normal(agents, 3, 3)
    plant = control.Plant(
        normal(agents, 4, 3),
        skew - skew.mT,
        heat @ heat.mT,
        normal(agents, 3, 2),
        a=normal(agents, 4),
        links=links,
        couplings=normal(len(links), 3, 3),
    )
    controller = control.Controller(
        agents, 3, links=links, dissipation=normal(4).square()
    )
    with torch.no_grad():
        for weight in controller.parameters():
            weight.copy_(scale * normal(*weight.shape))
    return (
        control.ClosedLoop(plant, controller, step),
        normal(2, agents, 7),
        normal,
    )


@settings(max_examples=15, deadline=None)
@given(seeds, st.integers(1, 4), st.floats(0.001, 1.0), st.floats(0.01, 10.0))
def test_the_balance_is_exact_for_any_weights_and_any_step(
    seed, agents, step, scale
):
    loop, y, _ = random_loop(seed, agents, step, scale)
    balance = loop.balance(y, horizons=2)
    assert float(balance.violation.max()) < 1e-13
    assert float(balance.lost.min()) >= 0
    assert bool((balance.jumps <= balance.bounds * (1 + 1e-12) + 1e-12).all())


def test_states_do_not_depend_on_the_samples_beside_them():
    loop, _, normal = random_loop(6)
    y = normal(40, 3, 7)
    many = loop(y).detach()
    for s in (0, 17, 39):
        torch.testing.assert_close(many[:, s], loop(y[s]).detach())


@settings(max_examples=6, deadline=None)
@given(seeds)
def test_the_kernel_has_the_states_and_gradients_of_the_definition(seed):
    pytest.importorskip("numba")
    loop, y, normal = random_loop(seed)
    forces = normal(3, 2, 3, 2)
    y.requires_grad_()
    forces.requires_grad_()
    leaves = [y, forces, *loop.parameters()]
    weights = normal(4, 2, 3, 7)
    outcomes = []
    for engine in ("reference", "fused"):
        loop.engine = engine
        trajectory = loop(y, forces=forces)
        gradients = torch.autograd.grad((trajectory * weights).sum(), leaves)
        outcomes.append([trajectory.detach(), *gradients])
    for want, got in zip(*outcomes, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


ONE_HORIZON = """
from hdnn import control
problem = control.crossing(steps=4, engine="fused")
print(problem.loop(problem.start()).square().sum().item())
"""


def test_damaged_files_of_compiled_kernels_are_written_anew(tmp_path: Path):
    pytest.importorskip("numba")
    variables = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}

    def output() -> str:
        command = [sys.executable, "-c", ONE_HORIZON]
        return subprocess.run(
            command, env=variables, capture_output=True, text=True, check=True
        ).stdout

    expected = output()
    for ending, share in ((".nbi", 0.0), (".nbc", 0.5)):
        files = [f for f in tmp_path.rglob("*") if f.suffix == ending]
        assert files
        for file in files:
            content = file.read_bytes()
            file.write_bytes(content[: int(share * len(content))])
        assert output() == expected


def test_chords_of_the_kernel_are_exact():
    pytest.importorskip("numba")
    import mpmath

    with mpmath.workdps(50):
        for u, d in [
            (0.3, 1e-9),
            (0.3, 2e-4),
            (-0.7, 0.15),
            (2.0, -0.9),
            (-3.0, 5.0),
            (30.0, 1.5),
        ]:
            v = u + d
            start, end = mpmath.mpf(u), mpmath.mpf(v)
            mean = mpmath.log(mpmath.cosh(end) / mpmath.cosh(start)) / (
                end - start
            )
            slopes = (mpmath.tanh(end) - mean, mean - mpmath.tanh(start))
            exact = (mean, *(slope / (end - start) for slope in slopes))
            for value, want in zip(kernel._chord(u, v), exact, strict=True):
                assert abs(value - float(want)) < 2e-12


def test_steps_are_of_order_two_in_pairs():
    loop, y, _ = random_loop(0)
    controller = loop.controller

    def end(steps: int) -> Tensor:
        finer = control.Controller(
            3, steps, links=controller.links, dissipation=controller.R
        )
        with torch.no_grad():
            finer.K.copy_(controller.K[:1])
            finer.b.copy_(controller.b[:1])
            finer.G.copy_(controller.G)
            finer.C.copy_(controller.C)
        return control.ClosedLoop(loop.plant, finer, 0.2 / steps)(y)[
            -1
        ].detach()

    exact = end(256)
    errors = [float((end(steps) - exact).norm()) for steps in (16, 32)]
    assert math.log2(errors[0] / errors[1]) == pytest.approx(2, abs=0.1)


def test_forces_supply_just_the_energy_that_the_balance_counts():
    loop, y, normal = random_loop(1)
    balance = loop.balance(y, forces=normal(3, 2, 3, 2))
    assert float(balance.supplied.abs().max()) > 0
    assert float(balance.violation.max()) < 1e-13


def test_outputs_of_robots_stay_below_the_gain():
    plant = control.robots(torch.zeros(2, 2), damping=0.25)
    loop = control.ClosedLoop(plant, control.Controller(2, steps=1), step=0.1)
    assert loop.gain == pytest.approx(4)
    steps = 400
    forces = (
        torch.sin(0.1 * torch.arange(steps))
        .view(-1, 1, 1, 1)
        .expand(steps, 1, 2, 2)
    )
    start = loop.start(torch.zeros(1, 2, 4))
    balance = loop.balance(start, horizons=steps, forces=forces.double())
    assert float(balance.outputs.norm()) <= 4 * float(forces.norm())


def test_a_plant_that_is_not_damped_has_no_gain():
    plant = control.robots(torch.zeros(1, 2), damping=0.0)
    assert (
        control.ClosedLoop(plant, control.Controller(1, steps=2)).gain
        == math.inf
    )


@pytest.mark.parametrize("make", [control.oscillators, control.pendulums])
def test_coupled_masses_keep_their_balance(make):
    plant = make([(0, 1), (1, 2), (0, 2)], damping=0.0)
    loop = control.ClosedLoop(
        plant, control.Controller(3, steps=20, inputs=1), step=0.05
    )
    z = torch.zeros(1, 3, plant.states)
    z[..., 0] = torch.tensor([0.5, -1.0, 2.0])
    balance = loop.balance(loop.start(z))
    assert float(balance.violation.max()) < 1e-13
    torch.testing.assert_close(
        balance.after[-1], balance.before[0]
    )  # nothing is damped


def test_a_coupling_that_is_given_from_the_other_end_is_the_same():
    loop, y, _ = random_loop(2, agents=2)
    plant = loop.plant
    C = plant.couplings
    matrices = (plant.A, plant.J, plant.R, plant.g)
    turned = control.Plant(
        *matrices, a=plant.a, links=[(1, 0)], couplings=-C.mT
    )
    other = control.ClosedLoop(turned, loop.controller, loop.step)
    torch.testing.assert_close(other(y), loop(y))


def test_energy_falls_after_the_horizon():
    loop, y, _ = random_loop(3)
    trajectory = loop(y, horizons=5).detach()
    t = torch.arange(len(trajectory))
    energy = loop.energy(trajectory, t)[2:]
    assert bool((energy.diff(dim=0) <= 1e-12).all())


def test_the_certificate_holds_and_says_so_in_five_lines():
    loop, y, _ = random_loop(4)
    certificate = loop.certify(y, horizons=2)
    assert certificate.holds
    assert certificate.smallest_norm > 0
    lines = str(certificate).splitlines()
    assert [line[:14].rstrip() for line in lines] == [
        "energy balance",
        "energy lost",
        "new weights",
        "gain",
        "gradients",
    ]
    assert {line[14:16] for line in lines} == {"  "}


def test_a_certificate_of_values_that_are_not_finite_does_not_hold():
    loop, y, _ = random_loop(4)
    certificate = loop.certify(y)
    broken = type(certificate)(
        **{**certificate.__dict__, "violation": math.nan}
    )
    assert not broken.holds
    assert "NOT" in str(broken)


def test_a_loop_is_saved_and_loaded(tmp_path: Path):
    loop, y, _ = random_loop(5)
    io.save(loop, tmp_path / "loop.safetensors")
    again = io.load(tmp_path / "loop.safetensors")
    assert torch.equal(again(y), loop(y))


# Costs and problems


def test_terms_of_the_cost_are_the_sums_of_their_definition():
    problem = control.crossing("ring", steps=5)
    loop = problem.loop
    trajectory = loop(problem.starts(3)).detach()
    cost = control.Cost(barrier=1, state=1, effort=1, smoothness=1, end=1)
    terms = {
        name: term.detach()
        for name, term in cost.terms(loop, trajectory).items()
    }
    h = loop.step
    z = trajectory[..., :4]
    rest = torch.cat([-problem.z[:, :2], torch.zeros(12, 2)], 1)
    state = effort = barrier = 0.0
    for j in range(6):
        for s in range(3):
            state += (
                h
                * 0.95 ** (h * (5 - j))
                * float((z[j, s] - rest).square().sum())
            )
            for i in range(12):
                for k in range(i):
                    d2 = float((z[j, s, i, :2] - z[j, s, k, :2]).square().sum())
                    if d2 < 1.44:
                        barrier += h * (1 / (d2 + 1e-3) - 1 / (1.44 + 1e-3))
    for u in loop.inputs(trajectory).detach():
        effort += h * float(u.square().sum())
    assert float(terms["state"]) == pytest.approx(state / 3)
    assert float(terms["effort"]) == pytest.approx(effort / 3)
    assert float(terms["barrier"]) == pytest.approx(barrier / 3)
    assert float(terms["end"]) == pytest.approx(
        float(loop.energy(trajectory[-1], 4).mean().detach())
    )


def test_nan_is_a_collision_and_an_agent_alone_never_collides():
    apart = torch.tensor([[0.0, 0.0], [3.0, 0.0]]).repeat(2, 2, 1, 1)
    assert control.collisions(apart).tolist() == [False, False]
    apart[1, 1, 0, 0] = math.nan
    assert control.collisions(apart).tolist() == [False, True]
    assert control.collisions(torch.zeros(2, 1, 1, 2)).tolist() == [False]


def test_starts_are_drawn_within_the_radius_and_without_collisions():
    problem = control.crossing()
    for disc in (False, True):
        y = problem.starts(50, seed=3, disc=disc)
        assert not bool(control.collisions(y[None], problem.collision).any())
        moved = y[..., :2] - problem.z[:, :2]
        size = moved.norm(dim=-1) if disc else moved.abs()
        assert float(size.max()) <= problem.radius
        assert torch.equal(y, problem.starts(50, seed=3, disc=disc))
    assert not torch.equal(problem.starts(1, draw=0), problem.starts(1, draw=1))


@pytest.mark.parametrize(
    ("mistake", "error"),
    [
        (lambda: control.Controller(2, steps=3, links=[(0, 2)]), OptionError),
        (lambda: control.Controller(2, steps=3, states=3), ShapeError),
        (lambda: control.Controller(2, steps=3, dissipation=-1.0), OptionError),
        (lambda: control.Plant(torch.eye(2)[None], torch.eye(2)[None], *[torch.zeros(1, 2, 2)] * 2),
         OptionError),
        (lambda: control.robots(torch.zeros(2, 2), damping=-1.0), OptionError),
        (lambda: control.Cost(barrier=-1.0), OptionError),
        (lambda: control.ClosedLoop(control.robots(torch.zeros(2, 2)), control.Controller(3, 5)),
         ShapeError),
        (lambda: control.LoopProblem(control.crossing().loop, torch.zeros(12, 4)), DataError),
        (lambda: control.crossing().loop(torch.zeros(12, 4)), ShapeError),
    ],
)  # fmt: skip
def test_mistakes_are_refused(mistake, error):
    with pytest.raises(error):
        mistake()


# Trainings


def test_a_training_takes_any_function_as_its_cost():
    problem = control.crossing(
        steps=4, cost=lambda loop, path: path[-1, ..., :2].square().mean()
    )
    history = control.LoopTraining(problem, iterations=15, batch=2).run(
        progress=False
    )
    assert history["cost"][-1] < history["cost"][0]


@pytest.mark.parametrize(
    ("cost", "reason"),
    [
        (lambda loop, path: 3.0, "returned 3.0"),
        (lambda loop, path: path[-1, 0, 0], r"a tensor \(8,\) with requires_grad=True"),
        (lambda loop, path: path.detach().sum(), r"a tensor \(\) with requires_grad=False"),
        (lambda loop, path: path.mean() / 0, "the cost is -?(inf|nan) in iteration 1"),
        (lambda loop, path: (path - path).sum().sqrt(), "the cost is 0 .* gradient of size nan"),
    ],
)  # fmt: skip
def test_a_cost_without_a_finite_number_and_gradient_is_refused(cost, reason):
    training = control.LoopTraining(control.crossing(steps=2, cost=cost))
    before = training.loop.controller.K.detach().clone()
    with pytest.raises(hdnn.HDNNError, match=reason):
        training.run(progress=False)
    assert torch.equal(training.loop.controller.K, before)


def test_a_training_by_a_function_is_resumed_by_another_of_its_name(
    tmp_path: Path,
):
    def training(**options) -> control.LoopTraining:
        def spread(loop: control.ClosedLoop, trajectory: Tensor) -> Tensor:
            return trajectory[-1, ..., :2].square().mean()

        problem = control.crossing(steps=2, cost=spread)
        return control.LoopTraining(
            problem, iterations=3, folder=tmp_path / "run", **options
        )

    first = training()
    first.run(progress=False, until=2)
    assert training(resume=True).done == 2


def test_a_platoon_in_one_dimension_learns_a_cost_of_its_own():
    plant = control.robots(-2.0 * torch.arange(4)[:, None], damping=0.5)
    z = torch.stack([-torch.arange(4.0), torch.zeros(4)], 1)
    controller = control.Controller(
        4, steps=20, inputs=1, links=[(0, 1), (1, 2), (2, 3)], dissipation=2.0
    )
    loop = control.ClosedLoop(plant, controller, step=0.1)

    def uneven(loop: control.ClosedLoop, trajectory: Tensor) -> Tensor:
        gaps = trajectory[..., :-1, 0] - trajectory[..., 1:, 0]
        return loop.step * (gaps - 2).square().sum((0, -1)).mean()

    problem = control.LoopProblem(
        loop, z, cost=uneven, radius=0.2, collision=0.3
    )
    starts = problem.starts(50)
    momenta = starts[..., 1]
    assert torch.equal(momenta, torch.zeros_like(momenta))
    assert float((starts[..., 0] - z[:, 0]).abs().max()) <= 0.2
    training = control.LoopTraining(problem, iterations=20)
    history = training.run(progress=False)
    assert history["cost"][-1] < history["cost"][0]
    trajectory = loop(training.starts(19)).detach()
    gaps = trajectory[..., :-1, 0] - trajectory[..., 1:, 0]
    assert history["distance"][-1] == pytest.approx(float(gaps.min()), abs=0.05)
    assert training.certify().holds


def test_a_training_that_is_resumed_has_the_bits_of_one_that_was_not(
    tmp_path: Path,
):
    def training(**options) -> control.LoopTraining:
        return control.LoopTraining(
            control.crossing("ring", steps=4), iterations=6, **options
        )

    straight = training()
    straight.run(progress=False)
    training(folder=tmp_path / "run").run(progress=False, until=3)
    resumed = training(folder=tmp_path / "run", resume=True)
    assert resumed.done == 3
    resumed.run(progress=False)
    assert resumed.history == straight.history
    for ours, theirs in zip(
        resumed.loop.parameters(), straight.loop.parameters(), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_another_training_is_not_resumed(tmp_path: Path):
    problem = control.crossing(steps=4)
    control.LoopTraining(problem, iterations=2, folder=tmp_path / "run").run(
        progress=False
    )
    with pytest.raises(hdnn.HDNNError):
        control.LoopTraining(
            control.crossing(steps=4), iterations=2, folder=tmp_path / "run"
        )
    other = control.crossing(seed=1, steps=4)
    with pytest.raises(hdnn.HDNNError):
        control.LoopTraining(
            other, iterations=2, folder=tmp_path / "run", resume=True
        )


def test_a_loop_runs_without_numba():
    program = (
        "import sys; sys.modules['numba'] = None\n"
        "from hdnn import control\n"
        "problem = control.crossing(steps=2)\n"
        "print(problem.loop(problem.start()).shape)"
    )
    command = [sys.executable, "-c", program]
    printed = subprocess.run(
        command, capture_output=True, text=True, check=True
    ).stdout
    assert "[3, 12, 8]" in printed
