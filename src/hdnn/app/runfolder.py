"""What every run on disk has: a folder, a config since its start, and results at its end."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from hdnn.errors import CheckpointError


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run, of any kind."""

    folder: Path

    # What to do about a folder that holds a run, by the options that its command has.
    ways: ClassVar[str] = "go on with it by --resume, or name another folder with --out"

    metrics_file = property(lambda self: self.folder / "metrics.json")
    log_file = property(lambda self: self.folder / "log.jsonl")

    @property
    def config_file(self) -> Path:
        """The config of the run, or where it will be if there is none."""
        raise NotImplementedError

    @property
    def exists(self) -> bool:
        """Whether a run was started here."""
        return self.config_file.is_file()

    @property
    def complete(self) -> bool:
        """Whether it is finished."""
        return self.metrics_file.is_file()

    def check_free(self) -> None:
        """Refuse a folder that holds anything: nothing is overwritten unless that is asked for."""
        # A temporary file is what a kill in the middle of the first write leaves behind.
        taken = os.path.lexists(self.folder) and not (
            self.folder.is_dir()
            and all(re.fullmatch(r"\..*\.tmp", file.name) for file in self.folder.iterdir())
        )
        if not taken:
            return
        if self.exists:
            raise CheckpointError(f"{self.folder} holds a run already; {self.ways}.")
        raise CheckpointError(
            f"{self.folder} is {'not empty' if self.folder.is_dir() else 'a file'}; name another "
            "folder with --out."
        )
