"""Files: safetensors with a checksum, JSON, and models that are rebuilt from their class.

Files are written completely or not at all. Nothing is ever pickled. A file that cannot be read
raises a `CheckpointError`.
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
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn
from torch.nn.utils import parametrize

from hdnn._version import __version__
from hdnn.errors import CheckpointError, HDNNError, OptionError, require

__all__ = [
    "HubModule",
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

# Names of classes in files.
HOMES = (
    "hdnn.networks",
    "hdnn.heads",
    "hdnn.models",
    "hdnn.control",
    "hdnn.dynamics",
)
PARTS = (*HOMES, "torch.nn")
# Classes of torch.nn whose arguments are attributes of the same names.
TORCH = """
    Sequential ModuleList Linear Conv1d Conv2d Conv3d BatchNorm1d BatchNorm2d LayerNorm GroupNorm
    Dropout Flatten Identity ReLU LeakyReLU GELU SiLU ELU Tanh Sigmoid Softplus Softmax AvgPool2d
    MaxPool2d AdaptiveAvgPool2d Embedding
"""
KEY = "hdnn"
CHECKSUM = "sha256"
WEIGHTS = "model.safetensors"  # of a folder on the Hugging Face Hub


def write_atomically(path: FilePath, content: bytes | str) -> None:
    """Write to a temporary file beside `path`, flush it to disk, then rename it over `path`."""
    if isinstance(content, str):
        content = content.encode()
    target = Path(os.path.realpath(path))  # a link remains a link
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
    """The value stored in a JSON file."""
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
    """Keep other processes out of an existing folder or file for the duration of a block.

    The lock ends with the process. On systems without such locks, nothing is locked.

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
        # Copies: safetensors does not accept tensors that share memory.
        copies[name] = tensor.detach().to("cpu", copy=True).contiguous()
    text = json.dumps(dict(metadata or {}), sort_keys=True)
    # Only one entry: safetensors writes several entries in random order.
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
            f"{path} cannot be read as a safetensors file; it is truncated, damaged or of another "
            f"kind ({_reason(error)})."
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
    """The metadata and the checksum; empty if the text is damaged or missing."""
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
        note: any value that JSON can hold; read it with `load_tensors(path)[1]["note"]`.

    Raises:
        CheckpointError: if hdnn does not know the class of `module`, or the file cannot be written.

    Examples:
        >>> import hdnn
        >>> hdnn.save(hdnn.H2(features=4, layers=8), "net.safetensors")
        >>> hdnn.load("net.safetensors")
        H2(4 features, 8 layers, tanh, h = 0.3, T = 2.4, 96 parameters)
    """
    kind = parametrize.type_before_parametrizations(module)
    if kind is not nn.Sequential:  # a single layer of PyTorch is not a model
        _class(kind.__name__, HOMES)
    description = describe(module)
    state = plain_state(module)
    try:
        _build(json.loads(json.dumps(description)), state)
    except (HDNNError, RuntimeError, TypeError) as error:
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
    new_tensor(None, device)  # raises if the device is not available
    tensors, metadata = load_tensors(path, device or "cpu")
    try:
        module = _build(metadata.get("model"), tensors)
    except (HDNNError, RuntimeError) as error:
        raise CheckpointError(
            f"{path}, written by hdnn {metadata.get('version')}, does not hold a model that hdnn "
            f"{__version__} can build: {_reason(error)}"
        ) from error
    return module if device is None else module.to(device)


class HubModule(nn.Module):
    """A module with the methods of Hugging Face's `PyTorchModelHubMixin`: the base of all models.

    A saved model is a folder, or a repository on the Hugging Face Hub, with two files:
    `config.json`, and `model.safetensors` as `save` writes it.

    Examples:
        >>> import hdnn
        >>> hdnn.H2(features=4, layers=8).save_pretrained("net")
        >>> hdnn.H2.from_pretrained("net")
        H2(4 features, 8 layers, tanh, h = 0.3, T = 2.4, 96 parameters)
    """

    def save_pretrained(self, folder: FilePath, **options: Any) -> None:
        """Write the two files.

        Args:
            folder: the folder to write to; it is created if it does not exist.
            **options: other options of the mixin, such as `config`, which have no effect here.

        Raises:
            CheckpointError: if `save` cannot write the model, or cannot write to the folder.
        """
        # Without the folder, writing fails with a clear message.
        with contextlib.suppress(OSError):
            os.makedirs(folder, exist_ok=True)
        save(self, Path(folder, WEIGHTS))
        write_json(Path(folder, "config.json"), describe(self))

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Upload the two files in one commit, and return its address.

        Args:
            repo_id: the repository, such as "user/name"; it is created if it does not exist.
            **options: options of the mixin: `private`, `token`, `branch`, `create_pr`,
                `commit_message` and more.

        Raises:
            MissingExtraError: if huggingface_hub is not installed.
            CheckpointError: if `save` cannot write the model.
        """
        mixin = require("huggingface_hub", extra="hub").ModelHubMixin
        return mixin.push_to_hub(self, repo_id, **options)

    @classmethod
    def from_pretrained(
        cls,
        source: FilePath,
        *,
        map_location: Any = "cpu",
        **options: Any,
    ) -> Self:
        """The model in a folder or a repository, in evaluation mode.

        Args:
            source: a folder, or a repository such as "user/name", which needs huggingface_hub.
            map_location: the device of the model, such as "cuda".
            **options: options of `huggingface_hub.hf_hub_download`, such as `revision`, `token` and
                `local_files_only`; a folder needs none.

        Raises:
            CheckpointError: if there is no such folder or repository, or it does not hold a model
                of this class.
        """
        path = Path(source, WEIGHTS)
        if not os.path.isdir(source):
            try:
                path = require("huggingface_hub", extra="hub").hf_hub_download(
                    str(source), WEIGHTS, **options
                )
            except (OSError, ValueError) as error:
                raise CheckpointError(
                    f"{source} is not a folder, and could not be read from the Hugging Face Hub: "
                    f"{_reason(error)}"
                ) from error
        module = load(path, device=map_location)
        if not isinstance(module, cls):
            raise CheckpointError(
                f"{source} holds a model of the class {type(module).__name__}, not "
                f"{cls.__name__}; use from_pretrained of that class."
            )
        return module.eval()


