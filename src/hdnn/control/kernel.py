"""The steps of a closed loop as one kernel: quadratic plants in float64 on a CPU, by numba.

The equations are those of `hdnn.control.step`. Each is solved by Newton's method in plain loops,
and the backward pass solves the transposed equations. Samples are independent, so a few threads
share them.
"""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hdnn.control.step import Substeps, System
from hdnn.errors import ConvergenceError

try:
    from numba import njit
except ImportError:  # the kernel is optional

    def njit(**_):  # pyright: ignore
        return lambda function: function

    AVAILABLE = False
else:
    AVAILABLE = True

CHUNKS = 2  # of the samples; fixed, so that sums do not depend on the number of cores
ITERATIONS = 1000
HALVINGS = 40
EPS = 2.0**-52
OPTIONS = {
    "nogil": True,
    "cache": True,
    "error_model": "numpy",
    "fastmath": {"contract", "reassoc"},
}


def unsupported_reason(y: Tensor, system: System) -> str | None:
    """A clause that says why the kernel cannot run these states, or None."""
    if not AVAILABLE:
        return "numba is not installed (pip install 'hdnn[fast]')"
    if y.device.type != "cpu" or y.dtype != torch.float64:
        return "it runs float64 on a CPU only"
    names = {*system.own.rows} - {"identity", "tanh"}
    if names or "tanh" in system.plant_edges.rows:
        return "the energy of the plant is not quadratic"
    return None


def trajectory(
    system: System, y: Tensor, steps: int, first: int, push: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As `System.trajectory`."""
    if push is None:
        push = y.new_zeros(0, *y.shape)
    shape = steps, first
    weights = [
        tensor for group in system for tensor in (group.A, group.a, group.B)
    ]
    static = [_static(group) for group in system]
    return _Loop.apply(shape, static, y, push, *weights)  # pyright: ignore[reportReturnType]


def _static(group: Substeps) -> tuple[np.ndarray, int]:
    """The entries that move, and the number of linear rows, which come first."""
    return group.entries.contiguous().numpy(), sum(
        name == "identity" for name in group.rows
    )


class _Loop(torch.autograd.Function):
    """The steps as one node of autograd; all solutions are saved for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, shape, static, y: Tensor, push: Tensor, *weights: Tensor
    ):
        steps, first = shape
        S, D = y.shape
        ctx.shape = shape
        ctx.static = static
        arrays = _arrays(static, weights)
        saved = steps if any(ctx.needs_input_grad) else min(steps, 1)
        states = np.empty((steps + 1, S, D))
        middles = np.empty((steps, S, D))
        traces = [
            np.empty((saved, S, len(index), 2, index.shape[1]))
            for index, _ in static
        ]
        states[0] = y.detach().numpy()
        force = push.detach().contiguous().numpy()

        def run(chunk: slice) -> int:
            parts = [trace[:, chunk] for trace in traces]
            return _forward(
                states[:, chunk],
                middles[:, chunk],
                force[:, chunk],
                first,
                *parts,
                *arrays,
            )

        failed = max(_in_threads(run, S), default=-1)
        if failed >= 0:
            raise ConvergenceError(
                f"step {failed} of a closed loop: Newton's method did not converge; take a smaller "
                "step or smaller weights."
            )
        ctx.traces = traces
        ctx.save_for_backward(push, *weights)
        outputs = torch.from_numpy(states), torch.from_numpy(middles)
        ctx.mark_non_differentiable(outputs[1])
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_states: Tensor, _: Tensor):  # pyright: ignore
        push, *weights = ctx.saved_tensors
        _, first = ctx.shape
        arrays = _arrays(ctx.static, weights)
        cotangents = np.ascontiguousarray(g_states.numpy())
        S, D = cotangents.shape[1:]
        g_y = np.zeros((S, D))
        g_push = np.zeros(push.shape)
        partial = {
            chunk.start: [np.zeros(w.shape) for w in weights]
            for chunk in _chunks(S)
        }

        def run(chunk: slice) -> None:
            parts = [trace[:, chunk] for trace in ctx.traces]
            gradients = partial[chunk.start]
            sums = [tuple(gradients[k : k + 3]) for k in (0, 3, 6)]
            of_samples = cotangents[:, chunk], g_y[chunk], g_push[:, chunk]
            _backward(*of_samples, first, *parts, *arrays, *sums)

        _in_threads(run, S)
        totals, *others = partial.values()
        for gradients in others:
            for total, gradient in zip(totals, gradients, strict=True):
                total += gradient
        gradients = map(torch.from_numpy, (g_y, g_push, *totals))
        return None, None, *gradients


