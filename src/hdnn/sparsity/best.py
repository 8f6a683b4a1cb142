"""Patterns (T, R) for a graph S with T R^T R + R^T R T <= S and as many free weights as possible.

The condition is the same for S and S^T, because T is symmetric: only mutual links can be used. For
a given T it says that each row of R is a set of nodes that are pairwise *near*: all T-neighbours of
either are linked to the other. So the best R is, row by row, the heaviest clique of near nodes
around node l, and only T has to be searched for.

Sets of nodes are whole numbers, with node k as bit M-1-k: of two sets, the larger number is the one
whose nodes come first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import combinations
from math import inf
from operator import or_
from typing import Any

import torch
from torch import Tensor

from hdnn.errors import SparsityError, require

EXHAUSTIVE = 12
"""All T are tried if S has at most this many mutual links."""
CLIQUE_WORK = 50_000
"""The search around one node stops after looking at this many, with the best clique so far."""
CLIMB_WORK = 3_000_000
"""A climb stops where it is after looking at this many nodes."""


class Budget:
    """Work left, in nodes looked at. Counted, not timed: the same patterns on every machine."""

    def __init__(self, left: float) -> None:
        self.left = left


def members(nodes: int) -> Iterator[int]:
    """The bits of a set, largest first."""
    while nodes:
        v = nodes.bit_length() - 1
        yield v
        nodes ^= 1 << v


def heaviest_clique(
    near: Sequence[int], weight: Sequence[int], v: int, budget: Budget, within: int = -1
) -> int:
    """The heaviest set of pairwise near nodes around v; of equals, the one with the first nodes.

    Branch and bound: exact, unless `CLIQUE_WORK` or the budget runs out. Then it is the best
    clique so far, which is never lighter than the greedy one.
    """
    around = near[v] & within & ~(1 << v)
    best, work = _greedy(near, weight, v, around)
    floor = sum(weight[u] for u in members(best)) - 1  # an equal one may have earlier nodes
    # The branch with the first candidate is on top, so cliques are met in order.
    stack = [(around, 1 << v, weight[v])]
    while stack and work < min(CLIQUE_WORK, budget.left):
        candidates, clique, total = stack.pop()
        work += 1 + candidates.bit_count()
        bound, reached = _bound(near, weight, candidates)
        if total + bound <= floor:
            continue
        if reached:
            best, floor = clique | candidates, total + bound
            continue
        u = candidates.bit_length() - 1
        stack.append((candidates ^ (1 << u), clique, total))
        stack.append((candidates & near[u] & ~(1 << u), clique | 1 << u, total + weight[u]))
    budget.left -= work
    return best


def _greedy(near: Sequence[int], weight: Sequence[int], v: int, left: int) -> tuple[int, int]:
    """A clique grown around v, each time by the node with most candidates left times its weight."""
    clique, work = 1 << v, 0
    while left:
        work += left.bit_count()
        _, u = max([(weight[u] * (left & near[u]).bit_count(), u) for u in members(left)])
        clique |= 1 << u
        left &= near[u] & ~(1 << u)
    return clique, work


def _bound(near: Sequence[int], weight: Sequence[int], nodes: int) -> tuple[int, bool]:
    """A bound on the weight of a clique: the heaviest nodes of all colours; and if all are one.

    Nodes of one colour are not near each other, so a clique has one of them at most.
    """
    bound, colours, left = 0, 0, nodes
    while left:
        colour, heaviest = left, 0
        while colour:
            u = colour.bit_length() - 1
            heaviest = max(heaviest, weight[u])
            left ^= 1 << u
            colour &= ~near[u]  # u is near itself
        bound, colours = bound + heaviest, colours + 1
    return bound, colours == nodes.bit_count()


@dataclass(frozen=True)
class Patterns:
    """T with its best R, and what it takes to change one link of T."""

    S: list[int]  # mutual links
    weight: list[int]  # the features of each node
    layers: int
    T: list[int]
    linked: list[int]  # to all T-neighbours of a node
    near: list[int]
    R: list[int]
    free: int  # weights: of K_p and K_q in every layer, and of one X

    @classmethod
    def of(cls, S: list[int], weight: list[int], layers: int, T: list[int]) -> Patterns:
        linked = [_linked_to_all(S, neighbours) for neighbours in T]
        near = [_mutual(linked, v) for v in range(len(S))]
        R = [heaviest_clique(near, weight, v, Budget(CLIQUE_WORK)) for v in range(len(S))]
        K, X = (sum(_row(weight, v, A[v]) for v in range(len(S))) for A in (R, T))
        return cls(S, weight, layers, T, linked, near, R, 2 * layers * K + X)

    def rank(self) -> tuple[int, list[int], list[int]]:
        """For comparison: first the free weights, then how early the ones of R and of T come."""
        return self.free, self.R[::-1], self.T[::-1]

    def flip(self, i: int, k: int, budget: Budget) -> Patterns:
        """With the link i - k of T added or removed. Only rows of R that can change are redone."""
        budget.left -= len(self.S)
        S, T, linked, near, R = self.S, *map(list, (self.T, self.linked, self.near, self.R))
        added = not T[i] >> k & 1
        T[i] ^= 1 << k
        T[k] ^= 1 << i
        free = self.free + (2 if added else -2) * self.weight[i] * self.weight[k]
        for a in (i, k):
            linked[a] = _linked_to_all(S, T[a])
        if linked != self.linked:
            changed = {a: _mutual(linked, a) ^ near[a] for a in (i, k)}
            for a, pairs in changed.items():
                near[a] ^= pairs
                for v in members(pairs & ~(1 << i | 1 << k)):
                    near[v] ^= 1 << a
            # Fewer pairs are near: a clique that has lost no pair is still the heaviest.
            # More pairs are near: only a node with a new pair around it can have a heavier clique.
            around = self.R if added else near
            for v in members(self.near[i] | near[i] | self.near[k] | near[k]):
                if any(around[v] >> a & 1 and around[v] & pairs for a, pairs in changed.items()):
                    R[v] = heaviest_clique(near, self.weight, v, budget)
                    gain = _row(self.weight, v, R[v]) - _row(self.weight, v, self.R[v])
                    free += 2 * self.layers * gain
        return Patterns(S, self.weight, self.layers, T, linked, near, R, free)

    def joined(self, budget: Budget) -> Patterns:
        """Replace rows of R until T and R join all nodes that S joins; `free` is -1 if none can.

        A group starts at one node and holds all that hear of each other. Again and again, it takes
        in the neighbour whose row loses fewest weights when it must hold a member of the group.
        """
        near, weight, R = self.near, self.weight, list(self.R)
        free, done = self.free, 0
        while left := ~done & ((1 << len(R)) - 1):
            group = self._group(R, 1 << (left.bit_length() - 1))
            while beyond := reduce(or_, (self.S[u] for u in members(group))) & ~group:
                pairs = ((v, u) for v in members(beyond) for u in members(near[v] & group))
                rows = [(v, heaviest_clique(near, weight, v, budget, near[u])) for v, u in pairs]
                if not rows:
                    return replace(self, free=-1)
                cost = [_row(weight, v, R[v]) - _row(weight, v, row) for v, row in rows]
                v, row = rows[cost.index(min(cost))]
                R[v], free = row, free - 2 * self.layers * min(cost)
                group = self._group(R, group)
            done |= group
        return replace(self, R=R, free=free)

    def _group(self, R: Sequence[int], nodes: int) -> int:
        """All nodes that hear of these through T and R."""
        before = 0
        while nodes != before:
            before = nodes
            for row, neighbours in zip(R, self.T, strict=True):
                if row & nodes:
                    nodes |= row | neighbours
        return nodes


def _row(weight: Sequence[int], v: int, nodes: int) -> int:
    """How many entries the blocks of row v have."""
    return weight[v] * sum([weight[u] for u in members(nodes)])


def _linked_to_all(S: Sequence[int], nodes: int) -> int:
    common = -1
    for a in members(nodes):
        common &= S[a]
    return common


def _mutual(linked: Sequence[int], a: int) -> int:
    return sum([1 << v for v in members(linked[a]) if linked[v] >> a & 1])


def best_patterns(
    S: Tensor, sizes: Sequence[int] | None, layers: int, connected: bool
) -> tuple[Tensor, Tensor]:
    """The (R, T) with most free weights: of all T for small graphs, of two climbs for others.

    A climb starts at T = I or T = S and takes every change of one link that frees weights, until
    none does: a local optimum.
    """
    links, alone, weight = _problem(S, sizes)
    edges = [(i, k) for i, k in combinations(range(len(links)), 2) if links[i] >> k & 1][::-1]
    finish = Patterns.joined if connected else lambda patterns, budget: patterns
    start = Patterns.of(links, weight, layers, alone)
    if len(edges) <= EXHAUSTIVE:
        best = finish(start, Budget(inf))
        for patterns in _all(start, edges):
            if patterns.free >= best.free:
                best = max(best, finish(patterns, Budget(inf)), key=Patterns.rank)
    else:
        starts = (start, Patterns.of(links, weight, layers, links))
        best = max((_climb(start, edges, finish) for start in starts), key=Patterns.rank)
    return _pattern(best.R), _pattern(best.T)


def best_R(S: Tensor, sizes: Sequence[int] | None, connected: bool) -> Tensor:
    """The R with most free weights for T = I: R^T R <= S."""
    links, alone, weight = _problem(S, sizes)
    best = Patterns.of(links, weight, 1, alone)
    return _pattern(best.joined(Budget(inf)).R if connected else best.R)


def _problem(S: Tensor, sizes: Sequence[int] | None) -> tuple[list[int], list[int], list[int]]:
    """Mutual links, T = I and the features of each node, with the last node as bit 0."""
    M = len(S)
    return _bits(S & S.mT), [1 << v for v in range(M)], list(sizes or [1] * M)[::-1]


def links_and_sizes(graph: Any, size: str | None) -> tuple[Tensor, list[Any] | None]:
    """S of a networkx graph, with S(i, k) = 1 where i hears k, and an attribute of its nodes."""
    networkx = require("networkx", extra="graph")
    if not isinstance(graph, networkx.Graph) or not len(graph):
        given = "one without" if isinstance(graph, networkx.Graph) else type(graph).__name__
        raise SparsityError(
            f"graph must be a networkx graph with nodes, but got {given}; "
            "make one, e.g. with networkx.Graph(edges)."
        )
    heard = networkx.to_numpy_array(graph, dtype=bool, weight=None)
    S = torch.from_numpy(heard).mT | torch.eye(len(graph), dtype=torch.bool)
    if size is None:
        return S, None
    for node, attributes in graph.nodes.items():
        if size not in attributes:
            raise SparsityError(
                f"node {node!r} has no attribute {size!r}; give it one with its number of "
                "features, or leave size out for nodes that are all alike."
            )
    return S, [attributes[size] for attributes in graph.nodes.values()]


def _all(patterns: Patterns, edges: Sequence[tuple[int, int]]) -> Iterator[Patterns]:
    """All T, in the order of a Gray code: each differs from the one before in one link."""
    yield patterns
    for step in range(1, 1 << len(edges)):
        edge = edges[(step & -step).bit_length() - 1]
        patterns = patterns.flip(*edge, Budget(inf))
        yield patterns


def _climb(
    patterns: Patterns,
    edges: Sequence[tuple[int, int]],
    finish: Callable[[Patterns, Budget], Patterns],
) -> Patterns:
    best, since, budget = finish(patterns, Budget(inf)), 0, Budget(CLIMB_WORK)
    while since < len(edges):
        for edge in edges:
            other = patterns.flip(*edge, budget)
            if budget.left <= 0:
                return best
            since += 1
            # `finish` only takes weights away, so it is not asked where there are too few.
            if other.free > best.free:
                finished = finish(other, budget)
                if finished.free > best.free:
                    patterns, best, since = other, finished, 0
    return best


def _bits(pattern: Tensor) -> list[int]:
    rows = pattern.flip(0, 1).int().tolist()
    return [sum(1 << v for v, one in enumerate(row) if one) for row in rows]


def _pattern(bits: list[int]) -> Tensor:
    M = len(bits)
    rows = [[row >> v & 1 for v in range(M)] for row in bits]
    return torch.tensor(rows, dtype=torch.bool).flip(0, 1)
