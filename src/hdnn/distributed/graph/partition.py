"""Sharing out the nodes of a graph: parts of equal size with few links between them."""

from __future__ import annotations

import importlib.util

from hdnn.distributed.graph.graph import Graph
from hdnn.errors import SparsityError, choose, positive_int, require

METHODS = ("auto", "metis", "bands")


def partition(graph: Graph, parts: int, method: str = "auto") -> list[int]:
    """The part of each node: by METIS (extra `graph`), or in bands of a breadth-first order.

    It changes how much has to be sent, not the results. "auto" uses METIS where it is installed and
    there are more nodes than parts; all processes must get the same parts.
    """
    parts, nodes = positive_int("parts", parts), graph.nodes
    choose("method", method, METHODS)
    if parts > nodes:
        raise SparsityError(f"{nodes} nodes cannot be shared out to {parts} parts; use fewer.")
    if parts == nodes:
        return [*range(nodes)]
    if parts == 1:
        return [0] * nodes
    if method == "metis" or (method == "auto" and importlib.util.find_spec("pymetis")):
        return _metis(graph, parts)
    tree = graph.tree()
    ordered = sorted(range(nodes), key=lambda i: (tree.depth[i], i))
    owner = [0] * nodes
    for place, node in enumerate(ordered):
        owner[node] = place * parts // nodes
    return owner


def _metis(graph: Graph, parts: int) -> list[int]:
    pymetis = require("pymetis", extra="graph")
    neighbours = [[k for k in row if k != i] for i, row in enumerate(graph.used)]
    _, owner = pymetis.part_graph(parts, adjacency=neighbours)
    if len(set(owner)) < parts:  # it may leave a part empty in tiny graphs
        return partition(graph, parts, "bands")
    return [int(part) for part in owner]


def cut(graph: Graph, owner: list[int]) -> int:
    """How many links join nodes of different parts."""
    return sum(owner[i] != owner[k] for i, row in enumerate(graph.used) for k in row) // 2
