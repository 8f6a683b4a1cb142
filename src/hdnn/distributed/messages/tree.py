"""Sums, gathers and broadcasts along a breadth-first tree of the graph, from part to linked part.

A sum adds up values of nodes, children in ascending order, so that it is the same bit for bit
however the nodes are shared out. What is only moved, not added, goes from part to part: each part
but the root's hangs below the part that owns the parent of its highest node.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hdnn.distributed.graph.plan import Part, Plan
from hdnn.distributed.transport import Transport


def parents(plan: Plan) -> list[int]:
    """The part above each part, -1 above that of the root."""
    tree, found = plan.tree, []
    for nodes in plan.nodes_of:
        highest = min(nodes, key=lambda i: (tree.depth[i], i))
        above = tree.parent[highest]
        found.append(-1 if above < 0 else plan.owner[above])
    return found


class Spanning:
    """The place of one part in the tree."""

    def __init__(self, part: Part, transport: Transport) -> None:
        self.plan, self.part, self.transport = part.plan, part, transport
        above = parents(self.plan)
        below: list[list[int]] = [[] for _ in above]
        for child, parent in enumerate(above):
            if parent >= 0:
                below[parent].append(child)
        self.root = above.index(-1)
        self.is_root = self.root == part.number
        self.above, self.below = above[part.number], below[part.number]

        def subtree(start: int) -> list[int]:
            """As messages are put together: each part, then what hangs below it, child by child."""
            found, waiting = [], [start]
            while waiting:
                found.append(waiting.pop())
                waiting += reversed(below[found[-1]])
            return found

        self.subtrees = {child: subtree(child) for child in self.below}
        self.order = [part.number, *(i for child in self.below for i in self.subtrees[child])]
        self.waves = self._waves()

    # Moving

    def broadcast(self, x: Tensor) -> Tensor:
        """The root's x, in place; others give one of the same shape and dtype."""
        if self.above >= 0:
            self.transport.exchange([], [(self.above, x)])
        self.transport.exchange([(child, x) for child in self.below], [])
        return x

    def gather(self, x: Tensor, rows: Sequence[int]) -> Tensor | None:
        """At the root the rows of all parts in its `order`, where part i has rows[i]; else None."""
        received = [
            (child, x.new_empty(sum(rows[i] for i in self.subtrees[child]), *x.shape[1:]))
            for child in self.below
        ]
        self.transport.exchange([], received)
        whole = torch.cat([x, *(tensor for _, tensor in received)])
        if self.is_root:
            return whole
        self.transport.exchange([(self.above, whole)], [])
        return None

    def traffic(self) -> list[tuple[int, int, int, int]]:
        """`(from, to, messages, bytes)` of all pairs of parts that talked; the root's only."""
        sent, plan = self.transport.traffic, self.plan
        peers = plan.peers(self.part.number)
        rows = [(p, sent.messages.get(p, 0), sent.bytes.get(p, 0)) for p in peers]
        counts = [len(plan.peers(part)) for part in range(plan.parts)]
        whole = self.gather(torch.tensor(rows, dtype=torch.int64).reshape(-1, 3), counts)
        if whole is None:
            return []
        senders = [part for part in self.order for _ in range(counts[part])]
        return [(s, *row) for s, row in zip(senders, whole.tolist(), strict=True)]

    def scatter(self, x: Tensor | None, rows: Sequence[int], example: Tensor) -> Tensor:
        """This part's rows of the root's x, which is in its `order`.

        `example` says what a row is: its dtype and its other dimensions.
        """
        if x is None:
            count = sum(rows[i] for i in self.order)
            x = example.new_empty(count, *example.shape[1:])
            self.transport.exchange([], [(self.above, x)])
        own = rows[self.part.number]
        sizes = [own, *(sum(rows[i] for i in self.subtrees[child]) for child in self.below)]
        mine, *others = x.split(sizes)
        self.transport.exchange(list(zip(self.below, others, strict=True)), [])
        return mine.clone()

    # Adding

    def _waves(self) -> list[_Wave]:
        """What this part adds up by itself, then sends and receives, wave after wave.

        A node's wave is the largest number of changes of part on any path up to it: so messages
        wait once for each wave, not for each depth of the tree.
        """
        tree, owner, me = self.plan.tree, self.plan.owner, self.part.number
        wave = [0] * len(owner)
        for node in sorted(range(len(owner)), key=lambda i: -tree.depth[i]):
            above = tree.parent[node]
            if above >= 0:
                wave[above] = max(wave[above], wave[node] + (owner[above] != owner[node]))
        children: dict[int, list[int]] = {node: [] for node in self.part.nodes}
        for node, parent in enumerate(tree.parent):
            if parent in children:
                children[parent].append(node)
        from_others = (k for some in children.values() for k in some if owner[k] != me)
        received = sorted(from_others, key=lambda k: (wave[k], owner[k], k))
        self.received_rows = len(received)
        place = {node: k for k, node in enumerate([*self.part.nodes, *received])}

        def rows(nodes: Iterable[int]) -> Tensor:
            return torch.tensor([place[node] for node in nodes])

        def grouped(
            nodes: Iterable[int], key: Callable[[int], tuple[int, int]]
        ) -> Iterator[tuple[_Wave, int, list[int]]]:
            """The nodes of each key, with their wave and the second part of the key."""
            for (number, rest), some in itertools.groupby(sorted(nodes, key=key), key):
                yield found[number], rest, [*some]

        found = [_Wave([], [], []) for _ in range(max(wave) + 1)]
        nodes = sorted(self.part.nodes)
        inner = (i for i in nodes if children[i])
        for now, _, some in grouped(inner, lambda i: (wave[i], -tree.depth[i])):
            for d in range(max(len(children[i]) for i in some)):
                more = [i for i in some if len(children[i]) > d]
                now.sums.append((rows(more), rows(children[i][d] for i in more)))
        leaving = (i for i in nodes if i != tree.root and owner[tree.parent[i]] != me)
        for now, part, some in grouped(leaving, lambda i: (wave[i], owner[tree.parent[i]])):
            now.out.append((part, rows(some)))
        for now, part, some in grouped(received, lambda k: (wave[k], owner[k])):
            now.into.append((part, place[some[0]], len(some)))
        return [now for now in found if any(now)]

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all nodes of values (own nodes, ...), for every part."""
        total = torch.cat([values, values.new_zeros(self.received_rows, *values.shape[1:])])
        for wave in self.waves:
            for above, below in wave.sums:
                total[above] = total[above] + total[below]
            received = [(r, total[first : first + count]) for r, first, count in wave.into]
            self.transport.exchange([(r, total[rows]) for r, rows in wave.out], received)
        if self.is_root:
            at = self.part.nodes.index(self.plan.tree.root)
            return self.broadcast(total[at].clone())
        return self.broadcast(total.new_empty(total.shape[1:]))

    def minimum(self, value: int) -> int:
        """The smallest of one number from each part."""
        least = torch.tensor([value])
        received = [(child, torch.empty_like(least)) for child in self.below]
        self.transport.exchange([], received)
        for _, other in received:
            least = torch.minimum(least, other)
        if not self.is_root:
            self.transport.exchange([(self.above, least)], [])
        return int(self.broadcast(least.clone()))


class _Wave(NamedTuple):
    """Who adds whom, in this order; then what goes up to other parts, and what comes from them."""

    sums: list[tuple[Tensor, Tensor]]
    out: list[tuple[int, Tensor]]
    into: list[tuple[int, int, int]]  # part, first row, rows
