"""The index of results, and the rows of other pages that repeat them, from the JSON files.

python benchmarks/index.py
"""

# ruff: noqa: E501
from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import hdnn

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
SECTIONS = {
    "The paper's tables and figures": ("table-", "ring", "fig-"),
    "Guarantees and gradients": ("cert", "contrast", "deep", "grad"),
    "Speed and memory": ("engine", "blocks", "images"),
    "Tables, runs, closed loops and the doctor": ("",),
}
ABOUT = """# Results

Every number on these pages comes from a run of the command beside it; the page gives the machine, the
versions and the spread. If a target was missed, the page says so. `hdnn reproduce NAME` makes the paper's
tables and figures; the programs in `benchmarks/` need a clone of the repository. `python benchmarks/index.py`
makes this page from the results.
"""
WITHOUT_GPU = """
`benchmarks/blocks.py --device cuda`, which needs a GPU.
"""


def results() -> dict[str, dict[str, Any]]:
    """All results by name, with the titles of their pages."""
    contents = {}
    for file in sorted(RESULTS.glob("*.json")):
        page = file.with_suffix(".md").read_text("utf-8")
        result = json.loads(file.read_text("utf-8"))
        title = page.partition("\n")[0].removeprefix("# ")
        contents[file.stem] = {**result, "title": title}
    return contents


def version(result: dict[str, Any]) -> str:
    """The version of hdnn that made a result; empty where it did not say."""
    about = result.get("versions") or result.get("machine")
    return about.get("hdnn", "") if isinstance(about, dict) else ""


def index(contents: dict[str, dict[str, Any]]) -> str:
    """The text of docs/results/index.md."""
    lines = [ABOUT]
    left = dict(contents)
    for title, beginnings in SECTIONS.items():
        lines += [f"## {title}", ""]
        lines += ["| page | command | what was found |", "| --- | --- | --- |"]
        for name in [name for name in left if name.startswith(beginnings)]:
            result = left.pop(name)
            link = f"[{result['title']}]({name}.md)"
            lines.append(
                f"| {link} | `{result['command']}` | {result['found']} |"
            )
        lines.append("")
    lines += ["## Not measured with this version", WITHOUT_GPU]
    older = []
    for name, result in contents.items():
        if version(result) != hdnn.__version__:
            older.append(f"[{result['title']}]({name}.md)")
    if older:
        lines.append(
            f"Measured with versions before {hdnn.__version__}: {', '.join(older)}."
        )
    return "\n".join(lines).rstrip() + "\n"


def with_rows(text: str, contents: dict[str, dict[str, Any]]) -> str:
    """A page whose table rows that link to a result say what it found."""

    def row(match: re.Match[str]) -> str:
        return f"{match[1]} {contents[match[2]]['found']} |"

    link = r"\| \[[^\]]*\]\((?:docs/|\.\./)?results/([\w-]+)\.md\)"
    pattern = rf"^({link}[^|]*\|(?: `[^`]*` \|)?).*$"
    return re.sub(pattern, row, text, flags=re.MULTILINE)


def pages() -> dict[Path, str]:
    """The files that repeat results, and the text that they should have."""
    contents = results()
    texts = {RESULTS / "index.md": index(contents)}
    docs = ROOT / "docs"
    for file in (
        ROOT / "README.md",
        docs / "index.md",
        docs / "guides" / "paper.md",
    ):
        texts[file] = with_rows(file.read_text("utf-8"), contents)
    return texts


if __name__ == "__main__":
    for file, text in pages().items():
        file.write_text(text, encoding="utf-8")
