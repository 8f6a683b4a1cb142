"""Pictures in the plane: decision regions, paths through the layers, orbits, agents, graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
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
    new_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hdnn.heads import Model

AGENT_COLOURS = (BLUE, ORANGE, GREEN, RED, SKY, PURPLE)
NUMBERED = 40  # agents or nodes, up to which they have their numbers on them
CIRCLE = 16  # nodes, up to which they lie on a circle
GREY = "#8C8C8C"


def decision_regions(
    model: Model,
    data: PlanarData,
    ax: Axes | None = None,
    *,
    points: int = 1000,
    grid: int = 300,
) -> Axes:
    """Colour the plane by the class that a model predicts, with test points on it.

    Args:
        model: a `hdnn.Model` of two inputs and two classes.
        data: one of the planar sets of `hdnn.data.planar`.
        ax: the Axes to draw into; by default those of a new figure.
        points: the most test points that are drawn.
        grid: predictions along each side of the plane.

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
    probability = (
        model.predict_proba(plane)[:, 1].reshape(grid, grid).T.cpu().double()
    )
    colours = [colour for colour, _ in CLASSES]
    ax.contourf(
        xs, ys, probability, levels=[-0.5, 0.5, 1.5], colors=colours, alpha=0.25
    )
    if probability.min() < 0.5 < probability.max():
        ax.contour(
            xs, ys, probability, levels=[0.5], colors=BLACK, linewidths=0.8
        )
    x = data.x_test[:points]
    t = data.t_test[:points]
    wrong = model.predict(x.to(parameter)).to(t.device) != t
    for label, (colour, marker) in enumerate(CLASSES):
        _points(
            ax,
            x[t == label],
            color=colour,
            marker=marker,
            label=f"class {label}",
        )
    if bool(wrong.any()):
        label = f"wrong ({int(wrong.sum())} of {len(t)})"
        _points(ax, x[wrong], color=BLACK, marker="x", label=label)
    ax.set(xlim=(left, right), ylim=(low, high), aspect="equal")
    title = f"{data.name.replace('_', ' ').capitalize()}: test points on the predicted classes"
    return finish(ax, 3, xlabel="$x_1$", ylabel="$x_2$", title=title)


def _points(ax: Axes, x: Tensor, **style: Any) -> None:
    ax.plot(*x.cpu().double().T.tolist(), linestyle="", markersize=3, **style)


def trajectories(
    states: Tensor,
    ax: Axes | None = None,
    *,
    features: tuple[int, int] = (0, -1),
    labels: Tensor | None = None,
) -> Axes:
    """Draw the paths `y_0 .. y_N` of samples in the plane of two features.

    Args:
        states: (N+1, B, n), as `net.trajectory(y)` and `model.trajectory(x)` give them.
        ax: the Axes to draw into; by default those of a new figure.
        features: which two are drawn, by default the first and the last.
        labels: 0 or 1 for each sample (B,), for two colours.

    Examples:
        >>> import hdnn, torch
        >>> net = hdnn.H2(features=4, layers=16)
        >>> ax = hdnn.plotting.trajectories(net.trajectory(torch.randn(10, 4)))
        >>> ax.get_title(), len(ax.lines)
        ('States through 16 layers', 10)
    """
    if states.ndim != 3:
        raise ShapeError(
            f"states must be (N+1, B, n), but got {tuple(states.shape)}."
        )
    ax = axes_or_new(ax, 5.2, 4.8)
    n = states.shape[-1]
    a, b = (range(n)[feature] for feature in features)
    paths = states.detach().cpu()
    classes = torch.zeros(paths.shape[1]) if labels is None else labels.cpu()
    for label, (colour, marker) in enumerate(CLASSES):
        x = paths[:, classes == label, a]
        y = paths[:, classes == label, b]
        if x.shape[1]:
            ax.plot(x.tolist(), y.tolist(), color=colour, lw=0.6, alpha=0.5)
            name = "$y_N$" if labels is None else f"$y_N$, class {label}"
            ax.scatter(
                x[-1].tolist(),
                y[-1].tolist(),
                s=14,
                color=colour,
                marker=marker,
                label=name,
            )
    title = f"States through {len(paths) - 1} layers"
    return finish(
        ax, 2, xlabel=f"$y_{{{a + 1}}}$", ylabel=f"$y_{{{b + 1}}}$", title=title
    )


