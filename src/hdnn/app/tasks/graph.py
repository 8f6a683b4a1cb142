"""Trainings on a graph: their options, checks before they start, and their results."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from hdnn import activations
from hdnn.app import results, runfiles, terminal
from hdnn.app.configs.common import plain_name
from hdnn.app.configs.flags import TIMEOUT, LaunchFlags
from hdnn.app.graphs import block_entries
from hdnn.app.runs import Run
from hdnn.base.config import types_of
from hdnn.base.files import read_json
from hdnn.base.memory import check_memory
from hdnn.base.search import components
from hdnn.data import planar
from hdnn.distributed.graph.file import MOST_NODES, edges_of, patterns_of, read_table, table_of
from hdnn.distributed.graph.graph import Graph, from_edges, transposed, union
from hdnn.distributed.graph.plan import Plan, partition
from hdnn.distributed.training import run
from hdnn.distributed.training.sources import LABELS
from hdnn.distributed.training.training import DEFAULTS
from hdnn.errors import (
    CheckpointError,
    DataError,
    OptionError,
    SparsityError,
    positive_float,
    positive_int,
)
from hdnn.serialization import read
from hdnn.training.checks import check_options

MOST_CONFIG = 2**32  # bytes of a config, which has all links of its graph
MOST_TRAINED = 200_000  # nodes: each process walks over all of them before it begins
PADDED = 2 * 10**7  # entries of a product with K, if every node had as many links as the busiest
PAIRS = 24  # of parts in the table of traffic
FIELDS = tuple(field.name for field in fields(run.Config) if field.metadata)
OPTIONS = tuple(name for name in DEFAULTS if name not in ("seed", "optimizer"))


@dataclass(frozen=True)
class GraphTask:
    """A training on a graph; everything is checked that does not need its data."""

    config: run.Config
    graph: Graph
    folder: Path
    resume: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """The options of the training, defaults included."""
        return _options(self.config)

    def plan(self, parts: int) -> Plan:
        """The nodes of each of so many processes."""
        return Plan(self.graph, partition(self.graph, positive_int("parts", parts)))

    def is_complete(self) -> bool:
        """Whether the training in the folder is complete; an error if none can be there."""
        if self.resume:
            return (self.folder / "metrics.json").is_file()
        if (self.folder / "config.json").is_file():
            raise CheckpointError(
                f"{self.folder} holds a training already; go on with it by --resume, or name "
                "another folder with --out."
            )
        Run(self.folder).check_free()
        return False

    def check_data(self) -> None:
        """Look at the data without reading them: there for each node, and of its shape."""
        if self.config.data not in planar.SETS:
            _check_folder(Path(self.config.data), self.graph.sizes)

    def warn(self) -> None:
        """Warn of what may be a mistake, though it can be trained."""
        graph = self.graph
        if any(len(row) > 1 for T in graph.T for row in T):
            terminal.say("warning: X and J are block-diagonal in a training, so T is not used.")
        if graph.nodes > 1 and all(len(row) == 1 for R in graph.R for row in R):
            terminal.say(
                "warning: R links no nodes, so each learns on its own up to the output layer."
            )
        elif (apart := len(components(graph.used))) > 1:
            terminal.say(
                f"warning: {apart} groups of nodes never hear of each other; see graph check."
            )

    def go_on(self, command: str) -> str:
        """The command that resumes it."""
        return f"go on with: hdnn {command} --resume --out {shlex.quote(str(self.folder))}"

    def stopped(self, how: str) -> terminal.StoppedError:
        """The message after an interruption, with the command that resumes."""
        if not (self.folder / "config.json").is_file():
            return terminal.StoppedError("interrupted before anything was written.")
        return terminal.StoppedError(f"interrupted; {how}")

    def result(self, metrics: dict[str, Any] | None = None) -> results.Result:
        """The result of the training, by default from its folder."""
        found = read_metrics(self.folder) if metrics is None else metrics
        return results.Result({**found, "run": str(self.folder)}, text)


def task_of(given: dict[str, Any]) -> tuple[GraphTask, float, int | None]:
    """The training that options ask for, its timeout, and the steps between two shards."""
    known = (*FIELDS, *OPTIONS)
    for name in given:
        if name not in known and name not in types_of(LaunchFlags):
            flag = name.replace("_", "-") if len(name) > 1 else name
            flags = ", ".join(f"--{option.replace('_', '-')}" for option in known)
            raise OptionError(f"--{flag} is not for a training on a graph; that has {flags}.")
    timeout = given.get("timeout", TIMEOUT)
    if not (math.isfinite(timeout) and 0 < timeout <= 10**7):
        raise OptionError(f"timeout must be a number of seconds > 0, but got {timeout}.")
    save_every = given.get("save_every")
    if save_every is not None and save_every < 1:
        raise OptionError(f"save-every must be a whole number >= 1, but got {save_every}.")
    task = ask(
        {name: value for name, value in given.items() if name in known},
        graph=given.get("graph"),
        nodes=given.get("nodes"),
        out=given.get("out"),
        resume="resume" in given,
    )
    return task, timeout, save_every


def ring_table(nodes: int) -> dict[str, Any]:
    """A ring, on which K links each node with its two neighbours."""
    if not 1 <= nodes <= MOST_NODES:
        raise OptionError(f"nodes must be a whole number from 1 to {MOST_NODES}, but got {nodes}.")
    links = from_edges(nodes, [(i, (i + 1) % nodes) for i in range(nodes)])
    return {"nodes": nodes, "R": edges_of(links)}


def ask(
    given: dict[str, Any],
    *,
    graph: str | None = None,
    nodes: int | None = None,
    out: str | None = None,
    resume: bool = False,
) -> GraphTask:
    """What these options ask for: those of `run.Config` and of its training, by their names."""
    if resume and out is not None and (Path(out) / "config.json").is_file():
        return _resumed(Path(out), given, graph, nodes)
    if graph is None and nodes is None:
        if resume and out is not None:
            raise CheckpointError(f"{out} holds no training on a graph to resume: no config.json.")
        raise OptionError("say on which graph: --graph FILE.toml, or --nodes 8 for a ring.")
    table = _table(graph, nodes)
    config = _config(table, given)
    found = patterns_of(table, graph or "the ring").graph()
    _check(config, found)
    names = (plain_name(place, "graph") for place in (graph or f"ring{nodes}", config.data))
    name = "-".join([*names, config.network, str(config.layers), str(config.seed)])
    folder = Path("runs") / name if out is None else Path(out)
    if resume and (folder / "config.json").is_file():
        return _resumed(folder, given, graph, nodes)
    return GraphTask(config, found, folder, resume)


def _table(graph: str | None, nodes: int | None) -> dict[str, Any]:
    if graph is None:
        assert nodes is not None
        _check_count(nodes)
        return ring_table(nodes)
    table = read_table(graph)
    _check_count(table.get("nodes"))
    patterns = patterns_of(table, graph)
    if nodes is not None and nodes != patterns.nodes:
        raise OptionError(f"{graph} has {patterns.nodes} nodes, not {nodes}; leave --nodes out.")
    # The designed patterns go into the config, so that all parts have the same.
    return table if "R" in table else table_of(patterns)


def _check_count(nodes: Any) -> None:
    """Refuse a graph that is too large to train on, before it is read as a whole."""
    if isinstance(nodes, int) and MOST_TRAINED < nodes <= MOST_NODES:
        raise OptionError(
            f"a training on a graph has up to {MOST_TRAINED} nodes, but there are {nodes}: each "
            "process would walk over all of them for minutes; take fewer nodes with more features."
        )


def _config(table: dict[str, Any], given: dict[str, Any]) -> run.Config:
    plain = {name: value for name, value in given.items() if name in FIELDS}
    if "network" in plain:
        plain["network"] = plain["network"].lower()
    if "data" in plain and plain["data"] not in planar.SETS:
        plain["data"] = os.path.abspath(plain["data"])
    options = {name: value for name, value in given.items() if name in OPTIONS}
    return run.Config(graph=table, options=options, **plain)


def _options(config: run.Config) -> dict[str, Any]:
    known = {**DEFAULTS, **run.OPTIONS, "seed": config.seed, **config.options}
    return check_options(**known)


def _resumed(
    folder: Path, given: dict[str, Any], graph: str | None, nodes: int | None
) -> GraphTask:
    """The training of a folder; an error if the options ask for something else."""
    file = folder / "config.json"
    try:
        written = read_json(file, MOST_CONFIG)
        runfiles.check(file, written, {}, {"gain": runfiles.number, "options": runfiles.table})
        config = run.Config.from_json(written)
        found = patterns_of(config.graph, str(file)).graph()
        _check(config, found)
    except (TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is no config of a training on a graph.") from error
    table = config.graph if graph is None and nodes is None else _table(graph, nodes)
    asked = _config(table, given)
    old, new = ({**asdict(c), **_options(c)} for c in (config, asked))
    named = ("graph", *(name for name in (*FIELDS, *OPTIONS) if name in given))
    for name in named:
        if old[name] != new[name]:
            what = f"{name.replace('_', '-')} = {old[name]!r}, not {new[name]!r}"
            raise OptionError(
                f"the training in {folder} has {'another graph' if name == 'graph' else what}; "
                "resume it with the options that it was started with, or name another folder with "
                "--out."
            )
    return GraphTask(config, found, folder, True)


def _check(config: run.Config, graph: Graph) -> None:
    """Raise what the processes would raise, and refuse what they could not hold."""
    graph.tree()
    config.check_choices()
    activations.registered(config.activation)
    positive_int("layers", config.layers)
    positive_float("step", config.step)
    if not 0 <= config.seed < 2**63 - 1:
        raise OptionError(f"seed must be from 0 to 2^63 - 2, but got {config.seed}.")
    options = _options(config)
    n = 2 * sum(graph.sizes)
    if config.init == "masked" and n > run.DENSE:
        raise OptionError(f"a masked network of {n} features is too large; take init scaled.")
    _check_busiest(graph)
    # Weights, gradients and two moments of Adam; then what each layer keeps of a minibatch.
    weights = 2 * block_entries(union(*graph.R), graph.sizes) * (2 if config.network == "h1" else 1)
    states = 6 * n * min(options["batch"], 10**6)
    samples = 2 * n * 8000 if config.data in planar.SETS else 0
    needed = config.layers * (4 * weights + states) + samples
    needed *= run.DTYPES[config.dtype].itemsize
    check_memory(needed, f"{config.layers} layers on this graph", "layers, nodes or features")


def _check_busiest(graph: Graph) -> None:
    """Refuse a hub: with few features a node, products pad all nodes to as many links as it has."""
    busy = max((max(map(len, A)), A) for R in graph.R for A in (R, transposed(R)))
    if graph.nodes * busy[0] > PADDED:
        hub = next(i for i, row in enumerate(busy[1]) if len(row) == busy[0])
        raise SparsityError(
            f"node {hub} has {busy[0] - 1} links in R, and a step takes as long as if each of the "
            f"{graph.nodes} nodes had as many; give it fewer links."
        )


def _check_folder(home: Path, sizes: Sequence[int]) -> None:
    """Refuse a folder of data that lacks the file of a node, or has one of another shape."""
    if not home.is_dir():
        known = ", ".join(planar.SETS)
        raise DataError(f"{home} is neither one of {known} nor a folder of node files.")
    classes = read_json(home / "classes.json")
    if not isinstance(classes, int) or isinstance(classes, bool) or not 2 <= classes <= 10**6:
        raise DataError(f"{home / 'classes.json'} must hold the number of classes, such as 2.")
    for part in ("train", "test"):
        if part == "test" and not (home / part).is_dir():
            continue
        _, labels = read(home / part / LABELS)
        t = labels.get("t")
        if t is None or t.ndim != 1 or not len(t) or t.is_floating_point() or t.is_complex():
            raise DataError(f"{home / part / LABELS} must hold whole numbers t, one a sample.")
        if int(t.min()) < 0 or int(t.max()) >= classes:
            raise DataError(
                f"labels must lie in 0 .. {classes - 1}, but {home / part / LABELS} has "
                f"{int(t.min())} .. {int(t.max())}."
            )
        for node, size in enumerate(sizes):
            file = home / part / f"node-{node:05d}.safetensors"
            shape = _shape(file)
            if shape != [len(t), 2 * size]:
                raise DataError(
                    f"{file} must hold x of shape ({len(t)}, {2 * size}), for the labels and the "
                    f"features of node {node}, but has {tuple(shape)}."
                )


def _shape(file: Path) -> list[int]:
    try:
        with safe_open(file, "pt") as content:
            return content.get_slice("x").get_shape()
    except (OSError, SafetensorError, ValueError) as error:
        reason = "there is no such file" if not file.exists() else f"no tensors with x ({error})"
        raise DataError(f"cannot read {file}: {reason}.") from error


def read_metrics(folder: Path) -> dict[str, Any]:
    """The results of a complete training."""
    file = folder / "metrics.json"
    found = read_json(file)
    runfiles.check(file, found, runfiles.OF_GRAPHS, runfiles.OF_SOME_GRAPHS)
    return found


def text(result: dict[str, Any]) -> str:
    """The metrics and the traffic, as small tables for people."""
    parts, nodes = result["parts"], result["nodes"]
    by, epochs = f"{parts} process{'es' * (parts != 1)}", result.get("epochs", 0)
    rows = [
        ("network", f"{result['network']} of {result['layers']} layers on {result['data']}"),
        ("graph", f"{nodes} node{'s' * (nodes != 1)} in {by}"),
        ("trained", f"{epochs} epoch{'s' * (epochs != 1)} in {result['seconds']:.1f} s"),
    ]
    if result.get("restarts"):
        rows[-1] = ("trained", f"{rows[-1][1]}, restarts: {result['restarts']}")
    rows += results.measure_rows(result)
    rows.append(("messages", f"{result['messages']:,}, {_bytes(result['bytes'])} in all"))
    rows.append(("run", result["run"]))
    between = _pairs(result["traffic"])
    told = terminal.rows_text(rows)
    if not between:
        return told
    shown = between
    if len(between) > PAIRS:
        shown = sorted(between, key=lambda pair: -pair[3])[:5]
    what = "node" if parts == nodes else "part"
    lines = [(f"between {what}s", "messages", "bytes")]
    lines += [(f"{a} - {b}", f"{count:,}", _bytes(size)) for a, b, count, size in shown]
    if len(shown) < len(between):
        lines.append((f".. {len(between) - len(shown)} more", "", ""))
    width, wide, broad = (max(map(len, column)) for column in zip(*lines, strict=True))
    table = (f"{a:<{width}}  {b:>{wide}}  {c:>{broad}}".rstrip() for a, b, c in lines)
    more = f"\nall of them: {Path(result['run']) / 'metrics.json'}" * (len(shown) < len(between))
    return f"{told}\n\n" + "\n".join(table) + more


def _pairs(traffic: list[list[int]]) -> list[tuple[int, int, int, int]]:
    """Messages and bytes between two parts, both ways together."""
    found: dict[tuple[int, int], list[int]] = {}
    for sender, receiver, count, size in traffic:
        pair = found.setdefault((min(sender, receiver), max(sender, receiver)), [0, 0])
        pair[0] += count
        pair[1] += size
    return [(a, b, count, size) for (a, b), (count, size) in sorted(found.items())]


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.{0 if unit == 'B' else 1}f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"
