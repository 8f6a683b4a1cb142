"""All work between the convolutions of a unit, as Triton kernels over channels-last images.

Such an image is a matrix: a row for each pixel, a column for each channel. A shear moves one image
by another, `target += c K^T sigma(K source + a)`. All of it except the two convolutions, and the
same of its backward pass, is done here in a few passes over memory. Sums over all pixels are taken
in two steps, within each program and then over programs, so that their order is always the same.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from hdnn import activations, engine
from hdnn.engine.kernels import compiling
from hdnn.engine.kernels.device import kernel_sigma, kernel_slope
from hdnn.engine.kernels.protocol import installed
from hdnn.engine.tracing import traced
from hdnn.engine.twice import differentiable

Step: TypeAlias = tuple[float, Tensor | None]  # c, and a factor of it for each image (B,)
ONE: Step = (1.0, None)
PROGRAMS = 1024  # at the most, for sums over pixels
TILE = 2048  # entries at once

tl: Any = None
constexpr: TypeAlias = Any


# Inside of a kernel


def _tile(tile, rows, C: constexpr, CB: constexpr, RB: constexpr):  # pragma: kernel
    """For a tile of pixels: its start, the offsets of its entries, and which of them exist."""
    row, c = tl.arange(0, RB)[:, None], tl.arange(0, CB)[None, :]
    inside = tile * RB + row < rows
    if CB > C:
        inside &= c < C
    return tile.to(tl.int64) * (RB * C), row * C + c, inside


def _places(x, tile, c, CB: constexpr, RB: constexpr, STRIDE: constexpr):  # pragma: kernel
    """The pointers to channels c of a tile of pixels, which are `STRIDE` apart."""
    return x + tile.to(tl.int64) * (RB * STRIDE) + tl.arange(0, RB)[:, None] * STRIDE + c


def _channel(vector, C: constexpr, CB: constexpr):  # pragma: kernel
    """One number a channel, as a row."""
    c = tl.arange(0, CB)
    return tl.load(vector + c, mask=c < C, other=0.0).to(tl.float32)[None, :]


def _read(x, inside):  # pragma: kernel
    return tl.load(x, mask=inside, other=0.0).to(tl.float32)


def _times_slope(g, v, ACT: constexpr):  # pragma: kernel
    return g * kernel_slope(v, kernel_sigma(v, ACT, False), ACT)


def _activate_kernel(
    x,
    z,
    scale,
    shift,
    rows,
    C: constexpr,
    CB: constexpr,
    RB: constexpr,
    ACT: constexpr,
    SCALED: constexpr,
):  # pragma: kernel
    first, at, inside = _tile(tl.program_id(0), rows, C, CB, RB)
    v = _read(x + first + at, inside)
    if SCALED:
        v *= _channel(scale, C, CB)
    v += _channel(shift, C, CB)
    tl.store(z + first + at, kernel_sigma(v, ACT, False), mask=inside)


def _of_image(c, factors, rows, size, RB: constexpr, EACH: constexpr):  # pragma: kernel
    """c times the factor of the image that a pixel belongs to, as a column."""
    row = tl.program_id(0).to(tl.int64) * RB + tl.arange(0, RB)[:, None]
    factor = tl.zeros((RB, 1), tl.float32) + c
    if EACH:
        factor *= tl.load(factors + row // size, mask=row < rows, other=0.0)
    return factor


def _move_kernel(
    y,
    w,
    y_out,
    s_out,
    by,
    times,
    rows,
    size,
    c_w,
    c_s,
    C: constexpr,
    CB: constexpr,
    RB: constexpr,
    Y: constexpr,
    NEW: constexpr,
    S: constexpr,
    ADD: constexpr,
    KEEP: constexpr,
    TURN: constexpr,
    BY: constexpr,
    TIMES: constexpr,
):  # pragma: kernel
    first, at, inside = _tile(tl.program_id(0), rows, C, CB, RB)
    c_w = _of_image(c_w, by, rows, size, RB, BY)
    c_s = _of_image(c_s, times, rows, size, RB, TIMES)
    # J exchanges the halves of the channels, and changes the sign of one.
    tile, c = tl.program_id(0), tl.arange(0, CB)[None, :]
    other = (c + C // 2) % C
    sign = tl.where(c < C // 2, -1.0, 1.0)
    new = _read(_places(y, tile, c, CB, RB, Y), inside)
    if ADD:
        if TURN == "w":
            new += c_w * sign * _read(_places(w, tile, other, CB, RB, C), inside)
        else:
            new += c_w * _read(w + first + at, inside)
    if KEEP:
        tl.store(_places(y_out, tile, c, CB, RB, NEW), new, mask=inside)
    s = new
    if TURN == "s":  # J^T, so with the other sign
        s = _read(_places(y, tile, other, CB, RB, Y), inside)
        if ADD:
            s += c_w * _read(_places(w, tile, other, CB, RB, C), inside)
        s = -sign * s
    tl.store(_places(s_out, tile, c, CB, RB, S), c_s * s, mask=inside)


def _put_sum(total, into, C: constexpr, CB: constexpr):  # pragma: kernel
    c = tl.arange(0, CB)
    tl.store(into + c, tl.sum(total, 0), mask=c < C)


def _slope_kernel(
    x, g, d, shift, partial, rows, C: constexpr, CB: constexpr, RB: constexpr, ACT: constexpr
):  # pragma: kernel
    """d = g sigma'(x + a), and its sums over the pixels of each program."""
    plus, total = _channel(shift, C, CB), tl.zeros((RB, CB), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, RB), tl.num_programs(0)):
        first, at, inside = _tile(_scalar(tile), rows, C, CB, RB)
        v = _read(x + first + at, inside) + plus
        u = _times_slope(_read(g + first + at, inside), v, ACT)
        tl.store(d + first + at, u, mask=inside)
        total += u
    _put_sum(total, partial + tl.program_id(0) * C, C, CB)


