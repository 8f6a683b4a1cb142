"""Every public name is explained, and the examples in docstrings run."""

from __future__ import annotations

import builtins
import doctest
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import hdnn
import public

NAMES = public.names()
FLAGS = (
    doctest.ELLIPSIS
    | doctest.NORMALIZE_WHITESPACE
    | doctest.IGNORE_EXCEPTION_DETAIL
)
SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises", "Examples")


def sections(thing: Any) -> dict[str, str]:
    """The text of each section of a docstring."""
    parts = re.split(
        rf"^({'|'.join(SECTIONS)}):\n", inspect.getdoc(thing) or "", flags=re.M
    )
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_no_module_that_hdnn_offers_is_forgotten():
    offered = {
        name: getattr(hdnn, name)
        for name in dir(hdnn)
        if not name.startswith("_")
    }
    known = {id(thing) for thing in NAMES.values()}
    for name, thing in offered.items():
        if inspect.ismodule(thing):
            assert (
                not hasattr(thing, "__all__")
                or thing.__name__ in public.MODULES
            ), name
        else:
            assert id(thing) in known, name


def test_constants_are_not_public():
    assert [name for name, thing in NAMES.items() if not callable(thing)] == []


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_explained(name: str):
    assert (inspect.getdoc(NAMES[name]) or "").strip()


@pytest.mark.parametrize("name", NAMES)
def test_errors_are_named(name: str):
    raises = sections(NAMES[name]).get("Raises", "")
    for error in re.findall(r"^    (\w+):", raises, re.M):
        assert hasattr(builtins, error) or any(
            n.endswith(f".{error}") for n in NAMES
        ), error


@pytest.mark.parametrize("name", NAMES)
def test_the_example_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    thing = NAMES[name]
    (test,) = doctest.DocTestFinder(recurse=False).find(
        thing, name, module=False, globs={}
    )
    printed: list[str] = []
    result = doctest.DocTestRunner(optionflags=FLAGS).run(
        test, out=printed.append
    )
    assert result.failed == 0, "".join(printed)
