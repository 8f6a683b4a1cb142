"""Agents in the plane: their paths, where they end, and where they collide."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hdnn.errors import SENSIBLE, OptionError, ShapeError, as_float, quoted, require
from hdnn.plotting.figures import BLACK, BLUE, GREEN, ORANGE, PURPLE, RED, SKY, axes_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = (BLUE, ORANGE, GREEN, RED, SKY, PURPLE)  # of agents, in turns
NUMBERED = 40  # agents, up to which they have their numbers on them
POINT = 0.2  # the size of agents that cannot collide


def agent_paths(
    paths: Tensor, targets: Tensor | None = None, ax: Axes | None = None, *, distance: float = 0.0
) -> Axes:
    """Draw the paths of agents in the plane, with a disc at the end of each.

    Discs are as wide as the distance below which two agents collide, so that those that touch do
    collide. Where two were closer on their way, both places have a black ring.

    Args:
        paths: positions `(steps + 1, N, 2)`, such as `loop(y)[..., :2]` for one start.
        targets: `(N, 2)`, drawn as crosses.
        ax: the Axes to draw into; by default those of a new figure.
        distance: below which two agents collide; 0 if they cannot.

    Returns:
        The Axes; `ax.figure.savefig(path)` writes the picture.

    Raises:
        ShapeError: if the paths are not `(steps + 1, N, 2)`, or the targets not `(N, 2)`.
        OptionError: if the distance is negative.

    Examples:
        >>> import hdnn
        >>> problem = hdnn.control.crossing(steps=20)
        >>> paths = problem.loop(problem.start()).detach()[..., :2]
        >>> ax = hdnn.plotting.agent_paths(paths, distance=problem.collision)
        >>> ax.get_title(), len(ax.lines)
        ('Paths of 12 agents, 12 of which collide', 12)
    """
    if paths.ndim != 3 or paths.shape[-1] != 2 or not paths.numel():
        raise ShapeError(
            f"paths must be (steps + 1, N, 2), places in the plane, but are {tuple(paths.shape)}."
        )
    N = paths.shape[1]
    if targets is not None and targets.shape != (N, 2):
        raise ShapeError(f"targets must be ({N}, 2), but are {tuple(targets.shape)}.")
    wide = as_float(distance)
    if wide is None or not 0 <= wide <= SENSIBLE:
        raise OptionError(f"distance must be finite and not negative, but got {quoted(distance)}.")
    q = paths.detach().cpu().double()
    ax = axes_of(ax, 4.8, 4.8)
    patches = require("matplotlib.patches", extra="plot")
    for i in range(N):
        colour = COLOURS[i % len(COLOURS)]
        ax.plot(*q[:, i].T, color=colour, linewidth=1.2, alpha=0.7)
        if targets is not None:
            ax.plot(*targets[i].cpu(), "+", color=colour, markersize=10, markeredgewidth=1.8)
        end = tuple(q[-1, i].tolist())
        ax.add_patch(patches.Circle(end, (wide or POINT) / 2, color=colour, alpha=0.85, zorder=3))
        if N <= NUMBERED:
            style = {"ha": "center", "va": "center_baseline", "fontsize": 7, "zorder": 4}
            ax.annotate(f"{i}", end, color=ink_on(colour), **style)
    near = _collisions(q, wide)
    for i, step in near.items():
        place = tuple(q[step, i].tolist())
        ring = patches.Circle(place, wide / 2, fill=False, edgecolor=BLACK, linewidth=1.5)
        ax.add_patch(ring)
    ax.set_aspect("equal")
    ax.autoscale_view()
    told = f", {len(near)} of which collide" if near else ""
    ax.set(xlabel="$x$", ylabel="$y$", title=f"Paths of {N} agent{'s' * (N != 1)}{told}")
    return ax


def _collisions(q: Tensor, distance: float) -> dict[int, int]:
    """The step at which each agent first is closer to another one than a distance."""
    found: dict[int, int] = {}
    for step, now in enumerate(q):
        apart = torch.cdist(now, now, compute_mode="donot_use_mm_for_euclid_dist")
        near = (apart.fill_diagonal_(torch.inf) < distance).any(1).nonzero().flatten()
        for i in near.tolist():
            found.setdefault(i, step)
    return found


def ink_on(colour: str) -> str:
    """Black or white, whichever is easier to read on a colour."""
    parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    light = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if (light + 0.05) ** 2 > 0.05 * 1.05 else "#FFFFFF"
