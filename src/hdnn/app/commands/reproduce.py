"""`hdnn reproduce`: the experiments of the paper."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Annotated

from hdnn import __version__
from hdnn.app import terminal
from hdnn.app.options import argument, option, typer
from hdnn.errors import HDNNError, OptionError, choose

EXAMPLES = (
    "hdnn reproduce table-planar",
    "hdnn reproduce table-planar --out results -- --seeds 3",
)
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


def reproduce(
    context: typer.Context,
    name: Annotated[str, argument(f"all, or one of {', '.join(EXPERIMENTS)}")],
    out: Annotated[
        str | None,
        option(
            "folder for the results, where old ones are replaced (default: runs/reproduced, where "
            "they are not)"
        ),
    ] = None,
) -> int:
    """Run an experiment of the paper; what follows -- goes to it."""
    given = [*([] if out is None else ["--out", out]), *context.args]
    names = EXPERIMENTS if name == "all" else [choose("experiment", name, (*EXPERIMENTS, "all"))]
    there = [n for n in names if _experiment(n)]
    if not there:
        raise OptionError(f"{name} is not there yet in hdnn {__version__}.")
    worst = 0
    for found in there:
        if len(names) > 1:
            terminal.say(f"reproducing {found}")
        experiment = importlib.import_module(_experiment(found))
        try:
            code = experiment.main(given)
        except HDNNError as error:  # others may still do
            code = terminal.fail(error)
        except SystemExit as error:  # it has shown its help
            code = error.code if isinstance(error.code, int) else 2 * bool(error.code)
        worst = max(worst, code or 0)
    return worst


def _experiment(name: str) -> str:
    """The module of an experiment, or nothing where it is not there yet."""
    module = f"hdnn.experiments.{name.replace('-', '_')}"
    try:
        return module if importlib.util.find_spec(module) else ""
    except ModuleNotFoundError:
        return ""
