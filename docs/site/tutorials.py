"""Tutorials are run whenever the site is built, and show what their cells printed and drew.

Each is a notebook too, made from the same text, which its page links to.

Each page is run by a process of its own in an empty folder. A cell that fails is an error, and so
is a page that takes more than a minute of processor time: that does not depend on what else the
machine is doing.
"""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import hdnn
from cells import MOVING, cells

PROGRAM = Path(__file__).with_name("cells.py")
SOURCE = str(
    Path(hdnn.__file__).parents[1]
)  # pages run the hdnn whose docstrings are shown
FOLDER = "tutorials/"
LIMIT = 60.0  # seconds of processor time
PATIENCE = 300.0  # seconds until a page that hangs is given up
AT_ONCE = 2
PICTURES = {".png", *MOVING}
INSTALL = "*Install `hdnn` with the extras `plot` and `fast` first.*"
# [text](page.md) and [text][name], which lead nowhere outside of the site
LINK = re.compile(r"(?<!!)\[([^\[\]]+)\](?:\((?!https?:)[^()]*\)|\[[^\[\]]*\])")

_running: dict[str, Future[Ran]] = {}


@dataclass(frozen=True)
class Ran:
    """What running a page brought about."""

    cells: list[dict[str, Any]]
    pictures: dict[str, bytes]
    seconds: float


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Start all tutorials; the pages wait for them."""
    pool = ThreadPoolExecutor(AT_ONCE)
    _running.clear()
    for file in files.documentation_pages():
        if file.src_uri.startswith(FOLDER):
            _running[file.src_uri] = pool.submit(
                run, Path(file.abs_src_path or "")
            )
    pool.shutdown(wait=False)
    return files


def on_page_markdown(
    markdown: str, page: Page, config: MkDocsConfig, files: Files
) -> str:
    uri = page.file.src_uri
    if uri not in _running:
        return markdown
    ran = _running[uri].result()
    stem = uri.removesuffix(".md")
    for name, picture in ran.pictures.items():
        files.append(File.generated(config, f"{stem}-{name}", content=picture))
    name = f"{stem}.ipynb"
    files.append(File.generated(config, name, content=notebook(markdown)))
    return shown(markdown, ran, Path(stem).name)


def on_build_error(error: Exception, **_: object) -> None:
    for future in _running.values():
        future.cancel()


def run(page: Path, limit: float = LIMIT, patience: float = PATIENCE) -> Ran:
    """Run the cells of a page, or raise an error that names the page, the cell and the line."""
    with (
        tempfile.TemporaryDirectory() as work,
        tempfile.TemporaryDirectory() as kept,
    ):
        began = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(page), kept],
            cwd=work,
            env={**os.environ, "MPLBACKEND": "Agg", "PYTHONPATH": SOURCE},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(timeout=patience)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise PluginError(
                f"{page}: it has not ended after {patience:.0f} s."
            ) from None
        seconds = time.perf_counter() - began
        report = Path(kept, "ran.json")
        if not report.exists():
            raise PluginError(
                f"{page}: its process ended with {process.returncode}.\n{said}"
            )
        ran = json.loads(report.read_text(encoding="utf-8"))
        if "error" in ran:
            raise PluginError(f"{page}, {ran['error']}\n{said}")
        if (took := ran["processor"]) > limit:
            raise PluginError(
                f"{page}: it takes {took:.0f} s to run, more than {limit:.0f}."
            )
        pictures = {
            path.name: path.read_bytes()
            for path in sorted(Path(kept).iterdir())
            if path.suffix in PICTURES
        }
        return Ran(ran["cells"], pictures, seconds)


def notebook(markdown: str) -> str:
    """The page as a Jupyter notebook; links within the site become plain text."""
    title, _, rest = markdown.strip().partition("\n")
    parts: list[tuple[str, str]] = [("markdown", f"{title}\n\n{INSTALL}")]
    end = 0
    for cell in cells(rest):
        start = rest.rfind("\n```", 0, cell.end - 3 - len(cell.code)) + 1
        parts += [("markdown", rest[end:start]), ("code", cell.code)]
        end = cell.end
    parts.append(("markdown", rest[end:]))
    listed: list[dict[str, Any]] = []
    for kind, text in parts:
        text = text.strip()
        if kind == "markdown":
            text = LINK.sub(r"\1", text)
        cell = {"cell_type": kind, "id": f"cell-{len(listed)}", "metadata": {}}
        cell["source"] = text.splitlines(keepends=True)
        if kind == "code":
            cell |= {"execution_count": None, "outputs": []}
        if text:
            listed.append(cell)
    kernel = {
        "name": "python3",
        "display_name": "Python 3",
        "language": "python",
    }
    return json.dumps(
        {
            "cells": listed,
            "metadata": {"kernelspec": kernel},
            "nbformat": 4,
            "nbformat_minor": 5,
        },
        indent=1,
    )


def shown(markdown: str, ran: Ran, stem: str) -> str:
    """A page with what its cells printed and drew below each, and how long it took at its end."""
    parts, end = [], 0
    for cell, found in zip(cells(markdown), ran.cells, strict=True):
        parts.append(markdown[end : cell.end])
        end = cell.end
        if printed := found["printed"].rstrip():
            ticks = "`" * max(
                3, *(1 + len(run) for run in re.findall("`+", printed)), 3
            )
            parts.append(
                f"\n\n{ticks} {{ .text .printed }}\n{printed}\n{ticks}\n"
            )
        for figure in found["figures"]:
            alt = (
                figure["alt"]
                .replace("[", "(")
                .replace("]", ")")
                .replace("\n", " ")
            )
            parts.append(f"\n\n![{alt}]({stem}-{figure['file']}){{ .drawn }}\n")
    python, torch = (
        platform.python_version(),
        version("torch").partition("+")[0],
    )
    told = f"{ran.seconds:.0f} s on {os.cpu_count()} cores with Python {python} and PyTorch {torch}"
    link = f"[as a notebook]({stem}.ipynb){{ download={stem}.ipynb }}"
    note = f"\n\n*This page was run in {told} when the site was built. Take it {link}.*\n"
    return "".join([*parts, markdown[end:], note])
