"""The whole stack as one kernel on the CPU: all layers on one tile of samples, then the next tile.

A tile is as wide as one vector, 64 float32 or 32 float64 samples; its state is kept feature by
feature, so that every operation is one vector instruction over samples with a weight as a scalar,
and nothing leaves the cache. The kernels are compiled by numba (extra `fast`) when first called,
once for each dtype whatever the sizes, and kept on disk. They release the interpreter and share
nothing, so that any number of threads may call them; tiles are spread over a pool of threads.

Sums over samples are made tile by tile within groups that depend on the batch size alone, then
group by group: results are the same to the bit for any number of threads.

For few samples and wide layers, matrix products by BLAS are faster: see `path`.
"""

from __future__ import annotations

import ctypes
import math
import operator
import os
import sys
import threading
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hdnn import activations
from hdnn.errors import require

__all__ = ["euler_backward", "euler_forward", "path", "split_backward", "split_forward"]

ACTIVATIONS = ("tanh", "relu", "sigmoid", "softplus", "gelu", "silu", "sin", "identity")
KINDS = ("same", "identity", "general", "canonical")
SAME, IDENTITY, GENERAL, CANONICAL = range(4)

VECTOR_BYTES = 256
GROUPS = 4, 16  # at least and at most so many partial sums of the weight gradients,
PARTIAL_BYTES = 2**20  # and between the two, as many as stay in the cache
PARALLEL_FROM = 100_000  # products, below which waking a thread costs more than it brings

Grads = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor]


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
) -> Tensor:
    """y_N: y_0 (B, 2m) through all shears of the schedule."""
    B, n = y.shape
    _, r_p, m = K_p.shape
    r_q, M = K_q.shape[1], len(half)
    if path(m, max(r_p, r_q), B, y.dtype) == "blas":
        V = {"same": (K_q, K_p), "identity": (None, None)}.get(kind, (V_q, V_p))
        return _split_forward_blas(y, (K_q, K_p), (b_q, b_p), V, half, layer, coef, activation)
    if kind != "general":
        V_p, V_q = K_p, K_q
    assert V_p is not None
    assert V_q is not None
    out = torch.empty_like(y)
    tiles = _tiles(y)
    args = (
        *(B, tiles, m, r_p, r_q, M),
        *(y.data_ptr(), out.data_ptr()),
        *(K_p.data_ptr(), K_q.data_ptr(), b_p.data_ptr(), b_q.data_ptr()),
        *(V_p.data_ptr(), V_q.data_ptr()),
        *(half.data_ptr(), layer.data_ptr(), coef.data_ptr()),
        *(ACTIVATIONS.index(activation), KINDS.index(kind)),
    )
    _spread("split_forward", y, tiles, n + max(r_p, r_q), 2 * M * max(r_p, r_q) * m, args)
    return out


def split_backward(
    y: Tensor,
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
) -> Grads:
    """y_0 and the gradients, from y_N and its gradient: the shears are undone one by one.

    Returns (y_0, g_0, dK_p, dK_q, db_p, db_q, dV_p, dV_q, dcoef); dV is None unless V is general.
    """
    B, n = y.shape
    N, r_p, m = K_p.shape
    r_q, M = K_q.shape[1], len(half)
    if path(m, max(r_p, r_q), B, y.dtype) == "blas":
        V = {"same": (K_q, K_p), "identity": (None, None)}.get(kind, (V_q, V_p))
        return _split_backward_blas(
            y, g, (K_q, K_p), (b_q, b_p), V, half, layer, coef, activation, kind
        )
    general = kind == "general"
    if not general:
        V_p, V_q = K_p, K_q
    assert V_p is not None
    assert V_q is not None
    y_0, g_0 = torch.empty_like(y), torch.empty_like(g)
    tiles = _tiles(y)
    sizes = [N * r_p * m, N * r_q * m, N * r_p, N * r_q, M]
    if general:
        sizes += sizes[:2]
    grads, groups, total = _partial_sums(y, tiles, sizes)
    args = (
        *(B, tiles, m, r_p, r_q, N, M),
        *(y.data_ptr(), g.data_ptr(), y_0.data_ptr(), g_0.data_ptr()),
        *(K_p.data_ptr(), K_q.data_ptr(), b_p.data_ptr(), b_q.data_ptr()),
        *(V_p.data_ptr(), V_q.data_ptr()),
        *(half.data_ptr(), layer.data_ptr(), coef.data_ptr(), grads.data_ptr(), total),
        *(ACTIVATIONS.index(activation), KINDS.index(kind)),
    )
    R = max(r_p, r_q)
    _spread("split_backward", y, groups, 2 * n + 3 * R, 6 * M * R * m, args)
    _add_up(grads, groups, total)
    dK_p, dK_q, db_p, db_q, dcoef, *dV = torch.split(grads[0, : sum(sizes)], sizes)
    dV_p, dV_q = (dV[0].view_as(V_p), dV[1].view_as(V_q)) if general else (None, None)
    dK_p, dK_q, db_p, db_q = (
        found.view_as(given)
        for found, given in ((dK_p, K_p), (dK_q, K_q), (db_p, b_p), (db_q, b_q))
    )
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
) -> Tensor:
    """y_N, or with `keep` all states (N+1, B, n), of y += h sigma(y K^T + b) V.

    V is given ("general"), K ("same"), nothing ("identity"), or K J^T ("canonical", H1).
    """
    B, n = y.shape
    N, r, _ = K.shape
    if path(n, r, B, y.dtype) == "blas":
        return _euler_forward_blas(y, K, b, _moves(K, V, kind), h, activation, keep)
    if kind != "general":
        V = K
    assert V is not None
    out = y.new_empty(N + 1, B, n) if keep else torch.empty_like(y)
    tiles = _tiles(y)
    args = (
        *(B, tiles, n, r, N, y.data_ptr(), out.data_ptr()),
        *(K.data_ptr(), b.data_ptr(), V.data_ptr(), h.data_ptr()),
        *(ACTIVATIONS.index(activation), KINDS.index(kind), int(keep)),
    )
    _spread("euler_forward", y, tiles, n + r, 2 * N * r * n, args)
    return out


