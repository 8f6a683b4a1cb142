"""One HTML page of a run of `hdnn control train`, with nothing outside of the file."""

from __future__ import annotations

import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

import hdnn
from hdnn.app.agents import svg
from hdnn.app.agents.runs import ControlRun
from hdnn.app.agents.scene import MOST, Scene, scene
from hdnn.app.configs.control import ControlConfig
from hdnn.app.onpage.values import NONE, counted, number, percent, text
from hdnn.app.report import template
from hdnn.app.svg_curves import BLUE, GREEN, RED, Curve, Line, curve
from hdnn.control import LoopProblem, load_problem

TEMPLATE = Path(__file__).with_name("page.html.jinja")
ANIMATED = 100  # agents, up to which the page has an animation
SECONDS = 8.0  # that it takes
HORIZONS = 2  # that energies and animations are shown for


def page(run: ControlRun, config: ControlConfig | None, metrics: dict[str, Any]) -> str:
    """The page of a run, complete or not; without a config it was not made by a command."""
    return template(TEMPLATE).render(
        version=hdnn.__version__, title=_title(run, config), run=OnPage(run, config, metrics)
    )


def _title(run: ControlRun, config: ControlConfig | None) -> str:
    name = run.folder.resolve().name if config is None else config.title
    return f"{name[:1].upper()}{name[1:]}: agents under control"


