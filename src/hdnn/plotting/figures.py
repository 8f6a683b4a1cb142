"""What all pictures share: new figures, logarithmic axes, legends.

Figures are made without pyplot: no window, no display, no global state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hdnn.errors import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def axes_of(ax: Axes | None, size: tuple[float, float]) -> Axes:
    """The given Axes, or those of a new figure that needs no display."""
    figure = require("matplotlib.figure", extra="plot")
    if ax is not None:
        return ax
    require("matplotlib.backends.backend_agg", extra="plot").FigureCanvasAgg(
        fresh := figure.Figure(figsize=size, dpi=150, layout="constrained")
    )
    return fresh.add_subplot()


def log_scale(ax: Axes) -> None:
    """A log axis with ticks 1, 2, 5, 10 .. over a few decades, or powers of ten over more."""
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    if high < 1e4 * low:
        ticker = require("matplotlib.ticker", extra="plot")
        ax.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
        ax.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
        ax.yaxis.set_minor_formatter(ticker.NullFormatter())


def legend_below(ax: Axes, columns: int, **options: Any) -> None:
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
