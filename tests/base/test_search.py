"""Breadth-first search on lists of neighbours."""

from __future__ import annotations

from hdnn.base.search import breadth_first, components

RING_AND_PAIR = [[1, 3], [0, 2], [1, 3], [2, 0], [5], [4]]


def test_depths_count_the_links_and_ties_go_to_the_smallest_parent():
    parent, depth = breadth_first(RING_AND_PAIR, 0)
    assert depth == [0, 1, 2, 1, -1, -1]
    assert parent == [-1, 0, 1, 0, -1, -1]


def test_components_are_ordered_by_their_first_node():
    assert components(RING_AND_PAIR) == [[0, 1, 2, 3], [4, 5]]
    assert components([[], [2], [1]]) == [[0], [1, 2]]
