"""A training on a graph by processes of this machine, which are started, watched and ended here."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from hdnn.app import terminal
from hdnn.app.progress import TrainingBar
from hdnn.app.runs import Run
from hdnn.app.tasks.graph import GraphTask
from hdnn.app.tasks.task import go_on, interrupted
from hdnn.app.terminal import StoppedError
from hdnn.base.cores import cores
from hdnn.distributed.launch import Ended, launch
from hdnn.distributed.training.run import name_of
from hdnn.errors import OptionError
from hdnn.training import TensorBoard
from hdnn.training.processes import meeting
from hdnn.training.processes.torchrun import Processes

PROCESSES = 32  # the most that are started unless a number is given


class LaunchedTask(GraphTask):
    """A training on a graph by processes that are started for it."""

    def parts(self) -> int:
        """As many as were asked for, or one for each node."""
        restarts, replicas = self.options.get("restarts", 0), self.options.get("replicas", 1)
        if not 0 <= restarts <= 1000:
            raise OptionError(f"restarts must be a whole number from 0 to 1000, not {restarts}.")
        if not 1 <= replicas <= PROCESSES:
            raise OptionError(
                f"replicas must be a whole number from 1 to {PROCESSES}, not {replicas}."
            )
        nodes, parts = self.graph.nodes, self.options.get("parts")
        if parts is None and nodes > PROCESSES:
            raise OptionError(
                f"a process for each of {nodes} nodes may be more than this machine can hold; say "
                f"how many with --parts, such as --parts {self._fitting()} for its "
                f"{_counted(cores(), 'core')}."
            )
        return nodes if parts is None else parts

    def _fitting(self) -> int:
        """How many parts keep all cores busy, and none of them waiting for its turn."""
        return max(1, min(cores() // self.options.get("replicas", 1), self.graph.nodes))

    def proposal(self) -> str:
        """What would be quicker, if more processes than cores were not asked for."""
        count = self.options.get("replicas", 1) * self.plan.parts
        fitting = self._fitting()
        if count <= cores() or "parts" in self.options or fitting == self.plan.parts:
            return ""
        return (
            f"note: {count} processes, one for each node, share {_counted(cores(), 'core')} and "
            f"will wait for each other; --parts {fitting} gives the same results sooner."
        )

    def claim(self, run: Run, stack: ExitStack) -> None:
        meeting.check_loopback()  # before there is a folder
        self.open(run, stack)

    def fit(
        self, run: Run, bar: TrainingBar, board: TensorBoard | None, processes: Processes
    ) -> None:
        how = go_on(run, "launch")
        if bar.wanted and (proposal := self.proposal()):
            terminal.say(proposal)
        try:
            ended = self._start(run, bar)
        except KeyboardInterrupt as error:
            raise interrupted(run, how) from error
        told = ended.fault.removesuffix(".")
        if ended.code == 130:
            raise interrupted(run, how)
        if ended.code == 2:
            raise StoppedError(f"{told}.", 2)
        if ended.code:
            raise StoppedError(f"the training stopped: {told}; {how}", 1)
        metrics = json.loads(ended.output.strip().splitlines()[-1])
        self.metrics = {**metrics, "restarts": ended.restarts, "cores": cores()}

    def _start(self, run: Run, bar: TrainingBar) -> Ended:
        """Start all processes, and wait for their end."""
        replicas, name = self.options.get("replicas", 1), name_of(self.plan)
        count = replicas * self.plan.parts
        with tempfile.TemporaryDirectory() as place, _stopped_by_signals():
            config = Path(place) / "config.json"
            config.write_text(json.dumps(self.config.to_json()), encoding="utf-8")
            # A restart must resume; the folder was already checked.
            command = [sys.executable, "-m", "hdnn.distributed.worker", str(config), "--resume"]
            command += ["--out", os.path.abspath(run.folder), "--timeout", str(self.timeout)]
            if self.save_every is not None:
                command += ["--save-every", str(self.save_every)]
            bar.open(f"starting {_counted(count, 'process')} on {_counted(cores(), 'core')}")
            return launch(
                count,
                command,
                timeout=self.timeout,
                restarts=self.options.get("restarts", 0),
                name=lambda number: name(number % self.plan.parts),
                show=bar.tell,
                environment={"HDNN_REPLICAS": str(replicas), "HDNN_TRANSPORT": "gloo"},
            )


def _counted(count: int, what: str) -> str:
    many = "es" if what.endswith("s") else "s"
    return f"{count} {what}{many if count != 1 else ''}"


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Take a SIGTERM as a Ctrl-C: the processes must not outlive this one."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
