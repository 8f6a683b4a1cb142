"""Operators K: apply, exact adjoint, spectral norm; dense and block-sparse."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hdnn.operators import block_sparse, dense
from strategies import Random, seeds

batches = st.lists(st.integers(0, 3), max_size=2)
node_sizes = st.lists(st.integers(1, 3), min_size=1, max_size=4)


def pattern(seed: int, M: int, *batch: int) -> torch.Tensor:
    return (Random(seed)(*batch, M, M) > 0.2) | torch.eye(M, dtype=torch.bool)


@given(seeds, st.integers(1, 5), st.integers(1, 5), batches)
def test_dense_applies_K_to_every_row(seed, r, n, batch):
    normal = Random(seed)
    K, y = normal(r, n), normal(*batch, n)
    assert dense.apply(K, y).shape == (*batch, r)
    torch.testing.assert_close(dense.apply(K, y), torch.einsum("rn,...n->...r", K, y))


@given(seeds, st.integers(1, 5), st.integers(1, 5), batches)
def test_the_dense_adjoint_is_exact(seed, r, n, batch):
    normal = Random(seed)
    K, y, z = normal(r, n), normal(*batch, n), normal(*batch, r)
    assert dense.adjoint(K, z).shape == (*batch, n)
    left = (dense.apply(K, y) * z).sum()
    torch.testing.assert_close(left, (y * dense.adjoint(K, z)).sum(), rtol=1e-12, atol=1e-12)


@given(seeds, st.integers(1, 5), st.integers(1, 5), batches)
def test_the_norm_is_the_largest_singular_value_of_each_matrix(seed, r, n, batch):
    K = Random(seed)(*batch, r, n)
    assert dense.norm(K).shape == tuple(batch)
    largest = torch.linalg.svdvals(K)[..., 0]
    torch.testing.assert_close(dense.norm(K), largest)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_norm_of_a_matrix_in_half_precision_is_finite(dtype):
    K = Random(0)(3, 4, 4)
    norm = dense.norm(K.to(dtype))
    torch.testing.assert_close(norm.double(), dense.norm(K), rtol=0.02, atol=0)


@given(seeds, node_sizes, st.booleans())
def test_a_mask_frees_exactly_the_blocks_of_its_pattern(seed, sizes, stacked):
    M = len(sizes)
    R = pattern(seed, M, 2) if stacked else pattern(seed, M)
    free = block_sparse.mask(R, sizes, sizes)
    assert free.shape == (*R.shape[:-2], sum(sizes), sum(sizes))
    node = [i for i, size in enumerate(sizes) for _ in range(size)]
    for a, i in enumerate(node):
        for b, k in enumerate(node):
            assert torch.equal(free[..., a, b], R[..., i, k])


@given(seeds, node_sizes, node_sizes)
def test_rows_and_columns_may_have_sizes_of_their_own(seed, rows, columns):
    M = min(len(rows), len(columns))
    rows, columns = rows[:M], columns[:M]
    R = pattern(seed, M)
    free = block_sparse.mask(R, rows, columns)
    assert free.shape == (sum(rows), sum(columns))
    expected = sum(R[i, k].item() * rows[i] * columns[k] for i in range(M) for k in range(M))
    assert free.sum() == expected


@given(seeds, node_sizes, st.booleans())
def test_the_block_pattern_of_a_masked_matrix_is_the_pattern_it_was_masked_by(seed, sizes, stacked):
    M = len(sizes)
    R = pattern(seed, M, 2) if stacked else pattern(seed, M)
    A = torch.where(
        block_sparse.mask(R, sizes, sizes), 1 + Random(seed)(sum(sizes), sum(sizes)) ** 2, 0
    )
    assert torch.equal(block_sparse.block_pattern(A, sizes, sizes), R)


@given(seeds, node_sizes)
def test_free_entries_fill_the_matrix_and_come_back(seed, sizes):
    normal, n = Random(seed), sum(sizes)
    free = block_sparse.mask(pattern(seed, len(sizes), 3), sizes, sizes)
    index = block_sparse.indices(free)
    values = normal(int(free.sum()))
    K = block_sparse.dense(values, index, (3, n, n))
    assert torch.equal(K[free], values)
    assert not K[~free].any()
    assert torch.equal(block_sparse.values(K, index), values)


@given(seeds, node_sizes)
def test_values_is_the_exact_adjoint_of_dense(seed, sizes):
    normal, n = Random(seed), sum(sizes)
    index = block_sparse.indices(block_sparse.mask(pattern(seed, len(sizes)), sizes, sizes))
    v, A = normal(len(index)), normal(n, n)
    left = (block_sparse.dense(v, index, (n, n)) * A).sum()
    torch.testing.assert_close(left, (v * block_sparse.values(A, index)).sum())


@given(seeds, node_sizes, batches)
def test_block_sparse_agrees_with_the_dense_matrix_that_it_stands_for(seed, sizes, batch):
    normal, n = Random(seed), sum(sizes)
    index = block_sparse.indices(block_sparse.mask(pattern(seed, len(sizes)), sizes, sizes))
    values, shape = normal(len(index)), (n, n)
    K = block_sparse.dense(values, index, shape)
    y, z = normal(*batch, n), normal(*batch, n)
    assert torch.equal(block_sparse.apply(values, index, shape, y), dense.apply(K, y))
    assert torch.equal(block_sparse.adjoint(values, index, shape, z), dense.adjoint(K, z))
    assert torch.equal(block_sparse.norm(values, index, shape), dense.norm(K))


def test_the_gradient_of_a_free_entry_is_that_of_its_place_in_the_matrix():
    index = block_sparse.indices(torch.tensor([[True, False], [True, True]]))
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    K = block_sparse.dense(values, index, (2, 2))
    weight = torch.tensor([[10.0, 20.0], [30.0, 40.0]])
    (K * weight).sum().backward()
    assert torch.equal(K, torch.tensor([[1.0, 0.0], [2.0, 3.0]]))
    assert torch.equal(values.grad, torch.tensor([10.0, 30.0, 40.0]))
