"""One safetensors file with a JSON config in its metadata. Never pickle."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from hdnn import models
from hdnn._version import __version__
from hdnn.base import tensorfile
from hdnn.base.devices import as_device
from hdnn.base.files import as_path, reason_of, write_atomically
from hdnn.base.tensorfile import read as read
from hdnn.errors import CheckpointError, HDNNError
from hdnn.heads import HEADS, Augment, Model
from hdnn.models import ImageModel
from hdnn.networks import KINDS, HamiltonianNet, Network, Reversible
from hdnn.networks.blocks import Layers as Block
from hdnn.networks.weights import refresh, target

FORMAT = 1
COUNTER = ".num_batches_tracked"  # of torch.nn.BatchNorm2d, a whole number
LITTLE = 2**20  # numbers: so few always fit into memory
ENDINGS = ("orig", "mask", "g", "u", "v")  # of names of tensors that a weight is made of
IMAGES = (models.MNISTNet, models.HDNNStar, models.ResNet, models.AlexNet)
# All that can be saved, but for a Model, and what makes each from its config.
MAKERS: dict[type[nn.Module], Callable[..., Any]] = {
    **{of: of for of in (Augment, *HEADS.values(), *KINDS.values())},
    **{of: of for of in IMAGES},
}
# What PyTorch raises for a config that contradicts itself, or for an impossible shape.
WRONG = (KeyError, TypeError, AttributeError, RuntimeError, ValueError, ArithmeticError, IndexError)


def save(model: Model | Network | ImageModel, path: str | os.PathLike[str]) -> None:
    """Write a model or a network to one file, all of it or nothing.

    The file has the weights, in the format of safetensors, and the configuration in its header;
    nothing is pickled. For pruned or parametrised weights (`torch.nn.utils`) the values that the
    network uses are written: loading gives a plain network with the same outputs.

    Args:
        model: a `hdnn.Model`, a network, or a model of `hdnn.models`.
        path: the file to write; one that is there is replaced.

    Raises:
        CheckpointError: if it is another module, a subclass of your own, or the file cannot be
            written.

    Examples:
        >>> import hdnn
        >>> hdnn.save(hdnn.H2(features=4, layers=8), "net.safetensors")
        >>> hdnn.load("net.safetensors")
        H2(4 features, 8 layers, tanh, h = 0.3, T = 2.4, 96 parameters)
    """
    write(model, path)


def write(
    model: Model | Network | ImageModel, path: str | os.PathLike[str], note: Any = None
) -> None:
    """`save`, with a note that `read_note` finds again."""
    if isinstance(model, (Reversible, Block)):
        raise CheckpointError(
            f"the modules of a {type(model).__name__} are your own, and hdnn could not make them "
            "again; save its state_dict(), and load that into one that you have built in the same "
            "way."
        )
    if not isinstance(model, (Model, Network, ImageModel)):
        raise CheckpointError(
            f"only a hdnn.Model or a network can be saved, but got {type(model).__name__}; "
            "for other modules save their state_dict()."
        )
    config = {"format": FORMAT, "version": __version__, **describe(model)}
    config |= {} if note is None else {"note": note}
    tensors = weights(model)
    try:
        _check_fit(config, tensors)
        content = tensorfile.packed(tensors, "hdnn", config)
    except (HDNNError, *WRONG) as error:
        raise CheckpointError(
            f"this {type(model).__name__} cannot be saved, because it could not be loaded again: "
            f"{reason_of(error).rstrip('.')}; save its state_dict()."
        ) from error
    write_atomically(path, content)


def load(
    path: str | os.PathLike[str], *, device: torch.device | str | None = None
) -> Model | Network | ImageModel:
    """Read back what `save` wrote, with its dtype.

    Args:
        path: the file to read.
        device: where the model is to be; by default on the CPU.

    Returns:
        The model or network, with all its options and weights.

    Raises:
        CheckpointError: if the file is not there, is damaged, was not written by hdnn, or was
            written by a newer version.
        OptionError: if there is no such device here.

    Examples:
        >>> import torch
        >>> import hdnn
        >>> net = hdnn.H2(features=4, layers=8)
        >>> hdnn.save(net, "net.safetensors")
        >>> y = torch.randn(10, 4)
        >>> torch.equal(hdnn.load("net.safetensors")(y), net(y))
        True
        >>> hdnn.load("other.safetensors")
        Traceback (most recent call last):
        hdnn.errors.CheckpointError: other.safetensors does not exist; check its name and folder.
    """
    path, device = as_path(path), None if device is None else as_device(device)
    with tensorfile.opened(path) as file:
        config = _config(file)
        try:
            _check_fit(config, file.tensors)
            tensors = file.load(config)
            model = restore(config, tensors)
            model.load_state_dict(tensors, assign=True)  # with the dtype that each had
            for part in model.modules():
                if isinstance(part, HamiltonianNet):
                    part.started_from_here()
        except CheckpointError as error:
            if str(path) in str(error):
                raise
            raise CheckpointError(f"{path} is damaged or was edited: {error}") from error
        except HDNNError as error:
            raise CheckpointError(
                f"{path} describes a model that cannot be made: {error}"
            ) from error
        except WRONG as error:
            raise CheckpointError(
                f"{path} does not hold the weights that its config describes; it is damaged or was "
                f"edited ({reason_of(error)})."
            ) from error
    return model if device is None else model.to(device)


def read_note(path: str | os.PathLike[str]) -> Any:
    """The note that `write` left in a file, or None."""
    with tensorfile.opened(as_path(path)) as file:
        return _config(file).get("note")


def _config(file: tensorfile.Mapped) -> dict[str, Any]:
    """The config in a file, if this version can read it."""
    try:
        config = file.about("hdnn")
        number = config["format"]
        if type(number) is not int or number < 1:
            raise ValueError(number)
    except (KeyError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{file.path} is a safetensors file of another kind: hdnn did not write it."
        ) from error
    if number > FORMAT:
        raise CheckpointError(
            f"{file.path} was written by hdnn {config.get('version')} in format {number}, newer "
            f"than format {FORMAT} of this hdnn {__version__}; install a newer hdnn."
        )
    return config


def _check_fit(config: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors that do not fit the config, before any part of the model is made."""
    numbers = {name for name, t in tensors.items() if t.is_floating_point()}
    wrong = [name for name in tensors if name not in numbers and not name.endswith(COUNTER)]
    if wrong or not numbers:
        what = f"{wrong[0]} is not of a floating-point type" if wrong else "it holds no weights"
        raise CheckpointError(f"{what}.")
    wanted = restore(config, tensors, device="meta").state_dict()
    for name in sorted({*wanted, *tensors}):
        if name not in wanted:
            raise CheckpointError(f"{name} is no weight of this {config['kind']}.")
        if name not in tensors:
            raise CheckpointError(f"the weight {name} is missing.")
        shape, given = tuple(wanted[name].shape), tuple(tensors[name].shape)
        if shape != given:
            raise CheckpointError(f"{name} has shape {given}, but {shape} is needed.")


