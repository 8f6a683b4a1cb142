"""The output layer for given features: solved with Newton's method, or the paper's Adam steps.

Both methods minimise the mean loss + ridge/2 |(W, b)|^2 over only the output layer, a convex
problem. With sample weights, the mean is weighted. The problem is small, and nearly singular if
`ridge` is small: it is solved with NumPy in float64, whatever the device and dtype of the model.
`W` denotes (W, b) as one matrix (c, n + 1).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hdnn.heads import RegressionHead, SigmoidHead, SoftmaxHead

Head = RegressionHead | SigmoidHead | SoftmaxHead
# features, targets, weights of the samples
Batch = tuple[Tensor, Tensor, Tensor | None]

SOLVERS = ("newton", "adam", "joint")
# For a minibatch, from zero. H1 with 1 layer on double moons then ends below 99% in 2 of 16
# training runs; in 16 of 24 with 3 steps, in 6 of 24 with 4, and in 7 of 16 with 2 or 3 steps from
# the output layer of the previous minibatch.
NEWTON_STEPS = 5
ADAM_STEPS = 10
REFIT_STEPS = 50
HALVINGS = 30  # halvings of a Newton step, at most
ENOUGH = 1e-14  # decrease of the loss, below which Newton's method ends
HALF = np.array(0.5)  # a product with it takes half as long as one with 0.5
EPSILON = np.array(1e-8)
QUIET = np.errstate(all="ignore")  # `fit` reports where numbers are not finite
CHUNK = 4096  # samples that go through a network at once


class Outcome(NamedTuple):
    """The loss of a minibatch, its accuracy and its gradient, with the output layer for it."""

    loss: float
    accuracy: float  # NaN for regression
    gradient: Tensor  # of the mean loss with respect to the features


class Scores(NamedTuple):
    """Log loss and accuracy, or mean squared error and R^2 (NaN if all targets are equal)."""

    loss: float
    score: float


class OutputProblem:
    """The mean loss of an output layer as a function of its scores S (c, B).

    A (n + 1, B) has the features and a row of ones, T (c, B) the targets, 0 and 1 for classes, and
    `share` (B,) the weight of each sample in the mean. Products are written `.dot`, which takes
    half as long as `@` for small matrices.
    """

    def __init__(self, head: Head, batch: Batch) -> None:
        y, t, weight = batch
        B, n = y.shape
        self.softmax = isinstance(head, SoftmaxHead)
        self.regression = isinstance(head, RegressionHead)
        self.A = np.ones((n + 1, B))
        self.A[:-1] = y.numpy(force=True).T
        T = t.numpy(force=True).reshape(B, -1).T
        if self.softmax:
            T = np.equal(T, np.arange(head.outputs)[:, None])
        self.T = T.astype(np.float64)
        self.share = np.full(B, 1 / B)
        if weight is not None:
            weights = weight.numpy(force=True).astype(np.float64)
            self.share = weights / weights.sum()
        # The gradient of the loss is linear in the predictions: these are its matrix and constant.
        self.weighted = self.A * self.share
        if self.regression:
            self.weighted *= 2 / len(self.T)
        self.moment = self.T.dot(self.weighted.T)

    def rows(self, index: np.ndarray) -> OutputProblem | None:
        """The problem for some of the samples; None if their weights are all zero."""
        share = self.share[index]
        total = share.sum()
        if not total:
            return None
        problem = copy.copy(self)
        problem.A = self.A.take(index, 1)
        problem.T = self.T.take(index, 1)
        problem.share = share / total
        problem.weighted = self.weighted.take(index, 1) / total
        problem.moment = problem.T.dot(problem.weighted.T)
        return problem

    def loss(self, S: np.ndarray) -> tuple[float, np.ndarray]:
        """The mean loss of scores, and the predictions."""
        if self.regression:
            error = S - self.T
            squares = (error * error).dot(self.share)
            return float(squares.mean()), S
        log_sum = self.log_sum(S)
        right = self.T * S
        if self.softmax:
            right = right.sum(0)
        losses = log_sum - right
        return losses.dot(self.share).item(), np.exp(S - log_sum)

    def log_sum(self, S: np.ndarray) -> np.ndarray:
        """The logarithm of the sum of exp(S) over the classes."""
        if not self.softmax:
            return np.logaddexp(0.0, S)
        highest = S.max(0)
        total = np.exp(S - highest).sum(0)
        return highest + np.log(total)

    def predictions(self, S: np.ndarray) -> np.ndarray:
        if self.regression:
            return S
        if self.softmax:
            return np.exp(S - self.log_sum(S))
        return HALF * np.tanh(HALF * S) + HALF

    def gradient(self, P: np.ndarray) -> np.ndarray:
        """The gradient of the mean loss with respect to W: (c, d)."""
        return P.dot(self.weighted.T) - self.moment

    def hessian(self, P: np.ndarray) -> np.ndarray:
        """The Hessian of the mean loss with respect to W, row by row: (c d, c d)."""
        c = len(P)
        d, B = self.A.shape
        slopes = np.ones_like(P) if self.regression else P
        if not (self.regression or self.softmax):
            slopes = P * (1 - P)
        if c == 1:
            return (self.weighted * slopes).dot(self.A.T)
        H = np.zeros((c, d, c, d))
        for i in range(c):
            scaled = self.weighted * slopes[i]
            H[i, :, i] = scaled.dot(self.A.T)
        H = H.reshape(c * d, c * d)
        if self.softmax:  # diag(P) - P P^T
            M = P[:, None] * self.A
            M = M.reshape(c * d, B)
            H -= (M * self.share).dot(M.T)
        return H

    def score(self, S: np.ndarray) -> float:
        """The share of correct classes, or for regression the mean of R^2 over the outputs."""
        if self.softmax:
            right = S.argmax(0) == self.T.argmax(0)
            return float(self.share.dot(right))
        if not self.regression:
            right = (S > 0) == (self.T > 0.5)
            return right.dot(self.share).item()
        weights = self.share
        mean = self.T.dot(weights)
        deviation = self.T - mean[:, None]
        spread = (deviation**2).dot(weights)
        residual = self.T - S
        error = (residual**2).dot(weights)
        differ = spread > 0
        if not differ.any():
            return math.nan
        unexplained = error[differ] / spread[differ]
        return float(1 - unexplained.mean())


class Output:
    """The output layer of a model, and how it is fitted: "newton", "adam" or "joint".

    With "joint" it is trained together with the hidden layers, and `solve` sets its gradient.
    """

    def __init__(
        self, head: Head, solver: str, ridge: float, rate: float
    ) -> None:
        self.head = head
        self.solver = solver
        self.ridge = ridge
        self.rate = rate
        self.shape = (head.outputs, head.features + 1)
        self.corrections: list[np.ndarray] = []  # for Adam's means, by step

    @QUIET
    def solve(self, batch: Batch) -> Outcome:
        """Find the output layer for these features, and the loss with it; set its weights."""
        head = self.head
        problem = OutputProblem(head, batch)
        if self.solver == "joint":
            W = weights_of(head)
        elif self.solver == "newton":
            zero = np.zeros(self.shape)
            W = newton(problem, zero, self.ridge, NEWTON_STEPS)
        else:
            W = self._adam([problem] * ADAM_STEPS)
        S = W.dot(problem.A)
        loss, P = problem.loss(S)
        if self.solver == "joint":
            gradient = torch.from_numpy(problem.gradient(P)).to(head.weight)
            head.weight.grad = gradient[:, :-1]
            head.bias.grad = gradient[:, -1]
        else:
            assign(head, W)
        accuracy = math.nan if problem.regression else problem.score(S)
        residual = (P - problem.T) * problem.weighted[-1]
        gradient = torch.from_numpy(residual.T.dot(W[:, :-1]))
        return Outcome(loss, accuracy, gradient.to(batch[0]))

    @QUIET
    def refit(
        self, batch: Batch, size: int, generator: torch.Generator
    ) -> None:
        """Fit the output layer to all data; Adam does so in minibatches of this size."""
        if self.solver == "joint":
            return
        problem = OutputProblem(self.head, batch)
        if self.solver == "newton":
            zero = np.zeros(self.shape)
            W = newton(problem, zero, self.ridge, REFIT_STEPS)
        else:
            W = self._adam(_minibatches(problem, size, generator))
        assign(self.head, W)

    def _adam(self, problems: Iterable[OutputProblem]) -> np.ndarray:
        """One Adam step on each problem, from zero: the paper's inner solver."""
        W = np.zeros(self.shape)
        powers = np.zeros((2, *self.shape))
        g, squares = powers
        means = np.zeros_like(powers)
        share = np.array([[[0.1]], [[0.001]]])
        ridge = np.array(self.ridge)
        for count, problem in enumerate(problems, 1):
            P = problem.predictions(W.dot(problem.A))
            np.add(problem.gradient(P), ridge * W, out=g)
            np.multiply(g, g, out=squares)
            # NaN once squares overflow: then training has diverged.
            means += share * (powers - means)
            if count > len(self.corrections):
                first = self.rate / (1 - 0.9**count)
                second = 1 / (1 - 0.999**count)
                self.corrections.append(np.array([[[first]], [[second]]]))
            move, root = means * self.corrections[count - 1]
            np.sqrt(root, out=root)
            root += EPSILON
            move /= root
            W -= move
        return W


