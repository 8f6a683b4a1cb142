"""Whether a figure is at or above the paper's: strictly, and within what the paper rounds off.

Where the paper prints 100%, without decimals, 99.95% may have been meant. Strictly, a mean of 99.95
is below 100; within rounding it is not. All other figures are taken as they are printed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

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


def sentence(pairs: Iterable[tuple[float, float]], what: str) -> str:
    """How many of these pairs (ours, the paper's) have ours at or above the paper's."""
    pairs = list(pairs)
    strictly = sum(reached(*pair) for pair in pairs)
    rounded = sum(within_rounding(*pair) for pair in pairs)
    return (
        f"{strictly} of {len(pairs)} cells have their {what} at or above the paper's figure; "
        f"within rounding, {ROUNDED} being 100, it is {rounded}."
    )
