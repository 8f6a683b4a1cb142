"""The identity of a training: all that decides its bits, so that only the same one is resumed.

Every field is something that JSON can hold, and short enough to be shown in an error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from torch import Tensor, nn

from hdnn import engine
from hdnn.base.tensorfile import bits
from hdnn.engine.kernels.factors import float32_setting
from hdnn.models import ImageModel
from hdnn.networks import Network

# Fields that checkpoints of earlier versions do not have; there they are not compared.
LATER = (
    *("shapes", "parts", "frozen weights", "order of weights", "dtype", "device", "engine"),
    *("matmul precision", "callbacks", "processes", "images", "normalisation", "smooth parts"),
    "graphs",
)
LONG = 200  # characters; of longer values only a digest is kept


def digest(tensors: Iterable[Tensor]) -> str:
    """A digest of the bits of some tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(bits(tensor))
    return found.hexdigest()[:16]


def shapes(tensors: Iterable[Tensor]) -> str:
    """Types and shapes of some tensors."""
    return ", ".join(f"{str(t.dtype)[6:]} {tuple(t.shape)}" for t in tensors)


def of_model(model: nn.Module) -> dict[str, Any]:
    """A model and how it runs, without the values of its weights."""
    named = list(model.named_parameters())
    dtypes = sorted({str(p.dtype)[6:] for _, p in named})
    several = {name: str(p.dtype) for name, p in named}
    usual, now = asdict(engine.Settings()), asdict(engine.current())
    return {
        "parts": {name or "model": _part(part) for name, part in model.named_modules()},
        "frozen weights": _brief([name for name, p in named if not p.requires_grad]),
        "order of weights": _brief([name for name, _ in named]),
        "dtype": dtypes[0] if len(dtypes) == 1 else _brief(several),
        "device": named[0][1].device.type,
        "engine": {k: v for k, v in now.items() if v != usual[k] and k != "check"},
        "matmul precision": float32_setting(),
    }


def outline(model: nn.Module) -> str:
    """A short description of a network, the same under every version of PyTorch.

    Its class, its number of parameters, and a digest of the classes of its modules, of the options
    of those that are not PyTorch's own, and of the names and shapes in its state.
    """
    parts = [(name, type(part).__name__, _form(part)) for name, part in model.named_modules()]
    shapes = [(name, tuple(t.shape)) for name, t in model.state_dict().items()]
    digest = hashlib.sha256(json.dumps([parts, shapes]).encode()).hexdigest()[:8]
    count = sum(p.numel() for p in model.parameters())
    return f"{type(model).__name__} with {count:,} parameters, {digest}"


def _form(part: nn.Module) -> str:
    if isinstance(part, Network):
        return part.form()
    of_torch = type(part).extra_repr.__module__.partition(".")[0] == "torch"
    return "" if of_torch else part.extra_repr()


def of_callbacks(callbacks: Iterable[object]) -> list[Any]:
    """The settings of callbacks that influence the result; others may change."""
    found = [one for one in callbacks if callable(getattr(one, "settings", None))]
    return _plain([[type(one).__name__, one.settings()] for one in found])  # pyright: ignore


def _part(part: nn.Module) -> dict[str, Any]:
    """The options of one module, as exactly as it knows them.

    Not the config of an image model: its parts say the same, and earlier checkpoints have no more.
    """
    kind = type(part)
    if isinstance(part, Network):
        options = {**part.config(), "engine": part.engine, "backprop": part.backprop}
        if options.get("learn_step"):
            del options["step"]  # where it began
    elif callable(getattr(part, "config", None)) and not isinstance(part, ImageModel):
        options = part.config()  # pyright: ignore
    elif kind.__module__.partition(".")[0] == "torch":
        # Not its repr, which changes with the version of PyTorch.
        options = {name: getattr(part, name, None) for name in getattr(part, "__constants__", ())}
    else:
        exact = {name: getattr(part, name, None) for name in ("step", "drop", "backprop")}
        options = {"options": part.extra_repr(), **exact}
    found = {"kind": kind.__name__, **options}
    return {name: _brief(value) for name, value in found.items() if value is not None}


def _brief(value: Any) -> Any:
    """A value as JSON gives it back, or the digest of a long one."""
    text = json.dumps(value, default=str, sort_keys=True)
    if len(text) > LONG:
        return f"of digest {hashlib.sha256(text.encode()).hexdigest()[:16]}"
    return json.loads(text)


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


def difference(theirs: Any, ours: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """The first field that differs: its name, what it was, and what it is now."""
    if theirs == ours and type(theirs) is type(ours):
        return None
    if not (isinstance(theirs, dict) and isinstance(ours, dict)):
        number = {type(theirs), type(ours)} <= {int, float}
        return None if number and theirs == ours else (name, theirs, ours)
    for key in dict.fromkeys((*ours, *theirs)):
        if not name and (key not in ours or (key in LATER and key not in theirs)):
            continue
        inner = key if name in ("", "parts") else f"{name}.{key}"
        found = difference(theirs.get(key), ours.get(key), inner)
        if found is not None:
            return found
    return None
