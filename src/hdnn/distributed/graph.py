"""Who may talk to whom: a graph of nodes as lists of neighbours, for any number of nodes.

`hdnn.sparsity` has the paper's algebra on (M, M) matrices; here the same patterns are kept as lists
of neighbours, whose size grows with the links and not with the square of the nodes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

from hdnn.errors import SparsityError, positive_int
from hdnn.sparsity import Sparsity, binary

Links = tuple[tuple[int, ...], ...]  # of each node: the nodes in its row, itself included


def links_of(name: str, given: Any, nodes: int | None = None) -> Links:
    """A pattern as lists of neighbours: from such lists, or from a binary matrix."""
    if isinstance(given, tuple) and all(isinstance(row, tuple) for row in given):
        rows = given
    else:
        matrix = binary(name, given)
        if matrix.ndim != 2:
            raise SparsityError(f"{name} must be (M, M), but has shape {tuple(matrix.shape)}.")
        rows = tuple(tuple(row.nonzero()[:, 0].tolist()) for row in matrix)
    for i, row in enumerate(rows):
        if i not in row:
            raise SparsityError(
                f"every node is its own neighbour, but {name} does not link node {i} to itself; "
                f"use {name} + I."
            )
        if any(not 0 <= k < len(rows) for k in row) or list(row) != sorted(set(row)):
            raise SparsityError(
                f"{name} must list the neighbours of each node once, in ascending order and from "
                f"0 to {len(rows) - 1}, but has {row} for node {i}."
            )
    if nodes is not None and len(rows) != nodes:
        raise SparsityError(f"{name} is for {len(rows)} nodes, but the graph has {nodes}.")
    return rows


def from_edges(nodes: int, edges: Iterable[Sequence[int]]) -> Links:
    """The neighbours that undirected edges make, each node with itself."""
    rows: list[set[int]] = [{i} for i in range(nodes)]
    for edge in edges:
        ends = list(edge)
        if len(ends) != 2 or not all(
            isinstance(i, int) and not isinstance(i, bool) and 0 <= i < nodes for i in ends
        ):
            raise SparsityError(
                f"an edge is a pair of nodes from 0 to {nodes - 1}, but one is {edge!r}."
            )
        i, k = ends
        rows[i].add(k)
        rows[k].add(i)
    return tuple(tuple(sorted(row)) for row in rows)


def alone(nodes: int) -> Links:
    """The identity: each node is its only neighbour."""
    return tuple((i,) for i in range(nodes))


def transposed(links: Links) -> Links:
    """Of each node: the nodes in whose row it is."""
    columns: list[list[int]] = [[] for _ in links]
    for i, row in enumerate(links):
        for k in row:
            columns[k].append(i)
    return tuple(map(tuple, columns))


def union(*patterns: Links) -> Links:
    """1 where any pattern is."""
    if len(patterns) == 1:
        return patterns[0]
    return tuple(tuple(sorted(set().union(*rows))) for rows in zip(*patterns, strict=True))


def reach(node: int, *steps: Links) -> set[int]:
    """The nodes at the end of all ways that take one link of each pattern, in this order."""
    reached = {node}
    for step in steps:
        reached = {k for i in reached for k in step[i]}
    return reached


class Graph:
    """M nodes, the pattern R of K, the pattern T of X or J, and the links S that there are.

    Node i owns `sizes[i]` features: the pair (p[i], q[i]) of H2 and its relatives, or a piece of y
    of H1. R and T are one pattern or one a layer, given as binary matrices or as tuples of
    neighbours; T is the identity by default. Where S is given, it is symmetric and the locality
    condition T R^T R + R^T R T <= S is checked (eq:sparsity_invariance). Messages travel along
    the links of R and T only.
    """

    def __init__(
        self, R: Any, T: Any = None, S: Any = None, sizes: int | Sequence[int] | None = None
    ) -> None:
        self.R = _patterns("R", R)
        self.nodes = len(self.R[0])
        for pattern in self.R:
            links_of("R", pattern, self.nodes)
        self.T = (alone(self.nodes),) if T is None else _patterns("T", T)
        if len(self.R) > 1 and len(self.T) > 1 and len(self.R) != len(self.T):
            raise SparsityError(f"R is for {len(self.R)} layers, but T is for {len(self.T)}.")
        for pattern in self.T:
            links_of("T", pattern, self.nodes)
            _check_symmetric("T", pattern, "because J is skew-symmetric; use T + T^T")
        self.S = None if S is None else links_of("S", S, self.nodes)
        if sizes is None or isinstance(sizes, int):
            sizes = (1 if sizes is None else sizes,) * self.nodes
        if len(sizes) != self.nodes:
            raise SparsityError(f"there are {len(sizes)} sizes, but the graph has {self.nodes}.")
        self.sizes = tuple(positive_int("the size of a node", size) for size in sizes)
        if self.S is not None:
            _check_symmetric("S", self.S, "because messages travel both ways; use S + S^T")
            self._check_local(self.S)

    @property
    def layers(self) -> int | None:
        """How many layers the patterns are for, or None where all have the same."""
        most = max(len(self.R), len(self.T))
        return None if most == 1 else most

    def R_of(self, layer: int) -> Links:
        return self.R[layer if len(self.R) > 1 else 0]

    def T_of(self, layer: int) -> Links:
        return self.T[layer if len(self.T) > 1 else 0]

    @cached_property
    def used(self) -> Links:
        """R + R^T + T over all layers: the links that carry messages."""
        patterns = dict.fromkeys((*self.R, *(transposed(R) for R in self.R), *self.T))
        return union(*patterns)

    def dependency(self, layer: int = 0) -> Links:
        """T R^T R + R^T R T: on whom each node's forward and backward update depend."""
        T, R = self.T_of(layer), self.R_of(layer)
        columns = transposed(R)

        return tuple(
            tuple(sorted(reach(i, T, columns, R) | reach(i, columns, R, T)))
            for i in range(self.nodes)
        )

    def _check_local(self, S: Links) -> None:
        beyond: set[tuple[int, int]] = set()
        for j in range(self.layers or 1):
            for i, (needs, may) in enumerate(zip(self.dependency(j), S, strict=True)):
                beyond.update((i, k) for k in set(needs) - set(may))
        if beyond:
            pairs = ", ".join(f"{i} -> {k}" for i, k in sorted(beyond)[:4])
            more = " ..." if len(beyond) > 4 else ""
            raise SparsityError(
                "the patterns break the locality condition T R^T R + R^T R T <= S: nodes would "
                f"need {pairs}{more}, which S does not link; remove edges from R or T, or add "
                "links to S."
            )

    def tree(self, root: int = 0) -> Tree:
        """A breadth-first tree of the links in use, or of S where those do not reach all nodes."""
        for links in (self.used, self.S):
            found = None if links is None else _breadth_first(links, root)
            if found is not None:
                return found
        raise SparsityError(
            f"the graph is not connected: not all nodes can be reached from node {root} along "
            "R, T or S, so they cannot learn together; add links."
        )

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
        """Each node with its two neighbours on a ring."""
        edges = [(i, (i + 1) % nodes) for i in range(nodes) if nodes > 1]
        return cls(from_edges(nodes, edges), sizes=size)

    @classmethod
    def grid(cls, rows: int, columns: int, size: int = 1) -> Graph:
        """Each node with its up to four neighbours on a grid."""
        edges = [(i * columns + k, i * columns + k + 1) for i, k in _cells(rows, columns - 1)]
        edges += [(i * columns + k, (i + 1) * columns + k) for i, k in _cells(rows - 1, columns)]
        return cls(from_edges(rows * columns, edges), sizes=size)


