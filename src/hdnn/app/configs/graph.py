"""The config of a training on a graph: of options, and checked without a look at its data."""

from __future__ import annotations

import os
from dataclasses import fields
from typing import Any

from hdnn import activations
from hdnn.app.configs.common import plain_name, target_text
from hdnn.app.configs.table import TableData
from hdnn.app.graphs import block_entries
from hdnn.base.memory import check_memory
from hdnn.data import planar, table
from hdnn.distributed.graph.file import MOST_NODES, edges_of, patterns_of, read_table, table_of
from hdnn.distributed.graph.graph import Graph, from_edges, transposed, union
from hdnn.distributed.training import run
from hdnn.distributed.training.training import DEFAULTS
from hdnn.errors import OptionError, SparsityError, positive_float, positive_int
from hdnn.training.checks import check_options

MOST_TRAINED = 200_000  # nodes: each process walks over all of them before it begins
PADDED = 2 * 10**7  # entries of a product with K, if every node had as many links as the busiest
FIELDS = tuple(field.name for field in fields(run.Config) if field.metadata)
OPTIONS = tuple(name for name in DEFAULTS if name not in ("seed", "optimizer"))


TABLE = tuple(each.name for each in fields(TableData))


def is_table(data: str | None) -> bool:
    """Whether data for a graph are a table rather than a planar set or a folder of node files."""
    if data is None or data in planar.SETS or os.path.isdir(data):
        return False
    return table.is_file_name(data)


def config_of_graph(table: dict[str, Any], given: dict[str, Any]) -> run.Config:
    """The config that options ask for, by their names, on a graph as its file has it."""
    plain = {name: value for name, value in given.items() if name in FIELDS}
    if "network" in plain:
        plain["network"] = plain["network"].lower()
    if "data" in plain and plain["data"] not in planar.SETS:
        plain["data"] = os.path.abspath(plain["data"])
    options = {name: value for name, value in given.items() if name in OPTIONS}
    return run.Config(graph=table, options=options, **plain)


def training_options(config: run.Config) -> dict[str, Any]:
    """The options of the training, defaults included, checked."""
    known = {**DEFAULTS, **run.OPTIONS, "seed": config.seed, **config.options}
    return check_options(**known)


def run_name(graph: str, config: run.Config, target: str | None = None) -> str:
    """The name of the run's folder: ring8-swiss_roll-h2-4-0, or plant-log-fault-h2-4-0."""
    names = [plain_name(place, "graph") for place in (graph, config.data)]
    names += [] if target is None else [target_text(target)]
    return "-".join([*names, config.network, str(config.layers), str(config.seed)])


def table_for(graph: str | None, nodes: int | None) -> dict[str, Any]:
    """The graph of a file, or a ring of so many nodes; one of them must be given."""
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


def ring_table(nodes: int) -> dict[str, Any]:
    """A ring, on which K links each node with its two neighbours."""
    if not 1 <= nodes <= MOST_NODES:
        raise OptionError(f"nodes must be a whole number from 1 to {MOST_NODES}, but got {nodes}.")
    links = from_edges(nodes, [(i, (i + 1) % nodes) for i in range(nodes)])
    return {"nodes": nodes, "R": edges_of(links)}


def _check_count(nodes: Any) -> None:
    """Refuse a graph that is too large to train on, before it is read as a whole."""
    if isinstance(nodes, int) and MOST_TRAINED < nodes <= MOST_NODES:
        raise OptionError(
            f"a training on a graph has up to {MOST_TRAINED} nodes, but there are {nodes}: each "
            "process would walk over all of them for minutes; take fewer nodes with more features."
        )


def checked_graph(config: run.Config, source: str) -> Graph:
    """The graph of a config, if the processes can train on it and hold what they need."""
    graph = patterns_of(config.graph, source).graph()
    graph.tree()
    config.check_choices()
    activations.registered(config.activation)
    positive_int("layers", config.layers)
    positive_float("step", config.step)
    if not 0 <= config.seed < 2**63 - 1:
        raise OptionError(f"seed must be from 0 to 2^63 - 2, but got {config.seed}.")
    options = training_options(config)
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
    return graph


def _check_busiest(graph: Graph) -> None:
    """Refuse a hub: with few features a node, products pad all nodes to as many links as it has."""
    busy = max((max(map(len, A)), A) for R in graph.R for A in (R, transposed(R)))
    if graph.nodes * busy[0] > PADDED:
        hub = next(i for i, row in enumerate(busy[1]) if len(row) == busy[0])
        raise SparsityError(
            f"{graph.called(hub)} has {busy[0] - 1} links in R, and a step takes as long as if "
            f"each of the {graph.nodes} nodes had as many; give it fewer links."
        )
