"""An environment that holds the built wheel and what it depends on, and what must work there.

There are two ways to make one. `by_pip` starts from nothing and installs as users do, which needs a
package index and about a minute. `by_links` links the dependencies of this environment into a new
one, which needs neither: no extra is there, and so nothing that the wheel forgot to ask for.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("user_program.py")
CORE = ("torch", "numpy", "safetensors")

# What users may type who have not installed an extra yet.
WITHOUT_EXTRAS = {
    "cli": ["-m", "hdnn", "train", "--data", "swiss_roll"],
    "sklearn": ["-c", "import hdnn; hdnn.HDNNClassifier()"],
    "plot": ["-c", "import hdnn; hdnn.analysis.certify(hdnn.H2(4, 2)).plot()"],
}


def by_pip(folder: Path, wheel: Path) -> Path:
    """Install torch by its pin and then the wheel, as `make` does; the Python of the result."""
    venv.create(folder, with_pip=True)
    python = python_of(folder)
    install = [
        python,
        "-m",
        "pip",
        "install",
        "-q",
        "-c",
        ROOT / "constraints.txt",
    ]
    run(*install, "torch")
    run(*install, wheel)
    run(python, "-m", "pip", "check")
    return python


def by_links(folder: Path, wheel: Path) -> Path:
    """Link what the wheel depends on from this environment; the Python of the result."""
    venv.create(folder, with_pip=False)
    python = python_of(folder)
    (site,) = (folder / "lib").glob("python*/site-packages")
    for name in dependencies(*CORE):
        for file in metadata.files(name) or ():
            top, here = (
                file.parts[0],
                Path(str(metadata.distribution(name).locate_file(""))),
            )
            if top not in ("..", "__pycache__") and not (site / top).exists():
                (site / top).symlink_to((here / top).resolve())
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "-q",
        "--no-index",
        wheel,
    )
    return python


def dependencies(*names: str) -> set[str]:
    """These distributions and all that they need here, without extras."""
    found: set[str] = set()
    left = [*names]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            needed = map(Requirement, metadata.requires(name) or ())
            left += [
                one.name
                for one in needed
                if not one.marker or one.marker.evaluate()
            ]
    return found


def python_of(folder: Path) -> Path:
    return folder / "bin" / "python"


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """What a command prints; an error with all that it said where it fails."""
    ended = start(*command, cwd=cwd)
    if ended.returncode:
        said = f"{ended.stdout}\n{ended.stderr}"
        raise AssertionError(f"{' '.join(map(str, command))} ended with {said}")
    return ended.stdout


def start(
    *command: str | Path, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command that sees neither the repository nor this environment."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "MYPYPATH")
    around = {
        name: value for name, value in os.environ.items() if name not in hidden
    }
    return subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=around,
        capture_output=True,
        text=True,
    )


def use(python: Path, folder: Path) -> str:
    """Run the user's program in a folder of its own; what it prints."""
    program = copied(folder)
    where = run(python, "-c", "import hdnn; print(hdnn.__file__)", cwd=folder)
    assert str(python.parents[1]) in where, f"hdnn is taken from {where}"
    return run(python, "-W", "error", program.name, cwd=folder)


def copied(folder: Path) -> Path:
    """The user's program in a folder outside of the repository."""
    return Path(shutil.copy(PROGRAM, folder))


def ask_for_extras(python: Path, folder: Path) -> dict[str, str]:
    """What is said, in one line, to someone who uses a part of hdnn whose extra is not there."""
    said = {}
    for extra, arguments in WITHOUT_EXTRAS.items():
        ended = start(python, *arguments, cwd=folder)
        said[extra] = ended.stderr.strip().rpartition("\n")[2]
        assert ended.returncode != 0, f"{extra} is not missing: {ended.stdout}"
        assert f"install it with: pip install 'hdnn[{extra}]'" in said[extra], (
            ended.stderr
        )
    return said


def check_by_pyright(python: Path, program: Path) -> None:
    """Have pyright read a program, in strict mode."""
    strict = '{"typeCheckingMode": "strict", "pythonVersion": "3.11"}'
    (program.parent / "pyrightconfig.json").write_text(strict)
    checker = [sys.executable, "-m", "pyright", "--pythonpath", python]
    run(*checker, program.name, cwd=program.parent)


def check_by_mypy(python: Path, program: Path) -> None:
    """Have mypy read a program, in strict mode."""
    checker = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--python-executable",
        python,
    ]
    run(*checker, "--cache-dir", ".mypy", program.name, cwd=program.parent)
