"""Wide stacks on a GPU: matrix products by cuBLAS, and one pass over memory between them.

Past some width the products take almost all of the time. Bias, activation and slope are Triton
kernels; the versions of the state are written where the backward pass reads them; and all launches
of a pass are replayed as one CUDA graph where the same memory is given again. In bf16 the factors
of products are rounded, and states stay float32.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from hdnn.engine.gpu import interpreted, sigma_of, slope_of
from hdnn.engine.memory import Stack, Tensors

ROWS, COLUMNS = 64, 64  # of a tile, between products
REMEMBERED = 32  # graphs of each pass
WASTED = 64  # graphs that were recorded and never replayed, after which none is recorded any more


@triton.jit
def value_kernel(
    a,
    b,
    z,
    h,
    fraction,
    B,
    r,
    ACT: constexpr,
    FAST: constexpr,
    BB: constexpr,
    BR: constexpr,
):  # pragma: kernel
    """a = a + b, and z = c sigma(a)."""
    row = tl.program_id(0).to(tl.int64) * BB + tl.arange(0, BB)[:, None]
    column = tl.program_id(1) * BR + tl.arange(0, BR)[None, :]
    inside = (row < B) & (column < r)
    at = row * r + column
    x = tl.load(a + at, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(b + column, mask=column < r, other=0.0)
    value = tl.load(h) * fraction * sigma_of(x, ACT, FAST)
    tl.store(a + at, x.to(a.dtype.element_ty), mask=inside)
    tl.store(z + at, value.to(z.dtype.element_ty), mask=inside)


@triton.jit
def slope_kernel(
    a, w, u, z, h, fraction, sums, dots, B, r,
    ACT: constexpr, FAST: constexpr, BB: constexpr, BR: constexpr,
):  # fmt: skip  # pragma: kernel
    """u = c w sigma'(a) and z = c sigma(a), with sums of u and of w sigma(a) over the tile."""
    tile = tl.program_id(0)
    block = tl.program_id(1)
    row = tile.to(tl.int64) * BB + tl.arange(0, BB)[:, None]
    column = block * BR + tl.arange(0, BR)[None, :]
    inside = (row < B) & (column < r)
    at = row * r + column
    c = tl.load(h) * fraction
    x = tl.load(a + at, mask=inside, other=0.0).to(tl.float32)
    t = tl.load(w + at, mask=inside, other=0.0).to(tl.float32)
    value = sigma_of(x, ACT, FAST)
    slope = c * t * slope_of(x, value, ACT)
    tl.store(u + at, slope.to(u.dtype.element_ty), mask=inside)
    tl.store(z + at, (c * value).to(z.dtype.element_ty), mask=inside)
    total = block * BR + tl.arange(0, BR)
    tl.store(sums + tile * r + total, tl.sum(slope, 0), mask=total < r)
    tl.store(dots + tile * tl.num_programs(1) + block, tl.sum(t * value))


def saved_size(stack: Stack) -> int:
    """Numbers that the forward pass saves: every version of the halves, and what sigma reads."""
    parts = 2 if stack.scheme.halves else 1
    versions = (stack.steps + parts) * stack.width
    return stack.samples * (versions + stack.steps * max(stack.rows))


