"""The steps of a closed loop as one kernel: quadratic plants in float64 on a CPU, with numba.

The equations are those of `hdnn.control.step`, after the linear rows have been eliminated:

    x = c + F A^T chord(A y + a, A x + a),        c = y + Q y + e + push

The rows u = A x + a are computed with Newton's method; the backward pass solves the transposed
equations. With P = A F A^T and the slopes D of chords its matrices are I - P D. Substeps do not
create energy, so the symmetric part of I - P D, scaled by the root of D, is at least I, and
elimination needs no pivots. Equations of agents or edges and samples that do not depend on each
other are stored side by side in lanes; the innermost loops run over lanes, and LLVM turns them into
vector instructions.
"""

# Numba compiles these functions, whose types pyright cannot see.
# pyright: reportOptionalMemberAccess=false, reportOptionalCall=false

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.polynomial import Chebyshev, Polynomial
from torch import Tensor
from torch.autograd.function import once_differentiable

from hdnn.control.plant import times
from hdnn.control.step import Substeps, System
from hdnn.errors import ConvergenceError

try:
    import numba
    from numba.core.caching import FunctionCache
except ImportError:  # the kernel is optional
    numba = FunctionCache = None

LANES = 32
VECTOR = 8
ITERATIONS = 10_000
SHORTEST = 2.0**-10  # shortest Newton step, which is always taken
SMALL = 1e-7  # a Newton step whose square is rounding
EPS = 2.0**-52
FAST = {"error_model": "numpy", "fastmath": {"contract"}}


def unsupported_reason(y: Tensor, system: System) -> str | None:
    """The reason why the kernel cannot run these states, or None."""
    if numba is None:
        return "numba is not installed (pip install 'hdnn[fast]')"
    if y.device.type != "cpu" or y.dtype != torch.float64:
        return "it only runs float64 on a CPU"
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
    """The implementation of `System.trajectory`."""
    groups = [_eliminated(substeps) for substeps in system]
    if push is None:
        push = y.new_zeros(0, *y.shape)
    else:
        inverse, _ = groups[0]
        agents = push.unflatten(-1, inverse.shape[-3:-1])
        push = times(inverse, agents).flatten(-2)
    weights = [weight for _, own in groups for weight in own]
    layout = [_layout(substeps) for substeps in system]
    shape = steps, first
    return _Loop.apply(shape, layout, y, push, *weights)  # pyright: ignore[reportReturnType]


def _eliminated(substeps: Substeps) -> tuple[Tensor, list[Tensor]]:
    """(I - H / 2)^-1 of the linear rows, which come first, and Q, e, F, A and a of the others."""
    linear = substeps.rows.count("identity")
    # Linear rows belong to plants, and are the same in all steps.
    rows = substeps.A[0, :, :linear].detach()
    offsets = substeps.a[0, :, :linear].detach()
    weights = substeps.weights[:, :linear]
    slopes = substeps.flow @ (rows.mT * weights.unsqueeze(-2))
    H = slopes @ rows
    eye = torch.eye(H.shape[-1]).to(H)
    inverse = torch.linalg.inv(eye - 0.5 * H)
    Q = inverse @ H
    e = times(inverse, times(slopes, offsets))
    F = inverse @ substeps.flow
    A = substeps.A[:, :, linear:]
    a = substeps.a[:, :, linear:]
    return inverse, [Q, e, F, A, a]


def _layout(substeps: Substeps) -> tuple[np.ndarray, np.ndarray]:
    """The entries, and the starts of groups of equations that share no entry."""
    index = substeps.entries.contiguous().numpy()
    stops = [group.stop or len(index) for group in substeps.groups]
    return index, np.array([0, *stops])


