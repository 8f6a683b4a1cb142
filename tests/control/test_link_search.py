"""Links of closed loops: other links for a problem, and what they are worth."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hdnn import control, sparsity
from hdnn.control.training import BETAS, factor
from hdnn.errors import OptionError, ShapeError, SparsityError, StepError

SHORT = {"iterations": 2, "batch": 2, "samples": 3}


class Load(control.Cost):
    """The first and the last robot carry a load: where its middle is counts, and what they push."""

    def terms(self, loop: control.ClosedLoop, trajectory: Tensor) -> dict[str, Tensor]:
        middle = trajectory[..., [0, 2], :2].sum(-2).square().sum(-1)
        found = super().terms(loop, trajectory)
        return {**found, "state": 10 * loop.step * middle.mean(1).sum()}


def three(steps: int = 20, engine: str | None = None, links: Any = None) -> control.LoopProblem:
    """Three robots, two of which carry a load."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        controller = control.Controller(3, steps, links=links, dissipation=[0.0, 0.0, 12.0, 12.0])
    with torch.no_grad():
        controller.b.fill_(0.1)
    plant = control.robots(torch.zeros(3, 2))
    loop = control.ClosedLoop(plant, controller, 0.2, engine=engine)
    price = Load(state=0.0, barrier=0.0, end=0.0, effort=1.0)
    return control.LoopProblem(loop, torch.zeros(3, 4), cost=price, radius=1.0, collision=0.0)


@pytest.fixture
def problem() -> control.LoopProblem:
    return control.crossing("ring", steps=6)


def test_new_links_change_nothing_before_they_are_trained() -> None:
    problem = control.crossing(steps=6)
    linked = control.with_links(problem, [(0, 1), (3, 7)])
    y = problem.starts(2)
    assert torch.equal(y, linked.starts(2))
    apart = (linked.loop(y) - problem.loop(y)).detach()
    assert float(apart.abs().max()) < 1e-12


def test_links_that_both_have_keep_their_couplings(problem: control.LoopProblem) -> None:
    kept, new = problem.loop.controller.links[4], (0, 11)
    assert new not in problem.loop.controller.links
    found = control.with_links(problem, [kept, new]).loop.controller
    couplings = dict(zip(found.links, found.C, strict=True))
    assert torch.equal(couplings[kept], problem.loop.controller.C[4])
    assert not couplings[new].any()


def test_all_else_is_copied(problem: control.LoopProblem) -> None:
    problem.loop.controller.G.requires_grad_(False)
    copy = control.with_links(problem, problem.loop.controller.links)
    assert not copy.loop.controller.G.requires_grad
    assert (copy.radius, copy.collision, copy.cost) == (0.5, 0.5, problem.cost)
    for name, weight in problem.loop.controller.named_parameters():
        theirs = getattr(copy.loop.controller, name)
        assert torch.equal(theirs, weight)
        assert theirs.data_ptr() != weight.data_ptr()


def test_a_gradient_in_a_mask_is_that_of_its_coupling() -> None:
    """d cost / d mask = <C, d cost / d C>, by the reference: scores come from what trains C."""
    problem = three(steps=3, engine="reference", links=[(0, 1), (1, 2)])
    C = problem.loop.controller.C
    y, start, h = problem.starts(1), C.detach().clone(), 1e-5
    problem.cost(problem.loop, problem.loop(y)).backward()
    assert C.grad is not None
    for e in range(2):
        costs = []
        for mask in (1 + h, 1 - h):
            with torch.no_grad():
                C.copy_(start)
                C[e] *= mask
                costs.append(float(problem.cost(problem.loop, problem.loop(y))))
        slope = (costs[0] - costs[1]) / (2 * h)
        assert slope == pytest.approx(float((C.grad[e] * start[e]).sum()), rel=1e-4)


def test_a_cost_is_that_of_the_trained_copy(problem: control.LoopProblem) -> None:
    before = problem.loop.controller.K.detach().clone()
    cost = control.LinkCost(problem, **SHORT)
    links = ((0, 1), (2, 3))
    found = cost(links)
    assert found == cost(links) == cost.judged(cost.trained(links))
    assert torch.equal(problem.loop.controller.K, before)


def test_a_cost_stays_when_its_problem_is_trained(problem: control.LoopProblem) -> None:
    cost = control.LinkCost(problem, **SHORT)
    found, identity = cost(()), cost.identity
    control.LoopTraining(problem, iterations=1, batch=1).run(progress=False)
    assert (cost(()), cost.identity) == (found, identity)


