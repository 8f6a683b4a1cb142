"""A training on disk: one file that holds all it needs to go on as if it had never stopped."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hdnn.base import tensorfile
from hdnn.base.files import as_path, read_bytes, reason_of, remove_leftovers, write_atomically
from hdnn.errors import CheckpointError
from hdnn.training.identity import difference

FORMAT = 1
KEY = "hdnn-training"
ADAM = ("exp_avg", "exp_avg_sq")
NAME = "checkpoint.safetensors"
LOG = "log.jsonl"

_held: set[tuple[int, int, int]] = set()  # device and inode of a folder, and the thread in it


def save(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    generator: Tensor,
    state: dict[str, Any],
    callbacks: Iterable[object] = (),
) -> None:
    """Write weights, optimiser, random state, position and callbacks, all of it or nothing."""
    tensors = {f"model.{name}": t for name, t in model.state_dict().items()}
    for k, slots in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{k}.{name}": torch.as_tensor(t) for name, t in slots.items()}
    tensors["generator"] = generator
    state = {**state, "callbacks": {}}
    for key, callback in _remembering(callbacks).items():
        parts = callback.state_dict()
        found = {name: part for name, part in parts.items() if isinstance(part, Tensor)}
        tensors |= {f"callback.{key}.{name}": part for name, part in found.items()}
        state["callbacks"][key] = {k: part for k, part in parts.items() if k not in found}
    content = tensorfile.packed(tensors, KEY, {"format": FORMAT, **state})
    write_atomically(folder / NAME, content)


class Saved(NamedTuple):
    """What a checkpoint holds."""

    path: Path
    state: dict[str, Any]
    tensors: dict[str, Tensor]


def read(folder: Path, options: dict[str, Any]) -> Saved | None:
    """A saved training with these options, or None if there is none yet."""
    path = folder / NAME
    if not path.exists():
        return None
    with tensorfile.opened(path, "a training of hdnn") as file:
        try:
            state = file.about(KEY)
            tensors = file.load(state)
            number, theirs = state.pop("format"), state["options"]
            if number != FORMAT or not isinstance(theirs, dict):
                raise ValueError("another format")
        except (KeyError, ValueError, TypeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"{path} cannot be read as a training of hdnn; it is damaged or of another kind "
                f"({reason_of(error)})."
            ) from error
    over = state.get("stopped") is True or state.get("epoch") == options.get("epochs")
    if over:  # callbacks are not called any more
        options = {name: value for name, value in options.items() if name != "callbacks"}
    different = difference(theirs, json.loads(json.dumps(options)))
    if different is not None:
        name, was, now = different
        raise CheckpointError(
            f"{path} is of another training: its {name} is {_short(was)}, not {_short(now)}; "
            "resume with the same options and data, or choose another folder."
        )
    return Saved(path, state, tensors)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:116]} ..."


@contextlib.contextmanager
def understood(path: Path) -> Iterator[None]:
    """Turn any error caused by the content of a file into one sentence that it does not fit."""
    try:
        yield
    except CheckpointError:
        raise
    except (RuntimeError, LookupError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} does not fit this model ({reason_of(error)}).") from error


def restore(
    saved: Saved,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    callbacks: Iterable[object] = (),
) -> tuple[dict[str, Any], Tensor]:
    """Put a saved training back; its state and random state."""
    path, state, tensors = saved
    with understood(path):
        weights = {
            n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")
        }
        slots: dict[int, dict[str, Tensor]] = {}
        known: dict[str, dict[str, Any]] = dict(state.get("callbacks", {}))
        for name, t in tensors.items():
            kind, _, rest = name.partition(".")
            key, _, slot = rest.partition(".")
            if kind == "optimizer":
                slots.setdefault(int(key), {})[slot] = t
            elif kind == "callback":
                known[key][slot] = t
        _check_slots(optimizer, slots)
        generator = tensors["generator"]
        torch.Generator().set_state(generator)  # raises if it is not valid
        model.load_state_dict(weights)
        optimizer.load_state_dict({**optimizer.state_dict(), "state": slots})
        for key, callback in _remembering(callbacks).items():
            if key in known:
                callback.load_state_dict(known[key])
        return state, generator


def _check_slots(optimizer: torch.optim.Optimizer, slots: dict[int, dict[str, Tensor]]) -> None:
    """Refuse moments that do not belong to the weights: PyTorch does not check their shapes."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    momentum = {"momentum_buffer"}
    names = momentum if isinstance(optimizer, torch.optim.SGD) else {*ADAM, "step"}
    for k, found in slots.items():
        if not 0 <= k < len(parameters) or found.keys() != names:
            raise ValueError(f"the optimizer has no weight {k} with {', '.join(sorted(found))}")
        for name, value in found.items():
            shape = () if name == "step" else parameters[k].shape
            if value.shape != shape or not value.is_floating_point():
                raise ValueError(f"{name} of weight {k} has shape {tuple(value.shape)}")


