"""The Python cells of a Markdown page, and a program that runs them one after the other.

    python cells.py page.md folder

runs the cells of a page in one namespace, writes what each one prints, the figures that it leaves
open and the moving pictures that it saves into the folder, and a `ran.json` that lists them. An
exception ends the program, with `ran.json` saying where and what it was.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

FENCE = re.compile(r"^(`{3,})python\b[^\n]*\n(.*?)^\1[ \t]*$", re.S | re.M)
# Fences that Markdown shows as Python too, and that would not be run.
OTHERS = re.compile(
    r"^(?!```+python\b)[ \t]*(?:`{3,}|~{3,})[ \t]*[{. \t]*py(?:thon)?3?\b", re.M
)
MOVING = {".gif", ".webp"}
DOTS = 160  # an inch of a figure


@dataclass(frozen=True)
class Cell:
    """One cell: its code, the line of the page on which that begins, and where its fence ends."""

    code: str
    line: int
    end: int


def cells(page: str) -> list[Cell]:
    """The cells of a page, in order."""
    if found := OTHERS.search(page):
        line = page[: found.start()].count("\n") + 1
        raise ValueError(
            f"line {line}: this cell would not be run; begin it by ```python at the margin."
        )
    return [
        Cell(found[2], page[: found.start(2)].count("\n") + 1, found.end())
        for found in FENCE.finditer(page)
    ]


def run(page: Path, folder: Path) -> int:
    """Run all cells of a page; the exit status."""
    work = Path.cwd()
    # Code that is defined in a cell belongs to __main__, as in a notebook.
    space = ModuleType("__main__")
    sys.modules["__main__"] = space
    ran: list[dict[str, object]] = []
    report: dict[str, object] = {"cells": ran}
    status = 0
    for number, cell in enumerate(
        cells(page.read_text(encoding="utf-8")), start=1
    ):
        printed: list[str] = []
        try:
            with _heard(printed):
                # Padded so that lines are counted as in the page.
                exec(
                    compile(
                        "\n" * (cell.line - 1) + cell.code, str(page), "exec"
                    ),
                    vars(space),
                )
            ran.append(
                {
                    "printed": printed[0],
                    "figures": _figures(folder, number)
                    + _moving(work, folder, number),
                }
            )
        except (Exception, SystemExit) as error:
            report["error"] = _told(error, page, number, cell.line)
            traceback.print_exc()
            status = 1
            break
    report["processor"] = sum(
        os.times()[:4]
    )  # that of its own and of the processes it started
    (folder / "ran.json").write_text(json.dumps(report), encoding="utf-8")
    return status


@contextlib.contextmanager
def _heard(printed: list[str]) -> Iterator[None]:
    """Collects what is written to standard output, also by other programs that are started."""
    sys.stdout.flush()
    kept = os.dup(1)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        try:
            yield
        finally:
            sys.stdout.flush()
            os.dup2(kept, 1)
            os.close(kept)
            file.seek(0)
            printed.append(file.read().decode("utf-8", "replace"))


def _figures(folder: Path, number: int) -> list[dict[str, str]]:
    """Write the figures that are open, and close them."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is None:
        return []
    written = []
    for k, shown in enumerate(pyplot.get_fignums(), start=1):
        figure = pyplot.figure(shown)
        name = f"{number}-{k}.png"
        figure.savefig(folder / name, dpi=DOTS, bbox_inches="tight")
        written.append(
            {"file": name, "alt": _alt(figure, f"Figure {k} of cell {number}")}
        )
    pyplot.close("all")
    return written


def _moving(work: Path, folder: Path, number: int) -> list[dict[str, str]]:
    """Move the moving pictures that a cell saved; words of a name are words for them."""
    written = []
    for path in sorted(work.iterdir()):
        if path.suffix in MOVING:
            name = f"{number}-{path.name}"
            shutil.move(path, folder / name)
            words = path.stem.replace("-", " ").capitalize()
            written.append({"file": name, "alt": words})
    return written


def _alt(figure, otherwise: str) -> str:
    titles = [
        figure.get_suptitle(),
        *(axes.get_title() for axes in figure.axes),
    ]
    return (
        "; ".join(dict.fromkeys(title for title in titles if title))
        or otherwise
    )


def _told(error: BaseException, page: Path, number: int, first: int) -> str:
    """Which cell and line failed, and how, in one sentence."""
    line = error.lineno if isinstance(error, SyntaxError) else None
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == str(page):
            line = frame.lineno
            break
    what = (
        "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
    )
    return f"cell {number}, line {line or first}: {what}"


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1]), Path(sys.argv[2])))
