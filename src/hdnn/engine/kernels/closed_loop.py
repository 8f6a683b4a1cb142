"""A closed loop over all its steps as compiled loops, forwards and backwards, in float64.

The substeps that `hdnn.control` defines, with all that is linear eliminated beforehand, so that
what is left to solve has as many unknowns as a controller has states: c. K (c, c) and b are the
weights of a controller, B = h C those of an edge between two, and S = K^T D K, where D are the
slopes of the chords in their ends; E are those in their starts. Needs numba (extra `fast`), which
is imported at the first use.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from hdnn.engine.kernels import closed_loop_lanes
from hdnn.engine.kernels.closed_loop_lanes import LANES

EPS = 2.0**-52
CLOSE = 0.01  # half the distance of two points up to which slopes are taken from a series
NEWTON, HALVINGS = 100, 60  # large weights make long steps, and bends that need short ones
# A Newton step that moves no argument of a chord by more than this is the last one: what it leaves
# is its square, far below rounding.
LAST = 1e-8
ROUNDING = 64 * EPS  # a residual relative to its terms that cannot be made smaller
BALANCE = 64 * EPS  # what a substep may change the energy by, relative to its terms
SMALLEST = 1e-10  # step along the curve of solutions with smaller h, where Newton fails at first

# `size` is a tuple of c entries, so that loops have a length that is known when they are compiled;
# or an array of that length.

# Rows of scratch memory, of c numbers each: where the chords start and what that sums, the chords,
# their slopes in both ends, f = K^T chords; the increment, what of it is known, and what is left.
Z, TERMS, PHI, D, E, F, DELTA, KNOWN, LEFT, SHIFT, STEP, TRIAL, KEPT = range(13)
ROWS = 13

# Agents or edges that do not depend on each other are solved for LANES at a time. Rows of scratch
# memory (rows, LANES): matrices, vectors of c rows each, and single rows at the end. The first
# seven vectors are of an agent, the next seven of the agent at the other end of its edge.
L_K, L_M, L_B, L_S, L_P, L_J, MATRICES = range(7)
L_Z, L_SHIFT, L_PHI, L_D, L_E, L_F, L_DELTA, AGENT = range(8)
L_KNOWN, L_LEFT, L_STEP, L_TRIAL, L_FOUND, L_OTHER, L_FORCE, VECTORS = range(14, 22)
L_TERMS, L_CLOSE, L_STATUS, L_SIZE, SINGLE = range(5)
LANE_STEPS = 8  # of Newton; what has not arrived by then is solved for by itself
GOING, ARRIVED, GAVE_UP = 0.0, 1.0, 2.0
PIVOT = 0.25  # the least that elimination without exchanges is trusted with

# Operations on lanes, which `compiled` puts here.
load: Any = None  # load(array, row)
store: Any = None
fused: Any = None  # fused(x, y, z): x y + z, rounded once
where_less: Any = None  # where_less(a, b, x, y): x where a < b, else y
any_less: Any = None  # any_less(a, b): whether a lane of a is less, or one is NaN
magnitude: Any = None
nearest: Any = None  # whole number
power_of_two: Any = None

EXPM1 = tuple(1 / math.factorial(k) for k in reversed(range(2, 15)))
ARTANH = tuple(1 / k for k in reversed(range(3, 27, 2)))

PARTS = (
    *("_polynomial", "_tanh", "_artanh", "_chord", "_at", "_lane_chords", "_lane_times"),
    *("_lane_times_T", "_lane_product", "_lane_product_T", "_lane_slopes", "_lane_solve"),
    *("_lane_largest", "_lane_rows", "_lane_same", "_lane_own", "_lane_pair"),
    *("_lane_own_adjoint", "_lane_pair_adjoint", "_put_agent", "_put_matrix", "_put_vector"),
    *("_times", "_times_T", "_product", "_rows", "_slopes", "_solve", "_largest"),
    *(
        "_product_T",
        "_own_residual",
        "_own_newton",
        "_same_energy",
        "_rounding",
        "_own_steps",
        "_found",
    ),
    *("_joined", "_start", "_own_step"),
    *("_several", "_balanced", "_alone", "_pair_step", "_linear_step", "_to_weights", "_room"),
    *("_own_adjoint", "_pair_adjoint", "_linear_adjoint", "_own_steps_of", "_pair_steps_of"),
    *("_own_adjoint_of", "_pair_adjoint_of"),
)
ROOTS = ("eliminate", "eliminate_adjoint", "forward", "backward")


@cache
def compiled(njit: Callable[[Any], Any]) -> dict[str, Any]:
    """By name."""
    import numba

    here = globals()
    here.update(closed_loop_lanes.operations())
    for name in PARTS:  # not kept on disk, where types of lanes would not be known again
        here[name] = numba.njit(error_model="numpy")(here[name])
    return {name: njit(here[name]) for name in ROOTS}


def _chord(m, d):  # pragma: kernel
    """The mean of tanh over m - d .. m + d, and its derivatives in both ends, m + d first."""
    t = 1 - 2 / (math.exp(2 * m) + 1)  # quicker than tanh, and right to rounding of 1
    if abs(d) < CLOSE:
        u, s, q = 1 - t * t, t * t, d * d
        t2, t3 = -2 * t * u, u * (6 * s - 2)
        t4, t5 = t * u * (16 - 24 * s), u * (16 + s * (120 * s - 120))
        t6 = t * u * (-272 + s * (960 - 720 * s))
        value = t + q * (t2 / 6 + q * (t4 / 120 + q * t6 / 5040))
        in_m = u + q * (t3 / 6 + q * t5 / 120)
        in_d = d * (t2 / 3 + q * (t4 / 30 + q * t6 / 840))
        return value, 0.5 * (in_m + in_d), 0.5 * (in_m - in_d)
    e = math.expm1(2 * d)
    e = e / (e + 2) if abs(d) < 20 else math.copysign(1.0, d)  # tanh d
    x = t * e
    if abs(x) < 0.9:  # cosh(m + d) / cosh(m - d) = (1 + x) / (1 - x)
        half, rest = 0.5 / d, 1 / (1 - x * x)
        value = half * math.log1p(2 * x * (1 + x) * rest)
        after, before = (t + e) * (1 - x) * rest, (t - e) * (1 + x) * rest
        return value, half * (after - value), half * (value - before)
    a, b = abs(m - d), abs(m + d)  # log cosh x = |x| + log(1 + exp(-2 |x|)) - log 2
    value = 0.5 * (b - a + math.log1p(math.exp(-2 * b)) - math.log1p(math.exp(-2 * a))) / d
    after, before = math.tanh(m + d), math.tanh(m - d)
    return value, 0.5 * (after - value) / d, 0.5 * (value - before) / d


def _polynomial(x, coefficients):  # pragma: kernel
    """The highest power first."""
    s = fused(x, coefficients[0], coefficients[1])
    for k in range(2, len(coefficients)):
        s = fused(s, x, coefficients[k])
    return s


def _tanh(x):  # pragma: kernel
    """tanh x = e / (e + 2), where e = exp(2 x) - 1."""
    x = where_less(magnitude(x), 22.0, x, where_less(x, 0.0, -22.0, 22.0)) * 2.0
    k = nearest(x * 1.4426950408889634)
    r = fused(k, -1.42860682030941723212e-6, fused(k, -6.93145751953125e-1, x))
    e, scale = fused(r * r, _polynomial(r, EXPM1), r), power_of_two(k)
    e = fused(e, scale, scale - 1.0)
    return e / (e + 2.0)


def _artanh(x):  # pragma: kernel
    """For |x| < 0.915: log((1 + x) / (1 - x)) / 2, less the nearest multiple of log(2) / 2."""
    size = magnitude(x)
    scale = where_less(size, 0.6997, where_less(size, 0.4776, 2.0, 4.0), 8.0)
    scale = where_less(size, 0.8376, scale, 16.0)
    k = where_less(size, 0.6997, where_less(size, 0.4776, 1.0, 2.0), 3.0)
    k = where_less(size, 0.8376, k, 4.0)
    top, bottom = size + 1.0, scale * (1.0 - size)
    reduced = (top - bottom) / (top + bottom)
    near = where_less(size, 0.1716, size, reduced)
    s = near * near
    y = fused(near * s, _polynomial(s, ARTANH), near)
    y = where_less(size, 0.1716, y, fused(k, 0.34657359027997264, y))
    return where_less(x, 0.0, 0.0 - y, y)


def _at(c, vector):  # pragma: kernel
    """The first row of a vector; after the last one the single rows begin."""
    return MATRICES * c * c + vector * c


def _lane_chords(V, size, z, shift, value, after, before):  # pragma: kernel
    """As `_chord`, a row of lanes: what lies in row `size` is overwritten."""
    d = load(V, shift) * 0.5
    m = load(V, z) + d
    t, far = _tanh(m), magnitude(d)
    a, b, c = t, t, t
    if any_less(far, CLOSE):
        s, q = t * t, d * d
        u = 1.0 - s
        t2, t3 = t * u * -2.0, u * (s * 6.0 - 2.0)
        t4, t5 = t * u * (16.0 - s * 24.0), u * (s * (s * 120.0 - 120.0) + 16.0)
        t6 = t * u * (s * (960.0 - s * 720.0) - 272.0)
        a = t + q * (t2 * (1 / 6) + q * (t4 * (1 / 120) + q * t6 * (1 / 5040)))
        in_m = u + q * (t3 * (1 / 6) + q * t5 * (1 / 120))
        in_d = d * (t2 * (1 / 3) + q * (t4 * (1 / 30) + q * t6 * (1 / 840)))
        b, c = (in_m + in_d) * 0.5, (in_m - in_d) * 0.5
    x = t * 0.0
    if any_less(0.999 * CLOSE, far):
        e = _tanh(d)
        x = where_less(far, CLOSE, x, t * e)
        over = 1.0 / d
        chord = _artanh(x) * over
        over, rest = over * 0.5, 1.0 / (1.0 - x * x)
        high = over * ((t + e) * (1.0 - x) * rest - chord)
        low = over * (chord - (t - e) * (1.0 + x) * rest)
        a = where_less(far, CLOSE, a, chord)
        b = where_less(far, CLOSE, b, high)
        c = where_less(far, CLOSE, c, low)
    store(V, value, a)
    store(V, after, b)
    store(V, before, c)
    if any_less(0.9, magnitude(x)):
        store(V, size, x)
        for k in range(LANES):
            if not abs(V[size, k]) < 0.9:
                half = 0.5 * V[shift, k]
                V[value, k], V[after, k], V[before, k] = _chord(V[z, k] + half, half)


def _lane_times(size, V, A, x, y):  # pragma: kernel
    """y = A x."""
    c = len(size)
    for i in range(c):
        s = load(V, A + i * c) * load(V, x)
        for j in range(1, c):
            s = fused(load(V, A + i * c + j), load(V, x + j), s)
        store(V, y + i, s)


def _lane_times_T(size, V, A, x, y):  # pragma: kernel
    """y = A^T x."""
    c = len(size)
    for j in range(c):
        s = load(V, A + j) * load(V, x)
        for i in range(1, c):
            s = fused(load(V, A + i * c + j), load(V, x + i), s)
        store(V, y + j, s)


def _lane_product(size, V, A, B, C):  # pragma: kernel
    """C = A B, all square."""
    c = len(size)
    for i in range(c):
        for j in range(c):
            s = load(V, A + i * c) * load(V, B + j)
            for r in range(1, c):
                s = fused(load(V, A + i * c + r), load(V, B + r * c + j), s)
            store(V, C + i * c + j, s)


def _lane_product_T(size, V, A, B, C):  # pragma: kernel
    """C = A B^T, all square."""
    c = len(size)
    for i in range(c):
        for j in range(c):
            s = load(V, A + i * c) * load(V, B + j * c)
            for r in range(1, c):
                s = fused(load(V, A + i * c + r), load(V, B + j * c + r), s)
            store(V, C + i * c + j, s)


def _lane_slopes(size, V, K, slope, S):  # pragma: kernel
    """S = K^T diag(slope) K."""
    c = len(size)
    for i in range(c):
        for j in range(i + 1):
            s = load(V, K + i) * load(V, slope) * load(V, K + j)
            for r in range(1, c):
                s = fused(load(V, K + r * c + i) * load(V, slope + r), load(V, K + r * c + j), s)
            store(V, S + i * c + j, s)
            store(V, S + j * c + i, s)


def _lane_solve(size, V, A, x):  # pragma: kernel
    """x becomes A^-1 x by elimination; A is overwritten. Its least pivot."""
    c = len(size)
    least = magnitude(load(V, A))
    for k in range(c):
        pivot = load(V, A + k * c + k)
        least = where_less(magnitude(pivot), least, magnitude(pivot), least)
        over = 1.0 / pivot
        store(V, A + k * c + k, over)
        for i in range(k + 1, c):
            factor = 0.0 - load(V, A + i * c + k) * over
            for j in range(k + 1, c):
                at = A + i * c + j
                store(V, at, fused(factor, load(V, A + k * c + j), load(V, at)))
            store(V, x + i, fused(factor, load(V, x + k), load(V, x + i)))
    for k in range(c - 1, -1, -1):
        s = load(V, x + k)
        for j in range(k + 1, c):
            s = s - load(V, A + k * c + j) * load(V, x + j)
        store(V, x + k, s * load(V, A + k * c + k))
    return least


def _lane_largest(size, V, x):  # pragma: kernel
    """The largest size of an entry; NaN where the last one is."""
    most = magnitude(load(V, x))
    for i in range(1, len(size)):
        each = magnitude(load(V, x + i))
        most = where_less(each, most, most, each)
    return most


def _lane_rows(size, rows, V, K, delta, agent):  # pragma: kernel
    """The chords of an agent from z to z + K delta and their slopes, and f = K^T chords."""
    c = len(size)
    z = _at(c, agent * AGENT)
    shift, value, after, before = z + c, z + 2 * c, z + 3 * c, z + 4 * c
    single = _at(c, VECTORS) + L_SIZE
    _lane_times(size, V, K, delta, shift)
    for r in range(rows):  # not of a known length: chords are long, and need not be copied
        _lane_chords(V, single, z + r, shift + r, value + r, after + r, before + r)
    _lane_times_T(size, V, K, value, z + 5 * c)


def _lane_same(size, V, delta, left, along):  # pragma: kernel
    """As `_same_energy`: how far the balance is broken, less what rounding may."""
    c = len(size)
    single, D_ = _at(c, VECTORS), _at(c, L_D)
    change = load(V, single + L_TERMS) * -BALANCE
    for r in range(c):
        s = load(V, r * c) * load(V, left)
        t = load(V, r * c) * (load(V, delta) - load(V, along))
        terms = magnitude(load(V, r * c) * load(V, delta))
        for j in range(1, c):
            s = fused(load(V, r * c + j), load(V, left + j), s)
            t = fused(load(V, r * c + j), load(V, delta + j) - load(V, along + j), t)
            terms = terms + magnitude(load(V, r * c + j) * load(V, delta + j))
        change = change + load(V, D_ + r) * magnitude(s * t) - terms * BALANCE
    return change


def _lane_own(size, rows, V):  # pragma: kernel
    """As `_own_steps` from 0 on, without a search; which lanes arrived is in row L_STATUS."""
    c = len(size)
    q = c * c
    K, M, S, J = 0, L_M * q, L_S * q, L_J * q
    shift, value, D_, F_ = _at(c, L_SHIFT), _at(c, L_PHI), _at(c, L_D), _at(c, L_F)
    delta, known, left = _at(c, L_DELTA), _at(c, L_KNOWN), _at(c, L_LEFT)
    step, trial, found = _at(c, L_STEP), _at(c, L_TRIAL), _at(c, L_FOUND)
    other, force, single = _at(c, L_OTHER), _at(c, L_FORCE), _at(c, VECTORS)
    zero = load(V, single) * 0.0
    status, close, before = zero, load(V, single + L_CLOSE), zero
    for i in range(c):
        store(V, delta + i, zero)
    for k in range(LANE_STEPS):
        _lane_rows(size, rows, V, K, delta, 0)
        _lane_times(size, V, M, F_, left)
        for i in range(c):
            store(V, left + i, load(V, delta + i) - (load(V, known + i) + load(V, left + i)))
        now = _lane_largest(size, V, left)
        if k > 0:
            worse = where_less(now, before * (1 - 1e-4), status, GAVE_UP)
            status = where_less(status, 0.5, worse, status)
        before = now
        _lane_slopes(size, V, K, D_, S)
        _lane_product(size, V, M, S, J)
        for i in range(c):
            for j in range(c):
                store(V, J + i * c + j, (1.0 if i == j else 0.0) - load(V, J + i * c + j))
            store(V, step + i, 0.0 - load(V, left + i))
        _lane_solve(size, V, J, step)
        _lane_times(size, V, K, step, shift)
        largest = _lane_largest(size, V, shift)
        if any_less(largest, close):
            for r in range(c):
                x = fused(load(V, D_ + r), load(V, shift + r), load(V, value + r))
                store(V, other + r, x)
            _lane_times_T(size, V, K, other, F_)
            _lane_times(size, V, M, F_, trial)
            _lane_times_T(size, V, M, F_, shift)
            for i in range(c):
                store(V, shift + i, load(V, shift + i) + load(V, trial + i))
                x = load(V, known + i) + load(V, trial + i)
                store(V, trial + i, x)
                store(V, left + i, load(V, delta + i) + load(V, step + i) - x)
            change = _lane_same(size, V, trial, left, shift)
            ready = where_less(change, 0.0, where_less(largest, close, ARRIVED, GOING), GOING)
            ready = where_less(status, 0.5, ready, GOING)
            for i in range(c):
                x = where_less(ready, 0.5, load(V, found + i), load(V, trial + i))
                store(V, found + i, x)
                x = where_less(ready, 0.5, load(V, force + i), load(V, F_ + i))
                store(V, force + i, x)
            status = where_less(ready, 0.5, status, ready)
        if not any_less(status, 0.5):
            break
        for i in range(c):
            store(V, delta + i, load(V, delta + i) + load(V, step + i))
    store(V, single + L_STATUS, status)


def _lane_pair(size, rows, V):  # pragma: kernel
    """As `_pair_steps` from 0 on, without a search; which lanes arrived is in row L_STATUS."""
    c = len(size)
    q = c * c
    K, L, B, S, P, J = 0, L_M * q, L_B * q, L_S * q, L_P * q, L_J * q
    shift, value, D_, F_ = _at(c, L_SHIFT), _at(c, L_PHI), _at(c, L_D), _at(c, L_F)
    shift2, value2 = _at(c, AGENT + L_SHIFT), _at(c, AGENT + L_PHI)
    D2, F2, e = _at(c, AGENT + L_D), _at(c, AGENT + L_F), _at(c, AGENT + L_DELTA)
    d, left, step, trial = _at(c, L_DELTA), _at(c, L_LEFT), _at(c, L_STEP), _at(c, L_TRIAL)
    found, other, force = _at(c, L_FOUND), _at(c, L_OTHER), _at(c, L_FORCE)
    known, single = _at(c, L_KNOWN), _at(c, VECTORS)
    zero = load(V, single) * 0.0
    status, close, before = zero, load(V, single + L_CLOSE), zero
    for i in range(c):
        store(V, d + i, zero)
    for k in range(LANE_STEPS):
        _lane_rows(size, rows, V, K, d, 0)
        _lane_times_T(size, V, B, F_, e)
        for j in range(c):
            store(V, e + j, 0.0 - load(V, e + j))
        _lane_rows(size, rows, V, L, e, 1)
        _lane_times(size, V, B, F2, left)
        for i in range(c):
            store(V, left + i, load(V, d + i) - load(V, left + i))
        now = _lane_largest(size, V, left)
        if k > 0:
            worse = where_less(now, before * (1 - 1e-4), status, GAVE_UP)
            status = where_less(status, 0.5, worse, status)
        before = now
        _lane_slopes(size, V, L, D2, S)
        _lane_product(size, V, B, S, P)
        _lane_product_T(size, V, P, B, S)
        _lane_slopes(size, V, K, D_, P)
        _lane_product(size, V, S, P, J)
        for i in range(c):
            store(V, J + i * c + i, load(V, J + i * c + i) + 1.0)
            store(V, step + i, 0.0 - load(V, left + i))
        _lane_solve(size, V, J, step)
        _lane_times(size, V, K, step, shift)
        largest = _lane_largest(size, V, shift)
        if any_less(largest, close):
            for r in range(c):
                x = fused(load(V, D_ + r), load(V, shift + r), load(V, value + r))
                store(V, known + r, x)
            _lane_times_T(size, V, K, known, F_)
            _lane_times_T(size, V, B, F_, trial)  # -e
            for j in range(c):
                store(V, known + j, 0.0 - load(V, trial + j) - load(V, e + j))
            _lane_times(size, V, L, known, shift2)
            more = _lane_largest(size, V, shift2)
            for r in range(c):
                x = fused(load(V, D2 + r), load(V, shift2 + r), load(V, value2 + r))
                store(V, known + r, x)
            _lane_times_T(size, V, L, known, F2)
            _lane_times(size, V, B, F2, force)  # d
            for i in range(c):
                store(V, left + i, load(V, d + i) + load(V, step + i) - load(V, force + i))
                store(V, known + i, zero)
            change = _lane_same(size, V, force, left, known)
            ready = where_less(change, 0.0, where_less(largest, close, ARRIVED, GOING), GOING)
            ready = where_less(more, close, ready, GOING)
            ready = where_less(status, 0.5, ready, GOING)
            for i in range(c):
                x = where_less(ready, 0.5, load(V, found + i), load(V, force + i))
                store(V, found + i, x)
                x = where_less(ready, 0.5, load(V, other + i), 0.0 - load(V, trial + i))
                store(V, other + i, x)
            status = where_less(ready, 0.5, status, ready)
        if not any_less(status, 0.5):
            break
        for i in range(c):
            store(V, d + i, load(V, d + i) + load(V, step + i))
    store(V, single + L_STATUS, status)


def _lane_own_adjoint(size, rows, V):  # pragma: kernel
    """The chords and what is solved for in `_own_adjoint`; lanes that can be trusted."""
    c = len(size)
    q = c * c
    K, M, S, J = 0, L_M * q, L_S * q, L_J * q
    step, trial, known = _at(c, L_STEP), _at(c, L_TRIAL), _at(c, L_KNOWN)
    _lane_rows(size, rows, V, K, _at(c, L_DELTA), 0)
    _lane_slopes(size, V, K, _at(c, L_D), S)
    _lane_times(size, V, S, trial, step)
    _lane_product_T(size, V, S, M, J)
    for i in range(c):
        for j in range(c):
            store(V, J + i * c + j, (1.0 if i == j else 0.0) - load(V, J + i * c + j))
        store(V, step + i, load(V, step + i) + load(V, known + i))
    least = _lane_solve(size, V, J, step)
    store(V, _at(c, VECTORS) + L_STATUS, where_less(PIVOT, least, ARRIVED, GAVE_UP))


def _lane_pair_adjoint(size, rows, V):  # pragma: kernel
    """The chords and what is solved for in `_pair_adjoint`; lanes that can be trusted."""
    c = len(size)
    q = c * c
    K, L, B, S, P, J = 0, L_M * q, L_B * q, L_S * q, L_P * q, L_J * q
    g1, g2 = _at(c, L_KNOWN), _at(c, L_TRIAL)
    step, other, left = _at(c, L_STEP), _at(c, L_OTHER), _at(c, L_LEFT)
    _lane_rows(size, rows, V, K, _at(c, L_DELTA), 0)
    _lane_rows(size, rows, V, L, _at(c, AGENT + L_DELTA), 1)
    _lane_slopes(size, V, K, _at(c, L_D), J)
    _lane_product(size, V, J, B, P)
    _lane_times(size, V, P, g2, left)
    _lane_slopes(size, V, L, _at(c, AGENT + L_D), S)
    _lane_product_T(size, V, S, B, J)
    _lane_product(size, V, P, J, S)
    for j in range(c):
        store(V, S + j * c + j, load(V, S + j * c + j) + 1.0)
        store(V, step + j, load(V, g1 + j) - load(V, left + j))
    least = _lane_solve(size, V, S, step)
    _lane_times(size, V, J, step, other)
    for j in range(c):
        store(V, other + j, load(V, other + j) + load(V, g2 + j))
    store(V, _at(c, VECTORS) + L_STATUS, where_less(PIVOT, least, ARRIVED, GAVE_UP))


def _put_matrix(size, V, row, lane, A):  # pragma: kernel
    c = len(size)
    for i in range(c):
        for j in range(c):
            V[row + i * c + j, lane] = A[i, j]


def _put_vector(size, V, vector, lane, x):  # pragma: kernel
    c = len(size)
    at = _at(c, vector)
    for i in range(c):
        V[at + i, lane] = x[i]


def _put_agent(size, V, agent, lane, K, b, x):  # pragma: kernel
    """The weights of an agent and where its chords start; the sum and the largest of the terms."""
    c = len(size)
    at, total, most = _at(c, agent * AGENT), 0.0, 0.0
    for r in range(c):
        s, terms = b[r], abs(b[r])
        for j in range(c):
            s += K[r, j] * x[j]
            terms += abs(K[r, j] * x[j])
            V[agent * L_M * c * c + r * c + j, lane] = K[r, j]
        V[at + r, lane] = s
        total += terms
        most = max(most, terms)
    return total, most


def _times(size, A, x, y):  # pragma: kernel
    """y = A x."""
    for i in range(len(size)):
        s = 0.0
        for j in range(len(size)):
            s += A[i, j] * x[j]
        y[i] = s


def _times_T(size, A, x, y):  # pragma: kernel
    """y = A^T x."""
    for j in range(len(size)):
        s = 0.0
        for i in range(len(size)):
            s += A[i, j] * x[i]
        y[j] = s


def _product(size, A, B, C):  # pragma: kernel
    """C = A B, all square."""
    c = len(size)
    for i in range(c):
        for j in range(c):
            s = 0.0
            for r in range(c):
                s += A[i, r] * B[r, j]
            C[i, j] = s


def _product_T(size, A, B, C):  # pragma: kernel
    """C = A B^T, all square."""
    c = len(size)
    for i in range(c):
        for j in range(c):
            s = 0.0
            for r in range(c):
                s += A[i, r] * B[j, r]
            C[i, j] = s


def _rows(size, K, delta, v):  # pragma: kernel
    """The chords from z to z + K delta and their slopes, and f = K^T chords."""
    _times(size, K, delta, v[SHIFT])
    for r in range(len(size)):
        d = 0.5 * v[SHIFT, r]
        v[PHI, r], v[D, r], v[E, r] = _chord(v[Z, r] + d, d)
    _times_T(size, K, v[PHI], v[F])


def _slopes(size, K, slope, S):  # pragma: kernel
    """S = K^T diag(slope) K."""
    c = len(size)
    for i in range(c):
        for j in range(i + 1):
            s = 0.0
            for r in range(c):
                s += K[r, i] * slope[r] * K[r, j]
            S[i, j] = s
            S[j, i] = s


def _solve(size, A, x):  # pragma: kernel
    """x becomes A^-1 x by elimination with pivots; A is overwritten."""
    c = len(size)
    for k in range(c):
        p = k
        for i in range(k + 1, c):
            if abs(A[i, k]) > abs(A[p, k]):
                p = i
        if p != k:
            for j in range(k, c):
                A[k, j], A[p, j] = A[p, j], A[k, j]
            x[k], x[p] = x[p], x[k]
        pivot = 1 / A[k, k]
        for i in range(k + 1, c):
            factor = A[i, k] * pivot
            for j in range(k + 1, c):
                A[i, j] -= factor * A[k, j]
            x[i] -= factor * x[k]
    for k in range(c - 1, -1, -1):
        s = x[k]
        for j in range(k + 1, c):
            s -= A[k, j] * x[j]
        x[k] = s / A[k, k]


def _largest(size, x):  # pragma: kernel
    """The largest size of an entry; infinite if one is NaN."""
    most = 0.0
    for i in range(len(size)):
        if not abs(x[i]) < np.inf:
            return np.inf
        most = max(most, abs(x[i]))
    return most


# What the lanes do not solve: delta = share (k + L delta + M f), f = K^T chord(z, z + K delta).
# They eliminate the plant, or one of two agents, which is quick; but rounding grows with the
# weights twice. Where that shows in the balance of the energy, or they do not arrive, both are
# solved for as one.


def _own_residual(size, K, M, L, share, delta, v):  # pragma: kernel
    """What is left of the equation, and its largest entry."""
    _rows(size, K, delta, v)
    _times(size, M, v[F], v[LEFT])
    _times(size, L, delta, v[SHIFT])
    for i in range(len(size)):
        v[LEFT, i] = delta[i] - share * (v[KNOWN, i] + v[LEFT, i] + v[SHIFT, i])
    return _largest(size, v[LEFT])


def _own_newton(size, K, M, L, share, v, m):  # pragma: kernel
    """A Newton step into v[STEP]; true if it was the last, and delta and f are found."""
    c, S, J = len(size), m[0], m[1]
    _slopes(size, K, v[D], S)
    _product(size, M, S, J)
    for i in range(c):
        for j in range(c):
            J[i, j] = -share * (J[i, j] + L[i, j])
        J[i, i] += 1
        v[STEP, i] = -v[LEFT, i]
    _solve(size, J, v[STEP])
    _times(size, K, v[STEP], v[SHIFT])
    if not _largest(size, v[SHIFT]) <= LAST + ROUNDING * _largest(size, v[TERMS]):
        return False
    for r in range(c):
        v[PHI, r] += v[D, r] * v[SHIFT, r]
    _times_T(size, K, v[PHI], v[F])
    _times(size, M, v[F], v[TRIAL])
    for i in range(c):
        v[LEFT, i] = v[DELTA, i] + v[STEP, i]
    _times(size, L, v[LEFT], v[SHIFT])
    for i in range(c):
        v[TRIAL, i] = share * (v[KNOWN, i] + v[TRIAL, i] + v[SHIFT, i])
        v[LEFT, i] -= v[TRIAL, i]
        v[SHIFT, i] = 0.0
        for j in range(c):
            v[SHIFT, i] += (M[i, j] + M[j, i]) * v[F, j]
    if not _same_energy(size, K, v[TRIAL], v):
        return False
    for i in range(c):
        v[DELTA, i] = v[TRIAL, i]
    return True


def _same_energy(size, K, delta, v):  # pragma: kernel
    """Whether chords that are right for delta + v[LEFT] break the balance by rounding only.

    The energy changes along delta; what is dissipated, -f^T M f, changes along v[SHIFT].
    """
    change, terms = 0.0, 0.0
    for r in range(len(size)):
        s, t = 0.0, 0.0
        for j in range(len(size)):
            s += K[r, j] * v[LEFT, j]
            t += K[r, j] * (delta[j] - v[SHIFT, j])
            terms += abs(K[r, j] * delta[j])  # chords that start at 0 have no others
        change += v[D, r] * abs(s * t)
        terms += v[TERMS, r]
    return change <= BALANCE * terms


def _rounding(size, K, M, L, v):  # pragma: kernel
    """Whether what is left is rounding only: relative to all terms that it sums."""
    c = len(size)
    for i in range(c):
        v[STEP, i] = abs(v[DELTA, i]) + abs(v[KNOWN, i])
        for j in range(c):
            v[STEP, i] += abs(L[i, j] * v[DELTA, j])
    for r in range(c):
        x = abs(v[PHI, r]) + v[D, r] * v[TERMS, r]
        for j in range(c):
            for i in range(c):
                v[STEP, i] += abs(M[i, j]) * abs(K[r, j]) * x
    return _largest(size, v[LEFT]) <= ROUNDING * _largest(size, v[STEP])


def _own_steps(size, K, M, L, share, v, m):  # pragma: kernel
    """Damped Newton steps from v[DELTA] on; whether they arrived."""
    left = _own_residual(size, K, M, L, share, v[DELTA], v)
    for _ in range(NEWTON):
        if not left < np.inf:
            return False
        if _own_newton(size, K, M, L, share, v, m):
            return True
        t, before = 1.0, left
        for _ in range(HALVINGS):
            for i in range(len(size)):
                v[TRIAL, i] = v[DELTA, i] + t * v[STEP, i]
            left = _own_residual(size, K, M, L, share, v[TRIAL], v)
            if left < (1 - 1e-4 * t) * before:
                break
            t *= 0.5
        for i in range(len(size)):
            v[DELTA, i] = v[TRIAL, i]
        if not left < before:
            return _rounding(size, K, M, L, v)
    return False


def _found(size, K, M, L, v, m):  # pragma: kernel
    """From v[DELTA] on; else along the curve of solutions for smaller steps h."""
    if _own_steps(size, K, M, L, 1.0, v, m):
        return True
    v[KEPT] = 0
    share, step = 0.0, 0.25
    while share < 1:
        aim = min(1.0, share + step)
        v[DELTA] = v[KEPT]
        if _own_steps(size, K, M, L, aim, v, m):
            v[KEPT] = v[DELTA]
            share, step = aim, 2 * step
        else:
            step *= 0.25
            if step < SMALLEST:
                return False
    return True


def _joined(size, K, L, B, v, w, whole):  # pragma: kernel
    """Both agents as one equation of 2 c unknowns."""
    c, (K2, M, L2, u, m) = len(size), whole
    K2[:], M[:], L2[:], u[DELTA], u[KNOWN] = 0, 0, 0, 0, 0
    for i in range(c):
        u[Z, i], u[Z, c + i] = v[Z, i], w[Z, i]
        u[TERMS, i], u[TERMS, c + i] = v[TERMS, i], w[TERMS, i]
        for j in range(c):
            K2[i, j], K2[c + i, c + j] = K[i, j], L[i, j]
            M[i, c + j], M[c + j, i] = B[i, j], -B[i, j]
    solved = _found(u[KEPT], K2, M, L2, u, m)
    for i in range(c):
        v[DELTA, i], w[DELTA, i] = u[DELTA, i], u[DELTA, c + i]
    return solved


# Substeps: states are changed in place. y is all agents' (N, p + c).


def _start(size, K, b, x, v):  # pragma: kernel
    """Where the chords start, z = K x + b, and the sizes of what it sums."""
    for r in range(len(size)):
        s, terms = b[r], abs(b[r])
        for j in range(len(size)):
            s += K[r, j] * x[j]
            terms += abs(K[r, j] * x[j])
        v[Z, r], v[TERMS, r] = s, terms


def _several(n):  # pragma: kernel
    """Scratch memory of n unknowns that are solved for as one."""
    return (
        np.zeros((n, n)),
        np.zeros((n, n)),
        np.zeros((n, n)),
        np.zeros((ROWS, n)),
        np.zeros((3, n, n)),
    )


def _room(c, p):  # pragma: kernel
    """Scratch memory: an agent, another, matrices; plants; a whole agent, two of them; lanes."""
    v, w, m = np.zeros((ROWS, c)), np.zeros((ROWS, c)), np.zeros((3, c, c))
    lanes = np.zeros((_at(c, VECTORS) + SINGLE, LANES))
    return v, w, m, np.zeros((3, 2 * p)), _several(p + c), _several(2 * c), lanes


def _own_steps_of(size, y, agents, now, own, room):  # pragma: kernel
    """Agents by themselves in all samples, (B, N, n). The first that was not solved, or -1."""
    (K, b), (M, U, u, _, _, _, _, _, _), V = now, own, room[6]
    B, c, p = len(y), len(size), U.shape[2]
    single, found, force = _at(c, VECTORS), _at(c, L_FOUND), _at(c, L_FORCE)
    known = _at(c, L_KNOWN)
    for first in range(0, B * len(agents), LANES):
        count = min(LANES, B * len(agents) - first)
        for lane in range(LANES):
            each = first + min(lane, count - 1)
            i, x = agents[each // B], y[each % B, agents[each // B]]
            total, most = _put_agent(size, V, 0, lane, K[i], b[i], x[p:])
            V[single + L_TERMS, lane], V[single + L_CLOSE, lane] = total, LAST + ROUNDING * most
            _put_matrix(size, V, L_M * c * c, lane, M[i])
            for j in range(c):
                s = u[i, j]
                for r in range(p):
                    s += U[i, j, r] * x[r]
                V[known + j, lane] = s
        _lane_own(size, K.shape[1], V)
        for lane in range(count):
            each = first + lane
            i = agents[each // B]
            arrived = V[single + L_STATUS, lane] == ARRIVED
            if arrived:
                for j in range(c):
                    room[0][DELTA, j], room[0][F, j] = V[found + j, lane], V[force + j, lane]
            total = V[single + L_TERMS, lane]
            if not _own_step(size, y[each % B, i], i, now, own, room, arrived, total):
                return i
    return -1


def _own_step(size, y, i, now, own, room, arrived, terms):  # pragma: kernel
    """Agent i by itself: z' = z + V z + v + W f, x' = x + U z + u + M f. Whether it was solved.

    If it has `arrived`, delta and f are known, and the sum of TERMS.
    """
    (K, b), (_, _, _, V, c0, W, G, Q, q), (v, _, _, line, whole, _, _) = now, own, room
    c, p = len(size), V.shape[1]
    if arrived:
        for r in range(p):
            s = c0[i, r]
            for j in range(p):
                s += V[i, r, j] * y[j]
            for j in range(c):
                s += W[i, r, j] * v[F, j]
            line[0, r] = s
    solved = arrived and _balanced(size, y, G[i], Q[i], q[i], v, line, terms)
    if not solved:
        _start(K[i, 0], K[i], b[i], y[p:], v)
        if not _alone(K[i, 0], y, K[i], G[i], Q[i], q[i], v, line, whole, arrived):
            return False
    for r in range(p):
        y[r] += line[0, r]
    for j in range(c):
        y[p + j] += v[DELTA, j]
    return True


def _balanced(size, y, G, Q, q, v, line, terms):  # pragma: kernel
    """Whether what is left of x' = x + G f changes the energy by rounding only: f^T of it."""
    c, p = len(size), Q.shape[0]
    change = 0.0
    for j in range(p):
        s = q[j]
        for r in range(p):
            s += Q[j, r] * (y[r] + 0.5 * line[0, r])
        line[1, j] = s
        terms += abs(s * (y[j] + 0.5 * line[0, j]))
    for j in range(p):
        s = line[0, j]
        for r in range(p):
            s -= G[j, r] * line[1, r]
        for r in range(c):
            s -= G[j, p + r] * v[F, r]
        change += line[1, j] * s
    for j in range(c):
        s = v[DELTA, j]
        for r in range(p):
            s -= G[p + j, r] * line[1, r]
        for r in range(c):
            s -= G[p + j, p + r] * v[F, r]
        change += v[F, j] * s
    return abs(change) <= BALANCE * terms


