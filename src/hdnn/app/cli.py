"""The command line: flags to calls, results to text, mistakes to one sentence and exit code 2.

Commands are plain functions; their annotations are read when the program is built, in `main`, so
that this file can be imported without typer. What is heavy is imported by the command that needs
it.
"""

from __future__ import annotations

import csv
import errno
import functools
import importlib
import importlib.metadata
import importlib.util
import io
import json
import math
import os
import platform
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from hdnn import __version__
from hdnn.errors import CheckpointError, HDNNError, OptionError, choose, readable
from hdnn.training.processes import launch

if TYPE_CHECKING:
    import typer

    from hdnn.app.image_runs import ImageConfig
    from hdnn.app.runs import Run, TrainConfig
    from hdnn.training import Moment
else:
    with suppress(ImportError):  # `hdnn.__main__` says what to install
        import typer

HELP = "Very deep networks whose gradients provably do not vanish."
EXPERIMENTS = (
    "table-planar",
    "table-distributed",
    "table-mnist",
    "table-cifar",
    "fig-planar",
    "fig-distributed",
    "fig-gradients",
    "fig-exploding",
    "fig-cifar",
)
EXTRAS = {
    "fast": ["numba"],
    "gpu": ["triton"],
    "sklearn": ["sklearn", "pandas"],
    "plot": ["matplotlib"],
    "cli": ["typer", "rich", "pyarrow"],
    "science": ["scipy"],
    "graph": ["networkx", "pymetis"],
    "mpi": ["mpi4py"],
    "images": ["PIL"],
    "export": ["onnx", "onnxscript", "onnxruntime"],
    "tensorboard": ["tensorboard"],
}
PLACES = {"out", "data", "run", "config", "checkpoint", "folders", "results", "graph", "file"}
LONGEST = 700  # letters of a message
WAIT = 2.0  # seconds before anything is shown of the progress

_COMMANDS: list[tuple[Callable[..., int | None], str, dict[str, Any]]] = []


class StoppedError(Exception):
    """A command that was stopped by hand, with a word on how to go on."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 if it worked, 2 if the input was wrong, 130 if it was interrupted."""
    given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    with suppress(AttributeError, ValueError):  # the name of a file may be no valid text
        sys.stdout.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]
    # The base of all that typer says about flags, in the click that it uses or brings along.
    wrong_flags: type[Exception] = typer.BadParameter.__mro__[2]  # pyright: ignore[reportAssignmentType]
    with warnings.catch_warnings():
        if launch.is_first():
            warnings.showwarning = lambda message, *_: _say(f"warning: {message}")
        else:
            warnings.showwarning = lambda *_: None
        try:
            code = typer.main.get_command(_app()).main(given, "hdnn", standalone_mode=False)
            if sys.stdout is not None:
                sys.stdout.flush()
        except OSError as error:
            return _no_output(error)
        except SystemExit as error:  # which is how rich says that nobody reads on
            if not isinstance(error.__context__, BrokenPipeError):
                raise
            return _no_output(error.__context__)
        except wrong_flags as error:
            context = getattr(error, "ctx", None)
            hint = f"see {context.command_path} --help" if context else "see hdnn --help"
            message = error.format_message().strip()  # pyright: ignore[reportAttributeAccessIssue]
            if given[0] == "train":
                launch.speak_as_one()
            return _fail(f"{message.rstrip('.')}; {hint}." if message[-1:] != "?" else message)
        except (KeyboardInterrupt, typer.Abort):
            return _fail("interrupted", 130)
    return code or 0


