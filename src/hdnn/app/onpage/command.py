"""The command that repeats a run: its options that are not the defaults."""

from __future__ import annotations

import shlex
from contextlib import suppress
from dataclasses import fields
from typing import Any

from hdnn.app.configs.kinds import GraphConfig, config_of
from hdnn.app.configs.table import TableConfig
from hdnn.app.runs import Run
from hdnn.errors import HDNNError

NEEDED = ("data", "target", "network")  # what defaults may depend on: always said


def command(run: Run, metrics: dict[str, Any]) -> str:
    """The command line; of a graph there is none, because its file is not part of the run."""
    config = run.config()
    if isinstance(config, GraphConfig):
        return ""
    given = {each.name: getattr(config, each.name) for each in fields(config)}
    asked = {name: given[name] for name in NEEDED if given.get(name) is not None}
    usual = _usual(run, asked, metrics)
    words = ["hdnn", "train"]
    processes = metrics.get("processes")
    if isinstance(processes, int) and processes > 1:
        words = ["torchrun", "--nproc-per-node", str(processes), "-m", *words]
    for name, value in given.items():
        if name in NEEDED or value != usual.get(name):
            words += _flags(f"--{name.replace('_', '-')}", value)
    words += ["--out", f"{run.folder}-again"]
    return shlex.join(words)


def _usual(run: Run, asked: dict[str, Any], metrics: dict[str, Any]) -> dict[str, Any]:
    """What the options would be by default, for such data."""
    rows = metrics.get("train_rows")
    try:
        config = config_of(asked)
    except HDNNError:
        return {}
    if isinstance(config, TableConfig):
        with suppress(HDNNError, OSError):  # without columns, blanks stay
            config = config.resolved(run.columns(), rows if isinstance(rows, int) else 1)
    return vars(config)


def _flags(flag: str, value: Any) -> list[str]:
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    several = value if isinstance(value, list) else [value]
    return [word for one in several for word in (flag, str(one))]
