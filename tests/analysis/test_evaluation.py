"""What is said of predictions, against scikit-learn where it says the same."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdnn.analysis import evaluation

NAMES = [f"class {k}" for k in range(300)]


def drawn(classes, rows, seed):
    random = np.random.default_rng(seed)
    chances = random.dirichlet(np.full(classes, 0.5), rows)
    return random.integers(0, classes, rows), chances


@given(st.integers(2, 6), st.integers(1, 60), st.integers(0, 10**6))
def test_scores_of_classes_are_those_of_scikit_learn(classes, rows, seed):
    metrics = pytest.importorskip("sklearn.metrics")
    true, chances = drawn(classes, rows, seed)
    found, every = chances.argmax(1), [*range(classes)]
    told = evaluation.of_classes(true, chances, NAMES[:classes], usual=0)
    assert told["confusion"] == metrics.confusion_matrix(true, found, labels=every).tolist()
    by_class = metrics.precision_recall_fscore_support(
        true, found, labels=every, zero_division=np.nan
    )
    for name, values in zip(("precision", "recall", "f1", "rows"), by_class, strict=True):
        ours = [math.nan if one[name] is None else one[name] for one in told["by_class"]]
        np.testing.assert_allclose(ours, values)
    expected = metrics.log_loss(true, np.clip(chances, 1e-300, None), labels=every)
    assert math.isclose(told["log_loss"], expected, rel_tol=1e-6)
    assert math.isclose(told["accuracy"], metrics.accuracy_score(true, found))
    macro = metrics.f1_score(true, found, average="macro", zero_division=0)  # absent classes too
    assert math.isclose(told["macro_f1"], macro, abs_tol=1e-12)
    assert told["usual"] == {"class": "class 0", "accuracy": (true == 0).mean()}
    assert sum(one["rows"] for one in told["mistakes"]) <= (true != found).sum()
    json.dumps(told, allow_nan=False)


def test_calibration_compares_how_sure_with_how_often_right():
    sure = np.array([0.55, 0.58, 0.95, 0.95, 1.0, 0.6])
    chances, true = np.stack([1 - sure, sure], 1), np.array([1, 0, 1, 1, 0, 1])
    found = evaluation.calibration(true, chances)
    assert [(one["from"], one["rows"]) for one in found["bins"]] == [(0.5, 3), (0.9, 3)]
    np.testing.assert_allclose([one["accuracy"] for one in found["bins"]], [2 / 3, 2 / 3])
    off = 3 * abs(sure[[0, 1, 5]].mean() - 2 / 3) + 3 * abs(sure[2:5].mean() - 2 / 3)
    assert math.isclose(found["error"], off / 6)
    assert evaluation.calibration(true, np.full((6, 2), math.nan)) == {"error": None, "bins": []}


def test_perfect_probabilities_have_no_error():
    chances = np.eye(3)[[0, 1, 2, 0]]
    told = evaluation.of_classes(np.array([0, 1, 2, 0]), chances, "abc")
    assert told["calibration"]["error"] == told["log_loss"] == told["brier"] == 0
    assert told["mistakes"] == []


def test_many_classes_stay_small():
    true, chances = drawn(300, 2000, 0)
    told = evaluation.of_classes(true, chances, NAMES)
    assert told["confusion"] is None
    assert told["classes"] == 300
    assert len(told["by_class"]) == evaluation.LISTED
    assert len(told["mistakes"]) == evaluation.MISTAKES
    assert len(json.dumps(told)) < 50_000


def test_values_are_measured_and_a_part_of_them_is_kept():
    random = np.random.default_rng(0)
    true = random.normal(10, 3, 1000)
    told = evaluation.of_values(true, true - 1)
    assert math.isclose(told["rmse"], 1)
    assert math.isclose(told["mae"], 1)
    assert math.isclose(told["r2"], 1 - 1 / true.var())
    assert len(told["points"]) == evaluation.POINTS
    assert told["points"][0][0] == pytest.approx(true.min(), rel=1e-5)
    assert told["points"][-1][0] == pytest.approx(true.max(), rel=1e-5)
    noisy = evaluation.of_values(true, true + random.normal(size=1000))
    assert sum(noisy["residuals"]["counts"]) == 1000
    quantiles = [*noisy["residuals"]["quantiles"].values()]
    assert quantiles == sorted(quantiles)


@pytest.mark.parametrize(
    ("true", "found"),
    [
        ([1.0], [1.0]),
        ([2.0, 2.0], [2.0, 2.0]),
        ([], []),
        ([1.0], [math.nan]),
        ([1e300], [-1e300]),
        ([1e-320, 0.0], [0.0, 0.0]),
    ],
)
def test_odd_values_are_no_trouble(true, found):
    told = evaluation.of_values(np.array(true), np.array(found))
    assert told["rows"] == len(true)
    assert told.get("r2") is None
