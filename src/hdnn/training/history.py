"""What a training reports: a history at its end, and a `Moment` to callbacks after each step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hdnn.model import Model


@dataclass
class History:
    """What a training went through, one entry an epoch.

    Loss and accuracy are means over the minibatches of an epoch; the rest is measured at its end.
    `hdnn.plotting.training_history` draws it.

    Attributes:
        loss: of the training data.
        accuracy: of the training data; empty for regression.
        smoothness: R_K, how much neighbouring layers differ.
        gradient: the norm of the last step's gradient.
        learning_rate: that of the last step.
        seconds: how long the whole training took.
        validation_loss: of the held-out rows; empty where nothing is held out.
        validation_score: their accuracy, or `R^2` of a regression.
        best_epoch: that of the lowest held-out loss, from 1; 0 where nothing is held out.

    Examples:
        >>> import hdnn, torch
        >>> x, t = torch.randn(50, 2), torch.randint(2, (50,))
        >>> model = hdnn.Model(hdnn.Augment(2, 4), hdnn.H2(4, 8), hdnn.SigmoidHead(4))
        >>> history = hdnn.training.fit(model, x, t, epochs=3, progress=False)
        >>> len(history.loss), len(history.accuracy), history.best_epoch
        (3, 3, 0)
    """

    loss: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)
    smoothness: list[float] = field(default_factory=list)
    gradient: list[float] = field(default_factory=list)
    learning_rate: list[float] = field(default_factory=list)
    seconds: float = 0.0
    validation_loss: list[float] = field(default_factory=list)
    validation_score: list[float] = field(default_factory=list)
    best_epoch: int = 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(vars(History()) | state)  # pickles of earlier versions have fewer fields

    def curves(self) -> dict[str, list[float]]:
        """All that has one entry an epoch, by name."""
        return {name: values for name, values in vars(self).items() if isinstance(values, list)}


@dataclass
class Moment:
    """What a callback of `fit` gets after each step; if it returns True, the training ends there.

    With held-out rows, a callback that has a method `measured` is also given a moment after each
    epoch, with what was found there; its model is then what it would be if training ended there.

    Attributes:
        model: the model in training.
        epoch: from 1.
        epochs: how many there will be at the most.
        step: from 1, over all epochs.
        steps: how many there will be at the most.
        loss: of this minibatch.
        accuracy: of this minibatch; None for regression.
        gradient: the norm of the gradient, before any clipping.
        learning_rate: of this step.
        end_of_epoch: whether this was the last step of its epoch.
        validation_loss: of the held-out rows, for `measured` only.
        validation_score: of the held-out rows, for `measured` only.

    Examples:
        >>> import hdnn, torch
        >>> x, t = torch.randn(50, 2), torch.randint(2, (50,))
        >>> model = hdnn.Model(hdnn.Augment(2, 4), hdnn.H2(4, 8), hdnn.SigmoidHead(4))
        >>> def stop_early(moment: hdnn.training.Moment) -> bool:
        ...     return moment.epoch == 2 and moment.end_of_epoch
        >>> history = hdnn.training.fit(model, x, t, callbacks=[stop_early], progress=False)
        >>> len(history.loss)
        2
    """

    model: Model
    epoch: int
    epochs: int
    step: int
    steps: int
    loss: float
    accuracy: float | None
    gradient: float
    learning_rate: float
    end_of_epoch: bool
    validation_loss: float | None = None
    validation_score: float | None = None


Callback = Callable[[Moment], bool | None]
