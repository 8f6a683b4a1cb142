"""The scikit-learn face: its published checks, and what it promises besides."""

import pickle

import numpy as np
import pytest
from sklearn.datasets import load_iris, make_moons
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import hdnn
from hdnn import HDNNClassifier, HDNNRegressor

SMALL = {"layers": 2, "epochs": 20, "random_state": 0}


@parametrize_with_checks([HDNNClassifier(layers=2), HDNNRegressor(layers=2)])
def test_estimators_pass_the_checks_of_scikit_learn(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def iris():
    X, y = load_iris(return_X_y=True)
    order = np.random.RandomState(0).permutation(len(X))
    return X[order], y[order]


def test_defaults_learn_what_no_line_separates():
    X, y = make_moons(300, noise=0.1, random_state=0)
    model = HDNNClassifier(random_state=0).fit(X[:200], y[:200])
    assert model.score(X[200:], y[200:]) >= 0.97


def test_several_values_come_back_in_the_shape_they_had():
    random = np.random.RandomState(0)
    X = random.randn(120, 5)
    y = X @ random.randn(5, 3) + 0.05 * random.randn(120, 3) + 7
    model = HDNNRegressor(random_state=0).fit(X, y)
    assert model.predict(X).shape == (120, 3)
    assert model.score(X, y) > 0.95


@pytest.mark.parametrize("network", ["h1", "h2", "verlet", "mlp"])
def test_the_network_can_be_chosen_and_is_certified(network, iris):
    model = HDNNClassifier(network=network, **SMALL).fit(*iris)
    assert model.score(*iris) > 0.8
    assert model.predict_proba(iris[0]).sum(1) == pytest.approx(1)
    assert model.certificate_.guaranteed == (network != "mlp")
    if network != "mlp":
        assert model.certificate_.holds
        assert model.certificate_.smallest_norm >= 1 - 1e-9


def test_one_seed_is_one_model(iris):
    first, second = (HDNNClassifier(**SMALL).fit(*iris) for _ in range(2))
    assert np.array_equal(first.predict_proba(iris[0]), second.predict_proba(iris[0]))
    other = HDNNClassifier(**{**SMALL, "random_state": 1}).fit(*iris)
    assert not np.array_equal(first.predict_proba(iris[0]), other.predict_proba(iris[0]))


def test_pipelines_cross_validation_and_pickles_work(iris):
    pipeline = make_pipeline(StandardScaler(), HDNNClassifier(**SMALL))
    assert cross_val_score(pipeline, *iris, cv=3).mean() > 0.8
    model = pipeline.fit(*iris)
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_allclose(again.predict_proba(iris[0]), model.predict_proba(iris[0]))


def test_tables_with_text_and_gaps_are_taken_as_they_are(iris):
    pandas = pytest.importorskip("pandas")
    X, y = iris
    frame = pandas.DataFrame(X[:, :2], columns=["a", "b"])
    frame["kind"] = np.array(["small", "large"])[(X[:, 2] > 2.5).astype(int)]
    frame.loc[3, "a"] = np.nan
    model = HDNNClassifier(**SMALL).fit(frame, y)
    assert model.score(frame, y) > 0.7


@pytest.mark.parametrize("change", [{"layers": 0}, {"network": "h3"}, {"epochs": -1}])
def test_bad_parameters_are_refused_when_fitting(change, iris):
    with pytest.raises((hdnn.HDNNError, ValueError)):
        HDNNClassifier(**{**SMALL, **change}).fit(*iris)
