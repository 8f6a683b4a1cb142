"""Trainings on a graph: `hdnn launch` starts processes, `hdnn train --graph` is one of them."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hdnn import __version__, analysis, distributed, io, plotting
from hdnn.app.config import (
    GRAPH_OPTIONS,
    PLANAR_SETS,
    LaunchOptions,
    RunOptions,
    TableConfig,
    all_options,
    plain_name,
)
from hdnn.app.runs import Run
from hdnn.app.scores import score_lines
from hdnn.app.train import Problem, draw, load
from hdnn.distributed import Graph
from hdnn.distributed.train import node_features
from hdnn.errors import OptionError
from hdnn.progress import Progress
from hdnn.training import History

STEP = 0.5  # h of a layer, unless T says otherwise
DEFAULTS = {"data": "swiss_roll", "network": "h2", "layers": 4, "seed": 0}
EPOCHS = 50
TABLE = ("target", "drop", "categorical", "task", "test_fraction")
MOST_PROCESSES = 32  # on one machine, unless --parts says otherwise


def launch(values: Mapping[str, Any]) -> dict[str, Any]:
    """Train by processes of this machine; or without data, say what a graph needs."""
    if "graph" in values and "data" not in values and "resume" not in values:
        return needs(Graph.read(values["graph"]))
    job = GraphJob(values)
    parts = values.get("parts")
    if parts is None and job.graph.nodes > MOST_PROCESSES:
        raise OptionError(
            f"{job.graph.nodes} processes, one for each node, may be too many for this machine; "
            f"say how many with --parts, such as --parts {os.cpu_count()}."
        )
    show = not ("quiet" in values or "json" in values)

    def start(tell: Any, **options: Any) -> dict[str, Any]:
        restarts = values.get("restarts", 0)
        return distributed.launch(
            job.graph,
            job.data,
            processes=parts,
            restarts=restarts,
            tell=tell,
            **options,
        )

    return job.run(start, show)


def run(values: Mapping[str, Any]) -> dict[str, Any]:
    """Train as the process that torchrun says this is; the metrics, or {} if not the first."""
    job = GraphJob(values)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and job.problem is not None:
        raise OptionError(
            "several processes need a file for each node: write them by "
            "hdnn.distributed.write_nodes, and give their folder as --data."
        )

    def start(tell: Any, **options: Any) -> dict[str, Any]:
        return distributed.train(job.graph, job.data, tell=tell, **options)

    if int(os.environ.get("RANK", "0")) > 0:
        return start(None, **job.options())
    return job.run(start, not ("quiet" in values or "json" in values))


class GraphJob:
    """A training on a graph, as options ask for it."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        options = all_options(LaunchOptions, RunOptions)
        for name in values:
            if name not in GRAPH_OPTIONS and name not in options:
                raise OptionError(
                    f"--{name.replace('_', '-')} is not for a training on a graph."
                )
        if "resume" in values and "overwrite" in values:
            raise OptionError(
                "--resume goes on with a run and --overwrite replaces it; give one."
            )
        self.resume = "resume" in values
        self.overwrite = "overwrite" in values
        self.config = {
            name: value
            for name, value in values.items()
            if name in GRAPH_OPTIONS
        }
        self.graph = self.read_graph(values)
        self.graph.check()
        for name, value in DEFAULTS.items():
            self.config.setdefault(name, value)
        self.data = self.config["data"]
        self.problem: Problem | None = None
        self.placement: list[int] = []
        if self.data not in PLANAR_SETS:
            self.data = self.config["data"] = os.path.abspath(self.data)
            if not os.path.isdir(self.data):
                self.read_table()
        name = Path(values.get("graph", f"ring{self.graph.nodes}")).stem
        self.folder = Run(
            values.get("out") or Path("runs") / self.run_name(plain_name(name))
        )
        if not (self.resume or self.overwrite):
            self.folder.check_free()

    def read_graph(self, values: Mapping[str, Any]) -> Graph:
        """The graph of the run to resume, of a file, or a ring."""
        out = values.get("out")
        if self.resume and out is not None and Run(out).exists:
            run = Run(out)
            run.check_same(self.config)
            options = run.options()
            self.config = {
                name: v for name, v in options.items() if name in GRAPH_OPTIONS
            }
            return Graph.of(options["graph"])
        if "graph" in values:
            graph = Graph.read(values["graph"])
            if values.get("nodes", graph.nodes) != graph.nodes:
                raise OptionError(
                    f"{values['graph']} has {graph.nodes} nodes; leave out --nodes."
                )
            return graph
        if "nodes" in values:
            return Graph.ring(values["nodes"])
        raise OptionError(
            "name a graph: --graph FILE.toml, or --nodes 8 for a ring."
        )

    def run_name(self, graph: str) -> str:
        parts = [
            graph,
            plain_name(Path(self.data).stem),
            self.config["network"],
        ]
        return "-".join(
            [*parts, str(self.config["layers"]), str(self.config["seed"])]
        )

    def read_table(self) -> None:
        """Read the file, and give each input a feature of the node that has its column."""
        names = ("data", "seed", *TABLE)
        options = {
            name: self.config[name] for name in names if name in self.config
        }
        self.problem = load(TableConfig.build(options))
        sources = self.problem.encoder.sources
        owners = {}
        for source in sources:
            if source not in self.graph.columns:
                raise OptionError(
                    f"the graph gives the column {source!r} to no node; add it to columns, or "
                    f"leave it out: --drop {source}."
                )
            owners.setdefault(self.graph.columns[source], []).append(source)
        sizes = list(self.graph.sizes)
        for node, inputs in owners.items():
            sizes[node] = max(sizes[node], math.ceil(len(inputs) / 2))
        self.graph = Graph.of({**self.graph.table(), "sizes": sizes})
        free = {node: iter(node_features(self.graph, node)) for node in owners}
        self.placement = [
            next(free[self.graph.columns[source]]) for source in sources
        ]

    def options(self) -> dict[str, Any]:
        """The arguments of `hdnn.distributed.train`."""
        own = {
            k: v
            for k, v in self.config.items()
            if k not in ("data", "T", *TABLE)
        }
        step = STEP
        if "T" in self.config:
            step = self.config["T"] / self.config["layers"]
        if self.placement:
            own["placement"] = self.placement
        folder = os.path.abspath(self.folder.training_folder)
        return {
            **own,
            "step": step,
            "folder": folder,
            "resume": self.resume,
            "gather": True,
        }

    def run(self, start: Any, show: bool) -> dict[str, Any]:
        """Start the training, and write the run like any other."""
        run = self.folder
        if self.resume and run.complete:
            return run.metrics()
        options = {**self.config, "graph": self.graph.table()}
        with run.opened(
            "launch", options, resume=self.resume, overwrite=self.overwrite
        ):
            if self.problem is not None:
                self.data = str(run.training_folder / "data")
                self.write_nodes()
            total = self.config.get("epochs", EPOCHS)
            with Progress("epoch", total) as line:

                def tell(state: dict[str, Any]) -> None:
                    if show and "epoch" in state:
                        line.update(
                            state["epoch"],
                            f"loss {state.get('loss', math.nan):.4f}",
                        )

                metrics = start(tell, **self.options())
            model = io.load(run.training_folder / "model.safetensors")
            metrics |= {
                "run": str(run.folder),
                "network": repr(model.net),
                **self.measure(model),
            }
            metrics["versions"] = {"hdnn": __version__}
            problem = self.rows()
            io.save(
                model,
                run.model_file,
                note=None if problem is None else problem.note(),
            )
            metrics.pop("model", None)
            metrics["pictures"] = draw(
                lambda: self.pictures(metrics), run.folder
            )
            io.write_json(run.metrics_file, metrics)
        return metrics

    def write_nodes(self) -> None:
        """Give each node a file with the columns that the graph gives to it."""
        problem = self.problem
        assert problem is not None
        classes = len(problem.target.classes)
        for part, x, t in (
            ("train", problem.x, problem.t),
            ("test", problem.x_test, problem.t_test),
        ):
            distributed.write_nodes(
                self.data,
                self.graph,
                x,
                t,
                self.placement,
                classes=classes,
                part=part,
            )

    def rows(self) -> Problem | None:
        """The data of the whole model, where they are not node files."""
        if self.data in PLANAR_SETS:
            return load(
                TableConfig.build(
                    {"data": self.data, "seed": self.config["seed"]}
                )
            )
        return self.problem

    def measure(self, model: Any) -> dict[str, Any]:
        """The certificate of the whole model, and its test scores beside those that are easy."""
        problem = self.rows()
        if problem is None or model.augment is None:
            certificate = analysis.certify(model.net, points="random states")
            return {"certificate": certificate.to_dict()}
        x = problem.points.to(next(model.parameters()).dtype)
        certificate = analysis.certify(model, x, points="test points")
        return {**problem.scores(model), "certificate": certificate.to_dict()}

    def pictures(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "training": plotting.training_history(History(**metrics["history"]))
        }


