"""Curves: of a training, of the norms of dy_N/dy_j, and of how sensitivities and errors grow."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hdnn.errors import DataError, ShapeError, require
from hdnn.plotting.figures import (
    BLACK,
    BLUE,
    GREEN,
    LEVEL_1,
    ORANGE,
    RED,
    SKY,
    STYLES,
    axes_of,
    finished,
    log_scale,
    new_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from hdnn.analysis import Certificate, Convergence, Diagnosis, GradientMonitor
    from hdnn.training import History

NORM = r"$\|\partial y_N / \partial y_j\|_2$"


def training_history(
    history: History, ax: Axes | None = None, *, test: Sequence[float] = ()
) -> Axes:
    """Draw the loss of each epoch and, for classes, the fraction of wrong labels, on a log scale.

    The loss at held-out rows is drawn too, with a mark at its best epoch.

    Args:
        history: what `hdnn.training.fit` returned.
        ax: the Axes to draw into; by default those of a new figure.
        test: accuracies on test data after each epoch, whose wrong labels are drawn as well.

    Returns:
        The Axes; `ax.figure.savefig(path)` writes the picture.

    Examples:
        >>> import hdnn
        >>> history = hdnn.training.History(loss=[0.7, 0.3, 0.1], accuracy=[0.5, 0.9, 1.0])
        >>> ax = hdnn.plotting.training_history(history)
        >>> ax.get_xlabel(), ax.get_yscale()
        ('epoch', 'log')
        >>> ax.figure.savefig("training.png")
    """
    ax = axes_of(ax)
    epochs = range(1, len(history.loss) + 1)
    marker = "o" if len(history.loss) < 3 else ""
    ax.plot(epochs, history.loss, color=BLUE, marker=marker, label="loss")
    held_out, best = history.validation_loss, history.best_epoch
    if held_out:
        label = f"held-out loss (lowest in epoch {best})" if best else "held-out loss"
        ax.plot(epochs, held_out, color=BLACK, linestyle="-", marker=marker, label=label)
    if best:
        ax.plot([best], [held_out[best - 1]], color=BLACK, marker="o", linestyle="")
    # Zero mistakes have no logarithm: such epochs are left out, and the legend says so.
    last = max((epoch for epoch, a in enumerate(history.accuracy, 1) if a < 1), default=0)
    none = f" (none from epoch {last + 1} on)" if last < len(history.accuracy) else ""
    for accuracies, color, linestyle, label in (
        (history.accuracy, RED, "--", f"wrong labels{none}"),
        (test, GREEN, "-.", "wrong labels, test"),
    ):
        if accuracies:
            wrong = [1 - a if a < 1 else math.nan for a in accuracies]
            ax.plot(epochs, wrong, color=color, linestyle=linestyle, marker=marker, label=label)
    if all(loss > 0 for loss in [*history.loss, *held_out]):
        log_scale(ax)
    ticker = require("matplotlib.ticker", extra="plot")
    ax.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    ax.grid(alpha=0.3)
    columns = 3 if test else 2
    return finished(ax, columns, xlabel="epoch", ylabel="mean over minibatches", title="Training")


# Norms of dy_N/dy_j


def sensitivity_norms(norms: Tensor, ax: Axes | None = None) -> Axes:
    """Draw norms of the matrices dy_N/dy_j against j: smallest, median and largest of each layer.

    Args:
        norms: `(N+1, *samples)`, as `hdnn.analysis.norms` finds them for
            `hdnn.analysis.backward_sensitivity`.
        ax: the Axes to draw into; by default those of a new figure.

    Returns:
        The Axes; `ax.figure.savefig(path)` writes the picture.

    Raises:
        ShapeError: if there are no norms.

    Examples:
        >>> import hdnn, torch
        >>> net = hdnn.H2(features=4, layers=16)
        >>> Phi = hdnn.analysis.backward_sensitivity(net, torch.randn(10, 4))
        >>> ax = hdnn.plotting.sensitivity_norms(hdnn.analysis.norms(Phi))
        >>> [line.get_label() for line in ax.lines]
        ['largest', 'median', 'smallest', 'norm 1']
    """
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
    """Draw smallest, median and largest norm of dy_N/dy_j against j, as a certificate has them.

    Args:
        certificate: what `hdnn.analysis.certify` returned for a network.
        ax: the Axes to draw into; by default those of a new figure.

    Returns:
        The Axes; `ax.figure.savefig(path)` writes the picture.

    Examples:
        >>> import hdnn
        >>> certificate = hdnn.analysis.certify(hdnn.H2(features=4, layers=16))
        >>> ax = hdnn.plotting.certificate_norms(certificate)  # or certificate.plot()
        >>> ax.get_title()
        'Sensitivity of the output, 20 samples'
    """
    found = certificate.by_layer
    ax = _norm_curves(found["layers"], found, certificate.samples, ax)
    if certificate.broken:
        ax.set_title("A guarantee does not hold numerically", color=RED)
    elif certificate.unknown:
        ax.set_title("Not all norms could be computed", color=RED)
    return ax


def certificates_norms(certificates: Sequence[Certificate]) -> Axes:
    """Draw the curves of several certificates side by side, those of the parts of one network.

    Args:
        certificates: one for each part, in their order.

    Returns:
        The Axes of the last one; `ax.figure.savefig(path)` writes the picture.

    Raises:
        DataError: if there is none.

    Examples:
        >>> import hdnn
        >>> nets = hdnn.H2(features=4, layers=8), hdnn.H1(features=4, layers=8)
        >>> ax = hdnn.plotting.certificates_norms([hdnn.analysis.certify(net) for net in nets])
        >>> len(ax.figure.axes)
        2
    """
    count = len(certificates)
    if not count:
        raise DataError("there is no certificate to draw.")
    panels = new_figure(1.0 + 4.2 * count, 3.8).subplots(1, count, squeeze=False)[0]
    for k, (one, ax) in enumerate(zip(certificates, panels, strict=True), 1):
        certificate_norms(one, ax)
        if not one.broken:
            ax.set_title(f"Unit {k}: {one.samples} image{'s' * (one.samples != 1)}")
        if k != (count + 1) // 2:  # one legend is enough, in the middle
            ax.get_legend().remove()
    return panels[-1]


def gradient_surface(
    monitor: GradientMonitor, ax: Axes | None = None, *, name: str = "smallest", low: float = 1e-8
) -> Axes:
    """Draw norm(dy_N/dy_j) through a training, as colours over steps and layers (fig:gradients).

    Args:
        monitor: a `hdnn.analysis.GradientMonitor` that has recorded something.
        ax: the Axes to draw into; by default those of a new figure.
        name: what is shown of the samples: "smallest", "median", "largest", or "of_mean", the norm
            of their mean matrix.
        low: what is below has the last colour.

    Returns:
        The Axes; `ax.figure.savefig(path)` writes the picture.

    Raises:
        ShapeError: if the monitor has recorded nothing yet.
        OptionError: if the name is not one of these.

    Examples:
        >>> import hdnn, torch
        >>> net = hdnn.H2(features=4, layers=16)
        >>> monitor = hdnn.analysis.GradientMonitor(net, torch.randn(8, 4))
        >>> for _ in range(3):  # after each step of your own loop
        ...     monitor.step()
        >>> ax = hdnn.plotting.gradient_surface(monitor)  # or monitor.plot()
        >>> ax.get_xlabel(), ax.get_ylabel()
        ('iteration', 'layer $j$')
    """
    if not monitor.records:
        raise ShapeError(
            "the monitor has recorded nothing yet: train with fit(callbacks=[monitor]), or call "
            "monitor.step() after each step of your own loop, and plot then."
        )
    colors = require("matplotlib.colors", extra="plot")
    ax = axes_of(ax)
    values = monitor.table(name)[:, :-1].T.clamp_min(low)
    steps, layers = _edges(monitor.recorded_steps), _edges([*range(len(values))])
    # Vanished is dark red, 1 is white, growth is blue; equal steps of colour are factors.
    reach = max([10.0, *values[values.isfinite()].tolist()])
    norm = colors.TwoSlopeNorm(0.0, math.log10(low), math.log10(reach))
    shown = ax.pcolormesh(
        *(steps, layers, values.log10().nan_to_num(posinf=math.log10(reach)).tolist()),
        cmap="RdBu",
        norm=norm,
        shading="flat",
        rasterized=True,
    )
    bar = ax.figure.colorbar(shown, ax=ax)
    powers = [*range(round(math.log10(low)), 1, 2), math.log10(reach)]
    bar.set_ticks(powers, labels=[f"{10**p:.2g}" for p in powers])
    bar.set_label(f"{NORM}, {name.replace('_', ' ')}")
    ax.set(xlabel="iteration", ylabel="layer $j$")
    if bool(values.isnan().all()):
        why = next(record.why for record in monitor.records if record.why)
        said = "\n".join(textwrap.wrap(f"no norm could be computed, because {why}", 40))
        ax.text(0.5, 0.5, said, ha="center", va="center", transform=ax.transAxes)
    return ax


def diagnosis_gains(diagnosis: Diagnosis, ax: Axes | None = None) -> Axes:
    """Draw what is left of a random gradient at each state, and mark where faults are.

    Args:
        diagnosis: what `hdnn.diagnose` returned.
        ax: the Axes to draw into; by default those of a new figure.

    Returns:
        The Axes; `ax.figure.savefig(path)` writes the picture.

    Examples:
        >>> import hdnn, torch
        >>> found = hdnn.diagnose(torch.nn.Sequential(torch.nn.Linear(4, 4)), torch.randn(8, 4))
        >>> ax = hdnn.plotting.diagnosis_gains(found)  # or found.plot()
        >>> ax.get_title()
        'Sequential: no fault was found, gradients reach every layer.'
    """
    ax = axes_of(ax, width=7.0)
    layers = diagnosis.layers
    for name, label, color, line, marker in (
        ("gain", "left of a random gradient", GREEN, "-.", "v"),
        ("own", "let through by the layer alone", BLUE, "", "."),
    ):
        values = [(j, getattr(one, name)) for j, one in enumerate(layers)]
        known = [(j, value) for j, value in values if math.isfinite(value) and value > 0]
        x, y = [j for j, _ in known], [value for _, value in known]
        ax.plot(x, y, color=color, linestyle=line, marker=marker, label=label)
    ax.axhline(1.0, **LEVEL_1)
    names = [one.layer for one in layers]
    for place in sorted({names.index(f.layer) for f in diagnosis.faults if f.layer in names}):
        ax.axvline(place, color=ORANGE, linewidth=4, alpha=0.4, zorder=0)
    ax.set_yscale("log")
    shown = [*range(0, len(names), max(1, -(-len(names) // 12)))]
    ax.set_xticks(shown, [names[j][-24:] for j in shown], rotation=30, ha="right", fontsize=7)
    ax.set(ylabel=NORM, title=textwrap.shorten(diagnosis.summary, 90, placeholder=" ..."))
    ax.legend(frameon=False, fontsize=8)
    return ax


def _edges(places: list[int]) -> list[float]:
    """The borders halfway between places, and as far outside of the first and the last."""
    inner = [(a + b) / 2 for a, b in pairwise(places)] or [places[0] - 0.5]
    first = 2 * places[0] - inner[0]
    return [first, *inner, 2 * places[-1] - inner[-1]] if len(places) > 1 else [inner[0], first]


def _norm_curves(
    layers: list[int], curves: dict[str, list[float]], samples: int, ax: Axes | None
) -> Axes:
    ax = axes_of(ax)
    least, most = curves["smallest"], curves["largest"]
    ax.fill_between(layers, least, most, color=SKY, alpha=0.25, linewidth=0)
    ax.plot(layers, most, color=RED, linestyle="--", label="largest")
    ax.plot(layers, curves["median"], color=BLUE, label="median")
    ax.plot(layers, least, color=GREEN, linestyle="-.", label="smallest")
    ax.axhline(1.0, **LEVEL_1, label="norm 1")
    if min(least) > 0 and max(most) > 20 * min(least):
        log_scale(ax)
    ax.set_xlim(0, max(layers[-1], 1))
    title = f"Sensitivity of the output, {samples} sample{'s' * (samples != 1)}"
    return finished(ax, 4, xlabel="layer $j$", ylabel=NORM, title=title)


# Growth: in continuous time, with depth, with the step


def sensitivity_growth(
    t: Tensor, Phi: Tensor, ax: Axes | None = None, *, slope: float | None = None
) -> Axes:
    """Draw the entries and the norm of `Phi = dy(T)/dy(T - t)` against t.

    Args:
        t: times (k,).
        Phi: the matrices (k, n, n) at these times.
        ax: the Axes to draw into; by default those of a new figure.
        slope: adds the line that the norm swings below.

    Returns:
        The Axes; `ax.figure.savefig(path)` writes the picture.

    Raises:
        ShapeError: if t and Phi do not fit together.

    Examples:
        >>> import hdnn, torch
        >>> ode = hdnn.analysis.ContinuousNetwork(hdnn.H2(features=4, layers=4))
        >>> t = torch.linspace(0, ode.T, 20)
        >>> Phi = ode.sensitivity(torch.randn(4), ode.T - t)
        >>> ax = hdnn.plotting.sensitivity_growth(t, Phi)
        >>> ax.get_title()
        'Growth of the BSM in continuous time'
    """
    if Phi.ndim != 3 or t.shape != Phi.shape[:1]:
        raise ShapeError(
            f"t must be (k,) and Phi (k, n, n), but got {tuple(t.shape)} and {tuple(Phi.shape)}."
        )
    ax = axes_of(ax)
    times, matrices = t.tolist(), Phi.detach().cpu().double()
    if slope is not None:
        line = (slope * t.double()).tolist()
        ax.plot(times, line, color=RED, linestyle="--", label=f"{slope:.3f} $t$", zorder=3)
    ax.plot(times, matrices.flatten(1).tolist(), color=SKY, lw=0.8)
    ax.plot([], [], color=SKY, lw=0.8, label="entries")
    norm = torch.linalg.matrix_norm(matrices, 2)
    ax.plot(times, norm.tolist(), color=BLUE, lw=1.6, label="norm")
    ax.axhline(1.0, **LEVEL_1, label="norm 1")
    ax.set(xlim=(times[0], times[-1]), title="Growth of the BSM in continuous time")
    return finished(ax, 4, xlabel="$t$", ylabel=r"$\partial y(T) / \partial y(T-t)$")


def perturbation_growth(
    curves: Mapping[float, tuple[Tensor, Tensor]],
    ax: Axes | None = None,
    *,
    slope: float | None = None,
    diameter: float | None = None,
) -> Axes:
    """Draw how far apart two states are after t, over their distance gamma at the start.

    Args:
        curves: for each gamma its times t (k,) and the distances over gamma (k,).
        ax: the Axes to draw into; by default those of a new figure.
        slope: adds the line of an infinitely small gamma.
        diameter: that of the orbit; adds the largest value that each gamma can have.

    Returns:
        The Axes; `ax.figure.savefig(path)` writes the picture.

    Examples:
        >>> import hdnn, torch
        >>> t = torch.linspace(0, 100, 50)
        >>> curves = {gamma: (t, t.clamp(max=2 / gamma)) for gamma in (0.1, 0.5)}
        >>> ax = hdnn.plotting.perturbation_growth(curves, slope=1.0, diameter=2.0)
        >>> ax.get_xscale(), ax.get_yscale()
        ('log', 'log')
    """
    ax = axes_of(ax)
    longest = max((float(t.max()) for t, _ in curves.values()), default=1.0)
    if slope is not None:
        span = [2.0 / slope, longest]
        ax.plot(span, [slope * x for x in span], color=BLACK, lw=0.8, label=r"$\gamma \to 0$")
    for i, (gamma, (t, sizes)) in enumerate(curves.items()):
        style = {
            **STYLES[i % len(STYLES)],
            "marker": "",
            "lw": 1.4,
            "label": rf"$\gamma$ = {gamma:g}",
        }
        known = t > 0
        ax.plot(t[known].tolist(), sizes[known].tolist(), **style)
        if diameter is not None:
            ax.axhline(diameter / gamma, color=style["color"], lw=0.8, linestyle=":")
    if diameter is not None:
        ax.plot([], [], color=BLACK, lw=0.8, linestyle=":", label=r"diameter / $\gamma$")
    ax.set(xscale="log", yscale="log", xlabel="$t$", xlim=(1.0, longest))
    ax.grid(alpha=0.3)
    distance = r"$\|s(t, y + \gamma\beta) - s(t, y)\| / \gamma$"
    title = "A finite perturbation grows until it spans the orbit"
    return finished(ax, 3, ylabel=distance, title=title)


def layer_growth(
    curves: Mapping[str, Tensor], ax: Axes | None = None, *, rates: Sequence[float] | None = None
) -> Axes:
    """Draw norms of dy_N/dy_j against N - j on a log scale, for several networks.

    Args:
        curves: for each name the norms (N+1,), from j = N back to 0.
        ax: the Axes to draw into; by default those of a new figure.
        rates: of each curve; adds the line of growth by exp(rate) a layer, for rates above 0.

    Returns:
        The Axes; `ax.figure.savefig(path)` writes the picture.

    Examples:
        >>> import hdnn, torch
        >>> curves = {"H1": 1.1 ** torch.arange(9.0), "H2": torch.ones(9)}
        >>> ax = hdnn.plotting.layer_growth(curves, rates=[0.0953, 0.0])
        >>> ax.get_legend_handles_labels()[1]
        ['H1', 'H2']
    """
    ax = axes_of(ax)
    for i, (name, sizes) in enumerate(curves.items()):
        style = {**STYLES[i % len(STYLES)], "linestyle": ""}
        every = max(1, len(sizes) // 32)
        ax.plot(sizes.tolist(), **style, markersize=4, markevery=every, label=name)
        if rates is not None and rates[i] > 0:
            logs = sizes[-1].log() + rates[i] * torch.arange(1 - len(sizes), 1)
            ax.plot(logs.exp().tolist(), color=style["color"], lw=1.0, zorder=1)
    ax.axhline(1.0, **LEVEL_1)
    ax.set_yscale("log")
    ax.grid(alpha=0.3)
    return finished(ax, 3, xlabel="layers $N - j$", ylabel=NORM, title="Growth per layer")


def convergence(results: Mapping[str, Convergence], ax: Axes | None = None) -> Axes:
    """Draw errors against the flow of the ODE over the step h, with slopes of whole orders below.

    Args:
        results: for each name what `hdnn.analysis.convergence` returned.
        ax: the Axes to draw into; by default those of a new figure.

    Returns:
        The Axes; `ax.figure.savefig(path)` writes the picture.

    Examples:
        >>> import hdnn, torch
        >>> net = hdnn.H2(features=4, layers=2, generator=torch.Generator().manual_seed(0))
        >>> found = hdnn.analysis.convergence(net, torch.randn(3, 4), refinements=(4, 8, 16))
        >>> ax = hdnn.plotting.convergence({"H2": found})
        >>> ax.get_xlabel(), ax.get_xscale()
        ('step $h$', 'log')
    """
    ax = axes_of(ax, height=4.6)
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
    ax.set(xscale="log", yscale="log", title="Layers against the flow of their ODE")
    ax.grid(alpha=0.3)
    return finished(ax, 2, xlabel="step $h$", ylabel=r"$\max\,\|y_N - y(T)\|$")
