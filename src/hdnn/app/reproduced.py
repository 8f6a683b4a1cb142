"""What was reproduced of the paper, for the report: each experiment's page and pictures.

The pages are Markdown as the experiments write it. HTML in them is escaped, links are shown as
their text, because other pages are not there to be linked to, and nothing but pictures of this
folder is taken in.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any, NamedTuple

from hdnn.errors import require

LARGEST = 2**20  # bytes of a file that is still shown
DEEPER = 2  # levels that a page's headings are moved down by in the report


class Picture(NamedTuple):
    """A PNG that goes into the page."""

    name: str
    caption: str
    base64: str


def pages(folder: Path) -> list[str]:
    """All tables and figures in a folder of results, as HTML."""
    files = [*folder.glob("table-*.md"), *folder.glob("fig-*.md")]
    texts = [_read(file).decode("utf-8", "replace") for file in sorted(files)]
    return [_html(text) for text in texts if text]


def pictures(folder: Path) -> list[Picture]:
    """All figures in a folder of results."""
    found = (picture(file) for file in sorted(folder.glob("fig-*.png")))
    return [one for one in found if one is not None]


def picture(file: Path, name: str = "", caption: str = "") -> Picture | None:
    """A PNG to put into the page, or None if the file is not one."""
    content = _read(file)
    if not content.startswith(b"\x89PNG"):
        return None
    name = name or file.stem.replace("-", " ").replace("_", " ")
    return Picture(name, caption or name, base64.b64encode(content).decode())


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes() if file.stat().st_size <= LARGEST else b""
    except OSError:
        return b""


def _html(text: str) -> str:
    """A Markdown page as HTML."""
    markdown = require("markdown_it", extra="cli").MarkdownIt("commonmark", {"html": False})
    markdown.enable("table")

    def write(kind: str, html: str) -> None:
        markdown.add_render_rule(kind, lambda *_: html)

    for unwanted in ("link_open", "link_close", "image"):
        write(unwanted, "")
    write("table_open", '<div class="scroll" tabindex="0"><table>\n')
    write("table_close", "</table></div>\n")
    tokens: list[Any] = markdown.parse(text)
    for token in tokens:
        if token.type in ("heading_open", "heading_close"):
            token.tag = f"h{min(int(token.tag[1:]) + DEEPER, 5)}"
    return markdown.renderer.render(tokens, markdown.options, {})