def _minibatches(
    problem: OutputProblem, size: int, generator: torch.Generator
) -> Iterable[OutputProblem]:
    """All samples in a new order for each step of the refit, without empty minibatches."""
    count = len(problem.share)
    for _ in range(REFIT_STEPS):
        order = torch.randperm(count, generator=generator).numpy()
        for start in range(0, count, size):
            minibatch = problem.rows(order[start : start + size])
            if minibatch is not None:
                yield minibatch


def newton(
    problem: OutputProblem, W: np.ndarray, ridge: float, steps: int
) -> np.ndarray:
    """W after some damped Newton steps."""
    S = W.dot(problem.A)
    loss, P = problem.loss(S)
    penalty = 0.5 * ridge * np.vdot(W, W)
    value = loss + penalty
    unit = ridge * np.eye(W.size)
    for _ in range(steps):
        gradient = problem.gradient(P)
        gradient += ridge * W
        hessian = problem.hessian(P)
        hessian += unit
        try:
            step = np.linalg.solve(hessian, gradient.reshape(-1))
        except np.linalg.LinAlgError:  # rounding must not stop training
            break
        step = step.reshape(W.shape)
        decrease = np.vdot(gradient, step)
        if not decrease > ENOUGH:
            break
        move = step.dot(problem.A)
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
    S = weights_of(head).dot(problem.A)
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
    for p, values in ((head.weight, W[:, :-1]), (head.bias, W[:, -1])):
        p.detach().copy_(torch.from_numpy(values))


@torch.no_grad()
def features(run: Callable[[Tensor], Tensor], y_0: Tensor) -> Tensor:
    """The last states y_N of all samples, computed in chunks that fit into memory."""
    return torch.cat([run(chunk) for chunk in y_0.split(CHUNK)])
