"""The output layer for given features: solved by Newton's method, or by the paper's Adam steps.

Both minimise the mean loss + ridge/2 |(W, b)|^2 over the output layer alone, a convex problem. With
sample weights the mean is the weighted one. The problem is small, and nearly singular where there
is little ridge: it is solved in NumPy, in float64, whatever the device and dtype of the model.
`W` stands for (W, b) as one matrix (c, n + 1).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hdnn.heads import RegressionHead, SigmoidHead, SoftmaxHead

Head = RegressionHead | SigmoidHead | SoftmaxHead
# features, targets, weights of the samples
Batch = tuple[Tensor, Tensor, Tensor | None]

SOLVERS = ("newton", "adam", "joint")
# For a minibatch, from zero. Fewer Newton steps from the output layer of the minibatch before are
# faster, but one of three trainings on double moons (H2, 1 layer) then reached 93.6%, not 99.9%.
NEWTON_STEPS = 5
ADAM_STEPS = 10
REFIT_STEPS = 50
HALVINGS = 30  # of a Newton step, at most
ENOUGH = 1e-14  # decrease of the loss, below which Newton's method ends
QUIET = np.errstate(all="ignore")  # `fit` says where numbers are not finite
CHUNK = 4096  # samples that go through a network at once


class Outcome(NamedTuple):
    """The loss of a minibatch, its accuracy and its gradient, with the output layer for it."""

    loss: float
    accuracy: float  # NaN for a regression
    gradient: Tensor  # of the mean loss in the features


class Scores(NamedTuple):
    """Log loss and accuracy, or mean squared error and R^2 (NaN where all targets are equal)."""

    loss: float
    score: float


class OutputProblem:
    """The mean loss of an output layer as a function of its scores S (B, c).

    A (B, n + 1) has the features and a column of ones, T the labels (B,) of several classes or else
    the targets (B, c), and `share` (B, 1) the weight of each sample in the mean.
    """

    def __init__(self, head: Head, batch: Batch) -> None:
        y, t, weight = batch
        B = len(y)
        self.softmax = isinstance(head, SoftmaxHead)
        self.regression = isinstance(head, RegressionHead)
        n = y.shape[1]
        self.A = np.ones((B, n + 1))
        self.A[:, :-1] = y.numpy(force=True)
        self.T: Any = t.numpy(force=True)
        if not self.softmax:
            self.T = self.T.reshape(B, head.outputs).astype(np.float64)
        if weight is None:
            self.share = np.full((B, 1), 1 / B)
        else:
            weights = weight.numpy(force=True).astype(np.float64)
            weights /= weights.sum()
            self.share = weights[:, None]

    def rows(self, index: slice | np.ndarray) -> OutputProblem:
        """The problem of some of the samples."""
        problem = copy.copy(self)
        problem.A = self.A[index]
        problem.T = self.T[index]
        share = self.share[index]
        problem.share = share / share.sum()
        return problem

    def log_sum(self, S: np.ndarray) -> np.ndarray:
        """The logarithm of the sum of exp(S) over the classes: (B, 1)."""
        if not self.softmax:
            return np.logaddexp(0.0, S)
        highest = S.max(1, keepdims=True)
        total = np.exp(S - highest).sum(1, keepdims=True)
        return highest + np.log(total)

    def loss(self, S: np.ndarray) -> tuple[float, np.ndarray]:
        """The mean loss of scores, and the predictions."""
        if self.regression:
            error = S - self.T
            squares = np.vdot(self.share * error, error)
            return float(squares) / S.shape[1], S
        log_sum = self.log_sum(S)
        if self.softmax:
            right = np.take_along_axis(S, self.T[:, None], 1)
        else:
            right = S * self.T
        loss = np.vdot(self.share, log_sum - right)
        return float(loss), np.exp(S - log_sum)

    def predictions(self, S: np.ndarray) -> np.ndarray:
        if self.regression:
            return S
        if self.softmax:
            return np.exp(S - self.log_sum(S))
        return 0.5 * np.tanh(0.5 * S) + 0.5

    def residual(self, P: np.ndarray) -> np.ndarray:
        """The gradient of the mean loss in the scores, from the predictions: (B, c)."""
        if self.softmax:
            residual = P.copy()
            residual[np.arange(len(P)), self.T] -= 1.0
        else:
            residual = P - self.T
        residual *= self.share
        if self.regression:
            residual *= 2 / P.shape[1]
        return residual

    def hessian(self, P: np.ndarray) -> np.ndarray:
        """The Hessian of the mean loss in all of W, row by row: (c d, c d)."""
        A = self.A
        c = P.shape[1]
        d = A.shape[1]
        if self.regression:
            curvature = np.full_like(P, 2 / c)
        else:
            curvature = P if self.softmax else P * (1 - P)
        curvature = curvature * self.share
        blocks = np.zeros((c, d, c, d))
        for i in range(c):
            column = curvature[:, i]
            scaled = A * column[:, None]
            blocks[i, :, i] = A.T @ scaled
        size = c * d
        H = blocks.reshape(size, size)
        if self.softmax:  # diag(P) - P P^T
            M = P[:, :, None] * A[:, None, :]
            M = M.reshape(-1, size)
            weighted = M * self.share
            H -= M.T @ weighted
        return H

    def score(self, S: np.ndarray) -> float:
        """The share of right classes; the mean of R^2 over the outputs of a regression."""
        if self.softmax:
            right = S.argmax(1) == self.T
            return float(self.share[right].sum())
        if not self.regression:
            right = (S > 0) == (self.T > 0.5)
            return float(np.vdot(self.share, right))
        weights = self.share[:, 0]
        mean = weights @ self.T
        deviation = self.T - mean
        spread = weights @ deviation**2
        residual = self.T - S
        error = weights @ residual**2
        differ = spread > 0
        if not differ.any():
            return math.nan
        unexplained = error[differ] / spread[differ]
        return float(1 - unexplained.mean())


class Output:
    """The output layer of a model, and how it is found: "newton", "adam" or "joint".

    With "joint" it is trained together with the hidden layers, and `solve` sets its gradient.
    """

    def __init__(
        self, head: Head, solver: str, ridge: float, rate: float
    ) -> None:
        self.head = head
        self.solver = solver
        self.ridge = ridge
        self.rate = rate

    @QUIET
    def solve(self, batch: Batch) -> Outcome:
        """Find the output layer for these features, and the loss with it; set its weights."""
        head = self.head
        problem = OutputProblem(head, batch)
        W = weights_of(head)
        if self.solver == "newton":
            zero = np.zeros_like(W)
            W = newton(problem, zero, self.ridge, NEWTON_STEPS)
        elif self.solver == "adam":
            W = self._adam([problem] * ADAM_STEPS)
        S = problem.A @ W.T
        loss, P = problem.loss(S)
        residual = problem.residual(P)
        if self.solver == "joint":
            gradient = torch.from_numpy(residual.T @ problem.A).to(head.weight)
            head.weight.grad = gradient[:, :-1]
            head.bias.grad = gradient[:, -1]
        else:
            assign(head, W)
        accuracy = math.nan if problem.regression else problem.score(S)
        gradient = torch.from_numpy(residual @ W[:, :-1]).to(batch[0])
        return Outcome(loss, accuracy, gradient)

    @QUIET
    def refit(
        self, batch: Batch, size: int, generator: torch.Generator
    ) -> None:
        """Fit the output layer to all data; Adam does so in minibatches of this size."""
        if self.solver == "joint":
            return
        problem = OutputProblem(self.head, batch)
        if self.solver == "newton":
            zero = np.zeros_like(weights_of(self.head))
            W = newton(problem, zero, self.ridge, REFIT_STEPS)
        else:
            W = self._adam(_minibatches(problem, size, generator))
        assign(self.head, W)

    def _adam(self, problems: Iterable[OutputProblem]) -> np.ndarray:
        """One Adam step on each problem, from zero: the paper's inner solver."""
        W = np.zeros((self.head.outputs, self.head.features + 1))
        m = np.zeros_like(W)  # 10 times the mean of the gradients
        v = np.zeros_like(W)
        for count, problem in enumerate(problems, 1):
            S = problem.A @ W.T
            P = problem.predictions(S)
            residual = problem.residual(P)
            g = residual.T @ problem.A
            g += self.ridge * W
            m *= 0.9
            m += g
            # NaN once squares overflow: then the training has diverged.
            v += 0.001 * (g * g - v)
            root = np.sqrt(v)
            root *= (1 - 0.999**count) ** -0.5
            root += 1e-8
            rate = 0.1 * self.rate / (1 - 0.9**count)
            W -= rate * m / root
        return W


