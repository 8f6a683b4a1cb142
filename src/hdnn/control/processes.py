"""Closed loops on real processes, each of which has some agents and hears their neighbours only."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hdnn.base.files import write_atomically
from hdnn.base.progress import ProgressLine
from hdnn.control import fused_cost
from hdnn.control.fused import Phases
from hdnn.control.problems import LoopProblem, load_problem
from hdnn.control.shared import SharedTraining, check, name_of
from hdnn.control.shares import shared_out
from hdnn.control.training import in_range
from hdnn.distributed.graph.plan import Plan
from hdnn.distributed.launch import launch
from hdnn.distributed.transport import DistributedError, Local, Transport
from hdnn.errors import OptionError, positive_float

OPTIONS = "options.json"
RESULT = "result.json"
TRAINED = "trained"


@dataclass(frozen=True)
class ProcessRun:
    """What processes say of a training that they did together.

    Attributes:
        history: the cost of each iteration, its terms (each times its weight) and the rate.
        owner: the process of each agent.
        traffic: `(from, to, messages, bytes)` of all processes that talked.
        seconds: from the first iteration to the last.
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
    batch: int = 16,
    rate: float = 0.1,
    seed: int = 0,
    timeout: float = 60.0,
    progress: bool = True,
    started: Callable[[list[subprocess.Popen[str]]], None] = lambda _: None,
) -> ProcessRun:
    """Train the controllers of a problem, in place, by processes that share its agents out.

    A process hears neighbours of its agents only, along links of the plant and of the controllers:
    there are no connections between others, and no sums over all but for the history, which goes
    along a tree of links. The result is the same bit for bit with any number of processes, and that
    of `LoopTraining` to rounding. Where a process fails, all end, and the problem stays as it is.

    Args:
        problem: whose controllers; its cost has to compare neighbours only, and its links to lead
            from each agent to each other.
        ranks: how many processes, up to one an agent; 1 is this process alone.
        iterations: how many.
        batch: starts an iteration.
        rate: the largest rate of Adam.
        seed: of the starts.
        timeout: the seconds after which a silent process counts as lost.
        progress: show one line while a person waits at a terminal.
        started: called with the processes.

    Returns:
        The history of the costs, who owned which agent, and who sent how much to whom.

    Raises:
        OptionError: if there are more ranks than agents, or the kernels cannot run here.
        SparsityError: if the cost compares agents that are not linked, or not all are connected.
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
    plan = shared_out(problem, ranks)
    check(problem)
    options = in_range(iterations, batch, rate, seed)
    seconds = positive_float("timeout", timeout)
    line = ProgressLine(progress)

    def show(news: dict[str, Any]) -> None:
        line.show(
            f"iteration {news['iteration']}/{options['iterations']}, cost {news['cost']:.4g}, "
            f"{news['seconds']:.0f} s"
        )

    try:
        if plan.parts == 1:
            return part_of(problem, plan, Local(), options, show)
        compile_kernels(problem)
        with tempfile.TemporaryDirectory() as name:
            home = Path(name)
            problem.save(home)
            write_atomically(home / OPTIONS, json.dumps(options).encode())
            command = [sys.executable, "-m", "hdnn.control.worker", str(home)]
            ended = launch(
                plan.parts,
                [*command, "--timeout", str(seconds)],
                timeout=seconds,
                name=name_of(plan),
                show=show,
                started=started,
            )
            if ended.code == 130:
                raise KeyboardInterrupt
            if ended.code:
                fault = ended.fault.removesuffix(".")
                raise DistributedError(f"the training on {plan.parts} processes failed: {fault}.")
            weights = load_problem(home / TRAINED).loop.controller.state_dict()
            result = json.loads((home / RESULT).read_text(encoding="utf-8"))
    finally:
        line.close()
    problem.loop.controller.load_state_dict(weights)
    return ProcessRun(**{**result, "traffic": [tuple(row) for row in result["traffic"]]})


def part_of(
    problem: LoopProblem,
    plan: Plan,
    transport: Transport,
    options: dict[str, Any],
    tell: Callable[[dict[str, Any]], None],
) -> ProcessRun:
    """Train as one of the processes; the root's problem and its result have all of it."""
    compile_kernels(problem)
    training = SharedTraining(problem, plan, transport, **options, tell=tell)
    history = training.run()
    training.collect()
    taken = training.seconds, training.processors()
    return ProcessRun(history, [*plan.owner], training.traffic(), *taken)


def read_task(home: Path) -> tuple[LoopProblem, dict[str, Any]]:
    """The problem in a folder, and the options of its training."""
    try:
        given = json.loads((home / OPTIONS).read_text(encoding="utf-8"))
        options = in_range(**given)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OptionError(f"{home} has no options of a training: {reason}.") from error
    return load_problem(home), options


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
