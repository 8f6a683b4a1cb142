"""A training on disk: one file that holds all it needs to go on as if it had never stopped."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn

from hdnn.errors import CheckpointError
from hdnn.files import write_atomically

FORMAT = 1
NAME = "checkpoint.safetensors"
LOG = "log.jsonl"


def save(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    generator: Tensor,
    state: dict[str, Any],
) -> None:
    """Write weights, optimiser, random state and position, all of it or nothing."""
    tensors = {f"model.{name}": t for name, t in model.state_dict().items()}
    for k, slots in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{k}.{name}": torch.as_tensor(t) for name, t in slots.items()}
    tensors["generator"] = generator
    copies = {
        name: t.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, t in tensors.items()
    }
    meta = {"hdnn-training": json.dumps({"format": FORMAT, **state}, sort_keys=True)}
    write_atomically(folder / NAME, to_safetensors(copies, metadata=meta))


def load(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, options: dict[str, Any]
) -> tuple[dict[str, Any], Tensor] | None:
    """Put a saved training back; its state and random state, or None if there is none yet."""
    path = folder / NAME
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            state = json.loads((file.metadata() or {})["hdnn-training"])
        if state.pop("format") != FORMAT:
            raise ValueError("another format")
        different = sorted(k for k in options if state["options"].get(k) != options[k])
    except (SafetensorError, OSError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} cannot be read as a training of hdnn; it is damaged or of another kind "
            f"({' '.join(str(error).split())[:120]})."
        ) from error
    if different:
        was, now = state["options"].get(different[0]), options[different[0]]
        raise CheckpointError(
            f"{path} is of another training: its {different[0]} is {was!r}, not {now!r}; resume "
            "with the same options and data, or choose another folder."
        )
    try:
        weights = {
            n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")
        }
        model.load_state_dict(weights)
        slots: dict[int, dict[str, Tensor]] = {}
        for name, t in tensors.items():
            if name.startswith("optimizer."):
                _, k, slot = name.split(".", 2)
                slots.setdefault(int(k), {})[slot] = t
        optimizer.load_state_dict({**optimizer.state_dict(), "state": slots})
        return state, tensors["generator"]
    except (RuntimeError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"{path} does not fit this model ({' '.join(str(error).split())[:200]})."
        ) from error


class Log:
    """One JSON object a line, an epoch each; after a resume only what the checkpoint knows."""

    def __init__(self, folder: Path | None, keep: int) -> None:
        self.path = None if folder is None else folder / LOG
        if self.path is None:
            return
        kept = b""
        if keep and self.path.exists():
            kept = b"".join(self.path.read_bytes().splitlines(keepends=True)[:keep])
        write_atomically(self.path, kept)

    def write(self, entry: dict[str, Any]) -> None:
        if self.path is None:
            return
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
        except OSError as error:
            raise CheckpointError(
                f"cannot write {self.path}: {error.strerror}; the last checkpoint is kept."
            ) from error


def open_folder(folder: str | os.PathLike[str] | None, resume: bool) -> Path | None:
    """The folder of a training, made if need be; one that holds a training is not overwritten."""
    if folder is None:
        if resume:
            raise CheckpointError("resume needs the folder of the training to go on with.")
        return None
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot make the folder {path}: {error.strerror}.") from error
    if not resume and (path / NAME).exists():
        raise CheckpointError(
            f"{path} holds a training already; resume it (resume=True) or choose another folder."
        )
    return path
