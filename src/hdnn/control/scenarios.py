"""Problems to begin with: robots that change places, twelve of them or a crowd."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hdnn.control.controller import Controller
from hdnn.control.links import coloured
from hdnn.control.loop import ClosedLoop
from hdnn.control.objective import Cost
from hdnn.control.plants import robots
from hdnn.control.problems import LoopProblem
from hdnn.errors import (
    OptionError,
    SparsityError,
    int_from,
    positive_float,
    positive_int,
    quoted,
)

SPACING = 2.0  # between the places of a crowd
JITTER = 0.2  # how far places of a crowd lie off the grid, in each coordinate
REACH = 2  # places between robots of a crowd that may meet, at most, also diagonally
SWIRL = 3.0  # seconds for which controllers push their robots to one side at first


def crossing(
    links: Any = None,
    seed: int = 0,
    *,
    steps: int = 100,
    horizon: float = 5.0,
    cost: Cost | None = None,
    engine: str | None = None,
) -> LoopProblem:
    """Twelve robots in two columns that all must pass through the middle to change places.

    Robots of mass 1 and damping 0.2 stand at x = -3 and 3, y = 5, 3, .. -5, and move up or down at
    speed 0.5; a spring 1 pulls each to its target, opposite with respect to the middle.
    Controllers have 4 states and dissipation 12 on their momenta, which start at 3. They start out
    as springs and dampers, slightly different from robot to robot, that push their robot to its
    right for the first 3 seconds.

    Args:
        links: who hears whom, as `Controller` takes it; "ring" for a ring; by default nobody.
        seed: of the weights.
        steps: T, of a horizon.
        horizon: its time.
        cost: what is minimised; by default `Cost()`.
        engine: of the loop, as `ClosedLoop` takes it.

    Returns:
        The problem, with weights as they are before a training.

    Raises:
        SparsityError: if the links are no links of twelve agents.
        ShapeError: if seed or steps are no whole numbers in range.
        StepError: if the horizon is not > 0.
        OptionError: if the cost is none, or the engine is not known.

    Examples:
        >>> from hdnn import control
        >>> problem = control.crossing("ring")
        >>> problem.loop.controller
        Controller(12 agents, 100 steps, 4 states, 2 inputs, 12 links)
    """
    rows = torch.tensor([5.0, 3.0, 1.0, -1.0, -3.0, -5.0], dtype=torch.float64)
    z = torch.zeros(12, 4, dtype=torch.float64)
    z[:6, 0], z[6:, 0], z[:, 1] = -3, 3, torch.cat([rows, rows])
    z[:, 3] = 0.5 * z[:, 1].sign()
    if isinstance(links, str):
        if links != "ring":
            raise SparsityError(
                f'links of the crossing are "ring" or pairs of agents, but got {quoted(links)}.'
            )
        links = ring(z)
    time = positive_int("steps", steps), positive_float("horizon", horizon)
    return _changing_places(z, -z[:, :2], links, seed, *time, _cost(cost), engine)


def ring(z: Tensor) -> list[tuple[int, int]]:
    """A ring around the middle of some places: neighbours in angle are linked."""
    middle = z[:, :2] - z[:, :2].mean(0)
    order = torch.atan2(middle[:, 1], middle[:, 0]).argsort(stable=True).tolist()
    return [(min(i, k), max(i, k)) for i, k in zip(order, order[1:] + order[:1], strict=True)]


def crowd(
    agents: int = 1000,
    seed: int = 0,
    *,
    steps: int = 100,
    horizon: float = 5.0,
    cost: Cost | None = None,
    engine: str | None = None,
) -> LoopProblem:
    """Robots on a jittered grid, each of which changes places with a robot nearby.

    Each robot is linked with the up to eight around it. The barrier of the cost compares it with
    the up to 24 within two places: while these change places, two who were not neighbours may meet.
    What a robot hears, and what it pays for, does not grow with the crowd.

    Args:
        agents: N.
        seed: of the places, of who changes with whom, and of the weights.
        steps: T, of a horizon.
        horizon: its time.
        cost: what is minimised, its pairs aside; by default `Cost()`.
        engine: of the loop, as `ClosedLoop` takes it.

    Returns:
        The problem, with weights as they are before a training.

    Raises:
        ShapeError: if agents, seed or steps are no whole numbers in range.
        StepError: if the horizon is not > 0.
        OptionError: if the cost is none, or the engine is not known.

    Examples:
        >>> from hdnn import control
        >>> problem = control.crowd(100)
        >>> problem.loop.controller
        Controller(100 agents, 100 steps, 4 states, 2 inputs, 342 links)
    """
    N, source = positive_int("agents", agents), _generator(seed)
    wide = math.ceil(N**0.5)
    places = torch.stack([torch.arange(N) % wide, torch.arange(N) // wide], 1).double()
    q = SPACING * (places - (wide - 1) / 2)
    pairs = _near(places, 1)
    q += JITTER * (2 * torch.rand(N, 2, generator=source, dtype=torch.float64) - 1)
    target, free = q.clone(), set(range(N))
    for e in torch.randperm(len(pairs), generator=source).tolist():
        i, k = pairs[e]
        if i in free and k in free:
            target[i], target[k] = q[k], q[i]
            free -= {i, k}
    known = replace(_cost(cost), pairs=coloured(_near(places, REACH)))
    time = positive_int("steps", steps), positive_float("horizon", horizon)
    z = torch.cat([q, torch.zeros_like(q)], 1)
    return _changing_places(z, target, pairs, seed, *time, known, engine)


def _near(places: Tensor, reach: int) -> list[tuple[int, int]]:
    """Pairs that are so many places of the grid apart at most, in each direction."""
    at = {(x, y): i for i, (x, y) in enumerate(places.long().tolist())}
    far = range(-reach, reach + 1)
    ahead = [(dx, dy) for dy in far for dx in far if (dy, dx) > (0, 0)]  # each pair from one end
    around = sorted(ahead, key=lambda way: (way[0] ** 2 + way[1] ** 2, -way[0]))
    found = [(i, at.get((x + dx, y + dy))) for (x, y), i in at.items() for dx, dy in around]
    return [(i, k) for i, k in found if k is not None]


def _changing_places(
    z: Tensor,
    target: Tensor,
    links: Any,
    seed: int,
    steps: int,
    horizon: float,
    cost: Cost,
    engine: str | None,
) -> LoopProblem:
    N, source, h = len(z), _generator(seed), horizon / steps

    def normal(*shape: int) -> Tensor:
        return 0.1 * torch.randn(*shape, generator=source, dtype=torch.float64)

    with torch.random.fork_rng(devices=[]):
        controller = Controller(N, steps, links=links, dissipation=[0.0, 0.0, 12.0, 12.0])
    one = torch.eye(2, dtype=torch.float64)
    with torch.no_grad():
        controller.K.copy_(torch.block_diag(0.5 * one, 2 * one) + normal(N, 4, 4))
        controller.G.copy_(torch.cat([one, 3 * one]) + normal(N, 4, 2))
        controller.b[..., :2].copy_(_sideways(z, target, h * torch.arange(steps)))
        controller.C.copy_(normal(*controller.C.shape))
    loop = ClosedLoop(robots(target), controller, h, engine=engine)
    xi = torch.tensor([0.0, 0.0, 3.0, 3.0])
    return LoopProblem(loop, z, xi, cost)


def _sideways(z: Tensor, target: Tensor, times: Tensor) -> Tensor:
    """Offsets that push each robot around the middle of its way, at first, `(T, N, 2)`."""
    x, y = ((z[:, :2] - target) / 2).T
    across = torch.stack([-y, x], 1) / 3
    push = torch.where(times < SWIRL, -2 * torch.cos(math.pi * times / 6), 0.0)
    return push.view(-1, 1, 1) * across


def _cost(given: Cost | None) -> Cost:
    found = Cost() if given is None else given
    if not isinstance(found, Cost):
        raise OptionError(f"cost must be a Cost, but got {quoted(given)}.")
    return found


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(int_from(0, "seed", seed))
