"""Convolutions of a unit with the pass over memory that follows each, as Triton kernels.

With few channels, a convolution takes not much longer than to read and write its images. So sigma,
its slope or the step of a shear is applied to K s while that is still in registers, and sigma' is
kept for the backward pass instead of K s. A convolution is a product of matrices: a row for each
pixel, with the channels of all its 9 neighbours, times K. Sums over pixels are taken in two steps,
within each program and then over programs, so that their order is always the same.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from hdnn.engine.kernels import compiling, pixels
from hdnn.engine.kernels.device import kernel_sigma, kernel_slope
from hdnn.engine.kernels.pixels import ONE, Pixels, Step
from hdnn.engine.kernels.protocol import installed
from hdnn.errors import require
from hdnn.operators import conv

CHANNELS = 128  # at the most
DEPTH = 64  # the packed K has a multiple of so many rows
PIXELS = 64  # whose products are added to the gradient of K at once

tl: Any = None
constexpr: TypeAlias = Any


# Inside of a kernel


def _dot(a, b, acc, EMULATE: constexpr):  # pragma: kernel
    if EMULATE:  # the interpreter cannot multiply bf16
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


def _read_row(s, b, r, column, first, K: constexpr, MB: constexpr):  # pragma: kernel
    """Channels first .. first + K - 1 of a row of pixels; 0 outside of the image."""
    return s.load([b, r, column, first]).reshape(MB, K)


def _sigma_and_slope(v, ACT: constexpr):  # pragma: kernel
    if ACT == "gelu":
        # By 7.1.26 of Abramowitz and Stegun, whose error is below 1e-7: all share one exponential.
        e = tl.exp2(v * v * -0.7213475204444817)
        t = 1.0 + 0.23164188 * tl.abs(v)
        t = tl.rsqrt(t * t)  # quicker than to divide
        tail = (t * 0.5307027145 - 0.7265760135) * t + 0.7107068705
        tail = ((tail * t - 0.142248368) * t + 0.127414796) * t * e
        Phi = tl.where(v < 0.0, tail, 1.0 - tail)
        z, d = v * Phi, Phi + v * 0.3989422804014327 * e
    else:
        z = kernel_sigma(v, ACT, False)
        d = kernel_slope(v, z, ACT)
    return z, d


def _shear_kernel(
    s, w, x, z, y, y_out, shift, by, times, partial,
    rows, c_w, c_s,
    H: constexpr, W: constexpr,
    C: constexpr, Y: constexpr, NEW: constexpr, S: constexpr,
    MB: constexpr, KB: constexpr, NB: constexpr,
    WHAT: constexpr, ACT: constexpr, KEEP: constexpr,
    STAGES: constexpr, CACHE: constexpr, EMULATE: constexpr,
):  # fmt: skip  # pragma: kernel
    """K s, and then one of

    activate: z = sigma(K s + a), x = sigma'(K s + a);
    slope: z = (K s) x, and the sums of that over the pixels of this program;
    move: y_out = y + c_w (K s), z = c_s times that, both as in `Pixels.move`.

    A program has `MB` pixels; w (.., NB) has a row for each of the 9 C neighbours' channels.
    """
    tile, m, n = tl.program_id(0), tl.arange(0, MB), tl.arange(0, NB)
    before = tile.to(tl.int64) * MB
    exists = m < rows - before
    pixel = (before % (H * W)).to(tl.int32) + m  # from the start of the first image
    row, column = pixel // W % H, pixel % W
    done = tl.zeros((MB, NB), tl.float32)
    for first in tl.range(0, 9 * C, KB, num_stages=STAGES):
        k = first + tl.arange(0, KB)
        down, right = k // C // 3 - 1, k // C % 3 - 1
        r, c = row[:, None] + down[None, :], column[:, None] + right[None, :]
        inside = (r >= 0) & (r < H) & (c >= 0) & (c < W)
        inside &= exists[:, None] & (k < 9 * C)[None, :]
        at = (m[:, None] + (down * W + right)[None, :]) * C + (k % C)[None, :]
        at = tl.multiple_of(tl.max_contiguous(at, (1, 8)), (1, 8))  # C is a multiple of 8
        inside = tl.max_constancy(inside, (1, 8))
        a = tl.load(s + before * C + at, mask=inside, other=0.0, cache_modifier=CACHE)
        b = tl.load(w + k[:, None] * NB + n[None, :], cache_modifier=CACHE)
        done = _dot(a, b, done, EMULATE)

    there = n < C
    inside, at = exists[:, None] & there[None, :], m[:, None]
    if WHAT == "activate":
        v = done + tl.load(shift + n, mask=there, other=0.0).to(tl.float32)[None, :]
        sigma, slope = _sigma_and_slope(v, ACT)
        tl.store(z + before * C + at * C + n[None, :], sigma, mask=inside)
        tl.store(x + before * C + at * C + n[None, :], slope, mask=inside)
    elif WHAT == "slope":
        slope = tl.load(x + before * C + at * C + n[None, :], mask=inside, other=0.0)
        d = tl.where(inside, done * slope.to(tl.float32), 0.0)
        tl.store(z + before * C + at * C + n[None, :], d, mask=inside)
        tl.store(partial + tile * C + n, tl.sum(d, 0), mask=there)
    else:
        image = before // (H * W) + pixel // (H * W)
        f_w = c_w * tl.load(by + image, mask=exists, other=0.0)[:, None]
        f_s = c_s * tl.load(times + image, mask=exists, other=0.0)[:, None]
        old = tl.load(y + before * Y + at * Y + n[None, :], mask=inside, other=0.0)
        new = old.to(tl.float32) + f_w * done
        if KEEP:
            tl.store(y_out + before * NEW + at * NEW + n[None, :], new, mask=inside)
        tl.store(z + before * S + at * S + n[None, :], f_s * new, mask=inside)


def _gradient_kernel(
    s, z, partial, B, height, width,
    C: constexpr, BB: constexpr, TW: constexpr, RB: constexpr, NB: constexpr,
    STAGES: constexpr, EMULATE: constexpr,
):  # fmt: skip  # pragma: kernel
    """The sums over some rows of pixels of z at a pixel times s at its neighbours: (C, 9, C)."""
    MB: constexpr = BB * TW
    first, r0, n0 = tl.program_id(0), tl.program_id(1) * RB, tl.program_id(2) * NB
    d00, d01, d02 = (tl.zeros((RB, NB), tl.float32),) * 3
    d10, d11, d12 = (tl.zeros((RB, NB), tl.float32),) * 3
    d20, d21, d22 = (tl.zeros((RB, NB), tl.float32),) * 3
    columns = tl.cdiv(width, TW)
    tasks = tl.cdiv(B, BB) * columns * height
    for task in tl.range(first, tasks, tl.num_programs(0), num_stages=STAGES):
        h = task % height
        column = task // height % columns * TW
        b = task // height // columns * BB
        z0 = tl.trans(_read_row(z, b, h + 1, column, r0, RB, MB))
        z1 = tl.trans(_read_row(z, b, h, column, r0, RB, MB))
        z2 = tl.trans(_read_row(z, b, h - 1, column, r0, RB, MB))
        a0 = _read_row(s, b, h, column - 1, n0, NB, MB)
        a1 = _read_row(s, b, h, column, n0, NB, MB)
        a2 = _read_row(s, b, h, column + 1, n0, NB, MB)
        d00 = _dot(z0, a0, d00, EMULATE)
        d01 = _dot(z0, a1, d01, EMULATE)
        d02 = _dot(z0, a2, d02, EMULATE)
        d10 = _dot(z1, a0, d10, EMULATE)
        d11 = _dot(z1, a1, d11, EMULATE)
        d12 = _dot(z1, a2, d12, EMULATE)
        d20 = _dot(z2, a0, d20, EMULATE)
        d21 = _dot(z2, a1, d21, EMULATE)
        d22 = _dot(z2, a2, d22, EMULATE)
    r, n = r0 + tl.arange(0, RB)[:, None], n0 + tl.arange(0, NB)[None, :]
    inside = (r < C) & (n < C)
    to = partial + first * (9 * C * C) + r * (9 * C) + n
    tl.store(to, d00, mask=inside)
    tl.store(to + C, d01, mask=inside)
    tl.store(to + 2 * C, d02, mask=inside)
    tl.store(to + 3 * C, d10, mask=inside)
    tl.store(to + 4 * C, d11, mask=inside)
    tl.store(to + 5 * C, d12, mask=inside)
    tl.store(to + 6 * C, d20, mask=inside)
    tl.store(to + 7 * C, d21, mask=inside)
    tl.store(to + 8 * C, d22, mask=inside)


def _pack_kernel(
    K, forward, adjoint, depth, C: constexpr, NB: constexpr, MORE: constexpr
):  # pragma: kernel
    """K and its adjoint as matrices (N, depth, NB) for `_shear_kernel`, with zeros around.

    A program has one tap of one layer; that of a tenth tap has what is left of the depth.
    """
    layer, tap = tl.program_id(0), tl.program_id(1)
    forward += layer.to(tl.int64) * depth * NB
    adjoint += layer.to(tl.int64) * depth * NB
    i, j = tl.arange(0, NB)[:, None], tl.arange(0, NB)[None, :]
    if tap == 9:
        rest = 9 * C + tl.arange(0, MORE)[:, None]
        zeros = tl.zeros((MORE, NB), tl.float32)
        tl.store(forward + rest * NB + j, zeros, mask=rest < depth)
        tl.store(adjoint + rest * NB + j, zeros, mask=rest < depth)
    else:
        inside = (i < C) & (j < C)
        start = K + layer.to(tl.int64) * (9 * C * C) + tap
        # Of K (r, n, 9), rows of the first are n, of the second r.
        found = tl.load(start + (j * C + i) * 9, mask=inside, other=0.0)
        tl.store(forward + (tap * C + i) * NB + j, found, mask=i < C)
        found = tl.load(start + (i * C + j) * 9, mask=inside, other=0.0)
        tl.store(adjoint + ((8 - tap) * C + i) * NB + j, found, mask=i < C)


def _total_kernel(partial, total, count, size, NB: constexpr):  # pragma: kernel
    """The sums over `count` parts of each of some tensors, some entries at a time."""
    n = tl.program_id(0) * NB + tl.arange(0, NB)
    partial += tl.program_id(1).to(tl.int64) * count * size
    total += tl.program_id(1).to(tl.int64) * size
    found = tl.zeros((64, NB), tl.float32)
    for first in range(0, count, 64):
        part = first + tl.arange(0, 64)[:, None]
        inside = (part < count) & (n < size)[None, :]
        found += tl.load(partial + part * size + n[None, :], mask=inside, other=0.0)
    tl.store(total + n, tl.sum(found, 0), mask=n < size)


# Around the kernels

_DEVICE = [f for f in [*globals().values()] if inspect.isfunction(f) and f.__module__ == __name__]


@functools.cache
def _load() -> dict[str, Any]:
    """Import Triton and compile the kernels above, at the first call."""
    compiling.load()  # sigma and its slope are the same
    here = globals()
    compiling.compile_functions(here, _DEVICE)
    descriptors = require("triton.tools.tensor_descriptor", extra="gpu")
    here["TensorDescriptor"] = descriptors.TensorDescriptor
    return here


class ShearTiling(NamedTuple):
    """The sizes of a program's parts."""

    MB: int  # pixels
    KB: int  # channels of neighbours at once
    NB: int  # channels of the result
    CACHE: str  # ".ca": the cache of a processor is used, too
    STAGES: int = 3


