"""One process of a training on a graph: the nodes it owns, its connections, and its files.

A folder has config.json, nodes/ with the shards of each node, log.jsonl with a line for each epoch,
and at the end model.safetensors (where one file can hold all weights) and metrics.json, which is
written last and has the traffic. Each part writes the shards of its nodes; all else is the root's.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hdnn import serialization
from hdnn._version import __version__
from hdnn.analysis.scores import scored
from hdnn.base.files import as_path, finite, write_atomically
from hdnn.base.graph_config import Config as Config
from hdnn.data import planar
from hdnn.distributed.graph.file import matrix_of
from hdnn.distributed.graph.graph import Graph
from hdnn.distributed.graph.plan import Plan, partition
from hdnn.distributed.messages.replicas import Replicas
from hdnn.distributed.network.network import GraphNetwork
from hdnn.distributed.training import sources
from hdnn.distributed.training.log import EpochLog
from hdnn.distributed.training.shards import make_folder
from hdnn.distributed.training.sources import Inputs
from hdnn.distributed.training.training import Training
from hdnn.distributed.transport import Local, Transport
from hdnn.errors import CheckpointError, DataError, OptionError
from hdnn.heads import Augment, RegressionHead, SigmoidHead, SoftmaxHead
from hdnn.model import Model
from hdnn.networks import BY_NAME, HamiltonianNet
from hdnn.sparsity import Sparsity

DENSE = 1024  # features, up to which one network of all nodes is made as well
NEWTON = 256  # features, up to which the root solves the output layer for each minibatch
DTYPES = {"float32": torch.float32, "float64": torch.float64}
# The best options for the ring of the paper's second table.
OPTIONS: dict[str, Any] = {
    "learning_rate": 2e-2,
    "warmup": 0.2,
    "clip": 0.1,
    "ridge": 5e-5,
    "smoothness": 5e-3,
    "smoothing": "cosine",
}


def build(config: Config, graph: Graph, owner: list[int], transport: Transport) -> GraphNetwork:
    """The nodes of this process, with their initial weights."""
    config.check_choices()
    plan = Plan(graph, owner)
    net = GraphNetwork(
        plan,
        config.layers,
        transport,
        network=config.network,
        step=config.step,
        activation=config.activation,
        dtype=DTYPES[config.dtype],
    )
    init = config.init
    if init == "auto":
        init = "masked" if net.features <= DENSE else "scaled"
    if init == "masked":
        net.load(dense(config, graph, net))
    else:
        net.draw(config.seed, init, config.gain)
    return net


def dense(config: Config, graph: Graph, net: GraphNetwork) -> HamiltonianNet:
    """One network of all nodes with the initial weights of the seed, its K masked."""
    if net.features > DENSE:
        raise OptionError(
            f"a masked network of {net.features} features is too large; take init scaled."
        )
    R = torch.tensor([matrix_of(links) for links in graph.R], dtype=torch.bool)
    found = BY_NAME[config.network](
        net.features,
        config.layers,
        step=config.step,
        activation=config.activation,
        sparsity=Sparsity(R if len(R) > 1 else R[0], sizes=graph.sizes),
        generator=torch.Generator().manual_seed(config.seed),
        dtype=net.dtype,
    )
    assert isinstance(found, HamiltonianNet)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter *= config.gain
    return found


def train(
    config: Config,
    graph: Graph,
    transport: Transport | None = None,
    *,
    owner: list[int] | None = None,
    replicas: Replicas | None = None,
    folder: str | os.PathLike[str] | None = None,
    resume: bool = False,
    save_every: int | None = None,
    tell: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Train, test and save as one part of the graph.

    All parts call it, with the same config and graph. A folder that has a training of another
    config is left alone.

    Args:
        config: all that decides the result.
        graph: the graph that the config describes.
        transport: carries messages to the other parts; without one, this process owns all nodes.
        owner: the part of each node; by default nodes are shared out alike.
        replicas: others that train the same nodes on other samples of each minibatch.
        folder: where to write config, shards, log, model and metrics, if anywhere.
        resume: go on with the training that the folder has, from the newest common step.
        save_every: steps between two shards (default: an epoch).
        tell: called by the root with a dict after each epoch.

    Returns:
        The metrics, at the root all of them.

    Raises:
        OptionError: if the config has a value that is not among the choices.
        TrainingError: if one of its `options` is not known or has no sensible value.
        DataError: if its data are no planar set and no folder of node files, or do not fit the
            nodes.
        SparsityError: if the graph is not connected, or owner does not fit it.
        CheckpointError: if the folder has a training that is not to be resumed.
        DistributedError: if the training diverges, parts do not fit together, or one is lost.

    Examples:
        >>> from hdnn.distributed import Config, Graph, train
        >>> ring = {"nodes": 4, "R": [[0, 1], [1, 2], [2, 3], [3, 0]]}
        >>> config = Config(graph=ring, data="double_moons", layers=2, options={"epochs": 1})
        >>> metrics = train(config, Graph.ring(4), folder="moons")
        >>> metrics["nodes"], metrics["test_accuracy"] > 0.85
        (4, True)
    """
    start = time.perf_counter()
    transport, replicas = transport or Local(), replicas or Replicas()
    owner = partition(graph, transport.parts) if owner is None else owner
    net = build(config, graph, owner, transport)
    train_set, test_set, classes = _samples(config, net)
    table = None if config.data in planar.SETS else sources.inputs_of(config.data)
    facts = {
        "data": config.data if config.data in planar.SETS else "folder",
        "order": [train_set.order, "" if test_set is None else test_set.order],
        "test": None if test_set is None else test_set.x.shape[1],
        "init": [config.init, config.gain],
    }
    generator = torch.Generator().manual_seed(config.seed + 1)
    if classes == 0:
        head = RegressionHead(net.features, 1, generator=generator, dtype=net.dtype)
    elif classes == 2:
        head = SigmoidHead(net.features, generator=generator, dtype=net.dtype)
    else:
        head = SoftmaxHead(net.features, classes, generator=generator, dtype=net.dtype)
    solver = "newton" if net.features <= NEWTON else "joint"
    home = None if folder is None else as_path(folder)
    is_first = replicas.index == 0
    is_root = is_first and net.plan.tree.root in net.part.nodes
    if home is not None and is_root:
        _claim(home, config, resume)
    training = Training(
        net,
        head,
        train_set.x,
        train_set.t,
        folder=None if home is None else home / "nodes",
        save_every=save_every,
        replicas=replicas,
        tell=partial(_told, tell, None if home is None else EpochLog(home)) if is_first else None,
        name=name_of(net.plan, replicas),
        facts=facts,
        **{**OPTIONS, "solver": solver, "seed": config.seed, **config.options},
    )
    begin = time.perf_counter()
    progress = training.run(resume)
    if home is not None and is_root:
        EpochLog(home).complete(progress)
    metrics: dict[str, Any] = {
        "data": config.data,
        "network": config.network,
        "layers": config.layers,
        "features": net.features,
        "train_rows": train_set.x.shape[1],
        "test_rows": 0 if test_set is None else test_set.x.shape[1],
        "training_seconds": round(time.perf_counter() - begin, 2),
        "nodes": graph.nodes,
        "parts": transport.parts,
        "replicas": replicas.count,
        "seed": config.seed,
    }
    if table is not None:
        about = {"task": table.columns.task, "target": table.columns.target, "table": table.source}
        metrics |= {**about, "columns": table.columns.used, "inputs": len(table.placement)}
    if graph.names:
        metrics["names"] = list(graph.names)
    if progress.loss:
        metrics |= {"epochs": len(progress.loss), "loss": progress.loss[-1]}
    for part, samples in (("train", train_set), ("test", test_set)):
        if samples is not None:
            state, _ = net.forward(net.split(samples.x), keep=False)
            scores = training.head.scores(net.join(state))
            if samples.t is not None:
                metrics |= scored(part, head, scores, samples.t, table and table.columns)
    traffic = training.traffic()
    whole = training.assemble(dense(config, graph, net) if net.features <= DENSE else None)
    metrics["seconds"] = round(time.perf_counter() - start, 2)
    metrics["versions"] = {"hdnn": __version__, "torch": torch.__version__}
    if is_root:
        metrics |= {"messages": sum(e[2] for e in traffic), "bytes": sum(e[3] for e in traffic)}
        metrics["traffic"] = traffic
    if home is not None and is_root:
        if whole is not None:
            metrics["parameters"] = sum(
                p.numel() for p in (*whole.parameters(), *head.parameters())
            )
            if table is not None:
                columns = json.dumps(table.columns.to_json(), indent=2)
                write_atomically(home / "columns.json", f"{columns}\n".encode())
            note = None if table is None else {"columns": table.columns.digest()}
            model = _model(config, whole, head, net, table)
            serialization.write(model, home / "model.safetensors", note)
        write_atomically(home / "metrics.json", json.dumps(finite(metrics), indent=1).encode())
    return metrics


