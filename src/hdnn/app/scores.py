"""Scores of a trained model, beside those of the simplest answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hdnn.heads import RegressionHead

CHUNK = 4096  # samples that go through a model at once


@torch.no_grad()
def outputs(model: Any, x: Tensor) -> np.ndarray:
    """Probabilities (rows, classes) of a classifier, or values (rows,) of a regression."""
    model.eval()
    scores = (
        torch.cat([model(chunk) for chunk in x.split(CHUNK)]).double().cpu()
    )
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
    """Scores of answers, beside those of always giving the commonest class, or the mean.

    Args:
        answers: probabilities (rows, classes), or values (rows,).
        truth: labels, or values.
        classes: their names; none for values.
        common: the commonest label of the training rows, or their mean value.
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
        }
    chosen = answers.argmax(1)
    counts = np.zeros((len(classes), len(classes)), int)
    np.add.at(counts, (truth, chosen), 1)
    plain = float((truth == common).mean())
    missed = (counts.sum(0) == 0) & (counts.sum(1) > 0)
    never = [
        name
        for name, is_missed in zip(classes, missed, strict=True)
        if is_missed
    ]
    return {
        "accuracy": float((chosen == truth).mean()),
        "baseline_accuracy": plain,
        "baseline": f"always answering {classes[int(common)]} would give {plain:.2%}",
        "never_predicted": never,
        "confusion": {"classes": list(classes), "counts": counts.tolist()},
    }


def score_text(name: str, value: float) -> str:
    """A score with as many digits as people read; nothing below 100% is shown as 100%."""
    if not name.endswith("accuracy"):
        return f"{value:.4g}"
    return f"{min(value, 0.9999) if value < 1 else 1:.2%}"


def score_lines(result: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The score, what is easy, and which classes are never predicted."""
    lines = []
    for name in ("accuracy", "rmse", "r2"):
        if result.get(prefix + name) is not None:
            label = (prefix + name).replace("_", " ")
            lines.append(
                f"{label:<16} {score_text(name, result[prefix + name])}"
            )
    if lines and "baseline" in result:
        lines[0] += f" ({result['baseline']})"
    if result.get("never_predicted"):
        lines.append(
            f"{'never predicted':<16} {', '.join(result['never_predicted'][:20])}"
        )
    return lines
