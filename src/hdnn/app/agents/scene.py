"""What a picture of agents shows, in pixels: panels side by side, each with the same robots.

An animation is the same picture at several times; `svg.py` and `gif.py` draw it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hdnn.app.agents.measured import check_size, fresh
from hdnn.app.agents.runs import Stage
from hdnn.app.onpage.values import counted
from hdnn.control import LoopProblem, load_problem
from hdnn.control.costs import nearest
from hdnn.control.objective import rest
from hdnn.errors import OptionError, ShapeError, int_from, positive_int
from hdnn.plotting.agents import COLOURS, NUMBERED, POINT

MOST = 2000  # agents: of more, nothing could be seen
FRAMES = 100  # of an animation, at most
VALUES = 150_000  # places of all agents in all frames, at most: a page of a few megabytes
WIDTH, GAP, TOP, BOTTOM = 320, 16, 46, 42  # of a panel, between two, above and below it
ROW = 16  # the height of another line below


@dataclass(frozen=True, eq=False)
class Panel:
    """Agents of one problem over time, in pixels of the panel.

    Attributes:
        title: which weights.
        told: how near they come, in words.
        collides: whether that is a collision.
        places: `(frames, N, 2)`.
        clashes: which agents are in a collision in a frame, or since the one before it.
        path: all states, for the trails, `(steps + 1, N, 2)`.
        shares: the part of its path that an agent has gone in each frame, `(frames, N)`.
        targets: `(N, 2)`.
    """

    title: str
    told: str
    collides: bool
    places: Tensor
    clashes: Tensor
    path: Tensor
    shares: Tensor
    targets: Tensor


@dataclass(frozen=True)
class Scene:
    """Panels of one size, and how long the agents move."""

    panels: list[Panel]
    height: int  # of a panel
    radius: float  # of an agent
    time: float  # that passes

    @property
    def size(self) -> tuple[int, int]:
        """The whole picture, in pixels."""
        count = len(self.panels)
        below = BOTTOM + ROW * (len(self.notes) - 1)
        return count * WIDTH + (count - 1) * GAP, TOP + self.height + below

    @property
    def numbered(self) -> bool:
        """Whether agents have their numbers on them."""
        return self.panels[0].places.shape[1] <= NUMBERED and self.radius >= 5

    @property
    def collided(self) -> bool:
        """Whether agents collide in a panel."""
        return any(panel.collides for panel in self.panels)

    @property
    def arm(self) -> float:
        """Half of the size of a target's cross."""
        return min(6.0, max(2.0, self.radius))

    @property
    def notes(self) -> list[str]:
        """What is to be seen: a line, or two where one is too long for the picture."""
        rings = ", and have a black ring" if self.collided else ""
        told = ["Crosses are targets.", f"Discs that overlap collide{rings}."]
        return told if rings and len(self.panels) == 1 else [" ".join(told)]

    def left(self, panel: int) -> int:
        """Where a panel begins."""
        return panel * (WIDTH + GAP)


def scene(
    stages: Sequence[Stage],
    *,
    start: int = 0,
    horizons: int = 1,
    seed: int = 0,
    frames: int = FRAMES,
) -> Scene:
    """The agents of each stage from one start: 0 for their places, 1, 2 .. for random ones."""
    problems = [load_problem(stage.folder) for stage in stages]
    check_plane(problems[0], stages[-1].folder)
    number, seed = int_from(0, "start", start), int_from(0, "seed", seed)
    check_size(problems[0], max(1, number), horizons, "random starts")
    paths = []
    for problem in problems:
        y = fresh(problem, number, seed)[-1] if number else problem.start()
        with torch.no_grad():
            paths.append(problem.loop(y, positive_int("horizons", horizons))[..., :2])
    targets = [rest(problem.loop.plant)[:, :2] for problem in problems]
    first = problems[0]
    wide = first.collision or POINT
    points = torch.cat([t.reshape(-1, 2) for t in (*paths, *targets)])
    low, high = points.amin(0) - wide, points.amax(0) + wide
    span = high - low
    scale = WIDTH / float(max(span[0], span[1] / 2))  # at most twice as high as wide
    shift = torch.tensor([(WIDTH - float(span[0]) * scale) / 2, 0.0], dtype=torch.float64)

    def pixels(q: Tensor) -> Tensor:
        return torch.stack([q[..., 0] - low[0], high[1] - q[..., 1]], -1) * scale + shift

    steps = len(paths[0]) - 1
    frames = max(2, min(frames, steps, VALUES // (first.agents * len(stages)))) + 1
    panels = [
        _panel(stage.name, problem, path, pixels(path), pixels(target), frames)
        for stage, problem, path, target in zip(stages, problems, paths, targets, strict=True)
    ]
    time = steps * first.loop.step
    return Scene(panels, round(float(span[1]) * scale), wide / 2 * scale, time)


def check_plane(problem: LoopProblem, folder: Path) -> None:
    """Refuse agents that cannot be drawn."""
    if problem.cost.dimensions != 2:
        raise ShapeError(
            f"agents can be drawn in the plane only, but those of {folder} have positions of "
            f"{counted(problem.cost.dimensions, 'coordinate')}."
        )
    if problem.agents > MOST:
        raise OptionError(f"a picture shows up to {MOST} agents, but there are {problem.agents}.")


def _panel(
    title: str, problem: LoopProblem, path: Tensor, pixels: Tensor, targets: Tensor, frames: int
) -> Panel:
    at = torch.linspace(0, len(path) - 1, frames).round().long()
    apart = nearest(path)
    hit = ~(apart >= problem.collision)  # NaN is a collision
    since = [hit[(int(a) + 1 if k else 0) : int(b) + 1] for k, (a, b) in enumerate(_pairs(at))]
    near, collides = float(apart.amin()), bool(hit.any())
    told = f"{'A' if collides else 'No'} collision; the nearest two are {near:.2f} apart"
    if problem.agents == 1 or not problem.collision:
        told = ""
    moved = (pixels[1:] - pixels[:-1]).norm(dim=-1).cumsum(0)
    gone = torch.cat([torch.zeros_like(moved[:1]), moved])[at]
    return Panel(
        title=title[:1].upper() + title[1:],
        told=told,
        collides=collides,
        places=pixels[at],
        clashes=torch.stack([window.any(0) for window in since]),
        path=pixels,
        shares=gone / moved[-1].clamp(min=1e-9),
        targets=targets,
    )


def _pairs(at: Tensor) -> list[tuple[int, int]]:
    """Each frame's state, after that of the frame before it."""
    states = at.tolist()
    return [*zip([states[0], *states[:-1]], states, strict=True)]


def colour_of(agent: int) -> str:
    """The colour of an agent."""
    return COLOURS[agent % len(COLOURS)]
