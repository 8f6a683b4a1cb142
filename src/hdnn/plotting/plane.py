"""Pictures in the plane: decision regions, orbits and paths of agents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hdnn.data.planar import PlanarData
from hdnn.errors import ShapeError, require
from hdnn.plotting.curves import (
    BLACK,
    BLUE,
    CLASSES,
    GREEN,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    STYLES,
    axes_or_new,
    finish,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from hdnn.heads import Model

AGENT_COLOURS = (BLUE, ORANGE, GREEN, RED, SKY, PURPLE)
POINTS = 1000  # points of the test set that are drawn
NUMBERED = 40  # up to so many agents, their numbers are shown


def decision_regions(
    model: Model,
    data: PlanarData,
    ax: Axes | None = None,
    *,
    grid: int = 300,
) -> Axes:
    """Colour the plane by predicted class, and draw the test points on it.

    Args:
        model: an `hdnn.Model` with two inputs and two classes.
        data: a planar set of `hdnn.data.planar`.
        ax: the Axes to draw into; by default a new figure.
        grid: the number of predictions along each side of the plane.

    Examples:
        >>> import hdnn
        >>> data = hdnn.data.planar.double_moons(200)
        >>> model = hdnn.Model(hdnn.Augment(2, 4), hdnn.H2(4, 8), hdnn.SigmoidHead(4))
        >>> ax = hdnn.plotting.decision_regions(model, data, grid=60)
        >>> ax.get_title()
        'Double moons: test points on the predicted classes'
    """
    (left, right), (low, high) = data.domain
    ax = axes_or_new(ax, 5.2, 1.1 + 4.2 * (high - low) / (right - left))
    parameter = next(model.parameters())
    xs = torch.linspace(left, right, grid)
    ys = torch.linspace(low, high, grid)
    plane = torch.cartesian_prod(xs, ys).to(parameter)
    # Probabilities, not labels: the boundary between grid points is then smooth.
    chance = model.predict_proba(plane)[:, 1].reshape(grid, grid)
    chance = chance.T.cpu().double()
    colours = [colour for colour, _ in CLASSES]
    ax.contourf(xs, ys, chance, [-0.5, 0.5, 1.5], colors=colours, alpha=0.25)
    if chance.min() < 0.5 < chance.max():
        ax.contour(xs, ys, chance, [0.5], colors=BLACK, linewidths=0.8)
    x = data.x_test[:POINTS].cpu()
    t = data.t_test[:POINTS].cpu()
    for label, (colour, marker) in enumerate(CLASSES):
        points = x[t == label].T
        _points(ax, points, marker, color=colour, label=f"class {label}")
    wrong = model.predict(x.to(parameter)).cpu() != t
    if wrong.any():
        label = f"wrong ({int(wrong.sum())} of {len(t)})"
        _points(ax, x[wrong].T, "x", color=BLACK, label=label)
    ax.set(xlim=(left, right), ylim=(low, high), aspect="equal")
    name = data.name.replace("_", " ").capitalize()
    ax.set_title(f"{name}: test points on the predicted classes")
    return finish(ax, 3, xlabel="$x_1$", ylabel="$x_2$")


def _points(ax: Axes, x: Tensor, marker: str, **style: Any) -> None:
    ax.plot(*x.double(), marker, markersize=3, **style)


def phase_portrait(
    states: Tensor,
    ax: Axes | None = None,
    *,
    names: Sequence[str] | None = None,
    energy: Callable[[Tensor], Tensor] | None = None,
) -> Axes:
    """Draw orbits in the plane of p and q, with a mark at each start.

    Args:
        states: the states (k, B, 2) of B orbits of k states each.
        ax: the Axes to draw into; by default a new figure.
        names: the names of the orbits, for the legend.
        energy: a function of states `(*batch, 2)`, whose level lines are added.

    Examples:
        >>> import hdnn, torch
        >>> net = hdnn.H2(features=2, layers=50)
        >>> states = net.trajectory(torch.tensor([[1.0, 0.0], [2.0, 0.0]]))
        >>> ax = hdnn.plotting.phase_portrait(states, names=["inner", "outer"])
        >>> ax.get_legend_handles_labels()[1]
        ['inner', 'outer']
    """
    if states.ndim != 3 or states.shape[-1] != 2:
        raise ShapeError(
            "states must have shape (k, B, 2), for B orbits of k states, but got "
            f"{tuple(states.shape)}."
        )
    ax = axes_or_new(ax, 4.6, 4.8)
    states = states.detach().cpu().double()
    for i, orbit in enumerate(states.unbind(1)):
        name = f"orbit {i + 1}" if names is None else names[i]
        style = STYLES[i % len(STYLES)]
        ax.plot(*orbit.T, **style, markevery=[0], lw=1.5, label=name)
    if energy is not None:
        reach = 1.15 * float(states.abs().max())
        side = torch.linspace(-reach, reach, 121, dtype=torch.float64)
        H = energy(torch.cartesian_prod(side, side)).reshape(121, 121).T
        ax.contour(side, side, H, 12, colors=BLACK, linewidths=0.7, alpha=0.18)
    ax.set(aspect="equal", title="Orbits")
    return finish(ax, 1, xlabel="$p$", ylabel="$q$")


def agent_paths(
    paths: Tensor,
    targets: Tensor | None = None,
    ax: Axes | None = None,
    *,
    distance: float = 0.0,
) -> Axes:
    """Draw the paths of agents in the plane, with a disc at the end of each.

    The width of a disc is the distance below which two agents collide, so agents with overlapping
    discs have collided. A black ring marks the first place where an agent collided on its way.

    Args:
        paths: positions `(steps + 1, N, 2)`, such as `loop(y)[..., :2]` for one start.
        targets: the targets `(N, 2)`, drawn as crosses.
        ax: the Axes to draw into; by default a new figure.
        distance: the distance below which two agents collide; 0 for no collisions.
    """
    if paths.ndim != 3 or paths.shape[-1] != 2:
        raise ShapeError(
            f"paths must have shape (steps + 1, N, 2), but got {tuple(paths.shape)}."
        )
    ax = axes_or_new(ax, 4.8, 4.8)
    circle = require("matplotlib.patches", extra="plot").Circle
    q = paths.detach().cpu().double()
    apart = torch.cdist(q, q, compute_mode="donot_use_mm_for_euclid_dist")
    apart.diagonal(dim1=1, dim2=2).fill_(torch.inf)
    near = apart.amin(2) < distance  # (steps + 1, N)
    count = q.shape[1]
    radius = (distance or 0.2) / 2
    for i, path in enumerate(q.unbind(1)):
        colour = AGENT_COLOURS[i % len(AGENT_COLOURS)]
        ax.plot(*path.T, color=colour, linewidth=1.2, alpha=0.7)
        if targets is not None:
            ax.plot(*targets[i].cpu(), "P", color=colour, markersize=8)
        end = tuple(path[-1].tolist())
        ax.add_patch(circle(end, radius, color=colour, alpha=0.85, zorder=3))
        if count <= NUMBERED:
            ax.annotate(f"{i}", end, ha="center", va="center", fontsize=7)
        if near[:, i].any():
            first = int(near[:, i].int().argmax())
            ring = circle(path[first].tolist(), radius, fill=False)
            ax.add_patch(ring)
    collisions = int(near.any(0).sum())
    title = f"Paths of {count} agent{'s' * (count != 1)}"
    if collisions:
        title += f", {collisions} of which collide"
    ax.set(xlabel="$x$", ylabel="$y$", title=title, aspect="equal")
    ax.autoscale_view()
    return ax
