"""A Hamiltonian unit on a GPU: convolutions by cuDNN, all between them by `hdnn.engine.pixels`.

Between shears the state is kept in float32, and in the precision of the convolutions. With K
alone, since J and h are put into the passes between, a shear and its gradients are

    w = K^T sigma(x + a),  x = K s,  target += c J w
    g~ = c J^T g,  d = (K g~) sigma'(x + a),  g += K^T d,  dK = sum of d s^T + sigma(x + a) g~^T

so one gradient of K, over (s, g~) and (d, sigma) as twice as many images, does for both. Each image
may have its own factor of c.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hdnn.engine.pixels import Pixels, Step, images
from hdnn.operators import conv


class Shear(NamedTuple):
    """One of the shears of a unit: which half it reads and which it moves, by how much."""

    source: int
    target: int
    kind: int  # which of the weights are its own
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
    reversible: bool  # whether states are rebuilt from y_N, and not kept
    reference: Callable[..., Tensor]  # y_N by plain PyTorch, for gradients of gradients

    def halves(self, y: Tensor) -> list[Tensor]:
        """What takes turns in moving: p and q, or all of y."""
        count = 1 + max(shear.target for shear in self.shears)
        return [images(half) for half in y.chunk(count, 1)]


class Weights(NamedTuple):
    """Those of all shears of one kind."""

    K: Tensor  # (N, r, n, k, k)
    a: Tensor  # (N, r)
    gamma: Tensor | None = None
    beta: Tensor | None = None


def grouped(schedule: Schedule, weights: Sequence[Tensor]) -> list[Weights]:
    """The weights by kind, from all of them in a row."""
    each = 4 if schedule.normed else 2
    return [Weights(*weights[k : k + each]) for k in range(0, len(weights), each)]


class Kept(NamedTuple):
    """What the backward pass of a shear needs; it fills the other half of `s` and of `z`."""

    s: Tensor  # (2B, ...): s, then g~
    z: Tensor  # (2B, ...): d, then sigma
    x: Tensor
    K: Tensor
    normal: Tensor | None


def run(
    y: Tensor, schedule: Schedule, weights: Sequence[Tensor], factors: Tensor | None = None
) -> tuple[Tensor, ...]:
    """y_N from y_0; with normalisation also the mean and 1 / deviation that each shear used.

    `factors` (N, B) of c are for each layer and each image.
    """
    with torch.cuda.device(y.device) if y.is_cuda else nullcontext():
        if torch.is_grad_enabled() and any(t.requires_grad for t in (y, *weights)):
            return _UnitStack.apply(y, schedule, factors, *weights)
        memory = Memory(schedule, factors, keep=False)
        return _forward(y, schedule, grouped(schedule, weights), memory)


class Memory:
    """What the backward pass will need of the forward pass: of each shear, or of the end alone."""

    def __init__(self, schedule: Schedule, factors: Tensor | None, *, keep: bool = True) -> None:
        self.factors = None if factors is None else factors.to(torch.float32).contiguous()
        self.rebuilds = keep and schedule.reversible
        self.stores = keep and not schedule.reversible
        self.shears: list[Kept] = []
        self.end: list[Tensor] = []  # the halves of y_N in float32
        self.normals: list[Tensor] = []  # (4, C) of each shear

    def step(self, shear: Shear, sign: int = 1) -> Step:
        """What the shear moves by."""
        return sign * shear.c, None if self.factors is None else self.factors[shear.layer]


class _UnitStack(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: Tensor, schedule: Schedule, factors: Tensor | None, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.schedule, ctx.memory = schedule, Memory(schedule, factors)
        ctx.save_for_backward(y, *weights)
        out, *statistics = _forward(y, schedule, grouped(schedule, weights), ctx.memory)
        ctx.mark_non_differentiable(*statistics)
        return out, *statistics

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        y, *weights = ctx.saved_tensors
        schedule: Schedule = ctx.schedule
        if torch.is_grad_enabled():  # gradients of these gradients will be asked for
            asked = [t for t in (y, *weights) if t.requires_grad]
            out = schedule.reference(y, ctx.memory.factors, *weights)
            found = iter(torch.autograd.grad(out, asked, grads[0], create_graph=True))
            g_y, *rest = (next(found) if t.requires_grad else None for t in (y, *weights))
            return g_y, None, None, *rest
        g, rest = _backward(grads[0], schedule, ctx.memory, grouped(schedule, weights))
        return g, None, None, *rest


def _twice(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Room for twice as many images."""
    shape = (2 * len(like), *like.shape[1:])
    layout: Any = {"memory_format": torch.channels_last, "device": like.device}
    return torch.empty(shape, dtype=dtype, **layout)


