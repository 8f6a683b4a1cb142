"""Data frames, objects and gaps: what the estimators take as X, and what they say of it."""

import pickle
import warnings

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.exceptions import DataConversionWarning
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils import get_tags

from hdnn.errors import DataError, HDNNError, OptionError, TableWarning
from hdnn.estimators import HDNNClassifier, HDNNRegressor

SMALL = {"layers": 1, "epochs": 3, "random_state": 0}


def mixed(count=60):
    """A table as people have it, and labels that depend on its text and its numbers."""
    random = np.random.RandomState(0)
    frame = pd.DataFrame(
        {
            "size": random.randn(count),
            "colour": random.choice(["red", "green", "blue"], count),
            "kind": pd.Categorical(random.choice([1, 2, 5], count)),
            "old": random.rand(count) > 0.5,
            "weight": pd.array(random.randint(0, 9, count), "Int64"),
        }
    )
    y = np.where((frame["colour"] == "red") ^ (frame["size"] > 0), "yes", "no")
    frame.loc[::7, "size"] = np.nan
    frame.loc[::11, "colour"] = None
    frame.loc[::13, "weight"] = pd.NA
    return frame, y


NAMES = ["size", "colour", "kind", "old", "weight"]


def test_a_data_frame_of_texts_and_gaps_is_learned_from():
    X, y = mixed(200)
    model = HDNNClassifier(random_state=0).fit(X, y)
    assert model.score(X, y) > 0.85
    assert list(model.feature_names_in_) == NAMES
    assert model.n_features_in_ == 5
    assert model.model_.augment.inputs == 2 + 4 + 3 + 1 + 2
    assert model.transform(X).shape == (200, model.model_.net.features)
    assert len(model.get_feature_names_out()) == model.model_.net.features


def test_frames_objects_and_lists_of_the_same_values_give_the_same_model():
    X, y = mixed()
    objects = X.to_numpy(object)
    arrow = pytest.importorskip("pyarrow").Table.from_pandas(X.assign(kind=X["kind"].astype(str)))
    first = HDNNClassifier(**SMALL).fit(X, y).predict_proba(X)
    for given in (objects, objects.tolist()):
        model = HDNNClassifier(**SMALL, categorical=[2]).fit(given, y)
        assert (model.predict_proba(given) == first).all()
    model = HDNNClassifier(**SMALL, categorical=["kind"]).fit(arrow, y)
    assert (model.predict_proba(arrow) == first).all()
    assert list(model.feature_names_in_) == NAMES


def test_numbers_without_gaps_are_standardised_and_nothing_else():
    X = np.random.RandomState(0).randn(40, 3)
    model = HDNNRegressor(**SMALL).fit(X, X[:, 0])
    assert model.scaler_.mean_.tolist() == X.mean(0).tolist()
    frame = pd.DataFrame(X.astype(object), columns=list("abc"))
    again = HDNNRegressor(**SMALL).fit(frame, X[:, 0])
    assert (again.predict(frame) == model.predict(X)).all()


def test_pickles_clones_pipelines_and_searches_keep_the_columns():
    X, y = mixed()
    model = HDNNClassifier(**SMALL, categorical=["weight"]).fit(X, y)
    copy = pickle.loads(pickle.dumps(model))
    assert (copy.predict_proba(X) == model.predict_proba(X)).all()
    again = clone(model).fit(X, y)
    assert (again.predict_proba(X) == model.predict_proba(X)).all()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TableWarning)
        assert len(cross_val_score(model, X, y, cv=2, error_score="raise")) == 2
        pipeline = make_pipeline(FunctionTransformer(), HDNNClassifier(**SMALL))
        grid = {"hdnnclassifier__categorical": [None, ["weight"]]}
        search = GridSearchCV(pipeline, grid, cv=2, error_score="raise").fit(X, y)
    assert search.best_score_ > 0


def test_what_is_unlike_the_samples_learned_from_is_a_warning():
    X, y = mixed()
    X = X.assign(old=X["old"].astype(object))
    model = HDNNClassifier(**SMALL).fit(X, y)
    new = X.head(4).copy()
    new.loc[0, "colour"], new.loc[1, "colour"], new.loc[2, "old"] = "pink", "pink", None
    with pytest.warns(TableWarning) as said:
        model.predict(new)
    assert [str(one.message) for one in said] == [
        "X: column 'colour' has categories that were not learned, in 2 rows: 'pink'; they count "
        "as none of the known ones.",
        "X: column 'old' has no value in 1 row, but had one in every row learned from: its "
        f"median, {X['old'].median():.4g}, is taken.",
    ]
    assert all(one.filename == __file__ for one in said)
    with pytest.warns(TableWarning, match="without any value, which are left out: 'none'"):
        HDNNClassifier(**SMALL).fit(X.assign(none=np.nan), y)


