"""Which part owns which node, and what a part sends, receives and multiplies in each round.

All sums are taken in the order of the nodes' numbers, whoever owns them, one term after the other:
that is why results are the same bit for bit however the nodes are shared out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hdnn.distributed.graph.graph import Graph, Links, transposed, union
from hdnn.errors import SparsityError


class Plan:
    """A graph and the owner of each node: part 0 .. parts - 1."""

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
        self.inner = sum(self.sizes[i] for i in inner)  # rows that need nobody else

    def rows_of(self, nodes: Sequence[int]) -> list[int]:
        """The rows of some of these nodes."""
        return [self.first[i] + k for i in nodes for k in range(self.sizes[i])]


def offsets(nodes: Sequence[int], sizes: dict[int, int], start: int = 0) -> dict[int, int]:
    """Where each node begins, one after the other."""
    found = {}
    for node in nodes:
        found[node] = start
        start += sizes[node]
    return found


@dataclass(frozen=True)
class Round:
    """What goes out and comes in: rows of what is sent to, places of what comes from a part."""

    out: tuple[tuple[int, Tensor], ...]
    into: tuple[tuple[int, Tensor], ...]


class Stencil:
    """Products with a matrix in BlkSprs(R) and with its transpose, for the rows of one part.

    Its free entries are one vector: node after node, each block row by row, neighbours in ascending
    order. `columns` are the rows of the extended state (own rows, then those of other parts, the
    halo) that each entry meets. Where R changes from layer to layer the entries are those of any
    layer, and messages those of each.
    """

    def __init__(self, part: Part, patterns: Sequence[Links]) -> None:
        plan, sizes = part.plan, part.sizes
        self.part = part
        owner, me = plan.owner, part.number
        links = union(*dict.fromkeys(patterns))
        back = transposed(links)
        halo = sorted({k for i in part.nodes for k in links[i] if owner[k] != me}, key=_by(owner))
        place = {**part.first, **offsets(halo, sizes, part.rows)}
        self.halo_rows = sum(sizes[k] for k in halo)
        self.links = {i: links[i] for i in part.nodes}
        self.widths = {i: sum(sizes[k] for k in links[i]) for i in part.nodes}
        # Each node's entries begin at `entry`, its contributions to neighbours at `gift`.
        self.entry, self.gift, entries, gifts = {}, {}, 0, 0
        for i in part.nodes:
            self.entry[i], self.gift[i] = entries, gifts
            entries += sizes[i] * self.widths[i]
            gifts += self.widths[i]
        self.entries, self.gifts = entries, gifts
        self.gifts_inner = next(
            (self.gift[i] for i in part.nodes if part.first[i] >= part.inner), gifts
        )
        self.columns = {
            i: torch.tensor([place[k] + c for k in links[i] for c in range(sizes[k])])
            for i in part.nodes
        }
        # Contributions that come from other parts: sorted by sender, receiving node, giving node.
        strangers = sorted(
            ((k, i) for k in part.nodes for i in back[k] if owner[i] != me),
            key=lambda edge: (owner[edge[1]], *edge),
        )
        received, self.received_rows = {}, 0
        for k, i in strangers:
            received[k, i] = self.gifts + 1 + self.received_rows
            self.received_rows += sizes[k]
        nothing = self.gifts  # a row of zeros, between the own and the received contributions

        def gift(i: int, k: int) -> int:
            """The row where the contribution of node i to node k begins."""
            if owner[i] != me:
                return received[k, i]
            return self.gift[i] + sum(sizes[other] for other in links[i] if other < k)

        most = max(len(back[k]) for k in part.nodes)
        self.gathered = torch.full((most, part.rows), nothing)
        for k in part.nodes:
            for d, i in enumerate(back[k]):
                begin, row = gift(i, k), part.first[k]
                self.gathered[d, row : row + sizes[k]] = torch.arange(begin, begin + sizes[k])

        def rounds(pattern: Links) -> tuple[Round, Round]:
            into, out = transposed(pattern), []
            wanted: dict[int, list[int]] = {}
            needed: dict[int, list[int]] = {}
            gave: dict[int, list[tuple[int, int]]] = {}
            given: dict[int, list[tuple[int, int]]] = {}
            for i in sorted(part.nodes):
                for k in pattern[i]:
                    if owner[k] != me:
                        needed.setdefault(owner[k], []).append(k)
                        gave.setdefault(owner[k], []).append((k, i))
                for k in into[i]:
                    if owner[k] != me:
                        wanted.setdefault(owner[k], []).append(i)
                        given.setdefault(owner[k], []).append((i, k))
            gather = Round(
                tuple((r, _tensor(part.rows_of(sorted(set(wanted[r]))))) for r in sorted(wanted)),
                tuple(
                    (
                        r,
                        _tensor(
                            [
                                place[k] - part.rows + c
                                for k in sorted(set(needed[r]))
                                for c in range(sizes[k])
                            ]
                        ),
                    )
                    for r in sorted(needed)
                ),
            )
            out = [
                (r, [gift(i, k) + c for k, i in sorted(gave[r]) for c in range(sizes[k])])
                for r in sorted(gave)
            ]
            back_in = [
                (
                    r,
                    [
                        received[k, i] - self.gifts - 1 + c
                        for k, i in sorted(given[r])
                        for c in range(sizes[k])
                    ],
                )
                for r in sorted(given)
            ]
            reduce = Round(
                tuple((r, _tensor(rows)) for r, rows in out),
                tuple((r, _tensor(rows)) for r, rows in back_in),
            )
            return gather, reduce

        found = {pattern: rounds(pattern) for pattern in dict.fromkeys(patterns)}
        self.rounds = tuple(found[pattern] for pattern in patterns)
        self.free = None  # all entries, unless a layer has fewer than another
        if len(found) > 1:
            self.free = torch.stack([self._mask(pattern) for pattern in patterns])

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


def _tensor(rows: list[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64)


def _by(owner: Sequence[int]):
    return lambda node: (owner[node], node)
