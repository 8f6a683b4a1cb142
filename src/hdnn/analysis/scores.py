"""How well a training on a graph does: at the root, which alone knows the labels."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from hdnn.analysis import evaluation
from hdnn.data.table import Columns
from hdnn.heads import RegressionHead
from hdnn.training.output import Head


def scored(
    part: str, head: Head, scores: Tensor, t: Tensor, columns: Columns | None
) -> dict[str, Any]:
    """Accuracy, or for values the root mean square error and R^2, and all of it in detail.

    `columns` give values their unit, and classes their names, where the data were a table.
    """
    found = head.predict(scores).detach()
    if isinstance(head, RegressionHead):
        values, true = (y.double().reshape(-1) for y in (found, t))
        if columns is not None:
            values, true = columns.in_units(values), columns.in_units(true)
        error = (values - true).square().mean().item()
        spread = (true - true.mean()).square().mean().item()
        result = {f"{part}_rmse": math.sqrt(error)}
        if spread > 0:
            result[f"{part}_r2"] = 1 - error / spread
        told = evaluation.of_values(true.numpy(), values.numpy())
    else:
        chances = head.probabilities(scores).detach().double().numpy()
        known = [] if columns is None else columns.classes
        names = known or [str(k) for k in range(chances.shape[1])]
        result = {f"{part}_accuracy": (found == t).double().mean().item()}
        told = evaluation.of_classes(t.numpy(), chances, names, found=found.numpy())
    return {**result, "evaluation": {"part": part, **told}}
