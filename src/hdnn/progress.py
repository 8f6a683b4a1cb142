"""A progress line at the terminal."""

from __future__ import annotations

import shutil
import sys
import time
from typing import Self

CLEAR = "\r\x1b[K"
PATIENCE = 2.0  # seconds before the line appears
INTERVAL = 0.1  # seconds between two drawings


class Progress:
    """One line on stderr, shown after two seconds and removed at the end; nothing when piped.

    Args:
        label: the start of the line.
        total: the value of `done` at the end.

    Examples:
        >>> from hdnn.progress import Progress
        >>> with Progress("training", total=3) as progress:
        ...     for epoch in range(3):
        ...         progress.update(epoch + 1, "loss 0.2")
    """

    def __init__(self, label: str, total: int) -> None:
        self.label = label
        self.total = total
        self.visible = False
        self.start = time.monotonic()
        self.due = self.start + PATIENCE

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.visible:
            sys.stderr.write(CLEAR)
            sys.stderr.flush()

    def update(self, done: int, text: str = "") -> None:
        """Redraw the line, at most ten times a second."""
        now = time.monotonic()
        if now < self.due or sys.stderr is None or not sys.stderr.isatty():
            return
        line = f"{self.label} {done}/{self.total}, {now - self.start:.0f} s"
        if text:
            line += f", {text}"
        width = (
            shutil.get_terminal_size().columns - 1
        )  # a line that wraps cannot be erased
        sys.stderr.write(CLEAR + line[:width])
        sys.stderr.flush()
        self.visible = True
        self.due = now + INTERVAL