def _arrays(static, weights) -> list[tuple]:
    """What the kernel reads of each group: entries, linear rows, A, a, B, and its sizes.

    A size is the length of a tuple: numba knows it when it compiles, and unrolls the loops.
    """
    tensors = [weight.detach().contiguous().numpy() for weight in weights]
    groups = []
    for number, (index, linear) in enumerate(static):
        A, a, B = tensors[3 * number : 3 * number + 3]
        groups.append(
            (index, linear, A, a, B, (0,) * A.shape[2], (0,) * A.shape[3])
        )
    return groups


def _chunks(samples: int) -> list[slice]:
    size = max(1, math.ceil(samples / CHUNKS))
    return [slice(start, start + size) for start in range(0, samples, size)]


def _in_threads(run, samples: int) -> list:
    chunks = _chunks(samples)
    if len(chunks) < 2:
        return [run(chunk) for chunk in chunks]
    return list(_pool().map(run, chunks))


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(CHUNKS, os.cpu_count() or 1))


# The kernel


@njit(**OPTIONS)
def _log_cosh(x):  # pragma: kernel
    size = abs(x)
    return size + math.log1p(math.exp(-2 * size)) - math.log(2.0)


@njit(**OPTIONS)
def _chord(u, v):  # pragma: kernel
    """The mean of tanh between u and v, to rounding, and its derivatives in v and in u.

    With the middle m and half the distance s of the points,
    log cosh(m + s) - log cosh(m - s) = 2 artanh(tanh m tanh s).
    """
    d = v - u
    half = 0.5 * d
    if abs(d) >= 1:
        mean = (_log_cosh(v) - _log_cosh(u)) / d
        return mean, (math.tanh(v) - mean) / d, (mean - math.tanh(u)) / d
    t = math.tanh(u + half)
    if abs(d) >= 0.2:
        w = t * math.tanh(half)
        mean = math.log1p(2 * w / (1 - w)) / d
    else:  # the series of both functions
        q = half * half
        tail = q * (-1382 / 155925 + q * (21844 / 6081075))
        ratio = 1 + q * (
            -1 / 3 + q * (2 / 15 + q * (-17 / 315 + q * (62 / 2835 + tail)))
        )
        w = t * ratio * half
        q = w * w
        tail = q * (1 / 9 + q * (1 / 11 + q * (1 / 13)))
        mean = t * ratio * (1 + q * (1 / 3 + q * (1 / 5 + q * (1 / 7 + tail))))
    if abs(d) < 3e-4:
        slope = 1 - t * t
        even = slope * (0.5 + (6 * t * t - 2) * d * d / 48)
        odd = slope * t * d / 6
        return mean, even - odd, even + odd
    ts = w / t if t != 0 else math.tanh(half)
    return (
        mean,
        ((t + ts) / (1 + w) - mean) / d,
        (mean - (t - ts) / (1 - w)) / d,
    )


@njit(**OPTIONS)
def _rows(A, a, x, z, R, K):  # pragma: kernel
    for j in range(len(R)):
        total = a[j]
        for m in range(len(K)):
            total += A[j, m] * x[m]
        z[j] = total


@njit(**OPTIONS)
def _chords(linear, z, u, value, end, start, R):  # pragma: kernel
    for j in range(len(R)):
        if j < linear:
            value[j] = 0.5 * (z[j] + u[j])
            end[j] = 0.5
            start[j] = 0.5
        else:
            value[j], end[j], start[j] = _chord(z[j], u[j])


@njit(**OPTIONS)
def _residual(x, c, B, value, F, R, K):  # pragma: kernel
    """`F = x - c - B value`, and its largest entry."""
    largest = 0.0
    for i in range(len(K)):
        total = x[i] - c[i]
        for j in range(len(R)):
            total -= B[i, j] * value[j]
        F[i] = total
        largest = max(largest, abs(total))
    return largest


@njit(**OPTIONS)
def _scale(a, B, x, z, value, end, R, K):  # pragma: kernel
    """The size of the terms whose rounding the residual has."""
    size = 1e-290
    for i in range(len(K)):
        terms = abs(x[i])
        for j in range(len(R)):
            terms += abs(B[i, j]) * (
                abs(value[j]) + abs(end[j]) * (abs(a[j]) + abs(z[j]))
            )
        size = max(size, terms)
    return size


