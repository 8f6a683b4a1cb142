"""How to train on images: epochs, optimiser, rates, loss, and how images are varied."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hdnn.errors import TrainingError, choose
from hdnn.training import schedule
from hdnn.training.checks import number, whole_number

OPTIMIZERS = ("sgd", "adam")


@dataclass(frozen=True, kw_only=True)
class ImageRecipe:
    """How a network is trained on images.

    `rates` are factors of the learning rate by epoch, such as ((0, 1.0), (120, 0.1)); without them
    it rises for the fraction `warmup` and falls as a cosine. `decay` is per epoch: 0.8 makes the
    rate 0.8 times what it was. Weight decay is on matrices, kernels and the b of deep networks,
    not on normalisations and other biases. `pad` pixels around an image make room for crops; `flip`
    mirrors half of them; `cut` is the side of a square that is blanked in each. With `power` q the
    loss of an image is (1 - p^q) / q instead of -log p, where p is the probability of its class:
    images that are far from right then count less, which is good for networks that cannot fit all.
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
    power: float = 0.0
    smoothness: float = 0.0
    clip: float | None = None
    pad: int = 0
    flip: bool = False
    cut: int = 0
    bf16: bool = False
    seed: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Its fields as JSON has them."""
        return {**asdict(self), "rates": [list(pair) for pair in self.rates]}

    def factor(self, step: int, batches: int) -> float:
        """What the learning rate is multiplied by at a step."""
        epoch, steps = step // batches, self.epochs * batches
        if self.decay is not None:
            return self.decay**epoch
        if self.rates:
            return [rate for first, rate in self.rates if first <= epoch][-1]
        return schedule.factor(step / steps, steps, self.warmup, "cosine")

    def checked(self) -> ImageRecipe:
        """The same recipe, or an error that names the number that is out of range."""
        choose("optimizer", self.optimizer, OPTIMIZERS)
        for name in ("epochs", "batch"):
            whole_number(name, getattr(self, name), 1)
        for name in ("pad", "cut"):
            whole_number(name, getattr(self, name), 0)
        for name in ("learning_rate", "momentum", "warmup", "weight_decay", "smoothness", "power"):
            number(name, getattr(self, name))
        if number("label_smoothing", self.label_smoothing) >= 1:
            raise TrainingError(f"label_smoothing must be below 1, but got {self.label_smoothing}.")
        if self.power and self.label_smoothing:
            raise TrainingError("power and label_smoothing are two losses; give one of them.")
        return self

    def loss(self, scores: Tensor, t: Tensor) -> Tensor:
        """The mean over a minibatch, from its scores and classes."""
        if not self.power:
            return F.cross_entropy(scores, t, label_smoothing=self.label_smoothing)
        log_p = -F.cross_entropy(scores, t, reduction="none")
        return -torch.expm1(self.power * log_p).mean() / self.power
