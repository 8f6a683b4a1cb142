"""Matrix products in bf16 that end in what a step of a wide stack does with them.

A product's sums are still in registers when bias, activation, slope or the state that it moves are
applied to them, so nothing is written and read again between a product and the rest of its step.
Sums, states and the rest are float32.
"""

from __future__ import annotations

import functools
import inspect
from importlib import import_module
from typing import Any, TypeAlias

from torch import Tensor

from hdnn.engine.kernels import compiling
from hdnn.engine.kernels.device import kernel_sigma, kernel_slope
from hdnn.engine.kernels.protocol import installed

# Entries of a product, and of its sums, that a program takes at once; measured on an H200.
ROWS, COLUMNS, DEPTH = 128, 64, 64
WIDE = 512  # from this many hidden units on, a state gives twice as many columns at once

tl: Any = None
constexpr: TypeAlias = Any


# Inside of a kernel


def _product(
    x, w, B, N, D, ACROSS: constexpr, EMULATED: constexpr,
    BB: constexpr, BN: constexpr, BD: constexpr,
):  # fmt: skip  # pragma: kernel
    """A block of x w^T (B, N) or, with ACROSS, of x w: sums over D.

    The factors are tensor descriptors, which read 0 where there is nothing.
    """
    across = tl.cdiv(N, BN)
    tile, block = tl.program_id(0) // across, tl.program_id(0) % across
    sums = tl.zeros((BB, BN), tl.float32)
    for k in range(0, D, BD):
        left = x.load([tile * BB, k])
        right = w.load([k, block * BN]) if ACROSS else w.load([block * BN, k]).T
        if EMULATED:  # the interpreter cannot multiply bf16
            left, right = left.to(tl.float32), right.to(tl.float32)
        sums = tl.dot(left, right, sums)
    row, col = tile * BB + tl.arange(0, BB), block * BN + tl.arange(0, BN)
    inside = (row < B)[:, None] & (col < N)[None, :]
    return sums, tile, block, col, row.to(tl.int64)[:, None] * N + col[None, :], inside


def _inner_kernel(
    x, K, b, a, z, coef, B, N, D,
    ACT: constexpr, FAST: constexpr, VALUE: constexpr,
    BB: constexpr, BN: constexpr, BD: constexpr,
):  # fmt: skip  # pragma: kernel
    """a = x K^T + b and, with VALUE, z = c sigma(a)."""
    sums, _, _, col, at, inside = _product(x, K, B, N, D, False, not FAST, BB, BN, BD)
    sums += tl.load(b + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
    rounded = sums.to(tl.bfloat16)
    tl.store(a + at, rounded, mask=inside)
    if VALUE:  # of what the backward pass reads, too
        tl.store(
            z + at, tl.load(coef) * kernel_sigma(rounded.to(tl.float32), ACT, FAST), mask=inside
        )


def _slope_kernel(
    g, V, a, u, z, coef, sums, dots, B, N, D,
    ACT: constexpr, FAST: constexpr, DOT: constexpr,
    BB: constexpr, BN: constexpr, BD: constexpr,
):  # fmt: skip  # pragma: kernel
    """u = c (g V^T) sigma'(a) and z = c sigma(a), with the sums of u over a tile of samples.

    With DOT there is also the block's part of sum((g V^T) sigma(a)), the gradient of c.
    """
    w, tile, block, col, at, inside = _product(g, V, B, N, D, False, not FAST, BB, BN, BD)
    x, c = tl.load(a + at, mask=inside, other=0.0).to(tl.float32), tl.load(coef)
    w = tl.where(inside, w, 0.0)
    value = kernel_sigma(x, ACT, FAST)
    slope = c * w * kernel_slope(x, value, ACT)
    tl.store(u + at, slope, mask=inside)
    tl.store(z + at, c * value, mask=inside)
    tl.store(sums + tile * N + col, tl.sum(slope, 0), mask=col < N)
    if DOT:
        tl.store(dots + tile * tl.cdiv(N, BN) + block, tl.sum(w * value))


def _move_kernel(
    z, W, now, to, sign, B, N, D, FAST: constexpr,
    BB: constexpr, BN: constexpr, BD: constexpr,
):  # fmt: skip  # pragma: kernel
    """now += sign z W, also rounded where it goes `to`."""
    sums, _, _, _, at, inside = _product(z, W, B, N, D, True, not FAST, BB, BN, BD)
    moved = tl.load(now + at, mask=inside, other=0.0) + sign * sums
    tl.store(now + at, moved, mask=inside)
    tl.store(to + at, moved, mask=inside)


# Around the kernels

_DEVICE = [f for f in [*globals().values()] if inspect.isfunction(f) and f.__module__ == __name__]


@functools.cache
def load() -> None:
    """Import Triton and compile the functions above, at the first call."""
    compiling.load()
    compiling.compile_functions(globals(), _DEVICE)


class Joined:
    """The kernels for one activation; `learned`: with gradients of c."""

    def __init__(self, activation: str, learned: bool) -> None:
        load()
        self.activation, self.learned, self.fast = (
            activation,
            learned,
            not compiling.interpreted(),
        )

    def inner(self, x: Tensor, K: Tensor, b: Tensor, a: Tensor, z: Any, c: Tensor) -> None:
        how = {"ACT": self.activation, "VALUE": z is not None}
        wide = 2 if len(K) >= WIDE else 1
        self._run(_inner_kernel, x, K, (b, a, a if z is None else z, c), wide=wide, **how)

    def slope(
        self, g: Tensor, V: Tensor, a: Tensor, u: Tensor, z: Tensor, c: Tensor, sums: Any, dots: Any
    ) -> None:
        how = {"ACT": self.activation, "DOT": self.learned}
        self._run(_slope_kernel, g, V, (a, u, z, c, sums, dots), **how)

    def move(self, now: Tensor, z: Tensor, W: Tensor, to: Tensor, sign: int) -> None:
        self._run(_move_kernel, z, W, (now, to, float(sign)), across=True)

    def dots(self, r: int) -> int:
        """Parts of the gradient of c for each tile of samples."""
        return -(-r // COLUMNS) if self.learned else 0

    def _run(
        self,
        kernel: Any,
        left: Tensor,
        right: Tensor,
        others: tuple[Any, ...],
        *,
        across: bool = False,
        wide: int = 1,
        **how: Any,
    ) -> None:
        (B, D), N, columns = left.shape, right.shape[across], wide * COLUMNS
        block = [DEPTH, columns] if across else [columns, DEPTH]
        x, w = _described(left, [ROWS, DEPTH]), _described(right, block)
        grid = (-(-B // ROWS) * -(-N // columns),)
        how |= {"FAST": self.fast, "BB": ROWS, "BN": columns, "BD": DEPTH}
        kernel[grid](x, w, *others, B, N, D, **how, num_warps=4 * wide, num_stages=5 - wide)


def _described(matrix: Tensor, block: list[int]) -> Any:
    return import_module("triton.tools.tensor_descriptor").TensorDescriptor.from_tensor(
        matrix, block
    )


def why_not(rows: tuple[int, ...], width: int) -> str:
    """Why products of such sizes do not run so; "" if they do."""
    if any(size % 8 for size in (*rows, width)):
        return "rows of matrices do not begin at multiples of 16 bytes"
    if not installed("triton.tools.tensor_descriptor"):
        return "this version of Triton has no tensor descriptors"
    return ""
