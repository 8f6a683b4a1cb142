"""Values from files, which may hold anything, as text for the page."""

from __future__ import annotations

import math
from typing import Any

from hdnn.analysis import words
from hdnn.app import results

NONE = "–"  # in place of what is not there


def listed(given: Any, name: str) -> list[Any]:
    """The list of that name, or an empty one."""
    value = given.get(name) if isinstance(given, dict) else None
    return value if isinstance(value, list) else []


def dicts(given: Any, name: str) -> list[dict[str, Any]]:
    """The dicts in the list of that name."""
    return [one for one in listed(given, name) if isinstance(one, dict)]


def entry(given: Any, name: str) -> dict[str, Any]:
    """The dict of that name, or an empty one."""
    value = given.get(name) if isinstance(given, dict) else None
    return value if isinstance(value, dict) else {}


def number(value: Any) -> float | None:
    """A finite number, or None."""
    found = words.number(value)
    return None if found is None or math.isinf(found) else found


def text(value: Any, digits: int = 4) -> str:
    """Whatever it is: numbers with a few digits, and nothing for None."""
    found = number(value)
    if isinstance(value, list):
        return ", ".join(text(one) for one in value)
    if found is None:
        return "" if value is None else str(value)
    return str(value) if isinstance(value, int) else f"{found:.{digits}g}"


def percent(value: Any, digits: int = 1) -> str:
    """A fraction in per cent; a small part of the whole is never rounded to all of it."""
    found = number(value)
    if found is None:
        return NONE
    shown = f"{100 * found:.{digits}f}"
    if found < 1 and float(shown) >= 100:
        shown = f"{100 - 10.0**-digits:.{digits}f}"
    return f"{shown}%"


def counted(count: Any, what: str, several: str = "") -> str:
    """A number of things, such as 1 row or 2,000 rows."""
    found = number(count)
    shown = text(count) if found is None else f"{found:,.0f}"
    return f"{shown} {what if found == 1 else several or what + 's'}"


def score(metrics: dict[str, Any], part: str) -> str:
    """The score that compares runs, on one part of the data."""
    for name, word in (("accuracy", ""), ("r2", "R² "), ("rmse", "RMSE ")):
        value = metrics.get(f"{part}_{name}")
        if value is not None:
            return word + results.measure_text(name, value)
    return ""


def interval(share: float, rows: float) -> tuple[float, float]:
    """Wilson's 95% interval of a share that was seen in so many rows."""
    z = 1.96
    middle = (share + z * z / (2 * rows)) / (1 + z * z / rows)
    half = z * math.sqrt(share * (1 - share) / rows + z * z / (4 * rows * rows))
    half /= 1 + z * z / rows
    return max(0.0, round(middle - half, 9)), min(1.0, round(middle + half, 9))
