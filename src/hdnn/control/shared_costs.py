"""What the agents of one process cost, agent by agent: the bits do not depend on the others."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from hdnn.control import costs, fused_cost
from hdnn.control.controller import Controller
from hdnn.control.loop import ClosedLoop
from hdnn.control.plants import Plant
from hdnn.control.problems import LoopProblem
from hdnn.control.shares import Share


class AgentCosts:
    """Costs of a process's own agents and their gradients: each by itself, then pair by pair.

    Args:
        problem: whose cost.
        share: which agents are here.
        weights: K, b and G of the agents here, which lead; others change them in place.
    """

    def __init__(self, problem: LoopProblem, share: Share, weights: dict[str, Tensor]) -> None:
        self.cost, self.step = problem.cost, problem.loop.step
        self.alone = replace(problem.cost, barrier=0.0, pairs=())
        self.loops = [
            _one_agent(
                problem.loop, agent, {name: weights[name][place] for name in ("K", "b", "G")}
            )
            for place, agent in enumerate(share.own)
        ]
        self.pairs = share.pairs
        self.partners: list[list[int]] = [[] for _ in share.own]
        for i, k in share.pairs:
            if i < len(share.own):
                self.partners[i].append(k)

    def own(self, place: int, trajectory: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The cost of one agent by itself, whose states are `(T + 1, B, n)`.

        Returns:
            Terms in the order of `Cost.terms`, and gradients of its states `y`, of K, b and G.
        """
        found = fused_cost.priced(self.loops[place], self.alone, trajectory.unsqueeze(-2))
        K, b, G = (found.weights[name] for name in ("K", "b", "G"))
        slopes = {"y": found.states.squeeze(-2), "K": K.squeeze(1), "b": b.squeeze(1)}
        terms = torch.tensor([*found.terms.values()], dtype=trajectory.dtype)
        return terms, {**slopes, "G": G.squeeze(0)}

    def near(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The barrier between agents here, whose positions are `(agents, T + 1, B, d)`.

        Returns:
            What each own agent pays, with those that come after it in a pair; and gradients of all
            positions.
        """
        values = positions.new_zeros(len(self.partners))
        if not self.pairs:
            return values, torch.zeros_like(positions)
        for place, others in enumerate(self.partners):
            if others:
                some = positions[[place, *others]]
                values[place] = self._barrier(some, [(0, k + 1) for k in range(len(others))])
        with torch.enable_grad():
            given = positions.detach().requires_grad_()
            (found,) = torch.autograd.grad(self._barrier(given, self.pairs), given)
        return values, found

    def _barrier(self, positions: Tensor, pairs: list[tuple[int, int]]) -> Tensor:
        options = {"distance": self.cost.distance, "dimensions": positions.shape[-1]}
        states = positions.permute(1, 2, 0, 3)
        return self.cost.barrier * costs.barrier(states, step=self.step, pairs=pairs, **options)


def _one_agent(whole: ClosedLoop, agent: int, weights: dict[str, Tensor]) -> ClosedLoop:
    """The closed loop of one agent without its neighbours; the weights are these very numbers."""
    plant, controller = whole.plant, whole.controller
    only = slice(agent, agent + 1)
    with torch.random.fork_rng(devices=[]):
        own = Controller(
            *(1, controller.steps),
            states=controller.states,
            inputs=controller.inputs,
            J=controller.J,
            dissipation=controller.R[only],
        )
    own.K, own.b = (nn.Parameter(weights[name].unsqueeze(1)) for name in ("K", "b"))
    own.G = nn.Parameter(weights["G"].unsqueeze(0))
    A, J, R, g, a = (t[only] for t in (plant.A, plant.J, plant.R, plant.g, plant.a))
    return ClosedLoop(Plant(A, J, R, g, a=a), own, whole.step)
