"""Wide stacks on a GPU: matrix products by cuBLAS, and one pass over memory between them.

Above some width, the products take almost all of the time. Activation and slope are Triton kernels,
and all launches of a pass are replayed as one CUDA graph if the same memory is passed again. In
tf32 and bf16 the gradients of weights are products of bf16 factors, so what each step reads is
saved in bf16; in bf16 all factors are rounded. States stay float32. With exact factors, the input
of sigma is computed again instead of saved, because the gradients of weights use its memory.
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

# Of a tile, between products
ROWS = 64
COLUMNS = 64
# True if a product of bf16 factors can have a float32 result
EXACT_SUMS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 8)
REMEMBERED = 32  # graphs of each pass
WASTED = 64  # after so many recorded graphs that were never replayed, no more are recorded

Weights = list[tuple[Tensor, Tensor, Tensor, Tensor]]  # K, b, V and gains


@triton.jit
def value_kernel(
    a,
    z,
    gains,
    h,
    fraction,
    B,
    r,
    ACT: constexpr,
    FAST: constexpr,
    BB: constexpr,
    BR: constexpr,
):  # pragma: kernel
    """z = c sigma(a) times the gains."""
    row = tl.program_id(0).to(tl.int64) * BB + tl.arange(0, BB)[:, None]
    column = tl.program_id(1) * BR + tl.arange(0, BR)[None, :]
    inside = (row < B) & (column < r)
    at = row * r + column
    c = tl.load(h) * fraction * tl.load(gains + column, mask=column < r)
    x = tl.load(a + at, mask=inside, other=0.0).to(tl.float32)
    value = c * sigma_of(x, ACT, FAST)
    tl.store(z + at, value.to(z.dtype.element_ty), mask=inside)


@triton.jit
def slope_kernel(
    a,
    w,
    u,
    z,
    gains,
    h,
    fraction,
    sums,
    dots,
    B,
    r,
    R,
    ACT: constexpr,
    FAST: constexpr,
    BB: constexpr,
    BR: constexpr,
):  # pragma: kernel
    """w = u = c w sigma'(a) and z = c sigma(a) for c times the gains, and sums over the tile.

    These are of u, and of the old w times sigma(a).
    """
    tile = tl.program_id(0)
    block = tl.program_id(1)
    row = tile.to(tl.int64) * BB + tl.arange(0, BB)[:, None]
    column = block * BR + tl.arange(0, BR)[None, :]
    inside = (row < B) & (column < r)
    at = row * r + column
    c = tl.load(h) * fraction * tl.load(gains + column, mask=column < r)
    x = tl.load(a + at, mask=inside, other=0.0).to(tl.float32)
    t = tl.load(w + at, mask=inside, other=0.0).to(tl.float32)
    value = sigma_of(x, ACT, FAST)
    slope = c * t * slope_of(x, value, ACT)
    tl.store(w + at, slope.to(w.dtype.element_ty), mask=inside)
    tl.store(u + at, slope.to(u.dtype.element_ty), mask=inside)
    tl.store(z + at, (c * value).to(z.dtype.element_ty), mask=inside)
    total = block * BR + tl.arange(0, BR)
    tl.store(sums + tile * R + total, tl.sum(slope, 0), mask=total < r)
    tl.store(dots + tile * R + total, tl.sum(t * value, 0), mask=total < r)


def dtypes(precision: str) -> tuple[torch.dtype, torch.dtype]:
    """The dtypes of factors: for products with states, and for weight gradients."""
    if precision == "bf16":
        return torch.bfloat16, torch.bfloat16
    if precision == "tf32":
        return torch.float32, torch.bfloat16
    return torch.float32, torch.float32


def saved_sizes(stack: Stack, precision: str) -> tuple[int, int]:
    """The counts of float32 numbers that hold the inputs of each step, and of sigma."""
    factor, low = dtypes(precision)
    rows = stack.steps * stack.samples
    read = rows * stack.width * low.itemsize
    inner = 0
    if low != torch.float32:
        inner = rows * max(stack.rows) * factor.itemsize
    # Aligned
    return -(-read // 128) * 32, -(-inner // 128) * 32


def saved_size(stack: Stack, precision: str = "ieee") -> int:
    """The count of numbers that the forward pass saves."""
    return sum(saved_sizes(stack, precision))


class Kernel:
    """A stack as matrix products."""

    def __init__(
        self, stack: Stack, precision: str = "ieee", deterministic: bool = False
    ) -> None:
        self.stack = stack
        self.precision = precision
        self.parts = 2 if stack.scheme.halves else 1
        self.factor, self.low = dtypes(precision)
        fast = precision in ("tf32", "bf16") and not interpreted()
        self.tile: dict[str, Any] = {
            "ACT": stack.sigma.name,
            "FAST": fast,
            "BB": ROWS,
            "BR": COLUMNS,
            "enable_fp_fusion": True,  # Triton 3.9 warns if this is left open
        }
        self.tiles = -(-stack.samples // ROWS)
        shape = (stack.layers, max(stack.rows))
        self.ones = torch.ones(shape, device=stack.device)
        self.replay = Replay()

    def forward(
        self, y: Tensor, tensors: Tensors, save: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """y_N from y_0 (B, n) and, with `save`, the values that `backward` needs."""
        stack = self.stack
        saved = None
        if save:
            saved = y.new_empty(saved_size(stack, self.precision))
        out = torch.empty_like(y)
        sources, inner = self._room(y, saved)
        now = self._new(y, y.dtype, self.parts)
        z = self._new(y, self.factor)
        h: Any = tensors[0]
        weights = self._weights(tensors)

        def launch() -> None:
            self._begin(y, now)
            for s, (half, j, fraction) in enumerate(stack.order):
                K, b, V, gains = weights[half]
                x = now[half]
                if save or self.factor != x.dtype:
                    source = sources[s % len(sources)].copy_(x)
                    x = source if self.factor == self.low else x
                a = self._view(inner[s % len(inner)], half)
                value = self._view(z, half)
                torch.addmm(b[j], x, K[j].mT, out=a)
                B, r = a.shape
                grid = (self.tiles, -(-r // COLUMNS))
                value_kernel[grid](
                    a, value, gains[j], h[j:], fraction, B, r, **self.tile
                )
                add_product(now[self._moved(half)], value, V[j])
            torch.cat(now.unbind(0), -1, out=out)

        used = [y, out, z, now, sources, inner, h]
        self._run("forward" if save else "last", launch, used, weights)
        return out, saved

    def backward(
        self, y: Tensor, saved: Tensor, g: Tensor, tensors: Tensors
    ) -> list[Tensor | None]:
        """The gradients of y_0 and of all tensors, given the gradient of y_N."""
        stack = self.stack
        out = torch.empty_like(g)
        buffer = g.new_empty(stack.size)
        grads = stack.gradients(buffer)
        sources, inner = self._room(g, saved)
        now = self._new(g, g.dtype, self.parts)
        w = self._new(g, self.factor)
        z = self._new(g, self.low)
        u = w if self.factor == self.low else self._new(g, self.low)
        low = w if self.low == g.dtype else self._new(g, self.low)
        sums = g.new_empty(2, stack.steps, self.tiles, max(stack.rows))
        h: Any = tensors[0]
        weights = self._weights(tensors)
        # The gradient of V is added to that of K if V is K.
        outputs = [
            grads[3 * half + (1 if kind in ("same", "gains") else 3)]
            for half, kind in enumerate(stack.outputs)
        ]

        def launch() -> None:
            buffer.zero_()
            self._begin(g, now)
            for s, step in reversed(list(enumerate(stack.order))):
                half, j, fraction = step
                K, b, V, gains = weights[half]
                dK = grads[3 * half + 1]
                t = self._view(w, half)
                slope = self._view(u, half)
                value = self._view(z, half)
                target = now[self._moved(half)]
                rounded = self._rounded(target, low)
                x = rounded if self.factor == self.low else target
                torch.mm(x, V[j].mT, out=t)
                a = self._view(inner[s % len(inner)], half)
                if self.low == torch.float32:
                    torch.addmm(b[j], sources[s], K[j].mT, out=a)
                B, r = a.shape
                grid = (self.tiles, -(-r // COLUMNS))
                slope_kernel[grid](
                    a,
                    t,
                    slope,
                    value,
                    gains[j],
                    h[j:],
                    fraction,
                    sums[0, s],
                    sums[1, s],
                    B,
                    r,
                    sums.shape[-1],
                    **self.tile,
                )
                add_product(dK[j], slope.mT, sources[s])  # pyright: ignore[reportOptionalSubscript]
                into = outputs[half]
                if into is not None:
                    add_product(into[j], value.mT, rounded)
                add_product(now[half], t, K[j])
            self._collect(sums, h, weights, grads)
            torch.cat(now.unbind(0), -1, out=out)

        used = [g, out, buffer, saved, now, low, w, u, z, sums, h]
        self._run("backward", launch, used, weights)
        return [out, *grads]

    # Parts of a pass

    def _moved(self, half: int) -> int:
        return 1 - half if self.parts == 2 else half

    def _collect(
        self, sums: Tensor, h: Tensor, weights: Weights, grads: list[Any]
    ) -> None:
        """The gradients of biases, gains and steps, from the sums over each tile of each step."""
        stack = self.stack
        moves = list(stack.scheme.ordered(stack.inverse))
        shape = (2, stack.layers, len(moves), self.tiles, -1)
        by_layer = sums.view(shape).sum(3)
        if stack.inverse:
            by_layer = by_layer.flip(1)
        for e, (half, _, fraction) in enumerate(moves):
            r = stack.rows[half]
            slopes, dots = by_layer[:, :, e, :r]
            dots = fraction * dots
            grads[3 * half + 2] += slopes
            if stack.outputs[half] == "gains":
                grads[3 * half + 3] += h.unsqueeze(-1) * dots
            if grads[0] is not None:
                grads[0] += (weights[half][3][:, :r] * dots).sum(1)

    def _room(self, y: Tensor, saved: Tensor | None) -> tuple[Tensor, Tensor]:
        """Memory for the inputs of each step (.., B, m), and for the inputs of sigma (.., B r)."""
        stack = self.stack
        B = stack.samples
        m = stack.width
        inner_size = B * max(stack.rows)
        sources = y.new_empty(1, B, m, dtype=self.low)
        inner = y.new_empty(1, inner_size, dtype=self.factor)
        if saved is not None:
            size, more = saved_sizes(stack, self.precision)
            states = saved[:size].view(self.low)
            sources = states[: stack.steps * B * m].view(-1, B, m)
            if more:
                values = saved[size:].view(self.factor)
                inner = values[: stack.steps * inner_size].view(-1, inner_size)
        return sources, inner

    def _new(
        self, y: Tensor, dtype: torch.dtype, parts: int | None = None
    ) -> Tensor:
        """Memory for both halves of a state (parts, B, m), or for a matrix of any of the widths."""
        stack = self.stack
        if parts is not None:
            return y.new_empty(parts, stack.samples, stack.width, dtype=dtype)
        widest = max(*stack.rows, stack.width)
        return y.new_empty(stack.samples * widest, dtype=dtype)

    def _view(self, flat: Tensor, half: int) -> Tensor:
        """The matrix (B, r) at the beginning of a buffer."""
        r = self.stack.rows[half]
        return flat[: self.stack.samples * r].view(-1, r)

    def _state(self, flat: Tensor) -> Tensor:
        """The matrix (B, m) at the beginning of a buffer."""
        m = self.stack.width
        return flat[: self.stack.samples * m].view(-1, m)

    def _weights(self, tensors: Tensors) -> Weights:
        """K, b, V and the gains of each force; factors of products are rounded."""
        weights = []
        for force in self.stack.forces(tensors):
            K = force.K.to(self.factor)
            V = K
            gains = self.ones
            if force.V is not None and force.V.ndim == 2:
                gains = force.V
            elif force.V is not None:
                V = force.V.to(self.factor)
            weights.append((K, force.b.to(self.factor), V, gains))
        return weights

    def _rounded(self, target: Tensor, low: Tensor) -> Tensor:
        """A state as a factor of weights' gradients, in a buffer if its dtype changes."""
        if self.low == target.dtype:
            return target
        return self._state(low).copy_(target)

    def _begin(self, y: Tensor, now: Tensor) -> None:
        """Split y into its halves."""
        halves = y.chunk(self.parts, -1)
        for half, place in zip(halves, now, strict=True):
            place.copy_(half)

    def _run(
        self,
        name: str,
        launch: Callable[[], None],
        used: list[Tensor],
        weights: Weights,
    ) -> None:
        if self.stack.device.type != "cuda":
            launch()
            return
        used += [t for force in weights for t in force]
        with torch.cuda.device(self.stack.device), multiplying(self.precision):
            self.replay(name, launch, used)


