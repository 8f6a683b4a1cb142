"""Two doors, one training: `hdnn train --data FILE` and the estimators give the same model."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("typer")
pytest.importorskip("sklearn")

from sklearn.datasets import make_classification, make_regression

import options_table
from hdnn import HDNNClassifier, HDNNRegressor
from hdnn.__main__ import main
from hdnn.data import class_weights
from hdnn.errors import OptionError
from said import told

NAMES = np.array(["no", "perhaps", "yes"])


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def problem(values):
    """A small table, also as the file t.csv."""
    if values:
        X, y = make_regression(90, 5, noise=10.0, random_state=0)
    else:
        X, y = make_classification(
            90, 5, n_classes=3, n_informative=4, n_redundant=0, weights=[0.6, 0.3], random_state=0
        )
        y = NAMES[y]
    with Path("t.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow([*(f"x{i}" for i in range(5)), "y"])
        rows.writerows([*map(repr, row), t] for row, t in zip(X.tolist(), y.tolist(), strict=True))
    return X, y


def by_command(capsys, *flags):
    """The predictions of a run on all rows of its table, and its metrics."""
    train = ["train", "--data", "t.csv", "--target", "y", "--test-fraction", "0", "--json"]
    assert main([*train, "--out", "r", *flags]) == 0, capsys.readouterr().err
    metrics = json.loads(capsys.readouterr().out)
    assert main(["predict", "--run", "r", "--data", "t.csv", "--proba", "--json"]) == 0
    return json.loads(capsys.readouterr().out), metrics


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        ([], {}),
        (
            ["--validation", "0.2", "--patience", "2", "--class-weight", "balanced"],
            {
                "early_stopping": True,
                "validation_fraction": 0.2,
                "n_iter_no_change": 2,
                "class_weight": "balanced",
            },
        ),
        (["--class-weight", "no=1,yes=3.5"], {"class_weight": {"yes": 3.5, "no": 1}}),
    ],
)
def test_classes_get_the_same_probabilities_through_both_doors(flags, options, capsys):
    X, y = problem(values=False)
    both = ["--layers", "4", "--seed", "7", "--epochs", "8"]
    found, metrics = by_command(capsys, *both, *flags)
    model = HDNNClassifier(layers=4, random_state=7, epochs=8, **options).fit(X, y)
    chances = np.array([found["probabilities"][name] for name in model.classes_]).T
    np.testing.assert_allclose(chances, model.predict_proba(X), rtol=1e-6, atol=1e-9)
    assert metrics["loss"] == pytest.approx(model.loss_curve_[-1], rel=1e-8)
    assert metrics["epochs"] == model.n_iter_
    if "early_stopping" in options:
        assert metrics["kept_epoch"] == model.history_.best_epoch
        assert metrics["validation_loss"] == pytest.approx(min(model.history_.validation_loss))


def test_values_are_the_same_through_both_doors(capsys):
    X, y = problem(values=True)
    train = ["train", "--data", "t.csv", "--target", "y", "--test-fraction", "0", "--json"]
    assert main([*train, "--layers", "8", "--seed", "7", "--epochs", "8", "--out", "r"]) == 0
    capsys.readouterr()
    assert main(["predict", "--run", "r", "--data", "t.csv", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["predictions"]
    model = HDNNRegressor(layers=8, random_state=7, epochs=8).fit(X, y)
    np.testing.assert_allclose(found, model.predict(X), rtol=1e-7)


def test_the_page_of_options_says_what_the_code_does():
    """Renew it with `PYTHONPATH=src:tests python -m options_table`."""
    text = options_table.PAGE.read_text("utf-8")
    assert text == options_table.page(text)


# Weights of classes


def test_balanced_classes_weigh_alike():
    labels = np.array([0, 0, 0, 1])
    factors = class_weights.balanced(labels, 2)
    assert (factors[labels].sum(), factors[1] / factors[0]) == pytest.approx((4, 3))
    assert np.isfinite(class_weights.balanced(labels, 3)).all()  # one class has no rows


def test_classes_are_named_as_the_column_has_them():
    assert class_weights.read(" balanced ") == "balanced"
    given = class_weights.read("a=b = 2,c=0.5")
    assert given == {"a=b": 2.0, "c": 0.5}
    assert class_weights.named(given, ["a=b", "c", "d"]).tolist() == [2.0, 0.5, 1.0]
    with pytest.raises(OptionError, match="class-weight names 'c', but the classes are 'a', 'b'"):
        class_weights.named({"c": 1.0}, ["a", "b"])
    with pytest.raises(OptionError, match="class-weight names 'a' twice"):
        class_weights.read("a=1,b=2, a=3")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("heavy", "class-weight must be balanced, or a number >= 0 for each class"),
        ("yes=-1", "class-weight must be balanced"),
        ("yes=nan", "class-weight must be balanced"),
        ("=2", "class-weight must be balanced"),
        ("yes=0,no=0,perhaps=0", "there is nothing to learn from"),
        ("maybe=2", "class-weight names 'maybe', but the classes are 'no', 'perhaps', 'yes'"),
    ],
)
def test_weights_that_no_class_can_have_are_one_sentence(given, words, capsys):
    problem(values=False)
    train = ["train", "--data", "t.csv", "--target", "y"]
    assert main([*train, "--class-weight", given]) == 2
    assert words in told(capsys)
    assert not Path("runs").exists()


@pytest.mark.parametrize("flags", [[], ["--task", "regression"]])
def test_values_have_no_class_weights(flags, capsys):
    problem(values=True)
    train = ["train", "--data", "t.csv", "--target", "y", "--class-weight", "balanced"]
    assert main([*train, *flags]) == 2
    assert "leave class-weight out" in told(capsys)
