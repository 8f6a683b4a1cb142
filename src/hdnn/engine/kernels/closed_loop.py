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
SMALLEST = 1e-5  # step along the curve of solutions with smaller h, where Newton fails at first

# `size` is a tuple of c entries, so that loops have a length that is known when they are compiled;
# or an array of that length.

# Rows of scratch memory, of c numbers each: where the chords start and what that sums, the chords,
# their slopes in both ends, f = K^T chords; the increment, what of it is known, and what is left.
Z, TERMS, PHI, D, E, F, DELTA, KNOWN, LEFT, SHIFT, STEP, TRIAL, KEPT = range(13)
ROWS = 13

PARTS = (
    *("_chord", "_times", "_times_T", "_product", "_rows", "_slopes", "_solve", "_largest"),
    *("_product_T", "_own_residual", "_own_newton", "_rounding", "_own_steps", "_found"),
    *("_pair_residual", "_pair_newton", "_pair_steps", "_joined", "_start", "_own_step"),
    *("_pair_step", "_linear_step", "_to_weights"),
    *("_own_adjoint", "_pair_adjoint", "_linear_adjoint"),
)


@cache
def compiled(njit: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Forwards and backwards, compiled."""
    here = globals()
    for name in PARTS:
        here[name] = njit(here[name])
    return njit(_forward), njit(_backward)


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


# An agent by itself: delta = share (k + M f), f = K^T chord(z, z + K delta)


def _own_residual(size, K, M, share, delta, v):  # pragma: kernel
    """What is left of delta = share (k + M f), and its largest entry."""
    _rows(size, K, delta, v)
    _times(size, M, v[F], v[LEFT])
    for i in range(len(size)):
        v[LEFT, i] = delta[i] - share * (v[KNOWN, i] + v[LEFT, i])
    return _largest(size, v[LEFT])


def _own_newton(size, K, M, share, v, m):  # pragma: kernel
    """A Newton step into v[STEP]; true if it was the last, and delta and f are found."""
    c, S, J = len(size), m[0], m[1]
    _slopes(size, K, v[D], S)
    _product(size, M, S, J)
    for i in range(c):
        for j in range(c):
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
    _times(size, M, v[F], v[DELTA])
    for i in range(c):
        v[DELTA, i] = share * (v[KNOWN, i] + v[DELTA, i])
    return True


def _rounding(size, K, M, v):  # pragma: kernel
    """Whether what is left is rounding only: relative to all terms that it sums."""
    c = len(size)
    for i in range(c):
        v[STEP, i] = abs(v[DELTA, i]) + abs(v[KNOWN, i])
    for r in range(c):
        x = abs(v[PHI, r]) + v[D, r] * v[TERMS, r]
        for j in range(c):
            for i in range(c):
                v[STEP, i] += abs(M[i, j]) * abs(K[r, j]) * x
    return _largest(size, v[LEFT]) <= ROUNDING * _largest(size, v[STEP])


def _own_steps(size, K, M, share, v, m):  # pragma: kernel
    """Damped Newton steps from v[DELTA] on; whether they arrived."""
    left = _own_residual(size, K, M, share, v[DELTA], v)
    for _ in range(NEWTON):
        if not left < np.inf:
            return False
        if _own_newton(size, K, M, share, v, m):
            return True
        t, before = 1.0, left
        for _ in range(HALVINGS):
            for i in range(len(size)):
                v[TRIAL, i] = v[DELTA, i] + t * v[STEP, i]
            left = _own_residual(size, K, M, share, v[TRIAL], v)
            if left < (1 - 1e-4 * t) * before:
                break
            t *= 0.5
        for i in range(len(size)):
            v[DELTA, i] = v[TRIAL, i]
        if not left < before:
            return _rounding(size, K, M, v)
    return False


def _found(size, K, M, v, m):  # pragma: kernel
    """v[DELTA] from 0 on; else along the curve of solutions for smaller steps h."""
    if _own_steps(size, K, M, 1.0, v, m):
        return True
    v[KEPT] = 0
    share, step = 0.0, 0.25
    while share < 1:
        aim = min(1.0, share + step)
        v[DELTA] = v[KEPT]
        if _own_steps(size, K, M, aim, v, m):
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
        v[LEFT, i] = w[STEP, i] - v[DELTA, i] - v[STEP, i]
    _times(size, K, v[LEFT], v[SHIFT])
    if not _largest(size, v[SHIFT]) <= close:
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
    c, (K2, M, u, m) = len(size), whole
    K2[:], M[:], u[DELTA], u[KNOWN] = 0, 0, 0, 0
    for i in range(c):
        u[Z, i], u[Z, c + i] = v[Z, i], w[Z, i]
        u[TERMS, i], u[TERMS, c + i] = v[TERMS, i], w[TERMS, i]
        for j in range(c):
            K2[i, j], K2[c + i, c + j] = K[i, j], L[i, j]
            M[i, c + j], M[c + j, i] = B[i, j], -B[i, j]
    solved = _found(u[KEPT], K2, M, u, m)
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


def _own_step(size, y, i, weights, own, v, m, room):  # pragma: kernel
    """Agent i by itself: z' = z + V z + v + W f, x' = x + U z + u + M f. Whether it was solved."""
    K, b = weights
    M, U, u, V, c0, W = own
    c, p = len(size), V.shape[1]
    _start(size, K[i], b[i], y[i, p:], v)
    for j in range(c):
        v[KNOWN, j] = u[i, j]
        for r in range(p):
            v[KNOWN, j] += U[i, j, r] * y[i, r]
        v[DELTA, j] = 0.0
    if not _found(size, K[i], M[i], v, m):
        return False
    for r in range(p):
        s = c0[i, r]
        for j in range(p):
            s += V[i, r, j] * y[i, j]
        for j in range(c):
            s += W[i, r, j] * v[F, j]
        room[r] = s
    for r in range(p):
        y[i, r] += room[r]
    for j in range(c):
        y[i, p + j] += v[DELTA, j]
    return True


def _pair_step(size, y, i, k, weights, B, v, w, m, whole):  # pragma: kernel
    """The controllers of agents i and k along their edge. Whether it was solved."""
    K, b = weights
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


def _linear_step(y, i, k, L, c0, kept):  # pragma: kernel
    """The plants of agents i and k along their edge: (z_i, z_k) += L (z_i, z_k) + c0."""
    p = c0.shape[0] // 2
    kept[:p], kept[p:] = y[i, :p], y[k, :p]
    for r in range(p):
        s, q = c0[r], c0[p + r]
        for j in range(2 * p):
            s += L[r, j] * kept[j]
            q += L[p + r, j] * kept[j]
        y[i, r] += s
        y[k, r] += q


def _forward(size, y0, first, weights, own, plant, links, kept, failed):  # pragma: kernel
    """All steps of all samples from step `first` on; writes what is kept, or what failed.

    weights: K (T, N, c, c) and b; own: the matrices of agents by themselves; plant and links:
    edges (E, 2) and matrices. kept: states (B, steps + 1, N, n), the other end of the agents' own
    substeps (B, steps, N, n), and both ends of edges before their substeps, if there is room.
    """
    (K, b), (plant_edges, L, c0), (edges, C) = weights, plant, links
    states, mids, plant_before, before = kept
    (B, N, n), (T, c), keep = y0.shape, (K.shape[0], K.shape[2]), before.shape[0] > 0
    p, P, E_ = n - c, plant_edges.shape[0], edges.shape[0]
    v, w, m = np.zeros((ROWS, c)), np.zeros((ROWS, c)), np.zeros((3, c, c))
    two = 2 * c  # unknowns of both agents of an edge together
    whole = (
        np.zeros((two, two)),
        np.zeros((two, two)),
        np.zeros((ROWS, two)),
        np.zeros((3, two, two)),
    )
    room, y = np.zeros(2 * p), np.zeros((N, n))
    for s in range(B):
        y[:] = y0[s]
        states[s, 0] = y
        for t in range(mids.shape[1]):
            now, turn = (K[min(first + t, T - 1)], b[min(first + t, T - 1)]), (first + t) % 2
            for q in range(P + E_ + 1):
                e = P + E_ - q if turn else q  # 0: agents by themselves; then edges
                if e == 0:
                    if turn:
                        mids[s, t] = y
                    for i in range(N):
                        if not _own_step(size, y, i, now, own, v, m, room):
                            failed[:] = (1, t, i, s)
                            return
                    if not turn:
                        mids[s, t] = y
                elif e <= P:
                    i, k = plant_edges[e - 1, 0], plant_edges[e - 1, 1]
                    _linear_step(y, i, k, L[e - 1], c0[e - 1], room)
                    if keep:
                        plant_before[s, t, e - 1] = room
                else:
                    e -= P + 1
                    i, k = edges[e, 0], edges[e, 1]
                    if keep:
                        before[s, t, e, :c] = y[i, p:]
                        before[s, t, e, c:] = y[k, p:]
                    if not _pair_step(size, y, i, k, now, C[e], v, w, m, whole):
                        failed[:] = (2, t, e, s)
                        return
            states[s, t + 1] = y


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


def _own_adjoint(size, i, y, x, g, weights, own, to_weights, to_own, v, m, room):  # pragma: kernel
    """Of the substep of agent i by itself from y to x."""
    (K, b), (M, U, _, V, _, W), (dK, db), (dM, dU, du, dV, dv, dW) = (
        weights,
        own,
        to_weights,
        to_own,
    )
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
        dv[i, r] += g[r]
        for j in range(p):
            dV[i, r, j] += g[r] * y[j]
        for j in range(c):
            dW[i, r, j] += g[r] * v[F, j]
    for r in range(p):
        s = 0.0
        for k in range(p):
            s += V[i, k, r] * g[k]
        for k in range(c):
            s += U[i, k, r] * v[STEP, k]
        room[r] = s
    for r in range(p):
        g[r] += room[r]
    for j in range(c):
        g[p + j] = v[STEP, j]
    _to_weights(size, K[i], y[p:], v, v[LEFT], g[p:], dK[i], db[i])


def _pair_adjoint(size, i, k, y, x, g, weights, B, to_weights, dB, v, w, m):  # pragma: kernel
    """Of the substep of the controllers of agents i and k, which were in y, and are now in x."""
    (K, b), (dK, db) = weights, to_weights
    c, S, P, A = len(size), m[0], m[1], m[2]
    p = g.shape[1] - c
    _start(size, K[i], b[i], y[:c], v)
    _start(size, K[k], b[k], y[c:], w)
    for j in range(c):
        v[DELTA, j], w[DELTA, j] = x[i, p + j] - y[j], x[k, p + j] - y[c + j]
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
    for j in range(c):
        x[i, p + j], x[k, p + j] = y[j], y[c + j]


def _linear_adjoint(i, k, y, x, g, L, dL, d0):  # pragma: kernel
    """Of the substep of the plants of agents i and k, which were in y, and are now in x."""
    p = d0.shape[0] // 2
    for r in range(p):
        d0[r] += g[i, r]
        d0[p + r] += g[k, r]
        for j in range(2 * p):
            dL[r, j] += g[i, r] * y[j]
            dL[p + r, j] += g[k, r] * y[j]
        x[i, r], x[k, r] = 0.0, 0.0
    for r in range(p):
        for j in range(p):
            x[i, r] += L[j, r] * g[i, j] + L[p + j, r] * g[k, j]
            x[k, r] += L[j, p + r] * g[i, j] + L[p + j, p + r] * g[k, j]
    for r in range(p):
        g[i, r] += x[i, r]
        g[k, r] += x[k, r]
        x[i, r], x[k, r] = y[r], y[p + r]


def _backward(size, grads, first, weights, own, plant, links, kept, found):  # pragma: kernel
    """From the gradients in all states to those in the first, and in weights and matrices.

    Gradients are added to what `found` holds, in the order of weights, own, plant and links; its
    last part are those in the first states, (B, N, n), which are written.
    """
    (K, b), (plant_edges, L, _), (edges, C) = weights, plant, links
    states, mids, plant_before, before = kept
    (dK, db), to_own, (dL, d0), dC, dy = found
    (B, _, N, n), (T, c), steps = states.shape, (K.shape[0], K.shape[2]), mids.shape[1]
    p, P, E_ = n - c, plant_edges.shape[0], edges.shape[0]
    v, w, m, room = np.zeros((ROWS, c)), np.zeros((ROWS, c)), np.zeros((3, c, c)), np.zeros(p)
    x, g = np.zeros((N, n)), np.zeros((N, n))
    for s in range(B):
        g[:] = grads[s, steps]
        for t in range(steps - 1, -1, -1):
            at, turn = min(first + t, T - 1), (first + t) % 2
            now, to_now = (K[at], b[at]), (dK[at], db[at])
            x[:] = mids[s, t] if turn else states[s, t + 1]
            for q in range(P + E_, -1, -1):
                e = P + E_ - q if turn else q
                if e == 0:
                    y, after = states[s, t], mids[s, t]
                    if turn:
                        y, after = mids[s, t], states[s, t + 1]
                    for i in range(N):
                        _own_adjoint(
                            size, i, y[i], after[i], g[i], now, own, to_now, to_own, v, m, room
                        )
                elif e <= P:
                    e -= 1
                    i, k, z = plant_edges[e, 0], plant_edges[e, 1], plant_before[s, t, e]
                    _linear_adjoint(i, k, z, x, g, L[e], dL[e], d0[e])
                else:
                    e -= P + 1
                    i, k, z = edges[e, 0], edges[e, 1], before[s, t, e]
                    _pair_adjoint(size, i, k, z, x, g, now, C[e], to_now, dC[e], v, w, m)
            g += grads[s, t]
        dy[s] = g
