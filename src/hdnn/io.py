"""Files: safetensors with a checksum, JSON, and models that are rebuilt from their class.

Files are written completely or not at all. Nothing is ever pickled. A file that cannot be read
raises a `CheckpointError` of one sentence.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import json
import math
import os
import uuid
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn
from torch.nn.utils import parametrize

from hdnn._version import __version__
from hdnn.errors import CheckpointError, HDNNError

__all__ = [
    "describe",
    "load",
    "load_tensors",
    "lock",
    "plain_state",
    "read_json",
    "restore",
    "save",
    "save_tensors",
    "write_atomically",
    "write_json",
]

FilePath = str | os.PathLike[str]

# Of classes in files.
HOMES = ("hdnn.networks", "hdnn.heads", "hdnn.models", "hdnn.control")
PARTS = (*HOMES, "torch.nn")
# Classes of torch.nn whose arguments are attributes of the same names.
TORCH = """
    Sequential Linear Conv1d Conv2d Conv3d BatchNorm1d BatchNorm2d LayerNorm GroupNorm Dropout
    Flatten Identity ReLU LeakyReLU GELU SiLU ELU Tanh Sigmoid Softplus Softmax AvgPool2d MaxPool2d
    AdaptiveAvgPool2d Embedding
"""
KEY = "hdnn"
CHECKSUM = "sha256"


def write_atomically(path: FilePath, content: bytes | str) -> None:
    """Write to a temporary file beside `path`, flush it to disk, then rename it over `path`."""
    if isinstance(content, str):
        content = content.encode()
    target = Path(os.path.realpath(path))  # a link stays a link
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    if target.exists() and not target.is_file():
        raise CheckpointError(
            f"cannot write {path}: it is not a file; choose another name."
        )
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"cannot write {path}: {_reason(error)}; choose a folder that exists and has room."
        ) from error
    finally:  # also after an interruption
        with contextlib.suppress(OSError, ValueError):
            temporary.unlink(missing_ok=True)


def read_json(path: FilePath) -> Any:
    """The value in a JSON file."""
    _check_file(path)
    try:
        return json.loads(Path(path).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"cannot read {path} as JSON: {_reason(error)}."
        ) from error


def write_json(path: FilePath, value: Any) -> None:
    """Write a value as JSON; infinite numbers and NaN become null."""
    write_atomically(path, json.dumps(_finite(value), indent=1) + "\n")


@contextlib.contextmanager
def lock(path: FilePath) -> Iterator[None]:
    """Keep other processes out of a folder or file that exists, for the duration of a block.

    The lock ends with the process. Where the system has no such locks, nothing is locked.

    Raises:
        CheckpointError: if another process holds the lock.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise CheckpointError(
            f"another process is using {path}; wait until it ends, or choose another place."
        ) from error
    except OSError:  # a disk without locks
        pass
    try:
        yield
    finally:
        os.close(descriptor)


# Tensors


def save_tensors(
    path: FilePath,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Write tensors and a JSON object, with a checksum of both."""
    copies = {}
    for name, tensor in tensors.items():
        # Copies: safetensors takes no tensors that share memory.
        copies[name] = tensor.detach().to("cpu", copy=True).contiguous()
    text = json.dumps(dict(metadata or {}), sort_keys=True)
    # One entry only: safetensors writes several in random order.
    header = f'{{"{CHECKSUM}": "{_digest(text, copies)}", "metadata": {text}}}'
    write_atomically(path, to_safetensors(copies, metadata={KEY: header}))


def load_tensors(
    path: FilePath, device: torch.device | str = "cpu"
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the JSON object that `save_tensors` wrote.

    Raises:
        CheckpointError: if the file does not exist, is damaged, or was not written by hdnn.
    """
    _check_file(path)
    try:
        with safe_open(path, framework="pt") as file:
            header = (file.metadata() or {}).get(KEY)
            # Clones: a mapped tensor would change with the file.
            names = list(file.keys())
            tensors = {name: file.get_tensor(name).clone() for name in names}
    except (SafetensorError, OSError, MemoryError, RuntimeError) as error:
        raise CheckpointError(
            f"{path} cannot be read as a safetensors file; it is truncated, damaged or something "
            f"else ({_reason(error)})."
        ) from error
    metadata, checksum = _parse_header(header)
    if checksum != _digest(json.dumps(metadata, sort_keys=True), tensors):
        raise CheckpointError(
            f"{path} is damaged, or was not written by hdnn: its checksum does not match; use "
            "another copy, or create it again."
        )
    placed = {name: tensor.to(device) for name, tensor in tensors.items()}
    return placed, metadata


def _parse_header(text: str | None) -> tuple[dict[str, Any], str]:
    """The metadata and the checksum; nothing of a text that is damaged or missing."""
    try:
        header = json.loads(text or "")
        return header["metadata"], header[CHECKSUM]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}, ""


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    """A checksum of a text and of the names, types, shapes and bits of tensors."""
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


