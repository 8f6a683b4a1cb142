"""The steps of a training, the same for all kinds: load, build, train, certify, write.

What they come to is one result. The folder, the lock and the device of trainings in one process, or
in several that share one model, are the same too.
"""

from __future__ import annotations

import shlex
import time
from abc import ABC, abstractmethod
from collections.abc import Collection
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

import hdnn
from hdnn import serialization
from hdnn.app import pictures, replaced
from hdnn.app.configs.common import find_device
from hdnn.app.progress import TrainingBar
from hdnn.app.results import Result
from hdnn.app.runs import Run, usable_folder, write_json
from hdnn.app.terminal import StoppedError
from hdnn.data.table import Columns
from hdnn.training import TensorBoard
from hdnn.training.checkpoint import locked
from hdnn.training.processes.torchrun import OneProcess, Processes

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Task(ABC):
    """One training: its config, and from `load` and `build` on its data and its model."""

    config: Any
    overwrite = False  # whether a run that is in the folder is replaced
    removed: Collection[Run] = ()  # other runs, of seeds that are not trained again

    @abstractmethod
    def known(self, run: Run) -> dict[str, Any] | None:
        """The metrics of a complete run; None if it is to be started or resumed."""

    @abstractmethod
    def load(self, processes: Processes, bar: TrainingBar) -> None:
        """Read or make the data, and fill in what the config leaves open."""

    @abstractmethod
    def build(self) -> None:
        """Make the model with the weights of its seed."""

    @abstractmethod
    def claim(self, run: Run, stack: ExitStack) -> None:
        """Make the folder of a run, and lock it until the stack is closed."""

    @abstractmethod
    def fit(
        self, run: Run, bar: TrainingBar, board: TensorBoard | None, processes: Processes
    ) -> None:
        """Train, or resume from the folder."""

    @abstractmethod
    def certify(self) -> Any:
        """What can be said of the gradients of the trained model."""

    @abstractmethod
    def write(self, run: Run, certified: Any, processes: Processes) -> dict[str, Any] | None:
        """Write all results, and return the metrics; None where another process has them."""

    @staticmethod
    @abstractmethod
    def text(metrics: dict[str, Any]) -> str:
        """The metrics as a small table for people."""

    def threads(self) -> AbstractContextManager[None]:
        """How many threads to train with: as many as PyTorch takes."""
        return nullcontext()


class OwnTask(Task):
    """A training that is done here: in one process, or in several that have the whole model."""

    columns: Columns | None = None  # how rows of a table become inputs
    model: Any
    history: Any  # of the training, one entry an epoch

    def __init__(self, config: Any) -> None:
        self.config, self.start = config, time.perf_counter()
        self.said: set[str] = set()  # notes that need not be said again

    def known(self, run: Run) -> dict[str, Any] | None:
        return known_metrics(run)

    def find_device(self, processes: Processes) -> None:
        """Put the device into the config: the one of the first process counts."""
        device = processes.first(lambda: find_device(self.config.device))
        self.config = replace(self.config, device=device)

    def claim(self, run: Run, stack: ExitStack) -> None:
        usable_folder(run.folder, pictures.ROOM + self.room())
        stack.enter_context(locked(run.folder))
        if self.overwrite:
            replaced.clear(run)
        for other in self.removed:
            replaced.remove(other)
        run.start(self.config, self.columns)

    @abstractmethod
    def room(self) -> int:
        """Bytes that the model and its checkpoints will take in the folder, at the most."""

    @abstractmethod
    def measured(self, certified: Any) -> dict[str, Any]:
        """The metrics that only this kind of training has."""

    @abstractmethod
    def pictures(self, certified: Any) -> dict[str, Axes]:
        """What to draw, by name."""

    def note(self) -> dict[str, Any] | None:
        """What the file of the model has to remember besides."""
        return None

    def write(self, run: Run, certified: Any, processes: Processes) -> dict[str, Any]:
        config, history = self.config, self.history
        serialization.write(self.model, run.model_file, self.note())
        metrics = {
            "run": str(run.folder),
            "data": config.data,
            "layers": config.layers,
            "seed": config.seed,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "epochs": len(history.loss),
            "loss": history.loss[-1],
            "training_seconds": round(history.seconds, 2),
            **self.measured(certified),
            **pictures.drawn(lambda: self.pictures(certified), run.folder),
        }
        if processes.several:
            metrics["processes"] = processes.size
        metrics |= {
            "seconds": round(time.perf_counter() - self.start, 2),
            "device": self.config.device,
            "versions": {"hdnn": hdnn.__version__, "torch": torch.__version__},
        }
        write_json(run.metrics_file, metrics)
        return metrics


def train(
    task: Task,
    run: Run,
    *,
    bar: TrainingBar | None = None,
    tensorboard: bool = False,
    processes: Processes | None = None,
) -> Result | None:
    """Train, certify and save in the folder of `run`; None where another process has the result.

    A run started there with the same config is resumed; a complete one stays as it is. Of
    several processes the first reads and writes, and all of them train.
    """
    processes = processes or OneProcess()
    bar = bar or TrainingBar(run.folder.name, False)
    metrics = None if task.overwrite else processes.first(lambda: task.known(run))
    if metrics is None:
        board = TensorBoard(run.folder / "tensorboard") if tensorboard else None
        task.load(processes, bar)
        task.build()
        with ExitStack() as stack:
            stack.enter_context(task.threads())
            if board is not None:
                stack.enter_context(board)
            processes.first(lambda: task.claim(run, stack))
            task.fit(run, bar, board, processes)
            metrics = processes.first(lambda: task.write(run, task.certify(), processes))
    return None if metrics is None else Result(metrics, task.text)


def known_metrics(run: Run) -> dict[str, Any] | None:
    """The metrics of a complete run; None if it is to be started or resumed."""
    if not run.exists:
        run.check_free()
    return run.result() if run.exists and run.complete else None


def go_on(run: Run, command: str) -> str:
    """How to resume a run."""
    return f"go on with: hdnn {command} --resume --out {shlex.quote(str(run.folder))}"


def interrupted(run: Run, how: str) -> StoppedError:
    """The message after an interruption, with how to go on."""
    if not run.exists:
        return StoppedError("interrupted before anything was written.")
    return StoppedError(f"interrupted; {how}")
