"""Curves of training, of the norms of dy_N/dy_j, and of a diagnosis.

Figures are made without pyplot: no window, no display, no global state.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hdnn.errors import OptionError, require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hdnn.analysis import Certificate, Diagnosis, GradientMonitor
    from hdnn.training import History

# The colours of Okabe and Ito, which colour-blind readers can tell apart.
ORANGE = "#E69F00"
SKY = "#56B4E9"
GREEN = "#009E73"
BLUE = "#0072B2"
RED = "#D55E00"
PURPLE = "#CC79A7"
BLACK = "#000000"
CLASSES = ((BLUE, "o"), (ORANGE, "^"))
STYLES: tuple[dict[str, Any], ...] = (  # styles of lines, in turn
    {"color": BLUE, "linestyle": "-", "marker": "o"},
    {"color": RED, "linestyle": "--", "marker": "^"},
    {"color": GREEN, "linestyle": "-.", "marker": "s"},
    {"color": PURPLE, "linestyle": (0, (4, 1, 1, 1, 1, 1)), "marker": "D"},
    {"color": ORANGE, "linestyle": (0, (6, 2)), "marker": "v"},
    {"color": SKY, "linestyle": (0, (1, 1)), "marker": "P"},
)
DASHED: dict[str, Any] = {"color": RED, "linestyle": "--"}
DOTTED: dict[str, Any] = {"color": GREEN, "linestyle": "-."}
LOW = 1e-8  # smaller norms have the last colour
NORM = r"$\|\partial y_N / \partial y_j\|_2$"


def new_figure(width: float, height: float) -> Figure:
    """A figure of the given size in inches, without a display."""
    figures = require("matplotlib.figure", extra="plot")
    agg = require("matplotlib.backends.backend_agg", extra="plot")
    size = (width, height)
    figure = figures.Figure(figsize=size, dpi=150, layout="constrained")
    agg.FigureCanvasAgg(figure)
    return figure


def axes_or_new(
    ax: Axes | None, width: float = 6.0, height: float = 3.8
) -> Axes:
    """The given Axes, or the Axes of a new figure of the given size."""
    return new_figure(width, height).add_subplot() if ax is None else ax


def finish(ax: Axes, columns: int, **labels: Any) -> Axes:
    """The Axes with labels, and a legend below, where it covers no data."""
    ax.set(**labels)
    transforms = require("matplotlib.transforms", extra="plot")
    # In points, not in fractions of the axes: labels do not overlap the legend at any size.
    below = transforms.offset_copy(
        ax.transAxes, fig=ax.figure, y=-36, units="points"
    )
    ax.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, 0.0),
        bbox_transform=below,
        ncols=columns,
        frameon=False,
        borderaxespad=0.0,
    )
    return ax


def level_one(ax: Axes, **label: Any) -> None:
    """Draw the line of norm 1."""
    ax.axhline(1.0, color=BLACK, linewidth=0.8, linestyle=":", **label)


def training_history(
    history: History, ax: Axes | None = None, *, test: Sequence[float] = ()
) -> Axes:
    """Draw the loss of each epoch and, for classes, the fraction of wrong labels, on a log scale.

    Args:
        history: the result of `hdnn.training.fit`; a mark shows the epoch with the lowest held-out
            loss.
        ax: the Axes to draw into; by default a new figure.
        test: accuracies on test data after each epoch; the fraction of wrong test labels is also
            drawn.

    Examples:
        >>> import hdnn
        >>> history = hdnn.training.History(loss=[0.7, 0.3, 0.1], accuracy=[0.5, 0.9, 1.0])
        >>> ax = hdnn.plotting.training_history(history)
        >>> ax.get_xlabel(), ax.get_yscale()
        ('epoch', 'log')
    """
    ax = axes_or_new(ax)
    best = history.best_epoch
    label = f"held-out loss (lowest in epoch {best})"
    _epochs(ax, history.loss, label="loss", color=BLUE)
    _epochs(ax, history.validation_loss, label=label, color=BLACK)
    wrong = [1 - accuracy for accuracy in history.accuracy]
    _epochs(ax, wrong, label="wrong labels", **DASHED)
    wrong = [1 - accuracy for accuracy in test]
    _epochs(ax, wrong, label="wrong labels, test", **DOTTED)
    if best:
        lowest = history.validation_loss[best - 1]
        ax.plot(best, lowest, color=BLACK, marker="o")
    if ax.lines:
        ax.set_yscale("log")
    ax.xaxis.get_major_locator().set_params(integer=True)  # pyright: ignore
    ax.grid(alpha=0.3)
    ax.set_title("Training")
    return finish(ax, 2, xlabel="epoch", ylabel="mean over minibatches")


def _epochs(ax: Axes, values: Sequence[float], **style: Any) -> None:
    """Draw a curve over the epochs, without zeros, which have no logarithm."""
    shown = [value if value > 0 else math.nan for value in values]
    if any(map(math.isfinite, shown)):
        marker = "o" if len(values) < 3 else ""
        ax.plot(range(1, len(values) + 1), shown, marker=marker, **style)


def certificate_norms(certificate: Certificate, ax: Axes | None = None) -> Axes:
    """Draw the smallest, median and largest norm of dy_N/dy_j in a certificate against j.

    The parts of a model are drawn side by side in a new figure.

    Args:
        certificate: the result of `hdnn.analysis.certify`.
        ax: the Axes to draw into; by default a new figure.

    Examples:
        >>> import hdnn
        >>> certificate = hdnn.analysis.certify(hdnn.H2(features=4, layers=16))
        >>> ax = hdnn.plotting.certificate_norms(certificate)  # or certificate.plot()
        >>> ax.get_title()
        'Sensitivity of the output, 20 samples'
    """
    count = len(certificate.parts)
    if count:
        figure = new_figure(1.0 + 4.2 * count, 3.8)
        for place, (name, part) in enumerate(certificate.parts.items(), 1):
            ax = certificate_norms(part, figure.add_subplot(1, count, place))
            ax.set_title(f"{name}: {part.samples} samples")
        return ax  # pyright: ignore[reportReturnType]
    ax = axes_or_new(ax)
    if certificate.by_layer:
        _norm_curves(ax, **certificate.by_layer)
        samples = certificate.samples
        plural = "s" if samples != 1 else ""
        ax.set_title(f"Sensitivity of the output, {samples} sample{plural}")
    if certificate.violations:
        ax.set_title("A guarantee does not hold numerically", color=RED)
    elif certificate.trouble:
        ax.set_title("Not all norms could be computed", color=RED)
    return ax


def _norm_curves(
    ax: Axes, layers: Any, smallest: Any, median: Any, largest: Any, **_: Any
) -> None:
    ax.fill_between(
        layers, smallest, largest, color=SKY, alpha=0.25, linewidth=0
    )
    ax.plot(layers, largest, label="largest", **DASHED)
    ax.plot(layers, median, label="median", color=BLUE)
    ax.plot(layers, smallest, label="smallest", **DOTTED)
    level_one(ax, label="norm 1")
    least = min(smallest)
    if 0 < 20 * least < max(largest):
        ax.set_yscale("log")
    ax.set_xlim(0, max(layers[-1], 1))
    finish(ax, 4, xlabel="layer $j$", ylabel=NORM)


def gradient_surface(
    monitor: GradientMonitor,
    ax: Axes | None = None,
    *,
    name: str = "smallest",
) -> Axes:
    """Draw norm(dy_N/dy_j) during training, as colours over steps and layers.

    Args:
        monitor: an `hdnn.analysis.GradientMonitor` that has recorded something.
        ax: the Axes to draw into; by default a new figure.
        name: the norm over the samples to draw: "smallest", "median", "largest", or "of_mean", the
            norm of the samples' mean matrix.

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
        raise OptionError(
            "the monitor has recorded nothing yet: train with fit(callbacks=[monitor]), or call "
            "monitor.step() after each step of your own loop, then plot."
        )
    colors = require("matplotlib.colors", extra="plot")
    ax = axes_or_new(ax)
    values = monitor.table(name)[:, :-1].T.clamp_min(LOW)
    high = max([10.0, *values[values.isfinite()].tolist()])
    low, top = math.log10(LOW), math.log10(high)
    logs = values.log10().nan_to_num(nan=0.0, posinf=top).numpy()
    # Dark red means vanished, white 1, blue growth; equal colour steps are equal factors.
    image = ax.pcolormesh(
        monitor.recorded_steps,
        range(len(logs)),
        logs,
        cmap="RdBu",
        norm=colors.TwoSlopeNorm(0.0, low, top),
        shading="nearest",
        rasterized=True,
    )
    bar = ax.figure.colorbar(image, ax=ax)
    powers = [*range(round(low), 1, 2), top]
    bar.set_ticks(powers, labels=[f"{10**power:.2g}" for power in powers])
    bar.set_label(f"{NORM}, {name.replace('_', ' ')}")
    ax.set(xlabel="iteration", ylabel="layer $j$")
    return ax


