"""The whole stack as one call on the CPU: tiles of samples, spread over threads.

What a kernel needs besides its tensors depends on their sizes alone and is computed once. Sums over
samples are made tile by tile within groups that depend on the batch size alone, then group by
group, so results are the same to the bit for any number of threads. The backward pass takes a few
steps at a time, so that these partial sums need the same little memory at any depth.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hdnn.engine.kernels import lent, tiles
from hdnn.engine.kernels.protocol import ACTIVATIONS, KINDS, Stack, Tensors, schedule
from hdnn.engine.kernels.vectors import VECTOR_BYTES

GROUPS = 8, 32  # the fewest and the most groups of tiles that have sums of their own
PARTIAL_BYTES = 2**18  # for the sums of all groups, over the steps of one part of a backward pass,
STEPS = 16  # or as much as this many steps need, if that is more
PARALLEL_FROM = 100_000  # products: below this, waking a thread costs more than it brings
LONG = 5_000_000  # products: takes far longer than the millisecond that a thread may be late


class _Sizes:
    """What depends on the sizes of a stack alone."""

    def __init__(self, stack: Stack) -> None:
        B, width, steps, R = stack.samples, stack.width, stack.steps, max(stack.rows)
        self.bytes = stack.dtype.itemsize
        lanes = VECTOR_BYTES // self.bytes
        self.tiles = -(-B // lanes)
        self.groups = max(1, min(self.tiles, max(GROUPS[0], min(GROUPS[1], self.tiles // 8))))
        general = stack.kind == "general"
        each = (R * width + R + 1) + (R * width if general else 0)  # sums of one step
        most = max(STEPS, PARTIAL_BYTES // (self.groups * each * self.bytes))
        chunk = max(1, min(steps, most))
        # The parts of a backward pass: first step and count. Without steps, it copies the state.
        spans = [(max(0, high - chunk), min(chunk, high)) for high in range(steps, 0, -chunk)]
        self.chunks = spans or [(0, 0)]
        self.total = -(-chunk * each // lanes) * lanes  # elements of the sums of a group
        # Bytes of all sums, the same for any number of steps, and of what a step keeps.
        self.sums = self.groups * (most * each + lanes) * self.bytes
        self.layer, self.late = self.tiles * width * VECTOR_BYTES, self.tiles * R * VECTOR_BYTES
        self.kept = kept_size(stack)
        self.how = ACTIVATIONS.index(stack.activation), KINDS.index(stack.kind)
        self.forward_products = B * steps * R * width
        self.backward_products = B * chunk * R * width


def kept_size(stack: Stack, precision: str = "") -> int:
    """How many numbers a stack keeps: whole tiles of what each step reads, and of sigma.

    Where the slope of sigma is no function of sigma itself, that is what sigma reads.
    """
    lanes = VECTOR_BYTES // stack.dtype.itemsize
    padded = -(-stack.samples // lanes) * lanes
    return stack.steps * padded * (stack.width + max(stack.rows))


def why_not(dtype: torch.dtype, features: int) -> str:
    """Why tiles cannot hold such states; empty if they can."""
    known = (torch.float32, torch.float64, torch.bfloat16, torch.float16)  # half: by float32
    return "" if dtype in known else f"the CPU kernel is not for {dtype}"


class CpuKernel:
    """A stack, tile by tile."""

    def __init__(self, stack: Stack) -> None:
        self.learned = stack.learned
        # Where each part moves once a layer, each gradient is the sum of one step, and is written;
        # otherwise several are added to zeros.
        self.once = sorted(stack.turns) in ([], [0, 1])
        self.sizes = sizes = _Sizes(stack)
        self.schedule = schedule(stack.turns, stack.layers, stack.inverse)
        self.order = tuple(t.data_ptr() for t in self.schedule)
        n, R = stack.features, max(stack.rows)
        self.late = stack.steps * sizes.layer  # bytes of what is kept before any sigma
        # Of the steps that move each part: how many rows K has. The first part moves by the last K.
        fixed = (stack.samples, sizes.tiles, n, stack.width, stack.rows[-1], stack.rows[0])
        fixed += sizes.how
        work = (sizes.forward_products * 2, sizes.tiles, stack.dtype)
        self.ahead = Spread("forward", n + R, *work, (*fixed, stack.steps, *self.order))
        work = (sizes.backward_products * 6, sizes.groups, stack.dtype)
        self.behind = Spread("backward", 2 * n + 3 * R, *work, (*fixed, sizes.total, self.once))
        self.dtype = stack.dtype
        self.collect: Any = None  # the kernel, compiled when it is first needed

    def forward(self, y: Tensor, tensors: Tensors, keep: bool) -> tuple[Tensor, Tensor | None]:
        kept = lent.empty(self.sizes.kept, self.dtype) if keep else None
        place = 0 if kept is None else kept.data_ptr()
        out = torch.empty_like(y)
        states = (y.data_ptr(), out.data_ptr(), tensors[-1].data_ptr(), place, place + self.late)
        self.ahead.run(*states, *_addresses(tensors))
        return out, kept

    def backward(self, kept: Tensor, g: Tensor, tensors: Tensors) -> Tensors:
        # Not 0, even if there is nothing to read: 0 would make the kernel read y.
        return self._gradients(kept.data_ptr() or 1, 0, 0, g, tensors)

    def undo(self, y_N: Tensor, g: Tensor, tensors: Tensors) -> tuple[Tensor, Tensors]:
        y_0 = torch.empty_like(y_N)
        return y_0, self._gradients(0, y_N.data_ptr(), y_0.data_ptr(), g, tensors)

    def _gradients(self, kept: int, y: int, y_0: int, g: Tensor, tensors: Tensors) -> Tensors:
        """From the address `kept` or, if that is 0, from y = y_N, which is undone to y_0."""
        *weights, coef = tensors
        new, sizes = torch.empty_like if self.once else torch.zeros_like, self.sizes
        found: list[Any] = [None if w is None else new(w) for w in weights]
        found.append(torch.empty_like(coef) if self.learned else None)
        g_0 = torch.empty_like(g)
        before, after = (y, g.data_ptr()), (y_0, g_0.data_ptr())
        weights = (*_addresses(tensors), *_addresses(found))
        c, dc = coef.data_ptr(), found[-1].data_ptr() if self.learned else 0
        (part, layer), late = self.order, kept + self.late
        collect = self.collect = self.collect or tiles.kernel("collect", self.dtype)
        sums, owner = _room_for_sums(sizes.sums)
        for low, count in sizes.chunks:
            at = low * sizes.bytes
            states = (*before, *after, c + at, sums, kept and kept + low * sizes.layer)
            args = self.behind.run(
                *(count, part + 8 * low, layer + 8 * low, *states, late + low * sizes.late),
                *(*weights, dc and dc + at),
            )
            collect(args.buffer_info()[0])
            before = after
        del owner
        return g_0, *found

    kept_size = staticmethod(kept_size)
    why_not = staticmethod(why_not)


def _addresses(tensors: Sequence[Any]) -> tuple[int, ...]:
    """Of K, b and V of the steps that move each part; 0 for a V that is not given."""
    if len(tensors) == 4:
        K, b, V, _ = tensors
        K, b, V = K.data_ptr(), b.data_ptr(), V.data_ptr() if V is not None else 0
        return K, K, b, b, V, V
    K_p, K_q, b_p, b_q, V_p, V_q, _ = tensors  # p moves by the weights of q, and q by those of p
    V_p, V_q = (0, 0) if V_p is None else (V_p.data_ptr(), V_q.data_ptr())
    return K_q.data_ptr(), K_p.data_ptr(), b_q.data_ptr(), b_p.data_ptr(), V_q, V_p


# How tiles are spread over threads


class Spread:
    """A kernel over shares of the samples, each with rows of vectors as scratch memory.

    Each thread takes the next share as soon as it is free. The arguments in `fixed` are the same
    in all calls, and are put into an array once.
    """

    def __init__(
        self,
        name: str,
        rows: int,
        products: int,
        shares: int,
        dtype: torch.dtype,
        fixed: Sequence[int] = (),
    ) -> None:
        self.name, self.dtype = name, dtype
        self.kernel: Any = None  # compiled when it is first needed
        self.shares, self.products = shares, products
        self.room = rows * VECTOR_BYTES
        self.shared = shares > 1 and products >= PARALLEL_FROM
        self.start = array("q", (0, 0, shares, self.room, *fixed))

    def run(self, *given: int) -> array[int]:
        """Run the kernel; the arguments that it had, for one that goes on from there."""
        kernel = self.kernel
        if kernel is None:
            kernel = self.kernel = tiles.kernel(self.name, self.dtype)
        threads = self._threads() if self.shared else 1
        room = _workspace.address("rows", threads * self.room)
        args = self.start + array("q", (room, *given))
        address = args.buffer_info()[0]
        if threads == 1:
            kernel(address)
        elif _openmp is not None:
            if self.products > LONG:
                _openmp(kernel, address, threads, 0)
            else:
                _watched(kernel, address, threads)
        else:
            rest = [_pool().submit(kernel, address) for _ in range(1, threads)]
            try:
                kernel(address)
            finally:  # they write to memory that this call owns
                wait(rest)
        return args

    def _threads(self) -> int:
        """How many threads are worth waking for this."""
        threads = min(self.shares, torch.get_num_threads())
        if threads > 1 and self.products < LONG:
            if _openmp is None and self.products < 20 * PARALLEL_FROM:
                return 1
            if time.perf_counter() < _alone_until:
                return 1
        return threads


class _Workspace(threading.local):
    """Scratch memory, kept from call to call; each calling thread has its own."""

    def __init__(self) -> None:
        self.rooms: dict[str, tuple[int, int, Tensor]] = {}

    def address(self, name: str, size: int) -> int:
        """The address of this many bytes."""
        found = self.rooms.get(name)
        if found is None or found[1] < size:
            room = torch.empty(size, dtype=torch.uint8, device="cpu")
            found = self.rooms[name] = (room.data_ptr(), size, room)
        return found[0]


_workspace = _Workspace()


def _room_for_sums(size: int) -> tuple[int, Tensor | None]:
    """The address of this many bytes, and the tensor to keep alive while they are used."""
    if size <= 4 * PARTIAL_BYTES:
        return _workspace.address("sums", size), None
    # Too much to keep until the next call.
    room = torch.empty(size, dtype=torch.uint8, device="cpu")
    return room.data_ptr(), room


_alone_until = 0.0


def _watched(kernel: Any, address: int, threads: int) -> None:
    """Run a short kernel on threads; if they are late, use this thread alone for a while.

    On a busy machine a thread may get its core only after milliseconds, and all wait for the last.
    """
    global _alone_until
    start = time.perf_counter()
    assert _openmp is not None
    _openmp(kernel, address, threads, 0)
    end = time.perf_counter()
    if end - start > 1e-3:
        _alone_until = end + 100 * (end - start)


def _find_openmp() -> Any:
    """The function that starts threads of PyTorch's own OpenMP, which are awake already."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"))
        found = library.GOMP_parallel
    except (OSError, AttributeError):
        return None
    found.restype = None
    found.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    return found


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count() or 1, "hdnn-cpu")


def _after_fork() -> None:
    """Start afresh: threads, OpenMP's too, and the locks they held stayed in the parent."""
    global _openmp
    _openmp = None
    _pool.cache_clear()
    tiles.after_fork()


_openmp = _find_openmp()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