def phase_portrait(
    states: Tensor,
    ax: Axes | None = None,
    *,
    names: Sequence[str] | None = None,
    energy: Callable[[Tensor], Tensor] | None = None,
) -> Axes:
    """Draw orbits in the plane of p and q, with a mark where each starts.

    Args:
        states: (k, B, 2), B orbits of k states each.
        ax: the Axes to draw into; by default those of a new figure.
        names: of the orbits, for the legend.
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
            f"states must be (k, B, 2), B orbits, but got {tuple(states.shape)}."
        )
    ax = axes_or_new(ax, 4.6, 4.8)
    states = states.detach().cpu().double()
    for i, orbit in enumerate(states.unbind(1)):
        name = f"orbit {i + 1}" if names is None else names[i]
        ax.plot(
            *orbit.T.tolist(),
            **STYLES[i % len(STYLES)],
            markevery=[0],
            lw=1.5,
            label=name,
        )
    if energy is not None:
        reach = 1.15 * float(states.abs().max())
        side = torch.linspace(-reach, reach, 121, dtype=torch.float64)
        H = energy(torch.cartesian_prod(side, side)).reshape(121, 121).T
        ax.contour(
            side, side, H, levels=12, colors=BLACK, alpha=0.18, linewidths=0.7
        )
    return finish(
        ax, 1, aspect="equal", xlabel="$p$", ylabel="$q$", title="Orbits"
    )


def agent_paths(
    paths: Tensor,
    targets: Tensor | None = None,
    ax: Axes | None = None,
    *,
    distance: float = 0.0,
) -> Axes:
    """Draw the paths of agents in the plane, with a disc at the end of each.

    Discs are as wide as the distance below which two agents collide, so that those that touch do
    collide. Where an agent first was closer to another on its way, there is a black ring.

    Args:
        paths: positions `(steps + 1, N, 2)`, such as `loop(y)[..., :2]` for one start.
        targets: `(N, 2)`, drawn as crosses.
        ax: the Axes to draw into; by default those of a new figure.
        distance: below which two agents collide; 0 if they cannot.
    """
    if paths.ndim != 3 or paths.shape[-1] != 2:
        raise ShapeError(
            f"paths must be (steps + 1, N, 2), but are {tuple(paths.shape)}."
        )
    ax = axes_or_new(ax, 4.8, 4.8)
    patches = require("matplotlib.patches", extra="plot")
    q = paths.detach().cpu().double()
    apart = torch.cdist(q, q, compute_mode="donot_use_mm_for_euclid_dist")
    apart.diagonal(dim1=1, dim2=2).fill_(torch.inf)
    near = apart.amin(2) < distance  # (steps + 1, N)
    count = q.shape[1]
    for i in range(count):
        colour = AGENT_COLOURS[i % len(AGENT_COLOURS)]
        ax.plot(*q[:, i].T, color=colour, linewidth=1.2, alpha=0.7)
        if targets is not None:
            ax.plot(
                *targets[i].cpu(),
                "+",
                color=colour,
                markersize=10,
                markeredgewidth=1.8,
            )
        end = tuple(q[-1, i].tolist())
        disc = patches.Circle(
            end, (distance or 0.2) / 2, color=colour, alpha=0.85, zorder=3
        )
        ax.add_patch(disc)
        if count <= NUMBERED:
            ax.annotate(
                f"{i}", end, ha="center", va="center", fontsize=7, zorder=4
            )
        if near[:, i].any():
            place = tuple(q[int(near[:, i].int().argmax()), i].tolist())
            ax.add_patch(
                patches.Circle(place, distance / 2, fill=False, edgecolor=BLACK)
            )
    collisions = int(near.any(0).sum())
    ax.set_aspect("equal")
    ax.autoscale_view()
    title = f"Paths of {count} agent{'s' * (count != 1)}"
    title += f", {collisions} of which collide" if collisions else ""
    ax.set(xlabel="$x$", ylabel="$y$", title=title)
    return ax


def graph_picture(
    R: np.ndarray, T: np.ndarray, S: np.ndarray | None, dependency: np.ndarray
) -> Figure:
    """A figure of a graph: its nodes and links, its patterns, and which nodes depend on which.

    Args:
        R: the pattern of the blocks of K, a boolean matrix (M, M).
        T: that of X or J.
        S: the links that may be used; None if there is no such limit.
        dependency: the links that a layer uses, from `hdnn.sparsity`; red where not in S.
    """
    figure = new_figure(12.0, 6.4)
    grid = figure.add_gridspec(2, 4)
    links = R | R.T | T | dependency
    _draw_links(figure.add_subplot(grid[:, :2]), links, R | R.T)
    patterns = (
        ("$R$: blocks of $K$", R, BLUE),
        ("$T$: blocks of $X$ or $J$", T, ORANGE),
        (
            "$S$: links that may be used",
            np.ones_like(R) if S is None else S,
            GREY,
        ),
        (r"$T R^\top R + R^\top R T$: links in use", dependency, GREEN),
    )
    colors = require("matplotlib.colors", extra="plot")
    for number, (title, pattern, colour) in enumerate(patterns):
        ax = figure.add_subplot(grid[number // 2, 2 + number % 2])
        values = pattern.astype(int)
        if S is not None and pattern is dependency:
            values[pattern & ~S] = 2
        palette = colors.ListedColormap(["white", colour, RED])
        ax.imshow(values, cmap=palette, vmin=0, vmax=2)
        ax.set_title(title, fontsize=11)
        if pattern is dependency and S is not None:
            outside = int((pattern & ~S).sum())
            ax.set_xlabel(
                f"{outside} not in $S$: not local"
                if outside
                else "all in $S$: local"
            )
    return figure


def _draw_links(ax: Axes, links: np.ndarray, solid: np.ndarray) -> None:
    """The nodes of a graph and the links between them: solid ones, and others in grey."""
    count = len(links)
    if count <= CIRCLE:
        turns = 2 * np.pi * np.arange(count) / count
        spots = np.stack([np.sin(turns), np.cos(turns)], 1)
    else:
        networkx = require("networkx", extra="graph")
        layout = networkx.spring_layout(
            networkx.from_numpy_array(links), seed=0
        )
        spots = np.array([layout[node] for node in range(count)])
    collections = require("matplotlib.collections", extra="plot")
    for pattern, style in (
        (links & ~solid, {"color": GREY, "lw": 0.6}),
        (solid, {"color": BLUE, "lw": 1.8}),
    ):
        lines = [
            (spots[i], spots[k]) for i, k in np.argwhere(np.triu(pattern, 1))
        ]
        ax.add_collection(collections.LineCollection(lines, **style))
    size = 19 if count <= CIRCLE else 8
    x, y = spots.T
    ax.plot(
        x,
        y,
        "o",
        markersize=size,
        markerfacecolor="white",
        markeredgecolor=BLACK,
    )
    if count <= NUMBERED:
        for i, spot in enumerate(spots):
            ax.annotate(
                f"{i}", tuple(spot), ha="center", va="center", fontsize=size / 2
            )
    ax.set_aspect("equal")
    ax.set_axis_off()
    ax.set_title(f"{count} node{'s' * (count != 1)}")
