"""All work between the convolutions of a unit, as Triton kernels over channels-last images.

Such an image is a matrix: a row for each pixel, a column for each channel. A shear moves one image
by another, `target += c K^T sigma(K source + a)`. All of it except the two convolutions, and the
same of its backward pass, is done here in a few passes over memory. Sums over all pixels are taken
in two steps, within each program and then over programs, so that their order is always the same.
"""

from __future__ import annotations

import functools
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from hdnn import activations, engine
from hdnn.engine.kernels import triton as triton_stacks
from hdnn.engine.kernels.protocol import installed
from hdnn.engine.tracing import traced
from hdnn.errors import require

Step: TypeAlias = tuple[float, Tensor | None]  # c, and a factor of it for each image (B,)
ONE: Step = (1.0, None)
PROGRAMS = 1024  # at the most, for sums over pixels
TILE = 2048  # entries at once

tl: Any = None
constexpr: TypeAlias = Any
kernel_sigma: Any = None
kernel_slope: Any = None


# Inside of a kernel


def _tile(tile, rows, C: constexpr, CB: constexpr, RB: constexpr):  # pragma: kernel
    """For a tile of pixels: its start, the offsets of its entries, and which of them exist."""
    row, c = tl.arange(0, RB)[:, None], tl.arange(0, CB)[None, :]
    inside = tile * RB + row < rows
    if CB > C:
        inside &= c < C
    return tile.to(tl.int64) * (RB * C), row * C + c, inside


