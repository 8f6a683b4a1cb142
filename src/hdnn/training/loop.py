"""Coordinate descent: solve the output layer, take one step on the hidden layers, repeat.

For every minibatch the output layer is fitted first, to the features that the hidden layers give
now; it is then kept fixed while the hidden layers descend. At the end the output layer is fitted
once more, to all data.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hdnn.engine.apart import Apart
from hdnn.errors import TrainingError
from hdnn.heads import RegressionHead
from hdnn.model import Model
from hdnn.networks import ODENetwork
from hdnn.training import checkpoint, coordinate, small_heads, small_steps
from hdnn.training.checks import check_data, check_options, check_weight, head_of
from hdnn.training.coordinate import Outcome
from hdnn.training.progress import Line

# A few steps suffice where the next minibatch has another optimum anyway.
MINIBATCH_STEPS = {"newton": 5, "adam": 10}
REFIT_STEPS = 50
SAVE_EVERY = 2.0  # seconds between checkpoints
ORDERED = 2**20  # numbers, up to which an epoch's samples are put in order all at once


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
    """What a callback is told after each step; if it returns True, the training ends there."""

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
    seed: int = 0,
    callbacks: Iterable[Callback] = (),
    folder: str | os.PathLike[str] | None = None,
    resume: bool = False,
    progress: bool = True,
) -> History:
    """Minimise mean loss + smoothness R_K + ridge/2 |output layer|^2 (eq:minimization), in place.

    Args:
        x: inputs (B, ...), of the dtype and on the device of the model.
        t: labels (B,) in 0 .. classes-1, or targets (B, outputs) for a regression head.
        optimizer: "adam", or "sgd" with Nesterov momentum 0.9, of the hidden layers.
        schedule: the rate stays "constant" or falls to zero as a "cosine", after it has risen for
            the fraction `warmup` of all steps.
        weight_decay: so many times the hidden layers' weights are added to their gradient.
        clip: the largest norm that a gradient of all hidden layers may have.
        solver: how the output layer is found for each minibatch. "newton": damped Newton steps on
            the ridge-regularised problem; "adam": the paper's 10 Adam steps from zero, with weight
            decay `ridge`; "joint": not at all, it descends together with the hidden layers.
        smoothness: alpha, where the network is a discretised ODE; others have no R_K.
        smoothing: alpha stays "constant" or falls to zero as a "cosine": first the layers are made
            alike, then each goes its way.
        weight: of each sample (B,) in the mean loss.
        seed: of the order of the samples; the global random state is neither read nor written.
        callbacks: called with a `Moment` after each step.
        folder: where to keep a checkpoint and a log, so that `resume=True` can go on after any
            interruption to the very same result.
        progress: show one line while a person waits at a terminal.
    """
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
    place = checkpoint.open_folder(folder, resume)
    with checkpoint.locked(place):
        training = _Training(model, x.detach(), t, weight, options, list(callbacks), progress)
        return training.run(place)


class _Training:
    """One call of `fit`."""

    def __init__(
        self,
        model: Model,
        x: Tensor,
        t: Tensor,
        weight: Tensor | None,
        options: dict[str, Any],
        callbacks: list[Callback],
        progress: bool,
    ) -> None:
        self.model, self.head = model, head_of(model)
        self.regression = isinstance(self.head, RegressionHead)
        self.x, self.y_0, self.weight = x, model.embed(x), weight
        self.t = t if self.regression else t.long()
        self.options, self.callbacks, self.line = options, callbacks, Line(progress)
        self.epochs, self.batch = options["epochs"], options["batch"]
        self.solver, self.rate = options["solver"], options["learning_rate"]
        self.batches = math.ceil(len(x) / self.batch)
        groups = _groups(model, self.solver, options["ridge"], options["weight_decay"])
        self.trained: list[nn.Parameter] = [p for group in groups for p in group["params"]]
        self.optimizer = _optimizer(options["optimizer"], groups, self.rate)
        self.generator = torch.Generator().manual_seed(options["seed"])
        self.smooth = _Smoothness(model.net, options["smoothness"])
        self.stack = _Stack(model.net, self.y_0[: self.batch])
        small = small_heads.usable(self.head, self.y_0)
        self.small = small_heads.SmallHead(self.head) if small else None
        self.history = History()
        self.epoch = self.k = 0  # where the training stands
        self.sums = [0.0, 0.0]  # of loss and accuracy, in this epoch
        self.order = self.generator.get_state()  # from which the order of this epoch is drawn
        self.stopped = False

    def run(self, folder: Any) -> History:
        start, was_training = time.perf_counter(), self.model.training
        self.model.train()
        try:
            if folder is not None:
                self._open(folder)
            self.log = checkpoint.Log(folder, len(self.history.loss))
            saved = time.monotonic()
            self.start = start - self.history.seconds
            with _Interrupt() as interrupt:
                while self.epoch < self.epochs and not self.stopped:
                    for minibatch in self._minibatches():
                        self._step(*minibatch)
                        due = interrupt.came or time.monotonic() - saved > SAVE_EVERY
                        if folder is not None and due:
                            self._save(folder)
                            saved = time.monotonic()
                        if interrupt.came:
                            raise KeyboardInterrupt
                        if self.stopped:
                            break
            for name, parameter in self.model.named_parameters():
                if not bool(torch.isfinite(parameter.detach()).all()):
                    raise self._diverged(f"the weight {name}")
            if self.solver != "joint":
                self._refit()
        finally:
            self.line.close()
            self.model.train(was_training)
            self.optimizer.zero_grad(set_to_none=True)
        self.history.seconds = time.perf_counter() - self.start
        if folder is not None:
            self._save(folder)
        return self.history

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
            return self._advance(None, rate, last)  # nobody counts here
        for p in self.trained:
            p.grad = None
        y = self.stack.forward(y_0)
        found = self._output(y, t, weight)
        if not math.isfinite(found.loss):
            raise self._diverged("the loss", y_0)
        self.stack.backward(found.gradient)
        if self.options["smoothing"] == "cosine":
            self.smooth.alpha = self.options["smoothness"] * _cosine(self._done())
        self.smooth.add_gradient()
        norm, clip = math.nan, self.options["clip"]
        small = self.optimizer if isinstance(self.optimizer, small_steps.Adam) else None
        if clip is not None or (small is None and (self.callbacks or last)):
            norm = self._gradient_norm()
            if clip is not None and norm > clip:
                for p in self.trained:
                    if p.grad is not None:
                        p.grad *= clip / norm
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if small is None:
            self.optimizer.step()
        else:
            descended = small.descend()
            norm = descended if clip is None else norm
        return self._advance((found.loss, found.correct, norm), rate, last)

    def _gradient_norm(self) -> float:
        """Of all that is trained."""
        grads = [p.grad for p in self.trained if p.grad is not None]
        if isinstance(self.optimizer, small_steps.Adam):
            return small_steps.norm(grads)
        return float(nn.utils.get_total_norm(grads))

    def _output(self, y: Tensor, t: Tensor, weight: Tensor | None) -> Outcome:
        """Find the output layer for these features, and what the loss is with it."""
        head, solver, ridge = self.head, self.solver, self.options["ridge"]
        if solver == "joint":
            return coordinate.outcome(head, y, t, weight, joint=True)
        # Adam starts from zero each time: a rate that falls would leave it there.
        steps, rate = MINIBATCH_STEPS[solver], self.rate
        if self.small is not None:
            return self.small.solve(y, t, weight, solver, steps, ridge, rate)
        if solver == "newton":
            coordinate.newton(head, y, t, ridge, steps, weight)
        else:
            coordinate.adam(head, [(y, t, weight)], ridge, rate, steps)
        return coordinate.outcome(head, y, t, weight)

    def _advance(self, found: tuple[float, float, float] | None, rate: float, last: bool) -> None:
        """Count a step, and say what it found."""
        epoch, step = self.epoch + 1, self.epoch * self.batches + self.k + 1
        if found is not None:
            loss, correct, norm = found
            self.sums[0] += loss
            self.sums[1] += correct
            moment = None
            for callback in self.callbacks:
                moment = moment or Moment(
                    *(self.model, epoch, self.epochs, step, self.epochs * self.batches),
                    *(loss, None if self.regression else correct, norm, rate, last),
                )
                self.stopped |= bool(callback(moment))
            if self.line.on:
                self.line.show(
                    f"epoch {epoch}/{self.epochs}, minibatch {self.k + 1}/{self.batches}, "
                    f"loss {loss:.4f}, {time.perf_counter() - self.start:.0f} s"
                )
        self.k += 1
        if not last:
            return
        history = self.history
        history.loss.append(self.sums[0] / self.batches)
        if not self.regression:
            history.accuracy.append(self.sums[1] / self.batches)
        history.smoothness.append(self.smooth.value())
        history.gradient.append(found[2] if found is not None else 0.0)
        history.learning_rate.append(rate)
        history.seconds = time.perf_counter() - self.start
        self.epoch, self.k, self.sums = self.epoch + 1, 0, [0.0, 0.0]
        self.order = self.generator.get_state()
        self.log.write(self._entry())  # before any checkpoint that knows of this epoch

    def _schedule(self) -> float:
        """The rate of this step."""
        done, warmup = self._done(), self.options["warmup"]
        if done < warmup:
            return self.rate * (done + 1 / (self.epochs * self.batches)) / warmup
        if self.options["schedule"] == "constant":
            return self.rate
        return self.rate * _cosine((done - warmup) / (1 - warmup))

    def _done(self) -> float:
        """The fraction of all steps that lies behind."""
        return (self.epoch + self.k / self.batches) / self.epochs

    def _refit(self) -> None:
        """Fit the output layer to all data; the hidden layers stay."""
        with torch.no_grad():
            y = torch.cat([self.model.net(part) for part in self.y_0.split(4096)])
        if not bool(torch.isfinite(y).all()):
            raise self._diverged("the last state y_N", self.y_0)
        ridge = self.options["ridge"]
        if self.solver == "newton":
            coordinate.newton(self.head, y, self.t, ridge, REFIT_STEPS, self.weight)
            return
        self.generator.set_state(self.order)  # also after a resume that had no step to take
        passes = []
        for _ in range(REFIT_STEPS):
            index = torch.randperm(len(y), generator=self.generator).to(y.device)
            weight = None if self.weight is None else self.weight[index]
            passes.append((y[index], self.t[index], weight))
        if self.small is not None:
            self.small.adam(passes, self.batch, ridge, self.rate)
            return
        coordinate.adam(
            self.head,
            [part for whole in passes for part in _parts(whole, self.batch)],
            *(ridge, self.rate),
        )

    def _entry(self) -> dict[str, Any]:
        """The last epoch, for the log."""
        last = {k: v[-1] for k, v in vars(self.history).items() if k != "seconds" and v}
        return {"epoch": self.epoch, **last, "seconds": round(self.history.seconds, 3)}

    def _save(self, folder: Any) -> None:
        if not all(bool(torch.isfinite(p.detach()).all()) for p in self.model.parameters()):
            return  # the last good one is kept
        state = {"epoch": self.epoch, "k": self.k, "sums": self.sums, "stopped": self.stopped}
        state |= {"history": asdict(self.history), "options": self._identity()}
        checkpoint.save(folder, self.model, self.optimizer, self.order, state, self.callbacks)

    def _open(self, folder: Any) -> None:
        found = checkpoint.load(
            folder, self.model, self.optimizer, self._identity(), self.callbacks
        )
        if found is None:
            self._save(folder)
            return
        state, self.order = found
        self.epoch, self.k, self.sums = state["epoch"], state["k"], state["sums"]
        self.history, self.stopped = History(**state["history"]), state["stopped"]

    def _identity(self) -> dict[str, Any]:
        """What must be the same for a training to go on: options, data and kind of model."""
        digest = hashlib.sha256()
        for tensor in (self.x, self.t, *([] if self.weight is None else [self.weight])):
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return {**self.options, "data": digest.hexdigest()[:16], "model": repr(self.model.net)}

    def _diverged(self, what: str, y_0: Tensor | None = None) -> TrainingError:
        """The error of a training that has left the numbers, with the layer where it did."""
        where = ""
        if y_0 is not None:
            with torch.no_grad():
                states = self.model.net.trajectory(y_0)
            bad = (~torch.isfinite(states)).flatten(1).any(1).nonzero()
            if len(bad):
                where = f", first in layer {max(int(bad[0]) - 1, 0)}"
        return TrainingError(
            f"{what} is not finite in epoch {self.epoch + 1}{where}: the training has diverged; "
            "lower learning_rate, clip the gradients, use a smaller step h or a bounded activation "
            "such as tanh."
        )


def _parts(whole: coordinate.Part, size: int) -> Iterator[coordinate.Part]:
    """The minibatches of a pass over the data, but for those where nobody counts."""
    y, t, weight = whole
    for low in range(0, len(y), size):
        part = slice(low, low + size)
        w = None if weight is None else weight[part]
        if w is None or bool(w.any()):
            yield y[part], t[part], w


def _cosine(done: float) -> float:
    """From 1 to 0."""
    return 0.5 * (1 + math.cos(math.pi * done))


class _Interrupt:
    """Ctrl-C is heard between steps, when all that is saved fits together; a second one at once."""

    def __enter__(self) -> _Interrupt:
        self.came, self.before = False, None
        if threading.current_thread() is threading.main_thread():
            self.before = signal.getsignal(signal.SIGINT)
            if self.before is signal.default_int_handler:
                signal.signal(signal.SIGINT, self._hear)
            else:
                self.before = None
        return self

    def __exit__(self, *_: object) -> None:
        if self.before is not None:
            signal.signal(signal.SIGINT, self.before)

    def _hear(self, number: int, frame: Any) -> None:
        if self.came:
            signal.default_int_handler(number, frame)
        self.came = True


class _Stack:
    """The hidden layers and their gradients, apart from autograd where that can be."""

    def __init__(self, net: nn.Module, y_0: Tensor) -> None:
        self.net = net
        apart = Apart(net)
        self.apart = apart if apart.usable(y_0) else None
        self.y = y_0

    def forward(self, y_0: Tensor) -> Tensor:
        """y_N."""
        if self.apart is not None:
            return self.apart.forward(y_0)
        self.y = self.net(y_0)
        return self.y.detach()

    def backward(self, g: Tensor) -> None:
        """Set the gradient of each parameter, given that of y_N."""
        if self.apart is not None:
            self.apart.backward(g)
        elif self.y.requires_grad:
            self.y.backward(g)


class _Smoothness:
    """alpha R_K and its gradient, by hand where R_K is a sum over parameters."""

    def __init__(self, net: nn.Module, alpha: float) -> None:
        self.net = net if isinstance(net, ODENetwork) else None
        self.alpha = alpha
        found = self.net.smooth_leaves() if self.net is not None else []
        self.by_hand = bool(found)
        self.leaves = [(p, times) for p, times in found if p.requires_grad and len(p) > 1]
        self.small: list[Any] = []
        if self.by_hand and self.net is not None:
            like = found[0][0]
            self.steps = torch.as_tensor(self.net.h, dtype=like.dtype, device=like.device)
            if not self.steps.ndim and small_steps.usable([p for p, _ in self.leaves]):
                h = float(self.steps)
                self.small = [(p, small_steps.by_layer(p), times * h) for p, times in self.leaves]

    def value(self) -> float:
        return 0.0 if self.net is None else float(self.net.smoothness().detach())

    def add_gradient(self) -> None:
        if self.net is None or not self.alpha:
            return
        if not self.by_hand:
            R_K = self.net.smoothness()
            if R_K.requires_grad:
                (self.alpha * R_K).backward()
            return
        for parameter, _ in self.leaves:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif not parameter.grad.is_contiguous():
                parameter.grad = parameter.grad.contiguous()
        if self.small:
            smooth = small_steps.kernels()[0]
            for parameter, layers, times in self.small:
                grad = parameter.grad.numpy().reshape(layers.shape)
                smooth(layers, grad, self.alpha * times)
            return
        for parameter, times in self.leaves:
            jumps, grad = parameter.detach().diff(dim=0), parameter.grad
            assert grad is not None
            jumps *= self.alpha * times
            jumps *= (
                self.steps[1:].view(-1, *[1] * (jumps.ndim - 1)) if self.steps.ndim else self.steps
            )
            grad[1:] += jumps
            grad[:-1] -= jumps


def _groups(model: Model, solver: str, ridge: float, decay: float) -> list[dict[str, Any]]:
    """What is trained: the hidden layers and, jointly, the output layer with its own decay."""
    head = set(model.head.parameters())
    free = [p for p in model.parameters() if p.requires_grad]
    hidden, output = [p for p in free if p not in head], [p for p in free if p in head]
    groups: list[dict[str, Any]] = [{"params": hidden, "weight_decay": decay}]
    if solver == "joint":
        groups.append({"params": output, "weight_decay": ridge})
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise TrainingError(
            "the hidden layers have no parameter that requires a gradient; unfreeze some with "
            'requires_grad_(), or train the output layer alone with solver="joint".'
        )
    return groups


def _optimizer(name: str, groups: list[dict[str, Any]], rate: float) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(groups, lr=rate, momentum=0.9, nesterov=True)
    if small_steps.usable([p for group in groups for p in group["params"]]):
        return small_steps.Adam(groups, lr=rate)
    return torch.optim.Adam(groups, lr=rate)
