"""Tables: what is read from files, and what is said about those that cannot be learned from."""

from __future__ import annotations

import json
import os
import socket
import time

import numpy as np
import pytest

from hdnn.base import memory
from hdnn.data import table, table_files
from hdnn.data.table import Columns
from hdnn.errors import CheckpointError, DataError, MissingExtraError, OptionError
from hdnn.training import table_recipe

GOOD = "a,b,kind\n1,2.5,x\n2,-1e-3,y\n3,0,x\n"


@pytest.fixture
def csv(tmp_path):
    def write(text, name="data.csv"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        GOOD.replace(",", ";"),
        GOOD.replace(",", "\t"),
        GOOD.replace("\n", "\r\n"),
        "\ufeff" + GOOD,
        GOOD.replace("2.5", ' "2.5" '.strip()),
        GOOD + "\n\n",
        GOOD.replace("\n", "\n\n"),
    ],
)
def test_a_csv_is_read_in_any_of_its_forms(csv, text):
    read = table.read(csv(text))
    assert list(read.columns) == ["a", "b", "kind"]
    assert read.rows == 3
    assert read.numbers("b").tolist() == [2.5, -1e-3, 0]
    assert read.texts("kind") == ["x", "y", "x"]


def test_true_and_false_are_numbers(csv):
    assert table.read(csv("a\nTrue\nfalse\n")).numbers("a").tolist() == [1, 0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        (" \n\n ", "is empty"),
        ("a,b\n", "no rows"),
        ("a,b\n1,2\n3\n", "line 3: there are 1 values, but 2 columns"),
        ("a,b\n1,2,3\n", "line 2: there are 3 values, but 2 columns"),
        ("a,b,a\n1,2,3\n", "columns 1 and 3 have the same name, 'a'"),
        ("a,,c\n1,2,3\n", "column 2 has no name"),
        (b"a,b\n1,\xff\n", "line 2: the text is not UTF-8"),
        ('a,b\n1,"2\n', "no CSV"),
        ("a,b\n1,\x002\n", "line 2"),
    ],
)
def test_a_broken_csv_is_refused_by_line(csv, text, words):
    path = csv(text)
    with pytest.raises(DataError) as refused:
        table.read(path).numbers("b")
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("", "line 3, column 'b': the value is missing"),
        ("nan", "line 3, column 'b': the value is missing"),
        ("NA", "line 3, column 'b': the value is missing"),
        ("inf", "line 3, column 'b': 'inf' is not finite"),
        ("1e999", "line 3, column 'b': '1e999' is not finite"),
        ("red", "line 3, column 'b': 'red' is not a number"),
        ("1,5", "line 3: there are 4 values"),
    ],
)
def test_a_cell_that_is_no_number_is_named(csv, cell, words):
    with pytest.raises(DataError, match=r"data\.csv") as refused:
        table.read(csv(GOOD.replace("-1e-3", cell))).numbers("b")
    assert words in str(refused.value)


def test_the_nearest_column_is_suggested(csv):
    read = table.read(csv(GOOD))
    with pytest.raises(DataError, match=r"no column 'kinds'; did you mean 'kind'\?"):
        read.column("kinds")
    with pytest.raises(DataError, match="it has 'a', 'b', 'kind'"):
        read.column("zzz")


@pytest.mark.parametrize(
    ("values", "task", "classes"),
    [
        (["red", "blue"] * 4, "classification", ["blue", "red"]),
        (["10", "9"] * 4, "classification", ["9", "10"]),
        (["01", "1", "2", "2"], "classification", ["1", "2"]),
        (["true", "false"] * 4, "classification", ["false", "true"]),
        (["0.5", "1.5"] * 4, "regression", []),
        ([str(i) for i in range(30)], "regression", []),
        (["1", "2.5", "3", "3"], "regression", []),
    ],
)
def test_the_task_is_seen_from_the_target(csv, values, task, classes):
    rows = "".join(f"{i},{value}\n" for i, value in enumerate(values))
    columns, x, t = Columns.learn(table.read(csv("a,t\n" + rows)), "t")
    assert (columns.task, columns.classes) == (task, classes)
    assert x.shape == (len(values), 1)
    assert len(t) == len(values)


@pytest.mark.parametrize(
    ("values", "task", "words"),
    [
        (["x"] * 5, "auto", "one class only, 'x'"),
        (["1"] * 5, "auto", "one class only, '1'"),
        (["1.5"] * 5, "auto", "is 1.5 in every row"),
        (["1.5", "2.5", "x", "3.5"], "auto", "line 4, column 't': 'x' is not a number"),
        (["1.5", "", "3.5"], "auto", "line 3, column 't': the value is missing"),
        (["x", "y", "x"], "regression", "'x' is not a number"),
        ([f"name {i}" for i in range(50)], "auto", "50 different values in 50 rows"),
    ],
)
def test_a_target_that_cannot_be_learned_is_refused(csv, values, task, words):
    rows = "".join(f"{i},{value}\n" for i, value in enumerate(values))
    with pytest.raises(DataError) as refused:
        Columns.learn(table.read(csv("a,t\n" + rows)), "t", task=task)
    assert words in str(refused.value)


