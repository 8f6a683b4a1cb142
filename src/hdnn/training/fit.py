"""The training loop: solve the output layer, take one step on the hidden layers, repeat.

For every minibatch the output layer is fitted first, to the current features of the hidden layers;
the output layer then stays fixed while the hidden layers take a step. At the end the output layer
is fitted once more, to all data.
"""

from __future__ import annotations

import copy
import itertools
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hdnn.errors import (
    ConvergenceError,
    DataError,
    OptionError,
    choose,
    positive_int,
)
from hdnn.heads import Model, RegressionHead, SigmoidHead, SoftmaxHead
from hdnn.progress import Progress
from hdnn.training import checkpoint
from hdnn.training.callbacks import (
    Callback,
    EarlyStopping,
    History,
    Moment,
    WellPosed,
)
from hdnn.training.hidden import Descent, HiddenLayers
from hdnn.training.output import (
    SOLVERS,
    Batch,
    Output,
    assign,
    evaluate,
    features,
    weights_of,
)
from hdnn.training.recipes import cosine, rate_factor

SAVE_EVERY = 2.0  # seconds between checkpoints
SMALL = 20_000  # up to so many numbers in a minibatch, one thread is faster than several


@dataclass(frozen=True, kw_only=True)
class Options:
    """The settings of a training run, all of them arguments of `fit`.

    Attributes:
        epochs: the largest number of passes over the data.
        batch: the number of samples in a minibatch.
        learning_rate: the learning rate of the hidden layers, and of the output layer unless that
            is solved with Newton steps.
        schedule: "constant" or "cosine" (a fall to zero): the learning rate after the warmup.
        warmup: the fraction of all steps in which the learning rate rises from zero.
        weight_decay: the multiple of the hidden weights that is added to their gradient.
        clip: the largest norm of the gradient of all hidden layers; None for no limit.
        solver: how the output layer is fitted to each minibatch. "newton": Newton steps on the
            ridge-regularised problem; "adam": the paper's 10 Adam steps from zero, with weight
            decay `ridge`; "joint": trained together with the hidden layers.
        ridge: the penalty on the output layer.
        smoothness: alpha, the penalty on differences between neighbouring layers.
        smoothing: "constant" alpha, or a "cosine" fall of alpha to zero.
        patience: stop after this many epochs in which the held-out loss did not fall by more than
            `tol`, and restore the model of the best epoch. Without held-out rows, the training loss
            is watched and the last model is kept.
        tol: the smallest decrease of the loss that counts.
        seed: the seed for the order of the samples; the global random state is neither read nor
            written.
    """

    epochs: int = 50
    batch: int = 125
    learning_rate: float = 2.5e-2
    schedule: str = "cosine"
    warmup: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None
    solver: str = "newton"
    ridge: float = 1e-4
    smoothness: float = 5e-4
    smoothing: str = "constant"
    patience: int | None = None
    tol: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        positive_int("epochs", self.epochs)
        positive_int("batch", self.batch)
        if self.patience is not None:
            positive_int("patience", self.patience)
        choose("schedule", self.schedule, ("cosine", "constant"))
        choose("smoothing", self.smoothing, ("cosine", "constant"))
        choose("solver", self.solver, SOLVERS)
        for name in (
            "learning_rate",
            "warmup",
            "weight_decay",
            "ridge",
            "smoothness",
            "tol",
        ):
            value = getattr(self, name)
            if not (isinstance(value, (int, float)) and 0 <= value < math.inf):
                raise OptionError(
                    f"{name} must be a finite number >= 0, but got {value!r}."
                )
        if self.learning_rate == 0 or self.clip == 0 or self.warmup >= 1:
            raise OptionError(
                "learning_rate and clip must be > 0, and warmup must be below 1."
            )
        if self.solver == "newton" and self.ridge == 0:
            raise OptionError(
                'solver="newton" needs ridge > 0; use e.g. ridge=1e-4.'
            )


