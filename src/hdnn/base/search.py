"""Breadth-first search on a graph, given by the neighbours of each node."""

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
    found, seen = [], [False] * len(links)
    for root in range(len(links)):
        if not seen[root]:
            seen[root] = True
            group, done = [root], 0
            while done < len(group):
                for k in links[group[done]]:
                    if not seen[k]:
                        seen[k] = True
                        group.append(k)
                done += 1
            found.append(sorted(group))
    return found
