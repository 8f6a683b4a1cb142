"""What a training reports: a history at its end, and a `Moment` to callbacks after each step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

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


@dataclass
class Moment:
    """What a callback gets after each step; if it returns True, the training ends there."""

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


Callback = Callable[[Moment], bool | None]