def fit(
    model: Model,
    x: Tensor,
    t: Tensor,
    *,
    weight: Tensor | None = None,
    validation: Sequence[Tensor | None] | None = None,
    callbacks: Iterable[Callback] = (),
    folder: str | Path | None = None,
    resume: bool = False,
    progress: bool = True,
    **options: Any,
) -> History:
    """Train a model in place, by coordinate descent between its output layer and its hidden layers.

    Training minimises mean loss + smoothness R_K + ridge/2 |output layer|^2. Settings such as
    `epochs` or `learning_rate` are described in `Options`.

    Args:
        model: an `hdnn.Model` with a head that has a loss.
        x: inputs (B, inputs), with the dtype and device of the model.
        t: labels (B,) in 0 .. classes-1, or targets (B, outputs) for regression.
        weight: the weight (B,) of each sample in the mean loss.
        validation: held-out rows (x, t) or (x, t, weight). Their loss and score are measured after
            each epoch, with the output layer that the model would have if training ended there. The
            held-out rows do not affect training unless `patience` is given.
        callbacks: called with a `Moment` after each step; returning True ends training.
        folder: the folder for a checkpoint. After any interruption, `resume=True` continues from
            the checkpoint, to exactly the same result on the same machine.
        resume: resume the training run in `folder`, or start one there if it is empty.
        progress: show a progress line at a terminal.
        **options: the fields of `Options`.

    Returns:
        A `History`: loss, accuracy and more, one entry per epoch.

    Raises:
        OptionError: if an option is out of range, or the head has no loss.
        DataError: if x, t, weight or validation are not finite or do not fit the model.
        CheckpointError: if the folder cannot be used, or holds a different training run.
        ConvergenceError: if training diverges.

    Examples:
        >>> import hdnn
        >>> data = hdnn.data.planar.double_moons(400)
        >>> model = hdnn.Model(hdnn.Augment(2, 4), hdnn.H2(4, 8), hdnn.SigmoidHead(4))
        >>> rows = {"validation": (data.x_test, data.t_test)}
        >>> history = hdnn.training.fit(model, data.x_train, data.t_train, epochs=5, **rows)
        >>> history.loss[-1] < history.loss[0], history.validation_score[-1] > 0.8
        (True, True)
    """
    settings = Options(**options)
    check_data(model, x, t, weight)
    held_out: list[Any] | None = None
    if validation is not None:
        held_out = [*validation, None][:3]
        check_data(model, *held_out, prefix="validation ")
    training = _Training(model, (x, t, weight), held_out, settings, callbacks)
    size = settings.batch * model.net.features
    with ExitStack() as stack:
        place = checkpoint.open_folder(folder, resume, stack)
        if size <= SMALL and x.device.type == "cpu":
            stack.enter_context(one_thread())
        line = None
        if progress:
            line = stack.enter_context(Progress("epoch", settings.epochs))
        batches = training.y_0.split(settings.batch)
        for rows in (batches[0], batches[-1]):  # the last minibatch is smaller
            training.layers.prepare(rows)
        return training.run(place, line)


