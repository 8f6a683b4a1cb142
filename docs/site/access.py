"""What the theme forgets for people who use a keyboard, a screen reader or a phone."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig

PICTURE = re.compile(r'<img (?=[^>]*\bsrc="([^":]+\.png)")')
SMALL = 0.45  # of a picture's own size; at less its letters are too small
PHONE = 400  # pixels


def on_post_page(output: str, **_: object) -> str:
    """The search is a dialog, and a dialog has a name."""
    return output.replace('role="dialog"', 'role="dialog" aria-label="Search"')


def on_post_build(config: MkDocsConfig) -> None:
    """Wide pictures keep a size at which they can be read; a phone scrolls them."""
    for page in Path(config.site_dir).rglob("*.html"):

        def sized(tag: re.Match[str], folder: Path = page.parent) -> str:
            picture = folder / tag[1]
            width = SMALL * width_of(picture) if picture.is_file() else 0
            if width < PHONE:
                return tag[0]
            return f'{tag[0]}style="--width: {width:.0f}px" data-wide '

        page.write_text(PICTURE.sub(sized, page.read_text("utf-8")), "utf-8")


def width_of(picture: Path) -> int:
    """The pixels of a PNG from left to right, which stand in its first block."""
    return int.from_bytes(picture.read_bytes()[16:20], "big")
