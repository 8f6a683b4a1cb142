"""Training on images: the whole set on the device, one step as one CUDA graph.

Minibatches are gathered on the device from images that stay there as bytes; crops and flips are
drawn there too. On a GPU a step, from the gathering to the optimiser, is recorded once and then
replayed: with small batches most of its time would go into launching it. Everything random in an
epoch comes from the seed and the number of that epoch, so a training can go on after any epoch as
if it had never stopped.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hdnn.base.progress import ProgressLine
from hdnn.data.images import ImageData, augment, blank, draw
from hdnn.errors import TrainingError
from hdnn.training import checkpoint, identity
from hdnn.training.images.recipe import ImageRecipe
from hdnn.training.smooth import Smooth, Smoothness

WARM = 3  # steps before a graph is recorded, so that all is allocated
EVALUATED = 1000  # images at once


@dataclass
class ImageHistory:
    """One entry an epoch."""

    loss: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)  # on the augmented minibatches
    test: list[float] = field(default_factory=list)
    seconds: float = 0.0  # of training, without tests


class ImageTraining:
    """A network, images on its device, and a recipe.

    `smooth` are the parts of the network whose smoothness R_K is added to the loss.
    """

    def __init__(
        self,
        model: nn.Module,
        data: ImageData,
        recipe: ImageRecipe,
        *,
        smooth: tuple[Smooth, ...] = (),
        graphs: bool | None = None,
    ) -> None:
        self.model, self.recipe = model, recipe.checked()
        self.smooth = Smoothness(smooth, recipe.smoothness)
        self.device = next(model.parameters()).device
        self.data = data.to(self.device)
        self.cuda = self.device.type == "cuda"
        self.graphs = self.cuda if graphs is None else graphs
        images = self.data.images_train
        self.batches = len(images) // recipe.batch  # what is left over waits for the next epoch
        if not self.batches:
            raise TrainingError(
                f"a minibatch of {recipe.batch} images is larger than the set of {len(images)}."
            )
        self.optimizer = self._optimizer()
        # The values that change from step to step, and the number of the step.
        rows, here = (self.batches, recipe.batch), dict[str, Any](device=self.device)
        self.order = torch.zeros(rows, dtype=torch.int64, **here)
        self.shifts = torch.zeros(*rows, 2, dtype=torch.int64, **here)
        self.flips = torch.zeros(rows, dtype=torch.bool, **here)
        self.cuts = torch.zeros_like(self.shifts)
        self.rates = torch.zeros(self.batches, dtype=torch.float32, **here)
        self.count = torch.zeros(1, dtype=torch.int64, **here)
        self.sums = torch.zeros(2, dtype=torch.float64, **here)
        self.history, self.epoch = ImageHistory(), 0
        self.stream = torch.cuda.Stream(self.device) if self.cuda else None
        self.random_state = _generator(self.device).clone_state() if self.cuda else None
        self.replay: Callable[[], None] | None = None

    def _optimizer(self) -> torch.optim.Optimizer:
        recipe = self.recipe
        decayed = [p for p in self.model.parameters() if p.ndim > 1]
        others = [p for p in self.model.parameters() if p.ndim <= 1]
        groups: list[dict[str, Any]] = [
            {"params": decayed, "weight_decay": recipe.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        rate = torch.tensor(recipe.learning_rate, device=self.device) if self.cuda else 0.0
        if recipe.optimizer == "adam":
            return torch.optim.Adam(groups, lr=rate, capturable=self.cuda, fused=self.cuda)
        return torch.optim.SGD(
            groups,
            lr=rate,
            momentum=recipe.momentum,
            nesterov=recipe.nesterov,
            fused=self.cuda,
        )

    # One step

    def _step(self) -> None:
        data, recipe = self.data, self.recipe
        index, shifts, flips = (
            each.index_select(0, self.count)[0] for each in (self.order, self.shifts, self.flips)
        )
        images, t = data.images_train[index], data.t_train[index]
        if recipe.pad or recipe.flip:
            images = augment(images, pad=recipe.pad, shifts=shifts, flips=flips)
        x = data.normalised(images, torch.float32)
        if recipe.cut:
            x = blank(x, self.cuts.index_select(0, self.count)[0], recipe.cut)
        if x.shape[1] > 1 and self.cuda:
            x = x.contiguous(memory_format=torch.channels_last)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=recipe.bf16):
            scores = self.model(x)
        loss = recipe.loss(scores.float(), t)
        self.optimizer.zero_grad()  # to None, so that gradients are written, not added
        loss.backward()
        self.smooth.add_gradient()
        if recipe.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip, foreach=True)
        rate = self.rates.index_select(0, self.count)[0]
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].copy_(rate)
            else:
                group["lr"] = float(rate)
        self.optimizer.step()
        correct = (scores.detach().argmax(1) == t).double().mean()
        self.sums += torch.stack([loss.detach().double(), correct])
        self.count += 1

    def _record(self) -> None:
        """Warm up, then record a step; weights and moments stay as they are."""
        saved = {k: v.clone() for k, v in self.model.state_dict().items()}
        moments = [v.clone() for s in self.optimizer.state.values() for v in s.values()]
        graph = torch.cuda.CUDAGraph()
        with _fastest_convolutions():
            for _ in range(WARM):
                self.count.zero_()
                self._step()
            self.count.zero_()
            with torch.cuda.graph(graph, stream=self.stream):
                self._step()
        self.model.load_state_dict(saved)
        there = [v for s in self.optimizer.state.values() for v in s.values()]
        for value, old in zip_longest(there, moments):
            if isinstance(value, Tensor):
                value.copy_(old) if isinstance(old, Tensor) else value.zero_()
        self.sums.zero_()
        self.count.zero_()
        self.replay = graph.replay

    # A training

    def steps(self) -> Iterator[int]:
        """The steps of the next epoch, one at a time, so that other trainings can take turns."""
        with self._aside(), self._random(0):
            self._lay_out()
            if self.graphs and self.replay is None:
                self._record()
        for k in range(self.batches):
            with self._aside(), self._random(k):
                (self.replay or self._step)()
            yield k
        with self._aside():
            loss, correct = (self.sums / self.batches).tolist()
            self.sums.zero_()
        if not math.isfinite(loss):
            raise TrainingError(
                f"the loss is not finite in epoch {self.epoch + 1}: the training has diverged; "
                "lower learning_rate, clip the gradients or take a smaller step h."
            )
        self.epoch += 1
        self.history.loss.append(loss)
        self.history.accuracy.append(correct)

    def run_epoch(self) -> None:
        """Go once through the training images."""
        for _ in self.steps():
            pass

    def _lay_out(self) -> None:
        """Draw what is random in the next epoch, from the seed and from its number alone."""
        recipe, epoch, N = self.recipe, self.epoch, self.batches
        self.model.train()
        generator = torch.Generator(self.device).manual_seed(self._epoch_seed())
        count = N * recipe.batch
        order = torch.randperm(len(self.data.t_train), generator=generator, device=self.device)
        shifts, flips = draw(count, generator, pad=recipe.pad, flip=recipe.flip)
        self.order.copy_(order[:count].view(N, -1))
        self.shifts.copy_(shifts.view(N, -1, 2))
        self.flips.copy_(flips.view(N, -1))
        if recipe.cut:
            side = min(self.data.images_train.shape[2:])
            self.cuts.random_(0, side, generator=generator)
        factors = [recipe.factor(epoch * N + k, N) for k in range(N)]
        self.rates.copy_(recipe.learning_rate * torch.tensor(factors))
        self.count.zero_()

    def _epoch_seed(self) -> int:
        return self.recipe.seed * 100_003 + self.epoch

    @contextmanager
    def _random(self, k: int) -> Iterator[None]:
        """Let the network's random numbers depend on the seed, the epoch and the step alone.

        On a GPU each training has a state of its own: a graph reads it while it runs, and by then
        another training may already have been seeded.
        """
        generator = _generator(self.device)
        if self.random_state is None:
            put_back = partial(generator.set_state, generator.get_state())
        else:
            put_back = partial(generator.graphsafe_set_state, generator.graphsafe_get_state())
            generator.graphsafe_set_state(self.random_state)
        generator.manual_seed((self._epoch_seed() * self.batches + k) % 2**63)
        try:
            yield
        finally:
            put_back()

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """On a GPU, run in a separate stream, after earlier work in the default stream."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.default_stream(self.device))
        with torch.cuda.stream(self.stream):
            yield

    def accuracy(self, images: Tensor, t: Tensor) -> float:
        """The fraction of images that is classified right, in evaluation mode."""
        return (self.scores(images).argmax(1) == t.cpu()).sum().item() / len(t)

    @torch.no_grad()
    def scores(self, images: Tensor) -> Tensor:
        """What the model gives for all images in evaluation mode, on the CPU."""
        self.model.eval()
        with self._aside():
            parts = []
            for some in images.split(EVALUATED):
                x = self.data.normalised(some, torch.float32)
                with torch.autocast(self.device.type, torch.bfloat16, enabled=self.recipe.bf16):
                    parts.append(self.model(x))
            return torch.cat(parts).cpu()

    def test(self) -> None:
        """Add the accuracy on the test images to the history."""
        self.history.test.append(self.accuracy(self.data.images_test, self.data.t_test))

    def run(
        self,
        *,
        folder: str | os.PathLike[str] | None = None,
        resume: bool = False,
        until: float = math.inf,
        progress: bool = True,
    ) -> ImageHistory:
        """All epochs that are left, or as many as fit into `until` seconds."""
        place = checkpoint.open_folder(folder, resume)
        begun, line = time.perf_counter(), ProgressLine(progress)
        with checkpoint.locked(place):
            if place is not None:
                self.open(place)
            while self.epoch < self.recipe.epochs:
                next_epoch([self], [place])
                line.show(
                    f"epoch {self.epoch}/{self.recipe.epochs}, loss {self.history.loss[-1]:.4f}, "
                    f"test {100 * self.history.test[-1]:.2f}%, {self.history.seconds:.0f} s"
                )
                if time.perf_counter() - begun > until:
                    break
            line.close()
        return self.history

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What must be the same for a training to go on: all that decides its bits."""
        data = self.data
        known: dict[str, Any] = {"data": data.name, "model": identity.outline(self.model)}
        tensors = (data.images_train, data.t_train, data.images_test, data.t_test)
        known |= {"images": identity.digest(tensors), "shapes": identity.shapes(tensors)}
        known |= {"normalisation": [list(data.mean), list(data.std)], "graphs": self.graphs}
        names = {id(part): name for name, part in self.model.named_modules()}
        parts = self.smooth.parts if self.recipe.smoothness else ()
        known["smooth parts"] = [names.get(id(part), "another") for part in parts]
        return {**self.recipe.to_dict(), **known, **identity.of_model(self.model)}

    def save(self, place: Path) -> None:
        """Write a checkpoint into the folder, all of it or nothing."""
        state = {"epoch": self.epoch, "history": asdict(self.history), "options": self.identity}
        none = torch.Generator().get_state()  # an epoch's randomness comes from its number
        checkpoint.save(place, self.model, self.optimizer, none, state)

    def open(self, place: Path) -> None:
        """Go on from the checkpoint in the folder, if there is one."""
        found = checkpoint.read(place, self.identity)
        if found is None:
            return
        checkpoint.check_state(found, {"epoch": int, "history": dict}, self.recipe.epochs)
        with checkpoint.understood(found.path):
            history = ImageHistory(**found.state["history"])
        state, _ = checkpoint.restore(found, self.model, self.optimizer, [])
        for p, slots in self.optimizer.state.items():  # in the layout of the weights again
            for name, value in slots.items():
                if value.shape == p.shape:
                    slots[name] = torch.empty_like(p).copy_(value)
        self.epoch, self.history = state["epoch"], history


def next_epoch(
    trainings: Sequence[ImageTraining],
    folders: Sequence[Path | None],
    watch: Callable[[int], None] | None = None,
) -> None:
    """Once through the images, a step of each training in turn; then tests, and checkpoints.

    `watch` is called with the number of the step.
    """
    start = time.perf_counter()
    for k, _ in enumerate(zip_longest(*(one.steps() for one in trainings))):
        if watch is not None:
            watch(k)
    seconds = (time.perf_counter() - start) / len(trainings)
    for one, folder in zip(trainings, folders, strict=True):
        one.history.seconds += seconds
        one.test()
        if folder is not None:
            one.save(folder)


def run_together(
    trainings: Sequence[ImageTraining],
    *,
    folders: Sequence[Path] | None = None,
    until: float = math.inf,
    progress: bool = False,
) -> bool:
    """Run several trainings, a step of each in turn, so that together they fill one GPU.

    With a folder for each, there is a checkpoint after every epoch to resume from. No epoch begins
    after `until`, by `time.monotonic`. Returns whether all trainings are complete.
    """
    places = [None] * len(trainings) if folders is None else folders
    pairs, line = list(zip(trainings, places, strict=True)), ProgressLine(progress)
    with ExitStack() as stack:
        stack.callback(line.close)
        for one, folder in pairs:
            if folder is not None:
                stack.enter_context(checkpoint.locked(checkpoint.open_folder(folder, resume=True)))
                one.open(folder)
        while left := [pair for pair in pairs if pair[0].epoch < pair[0].recipe.epochs]:
            if time.monotonic() > until:
                return False
            next_epoch([one for one, _ in left], [folder for _, folder in left])
            tests = ", ".join(f"{100 * one.history.test[-1]:.2f}%" for one, _ in left)
            one = left[-1][0]
            line.show(f"epoch {one.epoch}/{one.recipe.epochs}, test {tests}")
    return True


def _generator(device: torch.device) -> torch.Generator:
    """The random generator that networks use."""
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index]
    return torch.default_generator


@contextmanager
def _fastest_convolutions() -> Iterator[None]:
    """Let cuDNN try all its algorithms, which pays when a step is recorded and run many times."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
