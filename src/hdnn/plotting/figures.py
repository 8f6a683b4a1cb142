"""What all pictures share: colours, new figures, logarithmic axes, labels and legends.

Figures are made without pyplot: no window, no display, no global state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hdnn.errors import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The colours of Okabe and Ito, which colour-blind readers can tell apart.
ORANGE, SKY, GREEN, BLUE, RED = "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00"
PURPLE, BLACK = "#CC79A7", "#000000"
CLASSES = ((BLUE, "o"), (ORANGE, "^"))
STYLES: tuple[dict[str, Any], ...] = (  # of lines, in turns
    {"color": BLUE, "linestyle": "-", "marker": "o"},
    {"color": RED, "linestyle": "--", "marker": "^"},
    {"color": GREEN, "linestyle": "-.", "marker": "s"},
    {"color": PURPLE, "linestyle": (0, (4, 1, 1, 1, 1, 1)), "marker": "D"},
    {"color": ORANGE, "linestyle": (0, (6, 2)), "marker": "v"},
    {"color": SKY, "linestyle": (0, (1, 1)), "marker": "P"},
)
LEVEL_1: dict[str, Any] = {"color": BLACK, "linewidth": 0.8, "linestyle": ":"}  # the norm 1


def new_figure(width: float, height: float) -> Figure:
    """A figure of that size in inches, without a display."""
    figure = require("matplotlib.figure", extra="plot").Figure(
        figsize=(width, height), dpi=150, layout="constrained"
    )
    require("matplotlib.backends.backend_agg", extra="plot").FigureCanvasAgg(figure)
    return figure


def axes_of(ax: Axes | None, width: float = 6.0, height: float = 3.8) -> Axes:
    """The given Axes, or those of a new figure of that size."""
    return new_figure(width, height).add_subplot() if ax is None else ax


def log_scale(ax: Axes) -> None:
    """A log axis with ticks 1, 2, 5, 10 .. over a few decades, or powers of ten over more."""
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    if high < 1e4 * low:
        ticker = require("matplotlib.ticker", extra="plot")
        ax.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
        ax.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
        ax.yaxis.set_minor_formatter(ticker.NullFormatter())


def finished(ax: Axes, columns: int, *, markerscale: float | None = None, **labels: Any) -> Axes:
    """The Axes with their labels, and a legend under these, where it covers no data."""
    ax.set(**labels)
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
        markerscale=markerscale,
    )
    return ax
