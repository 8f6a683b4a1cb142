"""The commands of `hdnn` and their options.

Commands import what they need when they run, so the help appears at once.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from hdnn import __version__
from hdnn.app.config import (
    RARE,
    GraphConfig,
    ImageConfig,
    LaunchOptions,
    RunOptions,
    TableConfig,
    all_options,
)
from hdnn.errors import CheckpointError, OptionError, choose
from hdnn.experiments import NAMES as EXPERIMENTS

METAVARS = {
    "int | None": "N",
    "float | None": "X",
    "list[str]": "A,B",
    "<class 'int'>": "N",
    "<class 'float'>": "X",
}
TUTORIAL = "docs/tutorials/first-network.md"

# The base class of errors about options, from the click that typer uses.
WRONG_OPTION: type[Exception] = typer.BadParameter.__mro__[2]  # pyright: ignore[reportAssignmentType]

JsonFlag = Annotated[bool, Option("--json", help="print one JSON object")]
OverwriteFlag = Annotated[bool, Option("--overwrite", help="replace the file")]

app = typer.Typer(
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
    },
)


def show(result: dict[str, Any], text: str, as_json: bool) -> None:
    """Print a result as JSON or as text."""
    if as_json:
        content = json.dumps(result)
        finite = json.loads(content, parse_constant=lambda _: None)  # no NaN
        text = json.dumps(finite, indent=1)
    sys.stdout.write(text.rstrip("\n") + "\n")


def command(
    *examples: str, configs: Sequence[type] = (), passes_on: bool = False
) -> Any:
    """Make a command with examples; the fields of `configs` become its options."""

    def register(function: Any) -> Any:
        if configs:
            function.__signature__ = signature(configs)
        settings = {
            "allow_extra_args": passes_on,
            "ignore_unknown_options": passes_on,
        }
        shown = [f"  hdnn {example}" for example in examples]
        epilog = "\n".join(["\b", "Examples:", *shown])
        return app.command(epilog=epilog, context_settings=settings)(function)

    return register


def show_all_options(context: typer.Context, value: bool) -> None:
    """Print the help, including rare options."""
    if value:
        for parameter in context.command.params:
            parameter.hidden = False  # pyright: ignore[reportAttributeAccessIssue]
        print(context.get_help())
        raise typer.Exit


def signature(configs: Sequence[type]) -> Signature:
    """A signature with an option for each field of dataclasses; None or False if left out."""
    everything = Option(
        "--help-all",
        help="Show the rare options too, and exit.",
        is_eager=True,
        callback=show_all_options,
    )
    options: dict[str, Any] = {"help_all": Annotated[bool, everything]}
    for name, (annotation, about) in all_options(*configs).items():
        texts: dict[str, Any] = {"help": about, "hidden": name in RARE}
        if annotation is not bool:
            texts["metavar"] = METAVARS.get(str(annotation), "TEXT")
            annotation = annotation | None
        option = Option(f"--{name.replace('_', '-')}", **texts)
        options[name] = Annotated[annotation, option]
    parameters = []
    for name, kind in options.items():
        default = False if kind.__origin__ is bool else None
        parameter = Parameter(
            name, Parameter.KEYWORD_ONLY, default=default, annotation=kind
        )
        parameters.append(parameter)
    return Signature(parameters)


def chosen(options: dict[str, Any]) -> dict[str, Any]:
    """The options that were used, even with the value 0; lists such as a,b are split."""
    values = {}
    for name, value in options.items():
        if isinstance(value, list):
            value = ",".join(value).split(",") if value else None
        if value is not None and value is not False:
            values[name] = value
    return values


@app.callback(invoke_without_command=True)
def program(
    context: typer.Context,
    version: Annotated[
        bool, Option("--version", help="Print the version and exit.")
    ] = False,
) -> None:
    """Very deep networks whose gradients provably do not vanish."""
    if version:
        print(f"hdnn {__version__}")
    elif context.invoked_subcommand is None:
        print(f"{context.command.help}\n\n{next_steps()}")


def next_steps() -> str:
    """Show what to do next, for new users."""
    steps = {
        "hdnn play": "watch two networks learn side by side in your browser",
        "hdnn train --data FILE.csv --target COLUMN": "train on your own table",
        "hdnn --help": "see all commands",
    }
    if Path(TUTORIAL).is_file():
        steps[TUTORIAL] = "read the tutorial"
    else:
        steps["python -c 'help(\"hdnn\")'"] = "read about the library"
    lines = [f"  {step:<44} {purpose}" for step, purpose in steps.items()]
    return "\n".join(["What to do next:", *lines])


@command("demo", "demo --layers 128 --seed 3")
def demo(
    layers: Annotated[int, Option(help="number of layers")] = 64,
    epochs: Annotated[
        int | None, Option(help="passes over the data (default: 50)")
    ] = None,
    seed: Annotated[
        int, Option(help="seed of the weights and the order of the data")
    ] = 0,
    out: Annotated[str, Option(help="folder to write to")] = "runs/demo",
    as_json: JsonFlag = False,
) -> None:
    """Train a 64-layer H2 and a perceptron, and draw both."""
    from hdnn.app import demo

    options = {"layers": layers, "epochs": epochs, "seed": seed, "out": out}
    result = demo.run(chosen(options), quiet=as_json)
    show(result, f"{demo.text(result)}\n\n{next_steps()}", as_json)


@command(
    "train --data swiss_roll --network h2 --layers 64",
    "train --data iris.csv --target species --seeds 5",
    "train --data mnist --network h1 --layers 8",
    "train --resume --out runs/swiss_roll-h2-64-0",
    configs=(TableConfig, ImageConfig, RunOptions),
)
def train(**options: Any) -> None:
    """Train on a data set or a table. Model, scores and pictures are written to a folder."""
    from hdnn.app import train

    values = chosen(options)
    if "graph" in values:
        from hdnn.app import graph

        results = [graph.join(values)]
    else:
        results = []
        for config, run in train.plan(values):
            if run.complete and "resume" in values:
                results.append(run.metrics())
                continue
            job = train.JOBS[type(config)](config)
            results.append(train.train(job, run, values))
    result = train.summary(results)
    if result:  # among several processes, only the first has a result
        show(result, train.text(result), "json" in values)


@command(
    "launch --nodes 8 --data swiss_roll --layers 4",
    "launch --graph plant.toml",
    "launch --graph plant.toml --data log.csv --target fault",
    configs=(LaunchOptions, GraphConfig),
)
def launch(**options: Any) -> None:
    """Train on a graph of processes that talk only to neighbours. Without data, check the graph."""
    from hdnn.app import graph, scores, train

    values = chosen(options)
    if "graph" in values and "data" not in values and "resume" not in values:
        result = graph.needs(values["graph"])
        text = scores.lines(result)
    else:
        result = graph.launch(values)
        text = train.text(result)
    show(result, text, "json" in values)


@command(
    "predict runs/iris-species-h2-16-0 new.csv --out answers.csv",
    "predict runs/mnist-h1-8-0 mnist",
)
def predict(
    run: Annotated[
        str | None,
        Argument(
            metavar="RUN",
            help="folder of a run",
        ),
    ] = None,
    file: Annotated[
        str | None,
        Argument(
            metavar="FILE", help="a table with the same columns, or a data set"
        ),
    ] = None,
    run_option: Annotated[str | None, Option("--run", hidden=True)] = None,
    data: Annotated[str | None, Option("--data", hidden=True)] = None,
    out: Annotated[
        str | None, Option(help="CSV file to write (default: print it)")
    ] = None,
    proba: Annotated[
        bool, Option("--proba", help="probability of each class")
    ] = False,
    overwrite: OverwriteFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Predict each row of a table, or each test image, as CSV."""
    from hdnn.app import predict

    folder = run or run_option
    rows = file or data
    if folder is None or rows is None:
        raise OptionError(
            "predict needs a run and a file: hdnn predict RUN FILE.csv."
        )
    check_free(out, overwrite)
    result = predict.predict(folder, rows, proba=proba)
    text = predict.csv_text(result)
    if out is not None:
        from hdnn.io import write_atomically

        write_atomically(out, text)
        result = {**predict.summary(result), "out": out}
        text = predict.text(result)
    show(result, text, as_json)


