"""Distributed networks: block patterns that hold exactly, are not counted, and stay local."""

from __future__ import annotations

import copy

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hdnn
from hdnn import functional, interconnection, sparsity
from hdnn.errors import SparsityError
from hdnn.operators import block_sparse
from hdnn.sparsity import Sparsity
from strategies import Random, seeds

F64 = torch.float64
RING = 8


def ring(M: int, reach: int = 1) -> torch.Tensor:
    """Node i and its neighbours within `reach` steps of a ring."""
    distance = (torch.arange(M)[:, None] - torch.arange(M)).abs()
    return torch.minimum(distance, M - distance) <= reach


def random_pattern(seed: int, M: int, density: float = 0.4, *, symmetric: bool = False):
    free = torch.rand(M, M, generator=torch.Generator().manual_seed(seed)) < density
    free = free | torch.eye(M, dtype=torch.bool)
    return free | free.mT if symmetric else free


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def count(net: torch.nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


OPTIMISERS = {
    "SGD with momentum and decay": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True
    ),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.5),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.02, max_iter=5),
}


def train(net, optimiser: str, steps: int = 4) -> None:
    y, target = Random(1)(5, net.features), Random(2)(5, net.features)
    optimiser_ = OPTIMISERS[optimiser](list(net.parameters()))

    def closure():
        optimiser_.zero_grad()
        loss = (net(y) - target).square().mean()
        loss.backward()
        return loss

    for _ in range(steps):
        optimiser_.step(closure)


# Masked entries are zero and are no parameters


@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize("kind", ["H1", "H2", "ImplicitH2", "verlet", "midpoint"])
def test_no_optimiser_moves_a_masked_entry(optimiser, kind):
    R, T = ring(4), torch.eye(4)
    options = {"step": 0.1, "dtype": F64, "generator": generator()}
    if kind in ("H1", "midpoint"):
        options |= {"sparsity": Sparsity(R, T, sizes=[2] * 4), "learn_J": True}
        options["J"] = interconnection.block_diagonal([2] * 4)
    else:
        options |= {"sparsity": Sparsity(R, T), "learn_X": True}
    if kind in ("verlet", "midpoint"):
        net = hdnn.HamiltonianNet(8, 3, kind, **options)
    else:
        net = getattr(hdnn, kind)(8, 3, **options)
    masks = {name: net.weight(name) != 0 for name in net.stacked if name.startswith("K")}
    J_mask = net.J != 0
    before = copy.deepcopy(net)
    train(net, optimiser)
    for name, mask in masks.items():
        K = net.weight(name)
        assert not torch.equal(K, before.weight(name))
        assert bool((K[~mask] == 0).all())
        assert bool((K[mask] != 0).any())
    paired = kind in ("H2", "ImplicitH2", "verlet")
    free = interconnection.from_X(torch.ones(4, 4)).bool() & torch.eye(4).bool().tile(2, 2)
    free = free if paired else block_sparse.mask(T, [2] * 4, [2] * 4)
    assert not torch.equal(net.J, before.J)
    assert bool((net.J[~free] == 0).all())
    assert bool(J_mask[free].any())


def test_a_ring_of_eight_has_the_parameters_of_the_errata():
    n, R = 16, ring(RING)
    assert count(hdnn.H2(n, 1, sparsity=R)) == 64
    assert count(hdnn.H2(n, 1)) == 144
    assert count(hdnn.ImplicitH2(n, 1, sparsity=R)) == 112
    assert count(hdnn.ImplicitH2(n, 1)) == 272
    assert count(hdnn.H2(n, 10, sparsity=R)) == 640
    assert count(hdnn.H2(n, 10, sparsity=R, tied=True)) == 64


