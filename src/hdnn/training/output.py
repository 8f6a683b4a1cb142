"""The output layer for given features: solved by Newton's method, or by the paper's Adam steps.

Both minimise the mean loss + ridge/2 |(W, b)|^2 over the output layer alone, a convex problem. With
sample weights the mean is the weighted one. The problem is small, and nearly singular where there
is little ridge: it is solved in NumPy, in float64, whatever the device and dtype of the model.
`W` stands for (W, b) as one matrix (c, n + 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hdnn.heads import RegressionHead, SigmoidHead, SoftmaxHead

Head = RegressionHead | SigmoidHead | SoftmaxHead
Batch = tuple[
    Tensor, Tensor, Tensor | None
]  # features, targets, weights of the samples

SOLVERS = ("newton", "adam", "joint")
# For a minibatch, from zero: the next one has another optimum anyway.
NEWTON_STEPS = 5
ADAM_STEPS = 10
REFIT_STEPS = 50
START_STEPS = 8
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
    """The mean loss of an output layer as a function of its scores (B, c).

    A (B, n + 1) has the features and a column of ones, T (B, c) the targets, and `share` (B, 1) the
    weight of each sample in the mean.
    """

    def __init__(self, head: Head, batch: Batch) -> None:
        y, t, weight = batch
        self.head = head
        self.softmax = isinstance(head, SoftmaxHead)
        self.regression = isinstance(head, RegressionHead)
        B = len(y)
        self.A = np.ones((B, y.shape[1] + 1))
        self.A[:, :-1] = y.numpy(force=True)
        targets = t.numpy(force=True)
        if self.softmax:
            self.T = np.zeros((B, head.outputs))
            self.T[np.arange(B), targets] = 1.0
        else:
            self.T = targets.reshape(B, head.outputs).astype(np.float64)
        self.share = np.full((B, 1), 1 / B)
        if weight is not None:
            weights = weight.numpy(force=True).astype(np.float64)
            self.share = (weights / weights.sum())[:, None]
        self.shared_T = self.share * self.T

    def log_sum(self, S: np.ndarray) -> np.ndarray:
        """The logarithm of the sum of exp(S) over the classes: (B, 1)."""
        if not self.softmax:
            return np.logaddexp(0.0, S)
        highest = S.max(1, keepdims=True)
        return highest + np.log(np.exp(S - highest).sum(1, keepdims=True))

    def loss(self, S: np.ndarray) -> tuple[float, np.ndarray]:
        """The mean loss of scores, and the predictions."""
        if self.regression:
            error = S - self.T
            return float(np.vdot(self.share * error, error)) / S.shape[1], S
        log_sum = self.log_sum(S)
        loss = np.vdot(self.share, log_sum) - np.vdot(self.shared_T, S)
        return float(loss), np.exp(S - log_sum)

    def predictions(self, S: np.ndarray) -> np.ndarray:
        if self.regression:
            return S
        if not self.softmax:
            return 0.5 * np.tanh(0.5 * S) + 0.5
        return np.exp(S - self.log_sum(S))

    def residual(self, P: np.ndarray) -> np.ndarray:
        """The gradient of the mean loss in the scores, from the predictions: (B, c)."""
        residual = self.share * P - self.shared_T
        return residual * (2 / P.shape[1]) if self.regression else residual

    def hessian(self, P: np.ndarray) -> np.ndarray:
        """The Hessian of the mean loss in all of W, row by row: (c d, c d)."""
        A = self.A
        c, d = P.shape[1], A.shape[1]
        if c == 1:
            curvature = np.full_like(P, 2.0) if self.regression else P * (1 - P)
            return A.T @ (A * (curvature * self.share))
        H = np.zeros((c, d, c, d))
        for i in range(c):
            curvature = (
                np.full_like(P[:, :1], 2 / c)
                if self.regression
                else P[:, i : i + 1]
            )
            H[i, :, i] = A.T @ (A * (curvature * self.share))
        H = H.reshape(c * d, c * d)
        if self.softmax:  # diag(P) - P P^T
            M = (P[:, :, None] * A[:, None, :]).reshape(len(A), c * d)
            H -= M.T @ (M * self.share)
        return H

    def curvature(self) -> float:
        """The largest curvature that the loss of a sample can have in its scores."""
        if self.regression:
            return 2 / self.head.outputs
        return 0.5 if self.softmax else 0.25

    def accuracy(self, S: np.ndarray) -> float:
        """The share of right classes; NaN for a regression."""
        if self.regression:
            return math.nan
        if self.softmax:
            wrong = (S.argmax(1) != self.T.argmax(1))[:, None]
        else:
            wrong = (S > 0) != (self.T > 0.5)
        return 1 - float(np.vdot(self.share, wrong))

    def r2(self, S: np.ndarray) -> float:
        """The mean of R^2 over those outputs whose targets differ."""
        mean = (self.T * self.share).sum(0)
        spread = ((self.T - mean) ** 2 * self.share).sum(0)
        error = ((self.T - S) ** 2 * self.share).sum(0)
        differ = spread > 0
        return (
            float((1 - error[differ] / spread[differ]).mean())
            if differ.any()
            else math.nan
        )


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
    def solve(self, batch: Batch, write: bool = True) -> Outcome:
        """Find the output layer for these features, and the loss with it; set its weights."""
        problem = OutputProblem(self.head, batch)
        if self.solver == "newton":
            W = newton(problem, self.ridge, NEWTON_STEPS)
        elif self.solver == "adam":
            W = self._adam([problem] * ADAM_STEPS)
        else:
            W = weights_of(self.head)
        S = problem.A @ W.T
        loss, P = problem.loss(S)
        residual = problem.residual(P)
        if self.solver == "joint":
            gradient = torch.from_numpy(residual.T @ problem.A).to(
                self.head.weight
            )
            self.head.weight.grad = gradient[:, :-1]
            self.head.bias.grad = gradient[:, -1]
        elif write:
            assign(self.head, W)
        gradient = torch.from_numpy(residual @ W[:, :-1]).to(batch[0])
        return Outcome(loss, problem.accuracy(S), gradient)

    @QUIET
    def refit(
        self, batch: Batch, size: int, generator: torch.Generator
    ) -> None:
        """Fit the output layer to all data; Adam does so in minibatches of this size."""
        if self.solver == "newton":
            assign(
                self.head,
                newton(
                    OutputProblem(self.head, batch), self.ridge, REFIT_STEPS
                ),
            )
        elif self.solver == "adam":
            assign(
                self.head, self._adam(self._minibatches(batch, size, generator))
            )

    def _minibatches(
        self, batch: Batch, size: int, generator: torch.Generator
    ) -> Iterable[OutputProblem]:
        y, t, weight = batch
        for _ in range(REFIT_STEPS):
            order = torch.randperm(len(y), generator=generator).to(y.device)
            for index in order.split(size):
                weights = None if weight is None else weight[index]
                if weights is None or weights.any():
                    yield OutputProblem(
                        self.head, (y[index], t[index], weights)
                    )

    def _adam(self, problems: Iterable[OutputProblem]) -> np.ndarray:
        """One Adam step on each problem, from zero: the paper's inner solver."""
        W = np.zeros((self.head.outputs, self.head.features + 1))
        m = np.zeros_like(W)  # 10 times the mean of the gradients
        v = np.zeros_like(W)
        for count, problem in enumerate(problems, 1):
            P = problem.predictions(problem.A @ W.T)
            g = problem.residual(P).T @ problem.A
            g += self.ridge * W
            m *= 0.9
            m += g
            v += 0.001 * (
                g * g - v
            )  # NaN once squares overflow: then the training has diverged
            scale = math.sqrt(1 - 0.999**count)
            m_hat = m / (np.sqrt(v) + 1e-8 * scale)
            m_hat *= 0.1 * self.rate * scale / (1 - 0.9**count)
            W -= m_hat
        return W

    @QUIET
    def start(self, batch: Batch) -> None:
        """Let joint training begin near the optimum for the features that there are.

        An output layer that ignores the features would leave them without a gradient. The steps are
        Newton's with the largest possible curvature in place of the Hessian (Boehning, 1992), so
        that one factorisation serves all steps and outputs.
        """
        problem = OutputProblem(self.head, batch)
        A = problem.A
        ridge = (
            2 * self.ridge
        )  # no gradient may be zero but for rounding: Adam would magnify it
        H = problem.curvature() * (A * problem.share).T @ A
        H += np.eye(len(H)) * (
            ridge + 1e-9 * H.diagonal().mean()
        )  # some features may be zero
        inverse = np.linalg.inv(H)
        W = np.zeros((self.head.outputs, len(H)))
        for _ in range(START_STEPS):
            P = problem.predictions(A @ W.T)
            W -= (problem.residual(P).T @ A + ridge * W) @ inverse
        if np.isfinite(
            W
        ).all():  # else the features are not, and `fit` will say so
            assign(self.head, W)


