"""Whole stacks of layers as one Triton kernel: states in registers, weights streamed.

A program takes a tile of samples through all layers. A splitting scheme (H2, MS1, MS3, Verlet,
Yoshida) is a schedule of shears `target += coef * sigma(source K^T + b) V`; each can be undone, so
the backward kernel starts from y_N and reconstructs every state on its way back. Forward Euler (H1,
MS2) cannot be undone: its backward kernel reads the stored states.

A shear with r hidden units is the sum of shears with some of the units each, with the same source
and target: kernels loop over (shear, block of rows of K), so r has no limit and K takes no more
registers than one block.

A kernel is chosen, split into tiles and compiled once for a stack (`_Recipe`). Later calls only
allocate what they return and launch it.

Triton is imported when a kernel is first asked for. It reads the names that a kernel uses from this
module, which is why `tl` is one of them and why `load` replaces each kernel by its compiled form.
"""

# Kernels branch on what is known when they are compiled, which pyright cannot follow.
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import functools
import inspect
import math
import os
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from hdnn.engine.kernels.protocol import ACTIVATIONS, Stack, Tensors, schedule
from hdnn.errors import OptionError, ShapeError, choose, require

PRECISIONS = ("ieee", "tf32", "tf32x3", "bf16")
KINDS = ("same", "general", "identity", "canonical")
MAX_WIDTH = 256
"""The widest state y, in features."""

PARTIAL_BYTES = 64 * 2**20
"""Memory for the sums of single tiles, which the deterministic mode adds up afterwards."""

tl: Any = None
constexpr: TypeAlias = Any


# Inside of a kernel


def kernel_sigma(x, ACT: constexpr, FAST: constexpr):  # pragma: kernel
    if ACT == "tanh":
        if FAST:  # relative error 2^-11, that of a tf32 operand
            z = tl.inline_asm_elementwise(
                "tanh.approx.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
            )
        else:  # exact to rounding also near 0, where subtracting large numbers would not be
            s = x * x
            near = ((s * -5.70498872745e-3 + 2.06390887954e-2) * s - 5.37397155531e-2) * s
            near = x + x * (((near + 1.33314422036e-1) * s - 3.33332819422e-1) * s)
            z = tl.where(tl.abs(x) < 0.625, near, 2.0 * tl.sigmoid(2.0 * x) - 1.0)
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


def kernel_slope(x, z, ACT: constexpr):  # pragma: kernel
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
        d = tl.zeros_like(x) + 1.0
    return d


def _rounded(x, PREC: constexpr):  # pragma: kernel
    if PREC == "tf32":  # the tensor cores cut off the last 13 bits, which would always shrink x
        x = (x.to(tl.int32, bitcast=True) + 0x1000).to(tl.float32, bitcast=True)
    elif PREC == "bf16":
        x = x.to(tl.bfloat16)
    elif PREC == "emulated":  # bf16 in the interpreter, which cannot multiply bf16
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
    # t + 4 of a tf32 operand. The order of a sum is free: renumbering the columns of both factors
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


def _column_sum(u, u_T, into, block, r, BR: constexpr, BT: constexpr, PREC, DET):  # pragma: kernel
    i = block * BR + tl.arange(0, BR)
    if PREC == "ieee" or PREC == "emulated":
        _put(into + i, tl.sum(u, 0), i < r, DET)
    else:  # a product with ones takes the tensor cores less time than shuffles would need
        ones = _rounded(tl.full((BT, 16), 1.0, tl.float32), PREC)
        total = _dot(u_T, ones, tl.zeros((BR, 16), tl.float32), PREC)
        column = tl.arange(0, 16)[None, :]
        _put(into + i[:, None] + column * 0, total, (i[:, None] < r) & (column == 0), DET)