class _Loop(torch.autograd.Function):
    """The steps as one node of autograd; all solutions are saved for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        shape,
        layout,
        y: Tensor,
        push: Tensor,
        *weights: Tensor,
    ):
        steps, ctx.first = shape
        S, D = y.shape
        # Without gradients each step overwrites the solutions of the last one.
        saved = steps if any(ctx.needs_input_grad) else min(steps, 1)
        arrays = [_array(weight) for weight in weights]
        groups = []
        for number, (index, bounds) in enumerate(layout):
            own = arrays[5 * number : 5 * number + 5]
            E, k = index.shape
            trace = np.empty((saved, E, 2, S, k))
            _, _, F, A, _ = map(torch.from_numpy, own)
            P = A @ F @ A.mT
            groups.append((index, bounds, *own, P.numpy(), trace))
        ctx.groups = tuple(groups)
        states = np.empty((steps + 1, S, D))
        middles = np.empty((steps, S, D))
        states[0] = _array(y)
        force = _array(push)

        def run(low: int, high: int) -> int:
            arrays = states, middles, force
            space = _space(ctx.groups, high - low, D)
            return _call(_forward, low, *arrays, ctx.first, space, ctx.groups)

        failed = max(_in_threads(run, S, ctx.groups))
        if failed >= 0:
            raise ConvergenceError(
                f"step {failed} of a closed loop: Newton's method did not converge; use a smaller "
                "step or smaller weights."
            )
        outputs = torch.from_numpy(states), torch.from_numpy(middles)
        ctx.mark_non_differentiable(outputs[1])
        ctx.push_shape = push.shape
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_states: Tensor, _: Tensor):  # pyright: ignore
        cotangents = _array(g_states)
        steps, S, D = cotangents.shape
        g_y = np.empty((1, S, D))
        g_push = np.zeros(ctx.push_shape)
        groups = []
        traces = []
        for group in ctx.groups:
            E, r, k = group[5].shape[1:]
            pulls = np.empty((steps - 1, E, 3, S, r))
            sources = np.empty((steps - 1, E, S, k))
            traces.append((group[-1], pulls, sources))
            groups.append((*group, pulls, sources))

        def run(low: int, high: int) -> None:
            arrays = cotangents, g_y, g_push
            space = _space(ctx.groups, high - low, D)
            _call(_backward, low, *arrays, ctx.first, space, tuple(groups))

        _in_threads(run, S, ctx.groups)
        gradients = [g_y[0], g_push]
        for group, trace in zip(ctx.groups, traces, strict=True):
            sums = [np.zeros(weight.shape) for weight in group[2:7]]
            work = np.zeros((2, group[0].shape[1]))
            _call(
                _gradients, ctx.first, *group[4:6], *trace, tuple(work), *sums
            )
            gradients += sums
        gradients = map(torch.from_numpy, gradients)
        return None, None, *gradients


class Space(NamedTuple):
    """The memory for the lanes of a tile."""

    rows: tuple[np.ndarray, ...]
    chords: tuple[np.ndarray, ...]
    lanes: tuple[np.ndarray, ...]
    P: np.ndarray
    M: np.ndarray
    states: tuple[np.ndarray, ...]
    y: np.ndarray


def _space(groups: Any, samples: int, D: int) -> Space:
    shapes = [group[5].shape for group in groups]
    rows = max(shape[2] for shape in shapes)
    k = max(shape[3] for shape in shapes)

    def arrays(count: int, *shape: int) -> tuple[np.ndarray, ...]:
        return tuple(np.zeros(shape) for _ in range(count))

    return Space(
        arrays(6, rows, LANES),
        arrays(3, rows, LANES),
        arrays(5, LANES),
        np.zeros((rows, rows, LANES)),
        np.zeros((rows, rows, LANES)),
        arrays(2, k),
        np.zeros((samples, D)),
    )


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().contiguous().numpy()


def _in_threads(
    run: Callable[[int, int], Any], samples: int, groups: Any
) -> list[Any]:
    """The results of a function of the first and the last sample, for chunks of samples.

    The size of chunks does not depend on the number of cores, so neither do results.
    """
    agents = len(groups[0][0])
    size = max(1, LANES // agents)
    if samples <= size:
        return [run(0, samples)]
    starts = range(0, samples, size)
    stops = [min(start + size, samples) for start in starts]
    return list(_pool().map(run, starts, stops))


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count())


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a kernel; if its files on disk are damaged, compile it and write them again."""
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
    """A function that kernels call, compiled as part of each kernel."""
    if numba is None:
        return function
    internal = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return numba.njit(**internal, **FAST)(function)


def _inline(function: Any) -> Any:
    """A function in a loop that is turned into vector instructions."""
    if numba is None:
        return function
    return numba.njit(forceinline=True, **FAST)(function)


# Chords


def _arc_series(s: Any) -> Any:
    """(artanh(x) / x - 1) / s with s = x^2."""
    return sum(s**n / (2 * n + 3) for n in range(20))


