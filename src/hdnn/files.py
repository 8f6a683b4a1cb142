"""Writing files so that a crash, a full disk or a second writer never leaves half of one."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from hdnn.errors import CheckpointError


def write_atomically(path: str | os.PathLike[str], content: bytes) -> None:
    """Write to a temporary file beside `path`, flush it to disk, then rename it over `path`."""
    path = Path(path)
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(
            dir=path.parent, prefix=f".{path.name}.", suffix=".tmp", delete=False
        ) as file:
            temporary = file.name
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # as an ordinary new file, not a private one
        os.replace(temporary, path)
        temporary = None
    except OSError as error:
        raise CheckpointError(
            f"cannot write {path}: {error.strerror or error}; "
            "what was there before is unchanged. Choose a folder that exists and has room."
        ) from error
    finally:
        if temporary is not None:  # also after an interruption
            Path(temporary).unlink(missing_ok=True)
