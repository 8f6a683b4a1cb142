"""Values for another process: what was packed is unpacked, and nothing else can be made of it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import hdnn.app.tasks.table  # noqa: F401, which registers classes of data
import pytest
import torch
from hdnn.app.configs.table import TableConfig
from hdnn.base import portable
from hdnn.data.table import Columns
from hypothesis import given
from hypothesis import strategies as st

from hdnn.app.runs import Run
from hdnn.data import planar
from hdnn.errors import CheckpointError, DataError, HDNNError, TrainingError

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text(), inner)
        | inner.map(lambda one: {"tensor": one})  # words that the packing uses itself
    ),
    max_leaves=20,
)


@given(plain)
def test_plain_values_come_back(value):
    assert portable.unpack(portable.pack(value)) == value


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_tensors_come_back_bit_by_bit(dtype):
    whole = torch.arange(12).reshape(3, 4).to(dtype)
    views = [whole, whole.T, whole[:, 1], whole[:0]]
    for tensor, found in zip(views, portable.unpack(portable.pack(views)), strict=True):
        assert found.dtype == dtype
        assert torch.equal(found, tensor)
    assert math.isnan(portable.unpack(portable.pack({"a": (math.nan,)}))["a"][0])


def test_the_known_classes_come_back():
    columns = Columns("classification", "class", ["x"], [0.0], [1.0], ["a", "b"])
    config = TableConfig(data="swiss_roll", layers=3)
    data = planar.double_moons(40, seed=1)
    value = (config, columns, Run("runs/a"), Path("b"), data)
    found = portable.unpack(portable.pack(value))
    assert found[:4] == value[:4]
    assert torch.equal(found[4].x_train, data.x_train)
    assert found[4].domain == data.domain


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (DataError("no samples."), DataError, "no samples."),
        (HDNNError("of any kind."), HDNNError, "of any kind."),
        (KeyError("x"), TrainingError, "KeyError: 'x'"),
        (RuntimeError("a fault"), TrainingError, "RuntimeError: a fault"),
    ],
)
def test_errors_come_back_as_errors_of_hdnn(error, kind, said):
    found = portable.unpack(portable.pack([error]))[0]
    assert type(found) is kind
    assert str(found) == said


def test_a_class_of_somebody_else_does_not_take_the_place_of_an_error():
    class OtherError(HDNNError):
        def __init__(self, *, needed):
            pass

    OtherError.__name__ = "DataError"
    found = portable.unpack(portable.pack(DataError("no samples.")))
    assert type(found) is DataError


@pytest.mark.parametrize("value", [object(), {1: 2}, {"a": {3}}, print, torch.nn.Linear(1, 1)])
def test_other_things_cannot_be_sent(value):
    with pytest.raises(TypeError, match="cannot be sent"):
        portable.pack(value)


def forged(content) -> bytes:
    text = json.dumps(content).encode()
    return len(text).to_bytes(8, "big") + text + portable.pack(None)[12:]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"nonsense",
        forged({"Popen": {"dict": [["args", "ls"]]}}),
        forged({"Run": {"dict": [["nothing", 1]]}}),
        forged({"tensor": "7"}),
        forged({"error": ["DataError"]}),
        forged({"a": 1, "b": 2}),
        portable.pack([torch.ones(3)])[:-4],
    ],
)
def test_forged_and_damaged_bytes_are_refused(content):
    with pytest.raises(CheckpointError, match="damaged"):
        portable.unpack(content)