class Tree:
    """Parents and depths of all nodes, counted from the root."""

    def __init__(self, root: int, parent: tuple[int, ...], depth: tuple[int, ...]) -> None:
        self.root, self.parent, self.depth = root, parent, depth


def _cells(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    return ((i, k) for i in range(rows) for k in range(columns))


def _patterns(name: str, given: Any) -> tuple[Links, ...]:
    """One pattern, or one a layer."""
    if isinstance(given, (list, tuple)) and given:
        first = given[0]
        if isinstance(first, (list, tuple)) and first and isinstance(first[0], (list, tuple)):
            return tuple(links_of(name, one) for one in given)
        if not isinstance(first, (list, tuple)) and getattr(first, "ndim", 1) == 2:
            return tuple(links_of(name, one) for one in given)
    if getattr(given, "ndim", 2) == 3:
        return tuple(links_of(name, one) for one in given)
    return (links_of(name, given),)


def _check_symmetric(name: str, links: Links, why: str) -> None:
    rows = [set(row) for row in links]
    for i, row in enumerate(links):
        for k in row:
            if i not in rows[k]:
                raise SparsityError(
                    f"{name} must be symmetric, but it links {i} to {k} and not {k} to {i}, {why}."
                )


def _breadth_first(links: Links, root: int) -> Tree | None:
    """The tree, or None if some node is out of reach."""
    parent, depth = [-1] * len(links), [-1] * len(links)
    depth[root] = 0
    front = [root]
    while front:
        after = []
        for i in front:
            for k in links[i]:
                if depth[k] < 0:
                    parent[k], depth[k] = i, depth[i] + 1
                    after.append(k)
        front = sorted(after)
    return None if min(depth) < 0 else Tree(root, tuple(parent), tuple(depth))
