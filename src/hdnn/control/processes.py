"""Closed loops on real processes, each of which has some agents and hears their neighbours only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hdnn.base.files import write_atomically
from hdnn.base.progress import ProgressLine
from hdnn.control import fused_cost
from hdnn.control.fused import Phases
from hdnn.control.kept import Keeping, State, identity
from hdnn.control.problems import LoopProblem, checked, load_problem
from hdnn.control.shared import NAMES, SharedTraining, check, name_of
from hdnn.control.shares import shared_out
from hdnn.control.training import in_range
from hdnn.distributed.graph.plan import Plan
from hdnn.distributed.launch import GRACE, launch
from hdnn.distributed.transport import DistributedError, Local, Transport
from hdnn.errors import (
    CheckpointError,
    OptionError,
    flag,
    int_from,
    positive_float,
    quoted,
)
from hdnn.training import checkpoint
from hdnn.training.identity import difference

OPTIONS = "options.json"
RESULT = "result.json"
TRAINED = "trained"
TRANSPORTS = ("tcp", "gloo")  # MPI has processes of its own, which mpiexec starts


@dataclass(frozen=True)
class ProcessRun:
    """What processes say of a training that they did together.

    Attributes:
        history: the cost of each iteration, its terms (each times its weight) and the rate.
        owner: the process of each agent.
        traffic: `(from, to, messages, bytes)` of all processes that talked, since they were started
            last.
        seconds: that the iterations took; of a training that was resumed, all of them.
        processor_seconds: of all processes together, for the same.

    Examples:
        >>> from hdnn import control
        >>> problem = control.crowd(4, steps=5)
        >>> control.train_on_processes(problem, ranks=1, iterations=1).owner
        [0, 0, 0, 0]
    """

    history: dict[str, list[float]]
    owner: list[int]
    traffic: list[tuple[int, int, int, int]]
    seconds: float
    processor_seconds: float

    @property
    def talked(self) -> set[tuple[int, int]]:
        """The pairs of processes that sent each other anything."""
        return {(min(a, b), max(a, b)) for a, b, *_ in self.traffic}


def train_on_processes(
    problem: LoopProblem,
    ranks: int,
    *,
    iterations: int = 300,
    batch: int = 4,
    rate: float = 0.1,
    seed: int = 0,
    timeout: float = 60.0,
    progress: bool = True,
    started: Callable[[list[subprocess.Popen[str]]], None] = lambda _: None,
    folder: str | os.PathLike[str] | None = None,
    resume: bool = False,
    stages: Sequence[int] = (),
) -> ProcessRun:
    """Train the controllers of a problem, in place, by processes that share its agents out.

    A process hears neighbours of its agents only: those along links of the plant and of the
    controllers, and those that the cost names as pairs. There are no connections between others,
    and no sums over all but for the history, which goes along a tree of neighbours. The result is
    the same bit for bit with any number of processes, and that of `LoopTraining` to rounding. Where
    a process fails, all end, and the problem stays as it is.

    With a folder the training is kept there every half minute, at its end and at Ctrl-C. Whatever
    was killed, `resume=True` goes on to the very bits that it would have had, with any number of
    processes; give the problem as it was at the start. The folder also has the problem with its
    weights, for `load_problem`, and a log with a line an iteration.

    Args:
        problem: whose controllers; its cost has to name the pairs that it compares, and neighbours
            have to lead from each agent to each other.
        ranks: how many processes, up to one an agent; 1 is this process alone.
        iterations: how many.
        batch: starts an iteration.
        rate: the largest rate of Adam.
        seed: of the starts.
        timeout: the seconds after which a silent process counts as lost.
        progress: show one line while a person waits at a terminal.
        started: called with the processes.
        folder: where to keep all that is needed to go on; by default nowhere.
        resume: go on with the training in `folder`, or begin there if it is empty.
        stages: iterations after which the problem is kept too, in `folder/during-30` and so on; a
            training that is resumed keeps those that it has yet to come to, a finished one none.

    Returns:
        The history of the costs, who owned which agent, and who sent how much to whom.

    Raises:
        OptionError: if there are more ranks than agents, the kernels cannot run here, there are
            stages without a folder or beyond the iterations, `started` cannot be called, or the
            environment has another HDNN_TRANSPORT than tcp or gloo.
        CheckpointError: if the folder cannot be used, holds a training and is not to be resumed, or
            holds another one, such as one that began with other weights.
        SparsityError: if the cost names no pairs and not all agents are linked, or if no neighbours
            lead from one agent to another.
        ShapeError: if ranks, iterations, batch or seed are no whole numbers in range.
        StepError: if the rate or the timeout is not > 0.
        TrainingError: if some weights are frozen, a cost is not finite, or processes of this
            machine cannot talk to each other.
        ConvergenceError: if a step of the loop has no solution.
        DistributedError: if a process is lost or cannot go on; it says which, and why.

    Examples:
        >>> from hdnn import control
        >>> problem = control.crowd(9, steps=5)
        >>> run = control.train_on_processes(problem, ranks=1, iterations=2, batch=2)
        >>> len(run.history["cost"]), run.traffic
        (2, [])
    """
    plan = shared_out(checked(problem), ranks)
    check(problem)
    options = in_range(iterations, batch, rate, seed)
    seconds = positive_float("timeout", timeout)
    if not callable(started):
        raise OptionError(f"started must be a function of processes, but got {quoted(started)}.")
    transport = os.environ.get("HDNN_TRANSPORT", TRANSPORTS[0])
    if plan.parts > 1 and transport not in TRANSPORTS:
        raise OptionError(
            f"processes that are started here talk by {' or '.join(TRANSPORTS)}, but the "
            f"environment has HDNN_TRANSPORT={transport}; leave it out."
        )
    line = ProgressLine(flag("progress", progress))
    keeping = _keeping(problem, options, folder, resume, stages)
    if keeping is not None and (run := _begun(problem, plan, keeping)) is not None:
        return run

    def show(news: dict[str, Any]) -> None:
        line.show(
            f"iteration {news['iteration']}/{options['iterations']}, cost {news['cost']:.4g}, "
            f"{news['seconds']:.0f} s"
        )

    try:
        if plan.parts == 1:
            return part_of(problem, plan, Local(), options, show, keeping)
        compile_kernels(problem)
        with tempfile.TemporaryDirectory() as name:
            home = Path(name)
            problem.save(home)
            begun = None if keeping is None else replace(keeping, launcher=os.getpid())
            write_task(home, options, begun)
            command = [sys.executable, "-m", "hdnn.control.worker", str(home)]
            ended = launch(
                plan.parts,
                [*command, "--timeout", str(seconds)],
                timeout=seconds,
                name=name_of(plan),
                show=show,
                started=started,
                environment={"HDNN_TRANSPORT": transport},
                grace=GRACE if keeping is None else seconds,
            )
            if ended.code == 130:
                raise KeyboardInterrupt
            if ended.code:
                fault = ended.fault.removesuffix(".")
                again = f"; go on with it by resume=True from {folder}" if keeping else ""
                raise DistributedError(
                    f"the training on {plan.parts} processes failed: {fault}{again}."
                )
            weights = load_problem(home / TRAINED).loop.controller.state_dict()
            result = json.loads((home / RESULT).read_text(encoding="utf-8"))
    finally:
        line.close()
    problem.loop.controller.load_state_dict(weights)
    return ProcessRun(**{**result, "traffic": [tuple(row) for row in result["traffic"]]})


def _keeping(
    problem: LoopProblem,
    options: dict[str, Any],
    folder: str | os.PathLike[str] | None,
    resume: bool,
    stages: Sequence[int],
) -> Keeping | None:
    """Where the training is kept, and after which iterations weights are."""
    try:
        wanted = tuple(sorted({int_from(0, "stages", stage) for stage in stages}))
    except TypeError as error:
        raise OptionError(f"stages must be whole numbers, but got {quoted(stages)}.") from error
    if wanted and wanted[-1] > options["iterations"]:
        raise OptionError(
            f"stages are iterations up to the last, {options['iterations']}, but one is "
            f"{wanted[-1]}."
        )
    path = checkpoint.open_folder(folder, flag("resume", resume))
    if path is None:
        if wanted:
            raise OptionError("stages are kept in the folder of the training; name one.")
        return None
    return Keeping(path.absolute(), identity(problem, options), wanted)


def _begun(problem: LoopProblem, plan: Plan, keeping: Keeping) -> ProcessRun | None:
    """Begin to keep a training; where it is finished already, its result."""
    state = State(problem)
    state.history = {name: [] for name in NAMES}
    with checkpoint.locked(keeping.folder):
        _check_start(keeping)
        if not state.read(keeping):
            state.write(keeping)
    if state.done < keeping.options["iterations"]:
        return None
    problem.loop.load_state_dict(state.problem.loop.state_dict())
    taken = state.seconds, state.processor_seconds
    return ProcessRun(state.history, [*plan.owner], [], *taken)


def _check_start(keeping: Keeping) -> None:
    """Raise if a folder holds this very training, but begun with other weights."""
    saved = checkpoint.read(keeping.folder, {})
    if saved is None:
        return
    theirs, ours = saved.state["options"], json.loads(json.dumps(keeping.options))
    alike = difference({**theirs, "start": ours["start"]}, ours) is None
    if alike and theirs.get("start") != ours["start"]:
        raise CheckpointError(
            f"{saved.path} is of a training that began with other weights; give the problem as it "
            "was at the start, not as it was trained meanwhile, or choose another folder."
        )


def part_of(
    problem: LoopProblem,
    plan: Plan,
    transport: Transport,
    options: dict[str, Any],
    tell: Callable[[dict[str, Any]], None],
    keeping: Keeping | None = None,
) -> ProcessRun:
    """Train as one of the processes; the root's problem and its result have all of it."""
    compile_kernels(problem)
    training = SharedTraining(problem, plan, transport, **options, tell=tell, keeping=keeping)
    history = training.run()
    training.collect()
    taken = training.seconds, training.processors()
    return ProcessRun(history, [*plan.owner], training.traffic(), *taken)


