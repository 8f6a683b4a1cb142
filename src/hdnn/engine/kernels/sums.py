"""Weight gradients from the factors that a backward kernel has emitted."""

# Kernels branch on what is known when they are compiled, which pyright cannot follow.
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

from typing import Any, TypeAlias

from hdnn.engine.kernels.device import (
    dot,
    factor_rows,
)

tl: Any = None
constexpr: TypeAlias = Any


def weight_kernel(
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
    begin, end = part * 0, factor_rows(B, KIND)
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
            emitted = (here * T + t).to(tl.int64) * factor_rows(B, KIND)
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
                grad = dot(tl.trans(L), R, grad, PREC)
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