def test_only_the_free_entries_are_parameters_under_a_name_that_says_so():
    net = hdnn.H2(16, 2, sparsity=ring(RING), learn_X=True)
    shapes = {name: tuple(p.shape) for name, p in net.named_parameters()}
    assert shapes == {
        "X_free": (8,),
        "K_p_free": (2 * 24,),
        "K_q_free": (2 * 24,),
        "b_p": (2, 8),
        "b_q": (2, 8),
    }
    assert net.K_p.shape == net.K_q.shape == (2, 8, 8)
    assert torch.equal(net.X, torch.eye(8))


@given(seeds, st.integers(1, 4), st.integers(1, 3), st.sampled_from(["paper", "scaled"]))
def test_the_free_entries_are_drawn_like_those_of_a_dense_network(seed, M, size, init):
    options = {"init": init, "dtype": F64}
    net = hdnn.H2(
        2 * M * size, 2, sparsity=random_pattern(seed, M), generator=generator(seed), **options
    )
    dense = hdnn.H2(2 * M * size, 2, generator=generator(seed), **options)
    free = block_sparse.mask(net.sparsity.R, [size] * M, [size] * M)
    for name in ("K_p", "K_q"):
        assert torch.equal(net.weight(name), dense.weight(name) * free)


# The same function as the dense network


@given(seeds, st.integers(1, 4), st.integers(1, 3), st.booleans(), st.booleans())
def test_a_sparse_network_equals_the_dense_one_with_the_same_K(seed, M, size, tied, each):
    N = 3
    R = torch.stack([random_pattern(seed + j, M) for j in range(N)])
    R = R if each and not tied else R[0]
    X = Random(seed)(M * size, M * size) * block_sparse.mask(
        random_pattern(seed + 9, M, symmetric=True), [size] * M, [size] * M
    )
    sparse = hdnn.H2(
        2 * M * size, N, X=X, sparsity=R, tied=tied, dtype=F64, generator=generator(seed)
    )
    dense = hdnn.H2(2 * M * size, N, X=X, tied=tied, dtype=F64)
    for name in sparse.stacked:
        dense.assign(name, sparse.weight(name))
    y = Random(seed + 1)(4, 2 * M * size)
    assert torch.equal(sparse(y), dense(y))
    assert torch.equal(sparse.trajectory(y), dense.trajectory(y))
    sparse(y).square().sum().backward()
    dense(y).square().sum().backward()
    for name in ("K_p", "K_q"):
        index = sparse.get_buffer(f"_{name}_index")
        expected = dense.get_parameter(name).grad.flatten()[index]
        torch.testing.assert_close(sparse.get_parameter(f"{name}_free").grad, expected)


def test_every_layer_can_have_a_pattern_of_its_own():
    R = torch.stack([torch.eye(4).bool(), ring(4), torch.ones(4, 4).bool()])
    net = hdnn.H2(8, 3, sparsity=R, init="paper")
    for j in range(3):
        assert torch.equal(net.K_p[j] != 0, R[j])
    assert count(net) == 2 * (4 + 12 + 16) + 2 * 12
    for wrong in (R[:2], R[[0, 0, 1, 2]]):
        with pytest.raises(SparsityError, match=f"{len(wrong)} layers, but the network has 3"):
            hdnn.H2(8, 3, sparsity=wrong)
    with pytest.raises(SparsityError, match="3 layers, but the network has 1"):
        hdnn.H2(8, 3, sparsity=R, tied=True)


@given(seeds, st.integers(2, 4))
def test_assign_takes_whole_matrices_and_keeps_the_free_entries(seed, M):
    net = hdnn.H2(2 * M, 2, sparsity=random_pattern(seed, M), dtype=F64)
    K = Random(seed)(2, M, M)
    net.assign("K_p", K)
    assert torch.equal(net.K_p, K * net.sparsity.R)


def test_a_sparse_network_survives_deepcopy_casting_and_its_state_dict():
    net = hdnn.H2(8, 2, sparsity=Sparsity(ring(4), ring(4)), learn_X=True, generator=generator())
    twin = copy.deepcopy(net)
    assert twin.K_p_free is not net.K_p_free
    other = hdnn.H2(8, 2, sparsity=Sparsity(ring(4), ring(4)), learn_X=True)
    other.load_state_dict(net.state_dict())
    y = Random(0)(3, 8).float()
    assert torch.equal(twin(y), net(y))
    assert torch.equal(other(y), net(y))
    assert net.to(torch.bfloat16).K_p.dtype == torch.bfloat16
    assert net.to("meta").K_p.device.type == "meta"


