"""Whole stacks of layers as one Triton kernel: states in registers, weights streamed.

A program takes a tile of samples through all layers. A splitting scheme (H2, MS1, MS3, Verlet,
Yoshida) is a schedule of shears `target += coef * sigma(source K^T + b) V`; each can be undone, so
the backward kernel starts from y_N and reconstructs every state on its way back. Forward Euler (H1,
MS2) cannot be undone: its backward kernel reads the stored states.

A shear with r hidden units is the sum of shears with a part of them, which move the same target by
the same source: kernels walk over (shear, block of rows of K), so r has no limit and K needs no
more room than one block.

Triton is imported when a kernel is first asked for. It reads the names that a kernel uses from this
module, which is why `tl` is one of them and why `_load` replaces each kernel by its compiled form.
"""

from __future__ import annotations

import functools
import inspect
import os
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from hdnn.errors import OptionError, ShapeError, choose, require

PRECISIONS = ("ieee", "tf32", "tf32x3", "bf16")
KINDS = ("same", "general", "identity")
ACTIVATIONS = ("gelu", "identity", "relu", "sigmoid", "silu", "sin", "softplus", "tanh")
MAX_WIDTH = 256
"""The widest state y, in features."""

PARTIAL_BYTES = 64 * 2**20
"""Room for the sums of the single tiles that the deterministic mode adds up afterwards."""

tl: Any = None
constexpr: TypeAlias = Any


# Inside of a kernel


def _sigma(x, ACT: constexpr, FAST: constexpr):  # pragma: kernel
    if ACT == "tanh":
        if FAST:  # relative error 2^-11, that of a tf32 operand
            z = tl.inline_asm_elementwise(
                "tanh.approx.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
            )
        else:
            z = 2.0 * tl.sigmoid(2.0 * x) - 1.0
    elif ACT == "relu":
        z = tl.maximum(x, 0.0)
    elif ACT == "sigmoid":
        z = tl.sigmoid(x)
    elif ACT == "softplus":
        z = tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
    elif ACT == "gelu":
        z = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACT == "silu":
        z = x * tl.sigmoid(x)
    elif ACT == "sin":
        z = tl.sin(x)
    else:
        z = x
    return z


def _slope(x, z, ACT: constexpr):  # pragma: kernel
    if ACT == "tanh":
        d = 1.0 - z * z
    elif ACT == "relu":
        d = tl.where(x > 0.0, 1.0, 0.0)
    elif ACT == "sigmoid":
        d = z * (1.0 - z)
    elif ACT == "softplus":
        d = tl.sigmoid(x)
    elif ACT == "gelu":
        Phi = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        d = Phi + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif ACT == "silu":
        s = tl.sigmoid(x)
        d = s * (1.0 + x * (1.0 - s))
    elif ACT == "sin":
        d = tl.cos(x)
    else:
        d = x * 0.0 + 1.0
    return d


def _rounded(x, PREC: constexpr):  # pragma: kernel
    if PREC == "tf32":  # the tensor cores cut off the last 13 bits, which would always shrink x
        x = (x.to(tl.int32, bitcast=True) + 0x1000).to(tl.float32, bitcast=True)
    elif PREC == "bf16":
        x = x.to(tl.bfloat16)
    elif PREC == "emulated":  # bf16 in the interpreter, which cannot multiply it
        x = x.to(tl.bfloat16).to(tl.float32)
    return x


def _dot(a, b, acc, PREC: constexpr):  # pragma: kernel
    if PREC == "bf16":
        c = tl.dot(a, b, acc=acc)
    elif PREC == "emulated":
        c = tl.dot(a, b, acc=acc, input_precision="ieee")
    else:
        c = tl.dot(a, b, acc=acc, input_precision=PREC)
    return c


