"""Who may talk to whom: a graph of nodes as lists of neighbours, for any number of nodes.

`hdnn.sparsity` has the paper's algebra on (M, M) matrices; here the same patterns are kept as lists
of neighbours, whose size grows with the links and not with the square of the nodes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from hdnn.base.search import breadth_first
from hdnn.errors import SparsityError, positive_int
from hdnn.sparsity import Sparsity, binary, locality
from hdnn.sparsity.locality import Links, Needs, links_of_rows, of_keys, once, rows_of


def links_of(name: str, given: Any) -> Links:
    """A pattern as lists of neighbours: from such lists, or from a binary matrix."""
    if isinstance(given, tuple) and {*map(type, given)} <= {tuple}:
        _check_rows(name, given)
        links = given
    else:
        matrix = binary(name, given)
        if matrix.ndim != 2:
            raise SparsityError(f"{name} must be (M, M), but has shape {tuple(matrix.shape)}.")
        links = locality.links_of_rows(locality.of_matrix(matrix))
        _check_rows(name, links)
    return links


def _check_rows(name: str, links: Links) -> None:
    """Raise unless each row has its own node and is in order."""
    if {*map(type, chain.from_iterable(links))} <= {int}:
        with contextlib.suppress(OverflowError):
            rows, M = rows_of(links), len(links)
            keys, known = rows.keys, (rows.nodes >= 0) & (rows.nodes < M)
            with_itself = np.count_nonzero(rows.nodes == keys // M) == M
            if known.all() and (np.diff(keys) > 0).all() and with_itself:
                return
    for i, row in enumerate(links):
        if i not in row:
            raise SparsityError(
                f"every node is its own neighbour, but {name} does not link node {i} to itself; "
                f"use {name} + I."
            )
        if any(k not in range(len(links)) for k in row) or list(row) != sorted(set(row)):
            raise SparsityError(
                f"{name} must list the neighbours of each node once, in ascending order and from "
                f"0 to {len(links) - 1}, but has {shown(row)} for node {i}."
            )


def from_edges(
    nodes: int, edges: Iterable[Any], needed: str = "an edge is a pair of nodes", other: str = ""
) -> Links:
    """The neighbours that undirected edges make, each node with itself.

    An error begins with what is `needed`, and names what may be given instead, if anything.
    """
    pairs = [*edges]
    if not _are_pairs(pairs, nodes):
        bad = next(pair for pair in pairs if not _are_pairs([pair], nodes))
        raise SparsityError(f"{needed} from 0 to {nodes - 1}{other}, but has {shown(bad)}.")
    ends = np.fromiter(chain.from_iterable(pairs), np.int64, 2 * len(pairs))
    i, k = ends.reshape(-1, 2).T
    itself = np.arange(nodes)
    keys = np.concatenate([i * nodes + k, k * nodes + i, itself * nodes + itself])
    return links_of_rows(of_keys(once(keys), nodes))


def _are_pairs(pairs: list[Any], nodes: int) -> bool:
    if not ({*map(type, pairs)} <= {list, tuple} and {*map(len, pairs)} <= {2}):
        return False
    ends = [*chain.from_iterable(pairs)]
    return {*map(type, ends)} <= {int} and (not ends or 0 <= min(ends) <= max(ends) < nodes)


def shown(value: Any) -> str:
    """A value as a short text."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # Python writes no number of thousands of digits
        return "a huge number"
    return text if len(text) <= 60 else f"{text[:57]}..."


def alone(nodes: int) -> Links:
    """The identity: each node is its only neighbour."""
    return tuple([(i,) for i in range(nodes)])


def transposed(links: Links) -> Links:
    """The transposed pattern: of each node, the nodes in whose row it is."""
    return links_of_rows(locality.transpose(rows_of(links)))


def union(*patterns: Links) -> Links:
    """1 where any pattern is."""
    if len(patterns) == 1:
        return patterns[0]
    keys = once(np.concatenate([rows_of(links).keys for links in patterns]))
    return links_of_rows(of_keys(keys, len(patterns[0])))


