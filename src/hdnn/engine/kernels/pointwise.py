"""What lies between the matrix products of a wide stack: two Triton kernels, one pass each."""

from __future__ import annotations

import functools
import inspect
from typing import Any, TypeAlias

from torch import Tensor

from hdnn.engine.kernels import compiling
from hdnn.engine.kernels.device import kernel_sigma, kernel_slope

TILE = 2048  # entries at once
ROWS = 64  # samples at once, in sums over samples
COLUMNS = 64  # at the most, in such sums

tl: Any = None
constexpr: TypeAlias = Any


# Inside of a kernel


def _value_kernel(
    a, z, coef, size, ACT: constexpr, FAST: constexpr, BLOCK: constexpr
):  # pragma: kernel
    """z = c sigma(a)."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(a + i, mask=i < size, other=0.0).to(tl.float32)
    tl.store(z + i, tl.load(coef) * kernel_sigma(x, ACT, FAST), mask=i < size)


def _slope_kernel(
    a,
    w,
    chain,
    u,
    z,
    coef,
    sums,
    dots,
    B,
    r,
    ACT: constexpr,
    FAST: constexpr,
    TWICE: constexpr,
    DOT: constexpr,
    BB: constexpr,
    BR: constexpr,
):  # pragma: kernel
    """u = c w sigma'(a) and z = c sigma(a), with the sums of u over a tile of samples.

    With TWICE, u also goes where the next product reads it. With DOT there is also the tile's part
    of sum(w sigma(a)), the gradient of c.
    """
    tile, block = tl.program_id(0), tl.program_id(1)
    row, col = tile.to(tl.int64) * BB + tl.arange(0, BB), block * BR + tl.arange(0, BR)
    inside = (row < B)[:, None] & (col < r)[None, :]
    at = row[:, None] * r + col[None, :]
    c = tl.load(coef)
    x = tl.load(a + at, mask=inside, other=0.0).to(tl.float32)
    t = tl.load(w + at, mask=inside, other=0.0).to(tl.float32)
    value = kernel_sigma(x, ACT, FAST)
    slope = c * t * kernel_slope(x, value, ACT)
    tl.store(u + at, slope, mask=inside)
    if TWICE:
        tl.store(chain + at, slope, mask=inside)
    tl.store(z + at, c * value, mask=inside)
    tl.store(sums + tile * r + col, tl.sum(slope, 0), mask=col < r)
    if DOT:
        tl.store(dots + tile * tl.num_programs(1) + block, tl.sum(t * value))


# Around the kernels

_DEVICE = [f for f in [*globals().values()] if inspect.isfunction(f) and f.__module__ == __name__]


@functools.cache
def load() -> None:
    """Import Triton and compile the functions above, at the first call."""
    compiling.load()
    compiling.compile_functions(globals(), _DEVICE)


class Pointwise:
    """The kernels for one activation; `learned`: with gradients of c."""

    def __init__(self, activation: str, precision: str, learned: bool) -> None:
        load()
        fast = precision in ("tf32", "bf16") and not compiling.interpreted()
        self.how, self.learned = {"ACT": activation, "FAST": fast}, learned

    def value(self, a: Tensor, z: Tensor, coef: Tensor) -> None:
        """z = c sigma(a); c is the first number of `coef`."""
        grid, kernel = (-(-a.numel() // TILE),), _compiled(_value_kernel)
        kernel[grid](a, z, coef, a.numel(), **self.how, BLOCK=TILE, num_warps=4)

    def slope(
        self, a: Tensor, w: Tensor, to: tuple[Tensor, ...], coef: Tensor, sums: Tensor, dots: Tensor
    ) -> None:
        """c w sigma'(a) twice (or once, if both are the same) and c sigma(a), with their sums."""
        (B, r), width = a.shape, _columns(a.shape[1])
        grid, twice = (tiles(B), -(-r // width)), to[0].data_ptr() != to[1].data_ptr()
        sizes = {"TWICE": twice, "DOT": self.learned, "BB": ROWS, "BR": width}
        kernel = _compiled(_slope_kernel)
        kernel[grid](a, w, *to, coef, sums, dots, B, r, **self.how, **sizes, num_warps=4)

    def dots(self, r: int) -> int:
        """Parts of the gradient of c for each tile of samples."""
        return -(-r // _columns(r)) if self.learned else 0


def _compiled(kernel: Any) -> Any:
    """What `load` has made of a function above."""
    return kernel


def tiles(samples: int) -> int:
    """Over how many tiles of samples sums are taken."""
    return -(-samples // ROWS)


def _columns(r: int) -> int:
    return min(COLUMNS, max(16, 1 << (r - 1).bit_length()))