_fit = Chebyshev.interpolate(_arc_series, 10, domain=[0, 1 / 9])
ARTANH = tuple(_fit.convert(kind=Polynomial).coef[::-1].tolist())
EXP = tuple(1 / math.factorial(n) for n in range(13, 1, -1))
LOG2_HIGH = (
    6.93147180369123816490e-01  # products of it with small integers are exact
)
LOG2_LOW = 1.90821492927058770002e-10


@_inline
def _expm1(x):  # pragma: kernel
    """exp(x) - 1 for x between -80 and 0."""
    n = np.int64(x / math.log(2.0) - 0.5)
    rest = (x - n * LOG2_HIGH) - n * LOG2_LOW
    total = 0.0
    for factor in EXP:
        total = total * rest + factor
    total = total * rest * rest + rest
    power = np.int64((n + 1023) << 52).view(np.float64)
    return power * total + (power - 1)


@_inline
def _tanh(x):  # pragma: kernel
    """tanh x, and exp(-2 |x|) - 1."""
    fall = _expm1(-2 * min(abs(x), 40.0))
    size = fall / (2 + fall)
    return -size if x > 0 else size, fall


@_inline
def _chord(u, v):  # pragma: kernel
    """The mean of tanh between u and v, to rounding, and its derivatives in v and in u.

    The integral of tanh is log cosh, and with the middle m and half the distance s of close points
    log cosh(m + s) - log cosh(m - s) = 2 artanh(tanh m tanh s).
    """
    d = v - u
    near = abs(d) < 0.5
    small = abs(d) < 3e-4
    t, fall = _tanh(u + 0.5 * d if near else u)
    s, fall_v = _tanh(0.5 * d if near else v)
    w = t * s
    x = w if near else (fall_v - fall) / (4 + fall + fall_v)
    square = x * x
    total = 0.0
    for factor in ARTANH:
        total = total * square + factor
    rise = 2 * (x + x * square * total)
    rise = rise if near else rise + abs(v) - abs(u)
    at_end = (t + s) / (1 + w) if near else s
    at_start = (t - s) / (1 - w) if near else t
    slope = 1 - t * t
    even = slope * (0.5 + (6 * t * t - 2) * d * d / 48)
    odd = slope * t * d / 6
    mean = t - odd * d / 2 if small else rise / d  # by Taylor's series
    end = even - odd if small else (at_end - mean) / d
    start = even + odd if small else (mean - at_start) / d
    return mean, end, start


# The kernel


@_inner
def _chords(z, u, value, end, start, rows, lanes):  # pragma: kernel
    """The chords from z to u, with their derivatives in u and in z."""
    for j in range(rows):
        for lane in range(lanes):
            chord = _chord(z[j, lane], u[j, lane])
            value[j, lane], end[j, lane], start[j, lane] = chord


@_inner
def _matrix(P, end, M, rows, lanes):  # pragma: kernel
    """`M = I - P diag(end)`."""
    for i in range(rows):
        for j in range(rows):
            one = 1.0 if i == j else 0.0
            for lane in range(lanes):
                M[i, j, lane] = one - P[i, j, lane] * end[j, lane]


@_inner
def _eliminate(M, x, rows, lanes):  # pragma: kernel
    """Solve M x = v with Gaussian elimination, replacing v by x."""
    for i in range(rows):
        for lane in range(lanes):
            M[i, i, lane] = 1 / M[i, i, lane]
        for m in range(i + 1, rows):
            for lane in range(lanes):
                M[m, i, lane] *= M[i, i, lane]
            for j in range(i + 1, rows):
                for lane in range(lanes):
                    M[m, j, lane] -= M[m, i, lane] * M[i, j, lane]
            for lane in range(lanes):
                x[m, lane] -= M[m, i, lane] * x[i, lane]
    for i in range(rows - 1, -1, -1):
        for m in range(i + 1, rows):
            for lane in range(lanes):
                x[i, lane] -= M[i, m, lane] * x[m, lane]
        for lane in range(lanes):
            x[i, lane] *= M[i, i, lane]


@_inner
def _residual(P, q, u, value, F, error, rows, lanes):  # pragma: kernel
    """`F = u - q - P value`, and its largest entries."""
    for lane in range(lanes):
        error[lane] = 0.0
    for i in range(rows):
        for lane in range(lanes):
            F[i, lane] = u[i, lane] - q[i, lane]
        for j in range(rows):
            for lane in range(lanes):
                F[i, lane] -= P[i, j, lane] * value[j, lane]
        for lane in range(lanes):
            error[lane] = max(error[lane], abs(F[i, lane]))


