"""The log of a training on a graph: a line for each epoch, whole also after a resume."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hdnn.base.files import write_atomically
from hdnn.distributed.training.training import Progress
from hdnn.training.checkpoint import LOG, Log


class EpochLog:
    """What the root writes to log.jsonl in the folder of a training."""

    def __init__(self, home: Path) -> None:
        self.home, self.log = home, None

    def write(self, entry: dict[str, Any]) -> None:
        """Add an epoch; what an earlier start wrote of it and of later ones goes."""
        self.log = self.log or Log(self.home, entry["epoch"] - 1)
        self.log.write(entry)

    def complete(self, progress: Progress) -> None:
        """Write all epochs again if some are missing: older versions kept no log."""
        path, epochs = self.home / LOG, len(progress.loss)
        kept = path.read_bytes() if path.exists() else b""
        if kept.count(b"\n") != epochs or kept[-1:] not in (b"", b"\n"):
            named = {name: values for name, values in asdict(progress).items() if values}
            rows = ({name: values[k] for name, values in named.items()} for k in range(epochs))
            lines = [json.dumps({"epoch": k, **row}) + "\n" for k, row in enumerate(rows, 1)]
            write_atomically(path, "".join(lines).encode())