# Models


def save(module: nn.Module, path: FilePath, *, note: Any = None) -> None:
    """Write a model or a network to one safetensors file; nothing is pickled.

    For pruned or parametrised weights (`torch.nn.utils`) the values in use are written: loading
    gives a plain network with the same outputs.

    Args:
        module: an `hdnn.Model`, a network, a model of `hdnn.models`, or a `torch.nn.Sequential` of
            such networks and common layers of `torch.nn`.
        path: the file to write or replace.
        note: anything that JSON can hold; read it with `load_tensors(path)[1]["note"]`.

    Raises:
        CheckpointError: if `module` is of a class that hdnn does not know, or the file cannot be
            written.

    Examples:
        >>> import hdnn
        >>> hdnn.save(hdnn.H2(features=4, layers=8), "net.safetensors")
        >>> hdnn.load("net.safetensors")
        H2(4 features, 8 layers, tanh, h = 0.3, T = 2.4, 96 parameters)
    """
    kind = parametrize.type_before_parametrizations(module)
    if kind is not nn.Sequential:  # a layer of PyTorch alone is no model
        _class(kind.__name__, HOMES)
    description = describe(module)
    state = plain_state(module)
    try:
        _build(description, state)
    except (HDNNError, RuntimeError) as error:
        raise CheckpointError(
            f"this {type(module).__name__} cannot be saved, because it could not be loaded again: "
            f"{_reason(error).rstrip('.')}; save its state_dict() instead."
        ) from error
    metadata = {"version": __version__, "model": description, "note": note}
    save_tensors(path, state, metadata)


def load(path: FilePath, *, device: torch.device | str | None = None) -> Any:
    """The model or network that `save` wrote, with its options, weights and dtype.

    Args:
        path: the file to read.
        device: the device of the model, by default the CPU.

    Raises:
        CheckpointError: if the file does not exist, is damaged, or was not written by hdnn.
    """
    tensors, metadata = load_tensors(path, device or "cpu")
    try:
        module = _build(metadata.get("model"), tensors)
    except (HDNNError, RuntimeError) as error:
        raise CheckpointError(
            f"{path}, written by hdnn {metadata.get('version')}, does not hold a model that hdnn "
            f"{__version__} can build: {_reason(error)}"
        ) from error
    return module if device is None else module.to(device)


def describe(module: nn.Module) -> dict[str, Any]:
    """The class of a module and the arguments that build it again, as JSON can hold them.

    The arguments are those of `module.config()`, or else the attributes with the names of the
    constructor's arguments; modules among them are described in turn.
    """
    kind = parametrize.type_before_parametrizations(module)
    _class(kind.__name__, expected=kind)
    description = {"class": kind.__name__, "config": {}, "modules": {}}
    for name, value in _arguments(module, kind).items():
        if isinstance(value, nn.Module):
            description["modules"][name] = describe(value)
        else:
            description["config"][name] = value
    if hasattr(module, "constants"):
        # Matrices such as J; their values are in the state.
        constants = module.constants()  # pyright: ignore[reportCallIssue]
        description["constants"] = {
            name: list(value.shape) for name, value in constants.items()
        }
    return description


