"""Output layers of a few weights in compiled loops: calls of PyTorch cost more than the work.

The same problem and the same steps as in `hdnn.training.output`, in float64. Needs numba (extra
`fast`), which is imported at the first use.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hdnn.engine import jit
from hdnn.heads import RegressionHead, SigmoidHead, SoftmaxHead

# Past these, matrix products by BLAS are faster (measured on two kinds of x86 CPUs).
ALWAYS = 32  # weights that are solved here whatever the batch
MOST = 128  # weights, and
MOST_OF_HESSIAN = 1_000_000  # batch times weights squared, that Newton steps are made here for
MOST_OF_GRADIENT = 250_000  # batch times weights, that losses and gradients are computed here for
SIGMOID, SOFTMAX, REGRESSION = range(3)
KINDS = {SigmoidHead: SIGMOID, SoftmaxHead: SOFTMAX, RegressionHead: REGRESSION}

Found = tuple[float, float, Tensor]  # loss, fraction of correct classes, gradient in the features


def usable(head: torch.nn.Module, y: Tensor, solver: str) -> bool:
    """Whether a head is small enough for batches like y, on the CPU, and numba is there."""
    if type(head) not in KINDS or y.device.type != "cpu" or not jit.installed():
        return False
    weights: int = head.weight.numel() + head.bias.numel()  # pyright: ignore
    few = weights <= MOST and len(y) * weights**2 <= MOST_OF_HESSIAN
    if solver == "joint":
        few = len(y) * weights <= MOST_OF_GRADIENT
    return y.dtype in (torch.float32, torch.float64) and (weights <= ALWAYS or few)


class SmallHead:
    """The solver of one head: its weights are written where PyTorch keeps them."""

    def __init__(self, head: Any) -> None:
        self.kind = KINDS[type(head)]
        self.weight, self.bias = head.weight.detach().numpy(), head.bias.detach().numpy()
        self.shape = (self.weight.shape[0], self.weight.shape[1] + 1)

    def newton(
        self, y: Tensor, t: Tensor, weight: Tensor | None, ridge: float, steps: int
    ) -> Found:
        """At most so many Newton steps from zero."""
        given, gradient = self._given(y, t, weight)
        W = np.zeros(self.shape)
        loss, correct = _kernels()[0](*given, W, gradient, ridge, steps)
        return self._found(W, loss, correct, gradient)

    def adam(
        self,
        passes: Iterable[tuple[Tensor, Tensor, Tensor | None]],
        ridge: float,
        rate: float,
        steps: int,
        batch: int,
    ) -> Found:
        """Adam from zero: so many steps on each minibatch of each pass over the data.

        What it returns is for a single minibatch only.
        """
        state, count = np.zeros((3, *self.shape)), 0
        loss, correct, gradient = 0.0, 0.0, np.zeros(())
        for part in passes:
            given, gradient = self._given(*part)
            options = (ridge, rate, steps, batch)
            loss, correct, count = _kernels()[1](*given, state, gradient, count, *options)
        return self._found(state[0], loss, correct, gradient)

    def joint(self, y: Tensor, t: Tensor, weight: Tensor | None) -> tuple[Found, Any]:
        """What is found with the weights as they are, and the gradient in them (c, n + 1)."""
        given, gradient = self._given(y, t, weight)
        W, G = np.empty(self.shape), np.empty(self.shape)
        W[:, :-1], W[:, -1] = self.weight, self.bias
        loss, correct = _kernels()[2](*given, W, G, gradient)
        return (loss, correct, torch.from_numpy(gradient)), G

    def _given(self, y: Tensor, t: Tensor, weight: Tensor | None) -> tuple[tuple[Any, ...], Any]:
        """Features, targets, weights of the samples and the kind of head; room for a gradient."""
        features, targets = y.numpy(), t.numpy().reshape(len(y), -1)
        weights = np.ones(len(y)) if weight is None else weight.numpy().astype(np.float64)
        return (features, targets, weights, self.kind), np.empty_like(features)

    def _found(self, W: Any, loss: float, correct: float, gradient: Any) -> Found:
        self.weight[...], self.bias[...] = W[:, :-1], W[:, -1]
        return loss, correct, torch.from_numpy(gradient)


PARTS = ("_exp", "_take", "_scores", "_predicted", "_residual", "_gradient", "_loss")
PARTS += ("_finish", "_hessian", "_solve")


@cache
def _kernels() -> tuple[Any, Any, Any]:
    """The solvers, compiled."""
    here = globals()
    for name in PARTS:
        here[name] = jit.compiled(here[name])
    return jit.compiled(_newton), jit.compiled(_adam), jit.compiled(_joint)


# A minibatch lies feature by feature, so that every loop over samples is one of vectors: A (d, B)
# holds the features and a row of ones, T (c, B) the targets, S (c, B) the scores.

FACTORIALS = tuple(1 / math.factorial(k) for k in range(12, -1, -1))


def _exp(x):  # pragma: kernel
    """exp of a number between the largest and the smallest that are normal, in vectors."""
    x = min(max(x, -708.0), 709.0)
    k = math.floor(x * 1.4426950408889634 + 0.5)
    r = (x - k * 6.93145751953125e-1) - k * 1.42860682030941723212e-6
    s = 1 / 6227020800  # 1/13!
    for factor in FACTORIALS:
        s = s * r + factor
    return s * np.int64((np.int64(k) + 1023) << 52).view(np.float64)


def _take(y, targets, weights, kind, low, A, T, share):  # pragma: kernel
    """Lay out the samples from `low` on; False if none of them counts."""
    B, n = share.size, y.shape[1]
    total = 0.0
    for i in range(B):
        total += weights[low + i]
    for i in range(B):
        share[i] = weights[low + i] / total
        A[n, i] = 1.0
        for j in range(n):
            A[j, i] = y[low + i, j]
        for k in range(T.shape[0]):
            if kind == SOFTMAX:
                T[k, i] = targets[low + i, 0] == k
            else:
                T[k, i] = targets[low + i, k]
    return total > 0


def _scores(A, W, S):  # pragma: kernel
    for k in range(W.shape[0]):
        S[k] = 0.0
        for j in range(W.shape[1]):
            for i in range(S.shape[1]):
                S[k, i] += W[k, j] * A[j, i]


def _predicted(S, kind, P):  # pragma: kernel
    """The probabilities of classes, or the values themselves."""
    c, B = S.shape
    if kind == SIGMOID:
        for i in range(B):
            P[0, i] = 1 / (1 + _exp(-S[0, i]))
    elif kind == SOFTMAX:
        for i in range(B):
            top, total = S[0, i], 0.0
            for k in range(1, c):
                top = max(top, S[k, i])
            for k in range(c):
                P[k, i] = _exp(S[k, i] - top)
                total += P[k, i]
            for k in range(c):
                P[k, i] /= total
    else:
        P[:] = S


def _residual(S, T, share, kind, R):  # pragma: kernel
    """The gradient of the mean loss in the scores."""
    c, B = S.shape
    scale = 2 / c if kind == REGRESSION else 1.0
    _predicted(S, kind, R)
    for k in range(c):
        for i in range(B):
            R[k, i] = (R[k, i] - T[k, i]) * scale * share[i]


def _gradient(A, R, W, ridge, g):  # pragma: kernel
    """The gradient of mean loss + ridge/2 |W|^2."""
    (c, d), B = W.shape, A.shape[1]
    whole, part = B - B % 8, np.empty(8)
    for k in range(c):
        for j in range(d):
            part[:] = 0.0  # eight sums side by side are one of vectors
            for i in range(0, whole, 8):
                for o in range(8):
                    part[o] += R[k, i + o] * A[j, i + o]
            s = ridge * W[k, j]
            for i in range(whole, B):
                s += R[k, i] * A[j, i]
            for o in range(8):
                s += part[o]
            g[k, j] = s


def _loss(S, T, share, kind):  # pragma: kernel
    c, B = S.shape
    loss = 0.0
    for i in range(B):
        if kind == SIGMOID:
            s = S[0, i]
            each = max(s, 0.0) + math.log1p(_exp(-abs(s))) - s * T[0, i]
        elif kind == SOFTMAX:
            top, total, each = S[0, i], 0.0, 0.0
            for k in range(1, c):
                top = max(top, S[k, i])
            for k in range(c):
                total += _exp(S[k, i] - top)
                each -= S[k, i] * T[k, i]
            each += top + math.log(total)
        else:
            each = 0.0
            for k in range(c):
                each += (S[k, i] - T[k, i]) ** 2 / c
        loss += each * share[i]
    return loss


def _finish(A, T, share, W, gradient, kind, low, S, R):  # pragma: kernel
    """Loss, number of correct classes, and the gradient in the features."""
    (c, B), n = S.shape, A.shape[0] - 1
    _scores(A, W, S)
    _residual(S, T, share, kind, R)
    correct, g = 0, np.empty(n)
    for i in range(B):
        if kind == SIGMOID:
            correct += (S[0, i] > 0) == (T[0, i] > 0.5)
        elif kind == SOFTMAX:
            correct += T[S[:, i].argmax(), i] > 0.5
        g[:] = 0.0
        for k in range(c):
            for j in range(n):
                g[j] += R[k, i] * W[k, j]
        for j in range(n):
            gradient[low + i, j] = g[j]
    return _loss(S, T, share, kind), correct / B


def _adam(
    y, targets, weights, kind, state, gradient, count, ridge, rate, steps, batch
):  # pragma: kernel
    """So many steps on each minibatch in turn; `count` were made before. The state is W, m, v.

    Adam is written out here once more because nothing compiled can call PyTorch's.
    """
    W, m, v = state[0], state[1], state[2]
    (total, n), c = y.shape, W.shape[0]
    g = np.empty_like(W)
    loss, correct = 0.0, 0.0
    for low in range(0, total, batch):
        B = min(batch, total - low)
        A, T, share = np.empty((n + 1, B)), np.empty((c, B)), np.empty(B)
        S, R = np.empty((c, B)), np.empty((c, B))
        if not _take(y, targets, weights, kind, low, A, T, share):
            continue
        for _ in range(steps):
            count += 1
            _scores(A, W, S)
            _residual(S, T, share, kind, R)
            _gradient(A, R, W, ridge, g)
            first, second = 1 - 0.9**count, math.sqrt(1 - 0.999**count)
            for k in range(c):
                for j in range(n + 1):
                    m[k, j] = 0.9 * m[k, j] + 0.1 * g[k, j]
                    v[k, j] = 0.999 * v[k, j] + 0.001 * g[k, j] * g[k, j]
                    W[k, j] -= rate / first * m[k, j] / (math.sqrt(v[k, j]) / second + 1e-8)
        if batch >= total:
            loss, correct = _finish(A, T, share, W, gradient, kind, low, S, R)
    return loss, correct, count


def _joint(y, targets, weights, kind, W, G, gradient):  # pragma: kernel
    """Loss, fraction of correct classes, and the gradients in W and in the features."""
    B, (c, d) = len(y), W.shape
    A, T, share = np.empty((d, B)), np.empty((c, B)), np.empty(B)
    _take(y, targets, weights, kind, 0, A, T, share)
    S, R = np.empty((c, B)), np.empty((c, B))
    found = _finish(A, T, share, W, gradient, kind, 0, S, R)
    _gradient(A, R, W, 0.0, G)
    return found


def _hessian(A, S, share, kind, H, P, w):  # pragma: kernel
    """The Hessian of the mean loss in W, row by row; P (c, B) and w (B,) are scratch space."""
    (c, B), d = S.shape, len(A)
    whole, part = B - B % 8, np.empty(8)
    H[:] = 0.0
    _predicted(S, kind, P)
    for k in range(c):
        for q in range(k + 1):
            if kind == REGRESSION and k != q:
                continue
            for i in range(B):
                if kind == REGRESSION:
                    w[i] = (2 / c) * share[i]
                else:
                    w[i] = P[k, i] * ((k == q) - P[q, i]) * share[i]
            for j in range(d):
                for o in range(j + 1):
                    part[:] = 0.0
                    for i in range(0, whole, 8):
                        for e in range(8):
                            part[e] += w[i + e] * A[j, i + e] * A[o, i + e]
                    s = 0.0
                    for i in range(whole, B):
                        s += w[i] * A[j, i] * A[o, i]
                    for e in range(8):
                        s += part[e]
                    H[k * d + j, q * d + o] = s
                    H[k * d + o, q * d + j] = s
                    H[q * d + j, k * d + o] = s
                    H[q * d + o, k * d + j] = s


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


def _newton(y, targets, weights, kind, W, gradient, ridge, steps):  # pragma: kernel
    B, (c, d) = len(y), W.shape
    A, T, share = np.empty((d, B)), np.empty((c, B)), np.empty(B)
    _take(y, targets, weights, kind, 0, A, T, share)
    S, R, w = np.zeros((c, B)), np.empty((c, B)), np.empty(B)
    move, S_new = np.empty((c, B)), np.empty((c, B))
    H, g, x = np.empty((c * d, c * d)), np.empty((c, d)), np.empty(c * d)
    step = x.reshape((c, d))
    value = _loss(S, T, share, kind)
    for _ in range(steps):
        _residual(S, T, share, kind, R)
        _gradient(A, R, W, ridge, g)
        _hessian(A, S, share, kind, H, R, w)
        for k in range(c * d):
            H[k, k] += ridge
        if not _solve(H, g.reshape(c * d), x):
            break
        decrease = (g * step).sum()
        if not decrease > 1e-14:
            break
        _scores(A, step, move)
        size, moved = 1.0, False
        for _ in range(30):
            S_new[:] = S - size * move
            penalty = ((W - size * step) ** 2).sum()
            trial = _loss(S_new, T, share, kind) + 0.5 * ridge * penalty
            if trial <= value - 1e-4 * size * decrease:
                W -= size * step
                S[:] = S_new
                value, moved = trial, True
                break
            size *= 0.5
        if not moved:
            break
    return _finish(A, T, share, W, gradient, kind, 0, S, R)
