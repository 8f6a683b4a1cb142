"""The steps of a training, the same for all kinds that one process can train.

A task loads its data, builds its model, trains and measures it; the folder, the lock, the device
and the result are the same for all.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

import hdnn
from hdnn.app import pictures
from hdnn.app.configs.common import find_device
from hdnn.app.progress import TrainingBar
from hdnn.app.results import Result
from hdnn.app.runs import Run, usable_folder, write_json
from hdnn.data.table import Columns
from hdnn.training import TensorBoard
from hdnn.training.checkpoint import locked
from hdnn.training.processes.torchrun import OneProcess, Processes


class Task(ABC):
    """One training: its config, and from `load` and `build` on its data and its model."""

    config: Any
    columns: Columns | None = None  # how rows of a table become inputs

    @abstractmethod
    def load(self, processes: Processes, bar: TrainingBar) -> None:
        """Read or make the data, and fill in what the config leaves open."""

    @abstractmethod
    def build(self) -> None:
        """Make the model with the weights of its seed."""

    @abstractmethod
    def room(self) -> int:
        """Bytes that the model and its checkpoints will take in the folder, at the most."""

    @abstractmethod
    def fit(
        self, run: Run, bar: TrainingBar, board: TensorBoard | None, processes: Processes
    ) -> None:
        """Train, or resume from the folder."""

    @abstractmethod
    def write(self, run: Run) -> dict[str, Any]:
        """Write the model and pictures; return all metrics."""

    @staticmethod
    @abstractmethod
    def text(metrics: dict[str, Any]) -> str:
        """The metrics as a small table for people."""

    def threads(self) -> AbstractContextManager[None]:
        """How many threads to train with: as many as PyTorch takes."""
        return nullcontext()


def train(
    task: Task,
    run: Run,
    *,
    bar: TrainingBar | None = None,
    tensorboard: bool = False,
    processes: Processes | None = None,
) -> Result:
    """Train, measure, draw and save in the folder of `run`.

    A run started there with the same config is resumed; a complete one stays as it is. Of
    several processes the first reads and writes, and all of them train.
    """
    processes, start = processes or OneProcess(), time.perf_counter()
    bar = bar or TrainingBar(run.folder.name, False)
    known = processes.first(lambda: known_metrics(run))
    if known is not None:
        return Result(known, task.text)
    board = TensorBoard(run.folder / "tensorboard") if tensorboard else None
    device = processes.first(lambda: find_device(task.config.device))
    task.config = replace(task.config, device=device)
    task.load(processes, bar)
    task.build()
    with ExitStack() as stack:
        stack.enter_context(task.threads())
        if board is not None:
            stack.enter_context(board)
        processes.first(lambda: _claim(task, run, stack))
        task.fit(run, bar, board, processes)

        def finish() -> dict[str, Any]:
            metrics = task.write(run)
            if processes.several:
                metrics["processes"] = processes.size
            metrics |= {
                "seconds": round(time.perf_counter() - start, 2),
                "device": device,
                "versions": {"hdnn": hdnn.__version__, "torch": torch.__version__},
            }
            write_json(run.metrics_file, metrics)
            return metrics

        return Result(processes.first(finish), task.text)


def known_metrics(run: Run) -> dict[str, Any] | None:
    """The metrics of a complete run; None if it is to be started or resumed."""
    if not run.exists:
        run.check_free()
    return run.result() if run.exists and run.complete else None


def _claim(task: Task, run: Run, stack: ExitStack) -> None:
    """Make and lock the folder of a run, and write its config."""
    usable_folder(run.folder, pictures.ROOM + task.room())
    stack.enter_context(locked(run.folder))
    run.start(task.config, task.columns)


@contextmanager
def one_thread() -> Iterator[None]:
    """Run PyTorch on one thread inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
