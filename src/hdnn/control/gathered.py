"""Numbers of all agents and edges, from the processes that have them to the root and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hdnn.control.links import Edges
from hdnn.control.shares import Share
from hdnn.distributed.graph.plan import Part
from hdnn.distributed.messages.tree import Spanning


class Gathered:
    """Moves rows along the tree: at the root they are in the order of agents, or of edges.

    An edge between two processes is known to both, and has the same bits there; the process of its
    first agent tells the root.

    Args:
        tree: the place of this process in the tree.
        share: what it has.
        edges: all edges of controllers.
    """

    def __init__(self, tree: Spanning, share: Share, edges: Edges) -> None:
        self.tree, owner, parts = tree, tree.plan.owner, range(tree.plan.parts)
        self.agents = [[*Part(tree.plan, r).nodes] for r in parts]
        self.told = [[e for e, (i, _) in enumerate(edges) if owner[i] == r] for r in parts]
        self.edges = [
            [e for e, (i, k) in enumerate(edges) if r in (owner[i], owner[k])] for r in parts
        ]
        here = {e: row for row, e in enumerate(share.controllers.which)}
        self.mine = [here[e] for e in self.told[tree.part.number]]

    def agents_at_root(self, given: Sequence[Tensor]) -> list[Tensor] | None:
        """Tensors of which own agents lead become those of all agents; None but at the root."""
        return self._up(given, self.agents)

    def edges_at_root(self, given: Sequence[Tensor]) -> list[Tensor] | None:
        """Tensors of which the edges here lead become those of all edges; None but at the root."""
        return self._up([each[self.mine] for each in given], self.told)

    def agents_here(
        self, given: Sequence[Tensor] | None, like: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """What the root has of all agents becomes that of own agents; `like` has the shapes."""
        return self._down(given, self.agents, like)

    def edges_here(
        self, given: Sequence[Tensor] | None, like: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """What the root has of all edges becomes that of the edges here."""
        return self._down(given, self.edges, like)

    def _up(self, given: Sequence[Tensor], rows: list[list[int]]) -> list[Tensor] | None:
        flat = [each.flatten(1) for each in given]
        whole = self.tree.gather(torch.cat(flat, 1), [*map(len, rows)])
        if whole is None:
            return None
        order = torch.tensor(self._order(rows), dtype=torch.int64)
        columns = whole[order.argsort()].split([each.shape[1] for each in flat], 1)
        return [
            c.reshape(len(order), *each.shape[1:]) for c, each in zip(columns, given, strict=True)
        ]

    def _down(
        self, given: Sequence[Tensor] | None, rows: list[list[int]], like: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        example, whole = torch.cat([each.flatten(1) for each in like], 1), None
        if given is not None:
            order = torch.tensor(self._order(rows), dtype=torch.int64)
            whole = torch.cat([each.flatten(1) for each in given], 1)[order]
        found = self.tree.scatter(whole, [*map(len, rows)], example)
        columns = found.split([each[:1].flatten(1).shape[1] for each in like], 1)
        return [c.reshape(each.shape) for c, each in zip(columns, like, strict=True)]

    def _order(self, rows: list[list[int]]) -> list[int]:
        """The rows of all processes, as they come to the root and leave it."""
        return [row for number in self.tree.order for row in rows[number]]
