"""Markers, lines, and the colours of Okabe and Ito, which colour-blind readers can tell apart."""

from __future__ import annotations

from typing import Any

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
