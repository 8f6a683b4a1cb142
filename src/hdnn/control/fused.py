"""A closed loop as one kernel: what is linear is eliminated here, by PyTorch and its gradients."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hdnn.base.notice import said_if_slow
from hdnn.control.links import Edges
from hdnn.control.step import System
from hdnn.engine import jit
from hdnn.engine.kernels import closed_loop
from hdnn.errors import ConvergenceError

GROUPS = 8  # of samples that share sums: fixed, so that the bits do not depend on threads
UNROLLED = 4  # states of a controller up to which loops are compiled for just that number
COMPILING = "hdnn: compiling the kernels of closed loops for this processor (once, a minute)"

_lock = threading.Lock()


def why_not(y: Tensor, system: System) -> str:
    """Why the kernel cannot run; empty if it can."""
    if not jit.installed():
        return "it needs numba; pip install 'hdnn[fast]'"
    if y.device.type != "cpu" or system.K.dtype != torch.float64:
        return f"it is for float64 on a CPU, but states are {system.K.dtype} on {y.device.type}"
    return ""


def trajectory(system: System, y: Tensor, steps: int, first: int = 0) -> tuple[Tensor, Tensor]:
    """As `hdnn.control.step.trajectory`."""
    links = _indices(system.plant_links), _indices(system.links)
    own, plant = _own(system), _plant_edges(system)
    tensors = (system.K, system.b, *own, *plant, system.h * system.C)
    found: Any = _Run.apply(y, *tensors, (steps, first, links))
    return found[0].transpose(0, 1), found[1].transpose(0, 1)


def _own(system: System) -> tuple[Tensor, ...]:
    """An agent by itself once its linear rows are solved for: M, U, u, V, v, W of the kernel."""
    p = system.A.shape[2]
    G = system.h * system.own
    G_zz, G_zc, G_cz, G_cc = G[:, :p, :p], G[:, :p, p:], G[:, p:, :p], G[:, p:, p:]
    Q, q = system.A.mT @ system.A, system.A.mT @ system.a.unsqueeze(-1)
    eye = torch.eye(p, dtype=Q.dtype)
    solved = torch.linalg.solve(eye - 0.5 * G_zz @ Q, torch.cat([G_zz, G_zc], -1))
    V, W = solved[..., :p], solved[..., p:]
    U = G_cz @ (eye + 0.5 * Q @ V)
    M = G_cc + 0.5 * G_cz @ Q @ W
    return M, U @ Q, (U @ q).squeeze(-1), V @ Q, (V @ q).squeeze(-1), W


def _plant_edges(system: System) -> tuple[Tensor, Tensor]:
    """Both ends of an edge of plants: their increment is L z + l."""
    i, k = _indices(system.plant_links).T
    C, p = system.h * system.couplings, system.A.shape[2]
    none = torch.zeros_like(C)
    G = torch.cat([torch.cat([none, C], -1), torch.cat([-C.mT, none], -1)], -2)
    Q, q = system.A.mT @ system.A, (system.A.mT @ system.a.unsqueeze(-1)).squeeze(-1)
    Q = torch.cat([torch.cat([Q[i], none], -1), torch.cat([none, Q[k]], -1)], -2)
    L = torch.linalg.solve(torch.eye(2 * p, dtype=Q.dtype) - 0.5 * G @ Q, G)
    return L @ Q, (L @ torch.cat([q[i], q[k]], -1).unsqueeze(-1)).squeeze(-1)


def _indices(links: Edges) -> np.ndarray:
    return np.array(links, dtype=np.int64).reshape(-1, 2)


class _Run(torch.autograd.Function):
    """All steps of all samples: states and ends of substeps, `(B, steps + 1, N, n)` and `steps`."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
        *tensors, (steps, first, links) = given
        start, *arrays = (t.detach().contiguous().numpy() for t in (y, *tensors))
        (B, N, n), c = start.shape, arrays[0].shape[-1]
        edges = [len(each) for each in links]
        keep = B if any(ctx.needs_input_grad) else 0
        kept = (
            np.empty((B, steps + 1, N, n)),
            np.empty((B, steps, N, n)),
            np.empty((keep, steps, edges[0], 2 * (n - c))),
            np.empty((keep, steps, edges[1], 2 * c)),
        )
        failed = np.zeros((GROUPS, 4), dtype=np.int64)
        run, parts, size = kernels()[0], _sorted(arrays, links), _size(c)

        def group(j: int, low: int, high: int) -> None:
            run(size, start[low:high], first, *parts, tuple(k[low:high] for k in kept), failed[j])

        _each_group(B, run, group)
        for kind, t, which, _ in failed:
            if kind:
                i, k = links[1][which] if kind == 2 else (which, which)
                where = f"link ({i}, {k})" if kind == 2 else f"agent {i}"
                raise ConvergenceError(
                    f"step {first + t}, {where}: the step has no solution that floating-point "
                    "numbers can hold: a state or weight is NaN, infinite or far too large."
                )
        ctx.given, ctx.arrays, ctx.kept = (steps, first, links), arrays, kept
        states, ends = torch.from_numpy(kept[0]), torch.from_numpy(kept[1])
        ctx.mark_non_differentiable(ends)
        return states, ends

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _gradients(ctx, *grads)


