"""Training on a graph: `hdnn launch` starts processes, `hdnn train --graph` runs one of them."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hdnn import distributed, io
from hdnn.app.config import (
    GraphConfig,
    LaunchOptions,
    RunOptions,
    all_options,
    plain_name,
)
from hdnn.app.runs import Run
from hdnn.app.train import Data, Job, check_folders, load, pick, train
from hdnn.data import planar
from hdnn.distributed import Graph
from hdnn.distributed.exchange import world
from hdnn.errors import OptionError
from hdnn.progress import Progress
from hdnn.training import History

STEP = 0.5  # h of a layer, unless T is given
TRAINING = (  # options of a config that `hdnn.distributed.train` takes
    *("network", "layers", "activation", "epochs", "batch", "learning_rate"),
    *("weight_decay", "solver", "ridge", "smoothness", "seed"),
)


def launch(values: Mapping[str, Any]) -> dict[str, Any]:
    """Train with processes on this machine."""
    config, run = plan(values)
    nodes = Graph.of(config.graph or {}).nodes
    parts = values.get("parts", nodes)
    restarts = values.get("restarts", 0)
    if run.complete and "resume" in values:
        return run.metrics()
    start = partial(distributed.launch, processes=parts, restarts=restarts)
    return train(GraphJob(start, config), run, values)


def join(values: Mapping[str, Any]) -> dict[str, Any]:
    """Train as one process under torchrun; return the metrics, or {} if it is not the first."""
    config, run = plan(values)
    rank, size = world()
    table = config.data not in planar.SETS and not os.path.isdir(config.data)
    if size > 1 and table:
        raise OptionError(
            "several processes need a file for each node; write these files with "
            "hdnn.distributed.write_nodes, and pass their folder as --data."
        )
    if run.complete and "resume" in values:
        return run.metrics() if rank == 0 else {}
    job = GraphJob(distributed.train, config)
    if rank == 0:
        return train(job, run, values)
    return job.start(job.graph, config.data, **job.options(run.training_folder))


def plan(values: Mapping[str, Any]) -> tuple[Any, Run]:
    """The config and the folder of a run: a new one, or the one to resume."""
    options = all_options(LaunchOptions, RunOptions)
    own = {k: v for k, v in values.items() if k not in options}
    out = values.get("out")
    if "resume" in values and out is not None and Run(out).exists:
        run = Run(out)
        return run.config(own), run
    graph = read_graph(values)
    graph.check()
    config = GraphConfig.build({**own, "graph": graph.table()})
    if config.data not in planar.SETS:
        config = replace(config, data=os.path.abspath(config.data))
    name = Path(values.get("graph", f"ring{graph.nodes}")).stem
    run = Run(out or Path("runs") / config.run_name(plain_name(name)))
    if world()[0] == 0:
        check_folders([run], values)
    return config, run


def read_graph(values: Mapping[str, Any]) -> Graph:
    """The graph from a file, or a ring."""
    nodes = values.get("nodes")
    if "graph" in values and nodes is None:
        return Graph.read(values["graph"])
    if "graph" in values or nodes is None:
        raise OptionError(
            "name one graph: --graph FILE.toml, or --nodes 8 for a ring."
        )
    return Graph.ring(nodes)


class GraphJob(Job):
    """A training run on a graph.

    Args:
        start: the function `hdnn.distributed.train` or `launch`.
        config: the options.
    """

    def __init__(self, start: Any, config: GraphConfig) -> None:
        self.start = start
        self.graph = Graph.of(config.graph or {})
        self.placement: list[int] = []
        self.data = Data()
        if not os.path.isdir(config.data):
            self.data = load(config)
            if config.data not in planar.SETS:
                self.place_columns()
        self.config = replace(config, graph=self.graph.table())

    def place_columns(self) -> None:
        """Assign each input to a feature of the node that has its column."""
        columns = self.graph.columns
        owners: dict[int, list[int]] = {}
        for place, source in enumerate(self.data.encoder.sources):
            if source not in columns:
                raise OptionError(
                    f"the graph assigns the column {source!r} to no node; add it to columns, or "
                    f"leave it out: --drop {source}."
                )
            owners.setdefault(columns[source], []).append(place)
        sizes = list(self.graph.sizes)
        for node, inputs in owners.items():
            sizes[node] = max(sizes[node], math.ceil(len(inputs) / 2))
        self.graph = Graph.of({**self.graph.table(), "sizes": sizes})
        placement = torch.zeros(len(self.data.encoder.sources)).long()
        for node, inputs in owners.items():
            features = self.graph.places([node], both=True)
            placement[inputs] = features[: len(inputs)]
        self.placement = placement.tolist()

    def options(self, folder: Path) -> dict[str, Any]:
        """The arguments of `hdnn.distributed.train`."""
        config = self.config
        options: dict[str, Any] = {
            "step": STEP if config.T is None else config.T / config.layers,
            "folder": os.path.abspath(folder),
            "resume": True,
            "gather": True,
        }
        if self.placement:
            options["placement"] = self.placement
        return options | pick(config, TRAINING)

    def fit(self, folder: Path, progress: bool) -> History:
        data = self.config.data
        if self.placement:
            data = str(folder / "data")
            classes = len(self.data.target.classes)
            for part, (x, t) in self.data.parts.items():
                distributed.write_nodes(
                    data,
                    self.graph,
                    x,
                    t,
                    self.placement,
                    classes=classes,
                    part=part,
                )
        with Progress("epoch", self.config.epochs or 50) as line:

            def tell(news: dict[str, Any]) -> None:
                if progress:
                    line.update(news["epoch"], f"loss {news['loss']:.4f}")

            options = self.options(folder)
            results = self.start(self.graph, data, tell=tell, **options)
        self.model = io.load(folder / "model.safetensors")
        if self.model.augment is None:
            self.certified = self.model.net
            self.data.points = None
            self.data.place = "random states"
        seconds = results.pop("seconds")
        history = History(**results.pop("history"), seconds=seconds)
        results.pop("model", None)
        self.facts = results
        return history


def needs(path: str) -> dict[str, Any]:
    """The facts about the graph in a file, and the links that its updates need but lack."""
    graph = Graph.read(path)
    neighbours = [len(row) - 1 for row in graph.used]
    return {
        "nodes": graph.nodes,
        "links": sum(neighbours) // 2,
        "features": graph.features,
        "most_neighbours": max(neighbours),
        "columns": graph.columns,
        "missing_links": [str(breach) for breach in graph.breaches(10)],
    }
