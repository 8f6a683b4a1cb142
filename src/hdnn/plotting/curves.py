"""Curves of a network and of its training: norms of dy_N/dy_j, losses, accuracies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from hdnn.errors import ShapeError, require
from hdnn.plotting.figures import axes_of, legend_below, log_scale
from hdnn.plotting.styles import BLACK, BLUE, GREEN, RED, SKY

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from hdnn.analysis import Certificate, GradientMonitor
    from hdnn.training import History


def training_history(
    history: History, ax: Axes | None = None, *, test: Sequence[float] = ()
) -> Axes:
    """The loss of each epoch and, for classes, the fraction of wrong labels, on a log scale.

    `test` are accuracies on test data after each epoch, whose wrong labels are drawn too.
    """
    ax = axes_of(ax, (6.0, 3.8))
    epochs = range(1, len(history.loss) + 1)
    marker = "o" if len(history.loss) < 3 else ""
    ax.plot(epochs, history.loss, color=BLUE, marker=marker, label="loss")
    if history.accuracy:
        # Zero mistakes have no logarithm: such epochs are left out, and the legend says so.
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
        log_scale(ax)
    ax.set(xlabel="epoch", ylabel="mean over minibatches", title="Training")
    ax.xaxis.set_major_locator(
        require("matplotlib.ticker", extra="plot").MaxNLocator(integer=True, steps=[1, 2, 5, 10])
    )
    ax.grid(alpha=0.3)
    legend_below(ax, columns=3 if test else 2)
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


def certificates_norms(certificates: Sequence[Certificate]) -> Axes:
    """The curves of several certificates side by side, those of the parts of one network."""
    count = len(certificates)
    ax = axes_of(None, (1.0 + 4.2 * count, 3.8))
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


def gradient_surface(
    monitor: GradientMonitor, ax: Axes | None = None, *, name: str = "smallest", low: float = 1e-8
) -> Axes:
    """norm(dy_N/dy_j) through a training, as colours over steps and layers (fig:gradients).

    `name` chooses what is shown of the samples: "smallest", "median", "largest", or "of_mean", the
    norm of their mean matrix. What is below `low` has the last colour.
    """
    if not monitor.records:
        raise ShapeError("the monitor has recorded nothing yet.")
    colors = require("matplotlib.colors", extra="plot")
    ax = axes_of(ax, (6.0, 3.8))
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
    ax = axes_of(ax, (6.0, 3.8))
    least, most = curves["smallest"], curves["largest"]
    ax.fill_between(layers, least, most, color=SKY, alpha=0.25, linewidth=0)
    ax.plot(layers, most, color=RED, linestyle="--", label="largest")
    ax.plot(layers, curves["median"], color=BLUE, label="median")
    ax.plot(layers, least, color=GREEN, linestyle="-.", label="smallest")
    ax.axhline(1.0, color=BLACK, linewidth=0.8, linestyle=":", label="norm 1")
    if min(least) > 0 and max(most) > 20 * min(least):
        log_scale(ax)
    ax.set(xlabel="layer $j$", ylabel=r"$\|\partial y_N / \partial y_j\|_2$")
    ax.set_xlim(0, max(layers[-1], 1))
    ax.set_title(f"Sensitivity of the output, {samples} sample{'s' * (samples != 1)}")
    legend_below(ax, columns=4)
    return ax
