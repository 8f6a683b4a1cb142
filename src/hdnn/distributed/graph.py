"""Graphs of nodes that own features, with links, from Python or from a TOML file.

    nodes = 8
    edges = [[0, 1], [1, 2]]          # S: nodes that may depend on each other
    R = [[0, 1]]                      # links of K; by default as many free weights as possible
    sizes = 1                         # number of feature pairs (p, q) of each node, or a list
    names = ["pump", "valve", ..]     # instead of nodes; numbers still work
    columns = {flow = "pump", ..}     # the node of each column of a table

Patterns are stored as lists of neighbours, whose size grows with the number of links, not with the
square of the number of nodes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from itertools import accumulate, islice
from typing import Any

import torch

from hdnn import sparsity
from hdnn.errors import (
    DataError,
    HDNNError,
    OptionError,
    choose,
    positive_int,
)
from hdnn.sparsity import Breach, Sparsity

# The neighbours of each node, including itself, in order.
Links = list[list[int]]

KEYS = ("nodes", "edges", "R", "sizes", "names", "columns")
NAME = re.compile(r"[^\W_]([\w .-]{0,62}[\w-])?")  # files are named after it
MOST_NODES = 200_000  # each process walks over all of them
MOST_DESIGNED = 1000  # number of nodes for which an R is found in seconds


class Graph:
    """Nodes that own features, the links between them, and the patterns of their weights.

    Args:
        nodes: the number of nodes; may be left out if `names` are given.
        edges: pairs of nodes that may depend on each other (S); if given, R must respect them.
        R: the links of K, as pairs of nodes or as a matrix of 0 and 1; by default the links within
            the edges that leave the most weights free.
        sizes: the number of feature pairs (p, q) of each node, or one number for all nodes.
        names: the names of the nodes, for messages and files.
        columns: the node of each column of a table, or the columns of each node.

    Raises:
        OptionError: if there are too many nodes, or if a link, size, name or column does not fit
            the nodes.

    Examples:
        >>> from hdnn.distributed import Graph
        >>> Graph(4, R=[[0, 1], [1, 2], [2, 3], [3, 0]], sizes=2)
        Graph(4 nodes, 4 links)
        >>> Graph(names=["pump", "valve"], R=[["pump", "valve"]]).label(1)
        'valve'
    """

    def __init__(
        self,
        nodes: int | None = None,
        *,
        edges: Any = None,
        R: Any = None,
        sizes: int | Sequence[int] = 1,
        names: Sequence[str] = (),
        columns: Mapping[str, Any] | None = None,
    ) -> None:
        self.names = _checked_names(names)
        if nodes is None:
            nodes = len(self.names)
        self.nodes = positive_int("nodes", nodes)
        if self.nodes > MOST_NODES:
            raise OptionError(
                f"a graph can have up to {MOST_NODES} nodes, but this graph has {self.nodes}."
            )
        if self.names and len(self.names) != self.nodes:
            raise OptionError(
                f"there are {len(self.names)} names, but {self.nodes} nodes."
            )
        if isinstance(sizes, int):
            sizes = [sizes] * self.nodes
        self.sizes = sparsity.node_sizes(sizes, self.nodes)
        # The first feature of each node, in one half of the full state.
        self.first = [0, *accumulate(self.sizes)]
        self._numbers = {name: number for number, name in enumerate(self.names)}
        self.columns = self._columns(columns or {})
        self.S = None if edges is None else self._pairs("edges", edges)
        self.R = self._designed() if R is None else self._pattern(R)
        # R + R^T: the links that carry messages.
        self.used = _union(self.R, sparsity.transposed(self.R))

    @property
    def talking(self) -> Links:
        """The used links, or all edges if these links do not connect all nodes that edges do."""
        if self.S is not None and len(sparsity.groups(self.used)) > 1:
            return _union(self.used, self.S)
        return self.used

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Graph:
        """The graph in a TOML file, whose keys are the arguments of this class.

        Raises:
            DataError: if the file cannot be read or is not valid TOML.
            OptionError: if the file does not describe a graph.
        """
        try:
            with open(path, "rb") as file:
                table = tomllib.load(file)
        except (OSError, ValueError, RecursionError) as error:
            raise DataError(
                f"cannot read the graph {path}, a TOML file: {error}."
            ) from error
        return cls.of(table, str(path))

    @classmethod
    def of(cls, table: Mapping[str, Any], where: str = "the graph") -> Graph:
        """The graph for a mapping with the keys of a file; errors name its origin, `where`."""
        for name in table:
            choose(f"{where}: the key", name, KEYS)
        try:
            return cls(**table)
        except (HDNNError, TypeError, AttributeError) as error:
            raise OptionError(f"{where}: {error}") from error

    @classmethod
    def ring(cls, nodes: int, size: int = 1) -> Graph:
        """Make a ring of nodes, each linked to its two neighbours."""
        links = [[i, (i + 1) % nodes] for i in range(nodes)]
        return cls(nodes, R=links, sizes=size)

    @classmethod
    def grid(cls, rows: int, columns: int, size: int = 1) -> Graph:
        """Make a grid of nodes, each linked to its neighbours (at most four)."""
        nodes = range(rows * columns)
        links = []
        for i in nodes:
            if (i + 1) % columns:
                links.append([i, i + 1])
            if i + columns in nodes:
                links.append([i, i + columns])
        return cls(len(nodes), R=links, sizes=size)

    # Properties

    @property
    def features(self) -> int:
        """The number n of features of all nodes together."""
        return 2 * sum(self.sizes)

    def places(self, nodes: Sequence[int], *, both: bool) -> torch.Tensor:
        """The indices of some nodes' features, in one half of the full state or in both (p, q)."""
        places: list[int] = []
        middle = self.features // 2
        for node in nodes:
            first = self.first[node]
            last = self.first[node + 1]
            places += range(first, last)
            if both:
                places += range(middle + first, middle + last)
        return torch.tensor(places)

    def breaches(self, most: int = 1000) -> list[Breach]:
        """Pairs of nodes that updates need but edges do not link, up to a given number."""
        if self.S is None:
            return []
        T = [[node] for node in range(self.nodes)]
        breaches = sparsity.breaches(T, self.R, self.S)
        return list(islice(breaches, most))

    def check(self) -> None:
        """Raise an `OptionError` unless the graph is connected and updates need only links."""
        sparsity.check_no_breach(self.breaches(5), self.label)
        apart = sparsity.groups(self.talking)
        if len(apart) > 1:
            first = self.label(apart[0][0])
            second = self.label(apart[1][0])
            raise OptionError(
                f"the graph has {len(apart)} connected components, but nodes learn together only "
                f"if they are connected; add a link between {first} and {second}."
            )

    def label(self, node: int) -> str:
        """The name of a node, or its number."""
        if self.names:
            return self.names[node]
        return str(node)

    def key(self, node: int) -> str:
        """A name for the files of a node: node-00003 or node-pump."""
        if self.names:
            return f"node-{self.names[node]}"
        return f"node-{node:05d}"

    def digest(self) -> str:
        """A string that is the same only for equal graphs."""
        content = json.dumps([self.R, self.S, self.sizes])
        return hashlib.sha256(content.encode()).hexdigest()

    def table(self) -> dict[str, Any]:
        """The constructor arguments of this graph, in a form that TOML and JSON can hold."""
        table: dict[str, Any] = {"nodes": self.nodes}
        if self.S is not None:
            table["edges"] = _edges(self.S)
        # Links if they describe R completely, otherwise a matrix.
        table["R"] = _edges(self.R)
        if self.used != self.R:
            table["R"] = _matrix(self.R).int().tolist()
        table["sizes"] = list(self.sizes)
        if self.names:
            table["names"] = list(self.names)
        if self.columns:
            table["columns"] = dict(self.columns)
        return table

    def patterns(self) -> Sparsity:
        """The patterns and sizes for the option `sparsity` of a single network of all nodes."""
        return Sparsity(_matrix(self.R), sizes=self.sizes)

    def __repr__(self) -> str:
        links = len(_edges(self.used))
        return f"Graph({self.nodes} nodes, {links} links)"

    # Arguments

    def _designed(self) -> Links:
        """The R that leaves the most weights free."""
        if self.S is None or self.nodes > MOST_DESIGNED:
            raise OptionError(
                f"R is missing; without R, give edges and at most {MOST_DESIGNED} nodes."
            )
        designed = sparsity.design(_matrix(self.S), self.sizes)
        return sparsity.links_of(designed.R)

    def _number(self, node: Any, where: str) -> int:
        """The number of a node, which may be given by name."""
        if isinstance(node, str) and node in self._numbers:
            return self._numbers[node]
        if type(node) is int and 0 <= node < self.nodes:
            return node
        names = "".join(f", {name}" for name in self.names[:8])
        raise OptionError(
            f"{where} has {node!r:.60}, but nodes are 0 to {self.nodes - 1}{names}."
        )

    def _pairs(self, key: str, pairs: Any) -> Links:
        """The neighbours of each node according to undirected links, including itself."""
        try:
            links = [(i, k) for i, k in pairs]
        except (TypeError, ValueError) as error:
            raise OptionError(
                f"{key} must be pairs of nodes, but is {pairs!r:.60}."
            ) from error
        rows = [{i} for i in range(self.nodes)]
        for first, second in links:
            i = self._number(first, key)
            k = self._number(second, key)
            rows[i].add(k)
            rows[k].add(i)
        return [sorted(row) for row in rows]

    def _pattern(self, R: Any) -> Links:
        """R from pairs of nodes, or from a matrix with ones on its diagonal."""
        if not self._is_matrix(R):
            return self._pairs("R", R)
        links = sparsity.links_of(sparsity.binary("R", R))
        if any(i not in row for i, row in enumerate(links)):
            raise OptionError(
                "every node is its own neighbour: R needs ones on its diagonal."
            )
        return links

    def _is_matrix(self, R: Any) -> bool:
        """True for a matrix of 0 and 1, False for links."""
        if isinstance(R, torch.Tensor):
            return True
        if not isinstance(R, (list, tuple)):
            return False
        sizes = [len(row) for row in R if isinstance(row, (list, tuple))]
        if sizes != [self.nodes] * self.nodes:
            return False
        if self.nodes != 2:
            return True
        # [[1, 0], [0, 1]] is one link between two nodes, given from both ends.
        return R[0][0] == R[1][1] == 1 and bool(R[0][1] or R[1][0])

    def _columns(self, owners: Mapping[str, Any]) -> dict[str, int]:
        """The node of each column."""
        columns: dict[str, int] = {}
        for key, value in owners.items():
            node = value
            owned = [key]
            if isinstance(value, list):
                node = key
                owned = value
            if isinstance(node, str) and node.isdecimal():
                node = int(node)
            for column in owned:
                if column in columns:
                    raise OptionError(
                        f"columns assigns {column!r} to two nodes; assign it to one."
                    )
                columns[column] = self._number(node, "columns")
        return columns


def _checked_names(names: Sequence[str]) -> tuple[str, ...]:
    seen: set[str] = set()
    for name in names:
        fits = isinstance(name, str) and NAME.fullmatch(name)
        if not fits or name.isdecimal() or name.casefold() in seen:
            raise OptionError(
                f"names has {name!r:.60}, but a name has 1 to 64 letters, digits, blanks, dots, - "
                "and _, begins with a letter or a digit, is not a number, and is used only once."
            )
        seen.add(name.casefold())
    return tuple(names)


def _union(first: Links, second: Links) -> Links:
    return [sorted({*a, *b}) for a, b in zip(first, second, strict=True)]


def _matrix(links: Links) -> torch.Tensor:
    pattern = torch.zeros(len(links), len(links), dtype=torch.bool)
    for i, row in enumerate(links):
        pattern[i, row] = True
    return pattern


def _edges(links: Links) -> list[list[int]]:
    return [[i, k] for i, row in enumerate(links) for k in row if i < k]