def _app() -> typer.Typer:
    """The program, of the commands below."""
    app = typer.Typer(
        epilog=_examples("hdnn demo", "hdnn train --data swiss_roll --network h2 --layers 64"),
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(help=HELP)(_program)
    for function, examples, settings in _COMMANDS:
        app.command(epilog=examples, **settings)(_guarded(function))
    from hdnn.app import cli_graph  # which is made of what is here

    cli_graph.add_to(app)
    return app


def _command(*examples: str, **settings: Any) -> Callable[[Any], Any]:
    """Make a function a command, with examples under its help."""

    def add(function: Callable[..., int | None]) -> Callable[..., int | None]:
        _COMMANDS.append((function, _examples(*examples), settings))
        return function

    return add


def _examples(*examples: str) -> str:
    return "\n\n".join(["examples:", *examples])


def _guarded(function: Callable[..., int | None]) -> Callable[..., int]:
    """The same command, with each way to fail turned into one sentence and an exit code."""

    @functools.wraps(function)
    def command(*args: Any, **options: Any) -> int:
        try:
            for name in options.keys() & PLACES:
                options[name] = _at_home(options[name])
            code = function(*args, **options) or 0
            if sys.stdout is not None:
                sys.stdout.flush()
            return code
        except HDNNError as error:
            return _fail(error)
        except StoppedError as error:
            return _fail(error, 130)
        except KeyboardInterrupt:
            return _fail("interrupted", 130)
        except OSError as error:
            return _no_output(error)
        except MemoryError as error:
            return _fail(f"there is not enough memory ({error}); take less of everything.")
        except Exception as error:
            if os.environ.get("HDNN_TRACEBACK"):
                raise
            if "allocate memory" in str(error) or "out of memory" in str(error):
                return _fail("there is not enough memory; take fewer layers, features or rows.")
            return _fail(
                f"a mistake in hdnn itself, {type(error).__name__}: {error} (please report it; "
                "with HDNN_TRACEBACK=1 it shows where).",
                1,
            )

    return command


def _at_home(place: Any) -> Any:
    """A path, or several, with the folder that ~ stands for."""
    if isinstance(place, list):
        return [_at_home(one) for one in place]
    return os.path.expanduser(place) if isinstance(place, str) else place


def _no_output(error: OSError) -> int:
    """The exit code after an error of files or of the output, and what is to be said of it."""
    _forget_output()
    if isinstance(error, BrokenPipeError):  # whoever read the output has had enough
        return 0
    if error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return _fail(f"cannot write the output: {error.strerror}; make room, or send it elsewhere.")
    name = f" {error.filename}" if error.filename else ""
    return _fail(f"cannot go on with the file{name}: {error.strerror or error}.")


def _fail(message: object, code: int = 2) -> int:
    if launch.is_as_one():
        launch.last_word(message, _say)
    else:
        _say(message)
    return code


def _say(message: object) -> None:
    """One line on stderr, whatever is in the message; at a terminal as wide as that is."""
    text = readable(f"hdnn: {' '.join(str(message).split())}")
    if len(text) > LONGEST:  # what is wrong mostly stands at the end
        text = f"{text[: LONGEST // 2]} .. {text[-LONGEST // 2 :]}"
    with suppress(OSError, AttributeError, ValueError):  # there may be no stderr
        if _at_terminal():
            text = textwrap.fill(text, _columns() or LONGEST, break_on_hyphens=False)
        print(text, file=sys.stderr, flush=True)


def _forget_output() -> None:
    """Leave nothing in the buffer: Python would complain about it at its end."""
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _version(wanted: bool) -> None:
    if wanted:
        print(f"hdnn {__version__}")
        raise typer.Exit


def _program(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_version, is_eager=True),
    ] = False,
) -> None:
    """Options of the program itself, before any command."""


# Commands


@_command("hdnn demo", "hdnn demo --layers 128 --seed 3", "hdnn demo --json | jq .test_accuracy")
def demo(
    layers: Annotated[int, typer.Option(help="number of layers N")] = 64,
    epochs: Annotated[int | None, typer.Option(help="of training; default: what suffices")] = None,
    seed: Annotated[int, typer.Option(help="of weights and shuffle")] = 0,
    out: Annotated[str, typer.Option(help="folder to write to")] = "runs/demo",
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="no progress display")] = False,
) -> None:
    """Train a deep H2 on the Swiss roll; print its accuracy and gradient norms."""
    from hdnn.app import demo

    progress = not (quiet or as_json)
    result = demo.run(layers=layers, epochs=epochs, seed=seed, out=out, progress=progress)
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        _print(demo.summary(result))


def _option(panel: str, text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel)


# The parts of the help of `train`.
_data = functools.partial(_option, "Data")
_network = functools.partial(_option, "Network")
_training = functools.partial(_option, "Training")
_run = functools.partial(_option, "Run")


