"""Columns of any kind become inputs, as scikit-learn's encoders would make them."""

from __future__ import annotations

import datetime
import json
import math
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdnn.data import cells, encoding, table
from hdnn.data.encoding import encode, input_names, learn
from hdnn.data.rows import Frame, Table
from hdnn.data.table import Columns
from hdnn.errors import DataError, OptionError


def of(**columns):
    """A table as a CSV gives it, with line numbers."""
    count = len(next(iter(columns.values())))
    return Table(Path("t.csv"), columns, [*range(2, count + 2)])


def learned(**columns):
    read = of(**columns)
    found = learn(read, read.columns)
    return found, *encode(read, found)


def test_numbers_booleans_and_categories_become_inputs():
    found, x, notes = learned(
        a=["1", "2.5", "-3"], b=["true", "FALSE", "True"], c=["red", " blue ", "red"]
    )
    assert input_names(found) == ["a", "b", "c=blue", "c=red"]
    assert x.tolist() == [[1, 1, 0, 1], [2.5, 0, 1, 0], [-3, 1, 0, 1]]
    assert notes == []
    assert encoding.indicators(found).tolist() == [False, False, True, True]


def test_missing_values_are_filled_and_said_by_an_input():
    found, x, notes = learned(a=["1", "NA", "4", "?", "3"], c=["u", "", "v", "u", " none "])
    assert input_names(found) == ["a", "a is missing", "c=u", "c=v", "c is missing"]
    assert x[:, 0].tolist() == [1, 3, 4, 3, 3]
    assert x[:, 1].tolist() == [0, 1, 0, 1, 0]
    assert x[:, 2:].tolist() == [[1, 0, 0], [0, 0, 1], [0, 1, 0], [1, 0, 0], [0, 0, 1]]
    assert notes == []


@pytest.mark.parametrize(
    "gap", [None, math.nan, np.float32("nan"), Decimal("nan"), np.datetime64("NaT"), "", "N/A"]
)
def test_all_kinds_of_missing_values_are_seen(gap):
    assert cells.is_missing(gap)
    pd = pytest.importorskip("pandas")
    assert cells.is_missing(pd.NA)
    assert cells.is_missing(pd.NaT)
    assert not any(map(cells.is_missing, ["no", 0, False, [], {}, np.zeros(2), "0"]))


@given(st.data())
def test_inputs_are_those_of_scikit_learn(data):
    preprocessing = pytest.importorskip("sklearn.preprocessing")
    impute = pytest.importorskip("sklearn.impute")
    count = data.draw(st.integers(2, 12))
    cell = st.none() | st.floats(-1e6, 1e6).map(lambda value: round(value, 3))
    numbers = data.draw(st.lists(cell, min_size=count, max_size=count))
    words = data.draw(st.lists(st.sampled_from("abcd"), min_size=count, max_size=count))
    numbers[0], words[:2] = 1.0, "ab"
    read = of(n=["" if v is None else repr(v) for v in numbers], w=words)
    found = learn(read, read.columns)
    plain = np.array(numbers, float)[:, None]
    imputer = impute.SimpleImputer(strategy="median", add_indicator=True)
    one_hot = preprocessing.OneHotEncoder(sparse_output=False, handle_unknown="ignore")
    new = np.array([["z"]] + [[word] for word in words], object)
    expected = np.hstack(
        [imputer.fit_transform(plain), one_hot.fit_transform(np.array(words, object)[:, None])]
    )
    assert np.allclose(encode(read, found)[0], expected, rtol=1e-15)
    later = of(n=["1"] * len(new), w=new[:, 0].tolist())
    assert (encode(later, found)[0][:, -len(set(words)) :] == one_hot.transform(new)).all()


@given(st.lists(st.tuples(st.floats(-1e9, 1e9), st.integers(0, 4)), min_size=1, max_size=20))
def test_a_row_of_weight_two_counts_twice_in_the_median(pairs):
    values, weight = np.array(pairs).T
    weight[0] += 1
    frame = Frame(Path("X"), {"a": values}, [])
    (found,) = learn(frame, ["a"], rows=np.flatnonzero(weight), weight=weight)
    assert found["fill"] == pytest.approx(np.median(np.repeat(values, weight.astype(int))))