class GradientTiling(NamedTuple):
    """The same for the gradient of K."""

    BB: int  # images
    TW: int  # pixels of a row
    RB: int  # rows and columns of K
    NB: int
    programs: int
    STAGES: int = 3


def tiling(C: int) -> ShearTiling:
    """The fastest of those that were measured on an H200, for 48 to 72 channels."""
    NB = max(16, _power(C))
    return ShearTiling(64, 64, NB, ".ca" if NB <= 64 else "")


def _power(number: int) -> int:
    """The next power of two."""
    return 1 << max(number - 1, 0).bit_length()


def sums(B: int, C: int, height: int, width: int, processors: int) -> GradientTiling:
    TW = min(PIXELS, _power(width))
    BB, NB = PIXELS // TW, 32
    tasks = -(-B // BB) * -(-width // TW) * height
    tiles = -(-C // 64) * -(-C // NB)
    programs = max(1, min(tasks, 2 * processors // tiles))  # two at a time on each processor
    return GradientTiling(BB, TW, 64, NB, programs)


class TwoKernels:
    """The steps of a shear by cuDNN, each followed by a pass over its result."""

    def __init__(self, like: Tensor, activation: str) -> None:
        self.pixels = Pixels(like, activation)

    def kernels(self, K: Tensor, dtype: torch.dtype) -> tuple[Any, ...]:
        """K (N, r, n, k, k) of each layer, in the form that the steps take."""
        N, r = K.shape[:2]
        return pixels.images(K.flatten(0, 1), dtype).unflatten(0, (N, r)).unbind(0)

    def apply(self, K: Any, s: Tensor) -> Tensor:
        """K s."""
        return conv.apply(K, s)

    def activate(self, K: Any, s: Tensor, z: Tensor, shift: Tensor) -> Tensor:
        """z = sigma(K s + shift), and what `slope` needs of K s."""
        x = conv.apply(K, s)
        self.pixels.activate(x, z, shift)
        return x

    def move(
        self,
        K: Any,
        z: Tensor,
        y: Tensor,
        s: Tensor,
        *,
        by: Step = ONE,
        times: Step = ONE,
        turn: str = "",
        keep: bool | Tensor = True,
    ) -> Tensor:
        """y + by K^T z, and s = times that: see `Pixels.move`."""
        how: dict[str, Any] = {"by": by, "times": times, "turn": turn, "keep": keep}
        return self.pixels.move(y, conv.adjoint(K, z), s, **how)

    def slope(self, K: Any, g: Tensor, x: Tensor, d: Tensor, shift: Tensor) -> Tensor:
        """d = (K g) sigma', and its sums over some pixels each: (.., C)."""
        return self.pixels.slope(x, conv.apply(K, g), d, shift)

    def gradient(self, K: Any, s: Tensor, z: Tensor) -> Tensor:
        """The gradient of <K s, z> by K, or the parts of it."""
        return conv.gradient(s, z, K)

    def add_up(self, grads: list[Tensor]) -> list[Tensor]:
        """The gradients, from all that `gradient` has returned since the last call."""
        return grads


class OneKernel(TwoKernels):
    """The same without J, with the pass as a part of the convolution.

    So many gradients of K are added up `together`, which takes memory.
    """

    def __init__(self, like: Tensor, activation: str, together: int = 1) -> None:
        super().__init__(like, activation)
        self.together, self.parts = together, list[Tensor]()
        B, self.C, height, width = like.shape
        self.activation = activation
        here: Any = {"dtype": torch.float32, "device": like.device}
        self.ones = torch.ones(B, **here)  # as factors, if there are none
        self.tiling, processors = tiling(self.C), 2
        if like.is_cuda:
            processors = torch.cuda.get_device_properties(like.device).multi_processor_count
        self.sums = sums(2 * B, self.C, height, width, processors)

    def kernels(self, K: Tensor, dtype: torch.dtype) -> tuple[Any, ...]:
        N, C, NB = len(K), self.C, self.tiling.NB
        depth = -(-9 * C // DEPTH) * DEPTH
        packed = torch.empty(2, N, depth, NB, dtype=dtype, device=K.device)
        how = {"C": C, "NB": NB, "MORE": DEPTH}
        _load()["_pack_kernel"][N, 10, 1](K.contiguous(), *packed, depth, **how)
        return tuple(packed.unbind(1))

    def activate(self, K: Any, s: Tensor, z: Tensor, shift: Tensor) -> Tensor:
        x = torch.empty_like(z)
        self._run("activate", K[0], s, x, z, shift=shift, ACT=self.activation)
        return x

    def move(
        self,
        K: Any,
        z: Tensor,
        y: Tensor,
        s: Tensor,
        *,
        by: Step = ONE,
        times: Step = ONE,
        turn: str = "",
        keep: bool | Tensor = True,
    ) -> Tensor:
        assert not turn
        new = pixels.kept(keep, y, s)
        self._run("move", K[1], z, s, s, y=y, new=new, by=by, times=times, KEEP=new is not s)
        return new

    def slope(self, K: Any, g: Tensor, x: Tensor, d: Tensor, shift: Tensor) -> Tensor:
        tiles = -(-self.pixels.rows // self.tiling.MB)
        partial = torch.empty(tiles, self.C, dtype=torch.float32, device=g.device)
        self._run("slope", K[0], g, x, d, partial=partial)
        return partial

    def _run(
        self,
        what: str,
        w: Tensor,
        s: Tensor,
        x: Tensor,
        z: Tensor,
        *,
        y: Tensor | None = None,
        new: Tensor | None = None,
        shift: Tensor | None = None,
        partial: Tensor | None = None,
        by: Step = ONE,
        times: Step = ONE,
        **how: Any,
    ) -> None:
        rows, (_, C, height, width), t = self.pixels.rows, s.shape, self.tiling
        factors = (self.ones if one is None else one for one in (by[1], times[1]))
        given = (y, new, shift, *factors, partial)
        tensors = [s, w, x, z, *(w if one is None else one for one in given)]
        numbers = (rows, float(by[0]), float(times[0]))
        how = {"ACT": "identity", "KEEP": False} | how
        how |= pixels.strides(z if y is None else y, z if new is None else new, z)
        how |= {"WHAT": what, "C": C, "H": height, "W": width, "CACHE": t.CACHE}
        how |= {"MB": t.MB, "KB": t.KB, "NB": t.NB, "STAGES": t.STAGES, "num_warps": 4}
        grid = (-(-rows // t.MB), 1, 1)
        _load()["_shear_kernel"][grid](*tensors, *numbers, **how, EMULATE=_emulated(s))

    def gradient(self, K: Any, s: Tensor, z: Tensor) -> Tensor:
        (B, C, height, width), t = s.shape, self.sums
        if not self.parts:  # many at once, so that they can be added up at once
            shape = (self.together, t.programs, C, 3, 3, C)
            room = torch.empty(shape, dtype=torch.float32, device=s.device)
            self.parts = list(room.unbind(0))
        partial = self.parts.pop(0)
        rows = _described(s, (t.BB, 1, t.TW, t.NB)), _described(z, (t.BB, 1, t.TW, t.RB))
        how = {"C": C, "BB": t.BB, "TW": t.TW, "RB": t.RB, "NB": t.NB, "STAGES": t.STAGES}
        how |= {"EMULATE": _emulated(s), "num_warps": 4}
        grid = (t.programs, -(-C // t.RB), -(-C // t.NB))
        _load()["_gradient_kernel"][grid](*rows, partial, B, height, width, **how)
        return partial

    def add_up(self, grads: list[Tensor]) -> list[Tensor]:
        found, self.parts = [], []
        for first in range(0, len(grads), self.together):
            some = grads[first : first + self.together]
            total = some[0].new_empty(len(some), *some[0].shape[1:])
            size, count = total[0].numel(), self.sums.programs
            grid = (-(-size // 32), len(some), 1)
            _load()["_total_kernel"][grid](some[0], total, count, size, NB=32)
            found += total.permute(0, 1, 4, 2, 3).unbind(0)
        return found


def _described(x: Tensor, block: tuple[int, ...]) -> Any:
    """Channels-last images as the hardware reads blocks of them: 0 outside."""
    B, C, height, width = x.shape
    strides = [height * width * C, width * C, C, 1]
    return _load()["TensorDescriptor"](x, [B, height, width, C], strides, list(block))


def _emulated(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16 and compiling.interpreted()


def joins(like: Tensor, k: int, dtype: torch.dtype) -> bool:
    """Whether `OneKernel` takes these images in this precision, which it does where it is faster.

    It was measured on GPUs of the H100's generation, whose way of reading blocks it uses.
    """
    C = like.shape[1]
    return (
        not (like.is_cuda and torch.cuda.get_device_capability(like.device)[0] != 9)
        and k == 3
        and dtype in (torch.bfloat16, torch.float16)
        and C % 8 == 0  # the channels of a pixel begin at multiples of 16 bytes
        and 16 <= C <= CHANNELS
        and installed("triton.tools.tensor_descriptor")
    )
