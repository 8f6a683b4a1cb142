"""The whole stack as one call on the CPU: tiles of samples, spread over threads.

What a call needs to know besides its tensors depends on their sizes alone and is worked out once.
Sums over samples are made tile by tile within groups that depend on the batch size alone, then
group by group: results are the same to the bit for any number of threads. Steps are taken back a
few at a time, so that these partial sums need the same little room at any depth.

For few samples and wide layers, matrix products by BLAS are faster: see `path`.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from array import array
from concurrent.futures import ThreadPoolExecutor, wait
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hdnn.engine.kernels import blas, tiles
from hdnn.engine.kernels.vectors import VECTOR_BYTES

__all__ = [
    "euler_backward",
    "euler_forward",
    "kept_size",
    "path",
    "split_backward",
    "split_forward",
]

GROUPS = 8, 32  # the fewest and the most groups of tiles that have sums of their own
PARTIAL_BYTES = 2**18  # for the sums of all groups over the steps that are taken back at a time,
STEPS = 16  # or room for so many steps, if that is more
PARALLEL_FROM = 100_000  # products, below which waking a thread costs more than it brings
LONG = 5_000_000  # products, which take far longer than a millisecond that a thread may be late

# Where BLAS wins: weights of at least so many elements, where tiles are padded at least so much.
BLAS_FROM = {
    torch.float32: ((2**16, 1.5), (2**13, 3.0)),
    torch.float64: ((2**13, 4.0),),
}


def path(width: int, r: int, B: int, dtype: torch.dtype) -> str:
    """ "tiles" or "blas", whichever is faster for weights (r, width) and B samples.

    Full tiles are faster at every width measured, up to 512. A last tile costs as much as a full
    one, so that few samples and wide layers are left to BLAS.
    """
    lanes = VECTOR_BYTES // dtype.itemsize
    padded = -(-B // lanes) * lanes
    for elements, waste in BLAS_FROM[dtype]:
        if r * width >= elements and padded > waste * B:
            return "blas"
    return "tiles"


def kept_size(split: bool, steps: int, B: int, width: int, dtype: torch.dtype) -> int:
    """How many numbers the forward functions keep: whole tiles of what each step reads."""
    lanes = VECTOR_BYTES // dtype.itemsize
    return steps * (-(-B // lanes) * lanes) * width


# The four functions


def split_forward(
    y: Tensor,
    K_p: Tensor,
    K_q: Tensor,
    b_p: Tensor,
    b_q: Tensor,
    V_p: Tensor | None,
    V_q: Tensor | None,
    half: Tensor,
    layer: Tensor,
    coef: Tensor,
    activation: str,
    kind: str,
    keep: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """y_N: y_0 (B, 2m) through all shears; with `keep`, what `split_backward` needs of the states.

    That is the half that each shear reads.
    """
    sizes = _sizes(y.shape, K_p.shape, K_q.shape, half.shape[0], y.dtype, activation, kind)
    kept = y.new_empty(sizes.kept) if keep else None
    if sizes.blas:
        V = {"same": (K_q, K_p), "identity": (None, None)}.get(kind, (V_q, V_p))
        return blas.split_forward(
            y, (K_q, K_p), (b_q, b_p), V, half, layer, coef, activation, kept
        ), kept
    if V_p is None or V_q is None:
        V_p, V_q = K_p, K_q
    out = torch.empty_like(y)
    sizes.forward.spread(
        *(*sizes.tensors, y.data_ptr(), out.data_ptr()),
        *(K_p.data_ptr(), K_q.data_ptr(), b_p.data_ptr(), b_q.data_ptr()),
        *(V_p.data_ptr(), V_q.data_ptr()),
        *(half.data_ptr(), layer.data_ptr(), coef.data_ptr(), sizes.code, sizes.kind),
        0 if kept is None else kept.data_ptr(),
    )
    return out, kept


def split_backward(
    y: Tensor | None,
    g: Tensor,
    K_p: Tensor,
    K_q: Tensor,
    b_p: Tensor,
    b_q: Tensor,
    V_p: Tensor | None,
    V_q: Tensor | None,
    half: Tensor,
    layer: Tensor,
    coef: Tensor,
    activation: str,
    kind: str,
    coef_gradient: bool = True,
    kept: Tensor | None = None,
) -> blas.Grads:
    """The gradients, from that of y_N and either what `split_forward` has kept, or y_N.

    From y_N the shears are undone one by one, down to y_0. Returns (y_0, g_0, dK_p, dK_q, db_p,
    db_q, dV_p, dV_q, dcoef); dV is None unless V is general, dcoef unless it is asked for, and y_0
    where no shear is undone.
    """
    sizes = _sizes(g.shape, K_p.shape, K_q.shape, half.shape[0], g.dtype, activation, kind)
    if sizes.blas:
        V = {"same": (K_q, K_p), "identity": (None, None)}.get(kind, (V_q, V_p))
        return blas.split_backward(
            y, g, (K_q, K_p), (b_q, b_p), V, half, layer, coef, activation, kind, kept
        )
    if V_p is None or V_q is None:
        V_p, V_q = K_p, K_q
    y_0 = None if y is None else torch.empty_like(y)
    g_0, dcoef = torch.empty_like(g), torch.zeros_like(coef) if coef_gradient else None
    dK_p, dK_q = torch.zeros_like(K_p), torch.zeros_like(K_q)
    db_p, db_q = torch.zeros_like(b_p), torch.zeros_like(b_q)
    dV_p = dV_q = None
    outer = (0, 0, 0)
    if kind == "general":
        dV_p, dV_q = torch.zeros_like(V_p), torch.zeros_like(V_q)
        outer = (dV_p.data_ptr(), dV_q.data_ptr(), 1)
    sums = torch.empty(sizes.sums, dtype=g.dtype)
    before, after = (
        (0 if t is None else t.data_ptr(), u.data_ptr()) for t, u in ((y, g), (y_0, g_0))
    )
    for low, count in sizes.chunks:
        turns = (half.data_ptr() + 8 * low, layer.data_ptr() + 8 * low)
        at = low * sizes.bytes
        sizes.backward.spread(
            *(*sizes.tensors[:5], count, *before, *after),
            *(K_p.data_ptr(), K_q.data_ptr(), b_p.data_ptr(), b_q.data_ptr()),
            *(V_p.data_ptr(), V_q.data_ptr(), *turns, coef.data_ptr() + at),
            *(sums.data_ptr(), sizes.total, sizes.code, sizes.kind),
            # Not 0, even where there is nothing to read, for then it would read y.
            0 if kept is None else (kept.data_ptr() or 1) + low * sizes.layer,
        )
        sizes.collect(
            *(sums.data_ptr(), sizes.groups, sizes.total, count, *sizes.tensors[2:5], *turns),
            *(dK_p.data_ptr(), dK_q.data_ptr(), db_p.data_ptr(), db_q.data_ptr()),
            *(0 if dcoef is None else dcoef.data_ptr() + at, *outer),
        )
        before = after
    return y_0, g_0, dK_p, dK_q, db_p, db_q, dV_p, dV_q, dcoef


def euler_forward(
    y: Tensor,
    K: Tensor,
    b: Tensor,
    V: Tensor | None,
    h: Tensor,
    activation: str,
    kind: str,
    keep: bool,
) -> tuple[Tensor, Tensor | None]:
    """y_N of y += h sigma(y K^T + b) V and, with `keep`, what `euler_backward` needs of the states.

    V is given ("general"), K ("same"), nothing ("identity"), or K J^T ("canonical", H1).
    """
    sizes = _sizes(y.shape, K.shape, None, K.shape[0], y.dtype, activation, kind)
    kept = y.new_empty(sizes.kept) if keep else None
    if sizes.blas:
        return blas.euler_forward(y, K, b, blas.moves(K, V, kind), h, activation, kept), kept
    if V is None:
        V = K
    out = torch.empty_like(y)
    sizes.forward.spread(
        *(*sizes.tensors, y.data_ptr(), out.data_ptr()),
        *(K.data_ptr(), b.data_ptr(), V.data_ptr(), h.data_ptr()),
        *(sizes.code, sizes.kind, 0 if kept is None else kept.data_ptr()),
    )
    return out, kept


def euler_backward(
    states: Tensor,
    g: Tensor,
    K: Tensor,
    b: Tensor,
    V: Tensor | None,
    h: Tensor,
    activation: str,
    kind: str,
    step_gradient: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """(g_0, dK, db, dV, dh) from what `euler_forward` kept and the gradient of y_N."""
    sizes = _sizes(g.shape, K.shape, None, K.shape[0], g.dtype, activation, kind)
    if sizes.blas:
        return blas.euler_backward(states, g, K, b, blas.moves(K, V, kind), h, activation, kind)
    dV = torch.zeros_like(K) if kind == "general" else None
    if V is None:
        V = K
    g_0, dh = torch.empty_like(g), torch.zeros_like(h) if step_gradient else None
    dK, db = torch.zeros_like(K), torch.zeros_like(b)
    sums = torch.empty(sizes.sums, dtype=g.dtype)
    n, r = sizes.tensors[2:4]
    before, size = g.data_ptr(), sizes.bytes
    for low, count in sizes.chunks:
        matrix, vector = low * r * n * size, low * r * size
        sizes.backward.spread(
            *(*sizes.tensors[:4], count),
            *(states.data_ptr() + low * sizes.layer, before, g_0.data_ptr()),
            *(K.data_ptr() + matrix, b.data_ptr() + vector, V.data_ptr() + matrix),
            *(h.data_ptr() + low * size, sums.data_ptr(), sizes.total, sizes.code, sizes.kind),
        )
        sizes.collect(
            *(sums.data_ptr(), sizes.groups, sizes.total, count, n, r, 0, 0, 0),
            *(dK.data_ptr() + matrix, 0, db.data_ptr() + vector, 0),
            0 if dh is None else dh.data_ptr() + low * size,
            *((0, 0, 0) if dV is None else (dV.data_ptr() + matrix, 0, 1)),
        )
        before = g_0.data_ptr()
    return g_0, dK, db, dV, dh


# What the sizes of a call decide


class _Sizes:
    """Of a shear stack, or of an Euler stack if there is no K_q: worked out once."""

    def __init__(
        self,
        y: tuple[int, int],
        K: tuple[int, int, int],
        K_q: tuple[int, int, int] | None,
        steps: int,
        dtype: torch.dtype,
        activation: str,
        kind: str,
    ) -> None:
        (B, n), (_, r, width) = y, K
        R = r if K_q is None else max(r, K_q[1])
        self.blas = path(width, R, B, dtype) == "blas"
        self.code, self.kind = tiles.ACTIVATIONS.index(activation), tiles.KINDS.index(kind)
        self.bytes = dtype.itemsize
        lanes = VECTOR_BYTES // self.bytes
        count = -(-B // lanes)  # of tiles
        self.groups = max(1, min(count, max(GROUPS[0], min(GROUPS[1], count // 8))))
        each = (R * width + R + 1) + (R * width if kind == "general" else 0)  # sums of one step
        most = max(STEPS, PARTIAL_BYTES // (self.groups * each * self.bytes))
        chunk = max(1, min(steps, most))
        # Steps taken back at a time: the first, and how many. None copy the state.
        spans = [(max(0, high - chunk), min(chunk, high)) for high in range(steps, 0, -chunk)]
        self.chunks = spans or [(0, 0)]
        self.total = -(-chunk * each // lanes) * lanes  # elements of the sums of a group
        self.sums = self.groups * (most * each + lanes)  # of all, the same for any number of steps
        self.layer = count * width * VECTOR_BYTES  # bytes that a step keeps: what it reads
        self.kept = kept_size(K_q is not None, steps, B, width, dtype)  # enough for `blas` as well
        products, few = B * steps * R * width, B * chunk * R * width
        if K_q is None:
            self.tensors = (B, count, n, r, steps)
            works = (
                ("euler_forward", n + r, 2 * products),
                ("euler_backward", 2 * n + 3 * r, 5 * few),
            )
        else:
            self.tensors = (B, count, width, r, K_q[1], steps)
            works = (
                ("split_forward", n + R, 2 * products),
                ("split_backward", 2 * n + 3 * R, 6 * few),
            )
        self.forward = _Work(*works[0], count, dtype)
        self.backward = _Work(*works[1], self.groups, dtype)
        self._collect: Any = None
        self._dtype = dtype

    def collect(self, *given: int) -> None:
        """Add the partial sums to the gradients."""
        if self._collect is None:
            self._collect = tiles.kernel("collect", self._dtype)
        args = array("q", given)
        self._collect(args.buffer_info()[0])


_sizes = lru_cache(maxsize=1024)(_Sizes)


# How tiles are spread over threads


class _Work:
    """A kernel over so many shares of the samples, each with rows of vectors to write on.

    Threads take one share after the other, whoever is free.
    """

    def __init__(
        self, name: str, rows: int, products: int, shares: int, dtype: torch.dtype
    ) -> None:
        self.name, self.dtype, self.shares, self.products = name, dtype, shares, products
        self.room = rows * VECTOR_BYTES
        self.shared = shares > 1 and products >= PARALLEL_FROM
        self.kernel: Any = None

    def spread(self, *given: int) -> None:
        kernel = self.kernel
        if kernel is None:
            kernel = self.kernel = tiles.kernel(self.name, self.dtype)
        threads = self._threads() if self.shared else 1
        args = array("q", (0, 0, self.shares, _workspace(threads * self.room), self.room, *given))
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

    def _threads(self) -> int:
        """How many it is worth waking for this."""
        if _openmp is None and self.products < 20 * PARALLEL_FROM:
            return 1
        if self.products < LONG and time.perf_counter() < _alone_until:
            return 1
        return min(self.shares, torch.get_num_threads())


_mine = threading.local()


def _workspace(size: int) -> int:
    """The address of so many bytes to write on; each thread that calls has its own."""
    if size > getattr(_mine, "size", -1):
        _mine.room, _mine.size = torch.empty(size, dtype=torch.uint8), size
        _mine.address = _mine.room.data_ptr()
    return _mine.address


_alone_until = 0.0


def _watched(kernel: Any, address: int, threads: int) -> None:
    """Run a short kernel on threads; where they keep it waiting, work alone for a while.

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
    """The parallel regions of the OpenMP that PyTorch runs on: its threads are awake already."""
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


_workers: ThreadPoolExecutor | None = None


def _pool() -> ThreadPoolExecutor:
    global _workers
    if _workers is None:
        with _lock:
            if _workers is None:
                _workers = ThreadPoolExecutor(os.cpu_count() or 1, "hdnn-cpu")
    return _workers


def _after_fork() -> None:
    """The threads and whatever they had locked stayed in the parent, those of OpenMP too."""
    global _workers, _lock, _openmp
    _workers, _lock, _openmp = None, threading.RLock(), None
    tiles.after_fork()


_lock = threading.RLock()
_openmp = _find_openmp()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
