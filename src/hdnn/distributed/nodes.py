"""The data of nodes: one file per node, which only its owner reads, or points in the plane."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hdnn import io
from hdnn.data import planar
from hdnn.distributed.graph import Graph
from hdnn.distributed.plan import Plan
from hdnn.errors import DataError
from hdnn.training import checkpoint

LABELS = "labels.safetensors"


class Samples(NamedTuple):
    """The features of this process for all samples, and at the root their labels."""

    x: Tensor
    t: Tensor | None
    order: str  # equal if samples and their order are equal


def entry_points(graph: Graph) -> list[int]:
    """The features that receive points in the plane: p of the first node, q of the middle node."""
    middle = graph.nodes // 2
    return [0, graph.features // 2 + graph.first[middle]]


def place(x: Tensor, placement: Sequence[int], features: Tensor) -> Tensor:
    """Some features of all samples: inputs at their places, zeros elsewhere."""
    own = x.new_zeros(len(x), len(features))
    for column, feature in enumerate(placement):
        own[:, features == feature] = x[:, [column]]
    return own


def write_nodes(
    folder: str | os.PathLike[str],
    graph: Graph,
    x: Tensor,
    t: Tensor,
    placement: Sequence[int],
    *,
    classes: int,
    part: str = "train",
) -> None:
    """Write a file for each node, which only its owner reads, and the labels for the root.

    `FOLDER/PART/node-00003.safetensors` holds `x` (samples, features of node 3: p, then q),
    `labels.safetensors` the labels `t`, and `FOLDER/classes.json` the number of classes. Files made
    in another way may also hold `id`: the numbers of the samples, which must be the same in all
    files.

    Args:
        folder: the folder to write to.
        graph: the nodes.
        x: inputs `(samples, inputs)`.
        t: labels or values.
        placement: for each input, the number (over all nodes) of the feature that receives it.
        classes: the number of classes; 0 for values.
        part: "train" or "test".
    """
    home = Path(folder) / part
    home.mkdir(parents=True, exist_ok=True)
    for node in range(graph.nodes):
        own = place(x, placement, graph.places([node], both=True))
        save_file({"x": own}, home / f"{graph.key(node)}.safetensors")
    save_file({"t": t.contiguous()}, home / LABELS)
    io.write_json(Path(folder) / "classes.json", classes)


def load(
    data: str,
    plan: Plan,
    positions: Tensor,
    seed: int,
    dtype: torch.dtype,
) -> tuple[dict[str, Samples], int]:
    """Training and test samples, and the number of classes (0 for values).

    Args:
        data: the name of a planar set, or a folder of node files.
        plan: the plan of this process.
        positions: the features of this process, in the order of the network.
        seed: the seed for the points in the plane.
        dtype: the dtype of the features.
    """
    samples = {}
    if data in planar.SETS:
        points = planar.load(data, seed=seed, dtype=dtype)
        places = entry_points(plan.graph)
        for part in ("train", "test"):
            t = getattr(points, f"t_{part}")
            own = place(getattr(points, f"x_{part}"), places, positions)
            labels = t if plan.is_root else None
            samples[part] = Samples(own, labels, checkpoint.digest([t]))
        return samples, 2
    home = Path(data)
    if not home.is_dir():
        sets = ", ".join(planar.SETS)
        raise DataError(
            f"{home} is neither one of {sets} nor a folder of node files."
        )
    classes = io.read_json(home / "classes.json")
    for part in ("train", "test"):
        if part == "train" or (home / part).is_dir():
            samples[part] = _read(home / part, plan, positions, classes, dtype)
    return samples, classes


def _read(
    home: Path,
    plan: Plan,
    positions: Tensor,
    classes: int,
    dtype: torch.dtype,
) -> Samples:
    """The samples in the files of this process's nodes, and at the root the labels."""
    nodes: list[Tensor] = []
    orders = set()
    for node in plan.nodes:
        path = home / f"{plan.graph.key(node)}.safetensors"
        x, order = _load(path, "x")
        count = len(nodes[0]) if nodes else len(x)
        shape = (count, 2 * plan.graph.sizes[node])
        if x.shape != shape or not bool(x.isfinite().all()):
            raise DataError(
                f"{path} must hold x {shape}, without gaps: a row for each sample, p and then q of "
                f"node {plan.graph.label(node)}; x has {tuple(x.shape)}."
            )
        nodes.append(x.to(dtype))
        orders.add(order)
    t = None
    if plan.is_root:
        t, order = _load(home / LABELS, "t")
        fits = len(t) == len(nodes[0])
        if classes and fits:
            fits = bool(((t >= 0) & (t < classes) & (t == t.long())).all())
        if not fits:
            raise DataError(
                f"{home / LABELS} must hold t, a label in 0 .. {classes - 1} (or a value, if "
                f"classes.json is 0) for each of {len(nodes[0])} samples."
            )
        t = t.long() if classes else t.reshape(-1, 1).to(dtype)
        orders.add(order)
    if len(orders) > 1:
        raise DataError(
            f"files in {home} differ in their id, so their samples or the order of samples differ."
        )
    rows = torch.cat(nodes, 1)
    own = torch.empty_like(rows)
    order = plan.graph.places(plan.nodes, both=True).argsort()
    own[:, positions.argsort()] = rows[:, order]
    return Samples(own, t, orders.pop())


def _load(path: Path, name: str) -> tuple[Tensor, str]:
    """A tensor of a file, and a string that identifies the samples and their order."""
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise DataError(f"cannot read {path}: {error}.") from error
    order = checkpoint.digest([tensors.get("id")])
    return tensors.get(name, torch.empty(0)), order
