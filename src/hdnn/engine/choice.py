"""Which of the fused kernels runs a stack: the one that was measured to be fastest for its sizes.

`python benchmarks/engine.py --device cuda --choose` measures all of them over a grid of widths,
batches and depths, and writes `choices.json`. Between them times are interpolated; a batch counts
as the one of the grid that it is nearest to, in ratio. Past the widest state that one kernel can
hold, nothing is to be chosen.
"""

from __future__ import annotations

import json
import math
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from hdnn.engine.tracing import constant

TABLE = Path(__file__).with_name("choices.json")
BATCHES = (32, 512, 8192)  # those of the table


def scheme(turns: tuple[int, ...]) -> str:
    """What decides how long a step takes: which parts move, and in which order."""
    if not turns:
        return "euler"
    return "alternating" if len(turns) == 2 else "shears"


def nearest_batch(samples: Any) -> int:
    """By comparisons alone, so that a compiler may leave the number of samples open."""
    for k in range(len(BATCHES) - 1):
        if samples * samples <= BATCHES[k] * BATCHES[k + 1]:
            return BATCHES[k]
    return BATCHES[-1]


@constant
def best(device: str, scheme: str, precision: str, n: int, batch: int, layers: int) -> str:
    """The fastest kernel for a stack; `batch` is one of the grid."""
    return _best(device, scheme, precision, n, batch, layers)


@cache
def _best(device: str, scheme: str, precision: str, n: int, batch: int, layers: int) -> str:
    rows = _table()[device]["ms"][scheme]["ieee" if precision == "tf32x3" else precision]
    times = {name: _time(name, grid[str(batch)], n, layers) for name, grid in rows.items()}
    return min(times, key=lambda name: times[name])


@cache
def _table() -> dict[str, Any]:
    return json.loads(TABLE.read_text())


def _time(name: str, times: dict[str, dict[str, float]], n: int, layers: int) -> float:
    """The time for a width and a depth, from those of the grid: times[width][depth]."""
    at = {
        int(width): _between({int(depth): time for depth, time in row.items()}, layers)
        for width, row in times.items()
    }
    if name == "one kernel":  # it fills up its tiles: as slow as for the next width of the grid
        n = min((width for width in at if width >= n), default=n)
    return _between(at, n)


def _between(values: dict[int, float], x: int) -> float:
    """Straight lines between points, both axes in ratio; level beyond the first and the last."""
    known = sorted(values)
    if x <= known[0]:
        return values[known[0]]
    for low, high in pairwise(known):
        if x <= high:
            share = math.log(x / low) / math.log(high / low)
            return values[low] ** (1 - share) * values[high] ** share
    return values[known[-1]]