def test_what_is_new_is_said_and_handled():
    read = of(a=["1", "2", "6"], c=["u", "v", "u"], k=["7", "7", "7"])
    found = learn(read, read.columns)
    new = of(a=["", "3", "4"], c=["w", "", "w"], k=["7", "8", "9"])
    x, notes = encode(new, found)
    assert x.tolist() == [[2, 0, 0, 7], [3, 0, 0, 7], [4, 0, 0, 7]]
    assert notes == [
        "column 'a' has no value in 1 row, but had one in every row learned from: its median, 2, "
        "is taken.",
        "column 'c' has categories that were not learned, in 2 rows: 'w'; they count as none of "
        "the known ones.",
        "column 'c' has no value in 1 row, but had one in every row learned from: it counts as "
        "none of the known categories.",
    ]


def test_columns_are_learned_from_the_rows_to_train_on_alone():
    read = of(a=["1", "2", "3", "100", ""], c=["u", "v", "u", "w", "u"], t=list("xyxyx"))
    notes = []
    columns, x, _ = Columns.learn(read, "t", rows=np.arange(3), notes=notes)
    assert columns.names == ["a", "c=u", "c=v"]
    assert x.tolist() == [[1, 1, 0], [2, 0, 1], [3, 1, 0], [100, 0, 0], [2, 1, 0]]
    assert len(notes) == 3
    assert columns.standardised(x[:3], np.array([0, 1, 0])).scale[1:] == [0.5, 0.5]


def test_large_numbers_are_categories_of_their_own():
    large = 2**62
    for given_cells in ([large + 1, large], [str(large + 1), f"0{large}"]):
        (column,) = learn(of(a=given_cells), ["a"], categorical=["a"])
        assert column["values"] == [str(large), str(large + 1)]
    assert learn(of(a=["1e3", "2"]), ["a"], categorical=["a"])[0]["values"] == ["2", "1000"]


@pytest.mark.parametrize("word", ["none", " NA "])
def test_a_class_that_is_a_word_for_missing_is_said_to_be_one(word):
    plain = word.strip()
    with pytest.raises(DataError, match=rf"'{word}' counts as a missing .*'\({plain}\)'"):
        Columns.learn(of(a=["1", "2"], t=["x", word]), "t")
    assert Columns.learn(of(a=["1", "2"], t=["x", f"({plain})"]), "t")[0].classes[0] == f"({plain})"


def test_numbers_can_be_named_as_categories():
    read = of(a=["1", "02", "1.0", "10", ""], t=list("xyxyx"))
    columns, x, _ = Columns.learn(read, "t", categorical=["a"])
    assert columns.names == ["a=1", "a=2", "a=10", "a is missing"]
    assert x.sum(0).tolist() == [2, 1, 1, 1]
    frame = Frame(Path("X"), {"a": np.array([10.0, 3.0, math.nan])}, [])
    assert columns.encoding is not None
    assert encode(frame, columns.encoding)[0].tolist() == [[0, 0, 1, 0], [0] * 4, [0, 0, 0, 1]]
    for name, words in (("t", "the target"), ("b", "no column 'b'")):
        with pytest.raises((DataError, OptionError), match=words):
            Columns.learn(read, "t", categorical=[name])
    with pytest.raises(OptionError, match="left out by --drop"):
        Columns.learn(of(a=["1"] * 2, b=["1", "2"], t=["x", "y"]), "t", drop="a", categorical="a")


DAYS = ["2024-01-31", "31.1.2024", "1/31/24", "2024-01-31T12:00:00Z", "12:30", "3 Jan 2024"]
DAYS += ["January 3, 2024", "2024-01-31 12:00:00.5 +0100", "11:05:07 pm", "2024/01"]


@pytest.mark.parametrize("day", [*DAYS, datetime.date(2024, 1, 31), np.datetime64("2024", "ns")])
def test_dates_are_refused_in_a_sentence(day):
    with pytest.raises(DataError) as refused:
        learned(day=[day, "", day, "x"])
    said = str(refused.value)
    assert "t.csv, line 2, column 'day'" in said
    assert "date or time" in said
    assert "--drop day" in said
    read = of(day=[day, "", day, "x"])
    (found,) = learn(read, ["day"], categorical=["day"])
    assert len(found["values"]) == 2


