"""Ctrl-C during a training."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any, Self


class DeferredInterrupt:
    """Note a Ctrl-C in `came`, so that a training can stop and be saved between two steps.

    A second one interrupts at once, if it comes at least `patience` seconds after the first.
    """

    def __init__(self, patience: float) -> None:
        self.came, self.before, self.patience, self.since = False, None, patience, 0.0

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self.before = signal.getsignal(signal.SIGINT)
            if self.before is signal.default_int_handler:
                signal.signal(signal.SIGINT, self._hear)
            else:
                self.before = None
        return self

    def __exit__(self, *_: object) -> None:
        if self.before is not None:
            signal.signal(signal.SIGINT, self.before)

    def _hear(self, number: int, frame: Any) -> None:
        if not self.came:
            self.came, self.since = True, time.monotonic()
        elif time.monotonic() - self.since >= self.patience:
            signal.default_int_handler(number, frame)
