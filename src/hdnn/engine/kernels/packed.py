"""Wide layers, with weights that were packed beforehand.

A loop finds the blocks of its steps packed one behind the other, rounded and in the order of the
tensor cores, so that Triton can copy the next ones ahead. It does so only if no value is handed on
from one iteration to the next but one, as exchanging source and target by name would.
"""

# Kernels branch on what is known when they are compiled, which pyright cannot follow.
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

from typing import Any, TypeAlias

from hdnn.engine.kernels.device import (
    dot,
    emit,
    kernel_sigma,
    kernel_slope,
    load_last,
    load_state,
    ordered,
    places,
    pointers,
    rounded,
    scheduled,
    store_state,
    swapped,
    turned,
    weights,
)

tl: Any = None
constexpr: TypeAlias = Any


def store_packed(rows, cols, W, at, PREC: constexpr):  # pragma: kernel
    i, k = tl.arange(0, W.shape[0]), tl.arange(0, W.shape[1])
    at = at * (W.shape[0] * W.shape[1])
    W_T = ordered(tl.trans(W), PREC)
    tl.store(rows + at + (i[:, None] * W.shape[1] + k[None, :]), ordered(W, PREC))
    tl.store(cols + at + (k[:, None] * W.shape[0] + i[None, :]), W_T)


def pack_kernel(
    K_p, K_q, b_p, b_q, V_p, V_q, half, layer, coef,
    K_rows, K_cols, V_rows, V_cols, bias,
    B, m, r_p, r_q,
    KIND: constexpr, PREC: constexpr, PAD: constexpr, RB: constexpr, BM: constexpr, BR: constexpr,
):  # fmt: skip  # pragma: kernel
    """The weights of a block of a step, as the products take them."""
    step, block = tl.program_id(0) // RB, tl.program_id(0) % RB
    turn, j, _ = scheduled(half, layer, coef, step)
    K_j, b_j, V_j, r = pointers(turn, j, K_p, K_q, b_p, b_q, V_p, V_q, r_p, r_q, m, KIND)
    K, b, V = weights(K_j, b_j, V_j, block, r, m, BR, BM, KIND, PAD, PREC)
    at = tl.program_id(0).to(tl.int64)
    tl.store(bias + at * BR + tl.arange(0, BR), b)
    store_packed(K_rows, K_cols, K, at, PREC)
    if KIND == "canonical":
        V = turned(V.to(tl.float32)).to(V.dtype)
    if KIND != "same":
        store_packed(V_rows, V_cols, V, at, PREC)


def tile_of(W, k, H: constexpr, L: constexpr):  # pragma: kernel
    i, j = tl.arange(0, H)[:, None], tl.arange(0, L)[None, :]
    return tl.load(W + k * (H * L) + (i * L + j))


def product(x, W, acc, PREC: constexpr):  # pragma: kernel
    """Acc + x W^T for a packed W."""
    return dot(ordered(rounded(x, PREC), PREC), tl.trans(W), acc, PREC)


