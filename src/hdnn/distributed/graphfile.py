"""Graphs in TOML files.

    nodes = 8
    edges = [[0, 1], [1, 2], ...]     # S: who may depend on whom, both ways, each on itself
    R = [[0, 1], ...]                 # links of K, as edges or as a matrix; by default designed
    T = [[0, 1], ...]                 # links of X or J; by default none
    sizes = 1                         # features of a node, or a list of them

A list R (or T) of pairs are undirected edges; rows of zeros and ones are a matrix.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from hdnn import sparsity
from hdnn.distributed.graph import Graph, Links, from_edges, links_of
from hdnn.errors import SparsityError
from hdnn.files import as_path

KEYS = ("nodes", "edges", "R", "T", "sizes")


def read_graph(path: str | Path) -> Graph:
    """The graph of a file, checked; where it has no R, the one with most links is designed."""
    return graph_of(read_table(path), str(path))


def read_table(path: str | Path) -> dict[str, Any]:
    """What a file says, before it is checked."""
    file = as_path(path)
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not a text file"
        raise SparsityError(f"cannot read the graph {path}: {reason}.") from error
    except tomllib.TOMLDecodeError as error:
        raise SparsityError(f"{path} is no valid TOML: {error}.") from error


def graph_of(table: dict[str, Any], name: str = "the graph") -> Graph:
    """The graph that a table describes."""
    unknown = sorted(set(table) - set(KEYS))
    if unknown:
        raise SparsityError(f"{name} has {unknown[0]!r}, but only {', '.join(KEYS)} are known.")
    nodes = table.get("nodes")
    if not isinstance(nodes, int) or isinstance(nodes, bool) or nodes < 1:
        raise SparsityError(f"{name} must have nodes = a whole number >= 1, but has {nodes!r}.")
    S = None
    if "edges" in table:
        S = from_edges(nodes, _list(name, "edges", table["edges"]))
    elif "R" not in table:
        raise SparsityError(f"{name} has neither edges nor R; give one of them.")
    T = _pattern(name, "T", table["T"], nodes) if "T" in table else None
    if "R" in table:
        R = _pattern(name, "R", table["R"], nodes)
    else:
        assert S is not None
        R = _designed(S, T)
    sizes = table.get("sizes", 1)
    if not isinstance(sizes, (int, list)) or isinstance(sizes, bool):
        raise SparsityError(f"sizes of {name} must be a whole number or a list of them.")
    return Graph(R, T, S, sizes)


def _designed(S: Links, T: Links | None) -> Links:
    if T is not None:
        raise SparsityError("a graph with a T needs an R as well; R = [] links nobody.")
    matrix = [[int(k in row) for k in range(len(S))] for row in S]
    return links_of("R", sparsity.design_R(matrix).R)


def _pattern(name: str, key: str, given: Any, nodes: int) -> Links:
    rows = _list(name, key, given)
    square = len(rows) == nodes and all(len(row) == nodes for row in rows)
    if square and (nodes != 2 or rows[0][0] == rows[1][1] == 1):  # else two edges of two nodes
        return links_of(key, rows)
    return from_edges(nodes, rows)


def _list(name: str, key: str, given: Any) -> list[Any]:
    if not isinstance(given, list) or not all(isinstance(row, list) for row in given):
        raise SparsityError(f"{key} of {name} must be a list of pairs of nodes, or a matrix.")
    return given