def describe(module: nn.Module) -> dict[str, Any]:
    """The class of a module and the arguments that build it again, as plain values for JSON.

    The arguments are those of `module.config()`, or otherwise the attributes named like the
    constructor's arguments; modules among these are described in turn.
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
    """The arguments of the constructor; for a Sequential or a ModuleList, its modules."""
    if hasattr(module, "config"):
        return module.config()
    if kind in (nn.Sequential, nn.ModuleList):
        return dict(module._modules)
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
            # A skew matrix that fits every block pattern.
            arguments[name] = torch.zeros(shape)
        if kind is nn.Sequential:
            return nn.Sequential(OrderedDict(arguments))
        if kind is nn.ModuleList:
            return nn.ModuleList(arguments.values())
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


def new_tensor(dtype: torch.dtype | None, device: Any) -> Tensor:
    """An empty tensor of a dtype on a device, or an error if there is no such device."""
    try:
        return torch.empty(0, dtype=dtype, device=device)
    except (AssertionError, RuntimeError) as error:
        raise OptionError(
            f'no {str(device).upper()} device is available; use device="cpu".'
        ) from error


def _check_file(path: FilePath) -> None:
    """Refuse anything but plain files: reading a pipe or a device may never end."""
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
    """The message of an error, on one line of at most 300 characters."""
    text = (
        getattr(error, "strerror", None) or str(error) or type(error).__name__
    )
    return " ".join(text.split())[:300]