def test_the_repr_tells_nodes_and_links():
    assert "Sparsity(8 nodes, 16 links in R)" in repr(hdnn.H2(16, 1, sparsity=ring(8)))


# Patterns of X and J


def test_X_is_learned_inside_T_only():
    T = ring(5)
    net = hdnn.H2(10, 2, sparsity=Sparsity(torch.eye(5), T), learn_X=True, dtype=F64)
    assert net.X_free.numel() == 15
    net.assign("X", Random(0)(5, 5))
    assert torch.equal(net.X != 0, T)
    train(net, "SGD with momentum and decay")
    assert torch.equal(net.X != 0, T)


def test_without_T_the_pattern_is_what_X_uses():
    X = torch.eye(3)
    X[0, 2] = 1.0
    net = hdnn.H2(6, 2, X=X, sparsity=torch.eye(3), learn_X=True)
    assert torch.equal(net.sparsity.T, torch.tensor([[1, 0, 1], [0, 1, 0], [1, 0, 1]]).bool())
    assert net.X_free.numel() == 5


def test_the_callers_pattern_is_not_changed():
    given_ = Sparsity(torch.eye(3))
    hdnn.H2(6, 2, sparsity=given_)
    assert given_.T is None


@given(seeds, st.lists(st.integers(1, 3), min_size=1, max_size=4), st.booleans())
def test_J_is_learned_inside_T_for_nodes_that_own_pieces_of_y_or_pairs(seed, sizes, paired):
    M = len(sizes)
    T = random_pattern(seed, M, symmetric=True)
    n = 2 * sum(sizes) if paired else sum(sizes)
    free = block_sparse.mask(T, sizes, sizes)
    free = free.tile(2, 2) if paired else free
    J = Random(seed).skew(n) * free
    net = hdnn.H1(
        n, 2, J=J, learn_J=True, sparsity=Sparsity(torch.eye(M), T, sizes=sizes), dtype=F64
    )
    assert torch.equal(net.J, J)
    assert net.J_upper.numel() == int(free.triu(1).sum())
    with torch.no_grad():
        net.J_upper.copy_(1 + Random(seed)(net.J_upper.numel()).square())
    assert torch.equal(net.J, -net.J.mT)
    assert torch.equal(net.J != 0, free & ~torch.eye(n, dtype=torch.bool))


def test_K_of_H1_has_its_blocks_where_the_nodes_have_their_features():
    R = torch.tensor([[1, 1], [0, 1]])
    pieces = hdnn.H1(4, 1, J=interconnection.block_diagonal([2, 2]), sparsity=R, init="paper")
    expected = block_sparse.mask(R, [2, 2], [2, 2])
    assert torch.equal(pieces.K[0] != 0, expected)
    pairs = hdnn.H1(4, 1, sparsity=Sparsity(R, sizes=[1, 1]), init="paper")
    assert torch.equal(pairs.K[0] != 0, R.bool().tile(2, 2))
    uneven = hdnn.H1(6, 1, sparsity=Sparsity(R, sizes=[1, 2]), init="paper")
    half = block_sparse.mask(R, [1, 2], [1, 2])
    assert torch.equal(uneven.K[0] != 0, half.tile(2, 2))


