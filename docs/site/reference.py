"""The API reference: a page for each public name, in the group where a reader looks for it.

The names come from tests/public.py, so that none is forgotten; a name without a group is an error.
A page of docs/api introduces a group, and ends with the table of its names.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

# docstrings.py is imported by its plain name later, and so is the list of names.
HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tests")]
import public  # noqa: E402

# Which group a module's names belong to; the longest that fits counts.
GROUPS = {
    "hdnn.activations": "activations",
    "hdnn.analysis": "analysis",
    "hdnn.analysis.doctor": "doctor",
    "hdnn.control": "control",
    "hdnn.data": "data",
    "hdnn.distributed": "distributed",
    "hdnn.engine": "engine",
    "hdnn.errors": "errors",
    "hdnn.estimators": "estimators",
    "hdnn.functional": "functional",
    "hdnn.heads": "heads",
    "hdnn.interconnection": "interconnection",
    "hdnn.model": "models",
    "hdnn.models": "models",
    "hdnn.networks": "networks",
    "hdnn.networks.convert": "blocks",
    "hdnn.networks.coupling": "blocks",
    "hdnn.networks.reversible": "blocks",
    "hdnn.operators": "operators",
    "hdnn.plotting": "plotting",
    "hdnn.reference": "reference",
    "hdnn.regularization": "regularization",
    "hdnn.serialization": "saving",
    "hdnn.sparsity": "sparsity",
    "hdnn.training": "training",
}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    members = grouped(public.names())
    titles = {group: title(Path(config.docs_dir) / "api" / f"{group}.md") for group in members}
    config.nav = with_names(config.nav or [], members, titles)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, page in pages(public.names()).items():
        files.append(File.generated(config, f"api/{page}", content=f"::: {name}\n"))
    return files


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """The page of a group is the page of its section, as an index.md would be."""
    for group in GROUPS.values():
        if file := files.get_file_from_path(f"api/{group}.md"):
            assert file.url == f"api/{group}.html"  # settled before the name changes
            file.name = "index"
    return nav


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    folder, _, file = page.file.src_uri.rpartition("/")
    if folder != "api":
        return markdown
    names = public.names()
    members, linked = grouped(names), pages(names)
    if file == "index.md":
        rows = [
            f"| [{title(Path(config.docs_dir) / 'api' / f'{group}.md')}]({group}.md) | "
            + ", ".join(f"[`{short(name)}`]({linked[name]})" for name in members[group])
            + " |"
            for group in [path.removesuffix(".md") for path in in_order(config.nav)]
        ]
        return table(markdown, "| Group | Names |", rows)
    if (group := file.removesuffix(".md")) in members:
        page.meta["title"] = f"API: {page.title}"  # there is a page on errors, and one of errors
        rows = [
            f"| [`{name}`]({linked[name]}) | {summary(names[name])} |" for name in members[group]
        ]
        return table(markdown, "| Name | What it is |", rows)
    for name, own in linked.items():
        if file == own:  # what a browser's tab, a bookmark and a search engine show
            page.meta |= {"title": name, "description": summary(names[name]).replace("`", "")}
    return markdown


def grouped(names: dict[str, Any]) -> dict[str, list[str]]:
    """The names of each group, in the order of the list."""
    members: dict[str, list[str]] = {}
    for name, thing in names.items():
        members.setdefault(group_of(name, thing), []).append(name)
    return members


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


def pages(names: dict[str, Any]) -> dict[str, str]:
    """The file of each name; no two differ by upper case alone, since some systems see none."""
    found: dict[str, str] = {}
    for name in names:
        taken = {page.lower() for page in found.values()}
        page = f"{name}.md"
        found[name] = page if page.lower() not in taken else f"{name}-function.md"
    return found


def with_names(nav: Any, members: dict[str, list[str]], titles: dict[str, str]) -> Any:
    """The navigation, in which each group's page is followed by the pages of its names."""
    linked = pages(dict.fromkeys(name for group in members.values() for name in group))
    placed: set[str] = set()

    def walk(entry: Any) -> Any:
        if isinstance(entry, list):
            return [walk(each) for each in entry]
        if isinstance(entry, dict):
            return {text: walk(below) for text, below in entry.items()}
        group = entry.removeprefix("api/").removesuffix(".md")
        if not entry.startswith("api/") or group not in members:
            return entry
        placed.add(group)
        below = [{short(name): f"api/{linked[name]}"} for name in members[group]]
        return {titles[group]: [entry, *below]}

    made = walk(nav)
    if missing := members.keys() - placed:
        raise PluginError(f"mkdocs.yml has no page for the groups {', '.join(sorted(missing))}.")
    return made


def in_order(nav: Any) -> list[str]:
    """The pages of the groups, as the navigation lists them."""
    if isinstance(nav, str):
        known = nav.startswith("api/") and nav[4:-3] in GROUPS.values()
        return [nav[4:]] if known else []
    below = nav.values() if isinstance(nav, dict) else nav
    return [page for entry in below for page in in_order(entry)]


def title(page: Path) -> str:
    """What the first heading of a page says."""
    found = (
        re.search(r"^# (.+)$", page.read_text(encoding="utf-8"), re.M) if page.exists() else None
    )
    if not found:
        raise PluginError(f"{page} must introduce its names, below a heading.")
    return found[1]


def short(name: str) -> str:
    """A name without the module that its group stands for."""
    parts = name.split(".")
    return ".".join(parts[2:] or parts[1:])


def summary(thing: Any) -> str:
    """The first sentence of a docstring, for a cell of a table."""
    first = (inspect.getdoc(thing) or "").partition("\n\n")[0]
    sentence = re.split(r"(?<=\.)\s", " ".join(first.split()))[0].rstrip(":")
    return sentence.replace("|", r"\|")


def table(above: str, head: str, rows: list[str]) -> str:
    return "\n".join([above.rstrip(), "", head, "| --- | --- |", *rows, ""])
