"""The kernel of the GPU: one program takes a tile of samples through all layers.

The halves of the state stay in registers, and the weights are streamed. Widths are padded to powers
of two. The backward kernel reads what the forward kernel has saved: the half that each step reads.
Gradients of weights are added up with atomics or, for runs that repeat bit for bit, by a few
programs with their own sums. Triton (extra `gpu`) compiles the kernels.
"""

# Kernels branch on what is known when they are compiled, which pyright cannot follow.
# pyright: reportPossiblyUnboundVariable=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from hdnn.engine.memory import Stack, Tensors

PARTIAL_BYTES = 64 * 2**20
"""Memory for the sums of programs in the deterministic mode."""

FEW = 1024
"""From so many entries of K on, weight gradients in tf32 are products of bf16 factors."""


FEW_SAMPLES = 2048
"""Up to so many, smaller tiles keep more of the GPU busy."""

OUTPUTS = ("fixed", "learned", "same", "gains")
"""Kinds of V: the second bit of the number says that V is K, and the first that it is learned."""


@triton.jit
def sigma_of(x, ACT: constexpr, FAST: constexpr):  # pragma: kernel
    if ACT == "tanh":
        if FAST:  # relative error 2^-11, that of a tf32 operand
            z = tl.inline_asm_elementwise(
                "tanh.approx.f32 $0, $1;",
                "=r,r",
                [x],
                dtype=tl.float32,
                is_pure=True,
                pack=1,
            )
        else:  # exact to rounding also near 0, where subtracting large numbers would not be
            s = x * x
            near = (
                (s * -5.70498872745e-3 + 2.06390887954e-2) * s
                - 5.37397155531e-2
            ) * s
            near = x + x * (
                ((near + 1.33314422036e-1) * s - 3.33332819422e-1) * s
            )
            z = tl.where(
                tl.abs(x) < 0.625, near, 2.0 * tl.sigmoid(2.0 * x) - 1.0
            )
    elif ACT == "relu":
        z = tl.where(x > 0.0, x, x * 0.0)
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


@triton.jit
def slope_of(x, z, ACT: constexpr):  # pragma: kernel
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


@triton.jit
def rounded(x, PREC: constexpr):  # pragma: kernel
    # The tensor cores cut off the last 13 bits, which would always shrink x.
    if PREC == "tf32":
        x = (x.to(tl.int32, bitcast=True) + 0x1000).to(tl.float32, bitcast=True)
    elif PREC == "bf16":
        x = x.to(tl.bfloat16)
    # bf16 in the interpreter, which cannot multiply bf16
    elif PREC == "emulated":
        x = x.to(tl.bfloat16).to(tl.float32)
    return x


@triton.jit
def dot(a, b, acc, PREC: constexpr):  # pragma: kernel
    if PREC == "bf16":
        c = tl.dot(a, b, acc=acc)
    elif PREC == "emulated":
        c = tl.dot(a, b, acc=acc, input_precision="ieee")
    else:
        c = tl.dot(a, b, acc=acc, input_precision=PREC)
    return c


