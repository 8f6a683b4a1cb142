"""Trainings on a graph: as one part of it, or by processes that are started for all parts.

Whatever can be checked without the data is checked here. The owners of the nodes make and train
the weights, and the root writes the folder: see `hdnn.distributed.training.run`.
"""

from __future__ import annotations

import math
import os
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open

from hdnn import serialization
from hdnn.analysis.certificate import SAMPLES
from hdnn.app import replaced, results, terminal
from hdnn.app.configs.flags import TIMEOUT, LaunchFlags
from hdnn.app.configs.graph import (
    FIELDS,
    OPTIONS,
    TABLE,
    checked_graph,
    config_of_graph,
    is_table,
    run_name,
    table_for,
    training_options,
)
from hdnn.app.progress import TrainingBar
from hdnn.app.runs import Run, usable_folder, write_json
from hdnn.app.tasks import nodes, split
from hdnn.app.tasks.split import Split
from hdnn.app.tasks.task import Task, go_on, known_metrics
from hdnn.base.config import types_of
from hdnn.base.files import read_json, write_atomically
from hdnn.base.search import components
from hdnn.base.threads import one_thread
from hdnn.data import planar
from hdnn.distributed import worker
from hdnn.distributed.graph.graph import Graph
from hdnn.distributed.graph.plan import Plan, partition
from hdnn.distributed.messages.connect import number_here, parts_here
from hdnn.distributed.messages.stored import LostError
from hdnn.distributed.training.run import Config
from hdnn.distributed.training.sources import LABELS, file_of
from hdnn.errors import CheckpointError, DataError, HDNNError, OptionError, positive_int
from hdnn.serialization import read
from hdnn.training import TensorBoard
from hdnn.training.checkpoint import locked
from hdnn.training.processes import torchrun
from hdnn.training.processes.torchrun import Processes

PAIRS = 24  # of parts in the table of traffic

SomeTask = TypeVar("SomeTask", bound="GraphTask")


class GraphTask(Task):
    """What all trainings on a graph have in common; `options` are those of the command."""

    def __init__(self, config: Config, graph: Graph, options: dict[str, Any]) -> None:
        self.config, self.graph, self.options = config, graph, options
        self.resume, self.overwrite = "resume" in options, "overwrite" in options
        self.timeout: float = options.get("timeout", TIMEOUT)
        self.save_every: int | None = options.get("save_every")
        self.plan = Plan(graph, partition(graph, positive_int("parts", self.parts())))
        self.metrics: dict[str, Any] = {}
        self.split: Split | None = None  # a table that is to be shared out

    def parts(self) -> int:
        """How many processes share the nodes."""
        return parts_here()

    def known(self, run: Run) -> dict[str, Any] | None:
        if parts_here() > 1:  # only the root can know
            return None
        if not self.resume:
            run.check_free()
        found = known_metrics(run)
        return None if found is None else {**found, "run": str(run.folder)}

    def load(self, processes: Processes, bar: TrainingBar) -> None:
        """Look at the data, which the owners of the nodes will read, and at the graph."""
        if self.split is not None:
            terminal.say_notes([*self.split.notes])
        elif parts_here() == 1 and self.config.data not in planar.SETS:
            _check_folder(Path(self.config.data), self.graph)
        if torchrun.is_first():
            _warn(self.graph)

    def build(self) -> None:
        """The owners of the nodes make their weights."""

    def open(self, run: Run, stack: ExitStack) -> None:
        """Make the folder of a run, lock it, and remove what is to be replaced in it."""
        usable_folder(run.folder, 0)
        stack.callback(_remove_if_empty, run.folder)
        stack.enter_context(locked(run.folder))
        if self.overwrite:
            replaced.clear(run)
        elif not self.resume:
            run.check_free()
        if self.split is not None:
            self.split.write(run.folder / "data")
            write_atomically(run.folder / "config.json", self.config.text().encode())

    def certify(self) -> None:
        """`write` does so, where the root has brought all weights together."""

    def write(self, run: Run, certified: None, processes: Processes) -> dict[str, Any] | None:
        """The metrics of the root, with the certificate of the whole model where there is one."""
        if "traffic" not in self.metrics:
            return None
        if run.model_file.is_file():
            self.metrics |= _certified(run)
            write_json(run.metrics_file, self.metrics)
        return {**self.metrics, "run": str(run.folder)}

    @staticmethod
    def text(metrics: dict[str, Any]) -> str:
        return _text(metrics)

    def bar(self, run: Run, wanted: bool) -> TrainingBar:
        return TrainingBar(run.folder.name, wanted, training_options(self.config)["epochs"])


