"""What serves most tables: the defaults of the estimators and of `hdnn train --data FILE` alike.

Chosen by log loss and R^2 on one group of tables and reported on another, which was fixed before:
docs/results/estimators.md. Weights are penalised as if each were drawn from a normal distribution
before any data were seen: the more rows, the less this counts, and the wider the network, the
smaller each weight is expected to be. So noisy labels leave the network near a linear model, and
data that need more get it. Wide networks, whose weights add up to more, take smaller and fewer
steps.
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
        "epochs": None,
        "batch": None,
        "learning_rate": None,
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
MOST_DECAY = 3.3  # for the square root of the features: noise in weights grows no faster than that

EPOCHS, LEAST_EPOCHS = 40, 10
RATE = 2e-2
MANY, WIDE = 24, 64  # features, above which the learning rate and the epochs fall

WHOLE = 64  # rows, up to which all make one minibatch: a weight of two is then as good as two rows
TILE = 32  # rows that the compiled kernels take at once: a part of that costs as much
WIDEST = 4096  # inputs; a network for more must be asked for


def penalty(name: str, features: int) -> float:
    """The default of "weight_decay" or "ridge" for a network of so many features."""
    usual = PENALTIES[name] * features
    return min(usual, MOST_DECAY * math.sqrt(features)) if name == "weight_decay" else usual


def share(penalty: float, rows: float) -> float:
    """A penalty on the mean loss, from one on the sum: the more data, the smaller."""
    return penalty / rows


def epochs(features: int) -> int:
    """The default for a network of so many features; wide ones need fewer, and cost more."""
    return max(LEAST_EPOCHS, round(EPOCHS * min(1.0, WIDE / features)))


def learning_rate(features: int) -> float:
    """The default for a network of so many features: each step changes all of their weights."""
    return RATE * math.sqrt(min(1.0, MANY / features))


def batch(rows: int) -> int:
    """The square root of twice the rows: few of them get enough steps, many not too many.

    Rounded up to whole tiles, which cost no more.
    """
    return max(rows, 1) if rows <= WHOLE else TILE * math.ceil(math.sqrt(2 * rows) / TILE)


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
