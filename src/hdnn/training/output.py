"""The output layer for given features: solved to its optimum, or by the paper's few Adam steps.

Both minimise the mean loss + ridge/2 |(W, b)|^2 over the output layer alone, a convex problem. With
sample weights the mean is the weighted one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim.adam import adam as adam_steps

from hdnn.heads import RegressionHead, SigmoidHead, SoftmaxHead
from hdnn.training import small_heads

Head = RegressionHead | SigmoidHead | SoftmaxHead

Part = tuple[Tensor, Tensor, Tensor | None]  # features, targets, weights of the samples

SOLVERS = ("newton", "adam", "joint")
# A few steps suffice where the next minibatch has another optimum anyway.
MINIBATCH_STEPS = {"newton": 5, "adam": 10}
REFIT_STEPS = 50


class Outcome(NamedTuple):
    """The loss of a minibatch and its gradient, with the output layer found for it."""

    loss: float
    correct: float  # the fraction, for classes
    gradient: Tensor  # of the mean loss in the features


class Output:
    """An output layer and how it is found: "newton", "adam", or "joint" with the hidden layers."""

    def __init__(self, head: Head, solver: str, ridge: float, rate: float, y: Tensor) -> None:
        self.head, self.solver, self.ridge, self.rate = head, solver, ridge, rate
        usable = small_heads.usable(head, y, solver)
        self.small = small_heads.SmallHead(head) if usable else None

    def solve(self, y: Tensor, t: Tensor, weight: Tensor | None = None) -> Outcome:
        """Find the output layer for these features, and what the loss is with it."""
        part, solver = (y, t, weight), self.solver
        if solver == "joint":
            if self.small is None:
                return outcome(self.head, *part, joint=True)
            found, gradient = self.small.joint(*part)
            put_gradient(self.head, torch.from_numpy(gradient))
            return Outcome(*found)
        # Adam starts from zero each time: a rate that falls would leave it there.
        steps, options = MINIBATCH_STEPS[solver], (self.ridge, self.rate)
        if self.small is not None:
            if solver == "newton":
                return Outcome(*self.small.newton(*part, self.ridge, steps))
            return Outcome(*self.small.adam([part], *options, steps, len(y)))
        if solver == "newton":
            newton(self.head, *part, self.ridge, steps)
        else:
            adam(self.head, [part], *options, steps)
        return outcome(self.head, *part)

    def refit(
        self, y: Tensor, t: Tensor, weight: Tensor | None, generator: torch.Generator, batch: int
    ) -> None:
        """Fit the output layer to all data, in minibatches of an order of their own for Adam."""
        if self.solver == "newton":
            newton(self.head, y, t, weight, self.ridge, REFIT_STEPS)
            return
        orders = [torch.randperm(len(y), generator=generator) for _ in range(REFIT_STEPS)]
        orders = [order.to(y.device) for order in orders]
        passes = ((y[o], t[o], None if weight is None else weight[o]) for o in orders)
        if self.small is not None:
            self.small.adam(passes, self.ridge, self.rate, 1, batch)
        else:
            parts = (part for whole in passes for part in minibatches(whole, batch))
            adam(self.head, parts, self.ridge, self.rate, 1)


def minibatches(whole: Part, size: int) -> Iterator[Part]:
    """The minibatches of a pass over the data, without those whose samples all have weight 0."""
    y, t, weight = whole
    for low in range(0, len(y), size):
        part = slice(low, low + size)
        w = None if weight is None else weight[part]
        if w is None or bool(w.any()):
            yield y[part], t[part], w


class OutputProblem:
    """Features (B, n) with a one beside them, targets (B, c), and the share of each sample."""

    def __init__(
        self, head: Head, y: Tensor, t: Tensor, weight: Tensor | None, dtype: torch.dtype
    ) -> None:
        self.head = head
        A = y.new_ones(len(y), y.shape[1] + 1, dtype=dtype)
        A[:, :-1] = y
        self.A, c = A, head.weight.shape[0]
        if isinstance(head, SoftmaxHead):
            self.T = F.one_hot(t, c).to(dtype)
        else:
            self.T = t.reshape(len(y), c).to(dtype)
        if weight is None:
            self.share: Tensor | float = 1 / len(y)
        else:
            self.share = (weight / weight.sum()).to(dtype)[:, None]

    def scores(self, W: Tensor) -> Tensor:
        return self.A @ W.T

    def curvature(self) -> float:
        """The largest that the loss of a sample can have in its scores."""
        if isinstance(self.head, RegressionHead):
            return 2 / self.T.shape[1]
        return 0.5 if isinstance(self.head, SoftmaxHead) else 0.25

    def residual(self, S: Tensor) -> Tensor:
        """The gradient of the mean loss in the scores: (B, c)."""
        if isinstance(self.head, RegressionHead):
            return (S - self.T) * (2 / S.shape[1]) * self.share
        P = S.softmax(1) if isinstance(self.head, SoftmaxHead) else S.sigmoid()
        return (P - self.T) * self.share

    def loss(self, S: Tensor) -> Tensor:
        if isinstance(self.head, RegressionHead):
            each = (S - self.T).square().mean(1, keepdim=True)
        elif isinstance(self.head, SoftmaxHead):
            each = S.logsumexp(1, keepdim=True) - (S * self.T).sum(1, keepdim=True)
        else:
            each = F.softplus(S) - S * self.T
        return (each * self.share).sum()

    def hessian(self, S: Tensor) -> Tensor:
        """The Hessian of the mean loss in all of W, row by row: (c d, c d)."""
        A, c = self.A, S.shape[1]
        if isinstance(self.head, SigmoidHead):
            P = S.sigmoid()
            return (A * (P * (1 - P) * self.share)).T @ A
        softmax = isinstance(self.head, SoftmaxHead)
        P = S.softmax(1) if softmax else torch.full_like(S, 2 / c)
        D = P * self.share
        blocks = torch.block_diag(*((A * D[:, i : i + 1]).T @ A for i in range(c)))
        if softmax:  # diag(P) - P P^T
            M = (P[:, :, None] * A[:, None, :]).reshape(len(A), -1)
            blocks -= (M * self.share).T @ M
        return blocks


@torch.no_grad()
def outcome(
    head: Head, y: Tensor, t: Tensor, weight: Tensor | None, joint: bool = False
) -> Outcome:
    """The loss of features y and its gradient; `joint` sets that of the output layer too."""
    problem = OutputProblem(head, y, t, weight, y.dtype)
    scores = problem.scores(weights_of(head))
    residual = problem.residual(scores)
    if joint:
        put_gradient(head, residual.T @ problem.A)
    correct = 0.0
    if not isinstance(head, RegressionHead):
        correct = float((head.predict(scores) == t).double().mean())
    return Outcome(float(problem.loss(scores)), correct, residual @ head.weight)


def put_gradient(head: Head, gradient: Tensor) -> None:
    """Set the gradients of W and b, if they are trained."""
    for p, g in ((head.weight, gradient[:, :-1]), (head.bias, gradient[:, -1])):
        if p.requires_grad:
            p.grad = g.to(p.dtype).contiguous()


def weights_of(head: Head) -> Tensor:
    """(W, b) as one matrix (c, n + 1)."""
    return torch.cat([head.weight.detach(), head.bias.detach()[:, None]], 1)


@torch.no_grad()
def put(head: Head, W: Tensor) -> None:
    """Let (W, b) be these."""
    head.weight.copy_(W[:, :-1])
    head.bias.copy_(W[:, -1])


@torch.no_grad()
def newton(
    head: Head, y: Tensor, t: Tensor, weight: Tensor | None, ridge: float, steps: int
) -> None:
    """Damped Newton steps from zero; for ridge > 0 the result does not depend on the start.

    In float64 whatever the model's dtype: with little ridge the Hessian is nearly singular.
    """
    problem = OutputProblem(head, y, t, weight, torch.float64)
    c, d = head.weight.shape[0], problem.A.shape[1]
    W, S = problem.A.new_zeros(c, d), problem.A.new_zeros(len(y), c)
    unit = ridge * torch.eye(c * d, dtype=W.dtype, device=W.device)
    value = float(problem.loss(S))
    for _ in range(steps):
        gradient = problem.residual(S).T @ problem.A + ridge * W
        hessian = problem.hessian(S) + unit
        step, info = torch.linalg.solve_ex(hessian, gradient.reshape(-1, 1))
        if int(info):  # rounding in a nearly singular Hessian must not stop a training
            step = torch.linalg.lstsq(hessian, gradient.reshape(-1, 1)).solution
        step = step.reshape(c, d)
        decrease = float((gradient * step).sum())
        if not decrease > 1e-14:
            break
        move = problem.scores(step)
        # Far from the optimum a full step can overshoot: halve it until the loss falls.
        for halvings in range(30):
            size = 0.5**halvings
            W_new, S_new = W - size * step, S - size * move
            trial = float(problem.loss(S_new) + 0.5 * ridge * W_new.square().sum())
            if trial <= value - 1e-4 * size * decrease:
                W, S, value = W_new, S_new, trial
                break
        else:
            break
    put(head, W)


@torch.no_grad()
def adam(head: Head, parts: Iterable[Part], ridge: float, rate: float, steps: int) -> None:
    """So many Adam steps, from zero, on each minibatch in turn: the paper's inner solver.

    Calls the function that `torch.optim.Adam` uses: its `step` takes twice as long for few weights.
    """
    W = torch.zeros_like(weights_of(head))
    m, v, count = torch.zeros_like(W), torch.zeros_like(W), torch.zeros(())
    for y, t, weight in parts:
        problem = OutputProblem(head, y, t, weight, head.weight.dtype)
        for _ in range(steps):
            g = problem.residual(problem.scores(W)).T @ problem.A
            adam_steps(
                *([W], [g], [m], [v], [], [count]),
                foreach=False,
                amsgrad=False,
                beta1=0.9,
                beta2=0.999,
                lr=rate,
                weight_decay=ridge,
                eps=1e-8,
                maximize=False,
            )
    put(head, W)
