"""An entry of the navigation with a star stands for all pages that match and are not named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.nav = expanded(config.nav or [], Path(config.docs_dir))
    return config


def expanded(nav: list[Any], docs: Path) -> list[Any]:
    """The navigation without stars."""
    named = {page for page in pages(nav) if "*" not in page}

    def walk(entry: Any) -> list[Any]:
        if isinstance(entry, dict):
            return [{title: walk_all(below) for title, below in entry.items()}]
        if "*" not in entry:
            return [entry]
        found = sorted(
            path.relative_to(docs).as_posix() for path in docs.glob(entry)
        )
        return [page for page in found if page not in named]

    def walk_all(below: Any) -> Any:
        if isinstance(below, list):
            return [each for entry in below for each in walk(entry)]
        return below

    return walk_all(nav)


def pages(nav: Any) -> list[str]:
    """All pages that a navigation names."""
    if isinstance(nav, str):
        return [nav]
    below = nav.values() if isinstance(nav, dict) else nav
    return [page for entry in below for page in pages(entry)]
