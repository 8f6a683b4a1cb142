"""The cost of closed loops and its gradients, in one pass over all states; compiled by numba.

Samples of a call are summed up one after the other; calls for groups of them can run in threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

SOFT = 1e-3  # added to squared distances, so that the barrier is finite where robots meet
STATE, EFFORT, BARRIER, SMOOTHNESS, END = range(5)


@cache
def compiled(njit: Callable[[Any], Any]) -> Any:
    """The kernel, compiled."""
    here = globals()
    for name in ("_driven", "_ended", "_apart", "_smooth"):
        here[name] = njit(here[name])
    return njit(priced)


def priced(size, y, B, weights, plant, pairs, prices, discounts, terms, to):  # pragma: kernel
    """Add up the terms and all gradients; the smallest squared distance of the pairs.

    `size` has the length of the controllers' states, y is `(samples, T + 1, N, n)`, which are
    some of a batch of B; weights are K, b, G;
    plant is its rest and A, a; prices are those of the terms, times h where they are integrals, and
    the squared distance and the dimensions of the barrier; `to` has gradients of y, K, b, G.
    """
    (K, b, G), (target, A, a), (gy, gK, gb, gG) = weights, plant, to
    T, N, p = y.shape[1] - 1, y.shape[2], target.shape[1]
    work, nearest = np.empty((5, max(len(size), G.shape[2]))), math.inf
    for s in range(len(y)):
        for t in range(T + 1):
            price = prices[STATE] * discounts[t] / B
            for i in range(N):
                total = 0.0
                for j in range(p):
                    x = y[s, t, i, j] - target[i, j]
                    total += x * x
                    gy[s, t, i, j] = 2 * price * x
                terms[STATE] += price * total
                if t < T:
                    moving = K[t, i], b[t, i], G[i]
                    into = gy[s, t, i, p:], gK[t, i], gb[t, i], gG[i]
                    paid = prices[EFFORT] / B
                    terms[EFFORT] += _driven(size, y[s, t, i, p:], moving, paid, into, work)
                else:
                    last, rows = (K[t - 1, i], b[t - 1, i]), (A[i], a[i])
                    ends = gy[s, t, i], gK[t - 1, i], gb[t - 1, i]
                    terms[END] += _ended(size, y[s, t, i], last, rows, prices[END] / B, ends)
            found, near = _apart(y[s, t], pairs, prices, B, gy[s, t])
            terms[BARRIER] += found
            nearest = min(nearest, near)
    if prices[SMOOTHNESS] != 0:
        terms[SMOOTHNESS] += _smooth(K, b, prices[SMOOTHNESS], gK, gb)
    return nearest


def _driven(size, xi, own, price, to, work):  # pragma: kernel
    """The price of the input of one controller in one step: |G^T K^T tanh(K xi + b)|^2."""
    (K, b, G), (g, gK, gb, gG), m, total = own, to, own[2].shape[1], 0.0
    q, f, du, df, dr = work[0], work[1], work[2], work[3], work[4]
    for j in range(len(size)):
        r = b[j]
        for k in range(len(size)):
            r += K[j, k] * xi[k]
        q[j] = 1 - 2 / (math.exp(2 * r) + 1)
        g[j] = 0.0
    for k in range(len(size)):
        f[k] = 0.0
        for j in range(len(size)):
            f[k] += K[j, k] * q[j]
    for o in range(m):
        u = 0.0
        for k in range(len(size)):
            u += G[k, o] * f[k]
        total += u * u
        du[o] = 2 * price * u
    for k in range(len(size)):
        df[k] = 0.0
        for o in range(m):
            df[k] += G[k, o] * du[o]
            gG[k, o] += f[k] * du[o]
    for j in range(len(size)):
        s = 0.0
        for k in range(len(size)):
            s += K[j, k] * df[k]
        dr[j] = s * (1 - q[j] * q[j])
        gb[j] += dr[j]
        for k in range(len(size)):
            gK[j, k] += q[j] * df[k] + dr[j] * xi[k]
            g[k] += K[j, k] * dr[j]
    return price * total


def _ended(size, y, own, plant, price, to):  # pragma: kernel
    """The price of the energy of one agent with its controller in the last state."""
    (K, b), (A, a), (g, gK, gb), p, total = own, plant, to, plant[0].shape[1], 0.0
    for o in range(len(A)):
        r = a[o]
        for j in range(p):
            r += A[o, j] * y[j]
        total += 0.5 * r * r
        for j in range(p):
            g[j] += price * A[o, j] * r
    for k in range(len(size)):
        g[p + k] = 0.0
    for j in range(len(size)):
        r = b[j]
        for k in range(len(size)):
            r += K[j, k] * y[p + k]
        small = math.exp(-2 * abs(r))
        total += abs(r) + math.log1p((small - 1) / 2)
        slope = math.copysign(price * (1 - small) / (1 + small), r)
        gb[j] += slope
        for k in range(len(size)):
            gK[j, k] += slope * y[p + k]
            g[p + k] += slope * K[j, k]
    return price * total


def _apart(y, pairs, prices, B, g):  # pragma: kernel
    """The barrier of all pairs in one state, and the smallest of their squared distances."""
    price, far, d = prices[BARRIER] / B, prices[5], int(prices[6])
    none, total, nearest = 1 / (far + SOFT), 0.0, math.inf
    for e in range(len(pairs)):
        i, k = pairs[e, 0], pairs[e, 1]
        square = 0.0
        for j in range(d):
            square += (y[i, j] - y[k, j]) ** 2
        nearest = min(nearest, square)
        if square < far:
            inverse = 1 / (square + SOFT)
            total += inverse - none
            slope = -2 * price * inverse * inverse
            for j in range(d):
                x = slope * (y[i, j] - y[k, j])
                g[i, j] += x
                g[k, j] -= x
    return price * total, nearest


def _smooth(K, b, price, gK, gb):  # pragma: kernel
    """The price of changes from step to step."""
    T, N, c, total = len(K), K.shape[1], K.shape[2], 0.0
    for t in range(T - 1):
        for i in range(N):
            for j in range(c):
                x = b[t + 1, i, j] - b[t, i, j]
                total += x * x
                gb[t + 1, i, j] += 2 * price * x
                gb[t, i, j] -= 2 * price * x
                for k in range(c):
                    x = K[t + 1, i, j, k] - K[t, i, j, k]
                    total += x * x
                    gK[t + 1, i, j, k] += 2 * price * x
                    gK[t, i, j, k] -= 2 * price * x
    return price * total
