"""What serves most tables: the defaults of the estimators and of `hdnn train --data FILE` alike.

Chosen on scikit-learn's own data sets (docs/results/estimators.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hdnn.errors import OptionError
from hdnn.heads import roomy_width

BOTH: Mapping[str, Any] = {
    "activation": "relu",
    "T": 1.0,
    "epochs": 50,
    "batch": 64,
    "learning_rate": 2e-2,
    "solver": "auto",
    "smoothness": 5e-3,
    "early_stopping": False,
    "validation_fraction": 0.1,
    "n_iter_no_change": 10,
}
# Weight decay and ridge are added to the sum of the losses: see `share`.
CLASSES: Mapping[str, Any] = {**BOTH, "layers": 4, "weight_decay": 0.05, "ridge": 1.0}
VALUES: Mapping[str, Any] = {**BOTH, "layers": 8, "weight_decay": 2.0, "ridge": 3.0}
# A run is named after its layers before its file is read, so one number serves both tasks.
RUN_LAYERS = VALUES["layers"]

NEWTON_OUTPUTS = 10  # outputs; up to this, "auto" solves the output layer for every minibatch
WIDEST = 4096  # features; a wider network must be asked for


def share(penalty: float, rows: float) -> float:
    """A penalty on the mean loss, from one on the sum: the more data, the smaller."""
    return penalty / rows


def solver_of(solver: str, *, batch: int, features: int, outputs: int) -> str:
    """What "auto" is: Newton's method where a minibatch determines an output layer of few outputs.

    `outputs` are those of the head: one for two classes.
    """
    if solver != "auto":
        return solver
    return "newton" if batch >= 2 * features and outputs <= NEWTON_OUTPUTS else "joint"


def width(inputs: int) -> int:
    """The features of a network for so many inputs; an error if they must be asked for."""
    n = roomy_width(inputs)
    if n > WIDEST:
        raise OptionError(
            f"{inputs} inputs make a network of {n} features, with {n * n / 2:.2g} weights a layer "
            f"or more; leave columns out (--drop), or say features={n} (--features {n}) if you "
            "have the time and the memory."
        )
    return n
