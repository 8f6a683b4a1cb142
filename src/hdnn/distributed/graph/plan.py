"""Which part owns which node, and what a part sends, receives and multiplies in each round.

All sums are taken in the order of the nodes' numbers, one term after the other, on any part:
that is why results are the same bit for bit however the nodes are shared out.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from hdnn.distributed.graph.graph import Graph, Links, transposed, union
from hdnn.errors import SparsityError, choose, positive_int, require

METHODS = ("auto", "metis", "bands")  # of sharing out nodes


class Plan:
    """A graph and the owner of each node: part 0 .. parts - 1.

    Args:
        graph: the graph.
        owner: the part of each node, as `partition` finds it.
        root: the node at the top of the tree, whose part has the labels.

    Raises:
        SparsityError: if there is not one owner for each node, a part owns none, or the graph is
            not connected.

    Examples:
        >>> from hdnn.distributed import Graph, Plan
        >>> plan = Plan(Graph.ring(6), owner=[0, 0, 0, 1, 1, 1])
        >>> plan.parts, plan.nodes_of, plan.peers(0)
        (2, ((0, 1, 2), (3, 4, 5)), (1,))
    """

    def __init__(self, graph: Graph, owner: Sequence[int], root: int = 0) -> None:
        self.graph, self.owner = graph, tuple(owner)
        if len(self.owner) != graph.nodes:
            raise SparsityError(
                f"{len(self.owner)} nodes have an owner, but the graph has {graph.nodes} nodes."
            )
        self.parts = max(self.owner) + 1
        if set(self.owner) != set(range(self.parts)):
            raise SparsityError(f"each of the {self.parts} parts must own a node; use fewer parts.")
        self.tree = graph.tree(root)

    @classmethod
    def whole(cls, graph: Graph) -> Plan:
        """One part owns all."""
        return cls(graph, [0] * graph.nodes)

    @classmethod
    def each(cls, graph: Graph) -> Plan:
        """Every node is a part of its own."""
        return cls(graph, range(graph.nodes))

    @cached_property
    def nodes_of(self) -> tuple[tuple[int, ...], ...]:
        """The nodes of each part, in ascending order."""
        found: list[list[int]] = [[] for _ in range(self.parts)]
        for node, part in enumerate(self.owner):
            found[part].append(node)
        return tuple(map(tuple, found))

    def peers(self, part: int) -> tuple[int, ...]:
        """The parts that this one is linked to."""
        links, owner = self.graph.used, self.owner
        found = {owner[k] for i in self.nodes_of[part] for k in links[i]}
        tree = self.tree
        found |= {owner[tree.parent[i]] for i in self.nodes_of[part] if i != tree.root}
        found |= {owner[i] for i, up in enumerate(tree.parent) if up >= 0 and owner[up] == part}
        return tuple(sorted(found - {part}))

    def digest(self) -> str:
        """The same for equal graphs with equal owners only."""
        content = json.dumps([self.graph.digest(), self.owner, self.tree.root])
        return hashlib.sha256(content.encode()).hexdigest()


def partition(graph: Graph, parts: int, method: str = "auto") -> list[int]:
    """The part of each node: by METIS (extra `graph`), or in bands of a breadth-first order.

    It changes how much has to be sent, not the results. All processes must get the same parts.

    Args:
        graph: the graph.
        parts: how many processes share its nodes.
        method: "metis", "bands", or "auto": METIS where it is installed and there are more nodes
            than parts.

    Returns:
        The number of the part of each node.

    Raises:
        ShapeError: if parts is no whole number >= 1.
        SparsityError: if there are more parts than nodes, or the graph is not connected.
        OptionError: if there is no such method.
        MissingExtraError: if METIS is asked for and is not installed.

    Examples:
        >>> from hdnn.distributed import Graph, partition
        >>> partition(Graph.grid(2, 4), parts=2, method="bands")
        [0, 0, 0, 1, 0, 1, 1, 1]
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


class Part:
    """The nodes of one part: first those without a link to another part, then the others.

    Their features are rows, one after the other; a state is (rows, batch).
    """

    def __init__(self, plan: Plan, number: int, scale: int = 1) -> None:
        self.plan, self.number = plan, number
        owner, used = plan.owner, plan.graph.used
        mine = plan.nodes_of[number]
        inner = [i for i in mine if all(owner[k] == number for k in used[i])]
        edge = [i for i in mine if any(owner[k] != number for k in used[i])]
        self.nodes = (*inner, *edge)
        self.sizes = {i: scale * plan.graph.sizes[i] for i in range(plan.graph.nodes)}
        self.first = offsets(self.nodes, self.sizes)
        self.rows = sum(self.sizes[i] for i in self.nodes)
        self.inner = sum(self.sizes[i] for i in inner)  # rows that need no other part


def offsets(nodes: Sequence[int], sizes: dict[int, int], start: int = 0) -> dict[int, int]:
    """Where each node begins, one after the other."""
    found = {}
    for node in nodes:
        found[node] = start
        start += sizes[node]
    return found


def rows_at(blocks: Iterable[tuple[int, int]]) -> Tensor:
    """The rows of some blocks, given the first row of each and their number."""
    rows = [first + c for first, count in blocks for c in range(count)]
    return torch.tensor(rows, dtype=torch.int64)


class Round(NamedTuple):
    """Messages of one round: the rows to send to each part, and the places for what it sends."""

    out: list[tuple[int, Tensor]]
    into: list[tuple[int, Tensor]]


