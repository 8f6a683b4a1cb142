"""Sums, gathers and broadcasts along a breadth-first tree of the graph: no part needs a stranger.

A sum adds up values of nodes, children in ascending order, so that it is the same bit for bit
whoever owns them. What is only moved, not added, goes from part to part: each part but the root's
hangs below the part that owns the parent of its highest node.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hdnn.distributed.plan import Part, Plan
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
        self.levels = self._levels()

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

    def scatter(self, x: Tensor | None, rows: Sequence[int], like: Tensor) -> Tensor:
        """This part's rows of the root's x, which is in its `order`; `like` has the other shape."""
        if x is None:
            count = sum(rows[i] for i in self.order)
            x = like.new_empty(count, *like.shape[1:])
            self.transport.exchange([], [(self.above, x)])
        own = rows[self.part.number]
        sizes = [own, *(sum(rows[i] for i in self.subtrees[child]) for child in self.below)]
        mine, *others = x.split(sizes)
        self.transport.exchange(list(zip(self.below, others, strict=True)), [])
        return mine.clone()

    # Adding

    def _levels(self) -> list[_Level]:
        """What this part does at each depth, from the deepest nodes up."""
        tree, owner, me = self.plan.tree, self.plan.owner, self.part.number
        place = {node: k for k, node in enumerate(self.part.nodes)}
        children: dict[int, list[int]] = {node: [] for node in self.part.nodes}
        for node, parent in enumerate(tree.parent):
            if parent in children:
                children[parent].append(node)
        by_depth: dict[int, list[int]] = {}
        for node in sorted(self.part.nodes):
            by_depth.setdefault(tree.depth[node], []).append(node)
        found = []
        for depth in range(max(by_depth) + 1, 0, -1):
            out: dict[int, list[int]] = {}
            for node in by_depth.get(depth, []):
                if owner[tree.parent[node]] != me:
                    out.setdefault(owner[tree.parent[node]], []).append(node)
            adults = [i for i in by_depth.get(depth - 1, []) if children[i]]
            into: dict[int, list[int]] = {}
            for child in sorted(k for i in adults for k in children[i]):
                if owner[child] != me:
                    into.setdefault(owner[child], []).append(child)
            if not (out or adults):
                continue
            there = {**place} if into else place
            for nodes in (into[r] for r in sorted(into)):
                there |= {node: len(there) + k for k, node in enumerate(nodes)}
            most = max((len(children[i]) for i in adults), default=0)
            slots = []
            for d in range(most):
                some = [i for i in adults if len(children[i]) > d]
                slots.append(
                    (
                        torch.tensor([place[i] for i in some]),
                        torch.tensor([there[children[i][d]] for i in some]),
                    )
                )
            found.append(
                _Level(
                    [(r, torch.tensor([place[i] for i in out[r]])) for r in sorted(out)],
                    [(r, len(into[r])) for r in sorted(into)],
                    slots,
                )
            )
        return found

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all nodes of values (own nodes, ...), for every part."""
        total = values.clone()
        for level in self.levels:
            received = [(r, total.new_empty(k, *total.shape[1:])) for r, k in level.into]
            self.transport.exchange([(r, total[rows]) for r, rows in level.out], received)
            every = torch.cat([total, *(tensor for _, tensor in received)])
            for adults, children in level.slots:
                total[adults] = total[adults] + every[children]
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


class _Level:
    """One depth of the tree: what goes up to other parts, what comes, and who adds whom."""

    def __init__(
        self,
        out: list[tuple[int, Tensor]],
        into: list[tuple[int, int]],
        slots: list[tuple[Tensor, Tensor]],
    ) -> None:
        self.out, self.into, self.slots = out, into, slots
