"""Pictures of graphs tell links apart, and give every node a place of its own."""

import random

import pytest
import torch

from graphs import RING, TWO_STEPS
from hdnn.distributed import Graph
from hdnn.distributed.graph.file import patterns_of
from hdnn.distributed.graph.graph import from_edges
from hdnn.plotting.graphs import graph_picture, places


def drawn(**table):
    found = patterns_of(table)
    return graph_picture(found.R, found.T, found.S)


def legend(figure):
    box = figure.axes[0].get_legend()
    return [] if box is None else [text.get_text() for text in box.get_texts()]


def test_links_are_told_apart_and_what_is_not_local_is_red():
    pytest.importorskip("matplotlib")
    assert legend(drawn(nodes=8, edges=TWO_STEPS, R=RING)) == ["$R$: 8 links", "$S$ alone: 8 links"]
    figure = drawn(nodes=8, edges=RING, R=RING, T=[[0, 4]])
    assert legend(figure)[:2] == ["$R$: 8 links", "$T$: 1 link"]
    assert legend(figure)[2].startswith("needed, not in $S$: 1")
    assert "26 not in" in figure.axes[4].get_xlabel()
    free = drawn(nodes=1, R=[])
    assert legend(free) == []
    assert [t.get_text() for t in free.axes[3].texts] == ["not given"]


def test_few_nodes_lie_on_a_circle_and_a_grid_lies_in_rows():
    spots = places(from_edges(8, RING))
    assert (spots**2).sum(1) == pytest.approx(1)
    assert spots[0] == pytest.approx((0, 1))
    spots = places(Graph.grid(5, 5).used).reshape(5, 5, 2)
    across, down = spots[:, 1:] - spots[:, :-1], spots[1:] - spots[:-1]
    assert across[..., 0].min() > 0.8
    assert abs(across[..., 1]).max() < 0.2
    assert down[..., 1].max() < -0.8


def test_no_two_nodes_of_any_graph_lie_at_the_same_place():
    draw = random.Random(3)
    for nodes, chance in ((17, 0.0), (30, 0.05), (60, 0.08), (40, 1.0)):
        edges = [[i, k] for i in range(nodes) for k in range(i) if draw.random() < chance]
        spots = torch.from_numpy(places(from_edges(nodes, edges)))
        apart = torch.cdist(spots, spots) + torch.eye(nodes) * 9
        assert float(apart.min()) > 0.05 * min(1.0, 8 / nodes)
