"""Whole stacks of layers as one Triton kernel: states in registers, weights streamed.

A program takes a tile of samples through all layers. A splitting scheme (H2, MS1, MS3, Verlet,
Yoshida) is a schedule of shears `target += coef * sigma(source K^T + b) V`; each can be undone, so
the backward kernel can start from y_N and reconstruct every state on its way back. Forward Euler
(H1, MS2) is a schedule of steps whose source and target are the same y. They cannot be undone, so
the backward kernel reads the stored states.

A shear with r hidden units is the sum of shears with some of the units each, with the same source
and target: kernels loop over (shear, block of rows of K), so r has no limit and K takes no more
registers than one block.

The gradients of weights are sums over all samples. A narrow stack's backward kernel adds them up
tile by tile, by atomics. That of a wide stack, and any in the deterministic mode, *emits* their
factors instead: each step leaves behind the rows of u = c sigma'(a) t and of c z (left), and those
of its source and of g, the gradient of z V (right). A second kernel multiplies left^T right, for
some layers at a time. That needs no atomics, and leaves more registers to the chain of layers.

Weights of wide layers are also packed beforehand, so that the loop over layers finds them as the
tensor cores take them, and can copy them ahead without registers.

A kernel is chosen, split into tiles and compiled once for a stack (`_Recipe`). Later calls only
allocate what they return and launch it.

Triton is imported when a kernel is first asked for. It reads the names that a kernel uses from this
module, which is why `tl` is one of them and why `load` replaces each function by its compiled form.
"""

# Kernels branch on what is known when they are compiled, which pyright cannot follow.
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import functools
import inspect
import math
import os
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from hdnn.engine.kernels.protocol import Stack, Tensors, schedule
from hdnn.errors import require

MAX_WIDTH = 256
"""The widest state y, in features."""

EMITTED_BYTES = 256 * 2**20
"""Memory for the factors of weight gradients: of so many layers at a time, or of one layer."""

PROGRAMS, ROWS = 256, 512
"""Products of factors are split into parts for so many programs, but not for fewer rows."""

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


def _ordered(x, PREC: constexpr):  # pragma: kernel
    # Of every 8 columns, a thread of the tensor cores holds 2t and 2t + 1 of a result, but t and
    # t + 4 of a tf32 operand. The order of a sum is free: renumbering the columns of both factors
    # saves the exchange among threads.
    if PREC == "tf32":
        eights = tl.reshape(x, (x.shape[0], x.shape[1] // 8, 4, 2))
        x = tl.reshape(tl.permute(eights, (0, 1, 3, 2)), (x.shape[0], x.shape[1]))
    return x


def _times_transposed(x, K, acc, PREC: constexpr):  # pragma: kernel
    """Acc + x K^T."""
    x = _ordered(_rounded(x, PREC), PREC)
    return _dot(x, tl.trans(_ordered(K, PREC)), acc, PREC)


def _times(z, V, acc, PREC: constexpr):  # pragma: kernel
    """Acc + z V."""
    z = _ordered(_rounded(z, PREC), PREC)
    return _dot(z, tl.trans(_ordered(tl.trans(V), PREC)), acc, PREC)


def _turned(x):  # pragma: kernel
    """J x for rows x = (p, q) and the canonical J: (-q, p)."""
    halves = tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2))
    p, q = tl.split(tl.permute(halves, (0, 2, 1)))
    return tl.reshape(tl.permute(tl.join(-q, p), (0, 2, 1)), (x.shape[0], x.shape[1]))