class PartTask(GraphTask):
    """A training of which this process is one part, or all of them."""

    def threads(self) -> AbstractContextManager[None]:
        return one_thread()

    def claim(self, run: Run, stack: ExitStack) -> None:
        """The root makes the folder and keeps others out, before all parts meet."""
        if self.is_root:
            self.open(run, stack)

    @property
    def is_root(self) -> bool:
        """Whether this process owns node 0, and so writes the folder."""
        return number_here() == self.plan.owner[0]

    def go_on(self, run: Run) -> str:
        several = torchrun.several()
        return "give the same command with --resume" if several else go_on(run, "train")

    def fit(
        self, run: Run, bar: TrainingBar, board: TensorBoard | None, processes: Processes
    ) -> None:
        try:
            self.metrics = worker.work(
                self.config,
                out=run.folder,
                resume=self.resume or self.split is not None,  # which has written the config
                timeout=self.timeout,
                save_every=self.save_every,
                tell=bar.tell,
            )
        except LostError as error:
            told = str(error).removesuffix(".")
            raise terminal.StoppedError(f"{told}; {self.go_on(run)}", 1) from error


def asked(kind: type[SomeTask], given: dict[str, Any]) -> tuple[SomeTask, Run]:
    """The training on a graph that the options of a command ask for, and its folder."""
    known = (*FIELDS, *OPTIONS, *(TABLE if is_table(given.get("data")) else ()))
    replaced.check_options(given.get("overwrite"), given.get("resume"))
    for name in given:
        if name not in known and name not in types_of(LaunchFlags):
            flag = name.replace("_", "-") if len(name) > 1 else name
            flags = ", ".join(f"--{option.replace('_', '-')}" for option in known)
            raise OptionError(f"--{flag} is not for a training on a graph; that has {flags}.")
    timeout, save_every = given.get("timeout", TIMEOUT), given.get("save_every", 1)
    if not (math.isfinite(timeout) and 0 < timeout <= 10**7):
        raise OptionError(f"timeout must be a number of seconds > 0, but got {timeout}.")
    if save_every < 1:
        raise OptionError(f"save-every must be a whole number >= 1, but got {save_every}.")
    config, run, split = _config_and_run(given, {k: v for k, v in given.items() if k in known})
    if "overwrite" in given and parts_here() == 1:  # else the root does so
        replaced.check(run)
    source = given.get("graph") or ("the ring" if "nodes" in given else str(run.config_file))
    task = kind(config, checked_graph(config, source), given)
    task.split = split
    return task, run


def _config_and_run(
    given: dict[str, Any], options: dict[str, Any]
) -> tuple[Config, Run, Split | None]:
    """The config of a new training, or of the one to resume if it is the same, and its folder.

    And the table that is to be shared out, if the data are one.
    """
    graph, nodes, out = (given.get(name) for name in ("graph", "nodes", "out"))
    run = None if out is None else Run(out)
    table = {} if graph is None and nodes is None else {"graph": table_for(graph, nodes)}
    if not table and not ("resume" in given and run is not None):
        raise OptionError("say on which graph: --graph FILE.toml, or --nodes 8 for a ring.")
    config = None
    if table:
        config = config_of_graph(table["graph"], options)
        name = run_name(graph or f"ring{nodes}", config, options.get("target"))
        run = run or Run(Path("runs") / name)
    assert run is not None
    of_table, shared = is_table(options.get("data")), None
    if "resume" in given and run.exists:
        if run.kind != Config.kind:
            raise CheckpointError(f"{run.folder} holds a run, but no training on a graph.")
        if of_table:
            split.check_same(run, options)
            options = {k: v for k, v in options.items() if k not in ("data", *TABLE)}
            table = _as_sized(table, run)
        config = run.resumed({**table, **options})
    elif of_table and config is not None:
        if parts_here() > 1:
            raise OptionError(
                "several processes need a file for each node: make them by hdnn graph split."
            )
        shared = split.for_run(run, graph, table["graph"], options)
        sizes = list(shared.patterns.sizes)
        home = os.path.abspath(run.folder / "data")
        config = replace(config, data=home, graph={**table["graph"], "sizes": sizes})
    if not isinstance(config, Config):
        raise CheckpointError(f"{run.folder} holds no training on a graph to resume.")
    return config, run, shared


