"""Training on images: the whole set on the device, one step as one CUDA graph.

Images stay on the device as bytes; minibatches, crops and flips are made there too. On a GPU a
whole step, from choosing images to the optimiser, is recorded once and then replayed. All random
numbers of an epoch come from the seed and the number of that epoch, so training can resume after
any epoch as if it had never stopped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hdnn.data.images import ImageData, augment, draw
from hdnn.errors import ConvergenceError, OptionError
from hdnn.progress import Progress
from hdnn.training import checkpoint, graphs
from hdnn.training.callbacks import Callback, History, Moment
from hdnn.training.recipes import ImageRecipe

EVALUATED = 1000  # images at once


def fit_images(
    model: nn.Module,
    data: ImageData,
    recipe: ImageRecipe,
    *,
    callbacks: Iterable[Callback] = (),
    folder: str | Path | None = None,
    resume: bool = False,
    progress: bool = True,
    seconds: float = math.inf,
) -> History:
    """Train a network on images, in place, on its own device.

    Args:
        model: an image classifier; if it has a `smoothness()`, that is part of the loss.
        data: the training and test images.
        recipe: epochs, optimiser, rates, loss and augmentation.
        callbacks: called with a `Moment` after each epoch; returning True ends training.
        folder: the folder for a checkpoint of the last epoch, from which `resume=True` continues.
        resume: resume the training run in `folder`, or start one there if it is empty.
        progress: show a progress line at a terminal.
        seconds: no epoch starts after this time; use `resume` to continue.

    Returns:
        A `History`, whose `validation_score` is the accuracy on the test images.

    Raises:
        OptionError: if there are fewer images than a minibatch needs.
        CheckpointError: if the folder cannot be used, or holds a different training run.
        ConvergenceError: if training diverges.
    """
    training = _ImageTraining(model, data, recipe, list(callbacks))
    start = time.monotonic()
    with ExitStack() as stack:
        place = checkpoint.open_folder(folder, resume, stack)
        line = None
        if progress:
            line = stack.enter_context(Progress("epoch", recipe.epochs))
        training.open(place)
        stop = False
        while (
            not stop
            and training.epoch < recipe.epochs
            and time.monotonic() - start < seconds
        ):
            stop = training.run_epoch()
            training.save(place)
            if line is not None:
                line.update(training.epoch, training.history.text())
    model.eval()
    return training.history


class _ImageTraining:
    """One call of `fit_images`."""

    def __init__(
        self,
        model: nn.Module,
        data: ImageData,
        recipe: ImageRecipe,
        callbacks: list[Callback],
    ) -> None:
        self.model = model
        self.recipe = recipe
        self.callbacks = callbacks
        self.device = next(model.parameters()).device
        self.cuda = self.device.type == "cuda"
        self.data = data.to(self.device)
        # The remainder waits for the next epoch.
        self.batches = len(data.t_train) // recipe.batch
        if not self.batches:
            raise OptionError(
                f"a minibatch of {recipe.batch} images is larger than the set of "
                f"{len(data.t_train)}; use a smaller batch."
            )
        self.net: Any = model
        if self.cuda:
            model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
            self.net = torch.compile(model)
        self.optimizer = self._optimizer()
        # The tables that a recorded step reads, and the number of the step.
        rows = (self.batches, recipe.batch)
        self.order = torch.zeros(rows, dtype=torch.int64, device=self.device)
        self.shifts = torch.zeros(
            *rows, 2, dtype=torch.int64, device=self.device
        )
        self.flips = torch.zeros(rows, dtype=torch.bool, device=self.device)
        self.rates = torch.zeros(self.batches, device=self.device)
        self.count = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        self.replay: Callable[[], None] | None = None
        self.history = History()
        self.key: dict[str, Any] = {}  # the identity, once a folder is open

    @property
    def epoch(self) -> int:
        return len(self.history.loss)

    def _optimizer(self) -> torch.optim.Optimizer:
        recipe = self.recipe
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        others = [p for p in self.model.parameters() if p.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": recipe.weight_decay}]
        groups.append({"params": others, "weight_decay": 0.0})
        rate: Any = (
            torch.tensor(recipe.learning_rate, device=self.device)
            if self.cuda
            else 0.0
        )
        if recipe.optimizer == "adam":
            return torch.optim.Adam(
                groups, lr=rate, fused=True, capturable=self.cuda
            )
        options = {"momentum": recipe.momentum, "nesterov": recipe.nesterov}
        return torch.optim.SGD(groups, lr=rate, fused=True, **options)

    def step(self) -> None:
        """One step of the minibatch whose number is in `count`."""
        recipe = self.recipe
        index = self.order.index_select(0, self.count)[0]
        images = self.data.images_train[index]
        t = self.data.t_train[index]
        if recipe.pad or recipe.flip:
            shifts = self.shifts.index_select(0, self.count)[0]
            flips = self.flips.index_select(0, self.count)[0]
            images = augment(images, shifts, flips, pad=recipe.pad)
        x = self.data.normalised(images, torch.float32)
        if self.cuda:
            x = x.contiguous(memory_format=torch.channels_last)
        with torch.autocast(
            self.device.type, torch.bfloat16, enabled=recipe.bf16
        ):
            scores = self.net(x)
        loss = recipe.loss(scores.float(), t)
        self.optimizer.zero_grad()
        if recipe.smoothness and hasattr(self.model, "smoothness"):
            (loss + recipe.smoothness * self.model.smoothness()).backward()  # pyright: ignore
        else:
            loss.backward()
        if recipe.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip)
        rate = self.rates.index_select(0, self.count)[0]
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].copy_(rate)
            else:
                group["lr"] = float(rate)
        self.optimizer.step()
        right = (scores.detach().argmax(1) == t).double().mean()
        self.sums += torch.stack([loss.detach().double(), right])
        self.count += 1

    def run_epoch(self) -> bool:
        """One pass over the images, then a test; True if a callback ends training."""
        start = time.perf_counter()
        devices = [self.device] if self.cuda else []
        with torch.random.fork_rng(devices):
            seed = self.recipe.seed * 100_003 + self.epoch
            torch.manual_seed(seed)
            self.draw(seed)
            self.model.train()
            if self.cuda and self.replay is None:
                # Recording pays off for a step that runs many times.
                torch.backends.cudnn.benchmark = True
                self.replay = graphs.recorded(
                    self.step, self.model, self.optimizer, self.count
                )
                self.sums.zero_()
                torch.manual_seed(seed)
            run = self.replay or self.step
            for _ in range(self.batches):
                run()
        loss, accuracy = (self.sums / self.batches).tolist()
        self.sums.zero_()
        if not math.isfinite(loss):
            raise ConvergenceError(
                f"the loss is not finite in epoch {self.epoch + 1}: training has diverged; lower "
                "learning_rate, clip the gradients or use a smaller step h."
            )
        history = self.history
        history.loss.append(loss)
        history.accuracy.append(accuracy)
        history.learning_rate.append(float(self.rates[-1]))
        history.seconds += time.perf_counter() - start
        self.test()
        return self.call()

    def draw(self, seed: int) -> None:
        """Draw all random numbers of an epoch."""
        recipe = self.recipe
        rows = (self.batches, recipe.batch)
        generator = torch.Generator(self.device).manual_seed(seed)
        count = self.batches * recipe.batch
        order = torch.randperm(
            len(self.data.t_train), generator=generator, device=self.device
        )
        shifts, flips = draw(count, generator, pad=recipe.pad, flip=recipe.flip)
        self.order.copy_(order[:count].view(rows))
        self.shifts.copy_(shifts.view(*rows, 2))
        self.flips.copy_(flips.view(rows))
        first = self.epoch * self.batches
        factors = [
            recipe.factor(first + k, self.batches) for k in range(self.batches)
        ]
        self.rates.copy_(recipe.learning_rate * torch.tensor(factors))
        self.count.zero_()

    def test(self) -> None:
        """Add the accuracy and loss on the test images to the history."""
        scores = image_scores(
            self.net, self.data, self.data.images_test, self.recipe.bf16
        )
        t = self.data.t_test.cpu()
        history = self.history
        history.validation_score.append(
            float((scores.argmax(1) == t).double().mean())
        )
        history.validation_loss.append(
            float(nn.functional.cross_entropy(scores, t))
        )
        history.best_epoch = 1 + history.validation_loss.index(
            min(history.validation_loss)
        )

    def call(self) -> bool:
        history = self.history
        moment = Moment(
            model=self.model,
            epoch=self.epoch,
            epochs=self.recipe.epochs,
            step=self.epoch * self.batches,
            steps=self.recipe.epochs * self.batches,
            loss=history.loss[-1],
            accuracy=history.accuracy[-1],
            gradient=math.nan,
            learning_rate=history.learning_rate[-1],
            history=history,
            end_of_epoch=True,
        )
        answers = [callback(moment) for callback in self.callbacks]
        return any(answers)

    def identity(self) -> dict[str, Any]:
        """All that must be the same to resume a training run."""
        data = self.data
        rows = (data.images_train, data.t_train, data.images_test, data.t_test)
        return {
            **self.recipe.to_dict(),
            "data": data.name,
            "images": checkpoint.digest(rows),
            "model": repr(self.model),
            "device": self.device.type,
        }

    def open(self, place: Path | None) -> None:
        """Resume from the checkpoint in the folder, if there is one."""
        if place is None:
            return
        self.key = self.identity()
        saved = checkpoint.read(place, self.key)
        if saved is None:
            return
        checkpoint.restore(saved, self.model, self.optimizer)
        # Back in the layout of the weights.
        for p, slots in self.optimizer.state.items():
            for name, value in slots.items():
                if value.shape == p.shape:
                    slots[name] = torch.empty_like(p).copy_(value)
        self.history = History(**saved.values["history"])

    def save(self, place: Path | None) -> None:
        if place is None:
            return
        values = {"history": asdict(self.history)}
        parts = (self.model, self.optimizer)
        checkpoint.write(place, self.key, values, {}, *parts)


@torch.no_grad()
def image_scores(
    model: nn.Module, data: ImageData, images: Tensor, bf16: bool = False
) -> Tensor:
    """The scores of images in bytes, in evaluation mode, on the CPU."""
    device = next(model.parameters()).device
    model.eval()
    scores = []
    for chunk in images.to(device).split(EVALUATED):
        x = data.normalised(chunk, torch.float32)
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            scores.append(model(x).float().cpu())
    return torch.cat(scores)