def _column(n, BM: constexpr, PAD: constexpr):  # pragma: kernel
    """The matrix column of each column of a tile."""
    k = tl.arange(0, BM)
    if PAD == "halves":
        k = tl.where(k < BM // 2, k, k - BM // 2 + n // 2)
    return k


def _is_column(n, BM: constexpr, PAD: constexpr):  # pragma: kernel
    k = tl.arange(0, BM)
    if PAD == "halves":
        return k % (BM // 2) < n // 2
    return k < n


def _entries(block, n, BR: constexpr, BM: constexpr, PAD: constexpr):  # pragma: kernel
    """Where a block of rows of a matrix with n columns lies."""
    i = tl.arange(0, BR)[:, None]
    k = _column(n, BM, PAD)[None, :]
    if PAD == "none":
        at = block * (BR * BM) + (i * BM + k)
    else:
        at = (block * BR + i) * n + k
    return at


def _exist(block, r, n, BR: constexpr, BM: constexpr, PAD: constexpr):  # pragma: kernel
    i = block * BR + tl.arange(0, BR)[:, None]
    return (i < r) & _is_column(n, BM, PAD)[None, :]


def _matrix(W, block, r, n, BR: constexpr, BM: constexpr, PAD: constexpr, PREC):  # pragma: kernel
    at = W + _entries(block, n, BR, BM, PAD)
    if PAD == "none":
        tile = tl.load(at)
    else:
        tile = tl.load(at, mask=_exist(block, r, n, BR, BM, PAD), other=0.0)
    return _rounded(tile.to(tl.float32), PREC)


def _pointers(
    turn, j, K_p, K_q, b_p, b_q, V_p, V_q, r_p, r_q, m, KIND: constexpr
):  # pragma: kernel
    """Where layer j has its weights for the half that moves, and how many rows they have."""
    r = tl.where(turn == 0, r_q, r_p)
    K = tl.where(turn == 0, K_q, K_p) + j * r * m
    b = tl.where(turn == 0, b_q, b_p) + j * r
    V = tl.where(turn == 0, V_q, V_p)
    if KIND != "unit":
        V += j * r * m
    return K, b, V, r


def _weights(
    K, b, V, block, r, m, BR: constexpr, BM: constexpr, KIND: constexpr, PAD: constexpr, PREC
):  # pragma: kernel
    """A block of rows of the weights."""
    i = block * BR + tl.arange(0, BR)
    K = _matrix(K, block, r, m, BR, BM, PAD, PREC)
    b = tl.load(b + i, mask=i < r, other=0.0).to(tl.float32)
    if KIND == "general" or KIND == "unit":
        V = _matrix(V, block, r, m, BR, BM, PAD, PREC)
    else:
        V = K
    return K, b, V


def _scheduled(half, layer, coef, s):  # pragma: kernel
    """Step s: which half it moves, the layer of its weights, and its coefficient."""
    return tl.load(half + s), tl.load(layer + s).to(tl.int64), tl.load(coef + s)


def _swapped(swap, source, target):  # pragma: kernel
    return tl.where(swap, target, source), tl.where(swap, source, target)


def _places(
    first, B, m, BT: constexpr, BM: constexpr, PAD: constexpr, EULER: constexpr
):  # pragma: kernel
    """Where a tile of samples lies in y (p, of p and q) and in a state that is kept."""
    rows, cols = tl.arange(0, BT)[:, None], _column(m, BM, PAD)[None, :]
    inside = (first + rows < B) & _is_column(m, BM, PAD)[None, :]
    return rows * ((2 - EULER) * m) + cols, rows * m + cols, inside


def _load_state(y, at, m, inside, EULER: constexpr):  # pragma: kernel
    """What the first step reads and moves, if it moves p: q and p, or twice all of y."""
    target = tl.load(y + at, mask=inside, other=0.0)
    if EULER:
        return target, target
    return tl.load(y + at + m, mask=inside, other=0.0), target


def _store_state(y, at, m, inside, turn, source, target, EULER: constexpr):  # pragma: kernel
    if EULER:
        tl.store(y + at, target, mask=inside)
    else:
        q, p = _swapped(turn != 0, source, target)
        tl.store(y + at, p, mask=inside)
        tl.store(y + at + m, q, mask=inside)


def _add(into, value, mask):  # pragma: kernel
    tl.atomic_add(into, value, mask=mask, sem="relaxed")


def _add_matrix(W, value, block, r, n, PAD: constexpr):  # pragma: kernel
    at = W + _entries(block, n, value.shape[0], value.shape[1], PAD)
    if PAD == "none":
        _add(at, value, None)
    else:
        _add(at, value, _exist(block, r, n, value.shape[0], value.shape[1], PAD))


def _add_column_sum(u, u_T, into, block, r, PREC: constexpr):  # pragma: kernel
    i = block * u.shape[1] + tl.arange(0, u.shape[1])
    if PREC == "ieee" or PREC == "emulated":
        _add(into + i, tl.sum(u, 0), i < r)
    else:  # a product with ones takes the tensor cores less time than shuffles would need
        ones = _rounded(tl.full((u.shape[0], 16), 1.0, tl.float32), PREC)
        total = _dot(u_T, ones, tl.zeros((u.shape[1], 16), tl.float32), PREC)
        column = tl.arange(0, 16)[None, :]
        _add(into + i[:, None] + column * 0, total, (i[:, None] < r) & (column == 0))


def _factor_rows(B, KIND: constexpr):  # pragma: kernel
    """How many rows a step emits on either side: those of dK and those of dV lie in turn."""
    if KIND == "identity" or KIND == "unit":
        return B
    return 2 * B


def _emit_left(into, value, first, block, B, r, PAD: constexpr):  # pragma: kernel
    """Some columns of a left factor (B, r), for a tile of samples."""
    row = tl.arange(0, value.shape[0])[:, None]
    i = block * value.shape[1] + tl.arange(0, value.shape[1])[None, :]
    mask = first + row < B
    if PAD != "none":
        mask = mask & (i < r)
    tl.store(into + first * r + (row * r + i), value.to(into.dtype.element_ty), mask=mask)


def _emit_right(into, value, at, mask):  # pragma: kernel
    tl.store(into + at, value.to(into.dtype.element_ty), mask=mask)


def _emit(
    u, cz, along, source, g_zK,
    dcoef, left, right,
    first, in_kept, inside, k, low, turn, B, m, r_p, r_q,
    KIND: constexpr, WPREC: constexpr, PAD: constexpr, STEP: constexpr, RB: constexpr,
):  # fmt: skip  # pragma: kernel
    """Leave the factors of the weight gradients of a block of a step, and a part of dc."""
    block = k % RB
    r = tl.where(turn == 0, r_q, r_p)
    B += first * 0  # as int64
    emitted = (k // RB - low) * _factor_rows(B, KIND)
    left += emitted * tl.maximum(r_p, r_q)
    right += (emitted + first) * m
    _emit_left(left, _rounded(u, WPREC), first, block, B, r, PAD)
    if KIND != "identity" and KIND != "unit":
        _emit_left(left + B * r, _rounded(cz, WPREC), first, block, B, r, PAD)
    if block == 0:  # all blocks of a step have the same on the right
        _emit_right(right, _rounded(source, WPREC), in_kept, inside)
        if KIND != "identity" and KIND != "unit":
            _emit_right(right + B * m, _rounded(g_zK, WPREC), in_kept, inside)
    if STEP:
        step = tl.num_programs(0) * (first * 0 + k // RB) + tl.program_id(0)
        tl.store(dcoef + step * RB + block, tl.sum(along))


def _forward_kernel(
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
    at, in_kept, inside = _places(first, B, m, BT, BM, PAD, EULER)
    source, target = _load_state(y_in + here, at, m, inside, EULER)
    kept += first * m

    turn_next, j_next, c_next = _scheduled(half, layer, coef, 0)
    K_j, b_j, V_j, r = _pointers(turn_next, j_next, K_p, K_q, b_p, b_q, V_p, V_q, r_p, r_q, m, KIND)
    K_next, b_next, V_next = _weights(K_j, b_j, V_j, 0, r, m, BR, BM, KIND, PAD, PREC)
    s = tl.minimum(1, M * RB - 1) // RB
    turn_after, j_after, c_after = _scheduled(half, layer, coef, s)
    before = turn_next * 0
    if ALT:  # the shears take turns, so that the roles change by name alone
        before = turn_next
        source, target = _swapped(turn_next != 0, source, target)
    for pair in range(M * RB // (1 + ALT)):
        for e in tl.static_range(1 + ALT):
            k = pair * (1 + ALT) + e
            turn, c, K, b, V = turn_next, c_next, K_next, b_next, V_next
            # Load the weights of the next step before this one starts, and their addresses
            # one step earlier still.
            block = tl.minimum(k + 1, M * RB - 1) % RB
            turn_next, j_next, c_next = turn_after, j_after, c_after
            s = tl.minimum(k + 2, M * RB - 1) // RB
            turn_after, j_after, c_after = _scheduled(half, layer, coef, s)
            K_j, b_j, V_j, r = _pointers(
                turn_next, j_next, K_p, K_q, b_p, b_q, V_p, V_q, r_p, r_q, m, KIND
            )
            K_next, b_next, V_next = _weights(K_j, b_j, V_j, block, r, m, BR, BM, KIND, PAD, PREC)

            if not (ALT or EULER):
                source, target = _swapped(turn != before, source, target)
                before = turn
            if KEEP:  # all blocks of a step read the same
                step = (first * 0 + k // RB) * (B * m)
                if RB == 1:
                    tl.store(kept + step + in_kept, source, mask=inside)
                else:
                    starts = in_kept * 0 + k % RB == 0
                    tl.store(kept + step + in_kept, source, mask=inside & starts)
            bias = tl.zeros((BT, BR), tl.float32) + b[None, :]
            a = _times_transposed(source, K, bias, PREC)
            z = c * kernel_sigma(a, ACT, FAST)
            if KIND == "identity":
                target += z
            elif KIND == "canonical":
                target += _turned(_times(z, K, tl.zeros((BT, BM), tl.float32), PREC))
            else:
                target = _times(z, V, target, PREC)
            if ALT:
                source, target = target, source
            elif EULER:
                if RB == 1:
                    source = target
                else:
                    source = tl.where(k % RB == RB - 1, target, source)

    _store_state(y_out + here, at, m, inside, before, source, target, EULER)


def _backward_kernel(
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
    at, in_kept, inside = _places(first, B, m, BT, BM, PAD, EULER)
    if KEEP:
        y_in += first * m
        read = (first * 0 + high - 1) * (B * m)
        source_next = tl.load(y_in + read + in_kept, mask=inside, other=0.0)
    else:
        # Rows beyond the batch repeat its last sample, a state that can surely be undone.
        last = (tl.minimum(B - first, BT) - 1).to(tl.int32)
        cols = tl.arange(0, BM)[None, :]
        again = tl.minimum(tl.arange(0, BT), last)[:, None] * (2 * m) + cols
        source, target = _load_state(y_in + here, again, m, cols < m, EULER)
    g_source, g_target = _load_state(g_in + here, at, m, inside, EULER)

    turn_next, j_next, c_next = _scheduled(half, layer, coef, high - 1)
    K_j, b_j, V_j, r = _pointers(turn_next, j_next, K_p, K_q, b_p, b_q, V_p, V_q, r_p, r_q, m, KIND)
    K_next, b_next, V_next = _weights(K_j, b_j, V_j, RB - 1, r, m, BR, BM, KIND, PAD, PREC)
    s = tl.maximum(high * RB - 2, low * RB) // RB
    turn_after, j_after, c_after = _scheduled(half, layer, coef, s)
    before = turn_next * 0
    if ALT:  # the shears take turns, so that the roles change by name alone
        before = turn_next
        if not KEEP:
            source, target = _swapped(turn_next != 0, source, target)
        g_source, g_target = _swapped(turn_next != 0, g_source, g_target)
    for pair in range((high - low) * RB // (1 + ALT)):
        for e in tl.static_range(1 + ALT):
            turn, j, c, K, b, V = turn_next, j_next, c_next, K_next, b_next, V_next
            k = high * RB - 1 - (pair * (1 + ALT) + e)
            block = tl.maximum(k - 1, low * RB) % RB
            turn_next, j_next, c_next = turn_after, j_after, c_after
            s = tl.maximum(k - 2, low * RB) // RB
            turn_after, j_after, c_after = _scheduled(half, layer, coef, s)
            K_j, b_j, V_j, r = _pointers(
                turn_next, j_next, K_p, K_q, b_p, b_q, V_p, V_q, r_p, r_q, m, KIND
            )
            K_next, b_next, V_next = _weights(K_j, b_j, V_j, block, r, m, BR, BM, KIND, PAD, PREC)

            if KEEP:
                source = source_next
                read = (first * 0 + tl.maximum(k - 1, low * RB) // RB) * (B * m)
                source_next = tl.load(y_in + read + in_kept, mask=inside, other=0.0)
            if not (ALT or EULER):
                if not KEEP:
                    source, target = _swapped(turn != before, source, target)
                g_source, g_target = _swapped(turn != before, g_source, g_target)
                before = turn

            bias = tl.zeros((BT, BR), tl.float32) + b[None, :]
            a = _times_transposed(source, K, bias, PREC)
            g_zK = g_target  # dL/d(z K), if V is made of K
            if KIND == "canonical":
                g_zK = _turned(-g_target)
            if KIND == "identity":
                t = g_target
            else:
                t = _times_transposed(g_zK, V, tl.zeros((BT, BR), tl.float32), PREC)
            z = kernel_sigma(a, ACT, FAST)
            u = c * kernel_slope(a, z, ACT) * t
            cz = c * z
            g_source = _times(u, K, g_source, PREC)
            if not KEEP:
                if KIND == "identity":
                    target -= cz
                else:
                    target = _times(-cz, V, target, PREC)

            if EMIT:
                _emit(
                    u, cz, z * t, source, g_zK,
                    dcoef, left, right,
                    first, in_kept, inside, k, low, turn, B, m, r_p, r_q,
                    KIND, WPREC, PAD, STEP, RB,
                )  # fmt: skip
            else:
                block = k % RB
                r = tl.where(turn == 0, r_q, r_p)
                row = (1 - turn) * first_q + j * r  # of the gradients: those of p come first
                u_T = tl.trans(_rounded(u, WPREC))
                z_T = tl.trans(_rounded(cz, WPREC))
                grad = tl.zeros((BR, BM), tl.float32)
                if KIND == "same" or KIND == "canonical":
                    grad = _dot(z_T, _rounded(g_zK, WPREC), grad, WPREC)
                if KIND == "general":
                    grad_V = _dot(z_T, _rounded(g_target, WPREC), grad, WPREC)
                    _add_matrix(dV + row * m, grad_V, block, r, m, PAD)
                grad = _dot(u_T, _rounded(source, WPREC), grad, WPREC)
                _add_matrix(dK + row * m, grad, block, r, m, PAD)
                _add_column_sum(u, u_T, db + row, block, r, WPREC)
                if STEP:
                    _add(dcoef + k // RB, tl.sum(z * t), None)
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
        _store_state(y_out + here, at, m, inside, before, source, target, EULER)
    _store_state(g_out + here, at, m, inside, before, g_source, g_target, EULER)


def _weight_kernel(
    left,
    right,
    dK,
    db,
    dV,
    half,
    layer,
    B,
    low,
    T,
    m,
    r_p,
    r_q,
    first_q,
    size,
    KIND: constexpr,
    PREC: constexpr,
    PAD: constexpr,
    EULER: constexpr,
    PARTS: constexpr,
    BK: constexpr,
    BR: constexpr,
    BM: constexpr,
):  # pragma: kernel
    """The weight gradients of a layer from what its T steps have emitted.

    A program multiplies a part of the rows of left^T right, for a block of dK or dV.
    """
    which, part = tl.program_id(0), tl.program_id(2) % PARTS
    turn, here = which % (2 - EULER), which // (2 - EULER)
    r = tl.where(turn == 0, r_q, r_p)
    columns = tl.cdiv(m, BM)
    i = tl.program_id(1) // columns * BR + tl.arange(0, BR)
    k = tl.program_id(1) % columns * BM + tl.arange(0, BM)
    # On the left lie B rows of u and then B of c z; on the right, the source and then g.
    begin, end = part * 0, _factor_rows(B, KIND)
    if KIND == "general":
        begin = tl.program_id(2) // PARTS * B
        end = begin + B
    share = tl.cdiv(tl.cdiv(end - begin, PARTS), BK) * BK
    begin += part * share
    end = tl.minimum(end, begin + share)

    grad = tl.zeros((BR, BM), tl.float32)
    sums = tl.zeros((BK, BR), tl.float32)
    for t in range(T):
        if tl.load(half + t) == turn:
            emitted = (here * T + t).to(tl.int64) * _factor_rows(B, KIND)
            left_t = left + emitted * tl.maximum(r_p, r_q)
            right_t = right + emitted * m
            for start in range(begin, end, BK):
                row = tl.arange(0, BK)[:, None]
                in_left, in_right = start + row < end, start + row < end
                if PAD:
                    in_left, in_right = in_left & (i < r)[None, :], in_right & (k < m)[None, :]
                at = emitted * 0 + start  # as int64
                L = tl.load(left_t + at * r + (row * r + i[None, :]), mask=in_left, other=0.0)
                R = tl.load(right_t + at * m + (row * m + k[None, :]), mask=in_right, other=0.0)
                grad = _dot(tl.trans(L), R, grad, PREC)
                sums += tl.where(start + row < B, L.to(tl.float32), 0.0)

    j = tl.load(layer + low + here * T).to(tl.int64)
    row = (1 - turn) * first_q + j * r
    beyond = part.to(tl.int64) * size
    if KIND == "general":
        W = tl.where(tl.program_id(2) // PARTS == 0, dK, dV)
    else:
        W = dK
    exist = (i < r)[:, None] & (k < m)[None, :]
    tl.store(W + beyond + row * m + (i[:, None] * m + k[None, :]), grad, mask=exist)
    other = tl.program_id(1) % columns + tl.program_id(2) // PARTS  # 0: no other does the same
    tl.store(db + beyond + row + i, tl.sum(sums, 0), mask=(i < r) & (i * 0 + other == 0))


# The same for wide layers. A loop finds the blocks of its steps packed one behind the other,
# rounded and in the order of the tensor cores, so that Triton can copy the next ones ahead. It does
# so only if no value is handed on from one iteration to the next but one, as exchanging source and
# target by name would.


def _store_packed(rows, cols, W, at, PREC: constexpr):  # pragma: kernel
    i, k = tl.arange(0, W.shape[0]), tl.arange(0, W.shape[1])
    at = at * (W.shape[0] * W.shape[1])
    W_T = _ordered(tl.trans(W), PREC)
    tl.store(rows + at + (i[:, None] * W.shape[1] + k[None, :]), _ordered(W, PREC))
    tl.store(cols + at + (k[:, None] * W.shape[0] + i[None, :]), W_T)


def _pack_kernel(
    K_p, K_q, b_p, b_q, V_p, V_q, half, layer, coef,
    K_rows, K_cols, V_rows, V_cols, bias,
    B, m, r_p, r_q,
    KIND: constexpr, PREC: constexpr, PAD: constexpr, RB: constexpr, BM: constexpr, BR: constexpr,
):  # fmt: skip  # pragma: kernel
    """The weights of a block of a step, as the products take them."""
    step, block = tl.program_id(0) // RB, tl.program_id(0) % RB
    turn, j, _ = _scheduled(half, layer, coef, step)
    K_j, b_j, V_j, r = _pointers(turn, j, K_p, K_q, b_p, b_q, V_p, V_q, r_p, r_q, m, KIND)
    K, b, V = _weights(K_j, b_j, V_j, block, r, m, BR, BM, KIND, PAD, PREC)
    at = tl.program_id(0).to(tl.int64)
    tl.store(bias + at * BR + tl.arange(0, BR), b)
    _store_packed(K_rows, K_cols, K, at, PREC)
    if KIND == "canonical":
        V = _turned(V.to(tl.float32)).to(V.dtype)
    if KIND != "same":
        _store_packed(V_rows, V_cols, V, at, PREC)


def _tile_of(W, k, H: constexpr, L: constexpr):  # pragma: kernel
    i, j = tl.arange(0, H)[:, None], tl.arange(0, L)[None, :]
    return tl.load(W + k * (H * L) + (i * L + j))


def _product(x, W, acc, PREC: constexpr):  # pragma: kernel
    """Acc + x W^T for a packed W."""
    return _dot(_ordered(_rounded(x, PREC), PREC), tl.trans(W), acc, PREC)


def _packed_forward_kernel(
    y_in, y_out, kept,
    K_rows, V_cols, bias, half, coef,
    B, M, m,
    ACT: constexpr, PREC: constexpr, FAST: constexpr, PAD: constexpr, EULER: constexpr,
    KEEP: constexpr, RB: constexpr, BT: constexpr, BM: constexpr, BR: constexpr,
):  # fmt: skip  # pragma: kernel
    first = tl.program_id(0).to(tl.int64) * BT
    here = first * ((2 - EULER) * m)
    at, in_kept, inside = _places(first, B, m, BT, BM, PAD, EULER)
    source, target = _load_state(y_in + here, at, m, inside, EULER)
    kept += first * m
    turn_next, c_next = tl.load(half), tl.load(coef)
    swap_next = turn_next != 0
    for k in range(M * RB):
        turn, c, swap = turn_next, c_next, swap_next
        s = tl.minimum(k + 1, M * RB - 1) // RB
        turn_next, c_next = tl.load(half + s), tl.load(coef + s)
        swap_next = turn_next != turn
        K = _tile_of(K_rows, first * 0 + k, BR, BM)
        V = _tile_of(V_cols, first * 0 + k, BM, BR)
        b = tl.load(bias + k * BR + tl.arange(0, BR))
        if EULER:
            if k % RB == 0:
                source = target
        else:
            source, target = _swapped(swap, source, target)
        if KEEP:
            step = (first * 0 + k // RB) * (B * m)
            starts = in_kept * 0 + k % RB == 0
            tl.store(kept + step + in_kept, source, mask=inside & starts)
        a = _product(source, K, tl.zeros((BT, BR), tl.float32) + b[None, :], PREC)
        z = c * kernel_sigma(a, ACT, FAST)
        target = _product(z, V, target, PREC)
    _store_state(y_out + here, at, m, inside, turn_next, source, target, EULER)


def _packed_backward_kernel(
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
    at, in_kept, inside = _places(first, B, m, BT, BM, PAD, EULER)
    if KEEP:
        y_in += first * m
    else:
        # Rows beyond the batch repeat its last sample, a state that can surely be undone.
        last = (tl.minimum(B - first, BT) - 1).to(tl.int32)
        cols = tl.arange(0, BM)[None, :]
        again = tl.minimum(tl.arange(0, BT), last)[:, None] * (2 * m) + cols
        source, target = _load_state(y_in + here, again, m, cols < m, EULER)
    g_source, g_target = _load_state(g_in + here, at, m, inside, EULER)
    turn_next, c_next = tl.load(half + high - 1), tl.load(coef + high - 1)
    swap_next = turn_next != 0
    for q in range((high - low) * RB):
        k = high * RB - 1 - q
        turn, c, swap = turn_next, c_next, swap_next
        s = tl.maximum(k - 1, low * RB) // RB
        turn_next, c_next = tl.load(half + s), tl.load(coef + s)
        swap_next = turn_next != turn
        K = _tile_of(K_rows, first * 0 + k, BR, BM)
        K_T = _tile_of(K_cols, first * 0 + k, BM, BR)
        V, V_T = K, K_T
        if KIND != "same":
            V = _tile_of(V_rows, first * 0 + k, BR, BM)
            if not KEEP:
                V_T = _tile_of(V_cols, first * 0 + k, BM, BR)
        b = tl.load(bias + k * BR + tl.arange(0, BR))
        if KEEP:
            read = (first * 0 + k // RB) * (B * m)
            source = tl.load(y_in + read + in_kept, mask=inside, other=0.0)
        if EULER:
            if k % RB == RB - 1:
                g_target = g_source
        else:
            g_source, g_target = _swapped(swap, g_source, g_target)
            if not KEEP:
                source, target = _swapped(swap, source, target)
        a = _product(source, K, tl.zeros((BT, BR), tl.float32) + b[None, :], PREC)
        t = _product(g_target, V, tl.zeros((BT, BR), tl.float32), PREC)
        z = kernel_sigma(a, ACT, FAST)
        u = c * kernel_slope(a, z, ACT) * t
        cz = c * z
        g_source = _product(u, K_T, g_source, PREC)
        if not KEEP:
            target = _product(-cz, V_T, target, PREC)

        g_zK = g_target  # dL/d(z K), if V is made of K
        if KIND == "canonical":
            g_zK = _turned(-g_target)
        _emit(
            u, cz, z * t, source, g_zK,
            dcoef, left, right,
            first, in_kept, inside, k, low, turn, B, m, r_p, r_q,
            KIND, WPREC, PAD, STEP, RB,
        )  # fmt: skip

    if not KEEP:
        _store_state(y_out + here, at, m, inside, turn_next, source, target, EULER)
    if EULER:
        g_target = g_source
    _store_state(g_out + here, at, m, inside, turn_next, g_source, g_target, EULER)


# Around the kernels

_DEVICE = [f for f in [*globals().values()] if inspect.isfunction(f) and f.__module__ == __name__]

OPEN_ENDED = ("B", "M", "first_q", "low", "high", "rows", "T")
"""Arguments of kernels for whose values Triton does not compile again."""


def compile_functions(module: dict[str, Any], functions: list[Any]) -> Any:
    """Import Triton, and replace these functions of a module by what it makes of them."""
    triton = require("triton", extra="gpu")
    module["tl"] = require("triton.language", extra="gpu")
    module["constexpr"] = module["tl"].constexpr
    for function in functions:
        open_ended = [name for name in inspect.signature(function).parameters if name in OPEN_ENDED]
        module[function.__name__] = triton.jit(function, do_not_specialize=open_ended)
    return triton


@functools.cache
def load() -> bool:
    """Import Triton and compile the functions above, at the first call.

    Whether a compiled kernel can then be called without Triton's check of each argument.
    """
    triton = compile_functions(globals(), _DEVICE)
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return version >= (3, 3) and not interpreted()


def interpreted() -> bool:
    """Whether Triton runs the kernels in Python, for tests on a CPU."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


class Tiling(NamedTuple):
    """The sizes of a kernel's parts: samples a tile, rows of K a block, warps a program.

    `stages`: how many blocks of packed weights are on their way at once.
    """

    samples: int
    rows: int
    warps: int
    stages: int = 1


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
    128: _SPLIT[128],
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


# With packed weights: for up to FEW samples of a shear stack, for more, and for forward Euler.
# Where there is nothing, they were not measured to be faster.
_PACKED_FEW: dict[int, dict[str, tuple[Tiling, Tiling]]] = {
    128: {
        "tf32": (Tiling(16, 64, 4, 2), Tiling(16, 64, 4, 2)),
        "bf16": (Tiling(64, 64, 4, 2), Tiling(64, 64, 8, 2)),
    },
}
_PACKED: dict[int, dict[str, tuple[Tiling, Tiling]]] = {
    128: {
        "tf32": (Tiling(64, 64, 8, 2), Tiling(64, 64, 8, 2)),
        "bf16": (Tiling(64, 64, 4, 2), Tiling(64, 64, 8, 2)),
    },
}
_PACKED_EULER: dict[int, dict[str, tuple[Tiling, Tiling]]] = {
    256: {"tf32": (Tiling(32, 32, 8, 2), Tiling(32, 32, 8, 2))},
}
FEW = 2048
"""Samples that small tiles spread over the multiprocessors of an H200, one for each."""

SHARED_BYTES = 227 * 2**10
"""Shared memory that a program must have for packed weights: of an H100, and later ones."""


def packed_tilings(stack: Stack, precision: str) -> tuple[Tiling, Tiling] | None:
    """The tilings for packed weights, or None where those are not used."""
    table = (_PACKED_FEW if stack.samples <= FEW else _PACKED) if stack.turns else _PACKED_EULER
    found = table.get(_padded(stack.width), {}).get(precision)
    return found if found and _shared_bytes(stack.device) >= SHARED_BYTES else None


@functools.cache
def _shared_bytes(device: torch.device) -> int:
    """Shared memory that one program may have."""
    if device.type == "cpu":
        return SHARED_BYTES
    driver = require("triton.runtime", extra="gpu").driver
    return driver.active.utils.get_device_properties(device.index)["max_shared_mem"]


def tiling(stack: Stack, precision: str, *, backward: bool) -> Tiling:
    """The tiling of a kernel."""
    table = _SPLIT if stack.turns else _CANONICAL if stack.kind == "canonical" else _EULER
    packed = packed_tilings(stack, precision)
    pair = packed or table[max(32, _padded(stack.width))][precision]
    samples, rows, *others = pair[backward]
    if packed and stack.kind != "same":
        rows = min(rows, 32)  # so that K and V fit into shared memory together
    return Tiling(samples, min(rows, _padded(max(stack.rows))), *others)


def _padded(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())


class _Launch:
    """A kernel with all that stays the same from call to call."""

    def __init__(
        self,
        kernel: Any,
        stack: Stack,
        sizes: tuple[int, ...],
        constants: dict[str, Any],
        **options: int,
    ) -> None:
        self.calls_directly = load()
        self.kernel = kernel
        self.B, self.sizes = stack.samples, sizes
        self.constants = {name: constants[name] for name in kernel.arg_names if name in constants}
        # Fusing products and sums is Triton's default now, but may not stay so.
        self.options = {**options, "enable_fp_fusion": True}
        self.device = -1 if stack.device.type == "cpu" else stack.device.index
        self.rest = (*sizes, *self.constants.values())
        self.direct: dict[tuple[int, int, int], Any] = {}

    def __call__(self, grid: tuple[int, int, int], tensors: tuple[Tensor, ...], *span: int) -> None:
        """Run the kernel over a number of steps, or from one step to another."""
        if self.device >= 0 and self.device != torch.cuda.current_device():
            with torch.cuda.device(self.device):
                return self(grid, tensors, *span)
        pointers = [tensor.data_ptr() for tensor in tensors]
        bits = 0
        for pointer in pointers:
            bits |= pointer
        aligned = bits % 16 == 0
        direct = self.direct.get(grid)
        if aligned and direct:
            direct(*pointers, self.B, *span, *self.rest)
            return None
        compiled = self.kernel[grid](
            *tensors, self.B, *span, *self.sizes, **self.constants, **self.options
        )
        if aligned and self.calls_directly:
            # Triton compiles for aligned pointers, and for each different set of constants.
            self.direct[grid] = compiled[grid]
        return None


class _Recipe:
    """A stack's kernel with the tiling for its sizes: made once, and then called many times.

    `keep`: states are written forwards, or read backwards.
    """

    def __init__(
        self, stack: Stack, precision: str, deterministic: bool, backward: bool, keep: bool
    ) -> None:
        load()
        width, kind, BM = stack.width, stack.kind, _padded(stack.width)
        BT, BR, warps, stages = tiling(stack, precision, backward=backward)
        packed = packed_tilings(stack, precision) is not None
        sizes = (stack.width, stack.rows[0], stack.rows[-1])
        if kind == "identity" and (packed or BM > 128):
            kind = "unit"  # z in blocks, times a unit matrix
        elif kind == "identity":
            BR = BM
        self.tiles, self.blocks = -(-stack.samples // BT), -(-max(stack.rows) // BR)
        padding = "halves" if kind == "canonical" else "end"
        if width == BM:
            full = all(each == self.blocks * BR for each in stack.rows)
            padding = "none" if full else "end"
        emit = backward and (deterministic or packed)
        # No other layer depends on the gradients of weights.
        for_weights = "bf16" if precision == "tf32" else precision
        if interpreted():  # it cannot multiply bf16, and cuts off what it should round
            for_weights = "ieee" if precision == "tf32" else precision
            if precision == "bf16":
                precision = for_weights = "emulated"
        constants = {
            "ACT": stack.activation,
            "KIND": kind,
            "PREC": precision,
            "WPREC": for_weights,
            "FAST": precision in ("tf32", "bf16") and not interpreted(),  # with inline assembly
            "PAD": padding,
            "EULER": not stack.turns,
            # The kernel has a faster loop if p and q alternate.
            "ALT": sorted(stack.turns) == [0, 1] and self.blocks == 1,
            "KEEP": keep,
            "EMIT": emit,
            "STEP": stack.learned,
            "RB": self.blocks,
            "BT": BT,
            "BM": BM,
            "BR": BR,
        }
        self.backward, self.kind = backward, kind
        self.gradients = _Gradients(stack)
        self.factors = _Factors(stack, for_weights, kind, self.gradients) if emit else None
        self.packing = _Packing(stack, sizes, constants) if packed else None
        if packed:
            kernel: Any = _packed_backward_kernel if backward else _packed_forward_kernel
            sizes = sizes if backward else sizes[:1]
        else:
            kernel = _backward_kernel if backward else _forward_kernel
            sizes = (*sizes, self.gradients.starts[-1]) if backward else sizes
        options = {"num_warps": warps, "num_stages": stages}
        self._launch = _Launch(kernel, stack, sizes, constants, **options)

    def prepared(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The weights, the schedule and c as the kernel takes them."""
        return tensors if self.packing is None else self.packing(tensors, self.backward)

    def launch(self, tensors: tuple[Tensor, ...], *span: int) -> None:
        """Run the kernel over a number of steps, or from one step to another."""
        self._launch((self.tiles, 1, 1), tensors, *span)


class _Packing:
    """The weights of a stack, block by block in the order of the steps."""

    def __init__(self, stack: Stack, sizes: tuple[int, ...], constants: dict[str, Any]) -> None:
        RB, BM, BR = constants["RB"], constants["BM"], constants["BR"]
        self.blocks, self.rows, self.width = stack.steps * RB, BR, BM
        self.same = constants["KIND"] == "same"
        self.dtype = torch.bfloat16 if constants["PREC"] == "bf16" else torch.float32
        kernel: Any = _pack_kernel
        self._launch = _Launch(kernel, stack, sizes, constants, num_warps=4, num_stages=1)

    def __call__(self, tensors: tuple[Tensor, ...], backward: bool) -> tuple[Tensor, ...]:
        """K and V, each in rows and in columns, b, the halves that move, and c."""
        *_, half, _, c = tensors
        new = functools.partial(c.new_empty, dtype=self.dtype)
        size = self.blocks * self.rows * self.width
        K = new(size), new(size)
        V = K if self.same else (new(size), new(size))
        bias = c.new_empty(self.blocks * self.rows)
        self._launch((self.blocks, 1, 1), (*tensors, *K, *V, bias))
        return (*K, *V, bias, half, c) if backward else (K[0], V[1], bias, half, c)


class _Gradients:
    """How the gradients of a stack share one buffer, each of them contiguous.

    Rows of dK, db and dV have the same order: layer by layer, all of p before all of q.
    """

    def __init__(self, stack: Stack) -> None:
        N, rows, width = stack.layers, stack.rows, stack.width
        self.starts, end = [], 0
        for r in rows:
            self.starts.append(end)
            end = _aligned(end + N * r)
        tails = [(width,), (), (width,)] if stack.kind == "general" else [(width,), ()]
        self.places: list[tuple[tuple[int, ...], tuple[int, ...], int] | None] = []
        self.size = 0
        for tail in tails:
            w = math.prod(tail)
            for r, start in zip(rows, self.starts, strict=True):
                strides = (r * w, w, 1)[: 2 + len(tail)]
                self.places.append(((N, r, *tail), strides, self.size + start * w))
            self.size = _aligned(self.size + end * w)
        self.places += [None] * (3 * len(rows) - len(self.places))
        self.places.append(((stack.steps,), (1,), self.size) if stack.learned else None)
        self.size = _aligned(self.size + stack.steps * stack.learned)
        self.each = len(rows)

    def of(self, buffer: Tensor) -> list[Any]:
        """dK, db, dV (of p and of q each) and dc in a buffer."""
        return [None if at is None else buffer.as_strided(*at) for at in self.places]

    def targets(self, buffer: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """dK, db, dV and dc as kernels take them; any tensor stands in for None."""
        dK, db, dV, dc = self.of(buffer)[:: self.each]
        return dK, db, dK if dV is None else dV, db if dc is None else dc


class _Factors:
    """The factors of weight gradients, for some layers at a time, and their products.

    A product with few others at its side is computed in parts, which are added up in order.
    """

    def __init__(self, stack: Stack, precision: str, kind: str, gradients: _Gradients) -> None:
        self.stack, self.turns = stack, len(stack.turns) or 1
        if precision == "ieee" and not interpreted():
            precision = "tf32x3"  # as exact to rounding, and much faster than without tensor cores
        self.dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        self.rows = stack.samples * (1 if kind in ("identity", "unit") else 2)
        self.widths = (max(stack.rows), stack.width)
        one = self.turns * self.rows * sum(self.widths) * self.dtype.itemsize
        chunks = -(-stack.layers // max(1, EMITTED_BYTES // max(1, one)))
        self.layers = -(-stack.layers // max(1, chunks))
        BR, BM = (min(128, _padded(w)) for w in self.widths)
        blocks = math.prod(-(-w // block) for w, block in zip(self.widths, (BR, BM), strict=True))
        products = 2 if kind == "general" else 1
        programs = max(1, self.layers) * stack.parts * blocks * products
        self.parts = max(1, min(PROGRAMS // programs, self.rows // products // ROWS))
        self.grid = (stack.parts, blocks, self.parts * products)
        constants = {
            "KIND": kind,
            "PREC": precision,
            "PAD": any(r % BR for r in stack.rows) or stack.width % BM != 0,
            "EULER": not stack.turns,
            "PARTS": self.parts,
            "BK": 64 if precision == "bf16" else 32,
            "BR": BR,
            "BM": BM,
        }
        sizes = (self.turns, stack.width, stack.rows[0], stack.rows[-1], gradients.starts[-1])
        roomy = _shared_bytes(stack.device) >= 99 * 2**10
        warps = 8 if BR * BM >= 128 * 128 else 4
        options = {"num_warps": warps, "num_stages": 3 if roomy else 1}
        kernel: Any = _weight_kernel
        self._launch = _Launch(kernel, stack, (*sizes, gradients.size), constants, **options)

    def new(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Room on the left and on the right."""
        steps = self.layers * self.turns
        left, right = (like.new_empty(steps * self.rows * w, dtype=self.dtype) for w in self.widths)
        return left, right

    def spans(self) -> Iterator[tuple[int, int]]:
        """From which step to which, the last ones first."""
        chunk = self.layers * self.turns
        for high in range(self.stack.steps, 0, -chunk):
            yield max(0, high - chunk), high

    def multiply(self, tensors: tuple[Tensor, ...], low: int, high: int) -> None:
        """The weight gradients of the layers from one step to another."""
        halves, blocks, parts = self.grid
        self._launch(((high - low) // self.turns * halves, blocks, parts), tensors, low)


def _aligned(size: int) -> int:
    """The next multiple of 32 numbers, or 128 bytes."""
    return -(-size // 32) * 32


class TritonEuler:
    """A stack as one kernel each way; each is prepared when it is first needed.

    `deterministic` adds up in a fixed order, without atomics. Gradients are float32 and contiguous.
    """

    def __init__(self, stack: Stack, precision: str = "tf32", deterministic: bool = False) -> None:
        self.stack, self.how = stack, (precision, deterministic)
        self.schedule = schedule(stack.turns or (0,), stack.layers, stack.inverse, stack.device)
        self._recipes: dict[tuple[bool, bool], _Recipe] = {}

    def _recipe(self, backward: bool, keep: bool) -> _Recipe:
        found = self._recipes.get((backward, keep))
        if found is None:
            found = self._recipes[backward, keep] = _Recipe(self.stack, *self.how, backward, keep)
        return found

    def forward(self, y: Tensor, tensors: Tensors, keep: bool) -> tuple[Tensor, Tensor | None]:
        kept = y.new_empty(self.kept_size(self.stack)) if keep else None
        if self._empty:
            return y.clone(), kept
        out = torch.empty_like(y)
        states = (y, out, out if kept is None else kept)
        recipe = self._recipe(False, keep)
        weights = recipe.prepared(self._weights(recipe, tensors))
        recipe.launch((*states, *weights), self.stack.steps)
        return out, kept

    def backward(self, kept: Tensor, g: Tensor, tensors: Tensors) -> Tensors:
        return self._gradients(kept, g, tensors, keep=True)[1]

    def _gradients(
        self, start: Tensor, g: Tensor, tensors: Tensors, *, keep: bool
    ) -> tuple[Tensor | None, Tensors]:
        """From what was kept, or from y_N: then the shears are undone, down to y_0."""
        recipe = self._recipe(True, keep)
        gradients, factors = recipe.gradients, recipe.factors
        copy = torch.clone if self._empty else torch.empty_like
        y_0, g_0 = None if keep else copy(start), copy(g)
        end = (g_0 if y_0 is None else y_0, g_0)
        parts = 1 if factors is None else factors.parts
        buffer = g.new_zeros(parts, gradients.size)
        if self._empty:
            pass
        elif factors is None:
            dK, *others = gradients.targets(buffer)
            targets = (dK, *others, dK, dK)
            weights = recipe.prepared(self._weights(recipe, tensors))
            recipe.launch((start, g, *end, *weights, *targets), 0, self.stack.steps)
        else:
            *targets, _ = gradients.targets(buffer)
            left, right = factors.new(g)
            dc = g.new_empty(self.stack.steps, recipe.tiles * recipe.blocks)
            weights = recipe.prepared(self._weights(recipe, tensors))
            unused = targets if recipe.packing is None else []  # by a kernel that could add, too
            for low, high in factors.spans():
                states = (start, g, *end)
                recipe.launch((*states, *weights, *unused, dc, left, right), low, high)
                factors.multiply((left, right, *targets, *self.schedule), low, high)
                start, g = start if y_0 is None else y_0, g_0
        total = buffer[0] if parts == 1 else buffer.sum(0)
        *found, d_coef = gradients.of(total)
        if factors is not None and d_coef is not None and not self._empty:
            torch.sum(dc, 1, out=d_coef)
        return y_0, (g_0, *found, d_coef)

    @property
    def _empty(self) -> bool:
        return self.stack.samples == 0 or self.stack.steps == 0

    def _weights(self, recipe: _Recipe, tensors: Tensors) -> tuple[Tensor, ...]:
        """K, b and V of p and of q, the schedule and c, as kernels take them."""
        *weights, c = tensors
        each = len(self.stack.rows)
        K, b, V = weights[:each], weights[each : 2 * each], weights[2 * each :]
        if recipe.kind == "unit":
            V = [torch.eye(self.stack.width, dtype=c.dtype, device=c.device)]
        elif V[0] is None:
            V = K
        return K[0], K[-1], b[0], b[-1], V[0], V[-1], *self.schedule, c

    @staticmethod
    def kept_size(stack: Stack, precision: str = "") -> int:
        return stack.steps * stack.samples * stack.width

    @staticmethod
    def why_not(dtype: torch.dtype, features: int) -> str:
        """Why no kernel takes such states, or empty; half precision is converted to float32."""
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"the GPU kernel is for float32 and half precision, not {dtype}"
        if features > MAX_WIDTH:
            return f"the GPU kernel is for up to {MAX_WIDTH} features, not {features}"
        return ""


class TritonShears(TritonEuler):
    """The same for a shear stack, which can also be undone."""

    def undo(self, y_N: Tensor, g: Tensor, tensors: Tensors) -> tuple[Tensor, Tensors]:
        y_0, gradients = self._gradients(y_N, g, tensors, keep=False)
        assert y_0 is not None
        return y_0, gradients