class _Training:
    """One call of `fit`; its state is always the state at the end of an epoch."""

    def __init__(
        self,
        model: Model,
        data: Sequence[Any],
        held_out: Sequence[Any] | None,
        options: Options,
        callbacks: Iterable[Callback],
    ) -> None:
        self.model = model
        self.head: Any = model.head
        self.options = options
        self.data = data
        self.y_0, self.t, self.weight = self._embedded(data)
        self.held_out = held_out
        self.validation = None if held_out is None else self._embedded(held_out)
        self.callbacks = self._all_callbacks(callbacks)
        self.optimizer = self._optimizer()
        self.layers = HiddenLayers(model.net)
        self.output = Output(
            self.head, options.solver, options.ridge, options.learning_rate
        )
        self.batches = math.ceil(len(self.y_0) / options.batch)
        self.generator = torch.Generator().manual_seed(options.seed)
        self.history = History()
        self.best: dict[str, Tensor] = {}  # the model of the best epoch
        self.finished = False
        self.key: dict[str, Any] = {}  # the identity, once a folder is open

    def _embedded(
        self, rows: Sequence[Any]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        x, t, weight = rows
        t = t if isinstance(self.head, RegressionHead) else t.long()
        return self.model.embed(x.detach()), t, weight

    def _all_callbacks(self, callbacks: Iterable[Callback]) -> list[Callback]:
        chosen = list(callbacks)
        options = self.options
        if options.patience is not None:
            monitor = "loss" if self.validation is None else "validation_loss"
            chosen.append(EarlyStopping(options.patience, monitor, options.tol))
        limited = any(isinstance(callback, WellPosed) for callback in chosen)
        if WellPosed.needed(self.model.net) and not limited:
            chosen.insert(0, WellPosed())
        for callback in chosen:
            if isinstance(callback, WellPosed):
                callback.limit_coupling(self.model)
        return chosen

    def _optimizer(self) -> Descent:
        options = self.options
        head = set(self.head.parameters())
        free = [p for p in self.model.parameters() if p.requires_grad]
        self.hidden = [p for p in free if p not in head]
        output = []
        if options.solver == "joint":
            output = [p for p in free if p in head]
        self.trained = self.hidden + output
        if not self.trained:
            raise OptionError(
                "no hidden layer has a parameter that requires a gradient; call "
                'requires_grad_() on some, or train the output layer alone with solver="joint".'
            )
        decays = [options.weight_decay] * len(self.hidden)
        decays += [options.ridge] * len(output)
        return Descent(self.model.net, self.trained, decays)

    # The loop

    def run(self, place: Path | None, line: Progress | None) -> History:
        was_training = self.model.training
        self.model.train()
        self.open(place)
        saved = time.monotonic()
        try:
            while not self.finished:
                stop = self.run_epoch()
                if line is not None:
                    line.update(len(self.history.loss), self.history.text())
                if stop or len(self.history.loss) == self.options.epochs:
                    self.finish()
                if self.finished or time.monotonic() - saved > SAVE_EVERY:
                    self.save(place)
                    saved = time.monotonic()
        finally:
            self.model.train(was_training)
            self.model.zero_grad()
        return self.history

    def run_epoch(self) -> bool:
        """One pass over the data; True if a callback ends training."""
        start = time.perf_counter()
        epoch = len(self.history.loss)
        moments = []
        stop = False
        for k, batch in enumerate(self.minibatches()):
            weight = batch[2]
            if weight is not None and not weight.any():
                continue  # an empty minibatch
            moment = self.step(epoch, k, batch)
            moments.append(moment)
            if k < self.batches - 1 and self.call(moment):
                stop = True
                break
        self.history.add(moments, self.optimizer.smoothness())
        if self.validation is not None:
            self.measure(self.validation)
        self.history.seconds += time.perf_counter() - start
        moments[-1].end_of_epoch = True
        return stop or self.call(moments[-1])

    def minibatches(self) -> Iterable[Batch]:
        """All samples in a new order."""
        size = self.options.batch
        order = torch.randperm(len(self.y_0), generator=self.generator).to(
            self.y_0.device
        )
        columns: list[Any] = []
        for t in (self.y_0, self.t, self.weight):
            empty = itertools.repeat(None)
            columns.append(empty if t is None else t[order].split(size))
        return zip(*columns, strict=False)

    def step(self, epoch: int, k: int, batch: Batch) -> Moment:
        """Solve the output layer for a minibatch, then descend in the hidden layers."""
        options = self.options
        y_0, t, weight = batch
        done = (epoch + k / self.batches) / options.epochs
        steps = options.epochs * self.batches
        for p in self.trained:
            p.grad = None
        y = self.layers.forward(y_0)
        outcome = self.output.solve((y, t, weight))
        if not math.isfinite(outcome.loss):
            raise self.diverged(epoch, y_0)
        if self.hidden:
            self.layers.backward(outcome.gradient)
        alpha = options.smoothness
        if options.smoothing == "cosine":
            alpha *= cosine(done)
        rate = options.learning_rate * rate_factor(
            done, steps, options.warmup, options.schedule
        )
        norm = self.optimizer.step(rate, alpha, options.clip)
        return Moment(
            model=self.model,
            epoch=epoch + 1,
            epochs=options.epochs,
            step=epoch * self.batches + k + 1,
            steps=steps,
            loss=outcome.loss,
            accuracy=outcome.accuracy,
            gradient=norm,
            learning_rate=rate,
            history=self.history,
        )

    def call(self, moment: Moment) -> bool:
        answers = [callback(moment) for callback in self.callbacks]
        return any(answers)

    def refit(self) -> None:
        """Fit the output layer to all data; the hidden layers stay as they are."""
        if self.options.solver == "joint":
            return
        y = features(self.model.net, self.y_0)
        if not bool(y.isfinite().all()):
            raise self.diverged(len(self.history.loss), self.y_0)
        generator = torch.Generator().manual_seed(self.options.seed)
        self.output.refit(
            (y, self.t, self.weight), self.options.batch, generator
        )

    def measure(self, validation: Batch) -> None:
        """Measure the held-out rows with the model that training would return if it ended here."""
        y_0, t, weight = validation
        before = weights_of(self.head)
        self.refit()
        y = features(self.model.net, y_0)
        scores = evaluate(self.head, (y, t, weight))
        history = self.history
        history.validation_loss.append(scores.loss)
        history.validation_score.append(scores.score)
        if (
            not history.best_epoch
            or scores.loss < history.validation_loss[history.best_epoch - 1]
        ):
            history.best_epoch = len(history.loss)
            if self.options.patience is not None:
                self.best = copy.deepcopy(self.model.state_dict())
        assign(self.head, before)

    def finish(self) -> None:
        """Restore the model of the best epoch, or fit the output layer to all data."""
        if self.best:
            self.model.load_state_dict(self.best)
        else:
            self.refit()
        for name, parameter in self.model.named_parameters():
            if not bool(parameter.detach().isfinite().all()):
                raise self.diverged(
                    len(self.history.loss), None, f"the weight {name}"
                )
        self.finished = True

    def diverged(
        self, epoch: int, y_0: Tensor | None, what: str = "the loss"
    ) -> ConvergenceError:
        """The error for diverged training, with the first layer where it shows."""
        where = ""
        if y_0 is not None:
            with torch.no_grad():
                states = self.model.net.trajectory(y_0)
            bad = (~states.isfinite()).flatten(1).any(1).nonzero()
            where = (
                f", first in layer {max(int(bad[0]) - 1, 0)}"
                if len(bad)
                else ""
            )
        return ConvergenceError(
            f"{what} is not finite in epoch {epoch + 1}{where}: training has diverged; lower "
            "learning_rate, clip the gradients, or use a smaller step h."
        )

    # On disk

    def identity(self) -> dict[str, Any]:
        """All that must be the same to resume a training run."""
        rows = [*self.data, *(self.held_out or ())]
        return {
            **asdict(self.options),
            "data": checkpoint.digest(rows),
            "model": repr(self.model),
        }

    def open(self, place: Path | None) -> None:
        """Resume the training run in the folder, if there is one."""
        if place is None:
            return
        self.key = self.identity()
        state = checkpoint.read(place, self.key)
        if state is None:
            self.save(place)  # the weights at the start of training
            return
        parts = (self.model, self.optimizer, self.generator)
        checkpoint.restore(state, *parts)
        self.history = History(**state.values["history"])
        self.finished = state.values["finished"]
        self.best = state.group("best")

    def save(self, place: Path | None) -> None:
        if place is None:
            return
        values = {"history": asdict(self.history), "finished": self.finished}
        groups = {"best": self.best}
        parts = (self.model, self.optimizer, self.generator)
        checkpoint.write(place, self.key, values, groups, *parts)


@contextmanager
def one_thread() -> Iterator[None]:
    """Run PyTorch on one thread: several threads would wait longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check_data(
    model: Model, x: Tensor, t: Tensor, weight: Tensor | None, prefix: str = ""
) -> None:
    """Refuse data that a model cannot be trained on; `prefix` precedes their names in errors."""
    head = getattr(model, "head", None)
    if not isinstance(head, (RegressionHead, SigmoidHead, SoftmaxHead)):
        raise OptionError(
            "fit trains an hdnn.Model with a SigmoidHead or SoftmaxHead (for classes) or a "
            f"RegressionHead (for values), but got {type(head or model).__name__}."
        )
    like = head.weight
    if (
        x.dtype != like.dtype
        or x.device != like.device
        or t.device != like.device
    ):
        raise DataError(
            f"{prefix}x is {x.dtype} on {x.device} and t is on {t.device}, but the model is "
            f"{like.dtype} on {like.device}; use .to() to make them match."
        )
    classes = not isinstance(head, RegressionHead)
    shape = (len(x),) if classes else (len(x), head.outputs)
    if x.ndim != 2 or x.shape[1] != model.inputs or not len(x):
        raise DataError(
            f"{prefix}x must have shape (B, {model.inputs}), but has {tuple(x.shape)}."
        )
    if t.numel() != math.prod(shape) or len(t) != len(x):
        raise DataError(
            f"{prefix}t must have shape {shape}, but has {tuple(t.shape)}."
        )
    if not bool(x.isfinite().all() and t.isfinite().all()):
        raise DataError(
            f"{prefix}x or t has NaN or infinite values; remove or replace them."
        )
    if classes and (
        t.is_floating_point() or t.min() < 0 or t.max() >= max(head.outputs, 2)
    ):
        raise DataError(
            f"{prefix}t must be whole-number labels from 0 to {max(head.outputs, 2) - 1}, but is "
            f"{t.dtype} from {t.min()} to {t.max()}."
        )
    if weight is not None and (
        weight.shape != x.shape[:1] or not _is_weight(weight)
    ):
        raise DataError(
            f"{prefix}weight must have shape ({len(x)},) and be finite, not negative and not all "
            "zero."
        )


def _is_weight(weight: Tensor) -> bool:
    return bool(weight.isfinite().all() and weight.min() >= 0 and weight.any())