@pytest.mark.parametrize("integrator", ["semi_implicit_euler_full", "midpoint"])
def test_implicit_solves_couple_all_nodes_so_they_do_not_claim_to_be_local(integrator):
    M = 8
    masked = Sparsity(ring(M), torch.eye(M), sizes=[1] * M)
    net = hdnn.HamiltonianNet(
        2 * M, 1, integrator, step=0.2, sparsity=masked, dtype=F64, generator=generator()
    )
    jacobian = torch.autograd.functional.jacobian(net, Random(0)(2 * M))
    reached = block_sparse.block_pattern(jacobian[:M, :M], [1] * M, [1] * M)
    assert bool(reached.all())  # any S but the complete graph is broken
    local = Sparsity(ring(M), torch.eye(M), ring(M, 2), sizes=[1] * M)
    with pytest.raises(SparsityError, match="local"):
        hdnn.HamiltonianNet(2 * M, 1, integrator, sparsity=local)


# The locality condition


@settings(max_examples=40)
@given(seeds, st.integers(2, 6), st.floats(0.05, 0.35))
def test_the_dependency_follows_the_paths_of_the_proof(seed, M, density):
    """Node i needs h if T(i, r), R(s, r) and R(s, h) are 1 for some r and s, and the other way."""
    R = random_pattern(seed, M, density)
    T = random_pattern(seed + 1, M, density, symmetric=True)
    nodes = range(M)
    forward = torch.tensor(
        [
            [any(T[i, r] and R[s, r] and R[s, h] for r in nodes for s in nodes) for h in nodes]
            for i in nodes
        ]
    )
    assert torch.equal(sparsity.dependency(T, R), forward | forward.mT)


@given(seeds, st.integers(1, 5), st.floats(0.1, 0.9))
def test_the_dependency_is_that_of_the_field_itself(seed, M, density):
    """Generically necessary too: with two features a node and random weights nothing cancels."""
    sizes, n = [2] * M, 2 * M
    R = random_pattern(seed, M, density)
    T = random_pattern(seed + 1, M, density, symmetric=True)
    normal = Random(seed)
    J = normal.skew(n) * block_sparse.mask(T, sizes, sizes)
    net = hdnn.H1(
        n, 1, J=J, sparsity=Sparsity(R, T), init="paper", dtype=F64, generator=generator(seed)
    )
    y = normal(n)
    jacobian = torch.autograd.functional.jacobian(net, y) - torch.eye(n)
    forward = block_sparse.block_pattern(jacobian, sizes, sizes)
    backward = block_sparse.block_pattern(jacobian.mT, sizes, sizes)
    assert torch.equal(sparsity.dependency(T, R), forward | backward)
    for S in (forward | backward, torch.ones(M, M), torch.eye(M), random_pattern(seed + 2, M)):
        local = bool(((forward | backward) <= torch.as_tensor(S).bool()).all())
        assert sparsity.is_local(T, R, S) == local


@given(seeds, st.integers(1, 5), st.floats(0.1, 0.9))
def test_the_dependency_is_that_of_each_half_of_an_H2_layer(seed, M, density):
    sizes, m = [2] * M, 2 * M
    R = random_pattern(seed, M, density)
    T = random_pattern(seed + 1, M, density, symmetric=True)
    normal = Random(seed)
    X = normal(m, m) * block_sparse.mask(T, sizes, sizes)
    net = hdnn.H2(
        2 * m, 1, X=X, sparsity=Sparsity(R, T), init="paper", dtype=F64, generator=generator(seed)
    )
    jacobian = torch.autograd.functional.jacobian(net, normal(2 * m))
    kick = block_sparse.block_pattern(jacobian[:m, m:], sizes, sizes)  # dp'/dq
    reach = sparsity.product(T, R.mT, R)
    assert torch.equal(kick, reach)
    # q' uses the new p: a layer reaches as far as two of these, and no further.
    both = block_sparse.block_pattern(jacobian[m:, m:], sizes, sizes)
    assert bool((both <= sparsity.product(reach, reach) | torch.eye(M, dtype=torch.bool)).all())


def test_the_example_of_the_paper_is_local():
    S = [[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 1, 1]]
    cases = [
        (S, torch.eye(4)),
        (torch.eye(4), [[1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 1, 1], [0, 0, 1, 1]]),
        (
            [[1, 0, 1, 0], [0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 1, 1]],
            [[1, 0, 0, 1], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]],
        ),
    ]
    for T, R in cases:
        assert sparsity.is_local(T, R, S)
        assert not sparsity.dependency(T, R)[1, 3]
    assert not sparsity.is_local(torch.ones(4, 4), torch.eye(4), S)