def test_partial_fit_learns_the_columns_at_its_first_call():
    X, y = mixed()
    model = HDNNClassifier(**SMALL).partial_fit(X[:30], y[:30], classes=["no", "yes"])
    columns = model.columns_
    model.partial_fit(X[30:], y[30:])
    assert model.columns_ == columns
    constant = np.ones((20, 2))
    constant[:, 0] = np.arange(20)
    model = HDNNRegressor(**SMALL).partial_fit(constant, np.arange(20.0))
    different = np.random.RandomState(0).randn(20, 2)
    model.partial_fit(different, different[:, 1])  # what was constant may vary in later samples
    assert len(set(model.transform(different * [0, 1])[:, 1])) > 1


def test_a_column_that_never_varied_is_ignored():
    X = np.random.RandomState(0).randn(30, 2)
    X[:, 1] = 3.0
    model = HDNNRegressor(**SMALL).fit(X, X[:, 0])
    other = X.copy()
    other[:, 1] = 1e6
    assert (model.predict(other) == model.predict(X)).all()


def test_samples_of_weight_zero_teach_no_categories_and_no_medians():
    X, y = mixed()
    X.loc[:4, "colour"] = "rare"
    weight = np.ones(60)
    weight[:5] = 0
    with pytest.warns(TableWarning, match="'rare'"):
        weighted = HDNNClassifier(**SMALL, batch=100).fit(X, y, sample_weight=weight)
    alone = HDNNClassifier(**SMALL, batch=100).fit(X[5:], y[5:])
    assert np.allclose(weighted.predict_proba(X[5:]), alone.predict_proba(X[5:]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"day": pd.Timestamp("2024-01-31")}, "column 'day': Timestamp.*is a date or time"),
        ({"day": pd.Timedelta("1h")}, "column 'day'.*is a date or time"),
        ({"day": pd.Period("2024-01")}, "column 'day'.*is a date or time"),
        ({"id": [f"p{i}" for i in range(60)]}, r"60 different texts.*say categorical=\['id'\]"),
        ({"size": ["1", "2", "abc"] * 20}, r"X, row 2 \(counted from 0\), column 'size': 'abc'"),
        ({"size": np.inf}, "column 'size': inf is not finite"),
        ({"size": [[1]] * 60}, "column 'size': .1. is a list"),
    ],
)
def test_columns_that_cannot_be_used_are_named(change, words):
    X, y = mixed()
    with pytest.raises(DataError, match=words):
        HDNNClassifier(**SMALL).fit(X.assign(**change), y)


def test_frames_of_numbers_name_what_is_wrong_too():
    numbers = pd.DataFrame({"a": np.arange(6.0), "b": np.arange(6) + 2**60})
    y = ["x", "y"] * 3
    with pytest.raises(DataError, match=r"column 'day': Timedelta.*is a date or time"):
        HDNNClassifier(**SMALL).fit(numbers.assign(day=pd.to_timedelta(np.arange(6), "D")), y)
    with pytest.raises(DataError, match="more than one column of the name 'a'; rename them"):
        HDNNClassifier(**SMALL).fit(numbers[["a", "a"]], y)
    with pytest.raises(DataError, match=r"column 'b' has numbers beyond 2\^53"):
        HDNNClassifier(**SMALL, categorical=["b"]).fit(numbers, y)


def test_a_whole_number_is_the_same_category_in_a_frame_of_numbers():
    X = pd.DataFrame({"a": np.arange(6.0), "t": [1, 2, "u"] * 2})
    model = HDNNClassifier(**SMALL, categorical=["t"]).fit(X, [0, 1] * 3)
    alone = model.predict_proba(pd.DataFrame({"a": [0.0], "t": [1]}))  # t comes as 1.0
    assert np.allclose(alone, model.predict_proba(X)[:1], atol=1e-12)


