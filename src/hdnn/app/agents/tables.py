"""States of simulated agents as CSV or JSON, a row for each run, step and agent."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
from torch import Tensor

from hdnn.control import LoopProblem
from hdnn.errors import OptionError, int_from, positive_int

MOST = 20_000_000  # numbers, which take a few hundred megabytes as text
DIGITS = "%.9g"


class States:
    """The states of the plants in all runs, collected piece by piece."""

    def __init__(self, problem: LoopProblem, runs: int, horizons: int) -> None:
        self.problem, self.parts = problem, []
        steps = int_from(1, "horizons", horizons) * problem.loop.controller.steps + 1
        size = positive_int("runs", runs) * steps * problem.agents * problem.loop.plant.states
        if size > MOST:
            raise OptionError(
                f"{size} numbers are too many for one file; take fewer --runs or --horizons."
            )

    def see(self, trajectory: Tensor) -> None:
        """Keep a piece `(steps + 1, runs, N, n)`."""
        states = trajectory[..., : self.problem.loop.plant.states]
        self.parts.append(states.transpose(0, 1).numpy().copy())

    @property
    def names(self) -> list[str]:
        """What the states of an agent are called: position and momentum in the plane, if so."""
        p = self.problem.loop.plant.states
        plane = p == 4 and self.problem.cost.dimensions == 2
        return ["x", "y", "px", "py"] if plane else [f"z{k}" for k in range(p)]

    def content(self, kind: str) -> bytes:
        """The file, of kind csv or json."""
        states, h = np.concatenate(self.parts), self.problem.loop.step
        if kind == "json":
            told: dict[str, Any] = {"step": h, "names": self.names, "states": states.tolist()}
            return json.dumps(told).encode()
        runs, steps, agents, p = states.shape
        grid = np.indices((runs, steps, agents)).reshape(3, -1).T
        rows = np.column_stack([grid[:, :2], grid[:, 1] * h, grid[:, 2], states.reshape(-1, p)])
        written = io.StringIO()
        header = ",".join(["run", "step", "time", "agent", *self.names])
        form = ["%d", "%d", DIGITS, "%d", *[DIGITS] * p]
        np.savetxt(written, rows, fmt=form, delimiter=",", header=header, comments="")
        return written.getvalue().encode()
