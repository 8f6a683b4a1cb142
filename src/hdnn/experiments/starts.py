"""Training on copies of points that are moved a little, from several starts: our recipe for tables.

Moved copies keep the border between two classes away from the points of both. Which start is taken
follows from the training points alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import hdnn
from hdnn.data import planar
from hdnn.errors import ConvergenceError
from hdnn.experiments.runner import Job, accuracy
from hdnn.training import fit

ENOUGH = 1e-4  # a loss at which all points are clearly right


def measured(job: Job, trained: Callable[[Job, Tensor, Tensor], tuple[hdnn.Model, int]]) -> Job:
    """One training: its accuracy on the test set, or on what was kept aside."""
    begin = time.perf_counter()
    data = planar.load(job["data"], seed=job["seed"])
    x, t, x_test, t_test = data.x_train, data.t_train, data.x_test, data.t_test
    if job.get("validation"):
        kept = len(x) // 5
        x, t, x_test, t_test = x[kept:], t[kept:], x[:kept], t[:kept]
    try:
        model, starts = trained(job, x, t)
    except ConvergenceError as error:
        return {"failed": str(error)}
    right = accuracy(model, x_test, t_test)
    return {"accuracy": right, "seconds": round(time.perf_counter() - begin, 2), "starts": starts}


def start_seed(seed: int, start: int) -> int:
    """The seed of a start's weights and order; the first has that of the training."""
    return seed + 1_000_000 * start


def best_start(
    network_of: Callable[[int], hdnn.Model],
    x: Tensor,
    t: Tensor,
    seed: int,
    *,
    moved: float,
    copies: int,
    starts: int,
    **options: Any,
) -> tuple[hdnn.Model, int]:
    """The start with the least loss, and how many were made: a loss below ENOUGH ends the search.

    Each is trained, with the options of `fit`, on copies of the points whose coordinates are moved
    by up to `moved`. `network_of` gives the network of a start. A start whose layers get no
    solution is skipped, unless none has one.
    """
    generator = torch.Generator().manual_seed(seed)
    near, labels = x.repeat(copies, 1), t.repeat(copies)
    near += moved * (2 * torch.rand(near.shape, generator=generator, dtype=x.dtype) - 1)
    found: list[tuple[float, hdnn.Model]] = []
    failed: list[ConvergenceError] = []
    for start in range(starts):
        model = network_of(start)
        try:
            fit(model, near, labels, seed=start_seed(seed, start), progress=False, **options)
        except ConvergenceError as error:
            failed.append(error)
            continue
        with torch.no_grad():
            found.append((float(model.loss(x, t)), model))
        if found[-1][0] < ENOUGH:
            break
    if not found:
        raise failed[-1]
    return min(found, key=lambda pair: pair[0])[1], len(found) + len(failed)
