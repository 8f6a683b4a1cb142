"""A Hamiltonian unit on a GPU: by `kernels/convolutions.py` and `kernels/pixels.py`.

Between shears the state is kept both in float32 and in the precision of the convolutions. These use
K alone; J and h are applied between them. So a shear and its gradients are

    w = K^T sigma(x + a),  x = K s,  target += c J w
    g~ = c J^T g,  d = (K g~) sigma'(x + a),  g += K^T d,  dK = sum of d s^T + sigma(x + a) g~^T

so one gradient of K, over (s, g~) and (d, sigma) as twice as many images, does for both. Each image
may have its own factor of c. Where it is faster, a convolution and what follows are one kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hdnn.engine.drift import check_reversal, drift_of
from hdnn.engine.kernels import convolutions
from hdnn.engine.kernels.factors import float32_setting
from hdnn.engine.kernels.pixels import Step, apart, empty_images, images
from hdnn.engine.twice import differentiable

TOGETHER = 16  # gradients of K, at the most
IMAGES = 5  # of the size of a state, which the backward pass of a layer needs


def segment(N: int) -> int:
    """Layers between two of about sqrt(N) checkpoints.

    It is half of sqrt(N), since a layer inside a segment takes several times the memory of a state.
    """
    return max(1, math.isqrt(N) // 2)


class Shear(NamedTuple):
    """One of the shears of a unit: which half it reads and which it moves, by how much."""

    source: int
    target: int
    kind: int  # the index of its weights
    layer: int
    c: float


@dataclass(frozen=True)
class Schedule:
    """How a unit runs."""

    shears: tuple[Shear, ...]
    activation: str
    turn: bool  # whether J is applied, which for two halves is only a sign of c
    normed: bool
    eps: float
    work: torch.dtype
    backprop: str  # "stored", "checkpoint" or "reversible"
    check: bool  # whether reversals are checked
    reference: Callable[..., Tensor]  # y_N by plain PyTorch, from factors, y_0 and weights

    @property
    def count(self) -> int:
        """The shears in a layer, and the halves that take turns: 2, or 1 if all of y moves."""
        return 1 + self.shears[-1].target

    def halves(self, y: Tensor) -> list[Tensor]:
        """What takes turns in moving: p and q, or all of y."""
        return [half if apart(half) else images(half) for half in y.chunk(self.count, 1)]


class KindWeights(NamedTuple):
    """The weights of all shears of one kind."""

    K: Tensor  # (N, r, n, k, k)
    a: Tensor  # (N, r)
    gamma: Tensor | None = None
    beta: Tensor | None = None


class Kept(NamedTuple):
    """What the backward pass of a shear needs; that pass fills the rest of `s` and `z`."""

    s: Tensor  # (2B, ...): s, then g~
    z: Tensor  # (2B, ...): d, then sigma
    x: Tensor


def run(
    y: Tensor, schedule: Schedule, weights: Sequence[Tensor], factors: Tensor | None = None
) -> tuple[Tensor, ...]:
    """y_N from y_0; with normalisation also the mean and 1 / deviation that each shear used.

    `factors` (N, B) of c are for each layer and each image.
    """
    with torch.cuda.device(y.device) if y.is_cuda else nullcontext():
        if torch.is_grad_enabled() and any(t.requires_grad for t in (y, *weights)):
            return _UnitStack.apply(y, schedule, factors, *weights)
        with _as_precise_as_set():
            unit = _Unit(y, schedule, weights, factors)
            out = unit.whole(y.dtype)
            unit.ahead(schedule.halves(y), end=out)
            return out, *unit.statistics()


@contextmanager
def _as_precise_as_set() -> Iterator[None]:
    """Use tf32 for float32 convolutions only if it was asked for, as for matrix products.

    `torch.set_float32_matmul_precision` decides, as for all stacks here; cuDNN would use it by
    default, and gradients would lose half of their digits.
    """
    cudnn = torch.backends.cudnn
    before = cudnn.allow_tf32
    cudnn.allow_tf32 = before and float32_setting() != "highest"
    try:
        yield
    finally:
        cudnn.allow_tf32 = before


class _UnitStack(torch.autograd.Function):
    """A unit as one step of autograd.

    Besides the inputs, it saves what the backward pass starts from, but never the output, which may
    be changed in place.
    """

    @staticmethod
    @_as_precise_as_set()
    def forward(
        ctx: Any, y: Tensor, schedule: Schedule, factors: Tensor | None, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        unit, kept = _Unit(y, schedule, weights, factors), []
        halves, out = schedule.halves(y), unit.whole(y.dtype)
        if schedule.backprop == "stored":
            unit.ahead(halves, kept=kept, end=out)
            kept = [t for one in kept for t in one]
        elif schedule.backprop == "checkpoint":
            for first, last in unit.segments:
                kept += halves if first else []
                halves = unit.ahead(halves, first, last, end=out if last == unit.M else None)
        else:
            unit.ahead(halves, wide=kept, end=out)
        statistics = unit.statistics()
        ctx.schedule, ctx.weights, ctx.normals = schedule, len(weights), len(unit.normals)
        ctx.Ks = unit.Ks if schedule.backprop == "stored" else None
        ctx.save_for_backward(y, unit.factors, *weights, *unit.normals, *kept)
        ctx.mark_non_differentiable(*statistics)
        return out, *statistics

    @staticmethod
    @_as_precise_as_set()
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        y, factors, *rest = ctx.saved_tensors
        schedule: Schedule = ctx.schedule
        weights, rest = rest[: ctx.weights], rest[ctx.weights :]
        if torch.is_grad_enabled():  # for gradients of these gradients
            reference = partial(schedule.reference, factors)
            g, *found = differentiable(reference, (y, *weights), grads[0])
        else:
            unit = _Unit(y, schedule, weights, factors, rest[: ctx.normals], ctx.Ks)
            g, *found = _backward(grads[0], y, unit, rest[ctx.normals :])
        return g, None, None, *found


class _Unit:
    """The shears of a unit with their weights, for one batch; `normals` (4, C) if it runs again."""

    def __init__(
        self,
        y: Tensor,
        schedule: Schedule,
        weights: Sequence[Tensor],
        factors: Tensor | None,
        normals: Sequence[Tensor] = (),
        Ks: list[tuple[Any, ...]] | None = None,
    ) -> None:
        self.schedule, self.shears, self.M = schedule, schedule.shears, len(schedule.shears)
        each = 4 if schedule.normed else 2
        self.weights = [KindWeights(*weights[k : k + each]) for k in range(0, len(weights), each)]
        self.factors = None if factors is None else factors.to(torch.float32).contiguous()
        self.normals = list(normals)
        self.count, self.like = schedule.count, y.chunk(schedule.count, 1)[0]
        k = self.weights[0].K.shape[-1]
        self.by = convolutions.TwoKernels(self.like, schedule.activation)
        plain = not (schedule.turn or schedule.normed)
        if plain and convolutions.joins(self.like, k, schedule.work):
            together = min(self.M, TOGETHER) if schedule.backprop == "stored" else 1
            self.by = convolutions.OneKernel(self.like, schedule.activation, together)
        self.pixels, self.B = self.by.pixels, len(y)
        self.Ks = Ks or [self.by.kernels(one.K, schedule.work) for one in self.weights]

    @property
    def segments(self) -> list[tuple[int, int]]:
        """The shears between states that are kept; for a reversal, the first layer and the rest."""
        size = self.M
        if self.schedule.backprop == "checkpoint":
            size = self.count * segment(self.M // self.count)
        if self.schedule.backprop == "reversible" and self.count < self.M:
            return [(0, self.count), (self.count, self.M)]
        return [(first, min(first + size, self.M)) for first in range(0, self.M, size)]

    def room(self) -> Tensor:
        """Memory for twice as many images, in the precision of the convolutions."""
        shape = (2 * self.B, *self.like.shape[1:])
        return empty_images(self.like, shape, self.schedule.work)

    def whole(self, dtype: torch.dtype, halves: int | None = None) -> Tensor:
        """Memory for all channels of the images, or for so many halves."""
        B, C, *size = self.like.shape
        return empty_images(self.like, (B, (halves or self.count) * C, *size), dtype)

    def start(self, source: Tensor) -> Tensor:
        """`room` with the source in it, in the precision of the convolutions."""
        s = self.room()
        self.pixels.move(source, None, s[: self.B])
        return s

    def step(self, i: int, sign: int = 1) -> Step:
        """The factors by which a shear moves its target."""
        shear = self.shears[i]
        return sign * shear.c, None if self.factors is None else self.factors[shear.layer]

    def K(self, i: int) -> Any:
        return self.Ks[self.shears[i].kind][self.shears[i].layer]

    def normal(self, i: int) -> Tensor | None:
        return self.normals[i] if self.schedule.normed else None

    def inner(self, i: int, s: Tensor) -> Kept:
        """From the source of a shear to sigma."""
        one, layer = self.weights[self.shears[i].kind], self.shears[i].layer
        z = self.room()
        if one.gamma is None or one.beta is None:
            x = self.by.activate(self.K(i), s[: self.B], z[self.B :], one.a[layer])
            return Kept(s, z, x)
        x = self.by.apply(self.K(i), s[: self.B])
        if i == len(self.normals):
            eps = self.schedule.eps
            self.normals.append(self.pixels.normalise(x, one.gamma[layer], one.beta[layer], eps))
        normal = self.normals[i]
        self.pixels.activate(x, z[self.B :], normal[3], normal[2])
        return Kept(s, z, x)

    def ahead(
        self,
        halves: list[Tensor],
        first: int = 0,
        last: int | None = None,
        *,
        kept: list[Kept] | None = None,
        end: Tensor | None = None,
        wide: list[Tensor] | None = None,
    ) -> list[Tensor]:
        """The halves after the shears `first` .. `last` - 1; `kept` collects what each must keep.

        They are in float32, or written to `end`, and then with `wide` to float32 too. With `kept`
        but without `end`, they run again only for what is kept, and the last one stops early.
        """
        last = self.M if last is None else last
        halves, turn = list(halves), "w" if self.schedule.turn else ""
        ends = None if end is None else end.chunk(self.count, 1)
        s = self.start(halves[self.shears[first].source])
        for i in range(first, last):
            target, final = self.shears[i].target, i == last - 1
            inner = self.inner(i, s)
            if kept is not None:
                kept.append(inner)
                if final and end is None:
                    break
            # What has moved is what the next shear reads; the last one writes only where it ends.
            to = ends[target] if ends is not None and i >= last - self.count else None
            s = s if final else self.room()
            room = s[: self.B] if not final else self.whole(torch.float32, 1) if to is None else to
            keep = not final if to is None else wide is not None or (not final and to)
            how = {"by": self.step(i), "turn": turn, "keep": keep}
            new = self.by.move(self.K(i), inner.z[self.B :], halves[target], room, **how)
            if wide is not None and to is not None:
                wide.append(new)
                if not final:
                    self.pixels.move(new, None, to)
            halves[target] = new
        return halves

    def statistics(self) -> list[Tensor]:
        """Mean and 1 / deviation of what each shear has normalised."""
        if not self.schedule.normed:
            return []
        mean, rstd = torch.stack([normal[:2] for normal in self.normals], 1)
        a = torch.stack([self.weights[shear.kind].a[shear.layer] for shear in self.shears])
        return [mean + a, rstd]


def _backward(g_N: Tensor, y: Tensor, unit: _Unit, kept: Sequence[Tensor]) -> list[Any]:
    """The gradients of y and of the weights, from that of y_N."""
    schedule, shears, B = unit.schedule, unit.shears, unit.B
    g, turn = schedule.halves(g_N), "s" if schedule.turn else ""
    pixels, stores = unit.pixels, schedule.backprop == "stored"
    rebuilds = schedule.backprop == "reversible"
    # The gradients of weights are only needed at the end: a GPU takes a second stream for them.
    # Rebuilt states are soon freed, and for that the second stream would have to be waited for.
    side = torch.cuda.Stream(g_N.device) if g_N.is_cuda and not rebuilds else None
    dK: list[Tensor] = []
    sums: list[list[Tensor]] = [[] for _ in unit.weights]
    rebuilt: list[Tensor] = []
    y_1, g_0 = unit.whole(torch.float32) if rebuilds else None, unit.whole(g_N.dtype)
    ends = g_0.chunk(unit.count, 1)
    for first, last in reversed(unit.segments):
        if stores:
            past = _Stored(first, [Kept(*kept[k : k + 3]) for k in range(0, len(kept), 3)])
        elif rebuilds and first:
            past = _Rebuilt(unit, kept)
            rebuilt = past.halves
        else:
            at = (first // unit.segments[0][1] - 1) * unit.count
            start = list(kept[at : at + unit.count]) if first else schedule.halves(y)
            past = _Stored(first, [])
            unit.ahead(start, first, last, kept=past.kept, end=y_1)
        end, times = past.s(last - 1)[B:], unit.step(last - 1)
        pixels.move(g[shears[last - 1].target], None, end, times=times, turn=turn)
        for i in range(last - 1, first - 1, -1):
            source, _, kind, layer, _ = shears[i]
            (s, z, x), K, normal = past.shear(i), unit.K(i), unit.normal(i)
            if normal is None:
                total = unit.by.slope(K, s[B:], x, z[:B], unit.weights[kind].a[layer])
                # Partial sums of many layers would need memory: unless stored, add each up at once.
                sums[kind].append(total if stores else total.sum(0, keepdim=True))
            else:
                sums[kind].append(pixels.norm_slope(x, unit.by.apply(K, s[B:]), z[:B], normal))
            if side is not None:  # it waits for the work so far: what it allocates is free by then
                side.wait_stream(torch.cuda.current_stream(g_N.device))
            with torch.cuda.stream(side):
                dK.append(unit.by.gradient(K, s, z))
                if not stores:
                    dK[-1:] = unit.by.add_up(dK[-1:])
            if i > first:  # the input of the backward pass of the shear before
                before, times = past.s(i - 1)[B:], unit.step(i - 1)
                how = {"times": times, "turn": turn, "keep": i >= unit.count or ends[source]}
                g[source] = unit.by.move(K, z[:B], g[source], before, **how)
            else:
                room = unit.whole(torch.float32, 1) if i else ends[source]
                g[source] = unit.by.move(K, z[:B], g[source], room, keep=False)
        if stores:
            with torch.cuda.stream(side):
                dK = unit.by.add_up(dK)
        if side is not None:  # before the segment is freed, and the next one reuses its memory
            torch.cuda.current_stream(g_N.device).wait_stream(side)
        del past
    found: list[Tensor | None] = [g_0]
    for kind, (one, totals) in enumerate(zip(unit.weights, sums, strict=True)):
        grads = [grad for grad, shear in zip(dK[::-1], shears, strict=True) if shear.kind == kind]
        found.append(torch.stack(grads).to(one.K.dtype))
        total = torch.stack(totals[::-1])
        if one.gamma is None:
            found.append(total.sum(1).to(one.a.dtype))
        else:  # subtracting the mean removes the bias
            d_gamma, d_beta = total[:, 1].to(one.gamma.dtype), total[:, 0].to(one.gamma.dtype)
            found += [torch.zeros_like(one.a), d_gamma, d_beta]
    if rebuilt and schedule.check:
        assert y_1 is not None
        ends = (torch.cat(list(halves), 1) for halves in (rebuilt, kept))
        return check_reversal(drift_of(y_1, *ends), found)
    return found


class _Stored:
    """The shears from `first` on, as they were kept."""

    def __init__(self, first: int, kept: list[Kept]) -> None:
        self.first, self.kept = first, kept

    def s(self, i: int) -> Tensor:
        return self.kept[i - self.first].s

    def shear(self, i: int) -> Kept:
        return self.kept[i - self.first]


class _Rebuilt:
    """The same, rebuilt from the last state: a shear can be undone, as its source has not moved."""

    def __init__(self, unit: _Unit, end: Sequence[Tensor]) -> None:
        self.unit, self.halves = unit, list(end)
        self.next = unit.start(self.halves[unit.shears[-1].source])

    def s(self, i: int) -> Tensor:
        return self.next

    def shear(self, i: int) -> Kept:
        unit, target = self.unit, self.unit.shears[i].target
        inner, self.next = unit.inner(i, self.next), unit.room()
        z, room, by = inner.z[unit.B :], self.next[: unit.B], unit.step(i, -1)
        self.halves[target] = unit.by.move(unit.K(i), z, self.halves[target], room, by=by)
        return inner
