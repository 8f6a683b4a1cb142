"""Wide stacks on a GPU: matrix products, one pass over memory between them, and no host in the way.

A step is `target += c sigma(source K^T + b) V`. Past some width the two products take almost all of
its time, and cuBLAS does them best. What is left is done here. Bias, activation, slope and the sums
of a bias's gradient are one more pass over memory, or the end of a product of our own (`steps.py`).
The states are written where they are kept, so that nothing is copied. The gradients of weights,
which no other layer waits for, are taken for some layers at a time as batched products, on a second
stream beside the chain of layers. And all launches of a pass are replayed as one CUDA graph
(`replay.py`).

In bf16 the factors of products are rounded; states and gradients themselves stay float32. In tf32
weight gradients, on which no other layer depends, are products of bf16 factors too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hdnn.engine.kernels import joined
from hdnn.engine.kernels.factors import halves, has_wide_products, multiplying
from hdnn.engine.kernels.protocol import Stack, Tensors, moved_by, order
from hdnn.engine.kernels.replay import Replays, Streams
from hdnn.engine.kernels.steps import JoinedSteps, SeparateSteps, StepWeights
from hdnn.engine.kernels.versions import Ring, places
from hdnn.interconnection import times_canonical

CHUNK_BYTES = 256 * 2**20
"""Memory for the factors of one batch of weight gradients; there are two such batches at a time.