def add_product(into: Tensor, x: Tensor, W: Tensor) -> None:
    """Into += x W, added up in float32 for factors of any dtype."""
    if x.dtype == into.dtype:
        into.addmm_(x, W)
    elif x.is_cuda and EXACT_SUMS:
        torch.addmm(into, x, W, out_dtype=into.dtype, out=into)
    else:
        into += x.to(into.dtype) @ W.to(into.dtype)


class Replay:
    """The launches of passes as CUDA graphs, by the addresses of all memory that they touch.

    Nothing is copied: PyTorch allocates the same memory again and again during training. A pass
    whose addresses are new is launched kernel by kernel, and recorded the second time.
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
        key = (name, where, *[t.data_ptr() for t in used])
        seen = key in self.graphs
        graph = self.graphs.pop(key, None)
        if graph is not None:
            self.wasted = 0
        elif seen and self.wasted < WASTED:
            graph = _recorded(launch, where)
            self.wasted += 1
        if graph is None:
            launch()
        else:
            graph.replay()
        self.graphs[key] = graph
        if len(self.graphs) > REMEMBERED:
            self.graphs.popitem(last=False)


_places: dict[Any, Any] = {}


def _recorded(launch: Callable[[], None], where: tuple[int, int]) -> Any:
    """The launches as a graph, recorded on another stream.

    Graphs that run one after the other share a stream and a pool. The workspace of cuBLAS is in
    that pool, so it exists as long as one of these graphs.
    """
    current = torch.cuda.current_stream()
    if where not in _places:
        _places[where] = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
    stream, pool = _places[where]
    stream.wait_stream(current)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin(pool, capture_error_mode="thread_local")
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
        # `fp32_precision` was set, and rules out the older switch.
        except RuntimeError:
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
