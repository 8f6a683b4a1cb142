"""The config of `hdnn control train`: a problem, its cost and its training."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

from hdnn.base.config import BaseConfig, option
from hdnn.errors import OptionError, choose

PROBLEMS = ("crossing", "crowd")
COMPARED = ("all", "linked")
LINKS = ("ring", "none", "nearest")
WEIGHTS = ("state", "effort", "barrier", "smoothness", "end", "discount", "distance")
AGENTS = {"crossing": 12, "crowd": 100}
RATE = 0.05  # of a crowd: 1,000 robots cost more at 0.1 halfway than at 0.05
LONGEST = 10.0  # a step of the robots
FASTEST = 10.0  # rate: each weight, of about 1, moves by that in an iteration
# What a problem from a folder has decided.
OWN = ("links", "agents", "steps", "horizon", "radius", "collision", "compare", *WEIGHTS)

_problem, _cost, _training, _run = (
    partial(option, panel=panel) for panel in ("Problem", "Cost", "Training", "Run")
)


@dataclass(frozen=True, kw_only=True)
class ControlConfig(BaseConfig):
    """All that decides the result; what is None is filled in by the problem."""

    kind: ClassVar[str] = "control"

    problem: str = _problem(
        "crossing",
        "crossing (12 robots change places), crowd, or the FOLDER of a problem of one's own, as "
        "LoopProblem.save writes it",
    )
    links: str | None = _problem(
        None,
        "who hears whom: ring (default), none, nearest, or FILE.json with pairs of agents; a "
        "crowd has nearest",
    )
    agents: int | None = _problem(None, "of a crowd (default: 100)")
    steps: int = _problem(100, "of a horizon (default: 100)")
    horizon: float = _problem(5.0, "its time (default: 5)")
    radius: float = _problem(0.5, "how far from their places agents may start (default: 0.5)")
    collision: float = _problem(0.5, "the distance below which agents collide (default: 0.5)")

    state: float | None = _cost(None, "weight of the distance from the targets")
    discount: float | None = _cost(None, "of that distance, a unit of time before the end")
    effort: float | None = _cost(None, "weight of the work of the controllers")
    barrier: float | None = _cost(None, "weight of the price for agents that come close")
    distance: float | None = _cost(None, "below which that is paid")
    compare: str | None = _cost(
        None, "which agents that compares: all (default) or linked ones; in a crowd those nearby"
    )
    smoothness: float | None = _cost(None, "weight of the change of the weights over time")
    end: float | None = _cost(None, "weight of the energy that is left at the end")

    iterations: int = _training(300, "of Adam (default: 300)")
    batch: int = _training(4, "random starts an iteration (default: 4)")
    rate: float = _training(0.1, "the largest rate of Adam (default: 0.1, of a crowd 0.05)")
    seed: int = _training(0, "of the weights and the starts (default: 0)")
    processes: int = _training(
        1, "share the agents out to so many, which hear neighbours only (default: 1)"
    )

    @classmethod
    def of(cls, given: dict[str, Any]) -> Self:
        """The config of the options that were given, checked as far as no problem is needed."""
        problem = _named(given.get("problem", cls.problem))
        usual = {"rate": RATE} if problem == "crowd" else {}
        config = cls(**{**usual, **given, "problem": problem})
        if config.rate > FASTEST:
            raise OptionError(
                f"rate must be at most {FASTEST:g}, by which each weight moves in an iteration, "
                f"but got {config.rate:g}; 0.1 is usual."
            )
        if config.own:
            for name in OWN:
                if given.get(name) is not None:
                    raise OptionError(
                        f"the problem in {config.problem} has its own {name}; leave --{name} out."
                    )
            return config
        if config.compare is not None:
            choose("compare", config.compare, COMPARED)
        if config.steps > 0 and config.horizon / config.steps > LONGEST:
            raise OptionError(
                f"a step would take {config.horizon / config.steps:g}, but robots oscillate once "
                f"in 6.3: steps are at most {LONGEST:g}; give more --steps or a shorter --horizon."
            )
        if config.problem == "crossing":
            if config.agents not in (None, AGENTS["crossing"]):
                raise OptionError(
                    f"a crossing has 12 agents, not {config.agents}; take --problem crowd."
                )
            if config.processes > 1 and config.compare != "linked":
                raise OptionError(
                    "processes hear neighbours only, so that the cost has to compare these alone; "
                    "give --compare linked."
                )
        elif config.links not in (None, "nearest") or config.compare == "all":
            raise OptionError(
                "a crowd has links between neighbours, and compares those nearby; leave --links "
                "and --compare out, or take --problem crossing."
            )
        return config

    @property
    def own(self) -> bool:
        """Whether the problem is one from a folder."""
        return self.problem not in PROBLEMS

    @property
    def title(self) -> str:
        """The name of the problem; of one from a folder, that of the folder."""
        return Path(self.problem).name or self.problem

    def filled(self) -> dict[str, Any]:
        """All options, with what follows from the problem; what its folder says is None."""
        if self.own:
            return {**vars(self), **dict.fromkeys(OWN)}
        crowd = self.problem == "crowd"
        usual = {
            "links": "nearest" if crowd else "ring",
            "agents": AGENTS[self.problem],
            "compare": "nearby" if crowd else "all",
        }
        return {name: usual.get(name) if v is None else v for name, v in vars(self).items()}

    def run_name(self) -> str:
        """The folder of a run, if none is named."""
        if self.own:
            return f"{self.title}-{self.seed}"
        filled = self.filled()
        links = filled["links"] if filled["links"] in LINKS else "links"
        return f"{self.problem}-{links}-{filled['agents']}-{self.seed}"


def _named(given: str) -> str:
    """A problem by its name, or the whole path of its folder, which need not be there any more."""
    if given in PROBLEMS:
        return given
    if os.sep not in given and not os.path.isdir(given):
        try:
            choose("problem", given, PROBLEMS)
        except OptionError as error:
            raise OptionError(f"{error} Or name the folder of a problem of your own.") from None
    return os.path.abspath(given)


@dataclass(frozen=True, kw_only=True)
class ControlFlags:
    """Options that do not change what is trained."""

    runs: int | None = _run(None, "fresh starts to try it from (default: 200, of a crowd fewer)")
    out: str | None = _run(None, "new folder (default: runs/PROBLEM-LINKS-AGENTS-SEED)")
    resume: bool = _run(False, "go on where a run stopped")
    json: bool = _run(False, "print one JSON object")
    quiet: bool = _run(False, "no progress display")
