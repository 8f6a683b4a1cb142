"""Whole stacks of layers as one Triton kernel: states in registers, weights streamed.

A program takes a tile of samples through all layers. A splitting scheme (H2, MS1, MS3, Verlet,
Yoshida) is a schedule of shears `target += coef * sigma(source K^T + b) V`; each can be undone, so
the backward kernel can start from y_N and reconstruct every state on its way back. Forward Euler
(H1, MS2) is a schedule of steps whose source and target are the same y. They cannot be undone, so
the backward kernel reads the stored states.

A shear with r hidden units is the sum of shears with some of the units each, with the same source
and target: kernels loop over (shear, block of rows of K), so r has no limit and K takes no more
registers than one block.

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
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from hdnn.engine.kernels.protocol import Stack, Tensors, schedule
from hdnn.errors import require

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


def _put(into, value, mask, DET: constexpr):  # pragma: kernel
    if DET:
        tl.store(into, value, mask=mask)
    else:
        tl.atomic_add(into, value, mask=mask, sem="relaxed")


def _put_matrix(W, value, block, r, n, PAD: constexpr, DET):  # pragma: kernel
    at = W + _entries(block, n, value.shape[0], value.shape[1], PAD)
    if PAD == "none":
        _put(at, value, None, DET)
    else:
        _put(at, value, _exist(block, r, n, value.shape[0], value.shape[1], PAD), DET)


def _put_column_sum(u, u_T, into, block, r, PREC: constexpr, DET):  # pragma: kernel
    i = block * u.shape[1] + tl.arange(0, u.shape[1])
    if PREC == "ieee" or PREC == "emulated":
        _put(into + i, tl.sum(u, 0), i < r, DET)
    else:  # a product with ones takes the tensor cores less time than shuffles would need
        ones = _rounded(tl.full((u.shape[0], 16), 1.0, tl.float32), PREC)
        total = _dot(u_T, ones, tl.zeros((u.shape[1], 16), tl.float32), PREC)
        column = tl.arange(0, 16)[None, :]
        _put(into + i[:, None] + column * 0, total, (i[:, None] < r) & (column == 0), DET)


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
    DET: constexpr,
    STEP: constexpr,
    RB: constexpr,
    BT: constexpr,
    BM: constexpr,
    BR: constexpr,
):  # pragma: kernel
    """With KEEP, y_in is what the steps have read, and none is undone; without, it is y_N."""
    pid = tl.program_id(0)
    first = pid.to(tl.int64) * BT
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

            block = k % RB
            r = tl.where(turn == 0, r_q, r_p)
            if DET:  # the rows of a tile of samples
                slot = (k // RB - low).to(tl.int64) * tl.num_programs(0) + pid
                row = slot * tl.maximum(r_p, r_q)
                slot_coef = slot * RB + block
            else:  # the rows of a layer: those of p come first
                row = (1 - turn) * first_q + j * r
                slot_coef = k // RB
            u_T = tl.trans(_rounded(u, WPREC))
            z_T = tl.trans(_rounded(cz, WPREC))
            grad = tl.zeros((BR, BM), tl.float32)
            if KIND == "same" or KIND == "canonical":
                grad = _dot(z_T, _rounded(g_zK, WPREC), grad, WPREC)
            if KIND == "general":
                grad_V = _dot(z_T, _rounded(g_target, WPREC), grad, WPREC)
                _put_matrix(dV + row * m, grad_V, block, r, m, PAD, DET)
            grad = _dot(u_T, _rounded(source, WPREC), grad, WPREC)
            _put_matrix(dK + row * m, grad, block, r, m, PAD, DET)
            _put_column_sum(u, u_T, db + row, block, r, WPREC, DET)
            if STEP:
                _put(dcoef + slot_coef, tl.sum(z * t), None, DET)
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


# Around the kernels

_DEVICE = [f for f in [*globals().values()] if inspect.isfunction(f) and f.__module__ == __name__]

OPEN_ENDED = ("B", "M", "first_q", "low", "high", "rows")
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


def tiling(stack: Stack, precision: str, *, backward: bool) -> Tiling:
    """The tiling of a kernel."""
    table = _SPLIT if stack.turns else _CANONICAL if stack.kind == "canonical" else _EULER
    samples, rows, warps = table[max(32, _padded(stack.width))][precision][backward]
    return Tiling(samples, min(rows, _padded(max(stack.rows))), warps)


def _padded(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())


_INTERPRETED = {"tf32": "ieee", "bf16": "emulated"}


class _Recipe:
    """A stack's kernel with the tiling for its sizes: made once, and then called many times.

    `keep`: states are written forwards, or read backwards.
    """

    def __init__(
        self, stack: Stack, precision: str, deterministic: bool, backward: bool, keep: bool
    ) -> None:
        width, kind, BM = stack.width, stack.kind, _padded(stack.width)
        BT, BR, warps = tiling(stack, precision, backward=backward)
        if kind == "identity" and BM > 128:
            kind = "unit"  # z in blocks, times a unit matrix
        elif kind == "identity":
            BR = BM
        self.tiles, self.blocks = -(-stack.samples // BT), -(-max(stack.rows) // BR)
        padding = "halves" if kind == "canonical" else "end"
        if width == BM:
            full = all(each == self.blocks * BR for each in stack.rows)
            padding = "none" if full else "end"
        # The kernel has a faster loop if p and q alternate, but not if it adds in a fixed order.
        alternating = sorted(stack.turns) == [0, 1] and not deterministic
        if interpreted():
            precision = _INTERPRETED.get(precision, precision)
        constants = {
            "ACT": stack.activation,
            "KIND": kind,
            "PREC": precision,
            # No other layer depends on the gradients of weights.
            "WPREC": "bf16" if precision == "tf32" else precision,
            "FAST": precision in ("tf32", "bf16"),  # with inline assembly
            "PAD": padding,
            "EULER": not stack.turns,
            "ALT": alternating and self.blocks == 1,
            "KEEP": keep,
            "DET": deterministic,
            "STEP": stack.learned,
            "RB": self.blocks,
            "BT": BT,
            "BM": BM,
            "BR": BR,
        }
        self.gradients = _Gradients(stack)
        self.calls_directly = load()
        self.kernel: Any = _backward_kernel if backward else _forward_kernel
        self.constants = {
            name: constants[name] for name in self.kernel.arg_names if name in constants
        }
        first_q = (self.gradients.starts[-1],) if backward else ()
        self.B, self.sizes = stack.samples, (width, stack.rows[0], stack.rows[-1], *first_q)
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
        if aligned and self.calls_directly:
            # Triton compiles for aligned pointers, and for each different set of constants.
            self.direct = compiled[grid]
        return None


class _Gradients:
    """How the gradients of a stack share one buffer, each of them contiguous.

    Rows of dK, db and dV have the same order: layer by layer, all of p before all of q. A spare row
    at the end takes what belongs to none of them.
    """

    def __init__(self, stack: Stack) -> None:
        N, rows, width = stack.layers, stack.rows, stack.width
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
        """The buffer, and dK, db, dV (of p and of q each) and dc in it, all zero."""
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


class TritonEuler:
    """A stack as one kernel each way; each is prepared when it is first needed.

    `deterministic` adds up the tiles in a fixed order, in at most PARTIAL_BYTES. Gradients are
    float32 and contiguous.
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
        self._recipe(False, keep).launch((*states, *self._weights(tensors)), self.stack.steps)
        return out, kept

    def backward(self, kept: Tensor, g: Tensor, tensors: Tensors) -> Tensors:
        return self._gradients(kept, g, tensors, keep=True)[1]

    def _gradients(
        self, start: Tensor, g: Tensor, tensors: Tensors, *, keep: bool
    ) -> tuple[Tensor | None, Tensors]:
        """From what was kept, or from y_N: then the shears are undone, down to y_0."""
        recipe, in_order = self._recipe(True, keep), self.how[1]
        copy = torch.clone if in_order or self._empty else torch.empty_like
        y_0, g_0 = None if keep else copy(start), copy(g)
        buffer, parts = recipe.gradients.new(g)
        weights = self._weights(tensors)
        if self._empty:
            pass
        elif in_order:
            states = (start, g_0, g_0, g_0) if y_0 is None else (y_0, g_0, y_0, g_0)
            rows = self._rows_of_steps(recipe.gradients)
            recipe.gradients.add_in_order(buffer, rows, recipe, (*states, *weights))
        else:
            states = (start, g, g_0 if y_0 is None else y_0, g_0)
            dK, db, dV, dc = parts[:: len(self.stack.rows)]
            # Any tensor stands in for None, and is not touched.
            targets: Any = (dK, db, dK if dV is None else dV, db if dc is None else dc)
            recipe.launch((*states, *weights, *targets), 0, self.stack.steps)
        return y_0, (g_0, *parts)

    @property
    def _empty(self) -> bool:
        return self.stack.samples == 0 or self.stack.steps == 0

    def _weights(self, tensors: Tensors) -> tuple[Tensor, ...]:
        """K, b and V of p and of q, the schedule and c, as kernels take them."""
        *weights, c = tensors
        each = len(self.stack.rows)
        K, b, V = weights[:each], weights[each : 2 * each], weights[2 * each :]
        if self.stack.kind == "identity" and self.stack.width > 128:
            V = [torch.eye(self.stack.width, dtype=c.dtype, device=c.device)]
        elif V[0] is None:
            V = K
        return K[0], K[-1], b[0], b[-1], V[0], V[-1], *self.schedule, c

    def _rows_of_steps(self, into: _Gradients) -> Tensor:
        """For each step, the rows of the gradients to which its rows are added."""
        half, layer = (one.long()[:, None] for one in self.schedule)
        r_p, r_q = self.stack.rows[0], self.stack.rows[-1]
        i = torch.arange(into.most, device=half.device)
        r = torch.where(half == 0, r_q, r_p)
        start = torch.where(half == 0, into.starts[-1], 0)
        return torch.where(i < r, start + layer * r + i, into.spare)

    @staticmethod
    def kept_size(stack: Stack) -> int:
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