def test_isolated_nodes_admit_only_the_identity():
    eye = torch.eye(3)
    assert sparsity.is_local(eye, eye, eye)
    assert not sparsity.is_local(ring(3), eye, eye)
    assert not sparsity.is_local(eye, ring(3), eye)


def test_the_ring_of_table_two_reaches_two_steps():
    assert torch.equal(sparsity.dependency(torch.eye(8), ring(8)), ring(8, 2))
    assert sparsity.is_local(torch.eye(8), ring(8), ring(8, 2))
    assert not sparsity.is_local(torch.eye(8), ring(8), ring(8))
    assert Sparsity(ring(8), torch.eye(8), ring(8, 2)).nodes == 8


def test_patterns_may_be_tensors_arrays_or_lists():
    for form in (torch.eye(3), numpy.eye(3), torch.eye(3).tolist(), torch.eye(3).bool()):
        assert torch.equal(Sparsity(form).R, torch.eye(3).bool())
        assert hdnn.H2(6, 1, sparsity=form).K_p_free.numel() == 3


@given(seeds, st.integers(1, 5), st.integers(1, 4))
def test_the_binary_product_is_one_where_a_path_leads(seed, M, factors):
    patterns = [random_pattern(seed + i, M, 0.3) for i in range(factors)]
    product = patterns[0].double()
    for p in patterns[1:]:
        product = product @ p.double()
    assert torch.equal(sparsity.product(*patterns), product > 0)


# Errors


@pytest.mark.parametrize("which", ["R", "T", "S"])
@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("ring", "binary matrix, but got str"),
        ([[1, 0], [1]], "binary matrix, but got list"),
        (3, r"\(M, M\).*shape \(\)"),
        ([1, 1], r"\(M, M\).*shape \(2,\)"),
        (torch.ones(2, 3), r"\(M, M\).*shape \(2, 3\)"),
        (torch.ones(0, 0), r"\(M, M\).*shape \(0, 0\)"),
        (torch.ones(1, 1, 2, 2), r"\(M, M\).*shape \(1, 1, 2, 2\)"),
        (0.5 * torch.eye(2), "0 and 1 only"),
        (torch.eye(2) * float("nan"), "0 and 1 only"),
        ([[0, 1], [1, 1]], "own neighbour.*0 on its diagonal"),
    ],
)
def test_patterns_are_square_and_binary_with_a_full_diagonal(which, pattern, message):
    patterns = {"R": torch.eye(2), which: pattern}
    with pytest.raises(SparsityError, match=f"{which}.*{message}|{message}.*{which}|{message}"):
        Sparsity(**patterns)


def test_T_is_symmetric():
    with pytest.raises(SparsityError, match=r"T must be symmetric.*use T \+ T\^T"):
        Sparsity(torch.eye(2), T=[[1, 1], [0, 1]])


@pytest.mark.parametrize("which", ["T", "S"])
def test_all_patterns_have_the_same_nodes(which):
    with pytest.raises(SparsityError, match=f"{which} is for 3 nodes, but R is for 2"):
        Sparsity(torch.eye(2), **{which: torch.eye(3)})


def test_the_locality_condition_of_patterns_for_different_nodes_is_refused():
    with pytest.raises(SparsityError, match="nodes"):
        sparsity.dependency(torch.eye(3), torch.eye(2))
    with pytest.raises(SparsityError, match="nodes"):
        sparsity.is_local(torch.eye(2), torch.eye(2), torch.eye(3))


def test_patterns_for_different_numbers_of_layers_are_refused():
    R, S = torch.eye(2).expand(3, 2, 2), torch.eye(2).expand(2, 2, 2)
    with pytest.raises(SparsityError, match="layers"):
        Sparsity(R, torch.eye(2), S)


