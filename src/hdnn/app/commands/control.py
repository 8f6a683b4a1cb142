"""`hdnn control`: train controllers of many agents, simulate them, draw them and report on them."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from hdnn.app import progress, terminal
from hdnn.app.configs.control import ControlConfig, ControlFlags
from hdnn.app.options import argument, given, json_flag, option, overwrite_flag
from hdnn.base.config import types_of
from hdnn.base.files import write_atomically
from hdnn.errors import OptionError, choose, positive_float

if TYPE_CHECKING:  # imported where they are used: the help of these commands must not take long
    from hdnn.app.agents.runs import ControlRun

HELP = (
    "Train controllers of many agents in one closed loop that is stable for any weights; simulate "
    "them, animate them, report on them."
)
EXAMPLES = (
    "hdnn control train --problem crossing --links ring --out robots",
    "hdnn control simulate robots --runs 200",
    "hdnn control animate robots --out robots.svg",
    "hdnn control report robots",
)
PICTURES = ("svg", "gif")
TABLES = ("csv", "json")
SECONDS = (0.1, 600.0)  # that a round of an animation takes, at least and at most
ROOM = 2**26  # bytes that a run may take, with a margin


def _folder() -> Any:
    return argument("folder of a run")


def train(**options: Any) -> int:
    """Train controllers; keep their weights before, during and after, pictures and a report."""
    from hdnn.app.agents import training

    options = given(options)
    flags = {name: options.pop(name, None) for name in types_of(ControlFlags)}
    loud = not (flags["json"] or flags["quiet"])
    with progress.waiting("looking at the problem", loud):
        config, run = _asked(options, flags)
    with progress.TrainingBar(run.folder.name, loud) as bar:
        metrics = training.train(config, run, flags["runs"], bar)
    if flags["json"]:
        print(terminal.json_text(metrics))
    else:
        terminal.print_text(terminal.rows_text(_train_rows(metrics)))
    return 0 if metrics["certificate"]["holds"] else 1


def _asked(options: dict[str, Any], flags: dict[str, Any]) -> tuple[ControlConfig, ControlRun]:
    """The config and the folder of a run, which is started if it is a new one."""
    from hdnn.app.agents import measured, training
    from hdnn.app.agents.problems import build
    from hdnn.app.agents.runs import ControlRun
    from hdnn.app.runs import usable_folder
    from hdnn.control.training import LoopTraining
    from hdnn.errors import CheckpointError, positive_int
    from hdnn.training.checkpoint import locked

    if flags["runs"] is not None:
        positive_int("runs", flags["runs"])
    if flags["resume"] and flags["out"] is not None:
        run = ControlRun(Path(flags["out"]))
        if run.exists:
            return run.resumed(options), run
        if not options:
            raise CheckpointError(f"{run.folder} holds no run to resume: no control.json.")
    config = ControlConfig.of(options)
    run = ControlRun(Path(flags["out"] or Path("runs") / config.run_name()))
    if flags["resume"] and run.exists:
        return run.resumed(options), run
    problem = build(config)
    LoopTraining(problem, **{name: getattr(config, name) for name in training.OPTIONS})  # raises
    if config.processes > 1:
        from hdnn.control.shared import check
        from hdnn.control.shares import shared_out

        shared_out(problem, config.processes)  # raises
        check(problem)  # raises, too: no folder may be left of a training that cannot begin
    if flags["runs"] is not None:
        measured.check_size(problem, flags["runs"], training.HORIZONS)
    run.check_free()
    usable_folder(run.folder, ROOM)
    with locked(run.folder):
        run.check_free()
        run.start(config, problem)
    return config, run


def simulate(
    folder: Annotated[str, _folder()],
    runs: Annotated[
        int | None, option("from random starts (default: 200, of a crowd fewer)")
    ] = None,
    horizons: Annotated[int, option("that each of them takes")] = 10,
    seed: Annotated[int, option("of the starts, which are never those of the training")] = 0,
    shape: Annotated[
        str, option("of where they lie: disc, within the radius, or square, each coordinate")
    ] = "disc",
    out: Annotated[str | None, option("FILE.csv or FILE.json to write all states to")] = None,
    overwrite: Annotated[bool, overwrite_flag()] = False,
    as_json: Annotated[bool, json_flag()] = False,
) -> int:
    """Run from random starts: collisions, cost, energy; exit code 1 if its balance is violated."""
    from hdnn.app.agents import measured, tables
    from hdnn.app.agents.runs import ControlRun

    path = None if out is None else terminal.new_file(out, overwrite)
    kind = "" if path is None else _kind(path, TABLES)
    with progress.waiting("simulating", not as_json):
        problem = ControlRun(Path(folder)).problem()
        count = measured.usual_runs(problem) if runs is None else runs
        kept = tables.States(problem, count, horizons) if path is not None else None
        see: dict[str, Any] = {} if kept is None else {"seen": kept.see}
        found = measured.measure(problem, count, horizons, seed, shape=shape, **see)
    result = {"run": folder, "agents": problem.agents, **found}
    if path is not None and kept is not None:
        write_atomically(path, kept.content(kind))
        result["out"] = str(path)
    if as_json:
        print(terminal.json_text(result))
    else:
        terminal.print_text(terminal.rows_text(_simulate_rows(result, problem.collision)))
    return 0 if found["energy"]["holds"] else 1


def animate(
    folder: Annotated[str, _folder()],
    out: Annotated[str, option("picture to write: .svg, or .gif by Pillow")] = "agents.svg",
    when: Annotated[
        str, option("weights before, during or after the training, or all side by side")
    ] = "all",
    start: Annotated[int, option("0: the agents' places; 1, 2 ..: a random start")] = 0,
    horizons: Annotated[int, option("that are shown")] = 1,
    seconds: Annotated[float, option("that one round takes")] = 8.0,
    seed: Annotated[int, option("of random starts")] = 0,
    overwrite: Annotated[bool, overwrite_flag()] = False,
    as_json: Annotated[bool, json_flag()] = False,
) -> None:
    """Draw the agents as they move, before, during and after the training, as SVG or GIF."""
    from hdnn.app.agents import gif, svg
    from hdnn.app.agents.runs import WHEN, ControlRun
    from hdnn.app.agents.scene import scene

    path = terminal.new_file(out, overwrite)
    kind = _kind(path, PICTURES)
    choose("when", when, WHEN)
    least, most = SECONDS
    if not least <= positive_float("seconds", seconds) <= most:
        raise OptionError(f"seconds must be from {least:g} to {most:g}, but got {seconds:g}.")
    with progress.waiting("drawing", not as_json):
        stages = ControlRun(Path(folder)).stages(when)
        frames = {"frames": gif.FRAMES} if kind == "gif" else {}
        shown = scene(stages, start=start, horizons=horizons, seed=seed, **frames)
        if kind == "gif":
            content = gif.animation(shown, seconds)
        else:
            content = svg.animation(shown, seconds).encode()
        write_atomically(path, content)
    panels = [{"title": p.title, "collides": p.collides, "told": p.told} for p in shown.panels]
    if as_json:
        print(terminal.json_text({"run": folder, "out": str(path), "panels": panels}))
    else:
        rows = [(p["title"], str(p["told"])) for p in panels]
        terminal.print_text(terminal.rows_text([*rows, ("picture", str(path))]))


def report(
    folder: Annotated[str, _folder()],
    out: Annotated[str | None, option("HTML file to write (default: FOLDER/report.html)")] = None,
    overwrite: Annotated[bool, overwrite_flag()] = False,
) -> None:
    """Make one HTML page of a run: scores, curves, paths, certificate; it needs no network."""
    from hdnn.app.agents.page import page
    from hdnn.app.agents.runs import ControlRun

    run = ControlRun(Path(folder))
    run.check_there()
    path = terminal.new_file(out or str(run.report_file), overwrite or out is None)
    with progress.waiting("drawing"):
        config = run.config() if run.exists else None
        text = page(run, config, run.metrics() if run.complete else {})
    write_atomically(path, text.encode("utf-8", errors="replace"))
    print(path)


def _as_argument(folder: str) -> str:
    """A folder as commands take it; one that begins with a dash would be an option."""
    return f"./{folder}" if folder.startswith("-") else folder


def _kind(path: Path, kinds: tuple[str, ...]) -> str:
    """The kind of a file by its name."""
    kind = path.suffix.lower().removeprefix(".")
    if kind not in kinds:
        raise OptionError(f"{path} must end with one of {', '.join(f'.{k}' for k in kinds)}.")
    return kind


def _train_rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    from hdnn.app.onpage.values import counted
    from hdnn.app.results import picture_rows

    before, after = result["before"], result["after"]
    several = f" by {result['processes']} processes" if result["processes"] > 1 else ""
    # Without pictures, and without a reason for that, these agents do not move in the plane.
    drawn = result["pictures"] or "no_pictures_because" in result
    shown = "animate" if drawn else "simulate"
    return [
        (
            "problem",
            f"{Path(result['problem']).name}: {counted(result['agents'], 'agent')}, "
            f"{counted(result['links'], 'link')}, {counted(result['parameters'], 'parameter')}",
        ),
        (
            "trained",
            f"{counted(result['iterations'], 'iteration')} in {result['training_seconds']:.1f} s"
            f"{several}",
        ),
        ("cost", f"{after['cost']:.4g} from fresh starts (before training: {before['cost']:.4g})"),
        *_found_rows(after, before),
        ("certificate", result["certificate"]["summary"]),
        *picture_rows(result),
        ("report", str(result.get("report", ""))),
        ("next", shlex.join(["hdnn", "control", shown, _as_argument(result["run"])])),
    ]


def _found_rows(
    found: dict[str, Any], before: dict[str, Any] | None = None
) -> list[tuple[str, str]]:
    """Collisions and costs of runs from fresh starts."""
    from hdnn.app.onpage.values import counted, percent

    was = f" (before training: {percent(before['without_collision'])})" if before else ""
    near = "" if found["nearest"] is None else f"; nearest {found['nearest']:.3f}"
    many = found["horizons"] > 1  # and the nearest is that of all of them
    rows, later = [], ""
    # An agent alone has no nearest; results of earlier versions do not say when agents collide.
    alone = found["nearest"] is None and found["without_collision"] == 1
    if not alone and found.get("collision", 1.0):
        runs, free = counted(found["runs"], "fresh run"), percent(found["without_collision"])
        rows = [("no collision", f"in {free} of {runs}{was}{'' if many else near}")]
        later = f"no collision in {percent(found['without_collision_in_all_horizons'])}{near}; "
    if many:
        grown = f"{later}running cost {found['growth']:+.2%}"
        rows.append((f"over {counted(found['horizons'], 'horizon')}", grown))
    return rows


def _simulate_rows(result: dict[str, Any], collision: float) -> list[tuple[str, str]]:
    from hdnn.app.onpage.values import counted

    energy = result["energy"]
    kept = "keeps" if energy["holds"] else "does NOT keep"
    runs = counted(result["runs"], "fresh run")
    met = f"closer than {collision:g} is a collision" if collision else "they cannot collide"
    rows = [
        ("agents", f"{result['agents']}; {met}" if result["agents"] > 1 else "1"),
        *_found_rows(result),
        ("cost", f"{result['cost']:.4g} over one horizon, mean of {runs}"),
        ("running cost", f"{result['running_cost']:.4g}: distance, effort and barrier alone"),
        (
            "energy",
            f"each of {counted(energy['steps'], 'step')} from {counted(energy['starts'], 'start')} "
            f"{kept} its balance, to {energy['violation']:.1e}",
        ),
    ]
    return [*rows, ("states", result["out"])] if "out" in result else rows


CONFIGS_OF: dict[Any, tuple[type, ...]] = {train: (ControlConfig, ControlFlags)}
EXAMPLES_OF = {
    train: (
        "hdnn control train --problem crossing --links ring --out robots",
        "hdnn control train --problem crowd --agents 100 --iterations 100",
        "hdnn control train --links ring --compare linked --processes 4 --out shared",
        "hdnn control train --problem folder-of-my-problem --iterations 100",
        "hdnn control train --resume --out robots",
    ),
    simulate: (
        "hdnn control simulate robots",
        "hdnn control simulate robots --runs 1 --horizons 2 --out states.csv",
        "hdnn control simulate robots --json | jq .without_collision",
    ),
    animate: (
        "hdnn control animate robots",
        "hdnn control animate robots --when after --start 1 --out robots.gif",
    ),
    report: ("hdnn control report robots", "hdnn control report robots --out page.html"),
}