# Weights


def weights(model: nn.Module) -> dict[str, Tensor]:
    """All tensors to be saved, under the names of a plain network.

    Pruned and parametrised weights have the values that evaluation mode uses.
    """
    state, modes = model.state_dict(), [(part, part.training) for part in model.modules()]
    try:
        with torch.no_grad():
            for prefix, part in model.named_modules():
                start = f"{prefix}." if prefix else ""
                part.training = False
                for name, value, replaced in _computed(part):
                    for key in [key for key in state if key.startswith(start)]:
                        if key.removeprefix(start).startswith(replaced):
                            del state[key]
                    state[f"{start}{name}"] = value
    finally:
        for part, training in modes:
            part.training = training
    return state


def _computed(part: nn.Module) -> Iterator[tuple[str, Tensor, tuple[str, ...]]]:
    """Weights that a module computes from other tensors: name, value, names of the others."""
    if parametrize.is_parametrized(part):
        assert isinstance(part.parametrizations, nn.ModuleDict)
        part.parametrizations.eval()
        for name in part.parametrizations:
            yield name, getattr(part, name), (f"parametrizations.{name}.",)
    refresh(part)
    for hook in part._forward_pre_hooks.values():
        name = target(hook)
        if name is not None and isinstance(hook, (BasePruningMethod, SpectralNorm, WeightNorm)):
            yield name, getattr(part, name), tuple(f"{name}_{end}" for end in ENDINGS)