@pytest.mark.parametrize("sizes", [[1], [1, 1, 1], [1, 0], [2, -1], []])
def test_every_node_has_a_size_of_at_least_one(sizes):
    with pytest.raises(SparsityError, match="sizes must be 2 whole numbers >= 1"):
        Sparsity(torch.eye(2), sizes=sizes)


@pytest.mark.parametrize("sizes", [2, "ab", [1.5, 1.5], ["a", 1], [None, 1]])
def test_sizes_are_whole_numbers(sizes):
    with pytest.raises(SparsityError, match="sizes must be 2 whole numbers >= 1"):
        Sparsity(torch.eye(2), sizes=sizes)


def test_sizes_add_up_to_the_features():
    with pytest.raises(SparsityError, match=r"\(2, 1\) add up to 3, but .* m = n/2 = 4 \(pairs"):
        hdnn.H2(8, 1, sparsity=Sparsity(torch.eye(2), sizes=[2, 1]))
    with pytest.raises(SparsityError, match=r"m = n/2 = 4 .* or n = 8 \(pieces of y\)"):
        hdnn.H1(8, 1, sparsity=Sparsity(torch.eye(2), sizes=[2, 1]))
    with pytest.raises(SparsityError, match="5 features cannot be shared alike by 2 nodes"):
        hdnn.H2(10, 1, sparsity=torch.eye(2))


def test_updates_that_need_strangers_are_named():
    R = torch.tensor([[1, 1, 0], [0, 1, 0], [0, 0, 1]])
    with pytest.raises(SparsityError, match="0 -> 1, 1 -> 0, which S does not link"):
        Sparsity(R, torch.eye(3), torch.eye(3))
    with pytest.raises(SparsityError, match="locality condition"):
        hdnn.H2(6, 1, sparsity=Sparsity(R, S=torch.eye(3)))
    with pytest.raises(SparsityError, match="locality condition"):
        hdnn.H2(6, 1, X=torch.ones(3, 3), sparsity=Sparsity(torch.eye(3), S=ring(3, 0)))


def test_X_and_J_keep_to_T():
    X = torch.eye(3)
    X[1, 2] = 0.5
    with pytest.raises(SparsityError, match="X links nodes 1 and 2, but T does not"):
        hdnn.H2(6, 1, X=X, sparsity=Sparsity(torch.eye(3), torch.eye(3)))
    with pytest.raises(SparsityError, match="J links nodes 0 and 1, but T does not"):
        hdnn.H1(4, 1, sparsity=Sparsity(torch.eye(2), torch.eye(2)))
    J, pairs = interconnection.from_X(X), Sparsity(torch.eye(3), torch.eye(3), sizes=[1] * 3)
    with pytest.raises(SparsityError, match="J links nodes"):
        hdnn.H1(6, 1, J=J, sparsity=pairs)


def test_T_is_one_for_all_layers():
    with pytest.raises(SparsityError, match="one pattern for all layers"):
        hdnn.H2(4, 2, sparsity=Sparsity(torch.eye(2), torch.eye(2).expand(2, 2, 2)))


def test_a_config_makes_the_same_pattern_again():
    for given_ in (
        Sparsity(ring(4)),
        Sparsity(ring(4), torch.eye(4), ring(4, 2), [1, 2, 3, 1]),
        Sparsity(ring(4).expand(3, 4, 4), torch.eye(4)),
    ):
        again = Sparsity(**given_.to_config())
        assert again.to_config() == given_.to_config()
        assert torch.equal(again.R, given_.R)


@settings(max_examples=20)
@given(seeds, st.integers(2, 4))
def test_functions_see_only_plain_matrices(seed, M):
    net = hdnn.H2(2 * M, 2, sparsity=random_pattern(seed, M), dtype=F64, generator=generator(seed))
    y = Random(seed)(2 * M)
    expected = functional.h2(y, net.K_p, net.K_q, net.b_p, net.b_q, net.step)
    assert torch.equal(net(y), expected)