def _alone(size, y, K, G, Q, q, v, line, whole, found):  # pragma: kernel
    """Plant and controller of an agent as one equation; from what is found on, if anything is."""
    c, p, (K2, M, L, u, m) = len(size), Q.shape[0], whole
    K2[:], M[:], L[:], u[:] = 0, 0, 0, 0
    for r in range(p):
        s = q[r]
        for j in range(p):
            s += Q[r, j] * y[j]
        line[1, r] = s
        u[DELTA, r] = line[0, r] if found else 0.0
    for i in range(p + c):
        for j in range(p):
            u[KNOWN, i] += G[i, j] * line[1, j]
            for r in range(p):
                L[i, j] += 0.5 * G[i, r] * Q[r, j]
        for j in range(c):
            M[i, p + j] = G[i, p + j]
    for r in range(c):
        u[Z, p + r], u[TERMS, p + r] = v[Z, r], v[TERMS, r]
        u[DELTA, p + r] = v[DELTA, r] if found else 0.0
        for j in range(c):
            K2[p + r, p + j] = K[r, j]
    if not _found(u[KEPT], K2, M, L, u, m):
        return False
    for r in range(p):
        line[0, r] = u[DELTA, r]
    for j in range(c):
        v[DELTA, j] = u[DELTA, p + j]
    return True


