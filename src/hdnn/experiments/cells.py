"""Cells of a table: trained from several starts, and compared with the paper's figure.

Our recipe for Tables I and II trains on copies of points that are moved a little. Moved copies keep
the border between two classes away from the points of both. Which start is taken follows from the
training points alone.

Where the paper prints 100%, without decimals, 99.95% may have been meant. Strictly, a mean of 99.95
is below 100; within rounding it is not. All other figures are taken as they are printed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

import hdnn
from hdnn.data import planar
from hdnn.errors import ConvergenceError
from hdnn.experiments import runner
from hdnn.experiments.runner import Job
from hdnn.training import fit

ENOUGH = 1e-4  # a loss at which all points are clearly right
ROUNDED = 99.95  # may be printed as 100
EPS = 1e-9  # for sums of numbers such as 99.9; one test point of one seed is more than 1e-3


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
    right = runner.accuracy(model, x_test, t_test)
    return {"accuracy": right, "seconds": round(time.perf_counter() - begin, 2), "starts": starts}


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
    by up to `moved`. Each start has a seed of its own, from which `network_of` makes its network;
    the first has that of the training. A start whose layers get no solution is skipped, unless none
    has one.
    """
    generator = torch.Generator().manual_seed(seed)
    near, labels = x.repeat(copies, 1), t.repeat(copies)
    near += moved * (2 * torch.rand(near.shape, generator=generator, dtype=x.dtype) - 1)
    found: list[tuple[float, hdnn.Model]] = []
    failed: list[ConvergenceError] = []
    for own in range(seed, seed + 1_000_000 * starts, 1_000_000):
        model = network_of(own)
        try:
            fit(model, near, labels, seed=own, progress=False, **options)
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


def reached(value: float, paper: float) -> bool:
    """Whether an accuracy, not rounded, is at or above the paper's figure."""
    return value >= paper - EPS


def within_rounding(value: float, paper: float) -> bool:
    """Whether it is, or may be printed as 100 where the paper prints 100."""
    return reached(value, ROUNDED if paper == 100 else paper)


def spread(found: dict[str, Any]) -> str:
    """Mean and standard deviation over seeds."""
    return f"{found['mean']:.2f} ± {found['std']:.2f}"


def beside_paper(row: dict[str, Any], what: str = "mean") -> str:
    """Mean, spread and the paper's figure; bold where `what` is at or above that figure."""
    mark = "**" if reached(row[what], row["paper"]) and not row.get("failed") else ""
    return f"{mark}{spread(row)}{mark} ({row['worst']:.2f} to {row['best']:.2f}) [{row['paper']:g}]"


def sentence(rows: Sequence[dict[str, Any]], what: str = "mean") -> str:
    """How many of these rows have `what` at or above the paper's figure."""
    strictly = sum(reached(row[what], row["paper"]) for row in rows)
    rounded = sum(within_rounding(row[what], row["paper"]) for row in rows)
    return (
        f"{strictly} of {len(rows)} cells have their {what} at or above the paper's figure; "
        f"within rounding, {ROUNDED} being 100, it is {rounded}."
    )


def compared(
    done: Iterable[tuple[Job, Job]],
    keys: Sequence[str],
    paper: Callable[[str, str, int], float],
    what: str = "mean",
) -> list[dict[str, Any]]:
    """A row for all jobs that agree in these keys, of which network, data and layers come first.

    It has their accuracy over the seeds, and whether `what` is at or above the paper's figure.
    """
    rows = []
    for cell, results in runner.grouped(done, *keys).items():
        ended = [result["accuracy"] for result in results if "accuracy" in result]
        row = {**dict(zip(keys, cell, strict=True)), "paper": paper(*cell[:3])}
        row |= {"failed": len(results) - len(ended), **runner.summary(ended or [0.0])}
        good = not row["failed"] and reached(row[what], row["paper"])
        rows.append({**row, "reached": good})
    return rows


def lines(rows: Iterable[dict[str, Any]], texts: Iterable[str]) -> list[str]:
    """The lines of a table, one for each data set and depth, from rows and their texts."""
    found: dict[str, list[str]] = {}
    for row, text in zip(rows, texts, strict=True):
        place = f"{row['data'].replace('_', ' ')}, {row['layers']}"
        found.setdefault(place, [place]).append(text)
    return [" | ".join(cells) for cells in found.values()]