@pytest.mark.parametrize(
    ("estimator", "y", "words"),
    [
        (HDNNClassifier, ["a", None, "b"], "y, row 1 .counted from 0.: the value is missing"),
        (HDNNClassifier, pd.Series(["a", pd.NA, "b"], dtype="string"), "y, row 1 .*is missing"),
        (HDNNClassifier, pd.Categorical(["a", None, "b"]), "y, row 1 .*is missing"),
        (HDNNClassifier, np.array([1, "a", 2], object), "such as 'a' and 1; make all of them text"),
        (HDNNRegressor, ["1.5", "2", "many"], "y, row 2 .*'many' is not a number.*HDNNClassifier"),
        (HDNNRegressor, np.array([1.5, None, 2.0], object), "y, row 1 .*is missing"),
    ],
)
def test_targets_that_cannot_be_learned_are_named(estimator, y, words):
    with pytest.raises(DataError, match=words):
        estimator(**SMALL).fit([[1.0], [2.0], [3.0]], y)


@pytest.mark.parametrize("given", [{"a": -1, "b": 1}, {"a": np.nan}, {"a": 0, "b": 0}])
def test_impossible_weights_of_classes_are_named(given):
    with pytest.raises(OptionError, match="class_weight must have finite numbers >= 0"):
        HDNNClassifier(**SMALL, class_weight=given).fit([[1.0], [2.0], [3.0]], ["a", "b", "a"])


def test_dates_in_an_array_are_refused():
    days = np.array([["2024-01-01"], ["2024-01-02"]], "datetime64[ns]")
    with pytest.raises(DataError, match=r"X, row 0 .*, column 0: .*is a date or time.*=\[0\]"):
        HDNNClassifier(**SMALL).fit(days, [0, 1])


def test_missing_values_are_refused_where_that_is_wanted():
    X, y = mixed()
    model = HDNNClassifier(**SMALL, missing="refuse")
    with pytest.raises(ValueError, match=r"column 'size': the value is missing.*missing=\"fill\""):
        model.fit(X, y)
    with pytest.raises(ValueError, match="NaN"):
        model.fit(X[["size"]], y)
    model.fit(X[["old"]].assign(a=1.0 * np.arange(60)), y)
    with pytest.raises(ValueError, match="NaN"):
        model.predict(pd.DataFrame({"old": [True], "a": [np.nan]}))
    with pytest.raises(HDNNError, match="missing 'mean' is not known"):
        HDNNClassifier(**SMALL, missing="mean").fit(X, y)


def test_tags_say_what_is_taken():
    tags = get_tags(HDNNRegressor()).input_tags
    assert (tags.allow_nan, tags.categorical, tags.string) == (True, True, False)
    assert not get_tags(HDNNRegressor(missing="refuse")).input_tags.allow_nan


@pytest.mark.parametrize("categorical", [["tall"], [5], [-1], "size", 3, [True], [None]])
def test_categorical_names_columns_that_there_are(categorical):
    X, y = mixed()
    with pytest.raises(OptionError, match="categorical"):
        HDNNClassifier(**SMALL, categorical=categorical).fit(X, y)


@pytest.mark.parametrize("categorical", [["old"], [3], [False, False, False, True, False]])
def test_columns_are_named_by_name_position_or_mask(categorical):
    X, y = mixed()
    model = HDNNClassifier(**SMALL, categorical=categorical).fit(X, y)
    assert [c["kind"] == "categories" for c in model.columns_] == [False, True, True, True, False]


def test_verbose_says_what_became_of_the_columns(capsys):
    X, y = mixed()
    HDNNClassifier(**SMALL, verbose=True).fit(X.assign(same=1.0), y)
    said = capsys.readouterr().err
    assert "columns taken as categories: 'colour' (3), 'kind' (3)" in said
    assert "tell nothing and are ignored: 'same'" in said
    HDNNClassifier(**SMALL).fit(X.assign(same=1.0), y)
    assert capsys.readouterr().err == ""


def test_a_table_that_tells_nothing_is_refused():
    with pytest.raises(DataError, match="no column that tells anything"):
        HDNNClassifier(**SMALL).fit(pd.DataFrame({"a": ["x"] * 4}), [0, 1, 0, 1])


@pytest.mark.parametrize("kind", ["boolean", "Int64"])
def test_labels_of_nullable_types_are_predicted_as_they_were_given(kind):
    X = np.arange(-8.0, 8.0)[:, None]
    y = pd.Series(X[:, 0] > 0).astype(kind)
    for labels in (y, y.to_frame(), y.array):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DataConversionWarning)  # of a frame of one column
            model = HDNNClassifier(epochs=1, layers=1, random_state=0).fit(X, labels)
        assert model.classes_.tolist() == [False, True]
        assert model.predict(X).dtype == model.classes_.dtype == y.dtype.numpy_dtype
    y[3] = pd.NA
    with pytest.raises(ValueError, match=r"missing|NaN"):
        model.fit(X, y)