def test_identities_tell_costs_apart(problem: control.LoopProblem) -> None:
    costs = [
        control.LinkCost(problem, **SHORT),
        control.LinkCost(problem, **SHORT, seed=1),
        control.LinkCost(control.crossing("ring", seed=1, steps=6), **SHORT),
        control.LinkCost(control.crossing("ring", steps=6, cost=control.Cost(end=1)), **SHORT),
    ]
    assert len({cost.identity for cost in costs}) == len(costs)
    assert control.LinkCost(problem, **SHORT).identity == costs[0].identity


def test_identities_tell_plants_and_frozen_weights_apart(problem: control.LoopProblem) -> None:
    one = control.LinkCost(problem, **SHORT).identity
    problem.loop.controller.G.requires_grad_(False)
    two = control.LinkCost(problem, **SHORT).identity
    plant = problem.loop.plant
    given = (plant.A, plant.J, plant.R, plant.g)
    pairs = torch.zeros(1, plant.states, plant.states, dtype=torch.float64)
    found = []
    for links in ([(0, 1)], [(1, 2)]):
        linked = control.Plant(*given, a=plant.a, links=links, couplings=pairs)
        loop = control.ClosedLoop(linked, problem.loop.controller)
        found.append(control.LinkCost(control.LoopProblem(loop, problem.z), **SHORT).identity)
    assert len({one, two, *found}) == 4


class Priced(torch.nn.Module):
    """The cost of a problem as a module, so that weights can be given to it."""

    def __init__(self, problem: control.LoopProblem) -> None:
        super().__init__()
        self.loop, self.cost = problem.loop, problem.cost

    def forward(self, y: Tensor) -> Tensor:
        return self.cost(self.loop, self.loop(y))


def test_scores_are_those_of_couplings_that_are_a_mask_times_what_is_trained() -> None:
    """By Adam on D with C = mask D, written out with the reference."""
    problem, links, mask = three(steps=4, engine="reference"), [(0, 1), (0, 2), (1, 2)], 0.3
    linked = control.with_links(problem, links)
    priced = Priced(linked)
    weights = dict(priced.named_parameters())
    D = torch.zeros_like(weights.pop("loop.controller.C"), requires_grad=True)
    # Adam adds eps to the size of gradients, and those in D are smaller by the mask.
    groups = [{"params": [*weights.values()]}, {"params": [D], "eps": mask * 1e-8}]
    optimizer = torch.optim.Adam(groups, betas=BETAS)
    for k in range(3):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * factor(k, 3)
        optimizer.zero_grad()
        given = {**weights, "loop.controller.C": mask * D}
        torch.func.functional_call(priced, given, (linked.starts(2, draw=k),)).backward()
        optimizer.step()
    cost = control.LinkCost(problem, iterations=3, batch=2, rate=0.05, mask=mask)
    norms = (mask * D.detach()).flatten(1).norm(dim=1)
    assert cost.relaxed(links) == pytest.approx(norms.tolist(), rel=1e-9)


def test_scores_are_in_the_order_of_the_candidates() -> None:
    cost = control.LinkCost(control.crossing(steps=6), **SHORT)
    some = [(2, 3), (0, 11), (5, 1)]
    scores = cost.relaxed(some)
    assert scores == cost.relaxed(some[::-1])[::-1]
    assert min(scores) > 0


def test_links_are_found_where_one_agent_needs_another() -> None:
    cost = control.LinkCost(three(), iterations=25, batch=16, samples=64)
    found = sparsity.choose_links(3, cost, links=1, relaxed=cost.relaxed, rounds=2)
    assert found.links == ((0, 2),)
    assert found.cost < cost(())


def test_bad_input_is_refused(problem: control.LoopProblem) -> None:
    with pytest.raises(SparsityError, match="one is"):
        control.with_links(problem, [(0, 12)])
    with pytest.raises(OptionError, match="problem must be a LoopProblem, but got None"):
        control.with_links(None, [])  # pyright: ignore
    with pytest.raises(OptionError, match="problem must be a LoopProblem, but got None"):
        control.LinkCost(None)  # pyright: ignore
    with pytest.raises(ShapeError, match="iterations must be"):
        control.LinkCost(problem, iterations=0)
    with pytest.raises(ShapeError, match="samples must be"):
        control.LinkCost(problem, samples=0)
    with pytest.raises(OptionError, match="mask must be above 0 and at most 1, but got 0"):
        control.LinkCost(problem, mask=0)
    with pytest.raises(StepError, match="rate must be"):
        control.LinkCost(problem, rate=0.0)


def test_costs_by_another_optimiser_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = control.LinkCost(three(steps=4), iterations=2, batch=2, samples=2)
    before = cost.identity
    monkeypatch.setattr("hdnn.control.candidates.BETAS", (0.9, 0.999))
    assert cost.identity != before
