"""The folder of a run of `hdnn control train`, and what its files must hold.

It has control.json, the options; before, during-30 .. with the weights on the way, each a problem
of its own; and as `hdnn.control.LoopTraining` writes them problem.safetensors,
checkpoint.safetensors and log.jsonl. At the end come pictures, report.html and metrics.json, which
is written last: it says that a run is complete. A folder that `LoopTraining` made alone can be
simulated and drawn too.
"""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from hdnn.app.configs.control import PROBLEMS, ControlConfig
from hdnn.app.runfiles import read_log
from hdnn.app.runfolder import RunFolder
from hdnn.app.runs import write_json
from hdnn.base.config import fits, types_of
from hdnn.base.files import read_json
from hdnn.control import LoopProblem, load_problem
from hdnn.control.problems import NAME
from hdnn.errors import CheckpointError, HDNNError, OptionError, quoted

LARGEST = 2**20  # bytes of a file of options or results
WHEN = ("before", "during", "after", "all")


class FoundFresh(TypedDict):
    """What was found from fresh starts, as `measured.measure` returns it."""

    runs: int
    horizons: int
    without_collision: float
    without_collision_in_all_horizons: float
    nearest: float | None
    cost: float
    running_cost: float
    running_cost_of_all_horizons: float
    growth: float


class FoundCertain(TypedDict):
    """What the certificate of a closed loop says."""

    holds: bool
    summary: str


class ControlMetrics(TypedDict):
    """The entries that the results of a complete run have at least."""

    run: str
    problem: str
    agents: int
    links: int
    parameters: int
    iterations: int
    processes: int
    training_seconds: float
    before: FoundFresh
    after: FoundFresh
    certificate: FoundCertain
    pictures: dict[str, str]


@dataclass(frozen=True)
class Stage:
    """Weights on the way of a training: what they are called, and the folder of their problem."""

    name: str
    folder: Path


@dataclass(frozen=True)
class ControlRun(RunFolder):
    """The folder of one run of `hdnn control train`."""

    report_file = property(lambda self: self.folder / "report.html")
    before = property(lambda self: self.folder / "before")

    @property
    def config_file(self) -> Path:
        """The options of the run."""
        return self.folder / "control.json"

    def problem(self) -> LoopProblem:
        """The problem with its weights as they are now."""
        self.check_there()
        return load_problem(self.folder)

    def check_there(self) -> None:
        """Refuse a folder without a problem."""
        if not self.folder.is_dir():
            raise CheckpointError(f"there is no folder {self.folder}; name one of a run.")
        if not (self.folder / NAME).is_file():
            if self.exists:
                again = f"hdnn control train --resume --out {shlex.quote(str(self.folder))}"
                raise CheckpointError(f"{self.folder} is not complete; go on with it by {again}.")
            raise CheckpointError(
                f"{self.folder} is not the folder of a run; make one by hdnn control train."
            )

    def during(self) -> list[Stage]:
        """The weights that were kept on the way, in their order."""
        numbers = {
            int(number[1]): place
            for place in self.folder.glob("during-*")
            if (number := re.fullmatch(r"during-(\d{1,18})", place.name))
        }
        return [
            Stage(f"after {count} iteration{'s' * (count != 1)}", place)
            for count, place in sorted(numbers.items())
        ]

    def stages(self, when: str = "all", *, trained: bool = False) -> list[Stage]:
        """The weights before, during or after the training; of "all" one stage on the way.

        A run that is `trained` is not complete before all else is written.
        """
        self.check_there()
        over = trained or self.complete
        last = Stage("after training" if over else "as it is now", self.folder)
        before = [Stage("before training", self.before)] if self.before.is_dir() else []
        if when == "after":
            return [last]
        found = before if when == "before" else self.during()
        if when == "all":
            return [*before, *found[:1], last]
        if not found:
            kept = {"before": "from before", "during": "that were kept during"}[when]
            raise CheckpointError(
                f"{self.folder} has no weights {kept} its training; take --when after."
            )
        return found

    def start(self, config: ControlConfig, problem: LoopProblem) -> None:
        """Write the options of a new run, and its weights before the training."""
        problem.save(self.before)
        write_json(self.config_file, config.to_json())

    def config(self) -> ControlConfig:
        """The options that the run was started with."""
        if not self.exists:
            raise CheckpointError(
                f"{self.folder} is not the folder of a run: it has no control.json; make one by "
                "hdnn control train."
            )
        given = read_json(self.config_file, LARGEST)
        try:
            if not isinstance(given, dict) or "kind" not in given:
                raise OptionError("it holds no options.")
            options, known = ControlConfig.without_kind(given), types_of(ControlConfig)
            for name, value in options.items():
                if name not in known:
                    raise OptionError(f"there is no option {quoted(name)}.")
                if not (value is None or fits(value, known[name])):
                    raise OptionError(f"its {name} is {quoted(value)}.")
            return ControlConfig.of(
                {n: v for n, v in options.items() if v != getattr(ControlConfig, n)}
            )
        except HDNNError as error:
            raise CheckpointError(f"{self.config_file} is damaged or was edited: {error}") from None

    def resumed(self, given: dict[str, Any]) -> ControlConfig:
        """The same config; an error if the given options ask for something else."""
        config = self.config()
        known = config.filled()
        for name, new in given.items():
            if name == "problem" and new not in PROBLEMS:
                new = os.path.abspath(new)
            if new not in (known[name], getattr(config, name)):
                was = f"{name} = {known[name]!r}, not {new!r}"
                raise OptionError(
                    f"the run in {self.folder} has {was}; resume it with the options that it was "
                    "started with, or name another folder with --out."
                )
        return config

    def metrics(self) -> dict[str, Any]:
        """The results of a complete run."""
        found = read_json(self.metrics_file, LARGEST)
        if not fits(found, ControlMetrics):
            raise CheckpointError(
                f"{self.metrics_file} is damaged or was edited: an entry is missing or wrong."
            )
        return found

    def log(self) -> list[dict[str, Any]]:
        """One entry an iteration; lines that cannot be read are left out."""
        if not self.log_file.is_file():
            return []
        return read_log(self.log_file, "iteration")[0]
