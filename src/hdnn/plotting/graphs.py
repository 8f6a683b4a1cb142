"""One picture of a graph: its nodes and links, its patterns R, T, S, and who needs whom.

The nodes lie on a circle if they are few, else so that distances in the picture are those along
the links, as well as a plane allows. The same graph gives the same picture.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hdnn.errors import SparsityError, require
from hdnn.plotting.figures import BLACK, BLUE, GREEN, ORANGE, RED, new_figure
from hdnn.sparsity import dependency

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Links = Sequence[Sequence[int]]  # the neighbours of each node, itself among them
GREY = "#8C8C8C"
CIRCLE = 16  # nodes, up to which they lie on a circle
NAMED = 100  # nodes, up to which they have their numbers on them
MOST = 1000  # nodes: of more, nothing could be seen
ROUNDS = 300  # most rounds of improving the places of the nodes
PAIRS = 5 * 10**7  # pairs of nodes that are compared in doing so
DRAWN = 5000  # lines of one kind: more of them take long and hide each other


def graph_picture(R: Links, T: Links | None = None, S: Links | None = None) -> Figure:
    """A figure of a graph, whether the locality condition holds or not."""
    nodes = len(R)
    if nodes > MOST:
        raise SparsityError(f"a picture shows up to {MOST} nodes, but there are {nodes}.")
    blocks_K = _matrix(R)
    blocks_J = np.eye(nodes, dtype=bool) if T is None else _matrix(T)
    allowed = None if S is None else _matrix(S)
    needed = dependency(blocks_J, blocks_K).numpy()
    figure = new_figure(12.0, 6.4)
    figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.1)
    grid = figure.add_gridspec(2, 4)
    draw_links(figure.add_subplot(grid[:, :2]), blocks_K, blocks_J, allowed, needed)
    panels = [figure.add_subplot(grid[row, 2 + column]) for row in (0, 1) for column in (0, 1)]
    draw_pattern(panels[0], blocks_K, BLUE, "$R$: blocks of $K$")
    draw_pattern(panels[1], blocks_J, ORANGE, "$T$: blocks of $X$ or $J$")
    draw_pattern(panels[2], allowed, GREY, "$S$: who may need whom")
    title = r"$T R^\top R + R^\top R T$: who needs whom"
    draw_pattern(panels[3], needed, GREEN, title, within=allowed)
    return figure


def _matrix(links: Links) -> np.ndarray:
    """A pattern as a boolean matrix (M, M)."""
    matrix = np.zeros((len(links), len(links)), dtype=bool)
    for node, neighbours in enumerate(links):
        matrix[node, list(neighbours)] = True
    return matrix


def _edges(pattern: np.ndarray) -> np.ndarray:
    """The links (k, 2) of a symmetric pattern, each once."""
    return np.argwhere(np.triu(pattern, 1))


# Nodes and links


def draw_links(
    ax: Axes, R: np.ndarray, T: np.ndarray, S: np.ndarray | None, needed: np.ndarray
) -> None:
    """The nodes, and the links of R, T and S between them."""
    R = R | R.T
    used = R | T
    whole = used if S is None else used | S
    spots, nodes = places([np.flatnonzero(row).tolist() for row in whole]), len(R)
    thin, named = 1.0 if nodes <= 40 else 0.6, nodes <= NAMED
    none = np.zeros_like(R)
    spare, beyond = (none, none) if S is None else (S & ~used, needed & ~S)
    kinds: dict[str, tuple[np.ndarray, int, dict[str, Any]]] = {
        "$R$": (R, 3, {"color": BLUE, "lw": 2.2 * thin}),
        "$T$": (T, 2, {"color": ORANGE, "lw": 6 * thin, "alpha": 0.55}),
        "$S$ alone": (spare, 1, {"color": GREY, "lw": thin}),
        "needed, not in $S$": (beyond, 4, {"color": RED, "lw": 1.8 * thin, "linestyle": ":"}),
    }
    collections = require("matplotlib.collections", extra="plot")
    for name, (pattern, zorder, style) in kinds.items():
        edges = _edges(pattern)
        if not len(edges):
            continue
        lines = [(spots[i], spots[k]) for i, k in edges[:: -(-len(edges) // DRAWN)]]
        cap = {} if "linestyle" in style else {"capstyle": "round"}
        ax.add_collection(collections.LineCollection(lines, zorder=zorder, **style, **cap))
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
        text: dict[str, Any] = {"ha": "center", "va": "center_baseline", "zorder": 6}
        for i, spot in enumerate(spots):
            ax.annotate(f"{i}", tuple(spot), fontsize=0.55 * size, **text)
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
    networkx = require("networkx", extra="graph")
    graph = networkx.Graph((i, k) for i, row in enumerate(links) for k in row)
    # Groups that nothing joins are laid side by side, the largest first.
    groups = sorted(
        map(sorted, networkx.connected_components(graph)), key=lambda group: (-len(group), group)
    )
    found = np.zeros((len(links), 2))
    boxes = []
    for group in groups:
        steps = [networkx.single_source_shortest_path_length(graph, i) for i in group]
        spots = _spread(np.array([[row[k] for k in group] for row in steps], dtype=float))
        spots -= spots.min(0)
        found[group] = spots
        boxes.append(spots.max(0) + 1.5)
    wide = max(math.sqrt(sum(w * h for w, h in boxes)), max(w for w, _ in boxes)) + 1e-9
    x = y = tall = 0.0
    for group, (w, h) in zip(groups, boxes, strict=True):
        if x + w > wide and x > 0:
            x, y, tall = 0.0, y - tall, 0.0
        found[group] += [x, y - (h - 1.5)]
        x, tall = x + w, max(tall, h)
    return found


def _spread(d: np.ndarray) -> np.ndarray:
    """Places of connected nodes whose distances are d (M, M), the steps along the links.

    The stress sum (|x_i - x_k| - d_ik)^2 / d_ik^2 is made smaller by majorisation, from a start by
    the distances to four nodes far apart. `networkx.kamada_kawai_layout` finds the same places,
    but takes ten times as long (37 s against 4 s for 1,000 nodes) and needs scipy.
    """
    M = len(d)
    if M == 1:
        return np.zeros((1, 2))
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
    return _upright(spots, d == 1)


def _start(d: np.ndarray) -> np.ndarray:
    """Start places: two differences of distances to far nodes, the second across the first."""
    a = int(d[0].argmax())
    b = int(d[a].argmax())
    x = d[a] - d[b]
    c = int((np.minimum(d[a], d[b]) - np.abs(x)).argmax())
    e = int((d[c] - np.abs(x)).argmax())
    # A small offset by number keeps nodes apart that have the same distances to all others.
    shift = 1e-2 * np.sin(np.arange(len(d)) * np.array([[1.0], [2.0]]))
    return np.stack([x, d[c] - d[e]], 1) / 2 + shift.T


def _upright(spots: np.ndarray, linked: np.ndarray) -> np.ndarray:
    """Turned so that most links are horizontal or vertical, and numbers grow right and down."""
    i, k = _edges(linked).T
    along = (spots[i] - spots[k]) @ np.array([1, 1j])
    turn = np.exp(-1j * np.angle((along**4).sum()) / 4)
    z = (spots - spots.mean(0)) @ np.array([1, 1j]) * turn
    number = np.arange(len(z)) - (len(z) - 1) / 2
    ways = [w * quarter for w in (z, z.conj()) for quarter in (1, 1j, -1, -1j)]
    best = max(ways, key=lambda w: round(float(number @ w.real - 2 * number @ w.imag), 6))
    return np.stack([best.real, best.imag], 1)


# Patterns


def draw_pattern(
    ax: Axes,
    pattern: np.ndarray | None,
    colour: str,
    title: str,
    within: np.ndarray | None = None,
) -> None:
    """A pattern as filled blocks, paler on the diagonal, red where not `within` another pattern."""
    ax.set_title(title, fontsize=11)
    if pattern is None:
        ax.text(0.5, 0.5, "not given", ha="center", va="center", transform=ax.transAxes)
        ax.set(xticks=[], yticks=[], aspect="equal")
        return
    M = len(pattern)
    beyond = np.zeros_like(pattern) if within is None else pattern & ~within
    shown = np.where(beyond, 3, 2 * pattern)
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
        outside = int(beyond.sum())
        text = "all of it in $S$: local" if not outside else f"{outside} not in $S$: not local"
        ax.set_xlabel(text, color=RED if outside else BLACK)