def newton(problem: OutputProblem, ridge: float, steps: int) -> np.ndarray:
    """W after damped Newton steps from zero."""
    A = problem.A
    W = np.zeros((problem.T.shape[1], A.shape[1]))
    S = np.zeros_like(problem.T)
    value, P = problem.loss(S)
    unit = ridge * np.eye(W.size)
    for _ in range(steps):
        gradient = problem.residual(P).T @ A + ridge * W
        hessian = problem.hessian(P)
        hessian += unit
        try:
            step = np.linalg.solve(hessian, gradient.reshape(-1)).reshape(
                W.shape
            )
        except np.linalg.LinAlgError:  # rounding must not stop a training
            break
        decrease = np.vdot(gradient, step)
        if not decrease > ENOUGH:
            break
        move = A @ step.T
        # Far from the optimum a full step can overshoot: halve it until the loss falls.
        for halvings in range(HALVINGS):
            W_new = W - step
            S_new = S - move
            loss, P = problem.loss(S_new)
            trial = loss + 0.5 * ridge * np.vdot(W_new, W_new)
            if trial <= value - 1e-4 * 0.5**halvings * decrease:
                break
            step *= 0.5
            move *= 0.5
        else:
            break
        W, S, value = W_new, S_new, trial
    return W


@QUIET
def evaluate(head: Head, batch: Batch) -> Scores:
    """Loss and score of an output layer as it is."""
    problem = OutputProblem(head, batch)
    S = problem.A @ weights_of(head).T
    score = problem.r2(S) if problem.regression else problem.accuracy(S)
    return Scores(problem.loss(S)[0], score)


def weights_of(head: Head) -> np.ndarray:
    """(W, b) as one matrix (c, n + 1)."""
    W = np.empty((head.outputs, head.features + 1))
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
