"""The commands of `hdnn` and their options.

Commands import what they need when they run, so that the help is there at once.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from inspect import Parameter, Signature
from typing import Annotated, Any

import typer
from typer import Argument, Option

from hdnn import __version__
from hdnn.app.config import (
    GraphConfig,
    ImageConfig,
    LaunchOptions,
    RunOptions,
    TableConfig,
    all_options,
)
from hdnn.errors import CheckpointError, choose

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

# The base class of errors about options, of the click that typer needs or brings.
WRONG_OPTION: type[Exception] = typer.BadParameter.__mro__[2]  # pyright: ignore[reportAssignmentType]

JsonFlag = Annotated[bool, Option("--json", help="print one JSON object")]
OverwriteFlag = Annotated[bool, Option("--overwrite", help="replace the file")]

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
    },
)


def show(result: dict[str, Any], text: str, as_json: bool) -> None:
    """Print a result for programs or for people."""
    if as_json:
        content = json.dumps(result)
        finite = json.loads(content, parse_constant=lambda _: None)  # no NaN
        text = json.dumps(finite, indent=1)
    sys.stdout.write(text.rstrip("\n") + "\n")


def command(
    *examples: str, configs: Sequence[type] = (), passes_on: bool = False
) -> Any:
    """A command with examples; the fields of `configs` become its options."""

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


def signature(configs: Sequence[type]) -> Signature:
    """An option for each field of dataclasses; None or False if it is not given."""
    parameters = []
    for name, (annotation, about) in all_options(*configs).items():
        flag = Option(f"--{name.replace('_', '-')}", help=about)
        default = None
        if annotation is bool:
            default = False
        else:
            annotation = annotation | None
        kind = Annotated[annotation, flag]
        parameter = Parameter(
            name, Parameter.KEYWORD_ONLY, default=default, annotation=kind
        )
        parameters.append(parameter)
    return Signature(parameters)


def chosen(options: dict[str, Any]) -> dict[str, Any]:
    """The options that were given; a 0 is one of them."""
    return {
        k: v
        for k, v in options.items()
        if v not in (None, []) and v is not False
    }


@app.callback()
def program(
    version: Annotated[
        bool, Option("--version", help="print the version", is_eager=True)
    ] = False,
) -> None:
    """Very deep networks whose gradients provably do not vanish."""
    if version:
        print(f"hdnn {__version__}")
        raise typer.Exit


@command("demo", "demo --layers 128 --seed 3")
def demo(
    layers: Annotated[int, Option(help="number of layers")] = 64,
    epochs: Annotated[
        int | None, Option(help="passes over the data (default: 50)")
    ] = None,
    seed: Annotated[int, Option(help="of weights and order of the data")] = 0,
    out: Annotated[str, Option(help="folder to write to")] = "runs/demo",
    as_json: JsonFlag = False,
) -> None:
    """Train a deep H2 on the Swiss roll; print its accuracy and gradient norms."""
    from hdnn.app import train
    from hdnn.app.scores import lines

    options = {"layers": layers, "epochs": epochs, "seed": seed, "out": out}
    values = {"data": "swiss_roll", "overwrite": True, **chosen(options)}
    [(config, run)] = train.plan(values)
    result = train.train(config, run, {"overwrite": True, "quiet": as_json})
    certificate = result["certificate"]
    norms = {
        "smallest_bsm_norm": certificate["smallest_norm"],
        "largest_bsm_norm": certificate["largest_norm"],
        "symplectic_defect": certificate["symplectic_defect"],
    }
    shown = {k.replace("_", " "): f"{v:.6g}" for k, v in norms.items()}
    pictures = [os.path.join(out, name) for name in result["pictures"]]
    shown["pictures"] = ", ".join(pictures)
    text = f"{train.text(result)}\n{lines(shown)}"
    show({**result, **norms}, text, as_json)


@command(
    "train --data swiss_roll --network h2 --layers 64",
    "train --data iris.csv --target species --seeds 5",
    "train --data mnist --network h1 --layers 8",
    "train --resume --out runs/swiss_roll-h2-64-0",
    configs=(TableConfig, ImageConfig, RunOptions),
)
def train(**options: Any) -> None:
    """Train a network on a data set or a table; keep everything in a folder of its own."""
    from hdnn.app import train

    values = chosen(options)
    if "graph" in values:
        from hdnn.app import graph

        results = [graph.join(values)]
    else:
        results = []
        for config, run in train.plan(values):
            results.append(train.train(config, run, values))
    result = train.summary(results)
    if result:  # of several processes, the first one has it
        show(result, train.text(result), "json" in values)


@command(
    "launch --nodes 8 --data swiss_roll --layers 4",
    "launch --graph plant.toml",
    "launch --graph plant.toml --data log.csv --target fault",
    configs=(LaunchOptions, GraphConfig),
)
def launch(**options: Any) -> None:
    """Train on a graph by processes that talk to neighbours only; or say what a graph needs."""
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
    "predict --run runs/iris-species-h2-16-0 --data new.csv --out answers.csv",
    "predict --run runs/mnist-h1-8-0 --data mnist",
)
def predict(
    run: Annotated[
        str,
        Option(help="folder of a run, or of the runs of --seeds: their mean"),
    ],
    data: Annotated[
        str,
        Option(help="a file with the same columns, or the name of a data set"),
    ],
    out: Annotated[
        str | None, Option(help="CSV file to write (default: print it)")
    ] = None,
    proba: Annotated[
        bool, Option("--proba", help="probability of each class")
    ] = False,
    overwrite: OverwriteFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Predict the target of each row of a table, or test image, as CSV in their order."""
    from hdnn.app import predict

    file = None if out is None else new_file(out, overwrite)
    result = predict.run(run, data, proba=proba)
    csv = predict.csv_text(result)
    if file is not None:
        from hdnn.io import write_atomically

        write_atomically(file, csv)
        result = {**predict.summary(result), "out": out}
        show(result, predict.text(result), as_json)
    else:
        show(result, csv, as_json)