def test_dropped_columns_and_the_target_are_no_inputs(csv):
    columns, x, _ = Columns.learn(table.read(csv(GOOD)), "kind", drop=["a"])
    assert columns.names == ["b"]
    assert x[:, 0].tolist() == [2.5, -1e-3, 0]
    with pytest.raises(DataError, match="no column besides the target"):
        Columns.learn(table.read(csv(GOOD)), "kind", drop=["a", "b"])
    with pytest.raises(OptionError, match="task 'guess' is not known"):
        Columns.learn(table.read(csv(GOOD)), "kind", task="guess")


def test_inputs_are_standardised_and_constant_columns_left_at_zero(csv):
    columns, x, t = Columns.learn(table.read(csv("a,b,t\n1,7,x\n3,7,y\n5,7,x\n")), "t")
    columns = columns.standardised(x, t)
    z = columns.inputs(x)
    assert z.mean(0) == pytest.approx([0, 0])
    assert z.std(0) == pytest.approx([1, 0])
    assert Columns.from_json(json.loads(json.dumps(columns.to_json())), None) == columns  # type: ignore[arg-type]


def test_numbers_too_large_for_the_model_are_refused(csv):
    read = table.read(csv("a,t\n1e308,x\n-1e308,y\n"))
    columns, x, t = Columns.learn(read, "t")
    with pytest.raises(DataError, match="column 'a' are too large"):
        columns.standardised(x, t)
    read = table.read(csv("a,t\n1,1e308\n2,-1e308\n"))
    columns, x, t = Columns.learn(read, "t", task="regression")
    with pytest.raises(DataError, match="column 't' are too large"):
        columns.standardised(x, t)
    columns, x, t = Columns.learn(table.read(csv("a,t\n1,x\n2,y\n")), "t")
    with pytest.raises(DataError, match=r"line 3, column 'a': the value is too far"):
        columns.of(table.read(csv("a\n1\n1e100\n")))


@pytest.mark.parametrize(
    "given", [None, [], {}, {"task": "x"}, {"names": ["a"], "mean": [], "scale": []}]
)
def test_damaged_columns_are_refused(given, tmp_path):
    whole = {"task": "regression", "target": "t", "classes": [], "names": [], "mean": []}
    whole |= {"scale": [], "target_mean": 0.0, "target_scale": 1.0}
    given = {**whole, **given} if given else given
    with pytest.raises(CheckpointError, match="damaged or was edited"):
        Columns.from_json(given, tmp_path)


def test_the_split_is_of_each_class_and_of_the_seed():
    t = np.array([0] * 50 + [1] * 10 + [2])
    train, test = table.split(t, 0.2, 3, classes=True)
    assert sorted([*train, *test]) == list(range(61))
    assert [(t[test] == c).sum() for c in range(3)] == [10, 2, 0]
    again, _ = table.split(t, 0.2, 3, classes=True)
    other, _ = table.split(t, 0.2, 4, classes=True)
    assert train.tolist() == again.tolist() != other.tolist()
    train, test = table.split(t, 0.0, 0, classes=False)
    assert (len(train), len(test)) == (61, 0)


def test_a_file_of_another_kind_is_refused(csv, tmp_path):
    with pytest.raises(DataError, match=r"ends in '.xlsx'; give a .csv"):
        table.read(tmp_path / "data.xlsx")
    with pytest.raises(DataError, match="No such file"):
        table.read(tmp_path / "none.csv")
    with pytest.raises(DataError, match="cannot be read: embedded null"):
        table.read(tmp_path / "nul\0.csv")
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(DataError, match="cannot be read: it is a folder"):
        table.read(tmp_path / "folder.csv")


