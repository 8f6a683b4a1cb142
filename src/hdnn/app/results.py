"""Results of trainings, as text for people and as JSON for programs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hdnn.analysis.words import number_text, summary, summary_of_several
from hdnn.app import terminal
from hdnn.app.runfiles import SCORES

ROUNDING = 1e-12  # of a norm in float64


@dataclass(frozen=True, eq=False)
class Result:
    """The metrics of one training, and the function that shows them to people."""

    metrics: dict[str, Any]
    to_text: Callable[[dict[str, Any]], str]


def finish(results: Sequence[Result | None], *, as_json: bool) -> None:
    """Print the result of one training, or of several with mean and spread.

    Nothing is printed for None: another process has the result, and prints it.
    """
    known = [result for result in results if result is not None]
    found = [result.metrics for result in known]
    if not found:
        return
    if len(found) == 1:
        told, text = found[0], known[0].to_text(found[0])
    else:
        over_runs = spread(found)
        told, text = {"runs": found, "summary": over_runs}, spread_text(found, over_runs)
    print(terminal.json_text(told)) if as_json else terminal.print_text(text)


def measures(result: dict[str, Any]) -> dict[str, float]:
    return {name: result[name] for name in SCORES if result.get(name) is not None}


def measure_text(name: str, value: float) -> str:
    return f"{value:.2%}" if name.endswith("accuracy") else f"{value:.4g}"


def smallest_text(certified: dict[str, Any]) -> str:
    norm = certified["smallest_norm"]
    found = "unknown" if norm is None or math.isnan(norm) else rounded_down(norm)
    text = f"smallest norm(dy_N/dy_j) = {found}"
    if not certified["guaranteed"]:
        return f"{text} (no guarantee: {certified['guarantee']})"
    if certified["holds"] is None:
        return f"{text}: COULD NOT BE COMPUTED, {certified.get('unknown') or 'nothing is known'}"
    return f"{text} >= 1: {'holds' if certified['holds'] else 'DOES NOT HOLD'}"


def spread(results: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Mean, standard deviation and extremes of each measure over several runs."""
    found = {}
    for name in measures(results[0]):
        values = [result[name] for result in results if result.get(name) is not None]
        found[name] = {
            "runs": len(values),
            "mean": statistics.fmean(values),
            "std": statistics.stdev(values) if len(values) > 1 else 0.0,
            "smallest": min(values),
            "largest": max(values),
        }
    return found


def spread_text(results: list[dict[str, Any]], over_runs: dict[str, dict[str, float]]) -> str:
    rows = []
    for result in results:
        found = ", ".join(f"{name} {value}" for name, value in measure_rows(result))
        rows.append((f"seed {result['seed']}", f"{found}  {result['run']}"))
    for name, values in over_runs.items():
        mean, low, high = (
            measure_text(name, values[key]) for key in ("mean", "smallest", "largest")
        )
        text = f"mean {mean}, std {measure_text(name, values['std'])}, from {low} to {high}"
        rows.append((name.replace("_", " "), text))
    certified = [(f"Seed {result['seed']}", result.get("certificate")) for result in results]
    known = [(name, told) for name, told in certified if isinstance(told, dict)]
    if len(known) == len(results):
        rows.append(("gradients", summary_of_several(known, "runs")))
    return terminal.rows_text(rows)


def stopping_rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    """What was held out of a training, what was watched, and what was kept."""
    rows = []
    if "validation_rows" in result:
        loss = result.get("validation_loss")
        text = f", loss {loss:.4g}" if loss is not None else ""
        rows.append(("held out", f"{result['validation_rows']} rows{text}"))
    if "watched" in result:
        kept = result.get("kept_epoch")
        text = f"; the model of epoch {kept} is kept" if kept else ""
        rows.append(("patience", f"{result['patience']} epochs, for the {result['watched']}{text}"))
    return rows


def measure_rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Accuracies or errors, a row each."""
    found = measures(result).items()
    return [(name.replace("_", " "), measure_text(name, value)) for name, value in found]


def gradient_rows(certified: dict[str, Any]) -> list[tuple[str, str]]:
    """What one certificate says: in words, then in numbers."""
    largest = f"largest  norm(dy_N/dy_j) = {number_text(certified['largest_norm'])}"
    return [("gradients", summary(certified)), ("", smallest_text(certified)), ("", largest)]


def picture_rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    """The pictures of a training, or why there are none."""
    rows = [("picture", path) for path in result["pictures"].values()]
    if "no_pictures_because" in result:
        rows.append(("pictures", f"none: {result['no_pictures_because']}"))
    return rows


def rounded_down(norm: float) -> str:
    """Six digits, rounded down: what is printed as 1 is at least 1."""
    return f"{math.floor((norm + ROUNDING) * 1e6) / 1e6:.6f}"
