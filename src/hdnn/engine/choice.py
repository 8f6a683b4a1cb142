"""Which of the fused kernels runs a stack: the one that was measured to be fastest for its sizes.

`python benchmarks/engine.py --device cuda --choose` measures all of them over a grid of widths,
batches and depths, and writes `choices.json`; `--device cpu` does so for the kernels of the CPU.
Between the points of the grid times are interpolated; beyond, the nearest decides. Compilers leave
sizes open: there they count as those of the grid that they are nearest to, in ratio. Past the
widest state that one kernel of a GPU can hold, nothing is to be chosen.
"""

from __future__ import annotations

import json
import math
from functools import cache, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from hdnn.engine.kernels.vectors import VECTOR_BYTES
from hdnn.engine.tracing import constant

TABLE = Path(__file__).with_name("choices.json")
ONE_THREAD = "cpu, one thread"  # its times in the table; there are others for several threads
BATCHES = {
    "cpu": (1, 8, 32, 128, 512, 2048),
    "cuda": (32, 128, 512, 2048, 8192),
}  # those of the table
DEPTHS = (16, 64)
WIDTHS = (32, 64, 96, 128, 192, 256, 384, 512, 1024)  # those of a CPU


def scheme(turns: tuple[int, ...]) -> str:
    """What decides how long a step takes: which parts move, and in which order."""
    if not turns:
        return "euler"
    return "alternating" if len(turns) == 2 else "shears"


def nearest_batch(samples: Any, device: str) -> int:
    """By comparisons alone, so that a compiler may leave the number of samples open."""
    return _nearest(samples, BATCHES[device])


def nearest_width(n: Any) -> int:
    """The same for the width of a state on a CPU."""
    return _nearest(n, WIDTHS)


def _nearest(x: Any, known: tuple[int, ...]) -> int:
    for k in range(len(known) - 1):
        if x * x <= known[k] * known[k + 1]:
            return known[k]
    return known[-1]


@constant
def best(device: str, scheme: str, precision: str, n: int, batch: int, layers: int) -> str:
    """The fastest kernel for a stack; the precision on a CPU is the dtype."""
    return _best(device, scheme, precision, n, batch, layers)


@lru_cache(maxsize=4096)
def _best(device: str, scheme: str, precision: str, n: int, batch: int, layers: int) -> str:
    rows = _table()[device]["ms"][scheme]["ieee" if precision == "tf32x3" else precision]
    times = {}
    for name, grid in rows.items():
        samples = batch
        if name == "tiles":  # the last one takes as long as the others
            lanes = VECTOR_BYTES // (8 if precision == "float64" else 4)
            samples = -(-batch // lanes) * lanes
        # Large batches were not measured for the widest states.
        wide = min(n, max(int(width) for each in grid.values() for width in each))
        by_batch = {
            int(b): _time(name, each, n, layers)
            for b, each in grid.items()
            if any(int(width) >= wide for width in each)
        }
        times[name] = _between(by_batch, samples)
    return min(times, key=lambda name: times[name])


@cache
def _table() -> dict[str, Any]:
    found = json.loads(TABLE.read_text())
    for device in found.values():
        for by_precision in device["ms"].values():
            for rows in by_precision.values():
                rows.update({name: _unpacked(*packed) for name, packed in rows.items()})
    return found


def _unpacked(widths: list[int], batches: dict[str, list[list[float]]]) -> dict[str, Any]:
    """times[batch][width][depth] from lists of times, where the last ones may be missing."""
    return {
        batch: {width: dict(zip(DEPTHS, row)) for width, row in zip(widths, rows)}  # noqa: B905
        for batch, rows in batches.items()
    }


def _time(name: str, times: dict[Any, dict[Any, float]], n: int, layers: int) -> float:
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
