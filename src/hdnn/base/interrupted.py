"""Ctrl-C while the command line is still being imported, or ends: never a traceback.

Importing takes a second or more, and an interruption inside an extension may surface as any error.
`hdnn` imports this file before all others; in other programs that does nothing.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from typing import Any


def _expect() -> None:
    """End the program at Ctrl-C, if it is the command line that is being started."""
    alone = threading.current_thread() is threading.main_thread()
    if alone and is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def imported() -> None:
    """The imports are done: from here on Ctrl-C raises KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def ended() -> None:
    """All output is written: ignore Ctrl-C while Python shuts down."""
    if threading.current_thread() is threading.main_thread() and is_command():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def say(message: str) -> None:
    """One line on stderr, if there is one."""
    with suppress(OSError, AttributeError, ValueError):
        sys.stderr.write(f"hdnn: {message}\n")
        sys.stderr.flush()


def exit_code() -> int:
    """Say that the command was interrupted, and return its exit code."""
    say("interrupted")
    return 130


def _end(*_: Any) -> None:
    os._exit(exit_code())  # nothing is open yet, and an unfinished import cannot be cleaned up


def is_command() -> bool:
    """Whether this is `hdnn ..` or `python -m hdnn ..`, rather than a program that imports hdnn."""
    called, given = sys.argv[:1], sys.orig_argv
    if called == ["-m"]:  # while Python looks for the module
        return "hdnn" in given[: given.index("-m") + 2] if "-m" in given else "-mhdnn" in given
    return bool(called) and os.path.splitext(os.path.basename(called[0]))[0] in (
        "hdnn",
        "hdnn-script",
    )


_expect()
