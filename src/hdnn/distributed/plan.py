"""The plan of processes: the nodes they own, their peers, and the rows they exchange."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hdnn.distributed.graph import Graph
from hdnn.errors import OptionError, positive_int


def partition(graph: Graph, parts: int) -> list[int]:
    """The process that owns each node, chosen by METIS (extra `graph`) or, without it, in bands.

    The choice affects the messages, not the results. All processes must make the same choice.

    Args:
        graph: the graph.
        parts: the number of processes.

    Raises:
        OptionError: if there are more processes than nodes, or the graph is not connected.
    """
    graph.check()
    nodes = graph.nodes
    if positive_int("processes", parts) > nodes:
        raise OptionError(
            f"{nodes} nodes cannot be shared by {parts} processes; use fewer."
        )
    if parts == nodes:
        return list(range(nodes))
    if parts > 1 and importlib.util.find_spec("pymetis"):
        neighbours = [
            [other for other in row if other != node]
            for node, row in enumerate(graph.used)
        ]
        pymetis = importlib.import_module("pymetis")
        _, owner = pymetis.part_graph(parts, adjacency=neighbours)
        # It may leave a process of a tiny graph without a node.
        if len(set(owner)) == parts:
            return list(owner)
    owner = [0] * nodes
    for place, node in enumerate(_breadth_first(graph.talking, 0)):
        owner[node] = place * parts // nodes
    return owner


def _breadth_first(
    links: Sequence[Collection[int]],
    root: int,
) -> dict[int, int]:
    """The parent of each node that is connected to the root, in order of distance from the root."""
    parents = {root: root}
    frontier = [root]
    for node in frontier:
        for other in sorted(links[node]):
            if other not in parents:
                parents[other] = node
                frontier.append(other)
    return parents


class Plan:
    """The plan of one process: its nodes, its peers, and its place in a tree of processes.

    Args:
        graph: the graph, already checked.
        owner: the process that owns each node.
        rank: the number of this process.

    Attributes:
        nodes: the nodes of this process; nodes with equally many features and neighbours are next
            to each other.
        peers: the processes that own a neighbour of one of these nodes.
        parent: the process above this process in a tree of linked processes; None at the root.
        children: the processes directly below.
    """

    def __init__(
        self,
        graph: Graph,
        owner: Sequence[int],
        rank: int = 0,
    ) -> None:
        self.graph = graph
        self.owner = owner
        self.rank = rank
        self.size = max(owner) + 1
        own = [node for node in range(graph.nodes) if owner[node] == rank]
        self.nodes = sorted(own, key=self._shape)
        links: list[set[int]] = [set() for _ in range(self.size)]
        for node, row in enumerate(graph.talking):
            others = [owner[other] for other in row]
            links[owner[node]].update(others)
        root = owner[0]
        parents = _breadth_first(links, root)
        if len(parents) < self.size or not own:
            raise OptionError(
                f"{self.size} processes cannot learn together, because links connect only "
                f"{len(parents)} of them; every process needs a node, and a path of links to all "
                "others."
            )
        self.peers = sorted(links[rank] - {rank})
        # In this list the root is its own parent.
        del parents[root]
        self.parent = parents.get(rank)
        self.children = [k for k in parents if parents[k] == rank]

    def _shape(self, node: int) -> tuple[int, int]:
        return self.graph.sizes[node], self.width(node)

    @property
    def is_root(self) -> bool:
        """True if this process owns node 0, and so the labels."""
        return self.parent is None

    def width(self, node: int) -> int:
        """The number of feature pairs of a node and its neighbours in R."""
        graph = self.graph
        return sum(graph.sizes[k] for k in graph.R[node])

    def name(self, rank: int) -> str:
        """The name of a process in messages, with its nodes."""
        nodes = [k for k, part in enumerate(self.owner) if part == rank]
        labels = [self.graph.label(node) for node in nodes]
        if len(nodes) == 1:
            return f"node {labels[0]}"
        if len(nodes) > 4:
            labels[4:] = [".."]
        return f"process {rank} (nodes {', '.join(labels)})"


class NodeGroup(NamedTuple):
    """Nodes with equally many rows and columns of K, which are multiplied at once."""

    first: int  # of the free entries of K
    shape: tuple[int, int, int]  # nodes, rows, columns
    columns: Tensor  # of the extended state, for each node one after the other

    @property
    def last(self) -> int:
        return self.first + math.prod(self.shape)


class Halo:
    """The extended state of a process: its own rows, then the neighbours' rows that K reads.

    Args:
        plan: the share of this process.
        scale: the rows of a node per unit of its size: 1 for one half of the state, 2 for both.

    Attributes:
        rows: the number of own rows.
        extended: the total number of own rows and neighbours' rows.
        send: the own rows that each peer reads.
        receive: the first and the last row (exclusive) that each peer sends.
        groups: the own nodes, in the order of their free entries of K.
    """

    def __init__(self, plan: Plan, scale: int = 1) -> None:
        graph = plan.graph
        owner = plan.owner
        self.plan = plan
        self.scale = scale
        self.place: dict[int, int] = {}
        self.extended = 0
        for node in plan.nodes:
            self._add(node)
        self.rows = self.extended
        # The nodes whose rows one process reads from another.
        read: dict[tuple[int, int], set[int]] = defaultdict(set)
        for node, row in enumerate(graph.R):
            for other in row:
                read[owner[node], owner[other]].add(other)
        self.receive: dict[int, tuple[int, int]] = {}
        self.send: dict[int, Tensor] = {}
        for peer in plan.peers:
            first = self.extended
            for node in sorted(read[plan.rank, peer]):
                self._add(node)
            if self.extended > first:
                self.receive[peer] = first, self.extended
            sent = read[peer, plan.rank]
            if sent:
                self.send[peer] = self.index(sorted(sent))
        self.groups = self._groups()
        self.entries = self.groups[-1].last

    def _add(self, node: int) -> None:
        self.place[node] = self.extended
        self.extended += self.height(node)

    def height(self, node: int) -> int:
        """The number of rows of a node."""
        return self.scale * self.plan.graph.sizes[node]

    def index(self, nodes: Sequence[int]) -> Tensor:
        """The indices of some nodes' rows in the extended state, one after the other."""
        rows: list[int] = []
        for node in nodes:
            first = self.place[node]
            rows += range(first, first + self.height(node))
        return torch.tensor(rows, dtype=torch.int64)

    def _groups(self) -> list[NodeGroup]:
        graph = self.plan.graph
        alike: dict[tuple[int, int], list[int]] = {}
        for node in self.plan.nodes:
            width = self.scale * self.plan.width(node)
            shape = (self.height(node), width)
            alike.setdefault(shape, []).append(node)
        groups = []
        first = 0
        for (height, width), nodes in alike.items():
            columns = [self.index(graph.R[node]) for node in nodes]
            shape = (len(nodes), height, width)
            group = NodeGroup(first, shape, torch.cat(columns))
            groups.append(group)
            first = group.last
        return groups
