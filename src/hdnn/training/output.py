"""The output layer for given features: solved by Newton's method, or by the paper's Adam steps.

Both minimise the mean loss + ridge/2 |(W, b)|^2 over the output layer alone, a convex problem. With
sample weights the mean is the weighted one. `W` stands for (W, b) as one matrix (c, n + 1).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim.adam import adam as adam_step

from hdnn.heads import RegressionHead, SigmoidHead, SoftmaxHead

Head = RegressionHead | SigmoidHead | SoftmaxHead
Batch = tuple[Tensor, Tensor, Tensor | None]  # features, targets, weights of the samples

SOLVERS = ("newton", "adam", "joint")
NEWTON_STEPS = 2  # for a minibatch, from the solution of the one before
ADAM_STEPS = 10  # for a minibatch, from zero
REFIT_STEPS = 50
START_STEPS = 8
CHUNK = 4096  # samples that go through a network at once


class Outcome(NamedTuple):
    """The loss of a minibatch, its accuracy and its gradient, with the output layer for it."""

    loss: float
    accuracy: float
    gradient: Tensor  # of the mean loss in the features


class Scores(NamedTuple):
    """Log loss and accuracy, or mean squared error and R^2 (NaN where all targets are equal)."""

    loss: float
    score: float


class OutputProblem:
    """The mean loss of an output layer as a function of its scores (B, c).

    A (B, n + 1) has the features and a column of ones, T (B, c) the targets, and `share` the weight
    of each sample in the mean.
    """

    def __init__(self, head: Head, batch: Batch, dtype: torch.dtype) -> None:
        y, t, weight = batch
        self.head = head
        self.A = F.pad(y.detach().to(dtype), (0, 1), value=1.0)
        if isinstance(head, SoftmaxHead):
            self.T = F.one_hot(t, head.outputs).to(dtype)
        else:
            self.T = t.reshape(len(y), head.outputs).to(dtype)
        self.share: Tensor | float = 1 / len(y)
        if weight is not None:
            self.share = (weight / weight.sum()).to(dtype)[:, None]

    def mean(self, values: Tensor) -> Tensor:
        return (values * self.share).sum()

    def loss(self, S: Tensor) -> Tensor:
        if isinstance(self.head, SigmoidHead):
            return self.mean(F.softplus(S) - S * self.T)
        if isinstance(self.head, SoftmaxHead):
            return self.mean(S.logsumexp(1, keepdim=True) - (S * self.T).sum(1, keepdim=True))
        return self.mean((S - self.T).square()) / S.shape[1]

    def predictions(self, S: Tensor) -> Tensor:
        if isinstance(self.head, SigmoidHead):
            return S.sigmoid()
        return S.softmax(1) if isinstance(self.head, SoftmaxHead) else S

    def residual(self, S: Tensor) -> Tensor:
        """The gradient of the mean loss in the scores: (B, c)."""
        residual = (self.predictions(S) - self.T) * self.share
        return residual * (2 / S.shape[1]) if isinstance(self.head, RegressionHead) else residual

    def hessian(self, S: Tensor) -> Tensor:
        """The Hessian of the mean loss in all of W, row by row: (c d, c d)."""
        A = self.A
        P = self.predictions(S)
        if isinstance(self.head, SigmoidHead):
            return A.T @ (A * (P * (1 - P) * self.share))
        if isinstance(self.head, RegressionHead):
            block = A.T @ (A * self.share) * (2 / S.shape[1])
            return torch.block_diag(*[block] * S.shape[1])
        blocks = [A.T @ (A * p[:, None] * self.share) for p in P.unbind(1)]
        M = (P[:, :, None] * A[:, None, :]).flatten(1)  # diag(P) - P P^T
        return torch.block_diag(*blocks) - M.T @ (M * self.share)

    def curvature(self) -> float:
        """The largest curvature that the loss of a sample can have in its scores."""
        if isinstance(self.head, RegressionHead):
            return 2 / self.head.outputs
        return 0.25 if isinstance(self.head, SigmoidHead) else 0.5

    def accuracy(self, S: Tensor) -> float:
        """The share of right classes; NaN for a regression."""
        if isinstance(self.head, RegressionHead):
            return math.nan
        if isinstance(self.head, SigmoidHead):
            right = (S > 0) == (self.T > 0.5)
        else:
            right = (S.argmax(1) == self.T.argmax(1))[:, None]
        return float(self.mean(right.to(S.dtype)))

    def r2(self, S: Tensor) -> float:
        """The mean of R^2 over those outputs whose targets differ."""
        mean = (self.T * self.share).sum(0)
        spread = ((self.T - mean).square() * self.share).sum(0)
        error = ((self.T - S).square() * self.share).sum(0)
        values = (1 - error / spread)[spread > 0]
        return float(values.mean()) if len(values) else math.nan

    def outcome(self, S: Tensor) -> Outcome:
        gradient = self.residual(S) @ self.head.weight.to(S.dtype)
        gradient = gradient.to(self.head.weight.dtype)
        return Outcome(float(self.loss(S)), self.accuracy(S), gradient)


class Output:
    """The output layer of a model, and how it is found: "newton", "adam" or "joint".

    With "joint" it is trained together with the hidden layers, and `solve` sets its gradient.
    """

    def __init__(self, head: Head, solver: str, ridge: float, rate: float) -> None:
        self.head = head
        self.solver = solver
        self.ridge = ridge
        self.rate = rate

    @torch.no_grad()
    def solve(self, batch: Batch) -> Outcome:
        """Find the output layer for these features, and the loss with it."""
        dtype = torch.float64 if self.solver == "newton" else batch[0].dtype
        problem = OutputProblem(self.head, batch, dtype)
        if self.solver == "newton":
            S = newton(problem, self.ridge, NEWTON_STEPS)
            return problem.outcome(S)
        if self.solver == "adam":
            self._adam([problem] * ADAM_STEPS)
        W = weights_of(self.head, dtype)
        S = problem.A @ W.T
        if self.solver == "joint":
            gradient = problem.residual(S).T @ problem.A
            self.head.weight.grad = gradient[:, :-1].contiguous()
            self.head.bias.grad = gradient[:, -1].contiguous()
        return problem.outcome(S)

    @torch.no_grad()
    def refit(self, batch: Batch, size: int, generator: torch.Generator) -> None:
        """Fit the output layer to all data; Adam does so in minibatches of this size."""
        if self.solver == "newton":
            newton(OutputProblem(self.head, batch, torch.float64), self.ridge, REFIT_STEPS)
        elif self.solver == "adam":
            self._adam(self._minibatches(batch, size, generator))

    def _minibatches(
        self, batch: Batch, size: int, generator: torch.Generator
    ) -> Iterable[OutputProblem]:
        y, t, weight = batch
        for _ in range(REFIT_STEPS):
            order = torch.randperm(len(y), generator=generator).to(y.device)
            for index in order.split(size):
                part = None if weight is None else weight[index]
                if part is None or part.any():
                    yield OutputProblem(self.head, (y[index], t[index], part), y.dtype)

    def _adam(self, problems: Iterable[OutputProblem]) -> None:
        """One Adam step on each problem, from zero: the paper's inner solver."""
        W = torch.zeros_like(weights_of(self.head))
        m = torch.zeros_like(W)
        v = torch.zeros_like(W)
        count = torch.zeros((), device=W.device)
        for problem in problems:
            g = problem.residual(problem.A @ W.T).T @ problem.A
            adam_step(
                [W],
                [g],
                [m],
                [v],
                [],
                [count],
                fused=True,
                amsgrad=False,
                beta1=0.9,
                beta2=0.999,
                lr=self.rate,
                weight_decay=self.ridge,
                eps=1e-8,
                maximize=False,
            )
        assign(self.head, W)

    @torch.no_grad()
    def start(self, batch: Batch) -> None:
        """Let joint training begin near the optimum for the features that there are.

        An output layer that ignores the features would leave them without a gradient. The steps are
        Newton's with the largest possible curvature in place of the Hessian (Boehning, 1992), so
        that one factorisation serves all steps and outputs.
        """
        problem = OutputProblem(self.head, batch, torch.float64)
        A = problem.A
        ridge = 2 * self.ridge  # no gradient may be zero but for rounding: Adam would magnify it
        W = A.new_zeros(self.head.outputs, A.shape[1])
        H = problem.curvature() * (A * problem.share).T @ A
        H.diagonal().add_(ridge + 1e-9 * H.diagonal().mean())  # some features may be zero
        L, _ = torch.linalg.cholesky_ex(H)
        for _ in range(START_STEPS):
            gradient = problem.residual(A @ W.T).T @ A + ridge * W
            W -= torch.cholesky_solve(gradient.T, L).T
        if bool(W.isfinite().all()):  # else the features are not, and `fit` will say so
            assign(self.head, W)