def _scalar(number):  # pragma: kernel
    """A number as a Triton scalar, also in the interpreter, which uses Python's numbers."""
    return tl.program_id(0) * 0 + number


def _moments_kernel(x, partial, rows, C: constexpr, CB: constexpr, RB: constexpr):  # pragma: kernel
    """Sums of x and of its squares, with the first pixel subtracted: that saves digits."""
    start = _channel(x, C, CB)
    total, square = tl.zeros((RB, CB), tl.float32), tl.zeros((RB, CB), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, RB), tl.num_programs(0)):
        first, at, inside = _tile(_scalar(tile), rows, C, CB, RB)
        v = tl.where(inside, _read(x + first + at, inside) - start, 0.0)
        total += v
        square += v * v
    at = partial + tl.program_id(0) * 2 * C
    _put_sum(total, at, C, CB)
    _put_sum(square, at + C, C, CB)


def _halve_kernel(
    y, out, rows, width, C: constexpr, CB: constexpr, RB: constexpr
):  # pragma: kernel
    """Means over 2 x 2 pixels; `rows` and `width` are those of the smaller image."""
    first, at, inside = _tile(tl.program_id(0), rows, C, CB, RB)
    row = tl.program_id(0).to(tl.int64) * RB + tl.arange(0, RB)[:, None]
    # The lines of all images follow each other: two of them make one line of `out`.
    start = y + (row // width * 4 * width + row % width * 2) * C + tl.arange(0, CB)[None, :]
    total = _read(start, inside) + _read(start + C, inside)
    start += 2 * width * C
    total += _read(start, inside)
    total += _read(start + C, inside)
    tl.store(out + first + at, 0.25 * total, mask=inside)


def _double_kernel(
    g, out, rows, width, C: constexpr, CB: constexpr, RB: constexpr
):  # pragma: kernel
    """The adjoint: each pixel gives a quarter to 2 x 2; `rows`, `width` are of the larger image."""
    first, at, inside = _tile(tl.program_id(0), rows, C, CB, RB)
    row = tl.program_id(0).to(tl.int64) * RB + tl.arange(0, RB)[:, None]
    source = row // (2 * width) * (width // 2) + row % width // 2
    quarter = _read(g + source * C + tl.arange(0, CB)[None, :], inside)
    tl.store(out + first + at, 0.25 * quarter, mask=inside)


def _pair(partial, column, C: constexpr, P: constexpr):  # pragma: kernel
    """Both sums of these columns over all programs."""
    at = partial + tl.arange(0, P)[:, None] * (2 * C) + column[None, :]
    exists = column[None, :] < C
    a = tl.sum(tl.load(at, mask=exists, other=0.0), 0)
    return a, tl.sum(tl.load(at + C, mask=exists, other=0.0), 0)


def _normalise_kernel(
    x,
    partial,
    gamma,
    beta,
    normal,
    running_mean,
    running_var,
    rows,
    eps,
    momentum,
    C: constexpr,
    P: constexpr,
    CB: constexpr,
    TRACK: constexpr,
):  # pragma: kernel
    """`normal` (4, C): mean and 1 / deviation of each channel; scale and shift to normalise."""
    column = tl.program_id(0) * CB + tl.arange(0, CB)
    exists = column < C
    total, square = _pair(partial, column, C, P)
    total, square = total / rows, square / rows
    var = tl.maximum(square - total * total, 0.0)
    r = tl.rsqrt(var + eps)
    m = total + _read(x + column, exists)
    if TRACK:
        old = _read(running_mean + column, exists)
        tl.store(running_mean + column, old + momentum * (m - old), mask=exists)
        old = _read(running_var + column, exists)
        unbiased = var * (rows / tl.maximum(rows - 1, 1))
        tl.store(running_var + column, old + momentum * (unbiased - old), mask=exists)
    by = r * _read(gamma + column, exists)
    tl.store(normal + column, m, mask=exists)
    tl.store(normal + C + column, r, mask=exists)
    tl.store(normal + 2 * C + column, by, mask=exists)
    tl.store(normal + 3 * C + column, _read(beta + column, exists) - m * by, mask=exists)


def _norm_sums_kernel(
    x, g, normal, partial, rows, C: constexpr, CB: constexpr, RB: constexpr, ACT: constexpr
):  # pragma: kernel
    """Sums of u = g sigma'(v), and of u times the normalised x: the gradients of beta and gamma."""
    m, r = _channel(normal, C, CB), _channel(normal + C, C, CB)
    by, plus = _channel(normal + 2 * C, C, CB), _channel(normal + 3 * C, C, CB)
    total, product = tl.zeros((RB, CB), tl.float32), tl.zeros((RB, CB), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, RB), tl.num_programs(0)):
        first, at, inside = _tile(_scalar(tile), rows, C, CB, RB)
        one = _read(x + first + at, inside)
        u = _times_slope(_read(g + first + at, inside), one * by + plus, ACT)
        total += u
        product += u * (one - m) * r
    at = partial + tl.program_id(0) * 2 * C
    _put_sum(total, at, C, CB)
    _put_sum(product, at + C, C, CB)


