"""What configs have in common: names of data, and checks of numbers.

Configs are imported for the help of commands too: what takes long is imported where it is used.
"""

from __future__ import annotations

import inspect
import re
import unicodedata
from pathlib import Path
from typing import Any

from hdnn.errors import SENSIBLE, OptionError

DTYPES = ("float32", "float64")
IMAGE_SETS = ("mnist", "cifar10")


def is_table(data: str | None) -> bool:
    """Whether data of that name are a file."""
    from hdnn.data import planar

    return data is not None and data not in (*planar.SETS, *IMAGE_SETS)


def check_training(options: dict[str, Any]) -> None:
    """Check those of the options of `hdnn.training.fit` that are given."""
    from hdnn.training.checks import check_options

    check_options(**{**_fit_defaults(), **options})


def check_time(T: float | None, step: float | None) -> None:
    """Refuse a time span or a step that no layers can have, and both together."""
    for name, number in (("T", T), ("step", step)):
        if number is not None and not 0 < number <= SENSIBLE:
            raise OptionError(
                f"{name} must be finite and > 0, and at most {SENSIBLE:g}, but got {number}."
            )
    if T is not None and step is not None:
        raise OptionError("give T or step (h = T/N), but not both.")


def _fit_defaults() -> dict[str, Any]:
    """The options of `hdnn.training.fit` that it has a default for, also those without a flag."""
    from hdnn.training import fit

    given = inspect.signature(fit).parameters.values()
    return {option.name: option.default for option in given if option.default is not option.empty}


def find_device(name: str) -> str:
    """The device, if this machine has it; "auto" is a GPU where there is one."""
    import torch

    gpus = torch.cuda.device_count()
    if name == "auto":
        return "cuda" if gpus else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise OptionError(f"device {name!r} is not known; try cpu, cuda or auto.") from error
    if device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index):
        raise OptionError(f"device {name!r} is not for training; try cpu, cuda or auto.")
    if device.type == "cuda" and (device.index or 0) >= gpus:
        raise OptionError(f"there is no device {name!r} here: PyTorch finds {gpus} GPUs.")
    return name


def plain_name(place: str, otherwise: str) -> str:
    """The name of a data set or a file, with no letters that a folder should not have."""
    return plain_text(Path(place).stem, otherwise)


def plain_text(text: str, otherwise: str) -> str:
    """A text with no letters that a folder should not have; only ASCII, as names always were."""
    name = re.sub(r"[^\w.-]+", "_", text, flags=re.ASCII)
    return name.strip("._-")[:64] or otherwise


def target_text(text: str) -> str:
    """The name of a target, as part of a folder's name, with the letters of all languages."""
    name = re.sub(r"[^\w.-]+", "_", unicodedata.normalize("NFC", text))
    return name.encode()[:64].decode(errors="ignore").strip("._-") or "target"
