"""Writing files so that a crash, a full disk or a second writer never leaves half of one."""

from __future__ import annotations

import contextlib
import math
import os
import re
import uuid
from pathlib import Path
from typing import Any

from hdnn.errors import CheckpointError


def as_path(path: str | os.PathLike[str]) -> Path:
    """The path of a file, or an error that says what was given instead."""
    try:
        return Path(path)
    except TypeError as error:
        raise CheckpointError(
            f"a path must be a string or a pathlib.Path, but got {type(path).__name__}."
        ) from error


def write_atomically(path: str | os.PathLike[str], content: bytes) -> None:
    """Write to a temporary file beside `path`, flush it to disk, then rename it over `path`."""
    path = as_path(path)
    temporary = None
    try:
        path = Path(os.path.realpath(path))  # a link stays a link
        unique = path.parent / f".{path.name}.{uuid.uuid4().hex}.tmp"
        descriptor = os.open(unique, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        temporary = unique
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        temporary = None
        _flush_folder(path.parent)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise CheckpointError(
            f"cannot write {path}: {reason}; "
            "what was there before is unchanged. Choose a folder that exists and has room."
        ) from error
    finally:
        if temporary is not None:  # also after an interruption
            temporary.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Remove what a kill in the middle of a write has left; for who knows that nobody writes."""
    for file in folder.iterdir():
        if re.fullmatch(r"\..+\.[0-9a-f]{32}\.tmp", file.name):
            file.unlink(missing_ok=True)


def _flush_folder(folder: Path) -> None:
    """Make the rename last through a loss of power, where the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def finite(value: Any) -> Any:
    """The same with None for what JSON cannot hold: infinite numbers, and NaN."""
    if isinstance(value, dict):
        return {name: finite(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
