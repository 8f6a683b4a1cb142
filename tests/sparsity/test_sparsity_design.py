"""Patterns for a graph: membership, reasons why patterns are not local, and the best local ones."""

from __future__ import annotations

import itertools
import sys

import networkx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hdnn
from hdnn import sparsity
from hdnn.errors import MissingExtraError, OptionError, ShapeError, SparsityError
from hdnn.sparsity import BlkSprs, Sparsity, best
from strategies import Random, seeds

NODES = st.integers(1, 5)
DENSITY = st.floats(0.05, 0.95)


def pattern(seed: int, M: int, density: float, *, symmetric: bool = False) -> torch.Tensor:
    """Random, with ones on the diagonal."""
    free = torch.rand(M, M, generator=torch.Generator().manual_seed(seed)) < density
    free = free | torch.eye(M, dtype=torch.bool)
    return free | free.mT if symmetric else free


def node_sizes(seed: int, M: int) -> list[int]:
    return torch.randint(1, 4, (M,), generator=torch.Generator().manual_seed(seed)).tolist()


def ring(M: int, reach: int = 1) -> torch.Tensor:
    distance = (torch.arange(M)[:, None] - torch.arange(M)).abs()
    return torch.minimum(distance, M - distance) <= reach


def grid(rows: int, columns: int, reach: int = 1) -> torch.Tensor:
    node = torch.arange(rows * columns)
    x, y = node // columns, node % columns
    return (x[:, None] - x).abs() + (y[:, None] - y).abs() <= reach


def squares(M: int) -> list[torch.Tensor]:
    """All patterns with ones on the diagonal."""
    places = (~torch.eye(M, dtype=torch.bool)).nonzero()
    patterns = []
    for ones in itertools.product((False, True), repeat=len(places)):
        A = torch.eye(M, dtype=torch.bool)
        A[places[:, 0], places[:, 1]] = torch.tensor(ones, dtype=torch.bool)
        patterns.append(A)
    return patterns


# K in BlkSprs(R)


@given(seeds, NODES, DENSITY, st.booleans())
def test_a_projection_is_the_nearest_member(seed, M, density, layered):
    normal, rows, columns = Random(seed), node_sizes(seed, M), node_sizes(seed + 1, M)
    R = pattern(seed, M, density)
    R = torch.stack([R, pattern(seed + 1, M, density)]) if layered else R
    members, K = BlkSprs(R, rows, columns), normal(3, 2, sum(rows), sum(columns))
    P = members.project(K)
    assert P in members
    assert torch.equal(members.project(P), P)
    member = members.project(normal(*K.shape))
    assert ((K - P) * member).sum().abs() == 0  # what is cut off is orthogonal to every member
    assert (K in members) == bool(R.all())
    assert members.free == int((P[0] != 0).sum()) // (1 if layered else 2)


def test_a_single_entry_or_a_nan_in_a_masked_block_is_seen():
    members = BlkSprs([[1, 0], [1, 1]], rows=[2, 1], columns=[1, 2])
    assert members.free == 1 * 2 + 1 * 1 + 1 * 2
    assert repr(members) == "BlkSprs(2 nodes, 5 of 9 entries free)"
    for value in (1e-300, float("nan")):
        K = torch.zeros(3, 3, dtype=torch.float64)
        assert members.contains(K)
        K[1, 2] = value
        assert not members.contains(K)
        assert members.project(K) in members


def test_the_weights_of_a_sparse_network_are_members():
    net = hdnn.H2(8, 3, sparsity=ring(4), init="paper")
    members = BlkSprs(ring(4), [1] * 4)
    assert net.K_p in members
    assert net.K_q in members
    assert 3 * members.free == net.K_p_free.numel()