def diagnosis_gains(diagnosis: Diagnosis, ax: Axes | None = None) -> Axes:
    """Draw the share of a random gradient that is left at each layer, and mark faulty layers.

    Args:
        diagnosis: the result of `hdnn.diagnose`.
        ax: the Axes to draw into; by default a new figure.

    Examples:
        >>> import hdnn, torch
        >>> diagnosis = hdnn.diagnose(torch.nn.Sequential(torch.nn.Linear(4, 4)), torch.randn(8, 4))
        >>> ax = hdnn.plotting.diagnosis_gains(diagnosis)  # or diagnosis.plot()
        >>> ax.get_yscale()
        'log'
    """
    ax = axes_or_new(ax, width=7.0)
    names = [layer.layer for layer in diagnosis.layers]
    gains = [layer.gain or math.nan for layer in diagnosis.layers]
    own = [layer.own or math.nan for layer in diagnosis.layers]
    ax.semilogy(gains, "^--", color=RED, label="left of the gradient")
    ax.semilogy(own, ".", color=BLUE, label="let through by the layer")
    level_one(ax)
    for fault in diagnosis.faults:
        if fault.layer in names:
            place = names.index(fault.layer)
            ax.axvline(place, color=ORANGE, linewidth=4, alpha=0.4, zorder=0)
    ticks = range(0, len(names), len(names) // 12 + 1)
    labels = [names[j][-24:] for j in ticks]
    ax.set_xticks(ticks, labels, rotation=30, ha="right", fontsize=7)
    title = textwrap.shorten(diagnosis.summary, 90, placeholder=" ...")
    ax.set(ylabel="size", title=title)
    ax.legend(frameon=False, fontsize=8)
    return ax
