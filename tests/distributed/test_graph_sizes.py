"""Rings and grids refuse sizes that no graph can have, before any work is done."""

from __future__ import annotations

import pytest

from hdnn.distributed import Graph
from hdnn.errors import ShapeError


@pytest.mark.parametrize("nodes", [0, -1, 2.5, True, "4"])
def test_a_ring_has_a_whole_number_of_nodes(nodes):
    with pytest.raises(ShapeError, match="nodes must be a whole number >= 1"):
        Graph.ring(nodes)


@pytest.mark.parametrize(("rows", "columns", "name"), [(0, 2, "rows"), (2, 1.5, "columns")])
def test_a_grid_has_whole_numbers_of_rows_and_columns(rows, columns, name):
    with pytest.raises(ShapeError, match=f"{name} must be a whole number >= 1"):
        Graph.grid(rows, columns)


def test_a_single_node_is_a_ring_and_a_grid():
    assert Graph.ring(1).used == Graph.grid(1, 1).used == ((0,),)
