"""`hdnn bench`: the benchmarks of the source tree."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import hdnn
from hdnn.app.options import argument, typer
from hdnn.errors import OptionError, choose

EXAMPLES = (
    "hdnn bench",
    "hdnn bench engine -- --help",
)


def bench(
    context: typer.Context,
    name: Annotated[str | None, argument("one of the benchmarks; without it, list them")] = None,
) -> int:
    """Run a benchmark of the source tree; what follows -- goes to it."""
    folder = Path(hdnn.__file__).parents[2] / "benchmarks"
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
