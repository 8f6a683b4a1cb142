"""How sensitivities and errors grow: in continuous time, with depth, with the step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hdnn.errors import ShapeError
from hdnn.plotting.figures import axes_of, legend_below
from hdnn.plotting.styles import BLACK, BLUE, RED, SKY, STYLES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from hdnn.analysis.refinement import Convergence


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
    ax = axes_of(ax, (6.0, 3.8))
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
    legend_below(ax, columns=4)
    return ax


def perturbation_growth(
    curves: Mapping[float, tuple[Tensor, Tensor]],
    ax: Axes | None = None,
    *,
    slope: float | None = None,
    diameter: float | None = None,
) -> Axes:
    """The distance that states gamma apart have after t, over gamma: for each gamma (t, sizes).

    `slope` adds the line of an infinitely small gamma, `diameter` the largest value for each gamma.
    """
    ax = axes_of(ax, (6.0, 3.8))
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
    legend_below(ax, columns=3)
    return ax


def layer_growth(
    curves: Mapping[str, Tensor], ax: Axes | None = None, *, rates: Sequence[float] | None = None
) -> Axes:
    """Norms of dy_N/dy_j against N - j, (N+1,) for each name, on a log scale.

    `rates` adds the lines of growth by exp(rate) a layer, for rates other than 0.
    """
    ax = axes_of(ax, (6.0, 3.8))
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
    legend_below(ax, columns=3)
    return ax


def convergence(results: Mapping[str, Convergence], ax: Axes | None = None) -> Axes:
    """Errors against the flow of the ODE over the step h, with slopes of whole orders below."""
    ax = axes_of(ax, (6.0, 4.6))
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
    legend_below(ax, columns=2)
    return ax
