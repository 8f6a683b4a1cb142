"""A closed loop over all its steps as compiled loops, forwards and backwards, in float64.

The substeps that `hdnn.control` defines, with all that is linear eliminated beforehand
(`hdnn.control.elimination`), so that what is left to solve has as many unknowns as a controller has
states: c. K (c, c) and b are the weights of a controller, B = h C those of an edge between two, and
S = K^T D K, where D are the slopes of the chords in their ends; E are those in their starts. Needs
numba (extra `fast`), which is imported at the first use.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import numpy as np

from hdnn.engine.kernels import closed_loop_lanes
from hdnn.engine.kernels.closed_loop_lanes import LANES
from hdnn.errors import require

EPS = 2.0**-52
CLOSE = 0.01  # half the distance of two points up to which slopes are taken from a series
NEAR = 0.25  # up to here lanes take chords from two polynomials
NEWTON, HALVINGS = 100, 60  # large weights make long steps, and bends that need short ones
# A Newton step that moves no argument of a chord by more than this is the last one: what it leaves
# is its square, far below rounding. Lanes know the bends of chords too, and leave its cube.
LAST, LANES_LAST = 1e-8, 4e-6
STRAIGHT = 1e-7  # the length of a chord below which its bend is that of a point
ROUNDING = 64 * EPS  # a residual relative to its terms that cannot be made smaller
BALANCE = 64 * EPS  # what a substep may change the energy by, relative to its terms
SMALLEST = 1e-10  # step along the curve of solutions with smaller h, where Newton fails at first
TRIES = 1000  # such steps, at most

# `size` is a tuple of c entries, so that loops have a length that is known when they are compiled;
# or an array of that length. Matrices of agents are given as rows: (N, c c) and the like.

# Rows of scratch memory, as many numbers each as there are rows of the energy or unknowns: where
# the chords start and what that sums, the chords, their slopes in the ends, f = K^T chords; the
# increment, and what is left of its equation.
Z, TERMS, PHI, D, F, DELTA, LEFT, SHIFT, STEP, TRIAL, KEPT = range(11)
ROWS = 11

# Agents or edges that do not depend on each other are solved for LANES at a time: those of one
# agent in several samples if there are enough, else several agents. Rows of scratch memory
# (rows, LANES): matrices, vectors of c rows each, single rows; then what `_places` says. The first
# nine vectors are of an agent, the next nine of the agent at the other end of its edge.
L_K, L_M, L_B, L_S, L_P, L_J, MATRICES = range(7)
L_X, L_Z, L_SHIFT, L_PHI, L_D, L_E, L_BEND, L_F, L_DELTA, AGENT = range(10)
L_KNOWN, L_LEFT, L_STEP, L_TRIAL, L_FOUND, L_OTHER, L_FORCE, L_GAP, VECTORS = range(18, 27)
L_TERMS, L_CLOSE, L_STATUS, L_SIZE, SINGLE = range(5)
LANE_STEPS = 8  # of Newton; what has not arrived by then is solved for by itself
GOING, ARRIVED, GAVE_UP, UNBALANCED = 0.0, 1.0, 2.0, 3.0
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
put: Any = None  # put(array, row, lane, number)
get: Any = None  # get(array, row, lane)
totals: Any = None  # totals(array, row): of LANES rows from there on, each over its lanes

EXPM1 = tuple(1 / math.factorial(k) for k in reversed(range(2, 15)))
ARTANH = tuple(1 / k for k in reversed(range(3, 27, 2)))
# tanh d = d (1 - q TANH_NEAR(q)), q = d^2 and artanh x = x (1 + y ARTANH_NEAR(y)), y = x^2, for
# |d| < NEAR and |x| < tanh NEAR: by Chebyshev interpolation, to 3e-17.
TANH_NEAR = (
    *(0.0013334287579797762, -0.003581791786990957, 0.008862798753789404, -0.02186947902594781),
    *(0.053968253869450214, -0.1333333333329479, 0.3333333333333331),
)
ARTANH_NEAR = (
    *(0.07326117646652469, 0.06519844143570146, 0.07699914477369592, 0.09090692682100776),
    *(0.11111114439126835, 0.14285714260652518, 0.2000000000007175, 0.333333333333333),
)

ROOTS = ("forward", "backward")


@cache
def compiled(njit: Callable[[Any], Any]) -> dict[str, Any]:
    """By name."""
    numba: Any = require("numba", extra="fast")
    here = globals()
    here.update(closed_loop_lanes.operations())
    for name, part in [*here.items()]:  # not kept on disk: types of lanes would not be known again
        if name.startswith("_") and isinstance(part, FunctionType):
            here[name] = numba.njit(error_model="numpy")(part)
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


def _places(c, p, rows):  # pragma: kernel
    """The first rows of a plant: state, increment, f, rows; U, u, V, v, W, A, a, J - R; sums."""
    z = _at(c, VECTORS) + SINGLE
    s, f = z + p, z + 2 * p
    w = f + p
    U = w + rows
    u = U + c * p
    V = u + c
    v = V + p * p
    W = v + p
    A = W + p * c
    a = A + rows * p
    whole = a + rows
    return z, s, f, w, U, u, V, v, W, A, a, whole, whole + (p + c) * (p + c)


def _lane_chords(V, size, z, shift, value, after, before):  # pragma: kernel
    """As `_chord`, a row of lanes: what lies in row `size` is overwritten.

    With t = tanh m, e = tanh d and x = t e the chord is artanh(x) / d, its derivative in m is
    e (1 - t^2) / (d (1 - x^2)), and that in d is (t (1 - e^2) / (1 - x^2) - chord) / d.
    """
    d = load(V, shift) * 0.5
    t, far = _tanh(load(V, z) + d), magnitude(d)
    u, x = 1.0 - t * t, t * 0.0
    a, in_m, in_d = t, t, t
    if any_less(far, NEAR):  # all that is divided by d is taken out of the differences beforehand
        q = d * d
        tau = _polynomial(q, TANH_NEAR)
        e = 1.0 - q * tau
        y = t * d * e
        y = y * y
        more, rest = _polynomial(y, ARTANH_NEAR), 1.0 / (1.0 - y)
        a = t * e * fused(y, more, 1.0)
        in_m = e * u * rest
        in_d = t * d * rest * (tau - e * e * fused(t * t * e, more - 1.0 - y * more, 1.0))
    if any_less(0.999 * NEAR, far):
        e = _tanh(d)
        x = where_less(far, NEAR, x, t * e)
        over, rest = 1.0 / d, 1.0 / (1.0 - x * x)
        chord = _artanh(x) * over
        a = where_less(far, NEAR, a, chord)
        in_m = where_less(far, NEAR, in_m, e * over * u * rest)
        in_d = where_less(far, NEAR, in_d, over * (t * (1.0 - e * e) * rest - chord))
    store(V, value, a)
    store(V, after, (in_m + in_d) * 0.5)
    store(V, before, (in_m - in_d) * 0.5)
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


def _lane_factor(size, V, A):  # pragma: kernel
    """A becomes its factors, with the inverses of pivots, without exchanges. The least pivot."""
    c = len(size)
    least = magnitude(load(V, A))
    for k in range(c):
        pivot = load(V, A + k * c + k)
        least = where_less(magnitude(pivot), least, magnitude(pivot), least)
        over = 1.0 / pivot
        store(V, A + k * c + k, over)
        for i in range(k + 1, c):
            factor = 0.0 - load(V, A + i * c + k) * over
            store(V, A + i * c + k, factor)
            for j in range(k + 1, c):
                at = A + i * c + j
                store(V, at, fused(factor, load(V, A + k * c + j), load(V, at)))
    return least


def _lane_solve(size, V, A, x):  # pragma: kernel
    """x becomes A^-1 x, by the factors of A."""
    c = len(size)
    for k in range(c):
        for i in range(k + 1, c):
            store(V, x + i, fused(load(V, A + i * c + k), load(V, x + k), load(V, x + i)))
    for k in range(c - 1, -1, -1):
        s = load(V, x + k)
        for j in range(k + 1, c):
            s = s - load(V, A + k * c + j) * load(V, x + j)
        store(V, x + k, s * load(V, A + k * c + k))


def _lane_largest(size, V, x):  # pragma: kernel
    """The largest size of an entry; NaN where the last one is."""
    most = magnitude(load(V, x))
    for i in range(1, len(size)):
        each = magnitude(load(V, x + i))
        most = where_less(each, most, most, each)
    return most


def _lane_start(size, V, K, agent):  # pragma: kernel
    """Where the chords start, z = K x + b, from b; the sum and the largest of what that sums."""
    c = len(size)
    x = _at(c, agent * AGENT)
    z, total, most = x + c, load(V, x) * 0.0, load(V, x) * 0.0
    for r in range(c):
        s = load(V, z + r)
        terms = magnitude(s)
        for j in range(c):
            s = fused(load(V, K + r * c + j), load(V, x + j), s)
            terms = terms + magnitude(load(V, K + r * c + j) * load(V, x + j))
        store(V, z + r, s)
        total = total + terms
        most = where_less(most, terms, terms, most)
    return total, most


def _lane_points(size, rows, V, K, agent):  # pragma: kernel
    """As `_lane_rows` and `_lane_bends` where nothing has moved yet: chords are points."""
    c = len(size)
    x = _at(c, agent * AGENT)
    z, value, after, bend = x + L_Z * c, x + L_PHI * c, x + L_D * c, x + L_BEND * c
    for r in range(rows):
        t = _tanh(load(V, z + r))
        u = 1.0 - t * t
        store(V, value + r, t)
        store(V, after + r, u * 0.5)
        store(V, bend + r, t * u * (-1 / 3))
    _lane_times_T(size, V, K, value, x + L_F * c)


def _lane_rows(size, rows, V, K, agent):  # pragma: kernel
    """The chords of an agent from z to z + K delta and their slopes, and f = K^T chords."""
    c = len(size)
    x = _at(c, agent * AGENT)
    z, shift, value = x + L_Z * c, x + L_SHIFT * c, x + L_PHI * c
    after, before, single = x + L_D * c, x + L_E * c, _at(c, VECTORS) + L_SIZE
    _lane_times(size, V, K, x + L_DELTA * c, shift)
    for r in range(rows):  # not of a known length: chords are long, and need not be copied
        _lane_chords(V, single, z + r, shift + r, value + r, after + r, before + r)
    _lane_times_T(size, V, K, value, x + L_F * c)


def _lane_bends(size, V, agent):  # pragma: kernel
    """Half the second derivative of chords in their ends: (1 - tanh^2 - 2 slope) / length."""
    c = len(size)
    x = _at(c, agent * AGENT)
    for r in range(c):
        s, a = load(V, x + L_SHIFT * c + r), load(V, x + L_PHI * c + r)
        slope, far = load(V, x + L_D * c + r), magnitude(s)
        end = fused(s, slope, a)
        s = where_less(far, STRAIGHT, 1.0, s)
        bend = (0.5 - 0.5 * end * end - slope) / s
        point = a * (1.0 - a * a) * (-1 / 3)
        store(V, x + L_BEND * c + r, where_less(far, STRAIGHT, point, bend))


def _lane_moved(size, V, agent, shift, moved):  # pragma: kernel
    """The chords after their ends have moved by `shift`, to second order."""
    c = len(size)
    x = _at(c, agent * AGENT)
    for r in range(c):
        s = load(V, shift + r)
        slope = fused(load(V, x + L_BEND * c + r), s, load(V, x + L_D * c + r))
        store(V, moved + r, fused(slope, s, load(V, x + L_PHI * c + r)))


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


def _lane_arrived(size, V, ready, status, one, two):  # pragma: kernel
    """Keep rows `one` in L_FOUND and `two` in L_OTHER of lanes that are ready now. The status."""
    c = len(size)
    found, other = _at(c, L_FOUND), _at(c, L_OTHER)
    ready = where_less(status, 0.5, ready, GOING)
    for i in range(c):
        store(V, found + i, where_less(ready, 0.5, load(V, found + i), load(V, one + i)))
        store(V, other + i, where_less(ready, 0.5, load(V, other + i), load(V, two + i)))
    return where_less(ready, 0.5, status, ready)


def _lane_bent(size, V, step, trial, shift, more):  # pragma: kernel
    """Add what the bends say, where it is less than half of a step. The largest shift then."""
    least = _lane_largest(size, V, shift) * 0.5
    most = _lane_largest(size, V, more)
    for i in range(len(size)):
        x = where_less(most, least, load(V, trial + i), 0.0)
        store(V, step + i, load(V, step + i) + x)
        x = where_less(most, least, load(V, more + i), 0.0)
        store(V, shift + i, load(V, shift + i) + x)
    return _lane_largest(size, V, shift)


def _lane_own(size, rows, V):  # pragma: kernel
    """Newton steps of third order from 0 on; which lanes arrived is in row L_STATUS.

    Row L_FOUND has the increments, row L_OTHER has f.
    """
    c = len(size)
    q = c * c
    K, M, S, J = 0, L_M * q, L_S * q, L_J * q
    shift, D_, F_, bend = _at(c, L_SHIFT), _at(c, L_D), _at(c, L_F), _at(c, L_BEND)
    delta, known, left = _at(c, L_DELTA), _at(c, L_KNOWN), _at(c, L_LEFT)
    step, trial, force = _at(c, L_STEP), _at(c, L_TRIAL), _at(c, L_FORCE)
    single = _at(c, VECTORS)
    zero = load(V, single) * 0.0
    status, close, before = zero, load(V, single + L_CLOSE), zero
    for i in range(c):
        store(V, delta + i, zero)
    for k in range(LANE_STEPS):
        if k == 0:
            _lane_points(size, rows, V, K, 0)
        else:
            _lane_rows(size, rows, V, K, 0)
            _lane_bends(size, V, 0)
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
        _lane_factor(size, V, J)
        _lane_solve(size, V, J, step)
        _lane_times(size, V, K, step, shift)
        for r in range(c):  # what the bends of the chords add
            s = load(V, shift + r)
            store(V, force + r, load(V, bend + r) * s * s)
        _lane_times_T(size, V, K, force, left)
        _lane_times(size, V, M, left, trial)
        _lane_solve(size, V, J, trial)
        _lane_times(size, V, K, trial, left)
        largest = _lane_bent(size, V, step, trial, shift, left)
        if any_less(largest, close):
            _lane_moved(size, V, 0, shift, force)
            _lane_times_T(size, V, K, force, F_)
            _lane_times(size, V, M, F_, trial)
            _lane_times_T(size, V, M, F_, shift)
            for i in range(c):
                store(V, shift + i, load(V, shift + i) + load(V, trial + i))
                x = load(V, known + i) + load(V, trial + i)
                store(V, trial + i, x)
                store(V, left + i, load(V, delta + i) + load(V, step + i) - x)
            change = _lane_same(size, V, trial, left, shift)
            ready = where_less(change, 0.0, where_less(largest, close, ARRIVED, GOING), GOING)
            status = _lane_arrived(size, V, ready, status, trial, F_)
        if not any_less(status, 0.5):
            break
        for i in range(c):
            store(V, delta + i, load(V, delta + i) + load(V, step + i))
    store(V, single + L_STATUS, where_less(status, 0.5, GAVE_UP, status))


def _lane_pair(size, rows, V):  # pragma: kernel
    """As `_lane_own`: d = B f_2, e = -B^T f_1. Row L_FOUND has d, row L_OTHER has e.

    The first step is from d = e = 0 on; in later ones the equation of e holds, and d is left.
    """
    c = len(size)
    q = c * c
    K, L, B, S, P, J = 0, L_M * q, L_B * q, L_S * q, L_P * q, L_J * q
    shift, D_, F_, bend = _at(c, L_SHIFT), _at(c, L_D), _at(c, L_F), _at(c, L_BEND)
    shift2, D2 = _at(c, AGENT + L_SHIFT), _at(c, AGENT + L_D)
    F2, bend2 = _at(c, AGENT + L_F), _at(c, AGENT + L_BEND)
    d, e, gap = _at(c, L_DELTA), _at(c, AGENT + L_DELTA), _at(c, L_GAP)
    left, step, trial = _at(c, L_LEFT), _at(c, L_STEP), _at(c, L_TRIAL)
    force, known, single = _at(c, L_FORCE), _at(c, L_KNOWN), _at(c, VECTORS)
    zero = load(V, single) * 0.0
    status, close, before = zero, load(V, single + L_CLOSE), zero
    for i in range(c):
        store(V, d + i, zero)
        store(V, e + i, zero)
    for k in range(LANE_STEPS):
        if k == 0:
            _lane_points(size, rows, V, K, 0)
            _lane_points(size, rows, V, L, 1)
            _lane_times_T(size, V, B, F_, gap)
        else:
            _lane_rows(size, rows, V, K, 0)
            _lane_times_T(size, V, B, F_, e)
            for j in range(c):
                store(V, e + j, 0.0 - load(V, e + j))
                store(V, gap + j, zero)
            _lane_rows(size, rows, V, L, 1)
            _lane_bends(size, V, 0)
            _lane_bends(size, V, 1)
        _lane_times(size, V, B, F2, left)
        for i in range(c):
            store(V, left + i, load(V, d + i) - load(V, left + i))
        now = _lane_largest(size, V, left)
        if k > 1:  # the first is of both equations, and says nothing about the next
            worse = where_less(now, before * (1 - 1e-4), status, GAVE_UP)
            status = where_less(status, 0.5, worse, status)
        before = now
        _lane_slopes(size, V, L, D2, S)
        _lane_product(size, V, B, S, P)
        _lane_slopes(size, V, K, D_, J)
        _lane_product(size, V, J, B, S)
        _lane_product_T(size, V, P, S, J)  # B S_2 B^T S_1
        _lane_times(size, V, P, gap, step)
        for i in range(c):
            store(V, J + i * c + i, load(V, J + i * c + i) + 1.0)
            store(V, step + i, 0.0 - (load(V, left + i) + load(V, step + i)))
        _lane_factor(size, V, J)
        _lane_solve(size, V, J, step)
        _lane_times(size, V, K, step, shift)
        for r in range(c):
            s = load(V, shift + r)
            store(V, known + r, load(V, D_ + r) * s)
            store(V, force + r, load(V, bend + r) * s * s)
        _lane_times_T(size, V, K, known, trial)
        _lane_times_T(size, V, B, trial, known)
        for j in range(c):
            store(V, known + j, 0.0 - (load(V, known + j) + load(V, gap + j)))
        _lane_times(size, V, L, known, shift2)
        _lane_times_T(size, V, K, force, trial)
        _lane_times_T(size, V, B, trial, force)
        _lane_times(size, V, P, force, trial)
        for r in range(c):
            s = load(V, shift2 + r)
            store(V, known + r, load(V, bend2 + r) * s * s)
        _lane_times_T(size, V, L, known, force)
        _lane_times(size, V, B, force, known)
        for i in range(c):
            store(V, trial + i, load(V, known + i) - load(V, trial + i))
        _lane_solve(size, V, J, trial)
        _lane_times(size, V, K, trial, known)
        largest = _lane_bent(size, V, step, trial, shift, known)
        if any_less(largest, close):
            _lane_moved(size, V, 0, shift, known)
            _lane_times_T(size, V, K, known, F_)
            _lane_times_T(size, V, B, F_, trial)
            for j in range(c):
                store(V, trial + j, 0.0 - load(V, trial + j))  # e
                store(V, known + j, load(V, trial + j) - load(V, e + j))
            _lane_times(size, V, L, known, shift2)
            more = _lane_largest(size, V, shift2)
            _lane_moved(size, V, 1, shift2, known)
            _lane_times_T(size, V, L, known, F2)
            _lane_times(size, V, B, F2, force)  # d
            for i in range(c):
                store(V, left + i, load(V, d + i) + load(V, step + i) - load(V, force + i))
                store(V, known + i, zero)
            change = _lane_same(size, V, force, left, known)
            ready = where_less(change, 0.0, where_less(largest, close, ARRIVED, GOING), GOING)
            ready = where_less(more, close, ready, GOING)
            status = _lane_arrived(size, V, ready, status, force, trial)
        if not any_less(status, 0.5):
            break
        for i in range(c):
            store(V, d + i, load(V, d + i) + load(V, step + i))
    store(V, single + L_STATUS, where_less(status, 0.5, GAVE_UP, status))


def _lane_plant(size, V, p, rows):  # pragma: kernel
    """The increment of the plant, s = v + V z + W f; lanes whose energy it breaks are UNBALANCED.

    With the plant's own f, from its rows at z + s / 2, the energy changes by f^T of what is left of
    x' = x + (J - R) f more than it should. A second try takes what is left off s.
    """
    c = len(size)
    z, s, f, w, _, _, V_, v, W, A, a, G, spare = _places(c, p, rows)
    F_, delta, single, n = _at(c, L_OTHER), _at(c, L_FOUND), _at(c, VECTORS), p + c
    for r in range(p):
        x = load(V, v + r)
        for j in range(p):
            x = fused(load(V, V_ + r * p + j), load(V, z + j), x)
        for j in range(c):
            x = fused(load(V, W + r * c + j), load(V, F_ + j), x)
        store(V, s + r, x)
    status = load(V, single + L_STATUS)
    now = status
    for turn in range(2):
        change, terms = load(V, single) * 0.0, load(V, single + L_TERMS)
        for r in range(rows):
            x = load(V, a + r)
            first = magnitude(x)
            last = first
            for j in range(p):
                row, at, by = load(V, A + r * p + j), load(V, z + j), load(V, s + j)
                x = fused(row, fused(by, 0.5, at), x)
                first = first + magnitude(row * at)
                last = last + magnitude(row * (at + by))
            store(V, w + r, x)
            terms = terms + (first * first + last * last) * 0.5
        for j in range(p):
            x = load(V, A + j) * load(V, w)
            for r in range(1, rows):
                x = fused(load(V, A + r * p + j), load(V, w + r), x)
            store(V, f + j, x)
        for j in range(n):
            x = load(V, s + j) if j < p else load(V, delta + j - p)
            for r in range(p):
                x = x - load(V, G + j * n + r) * load(V, f + r)
            for r in range(c):
                x = x - load(V, G + j * n + p + r) * load(V, F_ + r)
            by = load(V, f + j) if j < p else load(V, F_ + j - p)
            change = fused(by, x, change)
            if j < p:
                store(V, spare + j, x)
        kept = where_less(magnitude(change), terms * BALANCE, ARRIVED, UNBALANCED)
        now = where_less(status, 1.5, kept, status)
        if turn == 1 or not any_less(1.5, now):
            break
        for r in range(p):
            x = load(V, spare + r)
            for j in range(p):
                x = fused(load(V, V_ + r * p + j) * 0.5, load(V, spare + j), x)
            x = load(V, s + r) - where_less(now, 2.5, 0.0, x)
            store(V, w + r, x)
        for r in range(p):
            store(V, s + r, load(V, w + r))
    store(V, single + L_STATUS, now)


def _lane_own_adjoint(size, rows, V, p, plant_rows):  # pragma: kernel
    """From the gradient after an agent's own substep to that before it, and what it adds to sums.

    L_KNOWN has the gradient of the controller, the place of the increment that of the plant. Sums:
    K, b, M, U, u, W.
    """
    c = len(size)
    q = c * c
    K, M, S, J = 0, L_M * q, L_S * q, L_J * q
    step, trial, known, gamma = _at(c, L_STEP), _at(c, L_TRIAL), _at(c, L_KNOWN), _at(c, L_LEFT)
    z, g, new, _, U, _, V_, _, W, _, _, _, out = _places(c, p, plant_rows)
    F_ = _at(c, L_F)
    for j in range(c):
        x = load(V, W + j) * load(V, g)
        for r in range(1, p):
            x = fused(load(V, W + r * c + j), load(V, g + r), x)
        store(V, trial + j, x)
    _lane_rows(size, rows, V, K, 0)
    _lane_slopes(size, V, K, _at(c, L_D), S)
    _lane_times(size, V, S, trial, step)
    _lane_product_T(size, V, S, M, J)
    for i in range(c):
        for j in range(c):
            store(V, J + i * c + j, (1.0 if i == j else 0.0) - load(V, J + i * c + j))
        store(V, step + i, load(V, step + i) + load(V, known + i))
    least = _lane_factor(size, V, J)
    _lane_solve(size, V, J, step)
    if any_less(least, PIVOT):
        _own_pivoted(size, V, least)
    _lane_times_T(size, V, M, step, gamma)
    for j in range(c):
        store(V, gamma + j, load(V, gamma + j) + load(V, trial + j))
        store(V, known + j, load(V, step + j))
    for r in range(p):
        x = load(V, g + r)
        for j in range(p):
            x = fused(load(V, V_ + j * p + r), load(V, g + j), x)
        for j in range(c):
            x = fused(load(V, U + j * p + r), load(V, step + j), x)
        store(V, new + r, x)
    out = _lane_weights(size, V, K, 0, gamma, known, out)
    for i in range(c):
        for j in range(c):
            store(V, out + i * c + j, load(V, step + i) * load(V, F_ + j))
    out += q
    for i in range(c):
        for j in range(p):
            store(V, out + i * p + j, load(V, step + i) * load(V, z + j))
    out += c * p
    for i in range(c):
        store(V, out + i, load(V, step + i))
    out += c
    for r in range(p):
        for j in range(c):
            store(V, out + r * c + j, load(V, g + r) * load(V, F_ + j))


def _lane_weights(size, V, K, agent, gamma, g, out):  # pragma: kernel
    """From gamma, the gradient in f = K^T chords, to K and b, and add to that of the start, g."""
    c = len(size)
    x = _at(c, agent * AGENT)
    value, D_, E_ = x + L_PHI * c, x + L_D * c, x + L_E * c
    delta, shift = x + L_DELTA * c, x + L_SHIFT * c
    _lane_times(size, V, K, gamma, shift)
    for r in range(c):
        s = load(V, shift + r)
        start, end, a = load(V, E_ + r) * s, load(V, D_ + r) * s, load(V, value + r)
        both = start + end
        store(V, out + c * c + r, both)
        for j in range(c):
            moved = end * load(V, delta + j)
            each = fused(a, load(V, gamma + j), fused(both, load(V, x + j), moved))
            store(V, out + r * c + j, each)
            store(V, g + j, fused(load(V, K + r * c + j), start, load(V, g + j)))
    return out + c * c + c


def _lane_pair_adjoint(size, rows, V, out):  # pragma: kernel
    """Of the substep of two controllers; L_KNOWN and L_TRIAL have the gradients of both.

    Sums: K and b of both agents, and B.
    """
    c = len(size)
    q = c * c
    K, L, B, S, P, J = 0, L_M * q, L_B * q, L_S * q, L_P * q, L_J * q
    g1, g2 = _at(c, L_KNOWN), _at(c, L_TRIAL)
    step, other, left = _at(c, L_STEP), _at(c, L_OTHER), _at(c, L_LEFT)
    F_, F2 = _at(c, L_F), _at(c, AGENT + L_F)
    _lane_rows(size, rows, V, K, 0)
    _lane_rows(size, rows, V, L, 1)
    _lane_slopes(size, V, K, _at(c, L_D), J)
    _lane_product(size, V, J, B, P)
    _lane_times(size, V, P, g2, left)
    _lane_slopes(size, V, L, _at(c, AGENT + L_D), S)
    _lane_product_T(size, V, S, B, J)
    _lane_product(size, V, P, J, S)
    for j in range(c):
        store(V, S + j * c + j, load(V, S + j * c + j) + 1.0)
        store(V, step + j, load(V, g1 + j) - load(V, left + j))
    least = _lane_factor(size, V, S)
    _lane_solve(size, V, S, step)
    if any_less(least, PIVOT):
        _pair_pivoted(size, V, least)
    _lane_times(size, V, J, step, other)
    for j in range(c):
        store(V, other + j, load(V, other + j) + load(V, g2 + j))
        store(V, g1 + j, load(V, step + j))
        store(V, g2 + j, load(V, other + j))
    sums = out + 2 * (q + c)
    for i in range(c):
        for j in range(c):
            x = load(V, F_ + i) * load(V, other + j)
            store(V, sums + i * c + j, load(V, step + i) * load(V, F2 + j) - x)
    _lane_times(size, V, B, other, left)
    for j in range(c):
        store(V, left + j, 0.0 - load(V, left + j))
    out = _lane_weights(size, V, K, 0, left, g1, out)
    _lane_times_T(size, V, B, step, left)
    _lane_weights(size, V, L, 1, left, g2, out)


# Lanes that elimination without exchanges is not to be trusted with


def _pivoted(c, V, lane, A, x):  # pragma: kernel
    """x becomes A^-1 x in one lane, where A is given by itself."""
    right = np.empty(c)
    for j in range(c):
        right[j] = V[x + j, lane]
    _solve(c, A, right)
    for j in range(c):
        V[x + j, lane] = right[j]


def _own_pivoted(size, V, least):  # pragma: kernel
    """(I - S M^T) STEP = g + S W^T g."""
    c = len(size)
    q = c * c
    M, S, status = L_M * q, L_S * q, _at(c, VECTORS) + L_STATUS
    step, trial, known = _at(c, L_STEP), _at(c, L_TRIAL), _at(c, L_KNOWN)
    A = np.empty((c, c))
    store(V, status, least)
    for lane in range(LANES):
        if not V[status, lane] > PIVOT:
            for i in range(c):
                V[step + i, lane] = V[known + i, lane]
                for j in range(c):
                    V[step + i, lane] += V[S + i * c + j, lane] * V[trial + j, lane]
                    A[i, j] = 1.0 if i == j else 0.0
                    for r in range(c):
                        A[i, j] -= V[S + i * c + r, lane] * V[M + j * c + r, lane]
            _pivoted(c, V, lane, A, step)


def _pair_pivoted(size, V, least):  # pragma: kernel
    """(I + S_1 B S_2 B^T) STEP = g_1 - S_1 B g_2."""
    c = len(size)
    q = c * c
    P, J, status = L_P * q, L_J * q, _at(c, VECTORS) + L_STATUS
    step, left, g1 = _at(c, L_STEP), _at(c, L_LEFT), _at(c, L_KNOWN)
    A = np.empty((c, c))
    store(V, status, least)
    for lane in range(LANES):
        if not V[status, lane] > PIVOT:
            for i in range(c):
                V[step + i, lane] = V[g1 + i, lane] - V[left + i, lane]
                for j in range(c):
                    A[i, j] = 1.0 if i == j else 0.0
                    for r in range(c):
                        A[i, j] += V[P + i * c + r, lane] * V[J + r * c + j, lane]
            _pivoted(c, V, lane, A, step)


# Into lanes, and out of them


def _block(number, B, which, same, of, at):  # pragma: kernel
    """Which of the agents or edges and which sample each lane has. How many lanes are in use.

    With `same`, lanes are samples of one agent, else agents one after the other.
    """
    if same:
        each = (B + LANES - 1) // LANES
        first = number % each * LANES
        count = min(LANES, B - first)
        for lane in range(LANES):
            of[lane], at[lane] = number // each, first + min(lane, count - 1)
        return count
    first = number * LANES
    count = min(LANES, B * len(which) - first)
    for lane in range(LANES):
        each = first + min(lane, count - 1)
        of[lane], at[lane] = each // B, each % B
    return count


def _put(V, row, X, of, same):  # pragma: kernel
    """Row of[lane] of X into each lane, from `row` on."""
    if same:
        for r in range(X.shape[1]):
            store(V, row + r, X[np.uint64(of[0]), np.uint64(r)])
    else:
        for lane in range(LANES):
            for r in range(X.shape[1]):
                put(V, row + r, lane, X[np.uint64(of[lane]), np.uint64(r)])


def _put_states(V, row, y, of, at, low, high):  # pragma: kernel
    """Columns low .. high of states (B, N, n) into lanes, from `row` on."""
    for lane in range(LANES):
        for j in range(low, high):
            x = y[np.uint64(at[lane]), np.uint64(of[lane]), np.uint64(j)]
            put(V, row + j - low, lane, x)


def _take_states(V, row, y, of, at, low, high, count, more):  # pragma: kernel
    """Out of lanes again: columns low .. high of states become those rows, or `more` by them."""
    for lane in range(count):
        s, i = np.uint64(at[lane]), np.uint64(of[lane])
        for j in range(low, high):
            x = get(V, row + j - low, lane)
            y[s, i, np.uint64(j)] = y[s, i, np.uint64(j)] + x if more else x


# What the lanes do not solve: delta = share G f, where f = K^T chord(z, z + K delta) and the first
# rows of K are linear, those of a plant. The lanes eliminate the plant, or one of two agents, which
# is quick; but rounding grows with the weights twice. Where that shows in the balance of the
# energy, or they do not arrive, both are solved for as one: Newton steps in the rows, whose
# equation I - K G K^T D has no inverse above 1 however stiff they are.


def _solve(n, A, x):  # pragma: kernel
    """x becomes A^-1 x by elimination with pivots; A is overwritten."""
    for k in range(n):
        p = k
        for i in range(k + 1, n):
            if abs(A[i, k]) > abs(A[p, k]):
                p = i
        if p != k:
            for j in range(k, n):
                A[k, j], A[p, j] = A[p, j], A[k, j]
            x[k], x[p] = x[p], x[k]
        pivot = 1 / A[k, k]
        for i in range(k + 1, n):
            factor = A[i, k] * pivot
            for j in range(k + 1, n):
                A[i, j] -= factor * A[k, j]
            x[i] -= factor * x[k]
    for k in range(n - 1, -1, -1):
        s = x[k]
        for j in range(k + 1, n):
            s -= A[k, j] * x[j]
        x[k] = s / A[k, k]


def _largest(x, low, high):  # pragma: kernel
    """The largest size of an entry; infinite if one is NaN."""
    most = 0.0
    for i in range(low, high):
        if not abs(x[i]) < np.inf:
            return np.inf
        most = max(most, abs(x[i]))
    return most


def _rows(K, linear, delta, v):  # pragma: kernel
    """The chords from z to z + K delta and their slopes, and f = K^T chords."""
    rows, n = K.shape
    for r in range(rows):
        s = 0.0
        for j in range(n):
            s += K[r, j] * delta[j]
        v[SHIFT, r] = s
        if r < linear:
            v[PHI, r], v[D, r] = v[Z, r] + 0.5 * s, 0.5
        else:
            v[PHI, r], v[D, r], _ = _chord(v[Z, r] + 0.5 * s, 0.5 * s)
    for j in range(n):
        v[F, j] = 0.0
    for r in range(rows):
        for j in range(n):
            v[F, j] += K[r, j] * v[PHI, r]


def _residual(K, G, linear, share, delta, v):  # pragma: kernel
    """What is left of the equation, and its largest entry."""
    n = K.shape[1]
    _rows(K, linear, delta, v)
    for i in range(n):
        s = 0.0
        for j in range(n):
            s += G[i, j] * v[F, j]
        v[LEFT, i] = delta[i] - share * s
    return _largest(v[LEFT], 0, n)


def _newton(K, G, linear, share, v, m):  # pragma: kernel
    """A Newton step into v[STEP]; true if it was the last, and delta is found."""
    (rows, n), X, J = K.shape, m[0], m[1]
    for r in range(rows):
        s = 0.0
        for j in range(n):
            s -= K[r, j] * v[LEFT, j]
        v[SHIFT, r] = s
        for k in range(rows):
            J[r, k] = -share * X[r, k] * v[D, k]
        J[r, r] += 1
    _solve(rows, J, v[SHIFT])
    last = _largest(v[SHIFT], linear, rows) <= LAST + ROUNDING * _largest(v[TERMS], linear, rows)
    for j in range(n):
        v[TRIAL, j] = 0.0
    for r in range(rows):
        for j in range(n):
            v[TRIAL, j] += K[r, j] * (v[D, r] * v[SHIFT, r])
    for i in range(n):
        s = 0.0
        for j in range(n):
            s += G[i, j] * v[TRIAL, j]
        v[STEP, i] = share * s - v[LEFT, i]
    if not last or not _largest(v[STEP], 0, n) < np.inf:
        return False
    for j in range(n):
        v[F, j] += v[TRIAL, j]
    for i in range(n):
        s = 0.0
        for j in range(n):
            s += G[i, j] * v[F, j]
        v[TRIAL, i] = share * s
        v[LEFT, i] = v[DELTA, i] + v[STEP, i] - v[TRIAL, i]
        v[SHIFT, i] = 0.0
        for j in range(n):
            v[SHIFT, i] += (G[i, j] + G[j, i]) * v[F, j]
    if not _same_energy(K, linear, v[TRIAL], v):
        return False
    for i in range(n):
        v[DELTA, i] = v[TRIAL, i]
    return True


def _same_energy(K, linear, delta, v):  # pragma: kernel
    """Whether chords that are right for delta + v[LEFT] break the balance by rounding only.

    The energy changes along delta; what is dissipated, -f^T G f, changes along v[SHIFT].
    """
    change, terms = 0.0, 0.0
    for r in range(K.shape[0]):
        s, t, moved = 0.0, 0.0, 0.0
        for j in range(K.shape[1]):
            s += K[r, j] * v[LEFT, j]
            t += K[r, j] * (delta[j] - v[SHIFT, j])
            moved += abs(K[r, j] * delta[j])  # chords that start at 0 have no others
        change += v[D, r] * abs(s * t)
        size = v[TERMS, r] + moved
        terms += 0.5 * size * size if r < linear else size
    return change <= BALANCE * terms


def _rounding(K, G, v):  # pragma: kernel
    """Whether what is left is rounding only: relative to all terms that it sums."""
    rows, n = K.shape
    for i in range(n):
        v[STEP, i] = abs(v[DELTA, i])
    for r in range(rows):
        x = abs(v[PHI, r]) + v[D, r] * v[TERMS, r]
        for j in range(n):
            for i in range(n):
                v[STEP, i] += abs(G[i, j]) * abs(K[r, j]) * x
    return _largest(v[LEFT], 0, n) <= ROUNDING * _largest(v[STEP], 0, n)


def _steps(K, G, linear, share, v, m):  # pragma: kernel
    """Damped Newton steps from v[DELTA] on; whether they arrived."""
    n = K.shape[1]
    left = _residual(K, G, linear, share, v[DELTA], v)
    for _ in range(NEWTON):
        if not left < np.inf:
            return False
        if _newton(K, G, linear, share, v, m):
            return True
        t, before = 1.0, left
        for _ in range(HALVINGS):
            for i in range(n):
                v[TRIAL, i] = v[DELTA, i] + t * v[STEP, i]
            left = _residual(K, G, linear, share, v[TRIAL], v)
            if left < (1 - 1e-4 * t) * before:
                break
            t *= 0.5
        for i in range(n):
            v[DELTA, i] = v[TRIAL, i]
        if not left < before:
            return _rounding(K, G, v)
    return False


def _found(K, G, linear, v, m):  # pragma: kernel
    """From v[DELTA] on; else along the curve of solutions for smaller steps h."""
    rows, n = K.shape
    for r in range(rows):
        for i in range(n):
            v[SHIFT, i] = 0.0
            for j in range(n):
                v[SHIFT, i] += K[r, j] * G[j, i]
        for k in range(rows):
            m[0, r, k] = 0.0
            for i in range(n):
                m[0, r, k] += v[SHIFT, i] * K[k, i]
    if _steps(K, G, linear, 1.0, v, m):
        return True
    v[KEPT] = 0
    share, step = 0.0, 0.25
    for _ in range(TRIES):
        if share >= 1:
            return True
        aim = min(1.0, share + step)
        v[DELTA] = v[KEPT]
        if _steps(K, G, linear, aim, v, m):
            v[KEPT] = v[DELTA]
            share, step = aim, 2 * step
        else:
            step *= 0.25
            if step < SMALLEST:
                return False
    return False


def _own_alone(size, V, lane, p, rows, whole):  # pragma: kernel
    """Plant and controller of the agent in a lane; from what is found on, if anything is."""
    (K, G, v, m), c = whole, len(size)
    z, s, _, _, _, _, _, _, _, A, a, G_, _ = _places(c, p, rows)
    x, delta, n = _at(c, L_X), _at(c, L_FOUND), p + c
    begun = V[_at(c, VECTORS) + L_STATUS, lane] == UNBALANCED
    K[:] = 0
    for r in range(rows):
        v[Z, r], v[TERMS, r] = V[a + r, lane], abs(V[a + r, lane])
        for j in range(p):
            K[r, j] = V[A + r * p + j, lane]
            v[Z, r] += K[r, j] * V[z + j, lane]
            v[TERMS, r] += abs(K[r, j] * V[z + j, lane])
    for r in range(c):
        v[Z, rows + r] = V[_at(c, L_Z) + r, lane]
        v[TERMS, rows + r] = abs(v[Z, rows + r])
        for j in range(c):
            K[rows + r, p + j] = V[r * c + j, lane]
            v[TERMS, rows + r] += abs(K[rows + r, p + j] * V[x + j, lane])
    for i in range(n):
        v[DELTA, i] = 0.0
        if begun:
            v[DELTA, i] = V[s + i, lane] if i < p else V[delta + i - p, lane]
        for j in range(n):
            G[i, j] = V[G_ + i * n + j, lane]
    if not _found(K, G, rows, v, m):
        return False
    for i in range(p):
        V[s + i, lane] = v[DELTA, i]
    for j in range(c):
        V[delta + j, lane] = v[DELTA, p + j]
    return True


def _pair_alone(size, V, lane, whole):  # pragma: kernel
    """Both agents of the edge in a lane."""
    (K, G, v, m), c = whole, len(size)
    B, found, other = L_B * c * c, _at(c, L_FOUND), _at(c, L_OTHER)
    K[:], G[:], v[DELTA] = 0, 0, 0
    for agent in range(2):
        x, low = _at(c, agent * AGENT), agent * c
        for r in range(c):
            v[Z, low + r] = V[x + c + r, lane]
            v[TERMS, low + r] = abs(v[Z, low + r])
            for j in range(c):
                K[low + r, low + j] = V[agent * L_M * c * c + r * c + j, lane]
                v[TERMS, low + r] += abs(K[low + r, low + j] * V[x + j, lane])
    for i in range(c):
        for j in range(c):
            G[i, c + j], G[c + j, i] = V[B + i * c + j, lane], -V[B + i * c + j, lane]
    if not _found(K, G, 0, v, m):
        return False
    for j in range(c):
        V[found + j, lane], V[other + j, lane] = v[DELTA, j], v[DELTA, c + j]
    return True


# Substeps: states are changed in place. y is all agents' (B, N, p + c).


def _aligned(rows):  # pragma: kernel
    """(rows, LANES) that begin at a multiple of their width, so that none is in two cache lines."""
    memory = np.zeros((rows + 1) * LANES)
    skipped = -(memory.ctypes.data // 8) % LANES
    return memory[skipped : skipped + rows * LANES].reshape(rows, LANES)


def _several(rows, n):  # pragma: kernel
    """Scratch memory for n unknowns that are solved for as one, in so many rows."""
    return (
        np.zeros((rows, n)),
        np.zeros((n, n)),
        np.zeros((ROWS, max(rows, n))),
        np.zeros((2, rows, rows)),
    )


def _room(c, p, rows):  # pragma: kernel
    """Scratch memory: lanes, totals, whose they are, plants; an agent, two, and two plants."""
    out = _places(c, p, rows)[12]
    sums = max(2 * c * c + 2 * c + 2 * c * p, 3 * c * c + 2 * c, p)
    V, T = (
        _aligned(out + (sums + LANES - 1) // LANES * LANES),
        _aligned((sums + LANES - 1) // LANES),
    )
    whose = np.zeros(LANES, dtype=np.int64), np.zeros(LANES, dtype=np.int64)
    return (
        V,
        T,
        whose,
        np.zeros((3, 2 * p)),
        _several(rows + c, p + c),
        _several(2 * c, 2 * c),
        _several(2 * rows, 2 * p),
    )


def _own_steps_of(size, y, agents, now, own, same, room):  # pragma: kernel
    """Agents by themselves in all samples, (B, N, n). The first that was not solved, or -1."""
    (K, b), (M, U, u, P, s0, W, G, A, a), (V, _, (of, at), _, whole, _, _) = now, own, room
    B, c = len(y), len(size)
    q, rows, p = c * c, a.shape[1], s0.shape[1]
    z, s, _, _, U_, u_, V_, v_, W_, A_, a_, G_, _ = _places(c, p, rows)
    single, known, found = _at(c, VECTORS), _at(c, L_KNOWN), _at(c, L_FOUND)
    blocks = len(agents) * ((B + LANES - 1) // LANES)
    if not same:
        blocks = (B * len(agents) + LANES - 1) // LANES
    for block in range(blocks):
        count = _block(block, B, agents, same, of, at)
        for lane in range(LANES):
            of[lane] = agents[of[lane]]
        _put(V, 0, K, of, same)
        _put(V, _at(c, L_Z), b, of, same)
        _put(V, L_M * q, M, of, same)
        _put(V, U_, U, of, same)
        _put(V, u_, u, of, same)
        _put(V, V_, P, of, same)
        _put(V, v_, s0, of, same)
        _put(V, W_, W, of, same)
        _put(V, A_, A, of, same)
        _put(V, a_, a, of, same)
        _put(V, G_, G, of, same)
        _put_states(V, z, y, of, at, 0, p)
        _put_states(V, _at(c, L_X), y, of, at, p, p + c)
        total, most = _lane_start(size, V, 0, 0)
        store(V, single + L_TERMS, total)
        store(V, single + L_CLOSE, most * ROUNDING + LANES_LAST)
        for j in range(c):
            x = load(V, u_ + j)
            for r in range(p):
                x = fused(load(V, U_ + j * p + r), load(V, z + r), x)
            store(V, known + j, x)
        _lane_own(size, K.shape[1] // c, V)
        _lane_plant(size, V, p, rows)
        for lane in range(count):
            if V[single + L_STATUS, lane] != ARRIVED and not _own_alone(
                size, V, lane, p, rows, whole
            ):
                return of[lane]
        _take_states(V, s, y, of, at, 0, p, count, True)
        _take_states(V, found, y, of, at, p, p + c, count, True)
    return -1


def _pair_steps_of(size, y, which, pairs, now, C, same, room):  # pragma: kernel
    """Edges that share no agent, in all samples. The first that was not solved, or -1."""
    (K, b), (V, _, (of, at), _, _, whole, _), c = now, room, len(size)
    B, p, q, other = len(y), y.shape[2] - c, c * c, np.zeros(LANES, dtype=np.int64)
    single, found, moved = _at(c, VECTORS), _at(c, L_FOUND), _at(c, L_OTHER)
    blocks = len(which) * ((B + LANES - 1) // LANES)
    if not same:
        blocks = (B * len(which) + LANES - 1) // LANES
    for block in range(blocks):
        count = _block(block, B, which, same, of, at)
        for lane in range(LANES):
            of[lane] = which[of[lane]]
        _put(V, L_B * q, C, of, same)
        edge = of[0]
        for lane in range(LANES):
            e = of[lane]
            of[lane], other[lane] = pairs[e, 0], pairs[e, 1]
        _put(V, 0, K, of, same)
        _put(V, _at(c, L_Z), b, of, same)
        _put_states(V, _at(c, L_X), y, of, at, p, p + c)
        _put(V, L_M * q, K, other, same)
        _put(V, _at(c, AGENT + L_Z), b, other, same)
        _put_states(V, _at(c, AGENT + L_X), y, other, at, p, p + c)
        total, most = _lane_start(size, V, 0, 0)
        _, more = _lane_start(size, V, L_M * q, 1)
        store(V, single + L_TERMS, total)
        most = where_less(most, more, more, most)
        store(V, single + L_CLOSE, most * ROUNDING + LANES_LAST)
        _lane_pair(size, K.shape[1] // c, V)
        for lane in range(count):
            if V[single + L_STATUS, lane] != ARRIVED and not _pair_alone(size, V, lane, whole):
                return edge if same else which[(block * LANES + lane) // B]
        _take_states(V, found, y, of, at, p, p + c, count, True)
        _take_states(V, moved, y, other, at, p, p + c, count, True)
    return -1


def _linear_step(y, pair, linear, A, a, line, whole):  # pragma: kernel
    """The plants of both agents of a pair along their edge: (z_i, z_k) += L (z_i, z_k) + c0.

    If that breaks the balance of the energy, as rounding does where plants are stiff, their rows
    are solved for: s_i = B f_k and s_k = -B^T f_i, with f from the rows at z + s / 2. Whether it
    was solved.
    """
    (L, c0, B), (z, s, f) = linear, (line[0], line[1], line[2])
    p = len(z) // 2
    for side in range(2):
        for j in range(p):
            z[side * p + j] = y[pair[side], j]
    for r in range(2 * p):
        s[r] = c0[r]
        for j in range(2 * p):
            s[r] += L[r, j] * z[j]
    terms, change = _linear_forces(pair, A, a, z, s, f), 0.0
    for r in range(p):
        left, other = s[r], s[p + r]
        for j in range(p):
            left -= B[r, j] * f[p + j]
            other += B[j, r] * f[j]
        change += f[r] * left + f[p + r] * other
    if not abs(change) <= BALANCE * terms and not _linear_alone(pair, B, A, a, z, s, whole):
        return False
    for side in range(2):
        for j in range(p):
            y[pair[side], j] += s[side * p + j]
    return True


def _linear_forces(pair, A, a, z, s, f):  # pragma: kernel
    """f = A^T (A (z + s / 2) + a) of both agents; the sum of the terms of their energies."""
    p, rows, terms = len(z) // 2, a.shape[1], 0.0
    for side in range(2):
        i, low = pair[side], side * p
        for j in range(p):
            f[low + j] = 0.0
        for r in range(rows):
            w, first = a[i, r], abs(a[i, r])
            last = first
            for j in range(p):
                row = A[i, r * p + j]
                w += row * (z[low + j] + 0.5 * s[low + j])
                first += abs(row * z[low + j])
                last += abs(row * (z[low + j] + s[low + j]))
            terms += 0.5 * (first * first + last * last)
            for j in range(p):
                f[low + j] += A[i, r * p + j] * w
    return terms


def _linear_alone(pair, B, A, a, z, s, whole):  # pragma: kernel
    """The increments of both plants as one equation of their rows, from s on."""
    (K, G, v, m), rows, p = whole, a.shape[1], len(B)
    K[:], G[:] = 0, 0
    for side in range(2):
        for r in range(rows):
            at, i = side * rows + r, pair[side]
            v[Z, at], v[TERMS, at] = a[i, r], abs(a[i, r])
            for j in range(p):
                row, x = A[i, r * p + j], z[side * p + j]
                K[at, side * p + j] = row
                v[Z, at] += row * x
                v[TERMS, at] += abs(row * x)
    for i in range(p):
        v[DELTA, i], v[DELTA, p + i] = s[i], s[p + i]
        for j in range(p):
            G[i, p + j], G[p + j, i] = B[i, j], -B[i, j]
    if not _found(K, G, 2 * rows, v, m):
        return False
    for i in range(2 * p):
        s[i] = v[DELTA, i]
    return True


# Backwards: g is the gradient in the states after a substep, and becomes that before it. Sums have
# a part for each group of samples: those that fill lanes, or each by itself.


def _add(out, V, at, T, low, lane):  # pragma: kernel
    """Add to a row of sums: of one lane from row `at` + `low` on, or the totals of all lanes."""
    for r in range(len(out)):
        out[r] += get(V, at + low + r, lane) if lane >= 0 else get(T, 0, low + r)


def _own_adjoint_of(size, kept, g, agents, now, own, same, found, room):  # pragma: kernel
    """Of agents by themselves, in all samples; kept: their states before and after, (B, A, n)."""
    (before, after), ((dK, db), (dM, dU, du, dW)) = kept, found
    (K, b), (M, U, _, P, s0, W, _, _, a), (V, T, (of, at), _, _, _, _) = now, own, room
    B, c, p = len(g), len(size), s0.shape[1]
    q, x, delta, known = c * c, _at(c, L_X), _at(c, L_DELTA), _at(c, L_KNOWN)
    z, gp, new, _, U_, _, V_, _, W_, _, _, _, out = _places(c, p, a.shape[1])
    sums = 2 * q + 2 * c + 2 * c * p
    blocks = len(agents) * ((B + LANES - 1) // LANES)
    if not same:
        blocks = (B * len(agents) + LANES - 1) // LANES
    for block in range(blocks):
        count = _block(block, B, agents, same, of, at)
        _put_states(V, z, before, of, at, 0, p)
        _put_states(V, x, before, of, at, p, p + c)
        _put_states(V, delta, after, of, at, p, p + c)
        for j in range(c):
            store(V, delta + j, load(V, delta + j) - load(V, x + j))
        for lane in range(LANES):
            of[lane] = agents[of[lane]]
        _put_states(V, gp, g, of, at, 0, p)
        _put_states(V, known, g, of, at, p, p + c)
        for lane in range(count, LANES):
            V[gp : gp + p, lane], V[known : known + c, lane] = 0.0, 0.0
        _put(V, 0, K, of, same)
        _put(V, _at(c, L_Z), b, of, same)
        _put(V, L_M * q, M, of, same)
        _put(V, U_, U, of, same)
        _put(V, V_, P, of, same)
        _put(V, W_, W, of, same)
        _lane_start(size, V, 0, 0)
        _lane_own_adjoint(size, K.shape[1] // c, V, p, a.shape[1])
        _take_states(V, new, g, of, at, 0, p, count, False)
        _take_states(V, known, g, of, at, p, p + c, count, False)
        if same:
            for k in range((sums + LANES - 1) // LANES):
                store(T, k, totals(V, out + k * LANES))
        for lane in range(-1 if same else 0, 0 if same else count):
            one = of[max(lane, 0)]
            group = at[0] // LANES if same else at[lane]
            _add(dK[group, one], V, out, T, 0, lane)
            _add(db[group, one], V, out, T, q, lane)
            _add(dM[group, one], V, out, T, q + c, lane)
            _add(dU[group, one], V, out, T, 2 * q + c, lane)
            _add(du[group, one], V, out, T, 2 * q + c + c * p, lane)
            _add(dW[group, one], V, out, T, 2 * q + 2 * c + c * p, lane)


def _pair_adjoint_of(size, kept, g, which, pairs, now, C, same, found, room):  # pragma: kernel
    """Of edges that share no agent; kept: both ends before and after, (B, E, 2 c)."""
    (before, after), ((dK, db), dC) = kept, found
    (K, b), (V, T, (of, at), _, _, _, _) = now, room
    B, c = len(g), len(size)
    p, q, other = g.shape[2] - c, c * c, np.zeros(LANES, dtype=np.int64)
    edges, g1, g2 = np.zeros(LANES, dtype=np.int64), _at(c, L_KNOWN), _at(c, L_TRIAL)
    out, sums = _at(c, VECTORS) + SINGLE, 3 * q + 2 * c
    blocks = len(which) * ((B + LANES - 1) // LANES)
    if not same:
        blocks = (B * len(which) + LANES - 1) // LANES
    for block in range(blocks):
        count = _block(block, B, which, same, of, at)
        for agent in range(2):
            x, low = _at(c, agent * AGENT), agent * c
            delta = x + L_DELTA * c
            _put_states(V, x, before, of, at, low, low + c)
            _put_states(V, delta, after, of, at, low, low + c)
            for j in range(c):
                store(V, delta + j, load(V, delta + j) - load(V, x + j))
        for lane in range(LANES):
            e = which[of[lane]]
            edges[lane], of[lane], other[lane] = e, pairs[e, 0], pairs[e, 1]
        _put_states(V, g1, g, of, at, p, p + c)
        _put_states(V, g2, g, other, at, p, p + c)
        for lane in range(count, LANES):
            V[g1 : g1 + c, lane], V[g2 : g2 + c, lane] = 0.0, 0.0
        _put(V, L_B * q, C, edges, same)
        _put(V, 0, K, of, same)
        _put(V, _at(c, L_Z), b, of, same)
        _put(V, L_M * q, K, other, same)
        _put(V, _at(c, AGENT + L_Z), b, other, same)
        _lane_start(size, V, 0, 0)
        _lane_start(size, V, L_M * q, 1)
        _lane_pair_adjoint(size, K.shape[1] // c, V, out)
        _take_states(V, g1, g, of, at, p, p + c, count, False)
        _take_states(V, g2, g, other, at, p, p + c, count, False)
        if same:
            for k in range((sums + LANES - 1) // LANES):
                store(T, k, totals(V, out + k * LANES))
        for lane in range(-1 if same else 0, 0 if same else count):
            one = max(lane, 0)
            group = at[0] // LANES if same else at[lane]
            _add(dK[group, of[one]], V, out, T, 0, lane)
            _add(db[group, of[one]], V, out, T, q, lane)
            _add(dK[group, other[one]], V, out, T, q + c, lane)
            _add(db[group, other[one]], V, out, T, 2 * q + c, lane)
            _add(dC[group, edges[one]], V, out, T, 2 * q + 2 * c, lane)


def _linear_adjoint(g, i, k, L, line):  # pragma: kernel
    """Of the substep of the plants of agents i and k: g += L^T g."""
    p = L.shape[0] // 2
    for j in range(2 * p):
        s = 0.0
        for r in range(p):
            s += L[r, j] * g[i, r] + L[p + r, j] * g[k, r]
        line[j] = s
    for r in range(p):
        g[i, r] += line[r]
        g[k, r] += line[p + r]


# All steps, or a phase of one for some agents or edges: `chosen` are the numbers of agents, of
# edges of plants and of edges, and where the colours of the latter begin, and end. Sums over
# samples and time are taken step by step, and in a step phase by phase: both give the same bits.


def _copied(x, states, t, p):  # pragma: kernel
    """x (B, N, c) becomes the states of controllers at time t."""
    for s in range(x.shape[0]):
        for i in range(x.shape[1]):
            for j in range(x.shape[2]):
                x[s, i, j] = states[s, t, i, p + j]


def forward(
    size, y, first, chosen, weights, own, plant, links, same, kept, failed
):  # pragma: kernel
    """Steps from step `first` on; y (B, N, n) changes in place. Writes what failed.

    weights: K (T, N, c c) and b; own: the matrices of agents by themselves; plant and links: edges
    (E, 2) and matrices. With `same`, lanes are samples of one agent. kept: states
    (B, steps + 1, N, n), the other end of the agents' own substeps (B, steps, N, n), and
    controllers at both ends of edges before their substeps; all but the number of steps is kept if
    there is room.
    """
    (agents, plant_which, which, cuts), (K, b), (states, mids, before) = chosen, weights, kept
    (plant_pairs, L, c0, couplings), (pairs, C) = plant, links
    B, (T, c), P, colours = len(y), (len(K), b.shape[2]), len(plant_which), len(cuts) - 1
    p = y.shape[2] - c
    room, whole, keep = _room(c, p, own[8].shape[1]), states.shape[0] > 0, before.shape[0] > 0
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
                lost = _own_steps_of(size, y, agents, now, own, same, room)
                if lost >= 0:
                    failed[:] = (1, t, lost)
                    return
                if whole and not turn:
                    mids[:, t] = y
            elif e <= P:
                a = plant_which[e - 1]
                linear, both = (L[a], c0[a], couplings[a]), plant_pairs[a]
                for s in range(B):
                    if not _linear_step(y[s], both, linear, own[7], own[8], room[3], room[6]):
                        failed[:] = (3, t, a)
                        return
            else:
                now_which = which[cuts[e - P - 1] : cuts[e - P]]
                if keep:
                    for s in range(B):
                        for a in now_which:
                            before[s, t, a, :c] = y[s, pairs[a, 0], p:]
                            before[s, t, a, c:] = y[s, pairs[a, 1], p:]
                lost = _pair_steps_of(size, y, now_which, pairs, now, C, same, room)
                if lost >= 0:
                    failed[:] = (2, t, lost)
                    return
        if whole:
            states[:, t + 1] = y


def backward(
    size, g, first, chosen, weights, own, plant, links, same, kept, grads, found
):  # pragma: kernel
    """From gradients after these steps, g (B, N, n), to those before them, in place.

    kept: as `forward` does; and both ends of edges after their substeps, where they are not to be
    found in the states. `grads` are added to g at their time, if there are any. Gradients of K and
    b, of M, U, u and W, and of the matrices of links are added to `found`, which has a part for
    each group of samples: as many as there are lanes if they are the same agent's, else 1.
    """
    (agents, plant_which, which, cuts), (K, b), (to_weights, to_own, dC) = chosen, weights, found
    (plant_pairs, L, _, _), (pairs, C), (dK, db) = plant, links, to_weights
    states, mids, before, given = kept
    B, (T, c), P, colours = len(g), (len(K), b.shape[2]), len(plant_which), len(cuts) - 1
    p, whole = g.shape[2] - c, given.shape[0] == 0
    room = _room(c, p, own[8].shape[1])
    x = np.zeros((B, g.shape[1] if whole else 0, c))
    after = np.zeros((B, len(which) if whole else 0, 2 * c))
    for t in range(mids.shape[1] - 1, -1, -1):
        at, turn = min(first + t, T - 1), (first + t) % 2
        now, to_now = (K[at], b[at]), (dK[:, at], db[:, at])
        if whole:
            _copied(x, mids, t, p) if turn else _copied(x, states, t + 1, p)
        for phase in range(P + colours, -1, -1):
            e = P + colours - phase if turn else phase
            if e == 0:
                ours = (mids[:, t], states[:, t + 1]) if turn else (states[:, t], mids[:, t])
                sums = to_now, to_own
                _own_adjoint_of(size, ours, g, agents, now, own, same, sums, room)
            elif e <= P:
                a = plant_which[e - 1]
                for s in range(B):
                    _linear_adjoint(g[s], plant_pairs[a, 0], plant_pairs[a, 1], L[a], room[3][0])
            else:
                low, high = cuts[e - P - 1], cuts[e - P]
                if whole:
                    for s in range(B):
                        for a in range(low, high):
                            i, k, y = pairs[a, 0], pairs[a, 1], before[s, t, a]
                            for j in range(c):
                                after[s, a, j], after[s, a, c + j] = x[s, i, j], x[s, k, j]
                                x[s, i, j], x[s, k, j] = y[j], y[c + j]
                ends_of = after if whole else given
                ours, sums = (before[:, t, low:high], ends_of[:, low:high]), (to_now, dC)
                _pair_adjoint_of(size, ours, g, which[low:high], pairs, now, C, same, sums, room)
        if len(grads):
            g += grads[:, t]
