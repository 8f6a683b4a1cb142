"""The scikit-learn face: its published checks, and what they do not ask."""

import pickle
import subprocess
import sys
import warnings
from functools import wraps

import numpy as np
import pandas as pd
import pytest
import torch
from joblib.externals.loky import ProcessPoolExecutor
from sklearn.base import clone
from sklearn.datasets import load_diabetes, load_iris, make_classification, make_moons
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler, StandardScaler
from sklearn.utils import check_random_state
from sklearn.utils.estimator_checks import parametrize_with_checks

import hdnn
from hdnn.app.configs.table import TableConfig
from hdnn.data.table import Columns
from hdnn.errors import HDNNError, OptionError
from hdnn.estimators import NETWORKS, HDNNClassifier, HDNNRegressor, base
from hdnn.training import table_recipe

SMALL = {"layers": 2, "epochs": 20, "random_state": 0}


@parametrize_with_checks([HDNNClassifier(layers=2), HDNNRegressor(layers=2)])
def test_estimators_pass_the_checks_of_scikit_learn(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def iris():
    X, y = load_iris(return_X_y=True)
    order = np.random.RandomState(0).permutation(len(X))
    return X[order], y[order]


@pytest.fixture(scope="module")
def line():
    """A linear map with three values, and a little noise."""
    random = np.random.RandomState(0)
    X = random.randn(120, 5)
    return X, X @ random.randn(5, 3) + 0.05 * random.randn(120, 3) + 7


def test_defaults_learn_what_no_line_separates():
    X, y = make_moons(300, noise=0.1, random_state=0)
    model = HDNNClassifier(random_state=0).fit(X[:200], y[:200])
    assert model.score(X[200:], y[200:]) >= 0.97


def test_probabilities_scores_and_labels_agree(iris):
    X, y = iris
    names = np.array(["setosa", "versicolor", "virginica"])
    model = HDNNClassifier(**SMALL).fit(X, names[y])
    P = model.predict_proba(X)
    assert list(model.classes_) == list(names)
    assert P.shape == (150, 3)
    assert np.allclose(P.sum(1), 1)
    assert (model.predict(X) == names[P.argmax(1)]).all()
    assert (P.argmax(1) == model.decision_function(X).argmax(1)).all()
    assert model.score(X, names[y]) > 0.9


def test_two_classes_have_one_score(iris):
    X, y = iris
    model = HDNNClassifier(**SMALL).fit(X[y < 2], y[y < 2] == 1)
    scores = model.decision_function(X)
    assert scores.shape == (150,)
    assert (model.predict(X) == (scores > 0)).all()
    assert np.allclose(model.predict_proba(X)[:, 1], 1 / (1 + np.exp(-scores)))
    assert isinstance(model.model_.head, hdnn.SigmoidHead)


def test_several_values_come_back_in_the_shape_they_had(line):
    X, Y = line
    model = HDNNRegressor(**SMALL).fit(X, Y)
    assert model.predict(X).shape == Y.shape
    assert model.score(X, Y) > 0.95
    assert HDNNRegressor(**SMALL).fit(X, Y[:, 0]).predict(X).shape == (120,)
    assert HDNNRegressor(**SMALL).fit(X, Y[:, :1]).predict(X).shape == (120, 1)


def test_units_of_inputs_and_targets_do_not_matter(line):
    X, Y = line
    plain = HDNNRegressor(**SMALL).fit(X, Y).predict(X)
    scaled = HDNNRegressor(**SMALL).fit(1e6 * X - 3e5, 1e-4 * Y + 5).predict(1e6 * X - 3e5)
    assert np.allclose((scaled - 5) * 1e4, plain, atol=1e-5)


def test_constant_columns_and_constant_targets_are_no_trouble(line):
    X, Y = line
    X = np.column_stack([X, np.full(len(X), 0.1)])
    assert HDNNRegressor(**SMALL).fit(X, Y).score(X, Y) > 0.95
    assert np.allclose(HDNNRegressor(**SMALL).fit(X, np.full(len(X), 3.0)).predict(X), 3)


@pytest.mark.parametrize("columns", [1, 3, 7])
@pytest.mark.parametrize("network", ["h1", "h2", "ms2"])
def test_any_number_of_columns_is_augmented(columns, network):
    random = np.random.RandomState(columns)
    X = random.randn(60, columns)
    model = HDNNClassifier(network, **SMALL).fit(X, X[:, 0] > 0)
    assert model.score(X, X[:, 0] > 0) > 0.9
    assert model.transform(X).shape == (60, max(16, 3 * columns + columns % 2))


@pytest.mark.parametrize(("inputs", "features"), [(1, 16), (9, 28), (12, 36), (64, 88), (301, 326)])
def test_width_is_even_and_grows_with_the_table(inputs, features):
    X = np.random.RandomState(0).randn(10, inputs)
    model = HDNNRegressor(layers=1, epochs=1).fit(X, X[:, 0])
    assert model.model_.net.features == features


@pytest.mark.parametrize("network", sorted(NETWORKS))
def test_every_network_serves(network, iris):
    X, y = iris
    model = HDNNClassifier(network, layers=2, features=8, epochs=5, random_state=0).fit(X, y)
    assert model.score(X, y) > 0.8
    certificate = model.certificate_
    if network != "mlp":
        assert certificate.smallest_norm >= 1 - 1e-9


def test_features_are_those_before_the_output_layer(iris):
    X, y = iris
    model = HDNNClassifier(**SMALL).fit(X, y)
    head = model.model_.head
    scores = model.transform(X) @ head.weight.detach().numpy().T + head.bias.detach().numpy()
    assert np.allclose(scores, model.decision_function(X))
    frame = model.set_output(transform="pandas").transform(X)
    assert list(frame.columns[:2]) == ["hdnnclassifier0", "hdnnclassifier1"]


def test_certificate_says_that_gradients_do_not_vanish(iris):
    X, y = iris
    model = HDNNClassifier(**SMALL)
    with pytest.raises(NotFittedError):
        _ = model.certificate_
    model.fit(X, y)
    certificate = model.certificate_
    low, high = (bound.value for bound in certificate.bounds[-2:])
    assert certificate.smallest_norm >= 1 - 1e-12
    assert certificate.symplectic
    assert 0 < low <= 1 <= certificate.largest_norm <= high * (1 + 1e-12)
    assert certificate.samples == 75
    assert model.certificate_ is certificate
    assert model.fit(X[:20], y[:20]).certificate_.samples == 20


def test_data_frames_are_known_by_their_columns(iris):
    X, y = iris
    frame = pd.DataFrame(X, columns=["a", "b", "c", "d"])
    model = HDNNClassifier(**SMALL).fit(frame, pd.Series(y).astype("category"))
    assert list(model.feature_names_in_) == ["a", "b", "c", "d"]
    assert model.n_features_in_ == 4
    assert (model.predict(frame) == HDNNClassifier(**SMALL).fit(X, y).predict(X)).all()
    with pytest.raises(ValueError, match="feature names"):
        model.predict(frame[["d", "c", "b", "a"]])


def test_one_seed_is_one_model_and_the_global_state_is_left_alone(iris):
    X, y = iris
    of_numpy = check_random_state(None)
    before = of_numpy.get_state()[1].copy(), torch.get_rng_state()
    first = HDNNClassifier(**SMALL).fit(X, y)
    again = clone(first).fit(X, y)
    other = clone(first).set_params(random_state=np.random.RandomState(1)).fit(X, y)
    assert (first.predict_proba(X) == again.predict_proba(X)).all()
    assert not np.allclose(first.predict_proba(X), other.predict_proba(X), atol=1e-6)
    assert (of_numpy.get_state()[1] == before[0]).all()
    assert torch.equal(torch.get_rng_state(), before[1])


def test_history_has_an_entry_for_each_epoch(iris):
    model = HDNNClassifier(**SMALL).fit(*iris)
    assert model.n_iter_ == len(model.history_.loss) == len(model.history_.accuracy) == 20
    assert model.history_.loss[-1] < model.history_.loss[0]
    assert model.history_.seconds > 0


def test_a_training_that_fails_leaves_nothing_to_predict_with(iris):
    X, y = iris
    model = HDNNClassifier(learning_rate=-1.0)
    for learn in (model.fit, lambda X, y: model.partial_fit(X, y, classes=[0, 1, 2])):
        with pytest.raises(HDNNError, match="learning_rate"):
            learn(X, y)
        with pytest.raises(NotFittedError):
            model.predict(X)


def test_penalties_are_shared_by_the_samples(line):
    X, Y = line
    once = HDNNRegressor(**SMALL, batch=500, ridge=3.0, weight_decay=2.0).fit(X, Y)
    twice = HDNNRegressor(**SMALL, batch=500, ridge=6.0, weight_decay=4.0)
    twice.fit(np.tile(X, (2, 1)), np.tile(Y, (2, 1)))
    assert np.allclose(once.predict(X), twice.predict(X))


def test_default_regressor_does_not_overfit_a_small_noisy_table():
    X, y = load_diabetes(return_X_y=True)
    model = HDNNRegressor(random_state=0).fit(X[:300], y[:300])
    assert model.score(X[300:], y[300:]) > 0.45


def test_default_classifier_is_not_too_sure_where_labels_are_wrong():
    X, y = make_classification(600, flip_y=0.3, random_state=12)
    model = HDNNClassifier(random_state=0).fit(X[:300], y[:300])
    linear = make_pipeline(StandardScaler(), LogisticRegression()).fit(X[:300], y[:300])
    ours, theirs = (log_loss(y[300:], one.predict_proba(X[300:])) for one in (model, linear))
    assert ours < 1.1 * theirs


@pytest.mark.parametrize("columns", [2, 3])
def test_default_classifier_learns_what_no_column_tells_alone(columns):
    X = np.random.RandomState(0).uniform(-1, 1, (700, columns))
    y = (X > 0).sum(1) % 2
    model = HDNNClassifier(random_state=0).fit(X[:400], y[:400])
    assert model.score(X[400:], y[400:]) > 0.9


def test_pipelines_searches_and_cross_validation_work(iris):
    X, y = iris
    pipeline = make_pipeline(MinMaxScaler(), HDNNClassifier(**SMALL))
    assert cross_val_score(pipeline, X, y, cv=3).mean() > 0.9
    grid = {
        "hdnnclassifier__epochs": np.array([1, 10]),
        "hdnnclassifier__ridge": np.logspace(-3, -2, 2),
    }
    search = GridSearchCV(pipeline, grid, cv=2, error_score="raise").fit(X, y)
    assert search.best_score_ > 0.9
    features = make_pipeline(HDNNRegressor(**SMALL), HDNNClassifier(**SMALL)).fit(X, y)
    assert features.score(X, y) > 0.9


def test_other_processes_train_and_send_back_the_same_model(iris):
    X, y = iris
    model = HDNNClassifier(**SMALL)
    # What joblib.Parallel starts and sends, with one process instead of two.
    with ProcessPoolExecutor(max_workers=1) as others:
        results = [others.submit(clone(model).fit, X, y) for _ in range(2)]
        here = model.fit(X, y).predict_proba(X)
    for result in (one.result() for one in results):
        assert np.allclose(result.predict_proba(X), here, rtol=1e-9, atol=1e-12)


def test_pickles_hold_arrays_and_no_torch_objects(iris):
    X, y = iris
    model = HDNNClassifier("verlet", engine="reference", **SMALL).fit(X, y)
    content = pickle.dumps(model)
    assert b"torch" not in content
    copy = pickle.loads(content)
    assert (copy.predict_proba(X) == model.predict_proba(X)).all()
    assert copy.model_.net.engine == "reference"
    assert copy.partial_fit(X, y).n_iter_ == 21
    assert isinstance(model.model_, hdnn.Model)


def test_partial_fit_learns_a_stream(iris):
    X, y = iris
    model = HDNNClassifier(layers=4, random_state=0)
    for _ in range(15):
        for part in np.array_split(np.arange(150), 5):
            model.partial_fit(X[part], y[part], classes=[0, 1, 2])
    assert model.score(X, y) > 0.9
    assert model.n_iter_ == len(model.history_.loss) == 75
    assert np.allclose(model.scaler_.mean_, X.mean(0))


def test_partial_fit_of_a_regressor_and_after_fit(line):
    X, Y = line
    model = HDNNRegressor(layers=4, random_state=0)
    for _ in range(60):
        model.partial_fit(X, Y)
    assert model.score(X, Y) > 0.9
    fitted = HDNNRegressor(**SMALL).fit(X, Y)
    before = fitted.score(X, Y)
    assert fitted.partial_fit(X, Y).score(X, Y) > before - 0.05


def test_partial_fit_says_what_it_needs(iris, line):
    X, y = iris
    with pytest.raises(HDNNError, match="first call of partial_fit needs classes"):
        HDNNClassifier().partial_fit(X, y)
    with pytest.raises(HDNNError, match="balanced"):
        HDNNClassifier(class_weight="balanced").partial_fit(X, y, classes=[0, 1, 2])
    model = HDNNClassifier(**SMALL).partial_fit(X, y, classes=[0, 1, 2])
    with pytest.raises(HDNNError, match="as in the first call"):
        model.partial_fit(X, y, classes=[0, 1])
    with pytest.raises(HDNNError, match="not among the classes"):
        model.partial_fit(X, y + 1)
    regressor = HDNNRegressor(**SMALL).partial_fit(*line)
    with pytest.raises(HDNNError, match="3 before"):
        regressor.partial_fit(line[0], line[1][:, 0])


def test_weight_two_is_the_sample_twice_and_zero_is_none(iris):
    X, y = iris[0][:40], iris[1][:40]
    weight = np.arange(40) % 3
    options = {**SMALL, "batch": 200}  # one minibatch: its order does not matter
    repeated = HDNNClassifier(**options).fit(np.repeat(X, weight, 0), np.repeat(y, weight))
    weighted = HDNNClassifier(**options).fit(X, y, sample_weight=weight)
    assert np.allclose(weighted.predict_proba(X), repeated.predict_proba(X), atol=1e-8)


def test_class_weights_raise_the_rare_class():
    random = np.random.RandomState(0)
    X = np.concatenate([random.randn(300, 2), random.randn(20, 2) + 1.5])
    y = np.repeat([0, 1], [300, 20])
    plain = HDNNClassifier(**SMALL).fit(X, y)
    balanced = HDNNClassifier(class_weight="balanced", **SMALL).fit(X, y)
    given = HDNNClassifier(class_weight={0: 320 / 600, 1: 320 / 40}, **SMALL).fit(X, y)
    assert balanced.predict(X[300:]).mean() > plain.predict(X[300:]).mean() + 0.2
    assert np.allclose(balanced.predict_proba(X), given.predict_proba(X))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"network": "h3"}, "network 'h3' is not known"),
        ({"layers": 0}, "layers must be a whole number >= 1"),
        ({"features": 7}, "must be even"),
        ({"features": 2}, "4 inputs do not fit into 2 features"),
        ({"T": -1.0}, "T must be finite and > 0"),
        ({"epochs": 0}, "epochs must be"),
        ({"solver": "sgd"}, "solver 'sgd' is not known"),
        ({"activation": "tan"}, "tan"),
        ({"ridge": "much"}, "ridge must be a number"),
        ({"class_weight": "rare"}, "class_weight"),
        ({"random_state": "seed"}, "cannot be used to seed"),
        ({"device": "abacus"}, "device 'abacus' is not known"),
    ],
)
def test_bad_parameters_are_named_when_fitting(change, message, iris):
    model = HDNNClassifier().set_params(**change)
    with pytest.raises(ValueError, match=message):
        model.fit(*iris)


