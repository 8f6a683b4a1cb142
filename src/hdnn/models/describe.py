"""Image classifiers as their constructors' arguments, for `hdnn.serialization`, and back.

The arguments are read off the modules themselves: what is saved is what is there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from hdnn import models
from hdnn.errors import CheckpointError
from hdnn.models import AlexNet, HDNNStar, ImageModel, MNISTNet, ResNet
from hdnn.networks.unit import HamiltonianUnit

UNIT = ("network", "activation", "norm", "backprop")  # alike in all units


def _mnist(model: MNISTNet) -> dict[str, Any]:
    # The hidden network describes itself, as networks do.
    return {"channels": model.stem.out_channels, "size": model.size}


def _star(model: HDNNStar) -> dict[str, Any]:
    units = [unit for unit in model.stages if isinstance(unit, HamiltonianUnit)]
    first = units[0]
    config: dict[str, Any] = {name: getattr(first, name) for name in UNIT}
    config["step"] = list(first.step) if isinstance(first.step, tuple) else first.step
    layers = [unit.layers for unit in units]
    config["layers"] = layers[0] if len(set(layers)) == 1 else layers
    config["channels"] = [unit.channels for unit in units]
    config["stem_norm"] = model.stem_norm is not None
    config["drop"] = units[-1].drop[-1]
    names = ("padding", "pool", "inputs", "size")
    return {**config, **{name: getattr(model, name) for name in names}}


def _resnet(model: ResNet) -> dict[str, Any]:
    return {"depth": 2 * len(model.blocks) + 2, "drop": model.drop}


def _alexnet(model: AlexNet) -> dict[str, Any]:
    (dropout,) = {part.p for part in model.hidden if isinstance(part, nn.Dropout)}
    return {"resize": model.resize, "dropout": dropout}


CONFIGS: dict[type[ImageModel], Callable[[Any], dict[str, Any]]] = {
    MNISTNet: _mnist,
    HDNNStar: _star,
    ResNet: _resnet,
    AlexNet: _alexnet,
}
MAKERS: dict[str, Callable[..., ImageModel]] = {
    "MNISTNet": lambda **options: models.mnist_net(None, 0, **options),
    "HDNNStar": models.hdnn_star,
    "ResNet": models.resnet56,
    "AlexNet": models.alexnet,
}


def config(model: ImageModel) -> dict[str, Any]:
    """The arguments that make a model again, as JSON can hold them."""
    if type(model) not in CONFIGS:
        raise CheckpointError(
            f"{type(model).__name__} is not a class of hdnn and cannot be saved by it; save its "
            "state_dict()."
        )
    return {**CONFIGS[type(model)](model), "classes": model.linear.out_features}


def make(kind: str, options: dict[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    """A model of that kind; its weights are still to come."""
    # A file that promises more layers than it has tensors would be built for hours.
    most = sum(len(t) if t.ndim > 2 else 1 for t in tensors.values())
    for name in ("depth", "layers"):
        count = options.get(name, 0)
        if not (max(count, default=0) if isinstance(count, list) else count) <= 2 * most + 2:
            raise CheckpointError(f"there are not as many weights as for {name} {count}")
    options.pop("reversible", None)  # before `backprop` that was the default of H2, not a choice
    return MAKERS[kind](**options)
