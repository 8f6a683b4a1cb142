"""The modules of the package and what they import, read from the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"


@cache
def modules() -> dict[str, ast.Module]:
    """All modules of the package by name, parsed."""
    found = {}
    for file in sorted(SOURCE.rglob("*.py")):
        parts = file.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(file.read_text(encoding="utf-8"))
    return found


def inside(name: str, *packages: str) -> bool:
    return any(
        name == package or name.startswith(f"{package}.")
        for package in packages
    )


def module_of(name: str) -> str:
    """The module that a dotted name lies in: `hdnn.errors` for `hdnn.errors.HDNNError`."""
    while name and name not in modules():
        name = name.rpartition(".")[0]
    return name


def imports(tree: ast.AST) -> Iterator[str]:
    """The modules of this package that are imported anywhere below, but for type checkers."""
    if isinstance(tree, ast.If) and "TYPE_CHECKING" in ast.unparse(tree.test):
        return
    if isinstance(tree, ast.Import):
        yield from (
            module_of(alias.name)
            for alias in tree.names
            if inside(alias.name, "hdnn")
        )
    elif isinstance(tree, ast.ImportFrom) and inside(tree.module or "", "hdnn"):
        yield from (
            module_of(f"{tree.module}.{alias.name}") for alias in tree.names
        )
    for child in ast.iter_child_nodes(tree):
        yield from imports(child)