def test_bad_data_are_refused_in_a_sentence(iris):
    X, y = iris
    hole = X.copy()
    hole[3, 2] = np.nan
    with pytest.raises(ValueError, match="NaN"):
        HDNNClassifier(missing="refuse").fit(hole, y)
    hole[3, 2] = np.inf
    with pytest.raises(ValueError, match="infinity"):
        HDNNClassifier().fit(hole, y)
    with pytest.raises(HDNNError, match="only one class: a"):
        HDNNClassifier().fit(X, np.full(150, "a"))
    with pytest.raises(ValueError, match="continuous"):
        HDNNClassifier().fit(X, X[:, 0])
    with pytest.raises(HDNNError, match="zero for all samples"):
        HDNNRegressor().fit(X, y, sample_weight=np.zeros(150))
    with pytest.raises(ValueError, match="egative"):
        HDNNRegressor().fit(X, y, sample_weight=-np.ones(150))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(HDNNError, match="rescale"):
            HDNNClassifier().fit(X * 1e200, y)
        with pytest.raises(HDNNError, match="y has values up to"):
            HDNNRegressor().fit(X, y * 1e200)


def test_without_scikit_learn_it_says_which_extra_to_install():
    program = (
        "import sys; sys.modules['sklearn'] = None\n"
        "import hdnn\n"
        "try: import hdnn.estimators\n"
        "except hdnn.errors.MissingExtraError as error: sys.exit(str(error))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert "pip install 'hdnn[sklearn]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_very_many_columns_ask_for_a_word_before_the_network_is_made():
    X, y = np.zeros((4, 20_000)), [0, 1, 0, 1]
    for estimator in (HDNNClassifier(), HDNNRegressor()):
        with pytest.raises(OptionError, match="features=20024"):
            estimator.fit(X, y)


def test_the_defaults_are_those_of_the_command_line():
    run = TableConfig.of({"data": "t.csv"})
    for estimator in (HDNNClassifier(), HDNNRegressor()):
        assert table_recipe.DEFAULTS.items() <= estimator.get_params().items()
        for name in ("layers", "activation", "epochs", "learning_rate", "solver", "smoothness"):
            assert getattr(run, name) == getattr(estimator, name)
        assert run.batch is run.weight_decay is run.ridge is run.features is None


def test_wide_networks_take_fewer_and_smaller_steps_and_minibatches_are_whole_tiles():
    assert [table_recipe.epochs(n) for n in (16, 64, 96, 4120)] == [40, 40, 27, 10]
    rates = [table_recipe.learning_rate(n) for n in (16, 24, 96)]
    assert rates == pytest.approx([0.02, 0.02, 0.01])
    assert [table_recipe.penalty("weight_decay", n) for n in (16, 100)] == [8, 33]
    assert table_recipe.penalty("ridge", 100) == 1
    assert [table_recipe.batch(rows) for rows in (0, 64, 65, 513, 5000)] == [1, 64, 32, 64, 128]


def test_rare_values_of_mostly_constant_columns_are_no_large_inputs_in_either_door():
    X = np.random.default_rng(0).normal(size=(200, 3))
    X[:, 1] = 0.0
    X[7, 1:] = 1000.0  # a rare value, and what may be a mistake in a column that varies
    y = (X[:, 0] > 0).astype(int)
    model = HDNNClassifier(layers=1, epochs=1, random_state=0).fit(X, y)
    inputs = model.scaler_.transform(X)
    assert np.abs(inputs).max(0)[1] == pytest.approx(4)
    assert inputs[:, [0, 2]].std(0) == pytest.approx(1)
    scale = model.scaler_.scale_.copy()
    model.partial_fit(X, y)
    np.testing.assert_allclose(model.scaler_.scale_, scale)
    parts = HDNNClassifier(layers=1, random_state=0)
    for some in (slice(None, 100), slice(100, None)):
        parts.partial_fit(X[some], y[some], classes=[0, 1])
    np.testing.assert_allclose(parts.scaler_.scale_, X.std(0))
    without = HDNNClassifier(layers=1, epochs=1, random_state=0)
    without.fit(X, y, sample_weight=np.arange(200) != 7)
    assert without.scaler_.scale_[2] < 2
    columns = Columns("classification", "y", ["a", "b", "c"], [], [], ["0", "1"])
    assert columns.standardised(X, y, "bounded").scale == pytest.approx(list(scale))
    assert columns.standardised(X, y).scale == pytest.approx(list(X.std(0)))


@pytest.mark.parametrize("rows", [40, 200])
def test_what_depends_on_rows_and_columns_is_the_same_in_the_command_line(rows, monkeypatch):
    asked, fit = {}, base.training.fit

    @wraps(fit)
    def watched(*data, **options):
        asked.update(options)
        return fit(*data, **options)

    monkeypatch.setattr(base.training, "fit", watched)
    X = np.random.RandomState(0).randn(rows, 1)
    HDNNClassifier(epochs=1).fit(X, X[:, 0] > 0)
    columns = Columns("", "t", ["a"], [0.0], [1.0], ["x", "y"])
    filled = TableConfig.of({"data": "t.csv", "epochs": 1}).resolved(columns, rows)
    assert filled.T == HDNNClassifier().T
    wanted = filled.fit_options(rows)
    assert {name: asked[name] for name in ("batch", "solver", "ridge", "weight_decay")} == {
        "batch": rows if rows == 40 else 32,
        "solver": "joint",
        "ridge": wanted["ridge"],
        "weight_decay": wanted["weight_decay"],
    }
    for name in ("batch", "learning_rate"):
        assert wanted[name] == asked[name]
    assert wanted["weight_decay"] == 8 / rows
