"""Breadth-first search on a graph that is given as the neighbours of each node."""

from __future__ import annotations

from collections.abc import Sequence

Neighbours = Sequence[Sequence[int]]


def breadth_first(links: Neighbours, root: int) -> tuple[list[int], list[int]]:
    """The parent of each node and its distance from the root; -1 where it cannot be reached.

    Of several possible parents it is the one with the smallest number. The root has the parent -1.
    """
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
    return parent, depth


def components(links: Neighbours) -> list[list[int]]:
    """The nodes that are joined by links, which must go both ways; ordered by their first node."""
    found: list[list[int]] = []
    seen: set[int] = set()
    for root in range(len(links)):
        if root not in seen:
            depth = breadth_first(links, root)[1]
            found.append([node for node, steps in enumerate(depth) if steps >= 0])
            seen.update(found[-1])
    return found
