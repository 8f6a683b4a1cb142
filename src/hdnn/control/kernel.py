"""The steps of a closed loop as one kernel: quadratic plants in float64 on a CPU, by numba.

The equations are those of `hdnn.control.step`. Each is solved by Newton's method in plain loops,
and the backward pass solves the transposed equations. Samples are independent, so a few threads
share them. One compilation serves loops of all sizes.
"""

# Numba compiles these functions, whose types pyright cannot see.
# pyright: reportOptionalMemberAccess=false, reportOptionalCall=false

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hdnn.control.step import System
from hdnn.errors import ConvergenceError

try:
    import numba
    from numba.core.caching import FunctionCache
except ImportError:  # the kernel is optional
    numba = FunctionCache = None

CHUNKS = 2  # of the samples; fixed, so that sums do not depend on the number of cores
ITERATIONS = 1000
HALVINGS = 40
EPS = 2.0**-52
FAST = {"error_model": "numpy", "fastmath": {"contract", "reassoc"}}


def unsupported_reason(y: Tensor, system: System) -> str | None:
    """A clause that says why the kernel cannot run these states, or None."""
    if numba is None:
        return "numba is not installed (pip install 'hdnn[fast]')"
    if y.device.type != "cpu" or y.dtype != torch.float64:
        return "it runs float64 on a CPU only"
    names = {*system.own.rows} - {"identity", "tanh"}
    if names or "tanh" in system.plant_edges.rows:
        return "the energy of the plant is not quadratic"
    return None