@_command(
    "hdnn train --data swiss_roll --network h2 --layers 64",
    "hdnn train --data iris.csv --target species --layers 16 --seeds 5",
    "hdnn train --data swiss_roll --layers 256 --multilevel 4,4 --epochs 20",
    "hdnn train --data mnist --network h1 --layers 8",
    "hdnn train --data cifar10 --network h2 --device cuda",
    "hdnn train --resume --out runs/swiss_roll-h2-64-0",
    "torchrun --nproc-per-node 2 -m hdnn train --data swiss_roll --layers 64",
    "torchrun --nproc-per-node 8 -m hdnn train --graph ring8.toml --data swiss_roll",
)
def train(
    data: Annotated[
        str | None,
        _data(
            "swiss_roll, double_moons, double_circles, mnist, cifar10, or FILE.csv or FILE.parquet"
        ),
    ] = None,
    graph: Annotated[
        str | None,
        _data("TOML file: train on its nodes, by one process or many (see hdnn launch --help)"),
    ] = None,
    target: Annotated[str | None, _data("column of the file to predict")] = None,
    drop: Annotated[list[str] | None, _data("column to leave out (may be repeated)")] = None,
    task: Annotated[str | None, _data("auto (default), classification or regression")] = None,
    test_fraction: Annotated[
        float | None, _data("of the rows, kept for testing (default: 0.2)")
    ] = None,
    images: Annotated[
        int | None,
        _data("of mnist and cifar10, train and test on so many each, for a quick look"),
    ] = None,
    network: Annotated[
        str | None,
        _network(
            "h1, h2 (default), ms1, ms2, ms3, implicit_h2, mlp, verlet, yoshida4, midpoint; for "
            "mnist h1, h2, ms1, ms2, ms3; for cifar10 h1, h2, h1_paper, resnet56, alexnet"
        ),
    ] = None,
    layers: Annotated[
        int | None,
        _network("their number N (default: 64; for a file or mnist 8; a unit for cifar10: 6)"),
    ] = None,
    features: Annotated[
        int | None, _network("of a state, n (default: 4; for a file twice its columns or so)")
    ] = None,
    T: Annotated[
        float | None, _network("time span, h = T/N (default: 2.4; for a file 1)", "--T")
    ] = None,
    step: Annotated[float | None, _network("h itself, instead of T")] = None,
    activation: Annotated[
        str | None,
        _network("tanh (default), relu (default for a file), sigmoid ..; cifar10: its recipe's"),
    ] = None,
    init: Annotated[
        str | None,
        _network(
            "weights: paper (default) or scaled (default for a file); images: as their recipe"
        ),
    ] = None,
    epochs: Annotated[
        int | None, _training("default: 50; for images 40, with the recipe of the paper's tables")
    ] = None,
    patience: Annotated[
        int | None, _training("end after so many epochs in which the training loss did not fall")
    ] = None,
    multilevel: Annotated[
        str | None,
        _training("2,2: train a quarter of the layers, then half, then all; that many epochs each"),
    ] = None,
    batch: Annotated[int | None, _training("minibatch size (default: 125; for a file 64)")] = None,
    optimizer: Annotated[str | None, _training("adam (default) or sgd")] = None,
    learning_rate: Annotated[float | None, _training("default: 0.05; for a file 0.02")] = None,
    schedule: Annotated[str | None, _training("cosine (default) or constant")] = None,
    warmup: Annotated[float | None, _training("fraction of steps with a rising rate")] = None,
    weight_decay: Annotated[
        float | None, _training("of hidden layers (default: 0; for a file 0.05, for values 2)")
    ] = None,
    clip: Annotated[float | None, _training("largest gradient norm")] = None,
    solver: Annotated[
        str | None, _training("of the output layer: auto, newton (default), adam or joint")
    ] = None,
    ridge: Annotated[
        float | None, _training("on the output layer (default: 1e-4; for a file 1, for values 3)")
    ] = None,
    penalties: Annotated[
        str | None,
        _training(
            "weight decay and ridge stand beside the mean of the losses, or beside their sum "
            "(default for a file: they are divided by its rows)"
        ),
    ] = None,
    smoothness: Annotated[
        float | None, _training("of weights over layers (default: 5e-4; for a file 5e-3)")
    ] = None,
    smoothing: Annotated[str | None, _training("that is constant (default) or cosine")] = None,
    seed: Annotated[int | None, _run("of split, weights and shuffle (default: 0)")] = None,
    seeds: Annotated[int | None, _run("that many runs: seed, seed + 1 ..")] = None,
    device: Annotated[str | None, _run("cpu (default), cuda or auto")] = None,
    dtype: Annotated[str | None, _run("float32 (default) or float64")] = None,
    out: Annotated[str | None, _run("new folder (default: runs/DATA-NETWORK-N-SEED)")] = None,
    resume: Annotated[bool, _run("go on where a run stopped", "--resume")] = False,
    tensorboard: Annotated[
        bool, _run("write its curves to the folder tensorboard in it", "--tensorboard")
    ] = False,
    config: Annotated[str | None, _run("TOML file, options under \\[train]")] = None,
    save_every: Annotated[int | None, _run("with --graph: steps between two shards")] = None,
    timeout: Annotated[
        float | None, _run("with --graph: seconds until a silent process counts as lost")
    ] = None,
    as_json: Annotated[bool, _run("print one JSON object", "--json")] = False,
    quiet: Annotated[bool, _run("no progress display", "--quiet")] = False,
) -> int:
    """Train a network on a data set or a table; keep everything in a folder of its own."""
    given = {k: v for k, v in locals().items() if not (v is None or v is False or v == [])}
    from hdnn.app import cli_graph, cli_images

    if cli_graph.wanted(given):
        return cli_graph.train(given)
    results = []
    with launch.joined() as processes:
        asked, chosen = processes.first(lambda: _asked(given))
        show = not (asked["quiet"] or asked["json"]) and processes.is_first
        for number, (settings, run) in enumerate(chosen, 1):
            title = run.folder.name + (f" ({number} of {len(chosen)})" if len(chosen) > 1 else "")
            with _TrainingBar(title, show) as bar:
                try:
                    results.append(_trained(settings, run, bar, asked, processes))
                except KeyboardInterrupt as error:
                    raise _how_to_go_on(run, len(chosen)) from error
    if not processes.is_first:
        return 0
    if len(results) == 1:
        text = cli_images.text if "certificates" in results[0] else _training_text
        if asked["json"]:
            print(_json(results[0]))
        else:
            _print(text(results[0]))
        return 0
    summary = _spread(results)
    if asked["json"]:
        print(_json({"runs": results, "summary": summary}))
    else:
        _print(_spread_text(results, summary))
    return 0


