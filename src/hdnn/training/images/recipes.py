"""How networks are trained on MNIST and CIFAR-10: by `hdnn train` and for the tables.

Ours were chosen on training images kept aside, never on the test images. On MNIST there is the
paper's recipe too; ours moves images by up to one pixel and lets the weights decay less, and gives
a network without hidden layers, which cannot fit all images, a bounded loss.
"""

from __future__ import annotations

from typing import Any

import torch

from hdnn import models
from hdnn.models import ImageModel
from hdnn.training.images import ImageRecipe

Options = dict[str, Any]

# MNIST: K from N(0, 1) ("paper") or N(0, 1/n), then what a recipe has.
_LINEAR: Options = {"learning_rate": 0.04, "decay": 0.8, "weight_decay": 1e-3}
_BOUNDED: Options = {**_LINEAR, "init": "paper", "smoothness": 1e-3}
_HAMILTONIAN: Options = {"init": "scaled", "learning_rate": 4e-3, "decay": 0.85, "pad": 1}
_HAMILTONIAN |= {"weight_decay": 3e-4, "smoothness": 1e-3}
_MARGINAL: Options = {**_BOUNDED, "weight_decay": 2.5e-4, "pad": 1}
_BY_PAPER: Options = {**_BOUNDED, "weight_decay": 4e-3, "smoothness": 8e-3}
MNIST: dict[str, dict[str, Options]] = {
    "ours": {
        "none": {**_LINEAR, "weight_decay": 2e-3, "power": 0.3},
        **dict.fromkeys(("ms1", "ms2", "ms3"), _MARGINAL),
        **dict.fromkeys(("h1", "h2"), _HAMILTONIAN),
    },
    "paper": {"none": _LINEAR, "ms1": _BOUNDED, **dict.fromkeys(("h1", "h2"), _BY_PAPER)},
}
MNIST_BATCH = 100
# K a 3 x 3 convolution, in two units of 4 layers.
MNIST_CONV: Options = {
    "batch": 250,
    "learning_rate": 0.1,
    "weight_decay": 5e-4,
    "label_smoothing": 0.1,
    "clip": 1.0,
    "pad": 2,
    "bf16": True,
}

CIFAR: Options = {
    "batch": 250,
    "optimizer": "sgd",
    "learning_rate": 0.2,
    "warmup": 0.1,
    "weight_decay": 5e-4,
    "label_smoothing": 0.1,
    "pad": 4,
    "flip": True,
    "bf16": True,
}
_STAR: Options = {"step": 0.5, "activation": "gelu", "norm": "after", "stem_norm": True}
# "long" has the changes for trainings so long that they fit all of their images.
LONG = 100  # epochs
DROP = 0.3  # how often the last layer is left out in a long training
CIFAR_NETWORKS: dict[str, dict[str, Options]] = {
    "resnet56": {"recipe": {}},
    "resnet56_drop": {"recipe": {}},  # with the DROP of the others, to be compared with them
    "h1": {"star": {"network": "h1", **_STAR}, "long": {"drop": DROP}, "recipe": {"clip": 1.0}},
    "h2": {
        "star": {
            "network": "h2",
            "channels": [88, 112, 144],
            "layers": 5,
            "pool": "mean",
            "reversible": False,
            **_STAR,
        },
        "long": {"channels": [96, 112, 144], "drop": DROP},
        "recipe": {"clip": 1.0},
    },
    # The paper's own, which diverges without the clipping.
    "h1_paper": {
        "star": {"network": "h1", "step": 0.1, "activation": "relu"},
        "recipe": {
            "batch": 100,
            "learning_rate": 0.1,
            "nesterov": False,
            "weight_decay": 2e-4,
            "smoothness": 2e-4,
            "label_smoothing": 0.0,
            "warmup": 0.0,
            "clip": 1.0,
        },
    },
    "alexnet": {"recipe": {"learning_rate": 0.05, "clip": 1.0}},
}
_DROPS = ((0.0, 1.0), (0.75, 0.1), (0.875, 0.01), (0.9375, 0.001))  # of the paper's rate

