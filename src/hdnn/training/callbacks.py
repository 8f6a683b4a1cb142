"""Callbacks for `fit`: end a training in time, keep it well posed, and show it in TensorBoard.

Callbacks with a memory have a `state_dict`, which `fit` keeps in its checkpoint: a resumed training
that is given the same callbacks restores it. Callbacks that influence the result have `settings`: a
training can be resumed only with the same ones. Callbacks with a method `measured` get what was
found at held-out rows after each epoch; with `by_epoch = True` they are not called for each step.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self, TypeGuard

from torch import Tensor

from hdnn.base.files import as_path
from hdnn.errors import TrainingError, choose, flag, quoted, require
from hdnn.model import Model
from hdnn.networks import HamiltonianNet
from hdnn.training import identity
from hdnn.training.checks import head_of, number, whole_number
from hdnn.training.heldout import HeldOut
from hdnn.training.history import Callback, Moment
from hdnn.training.output import weights_of

OF_TRAINING, OF_VALIDATION = ("loss", "accuracy"), ("validation_loss", "validation_score")


@dataclass
class EpochMeans:
    """Loss and accuracy, summed over the minibatches of an epoch so far."""

    epoch: int = 0
    step: int = 0
    count: int = 0
    loss: float = 0.0
    accuracy: float = 0.0

    def is_new(self, moment: Moment) -> bool:
        """Whether another training has begun, whose steps count from 1 again."""
        return moment.step <= self.step

    def add(self, moment: Moment) -> dict[str, float] | None:
        """Add a step; at the end of an epoch, return its means as `History` has them."""
        if moment.epoch != self.epoch or self.is_new(moment):
            self.count, self.loss, self.accuracy = 0, 0.0, 0.0
        self.epoch, self.step, self.count = moment.epoch, moment.step, self.count + 1
        self.loss += moment.loss
        self.accuracy += moment.accuracy or 0.0
        if not moment.end_of_epoch:
            return None
        means = {"loss": self.loss / self.count}
        if moment.accuracy is not None:
            means["accuracy"] = self.accuracy / self.count
        return means


@dataclass
class _Watched:
    """What `EarlyStopping` has seen of one training."""

    values: list[float] = field(default_factory=list)  # one an epoch
    best: float | None = None
    best_epoch: int = 0


class EarlyStopping:
    """End a training after `patience` epochs in which nothing got better.

    A callback of `fit`. Afterwards `values` has the watched value of each epoch, and `best_epoch`
    the best epoch. `fit(validation=.., patience=..)` is the short form for the loss at held-out
    rows, with `restore`.

    Args:
        patience: epochs without an improvement after which the training ends.
        monitor: "loss" or "accuracy", the mean over the minibatches of an epoch; or
            "validation_loss" or "validation_score", for the held-out rows of `fit(validation=..)`.
        minimum: the smallest improvement that counts.
        x: inputs of a validation set of its own, with `t`, for "loss" or "accuracy", measured at
            the end of each epoch. If the output layer is solved for each minibatch, the mean of the
            epoch's is used. Held-out rows are measured with the output layer that the model would
            end with.
        t: the labels or targets of that set.
        restore: go back to the weights of the best epoch, when this ends the training and also when
            all epochs are done. The output layer is then fitted to the training data, as always;
            with held-out rows it is the one that they were measured with.

    Raises:
        TrainingError: if `patience` or `minimum` is out of range, if only one of x and t is given,
            or both of them for held-out rows.
        OptionError: if `monitor` is not one of these, or `restore` neither True nor False.

    Examples:
        >>> import hdnn, torch
        >>> x, t = torch.randn(50, 2), torch.randint(2, (50,))  # nothing to learn
        >>> model = hdnn.Model(hdnn.Augment(2, 4), hdnn.H2(4, 8), hdnn.SigmoidHead(4))
        >>> early = hdnn.training.EarlyStopping(patience=1, minimum=0.1)
        >>> history = hdnn.training.fit(model, x, t, callbacks=[early], progress=False)
        >>> len(history.loss), early.best_epoch
        (2, 1)
    """

    def __init__(
        self,
        patience: int = 10,
        monitor: str = "loss",
        minimum: float = 0.0,
        *,
        x: Tensor | None = None,
        t: Tensor | None = None,
        restore: bool = False,
    ) -> None:
        self.patience = whole_number("patience", patience, 1)
        self.monitor = choose("monitor", monitor, (*OF_TRAINING, *OF_VALIDATION))
        self.by_epoch = monitor in OF_VALIDATION
        self.minimum = number("minimum", minimum)
        self.restore = flag("restore", restore)
        if (x is None) != (t is None):
            raise TrainingError("a validation set is both x and t; give both of them, or neither.")
        self.data = None if x is None or t is None else (x, t)
        if self.by_epoch and self.data is not None:
            raise TrainingError(
                f"{monitor} is that of fit(validation=..); give EarlyStopping no x and t, or watch "
                '"loss" or "accuracy".'
            )
        self.means, self.watched = EpochMeans(), _Watched()
        self.weights: dict[str, Tensor] = {}  # of the best epoch
        self.output: Tensor | None = None  # (W, b) of the output layer, summed over an epoch
        self.held_out: HeldOut | None = None  # the validation set, once the model is known

    @property
    def values(self) -> list[float]:
        """The watched value of each epoch so far."""
        return self.watched.values

    @property
    def best(self) -> float | None:
        """The best of them; None before the first epoch has ended."""
        return self.watched.best

    @property
    def best_epoch(self) -> int:
        """The epoch of the best value, from 1."""
        return self.watched.best_epoch

    def __call__(self, moment: Moment) -> bool:
        """Count a step; True ends the training."""
        if not self.means.step or self.means.is_new(moment):
            self._begin(moment)
        means = self.means.add(moment)
        if self.data is not None:
            W = weights_of(head_of(moment.model)).double()
            sum_ = self.output
            self.output = W if sum_ is None or self.means.count == 1 else W + sum_.to(W.device)
        if means is None:
            return False
        value = means[self.monitor] if self.data is None else self._validate(moment.model)
        self._watch(value, moment)
        stop = moment.epoch - self.best_epoch >= self.patience
        if self.restore and self.weights and (stop or moment.step == moment.steps):
            moment.model.load_state_dict(self.weights)
        return stop

    def measured(self, moment: Moment) -> bool:
        """Watch what was found at held-out rows; `fit` itself goes back to the best weights."""
        if not self.by_epoch:
            return False
        if not self.means.step or self.means.is_new(moment):
            self._begin(moment)
        self.means.step = moment.step
        self._watch(getattr(moment, self.monitor), moment)
        return moment.epoch - self.best_epoch >= self.patience

    def _begin(self, moment: Moment) -> None:
        self.watched, self.weights = _Watched(), {}
        if self.monitor == "accuracy" and moment.accuracy is None:
            raise TrainingError('a regression has no accuracy to watch; use monitor="loss".')
        if self.data is not None:
            self.held_out = HeldOut(moment.model, self.data)

    def _watch(self, value: float, moment: Moment) -> None:
        seen = self.watched
        seen.values.append(value)
        sign = 1 if self.monitor.endswith("loss") else -1
        better = seen.best is None or sign * (seen.best - value) > self.minimum
        if better and not math.isnan(value):
            seen.best, seen.best_epoch = value, moment.epoch
            if self.restore:
                weights = moment.model.state_dict()
                self.weights = {name: w.detach().clone() for name, w in weights.items()}

    def _validate(self, model: Model) -> float:
        """Loss or accuracy at the validation set."""
        assert self.data is not None
        assert self.output is not None
        if self.held_out is None:  # resumed
            self.held_out = HeldOut(model, self.data)
        head, W = head_of(model), None
        if head.weight.grad is None:  # it is solved for each minibatch, not trained
            W = (self.output / self.means.count).to(head.weight.dtype)
        found = self.held_out.measure(model, model.net, W)
        return found.loss if self.monitor == "loss" else found.score

    def settings(self) -> dict[str, Any]:
        """What it was asked to do, as JSON can hold it."""
        names = ("patience", "monitor", "minimum", "restore")
        data = None if self.data is None else identity.digest(self.data)
        return {**{name: getattr(self, name) for name in names}, "data": data}

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed training needs: numbers, lists and tensors."""
        tensors = {f"weights.{name}": value for name, value in self.weights.items()}
        tensors |= {} if self.output is None else {"output": self.output}
        return {"means": asdict(self.means), "watched": asdict(self.watched), **tensors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self.means, self.watched = EpochMeans(**state["means"]), _Watched(**state["watched"])
        prefix = "weights."
        self.weights = {k.removeprefix(prefix): state[k] for k in state if k.startswith(prefix)}
        self.output = state.get("output")


def keeps_best(callback: object) -> TypeGuard[EarlyStopping]:
    """Whether a training ends with the weights, output layer included, that this one has kept."""
    return isinstance(callback, EarlyStopping) and callback.by_epoch and callback.restore


class WellPosed:
    """Keep the steps of implicit layers solvable, with exactly one solution each.

    A callback of `fit`. Before the first step and after each, K is made smaller in those layers
    whose `coupling` is above `limit`. `fit` does so by itself where weights of a network could come
    to a step with no solution or with several; `WellPosed(None)` leaves them as they are.

    Args:
        limit: the largest coupling, between 0 and 1; None for no limit.

    Raises:
        TrainingError: if the limit does not lie between 0 and 1; and by `fit`, if the network has
            no implicit layers.

    Examples:
        >>> import hdnn, torch
        >>> x, t = torch.randn(50, 2), torch.randint(2, (50,))
        >>> model = hdnn.Model(hdnn.Augment(2, 4), hdnn.ImplicitH2(4, 4), hdnn.SigmoidHead(4))
        >>> limit = hdnn.training.WellPosed(0.5)
        >>> history = hdnn.training.fit(model, x, t, epochs=2, callbacks=[limit], progress=False)
        >>> bool((model.net.coupling() <= 0.5 + 1e-6).all())
        True
    """

    def __init__(self, limit: float | None = 0.95) -> None:
        self.limit = None if limit is None else number("limit", limit)
        if self.limit is not None and not 0 < self.limit < 1:
            raise TrainingError(f"limit must lie between 0 and 1, but is {limit}.")

    def settings(self) -> dict[str, Any]:
        """What it was asked to do, as JSON can hold it."""
        return {"limit": self.limit}

    def begin(self, model: Model) -> None:
        """Limit the coupling of a model before its first step."""
        net = model.net
        if not (isinstance(net, HamiltonianNet) and net.scheme.implicit):
            raise TrainingError(
                f"WellPosed is for implicit layers (ImplicitH2, midpoint), and {type(net).__name__}"
                " has none; leave it out."
            )
        if self.limit is not None:
            net.limit_coupling(self.limit)

    def __call__(self, moment: Moment) -> None:
        """Limit the coupling after a step."""
        self.begin(moment.model)


def begun(
    model: Model,
    callbacks: Iterable[Callback],
    patience: int | None = None,
    tol: float = 0.0,
    held_out: bool = False,
) -> list[Callback]:
    """The callbacks of a training that begins; implicit layers are kept well posed by default.

    With a patience, the held-out loss is watched where there is one, else that of the training.
    """
    chosen, net = _listed(callbacks), model.net
    if patience is not None:
        monitor = "validation_loss" if held_out else "loss"
        chosen.append(EarlyStopping(patience, monitor, tol, restore=held_out))
    for one in chosen:
        if isinstance(one, EarlyStopping) and one.by_epoch and not held_out:
            raise TrainingError(
                f"EarlyStopping watches {one.monitor}, but there are no held-out rows; give fit "
                'validation=(x, t), or watch "loss".'
            )
    if not any(isinstance(one, WellPosed) for one in chosen) and (
        isinstance(net, HamiltonianNet) and not net.always_solvable and net.learns("K")
    ):
        chosen = [WellPosed(), *chosen]
    for one in chosen:
        if isinstance(one, WellPosed):
            one.begin(model)
    return chosen


def _listed(callbacks: Any) -> list[Callback]:
    if not isinstance(callbacks, Iterable):
        raise TrainingError(f"callbacks must be a list, but got {quoted(callbacks)}.")
    chosen: list[Any] = list(callbacks)
    for one in chosen:
        if not callable(one):
            raise TrainingError(
                f"a callback is called with a Moment after each step, but {quoted(one)} cannot be."
            )
    return chosen


class TensorBoard:
    """Write loss, accuracy, gradient norm and learning rate of each epoch for TensorBoard.

    A callback of `fit`. Loss and accuracy are means over the epoch, the rest is that of its last
    step; held-out rows add their loss and score. The epochs of successive trainings are numbered
    on. Use it in a `with` block or call `close()`, so that all is written. Needs the extra
    `tensorboard`.

    Args:
        folder: where to write, as `tensorboard --logdir` takes it.

    Raises:
        CheckpointError: if the folder is not a path.
        MissingExtraError: if TensorBoard is not installed.

    Examples:
        >>> import os, hdnn, torch
        >>> x, t = torch.randn(50, 2), torch.randint(2, (50,))
        >>> model = hdnn.Model(hdnn.Augment(2, 4), hdnn.H2(4, 8), hdnn.SigmoidHead(4))
        >>> with hdnn.training.TensorBoard("runs") as board:
        ...     history = hdnn.training.fit(model, x, t, epochs=2, callbacks=[board])
        >>> len(os.listdir("runs"))
        1
    """

    first_only = True  # of several processes that share a training, the first writes

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = as_path(folder)
        self.tool = require("torch.utils.tensorboard", extra="tensorboard")
        self.means, self.before = EpochMeans(), 0  # epochs of earlier trainings
        self.writer: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Write what is still buffered; a later step opens the file again."""
        if self.writer is not None:
            self.writer.close()
            self.writer = None

    def __call__(self, moment: Moment) -> None:
        """Count a step, and write the means of an epoch at its end."""
        if self.means.is_new(moment):
            self.before += self.means.epoch
        means = self.means.add(moment)
        if means is not None:
            last = {"gradient_norm": moment.gradient, "learning_rate": moment.learning_rate}
            self.write(self.before + moment.epoch, {**means, **last})

    def measured(self, moment: Moment) -> None:
        """Write what was found at held-out rows."""
        found = {name: getattr(moment, name) for name in OF_VALIDATION}
        self.write(self.before + moment.epoch, found)

    def write(self, epoch: int, values: Mapping[str, float]) -> None:
        """Write the values of one epoch; the first call drops older entries from there on."""
        if self.writer is None:
            self.writer = self.tool.SummaryWriter(str(self.folder), purge_step=epoch)
        for name, value in values.items():
            self.writer.add_scalar(name, value, epoch)

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed training needs."""
        return {"means": asdict(self.means), "before": self.before}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self.means, self.before = EpochMeans(**state["means"]), state["before"]
