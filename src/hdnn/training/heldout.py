"""Held-out rows: what a model makes of data that it is not trained on, after each epoch.

The loss is what early stopping watches, not the score: a classifier that grows too sure of itself
has a rising log loss long before it puts more samples into the wrong class.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hdnn.base.parts import in_parts
from hdnn.errors import DataError
from hdnn.heads import RegressionHead
from hdnn.model import Model
from hdnn.training.checks import check_data, check_weight, head_of
from hdnn.training.history import History
from hdnn.training.output import OutputProblem


class HeldOutScores(NamedTuple):
    """What was found at held-out rows."""

    loss: float  # log loss, or mean square error
    score: float  # accuracy, or R^2; NaN where the targets do not differ


class HeldOut:
    """Rows (x, t) or (x, t, weight) that a model is measured at."""

    def __init__(self, model: Model, given: Any) -> None:
        if not isinstance(given, (tuple, list)) or len(given) not in (2, 3):
            raise DataError(
                "validation must be (x, t) or (x, t, weight), tensors of held-out rows, but got "
                f"{_described(given)}."
            )
        x, t = given[:2]
        weight = given[2] if len(given) == 3 else None
        check_data(model, x, t, "validation ")
        check_weight(weight, x, "validation ")
        if x.shape[1] != model.inputs:
            raise DataError(
                f"validation x has {x.shape[1]} columns, but the model takes {model.inputs}."
            )
        self.regression = isinstance(head_of(model), RegressionHead)
        self.y_0, self.weight = model.embed(x.detach()), weight
        self.t = t if self.regression else t.long()
        self.tensors = [one for one in (x, t, weight) if one is not None]

    @torch.no_grad()
    def measure(
        self, model: Model, features: Callable[[Tensor], Tensor], output: Tensor | None = None
    ) -> HeldOutScores:
        """Loss and score of the model as it is; `features` gives y_N.

        `output`: another output layer (W, b).
        """
        y = in_parts(features, self.y_0)
        head = head_of(model)
        problem = OutputProblem(head, y, self.t, self.weight, torch.float64)
        scores = head(y) if output is None else y @ output[:, :-1].T + output[:, -1]
        loss = float(problem.loss(scores.double()))
        if self.regression:
            return HeldOutScores(loss, self._r2(problem, scores.double()))
        right = (head.predict(scores) == self.t).double()[:, None]
        share = right.mean() if self.weight is None else (right * problem.share).sum()
        return HeldOutScores(loss, float(share))

    def _r2(self, problem: OutputProblem, scores: Tensor) -> float:
        """The mean of R^2 over those outputs whose targets differ."""
        mean = (problem.T * problem.share).sum(0)
        spread = ((problem.T - mean).square() * problem.share).sum(0)
        error = ((problem.T - scores).square() * problem.share).sum(0)
        known = spread > 0
        return float((1 - error[known] / spread[known]).mean()) if bool(known.any()) else math.nan


def best_epoch(losses: list[float]) -> int:
    """The epoch of the lowest loss, from 1; 0 where none is a number."""
    known = [(loss, epoch) for epoch, loss in enumerate(losses, 1) if not math.isnan(loss)]
    return min(known)[1] if known else 0


def text(history: History) -> str:
    """What is known of the held-out rows so far, for a line of progress."""
    losses, best = history.validation_loss, history.best_epoch
    if not losses:
        return ""
    lowest = f", lowest {losses[best - 1]:.4f} in epoch {best}" if best else ""
    return f"held-out {losses[-1]:.4f}{lowest}, "


def _described(given: Any) -> str:
    kind = type(given).__name__
    return f"a {kind} of {len(given)}" if isinstance(given, (tuple, list)) else kind
