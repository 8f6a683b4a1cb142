"""Trained controllers of the crossing for control.py: kept in a folder, and resumed there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hdnn import control
from hdnn.control import costs
from hdnn.control.certificate import balance_of

STOPS = (0.0, 0.25, 0.5, 0.75)
STARTS = 10**6  # the seed of the starts that trained controllers are tried from; no training's
RUNNING = ("state", "effort", "barrier")  # the terms that time adds up


def trained(seed: int, iterations: int, work: Path, *, whole: bool = True) -> control.LoopTraining:
    """A training on a ring, to its end or to three quarters, with copies on the way."""
    folder, steps = work / f"ring-{iterations}-{seed}", [round(s * iterations) for s in STOPS]
    problem = control.crossing("ring", seed)
    options = {"iterations": iterations, "seed": seed}
    training = control.LoopTraining(problem, **options, folder=folder, resume=True)

    def copied(now: control.LoopTraining) -> None:
        if now.done in steps and not (folder / f"at-{now.done}").exists():
            now.problem.save(folder / f"at-{now.done}")

    copied(training)
    training.run(until=iterations if whole else steps[-1], callback=copied)
    return training


def stopped(seed: int, iterations: int, work: Path) -> list[control.LoopProblem]:
    """The controllers at 0, 25, 50 and 75% of a training."""
    folder = work / f"ring-{iterations}-{seed}"
    return [control.load_problem(folder / f"at-{round(s * iterations)}") for s in STOPS]


def collisions(problem: control.LoopProblem, runs: int) -> dict[str, Any]:
    """How many runs from random starts within a disc collide, and how near robots come."""
    hit, nearest = 0, float("inf")
    for part in problem.starts(runs, seed=STARTS, shape="disc").split(50):
        with torch.no_grad():
            trajectory = problem.loop(part)
        hit += int(costs.collisions(trajectory, problem.collision).sum())
        nearest = min(nearest, float(costs.between(trajectory, 2, None).amin()) ** 0.5)
    return {"runs": runs, "collisions": hit, "nearest": nearest}


def growth(terms: dict[str, Tensor], longer: dict[str, Tensor]) -> dict[str, float]:
    """What is added to the running cost when the same loop goes on."""
    one, ten = (float(sum(t[name] for name in RUNNING)) for t in (terms, longer))
    return {"one": one, "ten": ten, "growth": ten / one - 1}


def ten_horizons(problem: control.LoopProblem, runs: int) -> dict[str, Any]:
    """The running cost over ten horizons against one, and collisions over all ten."""
    with torch.no_grad():
        trajectory = problem.loop(problem.starts(runs, seed=STARTS, shape="disc"), 10)
        first = trajectory[: problem.loop.controller.steps + 1]
        found = growth(*(problem.cost.terms(problem.loop, t) for t in (first, trajectory)))
    hit = int(costs.collisions(trajectory, problem.collision).sum())
    return {**found, "runs": runs, "collisions": hit}


def bounded(problem: control.LoopProblem, runs: int, horizons: int) -> dict[str, Any]:
    """The energy over many horizons, against what the certificate says it cannot exceed.

    From its start the energy can rise by the sum of |dK xi + db| when weights change, and by
    nothing else.
    """
    y = problem.starts(runs, seed=STARTS, shape="disc")
    T = problem.loop.controller.steps
    with torch.no_grad():
        trajectory, ends = problem.loop.run(y, horizons * T)
        balance = balance_of(problem.loop.system(), trajectory, ends)
    rises = torch.cat([torch.zeros_like(balance.bounds[:1]), balance.bounds]).cumsum(0)
    ceiling = balance.before[0] + rises
    late = balance.after[T:].diff(dim=0)
    scale = float(balance.before.amax())
    return {
        "holds": bool((balance.after <= ceiling * (1 + 1e-12)).all()),
        "violation": float(balance.violation.amax()),
        "late_rise": float(late.amax()) / scale,
        "start": float(balance.before[0].amax()),
        "largest": max(float(balance.before.amax()), float(balance.after.amax())),
        "ceiling": float(ceiling.amax()),
        "state": float(trajectory.abs().amax()),
        "end": float(balance.after[-1].amax()),
    }
