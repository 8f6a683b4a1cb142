"""A Hamiltonian unit on a GPU: convolutions by cuDNN, the rest by `kernels/pixels.py`.

Between shears the state is kept both in float32 and in the precision of the convolutions. These use
K alone; J and h are applied between them. So a shear and its gradients are

    w = K^T sigma(x + a),  x = K s,  target += c J w
    g~ = c J^T g,  d = (K g~) sigma'(x + a),  g += K^T d,  dK = sum of d s^T + sigma(x + a) g~^T

so one gradient of K, over (s, g~) and (d, sigma) as twice as many images, does for both. Each image
may have its own factor of c.
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
from hdnn.engine.kernels.factors import float32_setting
from hdnn.engine.kernels.pixels import Pixels, Step, differentiable, empty_images, images
from hdnn.operators import conv

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
        return [images(half) for half in y.chunk(self.count, 1)]


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
            halves = unit.ahead(schedule.halves(y), end=y.dtype)
            return _joined(halves, y.dtype), *unit.statistics()


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
        halves = schedule.halves(y)
        if schedule.backprop == "stored":
            halves = unit.ahead(halves, kept=kept, end=y.dtype)
            kept = [t for one in kept for t in one]
        elif schedule.backprop == "checkpoint":
            for first, last in unit.segments:
                kept += halves if first else []
                halves = unit.ahead(halves, first, last, end=y.dtype if last == unit.M else None)
        else:
            halves = unit.ahead(halves, wide=kept, end=y.dtype)
        out, statistics = _joined(halves, y.dtype), unit.statistics()
        ctx.schedule, ctx.weights, ctx.normals = schedule, len(weights), len(unit.normals)
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
            unit = _Unit(y, schedule, weights, factors, rest[: ctx.normals])
            g, *found = _backward(grads[0], y, unit, rest[ctx.normals :])
        return g, None, None, *found


def _kernels(K: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """K of each layer, in the form that the convolutions need."""
    N, r = K.shape[:2]
    return images(K.flatten(0, 1), dtype).unflatten(0, (N, r)).unbind(0)


class _Unit:
    """The shears of a unit with their weights, for one batch.

    `normals` (4, C) of each shear are given when it runs a second time.
    """

    def __init__(
        self,
        y: Tensor,
        schedule: Schedule,
        weights: Sequence[Tensor],
        factors: Tensor | None,
        normals: Sequence[Tensor] = (),
    ) -> None:
        self.schedule, self.shears, self.M = schedule, schedule.shears, len(schedule.shears)
        each = 4 if schedule.normed else 2
        self.weights = [KindWeights(*weights[k : k + each]) for k in range(0, len(weights), each)]
        self.Ks = [_kernels(one.K, schedule.work) for one in self.weights]
        self.factors = None if factors is None else factors.to(torch.float32).contiguous()
        self.normals = list(normals)
        self.count, self.like = schedule.count, y.chunk(schedule.count, 1)[0]
        self.pixels, self.B = Pixels(self.like, schedule.activation), len(y)

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
        return self.empty(2 * self.B, self.schedule.work)

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        return empty_images(self.like, (count, *self.like.shape[1:]), dtype)

    def start(self, source: Tensor) -> Tensor:
        """`room` with the source in it, in the precision of the convolutions."""
        s = self.room()
        self.pixels.move(source, None, s[: self.B])
        return s

    def step(self, i: int, sign: int = 1) -> Step:
        """The factors by which a shear moves its target."""
        shear = self.shears[i]
        return sign * shear.c, None if self.factors is None else self.factors[shear.layer]

    def K(self, i: int) -> Tensor:
        return self.Ks[self.shears[i].kind][self.shears[i].layer]

    def normal(self, i: int) -> Tensor | None:
        return self.normals[i] if self.schedule.normed else None

    def inner(self, i: int, s: Tensor) -> Kept:
        """From the source of a shear to sigma."""
        one, layer = self.weights[self.shears[i].kind], self.shears[i].layer
        x, z = conv.apply(self.K(i), s[: self.B]), self.room()
        if one.gamma is None or one.beta is None:
            self.pixels.activate(x, z[self.B :], one.a[layer])
            return Kept(s, z, x)
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
        end: torch.dtype | None = None,
        wide: list[Tensor] | None = None,
    ) -> list[Tensor]:
        """The halves after the shears `first` .. `last` - 1; `kept` collects what each must keep.

        In float32, or in the dtype `end` of y_N, with `wide` also in float32. With `kept` but
        without `end`, they run again only for what is kept, and the last one stops early.
        """
        last = self.M if last is None else last
        halves, turn = list(halves), "w" if self.schedule.turn else ""
        s = self.start(halves[self.shears[first].source])
        for i in range(first, last):
            target, final = self.shears[i].target, i == last - 1
            inner = self.inner(i, s)
            if kept is not None:
                kept.append(inner)
                if final and end is None:
                    break
            w = conv.adjoint(self.K(i), inner.z[self.B :])
            # What has moved is what the next shear reads.
            s = s if final else self.room()
            room = self.empty(self.B, end or torch.float32) if final else s[: self.B]
            done = final or (room.dtype == end and i >= last - self.count)
            keep, by = wide is not None or not done, self.step(i)
            new = self.pixels.move(halves[target], w, room, by=by, turn=turn, keep=keep)
            if wide is not None and i >= last - self.count:
                wide.append(new)
            halves[target] = room if done else new
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
    dK: list[list[Tensor]] = [[] for _ in unit.weights]
    sums: list[list[Tensor]] = [[] for _ in unit.weights]
    rebuilt: list[Tensor] = []
    y_1: list[Tensor] = []
    for first, last in reversed(unit.segments):
        if stores:
            past = _Stored(first, [Kept(*kept[k : k + 3]) for k in range(0, len(kept), 3)])
        elif rebuilds and first:
            past = _Rebuilt(unit, kept)
            rebuilt = past.halves
        else:
            at = (first // unit.segments[0][1] - 1) * unit.count
            start = list(kept[at : at + unit.count]) if first else schedule.halves(y)
            past, end = _Stored(first, []), torch.float32 if rebuilds else None
            y_1 = unit.ahead(start, first, last, kept=past.kept, end=end)
        end, times = past.s(last - 1)[B:], unit.step(last - 1)
        pixels.move(g[shears[last - 1].target], None, end, times=times, turn=turn)
        for i in range(last - 1, first - 1, -1):
            source, _, kind, layer, _ = shears[i]
            (s, z, x), K, normal = past.shear(i), unit.K(i), unit.normal(i)
            d_z = conv.apply(K, s[B:])
            if normal is None:
                total = pixels.slope(x, d_z, z[:B], unit.weights[kind].a[layer])
                # Partial sums of many layers would need memory: unless stored, add each up at once.
                sums[kind].append(total if stores else total.sum(0, keepdim=True))
            else:
                sums[kind].append(pixels.norm_slope(x, d_z, z[:B], normal))
            if side is not None:  # it waits for the work so far: what it allocates is free by then
                side.wait_stream(torch.cuda.current_stream(g_N.device))
            with torch.cuda.stream(side):
                dK[kind].append(conv.gradient(s, z, K))
            d_s = conv.adjoint(K, z[:B])
            if i > first:  # the input of the backward pass of the shear before
                before, times = past.s(i - 1)[B:], unit.step(i - 1)
                g[source] = pixels.move(g[source], d_s, before, times=times, turn=turn)
            else:
                room = torch.empty_like(d_s, dtype=torch.float32 if i else g_N.dtype)
                g[source] = pixels.move(g[source], d_s, room, keep=False)
        if side is not None:  # before the segment is freed, and the next one reuses its memory
            torch.cuda.current_stream(g_N.device).wait_stream(side)
        del past
    found: list[Tensor | None] = [_joined(g, g_N.dtype)]
    for one, grads, totals in zip(unit.weights, dK, sums, strict=True):
        found.append(torch.stack(grads[::-1]).to(one.K.dtype))
        total = torch.stack(totals[::-1])
        if one.gamma is None:
            found.append(total.sum(1).to(one.a.dtype))
        else:  # subtracting the mean removes the bias
            d_gamma, d_beta = total[:, 1].to(one.gamma.dtype), total[:, 0].to(one.gamma.dtype)
            found += [torch.zeros_like(one.a), d_gamma, d_beta]
    if rebuilt and schedule.check:
        ends = (_joined(list(halves), torch.float32) for halves in (y_1, rebuilt, kept))
        return check_reversal(drift_of(*ends), found)
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
        w, room = conv.adjoint(unit.K(i), inner.z[unit.B :]), self.next[: unit.B]
        by = unit.step(i, -1)
        self.halves[target] = unit.pixels.move(self.halves[target], w, room, by=by)
        return inner


def _joined(halves: list[Tensor], dtype: torch.dtype) -> Tensor:
    halves = [half.to(dtype) for half in halves]
    return halves[0] if len(halves) == 1 else torch.cat(halves, 1)
