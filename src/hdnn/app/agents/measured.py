"""What a closed loop does from fresh random starts: collisions, costs and the energy balance."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hdnn.app.onpage.values import counted
from hdnn.base.memory import check_memory
from hdnn.control import LoopProblem
from hdnn.control.costs import nearest
from hdnn.control.objective import WEIGHTS
from hdnn.errors import MOST, int_from, positive_int

FRESH = MOST  # the number of their draw, which no iteration of a training has
AT_ONCE = 8_000_000  # numbers of a trajectory that are held at once
COPIES = 4  # of such numbers, that are held while costs and balances are computed
RUNNING = ("state", "effort", "barrier")  # the terms of a cost that time adds up
BALANCED = 16  # starts from which the energy balance of every step is computed, at most
RUNS, AGENTS = 200, 2400  # of all runs together: a crowd is tried from fewer starts


def usual_runs(problem: LoopProblem) -> int:
    """How many fresh starts to try a problem from."""
    return max(1, min(RUNS, AGENTS // problem.agents))


def balanced(problem: LoopProblem, runs: int) -> int:
    """From how many of these starts the energy balance is computed."""
    return min(runs, max(1, min(BALANCED, AGENTS // problem.agents)))


def fresh(problem: LoopProblem, runs: int, seed: int = 0, shape: str = "disc") -> Tensor:
    """Random starts within the radius that no training takes."""
    count, seed = positive_int("runs", runs), int_from(0, "seed", seed)
    return problem.starts(count, seed=seed, draw=FRESH, shape=shape)


def check_size(problem: LoopProblem, runs: int, horizons: int, kind: str = "runs") -> None:
    """Refuse more runs, or longer ones, than this machine can hold, before any work."""
    loop, count = problem.loop, positive_int("runs", runs)
    width = problem.start().numel()
    each = (positive_int("horizons", horizons) * loop.controller.steps + 1) * width
    at_once = max(each * balanced(problem, count), min(AT_ONCE, each * count))
    # All starts with what they are drawn from, and what is computed with the states at once.
    needed = 8 * (3 * count * width + COPIES * at_once)
    told = f"{counted(count, kind.removesuffix('s'))} over {counted(horizons, 'horizon')}"
    check_memory(needed, told, f"{kind} or horizons")


def measure(
    problem: LoopProblem,
    runs: int,
    horizons: int,
    seed: int = 0,
    *,
    shape: str = "disc",
    seen: Callable[[Tensor], None] = lambda _: None,
) -> dict[str, Any]:
    """Simulate from fresh starts; `seen` is called with each piece of the trajectories."""
    check_size(problem, runs, horizons)
    loop, T = problem.loop, problem.loop.controller.steps
    starts = fresh(problem, runs, seed, shape)
    steps = positive_int("horizons", horizons) * T
    each = (steps + 1) * starts[0].numel()
    hit, hit_later, near = 0, 0, []
    one: dict[str, float] = dict.fromkeys(WEIGHTS, 0.0)
    many = dict(one)
    for part in starts.split(max(1, AT_ONCE // each)):
        with torch.no_grad():
            trajectory = loop(part, horizons)
            seen(trajectory)
            for sums, states in ((one, trajectory[: T + 1]), (many, trajectory)):
                for name, term in problem.cost.terms(loop, states).items():
                    sums[name] += float(term) * len(part) / runs
        apart = nearest(trajectory, dimensions=problem.cost.dimensions).amin(-1)
        hits = ~(apart >= problem.collision)  # NaN is a collision
        hit += int(hits[: T + 1].any(0).sum())
        hit_later += int(hits.any(0).sum())
        near.append(apart.amin(0))
    certificate = loop.certify(starts[: balanced(problem, runs)], horizons, samples=0)
    closest = float(torch.cat(near).amin())
    running, longer = (sum(sums[name] for name in RUNNING) for sums in (one, many))
    return {
        "runs": runs,
        "horizons": horizons,
        "seed": seed,
        "shape": shape,
        "collision": problem.collision,
        "without_collision": 1 - hit / runs,
        "without_collision_in_all_horizons": 1 - hit_later / runs,
        "nearest": None if math.isinf(closest) else closest,
        "cost": sum(one.values()),
        "terms": one,
        "running_cost": running,
        "running_cost_of_all_horizons": longer,
        "growth": longer / running - 1 if running else 0.0,
        "energy": {
            "violation": certificate.violation,
            "dissipated": certificate.dissipated,
            "bound": certificate.bound,
            "raised": certificate.raised,
            "steps": certificate.steps,
            "starts": certificate.samples,
            "holds": certificate.holds,
        },
    }