def _add_up_kernel(partial, sums, C: constexpr, P: constexpr, CB: constexpr):  # pragma: kernel
    column = tl.program_id(0) * CB + tl.arange(0, CB)
    a, b = _pair(partial, column, C, P)
    tl.store(sums + column, a, mask=column < C)
    tl.store(sums + C + column, b, mask=column < C)


def _norm_slope_kernel(
    x, g, d, normal, sums, rows, C: constexpr, CB: constexpr, RB: constexpr, ACT: constexpr
):  # pragma: kernel
    """From g to the gradient d of x, through sigma and through the normalisation."""
    first, at, inside = _tile(tl.program_id(0), rows, C, CB, RB)
    one, by = _read(x + first + at, inside), _channel(normal + 2 * C, C, CB)
    v = one * by + _channel(normal + 3 * C, C, CB)
    u = _times_slope(_read(g + first + at, inside), v, ACT)
    x_hat = (one - _channel(normal, C, CB)) * _channel(normal + C, C, CB)
    u -= (_channel(sums, C, CB) + x_hat * _channel(sums + C, C, CB)) / rows
    tl.store(d + first + at, by * u, mask=inside)


# Around the kernels

_DEVICE = [f for f in [*globals().values()] if inspect.isfunction(f) and f.__module__ == __name__]


@functools.cache
def _load() -> dict[str, Any]:
    """Import Triton and compile the kernels above, at the first call."""
    compiling.load()  # sigma and its slope are the same
    here = globals()
    compiling.compile_functions(here, _DEVICE)
    return here


