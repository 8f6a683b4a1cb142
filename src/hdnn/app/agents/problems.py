"""The problem that the options of `hdnn control train` describe."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hdnn.app.configs.control import LINKS, WEIGHTS, ControlConfig
from hdnn.base.files import read_json
from hdnn.base.memory import check_memory
from hdnn.control import Cost, LoopProblem, crossing, crowd, load_problem
from hdnn.control.problems import NAME
from hdnn.errors import OptionError, positive_int, quoted

NEIGHBOURS = 2  # that "nearest" links each agent with, at least
CROWD = 5000  # agents: all pairs of them are compared where they start
LARGEST = 2**24  # bytes of a file of links


def build(config: ControlConfig) -> LoopProblem:
    """The problem with the weights of its seed; all that is wrong with it is found here."""
    if config.own:
        return _from_folder(config)
    filled = config.filled()
    _check_size(config, filled["agents"], config.steps)
    cost = Cost(**{name: filled[name] for name in WEIGHTS if filled[name] is not None})
    time: dict[str, Any] = {name: filled[name] for name in ("steps", "horizon")}
    if config.problem == "crowd":
        problem = crowd(filled["agents"], config.seed, cost=cost, **time)
    else:
        links = links_of(filled["links"])
        problem = crossing(links, config.seed, cost=cost, **time)
    cost = problem.cost
    if filled["compare"] == "linked":
        cost = replace(cost, pairs=problem.loop.controller.links)
    return replace(problem, cost=cost, radius=config.radius, collision=config.collision)


def _from_folder(config: ControlConfig) -> LoopProblem:
    """A problem of one's own; where it was trained already, the training goes on from there."""
    folder = Path(config.problem)
    if not (folder / NAME).is_file():
        raise OptionError(
            f"{folder} holds no problem: there is no {NAME}, as LoopProblem.save writes it."
        )
    problem = load_problem(folder)
    size = sum(p.numel() for p in problem.loop.parameters()), problem.start().numel()
    _check_size(config, problem.agents, problem.loop.controller.steps, size)
    return problem


def _check_size(
    config: ControlConfig, agents: int, steps: int, size: tuple[int, int] | None = None
) -> None:
    """Refuse what this machine cannot hold, before anything of it is made.

    The size is how many weights and how many states there are, by default as robots have them.
    """
    names = ("batch", "iterations", "processes")
    batch, *_ = (positive_int(name, getattr(config, name)) for name in names)
    if positive_int("agents", agents) > CROWD:
        raise OptionError(f"a crowd has up to {CROWD} agents, but got {agents}.")
    steps = positive_int("steps", steps)
    weights, states = size or (20 * agents * steps, 8 * agents)
    # Weights, gradients and two moments; states, other ends and gradients of a batch.
    needed = 8 * (4 * weights + 3 * states * steps * batch)
    check_memory(needed, f"{steps} steps of {agents} agents", "steps, agents or starts a batch")


def links_of(given: str) -> Any:
    """Links of a crossing by name, or from a file: pairs, or an object with `links`."""
    if given == "none":
        return None
    if given == "ring":
        return given
    if given == "nearest":
        return nearest(crossing(steps=1).z[:, :2])
    if not given.lower().endswith(".json"):
        known = ", ".join(sorted(LINKS))
        raise OptionError(f"links {quoted(given)} are not known; choose {known} or a FILE.json.")
    found = read_json(Path(given), LARGEST)
    pairs = found.get("links") if isinstance(found, dict) else found
    if not isinstance(pairs, list):
        raise OptionError(f"{given} has no links: it must be a list of pairs, [[0, 1], [1, 2]].")
    return pairs


def nearest(q: Tensor, count: int = NEIGHBOURS) -> list[tuple[int, int]]:
    """Pairs of agents of which one is among the nearest to the other."""
    apart = torch.cdist(q, q).fill_diagonal_(torch.inf)
    order = apart.argsort(dim=1, stable=True)[:, : min(count, len(q) - 1)].tolist()
    return sorted({(min(i, k), max(i, k)) for i, near in enumerate(order) for k in near})
