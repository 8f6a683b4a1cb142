"""What the Triton kernels of stacks are made of."""

# Kernels branch on what is known when they are compiled, which pyright cannot follow.
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

from typing import Any, TypeAlias

tl: Any = None
constexpr: TypeAlias = Any


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


def rounded(x, PREC: constexpr):  # pragma: kernel
    if PREC == "tf32":  # the tensor cores cut off the last 13 bits, which would always shrink x
        x = (x.to(tl.int32, bitcast=True) + 0x1000).to(tl.float32, bitcast=True)
    elif PREC == "bf16":
        x = x.to(tl.bfloat16)
    elif PREC == "emulated":  # bf16 in the interpreter, which cannot multiply bf16
        x = x.to(tl.bfloat16).to(tl.float32)
    return x


def dot(a, b, acc, PREC: constexpr):  # pragma: kernel
    if PREC == "bf16":
        c = tl.dot(a, b, acc=acc)
    elif PREC == "emulated":
        c = tl.dot(a, b, acc=acc, input_precision="ieee")
    else:
        c = tl.dot(a, b, acc=acc, input_precision=PREC)
    return c


def ordered(x, PREC: constexpr):  # pragma: kernel
    # Of every 8 columns, a thread of the tensor cores holds 2t and 2t + 1 of a result, but t and
    # t + 4 of a tf32 operand. The order of a sum is free: renumbering the columns of both factors
    # saves the exchange among threads.
    if PREC == "tf32":
        eights = tl.reshape(x, (x.shape[0], x.shape[1] // 8, 4, 2))
        x = tl.reshape(tl.permute(eights, (0, 1, 3, 2)), (x.shape[0], x.shape[1]))
    return x


def times_transposed(x, K, acc, PREC: constexpr):  # pragma: kernel
    """Acc + x K^T."""
    x = ordered(rounded(x, PREC), PREC)
    return dot(x, tl.trans(ordered(K, PREC)), acc, PREC)


def times(z, V, acc, PREC: constexpr):  # pragma: kernel
    """Acc + z V."""
    z = ordered(rounded(z, PREC), PREC)
    return dot(z, tl.trans(ordered(tl.trans(V), PREC)), acc, PREC)


def turned(x):  # pragma: kernel
    """J x for rows x = (p, q) and the canonical J: (-q, p)."""
    halves = tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2))
    p, q = tl.split(tl.permute(halves, (0, 2, 1)))
    return tl.reshape(tl.permute(tl.join(-q, p), (0, 2, 1)), (x.shape[0], x.shape[1]))