@command(
    "certify runs/swiss_roll-h2-64-0",
    "certify model.safetensors --data double_moons",
)
def certify(
    run: Annotated[str, Argument(help="folder of a run, or a saved model")],
    data: Annotated[
        str | None, Option(help="points to look at (default: test points)")
    ] = None,
    samples: Annotated[int, Option(help="the most points")] = 1000,
    as_json: JsonFlag = False,
) -> int:
    """Measure the gradient norms of a trained network; exit code 1 if a guarantee is not seen."""
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
    """Run an experiment of the paper; other options go to it."""
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
    """Make one HTML page of runs: tables, curves, certificates; it needs no network."""
    from hdnn.app import report
    from hdnn.io import write_atomically

    own = report.is_report(out)
    file = new_file(out, overwrite or own)
    page, count = report.page(folders or ["runs"])
    write_atomically(file, page)
    print(f"{count} {'run' if count == 1 else 'runs'} in {file}")


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
    """Open a page where an H2 and a perceptron learn side by side; it needs no network."""
    from hdnn.app import play

    if out is None:
        play.serve(port, browser=not no_browser)
    else:
        from hdnn.io import write_atomically

        write_atomically(new_file(out, overwrite), play.page())
        print(out)


@command("info", "info --json")
def info(as_json: JsonFlag = False) -> None:
    """Show versions, devices, extras and data: what is here and what is missing."""
    from hdnn.app import info

    result = info.about()
    show(result, info.text(result), as_json)


def new_file(out: str, overwrite: bool) -> str:
    """The path of a file that may be written."""
    if os.path.isdir(out) or (os.path.lexists(out) and not overwrite):
        raise CheckpointError(
            f"{out} exists; choose another name, or replace the file (--overwrite)."
        )
    return out
