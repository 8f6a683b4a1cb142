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

PARTS = (
    *("_chord", "_times", "_times_T", "_product", "_rows", "_slopes", "_solve", "_largest"),
    *(
        "_product_T",
        "_own_residual",
        "_own_newton",
        "_same_energy",
        "_rounding",
        "_own_steps",
        "_found",
    ),
    *("_pair_residual", "_pair_newton", "_pair_steps", "_joined", "_start", "_own_step"),
    *("_several", "_balanced", "_alone", "_pair_step", "_linear_step", "_to_weights", "_room"),
    *("_own_adjoint", "_pair_adjoint", "_linear_adjoint"),
)
WHOLE = ("eliminate", "eliminate_adjoint", "forward", "backward")
PHASES = ("own", "plant_edges", "edges", "own_adjoint", "plant_edges_adjoint", "edges_adjoint")


@cache
def compiled(njit: Callable[[Any], Any]) -> dict[str, Any]:
    """Whole runs, and phases of steps one by one, compiled."""
    here = globals()
    for name in PARTS:
        here[name] = njit(here[name])
    return {name: njit(here[name]) for name in (*WHOLE, *PHASES)}


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


# delta = share (k + L delta + M f), f = K^T chord(z, z + K delta); L may be None. An agent by
# itself is that with L = None once its plant is eliminated, which is quick; but rounding grows with
# the weights twice: where that shows in the balance of the energy, both are solved for as one.


def _own_residual(size, K, M, L, share, delta, v):  # pragma: kernel
    """What is left of the equation, and its largest entry."""
    _rows(size, K, delta, v)
    _times(size, M, v[F], v[LEFT])
    if L is not None:
        _times(size, L, delta, v[SHIFT])
        for i in range(len(size)):
            v[LEFT, i] += v[SHIFT, i]
    for i in range(len(size)):
        v[LEFT, i] = delta[i] - share * (v[KNOWN, i] + v[LEFT, i])
    return _largest(size, v[LEFT])


def _own_newton(size, K, M, L, share, v, m):  # pragma: kernel
    """A Newton step into v[STEP]; true if it was the last, and delta and f are found."""
    c, S, J = len(size), m[0], m[1]
    _slopes(size, K, v[D], S)
    _product(size, M, S, J)
    for i in range(c):
        for j in range(c):
            if L is not None:
                J[i, j] += L[i, j]
            J[i, j] *= -share
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
    if L is not None:
        _times(size, L, v[LEFT], v[SHIFT])
        for i in range(c):
            v[TRIAL, i] += v[SHIFT, i]
    for i in range(c):
        v[TRIAL, i] = share * (v[KNOWN, i] + v[TRIAL, i])
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
        change += v[D, r] * abs(s * t)
        terms += v[TERMS, r]
    return change <= BALANCE * terms


def _rounding(size, K, M, L, v):  # pragma: kernel
    """Whether what is left is rounding only: relative to all terms that it sums."""
    c = len(size)
    for i in range(c):
        v[STEP, i] = abs(v[DELTA, i]) + abs(v[KNOWN, i])
        if L is not None:
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


# Two agents along an edge: d = B f_2, e = -B^T f_1. It is solved for d; v is of agent 1. That is
# quick, but rounding grows with the weights twice: where it fails, both are solved for as one.


def _pair_residual(size, K, L, B, d, v, w):  # pragma: kernel
    """What is left of d = B f_2, where e follows from d; and its largest entry."""
    _rows(size, K, d, v)
    _times_T(size, B, v[F], w[DELTA])
    for j in range(len(size)):
        w[DELTA, j] = -w[DELTA, j]
    _rows(size, L, w[DELTA], w)
    _times(size, B, w[F], v[LEFT])
    for i in range(len(size)):
        v[LEFT, i] = d[i] - v[LEFT, i]
    return _largest(size, v[LEFT])


