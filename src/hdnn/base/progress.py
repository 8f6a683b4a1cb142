"""A progress line in the terminal."""

from __future__ import annotations

import shutil
import sys
import time


class ProgressLine:
    """One line on stderr for a person who has waited two seconds; nothing when piped."""

    def __init__(self, wanted: bool, wait: float = 2.0) -> None:
        self.on = wanted and sys.stderr is not None and sys.stderr.isatty()
        self.due = time.monotonic() + wait
        self.shown = False

    def show(self, text: str) -> None:
        now = time.monotonic()
        if self.on and now >= self.due:
            # A line that wraps could not be erased.
            width = shutil.get_terminal_size().columns - 1
            sys.stderr.write(f"\r\x1b[K{text[:width]}")
            sys.stderr.flush()
            self.due, self.shown = now + 0.1, True

    def close(self) -> None:
        if self.shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
