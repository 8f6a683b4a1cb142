"""Runs on a graph that are asked about the samples in a folder of node files.

What each node reads for itself in a training is put together here. Where such a run knows the
columns of a table, or points of the plane, it is also asked as any other run is.
"""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from hdnn import analysis
from hdnn.analysis import Certificate
from hdnn.app.runs import Run
from hdnn.app.tasks import table
from hdnn.app.tasks.answers import Answer, answer_of
from hdnn.base.threads import one_thread
from hdnn.data import planar
from hdnn.distributed.graph.file import graph_of
from hdnn.distributed.graph.graph import Graph
from hdnn.distributed.training import sources
from hdnn.distributed.training.run import Config
from hdnn.errors import CheckpointError, DataError, OptionError
from hdnn.heads import SigmoidHead, SoftmaxHead
from hdnn.model import Model
from hdnn.serialization import read

PARTS = ("test", "train")


def is_folder(run: Run, data: str) -> bool:
    """Whether data for a run are node files rather than a table."""
    return run.of_graph and Path(data).is_dir()


def answer(run: Run, model: object, data: str, proba: bool) -> Answer:
    """What the model of a run says of the samples in a folder of node files."""
    net = _without_inputs(run, model)
    if proba and not isinstance(net.head, (SigmoidHead, SoftmaxHead)):
        raise OptionError("the run is a regression: it has values, but no probabilities.")
    graph = _graph(run)
    home = part_of(Path(data), graph)
    y = states(graph, home).to(next(net.parameters()).dtype)
    true = None
    if (home / sources.LABELS).is_file():
        true = read(home / sources.LABELS)[1].get("t")
        true = None if true is None or len(true) != len(y) else true.reshape(-1).numpy()
    columns = run.columns() if run.columns_file.exists() else None
    if true is not None and columns is not None and not columns.classes:
        true = columns.in_units(true)
    return answer_of(net, y, columns, true)


def certify(run: Run, model: object, data: str | None, *, samples: int) -> Certificate:
    """The certificate of a run on a graph at its own samples, or at those that are named."""
    own = run.config().data
    if own not in planar.SETS and not Path(own).is_dir() and (run.folder / "data").is_dir():
        own = str(run.folder / "data")  # the folder was moved
    if data is None and own in planar.SETS:
        points = planar.load(own, seed=run.config().seed).x_test
        model, _ = table.load_columns(run, model)
        with one_thread():
            return analysis.certify(model, points, samples=samples, points="test points")
    if data is not None and not is_folder(run, data):
        return table.certify(model, run, data, samples=samples)
    if data is None and not Path(own).is_dir():
        raise DataError(
            f"the node files of the run in {run.folder} are not in {own} any more; name rows with "
            "--data."
        )
    home = part_of(Path(data or own), graph := _graph(run))
    where = f"{home.name} samples" if data is None else f"samples of {data}"
    with one_thread():
        net = _without_inputs(run, model)
        return analysis.certify(net, states(graph, home), samples=samples, points=where)


def states(graph: Graph, home: Path) -> Tensor:
    """y_0 (samples, features) of all nodes, from a file for each of them."""
    first, m = [0, *accumulate(graph.sizes)], sum(graph.sizes)
    found: Tensor | None = None
    for node, size in enumerate(graph.sizes):
        path = sources.file_of(home, graph, node)
        x = read(path)[1].get("x")
        if x is None or x.ndim != 2 or x.shape[1] != 2 * size or not len(x):
            shape = "no x" if x is None else f"x of shape {tuple(x.shape)}"
            raise DataError(
                f"{path} has {shape}, but {graph.called(node)} needs (samples, {2 * size}): p, "
                "then q."
            )
        if found is None:
            found = torch.zeros(len(x), 2 * m, dtype=torch.float64)
        if len(x) != len(found):
            raise DataError(
                f"{path} has {len(x)} samples, but the file of {graph.called(0)} has {len(found)}."
            )
        if not bool(torch.isfinite(x).all()):
            raise DataError(f"{path} has a NaN or an infinite number; clean the data first.")
        found[:, first[node] : first[node + 1]] = x[:, :size]
        found[:, m + first[node] : m + first[node + 1]] = x[:, size:]
    assert found is not None
    return found


def part_of(home: Path, graph: Graph) -> Path:
    """Where the node files of a folder lie: in itself, in test/ or in train/."""
    for folder in (home, *(home / part for part in PARTS)):
        if sources.file_of(folder, graph, 0).is_file():
            return folder
    name = sources.file_of(home, graph, 0).name
    raise DataError(f"{home} holds no node files: there is no {name} in it, in test/ or in train/.")


def _graph(run: Run) -> Graph:
    config = run.config()
    assert isinstance(config, Config)
    return graph_of(config.graph, str(run.config_file))


def _without_inputs(run: Run, model: object) -> Model:
    """The model from y_0 on: the features of all nodes, rather than columns of a table."""
    if not isinstance(model, Model):
        raise CheckpointError(f"{run.model_file} does not hold the model of a run.")
    return Model(None, model.net, model.head)