def packed_forward_kernel(
    y_in, y_out, kept,
    K_rows, V_cols, bias, half, coef,
    B, M, m,
    ACT: constexpr, PREC: constexpr, FAST: constexpr, PAD: constexpr, EULER: constexpr,
    KEEP: constexpr, RB: constexpr, BT: constexpr, BM: constexpr, BR: constexpr,
):  # fmt: skip  # pragma: kernel
    first = tl.program_id(0).to(tl.int64) * BT
    here = first * ((2 - EULER) * m)
    at, in_kept, inside = places(first, B, m, BT, BM, PAD, EULER)
    source, target = load_state(y_in + here, at, m, inside, EULER)
    kept += first * m
    turn_next, c_next = tl.load(half), tl.load(coef)
    swap_next = turn_next != 0
    for k in range(M * RB):
        turn, c, swap = turn_next, c_next, swap_next
        s = tl.minimum(k + 1, M * RB - 1) // RB
        turn_next, c_next = tl.load(half + s), tl.load(coef + s)
        swap_next = turn_next != turn
        K = tile_of(K_rows, first * 0 + k, BR, BM)
        V = tile_of(V_cols, first * 0 + k, BM, BR)
        b = tl.load(bias + k * BR + tl.arange(0, BR))
        if EULER:
            if k % RB == 0:
                source = target
        else:
            source, target = swapped(swap, source, target)
        if KEEP:
            step = (first * 0 + k // RB) * (B * m)
            starts = in_kept * 0 + k % RB == 0
            tl.store(kept + step + in_kept, source, mask=inside & starts)
        a = product(source, K, tl.zeros((BT, BR), tl.float32) + b[None, :], PREC)
        z = c * kernel_sigma(a, ACT, FAST)
        target = product(z, V, target, PREC)
    store_state(y_out + here, at, m, inside, turn_next, source, target, EULER)


def packed_backward_kernel(
    y_in, g_in, y_out, g_out,
    K_rows, K_cols, V_rows, V_cols, bias, half, coef,
    dcoef, left, right,
    B, low, high, m, r_p, r_q,
    ACT: constexpr, KIND: constexpr, PREC: constexpr, WPREC: constexpr, FAST: constexpr,
    PAD: constexpr, EULER: constexpr, KEEP: constexpr, STEP: constexpr,
    RB: constexpr, BT: constexpr, BM: constexpr, BR: constexpr,
):  # fmt: skip  # pragma: kernel
    """With KEEP, y_in is what the steps have read, and none is undone; without, it is y_N."""
    first = tl.program_id(0).to(tl.int64) * BT
    here = first * ((2 - EULER) * m)
    at, in_kept, inside = places(first, B, m, BT, BM, PAD, EULER)
    if KEEP:
        y_in += first * m
    else:
        source, target = load_last(y_in + here, first, B, m, BT, BM, EULER)
    g_source, g_target = load_state(g_in + here, at, m, inside, EULER)
    turn_next, c_next = tl.load(half + high - 1), tl.load(coef + high - 1)
    swap_next = turn_next != 0
    for q in range((high - low) * RB):
        k = high * RB - 1 - q
        turn, c, swap = turn_next, c_next, swap_next
        s = tl.maximum(k - 1, low * RB) // RB
        turn_next, c_next = tl.load(half + s), tl.load(coef + s)
        swap_next = turn_next != turn
        K = tile_of(K_rows, first * 0 + k, BR, BM)
        K_T = tile_of(K_cols, first * 0 + k, BM, BR)
        V, V_T = K, K_T
        if KIND != "same":
            V = tile_of(V_rows, first * 0 + k, BR, BM)
            if not KEEP:
                V_T = tile_of(V_cols, first * 0 + k, BM, BR)
        b = tl.load(bias + k * BR + tl.arange(0, BR))
        if KEEP:
            read = (first * 0 + k // RB) * (B * m)
            source = tl.load(y_in + read + in_kept, mask=inside, other=0.0)
        if EULER:
            if k % RB == RB - 1:
                g_target = g_source
        else:
            g_source, g_target = swapped(swap, g_source, g_target)
            if not KEEP:
                source, target = swapped(swap, source, target)
        a = product(source, K, tl.zeros((BT, BR), tl.float32) + b[None, :], PREC)
        t = product(g_target, V, tl.zeros((BT, BR), tl.float32), PREC)
        z = kernel_sigma(a, ACT, FAST)
        u = c * kernel_slope(a, z, ACT) * t
        cz = c * z
        g_source = product(u, K_T, g_source, PREC)
        if not KEEP:
            target = product(-cz, V_T, target, PREC)

        g_zK = g_target  # dL/d(z K), if V is made of K
        if KIND == "canonical":
            g_zK = turned(-g_target)
        emit(
            u, cz, z * t, source, g_zK,
            dcoef, left, right,
            first, in_kept, inside, k, low, turn, B, m, r_p, r_q,
            KIND, WPREC, PAD, STEP, RB,
        )  # fmt: skip

    if not KEEP:
        store_state(y_out + here, at, m, inside, turn_next, source, target, EULER)
    if EULER:
        g_target = g_source
    store_state(g_out + here, at, m, inside, turn_next, g_source, g_target, EULER)