@command(
    "certify runs/swiss_roll-h2-64-0",
    "certify model.safetensors --data double_moons",
)
def certify(
    run: Annotated[
        str, Argument(metavar="RUN", help="folder of a run, or a saved model")
    ],
    data: Annotated[
        str | None, Option(help="points to measure at (default: test points)")
    ] = None,
    samples: Annotated[int, Option(help="use at most this many points")] = 20,
    as_json: JsonFlag = False,
) -> int:
    """Measure the gradients of a trained network. Exit code 1: a guarantee was not confirmed."""
    from hdnn.app import predict

    certificate = predict.certify(run, data, samples=samples)
    show({"run": run, **certificate.to_dict()}, str(certificate), as_json)
    return 1 if certificate.guaranteed and certificate.status != "holds" else 0


@command(
    "reproduce table-planar",
    "reproduce fig-exploding --out results",
    passes_on=True,
)
def reproduce(
    context: typer.Context,
    name: Annotated[
        str, Argument(help=f"all, or one of {', '.join(EXPERIMENTS)}")
    ],
    out: Annotated[
        str, Option(help="folder for the results")
    ] = "runs/reproduced",
) -> int:
    """Run an experiment of the paper. All other options are passed to the experiment."""
    from hdnn import experiments

    names: Sequence[str] = EXPERIMENTS
    if name != "all":
        names = [choose("experiment", name, EXPERIMENTS)]
    options = ["--out", out, *context.args]
    return max(experiments.main(each, options) for each in names)


