"""Writing files so that a crash, a full disk or a second writer never leaves half of one.

And reading them with a limit on their size; a bad file is refused in one sentence.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import stat
import uuid
from pathlib import Path
from typing import Any

from hdnn.errors import CheckpointError

MOST = 2**28  # bytes that a text file may have
DEEPEST = 50  # levels of nested lists that a JSON file may have
KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


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
        if os.path.exists(path) and not path.is_dir():
            check_regular(path, "written")  # a rename would replace a device by a file
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
    except CheckpointError:  # its message is complete already
        raise
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"cannot write {path}: {reason_of(error)}; "
            "what was there before is unchanged. Choose a folder that exists and has room."
        ) from error
    finally:
        if temporary is not None:  # also after an interruption
            temporary.unlink(missing_ok=True)


def reason_of(error: object, longest: int = 200) -> str:
    """What an error says, in a few words on one line."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split())[:longest] or type(error).__name__


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed write has left behind. Nobody else may be writing there."""
    for file in folder.iterdir():
        if re.fullmatch(r"\..+\.[0-9a-f]{32}\.tmp", file.name):
            file.unlink(missing_ok=True)


def _flush_folder(folder: Path) -> None:
    """Make the rename survive a power failure, where the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def check_regular(path: Path, to_be: str = "read") -> None:
    """Refuse all but plain files: reading a pipe may never return, and a device may never end."""
    try:
        mode = os.stat(path).st_mode
    except ValueError as error:  # a zero byte in its name
        raise CheckpointError(f"{str(path)!r} cannot be {to_be}: {error}.") from error
    if not stat.S_ISREG(mode):
        kind = KINDS.get(stat.S_IFMT(mode), "no plain file")
        raise CheckpointError(f"{path} cannot be {to_be}: it is {kind}; name a file.")


def read_bytes(path: Path, most: int = MOST) -> bytes:
    """The content of a plain file of at most `most` bytes."""
    try:
        check_regular(path)
        with path.open("rb") as file:
            content = file.read(most + 1)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {reason_of(error)}.") from error
    if len(content) > most:
        raise CheckpointError(
            f"cannot read {path}: it is larger than {most // 2**20} MiB, and not what hdnn wrote."
        )
    return content


def read_json(path: Path, most: int = MOST) -> Any:
    """What a JSON file holds."""
    content = read_bytes(path, most)
    try:
        return parse_json(content)
    except ValueError as error:
        raise CheckpointError(f"cannot read {path}: {error}.") from error


def parse_json(text: bytes | str) -> Any:
    """The value of a JSON text; a ValueError if it is not valid, or nested too deeply."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("its lists are nested too deeply") from error
    level = [value]
    for _ in range(DEEPEST):
        inner = [one.values() if isinstance(one, dict) else one for one in level if _holds(one)]
        level = [entry for one in inner for entry in one]
        if not level:
            return value
    raise ValueError("its lists are nested too deeply")


def _holds(value: Any) -> bool:
    return isinstance(value, (dict, list))


def finite(value: Any) -> Any:
    """The value with None in place of infinities and NaN, which JSON cannot hold."""
    if isinstance(value, dict):
        return {name: finite(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
