"""The API reference: a page for each group of names, in which every public name has its section.

The names come from tests/public.py, so that none is forgotten; a name without a group is an error.
A page of docs/api introduces its group, and this hook adds the names below.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

# docstrings.py is imported by its plain name later, and so is the list of names.
HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tests")]
import public  # noqa: E402

# The group of a module's names; the longest entry that fits counts.
GROUPS = {
    "hdnn.activations": "activations",
    "hdnn.analysis": "analysis",
    "hdnn.analysis.doctor": "doctor",
    "hdnn.analysis.rules": "doctor",
    "hdnn.control": "control",
    "hdnn.data": "data",
    "hdnn.distributed": "distributed",
    "hdnn.dynamics": "dynamics",
    "hdnn.engine": "engine",
    "hdnn.errors": "errors",
    "hdnn.estimators": "estimators",
    "hdnn.functional": "functional",
    "hdnn.heads": "heads",
    "hdnn.implicit": "schemes",
    "hdnn.models": "models",
    "hdnn.networks": "networks",
    "hdnn.networks.blocks": "blocks",
    "hdnn.networks.convert": "blocks",
    "hdnn.plotting": "plotting",
    "hdnn.schemes": "schemes",
    "hdnn.io": "saving",
    "hdnn.sparsity": "sparsity",
    "hdnn.training": "training",
}


def on_page_markdown(
    markdown: str, page: Page, config: MkDocsConfig, files: Files
) -> str:
    folder, _, file = page.file.src_uri.rpartition("/")
    if folder != "api":
        return markdown
    groups = grouped(public.names())
    group = file.removesuffix(".md")
    if group == "index":
        rows = [
            f"| [{group}]({group}.md) | "
            + ", ".join(f"[`{short(n)}`][{n}]" for n in names)
            + " |"
            for group, names in sorted(groups.items())
        ]
        return "\n".join(
            [
                markdown.rstrip(),
                "",
                "| Page | Names |",
                "| --- | --- |",
                *rows,
                "",
            ]
        )
    page.meta["title"] = (
        f"API: {page.title}"  # there is a page on errors, and one of errors
    )
    sections = [
        f"::: {name}\n    options:\n      heading_level: 2\n"
        for name in groups[group]
    ]
    return "\n\n".join([markdown.rstrip(), *sections])


def grouped(names: dict[str, Any]) -> dict[str, list[str]]:
    """The names of each group, in the order of the list."""
    groups: dict[str, list[str]] = {}
    for name, thing in names.items():
        groups.setdefault(group_of(name, thing), []).append(name)
    return groups


def group_of(name: str, thing: Any) -> str:
    """The group of a name, by where it is offered, or more exactly by where it is defined."""
    offered = name.rpartition(".")[0]
    defined = getattr(thing, "__module__", None) or ""
    inside = offered == "hdnn" or f"{defined}.".startswith(f"{offered}.")
    module = defined if inside else offered
    while module not in GROUPS:
        module = module.rpartition(".")[0]
        if not module:
            raise PluginError(
                f"{name} has no page: give {defined} a group in docs/site/reference.py."
            )
    return GROUPS[module]


def short(name: str) -> str:
    """A name without the module that its group stands for."""
    parts = name.split(".")
    return ".".join(parts[2:] or parts[1:])