@pytest.mark.parametrize(
    ("K", "given"), [(torch.ones(2, 2), r"\(2, 2\)"), (torch.ones(3), r"\(3,\)"), ([1], "list")]
)
def test_members_have_the_size_of_the_blocks(K, given):
    members = BlkSprs(torch.eye(2), [1, 2])
    with pytest.raises(ShapeError, match=rf"\(\.\.\., 3, 3\), as R has it, but got {given}"):
        members.contains(K)
    with pytest.raises(ShapeError, match=given):
        members.project(K)


def test_blocks_have_sizes():
    with pytest.raises(SparsityError, match="rows must be 2 whole numbers >= 1"):
        BlkSprs(torch.eye(2), [1])
    with pytest.raises(SparsityError, match="columns must be 2 whole numbers >= 1"):
        BlkSprs(torch.eye(2), [1, 2], [0, 3])


# Why patterns are not local


@settings(max_examples=40)
@given(seeds, st.integers(2, 5), DENSITY, DENSITY, st.booleans())
def test_an_explanation_names_every_breach_with_a_path_that_exists(seed, M, d, e, layered):
    T, S = pattern(seed, M, d, symmetric=True), pattern(seed + 1, M, e)
    R = torch.stack([pattern(seed + 2, M, d), pattern(seed + 3, M, d)])
    R = R if layered else R[0]
    found = sparsity.explain(T, R, S)
    assert bool(found) != sparsity.is_local(T, R, S)
    expected = set()
    for j, r in enumerate(R if layered else [R]):
        layer = j if layered else None
        for i, k in (~S).nonzero().tolist():
            forward = bool(sparsity.product(T, r.mT, r)[i, k])
            backward = bool(sparsity.product(r.mT, r, T)[i, k])
            if forward or backward:
                expected.add((i, k, forward, backward, layer))
    assert {(b.node, b.needs, b.forward, b.backward, b.layer) for b in found} == expected
    assert len(found) == len(expected)
    for b in found:
        r = R[b.layer] if layered else R
        assert (b.path[0], b.path[3]) == (b.node, b.needs)
        if b.forward:
            i, a, row, k = b.path
            assert T[i, a]
            assert r[row, a]
            assert r[row, k]
        else:
            i, row, a, k = b.path
            assert r[row, i]
            assert r[row, a]
            assert T[a, k]


def test_an_explanation_reads_like_a_sentence():
    R = torch.eye(3)
    R[1, 2] = 1
    T = torch.eye(3)
    T[0, 1] = T[1, 0] = 1
    S = torch.eye(3)
    S[0, 1] = S[1, 0] = S[1, 2] = S[2, 1] = 1
    far = "node 0 needs node 2 forward: T links 0 and 1, and row 1 of R has 1 and 2"
    back = "node 2 needs node 0 backward: T links 0 and 1, and row 1 of R has 1 and 2"
    assert str(sparsity.explain(T, R, S)) == f"{far}\n{back}"
    assert str(sparsity.explain(T, R[None], S)) == f"layer 0: {far}\nlayer 0: {back}"
    (alone, *_) = sparsity.explain(torch.eye(3), R, torch.eye(3))
    assert str(alone) == "node 1 needs node 2 forward and backward: row 1 of R has 1 and 2"
    (linked, *_) = sparsity.explain(T, torch.eye(3), torch.eye(3))
    assert str(linked) == "node 0 needs node 1 forward and backward: T links 0 and 1"
    assert str(sparsity.explain(T, R, torch.ones(3, 3))).startswith("local")


def test_the_error_of_patterns_that_are_not_local_says_why():
    R = torch.eye(3)
    R[1, 2] = 1
    why = r"\(node 1 needs node 2 forward and backward: row 1 of R has 1 and 2\); remove"
    with pytest.raises(SparsityError, match="1 -> 2, 2 -> 1, which S does not link " + why):
        Sparsity(R, torch.eye(3), torch.eye(3))
    layers = torch.stack([torch.eye(3), R])
    with pytest.raises(SparsityError, match="layer 1: node 1 needs node 2"):
        Sparsity(layers, torch.eye(3), torch.eye(3))
    with pytest.raises(SparsityError, match=r"0 -> 3, 0 -> 4 \.\.\., which"):
        Sparsity(torch.ones(6, 6), torch.eye(6), torch.eye(6))