@pytest.mark.parametrize("word", ["20-29", "1.2.3", "May", "10-K", "3rd", "A1", "1st Jan", "12:x"])
def test_other_texts_are_no_dates(word):
    assert not cells.looks_like_date(word)
    assert learned(a=[word, "b", "b"])[0][0]["kind"] == "categories"


@pytest.mark.parametrize("amount", ["$1,234.50", "12 %", "1,5", "1 234", "3.000,00 €"])
def test_numbers_that_are_not_written_plainly_are_no_categories(amount):
    with pytest.raises(DataError, match=r"line 2, column 'a'.*not written plainly.*like 1234.5"):
        learned(a=[amount, amount, "x"])


@pytest.mark.parametrize(
    ("given_cells", "words"),
    [
        (["1", "2", "n/a", "abc"], "line 5, column 'a': 'abc' is not a number; mend it, or leave"),
        (["1", "abc"], "--categorical a if it holds categories"),
        (["1", "2", "inf"], "line 4, column 'a': 'inf' is not finite"),
        ([1.0, [2], 3.0], "line 3, column 'a': .2. is a list"),
        ([{}, {}, {}], "line 2, column 'a': {} is a dict, .* must be a string or a number"),
        ([f"order {i}" for i in range(10)], "10 different texts in 10 rows, such as 'order 0'"),
        ([f"{i % 30}!" for i in range(50)], "30 different texts in 50 rows"),
        ([f"{i % 300}!" for i in range(9000)], "300 different texts in 9000 rows"),
    ],
)
def test_columns_that_are_neither_numbers_nor_categories_are_refused(given_cells, words):
    with pytest.raises(DataError, match=words):
        learned(a=given_cells)
    if "different" in words:
        read = of(a=given_cells)
        assert encoding.width(learn(read, ["a"], categorical=["a"])[0]) >= 10


def test_all_columns_that_cannot_be_used_are_named_at_once():
    names = [f"name {i}" for i in range(12)]
    with pytest.raises(DataError, match=r"column 'a'.*Not usable as they are either: 'c'\."):
        learned(a=names, b=["1"] * 12, c=DAYS + DAYS[:2])


def test_missing_values_can_be_refused():
    read = of(a=["1", "", "2"], c=["u", "v", ""])
    for name, line in (("a", 3), ("c", 4)):
        with pytest.raises(DataError, match=f"line {line}, column '{name}'.*--missing fill"):
            learn(read, [name], missing="refuse")
    whole = of(a=["1", "2"], c=["u", "v"])
    found = learn(whole, whole.columns, missing="refuse")
    assert encode(whole, found)[0].tolist() == [[1, 1, 0], [2, 0, 1]]
    for name in "ac":
        with pytest.raises(DataError, match=f"column '{name}': the value is missing"):
            encode(of(**{**whole.columns, name: ["", "1"]}), found)
    with pytest.raises(OptionError, match="missing 'drop' is not known"):
        learn(read, ["a"], missing="drop")


def test_empty_and_constant_columns_are_left_out_or_kept_and_said():
    notes = []
    read = of(
        id=[str(i) for i in range(30)],
        k=["7"] * 30,
        w=["x"] * 30,
        e=[""] * 30,
        a=[str(i * i) for i in range(30)],
        b=[str(float(i * i)) for i in range(30)],
        t=["u", "v"] * 15,
    )
    columns, x, t = Columns.learn(read, "t", notes=notes)
    assert columns.names == ["id", "k", "a", "b"]
    assert columns.standardised(x, t).inputs(x)[:, 1].tolist() == [0.0] * 30
    assert [note.split(":")[1] for note in notes] == [
        " 'e'.",
        " 'k', 'w'.",
        " 'id'; leave the column out with --drop id, unless their order means something.",
        " 'a' and 'b'.",
    ]
    with pytest.raises(DataError, match="no column besides 't' that tells anything"):
        Columns.learn(of(e=["", ""], t=["u", "v"]), "t")


def test_inputs_of_one_name_are_told_apart():
    found, *_ = learned(**{"a": ["b", "c", "c"], "a=b": ["1", "2", "3"]})
    assert len(set(input_names(found))) == 3


