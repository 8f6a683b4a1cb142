"""The interconnection matrix J: canonical, from X, any skew matrix."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hdnn
from hdnn import interconnection
from hdnn.errors import InterconnectionError, ShapeError
from strategies import Random, seeds, sizes

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@given(sizes, st.sampled_from(DTYPES))
def test_the_canonical_J_turns_p_and_q(m, dtype):
    J = interconnection.canonical(2 * m, dtype=dtype)
    p, q = torch.arange(1.0, m + 1).to(dtype), -torch.ones(m, dtype=dtype)
    assert J.dtype == dtype
    assert torch.equal(J @ torch.cat([p, q]), torch.cat([-q, p]))
    assert torch.equal(J @ J, -torch.eye(2 * m, dtype=dtype))


@pytest.mark.parametrize("n", [0, 1, 3, 7, -2])
def test_the_canonical_J_needs_an_even_size(n):
    with pytest.raises(ShapeError, match=rf"even number of features, but n = {n}; augment"):
        interconnection.canonical(n)


@given(seeds, sizes, st.lists(st.integers(1, 3), max_size=2))
def test_J_from_X_is_exactly_skew_and_holds_X_below_and_minus_its_transpose_above(seed, m, batch):
    X = Random(seed)(*batch, m, m)
    J = interconnection.from_X(X)
    assert J.shape == (*batch, 2 * m, 2 * m)
    assert torch.equal(J, -J.mT)
    assert torch.equal(J[..., m:, :m], X)
    assert torch.equal(J[..., :m, m:], -X.mT)
    assert not J[..., :m, :m].any()
    assert not J[..., m:, m:].any()


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_a_block_diagonal_J_is_canonical_inside_every_node_and_zero_between(halves):
    J = interconnection.block_diagonal([2 * half for half in halves])
    start = 0
    for half in halves:
        inside = slice(start, start + 2 * half)
        assert torch.equal(J[inside, inside], interconnection.canonical(2 * half))
        assert J[inside].abs().sum() == 2 * half
        start += 2 * half
    assert interconnection.is_skew(J)


@given(seeds, st.integers(1, 6), st.lists(st.integers(1, 3), max_size=2))
def test_skew_fills_a_matrix_from_its_upper_half_row_by_row(seed, n, batch):
    upper = Random(seed)(*batch, n * (n - 1) // 2)
    A = interconnection.skew(upper, n)
    assert torch.equal(A, -A.mT)
    i, j = torch.triu_indices(n, n, 1)
    assert torch.equal(A[..., i, j], upper)
    assert torch.equal(A.flatten(-2)[..., interconnection.upper_indices(n)], upper)


def test_skew_can_leave_entries_out():
    A = interconnection.skew(torch.tensor([5.0]), 3, torch.tensor([2]))
    assert torch.equal(A, torch.tensor([[0.0, 0, 5], [0, 0, 0], [-5, 0, 0]]))


def test_skew_passes_gradients_to_both_halves():
    upper = Random(0)(3).requires_grad_()
    weight = Random(1)(3, 3)
    (interconnection.skew(upper, 3) * weight).sum().backward()
    i, j = torch.triu_indices(3, 3, 1)
    torch.testing.assert_close(upper.grad, weight[i, j] - weight[j, i])


@given(seeds, st.integers(2, 6), st.sampled_from(DTYPES), st.floats(-6, 6))
def test_skew_matrices_are_recognised_in_every_dtype_and_scale(seed, n, dtype, exponent):
    J = (10**exponent * Random(seed).skew(n)).to(dtype)
    assert interconnection.is_skew(J)
    bent = J.clone()
    bent[0, 0] = 0.1 * J.abs().max()
    assert not interconnection.is_skew(bent)
    with pytest.raises(InterconnectionError, match="skew-symmetric"):
        interconnection.check_skew(bent)


def test_every_matrix_of_a_stack_is_checked_by_its_own_scale():
    good = interconnection.canonical(2, dtype=torch.float64)
    assert interconnection.is_skew(torch.stack([1e9 * good, 1e-9 * good]))
    assert not interconnection.is_skew(torch.stack([1e12 * good, 1e-6 * torch.eye(2).double()]))


def test_zero_is_skew():
    assert interconnection.is_skew(torch.zeros(3, 3))


def test_the_tolerance_can_be_chosen():
    J = torch.tensor([[0.0, -1.0], [1.001, 0.0]])
    assert not interconnection.is_skew(J)
    assert interconnection.is_skew(J, tolerance=1e-2)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_only_finite_matrices_are_interconnections(value):
    J = interconnection.canonical(4)
    J[0, 2], J[2, 0] = value, -value
    with pytest.raises(InterconnectionError, match="J has an entry that is NaN or infinite"):
        interconnection.check_skew(J)


@given(seeds, st.integers(1, 6))
def test_the_J_of_a_network_is_the_J_it_was_given(seed, n):
    J = Random(seed).skew(n)
    given_ = J.clone()
    net = hdnn.H1(n, 2, J=given_, dtype=torch.float64)
    assert torch.equal(net.J, J)
    given_.zero_()  # a network keeps a copy
    assert torch.equal(net.J, J)


@given(seeds, sizes, st.booleans())
def test_the_J_of_a_network_is_made_of_its_X(seed, m, each):
    X = Random(seed)(3, m, m) if each else Random(seed)(m, m)
    for net in (
        hdnn.H2(2 * m, 3, X=X, dtype=torch.float64),
        hdnn.ImplicitH2(2 * m, 3, X=X, dtype=torch.float64),
    ):
        assert torch.equal(net.J, interconnection.from_X(X))


def test_by_default_J_is_canonical():
    for kind in (hdnn.H1, hdnn.H2, hdnn.ImplicitH2):
        assert torch.equal(kind(6, 2).J, interconnection.canonical(6))
