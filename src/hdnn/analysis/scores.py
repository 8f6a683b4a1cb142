"""How well a trained model does at some rows: its scores, and with them all the details."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hdnn.analysis import evaluation
from hdnn.data.table import Columns
from hdnn.heads import RegressionHead, SigmoidHead, SoftmaxHead


def scored(
    part: str,
    head: RegressionHead | SigmoidHead | SoftmaxHead,
    outputs: Tensor,
    t: Tensor,
    columns: Columns | None,
    *,
    detailed: bool = True,
    usual: int | None = None,
) -> dict[str, Any]:
    """Accuracy, or for values the root mean square error and R^2; `detailed`, and an evaluation.

    `columns` give values their unit, and classes their names, where the data were a table. `usual`
    is as in `evaluation.of_classes`.
    """
    found, told = head.predict(outputs).detach(), {}
    if isinstance(head, RegressionHead):
        values, true = (y.double().reshape(-1).numpy() for y in (found, t))
        if columns is not None:
            values, true = columns.in_units(values), columns.in_units(true)
        rmse, r2 = evaluation.rmse_and_r2(true, values)
        result = {f"{part}_rmse": rmse, **({} if r2 is None else {f"{part}_r2": r2})}
        if detailed:
            told = evaluation.of_values(true, values)
    else:
        result = {f"{part}_accuracy": (found == t).double().mean().item()}
        if detailed:
            chances = head.probabilities(outputs).detach().double().numpy()
            known = [] if columns is None else columns.classes
            names = known or [str(k) for k in range(chances.shape[1])]
            given = {"found": found.numpy(), "usual": usual}
            told = evaluation.of_classes(t.numpy(), chances, names, **given)
    return {**result, **({"evaluation": {"part": part, **told}} if detailed else {})}
