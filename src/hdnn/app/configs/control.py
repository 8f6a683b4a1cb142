"""The config of `hdnn control train`: a problem, its cost and its training."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

from hdnn.base.config import BaseConfig, option
from hdnn.errors import OptionError, choose

PROBLEMS = ("crossing", "crowd")
COMPARED = ("all", "linked")
LINKS = ("ring", "none", "nearest")
WEIGHTS = ("state", "effort", "barrier", "smoothness", "end", "discount", "distance")
AGENTS = {"crossing": 12, "crowd": 100}

_problem, _cost, _training, _run = (
    partial(option, panel=panel) for panel in ("Problem", "Cost", "Training", "Run")
)


@dataclass(frozen=True, kw_only=True)
class ControlConfig(BaseConfig):
    """All that decides the result; what is None is filled in by the problem."""

    kind: ClassVar[str] = "control"

    problem: str = _problem(
        "crossing", "crossing (12 robots change places) or crowd", choices=PROBLEMS
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
        None, "which agents that compares: all (default) or linked ones, which a crowd does"
    )
    smoothness: float | None = _cost(None, "weight of the change of the weights over time")
    end: float | None = _cost(None, "weight of the energy that is left at the end")

    iterations: int = _training(300, "of Adam (default: 300)")
    batch: int = _training(16, "random starts an iteration (default: 16)")
    rate: float = _training(0.1, "the largest rate of Adam (default: 0.1)")
    seed: int = _training(0, "of the weights and the starts (default: 0)")
    processes: int = _training(
        1, "share the agents out to so many, which hear neighbours only (default: 1)"
    )

    @classmethod
    def of(cls, given: dict[str, Any]) -> Self:
        """The config of the options that were given, checked as far as no problem is needed."""
        config = cls(**given)
        config.check_choices()
        if config.compare is not None:
            choose("compare", config.compare, COMPARED)
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
                "a crowd has links between neighbours, and compares these; leave --links and "
                "--compare out, or take --problem crossing."
            )
        return config

    def filled(self) -> dict[str, Any]:
        """All options, with what follows from the problem."""
        crowd = self.problem == "crowd"
        usual = {
            "links": "nearest" if crowd else "ring",
            "agents": AGENTS[self.problem],
            "compare": "linked" if crowd else "all",
        }
        return {name: usual.get(name) if v is None else v for name, v in vars(self).items()}

    def run_name(self) -> str:
        """The folder of a run, if none is named."""
        filled = self.filled()
        links = filled["links"] if filled["links"] in LINKS else "links"
        return f"{self.problem}-{links}-{filled['agents']}-{self.seed}"


@dataclass(frozen=True, kw_only=True)
class ControlFlags:
    """Options that do not change what is trained."""

    runs: int | None = _run(None, "fresh starts to try it from (default: 200, of a crowd fewer)")
    out: str | None = _run(None, "new folder (default: runs/PROBLEM-LINKS-AGENTS-SEED)")
    resume: bool = _run(False, "go on where a run stopped")
    json: bool = _run(False, "print one JSON object")
    quiet: bool = _run(False, "no progress display")