@njit(**OPTIONS)
def _matrix(A, B, end, M, R, K):  # pragma: kernel
    """`M = I - B diag(end) A`."""
    k = len(K)
    for i in range(k):
        for m in range(k):
            M[i, m] = 0.0
        M[i, i] = 1.0
        for j in range(len(R)):
            factor = B[i, j] * end[j]
            for m in range(k):
                M[i, m] -= factor * A[j, m]


@njit(**OPTIONS)
def _transpose(M, K):  # pragma: kernel
    for i in range(len(K)):
        for m in range(i):
            M[i, m], M[m, i] = M[m, i], M[i, m]


@njit(**OPTIONS)
def _eliminate(M, v, K):  # pragma: kernel
    """Solve M x = v in place, by Gauss's elimination with pivots."""
    k = len(K)
    for i in range(k):
        pivot = i
        for m in range(i + 1, k):
            if abs(M[m, i]) > abs(M[pivot, i]):
                pivot = m
        if pivot != i:
            for m in range(i, k):
                M[i, m], M[pivot, m] = M[pivot, m], M[i, m]
            v[i], v[pivot] = v[pivot], v[i]
        inverse = 1.0 / M[i, i]
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


@njit(**OPTIONS)
def _solve(linear, A, a, B, y, c, x, work, M, R, K):  # pragma: kernel
    """The x with `x = c + B chord(A y + a, A x + a)`; False if it was not found."""
    r = len(R)
    k = len(K)
    z, u, value, end = work[0], work[1], work[2], work[3]
    F, dx, there, start = work[4], work[5], work[6], work[10]
    _rows(A, a, y, z, R, K)
    for i in range(k):
        x[i] = c[i]
    for j in range(r):
        value[j] = z[j] if j < linear else math.tanh(z[j])
    for i in range(k):
        for j in range(r):
            x[i] += B[i, j] * value[j]
    _rows(A, a, x, u, R, K)
    _chords(linear, z, u, value, end, start, R)
    error = _residual(x, c, B, value, F, R, K)
    rounding = EPS * _scale(a, B, x, z, value, end, R, K)
    # The rate of Newton's quadratic convergence: the largest of all steps, since the residual of a
    # lucky step may be far smaller than its rate.
    rate = 0.0
    for number in range(ITERATIONS):
        if error <= 4 * rounding:
            return True
        before = error
        last = number > 1 and 100 * rate * error * error <= rounding
        _matrix(A, B, end, M, R, K)
        for i in range(k):
            dx[i] = F[i]
        _eliminate(M, dx, K)
        if last:
            for i in range(k):
                x[i] -= dx[i]
            return True
        share = 1.0
        for _ in range(HALVINGS):
            for i in range(k):
                there[i] = x[i] - share * dx[i]
            _rows(A, a, there, u, R, K)
            _chords(linear, z, u, value, end, start, R)
            error = _residual(there, c, B, value, F, R, K)
            if error < before or error <= 64 * rounding:
                break
            share *= 0.5
        for i in range(k):
            x[i] = there[i]
        if error <= 64 * rounding and error > 0.25 * before:
            return True
        if not math.isfinite(error):
            return False
        rate = max(rate, error / (before * before))
    return error <= 64 * rounding


@njit(**OPTIONS)
def _move(group, t, backwards, y, push, trace, keep, work, M):  # pragma: kernel
    """Solve the substeps of a group one after the other, and write the states into y."""
    index, linear, A, a, B, R, K = group
    E = index.shape[0]
    k = len(K)
    t = min(t, A.shape[0] - 1)
    before, c, x = work[7], work[8], work[9]
    for number in range(E):
        e = E - 1 - number if backwards else number
        for i in range(k):
            before[i] = y[index[e, i]]
            c[i] = before[i] + push[index[e, i]] if push.shape[0] else before[i]
        if not _solve(
            linear, A[t, e], a[t, e], B[t, e], before, c, x, work, M, R, K
        ):
            return False
        for i in range(k):
            y[index[e, i]] = x[i]
            if keep:
                trace[e, 0, i] = before[i]
                trace[e, 1, i] = x[i]
    return True