def trajectory(
    system: System,
    y: Tensor,
    steps: int,
    first: int,
    push: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """As `System.trajectory`."""
    if push is None:
        push = y.new_zeros(0, *y.shape)
    weights = []
    static = []
    for group in system:
        weights += [group.A, group.a, group.B]
        index = group.entries.contiguous().numpy()
        linear = group.rows.count("identity")  # rows, which come first
        static.append((index, linear))
    shape = steps, first
    return _Loop.apply(shape, static, y, push, *weights)  # pyright: ignore[reportReturnType]


class _Loop(torch.autograd.Function):
    """The steps as one node of autograd; all solutions are saved for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        shape,
        static,
        y: Tensor,
        push: Tensor,
        *weights: Tensor,
    ):
        steps, ctx.first = shape
        S, D = y.shape
        # Without gradients each step overwrites the solutions of the last one.
        saved = steps if any(ctx.needs_input_grad) else min(steps, 1)
        arrays = [weight.detach().contiguous().numpy() for weight in weights]
        groups = []
        for number, (index, linear) in enumerate(static):
            equations, unknowns = index.shape
            trace = np.empty((saved, S, equations, 2, unknowns))
            own = arrays[3 * number : 3 * number + 3]
            groups.append((index, linear, trace, *own))
        ctx.groups = tuple(groups)
        states = np.empty((steps + 1, S, D))
        middles = np.empty((steps, S, D))
        states[0] = y.detach().numpy()
        force = push.detach().contiguous().numpy()

        def run(low: int, high: int) -> int:
            samples = low, high, states, middles, force
            return _call(_forward, *samples, ctx.first, ctx.groups)

        failed = max(_in_threads(run, S))
        if failed >= 0:
            raise ConvergenceError(
                f"step {failed} of a closed loop: Newton's method did not converge; take a smaller "
                "step or smaller weights."
            )
        ctx.save_for_backward(push, *weights)
        outputs = torch.from_numpy(states), torch.from_numpy(middles)
        ctx.mark_non_differentiable(outputs[1])
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_states: Tensor, _: Tensor):  # pyright: ignore
        push, *weights = ctx.saved_tensors
        cotangents = g_states.contiguous().numpy()
        _, S, D = cotangents.shape
        g_y = np.zeros((S, D))
        g_push = np.zeros(push.shape)

        def run(low: int, high: int) -> list[np.ndarray]:
            sums = [np.zeros(weight.shape) for weight in weights]
            groups = []
            for number, group in enumerate(ctx.groups):
                own = sums[3 * number : 3 * number + 3]
                groups.append((*group, *own))
            samples = low, high, cotangents, g_y, g_push
            _call(_backward, *samples, ctx.first, tuple(groups))
            return sums

        totals, *others = _in_threads(run, S)
        for sums in others:
            for total, part in zip(totals, sums, strict=True):
                total += part
        gradients = map(torch.from_numpy, (g_y, g_push, *totals))
        return None, None, *gradients


def _in_threads(run: Callable[[int, int], Any], samples: int) -> list[Any]:
    """The results of a function of the first and the last sample, for each chunk of samples."""
    if samples < CHUNKS:
        return [run(0, samples)]
    bounds = np.linspace(0, samples, CHUNKS + 1).astype(int).tolist()
    return list(_pool().map(run, bounds[:-1], bounds[1:]))


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(CHUNKS)


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a kernel; if its files on disk are damaged, it is compiled and written anew."""
    with contextlib.suppress(Exception):
        return _compiled(function)(*arguments)
    with contextlib.suppress(Exception):
        FunctionCache(function).flush()
        return _compiled(function)(*arguments)
    return _compiled(function, on_disk=False)(*arguments)


@cache
def _compiled(function: Callable[..., Any], on_disk: bool = True) -> Any:
    return numba.njit(nogil=True, cache=on_disk, **FAST)(function)


def _inner(function: Any) -> Any:
    """A function that kernels call, compiled as a part of them."""
    return function if numba is None else numba.njit(**FAST)(function)


# The kernel


@_inner
def _log_cosh(x):  # pragma: kernel
    size = abs(x)
    return size + math.log1p(math.exp(-2 * size)) - math.log(2.0)


@_inner
def _chord(u, v):  # pragma: kernel
    """The mean of tanh between u and v, to rounding, and its derivatives in v and in u.

    With the middle m and half the distance s of the points,
    log cosh(m + s) - log cosh(m - s) = 2 artanh(tanh m tanh s).
    """
    d = v - u
    half = 0.5 * d
    t = math.tanh(u + half)
    if abs(d) < 3e-4:  # Taylor's series
        slope = 1 - t * t
        mean = t - slope * t * d * d / 12
        even = slope * (0.5 + (6 * t * t - 2) * d * d / 48)
        odd = slope * t * d / 6
        return mean, even - odd, even + odd
    if abs(d) < 1:
        s = math.tanh(half)
        w = t * s
        rise = math.log1p(2 * w / (1 - w))
        at_end = (t + s) / (1 + w)
        at_start = (t - s) / (1 - w)
    else:
        rise = _log_cosh(v) - _log_cosh(u)
        at_end = math.tanh(v)
        at_start = math.tanh(u)
    mean = rise / d
    return mean, (at_end - mean) / d, (mean - at_start) / d


@_inner
def _rows(A, a, x, z):  # pragma: kernel
    """`z = A x + a`."""
    rows, columns = A.shape
    for j in range(rows):
        total = a[j]
        for m in range(columns):
            total += A[j, m] * x[m]
        z[j] = total


@_inner
def _chords(
    linear,
    A,
    a,
    x,
    z,
    u,
    value,
    end,
    start,
):  # pragma: kernel
    """`u = A x + a`, and the chords from z to u with their derivatives in u and in z."""
    _rows(A, a, x, u)
    for j in range(len(a)):
        if j < linear:
            value[j] = 0.5 * (z[j] + u[j])
            end[j] = 0.5
            start[j] = 0.5
        else:
            value[j], end[j], start[j] = _chord(z[j], u[j])


@_inner
def _residual(x, c, B, value, F):  # pragma: kernel
    """`F = x - c - B value`, and its largest entry."""
    columns, rows = B.shape
    largest = 0.0
    for i in range(columns):
        total = x[i] - c[i]
        for j in range(rows):
            total -= B[i, j] * value[j]
        F[i] = total
        largest = max(largest, abs(total))
    return largest


@_inner
def _scale(a, B, x, z, value, end):  # pragma: kernel
    """The size of the terms whose rounding the residual has."""
    columns, rows = B.shape
    size = 1e-290
    for i in range(columns):
        terms = abs(x[i])
        for j in range(rows):
            argument = abs(a[j]) + abs(z[j])
            chord = abs(value[j]) + abs(end[j]) * argument
            terms += abs(B[i, j]) * chord
        size = max(size, terms)
    return size


@_inner
def _matrix(A, B, end, M):  # pragma: kernel
    """`M = I - B diag(end) A`."""
    columns, rows = B.shape
    for i in range(columns):
        for m in range(columns):
            M[i, m] = 0.0
        M[i, i] = 1.0
        for j in range(rows):
            factor = B[i, j] * end[j]
            for m in range(columns):
                M[i, m] -= factor * A[j, m]


@_inner
def _eliminate(M, v, k):  # pragma: kernel
    """Solve M x = v in place, by Gauss's elimination with pivots."""
    for i in range(k):
        pivot = i
        for m in range(i + 1, k):
            if abs(M[m, i]) > abs(M[pivot, i]):
                pivot = m
        if pivot != i:
            for m in range(i, k):
                M[i, m], M[pivot, m] = M[pivot, m], M[i, m]
            v[i], v[pivot] = v[pivot], v[i]
        inverse = 1 / M[i, i]
        for m in range(i + 1, k):
            factor = M[m, i] * inverse
            if factor != 0:
                for j in range(i + 1, k):
                    M[m, j] -= factor * M[i, j]
                v[m] -= factor * v[i]
    for i in range(k - 1, -1, -1):
        total = v[i]
        for m in range(i + 1, k):
            total -= M[i, m] * v[m]
        v[i] = total / M[i, i]


@_inner
def _solve(
    linear,
    A,
    a,
    B,
    y,
    c,
    x,
    work,
):  # pragma: kernel
    """The x with `x = c + B chord(A y + a, A x + a)`; False without a solution."""
    k = len(y)
    z = work[0]
    u = work[1]
    value = work[2]
    end = work[3]
    start = work[4]
    F = work[5]
    dx = work[6]
    near = work[7]
    M = work[11:]
    _rows(A, a, y, z)
    for i in range(k):
        x[i] = c[i]
    _chords(linear, A, a, x, z, u, value, end, start)
    error = _residual(x, c, B, value, F)
    rounding = EPS * _scale(a, B, x, z, value, end)
    for _ in range(ITERATIONS):
        if error <= 4 * rounding:
            return True
        before = error
        _matrix(A, B, end, M)
        for i in range(k):
            dx[i] = F[i]
        _eliminate(M, dx, k)
        share = 1.0
        for _ in range(HALVINGS):
            for i in range(k):
                near[i] = x[i] - share * dx[i]
            _chords(linear, A, a, near, z, u, value, end, start)
            error = _residual(near, c, B, value, F)
            if error < before or error <= 64 * rounding:
                break
            share *= 0.5
        for i in range(k):
            x[i] = near[i]
        if error <= 64 * rounding and error > 0.25 * before:
            return True
        if not math.isfinite(error):
            return False
    return False


@_inner
def _move(
    group,
    t,
    at,
    s,
    backwards,
    y,
    push,
    work,
):  # pragma: kernel
    """Solve the substeps of a group one after the other, and write the states into y."""
    index, linear, trace, A, a, B = group
    E, k = index.shape
    t = min(t, A.shape[0] - 1)
    before = work[8]
    c = work[9]
    x = work[10]
    for number in range(E):
        e = E - 1 - number if backwards else number
        for i in range(k):
            entry = index[e, i]
            before[i] = y[entry]
            c[i] = before[i]
            if len(push):
                c[i] += push[entry]
        solved = _solve(
            linear,
            A[t, e],
            a[t, e],
            B[t, e],
            before[:k],
            c,
            x,
            work,
        )
        if not solved:
            return False
        for i in range(k):
            y[index[e, i]] = x[i]
            trace[at, s, e, 0, i] = before[i]
            trace[at, s, e, 1, i] = x[i]
    return True


@_inner
def _workspace(groups):  # pragma: kernel
    """Eleven vectors, and a matrix below them, for the largest equation."""
    size = 0
    for group in groups:
        A = group[3]
        size = max(size, A.shape[2], A.shape[3])
    return np.empty((11 + size, size))


@_inner
def _step(
    groups,
    t,
    at,
    s,
    y,
    middle,
    force,
    work,
):  # pragma: kernel
    """Move y by one step, and write the states in its middle; False without a solution.

    Groups are the agents themselves, the edges of plants and those of controllers: odd steps take
    them the other way round.
    """
    odd = t % 2 == 1
    for place in range(3):
        number = 2 - place if odd else place
        push = force[:0] if number else force
        if odd and number == 0:
            middle[:] = y
        if not _move(groups[number], t, at, s, odd, y, push, work):
            return False
        if not odd and number == 0:
            middle[:] = y
    return True


def _forward(
    low,
    high,
    states,
    middles,
    push,
    first,
    groups,
):  # pragma: kernel
    """All steps of some samples; the number of the step that failed, or -1."""
    steps, _, D = middles.shape
    work = _workspace(groups)
    last = groups[0][2].shape[0] - 1
    nothing = np.empty(0)
    y = np.empty(D)
    for s in range(low, high):
        y[:] = states[0, s]
        for n in range(steps):
            t = first + n
            at = min(n, last)
            force = push[n, s] if len(push) else nothing
            if not _step(groups, t, at, s, y, middles[n, s], force, work):
                return t
            states[n + 1, s] = y
    return -1


@_inner
def _pull(
    group,
    t,
    n,
    s,
    backwards,
    g,
    g_push,
    work,
):  # pragma: kernel
    """From the gradient of the states after a group to that before it; adds those of weights."""
    index, linear, trace, A, a, B, dA, da, dB = group
    E, k = index.shape
    r = A.shape[2]
    t = min(t, A.shape[0] - 1)
    z = work[0]
    u = work[1]
    value = work[2]
    end = work[3]
    start = work[4]
    v = work[5]
    M = work[11:]
    for number in range(E):
        e = number if backwards else E - 1 - number  # the last substep first
        y = trace[n, s, e, 0]
        x = trace[n, s, e, 1]
        A_e = A[t, e]
        a_e = a[t, e]
        B_e = B[t, e]
        _rows(A_e, a_e, y, z)
        _chords(linear, A_e, a_e, x, z, u, value, end, start)
        _matrix(A_e, B_e, end, M)
        for i in range(k):
            v[i] = g[index[e, i]]
        _eliminate(M.T, v, k)
        for j in range(r):
            total = 0.0
            for i in range(k):
                total += B_e[i, j] * v[i]
            end[j] *= total
            start[j] *= total
            da[t, e, j] += end[j] + start[j]
        for i in range(k):
            if len(g_push):
                g_push[index[e, i]] += v[i]
            for j in range(r):
                dB[t, e, i, j] += v[i] * value[j]
        for j in range(r):
            for i in range(k):
                dA[t, e, j, i] += end[j] * x[i] + start[j] * y[i]
                v[i] += A_e[j, i] * start[j]
        for i in range(k):
            g[index[e, i]] = v[i]


def _backward(
    low,
    high,
    cotangents,
    g_y,
    g_push,
    first,
    groups,
):  # pragma: kernel
    """The gradients of some samples, from those of all states."""
    steps = len(cotangents) - 1
    work = _workspace(groups)
    nothing = np.empty(0)
    g = np.empty(g_y.shape[1])
    for s in range(low, high):
        g[:] = cotangents[steps, s]
        for n in range(steps - 1, -1, -1):
            t = first + n
            odd = t % 2 == 1
            for place in range(3):
                number = place if odd else 2 - place
                force = nothing
                if number == 0 and len(g_push):
                    force = g_push[n, s]
                _pull(groups[number], t, n, s, odd, g, force, work)
            g += cotangents[n, s]
        g_y[s] = g
