"""`hdnn report`: one page of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from hdnn.app import progress, terminal
from hdnn.app.options import argument, option, overwrite_flag
from hdnn.base.files import write_atomically

EXAMPLES = (
    "hdnn report",
    "hdnn report runs/iris-species-h2-16-0 runs/iris-species-mlp-16-0 --out iris.html",
)


def report(
    folders: Annotated[
        list[str] | None, argument("runs, or folders of runs (default: runs)")
    ] = None,
    out: Annotated[str, option("HTML file to write")] = "report.html",
    results: Annotated[
        str, option("folder with what was reproduced of the paper, if it is there")
    ] = "docs/results",
    overwrite: Annotated[bool, overwrite_flag()] = False,
) -> None:
    """Make one HTML page of runs: tables, curves, certificates; it needs no network."""
    from hdnn.app.report import faults, find_runs, page

    path = terminal.new_file(out, overwrite)
    with progress.waiting("reading runs"):
        found = find_runs(folders or ["runs"])
        text = page(found, Path(results))
    write_atomically(path, text.encode("utf-8", errors="replace"))
    for fault in faults(found):
        terminal.say(fault)
    terminal.print_text(f"{len(found)} run{'s' * (len(found) != 1)} in {path}")
