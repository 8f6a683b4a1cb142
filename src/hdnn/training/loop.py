"""Coordinate descent: solve the output layer, take one step on the hidden layers, repeat.

For every minibatch the output layer is fitted first, to the features that the hidden layers give
now; it is then kept fixed while the hidden layers descend. At the end the output layer is fitted
once more, to all data.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hdnn.base.parts import in_parts
from hdnn.base.progress import ProgressLine
from hdnn.base.threads import threads_for
from hdnn.errors import TrainingError
from hdnn.heads import RegressionHead
from hdnn.model import Model
from hdnn.training import checkpoint, heldout, identity, schedule
from hdnn.training.callbacks import begun, keeps_best
from hdnn.training.checks import check_data, check_options, check_weight, diverged, head_of, number
from hdnn.training.heldout import HeldOut
from hdnn.training.hidden import HiddenLayers
from hdnn.training.history import Callback, History, Moment
from hdnn.training.interrupt import DeferredInterrupt
from hdnn.training.output import Output, put, weights_of
from hdnn.training.processes.parallel import Team, team

SAVE_EVERY = 2.0  # seconds between checkpoints
ORDERED = 2**20  # numbers; up to this, all samples of an epoch are reordered at once


def fit(
    model: Model,
    x: Tensor,
    t: Tensor,
    *,
    epochs: int = 50,
    batch: int = 125,
    optimizer: str = "adam",
    learning_rate: float = 2.5e-2,
    schedule: str = "cosine",
    warmup: float = 0.0,
    weight_decay: float = 0.0,
    clip: float | None = None,
    solver: str = "newton",
    ridge: float = 1e-4,
    smoothness: float = 5e-4,
    smoothing: str = "constant",
    weight: Tensor | None = None,
    validation: tuple[Tensor, ...] | None = None,
    patience: int | None = None,
    tol: float = 0.0,
    seed: int = 0,
    callbacks: Iterable[Callback] = (),
    folder: str | os.PathLike[str] | None = None,
    resume: bool = False,
    progress: bool = True,
    parallel: bool = False,
) -> History:
    """Train a model in place, by coordinate descent between its output layer and its hidden layers.

    It minimises `mean loss + smoothness R_K + ridge/2 |output layer|^2` (eq:minimization). For
    every minibatch the output layer is fitted first, to what the hidden layers give now; it is then
    kept fixed while the hidden layers take one step. At the end the output layer is fitted once
    more, to all data.

    Args:
        model: a `hdnn.Model` with a head that has a loss.
        x: inputs (B, inputs), of the dtype and on the device of the model.
        t: labels (B,) in 0 .. classes-1, or targets (B, outputs) for a regression head.
        epochs: passes over the data, at the most.
        batch: samples for each step.
        optimizer: "adam", or "sgd" with Nesterov momentum 0.9, of the hidden layers.
        learning_rate: of the hidden layers, and of the output layer unless Newton steps find it.
        schedule: the rate stays "constant" or falls to zero as a "cosine", after it has risen for
            the fraction `warmup` of all steps.
        warmup: that fraction, below 1.
        weight_decay: the hidden layers' weights, times this, are added to their gradient.
        clip: the largest norm that a gradient of all hidden layers may have.
        solver: how the output layer is found for each minibatch. "newton": damped Newton steps on
            the ridge-regularised problem; "adam": the paper's 10 Adam steps from zero, with weight
            decay `ridge`; "joint": not solved, but trained together with the hidden layers.
        ridge: penalty on the output layer.
        smoothness: alpha, where the network is a discretised ODE; others have no R_K.
        smoothing: alpha stays "constant" or falls to zero as a "cosine": layers are first kept
            alike, then free to differ.
        weight: of each sample (B,) in the mean loss.
        validation: held-out rows (x, t) or (x, t, weight), at which loss and score are measured
            after each epoch, with the output layer that the model would have if training ended
            there. They do not change the training.
        patience: end after so many epochs in which the held-out loss did not fall by more than
            `tol`, and keep the model of the best epoch, also when all epochs are done. Without
            held-out rows the loss of the training is watched, and the last model kept.
        tol: the smallest fall of the loss that counts.
        seed: of the order of the samples; the global random state is neither read nor written.
        callbacks: called with a `Moment` after each step; one that returns True ends the training.
            For implicit layers a `WellPosed()` is added, and an `EarlyStopping` for a `patience`.
        folder: where to keep a checkpoint and a log, so that `resume=True` can go on after any
            interruption to the very same result.
        resume: go on with the training in `folder`, or begin there if it is empty.
        progress: show one line while a person waits at a terminal.
        parallel: share each minibatch among all processes of torch.distributed, which must be
            initialised. All call `fit` with the same data and options; the training is that of one
            process with the model of the first, up to rounding, and only the first writes files.

    Returns:
        A `History`: loss, accuracy and more, one entry an epoch.

    Raises:
        TrainingError: if the model cannot be trained, if a number is out of range, if callbacks do
            not fit the training, or if it diverges.
        OptionError: if a name such as that of the solver is not known.
        DataError: if x, t, weight or validation do not fit the model or are not finite.
        ShapeError: if x has another number of inputs than the model.
        CheckpointError: if the folder cannot be used, or holds another training.

    Examples:
        >>> import hdnn
        >>> data = hdnn.data.planar.double_moons(400)
        >>> model = hdnn.Model(hdnn.Augment(2, 4), hdnn.H2(4, 8), hdnn.SigmoidHead(4))
        >>> rows = {"validation": (data.x_test, data.t_test), "progress": False}
        >>> history = hdnn.training.fit(model, data.x_train, data.t_train, epochs=5, **rows)
        >>> history.loss[-1] < history.loss[0], history.validation_score[-1] > 0.8
        (True, True)
    """
    members = team(parallel)
    with ExitStack() as stack:
        with members.together():
            options = check_options(
                epochs=epochs,
                batch=batch,
                optimizer=optimizer,
                learning_rate=learning_rate,
                schedule=schedule,
                warmup=warmup,
                weight_decay=weight_decay,
                clip=clip,
                solver=solver,
                ridge=ridge,
                smoothness=smoothness,
                smoothing=smoothing,
                seed=seed,
            )
            head_of(model)
            check_data(model, x, t)
            check_weight(weight, x)
            held_out = None if validation is None else HeldOut(model, validation)
            tol = number("tol", tol)
            callbacks = begun(model, callbacks, patience, tol, held_out is not None)
            place = checkpoint.open_folder(folder, resume) if members.first else None
            stack.enter_context(checkpoint.locked(place))
            chosen = [c for c in callbacks if members.first or not getattr(c, "first_only", False)]
            data = x.detach(), t, weight
            training = _Training(model, *data, held_out, options, chosen, progress, place, members)
        stack.enter_context(
            threads_for(min(len(x), training.batch) * model.net.features, x.device.type)
        )
        return training.run()


class _Training:
    """One call of `fit`."""

    def __init__(
        self,
        model: Model,
        x: Tensor,
        t: Tensor,
        weight: Tensor | None,
        held_out: HeldOut | None,
        options: dict[str, Any],
        callbacks: list[Callback],
        progress: bool,
        folder: Path | None,
        members: Team,
    ) -> None:
        self.model, self.head = model, head_of(model)
        self.folder, self.team = folder, members
        self.regression = isinstance(self.head, RegressionHead)
        self.x, self.y_0, self.weight = x, model.embed(x), weight
        self.t = t if self.regression else t.long()
        self.held_out, self.options, self.callbacks = held_out, options, callbacks
        self.keeping = next(filter(keeps_best, callbacks), None)
        self.by_step = [one for one in callbacks if not getattr(one, "by_epoch", False)]
        self.line = ProgressLine(progress and members.first)
        self.epochs, self.batch = options["epochs"], options["batch"]
        self.solver, self.rate = options["solver"], options["learning_rate"]
        self.batches = math.ceil(len(x) / self.batch)
        self.hidden = HiddenLayers(model, self.y_0[: self.batch], options, members)
        self.generator = torch.Generator().manual_seed(options["seed"])
        batch = self.y_0[: self.batch]
        self.output = Output(self.head, self.solver, options["ridge"], self.rate, batch)
        self.history = History()
        self.epoch = self.k = 0  # the position of the training
        self.sums = [0.0, 0.0]  # of loss and accuracy, in this epoch
        self.order = self.generator.get_state()  # from which the order of this epoch is drawn
        self.wish = self.stopped = False  # a callback asks to end; all processes have agreed

    def run(self) -> History:
        start, was_training = time.perf_counter(), self.model.training
        self.model.train()
        try:
            self._open()
            with self.team.together():
                self.log = checkpoint.Log(self.folder, len(self.history.loss))
            saved = time.monotonic()
            self.start = start - self.history.seconds
            with DeferredInterrupt(self.team.patience) as interrupt:
                while self.epoch < self.epochs and not self.stopped:
                    for minibatch in self._minibatches():
                        self._step(*minibatch)
                        self.stopped, came = self.team.agreed(self.wish, interrupt.came)
                        if came:
                            self._interrupted()
                        if time.monotonic() - saved > SAVE_EVERY:
                            with self.team.holding():
                                self._save()
                            saved = time.monotonic()
                        if self.stopped:
                            break
                if self.team.anyone(interrupt.came):
                    self._interrupted()
            for name, parameter in self.model.named_parameters():
                if not bool(torch.isfinite(parameter.detach()).all()):
                    raise self._diverged(f"the weight {name}")
            self._end()
        finally:
            self.line.close()
            self.model.train(was_training)
            self.hidden.optimizer.zero_grad(set_to_none=True)
        self.history.seconds = time.perf_counter() - self.start
        with self.team.together():
            self._save()
        return self.history

    def _interrupted(self) -> None:
        """Save, and let Ctrl-C do what it always does."""
        with self.team.together():
            self._save()
        raise KeyboardInterrupt

    def _minibatches(self) -> Iterator[tuple[Tensor, ...]]:
        """The rest of this epoch's minibatches, in the order that its seed says."""
        self.generator.set_state(self.order)
        indices = torch.randperm(len(self.x), generator=self.generator).to(self.x.device)
        tensors = [t for t in (self.y_0, self.t, self.weight) if t is not None]
        if self.y_0.numel() <= ORDERED:
            parts = zip(*[t[indices].split(self.batch) for t in tensors], strict=True)
            yield from itertools.islice(parts, self.k, None)
        else:
            for index in indices.split(self.batch)[self.k :]:
                yield tuple(t[index] for t in tensors)

    def _step(self, y_0: Tensor, t: Tensor, weight: Tensor | None = None) -> None:
        rate, last = self._schedule(), self.k == self.batches - 1
        if weight is not None and not bool(weight.any()):
            return self._advance(None, rate, last)  # all its samples have weight 0
        y = self.hidden.forward(y_0)
        if self.team.over:
            return None  # some process asked to end before this step
        found = self.output.solve(y, t, weight)
        if not math.isfinite(found.loss):
            raise self._diverged("the loss", y_0)
        if self.options["smoothing"] == "cosine":
            self.hidden.smooth.alpha = self.options["smoothness"] * schedule.cosine(self._done())
        self.hidden.backward(found.gradient)
        norm = self.hidden.step(rate, measured=bool(self.by_step) or last)
        return self._advance((found.loss, found.correct, norm), rate, last)

    def _advance(self, found: tuple[float, float, float] | None, rate: float, last: bool) -> None:
        """Count a step, and say what it found."""
        if found is not None:
            loss, correct = found[:2]
            self.sums[0] += loss
            self.sums[1] += correct
            if self.by_step:
                moment = self._moment(found, rate, last)
                with self.team.holding():
                    for callback in self.by_step:
                        self.wish |= bool(callback(moment))
            if self.line.on:
                self.line.show(
                    f"epoch {self.epoch + 1}/{self.epochs}, minibatch {self.k + 1}/{self.batches}, "
                    f"loss {loss:.4f}, {heldout.text(self.history)}"
                    f"{time.perf_counter() - self.start:.0f} s"
                )
        if not last:
            self.k += 1
            return
        history = self.history
        history.loss.append(self.sums[0] / self.batches)
        if not self.regression:
            history.accuracy.append(self.sums[1] / self.batches)
        history.smoothness.append(self.hidden.smooth.value())
        history.gradient.append(found[2] if found is not None else 0.0)
        history.learning_rate.append(rate)
        self.order = self.generator.get_state()
        if self.held_out is not None:
            self._measure(self.held_out, found or (math.nan, math.nan, 0.0), rate)
        history.seconds = time.perf_counter() - self.start
        self.epoch, self.k, self.sums = self.epoch + 1, 0, [0.0, 0.0]
        with self.team.holding():
            self.log.write(self._entry())  # before any checkpoint that includes this epoch
        self.team.check_weights(self.model, self.epoch)

    def _moment(self, found: tuple[float, float, float], rate: float, last: bool) -> Moment:
        """This step, for callbacks."""
        loss, correct, norm = found
        step, steps = self.epoch * self.batches + self.k + 1, self.epochs * self.batches
        return Moment(
            *(self.model, self.epoch + 1, self.epochs, step, steps),
            *(loss, None if self.regression else correct, norm, rate, last),
        )

    def _measure(self, held_out: HeldOut, found: tuple[float, float, float], rate: float) -> None:
        """Look at the held-out rows with the model that there would be if training ended here."""
        before = weights_of(self.head)
        if self.solver != "joint":
            self._refit()
        measured, history = held_out.measure(self.model, self._features), self.history
        history.validation_loss.append(measured.loss)
        history.validation_score.append(measured.score)
        moment = self._moment(found, rate, last=True)
        moment.validation_loss, moment.validation_score = measured
        with self.team.holding():
            for callback in self.callbacks:
                if hasattr(callback, "measured"):
                    self.wish |= bool(callback.measured(moment))  # pyright: ignore
        best = heldout.best_epoch(history.validation_loss)
        history.best_epoch = best if self.keeping is None else self.keeping.best_epoch
        put(self.head, before)

    def _end(self) -> None:
        """The best model that was kept, or an output layer for all data."""
        if self.keeping is not None and self.keeping.weights:
            self.model.load_state_dict(self.keeping.weights)
        elif self.solver != "joint":
            self._refit()
        else:
            return
        self.team.check_weights(self.model, self.epoch)

    def _schedule(self) -> float:
        """The rate of this step."""
        options, steps = self.options, self.epochs * self.batches
        change = schedule.factor(self._done(), steps, options["warmup"], options["schedule"])
        return self.rate * change

    def _done(self) -> float:
        """The fraction of all steps that are done."""
        return (self.epoch + self.k / self.batches) / self.epochs

    def _features(self, y_0: Tensor) -> Tensor:
        """y_N, of the samples of all processes."""
        return self.team.features(self.model.net, y_0)

    def _refit(self) -> None:
        """Fit the output layer to all data; the hidden layers stay."""
        with torch.no_grad():
            y = in_parts(self._features, self.y_0)
        if not bool(torch.isfinite(y).all()):
            raise self._diverged("the last state y_N", self.y_0)
        self.generator.set_state(self.order)  # also after a resume that had no step to take
        self.output.refit(y, self.t, self.weight, self.generator, self.batch)

    def _entry(self) -> dict[str, Any]:
        """The last epoch, for the log."""
        last = {name: values[-1] for name, values in self.history.curves().items() if values}
        return {"epoch": self.epoch, **last, "seconds": round(self.history.seconds, 3)}

    def _save(self) -> None:
        if self.folder is None:
            return
        if not all(bool(torch.isfinite(p.detach()).all()) for p in self.model.parameters()):
            return  # the last good one is kept
        state: dict[str, Any] = {"epoch": self.epoch, "k": self.k, "sums": self.sums}
        state |= {"stopped": self.wish or self.stopped}
        state |= {"history": asdict(self.history), "options": self.identity}
        parts = self.model, self.hidden.optimizer, self.order
        checkpoint.save(self.folder, *parts, state, self.callbacks)

    def _open(self) -> None:
        """Go on with what the folder holds, or begin there."""
        trained = [(tuple(p.shape), str(p.dtype)) for p in self.hidden.trained]
        self.team.check_alike(lambda: {**self.identity, "set of trained weights": trained})
        self.team.share(self.model)
        folder = self.folder
        saved = self.team.from_first(
            lambda: None if folder is None else checkpoint.read(folder, self.identity)
        )
        with self.team.together():
            if saved is None:
                self._save()
                return
            saved = checkpoint.Saved(*saved)
            kinds = {"epoch": int, "k": int, "sums": list, "history": dict, "stopped": bool}
            checkpoint.check_state(saved, kinds, self.epochs)
            with checkpoint.understood(saved.path):
                self.history = History(**saved.state["history"])
                self.sums = [float(sum_) for sum_ in saved.state["sums"]]
                if len(self.sums) != 2 or not 0 <= saved.state["k"] < self.batches:
                    raise ValueError(f"its position is {saved.state['k']}")
            found = checkpoint.restore(saved, self.model, self.hidden.optimizer, self.callbacks)
            state, self.order = found
            self.epoch, self.k = state["epoch"], state["k"]
            self.wish = self.stopped = state["stopped"]

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What must be the same for a training to go on: all that decides its bits."""
        tensors = [t for t in (self.x, self.t, self.weight) if t is not None]
        known = {"data": identity.digest(tensors), "model": self.model.net.form()}
        known |= {"shapes": identity.shapes(tensors), "processes": getattr(self.team, "size", 1)}
        known["callbacks"] = identity.of_callbacks(self.callbacks)
        held_out = self.held_out
        known["validation"] = None if held_out is None else identity.digest(held_out.tensors)
        return {**self.options, **known, **identity.of_model(self.model)}

    def _diverged(self, what: str, y_0: Tensor | None = None) -> TrainingError:
        return diverged(self.model, what, self.epoch + 1, y_0)
