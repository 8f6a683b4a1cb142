"""What a training reports: a history at its end, and a `Moment` to callbacks after each step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hdnn.model import Model


@dataclass
class History:
    """One entry an epoch: means of loss and accuracy over its minibatches, the rest at its end."""

    loss: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)  # empty for regression
    smoothness: list[float] = field(default_factory=list)  # R_K
    gradient: list[float] = field(default_factory=list)  # the norm of the last step's gradient
    learning_rate: list[float] = field(default_factory=list)
    seconds: float = 0.0
    validation_loss: list[float] = field(default_factory=list)  # empty where nothing is held out
    validation_score: list[float] = field(default_factory=list)  # accuracy, or R^2
    best_epoch: int = 0  # of the lowest held-out loss, from 1; 0 where nothing is held out

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(vars(History()) | state)  # pickles of earlier versions have fewer fields

    def curves(self) -> dict[str, list[float]]:
        """All that has one entry an epoch."""
        return {name: values for name, values in vars(self).items() if isinstance(values, list)}


@dataclass
class Moment:
    """What a callback gets after each step; if it returns True, the training ends there.

    With held-out rows, a callback that has a method `measured` is also given a moment after each
    epoch, with what was found there; its model is then what it would be if training ended there.
    """

    model: Model
    epoch: int  # from 1
    epochs: int
    step: int  # from 1, over all epochs
    steps: int
    loss: float
    accuracy: float | None
    gradient: float  # its norm, before any clipping
    learning_rate: float
    end_of_epoch: bool
    validation_loss: float | None = None
    validation_score: float | None = None


Callback = Callable[[Moment], bool | None]
