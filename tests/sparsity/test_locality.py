"""Who needs whom, from lists: as the matrices say, and in seconds for the largest of graphs."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from hdnn import sparsity
from hdnn.app import graphs
from hdnn.app.configs.graph import checked_graph, config_of_graph, table_for
from hdnn.base.search import components
from hdnn.distributed.graph.file import GraphPatterns
from hdnn.distributed.graph.graph import Graph, alone, from_edges, transposed, union
from hdnn.errors import OptionError, SparsityError
from hdnn.sparsity import locality
from hdnn.sparsity.locality import Needs, links_of_rows, of_matrix, rows_of

LONG = 60.0  # seconds, for what takes one or two on an idle machine


def random_patterns(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    M = int(torch.randint(1, 9, (), generator=generator))

    def links(density: float) -> torch.Tensor:
        return (torch.rand(M, M, generator=generator) < density) | torch.eye(M, dtype=torch.bool)

    T, R, S = links(0.2), links(0.3), links(0.5)
    return T & T.T, R, S | S.T


def star(nodes: int) -> locality.Links:
    return from_edges(nodes, [(0, i) for i in range(1, nodes)])


def patterns_of_star(nodes: int) -> GraphPatterns:
    return GraphPatterns(star(nodes), alone(nodes), star(nodes), (1,) * nodes)


@pytest.mark.parametrize("seed", range(40))
def test_needs_are_the_binary_products_of_the_patterns(seed):
    T, R, S = random_patterns(seed)
    needs = Needs(*map(of_matrix, (T, R, S)))
    expected = sparsity.dependency(T, R)
    assert links_of_rows(needs.rows()) == links_of_rows(of_matrix(expected))
    beyond = (expected & ~S).nonzero().tolist()
    found = needs.breaches()
    assert [list(pair[:2]) for pair in found.pairs] == beyond
    assert (found.count, found.complete) == (len(beyond), True)
    for breach in found.explained():
        i, a, row, k = breach.path
        if breach.forward:
            assert T[i, a]
            assert R[row, a]
            assert R[row, k]
        else:  # the path is i, l, a, k
            assert R[a, i]
            assert R[a, row]
            assert T[row, k]


@pytest.mark.parametrize("seed", range(10))
def test_matrices_and_steps_find_the_same(seed):
    needs = Needs(*map(of_matrix, random_patterns(seed)))
    step, whole = needs.breaches(), needs.breaches(work=0)  # so that matrices are taken
    assert (step.pairs, step.count, step.complete) == (whole.pairs, whole.count, whole.complete)


def test_lists_can_be_turned_joined_and_written_back():
    rows = rows_of(((0, 2), (1,), (1, 2)))
    assert links_of_rows(rows) == ((0, 2), (1,), (1, 2))
    assert transposed(((0, 2), (1,), (1, 2))) == ((0,), (1, 2), (0, 2))
    assert union(((0, 2), (1,), (1, 2)), ((0, 1), (1,), (2,))) == ((0, 1, 2), (1,), (1, 2))
    assert rows.sums(np.array([1.0, 10.0, 100.0])).tolist() == [101.0, 10.0, 110.0]


def test_a_star_is_told_by_counting_not_by_building():
    nodes, begin = 30_000, time.monotonic()
    result = graphs.check(patterns_of_star(nodes))
    assert time.monotonic() - begin < LONG
    assert result["local"] is False
    assert result["all_breaches"] is False
    assert result["breaches"] >= nodes
    assert len(result["explanation"]) == graphs.LISTED
    assert result["explanation"][0]["text"] == (
        "node 1 needs node 2 forward and backward: row 0 of R has 1 and 2"
    )
    pairs = nodes * (nodes - 1) // 2
    assert (
        f"row 0 of R has {nodes} nodes, which all need each other: {pairs} pairs"
        in (result["fault"])
    )
    with pytest.raises(SparsityError, match="which all need each other"):
        patterns_of_star(nodes).graph()


def test_what_a_star_needs_is_not_listed():
    with pytest.raises(SparsityError, match="which is too much to list"):
        Graph(star(30_000)).dependency()


def test_rows_that_are_all_linked_but_too_long_to_check_are_refused(monkeypatch):
    monkeypatch.setattr(locality, "DENSE", 10)
    clique = from_edges(30, [(i, k) for i in range(30) for k in range(i)])
    needs = Needs(*map(rows_of, (alone(30), clique, clique)))
    with pytest.raises(SparsityError, match="cannot be found in a short time"):
        needs.breaches(work=100)
    assert needs.breaches().count == 0


def test_many_nodes_without_links_are_grouped_at_once():
    begin = time.monotonic()
    assert len(components(alone(200_000))) == 200_000
    assert time.monotonic() - begin < LONG


def test_a_large_graph_is_checked_in_seconds():
    nodes, begin = 200_000, time.monotonic()
    ring = from_edges(nodes, [(i, (i + 1) % nodes) for i in range(nodes)])
    near = from_edges(nodes, [(i, (i + k) % nodes) for i in range(nodes) for k in (1, 2)])
    result = graphs.check(GraphPatterns(ring, alone(nodes), near, (1,) * nodes))
    assert time.monotonic() - begin < LONG
    assert (result["local"], result["depth"], result["fault"]) == (True, nodes // 2, None)


def test_the_diameter_of_a_dense_graph_takes_no_time():
    begin = time.monotonic()
    assert graphs.diameter(((*range(1500),),) * 1500) == 1
    assert graphs.diameter(star(1000)) == 2
    assert time.monotonic() - begin < LONG


def test_a_star_with_too_many_leaves_is_not_trained_on(tmp_path):
    file = tmp_path / "star.toml"
    file.write_text(f"nodes = 9000\nR = {[[0, i] for i in range(1, 9000)]}\n")
    with pytest.raises(SparsityError, match="node 0 has 8999 links in R"):
        checked_graph(config_of_graph(table_for(str(file), None), {}), str(file))


def test_more_nodes_than_can_be_trained_on_are_refused_at_once(tmp_path):
    with pytest.raises(OptionError, match="up to 200000 nodes, but there are 1000000"):
        table_for(None, 10**6)
    file = tmp_path / "many.toml"
    file.write_text("nodes = 300000\nR = []\n")
    with pytest.raises(OptionError, match="up to 200000 nodes, but there are 300000"):
        table_for(str(file), None)
