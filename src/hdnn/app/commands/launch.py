"""`hdnn launch`: a training on a graph by processes of this machine."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hdnn.app import progress, terminal
from hdnn.app.configs.flags import GraphTraining, LaunchFlags
from hdnn.app.options import given
from hdnn.distributed.training.run import Config, name_of
from hdnn.errors import CheckpointError, OptionError

if TYPE_CHECKING:
    from hdnn.app.tasks.graph import GraphTask
    from hdnn.distributed.graph.plan import Plan
    from hdnn.distributed.launch import Ended

EXAMPLES = (
    "hdnn launch --nodes 8 --data swiss_roll --layers 4",
    "hdnn launch --graph grid.toml --parts 4 --data double_circles",
    "hdnn launch --resume --out runs/ring8-swiss_roll-h2-4-0",
)
CONFIGS = (Config, GraphTraining, LaunchFlags)
PROCESSES = 32  # the most that are started unless a number is given


def launch(**options: Any) -> int:
    """Train on a graph by as many processes of this machine, which talk to neighbours only."""
    from hdnn.app import results
    from hdnn.app.tasks import graph
    from hdnn.training.processes import meeting

    options = given(options)
    as_json = "json" in options
    loud = not ("quiet" in options or as_json)
    with progress.waiting("looking at the graph", loud):
        task, timeout, save_every = graph.task_of(options)
    plan = _plan(task, options)
    done = task.is_complete()
    task.check_data()
    if done:
        results.finish([task.result()], as_json=as_json)
        return 0
    meeting.check_loopback()
    task.warn()
    flags = ["--timeout", str(timeout)]
    flags += [] if save_every is None else ["--save-every", str(save_every)]
    bar = progress.EpochBar(task.folder.name, task.options["epochs"], loud)
    ended = _run(task, plan, options, flags, bar)
    if ended.code == 130:
        raise task.stopped(task.go_on("launch"))
    told = ended.fault.removesuffix(".")
    if ended.code == 2:
        return terminal.fail(f"{told}.")
    if ended.code:
        return terminal.fail(f"the training stopped: {told}; {task.go_on('launch')}", 1)
    metrics = json.loads(ended.output.strip().splitlines()[-1])
    results.finish([task.result({**metrics, "restarts": ended.restarts})], as_json=as_json)
    return 0


def _plan(task: GraphTask, options: dict[str, Any]) -> Plan:
    """Which process owns which nodes; an error if the given numbers do not fit."""
    restarts, replicas = options.get("restarts", 0), options.get("replicas", 1)
    if not 0 <= restarts <= 1000:
        raise OptionError(f"restarts must be a whole number from 0 to 1000, but got {restarts}.")
    if not 1 <= replicas <= PROCESSES:
        raise OptionError(f"replicas must be a whole number from 1 to {PROCESSES}, not {replicas}.")
    nodes, parts = task.graph.nodes, options.get("parts")
    if parts is None and nodes > PROCESSES:
        raise OptionError(
            f"a process for each of {nodes} nodes may be more than this machine can hold; say how "
            "many with --parts."
        )
    return task.plan(nodes if parts is None else parts)


def _run(
    task: GraphTask, plan: Plan, options: dict[str, Any], flags: list[str], bar: progress.EpochBar
) -> Ended:
    """Start all processes, and wait for their end."""
    from hdnn.distributed.launch import launch as start
    from hdnn.training.checkpoint import locked

    replicas, name = options.get("replicas", 1), name_of(plan)
    count = replicas * plan.parts
    with _folder(task.folder), locked(task.folder), tempfile.TemporaryDirectory() as place:
        config = Path(place) / "config.json"
        config.write_text(json.dumps(task.config.to_json()), encoding="utf-8")
        # A restart must resume; the folder was already checked.
        command = [sys.executable, "-m", "hdnn.distributed.worker", str(config), "--resume"]
        command += ["--out", os.path.abspath(task.folder), *flags]
        with _stopped_by_signals(), bar:
            bar.open(f"starting {count} process{'es' * (count != 1)}")
            try:
                return start(
                    count,
                    command,
                    timeout=options["timeout"],
                    restarts=options.get("restarts", 0),
                    name=lambda number: name(number % plan.parts),
                    show=bar.tell,
                    environment={"HDNN_REPLICAS": str(replicas), "HDNN_TRANSPORT": "gloo"},
                )
            except KeyboardInterrupt as error:
                raise task.stopped(task.go_on("launch")) from error


@contextmanager
def _folder(folder: Path) -> Iterator[None]:
    """A folder to train in, gone again if nothing was written to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"cannot write to the folder {folder}: {reason}.") from error
    try:
        yield
    finally:
        with suppress(OSError):
            folder.rmdir()


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
