"""Schedules, and recipes for MNIST and CIFAR-10.

The recipes were chosen on held-out training images, never on the test images.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hdnn import models
from hdnn.errors import OptionError, choose, positive_int
from hdnn.models import ImageModel

# Schedules


def cosine(done: float) -> float:
    """A fall from 1 to 0 as the fraction `done` goes from 0 to 1."""
    return 0.5 * (1 + math.cos(math.pi * done))


def rate_factor(done: float, steps: int, warmup: float, schedule: str) -> float:
    """The factor of the learning rate after the fraction `done` of all steps.

    The factor rises for the fraction `warmup`, then stays "constant" or falls to zero as a
    "cosine".
    """
    if done < warmup:
        return min((done + 1 / steps) / warmup, 1.0)
    return (
        1.0
        if schedule == "constant"
        else cosine((done - warmup) / (1 - warmup))
    )


# Images


@dataclass(frozen=True, kw_only=True)
class ImageRecipe:
    """The settings of a training run on images.

    Attributes:
        epochs: the number of passes over the images.
        batch: the number of images in a minibatch.
        optimizer: "sgd", with Nesterov momentum, or "adam".
        learning_rate: the largest learning rate.
        momentum: the momentum of SGD.
        nesterov: True for Nesterov's momentum.
        warmup: the fraction of all steps in which the learning rate rises; it then falls as a
            cosine.
        rates: instead of warmup and cosine, factors of the learning rate by epoch, such as
            ((0, 1.0), (120, 0.1)).
        decay: instead of warmup and cosine, the learning rate's factor from one epoch to the next.
        weight_decay: the weight decay of matrices and kernels, not of normalisations and biases.
        label_smoothing: the label smoothing of the cross entropy.
        power: q > 0 makes the loss of an image (1 - p^q) / q instead of -log p, where p is the
            probability of its class: badly misclassified images then count less.
        smoothness: alpha, the penalty on differences between neighbouring layers.
        clip: the largest norm of the gradient; None for no limit.
        pad: the number of pixels added around an image before it is cropped.
        flip: mirror half of the images.
        bf16: compute in bfloat16, by autocast.
        seed: the seed for the order of images, crops and flips.
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
    bf16: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        positive_int("epochs", self.epochs)
        positive_int("batch", self.batch)
        choose("optimizer", self.optimizer, ("sgd", "adam"))
        for name in ("learning_rate", "weight_decay", "smoothness", "power"):
            if not 0 <= getattr(self, name) < math.inf:
                raise OptionError(
                    f"{name} must be >= 0, but got {getattr(self, name)!r}."
                )

    def to_dict(self) -> dict[str, Any]:
        """Its fields as plain values for JSON."""
        return {**asdict(self), "rates": [list(pair) for pair in self.rates]}

    def factor(self, step: int, batches: int) -> float:
        """The factor of the learning rate at a step."""
        epoch = step // batches
        if self.decay is not None:
            return self.decay**epoch
        if self.rates:
            return [rate for first, rate in self.rates if first <= epoch][-1]
        steps = self.epochs * batches
        return rate_factor(step / steps, steps, self.warmup, "cosine")

    def loss(self, scores: Tensor, t: Tensor) -> Tensor:
        """The mean loss of a minibatch."""
        if not self.power:
            return F.cross_entropy(
                scores, t, label_smoothing=self.label_smoothing
            )
        log_p = -F.cross_entropy(scores, t, reduction="none")
        return -torch.expm1(self.power * log_p).mean() / self.power


Settings = dict[str, Any]
_LINEAR: Settings = {"learning_rate": 0.04, "decay": 0.8, "weight_decay": 1e-3}
_MS: Settings = {**_LINEAR, "smoothness": 1e-3}
_OURS_MS: Settings = {**_MS, "weight_decay": 2.5e-4, "pad": 1}
_OURS_H: Settings = {
    "learning_rate": 4e-3,
    "decay": 0.85,
    "weight_decay": 3e-4,
    "smoothness": 1e-3,
    "pad": 1,
}
_PAPER_H: Settings = {**_MS, "weight_decay": 4e-3, "smoothness": 8e-3}
# By recipe and network. Our recipe moves images by a pixel, decays the weights less, and gives a
# network without hidden layers, which cannot fit all images, a bounded loss.
MNIST: dict[str, dict[str, Settings]] = {
    "ours": {
        "none": {**_LINEAR, "weight_decay": 2e-3, "power": 0.3},
        **dict.fromkeys(("ms1", "ms2", "ms3"), _OURS_MS),
        **dict.fromkeys(("h1", "h2"), _OURS_H),
        "conv": {  # K is a 3 x 3 convolution, in two units of 4 layers
            "batch": 250,
            "optimizer": "sgd",
            "learning_rate": 0.1,
            "label_smoothing": 0.1,
            "clip": 1.0,
            "pad": 2,
            "bf16": True,
        },
    },
    "paper": {"none": _LINEAR, "ms1": _MS, "h1": _PAPER_H, "h2": _PAPER_H},
}