NETWORKS = {"mnist": tuple(models.MNIST_STEPS), "cifar10": tuple(CIFAR_NETWORKS)}
LAYERS = {"mnist": 8, "cifar10": 6}  # of a unit, for cifar10
STORED = 12  # layers a unit whose states are kept in any case, which is faster


def is_plain(data: str, network: str, layers: int | None) -> bool:
    """Whether a network has no Hamiltonian layers at all."""
    return layers == 0 if data == "mnist" else "star" not in CIFAR_NETWORKS[network]


def mnist(network: str, epochs: int, seed: int, *, by: str = "ours") -> ImageRecipe:
    """How the hidden network of that name, or "none", is trained on MNIST."""
    options = {name: value for name, value in MNIST[by][network].items() if name != "init"}
    options |= {"epochs": epochs, "seed": seed, "batch": MNIST_BATCH, "optimizer": "adam"}
    return ImageRecipe(**options)


def cifar(network: str, epochs: int, seed: int) -> ImageRecipe:
    """How the network of that name is trained on CIFAR-10."""
    options = {**CIFAR, **CIFAR_NETWORKS[network]["recipe"], "epochs": epochs, "seed": seed}
    if network == "h1_paper":
        drops = {round(part * epochs): factor for part, factor in _DROPS}
        options["rates"] = tuple(drops.items())
    return ImageRecipe(**options)


def star(network: str, epochs: int) -> Options | None:
    """The options of a network's Hamiltonian units on CIFAR-10, if it has any."""
    known = CIFAR_NETWORKS[network]
    if "star" not in known:
        return None
    return {**known["star"], **(known.get("long", {}) if epochs >= LONG else {})}


def drop(network: str, epochs: int) -> float:
    """How often the last layer or block of a network for CIFAR-10 is left out while training."""
    return DROP if network == "resnet56_drop" else (star(network, epochs) or {}).get("drop", 0.0)


def recipe(data: str, network: str, layers: int | None, epochs: int, seed: int) -> ImageRecipe:
    """How a network is trained on a set."""
    if data == "mnist":
        return mnist("none" if layers == 0 else network, epochs, seed)
    return cifar(network, epochs, seed)


def hidden(data: str, network: str) -> Options:
    """The options of the Hamiltonian layers, unless others are asked for."""
    if data == "mnist":
        init, step = MNIST["ours"][network]["init"], models.MNIST_STEPS[network]
        return {"layers": LAYERS[data], "step": step, "activation": "tanh", "init": init}
    plain = {"layers": LAYERS[data], "step": 0.1, "activation": "relu", "init": "scaled"}
    units = CIFAR_NETWORKS[network]["star"]
    return {name: units.get(name, value) for name, value in plain.items()}


def build(data: str, network: str, options: Options, seed: int, epochs: int) -> ImageModel:
    """The network for a training of so many epochs, with the weights of its seed.

    `options` are those of its Hamiltonian layers.
    """
    with torch.random.fork_rng(devices=[]):  # weights are drawn from the global state
        torch.manual_seed(seed)
        if data == "mnist":
            return models.mnist_net(network, **options)
        found = star(network, epochs)
        if found is not None:
            found |= options
            if rebuilds(network, options):
                del found["reversible"]
        return cifar_network(network, found)


def rebuilds(network: str, options: Options) -> bool:
    """Whether a unit may run layers a second time in its backward pass: where states are many."""
    return network == "h2" and options.get("layers", 0) > STORED


def cifar_network(network: str, units: Options | None) -> ImageModel:
    """A network for CIFAR-10, with the options of its Hamiltonian units, if it has any."""
    if units is not None:
        return models.hdnn_star(**units)
    if network == "resnet56_drop":
        return models.resnet56(drop=DROP)
    return {"resnet56": models.resnet56, "alexnet": models.alexnet}[network]()
