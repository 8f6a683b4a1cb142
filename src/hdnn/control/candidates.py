"""What links are worth to a closed loop: trainings with some of them, or with all candidates."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from hdnn.control.controller import Controller
from hdnn.control.loop import ClosedLoop
from hdnn.control.problems import LoopProblem, checked
from hdnn.control.training import BETAS, LoopTraining, in_range
from hdnn.errors import OptionError, as_float, positive_int, quoted
from hdnn.training import identity


def with_links(problem: LoopProblem, links: Any) -> LoopProblem:
    """A copy of a problem and its weights whose controllers have other links.

    Couplings of links that both have stay as they are. Those of new links are 0, so that a link
    changes nothing before it is trained.

    Args:
        problem: which stays as it is.
        links: as `Controller` takes them.

    Returns:
        The copy.

    Raises:
        SparsityError: if the links are no links of these agents.
        OptionError: if the problem is no `LoopProblem`.

    Examples:
        >>> from hdnn import control
        >>> problem = control.with_links(control.crossing("ring"), [(0, 1), (0, 11)])
        >>> problem.loop.controller
        Controller(12 agents, 100 steps, 4 states, 2 inputs, 2 links)
    """
    loop, old = checked(problem).loop, problem.loop.controller
    with torch.random.fork_rng(devices=[]):
        new = Controller(
            *(old.agents, old.steps),
            states=old.states,
            inputs=old.inputs,
            links=links,
            J=old.J,
            dissipation=old.R,
            dtype=old.K.dtype,
        )
    couplings = dict(zip(old.links, old.C.detach(), strict=True))
    with torch.no_grad():
        for name in ("K", "b", "G"):
            getattr(new, name).copy_(getattr(old, name))
        for C, link in zip(new.C, new.links, strict=True):
            C.copy_(couplings.get(link, torch.zeros_like(C)))
    for name, weight in old.named_parameters():
        getattr(new, name).requires_grad_(weight.requires_grad)
    return LoopProblem(
        ClosedLoop(loop.plant, new, loop.step, engine=loop.engine),
        *(problem.z, problem.xi, problem.cost),
        radius=problem.radius,
        collision=problem.collision,
    )


class LinkCost:
    """What links cost a problem after a short training, for `hdnn.sparsity.choose_links`.

    Every training begins with the weights of the problem, takes the same starts, and is judged by
    others. So the weights should be trained without links before, or with those that are sure: then
    costs differ by what links are worth, and less by luck.

    Args:
        problem: which stays as it is.
        iterations: of each training.
        batch: starts an iteration.
        rate: the largest rate of Adam; a small one tells links apart that noise would mix up.
        seed: of the starts.
        samples: starts that judge.
        mask: of each candidate in `relaxed`, above 0 and at most 1: about the share of candidates
            that will be links.

    Raises:
        ShapeError: if iterations, batch, seed or samples are no whole numbers in range.
        StepError: if the rate is not > 0.
        OptionError: if the mask is out of range, or the problem is no `LoopProblem`.

    Examples:
        >>> from hdnn import control, sparsity
        >>> problem = control.crossing(steps=10)
        >>> cost = control.LinkCost(problem, iterations=2, batch=2, samples=2)
        >>> options = {"links": 3, "relaxed": cost.relaxed, "rounds": 2}
        >>> found = sparsity.choose_links(problem.agents, cost, **options)
        >>> better = cost.trained(found.links)
        >>> better.loop.controller
        Controller(12 agents, 10 steps, 4 states, 2 inputs, 3 links)
    """

    def __init__(
        self,
        problem: LoopProblem,
        *,
        iterations: int = 40,
        batch: int = 8,
        rate: float = 0.05,
        seed: int = 0,
        samples: int = 64,
        mask: float = 0.2,
    ) -> None:
        self.problem = with_links(problem, checked(problem).loop.controller.links)
        self.options = in_range(iterations, batch, rate, seed)
        self.samples = positive_int("samples", samples)
        number = as_float(mask)
        if number is None or not 0 < number <= 1:
            raise OptionError(f"mask must be above 0 and at most 1, but got {quoted(mask)}.")
        self.mask = number

    @property
    def identity(self) -> str:
        """A digest of all that decides the costs."""
        problem = self.problem
        numbers = [self.options, self.samples, self.mask, problem.radius, problem.collision, BETAS]
        loop = problem.loop
        frozen = [name for name, weight in loop.named_parameters() if not weight.requires_grad]
        about = [*numbers, loop.step, loop.controller.links, loop.plant.links, frozen]
        about.append(repr(problem.cost))
        if not loop.plant.quadratic:
            about.append(loop.plant.activation)
        tensors = identity.digest([problem.z, problem.xi, *loop.state_dict().values()])
        return hashlib.sha256(json.dumps([about, tensors]).encode()).hexdigest()[:16]

    def trained(self, links: Any) -> LoopProblem:
        """A copy of the problem, trained with these links.

        Args:
            links: as `Controller` takes them.

        Returns:
            The copy.

        Raises:
            SparsityError: if the links are no links of these agents.
            TrainingError: if the cost is not finite.
        """
        copy = with_links(self.problem, links)
        LoopTraining(copy, **self.options).run(progress=False)
        return copy

    def __call__(self, links: Iterable[tuple[int, int]]) -> float:
        """The cost after a training with these links, from starts that it did not take.

        Args:
            links: pairs of agents.

        Returns:
            The mean over the samples.
        """
        return self.judged(self.trained(tuple(links)))

    def judged(self, problem: LoopProblem) -> float:
        """The cost of a problem from the starts that judge.

        Args:
            problem: with any weights.

        Returns:
            The mean over the samples.
        """
        draw = self.options["iterations"]  # trainings take those before
        y = problem.starts(self.samples, seed=self.options["seed"], draw=draw)
        with torch.no_grad():
            return float(problem.cost(problem.loop, problem.loop(y)))

    def relaxed(self, candidates: Sequence[tuple[int, int]]) -> list[float]:
        """How strongly each link is used after a training with all of them: the norm of its C.

        All candidates at once would change the loop far more than the few links that are left in
        the end. So each is there to a part only: its coupling is C = mask D, and D is trained.
        What lowers the cost grows first.

        Args:
            candidates: pairs of agents.

        Returns:
            A number a candidate.
        """
        copy = with_links(self.problem, candidates)
        controller = copy.loop.controller
        before = controller.C.detach().clone()

        def masked(_: LoopTraining) -> None:
            """Adam moves D as far as it would move C, and C = mask D moves by that part of it."""
            with torch.no_grad():
                before.lerp_(controller.C, self.mask)
                controller.C.copy_(before)

        LoopTraining(copy, **self.options).run(progress=False, callback=masked)
        norms = controller.C.detach().flatten(1).norm(dim=1).tolist()
        found = dict(zip(controller.links, norms, strict=True))
        return [found[min(i, k), max(i, k)] for i, k in candidates]
