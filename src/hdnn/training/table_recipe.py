"""What serves most tables: the defaults of the estimators and of `hdnn train --data FILE` alike.

Chosen by log loss and R^2 on one group of tables and reported on another, which was fixed before:
docs/results/estimators.md. Weights are penalised as if each were drawn from a normal distribution
before any data were seen: the more rows, the less this counts, and the wider the network, the
smaller each weight is expected to be. So noisy labels leave the network near a linear model, and
data that need more get it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from hdnn.errors import OptionError
from hdnn.heads import roomy_width

# None depends on rows and columns: see the functions below.
DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "layers": 4,
        "features": None,
        "activation": "relu",
        "T": 4.0,
        "epochs": 40,
        "batch": None,
        "learning_rate": 2e-2,
        "weight_decay": None,
        "solver": "auto",
        "ridge": None,
        "smoothness": 0.0,
        "early_stopping": False,
        "validation_fraction": 0.1,
        "n_iter_no_change": 10,
    }
)
PENALTIES: Mapping[str, float] = MappingProxyType({"weight_decay": 0.5, "ridge": 0.01})
"""For each feature of the network, added to the sum of the losses: see `share`."""

WHOLE = 64  # rows, up to which all make one minibatch: a weight of two is then as good as two rows
WIDEST = 4096  # inputs; a network for more must be asked for


def penalty(name: str, features: int) -> float:
    """The default of "weight_decay" or "ridge" for a network of so many features."""
    return PENALTIES[name] * features


def share(penalty: float, rows: float) -> float:
    """A penalty on the mean loss, from one on the sum: the more data, the smaller."""
    return penalty / rows


def batch(rows: int) -> int:
    """The square root of twice the rows: few of them get enough steps, many not too many."""
    return max(rows, 1) if rows <= WHOLE else round(math.sqrt(2 * rows))


def solver_of(solver: str) -> str:
    """What "auto" is: the output layer is trained with the others, from where `begin` puts it.

    One that is solved for a minibatch would fit the noise in its labels.
    """
    return "joint" if solver == "auto" else solver


def width(inputs: int) -> int:
    """The features of a network for so many inputs; an error if they must be asked for."""
    n = roomy_width(inputs)
    if inputs > WIDEST:
        raise OptionError(
            f"{inputs} inputs make a network of {n} features, with {n * n / 2:.2g} weights a layer "
            f"or more; leave columns out (--drop), or say features={n} (--features {n}) if you "
            "have the time and the memory."
        )
    return n