@_inner
def _limits(P, q, limit, rows, lanes):  # pragma: kernel
    """The rounding of residuals, at most."""
    for lane in range(lanes):
        limit[lane] = 0.0
    for i in range(rows):
        for lane in range(lanes):
            size = abs(q[i, lane])
            for j in range(rows):
                size += abs(P[i, j, lane])
            limit[lane] = max(limit[lane], 64 * EPS * size)


@_inner
def _solve(z, q, P, space, rows, lanes):  # pragma: kernel
    """The u with `u = q + P chord(z, u)`; False without a solution.

    A Newton step that does not lower the residual is halved, only in its lane. The last step is so
    small that chords are linear along it, up to rounding.
    """
    _, _, u, base, dx, F = space.rows
    value, end, start = space.chords
    error, least, limit, share, moved = space.lanes
    _limits(P, q, limit, rows, lanes)
    for lane in range(lanes):
        least[lane] = np.inf
        share[lane] = 1.0
    for i in range(rows):
        for lane in range(lanes):
            u[i, lane] = z[i, lane]
    for _ in range(ITERATIONS):
        _chords(z, u, value, end, start, rows, lanes)
        _residual(P, q, u, value, F, error, rows, lanes)
        _matrix(P, end, space.M, rows, lanes)
        _eliminate(space.M, F, rows, lanes)
        for lane in range(lanes):
            better = error[lane] < least[lane] or error[lane] <= limit[lane]
            better = better or share[lane] < SHORTEST
            share[lane] = 1.0 if better else 0.5 * share[lane]
            least[lane] = error[lane] if better else least[lane]
            moved[lane] = 0.0
        for i in range(rows):
            for lane in range(lanes):
                better = share[lane] == 1
                base[i, lane] = u[i, lane] if better else base[i, lane]
                dx[i, lane] = F[i, lane] if better else dx[i, lane]
            for lane in range(lanes):
                shift = base[i, lane] - share[lane] * dx[i, lane] - u[i, lane]
                u[i, lane] += shift
                value[i, lane] += end[i, lane] * shift
                moved[lane] = max(moved[lane], abs(shift))
        unsolved = 0
        for lane in range(lanes):
            unsolved += share[lane] < 1 or not (
                moved[lane] <= SMALL or error[lane] <= limit[lane]
            )
        if unsolved == 0:
            return True
    return False


@_inner
def _pad(z, q, P, rows, lanes):  # pragma: kernel
    """Fill the last vector with equations of zeros; return the number of lanes."""
    full = (lanes + VECTOR - 1) // VECTOR * VECTOR
    for lane in range(lanes, full):
        for i in range(rows):
            z[i, lane] = 0.0
            q[i, lane] = 0.0
            for j in range(rows):
                P[i, j, lane] = 0.0
    return full


@_inline
def _put_rows(A, a, t, n, x, z, lane):  # pragma: kernel
    """`A x + a` as one lane of z."""
    for j in range(A.shape[2]):
        total = a[t, n, j]
        for m in range(A.shape[3]):
            total += A[t, n, j, m] * x[m]
        z[j, lane] = total


@_inner
def _gather(group, place, start, lanes, y, push, space):  # pragma: kernel
    """Lanes of z, q and P, from the states before the substeps."""
    index, _, Q, e, _, A, a, P, trace = group
    t, at, pushed, low = place
    samples = len(y)
    k = index.shape[1]
    z, q, _, _, _, _ = space.rows
    before, after = space.states
    for lane in range(lanes):
        n = (start + lane) // samples
        s = (start + lane) % samples
        for i in range(k):
            before[i] = y[s, index[n, i]]
        for i in range(k):
            total = before[i] + e[n, i]
            for m in range(k):
                total += Q[n, i, m] * before[m]
            if pushed >= 0:
                total += push[pushed, low + s, index[n, i]]
            after[i] = total
            trace[at, n, 0, low + s, i] = before[i]
            trace[at, n, 1, low + s, i] = total
        _put_rows(A, a, t, n, before, z, lane)
        _put_rows(A, a, t, n, after, q, lane)
        for i in range(A.shape[2]):
            for j in range(A.shape[2]):
                space.P[i, j, lane] = P[t, n, i, j]