def needs(graph: Graph) -> dict[str, Any]:
    """What a graph has, and which links its updates need and lack."""
    breaches = [str(breach) for breach in graph.breaches(10)]
    links = (sum(map(len, graph.used)) - graph.nodes) // 2
    neighbours = [len(row) - 1 for row in graph.used]
    return {
        "nodes": graph.nodes,
        "links": links,
        "features": graph.features,
        "most_neighbours": max(neighbours),
        "columns": graph.columns,
        "missing_links": breaches,
    }


def text(result: Mapping[str, Any]) -> str:
    """A result for people."""
    if "certificate" not in result:
        lines = [
            f"{name.replace('_', ' '):<16} {value}"
            for name, value in result.items()
        ]
        return "\n".join(lines)
    lines = [
        f"{'network':<16} {result['network']} on {result['nodes']} nodes",
        f"{'trained':<16} {result['epochs']} epochs by {result['processes']} processes in "
        f"{result['seconds']:.1f} s",
        f"{'messages':<16} {result['messages']:,}, {result['bytes'] / 2**20:.1f} MiB, between "
        "neighbours only",
        *score_lines(result, "test_"),
        f"{'gradients':<16} {result['certificate']['summary']}",
        f"{'run':<16} {result['run']}",
    ]
    return "\n".join(lines)