def _tiles(rows: int, C: int, entries: int = TILE) -> tuple[int, int, int]:
    """How many tiles there are, and their columns and rows."""
    CB = max(16, 1 << (C - 1).bit_length())
    RB = max(1, entries // CB)
    return -(-rows // RB), CB, RB


class Pixels:
    """The kernels for images of one size (B, C, height, width) and one activation."""

    def __init__(self, like: Tensor, activation: str = "identity") -> None:
        self.C, self.activation, self.size = like.shape[1], activation, like.shape[2:].numel()
        self.rows = like.numel() // max(self.C, 1)
        # Several tiles each, if there are enough for all programs; a power of 2.
        tiles = _tiles(self.rows, self.C)[0]
        self.programs = min(PROGRAMS, max(16, 1 << (tiles // 4).bit_length()))

    def run(self, name: str, *tensors: Tensor, c: tuple[float, ...] = (), **how: Any) -> None:
        """A kernel over all pixels; the numbers c follow their count."""
        tiles, CB, RB = _tiles(self.rows, self.C, how.pop("entries", TILE))
        grid, sizes = (how.pop("programs", tiles), 1, 1), {"C": self.C, "CB": CB, "RB": RB}
        _load()[name][grid](*tensors, self.rows, *c, **sizes, **how, num_warps=4)

    def _add_up(self, name: str, *arguments: Any, **constants: Any) -> None:
        """Over the programs, some channels at a time."""
        sizes = {"C": self.C, "P": self.programs, "CB": 8}
        _load()[name][-(-self.C // 8), 1, 1](*arguments, **sizes, **constants, num_warps=4)

    def activate(self, x: Tensor, z: Tensor, shift: Tensor, scale: Tensor | None = None) -> None:
        """z = sigma(x + shift), or sigma(scale x + shift)."""
        tensors = (x, z, shift if scale is None else scale, shift)
        self.run("_activate_kernel", *tensors, SCALED=scale is not None, ACT=self.activation)

    def move(
        self,
        y: Tensor,
        w: Tensor | None,
        s: Tensor,
        *,
        by: Step = ONE,
        times: Step = ONE,
        turn: str = "",
        keep: bool | Tensor = True,
    ) -> Tensor:
        """y + by w, and s = times that; `turn="w"` takes J w for w, "s" applies J^T to s.

        The sum is also kept, in float32 or in the images given, unless `keep` is false or w None.
        """
        new = kept(False if w is None else keep, y, s)
        given = (w, new, s, by[1], times[1])
        tensors = [y, *(y if one is None else one for one in given)]
        how = {"ADD": w is not None, "KEEP": new is not s, "TURN": turn, **strides(y, new, s)}
        how |= {"BY": by[1] is not None, "TIMES": times[1] is not None}
        self.run("_move_kernel", *tensors, c=(self.size, float(by[0]), float(times[0])), **how)
        return new

    def slope(self, x: Tensor, g: Tensor, d: Tensor, shift: Tensor) -> Tensor:
        """d = g sigma'(x + shift), and its sums over the pixels of each program: (programs, C)."""
        partial = self._new(x, self.programs)
        how = {"programs": self.programs, "ACT": self.activation}
        self.run("_slope_kernel", x, g, d, shift, partial, **how)
        return partial

    def normalise(
        self,
        x: Tensor,
        gamma: Tensor,
        beta: Tensor,
        eps: float,
        running: tuple[Tensor, Tensor] | None = None,
        momentum: float = 0.0,
    ) -> Tensor:
        """Mean, 1 / deviation, scale and shift of each channel: (4, C).

        `running` mean and variance are moved towards those of these images.
        """
        normal, partial = self._new(x, 4), self._new(x, self.programs, 2)
        self.run("_moments_kernel", x, partial, programs=self.programs)
        given = (x, partial, gamma, beta, normal, *(running or (gamma, beta)))
        numbers = (self.rows, float(eps), float(momentum))
        self._add_up("_normalise_kernel", *given, *numbers, TRACK=running is not None)
        return normal

    def norm_slope(self, x: Tensor, g: Tensor, d: Tensor, normal: Tensor) -> Tensor:
        """d, the gradient of x from that of z; the gradients of beta and of gamma: (2, C)."""
        sums, partial, act = self._new(x, 2), self._new(x, self.programs, 2), self.activation
        how = {"programs": self.programs, "entries": 2 * TILE, "ACT": act}
        self.run("_norm_sums_kernel", x, g, normal, partial, **how)
        self._add_up("_add_up_kernel", partial, sums)
        self.run("_norm_slope_kernel", x, g, d, normal, sums, ACT=act)
        return sums

    def _new(self, x: Tensor, *count: int) -> Tensor:
        return torch.empty(*count, self.C, dtype=torch.float32, device=x.device)


def kept(keep: bool | Tensor, y: Tensor, s: Tensor) -> Tensor:
    """Where a sum is kept: in the images given, in new ones in float32, or only in s."""
    if isinstance(keep, Tensor):
        return keep
    return empty_images(y, y.shape, torch.float32) if keep else s


def strides(y: Tensor, new: Tensor, s: Tensor) -> dict[str, int]:
    """How far apart the pixels of each are, which may be the halves of larger images."""
    return {"Y": apart(y), "NEW": apart(new), "S": apart(s)}


def apart(x: Tensor) -> int:
    """How far apart the pixels of channels-last images are; 0 of images in another layout."""
    _, C, height, width = x.shape
    counts = {3: 1, 2: width, 0: width * height}
    found = {x.stride(d) / count for d, count in counts.items() if x.shape[d] > 1} or {float(C)}
    one = found.pop()
    return int(one) if not found and one.is_integer() and (C == 1 or x.stride(1) == 1) else 0


def fuse(x: Tensor) -> bool:
    """Whether the kernels can run for these images now: on a GPU, and not traced by PyTorch."""
    return (
        x.is_cuda
        and not torch.compiler.is_compiling()  # which could not look at what follows
        and x.ndim == 4
        and x.numel() > 0
        and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and engine.current().engine != "reference"
        and installed("triton")
        and not traced(x)
    )


def images(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The images as the kernels take them."""
    return x.to(dtype or x.dtype).contiguous(memory_format=torch.channels_last)


def empty_images(like: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """Memory for images."""
    layout: Any = {"memory_format": torch.channels_last, "device": like.device}
    return torch.empty(*shape, dtype=dtype or like.dtype, **layout)


class Normalise(torch.autograd.Function):
    """sigma of the images (B, C, ..), normalised by their own statistics.

    `running` mean and variance are moved towards these. A `bias` of the images need not be added to
    them, as normalising takes it off again: it counts for the running mean only.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gamma: Tensor,
        beta: Tensor,
        eps: float,
        activation: str,
        running: tuple[Tensor, Tensor] | None = None,
        momentum: float = 0.0,
        bias: Tensor | None = None,
    ) -> Tensor:
        inputs, x = x, images(x)
        pixels, z = Pixels(x, activation), torch.empty_like(x)
        normal = pixels.normalise(x, gamma, beta, eps, running, momentum)
        pixels.activate(x, z, normal[3], normal[2])
        if running is not None and bias is not None:
            running[0].add_(bias, alpha=momentum)
        ctx.pixels, ctx.plain = pixels, functools.partial(_normalised, activation, eps)
        ctx.save_for_backward(inputs, gamma, beta, normal, bias)
        return z

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, gamma, beta, normal, bias = ctx.saved_tensors
        rest = [None] * 4 + [None if bias is None else torch.zeros_like(bias)]
        if torch.is_grad_enabled():  # for gradients of these gradients
            return *differentiable(ctx.plain, (x, gamma, beta), g), *rest
        x = images(x)
        d = torch.empty_like(x)
        d_beta, d_gamma = ctx.pixels.norm_slope(x, images(g, x.dtype), d, normal)
        return d, d_gamma.to(gamma.dtype), d_beta.to(beta.dtype), *rest


def _normalised(activation: str, eps: float, x: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    return activations.get(activation)(F.batch_norm(x, None, None, gamma, beta, True, 0.0, eps))


class Halve(torch.autograd.Function):
    """Means over 2 x 2 pixels, of images with even sides."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        y = images(y)
        B, C, height, width = ctx.shape = y.shape
        out = empty_images(y, (B, C, height // 2, width // 2))
        Pixels(out).run("_halve_kernel", y, out, c=(width // 2,))
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if torch.is_grad_enabled():
            return F.interpolate(0.25 * g, scale_factor=2, mode="nearest")
        out = empty_images(g, ctx.shape)
        Pixels(out).run("_double_kernel", images(g), out, c=(out.shape[3],))
        return out