def _pair_newton(size, K, L, B, v, w, m):  # pragma: kernel
    """A Newton step into v[STEP]; true if it was the last, and d, e and both f are found."""
    c, S, J, P = len(size), m[0], m[1], m[2]
    _slopes(size, L, w[D], S)
    _product(size, B, S, P)
    _product_T(size, P, B, S)
    _slopes(size, K, v[D], P)
    _product(size, S, P, J)
    for i in range(c):
        J[i, i] += 1
        v[STEP, i] = -v[LEFT, i]
    _solve(size, J, v[STEP])
    close = LAST + ROUNDING * max(_largest(size, v[TERMS]), _largest(size, w[TERMS]))
    _times(size, K, v[STEP], v[SHIFT])
    if not _largest(size, v[SHIFT]) <= close:
        return False
    for r in range(c):
        w[STEP, r] = v[PHI, r] + v[D, r] * v[SHIFT, r]
    _times_T(size, K, w[STEP], v[TRIAL])  # f_1
    _times_T(size, B, v[TRIAL], w[TRIAL])  # -e
    for j in range(c):
        w[STEP, j] = -w[TRIAL, j] - w[DELTA, j]
    _times(size, L, w[STEP], w[SHIFT])
    if not _largest(size, w[SHIFT]) <= close:
        return False
    for r in range(c):
        w[PHI, r] += w[D, r] * w[SHIFT, r]
    _times_T(size, L, w[PHI], w[F])
    _times(size, B, w[F], w[STEP])  # d
    for i in range(c):
        v[LEFT, i], v[SHIFT, i] = v[DELTA, i] + v[STEP, i] - w[STEP, i], 0.0
    if not _same_energy(size, K, w[STEP], v):
        return False
    for j in range(c):
        v[F, j], v[DELTA, j], w[DELTA, j] = v[TRIAL, j], w[STEP, j], -w[TRIAL, j]
    return True


def _pair_steps(size, K, L, B, v, w, m):  # pragma: kernel
    """Damped Newton steps from v[DELTA] on; whether they arrived."""
    left = _pair_residual(size, K, L, B, v[DELTA], v, w)
    for _ in range(NEWTON):
        if not left < np.inf:
            return False
        if _pair_newton(size, K, L, B, v, w, m):
            return True
        t, before = 1.0, left
        for _ in range(HALVINGS):
            for i in range(len(size)):
                v[TRIAL, i] = v[DELTA, i] + t * v[STEP, i]
            left = _pair_residual(size, K, L, B, v[TRIAL], v, w)
            if left < (1 - 1e-4 * t) * before:
                break
            t *= 0.5
        if not left < before:
            return False
        for i in range(len(size)):
            v[DELTA, i] = v[TRIAL, i]
    return False


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
    """Scratch memory of one agent, another, matrices; of plants; of a whole agent and of two."""
    v, w, m = np.zeros((ROWS, c)), np.zeros((ROWS, c)), np.zeros((3, c, c))
    return v, w, m, np.zeros((3, 2 * p)), _several(p + c), _several(2 * c)


def _own_step(size, y, i, now, own, room):  # pragma: kernel
    """Agent i by itself: z' = z + V z + v + W f, x' = x + U z + u + M f. Whether it was solved."""
    (K, b), (M, U, u, V, c0, W, G, Q, q) = now, own
    v, _, m, line, whole, _ = room
    c, p = len(size), V.shape[1]
    _start(size, K[i], b[i], y[p:], v)
    for j in range(c):
        v[KNOWN, j] = u[i, j]
        for r in range(p):
            v[KNOWN, j] += U[i, j, r] * y[r]
        v[DELTA, j] = 0.0
    found = _own_steps(size, K[i], M[i], None, 1.0, v, m)
    if found:
        for r in range(p):
            s = c0[i, r]
            for j in range(p):
                s += V[i, r, j] * y[j]
            for j in range(c):
                s += W[i, r, j] * v[F, j]
            line[0, r] = s
    solved = found and _balanced(size, y, G[i], Q[i], q[i], v, line)
    if not (solved or _alone(size, y, K[i], G[i], Q[i], q[i], v, line, whole, found)):
        return False
    for r in range(p):
        y[r] += line[0, r]
    for j in range(c):
        y[p + j] += v[DELTA, j]
    return True