def _as_sized(table: dict[str, Any], run: Run) -> dict[str, Any]:
    """The same graph, with the sizes that its nodes got from their columns in a run."""
    known = run.config()
    if not table or not isinstance(known, Config) or "sizes" not in known.graph:
        return table
    return {"graph": {**table["graph"], "sizes": known.graph["sizes"]}}


def _certified(run: Run) -> dict[str, Any]:
    """The certificate of a complete run for its metrics, or why there is none."""
    try:
        found = nodes.certify(run, serialization.load(run.model_file), None, samples=SAMPLES)
    except HDNNError as error:
        return {"no_certificate_because": str(error)}
    return {"certificate": found.to_dict()}


def _warn(graph: Graph) -> None:
    """Warn of what may be a mistake, though it can be trained."""
    if any(len(row) > 1 for T in graph.T for row in T):
        terminal.say("warning: X and J are block-diagonal in a training, so T is not used.")
    if graph.nodes > 1 and all(len(row) == 1 for R in graph.R for row in R):
        terminal.say("warning: R links no nodes, so each learns on its own up to the output layer.")
    elif (apart := len(components(graph.used))) > 1:
        terminal.say(f"warning: {apart} groups of nodes never hear of each other; see graph check.")


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def _check_folder(home: Path, graph: Graph) -> None:
    """Refuse a folder of data that lacks the file of a node, or has one of another shape."""
    if not home.is_dir():
        known = ", ".join(planar.SETS)
        raise DataError(f"{home} is neither one of {known} nor a folder of node files.")
    classes = read_json(home / "classes.json")
    if type(classes) is not int or not (classes == 0 or 2 <= classes <= 10**6):
        raise DataError(
            f"{home / 'classes.json'} must hold the number of classes, such as 2, or 0 for values."
        )
    for part in ("train", "test"):
        if part == "test" and not (home / part).is_dir():
            continue
        _, labels = read(home / part / LABELS)
        t = labels.get("t")
        if classes == 0:
            if t is None or not t.is_floating_point() or t.numel() != len(t) or not len(t):
                raise DataError(f"{home / part / LABELS} must hold numbers t, one a sample.")
        elif t is None or t.ndim != 1 or not len(t) or t.is_floating_point() or t.is_complex():
            raise DataError(f"{home / part / LABELS} must hold whole numbers t, one a sample.")
        if classes and (int(t.min()) < 0 or int(t.max()) >= classes):
            raise DataError(
                f"labels must lie in 0 .. {classes - 1}, but {home / part / LABELS} has "
                f"{int(t.min())} .. {int(t.max())}."
            )
        for node, size in enumerate(graph.sizes):
            file = file_of(home / part, graph, node)
            shape = _shape(file)
            if shape != [len(t), 2 * size]:
                raise DataError(
                    f"{file} must hold x of shape ({len(t)}, {2 * size}), for the labels and the "
                    f"features of {graph.called(node)}, but has {tuple(shape)}."
                )


def _shape(file: Path) -> list[int]:
    try:
        with safe_open(file, "pt") as content:
            return content.get_slice("x").get_shape()
    except (OSError, SafetensorError, ValueError) as error:
        reason = "there is no such file" if not file.exists() else f"no tensors with x ({error})"
        raise DataError(f"cannot read {file}: {reason}.") from error


def _text(result: dict[str, Any]) -> str:
    """The metrics and the traffic, as small tables for people."""
    parts, nodes, data = result["parts"], result["nodes"], result.get("table") or result["data"]
    by, epochs = f"{parts} process{'es' * (parts != 1)}", result.get("epochs", 0)
    if (cores := result.get("cores")) is not None:
        by += f" on {cores} core{'s' * (cores != 1)}"
    rows = [
        ("network", f"{result['network']} of {result['layers']} layers on {data}"),
        ("graph", f"{nodes} node{'s' * (nodes != 1)} in {by}"),
        ("trained", f"{epochs} epoch{'s' * (epochs != 1)} in {result['seconds']:.1f} s"),
    ]
    if result.get("restarts"):
        rows[-1] = ("trained", f"{rows[-1][1]}, restarts: {result['restarts']}")
    rows += results.measure_rows(result)
    if "certificate" in result:
        rows += results.gradient_rows(result["certificate"])
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
    names = result.get("names") if parts == nodes else None
    label = str if names is None else names.__getitem__
    lines += [
        (f"{label(a)} - {label(b)}", f"{count:,}", _bytes(size)) for a, b, count, size in shown
    ]
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
