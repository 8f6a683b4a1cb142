"""The program `hdnn`, of the files in `commands`; mistakes become one sentence and exit code 2."""

from __future__ import annotations

import functools
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Annotated, Any

from hdnn import __version__
from hdnn.app import options, terminal
from hdnn.app.commands import (
    bench,
    certify,
    demo,
    graph,
    info,
    launch,
    predict,
    report,
    reproduce,
    train,
)
from hdnn.app.options import typer
from hdnn.errors import HDNNError
from hdnn.training.processes import torchrun

HELP = "Very deep networks whose gradients provably do not vanish."
# Options in which ~ stands for the home folder.
PLACES = {"out", "data", "run", "config", "checkpoint", "folders", "results", "graph", "file"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 if it worked, 2 if the input was wrong, 130 if it was interrupted."""
    given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    with suppress(AttributeError, ValueError):  # the name of a file may be no valid text
        sys.stdout.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]
    # The base class of typer's errors about flags, from the click that it depends on or bundles.
    wrong_flags: type[Exception] = typer.BadParameter.__mro__[2]  # pyright: ignore[reportAssignmentType]
    with warnings.catch_warnings():
        if torchrun.is_first():
            warnings.showwarning = lambda message, *_: terminal.say(f"warning: {message}")
        else:
            warnings.showwarning = lambda *_: None
        try:
            code = typer.main.get_command(_app()).main(given, "hdnn", standalone_mode=False)
            _flush()
        except wrong_flags as error:
            if given[0] == "train":
                torchrun.speak_as_one()
            context = getattr(error, "ctx", None)
            hint = f"see {context.command_path} --help" if context else "see hdnn --help"
            message = error.format_message().strip()  # pyright: ignore[reportAttributeAccessIssue]
            said = f"{message.rstrip('.')}; {hint}." if message[-1:] != "?" else message
            return terminal.fail(said)
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            return _explained(error)
    return code or 0


def _flush() -> None:
    if sys.stdout is not None:
        sys.stdout.flush()


def _explained(error: BaseException) -> int:
    """Tell in one sentence why a command failed; the exit code."""
    # rich raises SystemExit when the reader of the pipe is gone.
    if isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError):
        error = error.__context__
    if isinstance(error, HDNNError):
        return terminal.fail(error)
    if isinstance(error, terminal.StoppedError):
        return terminal.fail(error, error.code)
    if isinstance(error, (KeyboardInterrupt, typer.Abort)):
        return terminal.fail("interrupted", 130)
    if isinstance(error, OSError):
        return terminal.fail_on_file(error)
    if os.environ.get("HDNN_TRACEBACK") or isinstance(error, SystemExit):
        raise error
    if isinstance(error, MemoryError) or re.search("allocate memory|out of memory", str(error)):
        return terminal.fail("there is not enough memory; take fewer layers, features or rows.")
    return terminal.fail(
        f"a mistake in hdnn itself, {type(error).__name__}: {error} (please report it; with "
        "HDNN_TRACEBACK=1 it shows where).",
        1,
    )


def _app() -> typer.Typer:
    """The program, of all commands."""
    app = typer.Typer(
        epilog=_examples("hdnn demo", "hdnn train --data swiss_roll --network h2 --layers 64"),
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(help=HELP)(_program)
    _add(app, demo, "demo")
    _add(app, train, "train")
    _add(app, predict, "predict")
    _add(app, certify, "certify")
    _add(app, reproduce, "reproduce", passes_on=True)
    _add(app, bench, "bench", passes_on=True)
    _add(app, report, "report")
    _add(app, info, "info")
    group = typer.Typer(help=graph.HELP, epilog=_examples(*graph.EXAMPLES), no_args_is_help=False)
    for function in (graph.check, graph.design, graph.draw):
        examples = _examples(*graph.EXAMPLES_OF[function])
        group.command(epilog=examples)(_guarded(function))
    app.add_typer(group, name="graph")
    _add(app, launch, "launch")
    return app


def _add(app: typer.Typer, module: ModuleType, name: str, *, passes_on: bool = False) -> None:
    """Make the function of that name a command, with the examples beside it under its help.

    Where its module names configs, their fields are its options.
    """
    settings = {"allow_extra_args": True, "ignore_unknown_options": True} if passes_on else {}
    command = _guarded(getattr(module, name))
    if hasattr(module, "CONFIGS"):
        command.__signature__ = options.signature(*module.CONFIGS)  # pyright: ignore
    app.command(epilog=_examples(*module.EXAMPLES), context_settings=settings)(command)


def _examples(*examples: str) -> str:
    return "\n\n".join(["examples:", *examples])


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


def _guarded(function: Callable[..., int | None]) -> Callable[..., int]:
    """The same command with an exit code, however it ends, and with ~ for the home folder.

    Typer must not see what a command raises: it has answers of its own to some of it.
    """

    @functools.wraps(function)
    def command(*args: Any, **given: Any) -> int:
        try:
            for name in given.keys() & PLACES:
                given[name] = terminal.at_home(given[name])
            code = function(*args, **given) or 0
            _flush()
            return code
        except (Exception, KeyboardInterrupt) as error:
            return _explained(error)

    return command