def _balanced(size, y, G, Q, q, v, line):  # pragma: kernel
    """Whether what is left of x' = x + G f changes the energy by rounding only: f^T of it."""
    c, p = len(size), Q.shape[0]
    terms, change = 0.0, 0.0
    for r in range(c):
        terms += v[TERMS, r]
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


def _pair_step(size, y, i, k, now, B, room):  # pragma: kernel
    """The controllers of agents i and k along their edge. Whether it was solved."""
    (K, b), (v, w, m, _, _, whole) = now, room
    c = len(size)
    p = y.shape[1] - c
    _start(size, K[i], b[i], y[i, p:], v)
    _start(size, K[k], b[k], y[k, p:], w)
    for j in range(c):
        v[DELTA, j] = 0.0
    if not (_pair_steps(size, K[i], K[k], B, v, w, m) or _joined(size, K[i], K[k], B, v, w, whole)):
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


def _own_adjoint(size, i, y, x, g, now, own, to_now, to_own, room):  # pragma: kernel
    """Of the substep of agent i by itself from y to x."""
    (K, b), (M, U, _, V, _, W, _, _, _) = now, own
    (dK, db), (dM, dU, du, dW), (v, _, m, _, _, _) = to_now, to_own, room
    line = room[3][0]
    c, p, A, S = len(size), V.shape[1], m[0], m[1]
    _start(size, K[i], b[i], y[p:], v)
    for j in range(c):
        v[DELTA, j] = x[p + j] - y[p + j]
    _rows(size, K[i], v[DELTA], v)
    _slopes(size, K[i], v[D], S)
    for j in range(c):
        v[TRIAL, j] = 0.0
        for r in range(p):
            v[TRIAL, j] += W[i, r, j] * g[r]
    _times(size, S, v[TRIAL], v[STEP])
    for j in range(c):  # (I - S M^T) STEP = g + S W^T g
        for k in range(c):
            s = 0.0
            for r in range(c):
                s += S[j, r] * M[i, k, r]
            A[j, k] = -s
        A[j, j] += 1
        v[STEP, j] += g[p + j]
    _solve(size, A, v[STEP])
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


def _pair_adjoint(size, i, k, y, x, g, now, B, to_now, dB, room):  # pragma: kernel
    """Of the substep of the controllers of agents i and k from y to x."""
    (K, b), (dK, db), (v, w, m, _, _, _) = now, to_now, room
    c, S, P, A = len(size), m[0], m[1], m[2]
    p = g.shape[1] - c
    _start(size, K[i], b[i], y[:c], v)
    _start(size, K[k], b[k], y[c:], w)
    for j in range(c):
        v[DELTA, j], w[DELTA, j] = x[j] - y[j], x[c + j] - y[c + j]
    _rows(size, K[i], v[DELTA], v)
    _rows(size, K[k], w[DELTA], w)
    _slopes(size, K[i], v[D], A)
    _product(size, A, B, P)
    _times(size, P, g[k, p:], v[LEFT])
    _slopes(size, K[k], w[D], S)
    _product_T(size, S, B, A)
    _product(size, P, A, S)
    for j in range(c):  # (I + S_1 B S_2 B^T) STEP = g_1 - S_1 B g_2
        S[j, j] += 1
        v[STEP, j] = g[i, p + j] - v[LEFT, j]
    _solve(size, S, v[STEP])
    _times(size, A, v[STEP], w[STEP])
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


