"""Where points, spans and bars of a chart lie in an SVG: beside the curves, what a report draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from hdnn.app.svg_curves import Canvas, marks


@dataclass(frozen=True)
class Chart(Canvas):
    """Points, spans and bars in one frame, all places in pixels."""

    label: str  # of the axis
    label_up: str
    title: str
    marks: list[tuple[float, str]]
    marks_across: list[tuple[float, str]]
    diagonal: tuple[float, float, float, float] | None = None
    dots: list[tuple[float, float]] = field(default_factory=list)
    spans: list[tuple[float, float, float]] = field(default_factory=list)  # x, and from y to y
    bars: list[tuple[float, float, float, float]] = field(default_factory=list)  # x, y, and size
    upright: float | None = None

    height: ClassVar = 260
    top: ClassVar = 28
    bottom: ClassVar = 220


@dataclass(frozen=True)
class Axes:
    """From numbers to pixels."""

    low: float
    high: float
    low_up: float
    high_up: float

    def across(self, x: float) -> float:
        return Chart.across(x, self.low, self.high)

    def down(self, y: float) -> float:
        return Chart.down(y, self.low_up, self.high_up)


def with_diagonal(
    points: Sequence[tuple[float, float]],
    labels: tuple[str, str],
    title: str,
    *,
    spans: Sequence[tuple[float, float, float]] = (),
    ends: Sequence[tuple[float, float]] = (),
) -> Chart | None:
    """Points over two axes, and the line on which the two are equal.

    Spans are uprights at x, from y to y. `ends` are those of both axes; by default one range, that
    of the points, is for both.
    """
    if not points:
        return None
    values = [value for point in points for value in point]
    ticks, ticks_up = (_ticks(*some) for some in (ends or [(min(values), max(values))] * 2))
    frame = Axes(ticks[0], ticks[-1], ticks_up[0], ticks_up[-1])
    first, last = max(ticks[0], ticks_up[0]), min(ticks[-1], ticks_up[-1])
    return Chart(
        *labels,
        title,
        [(frame.down(mark), f"{mark:.6g}") for mark in ticks_up],
        [(frame.across(mark), f"{mark:.6g}") for mark in ticks],
        (frame.across(first), frame.down(first), frame.across(last), frame.down(last)),
        [(frame.across(x), frame.down(y)) for x, y in points],
        [(frame.across(x), frame.down(low), frame.down(high)) for x, low, high in spans],
    )


def histogram(
    edges: Sequence[float], counts: Sequence[float], labels: tuple[str, str], title: str
) -> Chart | None:
    """Bars between edges, with an upright at 0 if it is among them."""
    if len(edges) != len(counts) + 1 or not counts or not max(counts) > 0:
        return None
    if not edges[-1] > edges[0]:  # all in one place
        around = abs(edges[0]) / 2 or 0.5
        edges = [edges[0] - around, edges[-1] + around]
    ticks, heights = _ticks(edges[0], edges[-1]), marks(0, max(counts), whole=True)
    if heights[-1] < max(counts):
        heights.append(2 * heights[-1] - heights[-2] if len(heights) > 1 else heights[-1] + 1)
    frame = Axes(ticks[0], ticks[-1], 0, heights[-1])
    bars = []
    for low, high, count in zip(edges, edges[1:], counts, strict=False):
        x, y = frame.across(low), frame.down(count)
        bars.append((x, y, round(frame.across(high) - x, 1), round(Chart.bottom - y, 1)))
    return Chart(
        *labels,
        title,
        [(frame.down(mark), f"{mark:g}") for mark in heights],
        [(frame.across(mark), f"{mark:.6g}") for mark in ticks],
        bars=bars,
        upright=frame.across(0) if ticks[0] < 0 < ticks[-1] else None,
    )


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers around a range, also one that is a single number."""
    if not high - low > 1e-9 * max(abs(low), abs(high)):
        around = abs(low) / 2 or 0.5
        low, high = low - around, high + around
    found = marks(low, high)
    return found if len(found) > 1 else [low, high]
