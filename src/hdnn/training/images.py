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
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hdnn import engine
from hdnn.data.images import ImageData, augment, draw
from hdnn.errors import TrainingError, choose
from hdnn.training import checkpoint, schedule
from hdnn.training.checks import number, whole_number
from hdnn.training.progress import Line

WARM = 3  # steps before a graph is recorded, so that all is allocated
OPTIMIZERS = ("sgd", "adam")
EVALUATED = 1000  # images at once


class Smooth(Protocol):
    def smoothness(self) -> Tensor: ...


@dataclass
class ImageHistory:
    """One entry an epoch."""

    loss: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)  # on the augmented minibatches
    test: list[float] = field(default_factory=list)
    seconds: float = 0.0  # of training, without tests


@dataclass(frozen=True, kw_only=True)
class ImageRecipe:
    """How a network is trained on images.

    `rates` are factors of the learning rate by epoch, such as ((0, 1.0), (120, 0.1)); without them
    it rises for the fraction `warmup` and falls as a cosine. `decay` is per epoch: 0.8 makes the
    rate 0.8 times what it was. Weight decay is on matrices and kernels only. `pad` pixels around an
    image make room for crops; `flip` mirrors half of them.
    """

    epochs: int = 40
    batch: int = 250
    optimizer: str = "sgd"
    learning_rate: float = 0.2
    momentum: float = 0.9
    nesterov: bool = True
    warmup: float = 0.1
    rates: tuple[tuple[int, float], ...] = ()
    decay: float | None = None
    weight_decay: float = 5e-4
    label_smoothing: float = 0.0
    smoothness: float = 0.0
    clip: float | None = None
    pad: int = 0
    flip: bool = False
    bf16: bool = False
    seed: int = 0

    def factor(self, step: int, batches: int) -> float:
        """What the learning rate is multiplied by at a step."""
        epoch, steps = step // batches, self.epochs * batches
        if self.decay is not None:
            return self.decay**epoch
        if self.rates:
            return [rate for first, rate in self.rates if first <= epoch][-1]
        return schedule.factor(step / steps, steps, self.warmup, "cosine")

    def checked(self) -> ImageRecipe:
        choose("optimizer", self.optimizer, OPTIMIZERS)
        for name in ("epochs", "batch"):
            whole_number(name, getattr(self, name), 1)
        for name in ("learning_rate", "momentum", "warmup", "weight_decay", "smoothness"):
            number(name, getattr(self, name))
        return self


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
        self.model, self.recipe, self.smooth = model, recipe.checked(), smooth
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
        B = recipe.batch
        like: dict[str, Any] = {"device": self.device}
        self.index = torch.zeros(B, dtype=torch.int64, **like)
        self.shifts = torch.zeros(B, 2, dtype=torch.int64, **like)
        self.flips = torch.zeros(B, dtype=torch.bool, **like)
        self.sums = torch.zeros(2, dtype=torch.float64, **like)
        self.history, self.epoch = ImageHistory(), 0
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
            return torch.optim.Adam(groups, lr=rate, capturable=self.cuda, foreach=self.cuda)
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
        images, t = data.images_train[self.index], data.t_train[self.index]
        if recipe.pad or recipe.flip:
            images = augment(images, pad=recipe.pad, shifts=self.shifts, flips=self.flips)
        x = data.normalised(images, torch.float32)
        if x.shape[1] > 1 and self.cuda:
            x = x.contiguous(memory_format=torch.channels_last)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=recipe.bf16):
            scores = self.model(x)
        loss = F.cross_entropy(scores.float(), t, label_smoothing=recipe.label_smoothing)
        total = loss
        if recipe.smoothness:
            for part in self.smooth:
                total = total + recipe.smoothness * part.smoothness()
        total.backward()
        if recipe.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        correct = (scores.detach().argmax(1) == t).double().mean()
        self.sums += torch.stack([loss.detach().double(), correct])

    def _record(self) -> None:
        """Warm up on a side stream, then record a step; weights and statistics stay as they are."""
        saved = {k: v.clone() for k, v in self.model.state_dict().items()}
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with engine.use(engine="reference"):  # the fused kernels look at their results
            with torch.cuda.stream(stream):
                for _ in range(WARM):
                    self._step()
            torch.cuda.current_stream().wait_stream(stream)
            with torch.cuda.graph(graph):
                self._step()
        self.model.load_state_dict(saved)
        for state in self.optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    value.zero_()
        self.sums.zero_()
        self.replay = graph.replay

    def _rate(self, factor: float) -> None:
        rate = self.recipe.learning_rate * factor
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    # A training

    def run_epoch(self) -> None:
        """Go once through the training images."""
        recipe = self.recipe
        self.model.train()
        if self.graphs and self.replay is None:
            saved = None
            if self.epoch:  # resumed: the optimiser's state must outlive the recording
                saved = [v.clone() for s in self.optimizer.state.values() for v in s.values()]
            self._record()
            if saved is not None:
                there = [v for s in self.optimizer.state.values() for v in s.values()]
                for value, old in zip(there, saved, strict=True):
                    value.copy_(old)
        generator = torch.Generator(self.device).manual_seed(recipe.seed * 100_003 + self.epoch)
        like: dict[str, Any] = {"generator": generator, "device": self.device}
        count = self.batches * recipe.batch
        order = torch.randperm(len(self.data.t_train), **like)[:count].view(self.batches, -1)
        drawn, mirrored = draw(count, generator, pad=recipe.pad, flip=recipe.flip)
        shifts, flips = drawn.view(self.batches, -1, 2), mirrored.view(self.batches, -1)
        step = self.replay or self._step
        for k in range(self.batches):
            self._rate(recipe.factor(self.epoch * self.batches + k, self.batches))
            self.index.copy_(order[k])
            if recipe.pad or recipe.flip:
                self.shifts.copy_(shifts[k])
                self.flips.copy_(flips[k])
            step()
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

    @torch.no_grad()
    def accuracy(self, images: Tensor, t: Tensor) -> float:
        """The fraction of images that is classified right, in evaluation mode."""
        self.model.eval()
        right = 0.0
        for some, labels in zip(images.split(EVALUATED), t.split(EVALUATED), strict=True):
            x = self.data.normalised(some, torch.float32)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.recipe.bf16):
                right += float((self.model(x).argmax(1) == labels).double().sum())
        return right / len(t)

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
        begun, line = time.perf_counter(), Line(progress)
        with checkpoint.locked(place):
            if place is not None:
                self._open(place)
            while self.epoch < self.recipe.epochs:
                start = time.perf_counter()
                self.run_epoch()
                self.history.seconds += time.perf_counter() - start
                data = self.data
                self.history.test.append(self.accuracy(data.images_test, data.t_test))
                if place is not None:
                    self._save(place)
                line.show(
                    f"epoch {self.epoch}/{self.recipe.epochs}, loss {self.history.loss[-1]:.4f}, "
                    f"test {100 * self.history.test[-1]:.2f}%, {self.history.seconds:.0f} s"
                )
                if time.perf_counter() - begun > until:
                    break
            line.close()
        return self.history

    def _identity(self) -> dict[str, Any]:
        recipe = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self.recipe).items()}
        recipe["rates"] = [list(pair) for pair in self.recipe.rates]
        return {**recipe, "data": self.data.name, "model": repr(self.model)}

    def _save(self, place: Any) -> None:
        state = {"epoch": self.epoch, "history": asdict(self.history), "options": self._identity()}
        none = torch.Generator().get_state()  # an epoch's randomness comes from its number
        checkpoint.save(place, self.model, self.optimizer, none, state)

    def _open(self, place: Any) -> None:
        found = checkpoint.read(place, self._identity())
        if found is None:
            return
        state, _ = checkpoint.restore(found, self.model, self.optimizer, [])
        self.epoch, self.history = state["epoch"], ImageHistory(**state["history"])