class Stencil:
    """Products with a matrix K in BlkSprs(R) and with its transpose, for the rows of one part.

    The free entries of K are one vector: node after node, each block row by row, neighbours in
    ascending order. `columns` are the rows of the extended state (own rows, then those of other
    parts, the halo) that each entry meets. To K^T z each node contributes some rows for each of its
    neighbours; contributions to other parts' nodes are sent to them. Where R changes from layer to
    layer the entries are those of any layer, and messages those of each.
    """

    def __init__(self, part: Part, patterns: Sequence[Links]) -> None:
        self.part, sizes = part, part.sizes
        links = union(*dict.fromkeys(patterns))
        self.links = {i: links[i] for i in part.nodes}
        self.widths = {i: sum(sizes[k] for k in links[i]) for i in part.nodes}
        blocks = {i: sizes[i] * self.widths[i] for i in part.nodes}
        # Where the entries of each node begin, and where its contributions do.
        self.entry, self.entries = offsets(part.nodes, blocks), sum(blocks.values())
        self.contribution = offsets(part.nodes, self.widths)
        self.contributions = sum(self.widths.values())
        inner = (i for i in part.nodes if part.first[i] < part.inner)
        self.inner_contributions = sum(self.widths[i] for i in inner)
        self._find_columns()
        self._find_gathered(transposed(links))
        found = {pattern: self._rounds(pattern) for pattern in dict.fromkeys(patterns)}
        self.rounds = tuple(found[pattern] for pattern in patterns)
        self.free = None  # all entries, unless a layer has fewer than another
        if len(found) > 1:
            self.free = torch.stack([self._mask(pattern) for pattern in patterns])

    def _find_columns(self) -> None:
        """The extended state: where each node begins in it, and which of its rows entries meet."""
        part, sizes, owner = self.part, self.part.sizes, self.part.plan.owner
        halo = {k for i in part.nodes for k in self.links[i] if owner[k] != part.number}
        ordered = sorted(halo, key=lambda k: (owner[k], k))
        self.place = {**part.first, **offsets(ordered, sizes, part.rows)}
        self.halo_rows = sum(sizes[k] for k in ordered)
        self.columns = {
            i: rows_at((self.place[k], sizes[k]) for k in self.links[i]) for i in part.nodes
        }

    def _find_gathered(self, back: Links) -> None:
        """Which contributions each own row is the sum of: (most neighbours, rows).

        The contributions are the own ones, a row of zeros, and those received, ordered by the
        sending part, the receiving node, and the node that they come from.
        """
        part, sizes = self.part, self.part.sizes
        self.received, self.received_rows = {}, 0  # of node k from node i: the first row
        for _, pairs in self._foreign(back):
            for k, i in pairs:
                self.received[k, i] = self.received_rows
                self.received_rows += sizes[k]
        most = max(len(back[k]) for k in part.nodes)
        self.gathered = torch.full((most, part.rows), self.contributions)
        for k in part.nodes:
            for d, i in enumerate(back[k]):
                if (k, i) in self.received:
                    begin = self.contributions + 1 + self.received[k, i]
                else:
                    begin = self._contribution(i, k)
                row = part.first[k]
                self.gathered[d, row : row + sizes[k]] = torch.arange(begin, begin + sizes[k])

    def _contribution(self, i: int, k: int) -> int:
        """The row where the contribution of the own node i to node k begins."""
        before = (other for other in self.links[i] if other < k)
        return self.contribution[i] + sum(self.part.sizes[other] for other in before)

    def _foreign(self, links: Links) -> list[tuple[int, list[tuple[int, int]]]]:
        """For each other part, in order: all links from an own node to one of its nodes."""
        part, owner = self.part, self.part.plan.owner
        found: dict[int, list[tuple[int, int]]] = {}
        for i in sorted(part.nodes):
            for k in links[i]:
                if owner[k] != part.number:
                    found.setdefault(owner[k], []).append((i, k))
        return sorted(found.items())

    def _rounds(self, pattern: Links) -> tuple[Round, Round]:
        """Gather the states of neighbours; reduce what nodes contribute to each other."""
        part, sizes = self.part, self.part.sizes
        there, back = self._foreign(pattern), self._foreign(transposed(pattern))

        def states(nodes: Iterable[int], begin: int = 0) -> Tensor:
            return rows_at((self.place[k] - begin, sizes[k]) for k in sorted({*nodes}))

        def given(pairs: list[tuple[int, int]]) -> Tensor:
            ordered = sorted(pairs, key=lambda pair: pair[::-1])
            return rows_at((self._contribution(i, k), sizes[k]) for i, k in ordered)

        def taken(pairs: list[tuple[int, int]]) -> Tensor:
            return rows_at((self.received[k, i], sizes[k]) for k, i in pairs)

        gather = Round(
            [(r, states(i for i, _ in pairs)) for r, pairs in back],
            [(r, states((k for _, k in pairs), part.rows)) for r, pairs in there],
        )
        reduce = Round(
            [(r, given(pairs)) for r, pairs in there], [(r, taken(pairs)) for r, pairs in back]
        )
        return gather, reduce

    def round(self, layer: int) -> tuple[Round, Round]:
        """How a layer gathers the states of neighbours, and reduces what they contribute."""
        return self.rounds[layer if len(self.rounds) > 1 else 0]

    def _mask(self, pattern: Links) -> Tensor:
        sizes = self.part.sizes
        rows = []
        for i in self.part.nodes:
            row = [k in pattern[i] for k in self.links[i] for _ in range(sizes[k])]
            rows += row * sizes[i]
        return torch.tensor(rows)
