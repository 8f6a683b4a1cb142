"""Where the lines, marks and numbers of a curve lie in an SVG, so that pages need no plotting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar

# Colours of Okabe and Ito, safe for colour-blind readers; lines differ in their dashes too.
BLUE, RED, GREEN = "var(--blue)", "var(--red)", "var(--green)"
FLAT = 5e-3  # of their size: values that differ by less are drawn as a flat line

Piece = list[tuple[float, float]]  # points of a line without a gap


@dataclass(frozen=True)
class Line:
    """One line of a curve; where a value is None, the line is open."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    colour: str
    dash: str = ""


class Canvas:
    """What a chart is drawn in, in pixels; it is small, so that a phone can show it."""

    width: ClassVar = 380
    left: ClassVar = 56
    right: ClassVar = 368
    height: ClassVar[int]
    top: ClassVar[int]
    bottom: ClassVar[int]

    @classmethod
    def across(cls, x: float, low: float, high: float) -> float:
        """Where x lies, if the frame goes from low to high."""
        share = (x - low) / (high - low) if high > low else 0.5
        return round(cls.left + share * (cls.right - cls.left), 1)

    @classmethod
    def down(cls, y: float, low: float, high: float) -> float:
        share = (y - low) / (high - low) if high > low else 0.5
        return round(cls.bottom - share * (cls.bottom - cls.top), 1)


@dataclass(frozen=True)
class Curve(Canvas):
    """Lines over one axis, all places in pixels."""

    label: str  # of the axis
    lines: list[tuple[Line, list[Piece]]]
    marks: list[tuple[float, str]]
    marks_across: list[tuple[float, str]]
    level: float | None  # where a line goes all the way across
    upright: float | None = None  # and all the way up

    height: ClassVar = 240
    top: ClassVar = 12
    bottom: ClassVar = 200

    @property
    def title(self) -> str:
        return f"{', '.join(line.name for line, _ in self.lines)} against the {self.label}"


def curve(
    lines: list[Line],
    label: str,
    *,
    level: float | None = None,
    upright: float | None = None,
    linear: bool = False,
) -> Curve | None:
    """Lines over one axis; None without values.

    Upwards it is logarithmic where nothing is negative, with zeros at the lower edge, unless it is
    to be `linear`: then it begins at 0.
    """
    points = [y for line in lines for y in line.y if y is not None]
    if not points:
        return None
    positive = [y for y in points if y > 0]
    log = len(positive) == len([y for y in points if y != 0]) and bool(positive) and not linear
    ends = [*(positive if log else points), *([] if level is None else [level])]
    if linear:
        ends.append(0.0)
    if log and max(ends) <= 3 * min(ends):  # a smaller range is easier to read on a linear axis
        log, ends = False, [*ends, *points]
    low, high = min(ends), max(ends)
    if log and len(points) > len(positive):
        low = max(low / 2, 5e-324)
    if high - low < FLAT * abs(high):  # the curve would show nothing but rounding
        low, high = low - FLAT * abs(low), high + FLAT * abs(high)
    heights = log_marks(low, high) if log else marks(low, high)
    low, high = min(low, heights[0]), max(high, heights[-1])
    x_low, x_high = min(lines[0].x), max(lines[0].x)

    def across(x: float) -> float:
        return Curve.across(x, x_low, x_high)

    def down(y: float) -> float:
        ends = max(y, low) if log else y, low, high
        return Curve.down(*(map(math.log10, ends) if log else ends))

    def pieces(line: Line) -> list[Piece]:
        """The line, in pieces where values are missing."""
        points = zip(line.x, line.y, strict=True)
        runs = groupby(points, lambda point: point[1] is None)
        found = [[(across(x), down(y)) for x, y in run if y is not None] for _, run in runs]
        return [piece for piece in found if piece]

    return Curve(
        label,
        [(line, pieces(line)) for line in lines],
        [(down(mark), f"{mark:g}") for mark in heights],
        [(across(mark), f"{mark:g}") for mark in marks(x_low, x_high, whole=True)],
        None if level is None else down(level),
        None if upright is None else across(upright),
    )


def marks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """About five round numbers around `low` to `high`, or whole ones inside."""
    span = high - low
    if not span > 0:
        return [low]
    raw = span / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    if whole:
        step = max(step, 1.0)
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [k * step for k in range(first, last + 1)] or [low]


def log_marks(low: float, high: float) -> list[float]:
    """Powers of ten, or 1, 2, 5, 10 .. where these would be too few."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    if high <= 100 * low:
        fine = [m * 10.0**k for k in range(first, last + 1) for m in (1, 2, 5)]
        inside = [mark for mark in fine if low * 0.999 <= mark <= high * 1.001]
        below = [mark for mark in fine if mark < low * 0.999][-1:]
        above = [mark for mark in fine if mark > high * 1.001][:1]
        return [*below, *inside, *above] or [low]
    every = -(-(last - first) // 6)
    powers = [10.0**k for k in range(first, last + 1) if k % every == 0 and k < 308]
    return [mark for mark in powers if low * 0.999 <= mark <= high * 1.001] or [low]