@command(
    "report",
    "report runs/iris-species-h2-16-0 runs/iris-species-mlp-16-0 --out iris.html",
)
def report(
    folders: Annotated[
        list[str] | None, Argument(help="runs, or folders of runs")
    ] = None,
    out: Annotated[str, Option(help="HTML file to write")] = "report.html",
    overwrite: OverwriteFlag = False,
) -> None:
    """Make one HTML page about runs, which can be read offline."""
    from hdnn.app import report
    from hdnn.io import write_atomically

    check_free(out, overwrite or report.is_report(out))
    page, count = report.page(folders or ["runs"])
    write_atomically(out, page)
    print(f"{count} {'run' if count == 1 else 'runs'} in {out}")


@command("play", "play --port 8080 --no-browser", "play --out playground.html")
def play(
    port: Annotated[
        int, Option(help="port to serve the page on (default: a free one)")
    ] = 0,
    no_browser: Annotated[
        bool, Option("--no-browser", help="only print the address")
    ] = False,
    out: Annotated[
        str | None, Option(help="write the page to this file instead")
    ] = None,
    overwrite: OverwriteFlag = False,
) -> None:
    """Watch two networks learn side by side in a browser. It works offline."""
    from hdnn.app import play

    check_free(out, overwrite)
    if out is None:
        play.serve(port, browser=not no_browser)
    else:
        from hdnn.io import write_atomically

        write_atomically(out, play.page())
        print(out)


@command("info", "info --json")
def info(as_json: JsonFlag = False) -> None:
    """Show what is installed, and what is missing."""
    from hdnn.app import info

    result = info.about()
    show(result, info.text(result), as_json)


def check_free(out: str | None, overwrite: bool) -> None:
    """Refuse to overwrite a file unless asked to."""
    if out is None:
        return
    if os.path.isdir(out) or (os.path.lexists(out) and not overwrite):
        raise CheckpointError(
            f"{out} already exists; choose another name, or replace the file (--overwrite)."
        )