def test_patterns_of_other_sizes_cannot_be_explained():
    with pytest.raises(SparsityError, match="S is for 3 nodes, but R is for 2"):
        sparsity.explain(torch.eye(2), torch.eye(2), torch.eye(3))
    with pytest.raises(SparsityError, match="R is for 3 nodes, but T is for 2"):
        sparsity.explain(torch.eye(2), torch.eye(3), torch.eye(3))


@given(seeds, st.integers(1, 7), st.floats(0.0, 0.4))
def test_components_are_those_of_the_graph_of_dependencies(seed, M, density):
    T, R = pattern(seed, M, density / 2, symmetric=True), pattern(seed + 1, M, density)
    needed = networkx.from_numpy_array(sparsity.dependency(T, R).int().numpy())
    expected = sorted(sorted(group) for group in networkx.connected_components(needed))
    assert sparsity.components(T, R) == expected


# The best patterns


@settings(max_examples=40)
@given(seeds, st.integers(1, 9), DENSITY)
def test_the_heaviest_clique_is_the_first_of_all_subsets(seed, M, density):
    near = best._bits(pattern(seed, M, density, symmetric=True))
    weight, v = node_sizes(seed, M), seed % M
    subsets = (
        nodes
        for nodes in range(1 << M)
        if nodes >> v & 1 and all(nodes & ~near[u] == 0 for u in best.members(nodes))
    )

    def rank(nodes: int) -> tuple[int, int]:
        return sum(weight[u] for u in best.members(nodes)), nodes

    budget = best.Budget(float("inf"))
    assert best.heaviest_clique(near, weight, v, budget) == max(subsets, key=rank)


@settings(max_examples=30)
@given(seeds, st.integers(1, 3), DENSITY, st.integers(1, 3), st.booleans())
def test_no_local_patterns_have_more_free_weights(seed, M, density, layers, symmetric):
    """All T and R are tried, for any S; of equals, the first in R and then T is found."""
    S, sizes = pattern(seed, M, density, symmetric=symmetric), node_sizes(seed, M)
    ranks = {}
    for T, R in itertools.product(squares(M), repeat=2):
        if torch.equal(T, T.mT) and sparsity.is_local(T, R, S):
            free = sparsity.free_weights(Sparsity(R, T, S, sizes), layers=layers)
            ranks[free, *R.flatten().tolist(), *T.flatten().tolist()] = R, T
    found = sparsity.design(S, sizes, layers=layers)
    R, T = ranks[max(ranks)]
    assert torch.equal(found.R, R)
    assert torch.equal(found.T, T)
    of_R = {key: R for key, (R, T) in ranks.items() if int(T.sum()) == M}
    assert torch.equal(sparsity.design_R(S, sizes).R, of_R[max(of_R)])
    of_T = [int(T.sum()) for R, T in ranks.values() if int(R.sum()) == M]
    assert int(sparsity.design_T(S, sizes).T.sum()) == max(of_T)


@settings(max_examples=5)
@given(seeds, DENSITY)
def test_no_local_patterns_of_four_nodes_have_more_ones(seed, density):
    S, R = pattern(seed, 4, density, symmetric=True), torch.stack(squares(4))
    most = {}
    for T in squares(4):
        if torch.equal(T, T.mT):
            local = (sparsity.dependency(T, R) <= S).flatten(1).all(1)
            ones = int(R[local].flatten(1).sum(1).max()) if local.any() else -100
            most[T] = 2 * ones + int(T.sum())
    assert sparsity.free_weights(sparsity.design(S)) == max(most.values())


