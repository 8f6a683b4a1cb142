"""Predictions: what one network says of some rows, or several networks together.

Several are the runs of one folder of seeds. For classes, their probabilities are averaged, and the
class with the largest mean is the prediction; `agreement` is the share of the runs that would have
predicted it alone. For values, the mean is the prediction, and `spread` is the standard deviation
over the runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hdnn.base.parts import in_parts
from hdnn.data.table import Columns
from hdnn.errors import CheckpointError
from hdnn.heads import SigmoidHead, SoftmaxHead
from hdnn.model import Model


@dataclass(frozen=True, eq=False)
class Answer:
    """What one network says: probabilities (rows, classes) of its classes, or values (rows,)."""

    target: str
    classes: list[str]  # empty for values
    found: np.ndarray
    chosen: np.ndarray  # numbers of classes, or the values
    true: np.ndarray | None = None  # the same, where they are known
    about: dict[str, Any] = field(default_factory=dict)

    def told(self, *, proba: bool) -> dict[str, Any]:
        """The predictions of one run as plain values, with their score if that is known."""
        result: dict[str, Any] = {"rows": len(self.found), "target": self.target, **self.about}
        if not self.classes:
            result["predictions"] = self.found.tolist()
            if self.true is not None:
                result["rmse"] = float(np.sqrt(np.mean((self.true - self.found) ** 2)))
            return result
        result["predictions"] = [self.classes[k] for k in self.chosen]
        if proba:
            result["probabilities"] = dict(zip(self.classes, self.found.T.tolist(), strict=True))
        if self.true is not None:
            result["accuracy"] = float((self.true == self.chosen).mean())
        return result


@torch.no_grad()
def answer_of(
    model: Model,
    x: Tensor,
    columns: Columns | None,
    true: np.ndarray | None = None,
    about: dict[str, Any] | None = None,
) -> Answer:
    """What a model says of inputs x; without columns, classes are numbered and values bare."""
    scores, head = in_parts(model, x), model.head
    target, about = "class" if columns is None else columns.target, about or {}
    if not isinstance(head, (SigmoidHead, SoftmaxHead)):
        values = scores[:, 0].double().numpy()
        values = values if columns is None else columns.in_units(values)
        return Answer(target, [], values, values, true, about)
    chances, chosen = head.probabilities(scores).double().numpy(), head.predict(scores).numpy()
    classes = [str(k) for k in range(head.classes)] if columns is None else columns.classes
    return Answer(target, classes, chances, chosen, true, about)


def together(names: Sequence[str], answers: Sequence[Answer], *, proba: bool) -> dict[str, Any]:
    """The predictions of several runs together, and how far they agree."""
    first = answers[0]
    for name, one in zip(names, answers, strict=True):
        if (one.target, one.classes) != (first.target, first.classes):
            raise CheckpointError(
                f"{names[0]} and {name} predict different things, so they have no mean; keep runs "
                "of one target with the same classes in a folder of seeds."
            )
    if first.classes:
        mean = np.mean([one.found for one in answers], axis=0)
        chosen = mean.argmax(1)
        agreed = np.mean([one.chosen == chosen for one in answers], axis=0)
        more = {"agreement": agreed.tolist()}
    else:
        each = np.stack([one.found for one in answers])
        mean = chosen = each.mean(0)
        more = {"spread": (each.std(0, ddof=1) if len(each) > 1 else 0 * mean).tolist()}
    notes = [note for one in answers for note in one.about.get("notes", [])]
    about = {**first.about, **({"notes": [*dict.fromkeys(notes)]} if notes else {})}
    whole = Answer(first.target, first.classes, mean, chosen, first.true, about)
    return {**whole.told(proba=proba), "runs": len(answers), **more}