@njit(**OPTIONS)
def _forward(
    states,
    middles,
    push,
    first,
    own_trace,
    plant_trace,
    link_trace,
    own,
    plant,
    link,
):  # pragma: kernel
    """All steps of some samples; the number of the step that failed, or -1."""
    steps, S, D = middles.shape
    size = max(
        len(own[5]),
        len(own[6]),
        len(plant[5]),
        len(plant[6]),
        len(link[5]),
        len(link[6]),
    )
    work = np.empty((11, size))
    M = np.empty((size, size))
    nothing = np.empty(0)
    keep = own_trace.shape[0] == steps
    y = np.empty(D)
    for s in range(S):
        y[:] = states[0, s]
        for n in range(steps):
            t = first + n
            at = n if keep else 0
            force = push[n, s] if push.shape[0] else nothing
            odd = t % 2 == 1
            fine = True
            if odd:
                fine = _move(
                    link, t, True, y, nothing, link_trace[at, s], keep, work, M
                )
                fine &= _move(
                    plant,
                    t,
                    True,
                    y,
                    nothing,
                    plant_trace[at, s],
                    keep,
                    work,
                    M,
                )
                middles[n, s] = y
            fine &= _move(
                own, t, False, y, force, own_trace[at, s], keep, work, M
            )
            if not odd:
                middles[n, s] = y
                fine &= _move(
                    plant,
                    t,
                    False,
                    y,
                    nothing,
                    plant_trace[at, s],
                    keep,
                    work,
                    M,
                )
                fine &= _move(
                    link, t, False, y, nothing, link_trace[at, s], keep, work, M
                )
            if not fine:
                return t
            states[n + 1, s] = y
    return -1


@njit(**OPTIONS)
def _pull(
    group, t, backwards, g, g_push, trace, gradients, work, M
):  # pragma: kernel
    """From the gradient of the states after a group to that before it; adds those of weights."""
    index, linear, A, a, B, R, K = group
    dA, da, dB = gradients
    E = index.shape[0]
    r = len(R)
    k = len(K)
    t = min(t, A.shape[0] - 1)
    z, u, value, end = work[0], work[1], work[2], work[3]
    v, pull, start = work[4], work[5], work[6]
    for number in range(E):
        e = number if backwards else E - 1 - number  # the last substep first
        y = trace[e, 0]
        x = trace[e, 1]
        _rows(A[t, e], a[t, e], y, z, R, K)
        _rows(A[t, e], a[t, e], x, u, R, K)
        _chords(linear, z, u, value, end, start, R)
        _matrix(A[t, e], B[t, e], end, M, R, K)
        _transpose(M, K)
        for i in range(k):
            v[i] = g[index[e, i]]
        _eliminate(M, v, K)
        for j in range(r):
            total = 0.0
            for i in range(k):
                total += B[t, e, i, j] * v[i]
            start[j] = start[j] * total
            pull[j] = end[j] * total
            da[t, e, j] += pull[j] + start[j]
        for i in range(k):
            if g_push.shape[0]:
                g_push[index[e, i]] += v[i]
            for j in range(r):
                dB[t, e, i, j] += v[i] * value[j]
        for j in range(r):
            for i in range(k):
                dA[t, e, j, i] += pull[j] * x[i] + start[j] * y[i]
                v[i] += A[t, e, j, i] * start[j]
        for i in range(k):
            g[index[e, i]] = v[i]


@njit(**OPTIONS)
def _backward(
    cotangents, g_y, g_push, first, own_trace, plant_trace, link_trace,
    own, plant, link, d_own, d_plant, d_link,
):  # pragma: kernel  # fmt: skip
    """The gradients of some samples, from those of all states."""
    steps = cotangents.shape[0] - 1
    S, D = g_y.shape
    size = max(
        len(own[5]),
        len(own[6]),
        len(plant[5]),
        len(plant[6]),
        len(link[5]),
        len(link[6]),
    )
    work = np.empty((11, size))
    M = np.empty((size, size))
    nothing = np.empty(0)
    g = np.empty(D)
    for s in range(S):
        g[:] = cotangents[steps, s]
        for n in range(steps - 1, -1, -1):
            t = first + n
            odd = t % 2 == 1
            force = g_push[n, s] if g_push.shape[0] else nothing
            if not odd:
                _pull(
                    link,
                    t,
                    False,
                    g,
                    nothing,
                    link_trace[n, s],
                    d_link,
                    work,
                    M,
                )
                _pull(
                    plant,
                    t,
                    False,
                    g,
                    nothing,
                    plant_trace[n, s],
                    d_plant,
                    work,
                    M,
                )
            _pull(own, t, False, g, force, own_trace[n, s], d_own, work, M)
            if odd:
                _pull(
                    plant,
                    t,
                    True,
                    g,
                    nothing,
                    plant_trace[n, s],
                    d_plant,
                    work,
                    M,
                )
                _pull(
                    link, t, True, g, nothing, link_trace[n, s], d_link, work, M
                )
            for i in range(D):
                g[i] += cotangents[n, s, i]
        g_y[s] = g
