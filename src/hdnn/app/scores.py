"""Scores of a trained model, beside those of the simplest answer, and how results are shown."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hdnn.heads import RegressionHead

CHUNK = 4096  # samples that go through a model at once
MOST_NAMES = 20  # of classes in a line
MORE = "more rows, or columns that say more about the target"


@torch.no_grad()
def outputs(model: Any, x: Tensor) -> np.ndarray:
    """Probabilities (rows, classes) of a classifier, or values (rows,) of a regression."""
    model.eval()
    rows = x.to(next(model.parameters()).dtype)
    scores = torch.cat([*map(model, rows.split(CHUNK))]).double().cpu()
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
    """Scores of answers, beside those of always giving the most frequent class, or the mean.

    Args:
        answers: probabilities (rows, classes), or values (rows,).
        truth: labels, or values.
        classes: their names; none for values.
        common: the most frequent label of the training rows, or their mean value.
    """
    if not classes:
        errors = answers - truth
        spread = float(((truth - truth.mean()) ** 2).sum())
        rmse = float(np.sqrt((errors**2).mean()))
        plain = float(np.sqrt(((truth - common) ** 2).mean()))
        r2 = 1 - float((errors**2).sum()) / spread if spread else float("nan")
        text = f"always answering the mean, {common:.4g}, would give an RMSE of {plain:.4g}"
        return {
            "rmse": rmse,
            "r2": r2,
            "baseline_rmse": plain,
            "baseline": text,
            "advice": MORE if rmse >= plain else "",
        }
    chosen = answers.argmax(1)
    counts = np.zeros((len(classes), len(classes)), int)
    np.add.at(counts, (truth, chosen), 1)
    accuracy = float((chosen == truth).mean())
    plain = float((truth == common).mean())
    missed = np.flatnonzero((counts.sum(0) == 0) & (counts.sum(1) > 0)).tolist()
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
    """A score with as many digits as people read; nothing below 100% is shown as 100%."""
    if not name.endswith("accuracy"):
        return f"{value:.4g}"
    return f"{min(value, 0.9999) if value < 1 else 1:.2%}"


def score_rows(result: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """The score, what is easy, which classes are never predicted, and what to try."""
    rows = {}
    for name in ("accuracy", "rmse", "r2"):
        if result.get(prefix + name) is not None:
            label = (prefix + name).replace("_", " ")
            rows[label] = score_text(name, result[prefix + name])
            if "baseline" in result and len(rows) == 1:
                rows[label] += f" ({result['baseline']})"
    never = result.get("never_predicted", [])
    if never:
        rows["never predicted"] = ", ".join(never[:MOST_NAMES])
    if result.get("advice"):
        rows["try"] = result["advice"]
    return rows


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean, standard deviation and extremes of a score over several runs."""
    return {
        "mean": statistics.fmean(values),
        "std": statistics.stdev(values),
        "smallest": min(values),
        "largest": max(values),
    }


def lines(rows: Mapping[str, Any]) -> str:
    """Names and values for people, a line each."""
    return "\n".join(f"{name:<16} {value}" for name, value in rows.items())
