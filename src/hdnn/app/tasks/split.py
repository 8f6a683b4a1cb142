"""A table shared out to the nodes of a graph: each gets a file with its own columns, and no others.

Columns become inputs as in `hdnn train`. The inputs of a node enter its features as those of any
table enter a network: one half at the start of p, the other at the end of q, all else at zero. The
folder has what `hdnn launch --data FOLDER` reads, columns.json (how rows become inputs), nodes.json
(which feature each input enters) and graph.toml, the graph with the sizes of its nodes filled in.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from hdnn.app.configs.graph import TABLE
from hdnn.app.configs.table import TableConfig
from hdnn.app.runs import Run, write_json
from hdnn.app.tasks.table import Problem, prepare
from hdnn.base.files import read_json, write_atomically
from hdnn.data import table
from hdnn.data.table import Columns
from hdnn.distributed.graph.file import (
    GraphPatterns,
    patterns_of,
    read_table,
    table_of,
    to_toml,
)
from hdnn.distributed.training import sources
from hdnn.errors import CheckpointError, DataError, OptionError
from hdnn.heads import Augment

LEAST = 2  # pairs of features of a node whose size is not given


@dataclass(frozen=True, eq=False)
class Split:
    """A table and a graph that fit together: the inputs of each node, and where they enter."""

    patterns: GraphPatterns  # with the sizes filled in
    problem: Problem
    own: tuple[list[int], ...]  # the inputs of each node
    entry: tuple[list[int], ...]  # the features of the node that they enter: p, then q
    notes: tuple[str, ...]

    @property
    def columns(self) -> Columns:
        return self.problem.columns

    @property
    def placement(self) -> list[int]:
        """For each input, its place among the features of all nodes."""
        sizes = self.patterns.sizes
        first, m = [0, *accumulate(sizes)], sum(sizes)
        found = [0] * len(self.columns.names)
        for node, (own, entry) in enumerate(zip(self.own, self.entry, strict=True)):
            for k, place in zip(own, entry, strict=True):
                is_q, at = divmod(place, sizes[node])
                found[k] = is_q * m + first[node] + at
        return found

    def facts(self) -> dict[str, Any]:
        """What nodes.json says."""
        config = self.problem.config
        labels = self.patterns.names or [str(k) for k in range(self.patterns.nodes)]
        names = self.columns.names
        return {
            "data": config.data,
            "target": config.target,
            "placement": self.placement,
            "inputs": {
                label: [names[k] for k in own] for label, own in zip(labels, self.own, strict=True)
            },
        }

    def write(self, home: Path) -> None:
        """Write all files into a folder, which is there as a whole or not at all."""
        home = Path(os.path.realpath(home))
        new = home.with_name(f".{home.name}.tmp")
        shutil.rmtree(new, ignore_errors=True)  # what a kill has left
        self._write(new)
        if home.exists():
            shutil.rmtree(home)
        new.rename(home)

    def _write(self, home: Path) -> None:
        problem, graph = self.problem, self.patterns.graph()
        parts = {"train": (problem.x_train, problem.t_train)}
        if len(problem.t_test):
            parts["test"] = problem.x_test, problem.t_test
        for part, (x, t) in parts.items():
            (home / part).mkdir(parents=True, exist_ok=True)
            for node, size in enumerate(graph.sizes):
                own = torch.zeros(len(x), 2 * size, dtype=torch.float64)
                own[:, self.entry[node]] = x[:, self.own[node]].double()
                _write_tensors(sources.file_of(home / part, graph, node), {"x": own})
            _write_tensors(home / part / sources.LABELS, {"t": t})
        write_json(home / "classes.json", len(self.columns.classes))
        write_json(home / "columns.json", self.columns.to_json())
        write_atomically(home / "graph.toml", to_toml(table_of(self.patterns)).encode())
        write_json(home / sources.NODES, self.facts())


OWN = re.compile(
    r"(columns|classes|nodes)\.json|graph\.toml|(train|test)(/(node-[^/]+|labels)\.safetensors)?"
)


def check_free(home: Path, overwrite: bool) -> None:
    """Refuse a folder that holds anything but node files that may be replaced."""
    if not os.path.lexists(home):
        return
    if not home.is_dir():
        raise CheckpointError(f"{home} is a file; name another folder with --out.")
    found = [path.relative_to(home).as_posix() for path in home.rglob("*")]
    strange = [name for name in found if not OWN.fullmatch(name)]
    if strange:
        raise CheckpointError(
            f"{home} holds {strange[0]}, which is no node file; name another folder with --out."
        )
    if found and not overwrite:
        raise CheckpointError(
            f"{home} holds node files already; replace them by --overwrite, or name another folder "
            "with --out."
        )


def for_run(run: Run, graph: str | None, links: dict[str, Any], given: dict[str, Any]) -> Split:
    """The table of a training on a graph, whose links are known; `given` are the options."""
    if graph is None:
        raise OptionError(
            "a table needs a graph that says which node has which column: --graph FILE.toml with "
            "[columns]."
        )
    options = {name: given[name] for name in ("data", "seed", *TABLE) if name in given}
    sized = "sizes" in read_table(graph)
    return split(patterns_of(links, graph), options, where=graph, sized=sized)


def check_same(run: Run, given: dict[str, Any]) -> None:
    """Refuse to go on with a run on another table, or with another target."""
    path = run.folder / "data" / sources.NODES
    known = read_json(path)
    wanted = {"data": os.path.abspath(given["data"]), "target": given.get("target")}
    for name, new in wanted.items():
        was = known.get(name) if isinstance(known, dict) else None
        if new is not None and new != was:
            raise OptionError(
                f"the run in {run.folder} has {name} = {was!r}, not {new!r}; resume it with the "
                "options that it was started with, or name another folder with --out."
            )


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    write_atomically(path, save({name: one.contiguous() for name, one in tensors.items()}))


def split(patterns: GraphPatterns, options: dict[str, Any], *, where: str, sized: bool) -> Split:
    """Share out a table to the nodes of the graph in the file `where`.

    `options` are those of a `TableConfig` on the data. Unless the graph is `sized`, a node gets
    twice as many features as it has inputs, and at least four.
    """
    source = table.read(options["data"])
    if not patterns.columns:
        column = next(iter(source.columns))
        example = f"{json.dumps(column)} = {json.dumps(patterns.names[0]) if patterns.names else 0}"
        raise OptionError(
            f"{where} does not say which node has which column of {source.path}; add [columns] and "
            f"lines such as {example}."
        )
    target, drop = options.get("target"), list(options.get("drop", []))
    for column in patterns.columns:
        source.column(column)  # raises if there is none
        if column == target:
            raise OptionError(
                f"{where} gives the target {target!r} to a node, but it is to be predicted; take "
                "it out of columns."
            )
    left = [name for name in source.columns if name not in (*patterns.columns, *drop, target)]
    more = {"drop": [*drop, *left], "dtype": "float64", "validation": None}
    problem = prepare(TableConfig.of({**options, **more}))
    notes = list(problem.notes)
    if left and target is not None:
        some = ", ".join(map(repr, left[:8])) + (" .." if len(left) > 8 else "")
        notes.append(f"no node of {where} has the column{'s' * (len(left) > 1)} {some}: left out")
    nodes = [patterns.columns[name] for name in problem.columns.sources]
    own = tuple([k for k, n in enumerate(nodes) if n == node] for node in range(patterns.nodes))
    if not sized:
        patterns = replace(patterns, sizes=tuple(max(LEAST, len(inputs)) for inputs in own))
    entry = []
    for node, (inputs, size) in enumerate(zip(own, patterns.sizes, strict=True)):
        if len(inputs) > 2 * size:
            called = patterns.graph().called(node)
            raise DataError(
                f"{called} has {len(inputs)} inputs from {options['data']}, but {2 * size} "
                f"features; give it sizes >= {-(-len(inputs) // 2)} in {where}, or leave sizes out."
            )
        entry.append(Augment(len(inputs), 2 * size).positions.tolist() if inputs else [])
    return Split(patterns, problem, own, tuple(entry), tuple(notes))