def _pair_steps_of(size, y, which, pairs, now, C, room):  # pragma: kernel
    """Edges that share no agent, in all samples. The first that was not solved, or -1."""
    (K, b), V, c = now, room[6], len(size)
    B, p = len(y), y.shape[2] - c
    single, found, other = _at(c, VECTORS), _at(c, L_FOUND), _at(c, L_OTHER)
    for first in range(0, B * len(which), LANES):
        count = min(LANES, B * len(which) - first)
        for lane in range(LANES):
            each = first + min(lane, count - 1)
            e, x = which[each // B], y[each % B]
            i, k = pairs[e, 0], pairs[e, 1]
            total, most = _put_agent(size, V, 0, lane, K[i], b[i], x[i, p:])
            _, more = _put_agent(size, V, 1, lane, K[k], b[k], x[k, p:])
            V[single + L_TERMS, lane] = total
            V[single + L_CLOSE, lane] = LAST + ROUNDING * max(most, more)
            _put_matrix(size, V, L_B * c * c, lane, C[e])
        _lane_pair(size, K.shape[1], V)
        for lane in range(count):
            each = first + lane
            e, x = which[each // B], y[each % B]
            i, k = pairs[e, 0], pairs[e, 1]
            if V[single + L_STATUS, lane] == ARRIVED:
                for j in range(c):
                    x[i, p + j] += V[found + j, lane]
                    x[k, p + j] += V[other + j, lane]
            elif not _pair_step(x, i, k, now, C[e], room):
                return e
    return -1


def _pair_step(y, i, k, now, B, room):  # pragma: kernel
    """The controllers of agents i and k along their edge. Whether it was solved."""
    (K, b), (v, w, _, _, _, whole, _), c = now, room, len(B)
    p, size = y.shape[1] - c, K[i, 0]
    _start(size, K[i], b[i], y[i, p:], v)
    _start(size, K[k], b[k], y[k, p:], w)
    if not _joined(size, K[i], K[k], B, v, w, whole):
        return False
    for j in range(c):
        y[i, p + j] += v[DELTA, j]
        y[k, p + j] += w[DELTA, j]
    return True


def _linear_step(y, i, k, L, c0, room):  # pragma: kernel
    """The plants of agents i and k along their edge: (z_i, z_k) += L (z_i, z_k) + c0."""
    p, line = c0.shape[0] // 2, room[3][0]
    line[:p], line[p:] = y[i, :p], y[k, :p]
    for r in range(p):
        s, q = c0[r], c0[p + r]
        for j in range(2 * p):
            s += L[r, j] * line[j]
            q += L[p + r, j] * line[j]
        y[i, r] += s
        y[k, r] += q


# Backwards: g is the gradient in the states after a substep, and becomes that before it


def _to_weights(size, K, x, v, gamma, g, dK, db):  # pragma: kernel
    """From gamma, the gradient in f = K^T chords, to K, b and the start x of the chords."""
    c = len(size)
    _times(size, K, gamma, v[SHIFT])
    for r in range(c):
        start, end = v[E, r] * v[SHIFT, r], v[D, r] * v[SHIFT, r]
        db[r] += start + end
        for j in range(c):
            dK[r, j] += v[PHI, r] * gamma[j] + start * x[j] + end * (x[j] + v[DELTA, j])
            g[j] += K[r, j] * start


def _own_adjoint_of(size, kept, g, agents, now, own, ends, found, room):  # pragma: kernel
    """Of agents by themselves, in all samples; kept: their states before and after, (B, A, n).

    Sums are added to `found`, which has a part for each group of samples; groups end at `ends`.
    """
    (before, after), ((dK, db), (dM, dU, du, dW)) = kept, found
    (K, b), (M, _, _, _, _, W, _, _, _), V, v = now, own, room[6], room[0]
    B, c, p = len(g), len(size), W.shape[1]
    single, delta, trial = _at(c, VECTORS), _at(c, L_DELTA), _at(c, L_TRIAL)
    known, value, D_ = _at(c, L_KNOWN), _at(c, L_PHI), _at(c, L_D)
    E_, F_, step = _at(c, L_E), _at(c, L_F), _at(c, L_STEP)
    for first in range(0, B * len(agents), LANES):
        count = min(LANES, B * len(agents) - first)
        for lane in range(LANES):
            each = first + min(lane, count - 1)
            a, s = each // B, each % B
            i, y, x = agents[a], before[s, a], after[s, a]
            _put_agent(size, V, 0, lane, K[i], b[i], y[p:])
            _put_matrix(size, V, L_M * c * c, lane, M[i])
            for j in range(c):
                V[delta + j, lane], V[known + j, lane] = x[p + j] - y[p + j], g[s, i, p + j]
                t = 0.0
                for r in range(p):
                    t += W[i, r, j] * g[s, i, r]
                V[trial + j, lane] = t
        _lane_own_adjoint(size, K.shape[1], V)
        for lane in range(count):
            a, s = (first + lane) // B, (first + lane) % B
            i, group = agents[a], 0
            while s >= ends[group]:
                group += 1
            for j in range(c):
                v[PHI, j], v[D, j], v[E, j] = V[value + j, lane], V[D_ + j, lane], V[E_ + j, lane]
                v[F, j], v[STEP, j] = V[F_ + j, lane], V[step + j, lane]
                v[TRIAL, j], v[DELTA, j] = V[trial + j, lane], V[delta + j, lane]
            trusted = V[single + L_STATUS, lane] == ARRIVED
            to_own = dM[group], dU[group], du[group], dW[group]
            to_now, y, z = (dK[group], db[group]), before[s, a], g[s, i]
            _own_adjoint(size, i, y, z, now, own, to_now, to_own, room, trusted)


def _own_adjoint(size, i, y, g, now, own, to_now, to_own, room, trusted):  # pragma: kernel
    """Of the substep of agent i by itself from y on, from where the lanes leave it."""
    (K, _), (M, U, _, V, _, _, _, _, _) = now, own
    (dK, db), (dM, dU, du, dW), (v, _, m, _, _, _, _) = to_now, to_own, room
    line = room[3][0]
    c, p, A, S = len(size), V.shape[1], m[0], m[1]
    if not trusted:  # (I - S M^T) STEP = g + S W^T g
        any_size = K[i, 0]
        _slopes(any_size, K[i], v[D], S)
        _times(any_size, S, v[TRIAL], v[STEP])
        _product_T(any_size, S, M[i], A)
        for j in range(c):
            for k in range(c):
                A[j, k] = -A[j, k]
            A[j, j] += 1
            v[STEP, j] += g[p + j]
        _solve(any_size, A, v[STEP])
    for j in range(c):
        s = v[TRIAL, j]
        du[i, j] += v[STEP, j]
        for k in range(c):
            s += M[i, k, j] * v[STEP, k]
            dM[i, j, k] += v[STEP, j] * v[F, k]
        for k in range(p):
            dU[i, j, k] += v[STEP, j] * y[k]
        v[LEFT, j] = s
    for r in range(p):
        for j in range(c):
            dW[i, r, j] += g[r] * v[F, j]
    for r in range(p):
        s = 0.0
        for k in range(p):
            s += V[i, k, r] * g[k]
        for k in range(c):
            s += U[i, k, r] * v[STEP, k]
        line[r] = s
    for r in range(p):
        g[r] += line[r]
    for j in range(c):
        g[p + j] = v[STEP, j]
    _to_weights(size, K[i], y[p:], v, v[LEFT], g[p:], dK[i], db[i])


def _pair_adjoint_of(size, kept, g, which, pairs, now, C, ends, found, room):  # pragma: kernel
    """Of edges that share no agent, in all samples; kept: both ends before and after, (B, E, 2 c).

    Sums are added to `found`, which has a part for each group of samples; groups end at `ends`.
    """
    (before, after), ((dK, db), dC) = kept, found
    (K, b), V, v, w = now, room[6], room[0], room[1]
    B, c = len(g), len(size)
    p = g.shape[2] - c
    single, delta, other_delta = _at(c, VECTORS), _at(c, L_DELTA), _at(c, AGENT + L_DELTA)
    g1, g2, step, other = _at(c, L_KNOWN), _at(c, L_TRIAL), _at(c, L_STEP), _at(c, L_OTHER)
    one, two = _at(c, L_PHI), _at(c, AGENT + L_PHI)
    for first in range(0, B * len(which), LANES):
        count = min(LANES, B * len(which) - first)
        for lane in range(LANES):
            each = first + min(lane, count - 1)
            a, s = each // B, each % B
            e, y, x = which[a], before[s, a], after[s, a]
            i, k = pairs[e, 0], pairs[e, 1]
            _put_agent(size, V, 0, lane, K[i], b[i], y[:c])
            _put_agent(size, V, 1, lane, K[k], b[k], y[c:])
            _put_matrix(size, V, L_B * c * c, lane, C[e])
            for j in range(c):
                V[delta + j, lane], V[other_delta + j, lane] = x[j] - y[j], x[c + j] - y[c + j]
                V[g1 + j, lane], V[g2 + j, lane] = g[s, i, p + j], g[s, k, p + j]
        _lane_pair_adjoint(size, K.shape[1], V)
        for lane in range(count):
            a, s = (first + lane) // B, (first + lane) % B
            e, group = which[a], 0
            while s >= ends[group]:
                group += 1
            for j in range(c):
                v[PHI, j], w[PHI, j] = V[one + j, lane], V[two + j, lane]
                v[D, j], w[D, j] = V[one + c + j, lane], V[two + c + j, lane]
                v[E, j], w[E, j] = V[one + 2 * c + j, lane], V[two + 2 * c + j, lane]
                v[F, j], w[F, j] = V[one + 3 * c + j, lane], V[two + 3 * c + j, lane]
                v[DELTA, j], w[DELTA, j] = V[delta + j, lane], V[other_delta + j, lane]
                v[STEP, j], w[STEP, j] = V[step + j, lane], V[other + j, lane]
            trusted = V[single + L_STATUS, lane] == ARRIVED
            to_now, y, dB = (dK[group], db[group]), before[s, a], dC[group, e]
            i, k = pairs[e, 0], pairs[e, 1]
            _pair_adjoint(size, i, k, y, g[s], now, C[e], to_now, dB, room, trusted)


def _pair_adjoint(size, i, k, y, g, now, B, to_now, dB, room, trusted):  # pragma: kernel
    """Of the substep of the controllers of agents i and k from y on, where the lanes leave it."""
    (K, _), (dK, db), (v, w, m, _, _, _, _) = now, to_now, room
    c, S, P, A = len(size), m[0], m[1], m[2]
    p = g.shape[1] - c
    if not trusted:  # (I + S_1 B S_2 B^T) STEP = g_1 - S_1 B g_2
        any_size = K[i, 0]
        _slopes(any_size, K[i], v[D], A)
        _product(any_size, A, B, P)
        _times(any_size, P, g[k, p:], v[LEFT])
        _slopes(any_size, K[k], w[D], S)
        _product_T(any_size, S, B, A)
        _product(any_size, P, A, S)
        for j in range(c):
            S[j, j] += 1
            v[STEP, j] = g[i, p + j] - v[LEFT, j]
        _solve(any_size, S, v[STEP])
        _times(any_size, A, v[STEP], w[STEP])
        for j in range(c):
            w[STEP, j] += g[k, p + j]
    _times(size, B, w[STEP], v[LEFT])
    _times_T(size, B, v[STEP], w[LEFT])
    for j in range(c):
        v[LEFT, j] = -v[LEFT, j]
        g[i, p + j], g[k, p + j] = v[STEP, j], w[STEP, j]
        for q in range(c):
            dB[j, q] += v[STEP, j] * w[F, q] - v[F, j] * w[STEP, q]
    _to_weights(size, K[i], y[:c], v, v[LEFT], g[i, p:], dK[i], db[i])
    _to_weights(size, K[k], y[c:], w, w[LEFT], g[k, p:], dK[k], db[k])


def _linear_adjoint(g, i, k, L, room):  # pragma: kernel
    """Of the substep of the plants of agents i and k: g += L^T g."""
    p, line = L.shape[0] // 2, room[3][0]
    for j in range(2 * p):
        s = 0.0
        for r in range(p):
            s += L[r, j] * g[i, r] + L[p + r, j] * g[k, r]
        line[j] = s
    for r in range(p):
        g[i, r] += line[r]
        g[k, r] += line[p + r]


# Agents by themselves and edges of plants, once what is linear is solved for. With the energy
# |A z + a|^2 / 2 = z^T Q z / 2 + q^T z + .. and F = h (J - R): P = (I - F Q / 2)^-1 g, likewise V
# from F; M = h (J_c - R_c) - G Y G^T, U = G Z, u = G z, W = -h P G^T. `rest` is Y, Z, z, P.


def eliminate(h, plant, controller, edges, own, rest, linear):  # pragma: kernel
    """Write `own`: M, U, u, V, v, W, and before that the whole, F, Q and q of each agent.

    Also `rest`, which its adjoint needs, and `linear`, the increments L and l of edges of plants.
    """
    (A, a, J, R, g), (J_c, R_c, G), (M, U, u, V, v, W, whole, Q, q) = plant, controller, own
    (Y, Z, z, P), (pairs, couplings), (L, l_) = rest, edges, linear
    (N, rows, p), (c, m) = A.shape, G.shape[1:]
    x, X, F, T = np.zeros(p), np.zeros((p, p)), np.zeros((p, p)), np.zeros((m, p))
    Q[:], q[:] = 0, 0
    for i in range(N):
        for j in range(p):
            for k in range(p):
                whole[i, j, k] = h * (J[i, j, k] - R[i, j, k])
            for k in range(c):
                s = 0.0
                for d in range(m):
                    s += h * g[i, j, d] * G[i, k, d]
                whole[i, j, p + k], whole[i, p + k, j] = -s, s
        for j in range(c):
            for k in range(c):
                whole[i, p + j, p + k] = h * J_c[j, k]
            whole[i, p + j, p + j] -= h * R_c[i, j]
        for j in range(p):
            for r in range(rows):
                q[i, j] += A[i, r, j] * a[i, r]
                for k in range(p):
                    Q[i, j, k] += A[i, r, j] * A[i, r, k]
        for col in range(p + m):
            for j in range(p):
                for k in range(p):
                    s = 0.0
                    for r in range(p):
                        s += whole[i, j, r] * Q[i, r, k]
                    X[j, k] = -0.5 * s
                X[j, j] += 1
                x[j] = whole[i, j, col] if col < p else g[i, j, col - p]
            _solve(x, X, x)
            for j in range(p):
                if col < p:
                    F[j, col] = x[j]
                else:
                    P[i, j, col - p] = x[j]
        for j in range(p):
            v[i, j] = 0.0
            for r in range(p):
                v[i, j] += F[j, r] * q[i, r]
            for k in range(p):
                V[i, j, k] = 0.0
                for r in range(p):
                    V[i, j, k] += F[j, r] * Q[i, r, k]
        for d in range(m):  # T = h g^T (I + Q F / 2)
            for k in range(p):
                s = g[i, k, d]
                for j in range(p):
                    for r in range(p):
                        s += 0.5 * g[i, j, d] * Q[i, j, r] * F[r, k]
                T[d, k] = h * s
        for d in range(m):
            z[i, d] = 0.0
            for k in range(p):
                z[i, d] += T[d, k] * q[i, k]
                Z[i, d, k] = 0.0
                for r in range(p):
                    Z[i, d, k] += T[d, r] * Q[i, r, k]
            for e in range(m):
                s = 0.0
                for j in range(p):
                    for r in range(p):
                        s += g[i, j, d] * Q[i, j, r] * P[i, r, e]
                Y[i, d, e] = 0.5 * h * h * s
        for j in range(c):
            u[i, j] = 0.0
            for d in range(m):
                u[i, j] += G[i, j, d] * z[i, d]
            for k in range(c):
                s = whole[i, p + j, p + k]
                for d in range(m):
                    for e in range(m):
                        s -= G[i, j, d] * Y[i, d, e] * G[i, k, e]
                M[i, j, k] = s
            for k in range(p):
                U[i, j, k], W[i, k, j] = 0.0, 0.0
                for d in range(m):
                    U[i, j, k] += G[i, j, d] * Z[i, d, k]
                    W[i, k, j] -= h * P[i, k, d] * G[i, j, d]
    X, x, B = np.zeros((2 * p, 2 * p)), np.zeros(2 * p), np.zeros((2 * p, 2 * p))
    for e in range(len(pairs)):  # B: h times the coupling, times Q
        i, k = pairs[e, 0], pairs[e, 1]
        for j in range(p):
            l_[e, j], l_[e, p + j] = 0.0, 0.0
            for r in range(p):
                l_[e, j] += h * couplings[e, j, r] * q[k, r]
                l_[e, p + j] -= h * couplings[e, r, j] * q[i, r]
                B[j, p + r], B[p + j, r] = 0.0, 0.0
                for d in range(p):
                    B[j, p + r] += h * couplings[e, j, d] * Q[k, d, r]
                    B[p + j, r] -= h * couplings[e, d, j] * Q[i, d, r]
        for col in range(2 * p + 1):
            for j in range(2 * p):
                for r in range(2 * p):
                    X[j, r] = -0.5 * B[j, r]
                X[j, j] += 1
                x[j] = B[j, col] if col < 2 * p else l_[e, j]
            _solve(x, X, x)
            for j in range(2 * p):
                if col < 2 * p:
                    L[e, j, col] = x[j]
                else:
                    l_[e, j] = x[j]


def eliminate_adjoint(h, G, rest, to_own, dG):  # pragma: kernel
    """From the gradients of M, U, u and W to that of G."""
    (Y, Z, z, P), (dM, dU, du, dW) = rest, to_own
    N, c, m = G.shape
    for i in range(N):
        for j in range(c):
            for d in range(m):
                s = du[i, j] * z[i, d]
                for k in range(P.shape[1]):
                    s += dU[i, j, k] * Z[i, d, k] - h * dW[i, k, j] * P[i, k, d]
                for k in range(c):
                    for e in range(m):
                        s -= dM[i, j, k] * G[i, k, e] * Y[i, d, e]
                        s -= dM[i, k, j] * G[i, k, e] * Y[i, e, d]
                dG[i, j, d] = s


# All steps, or a phase of one for some agents or edges: `chosen` are the numbers of agents, of
# edges of plants and of edges, and where the colours of the latter begin, and end. Sums over
# samples and time are taken step by step, and in a step phase by phase: both give the same bits.


def forward(size, y, first, chosen, weights, own, plant, links, kept, failed):  # pragma: kernel
    """Steps from step `first` on; y (B, N, n) changes in place. Writes what failed.

    weights: K (T, N, c, c) and b; own: the matrices of agents by themselves; plant and links:
    edges (E, 2) and matrices. kept: states (B, steps + 1, N, n), the other end of the agents' own
    substeps (B, steps, N, n), and controllers at both ends of edges before their substeps; all but
    the number of steps is kept if there is room.
    """
    (agents, plant_which, which, cuts), (K, b), (states, mids, before) = chosen, weights, kept
    (plant_pairs, L, c0), (pairs, C) = plant, links
    B, (T, c), P, colours = len(y), (K.shape[0], K.shape[2]), len(plant_which), len(cuts) - 1
    p = y.shape[2] - c
    room, whole, keep = _room(c, p), states.shape[0] > 0, before.shape[0] > 0
    if whole:
        states[:, 0] = y
    for t in range(mids.shape[1]):
        at, turn = min(first + t, T - 1), (first + t) % 2
        now = K[at], b[at]
        for phase in range(P + colours + 1):
            e = P + colours - phase if turn else phase  # 0: agents by themselves; then edges
            if e == 0:
                if whole and turn:
                    mids[:, t] = y
                lost = _own_steps_of(size, y, agents, now, own, room)
                if lost >= 0:
                    failed[:] = (1, t, lost)
                    return
                if whole and not turn:
                    mids[:, t] = y
            elif e <= P:
                a = plant_which[e - 1]
                for s in range(B):
                    _linear_step(y[s], plant_pairs[a, 0], plant_pairs[a, 1], L[a], c0[a], room)
            else:
                now_which = which[cuts[e - P - 1] : cuts[e - P]]
                if keep:
                    for s in range(B):
                        for a in now_which:
                            before[s, t, a, :c] = y[s, pairs[a, 0], p:]
                            before[s, t, a, c:] = y[s, pairs[a, 1], p:]
                lost = _pair_steps_of(size, y, now_which, pairs, now, C, room)
                if lost >= 0:
                    failed[:] = (2, t, lost)
                    return
        if whole:
            states[:, t + 1] = y


def backward(
    size, g, first, chosen, weights, own, plant, links, kept, grads, ends, found
):  # pragma: kernel
    """From gradients after these steps, g (B, N, n), to those before them, in place.

    kept: as `forward` does; and both ends of edges after their substeps, where they are not to be
    found in the states. `grads` are added to g at their time, if there are any. Gradients of K and
    b, of M, U, u and W, and of the matrices of links are added to `found`, which has a part for
    each group of samples; groups end at `ends`.
    """
    (agents, plant_which, which, cuts), (K, b), (to_weights, to_own, dC) = chosen, weights, found
    (plant_pairs, L, _), (pairs, C), (dK, db) = plant, links, to_weights
    states, mids, before, given = kept
    B, (T, c), P, colours = len(g), (K.shape[0], K.shape[2]), len(plant_which), len(cuts) - 1
    p, whole = g.shape[2] - c, given.shape[0] == 0
    room = _room(c, p)
    x = np.zeros((B, g.shape[1] if whole else 0, g.shape[2]))
    after = np.zeros((B, len(which) if whole else 0, 2 * c))
    for t in range(mids.shape[1] - 1, -1, -1):
        at, turn = min(first + t, T - 1), (first + t) % 2
        now, to_now = (K[at], b[at]), (dK[:, at], db[:, at])
        if whole:
            x[:] = mids[:, t] if turn else states[:, t + 1]
        for phase in range(P + colours, -1, -1):
            e = P + colours - phase if turn else phase
            if e == 0:
                ours = (mids[:, t], states[:, t + 1]) if turn else (states[:, t], mids[:, t])
                sums = to_now, to_own
                _own_adjoint_of(size, ours, g, agents, now, own, ends, sums, room)
            elif e <= P:
                a = plant_which[e - 1]
                for s in range(B):
                    _linear_adjoint(g[s], plant_pairs[a, 0], plant_pairs[a, 1], L[a], room)
            else:
                low, high = cuts[e - P - 1], cuts[e - P]
                if whole:
                    for s in range(B):
                        for a in range(low, high):
                            i, k, y = pairs[a, 0], pairs[a, 1], before[s, t, a]
                            after[s, a, :c], after[s, a, c:] = x[s, i, p:], x[s, k, p:]
                            x[s, i, p:], x[s, k, p:] = y[:c], y[c:]
                ends_of = after if whole else given
                ours, sums = (before[:, t, low:high], ends_of[:, low:high]), (to_now, dC)
                _pair_adjoint_of(size, ours, g, which[low:high], pairs, now, C, ends, sums, room)
        if len(grads):
            g += grads[:, t]
