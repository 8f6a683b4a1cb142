"""Whole trainings for control.py: ours and the authors' algorithm in turns, and how good they are.

The same problem, cost, starts, iterations and rates. Each is tried from fresh starts in the way in
which it was trained: ours by its steps, the authors' by forward Euler.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from typing import Any

import control_trained
import torch
from control_rivals import Dense
from hdnn.control.training import BETAS, factor

from hdnn import control
from hdnn.control import costs

RATE = 0.1
TURNS = 10  # of a training, between which the others go on
BATCHES = (1, 4)  # as the authors train, and as `LoopTraining` does


class Ours:
    """A `LoopTraining` with its defaults but for the batch."""

    def __init__(self, seed: int, iterations: int, batch: int) -> None:
        options = {"iterations": iterations, "batch": batch, "seed": seed, "rate": RATE}
        self.training = control.LoopTraining(control.crossing("ring", seed), **options)

    def go_on(self, until: int) -> None:
        self.training.run(progress=False, until=until)

    def collisions(self, runs: int) -> int:
        return control_trained.collisions(self.training.problem, runs)["collisions"]


class Authors:
    """The authors' algorithm in float32, one of their iterations after the other."""

    def __init__(self, seed: int, iterations: int, batch: int) -> None:
        self.problem, self.seed = control.crossing("ring", seed), seed
        self.iterations, self.batch, self.done = iterations, batch, 0
        odeint = importlib.import_module("torchdiffeq").odeint
        self.net = Dense(self.problem, torch.float32, odeint)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=RATE, betas=BETAS)

    def go_on(self, until: int) -> None:
        while self.done < until:
            for group in self.optimizer.param_groups:
                group["lr"] = RATE * factor(self.done, self.iterations)
            starts = self.problem.starts(self.batch, seed=self.seed, draw=self.done)
            self.optimizer.zero_grad()
            self.net.loss(self.net(*self._parts(starts))).backward()
            self.optimizer.step()
            self.done += 1

    def collisions(self, runs: int) -> int:
        starts = self.problem.starts(runs, seed=control_trained.STARTS, shape="disc")
        with torch.no_grad():
            states = self.net(*self._parts(starts))
        q = states[..., :48].unflatten(-1, (12, 4))
        return int(costs.collisions(q, self.problem.collision).sum())

    def _parts(self, starts: torch.Tensor) -> list[torch.Tensor]:
        return [part.flatten(1) for part in starts.float().split(4, -1)]


def trainings(seeds: int, iterations: int, runs: int) -> list[dict[str, Any]]:
    """Seconds of each training, and how many runs from fresh starts collide afterwards."""
    kinds: dict[str, Callable[[int, int, int], Ours | Authors]] = {"hdnn": Ours}
    if importlib.util.find_spec("torchdiffeq"):
        kinds["authors"] = Authors
    for kind in kinds.values():
        kind(0, iterations, 1).go_on(5)  # compiles kernels, and loads what is loaded lazily
    found = []
    for seed in range(seeds):
        rivals = {
            (name, batch): kind(seed, iterations, batch)
            for batch in BATCHES
            for name, kind in kinds.items()
        }
        seconds = dict.fromkeys(rivals, 0.0)
        for turn in range(TURNS):
            for key, rival in rivals.items():
                start = time.perf_counter()
                rival.go_on(iterations * (turn + 1) // TURNS)
                seconds[key] += time.perf_counter() - start
        for (name, batch), rival in rivals.items():
            row: dict[str, Any] = {"seed": seed, "way": name, "batch": batch, "runs": runs}
            row |= {
                "seconds": seconds[name, batch],
                "against_ours": seconds[name, batch] / seconds["hdnn", batch],
                "collisions": rival.collisions(runs),
            }
            found.append(row)
            print(row, flush=True)
    return found
