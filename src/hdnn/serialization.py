"""One safetensors file with a JSON config in its metadata. Never pickle."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn

import hdnn
from hdnn import describe_images
from hdnn.errors import CheckpointError, HDNNError
from hdnn.files import as_path, write_atomically
from hdnn.heads import HEADS, Augment
from hdnn.model import Model
from hdnn.models import ImageModel
from hdnn.networks import KINDS, Network

FORMAT = 1
COUNTER = ".num_batches_tracked"  # of torch.nn.BatchNorm2d, a whole number


def save(model: Model | Network | ImageModel, path: str | os.PathLike[str]) -> None:
    """Write a model or a network to one file, all of it or nothing."""
    if not isinstance(model, (Model, Network, ImageModel)):
        raise CheckpointError(
            f"only a hdnn.Model or a network can be saved, but got {type(model).__name__}; "
            "for other modules save their state_dict()."
        )
    config = {"format": FORMAT, "version": hdnn.__version__, **describe(model)}
    # Copies, because parameters may share their storage, and safetensors takes none that do.
    tensors = {
        name: t.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, t in model.state_dict().items()
    }
    # Sorted keys and no time stamp: the same model is the same bytes.
    content = to_safetensors(tensors, metadata={"hdnn": json.dumps(config, sort_keys=True)})
    write_atomically(path, content)


def load(
    path: str | os.PathLike[str], *, device: torch.device | str | None = None
) -> Model | Network | ImageModel:
    """Read back what `save` wrote, with its dtype, onto `device` (default: the CPU)."""
    path = as_path(path)
    metadata, tensors = read(path)
    try:
        config = json.loads(metadata["hdnn"])
        number = config["format"]
        if type(number) is not int or number < 1:
            raise ValueError(number)
    except (KeyError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path} is a safetensors file of another kind: hdnn did not write it."
        ) from error
    if number > FORMAT:
        raise CheckpointError(
            f"{path} was written by hdnn {config.get('version')} in format {number}, newer than "
            f"format {FORMAT} of this hdnn {hdnn.__version__}; install a newer hdnn."
        )
    numbers = {name for name, t in tensors.items() if t.is_floating_point()}
    wrong = [name for name in tensors if name not in numbers and not name.endswith(COUNTER)]
    if wrong or not numbers:
        what = f"{wrong[0]} is not of a floating-point type" if wrong else "it holds no weights"
        raise CheckpointError(f"{path} is damaged or was edited: {what}.")
    try:
        model = restore(config, tensors)
        model.load_state_dict(tensors, assign=True)  # with the dtype that each had
    except HDNNError as error:
        raise CheckpointError(f"{path} describes a model that cannot be made: {error}") from error
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"{path} does not hold the weights that its config describes; it is damaged or was "
            f"edited ({' '.join(str(error).split())[:200]})."
        ) from error
    return model if device is None else model.to(device)


def read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The metadata and the tensors of a safetensors file."""
    try:
        with safe_open(path, framework="pt") as file:
            # Copies: what is read is mapped from the file, and would change or die with it.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            return file.metadata() or {}, tensors
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist; check its name and folder.") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} cannot be read as a safetensors file; it is truncated, damaged or of another "
            f"kind ({' '.join(str(error).split())[:200]})."
        ) from error


def describe(part: nn.Module) -> dict[str, Any]:
    """The class of a part and the arguments that make it again."""
    kind = type(part).__name__
    if type(part) is Model:
        parts = {name: describe(module) for name, module in part.named_children()}
        return {"kind": kind, "parts": parts}
    if isinstance(part, ImageModel):
        description = {"kind": kind, "config": describe_images.config(part)}
        if isinstance(net := getattr(part, "net", None), Network):
            description["parts"] = {"net": describe(net)}
        return description
    if type(part) not in (Augment, *KINDS.values(), *HEADS.values()):
        raise CheckpointError(
            f"{kind} is not a class of hdnn and cannot be saved by it; save its state_dict()."
        )
    description = {"kind": kind, "config": part.config()}  # pyright: ignore[reportCallIssue]
    if isinstance(part, Network):
        description["constants"] = {k: list(v.shape) for k, v in part.constants().items()}
    return description


def restore(description: dict[str, Any], tensors: dict[str, Tensor], prefix: str = "") -> Any:
    """The part that was described, with the right shapes but not yet the right weights."""
    kind = description["kind"]
    if kind == "Model":
        parts = {
            name: restore(part, tensors, f"{name}.") for name, part in description["parts"].items()
        }
        return Model(parts.get("augment"), parts["net"], parts["head"])
    if kind == "Augment":
        return Augment(**description["config"])
    some = (t.dtype for name, t in tensors.items() if name.startswith(prefix))
    dtype = next(dtype for dtype in some if dtype.is_floating_point)
    options = {**description["config"], "dtype": dtype, "generator": torch.Generator()}
    if kind in describe_images.MAKERS:
        model = describe_images.make(kind, options, tensors)
        if "parts" in description:
            model.net = restore(description["parts"]["net"], tensors, "net.")
        return model
    if kind in HEADS:
        return HEADS[kind](**options)
    if kind in KINDS:
        for name, shape in description["constants"].items():
            options[name] = torch.zeros(shape)  # which is skew, and in every block pattern
        return KINDS[kind](**options)
    raise CheckpointError(f"kind {kind!r} is not known")
