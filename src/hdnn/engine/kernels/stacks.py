"""Stacks of any width that fits, block by block of the rows of K.

The backward kernel adds up weight gradients by atomics, or emits their factors for `sums.py`.
"""

# Kernels branch on what is known when they are compiled, which pyright cannot follow.
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

from typing import Any, TypeAlias

from hdnn.engine.kernels.device import (
    add,
    add_column_sum,
    add_matrix,
    dot,
    emit,
    kernel_sigma,
    kernel_slope,
    load_last,
    load_state,
    places,
    pointers,
    rounded,
    scheduled,
    store_state,
    swapped,
    times,
    times_transposed,
    turned,
    weights,
)

tl: Any = None
constexpr: TypeAlias = Any


def forward_kernel(
    y_in,
    y_out,
    kept,
    K_p,
    K_q,
    b_p,
    b_q,
    V_p,
    V_q,
    half,
    layer,
    coef,
    B,
    M,
    m,
    r_p,
    r_q,
    ACT: constexpr,
    KIND: constexpr,
    PREC: constexpr,
    FAST: constexpr,
    PAD: constexpr,
    EULER: constexpr,
    ALT: constexpr,
    KEEP: constexpr,
    RB: constexpr,
    BT: constexpr,
    BM: constexpr,
    BR: constexpr,
):  # pragma: kernel
    first = tl.program_id(0).to(tl.int64) * BT
    here = first * ((2 - EULER) * m)
    at, in_kept, inside = places(first, B, m, BT, BM, PAD, EULER)
    source, target = load_state(y_in + here, at, m, inside, EULER)
    kept += first * m

    turn_next, j_next, c_next = scheduled(half, layer, coef, 0)
    K_j, b_j, V_j, r = pointers(turn_next, j_next, K_p, K_q, b_p, b_q, V_p, V_q, r_p, r_q, m, KIND)
    K_next, b_next, V_next = weights(K_j, b_j, V_j, 0, r, m, BR, BM, KIND, PAD, PREC)
    s = tl.minimum(1, M * RB - 1) // RB
    turn_after, j_after, c_after = scheduled(half, layer, coef, s)
    before = turn_next * 0
    if ALT:  # the shears take turns, so that the roles change by name alone
        before = turn_next
        source, target = swapped(turn_next != 0, source, target)
    for pair in range(M * RB // (1 + ALT)):
        for e in tl.static_range(1 + ALT):
            k = pair * (1 + ALT) + e
            turn, c, K, b, V = turn_next, c_next, K_next, b_next, V_next
            # Load the weights of the next step before this one starts, and their addresses
            # one step earlier still.
            block = tl.minimum(k + 1, M * RB - 1) % RB
            turn_next, j_next, c_next = turn_after, j_after, c_after
            s = tl.minimum(k + 2, M * RB - 1) // RB
            turn_after, j_after, c_after = scheduled(half, layer, coef, s)
            K_j, b_j, V_j, r = pointers(
                turn_next, j_next, K_p, K_q, b_p, b_q, V_p, V_q, r_p, r_q, m, KIND
            )
            K_next, b_next, V_next = weights(K_j, b_j, V_j, block, r, m, BR, BM, KIND, PAD, PREC)

            if not (ALT or EULER):
                source, target = swapped(turn != before, source, target)
                before = turn
            if KEEP:  # all blocks of a step read the same
                step = (first * 0 + k // RB) * (B * m)
                if RB == 1:
                    tl.store(kept + step + in_kept, source, mask=inside)
                else:
                    starts = in_kept * 0 + k % RB == 0
                    tl.store(kept + step + in_kept, source, mask=inside & starts)
            bias = tl.zeros((BT, BR), tl.float32) + b[None, :]
            a = times_transposed(source, K, bias, PREC)
            z = c * kernel_sigma(a, ACT, FAST)
            if KIND == "identity":
                target += z
            elif KIND == "canonical":
                target += turned(times(z, K, tl.zeros((BT, BM), tl.float32), PREC))
            else:
                target = times(z, V, target, PREC)
            if ALT:
                source, target = target, source
            elif EULER:
                if RB == 1:
                    source = target
                else:
                    source = tl.where(k % RB == RB - 1, target, source)

    store_state(y_out + here, at, m, inside, before, source, target, EULER)


def backward_kernel(
    y_in,
    g_in,
    y_out,
    g_out,
    K_p,
    K_q,
    b_p,
    b_q,
    V_p,
    V_q,
    half,
    layer,
    coef,
    dK,
    db,
    dV,
    dcoef,
    left,
    right,
    B,
    low,
    high,
    m,
    r_p,
    r_q,
    first_q,
    ACT: constexpr,
    KIND: constexpr,
    PREC: constexpr,
    WPREC: constexpr,
    FAST: constexpr,
    PAD: constexpr,
    EULER: constexpr,
    ALT: constexpr,
    KEEP: constexpr,
    EMIT: constexpr,
    STEP: constexpr,
    RB: constexpr,
    BT: constexpr,
    BM: constexpr,
    BR: constexpr,
):  # pragma: kernel
    """With KEEP, y_in is what the steps have read, and none is undone; without, it is y_N."""
    first = tl.program_id(0).to(tl.int64) * BT
    here = first * ((2 - EULER) * m)
    at, in_kept, inside = places(first, B, m, BT, BM, PAD, EULER)
    if KEEP:
        y_in += first * m
        read = (first * 0 + high - 1) * (B * m)
        source_next = tl.load(y_in + read + in_kept, mask=inside, other=0.0)
    else:
        source, target = load_last(y_in + here, first, B, m, BT, BM, EULER)
    g_source, g_target = load_state(g_in + here, at, m, inside, EULER)

    turn_next, j_next, c_next = scheduled(half, layer, coef, high - 1)
    K_j, b_j, V_j, r = pointers(turn_next, j_next, K_p, K_q, b_p, b_q, V_p, V_q, r_p, r_q, m, KIND)
    K_next, b_next, V_next = weights(K_j, b_j, V_j, RB - 1, r, m, BR, BM, KIND, PAD, PREC)
    s = tl.maximum(high * RB - 2, low * RB) // RB
    turn_after, j_after, c_after = scheduled(half, layer, coef, s)
    before = turn_next * 0
    if ALT:  # the shears take turns, so that the roles change by name alone
        before = turn_next
        if not KEEP:
            source, target = swapped(turn_next != 0, source, target)
        g_source, g_target = swapped(turn_next != 0, g_source, g_target)
    for pair in range((high - low) * RB // (1 + ALT)):
        for e in tl.static_range(1 + ALT):
            turn, j, c, K, b, V = turn_next, j_next, c_next, K_next, b_next, V_next
            k = high * RB - 1 - (pair * (1 + ALT) + e)
            block = tl.maximum(k - 1, low * RB) % RB
            turn_next, j_next, c_next = turn_after, j_after, c_after
            s = tl.maximum(k - 2, low * RB) // RB
            turn_after, j_after, c_after = scheduled(half, layer, coef, s)
            K_j, b_j, V_j, r = pointers(
                turn_next, j_next, K_p, K_q, b_p, b_q, V_p, V_q, r_p, r_q, m, KIND
            )
            K_next, b_next, V_next = weights(K_j, b_j, V_j, block, r, m, BR, BM, KIND, PAD, PREC)

            if KEEP:
                source = source_next
                read = (first * 0 + tl.maximum(k - 1, low * RB) // RB) * (B * m)
                source_next = tl.load(y_in + read + in_kept, mask=inside, other=0.0)
            if not (ALT or EULER):
                if not KEEP:
                    source, target = swapped(turn != before, source, target)
                g_source, g_target = swapped(turn != before, g_source, g_target)
                before = turn

            bias = tl.zeros((BT, BR), tl.float32) + b[None, :]
            a = times_transposed(source, K, bias, PREC)
            g_zK = g_target  # dL/d(z K), if V is made of K
            if KIND == "canonical":
                g_zK = turned(-g_target)
            if KIND == "identity":
                t = g_target
            else:
                t = times_transposed(g_zK, V, tl.zeros((BT, BR), tl.float32), PREC)
            z = kernel_sigma(a, ACT, FAST)
            u = c * kernel_slope(a, z, ACT) * t
            cz = c * z
            g_source = times(u, K, g_source, PREC)
            if not KEEP:
                if KIND == "identity":
                    target -= cz
                else:
                    target = times(-cz, V, target, PREC)

            if EMIT:
                emit(
                    u, cz, z * t, source, g_zK,
                    dcoef, left, right,
                    first, in_kept, inside, k, low, turn, B, m, r_p, r_q,
                    KIND, WPREC, PAD, STEP, RB,
                )  # fmt: skip
            else:
                block = k % RB
                r = tl.where(turn == 0, r_q, r_p)
                row = (1 - turn) * first_q + j * r  # of the gradients: those of p come first
                u_T = tl.trans(rounded(u, WPREC))
                z_T = tl.trans(rounded(cz, WPREC))
                grad = tl.zeros((BR, BM), tl.float32)
                if KIND == "same" or KIND == "canonical":
                    grad = dot(z_T, rounded(g_zK, WPREC), grad, WPREC)
                if KIND == "general":
                    grad_V = dot(z_T, rounded(g_target, WPREC), grad, WPREC)
                    add_matrix(dV + row * m, grad_V, block, r, m, PAD)
                grad = dot(u_T, rounded(source, WPREC), grad, WPREC)
                add_matrix(dK + row * m, grad, block, r, m, PAD)
                add_column_sum(u, u_T, db + row, block, r, WPREC)
                if STEP:
                    add(dcoef + k // RB, tl.sum(z * t), None)
            if ALT:
                if not KEEP:
                    source, target = target, source
                g_source, g_target = g_target, g_source
            elif EULER:
                if RB == 1:
                    g_target = g_source
                else:
                    g_target = tl.where(k % RB == 0, g_source, g_target)

    if not KEEP:
        store_state(y_out + here, at, m, inside, before, source, target, EULER)
    store_state(g_out + here, at, m, inside, before, g_source, g_target, EULER)
