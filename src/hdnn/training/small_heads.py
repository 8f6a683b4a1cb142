"""Output layers of a few weights in compiled loops: calls of PyTorch cost more than the work.

The same problem and the same steps as in `hdnn.training.coordinate`, in float64. Needs numba (extra
`fast`), which is imported at the first use.
"""

from __future__ import annotations

import importlib.util
import math
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hdnn.heads import RegressionHead, SigmoidHead, SoftmaxHead
from hdnn.training import coordinate

MOST = 32  # weights, past which matrix products by BLAS are faster
SIGMOID, SOFTMAX, REGRESSION = range(3)
KINDS = {SigmoidHead: SIGMOID, SoftmaxHead: SOFTMAX, RegressionHead: REGRESSION}


def usable(head: torch.nn.Module, y: Tensor) -> bool:
    """Whether a head is small enough, on the CPU, and numba is there."""
    return (
        type(head) in KINDS
        and y.device.type == "cpu"
        and y.dtype in (torch.float32, torch.float64)
        and head.weight.numel() + head.bias.numel() <= MOST  # pyright: ignore
        and _installed()
    )


@cache
def _installed() -> bool:
    return importlib.util.find_spec("numba") is not None


def solve(
    head: Any,
    y: Tensor,
    t: Tensor,
    weight: Tensor | None,
    method: str,
    steps: int,
    ridge: float,
    rate: float,
) -> coordinate.Outcome:
    """Find the output layer by so many steps of "newton" or "adam", from zero."""
    W = np.zeros((head.weight.shape[0], y.shape[1] + 1))
    given = _given(head, y, t, weight)
    gradient = np.empty_like(given[0])
    newton, adam = _kernels()
    if method == "newton":
        loss, correct = newton(*given, W, gradient, steps, ridge)
    else:
        m, v = np.zeros_like(W), np.zeros_like(W)
        loss, correct = adam(*given, W, gradient, m, v, 0, steps, ridge, rate)
    coordinate.put(head, torch.from_numpy(W))
    return coordinate.Outcome(loss, correct, torch.from_numpy(gradient))


def adam(head: Any, parts: list[coordinate.Part], ridge: float, rate: float) -> None:
    """One Adam step, from zero, on each (y, t, weight) in turn."""
    W = np.zeros((head.weight.shape[0], head.weight.shape[1] + 1))
    m, v = np.zeros_like(W), np.zeros_like(W)
    step = _kernels()[1]
    for count, (y, t, weight) in enumerate(parts):
        given = _given(head, y, t, weight)
        step(*given, W, np.empty_like(given[0]), m, v, count, 1, ridge, rate)
    coordinate.put(head, torch.from_numpy(W))


def _given(head: Any, y: Tensor, t: Tensor, weight: Tensor | None) -> tuple[Any, ...]:
    """Features, labels or targets, shares of the samples and the kind of head, for a kernel."""
    kind = KINDS[type(head)]
    labels, targets = _NO_LABELS, _NO_TARGETS
    if kind == SOFTMAX:
        labels = t.numpy()
    else:
        targets = t.reshape(len(y), -1).numpy().astype(np.float64)
    share = np.full(len(y), 1 / len(y))
    if weight is not None:
        share = weight.numpy().astype(np.float64)
        share /= share.sum()
    return y.numpy(), labels, targets, share, kind


_NO_LABELS, _NO_TARGETS = np.zeros(1, dtype=np.int64), np.zeros((1, 1))


@cache
def _kernels() -> tuple[Any, Any]:  # pragma: kernel
    """The two solvers, compiled."""
    import numba

    def compiled(function: Any) -> Any:
        try:
            return numba.njit(cache=True, error_model="numpy", nogil=True)(function)
        except RuntimeError:  # there is no place on disk to keep it
            return numba.njit(error_model="numpy", nogil=True)(function)

    here = globals()
    for name in ("_scores", "_residual", "_loss", "_finish", "_hessian", "_solve"):
        here[name] = compiled(_PLAIN[name])
    return compiled(_newton), compiled(_adam)


def _scores(y, W, S):  # pragma: kernel
    B, n = y.shape
    for i in range(B):
        for k in range(W.shape[0]):
            s = W[k, n]
            for j in range(n):
                s += W[k, j] * y[i, j]
            S[i, k] = s


def _residual(S, labels, targets, share, kind, R):  # pragma: kernel
    """The gradient of the mean loss in the scores."""
    B, c = S.shape
    for i in range(B):
        if kind == 0:
            R[i, 0] = (1 / (1 + math.exp(-S[i, 0])) - targets[i, 0]) * share[i]
        elif kind == 1:
            top = S[i].max()
            total = 0.0
            for k in range(c):
                R[i, k] = math.exp(S[i, k] - top)
                total += R[i, k]
            for k in range(c):
                R[i, k] = (R[i, k] / total - (labels[i] == k)) * share[i]
        else:
            for k in range(c):
                R[i, k] = (S[i, k] - targets[i, k]) * (2 / c) * share[i]


def _loss(S, labels, targets, share, kind):  # pragma: kernel
    B, c = S.shape
    loss = 0.0
    for i in range(B):
        if kind == 0:
            s = S[i, 0]
            each = max(s, 0.0) + math.log1p(math.exp(-abs(s))) - s * targets[i, 0]
        elif kind == 1:
            top = S[i].max()
            total = 0.0
            for k in range(c):
                total += math.exp(S[i, k] - top)
            each = top + math.log(total) - S[i, labels[i]]
        else:
            each = 0.0
            for k in range(c):
                each += (S[i, k] - targets[i, k]) ** 2 / c
        loss += each * share[i]
    return loss


