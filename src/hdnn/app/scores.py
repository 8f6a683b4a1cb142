"""Scores of a trained model and of the simplest answer, and how results are shown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hdnn.heads import RegressionHead

CHUNK = 4096  # samples that go through a model at once
MOST_NAMES = 20  # names of classes in a line
MORE = "more rows, or columns that say more about the target"


@torch.no_grad()
def outputs(model: Any, x: Tensor) -> np.ndarray:
    """Probabilities (rows, classes) of a classifier, or values (rows,) for regression."""
    model.eval()
    parameter = next(model.parameters())
    rows = x.to(parameter.dtype)
    chunks = [model(chunk) for chunk in rows.split(CHUNK)]
    scores = torch.cat(chunks).double().cpu()
    head: Any = getattr(model, "head", None)
    if isinstance(head, RegressionHead):
        return scores[:, 0].numpy()
    if hasattr(head, "probabilities"):
        return head.probabilities(scores).numpy()
    return scores.softmax(1).numpy()


def evaluate(
    answers: np.ndarray,
    truth: np.ndarray,
    classes: Sequence[str],
    common: int | float,
) -> dict[str, Any]:
    """Scores of answers, with those of always answering the most frequent class, or the mean.

    Args:
        answers: probabilities (rows, classes), or values (rows,).
        truth: labels or values.
        classes: the names of the classes; empty for values.
        common: the most frequent label of the training rows, or their mean value.
    """
    if not classes:
        squares = (answers - truth) ** 2
        error = float(squares.mean())
        variance = float(truth.var())
        r2 = 1 - error / variance if variance else math.nan
        rmse = math.sqrt(error)
        deviations = (truth - common) ** 2
        plain = math.sqrt(float(deviations.mean()))
        text = f"always answering the mean, {common:.4g}, would give an RMSE of {plain:.4g}"
        return {
            "rmse": rmse,
            "r2": r2,
            "baseline_rmse": plain,
            "baseline": text,
            "advice": MORE if rmse >= plain else "",
        }
    chosen = answers.argmax(1)
    count = len(classes)
    counts = np.zeros((count, count), int)
    np.add.at(counts, (truth, chosen), 1)
    right = chosen == truth
    accuracy = float(right.mean())
    plain = float((truth == common).mean())
    missed = sorted({*truth.tolist()} - {*chosen.tolist()})
    advice = MORE if accuracy <= plain else ""
    if missed:
        advice = f"--class-weight balanced in training; {MORE}"
    return {
        "accuracy": accuracy,
        "baseline_accuracy": plain,
        "baseline": f"always answering {classes[int(common)]} would give {plain:.2%}",
        "never_predicted": [classes[label] for label in missed],
        "advice": advice,
        "confusion": {"classes": list(classes), "counts": counts.tolist()},
    }


def score_text(name: str, value: float) -> str:
    """A score, rounded for reading; a score below 100% is never shown as 100%."""
    if not name.endswith("accuracy"):
        return f"{value:.4g}"
    if value < 1:
        value = min(value, 0.9999)
    return f"{value:.2%}"


def score_rows(result: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Rows for a score: the score, its baseline, classes never predicted, and advice."""
    rows = {}
    for name in ("accuracy", "rmse", "r2"):
        value = result.get(prefix + name)
        if value is None:
            continue
        text = score_text(name, value)
        if "baseline" in result and not rows:
            text += f" ({result['baseline']})"
        label = (prefix + name).replace("_", " ")
        rows[label] = text
    never = result.get("never_predicted", [])
    if never:
        rows["never predicted"] = ", ".join(never[:MOST_NAMES])
    if result.get("advice"):
        rows["try"] = result["advice"]
    return rows


def spread(values: Sequence[float]) -> dict[str, float]:
    """The mean, standard deviation and extremes of a score over several runs."""
    return {
        "mean": statistics.fmean(values),
        "std": statistics.stdev(values),
        "smallest": min(values),
        "largest": max(values),
    }


def lines(rows: Mapping[str, Any]) -> str:
    """Names and values as text, one per line."""
    return "\n".join(f"{name:<16} {value}" for name, value in rows.items())