def _kernels(K: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """K of each layer, as the convolutions want it."""
    N, r = K.shape[:2]
    return images(K.flatten(0, 1), dtype).unflatten(0, (N, r)).unbind(0)


def _forward(
    y: Tensor, schedule: Schedule, weights: list[Weights], memory: Memory
) -> tuple[Tensor, ...]:
    """y_N and the statistics."""
    work, turn = schedule.work, "w" if schedule.turn else ""
    halves = schedule.halves(y)
    pixels, B, last = Pixels(halves[0], schedule.activation), len(y), len(schedule.shears) - 1
    Ks = [_kernels(one.K, work) for one in weights]
    s = _twice(halves[0], work)
    s[:B].copy_(halves[schedule.shears[0].source])
    for i, shear in enumerate(schedule.shears):
        _, target, kind, layer, _ = shear
        K, one = Ks[kind][layer], weights[kind]
        x, z = conv.apply(K, s[:B]), _twice(halves[0], work)
        normal = None
        if one.gamma is not None and one.beta is not None:
            normal = pixels.normalise(x, one.gamma[layer], one.beta[layer], schedule.eps)
            memory.normals.append(normal)
        _activate(pixels, x, z[B:], one.a[layer], normal)
        w = conv.adjoint(K, z[B:])
        if memory.stores:
            memory.shears.append(Kept(s, z, x, K, normal))
        # What has moved is what the next shear reads; the last leaves it as y has it.
        s = _twice(halves[0], work) if i < last else s
        room = s[:B] if i < last else torch.empty_like(halves[0], dtype=y.dtype)
        done = i == last or (room.dtype == y.dtype and i > last - len(halves))
        keep = memory.rebuilds or not done
        by = memory.step(shear)
        new = pixels.move(halves[target], w, room, by=by, turn=turn, keep=keep)
        if memory.rebuilds and i > last - len(halves):
            memory.end.append(new)
        halves[target] = room if done else new
    y_N = _joined(halves, y.dtype)
    if not memory.normals:
        return (y_N,)
    mean, rstd = torch.stack([normal[:2] for normal in memory.normals], 1)
    a = torch.stack([weights[shear.kind].a[shear.layer] for shear in schedule.shears])
    return y_N, mean + a, rstd


def _activate(pixels: Pixels, x: Tensor, z: Tensor, a: Tensor, normal: Tensor | None) -> None:
    if normal is None:
        pixels.activate(x, z, a)
    else:
        pixels.activate(x, z, normal[3], normal[2])


def _backward(
    g_N: Tensor, schedule: Schedule, memory: Memory, weights: list[Weights]
) -> tuple[Tensor, list[Tensor | None]]:
    turn = "s" if schedule.turn else ""
    g, shears = schedule.halves(g_N), schedule.shears
    pixels, B, last = Pixels(g[0], schedule.activation), len(g_N), shears[-1]
    like: dict[str, Any] = {"dtype": torch.float32, "device": g_N.device}
    # What is rebuilt is soon given away again, which a second stream would have to be waited for.
    aside = _Aside(None if memory.rebuilds else g_N.device)
    past = _Rebuilt(schedule, memory, weights, pixels) if memory.rebuilds else _Stored(memory)
    dK: list[list[Tensor]] = [[] for _ in weights]
    sums: list[list[Tensor]] = [[] for _ in weights]
    end = past.s(len(shears) - 1)[B:]
    pixels.move(g[last.target], None, end, times=memory.step(last), turn=turn)
    for i in range(len(shears) - 1, -1, -1):
        source, _, kind, layer, _ = shears[i]
        s, z, x, K, normal = past.shear(i)
        d_z = conv.apply(K, s[B:])
        if normal is None:
            partial = torch.empty(pixels.programs, pixels.C, **like)
            pixels.slope(x, d_z, z[:B], weights[kind].a[layer], partial)
            # Those of many layers would need room: then each is added up at once.
            sums[kind].append(partial.sum(0, keepdim=True) if memory.rebuilds else partial)
        else:
            sums[kind].append(pixels.norm_slope(x, d_z, z[:B], normal))
        with aside():
            dK[kind].append(conv.gradient(s, z, K))
        d_s = conv.adjoint(K, z[:B])
        if i:  # which is what the shear before this one starts from
            before, times = past.s(i - 1)[B:], memory.step(shears[i - 1])
            g[source] = pixels.move(g[source], d_s, before, times=times, turn=turn)
        else:
            room = torch.empty_like(d_s, dtype=g_N.dtype)
            g[source] = pixels.move(g[source], d_s, room, keep=False)
    aside.join()
    found: list[Tensor | None] = []
    for one, grads, totals in zip(weights, dK, sums, strict=True):
        found.append(torch.stack(grads[::-1]).to(one.K.dtype))
        total = torch.stack(totals[::-1])
        if one.gamma is None:
            found.append(total.sum(1).to(one.a.dtype))
        else:  # the mean that is taken off takes the bias with it
            d_gamma, d_beta = total[:, 1].to(one.gamma.dtype), total[:, 0].to(one.gamma.dtype)
            found += [torch.zeros_like(one.a), d_gamma, d_beta]
    return _joined(g, g_N.dtype), found


class _Stored:
    """The shears as the forward pass has kept them."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    def s(self, i: int) -> Tensor:
        return self.memory.shears[i].s

    def shear(self, i: int) -> Kept:
        return self.memory.shears[i]


class _Rebuilt:
    """The same from the end of the state: each shear is undone, since its source has not moved."""

    def __init__(
        self, schedule: Schedule, memory: Memory, weights: list[Weights], pixels: Pixels
    ) -> None:
        self.schedule, self.memory, self.weights, self.pixels = schedule, memory, weights, pixels
        self.Ks = [_kernels(one.K, schedule.work) for one in weights]
        self.halves = list(memory.end)
        self.B, self.next = len(self.halves[0]), self._room()
        self.next[: self.B].copy_(self.halves[schedule.shears[-1].source])

    def _room(self) -> Tensor:
        return _twice(self.halves[0], self.schedule.work)

    def s(self, i: int) -> Tensor:
        return self.next

    def shear(self, i: int) -> Kept:
        shear = self.schedule.shears[i]
        _, target, kind, layer, _ = shear
        s, z, K, B = self.next, self._room(), self.Ks[kind][layer], self.B
        x, self.next = conv.apply(K, s[:B]), self._room()
        normal = self.memory.normals[i] if self.memory.normals else None
        _activate(self.pixels, x, z[B:], self.weights[kind].a[layer], normal)
        w, room = conv.adjoint(K, z[B:]), self.next[:B]
        by = self.memory.step(shear, -1)
        self.halves[target] = self.pixels.move(self.halves[target], w, room, by=by)
        return Kept(s, z, x, K, normal)


class _Aside:
    """A second stream, for what nobody waits for before the end: the gradients of the weights.

    It always starts after the work that the first stream has been given, so whatever it allocates
    anew is free by then.
    """

    def __init__(self, device: torch.device | None) -> None:
        there = device is not None and device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if there else None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            yield

    def join(self) -> None:
        """Wait for it."""
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)


def _joined(halves: list[Tensor], dtype: torch.dtype) -> Tensor:
    halves = [half.to(dtype) for half in halves]
    return halves[0] if len(halves) == 1 else torch.cat(halves, 1)