def _finish(y, labels, targets, share, W, gradient, kind, S, R):  # pragma: kernel
    """Loss, fraction of correct classes, and the gradient in the features."""
    B, n = y.shape
    c = W.shape[0]
    _scores(y, W, S)
    _residual(S, labels, targets, share, kind, R)
    correct = 0
    for i in range(B):
        if kind == 0:
            correct += (S[i, 0] > 0) == (targets[i, 0] > 0.5)
        elif kind == 1:
            correct += S[i].argmax() == labels[i]
        for j in range(n):
            g = 0.0
            for k in range(c):
                g += R[i, k] * W[k, j]
            gradient[i, j] = g
    return _loss(S, labels, targets, share, kind), correct / B


def _adam(
    y, labels, targets, share, kind, W, gradient, m, v, count, steps, ridge, rate
):  # pragma: kernel
    (B, n), c = y.shape, W.shape[0]
    S, R = np.empty((B, c)), np.empty((B, c))
    for step in range(count + 1, count + steps + 1):
        _scores(y, W, S)
        _residual(S, labels, targets, share, kind, R)
        for k in range(c):
            for j in range(n + 1):
                g = ridge * W[k, j]
                for i in range(B):
                    g += R[i, k] * (y[i, j] if j < n else 1.0)
                m[k, j] = 0.9 * m[k, j] + 0.1 * g
                v[k, j] = 0.999 * v[k, j] + 0.001 * g * g
        first, second = 1 - 0.9**step, math.sqrt(1 - 0.999**step)
        for k in range(c):
            for j in range(n + 1):
                W[k, j] -= rate / first * m[k, j] / (math.sqrt(v[k, j]) / second + 1e-8)
    return _finish(y, labels, targets, share, W, gradient, kind, S, R)


def _hessian(y, S, share, kind, H):  # pragma: kernel
    """Of the mean loss in W, row by row."""
    (B, n), c = y.shape, S.shape[1]
    d = n + 1
    H[:] = 0.0
    P = np.empty(c)
    a = np.ones(d)
    for i in range(B):
        for j in range(n):
            a[j] = y[i, j]
        if kind == 0:
            P[0] = 1 / (1 + math.exp(-S[i, 0]))
        elif kind == 1:
            top, total = S[i].max(), 0.0
            for k in range(c):
                P[k] = math.exp(S[i, k] - top)
                total += P[k]
            for k in range(c):
                P[k] /= total
        for k in range(c):
            for q in range(k + 1):
                if kind == 0:
                    w = P[0] * (1 - P[0])
                elif kind == 1:
                    w = P[k] * ((k == q) - P[q])
                else:
                    w = (2 / c) * (k == q)
                w *= share[i]
                if w == 0.0:
                    continue
                for j in range(d):
                    for o in range(d):
                        H[k * d + j, q * d + o] += w * a[j] * a[o]
    for k in range(c * d):
        for q in range(k + 1, c * d):
            H[k, q] = H[q, k]


def _solve(H, g, x):  # pragma: kernel
    """x = H^-1 g for a positive definite H, by Cholesky in place; False if it is not."""
    size = len(g)
    for k in range(size):
        for q in range(k + 1):
            s = H[k, q]
            for o in range(q):
                s -= H[k, o] * H[q, o]
            if k == q:
                if not s > 0:
                    return False
                H[k, k] = math.sqrt(s)
            else:
                H[k, q] = s / H[q, q]
    for k in range(size):
        s = g[k]
        for o in range(k):
            s -= H[k, o] * x[o]
        x[k] = s / H[k, k]
    for k in range(size - 1, -1, -1):
        s = x[k]
        for o in range(k + 1, size):
            s -= H[o, k] * x[o]
        x[k] = s / H[k, k]
    return True


def _newton(y, labels, targets, share, kind, W, gradient, steps, ridge):  # pragma: kernel
    (B, n), c = y.shape, W.shape[0]
    d = n + 1
    S, R = np.zeros((B, c)), np.empty((B, c))
    move, S_new = np.empty((B, c)), np.empty((B, c))
    H, g, x = np.empty((c * d, c * d)), np.empty(c * d), np.empty(c * d)
    step = np.empty((c, d))
    value = _loss(S, labels, targets, share, kind)
    for _ in range(steps):
        _residual(S, labels, targets, share, kind, R)
        for k in range(c):
            for j in range(d):
                s = ridge * W[k, j]
                for i in range(B):
                    s += R[i, k] * (y[i, j] if j < n else 1.0)
                g[k * d + j] = s
        _hessian(y, S, share, kind, H)
        for k in range(c * d):
            H[k, k] += ridge
        if not _solve(H, g, x):
            break
        decrease = 0.0
        for k in range(c * d):
            decrease += g[k] * x[k]
            step[k // d, k % d] = x[k]
        if not decrease > 1e-14:
            break
        _scores(y, step, move)
        size, moved = 1.0, False
        for _ in range(30):
            penalty = 0.0
            for k in range(c):
                for j in range(d):
                    penalty += (W[k, j] - size * step[k, j]) ** 2
            for i in range(B):
                for k in range(c):
                    S_new[i, k] = S[i, k] - size * move[i, k]
            trial = _loss(S_new, labels, targets, share, kind) + 0.5 * ridge * penalty
            if trial <= value - 1e-4 * size * decrease:
                W -= size * step
                S[:] = S_new
                value, moved = trial, True
                break
            size *= 0.5
        if not moved:
            break
    return _finish(y, labels, targets, share, W, gradient, kind, S, R)


_PLAIN = {
    name: globals()[name]
    for name in ("_scores", "_residual", "_loss", "_finish", "_hessian", "_solve")
}
