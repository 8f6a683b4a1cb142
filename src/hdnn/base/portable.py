"""Values as bytes for another process: JSON and safetensors, never pickle.

Numbers, text, lists, tuples, dicts with text as keys, paths, tensors, errors, and dataclasses
registered by `portable`. Nothing else can be created from bytes that a stranger sends.
"""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as from_safetensors
from safetensors.torch import save as to_safetensors
from torch import Tensor

from hdnn import errors
from hdnn.base.sent import classes
from hdnn.base.sent import portable as portable
from hdnn.errors import CheckpointError, HDNNError, TrainingError


def pack(value: Any) -> bytes:
    """A value as bytes."""
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_plain(value, tensors)).encode()
    return len(text).to_bytes(8, "big") + text + to_safetensors(tensors)


def unpack(content: bytes) -> Any:
    """The value that `pack` was given."""
    try:
        end = 8 + int.from_bytes(content[:8], "big")
        plain, tensors = json.loads(content[8:end]), from_safetensors(content[end:])
        return _value(plain, tensors)
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"a message from another process is damaged ({error}).") from error


def _plain(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The value as JSON can hold it: other types become a pair of type and content."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [_plain(one, tensors) for one in value]
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().cpu().contiguous().clone()
        return {"tensor": name}
    if isinstance(value, tuple):
        return {"tuple": [_plain(one, tensors) for one in value]}
    if isinstance(value, Path):
        return {"path": str(value)}
    if isinstance(value, Exception):
        said = [type(value).__name__, str(value)]
        known = type(value).__module__ == HDNNError.__module__
        return {"error": said if known else [TrainingError.__name__, ": ".join(said)]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": [[key, _plain(one, tensors)] for key, one in value.items()]}
    kind = type(value).__name__
    if is_dataclass(value) and classes.get(kind) is type(value):
        parts = {field.name: getattr(value, field.name) for field in fields(value)}
        return {kind: _plain(parts, tensors)}
    raise TypeError(f"a {kind} cannot be sent to another process")


def _value(plain: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(plain, list):
        return [_value(one, tensors) for one in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "tuple":
        return tuple(_value(one, tensors) for one in content)
    if kind == "path":
        return Path(content)
    if kind == "error":
        name, said = content
        known = getattr(errors, name, TrainingError)
        ours = isinstance(known, type) and issubclass(known, HDNNError)
        return (known if ours else TrainingError)(said)
    if kind == "dict":
        return {key: _value(one, tensors) for key, one in content}
    return classes[kind](**_value(content, tensors))
