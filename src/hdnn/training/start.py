"""The output layer that joint training of a new model begins with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hdnn.base.parts import in_parts
from hdnn.model import Model
from hdnn.training.callbacks import begun
from hdnn.training.output import OutputProblem, put

STEPS = 8


@torch.no_grad()
def begin(model: Model, x: Tensor, t: Tensor, ridge: float, weight: Tensor | None = None) -> None:
    """Let the output layer of a new model begin near its optimum for the features that there are.

    Joint training must not begin with an output layer that ignores them: where nothing but a
    product of columns tells the classes apart, both it and the hidden layers would stay at zero.
    A few steps suffice. They are Newton's with the largest curvature that there can be in place of
    the Hessian (Boehning, 1992), so that one factorisation serves all steps and all outputs.
    """
    head: Any = model.head
    begun(model, ())  # implicit layers must have a solution, as in `fit`
    ridge *= 2  # a gradient that is zero but for rounding would make Adam's first steps random
    y = in_parts(model.features, x)
    problem = OutputProblem(
        head, y, t if t.is_floating_point() else t.long(), weight, torch.float64
    )
    A, W = problem.A, problem.A.new_zeros(head.weight.shape[0], head.weight.shape[1] + 1)
    H = problem.curvature() * (A * problem.share).T @ A
    H.diagonal().add_(ridge + 1e-9 * float(H.diagonal().mean()))  # some features may be all zero
    L, _ = torch.linalg.cholesky_ex(H)
    for _ in range(STEPS):
        gradient = problem.residual(problem.scores(W)).T @ A + ridge * W
        W = W - torch.cholesky_solve(gradient.T, L).T
    if bool(torch.isfinite(W).all()):  # else the features are not, which `fit` says
        put(head, W)
