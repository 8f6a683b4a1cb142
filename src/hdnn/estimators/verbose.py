"""What `verbose=True` shows: a line that is redrawn at a terminal, some lines anywhere else."""

from __future__ import annotations

import math
import sys
import time
from typing import Self, TextIO

from hdnn.base.progress import ProgressLine
from hdnn.training import History, Moment
from hdnn.training.callbacks import EpochMeans

LINES = 16  # of a training, at most, beside the first and the last


class Told:
    """A callback of `fit` that says how a training goes.

    At a terminal, one line on stderr is redrawn, and the last one stays. In a notebook, a log or a
    pipe, plain lines on stdout are spread over the epochs.
    """

    def __init__(self, name: str, wanted: bool) -> None:
        self.name, self.wanted, self.begun = name, wanted, time.perf_counter()
        self.line, self.means = ProgressLine(wanted, wait=0.0), EpochMeans()
        self.waiting = ""  # a plain line that may still get what is found at held-out samples

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.line.close()

    def __call__(self, moment: Moment) -> None:
        means = self.means.add(moment)
        where = f"epoch {moment.epoch}/{moment.epochs}, loss "
        if self.line.on:
            self.line.show(f"{self.name}: {where}{moment.loss:.4f}, {self._seconds()}")
        elif means is not None:
            self._print()
            every = math.ceil(moment.epochs / LINES)
            if moment.epoch == 1 or moment.epoch % every == 0:
                right = f", accuracy {means['accuracy']:.1%}" if "accuracy" in means else ""
                self.waiting = f"{where}{means['loss']:.4f}{right}"

    def measured(self, moment: Moment) -> None:
        if self.waiting:
            self.waiting += f", held-out loss {moment.validation_loss:.4f}"

    def end(self, history: History) -> None:
        """Say what the training came to."""
        if not self.wanted:
            return
        self.line.close()
        self._print()
        best, count = history.best_epoch, len(history.loss)
        text = f"{self.name}: {count} epoch{'s' * (count > 1)} in {self._seconds()}"
        text += f", loss {history.loss[-1]:.4f}"
        if best:
            text += f", held-out loss {history.validation_loss[best - 1]:.4f}; epoch {best} is kept"
        _say(text, sys.stderr if self.line.on else sys.stdout)

    def _print(self) -> None:
        if self.waiting:
            _say(f"{self.name}: {self.waiting}, {self._seconds()}", sys.stdout)
        self.waiting = ""

    def _seconds(self) -> str:
        return f"{time.perf_counter() - self.begun:.1f} s"


def _say(line: str, where: TextIO | None) -> None:
    if where is not None:  # a program without a console has none
        where.write(f"{line}\n")
        where.flush()