def _column(n, BM: constexpr, GAP: constexpr):  # pragma: kernel
    """The matrix column of each column of a tile; both halves of y = (p, q) may be padded."""
    k = tl.arange(0, BM)
    if GAP:
        k = tl.where(k < BM // 2, k, k - BM // 2 + n // 2)
    return k


def _is_column(n, BM: constexpr, GAP: constexpr):  # pragma: kernel
    k = tl.arange(0, BM)
    if GAP:
        return k % (BM // 2) < n // 2
    return k < n


def _entries(block, n, BR: constexpr, BM: constexpr, GAP: constexpr, EVEN):  # pragma: kernel
    """Where a block of rows of a matrix with n columns lies."""
    i = tl.arange(0, BR)[:, None]
    k = _column(n, BM, GAP)[None, :]
    if EVEN:
        at = block * (BR * BM) + (i * BM + k)
    else:
        at = (block * BR + i) * n + k
    return at


def _exist(block, r, n, BR: constexpr, BM: constexpr, GAP: constexpr):  # pragma: kernel
    i = block * BR + tl.arange(0, BR)[:, None]
    return (i < r) & _is_column(n, BM, GAP)[None, :]


def _matrix(
    W, block, r, n, BR: constexpr, BM: constexpr, GAP: constexpr, EVEN, PREC
):  # pragma: kernel
    at = W + _entries(block, n, BR, BM, GAP, EVEN)
    if EVEN:
        tile = tl.load(at)
    else:
        tile = tl.load(at, mask=_exist(block, r, n, BR, BM, GAP), other=0.0)
    return _rounded(tile.to(tl.float32), PREC)


def _turned(x, ROWS: constexpr, COLS: constexpr):  # pragma: kernel
    """J x for rows x = (p, q) and the canonical J: (-q, p)."""
    p, q = tl.split(tl.permute(tl.reshape(x, (ROWS, 2, COLS // 2)), (0, 2, 1)))
    return tl.reshape(tl.permute(tl.join(-q, p), (0, 2, 1)), (ROWS, COLS))


def _vector(b, block, r, BR: constexpr):  # pragma: kernel
    i = block * BR + tl.arange(0, BR)
    return tl.load(b + i, mask=i < r, other=0.0).to(tl.float32)


def _put(into, value, mask, DET: constexpr):  # pragma: kernel
    if DET:
        tl.store(into, value, mask=mask)
    else:
        tl.atomic_add(into, value, mask=mask, sem="relaxed")


def _put_matrix(
    W, value, block, r, n, BR: constexpr, BM: constexpr, GAP: constexpr, EVEN, DET
):  # pragma: kernel
    at = W + _entries(block, n, BR, BM, GAP, EVEN)
    if EVEN:
        _put(at, value, None, DET)
    else:
        _put(at, value, _exist(block, r, n, BR, BM, GAP), DET)


def _split_forward_kernel(
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
    EVEN: constexpr,
    ALT: constexpr,
    KEEP: constexpr,
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
    kept += first * m
    in_kept = rows[:, None] * m + cols[None, :]
    source = tl.load(y_in + at + m, mask=inside, other=0.0)
    target = tl.load(y_in + at, mask=inside, other=0.0)

    turn_next = tl.load(half)
    j_next = tl.load(layer).to(tl.int64)
    c_next = tl.load(coef)
    r = tl.where(turn_next == 0, r_q, r_p)
    K_next = _matrix(
        tl.where(turn_next == 0, K_q, K_p) + j_next * r * m, 0, r, m, BR, BM, False, EVEN, PREC
    )
    b_next = _vector(tl.where(turn_next == 0, b_q, b_p) + j_next * r, 0, r, BR)
    V_next = K_next
    if KIND == "general":
        V_next = _matrix(
            tl.where(turn_next == 0, V_q, V_p) + j_next * r * m, 0, r, m, BR, BM, False, EVEN, PREC
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
            # Load the weights of the next step before this one starts, and their addresses
            # one step earlier still.
            block = tl.minimum(k + 1, M * RB - 1) % RB
            turn_next, j_next, c_next = turn_after, j_after, c_after
            s = tl.minimum(k + 2, M * RB - 1) // RB
            turn_after = tl.load(half + s)
            j_after = tl.load(layer + s).to(tl.int64)
            c_after = tl.load(coef + s)
            r = tl.where(turn_next == 0, r_q, r_p)
            K_next = _matrix(
                tl.where(turn_next == 0, K_q, K_p) + j_next * r * m,
                block,
                r,
                m,
                BR,
                BM,
                False,
                EVEN,
                PREC,
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
                    False,
                    EVEN,
                    PREC,
                )

            if not ALT:
                swap = turn != before
                before = turn
                other = tl.where(swap, target, source)
                target = tl.where(swap, source, target)
                source = other

            if KEEP:  # all blocks of a shear read the same half
                step = (first * 0 + k // RB) * (B * m)
                if RB == 1:
                    tl.store(kept + step + in_kept, source, mask=inside)
                else:
                    starts = in_kept * 0 + k % RB == 0
                    tl.store(kept + step + in_kept, source, mask=inside & starts)
            bias = tl.zeros((BT, BR), tl.float32) + b[None, :]
            a = _times_transposed(source, K, bias, BT, BR, BM, PREC)
            z = c * kernel_sigma(a, ACT, FAST)
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
    low,
    high,
    m,
    r_p,
    r_q,
    first_p,
    ACT: constexpr,
    KIND: constexpr,
    PREC: constexpr,
    FAST: constexpr,
    EVEN: constexpr,
    DET: constexpr,
    STEP: constexpr,
    ALT: constexpr,
    KEEP: constexpr,
    WPREC: constexpr,
    RB: constexpr,
    BT: constexpr,
    BM: constexpr,
    BR: constexpr,
):  # pragma: kernel
    """With KEEP, y_in is what the shears have read, and none is undone; without, it is y_N."""
    pid = tl.program_id(0)
    first = pid.to(tl.int64) * BT
    rows = tl.arange(0, BT)
    cols = tl.arange(0, BM)
    here = first * (2 * m)
    at = rows[:, None] * (2 * m) + cols[None, :]
    inside = (first + rows[:, None] < B) & (cols[None, :] < m)
    g_in += here
    y_out += here
    g_out += here
    if KEEP:
        y_in += first * m
        in_kept = rows[:, None] * m + cols[None, :]
        read = (first * 0 + high - 1) * (B * m)
        source_next = tl.load(y_in + read + in_kept, mask=inside, other=0.0)
    else:
        y_in += here
        # Rows beyond the batch repeat its last sample, a state that can surely be undone.
        last = (tl.minimum(B - first, BT) - 1).to(tl.int32)
        again = tl.minimum(rows, last)[:, None] * (2 * m) + cols[None, :]
        source = tl.load(y_in + again + m, mask=cols[None, :] < m, other=0.0)
        target = tl.load(y_in + again, mask=cols[None, :] < m, other=0.0)
    g_source = tl.load(g_in + at + m, mask=inside, other=0.0)
    g_target = tl.load(g_in + at, mask=inside, other=0.0)

    turn_next = tl.load(half + high - 1)
    j_next = tl.load(layer + high - 1).to(tl.int64)
    c_next = tl.load(coef + high - 1)
    r = tl.where(turn_next == 0, r_q, r_p)
    K_next = _matrix(
        tl.where(turn_next == 0, K_q, K_p) + j_next * r * m, RB - 1, r, m, BR, BM, False, EVEN, PREC
    )
    b_next = _vector(tl.where(turn_next == 0, b_q, b_p) + j_next * r, RB - 1, r, BR)
    V_next = K_next
    if KIND == "general":
        V_next = _matrix(
            tl.where(turn_next == 0, V_q, V_p) + j_next * r * m,
            RB - 1,
            r,
            m,
            BR,
            BM,
            False,
            EVEN,
            PREC,
        )
    s = tl.maximum(high * RB - 2, low * RB) // RB
    turn_after = tl.load(half + s)
    j_after = tl.load(layer + s).to(tl.int64)
    c_after = tl.load(coef + s)
    before = turn_next * 0
    if ALT:  # the shears take turns, so that the roles change by name alone
        swap = turn_next != 0
        before = turn_next
        if not KEEP:
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
                tl.where(turn_next == 0, K_q, K_p) + j_next * r * m,
                block,
                r,
                m,
                BR,
                BM,
                False,
                EVEN,
                PREC,
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
                    False,
                    EVEN,
                    PREC,
                )

            if KEEP:
                source = source_next
                read = (first * 0 + tl.maximum(k - 1, low * RB) // RB) * (B * m)
                source_next = tl.load(y_in + read + in_kept, mask=inside, other=0.0)
            if not ALT:
                swap = turn != before
                before = turn
                if not KEEP:
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
            z = kernel_sigma(a, ACT, FAST)
            u = c * kernel_slope(a, z, ACT) * t
            cz = c * z
            g_source = _times(u, K, g_source, BT, BR, BM, PREC)
            if not KEEP:
                if KIND == "identity":
                    target -= cz
                else:
                    target = _times(-cz, V, target, BT, BR, BM, PREC)

            block = k % RB
            r = tl.where(turn == 0, r_q, r_p)
            if DET:  # the rows of a tile of samples
                slot = (k // RB - low).to(tl.int64) * tl.num_programs(0) + pid
                row = slot * tl.maximum(r_p, r_q)
                slot_coef = slot * RB + block
            else:  # the rows of a layer: those of q come first
                row = turn * first_p + j * r
                slot_coef = k // RB
            u_T = tl.trans(_rounded(u, WPREC))
            z_T = tl.trans(_rounded(cz, WPREC))
            grad = tl.zeros((BR, BM), tl.float32)
            if KIND == "same":
                grad = _dot(z_T, _rounded(g_target, WPREC), grad, WPREC)
            if KIND == "general":
                grad_V = _dot(z_T, _rounded(g_target, WPREC), grad, WPREC)
                _put_matrix(dV + row * m, grad_V, block, r, m, BR, BM, False, EVEN, DET)
            grad = _dot(u_T, _rounded(source, WPREC), grad, WPREC)
            _put_matrix(dK + row * m, grad, block, r, m, BR, BM, False, EVEN, DET)
            _column_sum(u, u_T, db + row, block, r, BR, BT, WPREC, DET)
            if STEP:
                _put(dcoef + slot_coef, tl.sum(z * t), None, DET)
            if ALT:
                if not KEEP:
                    source, target = target, source
                g_source, g_target = g_target, g_source

    p_moved = before == 0
    if not KEEP:
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
    GAP: constexpr,
    KEEP: constexpr,
    RB: constexpr,
    BT: constexpr,
    BM: constexpr,
    BR: constexpr,
):  # pragma: kernel
    first = tl.program_id(0).to(tl.int64) * BT
    rows = tl.arange(0, BT)
    at = rows[:, None] * n + _column(n, BM, GAP)[None, :]
    inside = (first + rows[:, None] < B) & _is_column(n, BM, GAP)[None, :]
    y_in += first * n
    y_out += first * n
    zero = first * 0
    y = tl.load(y_in + at, mask=inside, other=0.0)
    if KEEP:
        tl.store(y_out + at, y, mask=inside)
    new = y

    W_next = _matrix(K, 0, r, n, BR, BM, GAP, EVEN, PREC)
    V_next = W_next
    if KIND == "general":
        V_next = _matrix(V, 0, r, n, BR, BM, GAP, EVEN, PREC)
    b_next = _vector(b, 0, r, BR)
    c_next = tl.load(h)
    for k in range(N * RB):
        W, U, bias, c = W_next, V_next, b_next, c_next
        ahead = tl.minimum(k + 1, N * RB - 1)
        j = (ahead // RB).to(tl.int64)
        block = ahead % RB
        W_next = _matrix(K + j * r * n, block, r, n, BR, BM, GAP, EVEN, PREC)
        V_next = W_next
        if KIND == "general":
            V_next = _matrix(V + j * V_stride, block, r, n, BR, BM, GAP, EVEN, PREC)
        b_next = _vector(b + j * r, block, r, BR)
        c_next = tl.load(h + j)

        start = tl.zeros((BT, BR), tl.float32) + bias[None, :]
        a = _times_transposed(y, W, start, BT, BR, BM, PREC)
        z = c * kernel_sigma(a, ACT, FAST)
        if KIND == "identity":
            new += z
        elif KIND == "canonical":
            moved = _times(z, W, tl.zeros((BT, BM), tl.float32), BT, BR, BM, PREC)
            new += _turned(moved, BT, BM)
        else:
            new = _times(z, U, new, BT, BR, BM, PREC)
        if RB == 1:
            y = new
        else:
            y = tl.where(k % RB == RB - 1, new, y)
        if KEEP:  # each block overwrites it, and the last is right
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
    GAP: constexpr,
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
    at = rows[:, None] * n + _column(n, BM, GAP)[None, :]
    inside = (first + rows[:, None] < B) & _is_column(n, BM, GAP)[None, :]
    states += first * n
    g_in += first * n
    g_out += first * n
    g = tl.load(g_in + at, mask=inside, other=0.0)
    new = g

    top = (high - 1).to(tl.int64)
    W_next = _matrix(K + top * r * n, RB - 1, r, n, BR, BM, GAP, EVEN, PREC)
    V_next = W_next
    if KIND == "general":
        V_next = _matrix(V + top * V_stride, RB - 1, r, n, BR, BM, GAP, EVEN, PREC)
    b_next = _vector(b + top * r, RB - 1, r, BR)
    c_next = tl.load(h + top)
    y_next = tl.load(states + top * B * n + at, mask=inside, other=0.0)
    for i in range((high - low) * RB):
        W, U, bias, c, y = W_next, V_next, b_next, c_next, y_next
        k = high * RB - 1 - i
        ahead = tl.maximum(k - 1, low * RB)
        j = (ahead // RB).to(tl.int64)
        block = ahead % RB
        W_next = _matrix(K + j * r * n, block, r, n, BR, BM, GAP, EVEN, PREC)
        V_next = W_next
        if KIND == "general":
            V_next = _matrix(V + j * V_stride, block, r, n, BR, BM, GAP, EVEN, PREC)
        b_next = _vector(b + j * r, block, r, BR)
        c_next = tl.load(h + j)
        y_next = tl.load(states + j * B * n + at, mask=inside, other=0.0)

        start = tl.zeros((BT, BR), tl.float32) + bias[None, :]
        a = _times_transposed(y, W, start, BT, BR, BM, PREC)
        g_zK = g  # dL/d(z K), if V is made of K
        if KIND == "canonical":
            g_zK = _turned(-g, BT, BM)
        if KIND == "identity":
            t = g
        else:
            t = _times_transposed(g_zK, U, tl.zeros((BT, BR), tl.float32), BT, BR, BM, PREC)
        z = kernel_sigma(a, ACT, FAST)
        u = c * kernel_slope(a, z, ACT) * t
        new = _times(u, W, new, BT, BR, BM, PREC)

        block = k % RB
        if DET:
            slot = (k // RB - low).to(tl.int64) * tl.num_programs(0) + pid
            slot_h = slot * RB + block
        else:
            slot = (k // RB).to(tl.int64)
            slot_h = slot
        row = slot * r
        u_T = tl.trans(_rounded(u, WPREC))
        z_T = tl.trans(_rounded(c * z, WPREC))
        grad = tl.zeros((BR, BM), tl.float32)
        if KIND == "same" or KIND == "canonical":
            grad = _dot(z_T, _rounded(g_zK, WPREC), grad, WPREC)
        if OUTER:
            grad_V = _dot(z_T, _rounded(g, WPREC), grad, WPREC)
            _put_matrix(dV + row * n, grad_V, block, r, n, BR, BM, GAP, EVEN, DET)
        grad = _dot(u_T, _rounded(y, WPREC), grad, WPREC)
        _put_matrix(dK + row * n, grad, block, r, n, BR, BM, GAP, EVEN, DET)
        _column_sum(u, u_T, db + row, block, r, BR, BT, WPREC, DET)
        if STEP:
            _put(dh + slot_h, tl.sum(z * t), None, DET)
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
    direct: bool  # whether a compiled kernel can be called without Triton's check of each argument


_HELPERS = (
    "kernel_sigma",
    "kernel_slope",
    "_rounded",
    "_ordered",
    "_dot",
    "_times_transposed",
    "_times",
    "_column_sum",
    "_column",
    "_is_column",
    "_turned",
    "_entries",
    "_exist",
    "_matrix",
    "_vector",
    "_put",
    "_put_matrix",
)


@functools.cache
def load() -> _Kernels:
    """Import Triton and compile the kernels above, at the first call."""
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
    open_ended = ("B", "M", "N", "first_p", "low", "high")
    jit = [
        triton.jit(
            k, do_not_specialize=[a for a in open_ended if a in inspect.signature(k).parameters]
        )
        for k in kernels
    ]
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    compiled = not interpreted()
    return _Kernels(*jit, fast=compiled, direct=compiled and version >= (3, 3))


def interpreted() -> bool:
    """Whether Triton runs the kernels in Python, for tests on a CPU."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


class Tiling(NamedTuple):
    """The sizes of a kernel's parts: samples a tile, rows of K a block, warps a program."""

    samples: int
    rows: int
    warps: int


# For the forward and the backward kernel, by the padded width of K; measured on an H200.
_SPLIT: dict[int, dict[str, tuple[Tiling, Tiling]]] = {
    32: {
        "ieee": (Tiling(32, 32, 4), Tiling(32, 32, 4)),
        "tf32": (Tiling(64, 32, 4), Tiling(64, 32, 4)),
        "tf32x3": (Tiling(16, 32, 2), Tiling(32, 32, 2)),
        "bf16": (Tiling(64, 32, 4), Tiling(64, 32, 4)),
    },
    64: {
        "ieee": (Tiling(32, 32, 4), Tiling(32, 32, 4)),
        "tf32": (Tiling(64, 64, 4), Tiling(32, 64, 4)),
        "tf32x3": (Tiling(32, 64, 4), Tiling(32, 64, 8)),
        "bf16": (Tiling(64, 64, 4), Tiling(64, 64, 4)),
    },
    128: {
        "ieee": (Tiling(32, 16, 8), Tiling(16, 32, 8)),
        "tf32": (Tiling(32, 32, 4), Tiling(64, 64, 8)),
        "tf32x3": (Tiling(32, 32, 8), Tiling(64, 32, 8)),
        "bf16": (Tiling(64, 64, 8), Tiling(64, 64, 8)),
    },
}
_EULER: dict[int, dict[str, tuple[Tiling, Tiling]]] = {
    32: _SPLIT[32],
    64: {
        "ieee": (Tiling(32, 32, 4), Tiling(16, 32, 4)),
        "tf32": (Tiling(64, 64, 8), Tiling(64, 64, 8)),
        "tf32x3": (Tiling(32, 64, 4), Tiling(32, 64, 8)),
        "bf16": (Tiling(64, 64, 4), Tiling(64, 64, 8)),
    },
    128: {
        "ieee": (Tiling(32, 16, 8), Tiling(16, 32, 8)),
        "tf32": (Tiling(32, 32, 4), Tiling(64, 64, 8)),
        "tf32x3": (Tiling(32, 32, 8), Tiling(64, 32, 8)),
        "bf16": (Tiling(64, 64, 8), Tiling(64, 64, 8)),
    },
    256: {
        "ieee": (Tiling(16, 16, 8), Tiling(16, 16, 8)),
        "tf32": (Tiling(16, 16, 8), Tiling(64, 64, 8)),
        "tf32x3": (Tiling(16, 16, 8), Tiling(16, 16, 8)),
        "bf16": (Tiling(64, 32, 8), Tiling(64, 32, 8)),
    },
}
_CANONICAL = {  # Euler with V = K J^T
    **_EULER,
    64: {
        "ieee": (Tiling(32, 64, 4), Tiling(16, 64, 4)),
        "tf32": (Tiling(64, 64, 4), Tiling(32, 64, 4)),
        "tf32x3": (Tiling(32, 64, 4), Tiling(32, 64, 8)),
        "bf16": (Tiling(64, 64, 4), Tiling(64, 64, 4)),
    },
}


def tiling(name: str, kind: str, width: int, r: int, precision: str, *, backward: bool) -> Tiling:
    """The tiling of a kernel over K of this padded width and r rows."""
    table = _SPLIT if name == "split" else _CANONICAL if kind == "canonical" else _EULER
    samples, rows, warps = table[max(32, width)][precision][backward]
    return Tiling(samples, min(rows, _padded(r)), warps)


_INTERPRETED = {"tf32": "ieee", "bf16": "emulated"}


def _weight_precision(precision: str) -> str:
    """The precision for gradients of weights, on which no other layer depends."""
    return "bf16" if precision == "tf32" else precision


def _padded(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())


class _Call(NamedTuple):
    """What one launch of a kernel depends on besides the values of its arguments."""

    stack: Stack
    precision: str
    backward: bool
    keep: bool
    deterministic: bool

    @property
    def rows(self) -> tuple[int, ...]:
        """The rows of K, or of K_q and K_p: kernels count q first."""
        return self.stack.rows[::-1]


def _check(stack: Stack, precision: str) -> None:
    choose("activation", stack.activation, ACTIVATIONS)
    choose("kind", stack.kind, KINDS[:3] if stack.turns else KINDS)
    choose("precision", precision, PRECISIONS)
    dtype, n = stack.dtype, stack.features
    if dtype != torch.float32:
        raise OptionError(
            f"the Triton engine computes in float32, but the state is {dtype}; "
            "convert it or choose engine='reference'."
        )
    if n > MAX_WIDTH:
        raise ShapeError(
            f"the Triton engine takes up to {MAX_WIDTH} features, but y has {n}; "
            "choose engine='reference'."
        )
    if n % 2 and (stack.turns or stack.kind == "canonical"):
        raise ShapeError(f"y = (p, q) needs an even number of features, but has {n}.")


class _Recipe:
    """A stack's kernel with the tiling for its sizes: made once, and then called many times."""

    def __init__(self, call: _Call) -> None:
        stack, rows = call.stack, call.rows
        split, width, r, name = bool(stack.turns), stack.width, max(rows), _name(stack)
        BM = _padded(width)
        BT, BR, warps = tiling(name, stack.kind, BM, r, call.precision, backward=call.backward)
        self.unit = stack.kind == "identity" and BM > 128  # z in blocks, times a unit matrix
        if stack.kind == "identity" and not self.unit:
            BR = BM
        self.tiles, self.blocks = -(-stack.samples // BT), -(-r // BR)
        self.empty = stack.samples == 0 or stack.steps == 0
        self.steps, self.rows = stack.steps, rows
        # The kernel has a faster loop if p and q alternate, but not if it adds in a fixed order.
        alternating = sorted(stack.turns) == [0, 1] and not call.deterministic
        precision = call.precision
        if interpreted():
            precision = _INTERPRETED.get(precision, precision)
        constants = {
            "ACT": stack.activation,
            "KIND": "general" if self.unit else stack.kind,
            "PREC": precision,
            "WPREC": _weight_precision(precision),
            "FAST": load().fast and precision in ("tf32", "bf16"),
            "EVEN": width == BM and all(each == self.blocks * BR for each in rows),
            "GAP": stack.kind == "canonical" and width < BM,
            "ALT": alternating and self.blocks == 1,
            "KEEP": call.keep,
            "DET": call.deterministic,
            "STEP": stack.learned,
            "OUTER": stack.kind == "general",
            "RB": self.blocks,
            "BT": BT,
            "BM": BM,
            "BR": BR,
        }
        self.gradients = _Gradients(stack, rows)
        if split:
            sizes = (width, *stack.rows)
            if call.backward:
                sizes += (self.gradients.starts[1],)
        else:
            sizes = (width, r, 0 if self.unit else r * width)
        self.B, self.sizes = stack.samples, sizes
        self.kernel = getattr(load(), f"{name}_{'back' if call.backward else 'for'}ward")
        self.constants = {
            name: constants[name] for name in self.kernel.arg_names if name in constants
        }
        # Fusing products and sums is Triton's default now, but may not stay so.
        self.options = {"num_warps": warps, "num_stages": 1, "enable_fp_fusion": True}
        self.device = -1 if stack.device.type == "cpu" else stack.device.index
        self.rest = (*self.sizes, *self.constants.values())
        self.direct: Any = None

    def launch(self, tensors: tuple[Tensor, ...], *span: int) -> None:
        """Run the kernel over a number of steps, or from one step to another."""
        if self.device >= 0 and self.device != torch.cuda.current_device():
            with torch.cuda.device(self.device):
                return self.launch(tensors, *span)
        pointers = [tensor.data_ptr() for tensor in tensors]
        bits = 0
        for pointer in pointers:
            bits |= pointer
        aligned = bits % 16 == 0
        if aligned and self.direct:
            self.direct(*pointers, self.B, *span, *self.rest)
            return None
        grid = (self.tiles, 1, 1)
        compiled = self.kernel[grid](
            *tensors, self.B, *span, *self.sizes, **self.constants, **self.options
        )
        if aligned and load().direct:
            # Triton compiles for aligned pointers, and for each different _Call.
            self.direct = compiled[grid]
        return None


class _Gradients:
    """How the gradients of a stack share one buffer, each of them contiguous.

    Rows of dK, db and dV have the same order: layer by layer, all of q before all of p. A spare row
    at the end takes what belongs to none of them.
    """

    def __init__(self, stack: Stack, rows: tuple[int, ...]) -> None:
        N, width = stack.layers, stack.width
        self.starts, self.spare = [], 0
        for r in rows:
            self.starts.append(self.spare)
            self.spare = _aligned(self.spare + N * r)
        self.most = max(rows)
        tails = [(width,), (), (width,)] if stack.kind == "general" else [(width,), ()]
        self.widths = [math.prod(tail) for tail in tails]
        self.offsets = [0]
        self.places: list[tuple[tuple[int, ...], tuple[int, ...], int] | None] = []
        for tail, w in zip(tails, self.widths, strict=True):
            for r, start in zip(rows, self.starts, strict=True):
                strides = (r * w, w, 1)[: 2 + len(tail)]
                self.places.append(((N, r, *tail), strides, self.offsets[-1] + start * w))
            self.offsets.append(_aligned(self.offsets[-1] + (self.spare + 1) * w))
        self.places += [None] * (3 * len(rows) - len(self.places))
        self.places.append(((stack.steps,), (1,), self.offsets[-1]) if stack.learned else None)
        self.size = self.offsets[-1] + stack.steps * stack.learned

    def new(self, like: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        """The buffer, and dK, db, dV (of q and of p each) and dstep in it, all zero."""
        buffer = like.new_zeros(self.size)
        return buffer, [None if at is None else buffer.as_strided(*at) for at in self.places]

    def add_in_order(
        self, buffer: Tensor, rows: Tensor, recipe: _Recipe, tensors: tuple[Tensor, ...]
    ) -> None:
        """Launch for some steps at a time, and add up the sums of all tiles in a fixed order.

        rows (steps, most) says where the rows of a step belong.
        """
        widths, most, tiles = self.widths, self.most, recipe.tiles
        chunk = PARTIAL_BYTES // (4 * tiles * most * sum(widths))
        chunk = max(2, chunk - chunk % 2)  # whole pairs of shears
        parts = [buffer.new_empty(chunk, tiles, most * w) for w in widths]
        step_parts = buffer.new_empty(chunk, tiles * recipe.blocks)
        of_steps = buffer[self.offsets[-1] :]
        for high in range(len(rows), 0, -chunk):
            low = max(0, high - chunk)
            recipe.launch((*tensors, parts[0], parts[1], parts[-1], step_parts), low, high)
            here = rows[low:high].flatten()
            for part, w, offset in zip(parts, widths, self.offsets, strict=False):
                total = buffer.as_strided((self.spare + 1, w), (w, 1), offset)
                summed = part[: high - low].sum(1).view(-1, w)
                # This sorts the rows first; index_add_ would add in any order.
                total.index_put_((here,), summed, accumulate=True)
            if len(of_steps):
                of_steps[low:high] = step_parts[: high - low].sum(1)


def _aligned(size: int) -> int:
    """The next multiple of 32 numbers, or 128 bytes."""
    return -(-size // 32) * 32


def _targets(parts: list[Any]) -> tuple[Any, Any, Any, Any]:
    """dK, db, dV and dstep for a kernel; any tensor stands in for None, and is not touched."""
    dK, db, dV, dstep = parts
    return dK, db, dK if dV is None else dV, db if dstep is None else dstep


def _name(stack: Stack) -> str:
    return "split" if stack.turns else "euler"


def why_not(dtype: torch.dtype, features: int) -> str:
    """Why no kernel takes such states, or empty; half precision is converted to float32."""
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"the GPU kernel is for float32 and half precision, not {dtype}"
    if features > MAX_WIDTH:
        return f"the GPU kernel is for up to {MAX_WIDTH} features, not {features}"
    return ""


class _TritonStack:
    """The kernels of a stack; each is prepared when it is first needed.

    `deterministic` adds up the tiles in a fixed order, in at most PARTIAL_BYTES. Gradients are
    float32 and contiguous.
    """

    def __init__(self, stack: Stack, precision: str = "tf32", deterministic: bool = False) -> None:
        _check(stack, precision)
        self.stack, self.precision, self.deterministic = stack, precision, deterministic
        self._recipes: dict[tuple[bool, bool], _Recipe] = {}

    def recipe(self, backward: bool, keep: bool) -> _Recipe:
        """How to launch; `keep`: states are written forwards, or read backwards."""
        found = self._recipes.get((backward, keep))
        if found is None:
            call = _Call(self.stack, self.precision, backward, keep, self.deterministic)
            found = self._recipes[backward, keep] = _Recipe(call)
        return found

    why_not = staticmethod(why_not)


class TritonShears(_TritonStack):
    """A shear stack, as one kernel each way."""

    def __init__(self, stack: Stack, precision: str = "tf32", deterministic: bool = False) -> None:
        super().__init__(stack, precision, deterministic)
        self.schedule = schedule(stack.turns, stack.layers, stack.inverse, stack.device)

    def forward(self, y: Tensor, tensors: Tensors, keep: bool) -> tuple[Tensor, Tensor | None]:
        recipe = self.recipe(False, keep)
        kept = y.new_empty(self.kept_size(self.stack)) if keep else None
        if recipe.empty:
            return y.clone(), kept
        out = torch.empty_like(y)
        recipe.launch(
            (y, out, out if kept is None else kept, *self._weights(tensors)), recipe.steps
        )
        return out, kept

    def backward(self, kept: Tensor, g: Tensor, tensors: Tensors) -> Tensors:
        return self._gradients(kept, g, tensors, keep=True)[1]

    def undo(self, y_N: Tensor, g: Tensor, tensors: Tensors) -> tuple[Tensor, Tensors]:
        y_0, gradients = self._gradients(y_N, g, tensors, keep=False)
        assert y_0 is not None
        return y_0, gradients

    def _gradients(
        self, start: Tensor, g: Tensor, tensors: Tensors, *, keep: bool
    ) -> tuple[Tensor | None, Tensors]:
        """From what was kept, or from y_N: then the shears are undone, down to y_0."""
        recipe, in_order = self.recipe(True, keep), self.deterministic
        copy = torch.clone if in_order or recipe.empty else torch.empty_like
        y_0, g_0 = None if keep else copy(start), copy(g)
        buffer, parts = recipe.gradients.new(g)
        weights = self._weights(tensors)
        if recipe.empty:
            pass
        elif in_order:
            rows = _rows_of_shears(*self.schedule, recipe)
            states = (start, g_0, g_0, g_0) if y_0 is None else (y_0, g_0, y_0, g_0)
            recipe.gradients.add_in_order(buffer, rows, recipe, (*states, *weights))
        else:
            targets = _targets(parts[::2])
            states = (start, g, g_0 if y_0 is None else y_0, g_0)
            recipe.launch((*states, *weights, *targets), 0, recipe.steps)
        dK_q, dK_p, db_q, db_p, dV_q, dV_p, dcoef = parts
        return y_0, (g_0, dK_p, dK_q, db_p, db_q, dV_p, dV_q, dcoef)

    def _weights(self, tensors: Tensors) -> tuple[Tensor, ...]:
        K_p, K_q, b_p, b_q, V_p, V_q, coef = tensors
        V_p, V_q = (K_p, K_q) if V_p is None or V_q is None else (V_p, V_q)
        return K_p, K_q, b_p, b_q, V_p, V_q, *self.schedule, coef

    @staticmethod
    def kept_size(stack: Stack) -> int:
        return stack.steps * stack.samples * stack.width


def _rows_of_shears(half: Tensor, layer: Tensor, recipe: _Recipe) -> Tensor:
    """For each shear, the rows of the gradients to which its rows are added."""
    into, (r_q, r_p) = recipe.gradients, recipe.rows
    i = torch.arange(into.most, device=half.device)
    is_p = half.long()[:, None]
    r = r_q + (r_p - r_q) * is_p
    return torch.where(i < r, into.starts[1] * is_p + layer.long()[:, None] * r + i, into.spare)


class TritonEuler(_TritonStack):
    """An Euler stack, as one kernel each way."""

    def forward(self, y: Tensor, tensors: Tensors, keep: bool) -> tuple[Tensor, Tensor | None]:
        recipe = self.recipe(False, keep)
        out = y.new_empty((recipe.steps + 1, *y.shape) if keep else y.shape)
        if recipe.empty:
            out.copy_(y)
        else:
            recipe.launch((y, out, *_euler_weights(tensors, recipe)), recipe.steps)
        return (out[-1].clone(), out.view(-1)) if keep else (out, None)

    def backward(self, kept: Tensor, g: Tensor, tensors: Tensors) -> Tensors:
        # keep=False: this kernel always reads the states, and has no such option.
        recipe, in_order = self.recipe(True, False), self.deterministic
        g_0 = g.clone() if in_order or recipe.empty else torch.empty_like(g)
        buffer, parts = recipe.gradients.new(g)
        weights = _euler_weights(tensors, recipe)
        if recipe.empty:
            pass
        elif in_order:
            N, r = tensors[1].shape
            rows = torch.arange(N * r, device=g.device).view(N, r)
            recipe.gradients.add_in_order(buffer, rows, recipe, (kept, g_0, g_0, *weights))
        else:
            recipe.launch((kept, g, g_0, *weights, *_targets(parts)), 0, recipe.steps)
        return g_0, *parts

    @staticmethod
    def kept_size(stack: Stack) -> int:
        return (stack.steps + 1) * stack.samples * stack.width  # y_N as well


def _euler_weights(tensors: Tensors, recipe: _Recipe) -> tuple[Tensor, ...]:
    K, b, V, h = tensors
    if recipe.unit:
        return K, b, torch.eye(K.shape[1], dtype=K.dtype, device=K.device), h
    return K, b, K if V is None else V, h
