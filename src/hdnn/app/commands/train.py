"""`hdnn train`: on tables, images and points of the plane, or as one process of a graph."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hdnn.app import progress, terminal
from hdnn.app.configs.common import is_table
from hdnn.app.configs.flags import RunOptions, TrainFlags
from hdnn.app.configs.images import ImageConfig
from hdnn.app.configs.table import TableConfig, before_penalties
from hdnn.app.options import given
from hdnn.base import launched
from hdnn.base.config import types_of
from hdnn.errors import CheckpointError, HDNNError, OptionError

if TYPE_CHECKING:  # imported where they are used: the help of this command must not take long
    from hdnn.app.results import Result
    from hdnn.app.runs import Run

    Asked = tuple[dict[str, Any], list[tuple[TableConfig | ImageConfig, Run]]]

EXAMPLES = (
    "hdnn train --data swiss_roll --network h2 --layers 64",
    "hdnn train --data iris.csv --target species --layers 16 --seeds 5",
    "hdnn train --data swiss_roll --layers 256 --multilevel 4,4 --epochs 20",
    "hdnn train --data mnist --network h1 --layers 8",
    "hdnn train --data cifar10 --network h2 --device cuda",
    "hdnn train --resume --out runs/swiss_roll-h2-64-0",
    "torchrun --nproc-per-node 2 -m hdnn train --data swiss_roll --layers 64",
    "torchrun --nproc-per-node 8 -m hdnn train --graph ring8.toml --data swiss_roll",
)
CONFIGS = (TableConfig, ImageConfig, TrainFlags, RunOptions)
PATIENCE = 5.0  # seconds to find out which process was lost


def train(**options: Any) -> None:
    """Train a network on a data set or a table; keep everything in a folder of its own."""
    from hdnn.app import results

    launched.speak_as_one()
    options = given(options)
    train_here = _train_part if _is_for_graph(options) else _train_runs
    found, as_json = train_here(options)
    results.finish(found, as_json=as_json)


def _train_runs(options: dict[str, Any]) -> tuple[list[Result | None], bool]:
    """Train one run or several; their results in the first process, and whether as JSON."""
    from hdnn.app.tasks import task
    from hdnn.app.tasks.kinds import task_of
    from hdnn.training.processes import torchrun

    found, said = [], set()
    with torchrun.joined() as processes:
        asked, chosen = processes.first(lambda: _asked(options))
        show = not (asked["quiet"] or asked["json"]) and processes.is_first
        board = bool(asked["tensorboard"])
        for number, (config, run) in enumerate(chosen, 1):
            title = run.folder.name + (f" ({number} of {len(chosen)})" if len(chosen) > 1 else "")
            with progress.TrainingBar(title, show) as bar:
                try:
                    one = task_of(config, said)
                    one.overwrite = bool(asked["overwrite"])
                    one.removed = asked["removed"] if number == 1 else ()
                    result = task.train(one, run, bar=bar, tensorboard=board, processes=processes)
                except KeyboardInterrupt as error:
                    how = task.go_on(run, "train")
                    if len(chosen) > 1:
                        how = f"{run.folder} is not complete: give the same command with --resume."
                    raise task.interrupted(run, how) from error
            found.append(result)
    return found if processes.is_first else [], bool(asked["json"])


def _train_part(options: dict[str, Any]) -> tuple[list[Result | None], bool]:
    """Train as the part of a graph that the environment says this process is."""
    from hdnn.app.tasks import graph, task

    as_json = "json" in options
    loud = not ("quiet" in options or as_json)
    with progress.waiting("looking at the graph", loud):
        one, run = graph.asked(graph.PartTask, options)
    with one.bar(run, one.is_root and loud) as bar:
        if launched.several():
            _hear_before_the_end()
        try:
            result = task.train(one, run, bar=bar)
        except KeyboardInterrupt as error:
            raise task.interrupted(run, one.go_on(run)) from error
    return [result], as_json


def _asked(options: dict[str, Any]) -> Asked:
    """What the flags and the config file ask for: options of all runs, and the runs."""
    from hdnn.app import replaced
    from hdnn.app.configs.kinds import read_config

    flags = dict(options)
    file = flags.pop("config", None)
    options = {} if file is None else read_config(file)
    before = before_penalties(options) and "penalties" not in flags
    options |= flags
    options |= {name: terminal.at_home(options[name]) for name in options.keys() & {"data", "out"}}
    asked = {name: options.pop(name, None) for name in (*types_of(RunOptions), "overwrite")}
    replaced.check_options(asked["overwrite"], asked["resume"])
    told = is_table(options.get("data")) and before_penalties(options)
    if told and before:
        options["penalties"] = "mean"
    chosen = _chosen_runs(options, asked)
    if launched.several() and any(isinstance(config, ImageConfig) for config, _ in chosen):
        raise OptionError("one process trains on images: start hdnn train without torchrun.")
    if told and not asked["resume"]:
        terminal.say(_told_penalties(file if before else None))
    return asked, chosen


def _told_penalties(file: str | None) -> str:
    """The note on how weight decay and ridge are read, because earlier versions differed."""
    if file is None:
        return (
            "note: weight-decay and ridge of a file are divided by its rows, as the estimators "
            "do; --penalties mean takes them undivided, as before, and with --penalties sum there "
            "is no such note."
        )
    return (
        f"note: {file} has weight-decay or ridge without penalties, so they are not divided by "
        'the rows, as before; write penalties = "sum" for what the estimators do, or "mean".'
    )


def _chosen_runs(
    options: dict[str, Any], asked: dict[str, Any]
) -> list[tuple[TableConfig | ImageConfig, Run]]:
    """The config and the folder of each run, all of them checked before the first one starts."""
    from hdnn.app import replaced
    from hdnn.app.configs.kinds import config_of
    from hdnn.app.runs import Run

    out, resume, overwrite = asked["out"], bool(asked["resume"]), bool(asked["overwrite"])
    count = 1 if asked["seeds"] is None else asked["seeds"]
    if not 1 <= count <= 10_000:
        raise OptionError(f"seeds must be a whole number from 1 to 10000, but got {count}.")
    first = options.get("seed", 0)
    chosen = []
    if out is not None and count > 1 and not resume and Run(out).exists:
        raise CheckpointError(
            f"{out} holds a single run, not those of several seeds; name another folder with --out."
        )
    for seed in range(first, first + count):
        each = {**options, "seed": seed} if count > 1 else options
        if out is None:
            config = config_of(each)
            run = Run(Path("runs") / config.run_name())
            if not overwrite:
                run = _as_it_was_named(config, run)
        else:
            run = Run(Path(out) / f"seed-{seed}" if count > 1 else out)
            if resume and not run.exists and "data" not in options:
                several = "; its runs are of several seeds: give their command with --resume"
                raise CheckpointError(
                    f"{run.folder} holds no run to resume: no config.toml"
                    f"{several if run.members else ''}."
                )
            config = None if resume and run.exists else config_of(each)
        if overwrite:
            replaced.check(run)
        elif not resume:
            run.check_free()
        elif run.exists:
            config = run.resumed(each)
        if not isinstance(config, (TableConfig, ImageConfig)):  # only below a folder of seeds
            raise CheckpointError(f"{run.folder} holds a training on a graph; resume it alone.")
        chosen.append((config, run))
    asked["removed"] = []
    if overwrite and out is not None and count > 1:
        asked["removed"] = replaced.others(Run(out), [run for _, run in chosen])
    return chosen


def _as_it_was_named(config: TableConfig | ImageConfig, run: Run) -> Run:
    """The same run; or where an earlier version, whose names had no target, has put it."""
    from hdnn.app.runs import Run

    if not isinstance(config, TableConfig) or config.target is None or run.exists:
        return run
    before = Run(run.folder.with_name(config.name_without_target()))
    with suppress(HDNNError, OSError):  # what cannot be read is left alone
        if before.exists:
            known = before.config()
            same = isinstance(known, TableConfig) and known.target == config.target
            if same and known.data == os.path.abspath(config.data):
                return before
    return run


def _is_for_graph(options: dict[str, Any]) -> bool:
    """Whether the options mean a training on a graph, new or to be resumed."""
    from hdnn.app.runs import Run

    if "graph" in options:
        return True
    if "resume" in options and "out" in options and Run(options["out"]).kind == "graph":
        return True
    for name in ("timeout", "save_every"):
        if name in options:
            raise OptionError(f"--{name.replace('_', '-')} is for a training on a graph: --graph.")
    return False


def _hear_before_the_end() -> None:
    """Treat SIGTERM as Ctrl-C, but later: torchrun sends it to all once a process is lost.

    By then the others have found out which one, and report it.
    """

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    def wait(*_: object) -> None:
        signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, PATIENCE)

    if hasattr(signal, "setitimer"):
        with suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGTERM, wait)
