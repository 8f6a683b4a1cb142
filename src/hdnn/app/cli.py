"""The program `hdnn`, of the files in `commands`; mistakes become one sentence and exit code 2."""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Annotated, Any

from hdnn import __version__
from hdnn.app import commands, options, terminal
from hdnn.app.options import typer
from hdnn.base import interrupted, launched
from hdnn.errors import HDNNError

HELP = "Very deep networks whose gradients provably do not vanish."
# Each is a file in `commands`, and imported when it is wanted: a list of all must not take long.
COMMANDS = (
    *("demo", "train", "predict", "certify", "reproduce", "bench", "report", "info", "graph"),
    *("launch", "play"),
)
PASS_ON = ("reproduce", "bench")  # what they do not know
LIGHT = ("bench", "play")  # do no work of their own
EXPLAINED = ()  # by themselves: what they do is in the commands under their names
# Options in which ~ stands for the home folder.
PLACES = {"out", "data", "run", "config", "checkpoint", "folders", "results", "graph", "file"}
PLACES |= {"folder", "links"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 if it worked, 2 if the input was wrong, 130 if it was interrupted."""
    given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if len(given) == 1 and given[0] in EXPLAINED:
        given.append("--help")
    with suppress(AttributeError, ValueError):  # the name of a file may be no valid text
        sys.stdout.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]
    # The base class of typer's errors about flags, from the click that it depends on or bundles.
    wrong_flags: type[Exception] = typer.BadParameter.__mro__[2]  # pyright: ignore[reportAssignmentType]
    with warnings.catch_warnings():
        if launched.is_first():
            warnings.showwarning = lambda message, *_: terminal.say(f"warning: {message}")
        else:
            warnings.showwarning = lambda *_: None
        try:
            code = program().main(given, "hdnn", standalone_mode=False)
            _flush()
        except wrong_flags as error:
            if given[0] == "train":
                launched.speak_as_one()
            context = getattr(error, "ctx", None)
            hint = f"see {context.command_path} --help" if context else "see hdnn --help"
            message = error.format_message().strip()  # pyright: ignore[reportAttributeAccessIssue]
            said = f"{message.rstrip('.')}; {hint}." if message[-1:] != "?" else message
            return terminal.fail(said)
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            return _explained(error)
    return code or 0


def _import_all() -> None:
    """Import what commands work with, before Ctrl-C may interrupt them in between."""
    from hdnn.app.tasks import kinds as kinds


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


def program() -> Any:
    """The program, of all commands."""
    app = typer.Typer(
        cls=_group(),
        epilog=_examples("hdnn demo", "hdnn train --data swiss_roll --network h2 --layers 64"),
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(help=HELP)(_program)
    found: Any = typer.main.get_command(app)
    found.commands = Commands.fromkeys(COMMANDS)
    return found


class Commands(dict[str, Any]):
    """Commands by their names, made when they are first asked for."""

    def __getitem__(self, name: str) -> Any:
        if super().__getitem__(name) is None:
            self[name] = _command(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default


def _group() -> Any:
    """The class of the program, which lists its commands without importing them."""

    from typer import core

    class Program(core.TyperGroup):
        listing = False

        def format_help(self, ctx: Any, formatter: Any) -> None:
            self.listing = True
            super().format_help(ctx, formatter)
            self.listing = False

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            if self.listing:
                return core.TyperCommand(cmd_name, help=_about(cmd_name))
            return super().get_command(ctx, cmd_name)

    return Program


def _about(name: str) -> str:
    """What a command says of itself, read from its file."""
    found: Any = importlib.util.find_spec(f"{commands.__name__}.{name}")
    for node in ast.parse(found.loader.get_source(found.name)).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return ast.get_docstring(node) or ""
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "HELP":
            return ast.literal_eval(node.value)
    raise AssertionError(f"the command {name} says nothing of itself")


def _command(name: str) -> Any:
    """A command, with the examples in its file under its help.

    Where its module names configs, their fields are its options.
    """
    module = __import__(f"{commands.__name__}.{name}", fromlist=[name])
    plain: dict[str, Any] = {"add_completion": False, "pretty_exceptions_enable": False}
    if hasattr(module, "EXAMPLES_OF"):  # several commands under one name
        about = {"help": module.HELP, "epilog": _examples(*module.EXAMPLES)}
        app = typer.Typer(name=name, **about, **plain, no_args_is_help=False)
        for function, examples in module.EXAMPLES_OF.items():
            command = _guarded(function)
            if function in (configs := getattr(module, "CONFIGS_OF", {})):
                fields = options.with_fields(function, *configs[function])
                command.__signature__ = fields  # pyright: ignore
            app.command(epilog=_examples(*examples))(command)
        return typer.main.get_group(app)
    app = typer.Typer(**plain)
    command = _guarded(getattr(module, name))
    if hasattr(module, "CONFIGS"):
        command.__signature__ = options.signature(*module.CONFIGS)  # pyright: ignore
    passes_on = {"allow_extra_args": True, "ignore_unknown_options": True}
    settings = passes_on if name in PASS_ON else {}
    app.command(name, epilog=_examples(*module.EXAMPLES), context_settings=settings)(command)
    return typer.main.get_command(app)


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
            if function.__name__ not in LIGHT:
                _import_all()
            interrupted.imported()
            for name in given.keys() & PLACES:
                given[name] = terminal.at_home(given[name])
            code = function(*args, **given) or 0
            _flush()
            return code
        except (Exception, KeyboardInterrupt) as error:
            return _explained(error)

    return command
