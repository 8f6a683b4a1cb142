"""The rivals of closed loops simulate the same problem, and cost what it costs."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from hdnn import control

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def programs():
    """The parts of the program as modules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        names = ("control_rivals", "control_random", "control_trained")
        yield {name: importlib.import_module(name) for name in names}


def apart(rivals: ModuleType, steps: int) -> float:
    """How far forward Euler is from the closed loop at the end."""
    problem = control.crossing("ring", steps=steps)
    y = problem.start()[None]
    with torch.no_grad():
        ends = problem.loop(y)[-1].split(4, -1)
        found = rivals.Dense(problem, torch.float64)(*(part.flatten(1) for part in y.split(4, -1)))
    ours = torch.cat([part.flatten(1) for part in ends], -1)
    return float((found[-1] - ours).abs().max())


def test_forward_euler_goes_to_the_closed_loop(programs):
    errors = [apart(programs["control_rivals"], steps) for steps in (200, 400)]
    assert errors[1] < 0.7 * errors[0] < 0.2


@pytest.mark.parametrize("integrator", ["euler", "torchdiffeq"])
def test_both_ways_of_the_rival_have_one_cost_and_gradient(programs, integrator):
    def plain(field, y, times, method):
        states = [y]
        for t, h in zip(times, times.diff(), strict=False):
            states.append(states[-1] + h * field(t, states[-1]))
        return torch.stack(states)

    if integrator == "torchdiffeq":
        plain = pytest.importorskip("torchdiffeq").odeint
    problem = control.crossing("ring", steps=10)
    found = []
    for way in (None, plain):
        net = programs["control_rivals"].Dense(problem, torch.float64, way)
        loss = net.loss(net(*(part.flatten(1) for part in problem.starts(2).split(4, -1))))
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in net.parameters())])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_the_rival_pays_what_the_problem_costs(programs):
    problem = control.crossing("ring", steps=10)
    y = problem.loop(problem.starts(3)).detach()
    net = programs["control_rivals"].Dense(problem, torch.float64)
    states = torch.cat([part.flatten(2) for part in y.split(4, -1)], -1)
    torch.testing.assert_close(net.loss(states), problem.cost(problem.loop, y))


def test_random_loops_by_euler_go_to_the_closed_loop(programs):
    random = programs["control_random"]
    cases = [random.drawn(k, (0.1, 1.0)) for k in range(5)]
    for case in cases:
        case.loop.step = 1e-4
    ours = torch.cat([case.loop.run(case.y, 20)[0][-1] for case in cases]).detach()
    assert float((random.euler(cases, 20).y - ours).abs().max()) < 1e-5
    assert random.balanced(3, (0.1, 1.0), 1)["violation"] < 1e-13


def test_perceptrons_learn_and_go_on(programs):
    problem = control.crossing("ring", steps=10)
    net = programs["control_rivals"].Perceptrons(problem, hidden=4)
    y = problem.starts(2)[..., :4]
    states, forces = net(y, 2)
    assert states.shape == (21, 2, 12, 4)
    torch.testing.assert_close(states[0], y)
    v = torch.cat([y[0, i] - net.target[i] for i in net.near[3]])
    for k, (W, c) in enumerate(zip(net.W, net.c, strict=True)):
        v = v @ W[3] + c[3, 0]
        v = v if k == 3 else torch.tanh(v)
    torch.testing.assert_close(forces[0, 0, 3], v)
    problem.cost = control.Cost(barrier=0.0)
    before = float(sum(net.terms(*net(y)).values()).detach())
    net.train_all(10, 0.01)
    assert float(sum(net.terms(*net(y)).values()).detach()) < before
