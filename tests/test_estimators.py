"""The estimators beside what scikit-learn's own checks and the law tests say of them."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.datasets import load_diabetes, load_iris, make_circles
from sklearn.linear_model import LogisticRegression, RidgeCV
from torch.cuda import is_available as has_gpu

from hdnn import HDNNClassifier, HDNNRegressor
from hdnn.errors import DataError, HDNNError, OptionError, TableWarning

QUICK = {"layers": 2, "epochs": 15, "weight_decay": 1e-3, "random_state": 0}


@pytest.fixture(scope="module")
def iris():
    X, y = load_iris(return_X_y=True)
    order = np.random.RandomState(0).permutation(len(X))
    return X[order], y[order]


# Defaults


def test_defaults_learn_a_fast_sine():
    X = np.random.default_rng(0).uniform(-3, 3, (1000, 1))
    y = np.sin(8 * X[:, 0])
    model = HDNNRegressor(random_state=0).fit(X[:700], y[:700])
    assert model.score(X[700:], y[700:]) > 0.98


def test_defaults_learn_from_columns_with_heavy_tails():
    X = np.random.default_rng(0).standard_cauchy((1000, 4))
    y = X[:, 0] * X[:, 1] > 0
    model = HDNNClassifier(random_state=0).fit(X[:700], y[:700])
    assert model.score(X[700:], y[700:]) > 0.95


def test_defaults_shrink_to_a_linear_model_where_the_table_is_small_and_noisy():
    X, y = load_diabetes(return_X_y=True)
    model = HDNNRegressor(random_state=0).fit(X[:300], y[:300])
    assert model.score(X[300:], y[300:]) > 0.45


# Weights


@pytest.mark.parametrize("early_stopping", [False, True])
def test_uniform_weights_change_nothing(iris, early_stopping):
    X, y = iris
    options = {**QUICK, "early_stopping": early_stopping}
    plain = HDNNClassifier(**options).fit(X, y)
    weighted = HDNNClassifier(**options).fit(
        X, y, sample_weight=np.full(len(y), 10.0)
    )
    assert np.array_equal(plain.predict_proba(X), weighted.predict_proba(X))


def test_weight_zero_is_no_row_and_weight_two_is_a_row_twice():
    X, y = load_diabetes(return_X_y=True)
    X, y = X[:60], y[:60]
    weight = np.random.RandomState(0).randint(0, 3, 60)
    rows = np.repeat(np.arange(60), weight)
    options = {**QUICK, "batch": 1000, "epochs": 60}
    weighted = HDNNRegressor(**options).fit(X, y, sample_weight=weight)
    repeated = HDNNRegressor(**options).fit(X[rows], y[rows])
    np.testing.assert_allclose(
        weighted.predict(X), repeated.predict(X), rtol=1e-5
    )


def test_repeated_rows_do_not_mislead_the_choice_of_the_shrinkage():
    X, y = load_diabetes(return_X_y=True)
    options = {"layers": 4, "random_state": 0}
    weight = np.random.RandomState(0).randint(0, 3, 300)
    scores = []
    for count in (weight, 10 * weight):
        rows = np.repeat(np.arange(300), count)
        model = HDNNRegressor(**options).fit(X[rows], y[rows])
        scores.append(model.score(X[300:], y[300:]))
    model = HDNNRegressor(**options).fit(X[:300], y[:300], weight / 1000)
    scores.append(model.score(X[300:], y[300:]))
    assert np.ptp(scores) < 0.02


def test_class_weights_raise_the_rare_class():
    random = np.random.RandomState(0)
    X = random.randn(300, 2)
    y = (X[:, 0] + random.randn(300) > 1.5).astype(int)
    plain = HDNNClassifier(**QUICK).fit(X, y).predict(X).mean()
    for weight in ("balanced", {0: 1.0, 1: 8.0}):
        model = HDNNClassifier(class_weight=weight, **QUICK).fit(X, y)
        assert model.predict(X).mean() > plain + 0.05


@pytest.mark.parametrize(
    "weight", [np.zeros(150), np.full(150, np.nan), -np.ones(150)]
)
def test_impossible_weights_are_refused(iris, weight):
    with pytest.raises(ValueError, match=r"(?i)sample.weight|NaN"):
        HDNNClassifier(**QUICK).fit(*iris, sample_weight=weight)


# Tables


def table(rows=60):
    random = np.random.RandomState(0)
    kind = random.choice(["small", "large"], rows)
    frame = pd.DataFrame(
        {
            "kind": kind,
            "mass": random.randn(rows) + 3 * (kind == "large"),
            "day": pd.date_range("2020-01-01", periods=rows).astype(str),
            "year": random.choice([2007, 2008], rows),
        }
    )
    frame.loc[::7, "mass"] = np.nan
    return frame, np.where(kind == "large", "yes", "no")


def test_text_gaps_dates_and_categories_are_learned_from():
    X, y = table()
    model = HDNNClassifier(categorical=["year"], **QUICK).fit(X, y)
    assert model.score(X, y) == 1.0
    assert model.n_features_in_ == 4
    assert model.encoder_.names[-2:] == ["year = 2007", "year = 2008"]
    with pytest.warns(TableWarning, match="'huge'"):
        model.predict(X.assign(kind="huge"))


def test_columns_are_named_by_name_position_or_mask():
    X, y = table()
    chosen = [["year"], [3], [False, False, False, True]]
    names = [
        HDNNClassifier(categorical=c, **QUICK).fit(X, y).encoder_.names
        for c in chosen
    ]
    assert names[0] == names[1] == names[2]
    for wrong in (["yeer"], [9], "year"):
        with pytest.raises(HDNNError):
            HDNNClassifier(categorical=wrong, **QUICK).fit(X, y)


def test_frames_and_arrays_of_the_same_values_give_the_same_model(iris):
    X, y = iris
    first = HDNNClassifier(**QUICK).fit(X, y).predict_proba(X)
    frame = pd.DataFrame(X, columns=list("abcd"))
    second = HDNNClassifier(**QUICK).fit(frame, y).predict_proba(frame)
    assert np.array_equal(first, second)


# Options


def test_early_stopping_keeps_the_best_epoch(iris):
    options = {
        **QUICK,
        "epochs": 200,
        "early_stopping": True,
        "n_iter_no_change": 5,
    }
    model = HDNNClassifier(**options, validation_fraction=0.3).fit(*iris)
    history = model.history_
    assert history.best_epoch == np.argmin(history.validation_loss) + 1
    assert len(history.loss) < 200


def test_held_out_rows_choose_weak_shrinkage_for_circles(capsys):
    X, y = make_circles(400, noise=0.05, factor=0.5, random_state=0)
    HDNNClassifier(layers=4, epochs=30, random_state=0, verbose=True).fit(X, y)
    lines = [
        line
        for line in capsys.readouterr().err.splitlines()
        if "held-out loss" in line
    ]
    losses = [float(line.split()[-1]) for line in lines]
    assert min(losses[2:]) < losses[0]


def test_partial_fit_learns_a_stream(iris):
    X, y = iris
    model = HDNNClassifier(layers=2, random_state=0)
    with pytest.raises(DataError, match="needs classes"):
        model.partial_fit(X, y)
    for _ in range(30):
        model.partial_fit(X, y, classes=[0, 1, 2])
    assert model.score(X, y) > 0.85
    assert model.n_iter_ == 30


@pytest.mark.parametrize(
    "change",
    [
        {"layers": 0},
        {"network": "h3"},
        {"epochs": -1},
        {"learning_rate": -1.0},
        {"weight_decay": -1.0},
        {"missing": "guess"},
        {"early_stopping": True, "validation_fraction": 2.0},
        {"class_weight": {7: 1.0}},
    ],
)
def test_bad_options_are_refused_when_fitting(change, iris):
    with pytest.raises(HDNNError):
        HDNNClassifier(**{**QUICK, **change}).fit(*iris)


def test_targets_that_cannot_be_learned_are_named(iris):
    X, _ = iris
    cases = [
        (HDNNClassifier, np.zeros(150), "only one class"),
        (HDNNClassifier, ["a", None, "b"] * 50, "missing"),
        (HDNNClassifier, ["a", 1, "b"] * 50, "mixes text labels"),
        (HDNNRegressor, ["a", "b", "c"] * 50, "use HDNNClassifier"),
        (HDNNRegressor, np.full(150, np.nan), "NaN"),
    ]
    for kind, y, words in cases:
        target = np.array(y, object) if isinstance(y, list) else y
        with pytest.raises(ValueError, match=words):
            kind(**QUICK).fit(X, target)


@pytest.mark.parametrize("classes", [False, True])
def test_wide_tables_are_no_worse_than_a_linear_model(classes):
    random = np.random.default_rng(1)
    X = random.normal(size=(450, 10)) @ random.normal(size=(10, 500))
    X += 2 * random.normal(size=X.shape)
    y = X[:, :50] @ random.normal(size=50)
    y = y / y.std() + random.normal(size=450)
    kind, rival = HDNNRegressor, RidgeCV(np.logspace(0, 6, 13))
    if classes:
        y = y > 0
        kind, rival = HDNNClassifier, LogisticRegression(C=1e-3)
    scores = []
    for model in (kind(random_state=0), rival):
        model.fit(X[:150], y[:150])
        scores.append(model.score(X[150:], y[150:]))
    assert scores[0] > scores[1] - 0.05


def test_few_columns_of_a_wide_table_that_tell_all_are_seen():
    random = np.random.default_rng(0)
    X = random.normal(size=(600, 500))
    y = X[:, :5] @ [1, -2, 1, -1, 2] + 0.5 * random.normal(size=600)
    scores = []
    for model in (HDNNRegressor(random_state=0), RidgeCV(np.logspace(0, 6, 7))):
        model.fit(X[:150], y[:150])
        scores.append(model.score(X[150:], y[150:]))
    assert scores[0] > 0.9 > 0.5 > scores[1]


def test_a_linear_model_of_a_wide_table_is_that_of_all_its_columns():
    random = np.random.default_rng(0)
    X = random.normal(size=(300, 100))
    y = X @ random.normal(size=100)
    model = HDNNRegressor(random_state=0).fit(X, y)
    assert model.score(X, y) > 0.999


def test_a_class_that_is_seen_once_among_many_rows_is_learned():
    X = np.random.default_rng(0).normal(size=(12_000, 2))
    y = (X[:, 0] > 0).astype(int)
    y[7] = 2
    model = HDNNClassifier(random_state=0, layers=2).fit(X, y)
    assert model.predict_proba(X[:3]).shape == (3, 3)


def test_costs_do_not_follow_the_number_of_columns():
    X = np.random.default_rng(0).normal(size=(60, 3000))
    y = X[:, :5].sum(1)
    model = HDNNRegressor(random_state=0).fit(X, y)
    assert model.model_.net.features <= 88
    assert model.predict(X).shape == (60,)


def test_more_classes_than_can_be_told_apart_are_refused():
    y = np.arange(5000) % 2500
    with pytest.raises(DataError, match="2500 classes, such as"):
        HDNNClassifier(**QUICK).fit(np.ones((5000, 2)) * y[:, None], y)


def test_clones_have_the_options_and_nothing_learned(iris):
    model = HDNNClassifier(**QUICK).fit(*iris)
    again = clone(model)
    assert again.get_params() == model.get_params()
    assert not hasattr(again, "model_")
    assert model.transform(iris[0][:3]).shape == (3, 16)
    assert model.get_feature_names_out()[0] == "hdnnclassifier0"


@pytest.mark.skipif(has_gpu(), reason="needs no GPU")
def test_a_missing_gpu_is_named():
    with pytest.raises(OptionError, match="no CUDA device is available"):
        HDNNClassifier(device="cuda").fit(*load_iris(return_X_y=True))