LONG = 100  # from so many epochs on, training fits all images
DROP = 0.3  # how often the last layer is skipped in long training runs
_STAR: Settings = {
    "step": 0.5,
    "activation": "gelu",
    "norm": "after",
    "stem_norm": True,
}
_H1: Settings = {"network": "h1", **_STAR}
_H2: Settings = {
    "network": "h2",
    "channels": [88, 112, 144],
    "layers": 5,
    "pool": "mean",
    **_STAR,
}
STARS: dict[str, Settings] = {  # the Hamiltonian units of networks for CIFAR-10
    "h1": _H1,
    "h2": _H2,
    "h1_paper": {"network": "h1", "step": 0.1, "activation": "relu"},
}
LONG_STARS: dict[str, Settings] = {
    "h1": {**_H1, "drop": DROP},
    "h2": {**_H2, "channels": [96, 112, 144], "drop": DROP},
}
_PAPER_CIFAR: Settings = {  # the paper's recipe, which diverges without clipping
    "batch": 100,
    "learning_rate": 0.1,
    "nesterov": False,
    "weight_decay": 2e-4,
    "smoothness": 2e-4,
    "label_smoothing": 0.0,
    "clip": 1.0,
}
CIFAR: dict[str, Settings] = {
    "resnet56": {},
    "resnet56_drop": {},
    "h1": {"clip": 1.0},
    "h2": {"clip": 1.0},
    "h1_paper": _PAPER_CIFAR,
    "alexnet": {"learning_rate": 0.05, "clip": 1.0},
}
PAPER_DROPS = (
    (0.0, 1.0),
    (0.75, 0.1),
    (0.875, 0.01),
    (0.9375, 0.001),
)  # of the learning rate
NETWORKS = {"mnist": tuple(MNIST["ours"]), "cifar10": tuple(CIFAR)}


def image_recipe(
    data: str,
    network: str,
    *,
    epochs: int = 40,
    seed: int = 0,
    by: str = "ours",
    **options: Any,
) -> ImageRecipe:
    """The recipe for a network on "mnist" or "cifar10"; `options` replace its fields.

    Args:
        data: "mnist" or "cifar10".
        network: one of `NETWORKS[data]`.
        epochs: the number of passes over the images.
        seed: the seed for the order of images, crops and flips.
        by: "ours" or, for MNIST, the "paper".
        **options: fields of `ImageRecipe`.

    Examples:
        >>> from hdnn.training import recipes
        >>> recipes.image_recipe("mnist", "h2", epochs=2).learning_rate
        0.004
    """
    choose("network", network, NETWORKS[choose("data", data, NETWORKS)])
    settings: Settings = {"epochs": epochs, "seed": seed}
    if data == "mnist":
        settings |= {"batch": 100, "optimizer": "adam", **MNIST[by][network]}
    else:
        settings |= {
            "label_smoothing": 0.1,
            "pad": 4,
            "flip": True,
            "bf16": True,
        }
        settings |= CIFAR[network]
        if network == "h1_paper":
            drops = [
                (round(part * epochs), factor) for part, factor in PAPER_DROPS
            ]
            settings["rates"] = tuple(dict(drops).items())
    return ImageRecipe(**{**settings, **options})


def image_settings(
    data: str, network: str, *, epochs: int = 40, by: str = "ours"
) -> Settings:
    """The default options of a network's Hamiltonian layers, as `image_network` takes them."""
    if data == "mnist":
        if network in ("none", "conv"):
            return {}
        scaled = by == "ours" and network in ("h1", "h2")
        return {"layers": 8, "init": "scaled" if scaled else "paper"}
    stars = LONG_STARS if epochs >= LONG else STARS
    return dict(stars.get(network, STARS.get(network, {})))


def image_network(
    data: str, name: str, /, *, seed: int = 0, **settings: Any
) -> ImageModel:
    """A network for "mnist" or "cifar10", with weights drawn from a seed.

    Args:
        data: "mnist" or "cifar10".
        name: one of `NETWORKS[data]`.
        seed: the seed for the weights.
        **settings: options of the Hamiltonian layers, by default from `image_settings`.
    """
    choose("network", name, NETWORKS[choose("data", data, NETWORKS)])
    with torch.random.fork_rng(
        devices=[]
    ):  # weights are drawn from the global state
        torch.manual_seed(seed)
        if data == "mnist":
            if name == "conv":
                return models.mnist_conv("h1", norm="after")
            if name == "none":
                return models.mnist_net(None, 0)
            return models.mnist_net(
                name, **{**image_settings(data, name), **settings}
            )
        if name in STARS:
            return models.hdnn_star(
                **{**image_settings(data, name), **settings}
            )
        if name == "alexnet":
            return models.alexnet()
        return models.resnet56(drop=DROP if name == "resnet56_drop" else 0.0)