class Kernel:
    """A stack as matrix products."""

    def __init__(
        self, stack: Stack, precision: str = "ieee", deterministic: bool = False
    ) -> None:
        self.stack = stack
        self.precision = precision
        self.parts = 2 if stack.scheme.halves else 1
        self.factor = torch.bfloat16 if precision == "bf16" else stack.dtype
        fast = precision in ("tf32", "bf16") and not interpreted()
        self.how = {
            "ACT": stack.sigma.name,
            "FAST": fast,
            "BB": ROWS,
            "BR": COLUMNS,
        }
        self.replay = Replay()

    def forward(
        self, y: Tensor, tensors: Tensors, save: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """y_N from y_0 (B, n) and, with `save`, what `backward` needs of the states."""
        saved = y.new_empty(saved_size(self.stack)) if save else None
        out = torch.empty_like(y)
        states, inner = self._room(y, saved)
        z = self._new(y, 1, self.factor)[0]
        h: Any = tensors[0]
        weights = self._weights(tensors)

        def launch() -> None:
            now = self._begin(y, states)
            for s, (half, j, fraction) in enumerate(self.stack.order):
                K, b, V = weights[half]
                a = self._view(inner[s if save else 0], half)
                value = self._view(z, half)
                self._product(now[half], K[j].mT, a)
                self._pointwise(
                    value_kernel, half, a, b[j], value, h[j:], fraction
                )
                to = self._moved(half)
                place = states[self.parts + s] if save else now[to]
                now[to] = self._add(now[to], value, V[j], place)
            torch.cat(now, -1, out=out)

        used = [
            y,
            out,
            z,
            states,
            inner,
            h,
            *[t for force in weights for t in force],
        ]
        self._run("forward" if save else "last", launch, used)
        return out, saved

    def backward(
        self, y: Tensor, saved: Tensor, g: Tensor, tensors: Tensors
    ) -> list[Tensor | None]:
        """The gradients of y_0 and of all tensors, from that of y_N."""
        stack = self.stack
        out = torch.empty_like(g)
        buffer = g.new_empty(stack.size)
        grads = stack.gradients(buffer)
        states, inner = self._room(g, saved)
        now = torch.empty_like(states[: self.parts])
        w, u, z = self._new(g, 3, self.factor)
        tiles = -(-stack.samples // ROWS)
        sums = g.new_empty(tiles, max(stack.rows))
        dots = g.new_empty(tiles, -(-max(stack.rows) // COLUMNS))
        h: Any = tensors[0]
        weights = self._weights(tensors)
        sources = self._sources()

        def launch() -> None:
            buffer.zero_()
            gs = self._begin(g, now)
            for s in reversed(range(stack.steps)):
                half, j, fraction = stack.order[s]
                K, _, V = weights[half]
                dK, db, dV = grads[3 * half + 1 : 3 * half + 4]
                t, slope, value = (self._view(each, half) for each in (w, u, z))
                total = sums.view(-1)[: tiles * stack.rows[half]].view(
                    tiles, -1
                )
                g_target = gs[self._moved(half)]
                self._product(g_target, V[j].mT, t)
                args = (
                    self._view(inner[s], half),
                    t,
                    slope,
                    value,
                    h[j:],
                    fraction,
                    total,
                    dots,
                )
                self._pointwise(slope_kernel, half, *args)
                self._add(dK[j], slope.mT, states[sources[s]], dK[j])  # pyright: ignore[reportOptionalSubscript]
                into = dK if stack.outputs[half] == "same" else dV
                if into is not None:
                    self._add(into[j], value.mT, g_target, into[j])
                db[j].add_(total.sum(0))  # pyright: ignore[reportOptionalSubscript]
                if grads[0] is not None:
                    blocks = -(-stack.rows[half] // COLUMNS)
                    part = dots.view(-1)[: tiles * blocks].sum()
                    grads[0][j].add_(part, alpha=fraction)
                self._add(gs[half], slope, K[j], gs[half])
            torch.cat(gs, -1, out=out)

        used = [g, out, buffer, saved, now, w, u, z, sums, dots, h]
        self._run(
            "backward", launch, used + [t for force in weights for t in force]
        )
        return [out, *grads]

    # Parts of a pass

    def _moved(self, half: int) -> int:
        return 1 - half if self.parts == 2 else half

    def _sources(self) -> list[int]:
        """The version of the state that each step reads."""
        latest = list(range(self.parts))
        sources = []
        for s, (half, _, _) in enumerate(self.stack.order):
            sources.append(latest[half])
            latest[self._moved(half)] = self.parts + s
        return sources

    def _room(self, y: Tensor, saved: Tensor | None) -> tuple[Tensor, Tensor]:
        """Room for the versions of the state (.., B, m), and for what sigma reads."""
        stack = self.stack
        B, m, R = stack.samples, stack.width, max(stack.rows)
        if saved is None:
            return y.new_empty(self.parts, B, m), y.new_empty(1, B * R)
        size = (stack.steps + self.parts) * B * m
        return saved[:size].view(-1, B, m), saved[size:].view(
            stack.steps, B * R
        )

    def _new(self, y: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        return y.new_empty(
            count, self.stack.samples * max(self.stack.rows), dtype=dtype
        )

    def _view(self, flat: Tensor, half: int) -> Tensor:
        """The matrix (B, r) at the beginning of a buffer."""
        r = self.stack.rows[half]
        return flat[: self.stack.samples * r].view(-1, r)

    def _weights(self, tensors: Tensors) -> list[tuple[Tensor, Tensor, Tensor]]:
        """K, b and V of each force; factors of products are rounded."""
        weights = []
        for force in self.stack.forces(tensors):
            K = force.K.to(self.factor)
            V = K if force.V is None else force.V.to(self.factor)
            weights.append((K, force.b, V))
        return weights

    def _begin(self, y: Tensor, states: Tensor) -> list[Tensor]:
        """The parts of y, each in its place."""
        return [
            states[i].copy_(part)
            for i, part in enumerate(y.chunk(self.parts, -1))
        ]

    def _product(self, x: Tensor, W: Tensor, out: Tensor) -> None:
        """Out = x W."""
        if self.factor == x.dtype == out.dtype:
            torch.mm(x, W, out=out)
        else:
            out.copy_(x.to(self.factor) @ W)

    def _add(self, now: Tensor, x: Tensor, W: Tensor, out: Tensor) -> Tensor:
        """Out = now + x W."""
        if self.factor == now.dtype:
            return torch.addmm(now, x, W, out=out)
        return torch.add(now, x @ W.to(self.factor), out=out)

    def _pointwise(self, kernel: Any, half: int, *args: Any) -> None:
        B, r = self.stack.samples, self.stack.rows[half]
        grid = (-(-B // ROWS), -(-r // COLUMNS))
        kernel[grid](*args, B, r, **self.how, num_warps=4)

    def _run(
        self, name: str, launch: Callable[[], None], used: list[Tensor]
    ) -> None:
        if self.stack.device.type != "cuda":
            launch()
            return
        with torch.cuda.device(self.stack.device), multiplying(self.precision):
            self.replay(name, launch, used)


class Replay:
    """The launches of passes as CUDA graphs, by the addresses of all memory that they touch.

    Nothing is copied: PyTorch gives out the same memory again and again as a training goes on. A
    pass whose addresses are new is launched kernel by kernel, and recorded the second time.
    """

    def __init__(self) -> None:
        self.graphs: OrderedDict[Any, Any] = OrderedDict()
        self.wasted = 0

    def __call__(
        self, name: str, launch: Callable[[], None], used: list[Tensor]
    ) -> None:
        if torch.cuda.is_current_stream_capturing():
            launch()
            return
        # cuBLAS has memory of its own for each thread and stream.
        where = (threading.get_ident(), torch.cuda.current_stream().cuda_stream)
        key = (name, *where, *[t.data_ptr() for t in used])
        seen = key in self.graphs
        graph = self.graphs.pop(key, None)
        if graph is not None:
            self.wasted = 0
        elif seen and self.wasted < WASTED:
            graph = _recorded(launch)
            self.wasted += 1
        if graph is None:
            launch()
        else:
            graph.replay()
        self.graphs[key] = graph
        if len(self.graphs) > REMEMBERED:
            self.graphs.popitem(last=False)


def _recorded(launch: Callable[[], None]) -> Any:
    """The launches as a graph, recorded on another stream."""
    current = torch.cuda.current_stream()
    stream = torch.cuda.Stream()
    stream.wait_stream(current)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            launch()
        finally:
            graph.capture_end()
    current.wait_stream(stream)
    return graph


_switch = threading.RLock()


@contextmanager
def multiplying(precision: str) -> Iterator[None]:
    """Let cuBLAS take float32 factors as they are, or rounded to tf32.

    PyTorch has one switch for all threads.
    """
    matmul: Any = torch.backends.cuda.matmul
    rounding = precision == "tf32"
    with _switch:
        try:
            before = torch.get_float32_matmul_precision()
            after = "high" if rounding else "highest"
            change = torch.set_float32_matmul_precision
        except (
            RuntimeError
        ):  # `fp32_precision` was set, and rules out the older switch
            before = matmul.fp32_precision
            after = "tf32" if rounding else "ieee"
            change = partial(setattr, matmul, "fp32_precision")
        if precision == "bf16" or before == after:
            yield
            return
        change(after)
        try:
            yield
        finally:
            change(before)