def _channel(vector, C: constexpr, CB: constexpr):  # pragma: kernel
    """One number a channel, as a row."""
    c = tl.arange(0, CB)
    return tl.load(vector + c, mask=c < C, other=0.0).to(tl.float32)[None, :]


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
    v = tl.load(x + first + at, mask=inside, other=0.0).to(tl.float32)
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
    ADD: constexpr,
    KEEP: constexpr,
    TURN_W: constexpr,
    TURN_S: constexpr,
    BY: constexpr,
    TIMES: constexpr,
):  # pragma: kernel
    first, at, inside = _tile(tl.program_id(0), rows, C, CB, RB)
    c_w = _of_image(c_w, by, rows, size, RB, BY)
    c_s = _of_image(c_s, times, rows, size, RB, TIMES)
    # J exchanges the halves of the channels, and changes the sign of one.
    row, c = tl.arange(0, RB)[:, None], tl.arange(0, CB)[None, :]
    other = row * C + (c + C // 2) % C
    sign = tl.where(c < C // 2, -1.0, 1.0)
    new = tl.load(y + first + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        if TURN_W:
            new += c_w * sign * tl.load(w + first + other, mask=inside, other=0.0).to(tl.float32)
        else:
            new += c_w * tl.load(w + first + at, mask=inside, other=0.0).to(tl.float32)
    if KEEP:
        tl.store(y_out + first + at, new, mask=inside)
    s = new
    if TURN_S:  # J^T, so with the other sign
        s = tl.load(y + first + other, mask=inside, other=0.0).to(tl.float32)
        if ADD:
            s += c_w * tl.load(w + first + other, mask=inside, other=0.0).to(tl.float32)
        s = -sign * s
    tl.store(s_out + first + at, c_s * s, mask=inside)


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
        v = tl.load(x + first + at, mask=inside, other=0.0).to(tl.float32) + plus
        u = tl.load(g + first + at, mask=inside, other=0.0).to(tl.float32)
        u *= kernel_slope(v, kernel_sigma(v, ACT, False), ACT)
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
        v = tl.load(x + first + at, mask=inside, other=0.0).to(tl.float32)
        v = tl.where(inside, v - start, 0.0)
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
    total = tl.load(start, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(start + C, mask=inside, other=0.0).to(tl.float32)
    start += 2 * width * C
    total += tl.load(start, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(start + C, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + first + at, 0.25 * total, mask=inside)


def _double_kernel(
    g, out, rows, width, C: constexpr, CB: constexpr, RB: constexpr
):  # pragma: kernel
    """The adjoint: each pixel gives a quarter to 2 x 2; `rows`, `width` are of the larger image."""
    first, at, inside = _tile(tl.program_id(0), rows, C, CB, RB)
    row = tl.program_id(0).to(tl.int64) * RB + tl.arange(0, RB)[:, None]
    source = row // (2 * width) * (width // 2) + row % width // 2
    quarter = tl.load(g + source * C + tl.arange(0, CB)[None, :], mask=inside, other=0.0)
    tl.store(out + first + at, 0.25 * quarter.to(tl.float32), mask=inside)


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
    mean,
    rstd,
    scale,
    shift,
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
    """Mean and 1 / deviation of each channel; scale and shift to normalise with."""
    column = tl.program_id(0) * CB + tl.arange(0, CB)
    exists = column < C
    total, square = _pair(partial, column, C, P)
    total, square = total / rows, square / rows
    var = tl.maximum(square - total * total, 0.0)
    r = tl.rsqrt(var + eps)
    m = total + tl.load(x + column, mask=exists, other=0.0).to(tl.float32)
    if TRACK:
        old = tl.load(running_mean + column, mask=exists, other=0.0)
        tl.store(running_mean + column, old + momentum * (m - old), mask=exists)
        old = tl.load(running_var + column, mask=exists, other=0.0)
        unbiased = var * (rows / tl.maximum(rows - 1, 1))
        tl.store(running_var + column, old + momentum * (unbiased - old), mask=exists)
    by = r * tl.load(gamma + column, mask=exists, other=0.0)
    tl.store(mean + column, m, mask=exists)
    tl.store(rstd + column, r, mask=exists)
    tl.store(scale + column, by, mask=exists)
    tl.store(shift + column, tl.load(beta + column, mask=exists, other=0.0) - m * by, mask=exists)


def _norm_sums_kernel(
    x,
    g,
    scale,
    shift,
    mean,
    rstd,
    partial,
    rows,
    C: constexpr,
    CB: constexpr,
    RB: constexpr,
    ACT: constexpr,
):  # pragma: kernel
    """Sums of u = g sigma'(v), and of u times the normalised x: the gradients of beta and gamma."""
    by, plus = _channel(scale, C, CB), _channel(shift, C, CB)
    m, r = _channel(mean, C, CB), _channel(rstd, C, CB)
    total, product = tl.zeros((RB, CB), tl.float32), tl.zeros((RB, CB), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, RB), tl.num_programs(0)):
        first, at, inside = _tile(_scalar(tile), rows, C, CB, RB)
        one = tl.load(x + first + at, mask=inside, other=0.0).to(tl.float32)
        v = one * by + plus
        u = tl.load(g + first + at, mask=inside, other=0.0).to(tl.float32)
        u *= kernel_slope(v, kernel_sigma(v, ACT, False), ACT)
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
    x,
    g,
    d,
    scale,
    shift,
    mean,
    rstd,
    sums,
    rows,
    C: constexpr,
    CB: constexpr,
    RB: constexpr,
    ACT: constexpr,
):  # pragma: kernel
    """From g to the gradient d of x, through sigma and through the normalisation."""
    first, at, inside = _tile(tl.program_id(0), rows, C, CB, RB)
    one = tl.load(x + first + at, mask=inside, other=0.0).to(tl.float32)
    by = _channel(scale, C, CB)
    v = one * by + _channel(shift, C, CB)
    u = tl.load(g + first + at, mask=inside, other=0.0).to(tl.float32)
    u *= kernel_slope(v, kernel_sigma(v, ACT, False), ACT)
    normal = (one - _channel(mean, C, CB)) * _channel(rstd, C, CB)
    u -= (_channel(sums, C, CB) + normal * _channel(sums + C, C, CB)) / rows
    tl.store(d + first + at, by * u, mask=inside)


# Around the kernels

_HELPERS = ("_tile", "_channel", "_scalar", "_put_sum", "_pair", "_of_image")


@functools.cache
def _load() -> dict[str, Any]:
    """Import Triton and compile the kernels above, at the first call."""
    triton_stacks.load()  # sigma and its slope are the same
    triton, here = require("triton", extra="gpu"), globals()
    for name in ("tl", "constexpr", "kernel_sigma", "kernel_slope"):
        here[name] = getattr(triton_stacks, name)
    for name in _HELPERS:
        here[name] = triton.jit(here[name])
    kernels = [name for name in here if name.endswith("_kernel")]
    return {
        name: triton.jit(
            here[name],
            do_not_specialize=["rows"] if "rows" in here[name].__code__.co_varnames else None,
        )
        for name in kernels
    }


def _tiles(rows: int, C: int) -> tuple[int, int, int]:
    """How many tiles there are, and their columns and rows."""
    CB = max(16, 1 << (C - 1).bit_length())
    RB = max(1, TILE // CB)
    return -(-rows // RB), CB, RB


def _over_pixels(name: str, rows: int, C: int, *arguments: Any, **constants: Any) -> None:
    tiles, CB, RB = _tiles(rows, C)
    programs = constants.pop("programs", tiles)
    sizes = {"C": C, "CB": CB, "RB": RB}
    _load()[name][programs, 1, 1](*arguments, **sizes, **constants, num_warps=4)


class Pixels:
    """The kernels for images of one size (B, C, height, width) and one activation."""

    def __init__(self, like: Tensor, activation: str) -> None:
        self.C, self.activation, self.size = like.shape[1], activation, like.shape[2:].numel()
        self.rows = like.numel() // max(self.C, 1)
        # Several tiles each, if there are enough for all programs; a power of 2.
        tiles = _tiles(self.rows, self.C)[0]
        self.programs = min(PROGRAMS, max(16, 1 << (tiles // 4).bit_length()))

    def _sum(self, name: str, *tensors: Tensor, **how: Any) -> None:
        self._run(name, *tensors, programs=self.programs, **how)

    def _add_up(self, name: str, *arguments: Any, **constants: Any) -> None:
        """Over the programs, some channels at a time."""
        sizes = {"C": self.C, "P": self.programs, "CB": 8}
        _load()[name][-(-self.C // 8), 1, 1](*arguments, **sizes, **constants, num_warps=4)

    def _run(self, name: str, *tensors: Tensor, c: tuple[float, ...] = (), **how: Any) -> None:
        _over_pixels(name, self.rows, self.C, *tensors, self.rows, *c, **how)

    def activate(self, x: Tensor, z: Tensor, shift: Tensor, scale: Tensor | None = None) -> None:
        """z = sigma(x + shift), or sigma(scale x + shift)."""
        tensors = (x, z, shift if scale is None else scale, shift)
        self._run("_activate_kernel", *tensors, SCALED=scale is not None, ACT=self.activation)

    def move(
        self,
        y: Tensor,
        w: Tensor | None,
        s: Tensor,
        *,
        by: Step = ONE,
        times: Step = ONE,
        turn: str = "",
        keep: bool = True,
    ) -> Tensor:
        """y + by w, and s = times that; `turn="w"` takes J w for w, "s" applies J^T to s.

        The sum is also kept in float32, unless `keep` is false or w is None.
        """
        keep = keep and w is not None
        new = torch.empty_like(y, dtype=torch.float32) if keep else s
        given = (w, new, s, by[1], times[1])
        tensors = [y, *(y if one is None else one for one in given)]
        how = {"ADD": w is not None, "KEEP": keep, "TURN_W": turn == "w", "TURN_S": turn == "s"}
        how |= {"BY": by[1] is not None, "TIMES": times[1] is not None}
        self._run("_move_kernel", *tensors, c=(self.size, float(by[0]), float(times[0])), **how)
        return new

    def slope(self, x: Tensor, g: Tensor, d: Tensor, shift: Tensor, partial: Tensor) -> None:
        """d = g sigma'(x + shift); `partial` (programs, C) adds up to its sum over the pixels."""
        self._sum("_slope_kernel", x, g, d, shift, partial, ACT=self.activation)

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
        partial, found = self._partial(x), self._few(x, 4)
        self._sum("_moments_kernel", x, partial)
        given = (x, partial, gamma, beta, *found, *(running or (gamma, beta)))
        numbers = (self.rows, float(eps), float(momentum))
        track = {"TRACK": running is not None}
        self._add_up("_normalise_kernel", *given, *numbers, **track)
        return found

    def norm_slope(self, x: Tensor, g: Tensor, d: Tensor, normal: Tensor) -> Tensor:
        """d, the gradient of x from that of z; the gradients of beta and of gamma: (2, C)."""
        partial, sums = self._partial(x), self._few(x, 2)
        mean, rstd, scale, shift = normal
        both = (scale, shift, mean, rstd)
        self._sum("_norm_sums_kernel", x, g, *both, partial, ACT=self.activation)
        self._add_up("_add_up_kernel", partial, sums)
        self._run("_norm_slope_kernel", x, g, d, *both, sums, ACT=self.activation)
        return sums

    def _partial(self, x: Tensor) -> Tensor:
        return torch.empty(self.programs, 2, self.C, dtype=torch.float32, device=x.device)

    def _few(self, x: Tensor, count: int) -> Tensor:
        return torch.empty(count, self.C, dtype=torch.float32, device=x.device)


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


class Normalise(torch.autograd.Function):
    """sigma of the images (B, C, ..), normalised by their own statistics.

    `running` mean and variance are moved towards these.
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
    ) -> Tensor:
        inputs, x = x, images(x)
        pixels, z = Pixels(x, activation), torch.empty_like(x)
        normal = pixels.normalise(x, gamma, beta, eps, running, momentum)
        pixels.activate(x, z, normal[3], normal[2])
        ctx.pixels, ctx.eps = pixels, eps
        ctx.save_for_backward(inputs, gamma, beta, normal)
        return z

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, gamma, beta, normal = ctx.saved_tensors
        if torch.is_grad_enabled():  # for gradients of these gradients
            asked = [t for t in (x, gamma, beta) if t.requires_grad]
            v = F.batch_norm(x, None, None, gamma, beta, True, 0.0, ctx.eps)
            z = activations.get(ctx.pixels.activation)(v)
            found = iter(torch.autograd.grad(z, asked, g, create_graph=True))
            rest = [next(found) if t.requires_grad else None for t in (x, gamma, beta)]
            return *rest, *[None] * 4
        x = images(x)
        d = torch.empty_like(x)
        d_beta, d_gamma = ctx.pixels.norm_slope(x, images(g, x.dtype), d, normal)
        return d, d_gamma.to(gamma.dtype), d_beta.to(beta.dtype), *[None] * 4


class Halve(torch.autograd.Function):
    """Means over 2 x 2 pixels, of images with even sides."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        y = images(y)
        B, C, height, width = ctx.shape = y.shape
        like: Any = {"dtype": y.dtype, "device": y.device, "memory_format": torch.channels_last}
        out = torch.empty(B, C, height // 2, width // 2, **like)
        rows = out.numel() // C
        _over_pixels("_halve_kernel", rows, C, y, out, rows, width // 2)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if torch.is_grad_enabled():
            return F.interpolate(0.25 * g, scale_factor=2, mode="nearest")
        g = images(g)
        like: Any = {"dtype": g.dtype, "device": g.device, "memory_format": torch.channels_last}
        out = torch.empty(ctx.shape, **like)
        rows = out.numel() // out.shape[1]
        _over_pixels("_double_kernel", rows, out.shape[1], g, out, rows, out.shape[3])
        return out
