"""Safetensors files with a JSON text in their metadata and a checksum of all that they hold.

A file is checked before it is loaded: `opened` maps it, which costs no memory whatever size it
claims, so that names, shapes and text can be read first. Never pickle.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_safetensors
from torch import Tensor

from hdnn.base import memory
from hdnn.base.files import check_regular, parse_json, reason_of
from hdnn.errors import CheckpointError

SUM = "sha256"


def packed(tensors: Mapping[str, Tensor], key: str, about: dict[str, Any]) -> bytes:
    """The content of a file; the same tensors and the same text give the same bytes."""
    # Copies, because parameters may share their storage, and safetensors takes none that do.
    copies = {
        name: t.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, t in tensors.items()
    }
    about = json.loads(json.dumps(about))  # as it will be read
    text = json.dumps({**about, SUM: digest(about, copies)}, sort_keys=True)
    return to_safetensors(copies, metadata={key: text})


class Mapped(NamedTuple):
    """A file that is open: its metadata, and tensors that are not in memory yet."""

    path: Path
    metadata: dict[str, str]
    tensors: dict[str, Tensor]

    def about(self, key: str) -> dict[str, Any]:
        """The JSON text under a key; a ValueError, TypeError or KeyError where there is none."""
        about = parse_json(self.metadata[key])
        if not isinstance(about, dict):
            raise TypeError(f"its text is no object but {type(about).__name__}")
        return about

    def load(self, about: dict[str, Any] | None = None) -> dict[str, Tensor]:
        """The tensors, if they and the text have the checksum that was written with them.

        Old files have no checksum and are read without this check.
        """
        size = sum(t.nbytes for t in self.tensors.values())
        if size > memory.total_bytes():  # a sparse file may be this large and take no space on disk
            raise CheckpointError(f"{self.path} holds {size} bytes, more than there is memory.")
        # Copies: what is mapped would change with the file.
        tensors = {name: t.clone() for name, t in self.tensors.items()}
        if about is not None and SUM in about:
            rest = {name: value for name, value in about.items() if name != SUM}
            if about[SUM] != digest(rest, tensors):
                raise CheckpointError(
                    f"{self.path} is damaged: its contents do not have the checksum that was "
                    "written with them; take a copy from elsewhere, or make it again."
                )
        return tensors


@contextmanager
def opened(path: Path, what: str = "a safetensors file") -> Iterator[Mapped]:
    """Open a file for the duration of a `with` block, or raise an error that says why not."""
    try:
        check_regular(path)
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            yield Mapped(path, file.metadata() or {}, tensors)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist; check its name and folder.") from error
    except (SafetensorError, OSError, MemoryError) as error:
        raise CheckpointError(
            f"{path} cannot be read as {what}; it is truncated, damaged or of another kind "
            f"({reason_of(error)})."
        ) from error
    except RuntimeError as error:
        if "memory" not in str(error):
            raise
        raise CheckpointError(
            f"{path} needs more memory than there is ({reason_of(error)})."
        ) from error


def read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The metadata and the tensors of any safetensors file."""
    with opened(path) as file:
        return file.metadata, file.load()


def digest(about: dict[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """A checksum of a text and of all names, types, shapes and bits of tensors."""
    found = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        found.update(bits(tensor))
    return found.hexdigest()


def bits(tensor: Tensor) -> memoryview:
    """All bytes of a tensor."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