def euler_backward(
    states: Tensor,
    g: Tensor,
    K: Tensor,
    b: Tensor,
    V: Tensor | None,
    h: Tensor,
    activation: str,
    kind: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """(g_0, dK, db, dV, dh) from all states and the gradient of the last one."""
    B, n = g.shape
    N, r, _ = K.shape
    if path(n, r, B, g.dtype) == "blas":
        return _euler_backward_blas(states, g, K, b, _moves(K, V, kind), h, activation, kind)
    if kind != "general":
        V = K
    assert V is not None
    g_0 = torch.empty_like(g)
    tiles = _tiles(g)
    sizes = [N * r * n, N * r, N] + [N * r * n] * (kind == "general")
    grads, groups, total = _partial_sums(g, tiles, sizes)
    args = (
        *(B, tiles, n, r, N, states.data_ptr(), g.data_ptr(), g_0.data_ptr()),
        *(K.data_ptr(), b.data_ptr(), V.data_ptr(), h.data_ptr(), grads.data_ptr(), total),
        *(ACTIVATIONS.index(activation), KINDS.index(kind)),
    )
    _spread("euler_backward", g, groups, 3 * n + 3 * r, 5 * N * r * n, args)
    _add_up(grads, groups, total)
    dK, db, dh, *dV = torch.split(grads[0, : sum(sizes)], sizes)
    return g_0, dK.view_as(K), db.view_as(b), dV[0].view_as(V) if dV else None, dh


# How tiles are spread over threads


def _tiles(y: Tensor) -> int:
    return -(-len(y) * y.element_size() // VECTOR_BYTES)


def _spread(
    name: str, like: Tensor, shares: int, rows: int, work: int, given: tuple[int, ...]
) -> None:
    """Run a kernel over so many shares of the samples, with so many rows of vectors to write on.

    `work` is the products a sample takes. Threads take one share after the other, whoever is free.
    """
    kernel = _kernel(name, like.dtype)
    threads = min(shares, torch.get_num_threads())
    enough = PARALLEL_FROM if _openmp is not None else 20 * PARALLEL_FROM
    if threads > 1 and work * len(like) < enough:
        threads = 1
    scratch = torch.empty(threads * rows * VECTOR_BYTES, dtype=torch.uint8)
    args = array("q", (0, 0, shares, scratch.data_ptr(), rows * VECTOR_BYTES, *given))
    address = args.buffer_info()[0]
    if threads < 2:
        kernel(address)
    elif _openmp is not None:
        _openmp(kernel, address, threads, 0)
    else:
        rest = [_pool().submit(kernel, address) for _ in range(1, threads)]
        try:
            kernel(address)
        finally:  # they write to memory that this call owns
            wait(rest)


def _partial_sums(like: Tensor, tiles: int, sizes: list[int]) -> tuple[Tensor, int, int]:
    """Zeros for the sums of each group of tiles, their number, and the padded length of one."""
    lanes = VECTOR_BYTES // like.element_size()
    total = -(-sum(sizes) // lanes) * lanes
    fitting = PARTIAL_BYTES // max(total * like.element_size(), 1)
    groups = min(tiles, max(GROUPS[0], min(GROUPS[1], fitting)))
    return like.new_zeros(max(groups, 1), total), groups, total


def _add_up(grads: Tensor, groups: int, total: int) -> None:
    if groups > 1:
        args = array("q", (grads.data_ptr(), groups, total))
        _kernel("add_up", grads.dtype)(args.buffer_info()[0])


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


_lock = threading.RLock()
_openmp = _find_openmp()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


# Few samples, wide layers: matrix products in place, a layer at a time, in plain PyTorch


def _value_and_slope(a: Tensor, activation: str) -> tuple[Tensor, Tensor | None]:
    """sigma(a) and, unless the value says it all, sigma'(a). May overwrite a."""
    if activation == "tanh":
        return a.tanh_(), None
    if activation == "relu":
        return a.relu_(), None
    if activation == "identity":
        return a, None
    found = activations.get(activation)
    return found.sigma(a), found.slope(a)


def _times_slope(w: Tensor, z: Tensor, slope: Tensor | None, activation: str) -> Tensor:
    """w sigma'(a), in place."""
    if activation == "tanh":
        return torch.ops.aten.tanh_backward.grad_input(w, z, grad_input=w)
    if activation == "relu":
        return torch.ops.aten.threshold_backward.grad_input(w, z, 0, grad_input=w)
    return w if slope is None else w.mul_(slope)


def _value(a: Tensor, activation: str) -> Tensor:
    if activation in ("tanh", "relu"):
        return a.tanh_() if activation == "tanh" else a.relu_()
    return activations.get(activation).sigma(a)


def _step(target: Tensor, z: Tensor, V: Tensor | None, c: float) -> None:
    """target += c z V."""
    if V is None:
        target.add_(z, alpha=c)
    else:
        target.addmm_(z, V, alpha=c)


def _shear_back(
    x: Tensor,
    y: Tensor | None,
    gx: Tensor,
    gy: Tensor,
    K: Tensor,
    b: Tensor,
    V: Tensor | None,
    c: float,
    grads: tuple[Tensor, Tensor, Tensor | None],
    activation: str,
    work: tuple[Tensor, ...],
    ones: Tensor,
) -> Tensor:
    """Backwards through y += c sigma(x K^T + b) V: undo it, unless y is None, and add gradients.

    Adds to gx and to grads = (dK, db, dV); returns the gradient of c.
    """
    dK, db, dV = grads
    a, w = work
    z, slope = _value_and_slope(torch.addmm(b, x, K.mT, out=a), activation)
    if y is not None:
        _step(y, z, V, -c)
    w = w.copy_(gy) if V is None else torch.mm(gy, V.mT, out=w)
    dc = torch.dot(z.view(-1), w.view(-1))
    u = _times_slope(w, z, slope, activation)
    db.addmv_(u.mT, ones, alpha=c)
    dK.addmm_(u.mT, x, alpha=c)
    if dV is not None:
        dV.addmm_(z.mT, gy, alpha=c)
    gx.addmm_(u, K, alpha=c)
    return dc


@torch.no_grad()
def _split_forward_blas(
    y: Tensor,
    K: tuple[Tensor, Tensor],
    b: tuple[Tensor, Tensor],
    V: tuple[Tensor | None, Tensor | None],
    half: Tensor,
    layer: Tensor,
    coef: Tensor,
    activation: str,
) -> Tensor:
    """`split_forward`, with the weights that move p first."""
    halves = [part.contiguous() for part in y.chunk(2, -1)]
    room = [y.new_empty(len(y), weights.shape[1]) for weights in K]
    for i, j, c in zip(half.tolist(), layer.tolist(), coef.tolist(), strict=True):
        a = torch.addmm(b[i][j], halves[1 - i], K[i][j].mT, out=room[i])
        Vi = V[i]
        _step(halves[i], _value(a, activation), None if Vi is None else Vi[j], c)
    return torch.cat(halves, -1)


@torch.no_grad()
def _split_backward_blas(
    y: Tensor,
    g: Tensor,
    K: tuple[Tensor, Tensor],
    b: tuple[Tensor, Tensor],
    V: tuple[Tensor | None, Tensor | None],
    half: Tensor,
    layer: Tensor,
    coef: Tensor,
    activation: str,
    kind: str,
) -> Grads:
    x, gx = ([part.clone() for part in t.chunk(2, -1)] for t in (y, g))
    room = [tuple(y.new_empty(2, len(y), weights.shape[1])) for weights in K]
    ones = y.new_ones(len(y))
    dK, db = ([torch.zeros_like(t) for t in weights] for weights in (K, b))
    dV = {"same": dK, "general": [torch.zeros_like(t) for t in K]}.get(kind, [None, None])
    dcoef = []
    schedule = list(zip(half.tolist(), layer.tolist(), coef.tolist(), strict=True))
    for i, j, c in reversed(schedule):
        Vi, dVi = V[i], dV[i]
        dcoef.append(
            _shear_back(
                *(x[1 - i], x[i], gx[1 - i], gx[i]),
                *(K[i][j], b[i][j], None if Vi is None else Vi[j], c),
                (dK[i][j], db[i][j], None if dVi is None else dVi[j]),
                *(activation, room[i], ones),
            )
        )
    dV_p, dV_q = (dV[1], dV[0]) if kind == "general" else (None, None)
    dc = torch.stack(dcoef[::-1]) if dcoef else torch.zeros_like(coef)
    y_0, g_0 = torch.cat(x, -1), torch.cat(gx, -1)
    return y_0, g_0, dK[1], dK[0], db[1], db[0], dV_p, dV_q, dc


def _moves(K: Tensor, V: Tensor | None, kind: str) -> Tensor | None:
    """V of an Euler stack of that kind."""
    if kind == "canonical":
        K_p, K_q = K.chunk(2, -1)
        return torch.cat([-K_q, K_p], -1)  # K J^T
    return {"same": K, "identity": None}.get(kind, V)


@torch.no_grad()
def _euler_forward_blas(
    y: Tensor,
    K: Tensor,
    b: Tensor,
    V: Tensor | None,
    h: Tensor,
    activation: str,
    keep: bool,
) -> Tensor:
    states = y.new_empty(len(K) + 1 if keep else 1, *y.shape)
    states[0] = x = y.clone()
    room = y.new_empty(len(y), K.shape[1])
    for j, c in enumerate(h.tolist()):
        z = _value(torch.addmm(b[j], x, K[j].mT, out=room), activation)
        if keep:
            x = states[j + 1].copy_(x)
        _step(x, z, None if V is None else V[j], c)
    return states if keep else x


@torch.no_grad()
def _euler_backward_blas(
    states: Tensor,
    g: Tensor,
    K: Tensor,
    b: Tensor,
    V: Tensor | None,
    h: Tensor,
    activation: str,
    kind: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    gx, spare = g.clone(), torch.empty_like(g)
    room = tuple(g.new_empty(2, len(g), K.shape[1]))
    ones = g.new_ones(len(g))
    dK, db = torch.zeros_like(K), torch.zeros_like(b)
    dV = dK if kind == "same" else None if V is None else torch.zeros_like(K)
    dh = []
    for j, c in reversed(list(enumerate(h.tolist()))):
        gy = spare.copy_(gx)  # gx grows while gy is still needed
        dh.append(
            _shear_back(
                *(states[j], None, gx, gy, K[j], b[j], None if V is None else V[j], c),
                (dK[j], db[j], None if dV is None else dV[j]),
                *(activation, room, ones),
            )
        )
    if kind == "canonical" and dV is not None:
        dV_p, dV_q = dV.chunk(2, -1)
        dK += torch.cat([dV_q, -dV_p], -1)
    dh = torch.stack(dh[::-1]) if dh else torch.zeros_like(h)
    return gx, dK, db, dV if kind == "general" else None, dh


# The kernels: plain functions here, compiled by `_compile`, which also gives the names below their
# meaning. Memory is addressed by number: at(address, i, like) is element i of an array of the type
# of `like`, load(address, row, like) the row-th vector.

arguments: Any = None  # arguments(args, count): so many whole numbers
unit: Any = None  # 1 in the type that the kernel is for
claim: Any = None  # claim(args, i): argument i, which grows by 1 each time, in any thread
at: Any = None  # scalars
put: Any = None
integer: Any = None
load: Any = None  # vectors
store: Any = None
splat: Any = None
total_of: Any = None  # the sum over a vector
turn_block: Any = None  # four by four elements from one place to another, turned
fold: Any = None  # the sum of the quarters of a vector
dot: Any = None  # the sum of the quarters of a product, and then one product more
dot_more: Any = None
add_totals: Any = None  # add_totals(address, i, a, b, c, d): their sums onto elements i .. i + 3
where_less: Any = None  # where_less(a, b, x, y): x where a < b, else y
magnitude: Any = None
nearest: Any = None  # whole number
exactly_fused: Any = None  # a b + c, rounded once
power_of_two: Any = None
alternate: Any = None  # (-1)^k x for vectors x and k of whole numbers
is_double: Any = None
lanes_of: Any = None
bytes_of: Any = None


def _exp(x):  # pragma: kernel
    """exp of x, which is kept within the range of normal numbers."""
    if is_double(x):
        x = where_less(x, splat(-708.0, x), splat(-708.0, x), x)
        x = where_less(splat(709.0, x), x, splat(709.0, x), x)
        k = nearest(x * 1.4426950408889634)
        r = (x - k * 6.93145751953125e-1) - k * 1.42860682030941723212e-6
        s = r * (1 / 6227020800) + 1 / 479001600
        s = s * r + 1 / 39916800
        s = s * r + 1 / 3628800
        s = s * r + 1 / 362880
        s = s * r + 1 / 40320
        s = s * r + 1 / 5040
    else:
        x = where_less(x, splat(-87.0, x), splat(-87.0, x), x)
        x = where_less(splat(88.0, x), x, splat(88.0, x), x)
        k = nearest(x * 1.4426950408889634)
        r = (x - k * 0.693359375) - k * -2.12194440e-4
        s = splat(1 / 5040, x)
    s = s * r + 1 / 720
    s = s * r + 1 / 120
    s = s * r + 1 / 24
    s = s * r + 1 / 6
    s = s * r + 0.5
    s = s * r + 1.0
    s = s * r + 1.0
    return s * power_of_two(k)


def _tanh(x):  # pragma: kernel
    s = x * x
    if is_double(x):  # Cephes: a rational function near 0, exp elsewhere
        top = ((s * -9.64399179425052238628e-1 - 9.92877231001918586564e1) * s) - (
            1.61468768441708447952e3
        )
        low = ((s + 1.12811678491632931402e2) * s + 2.23548839060100448583e3) * s + (
            4.84406305325125486048e3
        )
        near = x + x * (s * top / low)
        size = magnitude(x)
        far = splat(1.0, x) - splat(2.0, x) / (_exp(size + size) + 1.0)
        far = where_less(x, splat(0.0, x), splat(0.0, x) - far, far)
        return where_less(size, splat(0.625, x), near, far)
    # A rational function that is exact to rounding up to where tanh is 1.
    x = where_less(x, splat(-7.90531110763549805, x), splat(-7.90531110763549805, x), x)
    x = where_less(splat(7.90531110763549805, x), x, splat(7.90531110763549805, x), x)
    s = x * x
    top = s * -2.76076847742355e-16 + 2.00018790482477e-13
    top = top * s - 8.60467152213735e-11
    top = top * s + 5.12229709037114e-08
    top = top * s + 1.48572235717979e-05
    top = top * s + 6.37261928875436e-04
    top = top * s + 4.89352455891786e-03
    low = s * 1.19825839466702e-06 + 1.18534705686654e-04
    low = low * s + 2.26843463243900e-03
    low = low * s + 4.89352518554385e-03
    return x * top / low


def _log1p(t):  # pragma: kernel
    """log(1 + t) for 0 <= t <= 1, as 2 artanh(t / (2 + t))."""
    a = t / (t + 2.0)
    s = a * a
    if is_double(t):
        p = s * (2 / 35) + 2 / 33
        p = p * s + 2 / 31
        p = p * s + 2 / 29
        p = p * s + 2 / 27
        p = p * s + 2 / 25
        p = p * s + 2 / 23
        p = p * s + 2 / 21
        p = p * s + 2 / 19
        p = p * s + 2 / 17
    else:
        p = splat(2 / 17, t)
    p = p * s + 2 / 15
    p = p * s + 2 / 13
    p = p * s + 2 / 11
    p = p * s + 2 / 9
    p = p * s + 2 / 7
    p = p * s + 2 / 5
    p = p * s + 2 / 3
    p = p * s + 2.0
    return a * p


def _normal_cdf(x, bell):  # pragma: kernel
    """Phi(x), given bell = exp(-x^2 / 2): a polynomial for (1 + 2a) exp(a^2) erfc(a)."""
    a = magnitude(x) * math.sqrt(0.5)
    a = where_less(splat(50.0, x), a, splat(50.0, x), a)
    u = (a - 4.0) / (a + 4.0)
    p = u * 1.6403183859126829e-09 - 6.9840210839589835e-09
    p = p * u - 1.6738128051575484e-08
    p = p * u + 9.29077286532988e-08
    p = p * u + 7.202517600492906e-08
    p = p * u - 8.019174682765151e-07
    p = p * u + 2.968409170763573e-07
    p = p * u + 5.689409089788712e-06
    p = p * u - 1.1224122281375893e-05
    p = p * u - 2.438769126418468e-05
    p = p * u + 0.00015062257137037893
    p = p * u - 0.0001992610018544803
    p = p * u - 0.0007577735257382317
    p = p * u + 0.005031971017234268
    p = p * u - 0.016197734020451597
    p = p * u + 0.03716751538360477
    p = p * u - 0.06633036581541651
    p = p * u + 0.0937328350110569
    p = p * u - 0.10103906603618064
    p = p * u + 0.06809705425420673
    p = p * u + 0.015379652102618402
    p = p * u - 0.139621116840557
    p = p * u + 1.2329951186255526
    tail = p * bell * 0.5 / (a + a + 1.0)
    return where_less(x, splat(0.0, x), tail, splat(1.0, x) - tail)


def _turns(x):  # pragma: kernel
    """k and r with x = k pi + r, |r| <= pi/2."""
    k = nearest(x * (1 / math.pi))
    if is_double(x):
        r = exactly_fused(k, splat(-3.141592653589793, x), x)
        r = exactly_fused(k, splat(-1.2246467991473532e-16, x), r)
    else:
        r = exactly_fused(k, splat(-3.1415927410125732, x), x)
        r = exactly_fused(k, splat(8.742277657347586e-08, x), r)
    # Past 2^52 (2^23 in float32) neighbouring numbers are whole turns apart.
    r = where_less(r, splat(-1.5707963267948966, x), splat(-1.5707963267948966, x), r)
    r = where_less(splat(1.5707963267948966, x), r, splat(1.5707963267948966, x), r)
    return k, r


def _sin(x):  # pragma: kernel
    k, r = _turns(x)
    s = r * r
    p = s * (1 / 51090942171709440000) - 1 / 121645100408832000
    p = p * s + 1 / 355687428096000
    p = p * s - 1 / 1307674368000
    p = p * s + 1 / 6227020800
    p = p * s - 1 / 39916800
    p = p * s + 1 / 362880
    p = p * s - 1 / 5040
    p = p * s + 1 / 120
    p = p * s - 1 / 6
    return alternate(k, r + r * (s * p))


def _cos(x):  # pragma: kernel
    k, r = _turns(x)
    s = r * r
    p = s * (1 / 1124000727777607680000) - 1 / 2432902008176640000
    p = splat(0.0, x) - p
    p = p * s - 1 / 6402373705728000
    p = p * s + 1 / 20922789888000
    p = p * s - 1 / 87178291200
    p = p * s + 1 / 479001600
    p = p * s - 1 / 3628800
    p = p * s + 1 / 40320
    p = p * s - 1 / 720
    p = p * s + 1 / 24
    p = p * s - 0.5
    return alternate(k, s * p + 1.0)


def _activate(code, a, rows, one):  # pragma: kernel
    """sigma in place over rows of vectors."""
    if code == 0:
        for i in range(rows):
            store(a, i, _tanh(load(a, i, one)))
    elif code == 1:
        for i in range(rows):
            x = load(a, i, one)
            zero = splat(0.0, x)
            store(a, i, where_less(x, zero, zero, x))
    elif code == 2:
        for i in range(rows):
            x = load(a, i, one)
            unit = splat(1.0, x)
            store(a, i, unit / (_exp(splat(0.0, x) - x) + unit))
    elif code == 3:
        for i in range(rows):
            x = load(a, i, one)
            zero = splat(0.0, x)
            store(a, i, where_less(x, zero, zero, x) + _log1p(_exp(zero - magnitude(x))))
    elif code == 4:
        for i in range(rows):
            x = load(a, i, one)
            store(a, i, x * _normal_cdf(x, _exp(x * x * -0.5)))
    elif code == 5:
        for i in range(rows):
            x = load(a, i, one)
            store(a, i, x / (_exp(splat(0.0, x) - x) + 1.0))
    elif code == 6:
        for i in range(rows):
            store(a, i, _sin(load(a, i, one)))


def _activate_both(code, a, d, rows, one):  # pragma: kernel
    """sigma in place, and its slope into d."""
    if code == 0:
        for i in range(rows):
            z = _tanh(load(a, i, one))
            store(a, i, z)
            store(d, i, splat(1.0, z) - z * z)
    elif code == 1:
        for i in range(rows):
            x = load(a, i, one)
            zero = splat(0.0, x)
            store(a, i, where_less(x, zero, zero, x))
            store(d, i, where_less(zero, x, splat(1.0, x), zero))
    elif code == 2:
        for i in range(rows):
            x = load(a, i, one)
            e = _exp(splat(0.0, x) - x)
            z = splat(1.0, x) / (e + 1.0)
            store(a, i, z)
            store(d, i, e * z * z)
    elif code == 3:
        for i in range(rows):
            x = load(a, i, one)
            zero = splat(0.0, x)
            t = _exp(zero - magnitude(x))
            store(a, i, where_less(x, zero, zero, x) + _log1p(t))
            store(d, i, where_less(x, zero, t, splat(1.0, x)) / (t + 1.0))
    elif code == 4:
        for i in range(rows):
            x = load(a, i, one)
            bell = _exp(x * x * -0.5)
            Phi = _normal_cdf(x, bell)
            store(a, i, x * Phi)
            store(d, i, x * bell * 0.3989422804014327 + Phi)
    elif code == 5:
        for i in range(rows):
            x = load(a, i, one)
            e = _exp(splat(0.0, x) - x)
            z = splat(1.0, x) / (e + 1.0)
            store(a, i, x * z)
            store(d, i, z + x * z * (e * z))
    elif code == 6:
        for i in range(rows):
            x = load(a, i, one)
            store(a, i, _sin(x))
            store(d, i, _cos(x))
    else:
        for i in range(rows):
            store(d, i, splat(1.0, load(a, i, one)))


def _one_row(W, across, x, count, one):  # pragma: kernel
    """The sum over k of W_k x_k, where W_k lies `across` bytes from its neighbour."""
    a = splat(0.0, one)
    for k in range(count):
        a = a + load(x, k, one) * at(W + k * across, 0, one)
    return a


def _two_rows(W, down, across, x, count, one):  # pragma: kernel
    """`_one_row` for W and for what lies `down` bytes below."""
    a = b = splat(0.0, one)
    for k in range(count):
        v, place = load(x, k, one), W + k * across
        a = a + v * at(place, 0, one)
        b = b + v * at(place + down, 0, one)
    return a, b


def _four_rows(W, down, across, x, count, one):  # pragma: kernel
    a = b = c = d = splat(0.0, one)
    for k in range(count):
        v, place = load(x, k, one), W + k * across
        a = a + v * at(place, 0, one)
        b = b + v * at(place + down, 0, one)
        c = c + v * at(place + 2 * down, 0, one)
        d = d + v * at(place + 3 * down, 0, one)
    return a, b, c, d


def _affine(K, b, x, z, r, m, one):  # pragma: kernel
    """z = K x + b, or K x if there is no b."""
    across = bytes_of(one)
    down = m * across
    for i in range(0, r - 3, 4):
        s0, s1, s2, s3 = _four_rows(K + i * down, down, across, x, m, one)
        if b:
            s0, s1 = s0 + at(b, i, one), s1 + at(b, i + 1, one)
            s2, s3 = s2 + at(b, i + 2, one), s3 + at(b, i + 3, one)
        store(z, i, s0)
        store(z, i + 1, s1)
        store(z, i + 2, s2)
        store(z, i + 3, s3)
    i = r - r % 4
    if r % 4 >= 2:
        s0, s1 = _two_rows(K + i * down, down, across, x, m, one)
        if b:
            s0, s1 = s0 + at(b, i, one), s1 + at(b, i + 1, one)
        store(z, i, s0)
        store(z, i + 1, s1)
    if r % 2:
        i = r - 1
        s0 = _one_row(K + i * down, across, x, m, one)
        if b:
            s0 = s0 + at(b, i, one)
        store(z, i, s0)


def _add_adjoint(V, step, z, c, y, r, m, one):  # pragma: kernel
    """y += c V^T z for m columns of V, whose rows are `step` elements apart."""
    down = bytes_of(one)
    across = step * down
    for k in range(0, m - 3, 4):
        s0, s1, s2, s3 = _four_rows(V + k * down, down, across, z, r, one)
        store(y, k, load(y, k, one) + s0 * c)
        store(y, k + 1, load(y, k + 1, one) + s1 * c)
        store(y, k + 2, load(y, k + 2, one) + s2 * c)
        store(y, k + 3, load(y, k + 3, one) + s3 * c)
    k = m - m % 4
    if m % 4 >= 2:
        s0, s1 = _two_rows(V + k * down, down, across, z, r, one)
        store(y, k, load(y, k, one) + s0 * c)
        store(y, k + 1, load(y, k + 1, one) + s1 * c)
    if m % 2:
        k = m - 1
        store(y, k, load(y, k, one) + _one_row(V + k * down, across, z, r, one) * c)


def _add_outer(G, u, x, z, g, r, m, one):  # pragma: kernel
    """G += u x^T + z g^T, or u x^T if there is no z, summed over samples.

    Sums over vectors are made four at a time.
    """
    if m == 2 and r % 2 == 0:
        x0, x1 = load(x, 0, one), load(x, 1, one)
        for i in range(0, r, 2):
            u0, u1 = load(u, i, one), load(u, i + 1, one)
            s0, s1, s2, s3 = dot(u0, x0), dot(u0, x1), dot(u1, x0), dot(u1, x1)
            if z:
                z0, z1, g0, g1 = (
                    load(z, i, one),
                    load(z, i + 1, one),
                    load(g, 0, one),
                    load(g, 1, one),
                )
                s0, s1 = dot_more(s0, z0, g0), dot_more(s1, z0, g1)
                s2, s3 = dot_more(s2, z1, g0), dot_more(s3, z1, g1)
            add_totals(G, 2 * i, s0, s1, s2, s3)
        return
    for i in range(0, r - 1, 2):
        u0, u1 = load(u, i, one), load(u, i + 1, one)
        z0, z1 = u0, u1
        if z:
            z0, z1 = load(z, i, one), load(z, i + 1, one)
        for k in range(0, m - 3, 4):
            v = load(x, k, one)
            s0, t0 = dot(u0, v), dot(u1, v)
            v = load(x, k + 1, one)
            s1, t1 = dot(u0, v), dot(u1, v)
            v = load(x, k + 2, one)
            s2, t2 = dot(u0, v), dot(u1, v)
            v = load(x, k + 3, one)
            s3, t3 = dot(u0, v), dot(u1, v)
            if z:
                v = load(g, k, one)
                s0, t0 = dot_more(s0, z0, v), dot_more(t0, z1, v)
                v = load(g, k + 1, one)
                s1, t1 = dot_more(s1, z0, v), dot_more(t1, z1, v)
                v = load(g, k + 2, one)
                s2, t2 = dot_more(s2, z0, v), dot_more(t2, z1, v)
                v = load(g, k + 3, one)
                s3, t3 = dot_more(s3, z0, v), dot_more(t3, z1, v)
            add_totals(G, i * m + k, s0, s1, s2, s3)
            add_totals(G, (i + 1) * m + k, t0, t1, t2, t3)
    for i in range(r):
        paired = r % 2 == 0 or i < r - 1
        for k in range(m - m % 4 if paired else 0, m):
            s = dot(load(u, i, one), load(x, k, one))
            if z:
                s = dot_more(s, load(z, i, one), load(g, k, one))
            put(G, i * m + k, at(G, i * m + k, one) + total_of(s))


def _add_sums(b, u, r, one):  # pragma: kernel
    """b += u, summed over samples."""
    for i in range(0, r - 3, 4):
        add_totals(
            b,
            i,
            fold(load(u, i, one)),
            fold(load(u, i + 1, one)),
            fold(load(u, i + 2, one)),
            fold(load(u, i + 3, one)),
        )
    for i in range(r - r % 4, r):
        put(b, i, at(b, i, one) + total_of(fold(load(u, i, one))))


def _turn(x, step, y, other_step, rows, columns, one):  # pragma: kernel
    """y = x^T for x (rows, columns); a row of x is `step` bytes, one of y `other_step`."""
    size = bytes_of(one)
    whole = rows - rows % 4
    for i in range(0, whole, 4):
        for k in range(0, columns - 3, 4):
            turn_block(
                x + i * step + k * size, step, y + k * other_step + i * size, other_step, one
            )
        for k in range(columns - columns % 4, columns):
            for j in range(i, i + 4):
                put(y + k * other_step, j, at(x + j * step, k, one))
    for i in range(whole, rows):
        for k in range(columns):
            put(y + k * other_step, i, at(x + i * step, k, one))


def _gather(y, tile, B, n, x, one):  # pragma: kernel
    """The rows y (B, n) of a tile, turned: x is (n, lanes), zero where there is no sample."""
    lanes, size = lanes_of(one), bytes_of(one)
    count = min(lanes, B - tile * lanes)
    if count < lanes:
        for k in range(n):
            store(x, k, splat(0.0, one))
    _turn(y + tile * lanes * n * size, n * size, x, lanes * size, count, n, one)


def _scatter(x, tile, B, n, y, one):  # pragma: kernel
    """The inverse of `_gather`."""
    lanes, size = lanes_of(one), bytes_of(one)
    count = min(lanes, B - tile * lanes)
    _turn(x, lanes * size, y + tile * lanes * n * size, n * size, n, count, one)


def _split_forward(args):  # pragma: kernel
    one, given = unit(args), arguments(args, 24)
    scratch, part, B, tiles, m, r_p, r_q, M = given[3:11]
    y, out, K_p, K_q, b_p, b_q, V_p, V_q = given[11:19]
    half, layer, coef, code, kind = given[19:24]
    scratch += claim(args, 0) * part
    size = bytes_of(one)
    vector = lanes_of(one) * size
    z = scratch + 2 * m * vector
    tile = claim(args, 1)
    while tile < tiles:
        _gather(y, tile, B, 2 * m, scratch, one)
        for s in range(M):
            j, c = integer(layer, s), at(coef, s, one)
            if integer(half, s) == 0:
                target, source, r = scratch, scratch + m * vector, r_q
                K, b, V = K_q + j * r * m * size, b_q + j * r * size, V_q + j * r * m * size
            else:
                target, source, r = scratch + m * vector, scratch, r_p
                K, b, V = K_p + j * r * m * size, b_p + j * r * size, V_p + j * r * m * size
            _affine(K, b, source, z, r, m, one)
            _activate(code, z, r, one)
            if kind == IDENTITY:
                for k in range(m):
                    store(target, k, load(target, k, one) + load(z, k, one) * c)
            else:
                _add_adjoint(V, m, z, c, target, r, m, one)
        _scatter(scratch, tile, B, 2 * m, out, one)
        tile = claim(args, 1)


def _split_backward(args):  # pragma: kernel
    one, given = unit(args), arguments(args, 29)
    groups, scratch, part, B, tiles, m, r_p, r_q, N, M = given[2:12]
    y, g, y_0, g_0, K_p, K_q, b_p, b_q, V_p, V_q = given[12:22]
    half, layer, coef, grads, total, code, kind = given[22:29]
    scratch += claim(args, 0) * part
    size = bytes_of(one)
    vector = lanes_of(one) * size
    x = scratch
    gx = x + 2 * m * vector
    z = gx + 2 * m * vector
    d = z + max(r_p, r_q) * vector
    w = d + max(r_p, r_q) * vector
    group = claim(args, 1)
    while group < groups:
        dK_p = grads + group * total * size
        dK_q = dK_p + N * r_p * m * size
        db_p = dK_q + N * r_q * m * size
        db_q = db_p + N * r_p * size
        dcoef = db_q + N * r_q * size
        dV_p = dcoef + M * size
        dV_q = dV_p + N * r_p * m * size
        for tile in range(tiles * group // groups, tiles * (group + 1) // groups):
            _gather(y, tile, B, 2 * m, x, one)
            _gather(g, tile, B, 2 * m, gx, one)
            for step in range(M):
                s = M - 1 - step
                j, c = integer(layer, s), at(coef, s, one)
                if integer(half, s) == 0:
                    r, to, of = r_q, 0, m * vector
                    K, b, V, dK, db, dV = K_q, b_q, V_q, dK_q, db_q, dV_q
                else:
                    r, to, of = r_p, m * vector, 0
                    K, b, V, dK, db, dV = K_p, b_p, V_p, dK_p, db_p, dV_p
                weight, bias = j * r * m * size, j * r * size
                _affine(K + weight, b + bias, x + of, z, r, m, one)
                _activate_both(code, z, d, r, one)
                v = w  # V g
                if kind == IDENTITY:
                    for k in range(m):
                        store(x + to, k, load(x + to, k, one) - load(z, k, one) * c)
                    v = gx + to
                else:
                    _add_adjoint(V + weight, m, z, -c, x + to, r, m, one)
                    _affine(V + weight, 0, gx + to, w, r, m, one)
                along = splat(0.0, one)
                for i in range(r):
                    zi, vi = load(z, i, one), load(v, i, one)
                    along = along + zi * vi
                    u = load(d, i, one) * vi * c
                    store(d, i, u)
                    store(z, i, zi * c)
                put(dcoef, s, at(dcoef, s, one) + total_of(fold(along)))
                _add_sums(db + bias, d, r, one)
                if kind == SAME:
                    _add_outer(dK + weight, d, x + of, z, gx + to, r, m, one)
                else:
                    _add_outer(dK + weight, d, x + of, 0, 0, r, m, one)
                    if kind == GENERAL:
                        _add_outer(dV + weight, z, gx + to, 0, 0, r, m, one)
                _add_adjoint(K + weight, m, d, one, gx + of, r, m, one)
            _scatter(x, tile, B, 2 * m, y_0, one)
            _scatter(gx, tile, B, 2 * m, g_0, one)
        group = claim(args, 1)


def _euler_forward(args):  # pragma: kernel
    one, given = unit(args), arguments(args, 19)
    scratch, part, B, tiles, n, r, N = given[3:10]
    y, out, K, b, V, h, code, kind, keep = given[10:19]
    scratch += claim(args, 0) * part
    size = bytes_of(one)
    vector = lanes_of(one) * size
    x, z = scratch, scratch + n * vector
    tile = claim(args, 1)
    while tile < tiles:
        _gather(y, tile, B, n, x, one)
        if keep:
            _scatter(x, tile, B, n, out, one)
        for j in range(N):
            c = at(h, j, one)
            _affine(K + j * r * n * size, b + j * r * size, x, z, r, n, one)
            _activate(code, z, r, one)
            if kind == IDENTITY:
                for k in range(n):
                    store(x, k, load(x, k, one) + load(z, k, one) * c)
            elif kind == CANONICAL:  # J V^T z: the halves trade places, one turns its sign
                half = n // 2
                place = V + j * r * n * size
                _add_adjoint(place, n, z, c, x + half * vector, r, half, one)
                _add_adjoint(place + half * size, n, z, -c, x, r, half, one)
            else:
                _add_adjoint(V + j * r * n * size, n, z, c, x, r, n, one)
            if keep:
                _scatter(x, tile, B, n, out + (j + 1) * B * n * size, one)
        if not keep:
            _scatter(x, tile, B, n, out, one)
        tile = claim(args, 1)


def _euler_backward(args):  # pragma: kernel
    one, given = unit(args), arguments(args, 21)
    groups, scratch, part, B, tiles, n, r, N = given[2:10]
    states, g, g_0, K, b, V, h, grads, total, code, kind = given[10:21]
    scratch += claim(args, 0) * part
    size = bytes_of(one)
    vector = lanes_of(one) * size
    x = scratch
    gx = x + n * vector
    z = gx + n * vector
    d = z + r * vector
    w = d + r * vector
    turned = w + r * vector
    group = claim(args, 1)
    while group < groups:
        dK = grads + group * total * size
        db = dK + N * r * n * size
        dh = db + N * r * size
        dV = dh + N * size
        for tile in range(tiles * group // groups, tiles * (group + 1) // groups):
            _gather(g, tile, B, n, gx, one)
            for step in range(N):
                j = N - 1 - step
                c = at(h, j, one)
                weight, bias = j * r * n * size, j * r * size
                _gather(states + j * B * n * size, tile, B, n, x, one)
                _affine(K + weight, b + bias, x, z, r, n, one)
                _activate_both(code, z, d, r, one)
                v, to = gx, gx
                if kind == CANONICAL:  # J^T g
                    half = n // 2
                    to = turned
                    for k in range(half):
                        store(to, k, load(gx, k + half, one))
                        store(to, k + half, splat(0.0, one) - load(gx, k, one))
                if kind != IDENTITY:
                    _affine(V + weight, 0, to, w, r, n, one)
                    v = w
                along = splat(0.0, one)
                for i in range(r):
                    zi, vi = load(z, i, one), load(v, i, one)
                    along = along + zi * vi
                    u = load(d, i, one) * vi * c
                    store(d, i, u)
                    store(z, i, zi * c)
                put(dh, j, at(dh, j, one) + total_of(fold(along)))
                _add_sums(db + bias, d, r, one)
                if kind in (SAME, CANONICAL):
                    _add_outer(dK + weight, d, x, z, to, r, n, one)
                else:
                    _add_outer(dK + weight, d, x, 0, 0, r, n, one)
                    if kind == GENERAL:
                        _add_outer(dV + weight, z, gx, 0, 0, r, n, one)
                _add_adjoint(K + weight, n, d, one, gx, r, n, one)
            _scatter(gx, tile, B, n, g_0, one)
        group = claim(args, 1)


def _sum_groups(args):  # pragma: kernel
    """The sums of all groups into the first, in order."""
    one, given = unit(args), arguments(args, 3)
    grads, groups, total = given
    size = bytes_of(one)
    for i in range(total // lanes_of(one)):
        s = load(grads, i, one)
        for group in range(1, groups):
            s = s + load(grads + group * total * size, i, one)
        store(grads, i, s)


KERNELS: dict[str, Callable[..., Any]] = {
    "split_forward": _split_forward,
    "split_backward": _split_backward,
    "euler_forward": _euler_forward,
    "euler_backward": _euler_backward,
    "add_up": _sum_groups,
}

INLINE = ("_exp", "_tanh", "_log1p", "_normal_cdf", "_turns", "_sin", "_cos")
INLINE += ("_one_row", "_two_rows", "_four_rows")
PARTS = ("_activate", "_activate_both", "_affine", "_add_adjoint", "_add_outer", "_add_sums")
PARTS += ("_turn", "_gather", "_scatter")

_compiled: dict[tuple[str, torch.dtype], Any] = {}


def _kernel(name: str, dtype: torch.dtype) -> Any:
    """The compiled kernel, a C function of the address of its arguments."""
    found = _compiled.get((name, dtype))
    if found is None:
        with _lock:
            found = _compile(name, dtype)
    return found


def _compile(name: str, dtype: torch.dtype) -> Any:
    """Compile a kernel, or find it on disk; give numba the vector operations before the first."""
    numba = require("numba", extra="fast")
    names = globals()
    if at is None:
        names.update(_vector_operations())
        for part in INLINE + PARTS:
            options = {"error_model": "numpy", "forceinline": part in INLINE}
            names[part] = numba.njit(**options)(names[part])
    if (name, dtype) not in _compiled:
        number = numba.float32 if dtype == torch.float32 else numba.float64
        signature = numba.void(numba.types.CPointer(number))
        try:
            compiled = numba.cfunc(signature, cache=True, error_model="numpy")(KERNELS[name])
        except RuntimeError:  # there is no place on disk to keep it
            compiled = numba.cfunc(signature, error_model="numpy")(KERNELS[name])
        # Only the address of a compiled function goes to C, so the object must stay.
        _compiled[name, dtype] = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(compiled.address)
        _kept.append(compiled)
    return _compiled[name, dtype]


_kept: list[Any] = []


def _vector_operations() -> dict[str, Any]:  # pragma: kernel
    """What numba has not got: vectors as values, and memory by address."""
    from llvmlite import ir
    from numba.core import types
    from numba.core.typing.templates import AbstractTemplate, infer_global, signature
    from numba.extending import intrinsic, lower_builtin, models, register_model

    whole: Any = types.int64
    nothing: Any = types.void
    boolean: Any = types.boolean
    fused = ("contract",)  # a b + c may be rounded once; NaN and infinity stay what they are

    class Vector(types.Type):
        def __init__(self, dtype: Any, size: int = VECTOR_BYTES) -> None:
            self.dtype = dtype
            self.lanes = size * 8 // dtype.bitwidth
            super().__init__(name=f"vector({dtype} x {self.lanes})")

    @register_model(Vector)
    class _VectorModel(models.PrimitiveModel):
        def __init__(self, manager: Any, kind: Any) -> None:
            super().__init__(manager, kind, ir.VectorType(scalar(kind.dtype), kind.lanes))

    def scalar(dtype: Any) -> Any:
        return ir.FloatType() if dtype.bitwidth == 32 else ir.DoubleType()

    def vector_type(kind: Any) -> Any:
        dtype = kind.dtype if isinstance(kind, Vector) else kind
        return ir.VectorType(scalar(dtype), VECTOR_BYTES * 8 // dtype.bitwidth)

    def vector_of(kind: Any) -> Vector:
        return kind if isinstance(kind, Vector) else Vector(kind)

    def spread(builder: Any, value: Any, to: Any) -> Any:
        one_lane = builder.insert_element(
            ir.Constant(to, ir.Undefined), value, ir.Constant(ir.IntType(32), 0)
        )
        mask = ir.Constant(ir.VectorType(ir.IntType(32), to.count), [0] * to.count)
        return builder.shuffle_vector(one_lane, ir.Constant(to, ir.Undefined), mask)

    def convert(context: Any, builder: Any, value: Any, kind: Any, to: Any) -> Any:
        """A scalar of any number type, or a vector, as a vector."""
        if isinstance(kind, Vector):
            return value
        return spread(builder, context.cast(builder, value, kind, to.dtype), vector_type(to))

    def arithmetic(op: Any, emit: str) -> None:
        class _Typing(AbstractTemplate):
            def generic(self, args: Any, kws: Any) -> Any:
                if any(isinstance(a, Vector) for a in args) and len(args) == 2:
                    to = next(a for a in args if isinstance(a, Vector))
                    return signature(to, *args)
                return None

        declare: Any = infer_global
        declare(op)(_Typing)

        def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            a, b = (
                convert(context, builder, value, kind, sig.return_type)
                for value, kind in zip(args, sig.args, strict=True)
            )
            return getattr(builder, emit)(a, b, flags=fused)

        lower_builtin(op, Vector, Vector)(lower)
        lower_builtin(op, Vector, types.Number)(lower)

    arithmetic(operator.add, "fadd")
    arithmetic(operator.sub, "fsub")
    arithmetic(operator.mul, "fmul")
    arithmetic(operator.truediv, "fdiv")

    def call(builder: Any, name: str, to: Any, *args: Any, **options: Any) -> Any:
        function_type = ir.FunctionType(to, [a.type for a in args])
        function = builder.module.globals.get(name)
        if function is None:
            function = ir.Function(builder.module, function_type, name)
        return builder.call(function, args, **options)

    def suffix(t: Any) -> str:
        width = "f32" if isinstance(getattr(t, "element", t), ir.FloatType) else "f64"
        return f"v{t.count}{width}" if isinstance(t, ir.VectorType) else width

    def element(builder: Any, address: Any, index: Any, to: Any, size: int) -> Any:
        place = builder.add(address, builder.mul(index, ir.Constant(index.type, size)))
        return builder.inttoptr(place, to.as_pointer())

    @intrinsic
    def unit(typing: Any, args: Any):
        def emit(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            return ir.Constant(scalar(args.dtype), 1.0)

        return args.dtype(args), emit

    @intrinsic(prefer_literal=True)
    def arguments(typing: Any, args: Any, count: Any):
        def emit(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            start = builder.bitcast(values[0], ir.IntType(64).as_pointer())
            found = [
                builder.load(builder.gep(start, [ir.Constant(ir.IntType(64), k)]))
                for k in range(count.literal_value)
            ]
            return context.make_tuple(builder, sig.return_type, found)

        return types.UniTuple(types.int64, count.literal_value)(args, count), emit

    @intrinsic
    def claim(typing: Any, args: Any, index: Any):
        def emit(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            start = builder.bitcast(values[0], ir.IntType(64).as_pointer())
            place = builder.gep(start, [values[1]])
            one = ir.Constant(ir.IntType(64), 1)
            return builder.atomic_rmw("add", place, one, "monotonic")

        return whole(args, types.int64), emit

    @intrinsic
    def at(typing: Any, address: Any, index: Any, like: Any):
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            t = scalar(like)
            return builder.load(element(builder, args[0], args[1], t, like.bitwidth // 8))

        return like(whole, whole, like), emit

    @intrinsic
    def put(typing: Any, address: Any, index: Any, value: Any):
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            t = scalar(value)
            builder.store(args[2], element(builder, args[0], args[1], t, value.bitwidth // 8))
            return context.get_dummy_value()

        return nothing(whole, whole, value), emit

    @intrinsic
    def integer(typing: Any, address: Any, index: Any):
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return builder.load(element(builder, args[0], args[1], ir.IntType(64), 8))

        return whole(whole, types.int64), emit

    @intrinsic
    def load(typing: Any, address: Any, row: Any, like: Any):
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            place = element(builder, args[0], args[1], vector_type(like), VECTOR_BYTES)
            return builder.load(place, align=16)

        return vector_of(like)(whole, whole, like), emit

    @intrinsic
    def store(typing: Any, address: Any, row: Any, value: Any):
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            place = element(builder, args[0], args[1], vector_type(value), VECTOR_BYTES)
            builder.store(args[2], place, align=16)
            return context.get_dummy_value()

        return nothing(whole, whole, value), emit

    @intrinsic
    def splat(typing: Any, value: Any, like: Any):
        to = vector_of(like)

        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return convert(context, builder, args[0], sig.args[0], to)

        return to(value, like), emit

    def part(builder: Any, x: Any, start: int, count: int) -> Any:
        mask = ir.Constant(ir.VectorType(ir.IntType(32), count), list(range(start, start + count)))
        return builder.shuffle_vector(x, ir.Constant(x.type, ir.Undefined), mask)

    def quarters(builder: Any, x: Any) -> list[Any]:
        count = x.type.count // 4
        return [part(builder, x, k * count, count) for k in range(4)]

    def quarter_of(kind: Any) -> Vector:
        return Vector(kind.dtype, VECTOR_BYTES // 4)

    def add_products(builder: Any, s: Any, x: Any, y: Any) -> Any:
        for a, b in zip(quarters(builder, x), quarters(builder, y), strict=True):
            ab = builder.fmul(a, b, flags=fused)
            s = ab if s is None else builder.fadd(s, ab, flags=fused)
        return s

    @intrinsic
    def turn_block(typing: Any, x: Any, step: Any, y: Any, other_step: Any, like: Any):
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            t = ir.VectorType(scalar(like), 4)
            size = like.bitwidth // 8

            def place(address: Any, step: Any, i: int) -> Any:
                offset = builder.mul(step, ir.Constant(step.type, i))
                return builder.inttoptr(builder.add(address, offset), t.as_pointer())

            def mix(a: Any, b: Any, picked: list[int]) -> Any:
                mask = ir.Constant(ir.VectorType(ir.IntType(32), 4), picked)
                return builder.shuffle_vector(a, b, mask)

            a, b, c, d = (builder.load(place(args[0], args[1], i), align=size) for i in range(4))
            low = mix(a, b, [0, 4, 1, 5]), mix(c, d, [0, 4, 1, 5])
            high = mix(a, b, [2, 6, 3, 7]), mix(c, d, [2, 6, 3, 7])
            halves = (low, [0, 1, 4, 5]), (low, [2, 3, 6, 7]), (high, [0, 1, 4, 5])
            for i, (pair, picked) in enumerate((*halves, (high, [2, 3, 6, 7]))):
                builder.store(mix(pair[0], pair[1], picked), place(args[2], args[3], i), align=size)
            return context.get_dummy_value()

        return nothing(whole, whole, whole, whole, like), emit

    @intrinsic
    def fold(typing: Any, x: Any):
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            a, b, c, d = quarters(builder, args[0])
            return builder.fadd(builder.fadd(a, b), builder.fadd(c, d))

        return quarter_of(x)(x), emit

    @intrinsic
    def dot(typing: Any, x: Any, y: Any):
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return add_products(builder, None, *args)

        return quarter_of(x)(x, y), emit

    @intrinsic
    def dot_more(typing: Any, s: Any, x: Any, y: Any):
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return add_products(builder, *args)

        return s(s, x, y), emit

    @intrinsic
    def add_totals(typing: Any, address: Any, index: Any, a: Any, b: Any, c: Any, d: Any):
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            def add_pairs(x: Any, y: Any, first: list[int], second: list[int]) -> Any:
                def mix(mask: list[int]) -> Any:  # the same within each four lanes
                    lanes = x.type.count
                    picked = [g + k % 4 + k // 4 * lanes for g in range(0, lanes, 4) for k in mask]
                    t = ir.VectorType(ir.IntType(32), lanes)
                    return builder.shuffle_vector(x, y, ir.Constant(t, picked))

                return builder.fadd(mix(first), mix(second))

            ab = add_pairs(args[2], args[3], [0, 4, 1, 5], [2, 6, 3, 7])
            cd = add_pairs(args[4], args[5], [0, 4, 1, 5], [2, 6, 3, 7])
            s = add_pairs(ab, cd, [0, 1, 4, 5], [2, 3, 6, 7])
            while s.type.count > 4:
                n = s.type.count // 2
                s = builder.fadd(part(builder, s, 0, n), part(builder, s, n, n))
            size = a.dtype.bitwidth // 8
            place = element(builder, args[0], args[1], s.type, size)
            builder.store(builder.fadd(builder.load(place, align=size), s), place, align=size)
            return context.get_dummy_value()

        return nothing(whole, whole, a, b, c, d), emit

    @intrinsic
    def total_of(typing: Any, x: Any):
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            t = scalar(x.dtype)
            name = f"llvm.vector.reduce.fadd.{suffix(args[0].type)}"
            return call(
                builder, name, t, ir.Constant(t, -0.0), args[0], fastmath=("reassoc", "contract")
            )

        return x.dtype(x), emit

    @intrinsic
    def where_less(typing: Any, a: Any, b: Any, x: Any, y: Any):
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return builder.select(builder.fcmp_ordered("<", args[0], args[1]), args[2], args[3])

        return x(a, b, x, y), emit

    def function_of(name: str, count: int):
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            t = args[0].type
            return call(builder, f"llvm.{name}.{suffix(t)}", t, *args)

        if count == 1:

            @intrinsic
            def unary(typing: Any, x: Any):
                return x(x), emit

            return unary

        @intrinsic
        def ternary(typing: Any, x: Any, y: Any, z: Any):
            return x(x, y, z), emit

        return ternary

    def bits(builder: Any, x: Any, kind: Any) -> tuple[Any, Any, int]:
        """The integers behind whole numbers x, their type, and the bits of a mantissa."""
        mantissa = 23 if kind.dtype.bitwidth == 32 else 52
        t = ir.VectorType(ir.IntType(kind.dtype.bitwidth), kind.lanes)
        shift = ir.Constant(x.type, [1.5 * 2.0**mantissa] * kind.lanes)
        return builder.bitcast(builder.fadd(x, shift), t), t, mantissa

    @intrinsic
    def power_of_two(typing: Any, k: Any):
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            digits, t, mantissa = bits(builder, args[0], k)
            bias = 127 if mantissa == 23 else 1023
            moved = builder.shl(digits, ir.Constant(t, [mantissa] * k.lanes))
            one = ir.Constant(t, [bias << mantissa] * k.lanes)
            return builder.bitcast(builder.add(moved, one), args[0].type)

        return k(k), emit

    @intrinsic
    def alternate(typing: Any, k: Any, x: Any):
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            digits, t, _ = bits(builder, args[0], k)
            sign = builder.shl(digits, ir.Constant(t, [k.dtype.bitwidth - 1] * k.lanes))
            return builder.bitcast(builder.xor(builder.bitcast(args[1], t), sign), args[1].type)

        return x(k, x), emit

    @intrinsic
    def is_double(typing: Any, like: Any):
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return ir.Constant(ir.IntType(1), int(like.dtype.bitwidth == 64))

        return boolean(like), emit

    @intrinsic
    def lanes_of(typing: Any, like: Any):
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return ir.Constant(ir.IntType(64), VECTOR_BYTES * 8 // like.bitwidth)

        return whole(like), emit

    @intrinsic
    def bytes_of(typing: Any, like: Any):
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return ir.Constant(ir.IntType(64), like.bitwidth // 8)

        return whole(like), emit

    return {
        "arguments": arguments,
        "unit": unit,
        "claim": claim,
        "turn_block": turn_block,
        "fold": fold,
        "dot": dot,
        "dot_more": dot_more,
        "add_totals": add_totals,
        "at": at,
        "put": put,
        "integer": integer,
        "load": load,
        "store": store,
        "splat": splat,
        "total_of": total_of,
        "where_less": where_less,
        "magnitude": function_of("fabs", 1),
        "nearest": function_of("rint", 1),
        "exactly_fused": function_of("fma", 3),
        "power_of_two": power_of_two,
        "alternate": alternate,
        "is_double": is_double,
        "lanes_of": lanes_of,
        "bytes_of": bytes_of,
    }