def _told(
    tell: Callable[[dict[str, Any]], None] | None, log: EpochLog | None, news: dict[str, Any]
) -> None:
    """What the root does after an epoch: write it to the log, and tell it."""
    if log is not None:
        log.write({k: v for k, v in news.items() if k not in ("step", "seconds_left")})
    if tell is not None:
        tell(news)


def _model(
    config: Config, whole: HamiltonianNet, head: Any, net: GraphNetwork, table: Inputs | None
) -> Model:
    """One model of all nodes, whose inputs are points or columns where they are known."""
    augment = None
    if config.data in planar.SETS:
        augment = Augment(2, net.features, placement=sources.entry_points(net))
    elif table is not None:
        augment = Augment(len(table.placement), net.features, placement=table.placement)
    return Model(augment, whole, head)


def _claim(home: Path, config: Config, resume: bool) -> None:
    """Write the config, unless the folder holds another training."""
    path = home / "config.json"
    if path.exists():
        if not _is_config(path, config):
            raise CheckpointError(f"{home} has another training; choose another folder.")
        if not resume:
            raise CheckpointError(f"{home} has a training; resume it, or choose another folder.")
    make_folder(home)
    write_atomically(path, config.text().encode())


def _is_config(path: Path, config: Config) -> bool:
    """Whether a file holds this config; old files do not name their kind."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {"kind": config.kind, **found} == json.loads(config.text())
    except (ValueError, TypeError):
        return False


def _samples(
    config: Config, net: GraphNetwork
) -> tuple[sources.Samples, sources.Samples | None, int]:
    if config.data in planar.SETS:
        data = planar.load(config.data, seed=config.seed, dtype=net.dtype)
        train_set, test_set = sources.of_planar(net, data)
        return train_set, test_set, 2
    home = Path(config.data)
    if not home.is_dir():
        known = ", ".join(planar.SETS)
        raise DataError(f"{config.data} is neither one of {known} nor a folder of node files.")
    train_set = sources.of_folder(net, home, "train")
    test_set = sources.of_folder(net, home, "test") if (home / "test").is_dir() else None
    about = home / "classes.json"
    try:
        classes = int(json.loads(about.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise DataError(
            f"{about} must hold the number of classes, such as 2, or 0 for values."
        ) from error
    for samples in (train_set, test_set):
        if classes == 0 and samples is not None and samples.t is not None:
            samples.t = samples.t.to(net.dtype).reshape(-1, 1)
    return train_set, test_set, classes


def name_of(plan: Plan, replicas: Replicas | None = None) -> Callable[[int], str]:
    """How to call a part: by its nodes, and by its replica where there are several."""
    replicas = replicas or Replicas()
    where = f" of replica {replicas.index}" if replicas.count > 1 else ""

    def name(part: int) -> str:
        nodes = plan.nodes_of[part]
        if len(nodes) == 1:
            return f"{plan.graph.called(nodes[0])}{where}"
        shown = ", ".join(map(plan.graph.label, nodes[:4])) + (", .." if len(nodes) > 4 else "")
        return f"part {part} (nodes {shown}){where}"

    return name