class Graph:
    """M nodes, the pattern R of K, the pattern T of X or J, and the links S that exist.

    Node i owns `sizes[i]` features: the pair `(p[i], q[i])` of H2 and its relatives, or a piece of
    y of H1. Messages travel along the links of R and T only.

    Args:
        R: one pattern or one a layer, as binary matrices or as tuples of neighbours.
        T: likewise, symmetric; by default the identity.
        S: symmetric; where given, the locality condition `T R^T R + R^T R T <= S` is checked
            (eq:sparsity_invariance).
        sizes: the features of each node, or one number for all; by default 1.
        names: of the nodes, if there are any, for messages and names of files.

    Raises:
        SparsityError: if a pattern is not binary, misses a node's link to itself or is not
            symmetric where it must be, if patterns, sizes or names are not for the same nodes or
            layers, or if the locality condition does not hold.
        ShapeError: if a size is no whole number >= 1.

    Examples:
        >>> from hdnn.distributed import Graph
        >>> chain = Graph(R=[[1, 1, 0], [0, 1, 1], [0, 0, 1]], sizes=2)
        >>> chain
        Graph(3 nodes, 2 links in use)
        >>> chain.dependency()  # the nodes that each node needs
        ((0, 1), (0, 1, 2), (1, 2))
    """

    def __init__(
        self,
        R: Any,
        T: Any = None,
        S: Any = None,
        sizes: int | Sequence[int] | None = None,
        names: Sequence[str] = (),
    ) -> None:
        self.R = _patterns("R", R)
        self.nodes = len(self.R[0])
        self.T = (alone(self.nodes),) if T is None else _patterns("T", T)
        if len(self.R) > 1 and len(self.T) > 1 and len(self.R) != len(self.T):
            raise SparsityError(f"R is for {len(self.R)} layers, but T is for {len(self.T)}.")
        self.S = None if S is None else links_of("S", S)
        for name, patterns in (("R", self.R), ("T", self.T), ("S", (self.S,) if self.S else ())):
            for size in map(len, patterns):
                if size != self.nodes:
                    raise SparsityError(
                        f"{name} is for {size} nodes, but the graph has {self.nodes}."
                    )
        for pattern in self.T:
            _check_symmetric("T", pattern, "because J is skew-symmetric; use T + T^T")
        if sizes is None or isinstance(sizes, int):
            sizes = (1 if sizes is None else sizes,) * self.nodes
        if len(sizes) != self.nodes:
            raise SparsityError(f"there are {len(sizes)} sizes, but the graph has {self.nodes}.")
        if not ({*map(type, sizes)} <= {int} and min(sizes) >= 1):
            sizes = [positive_int("the size of a node", size) for size in sizes]
        self.sizes, self.names = tuple(sizes), tuple(names)
        if self.names and len(self.names) != self.nodes:
            raise SparsityError(
                f"there are {len(self.names)} names, but the graph has {self.nodes} nodes."
            )
        if self.S is not None:
            _check_symmetric("S", self.S, "because messages travel both ways; use S + S^T")
            self._check_local(self.S)

    @property
    def layers(self) -> int | None:
        """How many layers the patterns are for, or None where all have the same."""
        most = max(len(self.R), len(self.T))
        return None if most == 1 else most

    def R_of(self, layer: int) -> Links:
        """The pattern R of a layer, as lists of neighbours."""
        return self.R[layer if len(self.R) > 1 else 0]

    def T_of(self, layer: int) -> Links:
        """The pattern T of a layer, as lists of neighbours."""
        return self.T[layer if len(self.T) > 1 else 0]

    @cached_property
    def used(self) -> Links:
        """`R + R^T + T` over all layers: the links that carry messages."""
        R = union(*dict.fromkeys(self.R))
        return union(R, transposed(R), *dict.fromkeys(self.T))

    def dependency(self, layer: int = 0) -> Links:
        """`T R^T R + R^T R T`: the nodes that updates of each node in this layer depend on."""
        return links_of_rows(self._needs(layer).rows())

    def _needs(self, layer: int, S: Links | None = None) -> Needs:
        T, R = rows_of(self.T_of(layer)), rows_of(self.R_of(layer))
        return Needs(T, R, None if S is None else rows_of(S))

    def _check_local(self, S: Links) -> None:
        beyond: set[tuple[int, int]] = set()
        reason, seen = "", set()
        for j in range(self.layers or 1):
            patterns = id(self.T_of(j)), id(self.R_of(j))
            if patterns not in seen:
                seen.add(patterns)
                found = self._needs(j, S).breaches(most=5)
                beyond.update((i, k) for i, k, _, _ in found.pairs)
                reason = reason or found.why
        if beyond:
            raise locality.broken(sorted(beyond), reason, label=self.label)

    def tree(self, root: int = 0) -> Tree:
        """A breadth-first tree of the links in use, or of S where those do not reach all nodes."""
        return tree_of(self.used, self.S, root, self.called(root))

    def key(self, node: int) -> str:
        """What the files of a node are called by."""
        return self.names[node] if self.names else f"{node:05d}"

    def called(self, node: int) -> str:
        """How a node is called in a sentence."""
        return f"node {self.label(node)}"

    def label(self, node: int) -> str:
        """The name of a node, or its number."""
        return self.names[node] if self.names else str(node)

    def digest(self) -> str:
        """The same for equal graphs only."""
        content = json.dumps([self.R, self.T, self.S, self.sizes])
        return hashlib.sha256(content.encode()).hexdigest()

    def __repr__(self) -> str:
        links = (sum(map(len, self.used)) - self.nodes) // 2
        return f"Graph({self.nodes} nodes, {links} links in use)"

    @classmethod
    def of(cls, sparsity: Sparsity, sizes: Sequence[int]) -> Graph:
        """The graph of a block-sparse network whose nodes have these sizes."""
        R = sparsity.R if sparsity.R.ndim == 3 else [sparsity.R]
        return cls([*R], None if sparsity.T is None else [sparsity.T], sparsity.S, sizes)

    @classmethod
    def ring(cls, nodes: int, size: int = 1) -> Graph:
        """Each of so many nodes, of `size` features each, with its two neighbours on a ring."""
        nodes = positive_int("nodes", nodes)
        edges = [(i, (i + 1) % nodes) for i in range(nodes) if nodes > 1]
        return cls(from_edges(nodes, edges), sizes=size)

    @classmethod
    def grid(cls, rows: int, columns: int, size: int = 1) -> Graph:
        """Each node, of `size` features, with its up to four neighbours on a grid."""
        rows, columns = positive_int("rows", rows), positive_int("columns", columns)
        nodes = range(rows * columns)
        edges = [(i, i + 1) for i in nodes if (i + 1) % columns]
        edges += [(i, i + columns) for i in nodes[:-columns]]
        return cls(from_edges(rows * columns, edges), sizes=size)