def check_state(saved: Saved, kinds: dict[str, type], epochs: int) -> None:
    """Refuse a position or a history that no training can have."""
    path, state, _ = saved
    with understood(path):
        for name, kind in kinds.items():
            if type(state[name]) is not kind:
                raise TypeError(f"its {name} is {_short(state[name])}")
        epoch, history = state["epoch"], state["history"]
        if not 0 <= epoch <= epochs:
            raise ValueError(f"its epoch is {epoch}")
        for name, values in history.items():
            single = name in ("seconds", "best_epoch")
            numbers = [values] if single else list(values)
            if not all(type(v) in (int, float) for v in numbers):
                raise TypeError(f"its history of {name} are no numbers")
            if not single and len(numbers) not in (0, epoch):
                raise ValueError(f"its history of {name} has {len(numbers)} epochs, not {epoch}")


def _remembering(callbacks: Iterable[object]) -> dict[str, Any]:
    """Callbacks that have a state, by class and number; others may change."""
    found: dict[str, list[object]] = {}
    for callback in callbacks:
        if hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict"):
            found.setdefault(type(callback).__name__, []).append(callback)
    return {f"{kind}-{k}": one for kind, alike in found.items() for k, one in enumerate(alike)}


class Log:
    """One JSON object a line for each epoch; a resume drops those after the checkpoint."""

    def __init__(self, folder: Path | None, keep: int) -> None:
        self.path = None if folder is None else folder / LOG
        if self.path is None:
            return
        kept = b""
        if keep and self.path.exists():
            kept = b"".join(read_bytes(self.path).splitlines(keepends=True)[:keep])
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
    path = as_path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # or a zero byte in its name
        reason = reason_of(error)
        raise CheckpointError(f"cannot make the folder {path}: {reason}.") from error
    if not resume and (path / NAME).exists():
        raise CheckpointError(
            f"{path} holds a training already; resume it (resume=True) or choose another folder."
        )
    return path


@contextlib.contextmanager
def locked(folder: Path | None) -> Iterator[None]:
    """Keep other processes, and other threads, out of the folder of a training meanwhile.

    The lock lies on the folder itself and belongs to the system: it leaves no file behind, and ends
    with the process, however that ends. Where the system or disk has no such locks, nothing is
    locked. A thread that has the lock can take it again. Files left half-written by a killed
    process are removed.
    """
    with contextlib.ExitStack() as stack:
        if folder is not None:
            with contextlib.suppress(ImportError):
                _lock(folder, stack)
        yield


def _lock(folder: Path, stack: contextlib.ExitStack) -> None:
    import fcntl

    try:
        descriptor = os.open(folder, os.O_RDONLY)
        stack.callback(os.close, descriptor)
        found = os.fstat(descriptor)
        mine = found.st_dev, found.st_ino, threading.get_ident()
        if mine in _held:
            return
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise CheckpointError(
            f"another process is training in {folder}; wait until it ends, or choose another "
            "folder."
        ) from error
    except OSError:  # a disk without locks
        return
    _held.add(mine)
    stack.callback(_held.discard, mine)
    with contextlib.suppress(OSError):
        remove_leftovers(folder)
