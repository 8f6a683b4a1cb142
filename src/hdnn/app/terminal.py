"""What all commands share: text, JSON and errors for a terminal or a pipe."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sys
import textwrap
from contextlib import suppress
from pathlib import Path
from typing import Any

from hdnn.base import launched
from hdnn.base.files import finite
from hdnn.errors import CheckpointError, readable

LONGEST = 700  # characters of a message


class StoppedError(Exception):
    """A training ended before its time, with this exit code; the message says how to go on."""

    def __init__(self, message: str, code: int = 130) -> None:
        super().__init__(message)
        self.code = code


def fail(message: object, code: int = 2) -> int:
    if launched.is_as_one():
        from hdnn.training.processes import torchrun

        torchrun.last_word(message, say)
    else:
        say(message)
    return code


def say(message: object) -> None:
    """Print one line on stderr, wrapped to the width of a terminal."""
    text = readable(f"hdnn: {' '.join(str(message).split())}")
    if len(text) > LONGEST:  # the cause is mostly at the end
        text = f"{text[: LONGEST // 2]} .. {text[-LONGEST // 2 :]}"
    with suppress(OSError, AttributeError, ValueError):  # there may be no stderr
        if at_terminal():
            text = textwrap.fill(text, columns() or LONGEST, break_on_hyphens=False)
        print(text, file=sys.stderr, flush=True)


def say_notes(notes: list[str], said: set[str] | None = None) -> None:
    """Print notes on stderr, a line each, but for those that were said before."""
    for note in notes:
        if said is None or note not in said:
            say(f"note: {note}")
    if said is not None:
        said |= {*notes}


def fail_on_file(error: OSError) -> int:
    """Report an error of a file or of the output; return the exit code."""
    forget_output()
    if isinstance(error, BrokenPipeError):  # the reader of the pipe has closed it
        return 0
    if error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return fail(f"cannot write the output: {error.strerror}; make room, or send it elsewhere.")
    name = f" {error.filename}" if error.filename else ""
    return fail(f"cannot go on with the file{name}: {error.strerror or error}.")


def forget_output() -> None:
    """Drop what is still buffered: Python would complain about it when it ends."""
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def json_text(result: Any) -> str:
    """A result as JSON, with null for numbers that are not finite."""
    return json.dumps(finite(result), indent=2)


def print_text(text: object) -> None:
    """Print text for people, wrapped to the width of a terminal, with its columns kept."""
    width = columns()
    lines = str(text).splitlines()
    print("\n".join(lines if width is None else (fitted(line, width) for line in lines)))


def columns() -> int | None:
    """The width of the terminal; None where the output is not one."""
    at_terminal = getattr(sys.stdout, "isatty", lambda: False)
    if not ("COLUMNS" in os.environ or at_terminal()):
        return None
    return max(shutil.get_terminal_size().columns, 20)


def fitted(line: str, width: int) -> str:
    """A line wrapped to this width, its further lines indented to the column of its value."""
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


def rows_text(rows: list[tuple[str, str]]) -> str:
    """Names and their values in two columns."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}".rstrip() for name, value in rows)


def at_terminal() -> bool:
    """Whether a person sees what is printed on stderr."""
    return sys.stderr is not None and sys.stderr.isatty()


def new_file(out: str, overwrite: bool) -> Path:
    """The path of a file to write, which must not exist unless it may be replaced."""
    path = Path(out)
    if os.path.isdir(path):
        raise CheckpointError(f"{path} is a folder; name a file in it with --out.")
    if os.path.lexists(path) and not overwrite:
        raise CheckpointError(f"{path} exists already; name another file, or say --overwrite.")
    if not os.path.isdir(path.parent):
        raise CheckpointError(f"there is no folder {path.parent} to write {path.name} to.")
    return path


def at_home(place: Any) -> Any:
    """A path, or several, with ~ replaced by the home folder."""
    if isinstance(place, list):
        return [at_home(one) for one in place]
    return os.path.expanduser(place) if isinstance(place, str) else place