# Whole runs. Sums over samples and time are taken step by step, and in a step phase by phase, so
# that phases that are run one by one give the same bits.


def forward(size, y0, first, weights, own, plant, links, kept, failed):  # pragma: kernel
    """All steps of all samples from step `first` on; writes what is kept, or what failed.

    weights: K (T, N, c, c) and b; own: the matrices of agents by themselves; plant and links:
    edges (E, 2) and matrices. kept: states (B, steps + 1, N, n), the other end of the agents' own
    substeps (B, steps, N, n), and controllers at both ends of edges before their substeps, if
    there is room.
    """
    (K, b), (plant_pairs, L, c0), (pairs, C) = weights, plant, links
    states, mids, before = kept
    (B, N, n), (T, c), keep = y0.shape, (K.shape[0], K.shape[2]), before.shape[0] > 0
    p, P, E_ = n - c, plant_pairs.shape[0], pairs.shape[0]
    room, y = _room(c, p), y0.copy()
    states[:, 0] = y
    for t in range(mids.shape[1]):
        at, turn = min(first + t, T - 1), (first + t) % 2
        now = K[at], b[at]
        for phase in range(P + E_ + 1):
            e = P + E_ - phase if turn else phase  # 0: agents by themselves; then edges
            if e == 0:
                if turn:
                    mids[:, t] = y
                for i in range(N):
                    for s in range(B):
                        if not _own_step(size, y[s, i], i, now, own, room):
                            failed[:] = (1, t, i)
                            return
                if not turn:
                    mids[:, t] = y
            elif e <= P:
                i, k = plant_pairs[e - 1, 0], plant_pairs[e - 1, 1]
                for s in range(B):
                    _linear_step(y[s], i, k, L[e - 1], c0[e - 1], room)
            else:
                e -= P + 1
                i, k = pairs[e, 0], pairs[e, 1]
                for s in range(B):
                    if keep:
                        before[s, t, e, :c], before[s, t, e, c:] = y[s, i, p:], y[s, k, p:]
                    if not _pair_step(size, y[s], i, k, now, C[e], room):
                        failed[:] = (2, t, e)
                        return
        states[:, t + 1] = y


def backward(size, grads, first, weights, own, plant, links, kept, found):  # pragma: kernel
    """From the gradients in all states to those in the first, and in weights and matrices.

    Gradients are added to what `found` holds: of K and b, of M, U, u and W, and of the matrices of
    links; its last part are those in the first states, (B, N, n), which are written.
    """
    (K, b), (plant_pairs, L, _), (pairs, C) = weights, plant, links
    states, mids, before = kept
    (dK, db), to_own, dC, g = found
    (B, _, N, n), (T, c), steps = states.shape, (K.shape[0], K.shape[2]), mids.shape[1]
    p, P, E_ = n - c, plant_pairs.shape[0], pairs.shape[0]
    room, x, after = _room(c, p), np.zeros((B, N, n)), np.zeros(2 * c)
    g[:] = grads[:, steps]
    for t in range(steps - 1, -1, -1):
        at, turn = min(first + t, T - 1), (first + t) % 2
        now, to_now = (K[at], b[at]), (dK[at], db[at])
        x[:] = mids[:, t] if turn else states[:, t + 1]
        for phase in range(P + E_, -1, -1):
            e = P + E_ - phase if turn else phase
            if e == 0:
                for i in range(N):
                    for s in range(B):
                        start, mid, end = states[s, t, i], mids[s, t, i], states[s, t + 1, i]
                        y, z = (mid, end) if turn else (start, mid)
                        _own_adjoint(size, i, y, z, g[s, i], now, own, to_now, to_own, room)
            elif e <= P:
                i, k = plant_pairs[e - 1, 0], plant_pairs[e - 1, 1]
                for s in range(B):
                    _linear_adjoint(g[s], i, k, L[e - 1], room)
            else:
                e -= P + 1
                i, k = pairs[e, 0], pairs[e, 1]
                for s in range(B):
                    y = before[s, t, e]
                    after[:c], after[c:] = x[s, i, p:], x[s, k, p:]
                    _pair_adjoint(size, i, k, y, after, g[s], now, C[e], to_now, dC[e], room)
                    x[s, i, p:], x[s, k, p:] = y[:c], y[c:]
        g += grads[:, t]


