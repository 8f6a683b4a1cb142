"""What was reproduced of the paper, as a part of the report: each experiment's page and pictures.

The pages are Markdown of the plain kind that the experiments write: headings, paragraphs, lists and
tables. Everything is escaped; nothing but pictures of this folder is taken in.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from html import escape
from itertools import groupby
from pathlib import Path

LARGEST = 2**20  # bytes of a file that is still shown


def section(folder: Path) -> str:
    """All tables and figures in a folder of results, or nothing if there are none."""
    parts = []
    names = sorted({file.stem for kind in ("table-*.md", "fig-*.md") for file in folder.glob(kind)})
    for name in names:
        parts += _page(_read(folder / f"{name}.md").decode("utf-8", "replace"))
    shown = [picture(file) for file in sorted(folder.glob("fig-*.png"))]
    if not parts and not any(shown):
        return ""
    figures = f'<div class="grid">{"".join(shown)}</div>'
    return "\n".join(["<section><h2>Reproduced from the paper</h2>", *parts, figures, "</section>"])


def picture(file: Path, alt: str = "", caption: str = "") -> str:
    """A PNG inside of the page, or nothing if it is none."""
    content = _read(file)
    if not content.startswith(b"\x89PNG"):
        return ""
    data = base64.b64encode(content).decode()
    name = alt or file.stem.replace("-", " ").replace("_", " ")
    return (
        f'<figure><img alt="{escape(name)}" src="data:image/png;base64,{data}">'
        f"<figcaption>{escape(caption or name)}</figcaption></figure>"
    )


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes() if file.stat().st_size <= LARGEST else b""
    except OSError:
        return b""


def _page(text: str) -> Iterator[str]:
    """A Markdown page as HTML."""
    for kind, group in groupby(text.splitlines(), _kind):
        lines = list(group)
        if kind == "table":
            yield _table(lines)
        elif kind == "list":
            yield "<ul>" + "".join(f"<li>{_inline(line[2:])}</li>" for line in lines) + "</ul>"
        elif kind == "heading":
            for line in lines:
                level = min(len(line) - len(line.lstrip("#")) + 2, 5)
                yield f"<h{level}>{_inline(line.lstrip('# '))}</h{level}>"
        elif kind == "text":
            yield f"<p>{_inline(' '.join(lines))}</p>"


def _kind(line: str) -> str:
    if not line.strip() or line.startswith("!["):
        return "nothing"
    starts = {"#": "heading", "|": "table", "-": "list"}
    return starts.get(line[0], "text")


def _table(lines: list[str]) -> str:
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]
    head, *body = [row for row in rows if not all(re.fullmatch(":?-+:?", cell) for cell in row)]

    def cells(kind: str, row: list[str]) -> str:
        style = [' class="text"', *[""] * (len(row) - 1)]
        each = zip(style, row, strict=True)
        return (
            "<tr>" + "".join(f"<{kind}{s}>{_inline(cell)}</{kind}>" for s, cell in each) + "</tr>"
        )

    inner = "".join(cells("td", row) for row in body)
    return (
        '<div class="scroll" tabindex="0"><table>'
        f"<thead>{cells('th', head)}</thead><tbody>{inner}</tbody></table></div>"
    )


def _inline(text: str) -> str:
    text = escape(text)
    text = re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", text)  # other pages are not there to be linked to
    text = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", text)
    return re.sub(r"`(.+?)`", r"<code>\1</code>", text)
