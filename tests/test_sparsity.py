"""Block patterns hold exactly, are explained where they are not local, and are designed well."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hdnn
from hdnn import sparsity
from hdnn.errors import HDNNError, OptionError
from hdnn.sparsity import Sparsity

F64 = torch.float64
NODES = st.integers(1, 5)
SEEDS = st.integers(0, 10**6)
DENSITY = st.floats(0.05, 0.95)


def components(T, R):
    """The groups of nodes that hear of each other, at any depth."""
    needed = sparsity.dependency(T, R)
    return sparsity.groups(sparsity.links_of(needed | needed.mT))


def pattern(
    seed: int, M: int, density: float, *, symmetric: bool = False
) -> torch.Tensor:
    """Random, with ones on the diagonal."""
    free = (
        torch.rand(M, M, generator=torch.Generator().manual_seed(seed))
        < density
    )
    free = free | torch.eye(M, dtype=torch.bool)
    return free | free.mT if symmetric else free


def ring(M: int, reach: int = 1) -> torch.Tensor:
    distance = (torch.arange(M)[:, None] - torch.arange(M)).abs()
    return torch.minimum(distance, M - distance) <= reach


def product(*patterns: torch.Tensor) -> torch.Tensor:
    """The binary product."""
    result = patterns[0].float()
    for other in patterns[1:]:
        result = ((result @ other.float()) > 0).float()
    return result > 0


# Networks


OPTIMISERS = {
    "momentum": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, weight_decay=0.1
    ),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1),
}


@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize("kind", ["H1", "H2", "ImplicitH2"])
def test_no_optimiser_moves_a_masked_entry(kind, optimiser):
    net = getattr(hdnn, kind)(
        8, 3, sparsity=Sparsity(ring(4)), step=0.1, dtype=F64
    )
    names = [name for name in net.weights() if name.startswith("K")]
    before = {name: net.weight(name).detach().clone() for name in names}
    steps = OPTIMISERS[optimiser](list(net.parameters()))
    for _ in range(3):
        steps.zero_grad()
        net(torch.randn(5, 8, dtype=F64)).square().mean().backward()
        steps.step()
    for name in names:
        masked = before[name] == 0
        assert masked.any()
        assert bool((net.weight(name)[masked] == 0).all())
        assert not torch.equal(net.weight(name), before[name])


@given(SEEDS, st.integers(1, 4), st.integers(1, 3))
def test_a_sparse_network_equals_the_dense_one_with_the_same_weights(
    seed, M, size
):
    n = 2 * M * size
    sparse = hdnn.H2(n, 3, sparsity=pattern(seed, M, 0.4), dtype=F64)
    dense = hdnn.H2(n, 3, dtype=F64)
    for name, weight in sparse.weights().items():
        if name[0] in "Kb":
            dense.assign(name, weight.detach())
    y = torch.randn(4, n, dtype=F64)
    assert torch.allclose(sparse(y), dense(y), atol=1e-12)


def test_a_copy_and_a_file_keep_the_patterns():
    net = hdnn.H2(8, 2, sparsity=Sparsity(ring(4), sizes=[1, 1, 1, 1]))
    twin = copy.deepcopy(net)
    assert torch.equal(twin.K_p, net.K_p)
    again = Sparsity(**net.sparsity.to_config())
    assert torch.equal(again.R, ring(4))
    assert repr(again) == "Sparsity(4 nodes, 8 links in R)"


def test_one_layer_sees_no_further_than_the_dependency_says():
    net = hdnn.H2(16, 1, sparsity=ring(8), init="paper", dtype=F64)
    y = torch.randn(1, 16, dtype=F64)
    J = torch.autograd.functional.jacobian(lambda y: net(y)[0], y)[:, 0]
    p_by_q = J[:8, 8:] != 0
    assert torch.equal(p_by_q, sparsity.dependency(torch.eye(8), ring(8)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"R": [[0, 1], [1, 0]]}, "R has a 0 on its diagonal"),
        ({"R": [[1, 2], [1, 1]]}, "R must be .* contain only 0 and 1"),
        ({"R": [1, 1]}, r"R must be \(M, M\)"),
        ({"R": "ring"}, "R must be an"),
        (
            {"R": torch.eye(2), "T": torch.eye(3)},
            "T and R must be for the same nodes",
        ),
        ({"R": torch.eye(2), "T": [[1, 1], [0, 1]]}, "T must be symmetric"),
        ({"R": torch.eye(2), "sizes": [1]}, "sizes must be 2 whole numbers"),
        ({"R": torch.eye(2), "sizes": [1, 0]}, "the size of a node"),
        ({"R": ring(5), "T": torch.eye(5), "S": ring(5)}, "0 -> 2"),
        (
            {"R": torch.ones(2, 3, 3), "S": torch.ones(3, 3, 3)},
            "S and R must be for the same nodes and layers",
        ),
    ],
)
def test_patterns_that_do_not_fit_are_sentences(arguments, message):
    with pytest.raises(HDNNError, match=message):
        Sparsity(**arguments)


def test_features_that_nodes_cannot_share_are_a_sentence():
    with pytest.raises(
        OptionError, match="7 features cannot be split equally among 2"
    ):
        Sparsity(torch.eye(2)).node_sizes(7)


# Why patterns are not local


@settings(max_examples=40)
@given(SEEDS, st.integers(2, 5), DENSITY, DENSITY, st.booleans())
def test_an_explanation_names_every_breach_with_a_path_that_exists(
    seed, M, d, e, layered
):
    T = pattern(seed, M, d, symmetric=True)
    S = pattern(seed + 1, M, e)
    R = torch.stack([pattern(seed + 2, M, d), pattern(seed + 3, M, d)])
    R = R if layered else R[0]
    breaches = sparsity.explain(T, R, S)
    assert bool(breaches) != sparsity.is_local(T, R, S)
    expected = set()
    for j, r in enumerate(R if layered else [R]):
        for i, k in (~S).nonzero().tolist():
            forward = bool(product(T, r.mT, r)[i, k])
            backward = bool(product(r.mT, r, T)[i, k])
            if forward or backward:
                expected.add((i, k, forward, backward, j if layered else None))
    assert {
        (b.node, b.needs, b.forward, b.backward, b.layer) for b in breaches
    } == expected
    for b in breaches:
        r = R[b.layer] if layered else R
        i, a, row, k = b.path if b.forward else b.path[::-1]
        assert {b.path[0], b.path[3]} == {b.node, b.needs}
        assert T[i, a]
        assert r[row, a]
        assert r[row, k]


def test_an_explanation_reads_like_a_sentence():
    R = torch.tensor([[1, 1, 0], [0, 1, 0], [0, 0, 1]])
    T = torch.tensor([[1, 0, 1], [0, 1, 0], [1, 0, 1]])
    lines = str(sparsity.explain(T, R, torch.eye(3))).splitlines()
    assert (
        "node 0 needs node 1 forward and backward: row 0 of R has 0 and 1"
        in lines
    )
    assert (
        "node 2 needs node 1 forward: T links 2 and 0, and row 0 of R has 0 and 1"
        in lines
    )
    assert (
        "node 1 needs node 2 backward: T links 2 and 0, and row 0 of R has 0 and 1"
        in lines
    )
    assert str(sparsity.explain(T, R, torch.ones(3, 3))).startswith("local")


def test_components_are_the_nodes_that_hear_of_each_other():
    T = torch.eye(4)
    T[2, 3] = T[3, 2] = 1
    assert components(T, torch.eye(4)) == [[0], [1], [2, 3]]
    assert components(torch.eye(4), ring(4)) == [[0, 1, 2, 3]]


# Design


@settings(max_examples=40)
@given(SEEDS, st.integers(1, 12), DENSITY)
def test_designed_patterns_are_local_and_join_what_the_graph_joins(
    seed, M, density
):
    S = pattern(seed, M, density, symmetric=True)
    designed = sparsity.design(S)
    assert sparsity.is_local(designed.T, designed.R, S)
    joined = components(designed.T, designed.R)
    assert joined == components(S, torch.eye(M))


@settings(max_examples=15)
@given(SEEDS, st.integers(2, 4), DENSITY)
def test_no_connected_pattern_has_more_free_weights(seed, M, density):
    S = pattern(seed, M, density, symmetric=True)
    apart = len(components(S, torch.eye(M)))
    designed = int(sparsity.design(S).R.sum())
    cells = [(i, k) for i, k in S.nonzero().tolist() if i != k]
    best = 0
    for ones in itertools.product((0, 1), repeat=len(cells)):
        R = torch.eye(M)
        for (i, k), value in zip(cells, ones, strict=True):
            R[i, k] = value
        local = sparsity.is_local(torch.eye(M), R, S)
        if local and len(components(torch.eye(M), R)) == apart:
            best = max(best, int(R.sum()))
    assert designed == best


def test_large_nodes_weigh_more():
    chain = [[1, 1, 0], [1, 1, 1], [0, 1, 1]]
    R = sparsity.design(chain, sizes=[1, 1, 9]).R
    assert bool(R[1, 2])


def test_a_design_needs_one_graph_with_ones_on_its_diagonal():
    with pytest.raises(OptionError, match="S has a 0 on its diagonal"):
        sparsity.design([[0, 1], [1, 0]])
    with pytest.raises(OptionError, match="one graph"):
        sparsity.design(torch.ones(2, 3, 3))
