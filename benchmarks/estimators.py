"""HDNNClassifier and HDNNRegressor with their defaults against tuned rivals.

    python benchmarks/estimators.py [--group hard report] [--folds 10] [--out FOLDER]

The group `hard` has tables that need a network; `search` and `report` are those of `table_sets`.
The folds are those of 5 x 2 cross-validation. A fifth of the training rows chooses the best
settings of each rival, which then trains on all of these rows. Rivals that --models does not name
are left out. A run that was stopped continues where it was: each result is a line of
FOLDER/estimators.jsonl.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
import warnings
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from report import head, keep, machine, say, table, text_of
from sklearn import ensemble, linear_model, neural_network
from sklearn.compose import TransformedTargetRegressor as Scaled
from sklearn.compose import make_column_selector, make_column_transformer
from sklearn.impute import SimpleImputer
from sklearn.metrics import log_loss, r2_score
from sklearn.model_selection import KFold, StratifiedKFold, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.utils import _safe_indexing
from table_sets import HARD, REPORT, SEARCH, Set

from hdnn import HDNNClassifier, HDNNRegressor

FOLDS = 10  # of 5 x 2 cross-validation
GROUPS = {"hard": HARD, "search": SEARCH, "report": REPORT}
# Eight for each rival; fewer for CatBoost and RealMLP, which take by far the longest.
SETTINGS: dict[str, dict[str, tuple[Any, ...]]] = {
    "linear": {"strength": tuple(np.logspace(-4, 3, 8).tolist())},
    "MLP": {
        "hidden_layer_sizes": ((100,), (128, 128)),
        "alpha": (1e-4, 1e-1),
        "learning_rate_init": (1e-3, 1e-2),
    },
    "boosting": {
        "learning_rate": (0.03, 0.1),
        "max_leaf_nodes": (8, 31),
        "min_samples_leaf": (5, 20),
    },
    "CatBoost": {
        "learning_rate": (0.03, 0.1),
        "depth": (4, 6),
    },
    "RealMLP": {"p_drop": (0.0, 0.15)},
}


def rival(name: str, classes: bool, options: dict[str, Any]) -> Any:
    """An estimator of numbers, behind what it needs."""
    if name == "linear":
        strength = options["strength"]
        if classes:
            model = linear_model.LogisticRegression(C=strength, max_iter=500)
        else:
            model = linear_model.Ridge(1 / strength)
    elif name == "MLP":
        options = {**options, "early_stopping": True, "max_iter": 500}
        if classes:
            model = neural_network.MLPClassifier(random_state=0, **options)
        else:
            values = neural_network.MLPRegressor(random_state=0, **options)
            model = Scaled(values, transformer=StandardScaler())
    elif name == "boosting":
        kind = ensemble.HistGradientBoostingRegressor
        if classes:
            kind = ensemble.HistGradientBoostingClassifier
        model = kind(
            random_state=0, max_iter=300, early_stopping=True, **options
        )
    elif name == "CatBoost":
        import catboost

        kind = catboost.CatBoostRegressor
        if classes:
            kind = catboost.CatBoostClassifier
        fixed = {"iterations": 500, "verbose": False, "thread_count": 1}
        model = kind(
            random_state=0, allow_writing_files=False, **fixed, **options
        )
    else:
        from pytabkit import RealMLP_TD_Classifier, RealMLP_TD_Regressor

        kind = RealMLP_TD_Classifier if classes else RealMLP_TD_Regressor
        model = kind(random_state=0, device="cpu", n_threads=1, **options)
    return make_pipeline(StandardScaler(), model)


def encoded(X: Any, train: np.ndarray) -> np.ndarray:
    """Numbers for rivals: medians in gaps, and an input for each text."""
    if not hasattr(X, "iloc"):
        return X
    texts = make_column_selector(dtype_exclude="number")
    numbers = make_column_selector(dtype_include="number")
    one_hot = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
    medians = SimpleImputer(strategy="median")
    encoder = make_column_transformer((medians, numbers), (one_hot, texts))
    return np.asarray(encoder.fit(X.iloc[train]).transform(X), float)


def loss(model: Any, X: Any, y: np.ndarray, classes: bool) -> float:
    """Log loss, or 1 - R^2."""
    if not classes:
        return 1 - r2_score(y, model.predict(X))
    return log_loss(y, model.predict_proba(X), labels=model.classes_)


def fitted(name: str, data: Set, X: Any, y: np.ndarray) -> Any:
    """Ours, or the rival with the setting that does best on a fifth of the rows."""
    if name == "hdnn":
        kind = HDNNClassifier if data.classes else HDNNRegressor
        return kind(random_state=0).fit(X, y)
    grid = SETTINGS[name]
    settings = [
        dict(zip(grid, each, strict=True)) for each in product(*grid.values())
    ]
    rows = np.arange(len(y))
    kinds = y if data.classes else None
    train, held = train_test_split(
        rows, test_size=0.2, random_state=0, stratify=kinds
    )
    losses = []
    for options in settings:
        model = rival(name, data.classes, options).fit(X[train], y[train])
        losses.append(loss(model, X[held], y[held], data.classes))
    best = settings[int(np.argmin(losses))]
    return rival(name, data.classes, best).fit(X, y)


def split(data: Set, y: np.ndarray, fold: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows to learn from and to test with, in one of five times two folds."""
    kind: Any = StratifiedKFold if data.classes else KFold
    halves = kind(2, shuffle=True, random_state=fold // 2).split(y, y)
    return list(halves)[fold % 2]


def measure(
    data: Set, names: list[str], fold: int, done: set[Any]
) -> Iterator[Any]:
    """The loss and the CPU seconds in a fold of each estimator that is not done."""
    names = [name for name in names if (data.name, name, fold) not in done]
    if not names:
        return
    X, y = data.load()
    train, test = split(data, y, fold)
    numbers = encoded(X, train)
    for name in names:
        rows = X if name == "hdnn" else numbers
        seen = _safe_indexing(rows, train)
        start = time.process_time()
        model = fitted(name, data, seen, y[train])
        seconds = time.process_time() - start
        new = _safe_indexing(rows, test)
        value = loss(model, new, y[test], data.classes)
        record = {"set": data.name, "model": name, "fold": fold}
        yield {**record, "loss": value, "seconds": seconds}


def summary(
    records: list[Any], sets: list[Set], names: list[str], count: int
) -> dict[str, Any]:
    """Mean losses, ranks and seconds of the sets and folds that all estimators have done."""
    by_place = {(r["set"], r["fold"], r["model"]): r for r in records}
    losses, seconds = {}, {}
    for data in sets:
        folds = [
            fold
            for fold in range(count)
            if all((data.name, fold, name) in by_place for name in names)
        ]
        if folds:
            for values, key in ((losses, "loss"), (seconds, "seconds")):
                values[data.name] = [
                    [by_place[data.name, fold, name][key] for fold in folds]
                    for name in names
                ]
    means = {
        name: [float(np.mean(v)) for v in row] for name, row in losses.items()
    }
    ranks = {
        name: np.argsort(np.argsort(row)) + 1 for name, row in means.items()
    }
    result: dict[str, Any] = {"losses": losses, "means": means}
    for kind, classes in (("log loss", True), ("R^2", False)):
        own = [
            ranks[d.name]
            for d in sets
            if d.classes == classes and d.name in ranks
        ]
        if own:
            result[kind] = np.mean(own, 0).round(2).tolist()
    times = [[np.mean(v) for v in row] for row in seconds.values()]
    result["seconds"] = np.mean(times, 0).round(1).tolist() if times else []
    result["lost"] = [n for n, row in means.items() if row[0] > 1.02 * min(row)]
    return result


def page(result: dict[str, Any], names: list[str]) -> str:
    lines = head("Estimators: our defaults against tuned rivals", result)
    lines += ["", result["found"], ""]
    lines += [
        "Means ± standard deviations over folds; half of the rows are for training. The measure is "
        "the log loss for classes and 1 - R^2 for values: lower is better. Seconds are for one "
        "processor, including the rivals' search. Rank 1 is the best.",
    ]
    rows = []
    for name, each in result["losses"].items():
        cells = [f"{np.mean(v):.3f}" for v in each]
        if len(each[0]) > 1:
            cells = [f"{np.mean(v):.3f} ± {np.std(v):.3f}" for v in each]
        rows.append([name, *cells])
    rows += [
        [f"mean rank by {title}", *map(str, result[title])]
        for title in ("log loss", "R^2")
        if title in result
    ]
    rows.append(["seconds", *map(str, result["seconds"])])
    lines += table(" | ".join(["table", *names]), rows)
    lost = ", ".join(result["lost"]) or "none"
    lines += ["", f"Tables where a rival is better by more than 2%: {lost}."]
    absent = ", ".join(name for name in SETTINGS if name not in names) or "none"
    folds = len(next(iter(result["losses"].values()))[0])
    tried = [
        f"{name} {math.prod(map(len, SETTINGS[name].values()))}"
        for name in names
        if name in SETTINGS
    ]
    lines += [
        "",
        f"Folds: {folds} of {FOLDS}. Rivals that were not measured: {absent}. Held-out rows "
        f"chose from this many settings: {', '.join(tried)}; ours has none to choose from. Tables "
        "with more than 4,000 rows were thinned. The latest changes to our recipe were chosen on "
        "other tables, but its first versions were also tested on these.",
    ]
    return text_of(lines)


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument(
        "--group", choices=GROUPS, nargs="+", default=["report"]
    )
    parser.add_argument("--folds", type=int, default=FOLDS)
    parser.add_argument("--models", nargs="+", default=["hdnn", *SETTINGS])
    parser.add_argument(
        "--quick", action="store_true", help="one table, to see that it runs"
    )
    parser.add_argument("--out", type=Path, help="folder for JSON and Markdown")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # of epochs that were not enough
    sets = [data for group in options.group for data in GROUPS[group]]
    names = options.models
    folds = options.folds
    if options.quick:
        sets, names, folds = sets[:1], ["hdnn", "linear"], 1
    log = options.out and options.out / "estimators.jsonl"
    records = []
    if log and log.exists():
        records = [json.loads(line) for line in log.read_text().splitlines()]
    done = {(r["set"], r["model"], r["fold"]) for r in records}
    for fold, data in product(range(folds), sets):
        for record in measure(data, names, fold, done):
            records.append(record)
            say(str(record))
            if log:
                with log.open("a") as file:
                    file.write(json.dumps(record) + "\n")
    words = ["python benchmarks/estimators.py --group", *options.group]
    words += ["--folds", str(folds), "--models", *names]
    result = {"command": " ".join(words), "machine": machine("cpu")}
    result |= summary(records, sets, names, folds)
    ranks = []
    for kind in ("log loss", "R^2", "seconds"):
        if kind in result:
            pairs = zip(names, result[kind], strict=True)
            each = ", ".join(f"{name} {rank}" for name, rank in pairs)
            title = kind if kind == "seconds" else f"mean rank by {kind}"
            ranks.append(f"{title}: {each}")
    result["found"] = f"{len(result['means'])} tables; " + "; ".join(ranks)
    text = page(result, names)
    print(text)
    keep(result, text, "estimators", options.out)


if __name__ == "__main__":
    main()
