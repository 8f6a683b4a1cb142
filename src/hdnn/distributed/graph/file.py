"""Graphs in TOML files.

    nodes = 8
    edges = [[0, 1], [1, 2]]          # S: who may depend on whom, both ways; each may on itself
    R = [[0, 1]]                      # links of K; by default those that free most weights
    T = [[0, 1]]                      # links of X or J; by default none
    sizes = 1                         # pairs of features of a node, or a list of them
    names = ["pump", "valve", ..]     # of the nodes, if wanted, to be used in place of numbers
    columns = {flow = "pump", ..}     # which node has which column of a table

R and T are lists of undirected links, or matrices: as many rows of zeros and ones as there are
nodes, with ones on the diagonal. (For two nodes, [[1, 0], [0, 1]] is the matrix.) A link that is
named twice, or of a node with itself, changes nothing.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from hdnn import sparsity
from hdnn.base.config import toml_value
from hdnn.base.files import as_path
from hdnn.distributed.graph import names as naming
from hdnn.distributed.graph.graph import Graph, Links, alone, from_edges, links_of, shown
from hdnn.errors import HDNNError, SparsityError, quoted

KEYS = ("nodes", "edges", "R", "T", "sizes", "names", "columns")
LARGEST_FILE = 2**27  # bytes
PIECE = 2**20  # bytes that are read at once
LARGEST_TEXT = 2**24  # bytes that tomllib reads, which takes some ten seconds
MOST_NODES = 10**6
MOST_FEATURES = 10**9  # of one node
MOST_DESIGNED = 1000  # nodes, for which an R is found in seconds
COMMENT = re.compile(r"#[^\n\x00-\x08\x0b-\x1f\x7f]*")
ENTRY = re.compile(r"^[ \t]*([A-Za-z]+)[ \t]*=[ \t]*(\[[0-9 \t\n,\[\]-]*\]|-?[0-9]+)[ \t]*$", re.M)
LAST_COMMA = re.compile(r"(?<=[0-9\]]),(?=[ \t\n]*\])")


@dataclass(frozen=True)
class GraphPatterns:
    """What a file says, whether the locality condition holds or not."""

    R: Links
    T: Links
    S: Links | None
    sizes: tuple[int, ...]
    names: tuple[str, ...] = ()
    columns: dict[str, int] = field(default_factory=dict)  # of a table, with their nodes

    @property
    def nodes(self) -> int:
        """How many nodes there are."""
        return len(self.sizes)

    def graph(self) -> Graph:
        """The same as a graph, if the locality condition holds."""
        return Graph(self.R, self.T, self.S, self.sizes, self.names)


def read_graph(path: str | os.PathLike[str]) -> Graph:
    """The graph of a TOML file, checked; where it has no R, the one that frees most weights.

    Args:
        path: of a file such as the one below; `hdnn graph check` reads the same.

    Returns:
        The graph.

    Raises:
        SparsityError: if the file cannot be read, is no valid TOML, describes no graph, or breaks
            the locality condition.

    Examples:
        >>> from pathlib import Path
        >>> from hdnn import distributed
        >>> _ = Path("plant.toml").write_text('''
        ... names = ["pump", "valve", "tank"]
        ... R = [["pump", "valve"], ["valve", "tank"]]
        ... ''')
        >>> distributed.read_graph("plant.toml")
        Graph(3 nodes, 2 links in use)
    """
    return graph_of(read_table(path), str(path))


def graph_of(table: dict[str, Any], name: str = "the graph") -> Graph:
    """The graph that a table describes."""
    return patterns_of(table, name).graph()


def read_table(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a file says, before it is checked."""
    try:
        with open(as_path(path), "rb", opener=_at_once) as file:
            pieces = iter(lambda: file.read(PIECE), b"")
            content = b"".join(islice(pieces, LARGEST_FILE // PIECE + 1))
        if len(content) > LARGEST_FILE:
            raise SparsityError(
                f"{path} is too large for a graph: more than {LARGEST_FILE / 2**20:.0f} MiB."
            )
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SparsityError(f"cannot read the graph {path}: it is not a text file.") from error
    except (OSError, ValueError) as error:
        if isinstance(error, HDNNError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise SparsityError(f"cannot read the graph {path}: {reason}.") from error
    table = _plain(text)
    if table is None and len(text) > LARGEST_TEXT:
        raise SparsityError(
            f"{path} is too large for a graph that says more than whole numbers and lists of them, "
            "or it has a mistake; write nodes = 8, R = [[0, 1], ..] and the like, and nothing else."
        )
    try:
        return table or tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a number may be too long for Python
        raise SparsityError(f"{path} is no valid TOML: {error}.") from error


def _at_once(path: str, flags: int) -> int:
    """Open a file without waiting: a pipe that nobody writes to counts as empty."""
    found = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    os.set_blocking(found, True)
    return found


def _plain(text: str) -> dict[str, Any] | None:
    """The table of a file with nothing but whole numbers and lists of them, in a tenth of the time.

    Such lists are the same in JSON, but for comments and a trailing comma. Returns None for
    anything else, and for mistakes: tomllib then reads or refuses the file.
    """
    text = COMMENT.sub("", text.replace("\r\n", "\n"))
    table: dict[str, Any] = {}
    done = 0
    for entry in ENTRY.finditer(text):
        key, value = entry.groups()
        if text[done : entry.start()].strip(" \t\n") or key in table:
            return None
        try:
            table[key] = json.loads(LAST_COMMA.sub("", value))
        except (ValueError, RecursionError):
            return None
        done = entry.end()
    return None if text[done:].strip(" \t\n") else table


def patterns_of(table: dict[str, Any], name: str = "the graph") -> GraphPatterns:
    """The patterns that a table describes, each of them checked."""
    unknown = sorted(set(table) - set(KEYS))
    if unknown:
        raise SparsityError(
            f"{name} has {quoted(unknown[0])}, but only {', '.join(KEYS)} are known."
        )
    names = naming.names_of(table, name)
    table = naming.numbered(table, names, name)
    nodes = _nodes(table, name)
    columns = naming.columns_of(table, names, nodes, name)
    S = _pairs(table, "edges", nodes, name) if "edges" in table else None
    if S is None and "R" not in table:
        raise SparsityError(f"{name} has neither edges nor R; give one of them.")
    sizes = _sizes(table.get("sizes", 1), nodes, name)
    if "R" in table:
        R = _pattern(table, "R", nodes, name)
    else:
        assert S is not None
        if "T" in table:
            raise SparsityError(f"{name} has a T but no R; R = [] links nobody.")
        R = _designed(S, sizes, name)
    T = _pattern(table, "T", nodes, name) if "T" in table else alone(nodes)
    return GraphPatterns(R, T, S, sizes, names, columns)


def table_of(patterns: GraphPatterns) -> dict[str, Any]:
    """The table that describes these patterns."""
    alike = len(set(patterns.sizes)) == 1
    table: dict[str, Any] = {"nodes": patterns.nodes}
    if patterns.S is not None:
        table["edges"] = edges_of(patterns.S)
    table["R"] = _short(patterns.R)
    if alone(patterns.nodes) != patterns.T:
        table["T"] = _short(patterns.T)
    table["sizes"] = patterns.sizes[0] if alike else list(patterns.sizes)
    if patterns.names:
        table["names"] = list(patterns.names)
    if patterns.columns:
        called = patterns.names or range(patterns.nodes)
        table["columns"] = {column: called[node] for column, node in patterns.columns.items()}
    return table


def to_toml(table: dict[str, Any]) -> str:
    """The text of a file that has this table."""
    lines = []
    for key, value in table.items():
        if isinstance(value, dict):
            continue
        text = f"{key} = {toml_value(value)}"
        if len(text) > 100 and isinstance(value, list):
            whole = any(isinstance(row, list) and len(row) != 2 for row in value)
            text = f"{key} = [\n{_wrapped(value, 1 if whole else 8)}]"
        lines.append(text)
    for key, value in table.items():  # tables come last
        if isinstance(value, dict):
            lines += ["", f"[{key}]"]
            lines += [f"{toml_value(name)} = {toml_value(one)}" for name, one in value.items()]
    return "\n".join(lines) + "\n"


def edges_of(links: Links) -> list[list[int]]:
    """The links of a symmetric pattern, each once."""
    return [[i, k] for i, row in enumerate(links) for k in row if i < k]


def matrix_of(links: Links) -> list[list[int]]:
    """A pattern as rows of zeros and ones."""
    found = [[0] * len(links) for _ in links]
    for i, row in enumerate(links):
        for k in row:
            found[i][k] = 1
    return found


def _short(links: Links) -> list[list[int]]:
    """As a list of links where that is enough, else as a matrix."""
    edges = edges_of(links)
    return edges if from_edges(len(links), edges) == links else matrix_of(links)


def _wrapped(rows: list[Any], count: int) -> str:
    parts = (rows[k : k + count] for k in range(0, len(rows), count))
    return "".join(f"    {', '.join(map(toml_value, part))},\n" for part in parts)


def _nodes(table: dict[str, Any], name: str) -> int:
    if "nodes" not in table:
        raise SparsityError(
            f"{name} does not say how many nodes there are; add e.g. nodes = 8, or their names."
        )
    nodes = table["nodes"]
    if not _whole(nodes, 1, MOST_NODES):
        raise SparsityError(
            f"nodes of {name} must be a whole number from 1 to {MOST_NODES}, but is {shown(nodes)}."
        )
    return nodes


def _sizes(given: Any, nodes: int, name: str) -> tuple[int, ...]:
    sizes = given if isinstance(given, list) else [given] * nodes
    if len(sizes) != nodes:
        raise SparsityError(f"sizes of {name} are {len(sizes)}, but there are {nodes} nodes.")
    for size in sizes if sizes is given else [given]:
        if not _whole(size, 1, MOST_FEATURES):
            raise SparsityError(
                f"sizes of {name} must be a whole number from 1 to {MOST_FEATURES}, or one for "
                f"each node, but there is {shown(size)}."
            )
    return tuple(sizes)


def _pairs(table: dict[str, Any], key: str, nodes: int, name: str, other: str = "") -> Links:
    given, needed = table[key], f"{key} of {name} must be pairs of nodes"
    if not isinstance(given, list):
        raise SparsityError(f"{needed} from 0 to {nodes - 1}{other}, but is {shown(given)}.")
    return from_edges(nodes, given, needed, other)


def _pattern(table: dict[str, Any], key: str, nodes: int, name: str) -> Links:
    """A pattern of a file; square rows are a matrix, but with two nodes they may be two links."""
    rows = table[key]
    square = isinstance(rows, list) and len(rows) == nodes
    square = square and all(isinstance(row, list) and len(row) == nodes for row in rows)
    if not square or (nodes == 2 and not rows[0][0] == rows[1][1] == 1):
        other = f", or a matrix of {nodes} rows of {nodes} zeros and ones"
        return _pairs(table, key, nodes, name, other)
    for i, row in enumerate(rows):
        for entry in row:
            if entry not in (0, 1):
                raise SparsityError(
                    f"the matrix {key} of {name} must have zeros and ones only, but row {i} has "
                    f"{shown(entry)}."
                )
    return links_of(key, tuple(tuple(k for k, one in enumerate(row) if one) for row in rows))


def _designed(S: Links, sizes: tuple[int, ...], name: str) -> Links:
    if len(S) > MOST_DESIGNED:
        raise SparsityError(
            f"{name} has no R, and for {len(S)} nodes none can be found in a short time; give R."
        )
    return links_of("R", sparsity.design_R(matrix_of(S), sizes, connected=True).R)


def _whole(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
