"""How good predictions are: mistakes by class, calibration and residuals, small enough for JSON.

A run keeps this beside its scores, so that a report can show it without the data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

BINS = 10  # of the confidence, from 0 to 1
SHOWN = 30  # classes, up to which the whole confusion matrix is kept
LISTED = 200  # classes, at the most
MISTAKES = 20  # most frequent pairs of classes, at the most
POINTS = 200  # pairs of true and predicted values, at the most
QUANTILES = (5, 25, 50, 75, 95)  # per cent
COLUMNS = 24  # of the histogram of residuals


def of_classes(
    true: np.ndarray,
    chances: np.ndarray,
    classes: Sequence[str],
    *,
    found: Any = None,
    usual: int | None = None,
) -> dict[str, Any]:
    """What there is to say of probabilities (B, K) of classes, given the true ones (B,).

    `found` are the predicted ones, by default the most probable. `usual` is the class that is most
    frequent among the rows trained on: what always saying it would score is there to compare with.
    """
    if found is None:
        found = chances.argmax(1)
    by_class = _by_class(true, found, classes)
    seen = [one for one in by_class if one["rows"]]
    chance = chances[np.arange(len(true)), true]
    told: dict[str, Any] = {
        "rows": len(true),
        "accuracy": _mean(found == true),
        "balanced_accuracy": _mean([one["recall"] for one in seen]),
        "macro_f1": _mean([one["f1"] for one in by_class if one["f1"] is not None]),
        "log_loss": _mean(-np.log(np.maximum(chance, np.finfo(np.float64).tiny))),
        "brier": _mean((chances**2).sum(1) - 2 * chance + 1),
        "classes": len(classes),
        "by_class": by_class,
        "confusion": None,
        "mistakes": _mistakes(true, found, classes),
        "calibration": calibration(true, chances, found),
    }
    if len(classes) <= SHOWN:
        pairs = np.bincount(true * len(classes) + found, minlength=len(classes) ** 2)
        told["confusion"] = pairs.reshape(len(classes), -1).tolist()
    if len(classes) > LISTED:
        told["by_class"] = sorted(by_class, key=lambda one: -one["rows"])[:LISTED]
    if usual is not None:
        told["usual"] = {"class": str(classes[usual]), "accuracy": _mean(true == usual)}
    return told


def _by_class(true: np.ndarray, found: np.ndarray, classes: Sequence[str]) -> list[dict[str, Any]]:
    rows, predicted, right = (
        np.bincount(some, minlength=len(classes)) for some in (true, found, true[true == found])
    )
    return [
        {
            "class": str(name),
            "rows": int(rows[k]),
            "predicted": int(predicted[k]),
            "right": int(right[k]),
            "precision": _share(right[k], predicted[k]),
            "recall": _share(right[k], rows[k]),
            "f1": _share(2 * right[k], rows[k] + predicted[k]),
        }
        for k, name in enumerate(classes)
    ]


def _mistakes(true: np.ndarray, found: np.ndarray, classes: Sequence[str]) -> list[dict[str, Any]]:
    """The most frequent pairs of a true class and another that was predicted."""
    wrong = true != found
    pairs, counts = np.unique(true[wrong] * len(classes) + found[wrong], return_counts=True)
    told = []
    for place in np.argsort(-counts, kind="stable")[:MISTAKES]:
        a, b = divmod(int(pairs[place]), len(classes))
        names = {"true": str(classes[a]), "predicted": str(classes[b])}
        told.append({**names, "rows": int(counts[place])})
    return told


def calibration(
    true: np.ndarray, chances: np.ndarray, found: np.ndarray | None = None, *, bins: int = BINS
) -> dict[str, Any]:
    """How often predictions are right, against how sure they are.

    Rows are sorted by the probability of the predicted class into `bins` of equal width. The
    `error`, the expected calibration error, is the mean distance of the two over all rows.
    """
    sure, right = chances.max(1), (chances.argmax(1) if found is None else found) == true
    if not len(sure) or not np.isfinite(sure).all():
        return {"error": None, "bins": []}
    place = np.clip(np.ceil(sure * bins).astype(int) - 1, 0, bins - 1)
    filled = []
    for k in range(bins):
        here = place == k
        if here.any():
            ends = {"from": k / bins, "to": (k + 1) / bins, "rows": int(here.sum())}
            means = {"confidence": _mean(sure[here]), "accuracy": _mean(right[here])}
            filled.append({**ends, **means})
    off = [one["rows"] * abs(one["confidence"] - one["accuracy"]) for one in filled]
    return {"error": float(sum(off) / len(sure)), "bins": filled}


def of_values(true: np.ndarray, found: np.ndarray) -> dict[str, Any]:
    """What there is to say of predicted values (B,), given the true ones."""
    true, found = np.asarray(true, np.float64), np.asarray(found, np.float64)
    told: dict[str, Any] = {"rows": len(true)}
    rmse, r2 = rmse_and_r2(true, found)
    if not (math.isfinite(rmse) and math.isfinite(r2 or 0)):
        return told | {"points": [], "residuals": None}
    residuals = true - found
    low, high = (float(end) for end in (residuals.min(), residuals.max()))
    edges = np.linspace(low, high, COLUMNS + 1 if high > low else 2)
    counts, _ = np.histogram(residuals, edges)
    chosen = np.argsort(true, kind="stable")
    if len(chosen) > POINTS:
        chosen = chosen[np.linspace(0, len(chosen) - 1, POINTS).round().astype(int)]
    return told | {
        "rmse": rmse,
        "r2": r2,
        "mae": _mean(np.abs(residuals)),
        "residuals": {
            "mean": _mean(residuals),
            "smallest": low,
            "largest": high,
            "quantiles": {str(q): float(np.percentile(residuals, q)) for q in QUANTILES},
            "edges": [_short(edge) for edge in edges],
            "counts": counts.tolist(),
        },
        "points": [[_short(true[k]), _short(found[k])] for k in chosen],
    }


def rmse_and_r2(true: np.ndarray, found: np.ndarray) -> tuple[float, float | None]:
    """The root mean square error of values (B,), and R^2 unless the true ones are all the same."""
    with np.errstate(over="ignore", invalid="ignore"):
        error, spread = _mean((true - found) ** 2), float(true.var()) if len(true) else math.nan
    if not spread > 0:
        return math.sqrt(error), None
    return math.sqrt(error), 1 - error / spread if math.isfinite(spread) else math.nan


def _mean(values: Any) -> float:
    values = np.asarray(values, np.float64)
    return float(values.mean()) if values.size else math.nan


def _share(part: Any, whole: Any) -> float | None:
    return float(part / whole) if whole else None


def _short(value: Any) -> float:
    """Six digits: a picture shows no more."""
    return float(f"{value:.6g}")
