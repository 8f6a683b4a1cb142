"""Nothing that users call has gone or is called otherwise since the names were recorded."""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path

import pytest

from kept.public_names import MODULES, PROGRAMS, describe, differences, public_classes

RECORDED = json.loads((Path(__file__).parent / "names.json").read_text("utf-8"))


@pytest.mark.parametrize("module", MODULES)
def test_every_name_is_there_with_the_same_parameters(module):
    found = importlib.import_module(module)
    public = public_classes()
    lost = []
    for name, before in RECORDED[module].items():
        if not hasattr(found, name):
            lost.append(f"{module}.{name} is gone")
        elif "same as" in before:
            where, _, other = before["same as"].rpartition(".")
            if getattr(found, name) is not getattr(importlib.import_module(where), other):
                lost.append(f"{module}.{name} is not {before['same as']} any more")
        else:
            now = describe(getattr(found, name), public)
            lost += differences(f"{module}.{name}", before, now)
    assert not lost, "\n" + "\n".join(lost)


@pytest.mark.parametrize("module", PROGRAMS)
def test_every_program_can_be_started_as_a_module(module):
    found = importlib.util.find_spec(module)
    assert found is not None
    if found.submodule_search_locations is not None:
        found = importlib.util.find_spec(f"{module}.__main__")
    assert found is not None


def f_before(a, b=1, *, c=2): ...


def f_longer(a, b=1, d=3, *, c=2, e=4, **more): ...


def f_other_default(a, b=2, *, c=2): ...


def f_other_order(b=1, a=0, *, c=2): ...


def f_shorter(a, b=1): ...


def f_needs_more(a, b=1, *, c=2, d): ...


class Before:
    def stay(self, a): ...

    @property
    def value(self): ...


class Without:
    def stay(self, a, b): ...


@pytest.mark.parametrize(
    ("later", "words"),
    [
        (f_before, []),
        (f_longer, []),
        (f_other_default, ["f has b as number 1 = 2, not number 1 = 1"]),
        (f_other_order, ["f has a as", "f has b as"]),
        (f_shorter, ["f has no parameter c any more"]),
        (f_needs_more, ["f needs a new parameter d"]),
        (3, ["f was a function and is a constant"]),
    ],
)
def test_a_change_of_parameters_is_seen_unless_no_call_can_notice_it(later, words):
    found = differences("f", describe(f_before), describe(later))
    assert len(found) == len(words)
    assert all(word in text for word, text in zip(words, found, strict=True))


def test_a_member_that_is_gone_or_changed_is_named(monkeypatch):
    for cls in (Before, Without):
        monkeypatch.setattr(cls, "__module__", "hdnn")
        monkeypatch.setattr(cls.stay, "__module__", "hdnn")
    monkeypatch.setattr(Before.value.fget, "__module__", "hdnn")
    found = differences("C", describe(Before), describe(Without))
    assert found == [
        "C has no member value any more",
        "C.stay needs a new parameter b; give it a default",
    ]
