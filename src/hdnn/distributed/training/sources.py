"""Where each node gets its features from: a planar set, files of its own, or a function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from hdnn.base.config import fits
from hdnn.base.files import as_path, read_json
from hdnn.data import planar
from hdnn.data.table import Columns
from hdnn.distributed.graph.graph import Graph
from hdnn.distributed.network.network import GraphNetwork
from hdnn.errors import DataError
from hdnn.serialization import read
from hdnn.training import identity

LABELS = "labels.safetensors"
NODES = "nodes.json"  # of a table that was shared out: where each input of it enters


@dataclass
class Samples:
    """The features (rows, samples) that a part owns, and at the root the labels of all samples.

    `order` is equal for parts that have the same samples in the same order, where that is known.
    """

    x: Tensor
    t: Tensor | None
    order: str = ""


def file_of(home: Path, graph: Graph, node: int) -> Path:
    """The file of a node in a folder."""
    return home / f"node-{graph.key(node)}.safetensors"


def of_function(net: GraphNetwork, features: Callable[[int], Tensor], t: Tensor | None) -> Samples:
    """From a function that returns the features (samples, own) of a node: first p, then q."""
    found: Tensor | None = None
    called = net.plan.graph.called
    for node in net.part.nodes:
        values = torch.as_tensor(features(node))
        rows = net.rows_of(node)
        if values.ndim != 2 or values.shape[1] != len(rows):
            raise DataError(
                f"{called(node)} owns {len(rows)} features, but its data have shape "
                f"{tuple(values.shape)}, not (samples, {len(rows)})."
            )
        if found is None:
            found = torch.zeros(net.rows, len(values), dtype=net.dtype)
        elif found.shape[1] != len(values):
            raise DataError(
                f"{called(node)} has {len(values)} samples, but others have {found.shape[1]}."
            )
        found[rows] = values.T.to(net.dtype)
    assert found is not None
    return Samples(found, t)


def of_folder(net: GraphNetwork, folder: str | Path, part: str = "train") -> Samples:
    """From PART/node-00003.safetensors, one a node, each read by its owner alone.

    A file holds `x` (samples, own features); the root's labels are `t` in labels.safetensors. Each
    may hold `id` as well, whole numbers that say which sample is which: then all must be the same.
    """
    home = as_path(folder) / part
    orders: dict[Path, str] = {}

    def content(path: Path, name: str) -> Tensor:
        _, tensors = read(path)
        if name not in tensors:
            raise DataError(f"{path} has no tensor named {name}.")
        orders[path] = _order(tensors["id"]) if "id" in tensors else ""
        return tensors[name]

    def features(node: int) -> Tensor:
        return content(file_of(home, net.plan.graph, node), "x")

    is_root = net.plan.tree.root in net.part.nodes
    found = of_function(net, features, content(home / LABELS, "t") if is_root else None)
    (first, order), *others = orders.items()
    for path, other in others:
        if other != order:
            raise DataError(
                f"{path} has other samples than {first}, or another order of them, by their id; "
                "give all files the same."
            )
    found.order = order
    return found


def _order(numbers: Tensor) -> str:
    """The same for the same whole numbers only."""
    return identity.digest([numbers.reshape(-1).long()])


class Inputs(NamedTuple):
    """How rows of a table become y_0, of a folder that was made of a table."""

    columns: Columns
    placement: list[int]  # for each input, its place among the features of all nodes
    source: str  # the file of the table


def inputs_of(folder: str | Path) -> Inputs | None:
    """What a folder of node files knows of the table that it was made of, if of one."""
    home = as_path(folder)
    if not (home / NODES).is_file():
        return None
    found, columns = read_json(home / NODES), home / "columns.json"
    known = Columns.from_json(read_json(columns), columns)
    placement: list[int] = found.get("placement", []) if isinstance(found, dict) else []
    if not fits(placement, list[int]) or len(placement) != len(known.names):
        raise DataError(f"{home / NODES} and {columns} do not fit together; split the table again.")
    return Inputs(known, placement, str(found.get("data", folder)))


def entry_points(net: GraphNetwork) -> list[int]:
    """Where x_1 and x_2 of a planar set enter: p of the first node, q of the middle one."""
    middle = net.positions_of(net.plan.graph.nodes // 2)
    return [0, middle[len(middle) // 2]]


def of_planar(net: GraphNetwork, data: planar.PlanarData) -> tuple[Samples, Samples]:
    """A planar set for training and testing; all other features begin at zero."""
    enter = dict(zip(entry_points(net), (0, 1), strict=True))
    is_root = net.plan.tree.root in net.part.nodes

    def samples(x: Tensor, t: Tensor) -> Samples:
        def features(node: int) -> Tensor:
            columns = [enter.get(position) for position in net.positions_of(node)]
            zero = torch.zeros(len(x), dtype=x.dtype)
            return torch.stack([zero if c is None else x[:, c] for c in columns], 1)

        found = of_function(net, features, t if is_root else None)
        found.order = _order(t)
        return found

    return samples(data.x_train, data.t_train), samples(data.x_test, data.t_test)
