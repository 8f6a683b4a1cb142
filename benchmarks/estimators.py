"""The defaults of HDNNClassifier and HDNNRegressor against those of scikit-learn.

    python benchmarks/estimators.py [--group hard usual search report] [--folds 3] [--out FOLDER]

`hard` are tables that need a network, `usual` are small tables for which a linear model is nearly
enough. `search` and `report` are those of `table_sets`, and take an hour. A third of the rows of
each fold is for testing. Accuracy for classes, R^2 for values, seconds on one thread.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from report import head, keep, machine, say, table, text_of
from sklearn import datasets
from sklearn.compose import make_column_selector, make_column_transformer
from sklearn.ensemble import (
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
)
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import KFold, StratifiedKFold
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from table_sets import REPORT, SEARCH, Set

from hdnn import HDNNClassifier, HDNNRegressor

ROWS = 2250  # of the hard tables: 1,500 to learn from


def checkerboard() -> Any:
    X = np.random.default_rng(0).uniform(0, 6, (ROWS, 2))
    return X, np.floor(X).sum(1).astype(int) % 2


def spirals() -> Any:
    random = np.random.default_rng(0)
    angle = np.sqrt(random.uniform(size=ROWS)) * 6 * np.pi + 0.5
    y = random.integers(0, 2, ROWS)
    turned = angle + np.pi * y
    X = np.stack([angle * np.cos(turned), angle * np.sin(turned)], 1)
    return X + 0.1 * random.normal(size=X.shape), y


def sine() -> Any:
    X = np.random.default_rng(0).uniform(-3, 3, (ROWS, 1))
    return X, np.sin(8 * X[:, 0])


def cauchy() -> Any:
    X = np.random.default_rng(0).standard_cauchy((ROWS, 5))
    return X, (X[:, 0] * X[:, 1] > 0).astype(int)


def lognormal() -> Any:
    Z = np.random.default_rng(0).normal(size=(ROWS, 6))
    return np.exp(3 * Z), (Z[:, 0] + Z[:, 1] > Z[:, 2] * Z[:, 3]).astype(int)


GROUPS = {
    "hard": (
        Set("checkerboard 6 x 6", checkerboard, True),
        Set("two spirals", spirals, True),
        Set("sin(8x)", sine, False),
        Set("Cauchy columns", cauchy, True),
        Set("lognormal columns, cubed", lognormal, True),
    ),
    "usual": (
        Set("iris", lambda: datasets.load_iris(return_X_y=True), True),
        Set("wine", lambda: datasets.load_wine(return_X_y=True), True),
        Set(
            "breast cancer",
            lambda: datasets.load_breast_cancer(return_X_y=True),
            True,
        ),
        Set("diabetes", lambda: datasets.load_diabetes(return_X_y=True), False),
    ),
    "search": SEARCH,
    "report": REPORT,
}


def estimators(classes: bool, frame: bool) -> dict[str, Any]:
    """Each with its defaults; all but hdnn behind what they need."""
    numbers = make_column_selector(dtype_include="number")
    texts = make_column_selector(dtype_exclude="number")
    one_hot = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
    encoder = make_column_transformer(
        (SimpleImputer(strategy="median"), numbers), (one_hot, texts)
    )
    first = [encoder] if frame else []
    kinds: tuple[Any, ...] = (
        HDNNRegressor,
        MLPRegressor,
        HistGradientBoostingRegressor,
    )
    linear: Any = Ridge()
    if classes:
        kinds = (HDNNClassifier, MLPClassifier, HistGradientBoostingClassifier)
        linear = LogisticRegression()
    network, mlp, boosting = (kind(random_state=0) for kind in kinds)
    return {
        "hdnn": network,
        "MLP": make_pipeline(*first, StandardScaler(), mlp),
        "linear": make_pipeline(*first, StandardScaler(), linear),
        "gradient boosting": make_pipeline(*first, boosting),
    }


def measure(data: Set, folds: int) -> dict[str, Any]:
    """The scores of all estimators, and the seconds of hdnn, in each fold."""
    X, y = data.load()
    frame = hasattr(X, "iloc")
    scores: dict[str, list[float]] = {}
    seconds = []
    kind = StratifiedKFold if data.classes else KFold
    splits = list(kind(3, shuffle=True, random_state=0).split(X, y))[:folds]
    for train, test in splits:
        for name, model in estimators(data.classes, frame).items():
            start = time.process_time()
            model.fit(X.iloc[train] if frame else X[train], y[train])
            if name == "hdnn":
                seconds.append(time.process_time() - start)
            score = model.score(X.iloc[test] if frame else X[test], y[test])
            scores.setdefault(name, []).append(float(score))
    return {"set": data.name, "scores": scores, "seconds": seconds}


def page(result: dict[str, Any]) -> str:
    lines = head("Estimators: the defaults on tables", result)
    lines += [
        "",
        "Means and smallest values over folds, two thirds of the rows to learn from; accuracy for "
        "classes, R^2 for values. All with their defaults and `random_state=0`; CPU seconds of a "
        "fit on one thread.",
    ]
    rows = []
    for record in result["records"]:
        scores = record["scores"]
        means = {
            name: f"{np.mean(values):.3f}" for name, values in scores.items()
        }
        ours = [means.pop("hdnn"), f"{min(scores['hdnn']):.3f}"]
        rows.append(
            [
                record["set"],
                *ours,
                *means.values(),
                f"{np.mean(record['seconds']):.1f}",
            ]
        )
    names = "table | hdnn | worst fold | MLP | linear | gradient boosting | seconds of hdnn"
    lines += table(names, rows)
    return text_of(lines)


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument(
        "--group", choices=GROUPS, nargs="+", default=["hard", "usual"]
    )
    parser.add_argument("--folds", type=int, default=3, choices=(1, 2, 3))
    parser.add_argument(
        "--quick", action="store_true", help="does it run? One table, one fold"
    )
    parser.add_argument("--out", type=Path, help="folder for JSON and Markdown")
    options = parser.parse_args()
    warnings.simplefilter(
        "ignore"
    )  # of epochs that were not enough for the MLP
    sets: list[Set] = []
    for group in options.group:
        sets += GROUPS[group]
    folds = options.folds
    if options.quick:
        sets = list(GROUPS["usual"][:1])
        folds = 1
    HDNNClassifier(random_state=0).fit(
        np.eye(8), np.arange(8) % 2
    )  # compiles what it needs
    records = []
    for data in sets:
        records.append(measure(data, folds))
        say(str(records[-1]))
    words = ["python benchmarks/estimators.py"]
    if options.group != parser.get_default("group"):
        words += ["--group", *options.group]
    if options.folds != parser.get_default("folds"):
        words += ["--folds", str(options.folds)]
    if options.quick:
        words.append("--quick")
    result = {
        "command": " ".join(words),
        "machine": machine("cpu"),
        "records": records,
    }
    text = page(result)
    print(text)
    keep(result, text, "estimators", options.out)


if __name__ == "__main__":
    main()