def _minibatches(
    problem: OutputProblem, size: int, generator: torch.Generator
) -> Iterable[OutputProblem]:
    """All samples in a new order for each step of the refit, but for empty minibatches."""
    count = len(problem.A)
    for _ in range(REFIT_STEPS):
        order = torch.randperm(count, generator=generator)
        shuffled = problem.rows(order.numpy())
        for start in range(0, count, size):
            rows = slice(start, start + size)
            if shuffled.share[rows].any():
                yield shuffled.rows(rows)


def newton(
    problem: OutputProblem, W: np.ndarray, ridge: float, steps: int
) -> np.ndarray:
    """W after some damped Newton steps."""
    A = problem.A
    S = A @ W.T
    loss, P = problem.loss(S)
    penalty = 0.5 * ridge * np.vdot(W, W)
    value = loss + penalty
    unit = ridge * np.eye(W.size)
    for _ in range(steps):
        residual = problem.residual(P)
        gradient = residual.T @ A
        gradient += ridge * W
        hessian = problem.hessian(P)
        hessian += unit
        try:
            step = np.linalg.solve(hessian, gradient.reshape(-1))
        except np.linalg.LinAlgError:  # rounding must not stop a training
            break
        step = step.reshape(W.shape)
        decrease = np.vdot(gradient, step)
        if not decrease > ENOUGH:
            break
        move = A @ step.T
        # Far from the optimum a full step can overshoot: halve it until the loss falls.
        for halvings in range(HALVINGS):
            W_new = W - step
            S_new = S - move
            loss, P = problem.loss(S_new)
            penalty = 0.5 * ridge * np.vdot(W_new, W_new)
            trial = loss + penalty
            expected = 1e-4 * 0.5**halvings * decrease
            if trial <= value - expected:
                break
            step *= 0.5
            move *= 0.5
        else:
            break
        W = W_new
        S = S_new
        value = trial
    return W


@QUIET
def evaluate(head: Head, batch: Batch) -> Scores:
    """Loss and score of an output layer as it is."""
    problem = OutputProblem(head, batch)
    S = problem.A @ weights_of(head).T
    return Scores(problem.loss(S)[0], problem.score(S))


def weights_of(head: Head) -> np.ndarray:
    """(W, b) as one matrix (c, n + 1)."""
    shape = (head.outputs, head.features + 1)
    W = np.empty(shape)
    W[:, :-1] = head.weight.numpy(force=True)
    W[:, -1] = head.bias.numpy(force=True)
    return W


def assign(head: Head, W: np.ndarray) -> None:
    """Set weights and biases from one matrix (c, n + 1)."""
    values = torch.from_numpy(W)
    head.weight.detach().copy_(values[:, :-1])
    head.bias.detach().copy_(values[:, -1])


@torch.no_grad()
def features(run: Callable[[Tensor], Tensor], y_0: Tensor) -> Tensor:
    """The last states y_N of all samples, computed in chunks that fit into memory."""
    return torch.cat([run(chunk) for chunk in y_0.split(CHUNK)])