Half of it where states are rebuilt, which is done to save memory.
"""

LANES = 2
"""Streams that large batches are shared out to: one computes while another waits for memory."""

LANE_BYTES = {torch.bfloat16: 8 * 2**20, torch.float32: 32 * 2**20}
"""From which size of half a state on, by dtype of the factors; measured on an H200."""


class ProductsKernel:
    """A stack as matrix products; all launches of a pass are one CUDA graph where they repeat."""

    def __init__(self, stack: Stack, precision: str = "ieee", deterministic: bool = False) -> None:
        self.stack, self.deterministic, self.precision = stack, deterministic, precision
        self.places = places(stack.turns)
        self.order = order(stack.turns, stack.layers, stack.inverse)
        # dtypes of factors: of the products from layer to layer, and of weight gradients, on which
        # no other layer depends. Versions of states have the latter.
        self.chain = torch.bfloat16 if precision == "bf16" else stack.dtype
        self.low = torch.bfloat16 if halves(precision, stack) else stack.dtype
        self.running = self.low != stack.dtype  # states stay float32, and versions are copies
        self.steps = _steps(stack, precision)
        self.replays = Replays()

    # Forwards

    @torch.no_grad()
    def forward(self, y: Tensor, tensors: Tensors, keep: bool) -> tuple[Tensor, Tensor | None]:
        out, E = torch.empty_like(y), self.places.steps
        kept = y.new_empty(self.kept_size(self.stack, self.precision)) if keep else None
        if self._empty:
            return out.copy_(y), kept
        weights, coef, most = self._weights(tensors), tensors[-1], max(self.stack.rows)
        if kept is None:  # the places of two layers, in turn
            states = self._new(2 * E, self.stack.width)
            pasts = [self._new(1, r, self.chain) for r in self._rows]
        else:
            states, pasts = self._in(kept)
        z, wide = self._new(1, most, self.chain), self._running(1)
        used = [y, out, states, *pasts, z, wide, coef, *_tensors(weights)]

        def launch(streams: Streams) -> None:
            for rows in self._lanes(streams):
                cut = [t[:, rows] for t in (states, z, wide[0], *pasts)]
                self._forward_lane(y[rows], out[rows], cut, weights, coef, keep)

        self._run("forwards" if kept is None else "forwards, kept", launch, used)
        return out, kept

    def _forward_lane(
        self,
        y: Tensor,
        out: Tensor,
        memory: list[Tensor],
        weights: list[StepWeights],
        coef: Tensor,
        keep: bool,
    ) -> None:
        """All layers for some samples."""
        (states, z, wide, *pasts), E = memory, self.places.steps
        now = self._begin(y, wide, states, self.places.start)
        for s, (i, j) in enumerate(self.order):
            (layer, e), of = divmod(s, E), weights[i]
            a = pasts[e][layer % len(pasts[e])]
            place = states[(layer * E + self.places.read[e]) % len(states)]
            value = z.view(-1)[: a.numel()].view_as(a)
            self.steps.inner(self._read(now, i - 1, place), of, j, a, value, coef[s:])
            write = states[((layer + 1) * E + e) % len(states)]
            read = keep or self.chain == self.low
            self._move(now, i, value, _at(of.V_T, j), write if read else None)
        _join(now, out)

    # Backwards

    def backward(self, kept: Tensor, g: Tensor, tensors: Tensors) -> Tensors:
        return self._gradients(kept, None, None, g, tensors)

    def undo(self, y_N: Tensor, g: Tensor, tensors: Tensors) -> tuple[Tensor, Tensors]:
        y_0 = torch.empty_like(y_N)
        return y_0, self._gradients(None, y_N, y_0, g, tensors)

    @torch.no_grad()
    def _gradients(
        self, kept: Tensor | None, y_N: Tensor | None, y_0: Tensor | None, g: Tensor, tensors: Any
    ) -> Tensors:
        """From what was kept or, without that, from y_N, which is undone to y_0."""
        g_0, coef, kind = torch.empty_like(g), tensors[-1], self.stack.kind
        new = torch.zeros_like if self._empty else torch.empty_like
        found: Any = [None if t is None else new(t) for t in tensors]
        if not self.stack.learned:
            found[-1] = None
        if self._empty:
            if y_N is not None and y_0 is not None:
                y_0.copy_(y_N)
            return g_0.copy_(g), *found
        weights, most = self._weights(tensors), max(self.stack.rows)
        states, pasts = (None, []) if kept is None else self._in(kept)
        # Room for a, u and c z of one step, for the products from layer to layer.
        room = self._new(3, most, self.chain)
        wide, N = self._running(2), self.stack.layers
        at_once = self._layers_at_once(kept is None)
        spans = [(max(0, end - at_once), end) for end in range(N, 0, -at_once)]
        rings = [self._ring(at_once, kept is None) for _ in spans[:2]]
        # With the canonical J, the gradient of V becomes one of K at the end.
        d_V = torch.empty_like(tensors[0]) if kind == "canonical" else None
        used = [g, g_0, wide, coef, room, *_tensors(weights), *_tensors(rings), *_tensors([found])]
        used += [t for t in (y_N, y_0, states, *pasts, d_V) if t is not None]

        def launch(streams: Streams) -> None:
            lanes: Any = {}
            for k, span in enumerate(spans):
                ring, behind = rings[k % 2], (span[1] - span[0]) * self.places.steps
                streams.wait_for_products(k - 2)
                for rows in self._lanes(streams):
                    mine, cut = (
                        lanes.setdefault(rows.start, ([], [])),
                        ring.cut(rows, self.steps.tile),
                    )
                    if k:
                        self._carry(
                            rings[(k - 1) % 2].cut(rows, self.steps.tile), cut, behind, *mine
                        )
                    else:
                        start, at = cut.grads[behind:], self.places.start_grad
                        mine[0][:] = self._begin(g[rows], wide[0][:, rows], start, at)
                        if y_N is not None and cut.states is not None:
                            start, at = cut.states[behind:], self.places.start_undone
                            mine[1][:] = self._begin(y_N[rows], wide[1][:, rows], start, at)
                    memory = [p[:, rows] for p in (room, *pasts)]
                    self._chain(weights, coef, span, cut, memory, *mine)
                    if k + 1 == len(spans):
                        _join(mine[0], g_0[rows])
                        if y_0 is not None:
                            _join(mine[1], y_0[rows])
                with streams.beside():
                    self._products(span, ring, states, found, d_V)

        self._run("undone" if kept is None else "backwards", launch, used)
        if d_V is not None:
            found[0] -= times_canonical(d_V)
        return g_0, *found

    def _lanes(self, streams: Streams) -> Iterator[slice]:
        """Some samples at a time, each lane on a stream of its own where there are several."""
        B, count = self.stack.samples, streams.lanes
        size = -(-B // count // self.steps.tile) * self.steps.tile if count > 1 else B
        return streams.each([slice(first, min(first + size, B)) for first in range(0, B, size)])

    def _chain(
        self,
        weights: list[StepWeights],
        coef: Tensor,
        span: tuple[int, int],
        ring: Ring,
        memory: list[Tensor],
        now_g: list[Tensor],
        now_y: list[Tensor],
    ) -> None:
        """The gradients of states through some layers, and the states if they are undone."""
        (low, high), E, (room, *pasts) = span, self.places.steps, memory
        for s in reversed(range(low * E, high * E)):
            (layer, e), (i, j) = divmod(s, E), self.order[s]
            of, here = weights[i], (layer - low) * E
            u, z = ring.u[e][layer - low], ring.z[e][layer - low]
            if pasts:
                a = pasts[e][layer]
            else:
                a = room[0].view(-1)[: u.numel()].view_as(u)
                place = ring.states[here + self.places.read_undone[e]]  # pyright: ignore[reportOptionalSubscript]
                self.steps.inner(self._read(now_y, i - 1, place), of, j, a, None, coef[s:])
            g = self._read(now_g, i, ring.grads[here + self.places.read_grad[e]])
            chain = u if u.dtype == self.chain else room[1].view(-1)[: u.numel()].view_as(u)
            sums, dots = ring.sums[e][layer - low], ring.dots[e][layer - low]
            self.steps.slope(g, of, j, a, (chain, u, z), coef[s:], sums, dots)
            self._move(now_g, (i - 1) % self.places.parts, chain, of.K_T[j], ring.grads[here + e])
            if not pasts:
                if z.dtype != self.chain:
                    z = room[2].view(-1)[: u.numel()].view_as(u)
                    self.steps.pointwise.value(a, z, coef[s:])
                back = ring.states[here + e]  # pyright: ignore[reportOptionalSubscript]
                self._move(now_y, i, z, _at(of.V_T, j), back, -1)

    def _products(
        self,
        span: tuple[int, int],
        ring: Ring,
        states: Tensor | None,
        found: list[Any],
        d_V: Tensor | None,
    ) -> None:
        """The gradients of the weights of some layers."""
        (low, high), E, N = span, self.places.steps, self.stack.layers
        count, at = high - low, slice(N - high, N - low) if self.stack.inverse else slice(low, high)
        done = set()
        for e, i in enumerate(self.places.turns):
            d_K, d_b, d_out = moved_by(i, found)
            d_out = {"same": d_K, "canonical": d_V}.get(self.stack.kind, d_out)
            if states is None:
                x = ring.states[self.places.read_undone[e] :: E]  # pyright: ignore[reportOptionalSubscript]
            else:
                x = states[low * E + self.places.read[e] :: E]
            g = ring.grads[self.places.read_grad[e] :: E]
            u, z = ring.u[e][:count], ring.z[e][:count]
            new = i not in done
            done.add(i)
            self._put_product(d_K[at], u, x[:count], new)
            if d_out is not None:
                self._put_product(d_out[at], z, g[:count], new and d_out is not d_K)
            _put(d_b[at], ring.sums[e][:count].sum(1), new, self.stack.inverse)
            if found[-1] is not None:
                found[-1][low * E + e : high * E : E] = ring.dots[e][:count].sum((1, 2))

    def _put_product(self, into: Tensor, left: Tensor, right: Tensor, new: bool) -> None:
        """into = left^T right, matrix by matrix; added unless `new`."""
        same = left.dtype == into.dtype
        if self.stack.inverse or not (same or has_wide_products(into)):
            product = torch.bmm(left.mT.to(into.dtype), right.to(into.dtype))
            _put(into, product, new, self.stack.inverse)
        elif same and new:
            torch.bmm(left.mT, right, out=into)
        elif same:
            into.baddbmm_(left.mT, right)
        elif new:
            torch.bmm(left.mT, right, out_dtype=into.dtype, out=into)
        else:
            torch.baddbmm(into, left.mT, right, out_dtype=into.dtype, out=into)

    # Parts of a pass

    def _begin(self, y: Tensor, wide: Any, states: Tensor, start: list[int]) -> list[Tensor]:
        """Put the parts of y where the first steps read them."""
        now = []
        for i, part in enumerate(y.chunk(self.places.parts, -1)):
            states[start[i]].copy_(part)
            now.append(wide[i].copy_(part) if self.running else states[start[i]])
        return now

    def _carry(
        self, old: Ring, ring: Ring, behind: int, now_g: list[Tensor], now_y: list[Tensor]
    ) -> None:
        """Go on in another ring."""
        sides: Any = [(old.grads, ring.grads, self.places.start_grad, now_g)]
        if now_y:
            sides.append((old.states, ring.states, self.places.start_undone, now_y))
        for source, target, start, now in sides:
            for i, at in enumerate(start):
                target[behind + at].copy_(source[at])
                if not self.running:
                    now[i] = target[behind + at]

    def _read(self, now: list[Tensor], i: int, version: Tensor) -> Tensor:
        """A part as a factor of the products from layer to layer."""
        return version if self.chain == self.low else now[i]

    def _move(
        self, now: list[Tensor], i: int, z: Tensor, V_T: Tensor | None, to: Any, sign: int = 1
    ) -> None:
        """A new version of part i, which is what it is now plus z V, if there is a place for it."""
        if not self.running:
            if V_T is None:
                now[i] = torch.add(now[i], z, alpha=sign, out=to)
            else:
                now[i] = torch.addmm(now[i], z, V_T.mT, alpha=sign, out=to)
            return
        self.steps.move(now[i], z, V_T, to, sign)

    # Memory

    @property
    def _rows(self) -> list[int]:
        """Hidden units of each step of a layer: p moves by the weights of q, and q by p's."""
        return _rows(self.stack)

    def _new(self, count: int, columns: int, dtype: torch.dtype | None = None) -> Tensor:
        stack = self.stack
        sizes = (count, stack.samples, columns)
        return torch.empty(sizes, dtype=dtype or self.low, device=stack.device)

    def _running(self, count: int) -> Tensor:
        """Room for states and gradients that stay float32 when factors are rounded."""
        parts = self.places.parts if self.running else 0
        room = self._new(count * parts, self.stack.width, self.stack.dtype)
        return room.view(count, parts, self.stack.samples, self.stack.width)

    def _in(self, kept: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The states and, for each step of a layer, the values before the activation."""
        (N, B), E, width = (
            (self.stack.layers, self.stack.samples),
            self.places.steps,
            self.stack.width,
        )
        states, rest = _split(kept, (N + 1) * E * B * width, self.low)
        pasts = []
        for r in self._rows:
            past, rest = _split(rest, N * B * r, self.chain)
            pasts.append(past.view(N, B, r))
        return states.view(-1, B, width), pasts

    def _layers_at_once(self, rebuilt: bool) -> int:
        stack = self.stack
        one = 2 * sum(self._rows) + (1 + rebuilt) * self.places.steps * stack.width
        size = self.low.itemsize
        # Of float32 factors cuBLAS multiplies few at a time many times slower.
        least = 1 if self.low.itemsize == 2 or stack.width >= 1024 else 16
        room = CHUNK_BYTES // 2 if rebuilt else CHUNK_BYTES
        return min(stack.layers, max(least, room // max(1, one * stack.samples * size)))

    def _ring(self, layers: int, rebuilt: bool) -> Ring:
        E, width, sums, dots = self.places.steps, self.stack.width, [], []
        for r in self._rows:
            options = {"dtype": self.stack.dtype, "device": self.stack.device}
            sums.append(
                torch.empty(layers, -(-self.stack.samples // self.steps.tile), r, **options)
            )
            dots.append(torch.empty(*sums[-1].shape[:2], self.steps.dots(r), **options))
        u, z = ([self._new(layers, r) for r in self._rows] for _ in range(2))
        grads = self._new((layers + 1) * E, width)
        return Ring(u, z, sums, dots, grads, torch.empty_like(grads) if rebuilt else None)

    def _weights(self, tensors: Tensors) -> list[StepWeights]:
        """The weights of the steps that move each part."""
        made, kind = [], self.stack.kind
        for i in range(self.places.parts):
            K, b, V = moved_by(i, tensors)
            if kind == "canonical":
                V = times_canonical(K)
            if self.chain != self.stack.dtype:
                K, b, V = (None if t is None else t.to(self.chain) for t in (K, b, V))
            K_T, V_T = (None if t is None else self._transposed(t) for t in (K, V))
            if kind == "same":
                V, V_T = K, K_T
            made.append(StepWeights(K, b, V, K_T, V_T))  # pyright: ignore[reportArgumentType]
        return made

    def _transposed(self, W: Tensor) -> Tensor:
        """Of tf32 factors, tensor cores read rows of both; of others, either way."""
        return W.mT.contiguous() if self.precision == "tf32" else W.mT

    @property
    def _lanes_wanted(self) -> int:
        """Streams for samples, besides one for weight gradients; 0 for one stream alone."""
        if self.deterministic:
            return 0
        state = self.stack.samples * self.stack.width * self.chain.itemsize
        return LANES if state >= LANE_BYTES.get(self.chain, torch.inf) else 1

    @property
    def _empty(self) -> bool:
        return self.stack.samples == 0 or self.stack.steps == 0

    def _run(self, what: str, launch: Any, used: list[Tensor]) -> None:
        with multiplying(self.precision, self.stack.device):
            self.replays.run(what, launch, used, lanes=self._lanes_wanted)

    @staticmethod
    def kept_size(stack: Stack, precision: str = "ieee") -> int:
        here, half = places(stack.turns), halves(precision, stack)
        size = _room((stack.layers + 1) * here.steps * stack.samples * stack.width, half)
        return size + sum(
            _room(stack.layers * stack.samples * r, precision == "bf16") for r in _rows(stack)
        )

    @staticmethod
    def why_not(dtype: torch.dtype, features: int) -> str:
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"the GPU kernel is for float32 and half precision, not {dtype}"
        return ""


def _steps(stack: Stack, precision: str) -> SeparateSteps:
    """Joined where that was faster on an H200: not for few samples of wide states."""
    small = max(stack.width, *stack.rows) <= 256
    joins = precision == "bf16" and stack.kind != "identity" and (small or stack.samples >= 1024)
    if joins and not joined.why_not(stack.rows, stack.width):
        return JoinedSteps(stack, precision)
    return SeparateSteps(stack, precision)


def _rows(stack: Stack) -> list[int]:
    return [stack.rows[0] if i else stack.rows[-1] for i in stack.turns or (0,)]


def _at(weights: Tensor | None, j: int) -> Tensor | None:
    return None if weights is None else weights[j]


def _room(count: int, half: bool) -> int:
    """How many float32 numbers make room for so many others, in whole cache lines."""
    return -(-count // (64 if half else 32)) * 32


def _split(memory: Tensor, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Room for so many numbers, and what is left."""
    size = _room(count, dtype != memory.dtype)
    return memory[:size].view(dtype)[:count], memory[size:]


def _tensors(groups: Sequence[Any]) -> list[Tensor]:
    """All tensors in groups of tensors, of lists of them, and of None."""
    found = []
    for group in groups:
        for one in group:
            found += one if isinstance(one, list) else [one]
    return [t for t in found if t is not None]


def _join(parts: list[Tensor], into: Tensor) -> None:
    for part, to in zip(parts, into.chunk(len(parts), -1), strict=True):
        to.copy_(part)


def _put(into: Tensor, value: Tensor, new: bool, inverse: bool) -> None:
    value = value.flip(0) if inverse else value
    if new:
        into.copy_(value)
    else:
        into.add_(value)
