"""A training run on disk: one file with all that is needed to resume without any difference."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hdnn import io
from hdnn.errors import CheckpointError

NAME = "checkpoint.safetensors"
Tensors = dict[str, Tensor]


class Saved(NamedTuple):
    """The contents of a checkpoint: plain values, and tensors whose names begin with a group."""

    values: dict[str, Any]
    tensors: Tensors

    def group(self, name: str) -> Tensors:
        """The tensors of a group, by their names without the group's."""
        prefix = f"{name}."
        members = {}
        for key, tensor in self.tensors.items():
            if key.startswith(prefix):
                members[key.removeprefix(prefix)] = tensor
        return members


def open_folder(
    folder: str | Path | None, resume: bool, stack: ExitStack
) -> Path | None:
    """Make and lock the folder of a training run; an existing training run is not overwritten."""
    if folder is None:
        if resume:
            raise CheckpointError(
                "resume needs the folder of the training run to continue."
            )
        return None
    place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"cannot make the folder {place}: {error.strerror}."
        ) from error
    stack.enter_context(io.lock(place))
    if not resume and (place / NAME).exists():
        raise CheckpointError(
            f"{place} already holds a training run; resume it (resume=True) or choose another "
            "folder."
        )
    return place


def digest(tensors: Iterable[Tensor | None]) -> str:
    """A checksum of the values of tensors."""
    total = hashlib.sha256()
    for tensor in tensors:
        if tensor is None:
            total.update(b"none")
        else:
            total.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            values = tensor.detach().cpu().contiguous()
            total.update(values.view(torch.uint8).numpy().data)
    return total.hexdigest()


def write(
    place: Path,
    identity: Mapping[str, Any],
    values: Mapping[str, Any],
    groups: Mapping[str, Tensors],
    model: nn.Module,
    optimizer: Any,
    generator: torch.Generator | None = None,
) -> None:
    """Write weights, optimiser state, random state and plain values in one atomic write.

    `identity` must be the same when training is resumed; `groups` are further tensors.
    """
    tensors = {}
    for group, members in {**groups, "model": model.state_dict()}.items():
        for name, tensor in members.items():
            tensors[f"{group}.{name}"] = tensor
    for index, slots in optimizer.state_dict()["state"].items():
        for name, value in slots.items():
            tensors[f"optimizer.{index}.{name}"] = torch.as_tensor(value)
    if generator is not None:
        tensors["generator.state"] = generator.get_state()
    metadata = {"identity": dict(identity), "values": dict(values)}
    io.save_tensors(place / NAME, tensors, metadata)


def read(place: Path, identity: Mapping[str, Any]) -> Saved | None:
    """The training run in a folder, which must have this identity, or None if there is none yet."""
    path = place / NAME
    if not path.exists():
        return None
    tensors, metadata = io.load_tensors(path)
    if "identity" not in metadata:
        raise CheckpointError(
            f"{path} was written by hdnn, but does not hold a training run."
        )
    before = metadata["identity"]
    now = json.loads(json.dumps(dict(identity)))
    for name in {**before, **now}:
        if before.get(name) != now.get(name):
            raise CheckpointError(
                f"{path} belongs to a different training run: its {name} is "
                f"{str(before.get(name))[:100]}, not {str(now.get(name))[:100]}; resume with the "
                "same options and data, or choose another folder."
            )
    return Saved(metadata["values"], tensors)


def restore(
    saved: Saved,
    model: nn.Module,
    optimizer: Any,
    generator: torch.Generator | None = None,
) -> None:
    """Restore the model, optimiser and random state of a saved training run."""
    model.load_state_dict(saved.group("model"))
    slots: dict[int, Tensors] = {}
    for key, tensor in saved.group("optimizer").items():
        index, _, name = key.partition(".")
        slots.setdefault(int(index), {})[name] = tensor
    optimizer.load_state_dict({**optimizer.state_dict(), "state": slots})
    if generator is not None:
        generator.set_state(saved.tensors["generator.state"])