@settings(max_examples=25)
@given(seeds, st.integers(4, 9), DENSITY, st.integers(1, 2))
def test_designs_are_local_keep_the_sizes_and_do_not_change(seed, M, density, layers):
    S, sizes = pattern(seed, M, density), node_sizes(seed, M)
    designs = (
        sparsity.design_R(S, sizes),
        sparsity.design_T(S, sizes),
        sparsity.design(S, sizes, layers=layers),
    )
    for found in designs:
        assert sparsity.is_local(found.T, found.R, S)
        assert found.sizes == tuple(sizes)
        assert torch.equal(found.S, S)
    again = sparsity.design(S.int().tolist(), sizes, layers=layers)
    assert again.to_config() == designs[2].to_config()
    counts = [sparsity.free_weights(found, layers=layers) for found in designs]
    assert counts[2] == max(counts)


@settings(max_examples=15)
@given(seeds, st.integers(2, 7), DENSITY, st.integers(1, 3))
def test_a_change_of_one_link_gives_the_patterns_of_that_T(seed, M, density, layers):
    S = best._bits(pattern(seed, M, density, symmetric=True))
    weight, budget = node_sizes(seed, M), best.Budget(float("inf"))
    edges = [(i, k) for i, k in itertools.combinations(range(M), 2) if S[i] >> k & 1]
    alone = [1 << v for v in range(M)]
    found = best.Patterns.of(S, weight, layers, alone)
    for edge in Random(seed)(12).argsort().tolist():
        if edges:
            found = found.flip(*edges[edge % len(edges)], budget)
    assert found == best.Patterns.of(S, weight, layers, found.T)


@settings(max_examples=20)
@given(seeds, st.integers(3, 5), DENSITY)
def test_a_climb_ends_where_no_single_change_of_T_frees_more(seed, M, density):
    S = pattern(seed, M, density, symmetric=True)
    most = sparsity.free_weights(sparsity.design(S))
    with pytest.MonkeyPatch().context() as patched:
        patched.setattr(best, "EXHAUSTIVE", -1)
        found = sparsity.design(S)
    free = sparsity.free_weights(found)
    assert free <= most
    for i, k in itertools.combinations(range(M), 2):
        T = found.T.clone()
        T[i, k] = T[k, i] = ~T[i, k]
        if bool((T <= S).all()):
            links, other = best._bits(S), best._bits(T)
            assert best.Patterns.of(links, [1] * M, 1, other).free <= free


def test_a_search_cut_short_is_still_local_and_greedy_at_least():
    S = pattern(0, 40, 0.4, symmetric=True)
    exact = sparsity.free_weights(sparsity.design_R(S))
    with pytest.MonkeyPatch().context() as patched:
        patched.setattr(best, "CLIQUE_WORK", 0)
        patched.setattr(best, "CLIMB_WORK", 500)
        greedy, both = sparsity.design_R(S), sparsity.design(S)
    assert 3 * 40 < sparsity.free_weights(greedy) < exact
    assert sparsity.is_local(both.T, both.R, S)
    assert sparsity.free_weights(both) >= sparsity.free_weights(greedy)


@settings(max_examples=25)
@given(seeds, st.integers(1, 9), st.floats(0.05, 0.6), st.booleans(), st.booleans())
def test_connected_designs_join_all_that_the_graph_joins(seed, M, density, symmetric, both):
    S, sizes = pattern(seed, M, density, symmetric=symmetric), node_sizes(seed, M)
    make = sparsity.design if both else sparsity.design_R
    free, connected = make(S, sizes), make(S, sizes, connected=True)
    eye = torch.eye(M)
    assert sparsity.components(connected.T, connected.R) == sparsity.components(S & S.mT, eye)
    assert sparsity.is_local(connected.T, connected.R, S)
    count = sparsity.free_weights(connected)
    if not both or int((S & S.mT).sum()) - M <= 2 * best.EXHAUSTIVE:
        assert count <= sparsity.free_weights(free)
        if sparsity.components(free.T, free.R) == sparsity.components(connected.T, connected.R):
            assert connected.to_config() == free.to_config()  # nothing had to be given up
    if both:
        assert count >= sparsity.free_weights(sparsity.design_T(S, sizes))
        assert count >= sparsity.free_weights(sparsity.design_R(S, sizes, connected=True))