def _arguments(module: Any, kind: type) -> dict[str, Any]:
    """The arguments of the constructor; of a Sequential its modules."""
    if hasattr(module, "config"):
        return module.config()
    if kind is nn.Sequential:
        return dict(module.named_children())
    names = filter(partial(hasattr, module), inspect.signature(kind).parameters)
    arguments = {name: getattr(module, name) for name in names}
    if "bias" in arguments:
        arguments["bias"] = module.bias is not None
    return arguments


def restore(description: Any) -> Any:
    """The module that `describe` described, with new weights."""
    try:
        kind = _class(description["class"])
        arguments = dict(description["config"])
        for name, submodule in description["modules"].items():
            arguments[name] = restore(submodule)
        for name, shape in description.get("constants", {}).items():
            # Skew, and in every block pattern.
            arguments[name] = torch.zeros(shape)
        if kind is nn.Sequential:
            return nn.Sequential(OrderedDict(arguments))
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            return kind(**arguments)
    except (
        KeyError,
        TypeError,
        AttributeError,
        ValueError,
        RuntimeError,
    ) as error:
        reason = _reason(error)
        if not isinstance(error, HDNNError):
            reason = f"the description is damaged ({reason})"
        raise CheckpointError(reason) from error


def _build(description: Any, state: Mapping[str, Tensor]) -> nn.Module:
    """The module of a description, with the tensors of a state and their dtypes."""
    module = restore(description)
    module.load_state_dict(dict(state), assign=True)
    return module


def plain_state(module: nn.Module) -> dict[str, Tensor]:
    """The state of a module, with the values in use for pruned and parametrised weights."""
    state: dict[str, Tensor] = {}
    tensors = module.state_dict()
    for name, value in tensors.items():
        if name.endswith("_orig"):
            weight = name.removesuffix("_orig")
            state[weight] = value * tensors[f"{weight}_mask"]
        elif "parametrizations." not in name and not name.endswith("_mask"):
            state[name] = value
    for prefix, submodule in module.named_modules():
        if parametrize.is_parametrized(submodule):
            state |= _parametrized_weights(prefix, submodule)
    return state


@torch.no_grad()
def _parametrized_weights(prefix: str, module: nn.Module) -> dict[str, Tensor]:
    parametrizations = module.parametrizations
    assert isinstance(parametrizations, nn.ModuleDict)
    parametrizations.eval()
    start = f"{prefix}." if prefix else ""
    weights = {start + name: getattr(module, name) for name in parametrizations}
    parametrizations.train(module.training)
    return weights


def _class(
    name: str,
    homes: tuple[str, ...] = PARTS,
    expected: type | None = None,
) -> type[nn.Module]:
    """A class of hdnn or of torch.nn that files may name."""
    for home in homes:
        if importlib.util.find_spec(home) is None:
            continue
        kind = getattr(importlib.import_module(home), name, None)
        known = home != "torch.nn" or name in TORCH.split()
        ours = isinstance(kind, type) and issubclass(kind, nn.Module)
        if known and ours and expected in (None, kind):
            return kind  # pyright: ignore[reportReturnType]
    raise CheckpointError(
        f"{name} is not a class that hdnn can build again; save its state_dict(), and load that "
        "into a module that you have built in the same way."
    )


# Small helpers


def _check_file(path: FilePath) -> None:
    """Refuse all but plain files: reading a pipe or a device may never end."""
    if not os.path.isfile(path):
        raise CheckpointError(
            f"{path} does not exist, or is not a file; check the name and the folder."
        )


def _finite(value: Any) -> Any:
    """The value with None in place of infinite numbers and NaN, which JSON does not have."""
    if isinstance(value, Mapping):
        return {name: _finite(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _reason(error: Exception) -> str:
    """The message of an error, on one line of at most 300 letters."""
    text = (
        getattr(error, "strerror", None) or str(error) or type(error).__name__
    )
    return " ".join(text.split())[:300]
