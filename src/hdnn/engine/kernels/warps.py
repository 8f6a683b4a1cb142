"""Narrow stacks whose halves take turns, with the samples of a warp in its own registers.

Sixteen samples belong to one warp, and no other one waits for their state. A tile has the shape
(warps, 16, features), which makes Triton give each warp a product of its own. The weights are
packed beforehand, so that each lane of a warp finds what the tensor cores take from it side by
side; a loop copies those of the next steps ahead. The gradients of weights are sums over the
samples of all warps, and those alone go from warp to warp. They are added up in the order in which
lanes hold them, and put in order in the end.

Tensor cores know matrices of 8 x 8: lane 4g + t holds the elements 2t and 2t + 1 of row g. What is
loaded, stored or added in that order needs no exchange among lanes.
"""

# Kernels branch on what is known when they are compiled, which pyright cannot follow.
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

from typing import Any, TypeAlias

from hdnn.engine.kernels.device import (
    add,
    dot,
    kernel_sigma,
    kernel_slope,
    matrix,
    pointers,
    rounded,
    scheduled,
)

tl: Any = None
constexpr: TypeAlias = Any


# Tiles (W, 16, BM) in the order of lanes, (BM // 4 * W, 64): each row has an 8 x 8 matrix of one
# warp, and each lane loads, stores or adds two elements side by side.