# Descriptions


def describe(part: nn.Module) -> dict[str, Any]:
    """The class of a part and the arguments that make it again."""
    of = parametrize.type_before_parametrizations(part)
    if of is not Model and of not in MAKERS:
        raise CheckpointError(
            f"{of.__name__} is not a class of hdnn and cannot be saved by it; save its "
            "state_dict()."
        )
    description: dict[str, Any] = {"kind": of.__name__}
    if of is not Model:
        config = part.config()  # pyright: ignore[reportCallIssue]
        config |= {k: None for k, v in config.items() if isinstance(v, nn.Module)}
        description["config"] = config
    if isinstance(part, Network):
        description["constants"] = {k: list(v.shape) for k, v in part.constants().items()}
    parts = {
        name: describe(child)
        for name, child in part.named_children()
        if of is Model or isinstance(child, Network)
    }
    return {**description, "parts": parts} if parts else description


def restore(
    description: dict[str, Any],
    tensors: Mapping[str, Tensor],
    prefix: str = "",
    device: str | None = None,
) -> Any:
    """The part that was described, with the right shapes but not yet the right weights.

    Of `tensors`, which are its own, only names, dtypes and shapes are read.
    """
    kind = description["kind"]
    of = next((of for of in (Model, *MAKERS) if of.__name__ == kind), None)
    if of is None:
        raise CheckpointError(f"kind {kind!r} is not known.")
    if of is Model:
        parts = {
            name: restore(part, tensors, f"{name}.", device)
            for name, part in description["parts"].items()
        }
        return Model(parts.get("augment"), parts["net"], parts["head"])
    own = {name: t for name, t in tensors.items() if name.startswith(prefix)}
    config, constants = description["config"], description.get("constants", {})
    if of is Augment:  # no tensors of its own: its features must fit those of the others
        _check_room(config, constants, tensors)
        return Augment(**config)
    dtype = next((t.dtype for t in own.values() if t.is_floating_point()), None)
    if dtype is None:
        raise CheckpointError(f"there are no weights of its {kind}.")
    generator = None if device == "meta" else torch.Generator()
    options = {**config, "dtype": dtype, "generator": generator, "device": device or "cpu"}
    if of in IMAGES:
        _check_depth(config, own)
        options.pop("reversible", None)  # in old files the default of H2, and not a choice
    else:
        _check_room(config, constants, own)
        # Zeros are skew, and in every block pattern.
        options |= {name: torch.zeros(shape) for name, shape in constants.items()}
    if "parts" in description:
        parts = description["parts"]["net"]
        options["network"] = restore(parts, tensors, f"{prefix}net.", device)
    return MAKERS[of](**options)


def _check_depth(config: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Refuse a file that claims more layers than it has tensors: building them may take hours."""
    most = sum(len(t) if t.ndim > 2 else 1 for t in tensors.values())
    for name in ("depth", "layers"):
        count = config.get(name, 0)
        if not (max(count, default=0) if isinstance(count, list) else count) <= 2 * most + 2:
            raise CheckpointError(f"there are not as many weights as for {name} {count}")


def _check_room(
    config: dict[str, Any], constants: dict[str, list[int]], tensors: Mapping[str, Tensor]
) -> None:
    """Refuse a part that is far larger than its weights, before memory is allocated for it."""
    n, there = _whole(config.get("features")), sum(t.numel() for t in tensors.values())
    sparsity = config.get("sparsity")
    nodes = len(sparsity["R"][0]) if isinstance(sparsity, dict) else 1
    if "layers" in config:
        # K has at least n^2 / 4 entries, or that divided by the number of nodes if none are linked.
        stored = 1 if config.get("tied") is True else _whole(config["layers"])
        needed = stored * n * max(n // (4 * nodes), 1)
    else:
        needed = n * _whole(config.get("outputs", config.get("classes")))
    matrices = [math.prod(map(_whole, shape)) for shape in constants.values()]
    if needed > max(LITTLE, there) or max(matrices, default=0) > max(LITTLE, 4 * nodes * there):
        raise CheckpointError(f"there are {there} weights, far too few for what it describes.")


def _whole(number: Any) -> int:
    """A size, or 1 for anything else, which is refused later where it is used."""
    return number if type(number) is int and number > 0 else 1
