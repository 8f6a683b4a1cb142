"""One picture of a graph: its nodes and links, beside the patterns R, T, S and who needs whom.

Where the nodes lie is computed here and needs no other library: on a circle if they are few, else
so that distances in the picture are those along the links, as well as a plane allows. The same
graph gives the same picture.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from hdnn.app.graph_tasks import distances, groups
from hdnn.distributed.graph.file import edges_of
from hdnn.distributed.graph.graph import Graph, Links, alone, transposed, union
from hdnn.errors import SparsityError, require
from hdnn.plotting.styles import BLACK, BLUE, GREEN, ORANGE, RED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREY = "#8C8C8C"
CIRCLE = 16  # nodes, up to which they lie on a circle
NAMED = 100  # nodes, up to which they have their numbers on them
MOST = 1000  # nodes: of more, nothing could be seen
ROUNDS = 300  # of improving the places of the nodes, at the most
PAIRS = 5 * 10**7  # of nodes that are looked at meanwhile
DRAWN = 5000  # lines of one kind: more of them take long and hide each other


def graph_picture(R: Links, T: Links | None = None, S: Links | None = None) -> Figure:
    """A figure of a graph, whether the locality condition holds or not."""
    nodes = len(R)
    if nodes > MOST:
        raise SparsityError(f"a picture shows up to {MOST} nodes, but there are {nodes}.")
    T = alone(nodes) if T is None else T
    needed = Graph(R, T).dependency()
    figure = require("matplotlib.figure", extra="plot").Figure(
        figsize=(12.0, 6.4), dpi=150, layout="constrained"
    )
    require("matplotlib.backends.backend_agg", extra="plot").FigureCanvasAgg(figure)
    layout = figure.get_layout_engine()
    assert layout is not None
    layout.set(w_pad=0.1, h_pad=0.1)
    grid = figure.add_gridspec(2, 4)
    draw_links(figure.add_subplot(grid[:, :2]), R, T, S)
    panels = [figure.add_subplot(grid[row, 2 + column]) for row in (0, 1) for column in (0, 1)]
    draw_pattern(panels[0], R, BLUE, "$R$: blocks of $K$")
    draw_pattern(panels[1], T, ORANGE, "$T$: blocks of $X$ or $J$")
    draw_pattern(panels[2], S, GREY, "$S$: who may need whom")
    title = r"$T R^\top R + R^\top R T$: who needs whom"
    draw_pattern(panels[3], needed, GREEN, title, within=S)
    return figure


# Nodes and links


def draw_links(ax: Axes, R: Links, T: Links, S: Links | None) -> None:
    """The nodes, and the links of R, T and S between them."""
    needed = Graph(R, T).dependency()
    R = union(R, transposed(R))
    used = union(R, T)
    whole = used if S is None else union(used, S)
    spots, nodes = places(whole), len(R)
    thin, named = 1.0 if nodes <= 40 else 0.6, nodes <= NAMED
    spare = [] if S is None else [e for e in edges_of(S) if e[1] not in used[e[0]]]
    beyond = [] if S is None else [e for e in edges_of(needed) if e[1] not in S[e[0]]]
    styles: list[tuple[list[list[int]], str, dict[str, Any]]] = [
        (edges_of(R), "$R$", {"color": BLUE, "lw": 2.2 * thin, "zorder": 3}),
        (edges_of(T), "$T$", {"color": ORANGE, "lw": 6 * thin, "alpha": 0.55, "zorder": 2}),
        (spare, "$S$ alone", {"color": GREY, "lw": thin, "zorder": 1}),
        (
            beyond,
            "needed, not in $S$",
            {"color": RED, "lw": 1.8 * thin, "linestyle": ":", "zorder": 4},
        ),
    ]
    collections = require("matplotlib.collections", extra="plot")
    for edges, name, style in styles:
        if not edges:
            continue
        lines = [(spots[i], spots[k]) for i, k in edges[:: -(-len(edges) // DRAWN)]]
        cap = {} if "linestyle" in style else {"capstyle": "round"}
        ax.add_collection(collections.LineCollection(lines, **style, **cap))
        style = {k: v for k, v in style.items() if k != "zorder"}
        ax.plot([], [], label=f"{name}: {len(edges)} link{'s' * (len(edges) != 1)}", **style)
    size = 19 if nodes <= CIRCLE else max(2.5, min(14, (105 if named else 60) / math.sqrt(nodes)))
    ax.plot(
        *spots.T,
        linestyle="",
        marker="o",
        markersize=size,
        markerfacecolor="white" if named else BLACK,
        markeredgecolor=BLACK,
        markeredgewidth=0.07 * size if named else 0.0,
        zorder=5,
    )
    if named:
        for i, (x, y) in enumerate(spots):
            ax.annotate(
                f"{i}",
                (x, y),
                ha="center",
                va="center_baseline",
                fontsize=0.55 * size,
                zorder=6,
            )
    low, high = spots.min(0), spots.max(0)
    middle, half = (low + high) / 2, max(float((high - low).max()) / 2, 0.5) * 1.1
    ax.set(aspect="equal", xlim=middle[0] + np.array([-half, half]))
    ax.set_ylim(middle[1] - half, middle[1] + half)
    ax.set_axis_off()
    ax.set_title(f"{nodes} node{'s' * (nodes != 1)}")
    if ax.get_legend_handles_labels()[0]:
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=4, frameon=False)


def places(links: Links) -> np.ndarray:
    """Where each node lies, (M, 2)."""
    if len(links) <= CIRCLE:
        turns = 2 * math.pi * np.arange(len(links)) / len(links)
        return np.stack([np.sin(turns), np.cos(turns)], 1)
    # Groups that nothing joins are laid side by side, the largest first.
    found = np.zeros((len(links), 2))
    parts = sorted(groups(links), key=lambda group: (-len(group), group))
    boxes = []
    for group in parts:
        place = {node: k for k, node in enumerate(group)}
        inside = tuple(tuple(place[k] for k in links[i]) for i in group)
        spots = _spread(inside)
        spots -= spots.min(0)
        found[group] = spots
        boxes.append(spots.max(0) + 1.5)
    wide = max(math.sqrt(sum(w * h for w, h in boxes)), max(w for w, _ in boxes)) + 1e-9
    x = y = tall = 0.0
    for group, (w, h) in zip(parts, boxes, strict=True):
        if x + w > wide and x > 0:
            x, y, tall = 0.0, y - tall, 0.0
        found[group] += [x, y - (h - 1.5)]
        x, tall = x + w, max(tall, h)
    return found


def _spread(links: Links) -> np.ndarray:
    """Places of connected nodes whose distances are those along the links, in squares.

    The stress sum (|x_i - x_k| - d_ik)^2 / d_ik^2 is made smaller by majorisation, from a start by
    the distances to four nodes far apart.
    """
    M = len(links)
    if M == 1:
        return np.zeros((1, 2))
    d = np.array([distances(links, i) for i in range(M)], dtype=float)
    weight = 1 / np.maximum(d, 1) ** 2
    np.fill_diagonal(weight, 0)
    inverse = np.linalg.inv(np.diag(weight.sum(1)) - weight + 1 / M)
    spots, towards = _start(d), -weight * d
    for _ in range(min(ROUNDS, max(20, PAIRS // M**2))):
        x, y = spots.T
        pull = towards / np.maximum(np.hypot(x[:, None] - x, y[:, None] - y), 1e-9)
        np.fill_diagonal(pull, 0)
        np.fill_diagonal(pull, -pull.sum(1))
        moved = inverse @ (pull @ spots)
        step = float(np.abs(moved - spots).max())
        spots = moved
        if step < 1e-4:
            break
    return _upright(spots, links)


def _start(d: np.ndarray) -> np.ndarray:
    """Two differences of distances to nodes that are far apart, the second across the first."""
    a = int(d[0].argmax())
    b = int(d[a].argmax())
    x = d[a] - d[b]
    c = int((np.minimum(d[a], d[b]) - np.abs(x)).argmax())
    e = int((d[c] - np.abs(x)).argmax())
    # A little of the node's number: nodes that are alike in all distances must not fall together.
    shift = 1e-2 * np.sin(np.arange(len(d)) * np.array([[1.0], [2.0]]))
    return np.stack([x, d[c] - d[e]], 1) / 2 + shift.T


def _upright(spots: np.ndarray, links: Links) -> np.ndarray:
    """Turned so that most links are level or plumb and numbers grow rightwards and downwards."""
    i, k = np.array(edges_of(links)).T
    along = (spots[i] - spots[k]) @ np.array([1, 1j])
    turn = np.exp(-1j * np.angle((along**4).sum()) / 4)
    z = (spots - spots.mean(0)) @ np.array([1, 1j]) * turn
    number = np.arange(len(z)) - (len(z) - 1) / 2
    ways = [w * quarter for w in (z, z.conj()) for quarter in (1, 1j, -1, -1j)]
    best = max(ways, key=lambda w: round(float(number @ w.real - 2 * number @ w.imag), 6))
    return np.stack([best.real, best.imag], 1)


# Patterns


def draw_pattern(
    ax: Axes, links: Links | None, colour: str, title: str, within: Links | None = None
) -> None:
    """A pattern as filled blocks, paler on the diagonal; red what is not `within` another."""
    ax.set_title(title, fontsize=11)
    if links is None:
        ax.text(0.5, 0.5, "not given", ha="center", va="center", transform=ax.transAxes)
        ax.set(xticks=[], yticks=[], aspect="equal")
        return
    M, outside = len(links), 0
    shown = np.zeros((M, M))
    for i, row in enumerate(links):
        shown[i, list(row)] = 2
        if within is not None:
            beyond = sorted(set(row) - set(within[i]))
            shown[i, beyond] = 3
            outside += len(beyond)
    pale = shown.diagonal() == 2
    shown[pale, pale] = 1
    colours = require("matplotlib.colors", extra="plot")
    light = colours.to_rgba(colour, 0.45)
    palette = colours.ListedColormap(["white", light, colour, RED])
    lines: dict[str, Any] = {"edgecolor": "#DDDDDD", "linewidth": 0.6 if M <= 16 else 0.3}
    lines = lines if M <= 40 else {}
    edge = np.arange(M + 1) - 0.5
    ax.pcolormesh(edge, edge, shown, cmap=palette, vmin=0, vmax=3, **lines)
    ax.set(aspect="equal", xlim=(-0.5, M - 0.5), ylim=(M - 0.5, -0.5))
    every = next(k for k in (1, 2, 5, 10, 20, 50, 100) if 12 * k >= M)
    ax.set(xticks=range(0, M, every), yticks=range(0, M, every))
    ax.tick_params(labelsize=7, length=2)
    if within is not None:
        text = "all of it in $S$: local" if not outside else f"{outside} not in $S$: not local"
        ax.set_xlabel(text, color=RED if outside else BLACK)
