"""A line for whoever waits at a terminal, when something takes long that usually does not."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

PATIENCE = 2.0  # seconds


_said: set[str] = set()


@contextmanager
def said_if_slow(line: str, patience: float = PATIENCE) -> Iterator[None]:
    """Write the line to the terminal if the block takes longer than that; quiet when piped.

    A process says a line once, however many blocks are slow.
    """
    if line in _said or not sys.stderr.isatty():
        yield
        return
    with later(patience, partial(_say, line)):
        yield


def _say(line: str) -> None:
    _said.add(line)
    sys.stderr.write(f"{line}\n")


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
