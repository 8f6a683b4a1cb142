"""Old names that the program still imports."""  # until app is rewritten

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

STATES = {"holds": "holds", "violated": "broken", "not known": "not computed"}


def summary(told: Mapping[str, Any]) -> str:
    return str(told.get("summary", ""))


def summary_of_several(named: Sequence[tuple[str, Mapping[str, Any]]], what: str) -> str:
    return " ".join(f"{name}: {summary(told)}" for name, told in named)


def summary_of_parts(parts: Sequence[Mapping[str, Any]], nothing: str = "") -> str:
    return " ".join(map(summary, parts)) or nothing


def state(told: Mapping[str, Any]) -> str:
    return STATES.get(str(told.get("status")), "not guaranteed")


def where(told: Mapping[str, Any]) -> str:
    return f"{told.get('samples')} {told.get('points')}"


def at_least_text(norm: float, digits: int = 3) -> str:
    if not (math.isfinite(norm) and norm > 0):
        return f"{norm:g}"
    unit = 10.0 ** (math.floor(math.log10(norm)) - digits + 1)
    return f"{math.floor(norm / unit * (1 + 1e-15)) * unit:.{digits}g}"


def number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return None if math.isnan(value) else float(value)


def number_text(value: float | None) -> str:
    return "unknown" if value is None or math.isnan(value) else f"{value:.6g}"