@triton.jit
def ordered(x, PREC: constexpr):  # pragma: kernel
    # Of every 8 columns, a thread of the tensor cores holds 2t and 2t + 1 of a result, but t and
    # t + 4 of a tf32 operand. The order of a sum is free: renumbering the columns of both factors
    # saves the exchange among threads.
    if PREC == "tf32":
        eights = tl.reshape(x, (x.shape[0], x.shape[1] // 8, 4, 2))
        x = tl.reshape(
            tl.permute(eights, (0, 1, 3, 2)), (x.shape[0], x.shape[1])
        )
    return x


@triton.jit
def times_transposed(x, K, acc, PREC: constexpr):  # pragma: kernel
    """Acc + x K^T."""
    x = ordered(rounded(x, PREC), PREC)
    return dot(x, tl.trans(ordered(K, PREC)), acc, PREC)


@triton.jit
def times(z, V, acc, PREC: constexpr):  # pragma: kernel
    """Acc + z V."""
    z = ordered(rounded(z, PREC), PREC)
    return dot(z, tl.trans(ordered(tl.trans(V), PREC)), acc, PREC)


@triton.jit
def weights_of(
    forces,
    j,
    block,
    m,
    e: constexpr,
    READS: constexpr,
    OUTPUTS: constexpr,
    PREC: constexpr,
    BR: constexpr,
    BM: constexpr,
):  # pragma: kernel
    """A block of rows of the weights of move e in layer j: K, b, V and the gains."""
    K, b, V, r = forces[(READS >> e) & 1]
    OUTPUT: constexpr = (OUTPUTS >> 2 * e) & 3
    i = block * BR + tl.arange(0, BR)
    k = tl.arange(0, BM)
    at = (j * r + i)[:, None] * m + k[None, :]
    inside = (i < r)[:, None] & (k < m)[None, :]
    K_j = rounded(tl.load(K + at, mask=inside, other=0.0), PREC)
    b_j = tl.load(b + j * r + i, mask=i < r, other=0.0)
    V_j = K_j
    a_j = tl.full((), 1.0, tl.float32)
    if OUTPUT < 2:
        V_j = rounded(tl.load(V + at, mask=inside, other=0.0), PREC)
    elif OUTPUT == 3:
        a_j = tl.load(V + j * r + i, mask=i < r, other=0.0)
    return K_j, b_j, V_j, a_j


@triton.jit
def forces_of(
    source, K, b, c, ACT: constexpr, PREC: constexpr, FAST: constexpr
):  # pragma: kernel
    """C sigma(source K^T + b)."""
    bias = tl.zeros((source.shape[0], K.shape[0]), tl.float32) + b[None, :]
    return c * sigma_of(times_transposed(source, K, bias, PREC), ACT, FAST)


@triton.jit(do_not_specialize=["B", "N"])
def forward_kernel(
    y,
    out,
    kept,
    h,
    fractions,
    forces,
    B,
    N,
    m,
    ACT: constexpr,
    PREC: constexpr,
    FAST: constexpr,
    READS: constexpr,
    MOVES: constexpr,
    E: constexpr,
    OUTPUTS: constexpr,
    HALVES: constexpr,
    INVERSE: constexpr,
    KEEP: constexpr,
    RB: constexpr,
    BT: constexpr,
    BM: constexpr,
    BR: constexpr,
):  # pragma: kernel
    first = tl.program_id(0).to(tl.int64) * BT
    row = first + tl.arange(0, BT)[:, None]
    k = tl.arange(0, BM)[None, :]
    inside = (row < B) & (k < m)
    at = row * ((1 + HALVES) * m) + k
    p = tl.load(y + at, mask=inside, other=0.0)
    q = p
    if HALVES:
        q = tl.load(y + at + m, mask=inside, other=0.0)
    j = first * 0 + N - 1 if INVERSE else first * 0
    K, b, V, a = weights_of(forces, j, 0, m, 0, READS, OUTPUTS, PREC, BR, BM)
    for depth in range(N):
        for e in tl.static_range(E):
            c = tl.load(h + j) * fractions[e]
            j_next = j
            if e == E - 1:
                j_next = (
                    tl.maximum(j - 1, 0)
                    if INVERSE
                    else tl.minimum(j + 1, N - 1)
                )
            source = q if (READS >> e) & 1 else p
            target = q if (MOVES >> e) & 1 else p
            if KEEP:
                step = (first * 0 + depth * E + e) * B
                tl.store(kept + (step + row) * m + k, source, mask=inside)
            if RB == 1:
                z = forces_of(source, K, b, c * a, ACT, PREC, FAST)
                V_here = V
                # The next weights are on their way while this step runs.
                K, b, V, a = weights_of(
                    forces,
                    j_next,
                    0,
                    m,
                    (e + 1) % E,
                    READS,
                    OUTPUTS,
                    PREC,
                    BR,
                    BM,
                )
                target = times(z, V_here, target, PREC)
            else:
                for block in range(RB):
                    K, b, V, a = weights_of(
                        forces, j, block, m, e, READS, OUTPUTS, PREC, BR, BM
                    )
                    z = forces_of(source, K, b, c * a, ACT, PREC, FAST)
                    target = times(z, V, target, PREC)
            j = j_next
            if (MOVES >> e) & 1:
                q = target
            else:
                p = target
    tl.store(out + at, p, mask=inside)
    if HALVES:
        tl.store(out + at + m, q, mask=inside)


@triton.jit
def add(into, value, mask, ATOMIC: constexpr):  # pragma: kernel
    """Into += value, together with other programs or alone."""
    if ATOMIC:
        tl.atomic_add(into, value, mask=mask, sem="relaxed")
    else:
        tl.store(into, tl.load(into, mask=mask, other=0.0) + value, mask=mask)


@triton.jit(do_not_specialize=["B", "N", "tiles", "size"])
def backward_kernel(
    kept,
    g,
    out,
    h,
    fractions,
    forces,
    dh,
    grads,
    B,
    N,
    m,
    tiles,
    size,
    ACT: constexpr,
    PREC: constexpr,
    WPREC: constexpr,
    FAST: constexpr,
    READS: constexpr,
    MOVES: constexpr,
    E: constexpr,
    OUTPUTS: constexpr,
    STEP: constexpr,
    HALVES: constexpr,
    INVERSE: constexpr,
    ATOMIC: constexpr,
    RB: constexpr,
    BT: constexpr,
    BM: constexpr,
    BR: constexpr,
):  # pragma: kernel
    own = tl.program_id(0).to(tl.int64) * size
    zero = own * 0
    if ATOMIC:
        own = zero
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        first = zero + tile * BT
        row = first + tl.arange(0, BT)[:, None]
        k = tl.arange(0, BM)[None, :]
        inside = (row < B) & (k < m)
        at = row * ((1 + HALVES) * m) + k
        g_p = tl.load(g + at, mask=inside, other=0.0)
        g_q = g_p
        if HALVES:
            g_q = tl.load(g + at + m, mask=inside, other=0.0)
        j = zero if INVERSE else zero + N - 1
        K, b, V, a = weights_of(
            forces, j, 0, m, E - 1, READS, OUTPUTS, PREC, BR, BM
        )
        step = (zero + N * E - 1) * B
        source_next = tl.load(
            kept + (step + row) * m + k, mask=inside, other=0.0
        )
        for depth in range(N):
            for e in tl.static_range(E - 1, -1, -1):
                part = fractions[e]
                c = tl.load(h + j) * part
                j_here = j
                if e == 0:
                    j = (
                        tl.minimum(j + 1, N - 1)
                        if INVERSE
                        else tl.maximum(j - 1, 0)
                    )
                source = source_next
                left = zero + N * E - 2 - (depth * E + E - 1 - e)
                step = tl.maximum(left, 0) * B
                source_next = tl.load(
                    kept + (step + row) * m + k, mask=inside, other=0.0
                )
                moved = g_q if (READS >> e) & 1 else g_p
                g_target = g_q if (MOVES >> e) & 1 else g_p
                r = forces[(READS >> e) & 1][3]
                dK, db, dV = grads[(READS >> e) & 1]
                for block in range(RB):
                    if RB > 1:
                        K, b, V, a = weights_of(
                            forces,
                            j_here,
                            block,
                            m,
                            e,
                            READS,
                            OUTPUTS,
                            PREC,
                            BR,
                            BM,
                        )
                    # The gradient of what this block reads; those of its weights are added up.
                    bias = tl.zeros((BT, BR), tl.float32) + b[None, :]
                    x = times_transposed(source, K, bias, PREC)
                    t = times_transposed(g_target, V, tl.zeros_like(x), PREC)
                    z = sigma_of(x, ACT, FAST)
                    u = c * a * slope_of(x, z, ACT) * t
                    u_T = tl.trans(rounded(u, WPREC))
                    z_T = tl.trans(rounded(c * a * z, WPREC))
                    empty = tl.zeros((BR, BM), tl.float32)
                    grad = dot(u_T, rounded(source, WPREC), empty, WPREC)
                    i = block * BR + tl.arange(0, BR)
                    in_b = own + j_here * r + i
                    in_K = (own + (j_here * r + i) * m)[:, None] + k
                    free = (i < r)[:, None] & (k < m)
                    if (OUTPUTS >> 2 * e) & 2:
                        grad = dot(z_T, rounded(g_target, WPREC), grad, WPREC)
                    elif (OUTPUTS >> 2 * e) & 1:
                        output = dot(
                            z_T, rounded(g_target, WPREC), empty, WPREC
                        )
                        add(dV + in_K, output, free, ATOMIC)
                    add(dK + in_K, grad, free, ATOMIC)
                    add(db + in_b, tl.sum(u, 0), i < r, ATOMIC)
                    if (OUTPUTS >> 2 * e) & 3 == 3:
                        add(dV + in_b, c * tl.sum(z * t, 0), i < r, ATOMIC)
                    if STEP:
                        rate = part * tl.sum(a * z * t)
                        add(dh + own + j_here, rate, j >= 0, ATOMIC)
                    moved = times(u, K, moved, PREC)
                if RB == 1:
                    K, b, V, a = weights_of(
                        forces,
                        j,
                        0,
                        m,
                        (e + E - 1) % E,
                        READS,
                        OUTPUTS,
                        PREC,
                        BR,
                        BM,
                    )
                if (READS >> e) & 1:
                    g_q = moved
                else:
                    g_p = moved
        tl.store(out + at, g_p, mask=inside)
        if HALVES:
            tl.store(out + at + m, g_q, mask=inside)


# Around the kernels


def interpreted() -> bool:
    """True if Triton runs the kernels in Python, for tests on a CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def bits(answers: Sequence[int], size: int = 1) -> int:
    """A number that encodes the answers, so many bits each, which Triton reads at compile time."""
    return sum(answer << size * e for e, answer in enumerate(answers))


def padded(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())


def tiling(
    stack: Stack, precision: str, backward: bool
) -> tuple[int, int, int]:
    """The samples per tile, rows of K per block, and warps per program, as measured on an H200."""
    BM = padded(stack.width)
    exact = precision in ("ieee", "tf32x3")
    block, warps = 64, 4
    if BM <= 32:
        samples, block = (32 if exact else 64), 32
    elif BM == 64:
        samples = 32 if exact or backward else 64
        block = 32 if precision == "ieee" else 64
    elif exact:
        samples, block, warps = (16 if backward else 32), 32, 8
    else:
        samples = 16 if stack.samples <= FEW_SAMPLES else 32
    return samples, min(block, padded(max(stack.rows))), warps


def saved_size(stack: Stack, precision: str = "ieee") -> int:
    """The count of numbers that the forward pass saves: the inputs of each step."""
    return stack.steps * stack.samples * stack.width


class Kernel:
    """A stack on the GPU."""

    def __init__(
        self, stack: Stack, precision: str = "ieee", deterministic: bool = False
    ) -> None:
        self.stack = stack
        self.deterministic = deterministic
        moves = list(stack.scheme.ordered(stack.inverse))
        outputs = [OUTPUTS.index(stack.outputs[half]) for half, _, _ in moves]
        self.precision = precision
        few = min(stack.rows) * stack.width < FEW
        weights = "bf16" if precision == "tf32" and not few else precision
        fast = precision in ("tf32", "bf16") and not interpreted()
        if interpreted():
            names = {"bf16": "emulated", "tf32": "ieee"}
            precision, weights = (
                names.get(precision, precision),
                names.get(weights, weights),
            )
        self.constants = {
            "ACT": stack.sigma.name,
            "PREC": precision,
            "WPREC": weights,
            "FAST": fast,
            "READS": bits([half for half, _, _ in moves]),
            "MOVES": bits([moved for _, moved, _ in moves]),
            "E": len(moves),
            "OUTPUTS": bits(outputs, 2),
            "STEP": stack.learned,
            "HALVES": int(stack.scheme.halves),
            "INVERSE": stack.inverse,
            "BM": padded(stack.width),
        }
        self.sizes = (stack.samples, stack.layers, stack.width)
        self.fractions = tuple([fraction for _, _, fraction in moves])

    def _launch(
        self, kernel: Any, grid: int, args: tuple[Any, ...], **options: Any
    ) -> None:
        constants = self.constants | options
        names = {*kernel.arg_names, "num_warps", "num_stages"}
        constants = {
            name: value for name, value in constants.items() if name in names
        }
        # Triton 3.9 warns if this is left open.
        constants["enable_fp_fusion"] = True
        if self.stack.device.type != "cuda":
            kernel[(grid,)](*args, **constants)
            return
        with torch.cuda.device(self.stack.device):
            kernel[(grid,)](*args, **constants)

    def _tiles(self, backward: bool) -> tuple[int, dict[str, int]]:
        stack = self.stack
        BT, BR, warps = tiling(stack, self.precision, backward)
        tiles = -(-stack.samples // BT)
        return tiles, {
            "BT": BT,
            "BR": BR,
            "RB": -(-max(stack.rows) // BR),
            "num_warps": warps,
            "num_stages": 1,
        }

    def forward(
        self, y: Tensor, tensors: Tensors, save: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """y_N from y_0 (B, n) and, with `save`, the values that `backward` needs."""
        kept = y.new_empty(saved_size(self.stack)) if save else None
        if self.stack.samples == 0 or self.stack.layers == 0:
            return y.clone(), kept
        out = torch.empty_like(y)
        tiles, options = self._tiles(False)
        states = (y, out, out if kept is None else kept)
        args = (*states, *self._weights(tensors), *self.sizes)
        self._launch(forward_kernel, tiles, args, KEEP=save, **options)
        return out, kept

    def backward(
        self, y: Tensor, saved: Tensor, g: Tensor, tensors: Tensors
    ) -> list[Tensor | None]:
        """The gradients of y_0 and of all tensors, given the gradient of y_N."""
        stack = self.stack
        tiles, options = self._tiles(True)
        programs = tiles
        if self.deterministic:
            programs = min(tiles, max(1, PARTIAL_BYTES // (stack.size * 4)))
        sums = g.new_zeros(programs if self.deterministic else 1, stack.size)
        if stack.samples == 0 or stack.layers == 0:
            return [g.clone(), *stack.gradients(sums[0])]
        out = torch.empty_like(g)
        dh, *places = [g if t is None else t for t in stack.gradients(sums[0])]
        grads = tuple(zip(*[iter(places)] * 3, strict=True))
        weights = self._weights(tensors)
        args = (saved, g, out, *weights, dh, grads, *self.sizes)
        args += (tiles, stack.size)
        options["ATOMIC"] = not self.deterministic
        self._launch(backward_kernel, programs, args, **options)
        total = sums.sum(0) if self.deterministic else sums[0]
        return [out, *stack.gradients(total)]

    def _weights(self, tensors: Tensors) -> tuple[Any, ...]:
        """The steps, their fractions, and K, b, V and the number of rows of each force."""
        forces = []
        for force, rows in zip(
            self.stack.forces(tensors), self.stack.rows, strict=True
        ):
            V = force.K if force.V is None else force.V
            forces.append((force.K, force.b, V, rows))
        return tensors[0], self.fractions, tuple(forces)
