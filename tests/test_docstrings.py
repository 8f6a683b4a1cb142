"""Every public name says what it takes, returns and refuses, and shows it by an example that runs.

A docstring has the sections `Args:` (or `Attributes:`, for what is returned and not constructed),
`Returns:`, `Raises:` and `Examples:`, in this order. The site makes a page of them.
"""

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
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL
SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises", "Examples")


def sections(thing: Any) -> dict[str, str]:
    """The text of each section of a docstring."""
    parts = re.split(rf"^({'|'.join(SECTIONS)}):\n", inspect.getdoc(thing) or "", flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_no_module_that_hdnn_offers_is_forgotten():
    offered = {name: getattr(hdnn, name) for name in dir(hdnn) if not name.startswith("_")}
    known = {id(thing) for thing in NAMES.values()}
    for name, thing in offered.items():
        if inspect.ismodule(thing):
            assert not hasattr(thing, "__all__") or thing.__name__ in public.MODULES, name
        else:
            assert id(thing) in known, name


def test_constants_are_not_public():
    assert [name for name, thing in NAMES.items() if not callable(thing)] == []


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_is_explained(name: str):
    thing, found = NAMES[name], sections(NAMES[name])
    told = found.get("Args", "") + found.get("Attributes", "")
    asked = public.parameters(thing)
    # Lines such as "    features: n, the size of a state", also for several: "K, b: weights".
    heads = re.findall(r"^    (\*{0,2}\w[\w, *]*)(?: \(.*?\))?:", told, re.M)
    known = {word.strip(" *") for head in heads for word in head.split(",")}
    assert [p for p in asked if p not in known] == []


@pytest.mark.parametrize("name", [n for n, thing in NAMES.items() if not inspect.isclass(thing)])
def test_what_is_returned_is_explained(name: str):
    returned = inspect.signature(NAMES[name]).return_annotation
    found = sections(NAMES[name])
    assert returned in (None, "None") or "Returns" in found or "Yields" in found


@pytest.mark.parametrize("name", NAMES)
def test_errors_are_named(name: str):
    raises = sections(NAMES[name]).get("Raises", "")
    for error in re.findall(r"^    (\w+):", raises, re.M):
        assert hasattr(builtins, error) or any(n.endswith(f".{error}") for n in NAMES), error


@pytest.mark.parametrize("name", NAMES)
def test_the_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    thing = NAMES[name]
    (test,) = doctest.DocTestFinder(recurse=False).find(thing, name, module=False, globs={})
    assert test.examples, f"{name} has no example"
    printed: list[str] = []
    result = doctest.DocTestRunner(optionflags=FLAGS).run(test, out=printed.append)
    assert result.failed == 0, "".join(printed)
