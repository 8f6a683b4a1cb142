"""Pictures of a training, where matplotlib is installed."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hdnn.base.files import write_atomically
from hdnn.errors import MissingExtraError, require

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROOM = 4 * 2**20  # bytes that the pictures of a run may take, with a margin


def drawn(draw: Callable[[], dict[str, Axes]], folder: Path) -> dict[str, Any]:
    """The PNG files of what `draw` returns, by its names, or the reason why there are none."""
    try:
        require("matplotlib", extra="plot")
    except MissingExtraError as error:
        return {"pictures": {}, "no_pictures_because": str(error)}
    return {
        "pictures": {name: save_picture(ax, folder / f"{name}.png") for name, ax in draw().items()}
    }


def save_picture(ax: Axes, path: Path) -> str:
    """Write the figure of `ax` as a PNG."""
    picture = io.BytesIO()
    ax.figure.canvas.print_figure(picture, format="png")
    write_atomically(path, picture.getvalue())
    return str(path)