@_command(
    "hdnn predict --run runs/iris-h2-16-0 --data new.csv --out answers.csv",
    "hdnn predict --run runs/iris-h2-16-0 --data new.csv --proba",
    "hdnn predict --run runs/mnist-h1-8-0 --data mnist --out answers.csv",
)
def predict(
    run: Annotated[str, typer.Option(help="folder of a complete run")],
    data: Annotated[
        str,
        typer.Option(
            help="FILE.csv or FILE.parquet with the same columns; for a run on images, mnist or "
            "cifar10: the test images"
        ),
    ],
    out: Annotated[str | None, typer.Option(help="CSV to write; default: print it")] = None,
    proba: Annotated[bool, typer.Option("--proba", help="probability of each class")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace that file")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Predict the target for each row of a table, or test image, as CSV in their order."""
    from hdnn.app import tasks
    from hdnn.app.runs import Run
    from hdnn.base.files import write_atomically

    path = None if out is None else _new_file(out, overwrite)
    with _waiting("predicting", not as_json):
        result = tasks.predict(Run(run), data, proba=proba)
    if path is not None:
        write_atomically(path, _prediction_csv(result).encode())
        result = {name: value for name, value in result.items() if name not in ANSWERS}
        result["out"] = str(path)
    if as_json:
        print(_json(result))
    elif path is None:
        sys.stdout.write(_prediction_csv(result))
    else:
        _print(f"{result['rows']} predictions of {result['target']} in {path}{_score(result)}")


@_command(
    "hdnn certify runs/swiss_roll-h2-64-0",
    "hdnn certify runs/iris-h2-16-0 --data new.csv --json",
    "hdnn certify model.safetensors --data double_moons",
)
def certify(
    checkpoint: Annotated[
        str | None, typer.Argument(help="folder of a complete run, or a saved model")
    ] = None,
    run: Annotated[str | None, typer.Option(help="the same, by name")] = None,
    data: Annotated[
        str | None, typer.Option(help="points to look at; default: the run's own test points")
    ] = None,
    samples: Annotated[int, typer.Option(help="of them, at the most")] = 1000,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> int:
    """Measure the gradient norms of a trained network; exit code 1 if a guarantee is not seen."""
    from hdnn.app import tasks

    place = checkpoint or run
    if not place or (checkpoint and run):
        raise OptionError("name one run or saved model: hdnn certify runs/NAME.")
    with _waiting("certifying", not as_json):
        certificate = tasks.certify(place, data, samples=samples)
    if as_json:
        print(_json({"run": place, **certificate.to_dict()}))
    else:
        _print(certificate)
    return 1 if certificate.broken or certificate.unknown else 0


@_command(
    "hdnn reproduce table-planar",
    "hdnn reproduce table-planar -- --seeds 3",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def reproduce(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help=f"all, or one of {', '.join(EXPERIMENTS)}")],
) -> int:
    """Run an experiment of the paper; what follows -- goes to it."""
    names = EXPERIMENTS if name == "all" else [choose("experiment", name, (*EXPERIMENTS, "all"))]
    there = [n for n in names if _experiment(n)]
    if not there:
        raise OptionError(f"{name} is not there yet in hdnn {__version__}.")
    worst = 0
    for found in there:
        if len(names) > 1:
            _say(f"reproducing {found}")
        experiment = importlib.import_module(_experiment(found))
        try:
            code = experiment.main(list(context.args))
        except HDNNError as error:  # others may still do
            code = _fail(error)
        except SystemExit as error:  # it has shown its help
            code = error.code if isinstance(error.code, int) else 2 * bool(error.code)
        worst = max(worst, code or 0)
    return worst


@_command(
    "hdnn bench",
    "hdnn bench engine -- --help",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def bench(
    context: typer.Context,
    name: Annotated[
        str | None, typer.Argument(help="one of the benchmarks; without it, list them")
    ] = None,
) -> int:
    """Run a benchmark of the source tree; what follows -- goes to it."""
    folder = Path(__file__).parents[2] / "benchmarks"
    files = {file.stem: file for file in sorted(folder.glob("*.py"))}
    files = {stem: file for stem, file in files.items() if "__main__" in file.read_text("utf-8")}
    if not files:
        raise OptionError(
            "the benchmarks are not part of the installed package: in a clone of the repository, "
            "run python benchmarks/engine.py."
        )
    if name is None:
        print("\n".join(f"hdnn bench {stem}" for stem in files))
        return 0
    command = [sys.executable, str(files[choose("benchmark", name, files)]), *context.args]
    return subprocess.run(command, check=False).returncode


@_command("hdnn report", "hdnn report runs/iris-h2-16-0 runs/iris-mlp-16-0 --out iris.html")
def report(
    folders: Annotated[
        list[str] | None, typer.Argument(help="runs, or folders of runs (default: runs)")
    ] = None,
    out: Annotated[str, typer.Option(help="HTML file to write")] = "report.html",
    results: Annotated[
        str, typer.Option(help="folder with what was reproduced of the paper, if it is there")
    ] = "docs/results",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace that file")] = False,
) -> None:
    """Make one HTML page of runs: tables, curves, certificates; it needs no network."""
    from hdnn.app import report
    from hdnn.base.files import write_atomically

    path = _new_file(out, overwrite)
    with _waiting("reading runs"):
        found = report.find_runs(folders or ["runs"])
        page = report.page(found, Path(results))
    write_atomically(path, page.encode("utf-8", errors="replace"))
    for fault in report.faults(found):
        _say(fault)
    _print(f"{len(found)} run{'s' * (len(found) != 1)} in {path}")


@_command("hdnn info", "hdnn info --json | jq .engines")
def info(
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Show versions, devices, engines, extras and data: what is here and what is missing."""
    result = _about()
    if as_json:
        print(_json(result))
        return
    for topic, entries in result.items():
        width = max(len(name) for name in entries)
        lines = (f"  {name:<{width}}  {value}" for name, value in entries.items())
        _print("\n".join([topic, *lines]))


# What the commands are made of


def _asked(
    given: dict[str, Any],
) -> tuple[dict[str, Any], list[tuple[TrainConfig | ImageConfig, Run]]]:
    """What the flags of `train` and its config file ask for: options of all runs, and the runs."""
    from hdnn.app import cli_images, runs

    if "as_json" in given:
        given["json"] = given.pop("as_json")
    file = given.pop("config", None)
    options = {} if file is None else runs.read_config(file)
    before = runs.before_penalties(options) and "penalties" not in given
    options |= given
    options |= {name: _at_home(options[name]) for name in options.keys() & PLACES}
    asked = {name: options.pop(name, None) for name in runs.RUN_OPTIONS}
    told = runs.is_table(options.get("data")) and runs.before_penalties(options)
    if told and before:
        options["penalties"] = "mean"
    chosen = _chosen_runs(options, asked["out"], asked["seeds"], bool(asked["resume"]))
    cli_images.check(chosen)
    if told and not asked["resume"]:
        _say(_told_penalties(file if before else None))
    return asked, chosen


def _told_penalties(file: str | None) -> str:
    """What weight decay and ridge are taken for, where it was another thing once."""
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
    options: dict[str, Any], out: str | None, seeds: int | None, resume: bool
) -> list[tuple[TrainConfig | ImageConfig, Run]]:
    """The config and the folder of each run, all of them checked before the first one starts."""
    from hdnn.app.runs import Run, config_of

    count = 1 if seeds is None else seeds
    if not 1 <= count <= 10_000:
        raise OptionError(f"seeds must be a whole number from 1 to 10000, but got {count}.")
    first = options.get("seed", 0)
    chosen = []
    for seed in range(first, first + count):
        each = {**options, "seed": seed} if count > 1 else options
        if out is None:
            config = config_of(each)
            run = Run(Path("runs") / config.run_name())
        else:
            run = Run(Path(out) / f"seed-{seed}" if count > 1 else out)
            if resume and not run.exists and "data" not in options:
                raise CheckpointError(f"{run.folder} holds no run to resume: no config.toml.")
            config = None if resume and run.exists else config_of(each)
        if not resume:
            run.check_free()
        elif run.exists:
            config = run.resumed(each)
        assert config is not None
        chosen.append((config, run))
    return chosen


def _trained(
    settings: TrainConfig | ImageConfig,
    run: Run,
    bar: _TrainingBar,
    asked: dict[str, Any],
    processes: launch.Single | launch.Launch,
) -> dict[str, Any]:
    """Train one run, on images or not."""
    from hdnn.app import image_tasks, tasks
    from hdnn.app.image_runs import ImageConfig

    board = bool(asked["tensorboard"])
    if isinstance(settings, ImageConfig):
        tell, waiting = bar.show if bar.on else None, functools.partial(_waiting, wanted=bar.on)
        return image_tasks.train(settings, run, tell=tell, waiting=waiting, tensorboard=board)
    callbacks = [bar] if bar.on else []
    return tasks.train(settings, run, callbacks, tensorboard=board, processes=processes)


def _how_to_go_on(run: Run, count: int) -> StoppedError:
    if not run.exists:
        return StoppedError("interrupted before anything was written.")
    if count > 1:
        return StoppedError(f"interrupted in {run.folder}; give the same command with --resume.")
    folder = shlex.quote(str(run.folder))
    return StoppedError(f"interrupted; go on with: hdnn train --resume --out {folder}")


def _new_file(out: str, overwrite: bool) -> Path:
    """The path of a file to write, if nothing is lost by that."""
    path = Path(out)
    if os.path.isdir(path):
        raise CheckpointError(f"{path} is a folder; name a file in it with --out.")
    if os.path.lexists(path) and not overwrite:
        raise CheckpointError(f"{path} exists already; name another file, or say --overwrite.")
    if not os.path.isdir(path.parent):
        raise CheckpointError(f"there is no folder {path.parent} to write {path.name} to.")
    return path


def _experiment(name: str) -> str:
    """The module of an experiment, or nothing where it is not there yet."""
    module = f"hdnn.experiments.{name.replace('-', '_')}"
    try:
        return module if importlib.util.find_spec(module) else ""
    except ModuleNotFoundError:
        return ""


def _about() -> dict[str, dict[str, str]]:
    """What this machine and this installation have to offer."""
    import torch

    from hdnn.app import image_tasks
    from hdnn.app.runs import IMAGE_SETS
    from hdnn.data import planar

    missing = {
        extra: [module for module in modules if not _installed(module)]
        for extra, modules in EXTRAS.items()
    }
    versions = {name: _package_version(name) for name in ("torch", "numpy", "safetensors")}
    devices = {"cpu": f"{os.cpu_count()} cores, {torch.get_num_threads()} threads of PyTorch"}
    for index in range(torch.cuda.device_count()):
        devices[f"cuda:{index}"] = torch.cuda.get_device_name(index)
    if len(devices) == 1:
        devices["cuda"] = "none that PyTorch can use"
    engines = {"reference": "ready (plain PyTorch)"}
    engines["fused, cpu"] = _ready("fast", missing)
    engines["fused, gpu"] = (
        _ready("gpu", missing) if torch.cuda.is_available() else "needs a CUDA device"
    )
    data = dict.fromkeys(planar.SETS, "ready (made on the fly)")
    data |= {name: image_tasks.where(name) for name in IMAGE_SETS}
    return {
        "versions": {"hdnn": __version__, "python": platform.python_version(), **versions},
        "devices": devices,
        "engines": engines,
        "extras": {extra: _ready(extra, missing) for extra in EXTRAS},
        "data": data,
    }


def _ready(extra: str, missing: dict[str, list[str]]) -> str:
    if not missing[extra]:
        return "ready"
    return f"{', '.join(missing[extra])} missing: pip install 'hdnn[{extra}]'"


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _package_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


# Text for people and machines


def _json(result: Any) -> str:
    from hdnn.base.files import finite

    return json.dumps(finite(result), indent=2)


def _print(text: object) -> None:
    """Text for people; at a terminal no line is wider than that is, and columns stay columns."""
    width = _columns()
    lines = str(text).splitlines()
    print("\n".join(lines if width is None else (_fitted(line, width) for line in lines)))


def _columns() -> int | None:
    """The width of the terminal; None where nobody asks for one."""
    at_terminal = getattr(sys.stdout, "isatty", lambda: False)
    if not ("COLUMNS" in os.environ or at_terminal()):
        return None
    return max(shutil.get_terminal_size().columns, 20)


def _fitted(line: str, width: int) -> str:
    """One line of a text as several, the further ones under the value of the first."""
    if len(line) <= width:
        return line
    name = re.match(r"\s{3,}|\s*(\S+( \S+)*\s{2,})?", line)
    indent = len(name[0]) if name else 0
    if indent > width // 2:
        indent = 2
    return textwrap.fill(
        line,
        width,
        subsequent_indent=" " * indent,
        break_on_hyphens=False,
        replace_whitespace=False,
    )


def _rows(rows: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}".rstrip() for name, value in rows)


def _training_text(result: dict[str, Any]) -> str:
    """The metrics of one run, as a small table."""
    from hdnn.analysis.certificate import number_text

    certified = result["certificate"]
    rows = [
        ("network", f"{result['network']} on {result['data']}"),
        ("trained", f"{result['epochs']} epochs in {result['training_seconds']:.1f} s"),
    ]
    for name, value in _measures(result).items():
        rows.append((name.replace("_", " "), _measure(name, value)))
    rows += [
        ("gradients", _smallest(certified)),
        ("", f"largest  norm(dy_N/dy_j) = {number_text(certified['largest_norm'])}"),
        ("run", result["run"]),
    ]
    rows += [("picture", path) for path in result["pictures"].values()]
    if "no_pictures_because" in result:
        rows.append(("pictures", f"none: {result['no_pictures_because']}"))
    return _rows(rows)


MEASURES = tuple(
    f"{part}_{name}" for part in ("train", "test") for name in ("accuracy", "rmse", "r2")
)
ANSWERS = ("predictions", "probabilities")


def _measures(result: dict[str, Any]) -> dict[str, float]:
    return {name: result[name] for name in MEASURES if result.get(name) is not None}


def _measure(name: str, value: float) -> str:
    return f"{value:.2%}" if name.endswith("accuracy") else f"{value:.4g}"


def _smallest(certified: dict[str, Any]) -> str:
    from hdnn.app.demo import rounded_down

    norm = certified["smallest_norm"]
    found = "unknown" if norm is None or math.isnan(norm) else rounded_down(norm)
    text = f"smallest norm(dy_N/dy_j) = {found}"
    if not certified["guaranteed"]:
        return f"{text} (no guarantee: {certified['guarantee']})"
    if certified["holds"] is None:
        return f"{text}: COULD NOT BE COMPUTED, {certified.get('unknown') or 'nothing is known'}"
    return f"{text} >= 1: {'holds' if certified['holds'] else 'DOES NOT HOLD'}"


def _spread(results: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Mean, standard deviation and extremes of each measure over several runs."""
    summary = {}
    for name in _measures(results[0]):
        values = [result[name] for result in results if result.get(name) is not None]
        summary[name] = {
            "runs": len(values),
            "mean": statistics.fmean(values),
            "std": statistics.stdev(values) if len(values) > 1 else 0.0,
            "smallest": min(values),
            "largest": max(values),
        }
    return summary


def _spread_text(results: list[dict[str, Any]], summary: dict[str, dict[str, float]]) -> str:
    rows = []
    for result in results:
        measures = ", ".join(f"{n} {_measure(n, v)}" for n, v in _measures(result).items())
        rows.append((f"seed {result['seed']}", f"{measures.replace('_', ' ')}  {result['run']}"))
    for name, spread in summary.items():
        mean, low, high = (_measure(name, spread[key]) for key in ("mean", "smallest", "largest"))
        text = f"mean {mean}, std {_measure(name, spread['std'])}, from {low} to {high}"
        rows.append((name.replace("_", " "), text))
    return _rows(rows)


def _prediction_csv(result: dict[str, Any]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    chances = result.get("probabilities", {})
    writer.writerow([result["target"], *(f"p({name})" for name in chances)])
    writer.writerows(zip(result["predictions"], *chances.values(), strict=True))
    return text.getvalue()


def _score(result: dict[str, Any]) -> str:
    for name in ("accuracy", "rmse"):
        if name in result:
            return f" ({name} {_measure(name, result[name])})"
    return ""


# Progress, for a person at a terminal who has waited for two seconds


def _at_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


@contextmanager
def _waiting(what: str, wanted: bool = True) -> Iterator[None]:
    """A sign of life beside something that has no steps to count."""
    if not (wanted and _at_terminal()):
        yield
        return
    from rich.console import Console

    status = Console(stderr=True).status(what)
    timer = threading.Timer(WAIT, status.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        status.stop()


class _TrainingBar:
    """Loss, accuracy and gradient norm beside a bar; called after each step of a training."""

    def __init__(self, title: str, wanted: bool) -> None:
        self.title, self.on = title, wanted and _at_terminal()
        self.due, self.progress, self.task = time.monotonic() + WAIT, None, None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.progress is not None:
            self.progress.stop()

    def __call__(self, moment: Moment) -> None:
        values = f"loss {moment.loss:.4f}"
        if moment.accuracy is not None:
            values += f", accuracy {moment.accuracy:.1%}"
        values += f", gradient {moment.gradient:.2e}, epoch {moment.epoch}/{moment.epochs}"
        self.show(moment.step, moment.steps, values)

    def show(self, step: int, steps: int, values: str) -> None:
        """So many steps are done, with these values; now and then, and at the end."""
        now = time.monotonic()
        if now < self.due and not (self.progress and step == steps):
            return
        self.due = now + 0.1
        if self.progress is None:
            self._open(steps)
        assert self.progress is not None
        assert self.task is not None
        self.progress.update(self.task, completed=step, total=steps, values=values)

    def _open(self, steps: int) -> None:
        from rich import progress
        from rich.console import Console
        from rich.markup import escape

        self.progress = progress.Progress(
            progress.TextColumn(escape(self.title)),
            progress.BarColumn(bar_width=None),
            progress.TextColumn("{task.fields[values]}"),
            progress.TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self.task = self.progress.add_task("", total=steps, values="")
        self.progress.start()