def lane_rows(W: constexpr, BM: constexpr):  # pragma: kernel
    """The row of a tile in which each element lies."""
    block = tl.arange(0, BM // 4 * W)[:, None]
    return block % W * 16 + block // (BM // 8 * W) * 8 + tl.arange(0, 64)[None, :] // 8


def lane_columns(W: constexpr, BM: constexpr):  # pragma: kernel
    """The column of a tile in which each element lies."""
    block, element = tl.arange(0, BM // 4 * W)[:, None], tl.arange(0, 64)[None, :]
    # Written so that Triton sees pairs, and does not give four elements to a lane.
    return block // W % (BM // 8) * 8 + element // 2 * 2 % 8 + element % 2


def to_lanes(x):  # pragma: kernel
    W: constexpr = x.shape[0]
    BM: constexpr = x.shape[2]
    x = tl.permute(tl.reshape(x, (W, 2, 8, BM // 8, 4, 2)), (1, 3, 0, 2, 4, 5))
    return tl.reshape(x, (BM // 4 * W, 64))


def from_lanes(x, W: constexpr, BM: constexpr):  # pragma: kernel
    x = tl.permute(tl.reshape(x, (2, BM // 8, W, 8, 4, 2)), (2, 0, 3, 1, 4, 5))
    return tl.reshape(x, (W, 16, BM))


def load_tile(y, at, inside, W: constexpr, BM: constexpr):  # pragma: kernel
    return from_lanes(tl.load(y + at, mask=inside, other=0.0), W, BM)


def store_tile(y, at, inside, x):  # pragma: kernel
    tl.store(y + at, to_lanes(x), mask=inside)


# Weights. A lane has n k / 32 elements of a matrix, and loads 16 bytes of them at once.


def store_fragments(P, at, W, PREC: constexpr):  # pragma: kernel
    """The weights W of products x W^T, in the order in which `fragments` reads them."""
    n: constexpr = W.shape[0]
    k: constexpr = W.shape[1]
    V: constexpr = 8 if PREC == "bf16" else 4
    W = tl.permute(tl.reshape(rounded(W, PREC), (n // 8, 8, k // 8, 4, 2)), (1, 3, 0, 2, 4))
    W = tl.permute(tl.reshape(W, (32, n * k // 32 // V, V)), (1, 0, 2))
    tl.store(P + at * (n * k) + tl.arange(0, n * k), tl.reshape(W, (n * k,)))


def fragments(P, at, W: constexpr, n: constexpr, k: constexpr, PREC: constexpr):  # pragma: kernel
    """W^T for products x W^T, once for each warp: each of its lanes loads what it multiplies."""
    V: constexpr = 8 if PREC == "bf16" else 4
    C: constexpr = n * k // 32 // V
    block, element = tl.arange(0, C)[:, None], tl.arange(0, 32 * V)[None, :]
    f = tl.load(P + at * (n * k) + (block * (32 * V) + element))
    f = tl.permute(tl.reshape(f, (C, 8, 4, V)), (1, 2, 0, 3))
    f = tl.reshape(f, (8, 4, n // 8, k // 8, 2))
    if PREC == "tf32":  # renumbered as in `ordered`
        f = tl.permute(f, (3, 4, 1, 2, 0))
    else:
        f = tl.permute(f, (3, 1, 4, 2, 0))
    return tl.broadcast_to(tl.reshape(f, (1, k, n)), (W, k, n))


def fragment_kernel(
    K_p, K_q, b_p, b_q, V_p, V_q, half, layer, coef,
    K_rows, K_cols, bias,
    B, m, r_p, r_q,
    PREC: constexpr, PAD: constexpr, BM: constexpr, BR: constexpr,
):  # fmt: skip  # pragma: kernel
    """K and c K^T of a step, as the products take them, and its b."""
    s = tl.program_id(0)
    turn, j, c = scheduled(half, layer, coef, s)
    K_j, b_j, _, r = pointers(turn, j, K_p, K_q, b_p, b_q, V_p, V_q, r_p, r_q, m, "same")
    K = matrix(K_j, 0, r, m, BR, BM, PAD, "ieee")
    i, at = tl.arange(0, BR), s.to(tl.int64)
    tl.store(bias + at * BR + i, tl.load(b_j + i, mask=i < r, other=0.0).to(tl.float32))
    store_fragments(K_rows, at, K, PREC)
    store_fragments(K_cols, at, tl.trans(c * K), PREC)


def product(x, F, acc, PREC: constexpr):  # pragma: kernel
    """Acc + x W^T, given the fragments of W."""
    x = rounded(x, PREC)
    if PREC == "tf32":  # see `ordered`
        eights = tl.reshape(x, (x.shape[0], 16, x.shape[2] // 8, 4, 2))
        x = tl.reshape(tl.permute(eights, (0, 1, 2, 4, 3)), x.shape)
    return dot(x, F, acc, PREC)


# Stacks


def warp_forward_kernel(
    y_in, y_out, kept,
    K_rows, K_cols, bias, half,
    B, M, m,
    ACT: constexpr, PREC: constexpr, FAST: constexpr, PAD: constexpr, KEEP: constexpr,
    BT: constexpr, BM: constexpr, BR: constexpr,
):  # fmt: skip  # pragma: kernel
    W: constexpr = BT // 16
    first = tl.program_id(0).to(tl.int64) * BT
    row, col = lane_rows(W, BM), lane_columns(W, BM)
    at, in_kept, inside = row * (2 * m) + col, row * m + col, first + row < B
    if PAD != "none":
        inside = inside & (col < m)
    other = tl.where(tl.load(half) == 0, m, 0)  # p, or q, is read by every second step
    source = load_tile(y_in + first * (2 * m) + other, at, inside, W, BM)
    target = load_tile(y_in + first * (2 * m) + (m - other), at, inside, W, BM)
    kept += first * m

    units = tl.arange(0, BR)
    b_next = tl.load(bias + units)
    for pair in range(M // 2):
        for e in tl.static_range(2):
            s = first * 0 + (2 * pair + e)
            K = fragments(K_rows, s, W, BR, BM, PREC)
            V = fragments(K_cols, s, W, BM, BR, PREC)
            b = b_next
            b_next = tl.load(bias + tl.minimum(s + 1, M - 1) * BR + units)
            if KEEP:
                store_tile(kept, in_kept, inside, source)
                kept += first * 0 + B * m
            a = product(source, K, tl.zeros((W, 16, BR), tl.float32) + b[None, None, :], PREC)
            target = product(kernel_sigma(a, ACT, FAST), V, target, PREC)
            source, target = target, source
    store_tile(y_out + first * (2 * m) + other, at, inside, source)
    store_tile(y_out + first * (2 * m) + (m - other), at, inside, target)


def factor(x, PREC: constexpr):  # pragma: kernel
    """The rows of all warps, as a factor of weight gradients."""
    return tl.reshape(rounded(x, PREC), (x.shape[0] * 16, x.shape[2]))


def fours(x):  # pragma: kernel
    """A sum over samples, cut so that each row has what the lanes of one warp hold: four each."""
    R: constexpr = x.shape[0]
    C: constexpr = x.shape[1]
    x = tl.permute(tl.reshape(x, (R // 16, 2, 8, C // 8, 4, 2)), (3, 0, 2, 4, 1, 5))
    return tl.reshape(x, (C // 8 * (R // 16), 128))


def add_weight_gradients(u, z, source, g, dK, db, PREC: constexpr):  # pragma: kernel
    """dK += u^T source + z^T g and db += u^T 1, in the order of `fours`."""
    BR: constexpr = u.shape[2]
    BM: constexpr = source.shape[2]
    right, right_g = factor(source, PREC), factor(g, PREC)
    u_T, z_T = tl.trans(factor(u, PREC)), tl.trans(factor(z, PREC))
    grad = dot(u_T, right, tl.zeros((BR, BM), tl.float32), PREC)
    grad = fours(dot(z_T, right_g, grad, PREC))
    row, element = tl.arange(0, grad.shape[0])[:, None], tl.arange(0, 128)[None, :]
    add(dK + (row * 128 + element), grad, None)

    ones = rounded(tl.full((u.shape[0] * 16, 16), 1.0, tl.float32), PREC)
    sums = fours(dot(u_T, ones, tl.zeros((BR, 16), tl.float32), PREC))  # in all columns the same
    row = tl.arange(0, sums.shape[0])[:, None]
    once = (row < BR // 16) & (element // 4 % 4 == 0)
    add(db + (row * 32 + element // 16 * 4 + element % 4), sums, once)


def unfold_kernel(
    sums_K, sums_b, half, layer, coef,
    dK, db,
    B, m, r_p, r_q, first_q,
    PAD: constexpr, BM: constexpr, BR: constexpr,
):  # fmt: skip  # pragma: kernel
    """The weight gradients of a step from what `add_weight_gradients` has added up."""
    s = tl.program_id(0)
    turn, j, c = scheduled(half, layer, coef, s)
    r = tl.where(turn == 0, r_q, r_p)
    row = (1 - turn) * first_q + j * r  # of the gradients: those of p come first
    i, k = tl.arange(0, BR), tl.arange(0, BM)
    place = i // 16 * 128 + i % 8 * 16 + i // 8 % 2 * 2
    other = k // 8 * (BR * 8) + k % 8 // 2 * 4 + k % 2
    at = s.to(tl.int64)
    grad = tl.load(sums_K + at * (BR * BM) + (place[:, None] + other[None, :]))
    inside = (i < r)[:, None] & (k < m)[None, :]
    tl.store(dK + row * m + (i[:, None] * m + k[None, :]), c * grad, mask=inside)
    of_b = i // 16 * 32 + i % 8 * 4 + i // 8 % 2 * 2
    tl.store(db + row + i, c * tl.load(sums_b + at * (2 * BR) + of_b), mask=i < r)


def warp_backward_kernel(
    y_in, g_in, y_out, g_out,
    K_rows, K_cols, bias, half,
    dK, db, dcoef,
    B, M, m,
    ACT: constexpr, PREC: constexpr, WPREC: constexpr, FAST: constexpr, PAD: constexpr,
    KEEP: constexpr, STEP: constexpr, BT: constexpr, BM: constexpr, BR: constexpr,
):  # fmt: skip  # pragma: kernel
    """With KEEP, y_in is what the steps have read, and none is undone; without, it is y_N."""
    W: constexpr = BT // 16
    first = tl.program_id(0).to(tl.int64) * BT
    row, col = lane_rows(W, BM), lane_columns(W, BM)
    at, in_kept, inside = row * (2 * m) + col, row * m + col, first + row < B
    if PAD != "none":
        inside = inside & (col < m)
    other = tl.where(tl.load(half + M - 1) == 0, m, 0)
    if KEEP:
        y_in += first * m
        next_source = load_tile(y_in + (first * 0 + M - 1) * (B * m), in_kept, inside, W, BM)
        source_after = load_tile(y_in + (first * 0 + M - 2) * (B * m), in_kept, inside, W, BM)
    else:
        # Rows beyond the batch repeat its last sample, a state that can surely be undone.
        last = (tl.minimum(B - first, BT) - 1).to(tl.int32)
        again = tl.minimum(row, last) * (2 * m) + col
        source = load_tile(y_in + first * (2 * m) + other, again, col < m, W, BM)
        target = load_tile(y_in + first * (2 * m) + (m - other), again, col < m, W, BM)
    g_source = load_tile(g_in + first * (2 * m) + other, at, inside, W, BM)
    g_target = load_tile(g_in + first * (2 * m) + (m - other), at, inside, W, BM)

    units = tl.arange(0, BR)
    b_next = tl.load(bias + (first * 0 + M - 1) * BR + units)
    for pair in range(M // 2):
        for e in tl.static_range(2):
            s = first * 0 + (M - 1 - 2 * pair - e)
            K = fragments(K_rows, s, W, BR, BM, PREC)
            K_T = fragments(K_cols, s, W, BM, BR, PREC)
            b = b_next
            b_next = tl.load(bias + tl.maximum(s - 1, 0) * BR + units)
            if KEEP:
                source, next_source = next_source, source_after
                read = tl.maximum(s - 2, 0) * (B * m)
                source_after = load_tile(y_in + read, in_kept, inside, W, BM)
            a = product(source, K, tl.zeros((W, 16, BR), tl.float32) + b[None, None, :], PREC)
            t = product(g_target, K, tl.zeros((W, 16, BR), tl.float32), PREC)
            z = kernel_sigma(a, ACT, FAST)
            u = kernel_slope(a, z, ACT) * t

            g_before = product(u, K_T, g_source, PREC)
            to_K, to_b = dK + s * (BR * BM), db + s * (2 * BR)
            add_weight_gradients(u, z, source, g_target, to_K, to_b, WPREC)
            if STEP:
                add(dcoef + s, tl.sum(z * t), None)
            g_source, g_target = g_target, g_before
            if not KEEP:
                target = product(-1.0 * z, K_T, target, PREC)
                source, target = target, source
    if not KEEP:
        store_tile(y_out + first * (2 * m) + other, at, inside, source)
        store_tile(y_out + first * (2 * m) + (m - other), at, inside, target)
    store_tile(g_out + first * (2 * m) + other, at, inside, g_source)
    store_tile(g_out + first * (2 * m) + (m - other), at, inside, g_target)
