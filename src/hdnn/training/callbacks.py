"""The history of a training run, and callbacks of `fit`.

A callback is called with a `Moment` after each step; returning True ends training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from hdnn.errors import OptionError, choose, positive_int, require
from hdnn.heads import Model
from hdnn.networks import Network

MONITORS = ("loss", "accuracy", "validation_loss", "validation_score")


@dataclass
class History:
    """Values for each epoch of a training run; `hdnn.plotting.training_history` draws them.

    Loss and accuracy are means over the minibatches of an epoch; the other fields are values at its
    end.

    Attributes:
        loss: the loss on the training data.
        accuracy: the accuracy on the training data; NaN for regression.
        smoothness: R_K, the differences between neighbouring layers.
        gradient: the norm of the last step's gradient.
        learning_rate: the learning rate of the last step.
        validation_loss: the loss on the held-out rows; empty if there are none.
        validation_score: the accuracy on the held-out rows, or R^2 for regression.
        best_epoch: the epoch of the lowest held-out loss, counted from 1; 0 without held-out rows.
        seconds: the duration of the training run.
    """

    loss: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)
    smoothness: list[float] = field(default_factory=list)
    gradient: list[float] = field(default_factory=list)
    learning_rate: list[float] = field(default_factory=list)
    validation_loss: list[float] = field(default_factory=list)
    validation_score: list[float] = field(default_factory=list)
    best_epoch: int = 0
    seconds: float = 0.0

    def add(self, moments: Sequence[Moment], smoothness: float) -> None:
        """Add the epoch that these steps make up."""
        self.loss.append(fmean(moment.loss for moment in moments))
        self.accuracy.append(fmean(moment.accuracy for moment in moments))
        self.smoothness.append(smoothness)
        self.gradient.append(moments[-1].gradient)
        self.learning_rate.append(moments[-1].learning_rate)

    def curves(self) -> dict[str, list[float]]:
        """All lists with an entry for each epoch, by name."""
        return {
            name: values
            for name, values in vars(self).items()
            if isinstance(values, list)
        }

    def text(self) -> str:
        """The text of the progress line for the last epoch."""
        text = f"loss {self.loss[-1]:.4f}"
        if not math.isnan(self.accuracy[-1]):
            text += f", {100 * self.accuracy[-1]:.1f}% right"
        if self.validation_loss:
            text += f", held-out loss {self.validation_loss[-1]:.4f}"
            text += f" (lowest in epoch {self.best_epoch})"
        return text


@dataclass
class Moment:
    """The argument of a callback of `fit`, after each step.

    Attributes:
        model: the model in training.
        epoch: the number of the epoch, from 1.
        epochs: the largest number of epochs.
        step: the number of the step, from 1, over all epochs.
        steps: the largest number of steps.
        loss: the loss of this minibatch.
        accuracy: the accuracy on this minibatch; NaN for regression.
        gradient: the norm of the gradient, before any clipping.
        learning_rate: the learning rate of this step.
        history: the `History` of all epochs so far.
        end_of_epoch: True in the last step of an epoch; the history then includes that epoch.

    Examples:
        >>> import hdnn, torch
        >>> x, t = torch.randn(50, 2), torch.randint(2, (50,))
        >>> model = hdnn.Model(hdnn.Augment(2, 4), hdnn.H2(4, 8), hdnn.SigmoidHead(4))
        >>> def stop_early(moment: hdnn.training.Moment) -> bool:
        ...     return moment.epoch == 2 and moment.end_of_epoch
        >>> history = hdnn.training.fit(model, x, t, callbacks=[stop_early])
        >>> len(history.loss)
        2
    """

    model: Any
    epoch: int
    epochs: int
    step: int
    steps: int
    loss: float
    accuracy: float
    gradient: float
    learning_rate: float
    history: History
    end_of_epoch: bool = False


Callback = Callable[[Moment], bool | None]


class EarlyStopping:
    """A callback that ends training after `patience` epochs without an improvement.

    `fit(validation=.., patience=..)` is a shorthand for watching the held-out loss, and also
    restores the model of the best epoch.

    Args:
        patience: the number of epochs without an improvement.
        monitor: "loss", "accuracy", "validation_loss" or "validation_score" of the `History`.
        minimum: the smallest improvement that counts.

    Examples:
        >>> import hdnn, torch
        >>> x, t = torch.randn(50, 2), torch.randint(2, (50,))  # nothing to learn
        >>> model = hdnn.Model(hdnn.Augment(2, 4), hdnn.H2(4, 8), hdnn.SigmoidHead(4))
        >>> early = hdnn.training.EarlyStopping(patience=1, minimum=0.1)
        >>> len(hdnn.training.fit(model, x, t, callbacks=[early]).loss)
        2
    """

    def __init__(
        self, patience: int = 10, monitor: str = "loss", minimum: float = 0.0
    ) -> None:
        self.patience = positive_int("patience", patience)
        self.monitor = choose("monitor", monitor, MONITORS)
        self.minimum = minimum

    def __call__(self, moment: Moment) -> bool:
        """True to end training."""
        if not moment.end_of_epoch:
            return False
        values = getattr(moment.history, self.monitor)
        if not values or math.isnan(values[0]):
            raise OptionError(
                f"EarlyStopping watches {self.monitor}, which this training run does not record; "
                'pass validation=(x, t) to fit, or watch "loss".'
            )
        sign = 1 if self.monitor.endswith("loss") else -1
        best = math.inf
        best_epoch = 0
        for epoch, value in enumerate(values, 1):
            if best - sign * value > self.minimum:
                best = sign * value
                best_epoch = epoch
        return len(values) - best_epoch >= self.patience


class WellPosed:
    """A callback that scales down K of implicit layers whose step may lack a unique solution.

    `fit` adds it automatically if needed; `WellPosed(None)` leaves the weights as they are.

    Args:
        limit: the largest `coupling` of a layer, between 0 and 1; None for no limit.
    """

    def __init__(self, limit: float | None = 0.95) -> None:
        if limit is not None and not 0 < limit < 1:
            raise OptionError(f"limit must be between 0 and 1, but is {limit}.")
        self.limit = limit

    @staticmethod
    def needed(net: Network) -> bool:
        """True if some weights of a network could give a step without a unique solution."""
        return bool(net.implicit) and not getattr(net, "always_solvable", True)

    def limit_coupling(self, model: Model) -> None:
        if self.limit is not None and self.needed(model.net):
            model.net.limit_coupling(self.limit)  # pyright: ignore[reportCallIssue]

    def __call__(self, moment: Moment) -> None:
        """Limit the coupling after a step."""
        self.limit_coupling(moment.model)


class TensorBoard:
    """A callback that writes the history for TensorBoard; needs the extra `tensorboard`.

    Args:
        folder: the folder to write to, for `tensorboard --logdir`.

    Examples:
        >>> import os, hdnn, torch
        >>> x, t = torch.randn(50, 2), torch.randint(2, (50,))
        >>> model = hdnn.Model(hdnn.Augment(2, 4), hdnn.H2(4, 8), hdnn.SigmoidHead(4))
        >>> with hdnn.training.TensorBoard("runs") as board:
        ...     history = hdnn.training.fit(model, x, t, epochs=2, callbacks=[board])
        >>> len(os.listdir("runs"))
        1
    """

    def __init__(self, folder: str | Path) -> None:
        tool = require("torch.utils.tensorboard", extra="tensorboard")
        self.writer = tool.SummaryWriter(str(folder))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.writer.close()

    def __call__(self, moment: Moment) -> None:
        """Write the epoch at its end."""
        if not moment.end_of_epoch:
            return
        for name, values in moment.history.curves().items():
            if values and math.isfinite(values[-1]):
                self.writer.add_scalar(name, values[-1], moment.epoch)