def _ordered(x, ROWS: constexpr, COLS: constexpr, PREC: constexpr):  # pragma: kernel
    # Of every 8 columns, a thread of the tensor cores holds 2t and 2t + 1 of a result, but t and
    # t + 4 of a tf32 operand. The order of a sum is free: counting the columns anew in both factors
    # saves the exchange among threads.
    if PREC == "tf32":
        x = tl.reshape(x, (ROWS, COLS // 8, 4, 2))
        x = tl.reshape(tl.permute(x, (0, 1, 3, 2)), (ROWS, COLS))
    return x


def _times_transposed(
    x, K, acc, BT: constexpr, BR: constexpr, BM: constexpr, PREC: constexpr
):  # pragma: kernel
    """Acc + x K^T."""
    x = _ordered(_rounded(x, PREC), BT, BM, PREC)
    return _dot(x, tl.trans(_ordered(K, BR, BM, PREC)), acc, PREC)


def _times(
    z, V, acc, BT: constexpr, BR: constexpr, BM: constexpr, PREC: constexpr
):  # pragma: kernel
    """Acc + z V."""
    z = _ordered(_rounded(z, PREC), BT, BR, PREC)
    return _dot(z, tl.trans(_ordered(tl.trans(V), BM, BR, PREC)), acc, PREC)


def _column_sum(u, u_T, into, BR: constexpr, BT: constexpr, PREC, DET):  # pragma: kernel
    if PREC == "ieee" or PREC == "emulated":
        _put(into + tl.arange(0, BR), tl.sum(u, 0), DET)
    else:  # a product with ones takes the tensor cores less time than shuffles would need
        ones = _rounded(tl.full((BT, 16), 1.0, tl.float32), PREC)
        total = _dot(u_T, ones, tl.zeros((BR, 16), tl.float32), PREC)
        column = tl.arange(0, 16)[None, :]
        at = into + tl.arange(0, BR)[:, None] + column * 0
        if DET:
            tl.store(at, total, mask=column == 0)
        else:
            tl.atomic_add(at, total, mask=column == 0, sem="relaxed")


def _matrix(W, block, r, m, BR: constexpr, BM: constexpr, EVEN, PREC):  # pragma: kernel
    i = tl.arange(0, BR)
    k = tl.arange(0, BM)
    if EVEN:
        tile = tl.load(W + block * (BR * BM) + (i[:, None] * BM + k[None, :]))
    else:
        i += block * BR
        at = W + (i[:, None] * m + k[None, :])
        tile = tl.load(at, mask=(i[:, None] < r) & (k[None, :] < m), other=0.0)
    return _rounded(tile.to(tl.float32), PREC)


def _vector(b, block, r, BR: constexpr):  # pragma: kernel
    i = block * BR + tl.arange(0, BR)
    return tl.load(b + i, mask=i < r, other=0.0).to(tl.float32)


def _put(into, value, DET: constexpr):  # pragma: kernel
    if DET:
        tl.store(into, value)
    else:
        tl.atomic_add(into, value, sem="relaxed")


def _split_forward_kernel(
    y_in,
    y_out,
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
    EVEN: constexpr,
    ALT: constexpr,
    RB: constexpr,
    BT: constexpr,
    BM: constexpr,
    BR: constexpr,
):  # pragma: kernel
    first = tl.program_id(0).to(tl.int64) * BT
    rows = tl.arange(0, BT)
    cols = tl.arange(0, BM)
    here = first * (2 * m)
    at = rows[:, None] * (2 * m) + cols[None, :]
    inside = (first + rows[:, None] < B) & (cols[None, :] < m)
    y_in += here
    y_out += here
    source = tl.load(y_in + at + m, mask=inside, other=0.0)
    target = tl.load(y_in + at, mask=inside, other=0.0)

    turn_next = tl.load(half)
    j_next = tl.load(layer).to(tl.int64)
    c_next = tl.load(coef)
    r = tl.where(turn_next == 0, r_q, r_p)
    K_next = _matrix(
        tl.where(turn_next == 0, K_q, K_p) + j_next * r * m, 0, r, m, BR, BM, EVEN, PREC
    )
    b_next = _vector(tl.where(turn_next == 0, b_q, b_p) + j_next * r, 0, r, BR)
    V_next = K_next
    if KIND == "general":
        V_next = _matrix(
            tl.where(turn_next == 0, V_q, V_p) + j_next * r * m, 0, r, m, BR, BM, EVEN, PREC
        )
    s = tl.minimum(1, M * RB - 1) // RB
    turn_after = tl.load(half + s)
    j_after = tl.load(layer + s).to(tl.int64)
    c_after = tl.load(coef + s)
    before = turn_next * 0
    if ALT:  # the shears take turns, so that the roles change by name alone
        swap = turn_next != 0
        before = turn_next
        other = tl.where(swap, target, source)
        target = tl.where(swap, source, target)
        source = other
    for pair in range(M * RB // (1 + ALT)):
        for e in tl.static_range(1 + ALT):
            k = pair * (1 + ALT) + e
            turn, c, K, b, V = turn_next, c_next, K_next, b_next, V_next
            # The weights of the next step are asked for before this one starts, and what says
            # where they are one step earlier still.
            block = tl.minimum(k + 1, M * RB - 1) % RB
            turn_next, j_next, c_next = turn_after, j_after, c_after
            s = tl.minimum(k + 2, M * RB - 1) // RB
            turn_after = tl.load(half + s)
            j_after = tl.load(layer + s).to(tl.int64)
            c_after = tl.load(coef + s)
            r = tl.where(turn_next == 0, r_q, r_p)
            K_next = _matrix(
                tl.where(turn_next == 0, K_q, K_p) + j_next * r * m, block, r, m, BR, BM, EVEN, PREC
            )
            b_next = _vector(tl.where(turn_next == 0, b_q, b_p) + j_next * r, block, r, BR)
            V_next = K_next
            if KIND == "general":
                V_next = _matrix(
                    tl.where(turn_next == 0, V_q, V_p) + j_next * r * m,
                    block,
                    r,
                    m,
                    BR,
                    BM,
                    EVEN,
                    PREC,
                )

            if not ALT:
                swap = turn != before
                before = turn
                other = tl.where(swap, target, source)
                target = tl.where(swap, source, target)
                source = other

            bias = tl.zeros((BT, BR), tl.float32) + b[None, :]
            a = _times_transposed(source, K, bias, BT, BR, BM, PREC)
            z = c * _sigma(a, ACT, FAST)
            if KIND == "identity":
                target += z
            else:
                target = _times(z, V, target, BT, BR, BM, PREC)
            if ALT:
                source, target = target, source

    p_moved = before == 0
    tl.store(y_out + at, tl.where(p_moved, target, source), mask=inside)
    tl.store(y_out + at + m, tl.where(p_moved, source, target), mask=inside)


def _split_backward_kernel(
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
    B,
    N,
    low,
    high,
    m,
    r_p,
    r_q,
    ACT: constexpr,
    KIND: constexpr,
    PREC: constexpr,
    FAST: constexpr,
    EVEN: constexpr,
    DET: constexpr,
    STEP: constexpr,
    ALT: constexpr,
    WPREC: constexpr,
    RB: constexpr,
    BT: constexpr,
    BM: constexpr,
    BR: constexpr,
):  # pragma: kernel
    pid = tl.program_id(0)
    first = pid.to(tl.int64) * BT
    rows = tl.arange(0, BT)
    cols = tl.arange(0, BM)
    here = first * (2 * m)
    at = rows[:, None] * (2 * m) + cols[None, :]
    inside = (first + rows[:, None] < B) & (cols[None, :] < m)
    y_in += here
    g_in += here
    y_out += here
    g_out += here
    # Rows beyond the batch repeat its last sample: a state that surely can be taken back.
    last = (tl.minimum(B - first, BT) - 1).to(tl.int32)
    again = tl.minimum(rows, last)[:, None] * (2 * m) + cols[None, :]
    source = tl.load(y_in + again + m, mask=cols[None, :] < m, other=0.0)
    target = tl.load(y_in + again, mask=cols[None, :] < m, other=0.0)
    g_source = tl.load(g_in + at + m, mask=inside, other=0.0)
    g_target = tl.load(g_in + at, mask=inside, other=0.0)
    in_block = tl.arange(0, BR)[:, None] * BM + cols[None, :]

    turn_next = tl.load(half + high - 1)
    j_next = tl.load(layer + high - 1).to(tl.int64)
    c_next = tl.load(coef + high - 1)
    r = tl.where(turn_next == 0, r_q, r_p)
    K_next = _matrix(
        tl.where(turn_next == 0, K_q, K_p) + j_next * r * m, RB - 1, r, m, BR, BM, EVEN, PREC
    )
    b_next = _vector(tl.where(turn_next == 0, b_q, b_p) + j_next * r, RB - 1, r, BR)
    V_next = K_next
    if KIND == "general":
        V_next = _matrix(
            tl.where(turn_next == 0, V_q, V_p) + j_next * r * m, RB - 1, r, m, BR, BM, EVEN, PREC
        )
    s = tl.maximum(high * RB - 2, low * RB) // RB
    turn_after = tl.load(half + s)
    j_after = tl.load(layer + s).to(tl.int64)
    c_after = tl.load(coef + s)
    before = turn_next * 0
    if ALT:  # the shears take turns, so that the roles change by name alone
        swap = turn_next != 0
        before = turn_next
        other = tl.where(swap, target, source)
        target = tl.where(swap, source, target)
        source = other
        other = tl.where(swap, g_target, g_source)
        g_target = tl.where(swap, g_source, g_target)
        g_source = other
    for pair in range((high - low) * RB // (1 + ALT)):
        for e in tl.static_range(1 + ALT):
            turn, j, c, K, b, V = turn_next, j_next, c_next, K_next, b_next, V_next
            k = high * RB - 1 - (pair * (1 + ALT) + e)
            block = tl.maximum(k - 1, low * RB) % RB
            turn_next, j_next, c_next = turn_after, j_after, c_after
            s = tl.maximum(k - 2, low * RB) // RB
            turn_after = tl.load(half + s)
            j_after = tl.load(layer + s).to(tl.int64)
            c_after = tl.load(coef + s)
            r = tl.where(turn_next == 0, r_q, r_p)
            K_next = _matrix(
                tl.where(turn_next == 0, K_q, K_p) + j_next * r * m, block, r, m, BR, BM, EVEN, PREC
            )
            b_next = _vector(tl.where(turn_next == 0, b_q, b_p) + j_next * r, block, r, BR)
            V_next = K_next
            if KIND == "general":
                V_next = _matrix(
                    tl.where(turn_next == 0, V_q, V_p) + j_next * r * m,
                    block,
                    r,
                    m,
                    BR,
                    BM,
                    EVEN,
                    PREC,
                )

            if not ALT:
                swap = turn != before
                before = turn
                other = tl.where(swap, target, source)
                target = tl.where(swap, source, target)
                source = other
                other = tl.where(swap, g_target, g_source)
                g_target = tl.where(swap, g_source, g_target)
                g_source = other

            bias = tl.zeros((BT, BR), tl.float32) + b[None, :]
            a = _times_transposed(source, K, bias, BT, BR, BM, PREC)
            if KIND == "identity":
                t = g_target
            else:
                t = _times_transposed(g_target, V, tl.zeros((BT, BR), tl.float32), BT, BR, BM, PREC)
            z = _sigma(a, ACT, FAST)
            u = c * _slope(a, z, ACT) * t
            cz = c * z
            g_source = _times(u, K, g_source, BT, BR, BM, PREC)
            if KIND == "identity":
                target -= cz
            else:
                target = _times(-cz, V, target, BT, BR, BM, PREC)

            if DET:
                slot = ((k // RB - low).to(tl.int64) * tl.num_programs(0) + pid) * RB + k % RB
                slot_coef = slot
            else:
                slot = (turn * N + j) * RB + k % RB
                slot_coef = k // RB
            into = slot * (BR * BM)
            u_T = tl.trans(_rounded(u, WPREC))
            z_T = tl.trans(_rounded(cz, WPREC))
            grad = tl.zeros((BR, BM), tl.float32)
            if KIND == "same":
                grad = _dot(z_T, _rounded(g_target, WPREC), grad, WPREC)
            if KIND == "general":
                grad_V = _dot(z_T, _rounded(g_target, WPREC), grad, WPREC)
                _put(dV + into + in_block, grad_V, DET)
            grad = _dot(u_T, _rounded(source, WPREC), grad, WPREC)
            _put(dK + into + in_block, grad, DET)
            _column_sum(u, u_T, db + slot * BR, BR, BT, WPREC, DET)
            if STEP:
                _put(dcoef + slot_coef, tl.sum(z * t), DET)
            if ALT:
                source, target = target, source
                g_source, g_target = g_target, g_source

    p_moved = before == 0
    tl.store(y_out + at, tl.where(p_moved, target, source), mask=inside)
    tl.store(y_out + at + m, tl.where(p_moved, source, target), mask=inside)
    tl.store(g_out + at, tl.where(p_moved, g_target, g_source), mask=inside)
    tl.store(g_out + at + m, tl.where(p_moved, g_source, g_target), mask=inside)


def _euler_forward_kernel(
    y_in,
    y_out,
    K,
    b,
    V,
    h,
    B,
    N,
    n,
    r,
    V_stride,
    ACT: constexpr,
    KIND: constexpr,
    PREC: constexpr,
    FAST: constexpr,
    EVEN: constexpr,
    KEEP: constexpr,
    RB: constexpr,
    BT: constexpr,
    BM: constexpr,
    BR: constexpr,
):  # pragma: kernel
    first = tl.program_id(0).to(tl.int64) * BT
    rows = tl.arange(0, BT)
    cols = tl.arange(0, BM)
    at = rows[:, None] * n + cols[None, :]
    inside = (first + rows[:, None] < B) & (cols[None, :] < n)
    y_in += first * n
    y_out += first * n
    zero = first * 0
    y = tl.load(y_in + at, mask=inside, other=0.0)
    if KEEP:
        tl.store(y_out + at, y, mask=inside)
    new = y

    W_next = _matrix(K, 0, r, n, BR, BM, EVEN, PREC)
    V_next = W_next
    if KIND == "general":
        V_next = _matrix(V, 0, r, n, BR, BM, EVEN, PREC)
    b_next = _vector(b, 0, r, BR)
    c_next = tl.load(h)
    for k in range(N * RB):
        W, U, bias, c = W_next, V_next, b_next, c_next
        ahead = tl.minimum(k + 1, N * RB - 1)
        j = (ahead // RB).to(tl.int64)
        block = ahead % RB
        W_next = _matrix(K + j * r * n, block, r, n, BR, BM, EVEN, PREC)
        V_next = W_next
        if KIND == "general":
            V_next = _matrix(V + j * V_stride, block, r, n, BR, BM, EVEN, PREC)
        b_next = _vector(b + j * r, block, r, BR)
        c_next = tl.load(h + j)

        start = tl.zeros((BT, BR), tl.float32) + bias[None, :]
        a = _times_transposed(y, W, start, BT, BR, BM, PREC)
        z = c * _sigma(a, ACT, FAST)
        if KIND == "identity":
            new += z
        else:
            new = _times(z, U, new, BT, BR, BM, PREC)
        if RB == 1:
            y = new
        else:
            y = tl.where(k % RB == RB - 1, new, y)
        if KEEP:  # the last block has the last word
            tl.store(y_out + (zero + k // RB + 1) * (B * n) + at, new, mask=inside)
    if not KEEP:
        tl.store(y_out + at, y, mask=inside)


def _euler_backward_kernel(
    states,
    g_in,
    g_out,
    K,
    b,
    V,
    h,
    dK,
    db,
    dV,
    dh,
    B,
    low,
    high,
    n,
    r,
    V_stride,
    ACT: constexpr,
    KIND: constexpr,
    PREC: constexpr,
    FAST: constexpr,
    EVEN: constexpr,
    DET: constexpr,
    STEP: constexpr,
    OUTER: constexpr,
    WPREC: constexpr,
    RB: constexpr,
    BT: constexpr,
    BM: constexpr,
    BR: constexpr,
):  # pragma: kernel
    pid = tl.program_id(0)
    first = pid.to(tl.int64) * BT
    rows = tl.arange(0, BT)
    cols = tl.arange(0, BM)
    at = rows[:, None] * n + cols[None, :]
    inside = (first + rows[:, None] < B) & (cols[None, :] < n)
    states += first * n
    g_in += first * n
    g_out += first * n
    g = tl.load(g_in + at, mask=inside, other=0.0)
    new = g
    in_block = tl.arange(0, BR)[:, None] * BM + cols[None, :]

    top = (high - 1).to(tl.int64)
    W_next = _matrix(K + top * r * n, RB - 1, r, n, BR, BM, EVEN, PREC)
    V_next = W_next
    if KIND == "general":
        V_next = _matrix(V + top * V_stride, RB - 1, r, n, BR, BM, EVEN, PREC)
    b_next = _vector(b + top * r, RB - 1, r, BR)
    c_next = tl.load(h + top)
    y_next = tl.load(states + top * B * n + at, mask=inside, other=0.0)
    for i in range((high - low) * RB):
        W, U, bias, c, y = W_next, V_next, b_next, c_next, y_next
        k = high * RB - 1 - i
        ahead = tl.maximum(k - 1, low * RB)
        j = (ahead // RB).to(tl.int64)
        block = ahead % RB
        W_next = _matrix(K + j * r * n, block, r, n, BR, BM, EVEN, PREC)
        V_next = W_next
        if KIND == "general":
            V_next = _matrix(V + j * V_stride, block, r, n, BR, BM, EVEN, PREC)
        b_next = _vector(b + j * r, block, r, BR)
        c_next = tl.load(h + j)
        y_next = tl.load(states + j * B * n + at, mask=inside, other=0.0)

        start = tl.zeros((BT, BR), tl.float32) + bias[None, :]
        a = _times_transposed(y, W, start, BT, BR, BM, PREC)
        if KIND == "identity":
            t = g
        else:
            t = _times_transposed(g, U, tl.zeros((BT, BR), tl.float32), BT, BR, BM, PREC)
        z = _sigma(a, ACT, FAST)
        u = c * _slope(a, z, ACT) * t
        new = _times(u, W, new, BT, BR, BM, PREC)

        if DET:
            slot = ((k // RB - low).to(tl.int64) * tl.num_programs(0) + pid) * RB + k % RB
            slot_h = slot
        else:
            slot = (k // RB).to(tl.int64) * RB + k % RB
            slot_h = (k // RB).to(tl.int64)
        into = slot * (BR * BM)
        u_T = tl.trans(_rounded(u, WPREC))
        if OUTER:
            z_T = tl.trans(_rounded(c * z, WPREC))
            grad_V = _dot(z_T, _rounded(g, WPREC), tl.zeros((BR, BM), tl.float32), WPREC)
            _put(dV + into + in_block, grad_V, DET)
        grad = _dot(u_T, _rounded(y, WPREC), tl.zeros((BR, BM), tl.float32), WPREC)
        _put(dK + into + in_block, grad, DET)
        _column_sum(u, u_T, db + slot * BR, BR, BT, WPREC, DET)
        if STEP:
            _put(dh + slot_h, tl.sum(z * t), DET)
        if RB == 1:
            g = new
        else:
            g = tl.where(k % RB == 0, new, g)
    tl.store(g_out + at, g, mask=inside)


# Around the kernels


class _Kernels(NamedTuple):
    split_forward: Any
    split_backward: Any
    euler_forward: Any
    euler_backward: Any
    fast: bool  # whether inline assembly can be used


_HELPERS = (
    "_sigma",
    "_slope",
    "_rounded",
    "_ordered",
    "_dot",
    "_times_transposed",
    "_times",
    "_column_sum",
    "_matrix",
    "_vector",
    "_put",
)


@functools.cache
def _load() -> _Kernels:
    """Import Triton and compile what is above, at the first call."""
    triton = require("triton", extra="gpu")
    here = globals()
    here["tl"] = require("triton.language", extra="gpu")
    here["constexpr"] = here["tl"].constexpr
    for name in _HELPERS:
        here[name] = triton.jit(here[name])
    kernels = (
        _split_forward_kernel,
        _split_backward_kernel,
        _euler_forward_kernel,
        _euler_backward_kernel,
    )
    # One compiled kernel serves every depth and batch.
    open_ended = ("B", "M", "N", "low", "high")
    jit = [
        triton.jit(
            k, do_not_specialize=[a for a in open_ended if a in inspect.signature(k).parameters]
        )
        for k in kernels
    ]
    return _Kernels(*jit, fast=not interpreted())


def interpreted() -> bool:
    """Whether Triton runs the kernels in Python, for tests on a CPU."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


class Plan(NamedTuple):
    """How a kernel is cut up: samples a tile, rows of K a block, warps a program."""

    samples: int
    rows: int
    warps: int


# For the forward and the backward kernel, by the padded width of K; measured on an H200.
_SPLIT: dict[int, dict[str, tuple[Plan, Plan]]] = {
    32: {
        "ieee": (Plan(32, 32, 4), Plan(32, 32, 4)),
        "tf32": (Plan(64, 32, 4), Plan(64, 32, 4)),
        "tf32x3": (Plan(16, 32, 2), Plan(32, 32, 2)),
        "bf16": (Plan(64, 32, 4), Plan(64, 32, 4)),
    },
    64: {
        "ieee": (Plan(32, 32, 4), Plan(32, 32, 4)),
        "tf32": (Plan(64, 64, 4), Plan(32, 64, 4)),
        "tf32x3": (Plan(32, 64, 4), Plan(32, 64, 8)),
        "bf16": (Plan(64, 64, 4), Plan(64, 64, 4)),
    },
    128: {
        "ieee": (Plan(32, 16, 8), Plan(16, 32, 8)),
        "tf32": (Plan(32, 32, 4), Plan(64, 64, 8)),
        "tf32x3": (Plan(32, 32, 8), Plan(64, 32, 8)),
        "bf16": (Plan(64, 64, 8), Plan(64, 64, 8)),
    },
}
_EULER: dict[int, dict[str, tuple[Plan, Plan]]] = {
    32: _SPLIT[32],
    64: {
        "ieee": (Plan(32, 32, 4), Plan(16, 32, 4)),
        "tf32": (Plan(64, 64, 8), Plan(64, 64, 8)),
        "tf32x3": (Plan(32, 64, 4), Plan(32, 64, 8)),
        "bf16": (Plan(64, 64, 4), Plan(64, 64, 8)),
    },
    128: {
        "ieee": (Plan(32, 16, 8), Plan(16, 32, 8)),
        "tf32": (Plan(32, 32, 4), Plan(64, 64, 8)),
        "tf32x3": (Plan(32, 32, 8), Plan(64, 32, 8)),
        "bf16": (Plan(64, 64, 8), Plan(64, 64, 8)),
    },
    256: {
        "ieee": (Plan(16, 16, 8), Plan(16, 16, 8)),
        "tf32": (Plan(16, 16, 8), Plan(64, 64, 8)),
        "tf32x3": (Plan(16, 16, 8), Plan(16, 16, 8)),
        "bf16": (Plan(64, 32, 8), Plan(64, 32, 8)),
    },
}


def plan(euler: bool, width: int, r: int, precision: str, *, backward: bool) -> Plan:
    """How a kernel over K of this padded width and r rows is cut up."""
    table = _EULER if euler else _SPLIT
    samples, rows, warps = table[max(32, width)][precision][backward]
    return Plan(samples, min(rows, _padded(r)), warps)


_INTERPRETED = {"tf32": "ieee", "bf16": "emulated"}


def _weight_precision(precision: str) -> str:
    """How the gradients of the weights, which no layer works on further, are multiplied."""
    return "bf16" if precision == "tf32" else precision


def _padded(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())


def _check(y: Tensor, activation: str, kind: str, precision: str, *weights: Tensor | None) -> None:
    choose("activation", activation, ACTIVATIONS)
    choose("kind", kind, KINDS)
    choose("precision", precision, PRECISIONS)
    if y.dtype != torch.float32:
        raise OptionError(
            f"the Triton engine computes in float32, but the state is {y.dtype}; "
            "convert it or choose engine='reference'."
        )
    if y.shape[-1] > MAX_WIDTH:
        raise ShapeError(
            f"the Triton engine takes up to {MAX_WIDTH} features, but y has {y.shape[-1]}; "
            "choose engine='reference'."
        )
    for tensor in (y, *weights):
        if tensor is not None and not tensor.is_contiguous():
            raise ShapeError("the Triton engine takes contiguous tensors; call .contiguous().")


class _Cut(NamedTuple):
    """A plan with everything that a launch needs of it."""

    tiles: int
    blocks: int
    kind: str
    options: dict[str, Any]


def _cut(
    B: int,
    width: int,
    rows: tuple[int, ...],
    activation: str,
    kind: str,
    precision: str,
    backward: bool,
    euler: bool = False,
) -> _Cut:
    BM = _padded(width)
    samples, BR, warps = plan(euler, BM, max(rows), precision, backward=backward)
    if kind == "identity":
        if BM > 128:
            kind = "unit"
        else:
            BR = BM
    blocks = -(-max(rows) // BR)
    options = {
        "ACT": activation,
        "KIND": "general" if kind == "unit" else kind,
        "PREC": _INTERPRETED.get(precision, precision) if interpreted() else precision,
        "FAST": _load().fast and precision in ("tf32", "bf16"),
        "EVEN": width == BM and all(r == blocks * BR for r in rows),
        "RB": blocks,
        "BT": samples,
        "BM": BM,
        "BR": BR,
        "num_warps": warps,
        "num_stages": 1,
    }
    return _Cut(-(-B // samples), blocks, kind, options)


def split_forward(
    y: Tensor,
    K_p: Tensor,
    K_q: Tensor,
    b_p: Tensor,
    b_q: Tensor,
    V_p: Tensor | None,
    V_q: Tensor | None,
    half: Tensor,
    layer: Tensor,
    coef: Tensor,
    activation: str = "tanh",
    kind: str = "same",
    precision: str = "tf32",
    alternating: bool = False,
) -> Tensor:
    """y_N from y_0 (B, 2m) by the shears `target += coef[s] sigma(source K^T + b) V`.

    Shear s moves p by K_q (half[s] = 0) or q by K_p (half[s] = 1), with the weights of layer[s];
    coef (M,) is float32, half and layer are int32. `kind`: V is K ("same"), given ("general",
    V_p and V_q (N, r, m)), or left out ("identity", r = m). `alternating` promises that p and q
    take turns and M is even, which saves a few instructions.
    """
    _check(y, activation, kind, precision, K_p, K_q, b_p, b_q, V_p, V_q)
    (B, n), rows = y.shape, (K_p.shape[1], K_q.shape[1])
    cut = _cut(B, n // 2, rows, activation, kind, precision, False)
    out = torch.empty_like(y)
    if B == 0 or len(half) == 0:
        return out.copy_(y)
    V_p, V_q = (K_p, K_q) if V_p is None or V_q is None else (V_p, V_q)
    weights = (K_p, K_q, b_p, b_q, V_p, V_q, half, layer, coef)
    sizes = (B, len(half), n // 2, *rows)
    _load().split_forward[(cut.tiles,)](
        y, out, *weights, *sizes, ALT=alternating and cut.blocks == 1, **cut.options
    )
    return out


def split_backward(
    y_N: Tensor,
    g_N: Tensor,
    K_p: Tensor,
    K_q: Tensor,
    b_p: Tensor,
    b_q: Tensor,
    V_p: Tensor | None,
    V_q: Tensor | None,
    half: Tensor,
    layer: Tensor,
    coef: Tensor,
    activation: str = "tanh",
    kind: str = "same",
    precision: str = "tf32",
    deterministic: bool = False,
    coef_gradient: bool = True,
    alternating: bool = False,
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None
]:
    """(y_0, g_0, dK_p, dK_q, db_p, db_q, dV_p, dV_q, dcoef) from y_N and g_N = dL/dy_N.

    Gradients are float32. `deterministic` adds up the tiles in a fixed order, in at most
    PARTIAL_BYTES; `coef_gradient=False` leaves dcoef out.
    """
    _check(y_N, activation, kind, precision, g_N, K_p, K_q, b_p, b_q, V_p, V_q)
    B, (N, r_p, m), r_q, M = len(y_N), K_p.shape, K_q.shape[1], len(half)
    cut = _cut(B, m, (r_p, r_q), activation, kind, precision, True)
    options = {**cut.options, "DET": deterministic, "STEP": coef_gradient}
    options["ALT"] = alternating and cut.blocks == 1
    options["WPREC"] = _weight_precision(options["PREC"])
    BR, BM = options["BR"], options["BM"]
    copy = torch.clone if deterministic or not (B and M) else torch.empty_like
    y_0, g_0 = copy(y_N), copy(g_N)
    sums = _Sums(y_N, 2 * N, M, cut.blocks, BR, BM, general=kind == "general")
    V_p, V_q = (K_p, K_q) if V_p is None or V_q is None else (V_p, V_q)
    weights = (K_p, K_q, b_p, b_q, V_p, V_q, half, layer, coef)
    kernel = _load().split_backward
    if B and M and deterministic:
        slots = half.long() * N + layer.long()
        chunk, partial = sums.partial(cut.tiles)
        for high in range(M, 0, -chunk):
            low = max(0, high - chunk)
            sizes = (B, N, low, high, m, r_p, r_q)
            kernel[(cut.tiles,)](y_0, g_0, y_0, g_0, *weights, *partial, *sizes, **options)
            sums.collect(partial, slots[low:high], low, high)
    elif B and M:
        sizes = (B, N, 0, M, m, r_p, r_q)
        kernel[(cut.tiles,)](y_N, g_N, y_0, g_0, *weights, *sums.all, *sizes, **options)
    dK, db, dV = sums.of_weights(max(r_p, r_q), m)
    dV_p, dV_q = (dV[N:, :r_p], dV[:N, :r_q]) if dV is not None else (None, None)
    dcoef = sums.all[3] if coef_gradient else None
    return y_0, g_0, dK[N:, :r_p], dK[:N, :r_q], db[N:, :r_p], db[:N, :r_q], dV_p, dV_q, dcoef


def euler_forward(
    y: Tensor,
    K: Tensor,
    b: Tensor,
    V: Tensor | None,
    h: Tensor,
    activation: str = "tanh",
    kind: str = "general",
    precision: str = "tf32",
    keep: bool = False,
) -> Tensor:
    """y_N by `y += h[j] sigma(y K[j]^T + b[j]) V[j]`, or with `keep` all states (N+1, B, n).

    `kind`: V (N, r, n) is given ("general"), is K ("same"), or left out ("identity", r = n).
    """
    _check(y, activation, kind, precision, K, b, V)
    (B, n), (N, r, _) = y.shape, K.shape
    cut = _cut(B, n, (r,), activation, kind, precision, False, euler=True)
    out = torch.empty((N + 1, B, n) if keep else (B, n), dtype=y.dtype, device=y.device)
    if B == 0 or N == 0:
        return out.copy_(y)
    V, V_stride, _ = _outer(K, V, cut.kind)
    sizes = (B, N, n, r, V_stride)
    _load().euler_forward[(cut.tiles,)](y, out, K, b, V, h, *sizes, KEEP=keep, **cut.options)
    return out


def euler_backward(
    states: Tensor,
    g_N: Tensor,
    K: Tensor,
    b: Tensor,
    V: Tensor | None,
    h: Tensor,
    activation: str = "tanh",
    kind: str = "general",
    precision: str = "tf32",
    deterministic: bool = False,
    step_gradient: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """(g_0, dK, db, dV, dh) from the states (N+1 or N, B, n) and g_N = dL/dy_N.

    With kind "same", dK holds both parts and dV is None.
    """
    _check(g_N, activation, kind, precision, states, K, b, V)
    (B, n), (N, r, _) = g_N.shape, K.shape
    cut = _cut(B, n, (r,), activation, kind, precision, True, euler=True)
    V, V_stride, outer = _outer(K, V, cut.kind)
    options = {**cut.options, "DET": deterministic, "STEP": step_gradient, "OUTER": outer}
    options["WPREC"] = _weight_precision(options["PREC"])
    g_0 = g_N.clone() if deterministic or not (B and N) else torch.empty_like(g_N)
    sums = _Sums(g_N, N, N, cut.blocks, options["BR"], options["BM"], general=outer)
    kernel = _load().euler_backward
    if B and N and deterministic:
        slots = torch.arange(N, device=g_N.device)
        chunk, partial = sums.partial(cut.tiles)
        for high in range(N, 0, -chunk):
            low = max(0, high - chunk)
            sizes = (B, low, high, n, r, V_stride)
            kernel[(cut.tiles,)](states, g_0, g_0, K, b, V, h, *partial, *sizes, **options)
            sums.collect(partial, slots[low:high], low, high)
    elif B and N:
        sizes = (B, 0, N, n, r, V_stride)
        kernel[(cut.tiles,)](states, g_N, g_0, K, b, V, h, *sums.all, *sizes, **options)
    dK, db, dV = sums.of_weights(r, n)
    if kind == "same" and dV is not None:
        dK, dV = dK + dV, None
    return g_0, dK, db, dV, sums.all[3] if step_gradient else None


def _outer(K: Tensor, V: Tensor | None, kind: str) -> tuple[Tensor, int, bool]:
    """The matrices outside of sigma, how far apart they lie, and whether they have gradients."""
    if kind == "unit":
        return torch.eye(K.shape[1], dtype=K.dtype, device=K.device), 0, False
    if V is None:
        return K, K.stride(0), kind == "same"
    return V, V.stride(0), True


class _Sums:
    """Gradients of the weights, padded to whole blocks."""

    def __init__(
        self, like: Tensor, slots: int, steps: int, blocks: int, BR: int, BM: int, *, general: bool
    ) -> None:
        self.slots, self.blocks, self.BR, self.BM = slots, blocks, BR, BM
        sizes = (slots * blocks * BR * BM, slots * blocks * BR, steps)
        parts = like.new_zeros(sum(sizes) + general * sizes[0]).split(
            [*sizes, *([sizes[0]] if general else [])]
        )
        dV = parts[3] if general else parts[0]
        self.general = general
        self.all = (parts[0], parts[1], dV, parts[2])

    def partial(self, tiles: int) -> tuple[int, tuple[Tensor, ...]]:
        """How many steps fit into the room for the sums of single tiles, and that room."""
        rows, new = self.blocks * self.BR, self.all[0].new_empty
        chunk = PARTIAL_BYTES // (4 * tiles * rows * self.BM * (1 + self.general))
        chunk = max(2, chunk - chunk % 2)  # whole pairs of shears
        dK = new(chunk, tiles, rows * self.BM)
        dV = torch.empty_like(dK) if self.general else dK
        return chunk, (dK, new(chunk, tiles, rows), dV, new(chunk, tiles * self.blocks))

    def collect(self, partial: tuple[Tensor, ...], slots: Tensor, low: int, high: int) -> None:
        """Add the tiles of the steps low .. high - 1, in an order that never changes."""
        weights = zip(self.all[:3], partial[:3], (True, True, self.general), strict=True)
        for total, part, wanted in weights:
            if wanted:
                summed = part[: high - low].sum(1)
                # Sorts the slots first; index_add_ would add in the order of arrival.
                total.view(self.slots, -1).index_put_((slots,), summed, accumulate=True)
        self.all[3][low:high] = partial[3][: high - low].sum(1)

    def of_weights(self, r: int, m: int) -> tuple[Tensor, Tensor, Tensor | None]:
        dK, db, dV, _ = self.all
        rows = self.blocks * self.BR
        matrix = (self.slots, rows, self.BM)
        dV = dV.view(matrix)[:, :r, :m] if self.general else None
        return dK.view(matrix)[:, :r, :m], db.view(self.slots, rows)[:, :r], dV
