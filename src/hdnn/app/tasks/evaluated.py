"""How good the predictions of a trained model are, for the metrics of its run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hdnn.analysis import evaluation
from hdnn.base.parts import in_parts
from hdnn.data.table import Columns
from hdnn.heads import SigmoidHead, SoftmaxHead
from hdnn.model import Model


@torch.no_grad()
def evaluated(
    model: Model, columns: Columns, parts: dict[str, tuple[Tensor, Tensor]]
) -> dict[str, Any]:
    """What there is to say of the first part of the data that has rows; the last was trained on."""
    part = next(name for name, (x, _) in parts.items() if len(x))
    x, t = parts[part]
    found = in_parts(model, x)
    if not columns.classes:
        values, true = (columns.in_units(y.double().reshape(-1).numpy()) for y in (found, t))
        return {"part": part, **evaluation.of_values(true, values)}
    head = model.head
    assert isinstance(head, (SigmoidHead, SoftmaxHead))
    told = evaluation.of_classes(
        t.numpy(),
        head.probabilities(found).double().numpy(),
        columns.classes,
        found=head.predict(found).numpy(),
        usual=int(torch.bincount([*parts.values()][-1][1]).argmax()),
    )
    return {"part": part, **told}