def column(n, BM: constexpr, PAD: constexpr):  # pragma: kernel
    """The matrix column of each column of a tile."""
    k = tl.arange(0, BM)
    if PAD == "halves":
        k = tl.where(k < BM // 2, k, k - BM // 2 + n // 2)
    return k


def is_column(n, BM: constexpr, PAD: constexpr):  # pragma: kernel
    k = tl.arange(0, BM)
    if PAD == "halves":
        return k % (BM // 2) < n // 2
    return k < n


def entries(block, n, BR: constexpr, BM: constexpr, PAD: constexpr):  # pragma: kernel
    """Where a block of rows of a matrix with n columns lies."""
    i = tl.arange(0, BR)[:, None]
    k = column(n, BM, PAD)[None, :]
    if PAD == "none":
        at = block * (BR * BM) + (i * BM + k)
    else:
        at = (block * BR + i) * n + k
    return at


def exist(block, r, n, BR: constexpr, BM: constexpr, PAD: constexpr):  # pragma: kernel
    i = block * BR + tl.arange(0, BR)[:, None]
    return (i < r) & is_column(n, BM, PAD)[None, :]


def matrix(W, block, r, n, BR: constexpr, BM: constexpr, PAD: constexpr, PREC):  # pragma: kernel
    at = W + entries(block, n, BR, BM, PAD)
    if PAD == "none":
        tile = tl.load(at)
    else:
        tile = tl.load(at, mask=exist(block, r, n, BR, BM, PAD), other=0.0)
    return rounded(tile.to(tl.float32), PREC)


def pointers(turn, j, K_p, K_q, b_p, b_q, V_p, V_q, r_p, r_q, m, KIND: constexpr):  # pragma: kernel
    """Where layer j has its weights for the half that moves, and how many rows they have."""
    r = tl.where(turn == 0, r_q, r_p)
    K = tl.where(turn == 0, K_q, K_p) + j * r * m
    b = tl.where(turn == 0, b_q, b_p) + j * r
    V = tl.where(turn == 0, V_q, V_p)
    if KIND != "unit":
        V += j * r * m
    return K, b, V, r


def weights(
    K, b, V, block, r, m, BR: constexpr, BM: constexpr, KIND: constexpr, PAD: constexpr, PREC
):  # pragma: kernel
    """A block of rows of the weights."""
    i = block * BR + tl.arange(0, BR)
    K = matrix(K, block, r, m, BR, BM, PAD, PREC)
    b = tl.load(b + i, mask=i < r, other=0.0).to(tl.float32)
    if KIND == "general" or KIND == "unit":
        V = matrix(V, block, r, m, BR, BM, PAD, PREC)
    else:
        V = K
    return K, b, V


def scheduled(half, layer, coef, s):  # pragma: kernel
    """Step s: which half it moves, the layer of its weights, and its coefficient."""
    return tl.load(half + s), tl.load(layer + s).to(tl.int64), tl.load(coef + s)


def swapped(swap, source, target):  # pragma: kernel
    return tl.where(swap, target, source), tl.where(swap, source, target)


def places(
    first, B, m, BT: constexpr, BM: constexpr, PAD: constexpr, EULER: constexpr
):  # pragma: kernel
    """Where a tile of samples lies in y (p, of p and q) and in a state that is kept."""
    rows, cols = tl.arange(0, BT)[:, None], column(m, BM, PAD)[None, :]
    inside = (first + rows < B) & is_column(m, BM, PAD)[None, :]
    return rows * ((2 - EULER) * m) + cols, rows * m + cols, inside


def load_state(y, at, m, inside, EULER: constexpr):  # pragma: kernel
    """What the first step reads and moves, if it moves p: q and p, or twice all of y."""
    target = tl.load(y + at, mask=inside, other=0.0)
    if EULER:
        return target, target
    return tl.load(y + at + m, mask=inside, other=0.0), target


def load_last(y, first, B, m, BT: constexpr, BM: constexpr, EULER: constexpr):  # pragma: kernel
    """The same, to be undone: rows beyond the batch repeat its last sample, which surely can be."""
    last = (tl.minimum(B - first, BT) - 1).to(tl.int32)
    cols = tl.arange(0, BM)[None, :]
    again = tl.minimum(tl.arange(0, BT), last)[:, None] * (2 * m) + cols
    return load_state(y, again, m, cols < m, EULER)


def store_state(y, at, m, inside, turn, source, target, EULER: constexpr):  # pragma: kernel
    if EULER:
        tl.store(y + at, target, mask=inside)
    else:
        q, p = swapped(turn != 0, source, target)
        tl.store(y + at, p, mask=inside)
        tl.store(y + at + m, q, mask=inside)


def add(into, value, mask):  # pragma: kernel
    tl.atomic_add(into, value, mask=mask, sem="relaxed")


def add_matrix(W, value, block, r, n, PAD: constexpr):  # pragma: kernel
    at = W + entries(block, n, value.shape[0], value.shape[1], PAD)
    if PAD == "none":
        add(at, value, None)
    else:
        add(at, value, exist(block, r, n, value.shape[0], value.shape[1], PAD))


def add_column_sum(u, u_T, into, block, r, PREC: constexpr):  # pragma: kernel
    i = block * u.shape[1] + tl.arange(0, u.shape[1])
    if PREC == "ieee" or PREC == "emulated":
        add(into + i, tl.sum(u, 0), i < r)
    else:  # a product with ones takes the tensor cores less time than shuffles would need
        ones = rounded(tl.full((u.shape[0], 16), 1.0, tl.float32), PREC)
        total = dot(u_T, ones, tl.zeros((u.shape[1], 16), tl.float32), PREC)
        column = tl.arange(0, 16)[None, :]
        add(into + i[:, None] + column * 0, total, (i[:, None] < r) & (column == 0))


def factor_rows(B, KIND: constexpr):  # pragma: kernel
    """How many rows a step emits on either side: those of dK and those of dV lie in turn."""
    if KIND == "identity" or KIND == "unit":
        return B
    return 2 * B


def emit_left(into, value, first, block, B, r, PAD: constexpr):  # pragma: kernel
    """Some columns of a left factor (B, r), for a tile of samples."""
    row = tl.arange(0, value.shape[0])[:, None]
    i = block * value.shape[1] + tl.arange(0, value.shape[1])[None, :]
    mask = first + row < B
    if PAD != "none":
        mask = mask & (i < r)
    tl.store(into + first * r + (row * r + i), value.to(into.dtype.element_ty), mask=mask)


def emit_right(into, value, at, mask):  # pragma: kernel
    tl.store(into + at, value.to(into.dtype.element_ty), mask=mask)


def emit(
    u, cz, along, source, g_zK,
    dcoef, left, right,
    first, in_kept, inside, k, low, turn, B, m, r_p, r_q,
    KIND: constexpr, WPREC: constexpr, PAD: constexpr, STEP: constexpr, RB: constexpr,
):  # fmt: skip  # pragma: kernel
    """Leave the factors of the weight gradients of a block of a step, and a part of dc."""
    block = k % RB
    r = tl.where(turn == 0, r_q, r_p)
    B += first * 0  # as int64
    emitted = (k // RB - low) * factor_rows(B, KIND)
    left += emitted * tl.maximum(r_p, r_q)
    right += (emitted + first) * m
    emit_left(left, rounded(u, WPREC), first, block, B, r, PAD)
    if KIND != "identity" and KIND != "unit":
        emit_left(left + B * r, rounded(cz, WPREC), first, block, B, r, PAD)
    if block == 0:  # all blocks of a step have the same on the right
        emit_right(right, rounded(source, WPREC), in_kept, inside)
        if KIND != "identity" and KIND != "unit":
            emit_right(right + B * m, rounded(g_zK, WPREC), in_kept, inside)
    if STEP:
        step = tl.num_programs(0) * (first * 0 + k // RB) + tl.program_id(0)
        tl.store(dcoef + step * RB + block, tl.sum(along))