@_inner
def _scatter(group, place, start, lanes, y, space):  # pragma: kernel
    """The states after the substeps."""
    index, _, _, _, F, A, _, _, trace = group
    t, at, _, low = place
    samples = len(y)
    k = index.shape[1]
    value, _, _ = space.chords
    slopes, _ = space.states
    for lane in range(lanes):
        n = (start + lane) // samples
        s = (start + lane) % samples
        for i in range(k):
            slopes[i] = 0.0
        for j in range(A.shape[2]):
            for i in range(k):
                slopes[i] += A[t, n, j, i] * value[j, lane]
        for i in range(k):
            total = trace[at, n, 1, low + s, i]
            for m in range(k):
                total += F[n, i, m] * slopes[m]
            trace[at, n, 1, low + s, i] = total
            y[s, index[n, i]] = total


@_inner
def _move(group, place, backwards, y, push, space):  # pragma: kernel
    """Solve the substeps of a group, and write the states into y, whose first sample is low."""
    bounds = group[1]
    A = group[5]
    samples = len(y)
    t, at, pushed, low = place
    place = min(t, A.shape[0] - 1), at, pushed, low
    z, q, _, _, _, _ = space.rows
    parts = len(bounds) - 1
    for part in range(parts):
        colour = parts - 1 - part if backwards else part
        last = bounds[colour + 1] * samples
        for start in range(bounds[colour] * samples, last, LANES):
            lanes = min(LANES, last - start)
            _gather(group, place, start, lanes, y, push, space)
            lanes = _pad(z, q, space.P, A.shape[2], lanes)
            if not _solve(z, q, space.P, space, A.shape[2], lanes):
                return False
            lanes = min(LANES, last - start)
            _scatter(group, place, start, lanes, y, space)
    return True


@_inner
def _copy(y, states, n, low):  # pragma: kernel
    """Write some samples to the states of a step."""
    for s in range(y.shape[0]):
        for i in range(y.shape[1]):
            states[n, low + s, i] = y[s, i]


def _forward(
    low, states, middles, push, first, space, groups
):  # pragma: kernel
    """All steps of some samples; the number of the step that failed, or -1.

    Groups are the agents themselves, the edges of plants and those of controllers: odd steps run
    them in reverse order.
    """
    last = groups[0][-1].shape[0] - 1
    y = space.y
    for s in range(y.shape[0]):
        for i in range(y.shape[1]):
            y[s, i] = states[0, low + s, i]
    for n in range(len(middles)):
        t = first + n
        at = min(n, last)
        odd = t % 2 == 1
        for turn in range(3):
            number = 2 - turn if odd else turn
            own = number == 0
            if odd and own:
                _copy(y, middles, n, low)
            pushed = n if own and len(push) else -1
            place = t, at, pushed, low
            if not _move(groups[number], place, odd, y, push, space):
                return t
            if own and not odd:
                _copy(y, middles, n, low)
        _copy(y, states, n + 1, low)
    return -1


@_inner
def _pull(group, place, backwards, g, g_push, space):  # pragma: kernel
    """Compute the gradient of the states before a group from the gradient after it.

    Saves the gradients of rows at the start and at the end, chords, and gradients of solutions.
    """
    bounds = group[1]
    A = group[5]
    samples = len(g)
    rows = A.shape[2]
    t, at, pushed, low = place
    place = min(t, A.shape[0] - 1), at, pushed, low
    z, u, w, _, _, _ = space.rows
    value, end, start_slope = space.chords
    parts = len(bounds) - 1
    for part in range(parts):  # the last substep first
        colour = part if backwards else parts - 1 - part
        last = bounds[colour + 1] * samples
        for start in range(bounds[colour] * samples, last, LANES):
            lanes = min(LANES, last - start)
            _gather_back(group, place, start, lanes, g, space)
            lanes = _pad(z, u, space.P, A.shape[2], lanes)
            _chords(z, u, value, end, start_slope, rows, lanes)
            _matrix(space.P, end, space.M, rows, lanes)
            _eliminate(space.M, w, rows, lanes)
            lanes = min(LANES, last - start)
            _scatter_back(group, place, start, lanes, g, g_push, space)


