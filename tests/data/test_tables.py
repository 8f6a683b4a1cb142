"""Tables: any usual file is read, columns become inputs, and mistakes are one sentence."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pandas as pd
import pytest

from hdnn.data import tables
from hdnn.data.tables import Encoder, Target
from hdnn.errors import DataError, OptionError, TableWarning


@pytest.fixture
def csv(tmp_path):
    def write(text, name="table.csv", encoding="utf-8"):
        path = tmp_path / name
        path.write_bytes(text.encode(encoding))
        return path

    return write


# Files


@pytest.mark.parametrize(
    "text",
    [
        "a,b\n1.5,x\n2,y\n",
        "a;b\n1,5;x\n2;y\n",
        "a\tb\n1.5\tx\n2\ty\n",
        "a|b\r\n1.5|x\r\n2|y\r\n",
        '\ufeffa, b\n"1.5", x\n2, y\n',
        "a ,b \n1.5 ,x \n2 ,y\n",
    ],
)
def test_delimiter_and_decimal_sign_are_detected(csv, text):
    frame = tables.read(csv(text))
    assert frame["a"].tolist() == [1.5, 2.0]
    assert frame["b"].str.strip().tolist() == ["x", "y"]


def test_files_of_old_encodings_are_read(csv):
    frame = tables.read(csv("größe,b\n1,ä\n2,ö\n", encoding="latin-1"))
    assert frame["größe"].tolist() == [1, 2]


def test_utf16_and_marks_of_gaps_are_read(csv):
    frame = tables.read(csv("a,b\n1,x\n.,--\n", encoding="utf-16"))
    assert frame.isna().to_numpy().tolist() == [[False, False], [True, True]]


def test_large_files_are_read_as_float32(csv, monkeypatch):
    monkeypatch.setattr(tables, "LARGE", 10)
    frame = tables.read(csv("a,b,c\n" + "1.5,2,x\n" * 9))
    assert [str(kind) for kind in frame.dtypes[:2]] == ["float32", "int64"]
    cells = ["1.5"] * 2000 + ["abc"]
    frame = tables.read(csv("a,b\n" + "".join(f"{c},1\n" for c in cells)))
    assert frame["a"].iloc[-1] == "abc"


def test_text_far_down_does_not_change_the_texts_above(csv):
    cells = ["007"] * 200_000 + ["x"]
    rows = [f"{cell},{'1.5,' * 4}" for cell in cells]
    frame = tables.read(csv("a,b,c,d,e,f\n" + "\n".join(rows)))
    assert frame["a"].unique().tolist() == ["007", "x"]


def test_parquet_holds_the_same(tmp_path):
    pytest.importorskip("pyarrow")
    frame = pd.DataFrame({"a": [1.0, None], "b": ["x", "y"]})
    frame.to_parquet(tmp_path / "t.parquet")
    pd.testing.assert_frame_equal(tables.read(tmp_path / "t.parquet"), frame)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty"),
        ("a,b\n", "no rows"),
        ("1,2\n3,4\n", "first line"),
        ("a,y,y\n1,2,2\n", "two columns 'y'; rename one"),
        ("a,b\n1,2\n1,2,3,4\n", "line 3"),
    ],
)
def test_a_broken_file_is_one_sentence(csv, text, words):
    with pytest.raises(DataError, match=words) as caught:
        tables.read(csv(text))
    assert "\n" not in str(caught.value)


def test_a_file_of_another_kind_or_none_is_named(csv, tmp_path):
    with pytest.raises(OptionError, match=r"\.csv"):
        tables.read(csv("a\n1\n", name="table.doc"))
    with pytest.raises(DataError, match="does not exist"):
        tables.read(tmp_path / "none.csv")


# Columns


def test_numbers_are_standardised_and_categories_have_an_input_each():
    frame = pd.DataFrame({"a": [1.0, 2.0, 3.0, 6.0], "b": ["x", "y", "x", "x"]})
    encoder = Encoder.fit(frame)
    inputs = encoder.transform(frame)
    assert encoder.names == ["a", "b = x", "b = y"]
    assert encoder.sources == ["a", "b", "b"]
    np.testing.assert_allclose(inputs.mean(0), 0, atol=1e-12)
    assert inputs[:, 0].std() == pytest.approx(1)
    assert (inputs[:, 1] - inputs[:, 2]).tolist() == [1.0, -3.0, 1.0, 1.0]


def test_missing_values_are_filled_by_the_median_and_marked():
    frame = pd.DataFrame(
        {"a": [1.0, None, 3.0, 8.0], "b": ["x", None, "y", "x"]}
    )
    encoder = Encoder.fit(frame)
    assert encoder.names == [
        "a",
        "a is missing",
        "b = x",
        "b = y",
        "b is missing",
    ]
    assert encoder.columns[0]["fill"] == 3.0
    inputs = encoder.transform(frame)
    assert inputs[1, 1] > 0 > inputs[0, 1]
    with pytest.raises(DataError, match="column 'a', row 2"):
        Encoder.fit(frame, missing="refuse")


@pytest.mark.parametrize(
    ("cells", "number"),
    [
        (["$1,234", "$2,000", "$5"], 1234.0),
        (["1,5", "2,5", "3,25"], 1.5),
        (["12 %", "13 %", "14 %"], 12.0),
        (["€ 7", "€ 8", "€ 9"], 7.0),
        (["(1,234.50)", "7.25", "2,000"], -1234.5),
        (["1.234,5", "2.000,25", "7"], 1234.5),
        (["1.100,50 €", "1.200,50 €", "3 €"], 1100.5),
        ([True, False, True], 1.0),
        (pd.array([4, None, 5], "Int64"), 4.0),
    ],
)
def test_numbers_in_any_dress_are_numbers(cells, number):
    series = pd.Series(cells)
    encoder = Encoder.fit(pd.DataFrame({"a": series}))
    assert encoder.columns[0]["kind"] == "number"
    column = encoder.columns[0]
    first = encoder.transform(pd.DataFrame({"a": series}))[0, 0]
    assert first * column["scale"] + column["center"] == pytest.approx(number)


@pytest.mark.parametrize(
    "days",
    [
        ["2020-01-01", "2020-01-03", "2020-02-01"],
        ["1/1/2020", "1/3/2020", "2/1/2020"],
        ["31.12.2019", "02.01.2020", "31.01.2020"],
        ["1-Mar-20", "3-Mar-20", "1-Apr-20"],
        ["Mar 1, 2020", "Mar 3, 2020", "Apr 1, 2020"],
        pd.to_datetime(["2020-01-01", "2020-01-03", "2020-02-01"]),
        pd.to_datetime(["2020-01-01", "2020-01-03", "2020-02-01"], utc=True),
    ],
)
def test_dates_become_days(days):
    frame = pd.DataFrame({"when": days})
    encoder = Encoder.fit(frame)
    inputs = encoder.transform(frame)[:, 0] * encoder.columns[0]["scale"]
    np.testing.assert_allclose(np.diff(inputs), [2, 29], atol=1e-6)


def test_new_rows_are_read_in_the_form_that_was_learned():
    frame = pd.DataFrame(
        {
            "when": ["13/02/2020", "01/02/2020", "03/04/2020"],
            "price": ["1,5", "2,25", "7,125"],
        }
    )
    encoder = Encoder.fit(frame)
    inputs = encoder.transform(frame)
    assert np.array_equal(encoder.transform(frame.iloc[2:]), inputs[2:])


def test_identifiers_names_empty_and_constant_columns_are_left_out_with_a_note():
    frame = pd.DataFrame(
        {
            "id": range(100, 200),
            "name": [f"Person {i}" for i in range(100)],
            "empty": [None] * 100,
            "same": ["x"] * 100,
            "seven": [7.0] * 100,
            "size": np.arange(100.0),
        }
    )
    encoder = Encoder.fit(frame)
    assert encoder.names == ["size"]
    assert len(encoder.notes) == 5
    assert any(
        "'name'" in note and "identifiers" in note for note in encoder.notes
    )
    with pytest.raises(DataError, match="no usable column"):
        Encoder.fit(frame[["empty", "same"]])


def test_numbers_can_be_named_as_categories():
    frame = pd.DataFrame({"year": [2007, 2008, 2007], "a": [1.0, 2.0, 4.0]})
    encoder = Encoder.fit(frame, categorical=["year"])
    assert encoder.names == ["year = 2007", "year = 2008", "a"]
    as_floats = frame.astype({"year": float})
    assert np.array_equal(
        encoder.transform(as_floats), encoder.transform(frame)
    )


def test_columns_with_far_values_are_scaled_by_their_ranks():
    random = np.random.default_rng(0)
    frame = pd.DataFrame(
        {"heavy": random.standard_cauchy(500), "light": random.normal(size=500)}
    )
    encoder = Encoder.fit(frame)
    inputs = encoder.transform(frame)
    assert "ranks" in encoder.columns[0]
    assert "ranks" not in encoder.columns[1]
    assert np.abs(inputs).max() < 5
    order = frame["heavy"].argsort().to_numpy()
    assert (np.diff(inputs[order, 0]) >= 0).all()


def test_new_rows_unlike_those_learned_from_are_handled_and_named():
    encoder = Encoder.fit(
        pd.DataFrame({"a": [1.0, 2.0, 4.0], "b": ["x", "y", "x"]})
    )
    with pytest.warns(TableWarning) as caught:
        inputs = encoder.transform(
            pd.DataFrame({"a": [None, 3.0], "b": ["z", "x"]})
        )
    assert np.isfinite(inputs).all()
    messages = [str(warning.message) for warning in caught]
    assert any(
        "column 'a': 1 rows have no value" in message for message in messages
    )
    assert any("'z'" in message for message in messages)
    with pytest.raises(
        DataError, match="column 'a', row 1: 'abc' is not a finite number"
    ):
        encoder.transform(pd.DataFrame({"a": ["abc", "1", "2"], "b": "x"}))
    with pytest.raises(DataError, match="no column 'b'"):
        encoder.transform(pd.DataFrame({"a": [1.0]}))


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        (["1", "2", "3", "abc"], "row 4: 'abc' is not a finite number"),
        ([1.0, 2.0, np.inf], "row 3"),
        ([[1], [2], [3]], "holds a list"),
        ([1e200, -1e200, 3.0], "too large"),
    ],
)
def test_cells_that_cannot_be_used_are_named(cells, words):
    with pytest.raises(DataError, match=words):
        Encoder.fit(pd.DataFrame({"a": cells}))


def test_encoders_and_targets_come_back_from_json():
    random = np.random.default_rng(0)
    frame = pd.DataFrame(
        {"a": random.standard_cauchy(50), "b": ["x", None] * 25, "t": "n"}
    )
    frame.loc[:24, "t"] = "y"
    encoder = Encoder.fit(frame[["a", "b"]])
    again = Encoder(**json.loads(json.dumps(encoder.config())))
    assert np.array_equal(again.transform(frame), encoder.transform(frame))
    target = Target.fit(frame, "t")
    assert Target(**json.loads(json.dumps(target.config()))) == target


def test_a_weight_of_two_is_a_row_twice():
    frame = pd.DataFrame({"a": [1.0, 2.0, 5.0], "b": ["x", "y", "y"]})
    weighted = Encoder.fit(frame, weight=np.array([2.0, 1.0, 1.0]))
    repeated = Encoder.fit(frame.iloc[[0, 0, 1, 2]])
    np.testing.assert_allclose(
        weighted.transform(frame), repeated.transform(frame)
    )


# Targets


@pytest.mark.parametrize(
    ("values", "task", "classes"),
    [
        (["yes", "no"] * 10, "classification", ["no", "yes"]),
        ([0, 1, 10, 2] * 10, "classification", ["0", "1", "2", "10"]),
        ([True, False] * 10, "classification", ["False", "True"]),
        ([0.5, 1.5, 2.25, 7.0] * 5, "regression", []),
        (list(range(100)), "regression", []),
    ],
)
def test_the_task_is_seen_from_the_target(values, task, classes):
    frame = pd.DataFrame({"t": values})
    target = Target.fit(frame, "t")
    assert (target.task, target.classes) == (task, classes)
    decoded = target.decode(target.encode(frame))
    if task == "regression":
        np.testing.assert_allclose(decoded, values)
    else:
        assert decoded.tolist() == [str(value) for value in values]


@pytest.mark.parametrize(
    ("values", "options", "words"),
    [
        (["x"] * 9, {}, "one class only"),
        ([1.5] * 9, {"task": "regression"}, "same in every row"),
        ([f"name {i}" for i in range(50)], {}, "too many for classes"),
        ([f"c{i % 1500}" for i in range(4500)], {}, "'c0', too many"),
        (["x", None, "y"] * 3, {}, "missing in 3 rows, first in row 2"),
        (["1", "2", "x"] * 9, {"task": "regression"}, "row 3: 'x'"),
    ],
)
def test_a_target_that_cannot_be_learned_is_one_sentence(
    values, options, words
):
    with pytest.raises(DataError, match=words):
        Target.fit(pd.DataFrame({"t": values}), "t", **options)


def test_a_class_that_was_not_learned_and_a_wrong_name_are_named():
    target = Target.fit(pd.DataFrame({"t": ["x", "y"] * 5}), "t")
    with pytest.raises(
        DataError, match="'z', which is not among the classes x, y"
    ):
        target.encode(pd.DataFrame({"t": ["z"]}))
    with pytest.raises(DataError, match="did you mean 'target'"):
        Target.fit(pd.DataFrame({"target": [1, 2]}), "targt")


# Rows and classes


def test_rows_are_held_out_of_each_class_by_seed():
    t = np.array([0] * 80 + [1] * 20 + [2])
    train, held = tables.hold_out(t, 0.25, seed=3, classes=True)
    assert np.array_equal(np.sort([*train, *held]), np.arange(len(t)))
    assert np.bincount(t[held]).tolist() == [20, 5]
    again = tables.hold_out(t, 0.25, seed=3, classes=True)
    assert np.array_equal(held, again[1])


def test_class_weights_balance_or_are_named():
    labels = np.array([0, 0, 0, 1])
    balanced = tables.class_weights("balanced", labels, ["a", "b"])
    assert balanced[:3].sum() == pytest.approx(balanced[3])
    assert tables.class_weights({"b": 5.0}, labels, ["a", "b"]).tolist() == [
        1,
        1,
        1,
        5,
    ]
    assert tables.class_weights(None, labels, ["a", "b"]) is None
    for wrong in ({"c": 1.0}, {"a": -1.0}, {"a": 0, "b": 0}, "heavy"):
        with pytest.raises(OptionError):
            tables.class_weights(wrong, labels, ["a", "b"])


@pytest.mark.slow
def test_a_million_rows_take_little_more_than_pandas_itself(tmp_path):
    import time

    random = np.random.default_rng(0)
    frame = pd.DataFrame(random.normal(size=(10**5, 20)).round(6)).add_prefix(
        "c"
    )
    frame.to_csv(tmp_path / "t.csv", index=False)
    ratios = []
    for _ in range(9):
        start = time.process_time()
        pd.read_csv(tmp_path / "t.csv")
        plain = time.process_time() - start
        start = time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            table = tables.read(tmp_path / "t.csv")
            Encoder.fit(table).transform(table)
        ratios.append((time.process_time() - start) / plain)
    # Of turns, so that other programs slow both
    assert np.median(ratios) < 2.5
