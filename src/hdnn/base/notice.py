"""A line for whoever waits at a terminal, when something takes long that usually does not."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE = 2.0  # seconds


@contextmanager
def said_if_slow(line: str, patience: float = PATIENCE) -> Iterator[None]:
    """Write the line to the terminal if the block takes longer than that; quiet when piped."""
    if not sys.stderr.isatty():
        yield
        return
    timer = threading.Timer(patience, sys.stderr.write, (f"{line}\n",))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