def test_parquet_holds_the_same(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "data.parquet"
    columns = {"a": [1, 2, None], "b": [True, False, True], "kind": ["x", "y", "x"]}
    parquet.write_table(arrow.table(columns), path)
    read = table.read(path)
    assert read.numbers("b").tolist() == [1, 0, 1]
    assert read.texts("kind") == ["x", "y", "x"]
    with pytest.raises(DataError, match=r"row 3, column 'a': the value is missing"):
        read.numbers("a")
    parquet.write_table(arrow.table({"a": arrow.array([], arrow.int64())}), path)
    with pytest.raises(DataError, match="no rows"):
        table.read(path)
    path.write_bytes(b"PAR1 no, it is not")
    with pytest.raises(DataError, match="cannot be read as a Parquet file"):
        table.read(path)


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    import sys

    for name in [m for m in sys.modules if m.split(".")[0] == "pyarrow"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "data.parquet").write_bytes(b"PAR1")
    with pytest.raises(MissingExtraError, match=r"hdnn\[cli\]"):
        table.read(tmp_path / "data.parquet")


def test_booleans_of_parquet_are_classes(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "data.parquet"
    parquet.write_table(arrow.table({"a": [1.0, 2.0], "t": [True, False]}), path)
    columns, _, t = Columns.learn(table.read(path), "t")
    assert (columns.classes, t.tolist()) == (["False", "True"], [1, 0])


# Within bounds


def test_what_is_no_plain_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "zero.csv").symlink_to("/dev/zero")
    (tmp_path / "zero.parquet").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as there:
        there.bind(str(tmp_path / "s.csv"))
        for name, kind in (
            ("pipe.csv", "a pipe"),
            ("zero.csv", "a device"),
            ("zero.parquet", "a device"),
            ("s.csv", "a socket"),
        ):
            with pytest.raises(DataError, match=f"it is {kind}"):
                table.read(tmp_path / name)


def test_a_line_without_end_is_refused_when_its_start_is_read(tmp_path):
    with (tmp_path / "line.csv").open("wb") as file:
        file.truncate(table.LONGEST + 2**20)
    with pytest.raises(DataError, match="a line of more than 16,777,216 letters"):
        table.read(tmp_path / "line.csv")


def test_a_table_that_does_not_fit_into_memory_is_refused_with_its_size(csv, monkeypatch):
    monkeypatch.setattr(memory, "total_bytes", lambda: 2.0**20)
    with pytest.raises(OptionError, match=r"the cells of .*need about .* has 0.000977"):
        table.read(csv("a,b\n" + "1,2\n" * 20_000))
    assert table.read(csv("a,b\n" + "1,2\n" * 1000)).rows == 1000


def test_a_parquet_file_says_how_much_it_unpacks_to(tmp_path, monkeypatch):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"a": np.zeros(10**6, np.int8)}), tmp_path / "rows.parquet")
    texts = arrow.array(["x" * 10**4] * 5000)
    parquet.write_table(arrow.table({"a": texts}), tmp_path / "texts.parquet")
    assert max(path.stat().st_size for path in tmp_path.iterdir()) < 10**5
    monkeypatch.setattr(memory, "total_bytes", lambda: 3e7)
    with pytest.raises(OptionError, match="the 1,000,000 values of"):
        table.read(tmp_path / "rows.parquet")
    with pytest.raises(OptionError, match=r"the values of .*texts.parquet need about"):
        table.read(tmp_path / "texts.parquet")
    monkeypatch.setattr(memory, "total_bytes", lambda: 1e9)
    assert table.read(tmp_path / "rows.parquet").rows == 10**6


def test_a_table_has_only_so_many_values(csv, tmp_path, monkeypatch):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = arrow.table({"a": np.zeros(10**6, np.int8), "b": np.zeros(10**6, np.int8)})
    with parquet.ParquetWriter(tmp_path / "bomb.parquet", rows.schema) as writer:
        for _ in range(100):
            writer.write_table(rows)
    monkeypatch.setattr(memory, "total_bytes", lambda: 2.0**60)
    with pytest.raises(DataError, match="has 200,000,000 values or more, and a table may have 100"):
        table.read(tmp_path / "bomb.parquet")
    monkeypatch.setattr(table_files, "MOST_CELLS", 4096)
    with pytest.raises(DataError, match="has 4,096 values or more"):
        table.read(csv("a,b\n" + "1,2\n" * 5000))


def test_names_of_many_columns_are_compared_in_no_time(csv):
    names = [f"c{i}" for i in range(20_000)]
    before = time.process_time()
    assert list(table.read(csv(",".join(names) + "\n" + ",".join("1" * 20_000))).columns) == names
    assert time.process_time() - before < 1.0


def test_lines_are_counted_whatever_ends_them(csv):
    for end in ("\n", "\r\n", "\r"):
        text = end.join(["", " ", "a,b", "1,2", "3"])
        with pytest.raises(DataError, match="line 5: there are 1 values, but 2 columns"):
            table.read(csv(text))


def test_the_memory_of_a_container_counts(tmp_path, monkeypatch):
    whole = memory.total_bytes()
    (tmp_path / "max").write_text("max\n")
    (tmp_path / "limit").write_text("4096\n")
    monkeypatch.setattr(memory, "LIMITS", (str(tmp_path / "max"), str(tmp_path / "none")))
    assert memory.total_bytes() >= whole
    monkeypatch.setattr(memory, "LIMITS", (str(tmp_path / "limit"),))
    assert memory.total_bytes() == 4096


def test_a_table_of_very_many_columns_asks_for_a_word():
    assert table_recipe.width(4096) == 4120
    with pytest.raises(OptionError, match=r"20000 inputs .*\(--drop\), .*\(--features 20024\)"):
        table_recipe.width(20_000)
