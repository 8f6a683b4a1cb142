"""Progress, for a person at a terminal who has waited for two seconds."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from hdnn.app import terminal
from hdnn.base.notice import later

if TYPE_CHECKING:
    from hdnn.training import Moment

WAIT = 2.0  # seconds before anything is shown


@contextmanager
def waiting(what: str, wanted: bool = True) -> Iterator[None]:
    """Show a spinner during something that has no steps to count."""
    if not (wanted and terminal.at_terminal()):
        yield
        return
    from rich.console import Console

    status = Console(stderr=True).status(what)
    try:
        with later(WAIT, status.start):
            yield
    finally:
        status.stop()


class TrainingBar:
    """A progress bar with loss, accuracy and gradient norm; a callback of `hdnn.training.fit`."""

    def __init__(self, title: str, wanted: bool, epochs: int = 0) -> None:
        self.title, self.wanted, self.epochs = title, wanted, epochs
        self.on = wanted and terminal.at_terminal()
        self.due, self.progress, self.task = time.monotonic() + WAIT, None, None
        self.held_out = ""  # what was found there after the last epoch

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.progress is not None:
            self.progress.stop()

    def __call__(self, moment: Moment) -> None:
        if moment.epoch == 1:  # of a further level
            self.held_out = ""
        course = f"gradient {moment.gradient:.2e}, epoch {moment.epoch}/{moment.epochs}"
        course = f"{self.held_out}{course}"
        self.show(moment.step, moment.steps, _values(moment.loss, moment.accuracy, course))

    def measured(self, moment: Moment) -> None:
        """Show what was found at held-out rows from now on."""
        self.held_out = f"held-out {moment.validation_loss:.4f}, "

    def tell(self, news: dict[str, Any]) -> None:
        """Show what the root of a graph reports after an epoch, or the launcher after a fault."""
        if "restart" in news:
            words = f"restart {news['restart']}, because {news['fault']}"
            if self.wanted and not self.on:
                terminal.say(words)
            self.open(words)
        elif self.on:
            course = f"epoch {news['epoch']}/{self.epochs}"
            if "seconds_left" in news and news["epoch"] < self.epochs:
                course += f", {time_text(news['seconds_left'])} left"
            values = _values(news["loss"], news.get("accuracy"), course)
            self.show(news["epoch"], self.epochs, values)

    def open(self, words: str) -> None:
        """Show the bar at once, with these words."""
        if self.on:
            self.show(0, self.epochs, words, at_once=True)

    def show(self, step: int, steps: int, values: str, *, at_once: bool = False) -> None:
        """Update the bar: steps done, steps in all, and a text; at most ten times a second."""
        from rich.markup import escape

        now = time.monotonic()
        if now < self.due and not (at_once or (self.progress and step == steps)):
            return
        self.due = now + 0.1
        if self.progress is None:
            self._open(steps)
        assert self.progress is not None
        assert self.task is not None
        self.progress.update(self.task, completed=step, total=steps, values=escape(values))

    def _open(self, steps: int) -> None:
        from rich import progress
        from rich.console import Console
        from rich.markup import escape

        self.progress = progress.Progress(
            progress.TextColumn(escape(self.title)),
            progress.BarColumn(bar_width=None),
            progress.TextColumn("{task.fields[values]}"),
            *([] if self.epochs else [progress.TimeRemainingColumn()]),  # a graph tells it itself
            console=Console(stderr=True),
            transient=True,
        )
        self.task = self.progress.add_task("", total=steps, values="")
        self.progress.start()


def time_text(seconds: float) -> str:
    """A time in a few words, such as 40 s or 1 h 5 min."""
    seconds = max(0, math.ceil(seconds))
    if seconds < 100:
        return f"{seconds} s"
    minutes = math.ceil(seconds / 60)
    hours, rest = divmod(minutes, 60)
    return f"{minutes} min" if not hours else f"{hours} h {rest} min" if rest else f"{hours} h"


def _values(loss: float, accuracy: float | None, course: str) -> str:
    reached = "" if accuracy is None else f"accuracy {accuracy:.1%}, "
    return f"loss {loss:.4f}, {reached}{course}"
