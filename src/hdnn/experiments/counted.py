"""Cells of a table beside the paper's figures: at or above them, or within what it rounds off.

Where the paper prints 100%, without decimals, 99.95% may have been meant. Strictly, a mean of 99.95
is below 100; within rounding it is not. All other figures are taken as they are printed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hdnn.experiments import runner
from hdnn.experiments.runner import Job

ROUNDED = 99.95  # may be printed as 100
EPS = 1e-9  # for sums of numbers such as 99.9; one test point of one seed is more than 1e-3


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