@once_differentiable
def _gradients(ctx: Any, *grads: Any) -> Any:
    _, first, links = ctx.given
    arrays, kept, run = ctx.arrays, ctx.kept, kernels()[1]
    g, parts = grads[0].contiguous().numpy(), _sorted(arrays, links)
    size = _size(arrays[0].shape[-1])
    B, dy = len(g), np.empty_like(kept[0][:, 0])
    found = [[np.zeros_like(a) for a in arrays] for _ in range(min(B, GROUPS))]

    def group(j: int, low: int, high: int) -> None:
        K, b, M, U, u, V, v, W, L, l_, C = found[j]
        to = (K, b), (M, U, u, V, v, W), (L, l_), C, dy[low:high]
        run(size, g[low:high], first, *parts, tuple(k[low:high] for k in kept), to)

    _each_group(B, run, group)
    sums = [sum(each[1:], each[0]) for each in zip(*found, strict=True)] if found else arrays
    return torch.from_numpy(dy), *(torch.from_numpy(s) for s in sums), None


def _size(c: int) -> Any:
    """c as the kernel takes it: small ones are compiled each by itself."""
    return (0,) * c if c <= UNROLLED else np.zeros(c)


def _sorted(arrays: list[np.ndarray], links: Any) -> tuple[Any, ...]:
    """Weights, own matrices, plant edges and edges as the kernel takes them."""
    K, b, M, U, u, V, v, W, L, l_, C = arrays
    return (K, b), (M, U, u, V, v, W), (links[0], L, l_), (links[1], C)


def kernels() -> tuple[Any, Any]:
    """Forwards and backwards; numba compiles them when they are first called."""
    with _lock:
        return closed_loop.compiled(jit.compiled)


def _each_group(B: int, kernel: Any, run: Callable[[int, int, int], None]) -> None:
    """Run groups of samples, shared out to as many threads as PyTorch may use."""
    groups = min(B, GROUPS)
    bounds = [(j, B * j // groups, B * (j + 1) // groups) for j in range(groups)]
    threads = min(groups, torch.get_num_threads())

    def share(first: int) -> None:
        for bound in bounds[first::threads]:
            run(*bound)

    with nullcontext() if kernel.signatures else said_if_slow(COMPILING):
        if threads <= 1:
            for bound in bounds:
                run(*bound)
        else:
            rest = [_pool().submit(share, j) for j in range(1, threads)]
            try:
                share(0)
            finally:
                for future in rest:
                    future.result()


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count() or 1, "hdnn-control")


def _after_fork() -> None:
    """Threads, and the lock that one of them may hold, stayed in the parent."""
    global _lock
    _lock = threading.Lock()
    _pool.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