def test_columns_are_the_same_after_json_and_old_files_have_plain_numbers(tmp_path):
    read = of(a=["1", "", "3"], c=["ü", "v", "ü"], t=["x", "y", "x"])
    columns, x, t = Columns.learn(read, "t")
    columns = columns.standardised(x, t)
    again = Columns.from_json(json.loads(json.dumps(columns.to_json())), tmp_path)
    assert again == columns
    assert again.agree(columns)
    plain = of(a=["1", "2", "4"], t=["x", "y", "x"])
    now, x, t = Columns.learn(plain, "t")
    now = now.standardised(x, t)
    old = {k: v for k, v in now.to_json().items() if k != "encoding"}
    before = Columns.from_json(old, tmp_path)
    assert before.to_json() == old
    assert before.agree(now)
    assert now.agree(before)
    assert not before.agree(columns)
    assert (before.of(plain) == now.of(plain)).all()
    with pytest.raises(DataError, match="the value is missing"):
        before.of(of(a=["", "1"]))
    assert now.of(of(a=["", "1"]))[0, 0] == now.of(of(a=["2"]))[0, 0]


def test_names_with_blanks_are_quoted_as_a_shell_needs_them():
    with pytest.raises(DataError, match="--drop 'House style', or say --categorical 'House style'"):
        learned(**{"House style": [f"s{i}" for i in range(12)]})


def test_parquet_has_texts_gaps_and_dates_too(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "data.parquet"
    columns = {"a": [1, None, 3], "b": [True, None, False], "c": ["u", None, "v"]}
    columns |= {"d": arrow.array(["u", "v", "u"]).dictionary_encode(), "e": [Decimal("1.5")] * 3}
    parquet.write_table(arrow.table({**columns, "f": [datetime.date(2024, 1, 1)] * 3}), path)
    read = table.read(path)
    found = learn(read, [*columns])
    x, _ = encode(read, found)
    assert input_names(found)[:5] == ["a", "a is missing", "b", "b is missing", "c=u"]
    assert x[1].tolist() == [2, 1, 0.5, 1, 0, 0, 1, 0, 1, 1.5]
    with pytest.raises(DataError, match=r"row 1, column 'f'.*date"):
        learn(read, ["f"])


def test_the_index_that_pandas_writes_is_no_input(tmp_path):
    pd = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    frame = pd.DataFrame({"a": [1.5, 2.5, 0.5, 4.0], "t": list("xyxy")}).iloc[[3, 1, 0]]
    frame.to_csv(tmp_path / "t.csv")
    frame.to_parquet(tmp_path / "t.parquet")
    for name in ("t.csv", "t.parquet"):
        notes = []
        columns, *_ = Columns.learn(table.read(tmp_path / name), "t", notes=notes)
        assert columns.names == ["a"]
        assert notes == ["the index, a column that numbers the rows, is left out."]
    for text in (",a\nx,1\ny,2\n", ",a\n1,1\n1,2\n", ",a\n0.5,1\n", "a,\n1,1\n"):
        (tmp_path / "t.csv").write_text(text)
        with pytest.raises(DataError, match="has no name in the first line"):
            table.read(tmp_path / "t.csv")


def test_only_mostly_constant_inputs_are_bounded_by_their_rare_values():
    x = np.zeros((100, 4))
    x[:, 0] = np.linspace(-1, 1, 100)
    x[7, 0] = 1000.0  # perhaps a mistake, in a column that varies
    x[3, 1] = 8.0  # a rare value
    x[:50, 2] = 1.0  # half and half
    mean = x.mean(0)
    far = encoding.farthest(x, mean)
    assert far.tolist() == [0.0, 8.0 - mean[1], 0.0, 0.0]
    scale = x.std(0)
    encoding.rescale(scale, [], far)
    assert np.abs(x - mean)[:, 1].max() / scale[1] == pytest.approx(encoding.FARTHEST)
    assert scale[0] == pytest.approx(x[:, 0].std())


def test_a_weight_of_two_counts_as_two_rows_where_inputs_are_bounded():
    x = np.array([[0.0], [0.0], [1.0], [5.0]])
    weight = np.array([1.0, 1.0, 0.0, 3.0])
    repeated = np.array([[0.0], [0.0], [5.0], [5.0], [5.0]])
    mean = repeated.mean(0)
    assert encoding.farthest(x, mean, weight) == encoding.farthest(repeated, mean)
