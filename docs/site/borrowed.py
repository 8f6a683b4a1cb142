"""Pages of the site that live elsewhere in the repository: changelog, contributing, playground.

Links are written so that they work in the repository. On the site, those that lead out of docs/
lead to the borrowed page, or to nothing and are plain text.
"""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from hdnn.app import play

PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
HOME = '<p class="small"><a href="index.html">hdnn: documentation</a></p>'
PLACES = {**PAGES, "README.md": "index.md"}
LINK = re.compile(r"(?<!!)\[([^\[\]]*)\]\(([^()\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    root = Path(config.config_file_path).parent
    for source, page in PAGES.items():
        files.append(
            File.generated(config, page, abs_src_path=str(root / source))
        )
    return files


def on_page_markdown(
    markdown: str, page: Page, config: MkDocsConfig, files: Files
) -> str:
    here = {to: source for source, to in PAGES.items()}.get(
        page.file.src_uri, f"docs/{page.file.src_uri}"
    )
    root = Path(config.config_file_path).parent
    return LINK.sub(
        lambda link: moved(link, here, page.file.src_uri, root), markdown
    )


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """The playground takes the whole of its page."""
    if page.file.src_uri != "play.md":
        return output
    return play.page().replace("<header>", f"<header>{HOME}", 1)


def moved(link: re.Match[str], here: str, page: str, root: Path) -> str:
    """A link in the file `here` of the repository, as the `page` of the site must write it."""
    text, target = link.groups()
    path, hash_, anchor = target.partition("#")
    if not path or ":" in path:
        return link[0]
    place = normpath(join(dirname(here), path))
    if place.startswith("../") or not (root / place).exists():
        return link[0]  # left as it is, for the strict build to complain about
    to = PLACES.get(place) or (
        place.removeprefix("docs/") if place.startswith("docs/") else None
    )
    if to is None:
        return text
    return f"[{text}]({relpath(to, dirname(page) or '.')}{hash_}{anchor})"
