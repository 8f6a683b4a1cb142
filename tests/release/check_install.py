"""Install a wheel in an empty environment, use it there, and check its types.

    python tests/release/check_install.py dist/hdnn-*.whl

`make release-check` builds the wheel first. pip must find torch and NumPy.
"""

# ruff: noqa: T201

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import installed


def main() -> None:
    wheel = Path(sys.argv[1]).resolve()
    begin = time.perf_counter()

    def say(what: str) -> None:
        print(f"{time.perf_counter() - begin:5.0f} s  {what}", flush=True)

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        python = installed.by_pip(folder / "environment", wheel)
        say(f"{wheel.name} is installed in an empty environment")
        print(installed.use(python, folder), end="")
        say("the program of a user runs there")
        for extra, said in installed.ask_for_extras(python, folder).items():
            print(f"{extra}: {said}")
        say("parts whose extra is missing say so")
        program = installed.copied(folder)
        installed.check_by_pyright(python, program)
        installed.check_by_mypy(python, program)
        say("pyright and mypy find no fault in that program")


if __name__ == "__main__":
    main()