def newton(problem: OutputProblem, ridge: float, steps: int) -> Tensor:
    """Damped Newton steps from the present weights; returns the scores.

    In float64 whatever the dtype of the model: with little ridge the Hessian is nearly singular.
    """
    A = problem.A
    W = weights_of(problem.head, A.dtype)
    S = A @ W.T
    value = problem.loss(S) + 0.5 * ridge * W.square().sum()
    for _ in range(steps):
        gradient = torch.addmm(W, problem.residual(S).T, A, beta=ridge)
        hessian = problem.hessian(S)
        hessian.diagonal().add_(ridge)
        L, info = torch.linalg.cholesky_ex(hessian)
        if info:  # rounding in a nearly singular Hessian must not stop a training
            break
        step = torch.cholesky_solve(gradient.reshape(-1, 1), L).view_as(W)
        decrease = (gradient * step).sum()
        if not decrease > 1e-14:
            break
        move = A @ step.T
        # Far from the optimum a full step can overshoot: halve it until the loss falls.
        for halvings in range(30):
            size = 0.5**halvings
            W_new = W - size * step
            S_new = S - size * move
            trial = problem.loss(S_new) + 0.5 * ridge * W_new.square().sum()
            if trial <= value - 1e-4 * size * decrease:
                W, S, value = W_new, S_new, trial
                break
        else:
            break
    assign(problem.head, W)
    return S


@torch.no_grad()
def evaluate(head: Head, batch: Batch) -> Scores:
    """Loss and score of an output layer as it is."""
    problem = OutputProblem(head, batch, torch.float64)
    S = problem.A @ weights_of(head, torch.float64).T
    score = problem.r2(S) if isinstance(head, RegressionHead) else problem.accuracy(S)
    return Scores(float(problem.loss(S)), score)


def weights_of(head: Head, dtype: torch.dtype | None = None) -> Tensor:
    """(W, b) as one matrix (c, n + 1)."""
    return torch.cat([head.weight.detach(), head.bias.detach()[:, None]], 1).to(dtype)


@torch.no_grad()
def assign(head: Head, W: Tensor) -> None:
    """Set the weights and biases from one matrix (c, n + 1)."""
    head.weight.copy_(W[:, :-1])
    head.bias.copy_(W[:, -1])


@torch.no_grad()
def features(run, y_0: Tensor) -> Tensor:
    """The last states y_N of all samples, computed in chunks that fit into memory."""
    return torch.cat([run(chunk) for chunk in y_0.split(CHUNK)])