@_inner
def _gather_back(group, place, start, lanes, g, space):  # pragma: kernel
    """Lanes of z, u, `A F^T g` and the transpose of P."""
    index, _, _, _, F, A, a, P, trace, _, _ = group
    t, at, _, low = place
    samples = len(g)
    k = index.shape[1]
    rows = A.shape[2]
    z, u, w, _, _, _ = space.rows
    before, after = space.states
    for lane in range(lanes):
        n = (start + lane) // samples
        s = (start + lane) % samples
        for i in range(k):
            before[i] = trace[at, n, 0, low + s, i]
            after[i] = trace[at, n, 1, low + s, i]
        _put_rows(A, a, t, n, before, z, lane)
        _put_rows(A, a, t, n, after, u, lane)
        for m in range(k):
            before[m] = 0.0
        for i in range(k):
            for m in range(k):
                before[m] += F[n, i, m] * g[s, index[n, i]]
        for j in range(rows):
            total = 0.0
            for m in range(k):
                total += A[t, n, j, m] * before[m]
            w[j, lane] = total
            for i in range(rows):
                space.P[i, j, lane] = P[t, n, j, i]


@_inner
def _scatter_back(
    group, place, start, lanes, g, g_push, space
):  # pragma: kernel
    """The gradients of the states before the substeps, and of rows, chords and solutions."""
    index, _, Q, _, _, A, _, _, _, pulls, sources = group
    t, at, pushed, low = place
    samples = len(g)
    k = index.shape[1]
    _, _, w, _, _, _ = space.rows
    value, end, start_slope = space.chords
    v, to_y = space.states
    for lane in range(lanes):
        n = (start + lane) // samples
        s = (start + lane) % samples
        for i in range(k):
            v[i] = g[s, index[n, i]]
            to_y[i] = 0.0
        for j in range(A.shape[2]):
            at_start = start_slope[j, lane] * w[j, lane]
            at_end = end[j, lane] * w[j, lane]
            pulls[at, n, 0, low + s, j] = at_start
            pulls[at, n, 1, low + s, j] = at_end
            pulls[at, n, 2, low + s, j] = value[j, lane]
            for i in range(k):
                v[i] += A[t, n, j, i] * at_end
                to_y[i] += A[t, n, j, i] * at_start
        for m in range(k):
            for i in range(k):
                to_y[i] += Q[n, m, i] * v[m]
        for i in range(k):
            sources[at, n, low + s, i] = v[i]
            g[s, index[n, i]] = to_y[i] + v[i]
            if pushed >= 0:
                g_push[pushed, low + s, index[n, i]] = v[i]


def _backward(
    low, cotangents, g_y, g_push, first, space, groups
):  # pragma: kernel
    """The gradients of some samples, from the gradients of all states."""
    steps = len(cotangents) - 1
    g = space.y
    for n in range(steps, -1, -1):
        for s in range(g.shape[0]):
            for i in range(g.shape[1]):
                g[s, i] += cotangents[n, low + s, i]
        if n == 0:
            break
        t = first + n - 1
        odd = t % 2 == 1
        for turn in range(3):
            number = turn if odd else 2 - turn
            pushed = n - 1 if number == 0 and len(g_push) else -1
            place = t, n - 1, pushed, low
            _pull(groups[number], place, odd, g, g_push, space)
    _copy(g, g_y, 0, low)


def _gradients(
    first, F, A, trace, pulls, sources, work, dQ, de, dF, dA, da
):  # pragma: kernel
    """The gradients of Q, e, F, A and a, from the solutions and their gradients."""
    steps, E, S, k = sources.shape
    T, _, rows, _ = A.shape
    slopes, back = work
    for step in range(steps):
        t = min(first + step, T - 1)
        for n in range(E):
            for s in range(S):
                for m in range(k):
                    slopes[m] = 0.0
                    back[m] = 0.0
                for i in range(k):
                    v = sources[step, n, s, i]
                    de[n, i] += v
                    for m in range(k):
                        dQ[n, i, m] += v * trace[step, n, 0, s, m]
                        back[m] += F[n, i, m] * v
                for j in range(rows):
                    at_start = pulls[step, n, 0, s, j]
                    at_end = pulls[step, n, 1, s, j]
                    value = pulls[step, n, 2, s, j]
                    da[t, n, j] += at_start + at_end
                    for m in range(k):
                        total = at_start * trace[step, n, 0, s, m]
                        total += at_end * trace[step, n, 1, s, m]
                        dA[t, n, j, m] += total + value * back[m]
                        slopes[m] += A[t, n, j, m] * value
                for i in range(k):
                    for m in range(k):
                        dF[n, i, m] += sources[step, n, s, i] * slopes[m]
