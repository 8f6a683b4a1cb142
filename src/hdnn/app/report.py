"""One HTML page of runs: scores, tables, curves and certificates, with nothing outside of the file.

What the page says of each run is in `onpage`; here is what it says of all of them. How it looks is
in `report.html.jinja`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hdnn
from hdnn.app import reproduced, results
from hdnn.app.onpage.run import RunOnPage
from hdnn.app.onpage.values import NONE, score, text
from hdnn.app.runs import Run
from hdnn.app.runs import find_runs as find_runs
from hdnn.errors import require

TEMPLATE = Path(__file__).with_name("report.html.jinja")
TESTED = ("test_accuracy", "test_r2", "test_rmse")  # the first that there is compares runs
NAMED = {"test_accuracy": "test accuracy", "test_r2": "test R²", "test_rmse": "test RMSE"}
# Options that say what a run is, which come first; and those that are no column of their own,
# because they say nothing of the result or follow from the target.
FIRST = ("data", "target", "network", "layers")
COMMON = (*FIRST, "features", "epochs")
ASIDE = ("device", "task")


def page(runs: Sequence[Run], folder: Path | None = None) -> str:
    """The whole page, with what a folder of results has of the paper's tables and figures."""
    shown = [
        RunOnPage(run, f"run-{index}", short)
        for index, (run, short) in enumerate(zip(runs, short_names(runs), strict=True))
    ]
    return template(TEMPLATE).render(
        version=hdnn.__version__,
        runs=shown,
        title=_title(shown),
        overview=Overview(shown),
        over_seeds=OverSeeds(shown),
        pages=[] if folder is None else reproduced.pages(folder),
        pictures=[] if folder is None else reproduced.pictures(folder),
    )


def template(file: Path) -> Any:
    """A page to be rendered, with the macros and looks that all pages share."""
    jinja2 = require("jinja2", extra="cli")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([file.parent, TEMPLATE.parent], encoding="utf-8"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template(file.name)


def faults(runs: Sequence[Run]) -> list[str]:
    """What is wrong with the files of each run that is damaged."""
    return [fault for run in runs for fault in RunOnPage(run).faults]


def short_names(runs: Sequence[Run]) -> list[str]:
    """The names of the folders, without what all of them begin with."""
    folders = [run.folder for run in runs]
    try:
        common = os.path.commonpath([folder.parent for folder in folders])
    except ValueError:  # some are absolute, some are not
        return [str(folder) for folder in folders]
    return [os.path.relpath(folder, common or ".") for folder in folders]


class Overview:
    """The table of all runs: the score first, then the options in which they differ."""

    def __init__(self, runs: list[RunOnPage]) -> None:
        options = [_options(one) for one in runs]
        self.differing = differing(options)
        self.head = ["run", _measure(runs), *map(_words, self.differing)]
        self.head += ["on training rows", "smallest norm", "seconds"]
        self.rows = [
            (
                one,
                one.test or NONE,
                [
                    *(text(given.get(name)) for name in self.differing),
                    score(one.metrics, "train"),
                    one.smallest,
                    text(one.metrics.get("training_seconds")),
                ],
            )
            for one, given in zip(runs, options, strict=True)
        ]
        columns = zip(*(rest for _, _, rest in self.rows), strict=True)
        self.wordy = [any(map(_is_words, column)) for column in columns]
        known = [given for given in options if given]
        values = {name: {text(given.get(name)) for given in known} for name in COMMON}
        self.common = [
            (_words(name), value)
            for name in COMMON
            if len(values[name]) == 1 and (value := values[name].pop())
        ]


class OverSeeds:
    """Mean and spread of runs that differ in nothing but their seed."""

    def __init__(self, runs: list[RunOnPage]) -> None:
        groups: dict[tuple[Any, ...], list[RunOnPage]] = {}
        for one in runs:
            if one.metrics and one.options:
                alike = {k: v for k, v in one.options.items() if k not in ("seed", *ASIDE)}
                groups.setdefault(tuple((k, str(v)) for k, v in alike.items()), []).append(one)
        found = []
        for group in groups.values():
            summary = results.spread([one.metrics for one in group])
            name = next((name for name in TESTED if name in summary), None)
            if name is not None and summary[name]["runs"] >= 2:
                found.append((group, name, summary[name]))
        options = [
            {k: v for k, v in _options(group[0]).items() if k != "seed"} for group, _, _ in found
        ]
        self.differing = differing(options)
        self.head = ["runs", "mean", "std", "smallest", "largest", "measure", "seeds"]
        self.head += map(_words, self.differing)
        self.rows = [
            [
                _group_name(group),
                *(results.measure_text(name, spread[key]) for key in ("mean", "std")),
                *(results.measure_text(name, spread[key]) for key in ("smallest", "largest")),
                NAMED[name],
                text(spread["runs"]),
                *(text(given.get(option)) for option in self.differing),
            ]
            for (group, name, spread), given in zip(found, options, strict=True)
        ]


def differing(options: Sequence[dict[str, Any]]) -> list[str]:
    """The options that tell runs apart.

    Data, target, network and layers count wherever they differ; all others where they do among
    runs for the same target of the same data, because defaults depend on the data.
    """
    names = dict.fromkeys([*FIRST, *(name for given in options for name in given)])
    same: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for given in options:
        problem = tuple(text(given.get(name)) for name in FIRST[:2])
        same.setdefault((*problem, *given), []).append(given)  # of one kind, by names of options

    def differs(name: str, runs: Sequence[dict[str, Any]]) -> bool:
        return len({text(given[name]) for given in runs if name in given}) > 1

    return [
        name
        for name in names
        if name not in ASIDE
        and any(differs(name, runs) for runs in ([options] if name in FIRST else same.values()))
    ]


def _options(run: RunOnPage) -> dict[str, Any]:
    """The options of a run, with the name of the data for their path."""
    given = dict(run.options)
    if "data" in given:
        given["data"] = run.data
    return given


def _measure(runs: list[RunOnPage]) -> str:
    """The name of the score that compares runs, if it is the same for all."""
    names = {next((m for m in TESTED if one.metrics.get(m) is not None), None) for one in runs}
    names -= {None}
    return NAMED[names.pop() or ""] if len(names) == 1 else "test"


def _is_words(cell: str) -> bool:
    return re.match(r"[A-Za-z]", cell) is not None and not cell.startswith(("R²", "RMSE"))


def _words(name: str) -> str:
    return name.replace("_", " ")


def _title(runs: list[RunOnPage]) -> str:
    """What the page is about: the data and the target, if these are the same for all."""
    about = {(one.data, one.target) for one in runs if one.options}
    if len(about) != 1:
        return "Runs"
    data, target = about.pop()
    many = "Runs" if len(runs) > 1 else "A run"
    return f"{many} on {data}" + (f": {target}" if target else "")


def _group_name(group: list[RunOnPage]) -> str:
    """What the names of runs that differ in their seed have in common."""
    common = os.path.commonprefix([one.short for one in group])
    return re.sub(r"[-/_]*(seed-)?\d*$", "", common) or common or group[0].data