# Phases of a step one by one, for some of the agents or edges. y and g are (B, N, n). Samples of a
# group share sums: `found` has a part for each group, which ends before sample `ends[j]`.


def own(size, y, agents, now, matrices, kept, failed):  # pragma: kernel
    """Agents by themselves; keeps their states before and after, (B, A, n) each."""
    before, after = kept
    c = len(size)
    room = _room(c, y.shape[2] - c)
    for a in range(len(agents)):
        i = agents[a]
        for s in range(len(y)):
            before[s, a] = y[s, i]
            if not _own_step(size, y[s, i], i, now, matrices, room):
                failed[:] = (1, 0, i)
                return
            after[s, a] = y[s, i]


def own_adjoint(size, g, agents, now, matrices, kept, ends, found):  # pragma: kernel
    """Of `own`: g changes in place, sums are added to `found`."""
    (before, after), ((dK, db), (dM, dU, du, dW)) = kept, found
    c = len(size)
    room = _room(c, g.shape[2] - c)
    for a in range(len(agents)):
        i, j = agents[a], 0
        for s in range(len(g)):
            if s >= ends[j]:
                j += 1
            y, x, to_own = before[s, a], after[s, a], (dM[j], dU[j], du[j], dW[j])
            _own_adjoint(size, i, y, x, g[s, i], now, matrices, (dK[j], db[j]), to_own, room)


def plant_edges(y, which, pairs, L, c0):  # pragma: kernel
    """Plants at both ends of the edges `which`."""
    room = _room(0, L.shape[1] // 2)
    for e in which:
        i, k = pairs[e, 0], pairs[e, 1]
        for s in range(len(y)):
            _linear_step(y[s], i, k, L[e], c0[e], room)


def plant_edges_adjoint(g, which, pairs, L):  # pragma: kernel
    """Of `plant_edges`: g changes in place."""
    room = _room(0, L.shape[1] // 2)
    for e in which:
        i, k = pairs[e, 0], pairs[e, 1]
        for s in range(len(g)):
            _linear_adjoint(g[s], i, k, L[e], room)


def edges(size, y, which, pairs, now, C, kept, failed):  # pragma: kernel
    """Controllers at both ends of the edges `which`; keeps them before and after, (B, E, 2 c)."""
    before, after = kept
    c = len(size)
    p = y.shape[2] - c
    room = _room(c, p)
    for a in range(len(which)):
        e = which[a]
        i, k = pairs[e, 0], pairs[e, 1]
        for s in range(len(y)):
            before[s, a, :c], before[s, a, c:] = y[s, i, p:], y[s, k, p:]
            if not _pair_step(size, y[s], i, k, now, C[e], room):
                failed[:] = (2, 0, e)
                return
            after[s, a, :c], after[s, a, c:] = y[s, i, p:], y[s, k, p:]


def edges_adjoint(size, g, which, pairs, now, C, kept, ends, found):  # pragma: kernel
    """Of `edges`: g changes in place, sums are added to `found`."""
    (before, after), ((dK, db), dC) = kept, found
    c = len(size)
    room = _room(c, g.shape[2] - c)
    for a in range(len(which)):
        e, j = which[a], 0
        i, k = pairs[e, 0], pairs[e, 1]
        for s in range(len(g)):
            if s >= ends[j]:
                j += 1
            y, x, to_now = before[s, a], after[s, a], (dK[j], db[j])
            _pair_adjoint(size, i, k, y, x, g[s], now, C[e], to_now, dC[j, e], room)
