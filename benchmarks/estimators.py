"""The defaults of HDNNClassifier and HDNNRegressor against those of scikit-learn, on many tables.

    python benchmarks/estimators.py [--group search] [--sets WORD ..] [--load] [--out docs/results]

Five times two folds, the same for all: log loss, accuracy and expected calibration error for
classes, R^2 for values, and seconds on one thread. The tables are those of `table_sets`; what the
defaults were chosen on is never in the report. Each fold is kept in a file as soon as it is
measured, so that after Ctrl-C the same command goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

if "--loaded-fit" not in sys.argv:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # seconds are those of one thread

import numpy as np
import sklearn
import torch
from report import keep, on_one_line, table
from sklearn.compose import make_column_selector, make_column_transformer
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import log_loss
from sklearn.model_selection import RepeatedKFold, RepeatedStratifiedKFold
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from table_sets import REPORT, SEARCH, Set

import hdnn
from hdnn.estimators import HDNNClassifier, HDNNRegressor

HDNN, MLP, LINEAR, BOOSTING = EVERYONE = "hdnn", "MLP", "linear", "gradient boosting"
BINS = 15  # of confidence, for the calibration error
LOADED = ("penguins", "labels, 20% wrong", "digits")  # fitted once more on a busy machine

Record = dict[str, Any]


def estimator(who: str, classes: bool, frame: bool) -> Any:
    """With its defaults; all but hdnn, which takes tables as they are, behind what they need."""
    if who == HDNN:
        return (HDNNClassifier if classes else HDNNRegressor)(random_state=0)
    encoder = [_encoder()] if frame else []
    if who == BOOSTING:
        kind = HistGradientBoostingClassifier if classes else HistGradientBoostingRegressor
        return make_pipeline(*encoder, kind(random_state=0))
    if who == MLP:
        last = (MLPClassifier if classes else MLPRegressor)(random_state=0)
    else:
        last = LogisticRegression() if classes else Ridge()
    return make_pipeline(*encoder, StandardScaler(), last)


def _encoder() -> Any:
    numbers = make_column_selector(dtype_include="number")
    texts = make_column_selector(dtype_exclude="number")
    one_hot = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
    return make_column_transformer((SimpleImputer(strategy="median"), numbers), (one_hot, texts))


def calibration_error(P: np.ndarray, y: np.ndarray) -> float:
    """How far the confidence in the likeliest class is from how often it is right."""
    sure, right = P.max(1), P.argmax(1) == y
    bins = np.minimum((sure * BINS).astype(int), BINS - 1)
    parts = [bins == k for k in range(BINS)]
    return sum(float(abs(right[p].mean() - sure[p].mean()) * p.mean()) for p in parts if p.any())


def folds(X: Any, y: np.ndarray, classes: bool, repeats: int) -> list[Any]:
    kind = RepeatedStratifiedKFold if classes else RepeatedKFold
    return list(kind(n_splits=2, n_repeats=repeats, random_state=0).split(X, y))


def rows_of(X: Any, rows: np.ndarray) -> Any:
    return X.iloc[rows] if hasattr(X, "iloc") else X[rows]


def loaded(one: Set, most: int | None) -> tuple[Any, np.ndarray]:
    """Table and target; classes are numbered. Of `most` rows, if given."""
    X, y = one.load()
    if one.classes:
        y = np.unique(y, return_inverse=True)[1]
    if most is not None:
        some = np.sort(np.random.default_rng(0).permutation(len(y))[:most])
        X, y = rows_of(X, some), y[some]
    return X, y


def measure(one: Set, who: str, X: Any, y: np.ndarray, fold: Any) -> Record:
    """Fit on one half, look at the other."""
    train, test = fold
    model = estimator(who, one.classes, hasattr(X, "iloc"))
    with warnings.catch_warnings():
        # The MLP's 200 epochs, and categories that one half does not have.
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.simplefilter("ignore", UserWarning)
        start = time.process_time()
        model.fit(rows_of(X, train), y[train])
        seconds, held = time.process_time() - start, rows_of(X, test)
        if not one.classes:
            return {"seconds": seconds, "r2": float(model.score(held, y[test]))}
        P = model.predict_proba(held)
    return {
        "seconds": seconds,
        "log_loss": float(log_loss(y[test], P, labels=np.arange(P.shape[1]))),
        "accuracy": float((P.argmax(1) == y[test]).mean()),
        "calibration": calibration_error(P, y[test]),
    }


# Records: a line for each fold


def known(path: Path | None) -> dict[tuple[str, int, str], Record]:
    """What was measured before; a line that Ctrl-C cut short counts as none."""
    found = {}
    if path is None or not path.exists():
        return found
    for line in path.read_text().splitlines():
        try:
            record = json.loads(line)
            found[record["set"], record["fold"], record["who"]] = record
        except (ValueError, KeyError, TypeError):
            continue
    return found


def measured(sets: list[Set], repeats: int, path: Path | None, most: int | None) -> list[Record]:
    """All folds of all sets, those of the file first."""
    records, all_of_them = known(path), []
    estimator(HDNN, True, False).fit(np.eye(8), np.arange(8) % 2)  # compiles what it needs
    for k, one in enumerate(sets, 1):
        X, y = loaded(one, most)
        for number, fold in enumerate(folds(X, y, one.classes, repeats)):
            for who in EVERYONE:
                key = one.name, number, who
                if key not in records:
                    found = measure(one, who, X, y, fold)
                    size = {"rows": len(y), "columns": X.shape[1]}
                    about = {"set": one.name, "fold": number, "who": who, **size}
                    records[key] = {**about, **found, "hdnn": hdnn.__version__}
                    if path is not None:
                        with path.open("a") as file:
                            file.write(json.dumps(records[key]) + "\n")
                all_of_them.append(records[key])
        line = summary(one, [r for r in all_of_them if r["set"] == one.name])
        score = "log_loss" if one.classes else "r2"
        each = ", ".join(f"{who} {line[who][score]:.4f}" for who in EVERYONE)
        print(f"{k}/{len(sets)} {one.name}: {score} {each}", flush=True)
    return all_of_them


# What they add up to


def summary(one: Set, records: list[Record]) -> dict[str, Any]:
    """The means over folds of one set, and the standard error of the score."""
    first = records[0]
    found: dict[str, Any] = {"rows": first["rows"], "columns": first["columns"]}
    names = ("log_loss", "accuracy", "calibration") if one.classes else ("r2",)
    for who in EVERYONE:
        mine = [r for r in records if r["who"] == who]
        found[who] = {name: float(np.mean([r[name] for r in mine])) for name in names}
        found[who]["seconds"] = float(np.median([r["seconds"] for r in mine]))
        scores = [r[names[0]] for r in mine]
        found[who]["standard_error"] = float(np.std(scores, ddof=1) / len(scores) ** 0.5)
    values = {who: found[who][names[0]] * (1 if one.classes else -1) for who in EVERYONE}
    found["rank"] = {who: 1 + sum(v < values[who] for v in values.values()) for who in EVERYONE}
    found["slower"] = found[HDNN]["seconds"] / found[MLP]["seconds"]
    if one.classes:
        rival = min(found[MLP]["log_loss"], found[LINEAR]["log_loss"])
        found["worse"] = found[HDNN]["log_loss"] / rival - 1
        found["noisy"] = one.noisy
        found["miscalibrated"] = found[HDNN]["calibration"] - found[LINEAR]["calibration"]
    return found


def mean_ranks(sets: list[dict[str, Any]]) -> dict[str, float]:
    return {who: float(np.mean([one["rank"][who] for one in sets])) for who in EVERYONE}


def targets(classes: dict[str, Any], values: dict[str, Any]) -> list[list[Any]]:
    """What was aimed at, and what was reached."""
    rows: list[list[Any]] = []

    def add(what: str, found: str, target: str, met: bool) -> None:
        rows.append([what, found, target, "yes" if met else "no"])

    for what, sets in (("log loss", classes), ("R^2", values)):
        if sets:
            ranks = mean_ranks(list(sets.values()))
            place = 1 + sum(rank < ranks[HDNN] for rank in ranks.values())
            best = sum(one["rank"][HDNN] == 1 for one in sets.values())
            text = ", ".join(f"{who} {rank:.2f}" for who, rank in ranks.items())
            text += f"; hdnn is the best on {best} of {len(sets)}"
            add(f"mean rank in {what}", text, "first or second", place <= 2)
    if classes:
        far = {name: one["worse"] for name, one in classes.items() if one["worse"] > 0.1}
        worst = max(classes, key=lambda name: classes[name]["worse"])
        text = f"at most {classes[worst]['worse']:+.1%} ({worst}); above 10% on {len(far)}"
        what = "log loss, against the better of MLP and logistic regression"
        add(what, text, "at most +10% on each", not far)
    noisy = {name: one for name, one in classes.items() if one["noisy"]}
    if noisy:
        worst = max(noisy, key=lambda name: noisy[name]["miscalibrated"])
        most = noisy[worst]["miscalibrated"]
        what = "calibration error on noisy sets, against logistic regression"
        add(what, f"at most {most:+.3f} ({worst})", "at most +0.02 on each", most <= 0.02)
    everything = {**classes, **values}
    slower = {name: one["slower"] for name, one in everything.items()}
    worst = max(slower, key=lambda name: slower[name])
    middle = float(np.median(list(slower.values())))
    text = f"{middle:.2f} in the middle, {slower[worst]:.2f} at most ({worst})"
    add("seconds for a fit, times those of MLP", text, "at most 1.5 on each", slower[worst] <= 1.5)
    return rows


def page(result: dict[str, Any]) -> str:
    about = on_one_line(result["versions"])
    classes = {k: v for k, v in result["sets"].items() if "worse" in v}
    values = {k: v for k, v in result["sets"].items() if "worse" not in v}
    lines = [
        "# Estimators: the defaults on tables that they were not chosen on",
        "",
        f"`{result['command']}`, {about}",
        "",
        f"Means over {result['repeats']} times two folds, the same for all: half of the rows to "
        "learn from, half to look at. All with default parameters and `random_state=0`. The linear "
        "model is logistic regression or ridge; it and MLP stand behind a StandardScaler, and "
        "where there are texts and gaps, all but hdnn behind one-hot encoding and medians. The "
        "tables were fixed before defaults were chosen, and were not looked at for it; those that "
        "were are in `SEARCH` of benchmarks/table_sets.py.",
        *(["", result["note"]] if "note" in result else []),
        *table("what | reached | target | met", targets(classes, values)),
    ]

    def rows(sets: dict[str, Any], score: str, more: Any) -> list[list[Any]]:
        made = []
        for name, one in sets.items():
            cells = [f"{one[who][score]:.4f}" for who in EVERYONE]
            best = min(range(4), key=lambda k: one["rank"][EVERYONE[k]])
            cells[best] = f"**{cells[best]}**"
            size = f"{one['rows']} x {one['columns']}"
            made.append([name, size, *cells, *more(one)])
        return made

    everyone = " | ".join(EVERYONE)
    if classes:
        lines += ["", "## Classes: log loss, the smaller the better"]
        head = f"set | size | {everyone} | standard error of hdnn | hdnn to the better of two"
        lines += table(
            head,
            rows(
                classes,
                "log_loss",
                lambda one: [f"{one[HDNN]['standard_error']:.4f}", f"{one['worse']:+.1%}"],
            ),
        )
        lines += ["", "The better of two: of MLP and logistic regression."]
        lines += ["", "## Classes: accuracy"]
        made = []
        for name, one in classes.items():
            made.append([name, *(f"{one[who]['accuracy']:.4f}" for who in EVERYONE)])
        lines += table(f"set | {everyone}", made)
        lines += ["", f"## Classes: expected calibration error, {BINS} bins"]
        made = []
        for name, one in classes.items():
            cells = [f"{one[who]['calibration']:.3f}" for who in EVERYONE]
            made.append([name, "yes" if one["noisy"] else "", *cells])
        lines += table(f"set | noisy | {everyone}", made)
    if values:
        lines += ["", "## Values: R^2, the larger the better"]
        more = rows(values, "r2", lambda one: [f"{one[HDNN]['standard_error']:.4f}"])
        lines += table(f"set | size | {everyone} | standard error of hdnn", more)
    lines += ["", "## Seconds for one fit, on one thread", "", "Of processor time, the median."]
    made = []
    for name, one in result["sets"].items():
        cells = [f"{one[who]['seconds']:.2f}" for who in EVERYONE]
        made.append([name, *cells, f"{one['slower']:.2f}"])
    lines += table(f"set | {everyone} | hdnn / MLP", made)
    if result.get("loaded"):
        lines += ["", "## Seconds for one fit on a busy machine, with default threads", ""]
        lines += [
            f"By the clock, the median of {LOADED_FITS} fits, while {2 * (os.cpu_count() or 1)} "
            f"other processes keep {os.cpu_count()} cores busy."
        ]
        made = [
            [name, f"{t[HDNN]:.2f}", f"{t[MLP]:.2f}", f"{t[HDNN] / t[MLP]:.2f}"]
            for name, t in result["loaded"].items()
        ]
        lines += table("set | hdnn | MLP | hdnn / MLP", made)
    return "\n".join(lines) + "\n"


# A busy machine

LOADED_FITS = 5


def under_load(sets: list[Set]) -> dict[str, Any]:
    """Seconds by the clock with default threads, while twice as many processes as cores run."""
    ends_with_us = "import os; first = os.getppid()\nwhile os.getppid() == first: pass"
    busy = [sys.executable, "-c", ends_with_us]
    others = [subprocess.Popen(busy) for _ in range(2 * (os.cpu_count() or 1))]
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    found: dict[str, Any] = {}
    try:
        for one in sets:
            command = [sys.executable, __file__, "--loaded-fit", one.name]
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(done.stderr)
            found[one.name] = json.loads(done.stdout.splitlines()[-1])
            print(f"busy: {one.name} {found[one.name]}", flush=True)
    finally:
        for other in others:
            other.kill()
    return found


def loaded_fit(name: str) -> None:
    """The seconds of fits in this process, in turns."""
    one = next(s for s in REPORT + SEARCH if s.name == name)
    X, y = loaded(one, None)
    train, _ = folds(X, y, one.classes, 1)[0]
    seconds: dict[str, list[float]] = {HDNN: [], MLP: []}
    warnings.simplefilter("ignore")
    estimator(HDNN, one.classes, False).fit(np.eye(8), np.arange(8) % 2)
    for _ in range(LOADED_FITS):
        for who, times in seconds.items():
            start = time.perf_counter()
            estimator(who, one.classes, hasattr(X, "iloc")).fit(rows_of(X, train), y[train])
            times.append(time.perf_counter() - start)
    print(json.dumps({who: float(np.median(times)) for who, times in seconds.items()}))


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the defaults with scikit-learn's.")
    parser.add_argument("--quick", action="store_true", help="one repeat, 200 rows, no files")
    parser.add_argument("--group", choices=("report", "search"), default="report")
    parser.add_argument("--sets", nargs="+", help="only those with one of these words in the name")
    parser.add_argument("--repeats", type=int, default=5, help="of the two folds")
    parser.add_argument(
        "--records", type=Path, help="one line a fold (default: estimators-GROUP.jsonl)"
    )
    parser.add_argument("--load", action="store_true", help="also measure fits on a busy machine")
    parser.add_argument("--note", help="what else the page should say of this measurement")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--out", type=Path, help="folder for estimators.md and estimators.json")
    parser.add_argument("--loaded-fit", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.loaded_fit:
        return loaded_fit(given.loaded_fit)
    torch.set_num_threads(1)
    group = REPORT if given.group == "report" else SEARCH
    sets = [s for s in group if not given.sets or any(word in s.name for word in given.sets)]
    if not sets:
        raise SystemExit(f"no set is called so; there are: {'; '.join(s.name for s in group)}")
    records = given.records or Path(f"estimators-{given.group}.jsonl")
    repeats, most = (1, 200) if given.quick else (given.repeats, None)
    found = measured(sets, repeats, None if given.quick else records, most)
    result: dict[str, Any] = {
        "command": "python benchmarks/estimators.py" + (" --load" if given.load else ""),
        "repeats": repeats,
        "versions": {
            "hdnn": hdnn.__version__,
            "scikit-learn": sklearn.__version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
            "date": time.strftime("%Y-%m-%d"),
        },
        "sets": {s.name: summary(s, [r for r in found if r["set"] == s.name]) for s in sets},
    }
    if given.note:
        result["note"] = given.note
    if given.load:
        result["loaded"] = under_load([s for s in sets if s.name in LOADED])
    text = page(result)
    print("\n" + text)
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    if given.out is not None and not given.quick:
        keep(result, text, "estimators", given.out)
    return None


if __name__ == "__main__":
    main()
