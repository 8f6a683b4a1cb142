"""Pictures. Every function draws into `ax`, or a new figure, and returns the Axes.

Colours are those of Okabe and Ito, told apart by colour-blind readers; classes also differ in
their markers, lines in their dashes, so that a print in grey can be read. Figures are made without
pyplot: no window, no display, no global state. `ax.figure.savefig(path)` writes one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hdnn.data.planar import PlanarData
from hdnn.errors import ShapeError, require
from hdnn.plotting.styles import BLACK, BLUE, CLASSES, GREEN, RED, SKY, STYLES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from hdnn.analysis import Certificate, GradientMonitor
    from hdnn.analysis.refinement import Convergence
    from hdnn.model import Model
    from hdnn.training import History


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
    flat = norms.detach().cpu().double().reshape(len(norms), -1)
    curves = {"smallest": flat.amin(1), "median": flat.median(1).values, "largest": flat.amax(1)}
    layers = list(range(len(flat)))
    return _norm_curves(layers, {k: c.tolist() for k, c in curves.items()}, flat.shape[1], ax)


def certificate_norms(certificate: Certificate, ax: Axes | None = None) -> Axes:
    """Smallest, median and largest norm of dy_N/dy_j against j, as a certificate has them."""
    found = certificate.by_layer
    ax = _norm_curves(found["layers"], found, certificate.samples, ax)
    if certificate.broken:
        ax.set_title("A guarantee does not hold numerically", color=RED)
    elif certificate.unknown:
        ax.set_title("Not all norms could be computed", color=RED)
    return ax


def gradient_surface(
    monitor: GradientMonitor, ax: Axes | None = None, *, name: str = "smallest", low: float = 1e-8
) -> Axes:
    """norm(dy_N/dy_j) through a training, as colours over steps and layers (fig:gradients).

    `name` is what of the samples is shown: "smallest", "median", "largest", or "of_mean", the norm
    of their mean matrix. What is below `low` has the last colour.
    """
    if not monitor.records:
        raise ShapeError("the monitor has recorded nothing yet.")
    colors = require("matplotlib.colors", extra="plot")
    ax = _axes(ax, (6.0, 3.8))
    values = monitor.table(name)[:, :-1].T.clamp_min(low)
    steps, layers = monitor.recorded_steps, range(len(values))
    # Vanished is dark red, 1 is white, growth is blue; equal steps of colour are factors.
    reach = max([10.0, *values[values.isfinite()].tolist()])
    norm = colors.TwoSlopeNorm(0.0, math.log10(low), math.log10(reach))
    shown = ax.pcolormesh(
        *(steps, layers, values.log10().nan_to_num(posinf=math.log10(reach)).tolist()),
        cmap="RdBu",
        norm=norm,
        shading="nearest",
        rasterized=True,
    )
    bar = ax.figure.colorbar(shown, ax=ax)
    powers = [*range(round(math.log10(low)), 1, 2), math.log10(reach)]
    bar.set_ticks(powers, labels=[f"{10**p:.2g}" for p in powers])
    bar.set_label(r"$\|\partial y_N / \partial y_j\|_2$, " + name.replace("_", " "))
    ax.set(xlabel="iteration", ylabel="layer $j$")
    return ax


def _norm_curves(
    layers: list[int], curves: dict[str, list[float]], samples: int, ax: Axes | None
) -> Axes:
    ax = _axes(ax, (6.0, 3.8))
    least, most = curves["smallest"], curves["largest"]
    ax.fill_between(layers, least, most, color=SKY, alpha=0.25, linewidth=0)
    ax.plot(layers, most, color=RED, linestyle="--", label="largest")
    ax.plot(layers, curves["median"], color=BLUE, label="median")
    ax.plot(layers, least, color=GREEN, linestyle="-.", label="smallest")
    ax.axhline(1.0, color=BLACK, linewidth=0.8, linestyle=":", label="norm 1")
    if min(least) > 0 and max(most) > 20 * min(least):
        _log_scale(ax)
    ax.set(xlabel="layer $j$", ylabel=r"$\|\partial y_N / \partial y_j\|_2$")
    ax.set_xlim(0, max(layers[-1], 1))
    ax.set_title(f"Sensitivity of the output, {samples} sample{'s' * (samples != 1)}")
    _legend_below(ax, columns=4)
    return ax


def certificates_norms(certificates: Sequence[Certificate]) -> Axes:
    """The curves of several certificates side by side, those of the parts of one network."""
    count = len(certificates)
    ax = _axes(None, (1.0 + 4.2 * count, 3.8))
    figure = ax.figure
    figure.clear()
    for k, one in enumerate(certificates, 1):
        ax = certificate_norms(one, figure.add_subplot(1, count, k))  # pyright: ignore
        if not one.broken:
            ax.set_title(f"Unit {k}: {one.samples} image{'s' * (one.samples != 1)}")
        legend = ax.get_legend()
        if legend is not None and k != (count + 1) // 2:  # one is enough, in the middle
            legend.remove()
    return ax


def training_history(
    history: History, ax: Axes | None = None, *, test: Sequence[float] = ()
) -> Axes:
    """The loss of each epoch and, for classes, the fraction of wrong labels, on a log scale.

    `test` are accuracies on test data after each epoch, whose wrong labels are drawn too.
    """
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
    if test:
        wrong = [1 - a if a < 1 else math.nan for a in test]
        label = "wrong labels, test"
        ax.plot(epochs, wrong, color=GREEN, linestyle="-.", marker=marker, label=label)
    if all(loss > 0 for loss in history.loss):
        _log_scale(ax)
    ax.set(xlabel="epoch", ylabel="mean over minibatches", title="Training")
    ax.xaxis.set_major_locator(
        require("matplotlib.ticker", extra="plot").MaxNLocator(integer=True, steps=[1, 2, 5, 10])
    )
    ax.grid(alpha=0.3)
    _legend_below(ax, columns=3 if test else 2)
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


def phase_portrait(
    states: Tensor,
    ax: Axes | None = None,
    *,
    names: Sequence[str] | None = None,
    energy: Callable[[Tensor], Tensor] | None = None,
) -> Axes:
    """Orbits (k, B, 2) in the plane of p and q: a mark where each starts, an arrow on its way.

    `energy` of states (*batch, 2) adds its level lines.
    """
    if states.ndim != 3 or states.shape[-1] != 2 or not all(states.shape):
        raise ShapeError(f"states must be (k, B, 2), B orbits, but got {tuple(states.shape)}.")
    ax = _axes(ax, (4.6, 4.8))
    for i, orbit in enumerate(states.detach().cpu().double().unbind(1)):
        style = STYLES[i % len(STYLES)]
        name = f"orbit {i + 1}" if names is None else names[i]
        p, q = orbit.T.tolist()
        ax.plot(p, q, **style, markevery=[0], lw=1.5, markersize=6, label=name)
        at = len(p) // 5
        ax.annotate(
            "",
            xy=(p[at + 1], q[at + 1]) if at + 1 < len(p) else (p[at], q[at]),
            xytext=(p[at], q[at]),
            arrowprops={"arrowstyle": "-|>", "color": style["color"], "mutation_scale": 14},
        )
    if energy is not None:
        reach = 1.15 * float(states.abs().max())
        side = torch.linspace(-reach, reach, 121, dtype=torch.float64)
        H = energy(torch.cartesian_prod(side, side)).reshape(121, 121).T
        ax.contour(side, side, H, levels=12, colors=BLACK, alpha=0.18, linewidths=0.7)
    ax.set(aspect="equal", xlabel="$p$", ylabel="$q$", title="Orbits")
    _legend_below(ax, columns=1)
    return ax


def sensitivity_growth(
    t: Tensor, Phi: Tensor, ax: Axes | None = None, *, slope: float | None = None
) -> Axes:
    """The entries and the norm of Phi = dy(T)/dy(T - t), (k, n, n), against t (k,).

    `slope` adds the line that the norm swings below.
    """
    if Phi.ndim != 3 or t.shape != Phi.shape[:1]:
        raise ShapeError(
            f"t must be (k,) and Phi (k, n, n), but got {tuple(t.shape)} and {tuple(Phi.shape)}."
        )
    ax = _axes(ax, (6.0, 3.8))
    times, matrices = t.tolist(), Phi.detach().cpu().double()
    if slope is not None:
        line = (slope * t.double()).tolist()
        ax.plot(times, line, color=RED, linestyle="--", label=f"{slope:.3f} $t$", zorder=3)
    ax.plot(times, matrices.flatten(1).tolist(), color=SKY, lw=0.8)
    ax.plot([], [], color=SKY, lw=0.8, label="entries")
    norm = torch.linalg.matrix_norm(matrices, 2)
    ax.plot(times, norm.tolist(), color=BLUE, lw=1.6, label="norm")
    ax.axhline(1.0, color=BLACK, linewidth=0.8, linestyle=":", label="norm 1")
    ax.set(xlabel="$t$", ylabel=r"$\partial y(T) / \partial y(T-t)$", xlim=(times[0], times[-1]))
    ax.set_title("Growth of the BSM in continuous time")
    _legend_below(ax, columns=4)
    return ax


def perturbation_growth(
    curves: Mapping[float, tuple[Tensor, Tensor]],
    ax: Axes | None = None,
    *,
    slope: float | None = None,
    diameter: float | None = None,
) -> Axes:
    """The distance that states gamma apart have after t, over gamma: for each gamma (t, sizes).

    `slope` adds the line of an infinitely small gamma, `diameter` where each gamma has to end.
    """
    ax = _axes(ax, (6.0, 3.8))
    longest = max((float(t.max()) for t, _ in curves.values()), default=1.0)
    if slope is not None:
        span = [2.0 / slope, longest]
        ax.plot(span, [slope * x for x in span], color=BLACK, lw=0.8, label=r"$\gamma \to 0$")
    for i, (gamma, (t, sizes)) in enumerate(curves.items()):
        style = {k: v for k, v in STYLES[i % len(STYLES)].items() if k != "marker"}
        known = t > 0
        name = rf"$\gamma$ = {gamma:g}"
        ax.plot(t[known].tolist(), sizes[known].tolist(), **style, lw=1.4, label=name)
        if diameter is not None:
            ax.axhline(diameter / gamma, color=style["color"], lw=0.8, linestyle=":")
    if diameter is not None:
        ax.plot([], [], color=BLACK, lw=0.8, linestyle=":", label=r"diameter / $\gamma$")
    ax.set(xscale="log", yscale="log", xlabel="$t$", xlim=(1.0, longest))
    ax.set_ylabel(r"$\|s(t, y + \gamma\beta) - s(t, y)\| / \gamma$")
    ax.set_title("A finite perturbation grows until it spans the orbit")
    ax.grid(alpha=0.3)
    _legend_below(ax, columns=3)
    return ax


def layer_growth(
    curves: Mapping[str, Tensor], ax: Axes | None = None, *, rates: Sequence[float] | None = None
) -> Axes:
    """Norms of dy_N/dy_j against N - j, (N+1,) for each name, on a log scale.

    `rates` adds how each would grow by exp(rate) a layer, where that is not 0.
    """
    ax = _axes(ax, (6.0, 3.8))
    for i, (name, sizes) in enumerate(curves.items()):
        style = {**STYLES[i % len(STYLES)], "linestyle": ""}
        every = max(1, len(sizes) // 32)
        ax.plot(sizes.tolist(), **style, markersize=4, markevery=every, label=name)
        if rates is not None and rates[i] > 0:
            logs = sizes[-1].log() + rates[i] * torch.arange(1 - len(sizes), 1)
            ax.plot(logs.exp().tolist(), color=style["color"], lw=1.0, zorder=1)
    ax.axhline(1.0, color=BLACK, linewidth=0.8, linestyle=":")
    ax.set(yscale="log", xlabel="layers $N - j$")
    ax.set_ylabel(r"$\|\partial y_N / \partial y_j\|_2$")
    ax.set_title("Growth per layer")
    ax.grid(alpha=0.3)
    _legend_below(ax, columns=3)
    return ax


def convergence(results: Mapping[str, Convergence], ax: Axes | None = None) -> Axes:
    """Errors against the flow of the ODE over the step h, with slopes of whole orders below."""
    ax = _axes(ax, (6.0, 4.6))
    lowest: dict[int, Convergence] = {}  # by order
    for i, (name, result) in enumerate(results.items()):
        style = STYLES[i % len(STYLES)]
        label = f"{name}: order {result.order:.2f}"
        ax.plot(result.steps, result.errors, **style, lw=1.4, markersize=5, label=label)
        if math.isfinite(result.order):
            order = round(result.order)
            other = lowest.setdefault(order, result)
            lowest[order] = min(other, result, key=lambda each: each.errors[0])
    for order, result in lowest.items():
        steps, start = result.steps, 0.4 * result.errors[0]
        slope = [start * (h / steps[0]) ** order for h in steps]
        ax.plot(steps, slope, color=BLACK, lw=0.8, linestyle=":", zorder=1)
        name = f"$h^{order}$ " if order > 1 else "$h$ "
        ax.annotate(name, (steps[-1], slope[-1]), ha="right", va="center")
    ax.set(xscale="log", yscale="log", xlabel="step $h$", ylabel=r"$\max\,\|y_N - y(T)\|$")
    ax.set_title("Layers against the flow of their ODE")
    ax.grid(alpha=0.3)
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
