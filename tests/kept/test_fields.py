"""Nothing that programs read has gone since it was recorded: fields of JSON and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("typer")

from kept.json_fields import WELL, WRONG, differences, json_fields, prepared
from kept.small import hdnn_command
from said import started_alone

RECORDED = json.loads((Path(__file__).parent / "fields.json").read_text("utf-8"))
# What the commands of the second test look at.
FIRST = (
    "train --data swiss_roll --layers 2 --epochs 1 --out planar",
    "train --data classes.csv --target target --layers 2 --epochs 1 --out classes",
    "train --data values.csv --target target --layers 2 --epochs 1 --out values",
    "train --graph ring.toml --data double_circles --layers 2 --epochs 1 --batch 2000 --out ring",
)


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    started_alone(monkeypatch)


def test_every_command_prints_the_fields_that_it_had():
    now = json_fields()
    lost = [
        line for name, before in RECORDED.items() for line in differences(name, before, now[name])
    ]
    assert not lost, "\n" + "\n".join(lost)


def test_every_command_ends_with_the_code_that_it_had():
    other = []
    with prepared():
        for command in (*FIRST, *WELL):
            ended = hdnn_command(command)
            if ended.code != 0 or not ended.output:
                other.append(f"hdnn {command} ended with {ended.code}, not 0: {ended.said}")
        for command in WRONG:
            ended = hdnn_command(command)
            is_sentence = ended.said.startswith("hdnn: ") and ended.said.count("\n") == 1
            if ended.code != 2 or not is_sentence or "mistake in hdnn itself" in ended.said:
                other.append(f"hdnn {command} ended with {ended.code}, not 2: {ended.said}")
    assert not other, "\n" + "\n".join(other)


def test_a_field_that_is_gone_or_changed_is_named():
    before = {"text": ["data", "spread[]"], "number": ["loss", "spread[]"]}
    assert differences("train", before, before | {"null": ["new"]}) == []
    now = {"text": ["loss"], "number": ["spread[]"]}
    assert differences("train", before, now) == [
        "train prints no data any more",
        "train prints spread[] as number, not number or text",
        "train prints loss as text, not number",
    ]