def test_two_cliques_and_the_link_between_them_are_joined_at_the_least_price():
    S = torch.block_diag(torch.ones(3, 3), torch.ones(3, 3))
    S[2, 3] = S[3, 2] = 1
    apart, joined = sparsity.design_R(S), sparsity.design_R(S, connected=True)
    assert sparsity.components(apart.T, apart.R) == [[0, 1, 2], [3, 4, 5]]
    assert sparsity.components(joined.T, joined.R) == [[0, 1, 2, 3, 4, 5]]
    assert int(apart.R.sum()) - int(joined.R.sum()) == 1  # one row is {2, 3}
    with pytest.raises(OptionError, match="connected must be True or False"):
        sparsity.design_R(S, connected="yes")


def test_isolated_nodes_have_one_pattern_and_a_complete_graph_has_all_links():
    for found in (sparsity.design(torch.eye(5)), sparsity.design_R(torch.eye(5))):
        assert torch.equal(found.R, torch.eye(5).bool())
        assert torch.equal(found.T, torch.eye(5).bool())
    assert bool(sparsity.design_R(torch.ones(6, 6)).R.all())
    both = sparsity.design(torch.ones(6, 6))
    assert bool(both.R.all())
    assert bool(both.T.all())


def test_the_ring_of_the_paper_gets_as_many_weights_as_its_own_pattern():
    S = ring(8, 2)
    found = sparsity.design_R(S)
    assert int(found.R.sum()) == int(ring(8).sum()) == 24
    assert sparsity.components(found.T, found.R) == [list(range(8))]
    net = hdnn.H2(16, 4, sparsity=found)
    assert net.K_p_free.numel() == 4 * 24


def test_links_one_way_are_not_used():
    S = torch.ones(3, 3)
    S[2, 0] = 0  # 0 hears 2, but 2 does not hear 0
    for found in (sparsity.design(S), sparsity.design_R(S), sparsity.design_T(S)):
        needed = sparsity.dependency(found.T, found.R)
        assert not needed[0, 2]
        assert not needed[2, 0]


def test_large_nodes_come_first():
    S = ring(4)  # node 0 is between 1 and 3
    assert sparsity.design_R(S).R[0].tolist() == [True, True, False, False]
    assert sparsity.design_R(S, [1, 1, 1, 2]).R[0].tolist() == [True, False, False, True]


def test_free_weights_are_the_parameters_of_a_network_that_learns_X():
    S, sizes = ring(5), [1, 2, 1, 3, 1]
    for found in (sparsity.design(S, sizes), sparsity.design_R(S, sizes)):
        net = hdnn.H2(16, 3, sparsity=found, learn_X=True)
        biases = net.b_p.numel() + net.b_q.numel()
        count = sum(p.numel() for p in net.parameters())
        assert sparsity.free_weights(found, layers=3) == count - biases
    layers = Sparsity(torch.stack([ring(5), torch.eye(5).bool()]))
    assert sparsity.free_weights(layers) == 2 * (15 + 5) + 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("S", "connected"),
    [
        (ring(200), True),
        (ring(200, 5), False),
        (grid(10, 20), True),
        (grid(10, 20, 2), False),
        (pattern(0, 200, 0.05, symmetric=True), False),
    ],
    ids=["ring", "wide ring", "grid", "wide grid", "random"],
)
def test_two_hundred_nodes_get_at_least_what_simple_designs_give(S, connected):
    free = sparsity.free_weights(sparsity.design(S, connected=connected))
    assert free >= sparsity.free_weights(sparsity.design_R(S, connected=connected))
    assert free >= sparsity.free_weights(sparsity.design_T(S))


