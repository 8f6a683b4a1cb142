"""Pictures. Every function draws into `ax`, or a new figure, and returns the Axes.

Colours are those of Okabe and Ito, told apart by colour-blind readers; classes also differ in
their markers, lines in their dashes, so that a print in grey can be read. Figures are made without
pyplot: no window, no display, no global state. `ax.figure.savefig(path)` writes one.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hdnn.data.planar import PlanarData
from hdnn.errors import ShapeError, require

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from hdnn.model import Model
    from hdnn.training import History

ORANGE, SKY, GREEN, BLUE, RED = "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00"
PURPLE, BLACK = "#CC79A7", "#000000"
CLASSES = ((BLUE, "o"), (ORANGE, "^"))


def decision_regions(
    model: Model, data: PlanarData, ax: Axes | None = None, *, points: int = 1000, grid: int = 300
) -> Axes:
    """The plane coloured by the class that `model` predicts, with up to `points` test points."""
    (left, right), (low, high) = data.domain
    ax = _axes(ax, (5.2, 1.1 + 4.2 * (high - low) / (right - left)))
    like = next(model.parameters())
    xs, ys = torch.linspace(left, right, grid), torch.linspace(low, high, grid)
    plane = torch.cartesian_prod(xs, ys).to(like)
    # Probabilities, not labels: the boundary between grid points is then smooth.
    one = model.predict_proba(plane)[:, 1].reshape(grid, grid).T.cpu().double()
    colours = [colour for colour, _ in CLASSES]
    ax.contourf(xs, ys, one, levels=[-0.5, 0.5, 1.5], colors=colours, alpha=0.25)
    if one.min() < 0.5 < one.max():
        ax.contour(xs, ys, one, levels=[0.5], colors=BLACK, linewidths=0.8)
    x, t = data.x_test[:points], data.t_test[:points]
    wrong = model.predict(x.to(like)).to(t.device) != t
    for label, (colour, marker) in enumerate(CLASSES):
        _points(ax, x[t == label], colour, marker, f"class {label}", size=3)
    if bool(wrong.any()):
        _points(ax, x[wrong], BLACK, "x", f"wrong ({int(wrong.sum())} of {len(t)})", size=5)
    ax.set(xlim=(left, right), ylim=(low, high), aspect="equal", xlabel="$x_1$", ylabel="$x_2$")
    name = data.name.replace("_", " ").capitalize()
    ax.set_title(f"{name}: test points on the predicted classes")
    _legend_below(ax, columns=3, markerscale=2)
    return ax


def sensitivity_norms(norms: Tensor, ax: Axes | None = None) -> Axes:
    """Norms of the BSMs dy_N/dy_j, (N+1, *samples), against j: min, median and max per layer."""
    if norms.ndim < 1 or norms.numel() == 0:
        raise ShapeError(
            f"norms must be (N+1, *samples), a norm for each layer, but got {tuple(norms.shape)}; "
            "see hdnn.analysis.norms."
        )
    ax = _axes(ax, (6.0, 3.8))
    flat = norms.detach().cpu().double().reshape(len(norms), -1)
    layer = range(len(flat))
    least, median, most = flat.amin(1), flat.median(1).values, flat.amax(1)
    ax.fill_between(layer, least.tolist(), most.tolist(), color=SKY, alpha=0.25, linewidth=0)
    ax.plot(layer, most.tolist(), color=RED, linestyle="--", label="largest")
    ax.plot(layer, median.tolist(), color=BLUE, label="median")
    ax.plot(layer, least.tolist(), color=GREEN, linestyle="-.", label="smallest")
    ax.axhline(1.0, color=BLACK, linewidth=0.8, linestyle=":", label="norm 1")
    if float(least.min()) > 0 and float(most.max()) > 20 * float(least.min()):
        _log_scale(ax)
    ax.set(xlabel="layer $j$", ylabel=r"$\|\partial y_N / \partial y_j\|_2$")
    ax.set_xlim(0, max(len(flat) - 1, 1))
    samples = flat.shape[1]
    ax.set_title(f"Sensitivity of the output, {samples} sample{'s' * (samples != 1)}")
    _legend_below(ax, columns=4)
    return ax


def training_history(history: History, ax: Axes | None = None) -> Axes:
    """The loss of each epoch and, for classes, the fraction of wrong labels, on a log scale."""
    ax = _axes(ax, (6.0, 3.8))
    epochs = range(1, len(history.loss) + 1)
    marker = "o" if len(history.loss) < 3 else ""
    ax.plot(epochs, history.loss, color=BLUE, marker=marker, label="loss")
    if history.accuracy:
        # An epoch without a mistake has no logarithm: it is left open, and the legend says so.
        wrong = [1 - a if a < 1 else math.nan for a in history.accuracy]
        last = max((epoch for epoch, w in zip(epochs, wrong, strict=True) if w > 0), default=0)
        label = "wrong labels"
        if last < len(wrong):
            label += f" (none from epoch {last + 1} on)"
        ax.plot(epochs, wrong, color=RED, linestyle="--", marker=marker, label=label)
    if all(loss > 0 for loss in history.loss):
        _log_scale(ax)
    ax.set(xlabel="epoch", ylabel="mean over minibatches", title="Training")
    ax.xaxis.set_major_locator(
        require("matplotlib.ticker", extra="plot").MaxNLocator(integer=True, steps=[1, 2, 5, 10])
    )
    ax.grid(alpha=0.3)
    _legend_below(ax, columns=2)
    return ax


def trajectories(
    states: Tensor,
    ax: Axes | None = None,
    *,
    features: tuple[int, int] = (0, -1),
    labels: Tensor | None = None,
) -> Axes:
    """Paths y_0 .. y_N of the samples, (N+1, B, n), in the plane of two features."""
    if states.ndim != 3:
        raise ShapeError(
            f"states must be (N+1, B, n), the trajectory of B samples, but got "
            f"{tuple(states.shape)}; see model.trajectory(x)."
        )
    n = states.shape[-1]
    if len(features) != 2 or not all(-n <= i < n for i in features):
        raise ShapeError(f"features must be two of 0 .. {n - 1}, but got {features}.")
    ax = _axes(ax, (5.2, 4.8))
    a, b = (range(n)[i] for i in features)
    paths = states.detach().cpu()
    classes = torch.zeros(paths.shape[1]) if labels is None else labels.cpu()
    for label, (colour, marker) in enumerate(CLASSES):
        chosen = paths[:, classes == label]
        if not chosen.shape[1]:
            continue
        ax.plot(chosen[..., a].tolist(), chosen[..., b].tolist(), color=colour, lw=0.6, alpha=0.5)
        name = "$y_N$" if labels is None else f"$y_N$, class {label}"
        ends = chosen[-1]
        ax.scatter(
            ends[:, a].tolist(),
            ends[:, b].tolist(),
            s=14,
            color=colour,
            marker=marker,
            label=name,
            zorder=3,
        )
    ax.set(xlabel=f"$y_{{{a + 1}}}$", ylabel=f"$y_{{{b + 1}}}$")
    ax.set_title(f"States through {len(paths) - 1} layers")
    _legend_below(ax, columns=2)
    return ax


def _axes(ax: Axes | None, size: tuple[float, float]) -> Axes:
    """The given Axes, or those of a new figure that needs no display."""
    figure = require("matplotlib.figure", extra="plot")
    if ax is not None:
        return ax
    require("matplotlib.backends.backend_agg", extra="plot").FigureCanvasAgg(
        fresh := figure.Figure(figsize=size, dpi=150, layout="constrained")
    )
    return fresh.add_subplot()


def _points(ax: Axes, x: Tensor, colour: str, marker: str, label: str, size: float) -> None:
    edge = 1.2 if marker == "x" else 0.0
    style = {"marker": marker, "markersize": size, "markeredgewidth": edge}
    ax.plot(*x.cpu().double().T.tolist(), linestyle="", color=colour, label=label, **style)


def _log_scale(ax: Axes) -> None:
    """1, 2, 5, 10 .. beside an axis of a few decades; powers of ten beside a longer one."""
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    if high < 1e4 * low:
        ticker = require("matplotlib.ticker", extra="plot")
        ax.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
        ax.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
        ax.yaxis.set_minor_formatter(ticker.NullFormatter())


def _legend_below(ax: Axes, columns: int, **options: Any) -> None:
    """A legend under the axis labels, where it covers no data."""
    transforms = require("matplotlib.transforms", extra="plot")
    # In points, not in parts of the axes: labels stay clear of it at any size.
    below = transforms.offset_copy(ax.transAxes, fig=ax.figure, y=-36, units="points")
    ax.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, 0.0),
        bbox_transform=below,
        ncols=columns,
        frameon=False,
        borderaxespad=0.0,
        **options,
    )