def write_task(home: Path, options: dict[str, Any], keeping: Keeping | None) -> None:
    """The options of a training and where it is kept, for `read_task` in each process."""
    task: dict[str, Any] = {**options}
    if keeping is not None:
        task["keeping"] = {**asdict(keeping), "folder": str(keeping.folder)}
    write_atomically(home / OPTIONS, json.dumps(task).encode())


def read_task(home: Path) -> tuple[LoopProblem, dict[str, Any], Keeping | None]:
    """The problem in a folder, the options of its training, and where that is kept."""
    try:
        given = json.loads((home / OPTIONS).read_text(encoding="utf-8"))
        kept = given.pop("keeping", None)
        options = in_range(**given)
        keeping = None if kept is None else Keeping(**kept)
        if keeping is not None:
            keeping = replace(keeping, folder=Path(keeping.folder), stages=tuple(keeping.stages))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OptionError(f"{home} has no options of a training: {reason}.") from error
    return load_problem(home), options, keeping


def write_result(home: Path, problem: LoopProblem, run: ProcessRun) -> None:
    """What `train_on_processes` reads when all processes have ended."""
    problem.save(home / TRAINED)
    write_atomically(home / RESULT, json.dumps(vars(run)).encode())


def compile_kernels(problem: LoopProblem) -> None:
    """Have the kernels ready: compiled by the process that starts others, then read from a file."""
    loop, start = problem.loop, problem.start()
    with torch.no_grad():
        phases, y = Phases(loop.system(), 1), start[None].clone().numpy()
    done = [phases.own(y, 0, [0])]
    done += [phases.plant_edges(y, 0, [0])] if loop.plant.links else []
    done += [phases.edges(y, 0, [0])] if loop.controller.links else []
    for phase in reversed(done):
        phases.adjoint(phase, y)
    phases.gradients()
    fused_cost.priced(loop, problem.cost, start.expand(loop.controller.steps + 1, 1, *start.shape))