def test_graphs_for_a_design_are_checked():
    for make in (sparsity.design, sparsity.design_R, sparsity.design_T):
        with pytest.raises(SparsityError, match=r"S has a 0 on its diagonal; use S \+ I"):
            make([[0, 1], [1, 0]])
        with pytest.raises(SparsityError, match=r"S must be \(M, M\), one graph, .* \(2, 3, 3\)"):
            make(torch.ones(2, 3, 3))
        with pytest.raises(SparsityError, match="sizes must be 2 whole numbers"):
            make(torch.ones(2, 2), [1, 2, 3])
    with pytest.raises(ShapeError, match="layers must be a whole number >= 1, but got 0"):
        sparsity.design(torch.ones(2, 2), layers=0)


# networkx


def test_a_networkx_graph_gives_a_network_at_once():
    graph = networkx.Graph([("pump", "tank"), ("tank", "valve"), ("pump", "pump")])
    networkx.set_node_attributes(graph, {"pump": 1, "tank": 2, "valve": 1}, "states")
    found = sparsity.from_networkx(graph, size="states")
    assert found.S.int().tolist() == [[1, 1, 0], [1, 1, 1], [0, 1, 1]]
    assert found.sizes == (1, 2, 1)
    assert torch.equal(found.T, torch.eye(3).bool())
    assert hdnn.H2(8, 2, sparsity=found).K_p.shape == (2, 4, 4)
    assert sparsity.from_networkx(graph).sizes is None


@pytest.mark.parametrize("kind", [networkx.Graph, networkx.MultiGraph])
def test_the_order_of_the_nodes_is_that_of_the_graph(kind):
    graph = kind()
    graph.add_nodes_from([3, "a", (0, 1)])
    graph.add_edge((0, 1), 3)
    assert sparsity.from_networkx(graph).S.int().tolist() == [[1, 0, 1], [0, 1, 0], [1, 0, 1]]


def test_an_edge_of_a_directed_graph_lets_its_head_hear_its_tail():
    graph = networkx.DiGraph([(0, 1), (1, 2), (2, 1)])
    found = sparsity.from_networkx(graph)
    assert found.S.int().tolist() == [[1, 0, 0], [1, 1, 1], [0, 1, 1]]
    assert sparsity.components(found.T, found.R) == [[0], [1, 2]]


def test_the_design_of_a_graph_can_be_chosen():
    graph = networkx.cycle_graph(5)
    for name, expected in (
        ("R", sparsity.design_R(ring(5), connected=True)),
        ("T", sparsity.design_T(ring(5))),
        ("both", sparsity.design(ring(5), connected=True)),
    ):
        found = sparsity.from_networkx(graph, design=name)
        assert found.to_config() == expected.to_config()
    with pytest.raises(OptionError, match="design 'X' is not known; choose one of R, T, both"):
        sparsity.from_networkx(graph, design="X")


def test_a_graph_is_needed_with_nodes_and_sizes_for_all():
    with pytest.raises(SparsityError, match="networkx graph with nodes, but got list"):
        sparsity.from_networkx([(0, 1)])
    with pytest.raises(SparsityError, match="with nodes, but got one without"):
        sparsity.from_networkx(networkx.Graph())
    graph = networkx.path_graph(2)
    graph.nodes[0]["size"] = 1
    with pytest.raises(SparsityError, match="node 1 has no attribute 'size'"):
        sparsity.from_networkx(graph, size="size")
    graph.nodes[1]["size"] = 0.5
    with pytest.raises(SparsityError, match="sizes must be 2 whole numbers >= 1"):
        sparsity.from_networkx(graph, size="size")


def test_without_networkx_the_extra_is_named(monkeypatch):
    graph = networkx.path_graph(2)
    monkeypatch.setitem(sys.modules, "networkx", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'hdnn\[graph\]'"):
        sparsity.from_networkx(graph)
