"""Estimators that hold samples out, end when these get no better, and keep the best model."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("sklearn")

from sklearn.datasets import make_classification, make_regression
from sklearn.metrics import accuracy_score, log_loss, r2_score

from hdnn import HDNNClassifier, HDNNRegressor
from hdnn.data.table import hold_out
from hdnn.errors import HDNNError
from hdnn.training import fit

X, Y = make_classification(
    160, 6, n_classes=3, n_informative=4, weights=[0.6, 0.3, 0.1], flip_y=0.2, random_state=0
)
QUICK = {"layers": 2, "features": 8, "epochs": 12, "learning_rate": 0.1, "random_state": 3}
EARLY = {"early_stopping": True, "validation_fraction": 0.25, "n_iter_no_change": 3}


def stratified(seed=3, fraction=0.25, weight=None):
    return hold_out(Y, fraction, seed, classes=True, weight=weight)[1]


def test_the_kept_model_is_the_best_at_the_held_out_samples():
    model = HDNNClassifier(**QUICK, **EARLY).fit(X, Y)
    held, history, best = stratified(), model.history_, model.history_.best_epoch
    assert model.n_iter_ == len(model.loss_curve_) == min(best + 3, 12)
    loss = log_loss(Y[held], model.predict_proba(X[held]))
    assert loss == pytest.approx(min(history.validation_loss), rel=1e-9)
    assert model.validation_scores_ == history.validation_score
    score = accuracy_score(Y[held], model.predict(X[held]))
    assert model.best_validation_score_ == pytest.approx(score)
    assert model.best_loss_ is None
    assert sorted(np.bincount(Y[held])) == [round(n / 4) for n in sorted(np.bincount(Y))]


def test_values_are_held_out_too():
    x, y = make_regression(80, 4, noise=5.0, random_state=1)
    model = HDNNRegressor(**QUICK, **EARLY).fit(x, y)
    held = hold_out(y, 0.25, 3, classes=False)[1]
    assert len(held) == 20
    assert model.best_validation_score_ == pytest.approx(r2_score(y[held], model.predict(x[held])))


def test_without_early_stopping_all_samples_are_learned_from():
    model = HDNNClassifier(**QUICK).fit(X, Y)
    assert model.n_iter_ == len(model.loss_curve_) == 12
    assert model.validation_scores_ is None
    assert model.best_validation_score_ is None
    assert model.best_loss_ == min(model.loss_curve_)


def test_samples_of_weight_zero_are_as_good_as_absent():
    weight = np.where(np.arange(len(X)) % 5 == 0, 0.0, 2.0)
    few = weight > 0
    options = {**QUICK, **EARLY, "epochs": 3, "batch": 512}
    # The penalties are shared by the sum of the weights.
    without = HDNNClassifier(**options).fit(X[few], Y[few], 2.0 * np.ones(few.sum()))
    with_zeros = HDNNClassifier(**options).fit(X, Y, weight)
    assert len(without.history_.validation_loss) == 3
    assert with_zeros.history_.validation_loss == pytest.approx(without.history_.validation_loss)


def test_a_number_as_random_state_is_the_seed_of_the_training(monkeypatch):
    seeds = []

    def watched(*args, **options):
        seeds.append(options["seed"])
        return fit(*args, **options)

    monkeypatch.setattr("hdnn.training.fit", watched)
    for state in (7, np.int64(7), np.random.RandomState(0)):
        HDNNClassifier(**{**QUICK, "epochs": 1, "random_state": state}).fit(X, Y)
    assert seeds[:2] == [7, 7]
    assert seeds[2] != 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"early_stopping": "yes"}, "early_stopping must be True or False"),
        ({"validation_fraction": 1.0}, "validation_fraction must be a number between 0 and 1"),
        ({"validation_fraction": "a"}, "validation_fraction must be a number between 0 and 1"),
        ({"validation_fraction": 1e-4}, r"160 rows are too few to hold out 0.0001 of each of 3"),
        ({"n_iter_no_change": 0}, "n_iter_no_change must be"),
        ({"tol": -1.0}, "tol must be"),
    ],
)
def test_what_cannot_be_held_out_is_said(options, message):
    with pytest.raises(HDNNError, match=message):
        HDNNClassifier(**QUICK, **{**EARLY, **options}).fit(X, Y)


def test_the_best_score_stays_that_of_the_best_epoch():
    model = HDNNClassifier(**QUICK, **EARLY).fit(X, Y)
    best = model.best_validation_score_
    model.history_.validation_score[-1] = -1.0  # of the last epoch, not of the best
    assert model.partial_fit(X, Y).best_validation_score_ == best


def test_one_more_epoch_holds_nothing_out():
    model = HDNNClassifier(**QUICK, **EARLY).partial_fit(X, Y, classes=[0, 1, 2])
    assert model.n_iter_ == 1
    assert model.validation_scores_ is None
