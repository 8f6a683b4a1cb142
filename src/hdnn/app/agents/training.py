"""The steps of `hdnn control train`: train, keep weights on the way, measure, draw, report."""

from __future__ import annotations

import math
import shlex
from dataclasses import asdict
from typing import Any

import torch

import hdnn
from hdnn import plotting
from hdnn.app import pictures
from hdnn.app.agents import measured, page
from hdnn.app.agents.runs import ControlRun
from hdnn.app.configs.control import ControlConfig
from hdnn.app.progress import TrainingBar, waiting
from hdnn.app.runs import write_json
from hdnn.app.terminal import StoppedError
from hdnn.base.files import write_atomically
from hdnn.control import LoopCertificate, LoopProblem, LoopTraining, load_problem
from hdnn.control.objective import rest
from hdnn.control.processes import train_on_processes
from hdnn.errors import CheckpointError, OptionError
from hdnn.training import checkpoint

OPTIONS = ("iterations", "batch", "rate", "seed")  # of a training
KEPT = (0.1, 0.25, 0.5, 0.75)  # of a training, after which the weights are kept
HORIZONS = 10  # over which a trained loop is measured
CERTIFIED = 16  # starts of the certificate, over two horizons
NORMS = 200  # states of all agents, up to which it has norms of gradients: they take a minute


def train(
    config: ControlConfig, run: ControlRun, runs: int | None, bar: TrainingBar
) -> dict[str, Any]:
    """Train, or go on with a training, and write all results; a complete run stays as it is."""
    if run.complete:
        found = run.metrics()
        if runs not in (None, found["after"]["runs"]):
            raise OptionError(
                f"the run in {run.folder} is complete, with {found['after']['runs']} fresh starts; "
                f"try others by hdnn control simulate --runs {runs}."
            )
        return found
    if runs is not None:
        measured.check_size(load_problem(run.before), runs, HORIZONS)
    try:
        # Processes lock the folder themselves while they train.
        shared = _shared(config, run, bar) if config.processes > 1 else None
        with checkpoint.locked(run.folder):
            problem, seconds = _alone(config, run, bar) if shared is None else shared
            with waiting("measuring from fresh starts", bar.wanted):
                return _finished(config, run, problem, runs, seconds)
    except KeyboardInterrupt as error:
        again = f"hdnn control train --resume --out {shlex.quote(str(run.folder))}"
        raise StoppedError(f"interrupted; go on with: {again}") from error


def _alone(config: ControlConfig, run: ControlRun, bar: TrainingBar) -> tuple[LoopProblem, float]:
    """Train in this process, with exact resumption."""
    if (run.folder / checkpoint.NAME).is_file():
        training = LoopTraining.resume(run.folder)
        _check_same(config, run, training)
    else:
        options = {name: getattr(config, name) for name in OPTIONS}
        training = LoopTraining(load_problem(run.before), **options, folder=run.folder)

    def show(now: LoopTraining) -> None:
        if bar.on:
            near = now.history.get("distance")  # where no agents are compared, there is none
            course = "" if near is None else f", nearest {near[-1]:.2f}"
            told = f"cost {now.history['cost'][-1]:.4g}{course}"
            bar.show(now.done, now.iterations, f"{told}, iteration {now.done}/{now.iterations}")

    for done in kept_after(training.iterations):
        if training.done <= done:
            training.run(progress=False, until=done, callback=show)
            training.problem.save(run.folder / f"during-{done}")
    training.run(progress=False, callback=show)
    return training.problem, training.seconds


def _check_same(config: ControlConfig, run: ControlRun, training: LoopTraining) -> None:
    """Refuse options that were edited since: the training goes on with those that it began with."""
    begun = {name: getattr(training, name) for name in OPTIONS}
    if not config.own:
        begun["steps"] = training.loop.controller.steps
    for name, was in begun.items():
        if getattr(config, name) != was:
            raise CheckpointError(
                f"{run.config_file} says {name} = {getattr(config, name)!r}, but the training was "
                f"begun with {was!r}; to train longer, begin another one where this one ends, by "
                f"hdnn control train --problem {shlex.quote(str(run.folder))}."
            )


def _shared(config: ControlConfig, run: ControlRun, bar: TrainingBar) -> tuple[LoopProblem, float]:
    """Train by processes that hear their neighbours only, with exact resumption."""
    options = {name: getattr(config, name) for name in OPTIONS}
    problem = load_problem(run.before)
    kept = {"folder": run.folder, "resume": True, "stages": kept_after(config.iterations)}
    found = train_on_processes(problem, config.processes, **options, **kept, progress=bar.wanted)
    return problem, found.seconds


def kept_after(iterations: int) -> list[int]:
    """After how many iterations the weights are kept."""
    found = {round(share * iterations) for share in KEPT}
    return sorted(found - {0, iterations})


def _finished(
    config: ControlConfig, run: ControlRun, problem: LoopProblem, runs: int | None, seconds: float
) -> dict[str, Any]:
    count = measured.usual_runs(problem) if runs is None else runs
    before = load_problem(run.before)
    starts = measured.fresh(problem, min(CERTIFIED, measured.usual_runs(problem)), config.seed)
    certificate = problem.loop.certify(starts, 2, samples=int(starts[0].numel() <= NORMS))
    metrics: dict[str, Any] = {
        "run": str(run.folder),
        "problem": config.problem,
        "agents": problem.agents,
        "links": len(problem.loop.controller.links),
        "steps": problem.loop.controller.steps,
        "parameters": sum(p.numel() for p in problem.loop.controller.parameters()),
        "iterations": config.iterations,
        "seed": config.seed,
        "processes": config.processes,
        "training_seconds": round(seconds, 2),
        "before": measured.measure(before, count, 1, config.seed),
        "after": measured.measure(problem, count, HORIZONS, config.seed),
        "certificate": certified(certificate),
    }
    drawn = pictures.drawn(lambda: _pictures(before, problem, run), run.folder)
    metrics |= {
        **drawn,
        "report": str(run.report_file),
        "versions": {"hdnn": hdnn.__version__, "torch": torch.__version__},
    }
    text = page.page(run, config, metrics)
    write_atomically(run.report_file, text.encode("utf-8", errors="replace"))
    write_json(run.metrics_file, metrics)
    return run.metrics()


def certified(certificate: LoopCertificate) -> dict[str, Any]:
    """A certificate as JSON holds it."""
    return {
        "holds": certificate.holds,
        "summary": certificate.summary,
        **{name: _plain(value) for name, value in asdict(certificate).items()},
    }


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _pictures(before: LoopProblem, after: LoopProblem, run: ControlRun) -> dict[str, Any]:
    """The paths before and after the training, and the costs of each iteration."""
    found = {}
    if after.cost.dimensions == 2:
        for name, problem in (("before", before), ("after", after)):
            with torch.no_grad():
                path = problem.loop(problem.start())[..., :2]
            ax = plotting.agent_paths(
                path, rest(problem.loop.plant)[:, :2], distance=problem.collision
            )
            ax.set_title(f"{name.capitalize()} training")
            found[f"paths_{name}"] = ax
    return found