class OnPage:
    """What the page says of a run."""

    def __init__(
        self, run: ControlRun, config: ControlConfig | None, metrics: dict[str, Any]
    ) -> None:
        self.run, self.config, self.metrics = run, config, metrics
        self.name, self.log = str(run.folder), run.log()
        self.problem = run.problem()
        self.before = load_problem(run.before) if run.before.is_dir() else None

    # What it is

    @property
    def about(self) -> str:
        """What was trained, in a sentence."""
        loop, N = self.problem.loop, self.problem.agents
        links = len(loop.controller.links)
        heard = f"talk along {counted(links, 'link')}" if links else "hear nobody else"
        told = f"{counted(N, 'agent')} with a controller each, which {heard}"
        if N == 1:
            told = "1 agent with a controller"
        time = loop.step * loop.controller.steps
        return (
            f"{told}; a horizon of {counted(loop.controller.steps, 'step')}, {time:g} "
            f"{'unit' if time == 1 else 'units'} of time."
        )

    @property
    def trained(self) -> str:
        done, seconds = len(self.log), number(self.metrics.get("training_seconds"))
        took = "" if seconds is None else f" in {seconds:.0f} s"
        processes = number(self.metrics.get("processes"))
        where = "" if processes in (None, 1) else f" by {processes:g} processes"
        return f"Trained for {counted(done, 'iteration')}{took}{where}."

    @property
    def headline(self) -> tuple[str, str] | None:
        found = self.metrics.get("after")
        if not found or not self.problem.collision or self.problem.agents == 1:
            return None
        runs = counted(found["runs"], "run")
        was = percent(self.metrics["before"]["without_collision"])
        told = f"of {runs} from fresh random starts without a collision (before training: {was})"
        return percent(found["without_collision"]), told

    @property
    def scores(self) -> list[list[str]]:
        """A row for each measure, before and after the training."""
        if not self.metrics:
            return []
        before, after = self.metrics["before"], self.metrics["after"]
        many = counted(after["horizons"], "horizon")
        met = [
            (
                "runs without a collision",
                *(percent(m["without_collision"]) for m in (before, after)),
            ),
            (
                f"without one over {many}",
                NONE,
                percent(after["without_collision_in_all_horizons"]),
            ),
            ("smallest distance of two agents", *_texts("nearest", before, after)),
        ]
        rows = [
            *(met if self.problem.collision and self.problem.agents > 1 else ()),
            ("cost of a horizon", *_texts("cost", before, after)),
            ("of it distance, effort and barrier", *_texts("running_cost", before, after)),
            (f"the same terms over {many}", NONE, text(after["running_cost_of_all_horizons"])),
            ("more than over one", NONE, percent(after["growth"], 2)),
        ]
        return [[*row] for row in rows]

    # How it was trained

    @property
    def cost(self) -> Curve | None:
        """The cost of each iteration, and of its terms the two that agents see."""
        return self._curve(
            [
                ("cost", "cost", BLUE, ""),
                ("barrier", "barrier", RED, "6 4"),
                ("distance from targets", "state", GREEN, "8 3 2 3"),
            ]
        )

    @property
    def distance(self) -> Curve | None:
        """The smallest distance of each iteration."""
        level = self.problem.collision or None
        lines = [("smallest distance in the batch", "distance", BLUE, "")]
        return self._curve(lines, level=level, linear=True)

    def _curve(self, given: list[tuple[str, str, str, str]], **options: Any) -> Curve | None:
        x = [float(entry["iteration"]) for entry in self.log]
        values = {name: [number(entry.get(name)) for entry in self.log] for _, name, *_ in given}
        lines = [
            Line(told, x, values[name], colour, dash)
            for told, name, colour, dash in given
            if any(values[name])
        ]
        return curve(lines, "iteration", **options) if lines else None

    # What the agents do

    @property
    def energy(self) -> Curve | None:
        """The energy from the places of the agents on, before and after the training."""
        last = "after training" if self.metrics else "now"
        shown = [("before training", self.before, RED, "6 4"), (last, self.problem, BLUE, "")]
        lines = [
            Line(name, *_energies(problem), colour, dash)
            for name, problem, colour, dash in shown
            if problem is not None
        ]
        loop = self.problem.loop
        return curve(lines, "time", upright=loop.step * loop.controller.steps)

    @property
    def paths(self) -> str:
        """The paths before and after the training, as SVG."""
        shown = self._scene(during=False)
        return "" if shown is None else svg.still(shown)

    @property
    def moving(self) -> str:
        """The animation, as SVG."""
        shown = self._scene(during=True) if self.problem.agents <= ANIMATED else None
        return "" if shown is None else svg.animation(shown, SECONDS)

    def _scene(self, *, during: bool) -> Scene | None:
        if self.problem.cost.dimensions != 2 or self.problem.agents > MOST:
            return None
        stages = self.run.stages(trained=bool(self.metrics))
        return scene(stages if during else [*dict.fromkeys([stages[0], stages[-1]])])

    # What is certain

    @property
    def certificate(self) -> tuple[bool, str] | None:
        found = self.metrics.get("certificate")
        return None if not found else (found["holds"], found["summary"])

    @property
    def options(self) -> list[list[str]]:
        """All options, with the weights of the cost as they were."""
        if self.config is None:
            return []
        problem, controller = self.problem, self.problem.loop.controller
        pairs = problem.cost.pairs
        decided = {
            **problem.cost.to_dict(),
            "links": len(controller.links),
            "agents": problem.agents,
            "steps": controller.steps,
            "horizon": problem.loop.step * controller.steps,
            "radius": problem.radius,
            "collision": problem.collision,
            "compare": "all" if pairs is None else counted(len(pairs), "pair"),
        }
        filled = self.config.filled()
        known = {name: decided.get(name) if v is None else v for name, v in filled.items()}
        return [[name, text(value)] for name, value in known.items()]

    @property
    def command(self) -> str:
        """The command that does it again."""
        if self.config is None:
            return ""
        words = ["hdnn", "control", "train"]
        for each in fields(self.config):
            value = getattr(self.config, each.name)
            if value != each.default or each.name == "problem":
                words += [f"--{each.name.replace('_', '-')}", str(value)]
        return shlex.join([*words, "--out", f"{self.run.folder}-again"])


def _texts(name: str, *measured: dict[str, Any]) -> list[str]:
    return [text(each[name]) or NONE for each in measured]


def _energies(problem: LoopProblem) -> tuple[list[float], list[float | None]]:
    loop = problem.loop
    with torch.no_grad():
        trajectory = loop(problem.start(), HORIZONS)
        found = [float(loop.energy(y, t)) for t, y in enumerate(trajectory)]
    return [loop.step * t for t in range(len(found))], [*found]
