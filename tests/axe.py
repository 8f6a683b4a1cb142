"""axe-core, which looks for what keeps people from using a page."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

VERSION = "axe-core@4.14.0"


def text(folder: Path) -> str:
    """The text of axe-core, which npm installs into a folder."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("there is no npm to install axe-core with")
    flags = ["--silent", "--no-audit", "--no-fund", "--prefix", str(folder)]
    done = subprocess.run(
        [npm, "install", *flags, VERSION], capture_output=True, timeout=60
    )
    if done.returncode:
        pytest.skip(f"npm could not install {VERSION} here")
    return (folder / "node_modules" / "axe-core" / "axe.min.js").read_text(
        encoding="utf-8"
    )


def grave_faults(page: Any, axe: str) -> list[tuple[str, list[str]]]:
    """What is serious or worse on a page: each rule with the elements that break it."""
    page.evaluate(axe)
    # Without preloading: style sheets of the file system cannot be fetched.
    found = page.evaluate(
        "axe.run({ preload: false }).then(found => found.violations)"
    )
    return [
        (one["id"], [node["html"] for node in one["nodes"]])
        for one in found
        if one["impact"] in ("serious", "critical")
    ]