def tree_of(used: Links, S: Links | None = None, root: int = 0, called: str = "") -> Tree:
    """A breadth-first tree of the links in use, or of S where those do not reach all nodes."""
    for links in (used, S):
        if links is not None:
            parent, depth = breadth_first(links, root)
            if min(depth) >= 0:
                return Tree(root, tuple(parent), tuple(depth))
    raise SparsityError(
        f"the graph is not connected: not all nodes can be reached from "
        f"{called or f'node {root}'} along "
        "R, T or S, so they cannot learn together; add links."
    )


class Tree(NamedTuple):
    """Parents and depths of all nodes, counted from the root."""

    root: int
    parent: tuple[int, ...]
    depth: tuple[int, ...]


def _patterns(name: str, given: Any) -> tuple[Links, ...]:
    """One pattern, or one a layer."""
    levels, inner = 0, given
    while isinstance(inner, (list, tuple)) and inner:
        levels, inner = levels + 1, inner[0]
    if levels + getattr(inner, "ndim", 0) == 3:
        return tuple(links_of(name, one) for one in given)
    return (links_of(name, given),)


def _check_symmetric(name: str, links: Links, why: str) -> None:
    rows = rows_of(links)
    keys, back = rows.keys, locality.transpose(rows).keys
    if np.array_equal(keys, back):
        return
    i, k = divmod(int(np.setdiff1d(keys, back, assume_unique=True)[0]), len(links))
    raise SparsityError(
        f"{name} must be symmetric, but it links {i} to {k} and not {k} to {i}, {why}."
    )
