"""A line for whoever waits at a terminal, when something takes long that usually does not."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

PATIENCE = 2.0  # seconds


@contextmanager
def said_if_slow(line: str, patience: float = PATIENCE) -> Iterator[None]:
    """Write the line to the terminal if the block takes longer than that; quiet when piped."""
    if not sys.stderr.isatty():
        yield
        return
    with later(patience, partial(sys.stderr.write, f"{line}\n")):
        yield


@contextmanager
def later(seconds: float, function: Callable[[], object]) -> Iterator[None]:
    """Call a function if the block takes longer than that; at its end the call is over."""
    timer = threading.Timer(seconds, function)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
