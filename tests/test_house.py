"""The order of the house: what import-linter cannot see of it, read from the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from house import imports, modules


def functions(
    tree: ast.AST,
) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_no_modules_import_each_other_in_a_circle():
    """Each module can be put behind all that it imports, in functions too."""
    left = {name: {*imports(tree)} - {name} for name, tree in modules().items()}
    # A package names what its modules hold, and they may name the package: `hdnn` itself alone.
    left.pop("hdnn")
    while free := [
        name for name, needed in left.items() if not needed & left.keys()
    ]:
        for name in free:
            del left[name]
    assert not left, f"in circles, or behind one: {sorted(left)}"


def test_every_test_asserts_something():
    """A test checks by an assert, by what must be raised or warned, or by a helper that asserts."""
    silent = []
    for file in sorted(Path(__file__).parent.rglob("test_*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        helpers = {f.name for f in functions(tree) if asserts(f, set())}
        silent += [
            f"{file.name}::{function.name}"
            for function in functions(tree)
            if function.name.startswith("test_")
            and not asserts(function, helpers)
        ]
    assert silent == []


def asserts(function: ast.AST, helpers: set[str]) -> bool:
    for node in ast.walk(function):
        if isinstance(node, ast.Assert | ast.Raise):
            return True
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            last = called.rpartition(".")[2]
            if (
                last in helpers
                or last in CHECKING
                or last.startswith(("assert_", "check"))
            ):
                return True
            if any(
                keyword.arg == "check" for keyword in node.keywords
            ):  # of a process
                return True
    return False


CHECKING = {"raises", "warns", "fail", "gradcheck", "gradgradcheck", "opcheck"}
CHECKING |= {
    "run_node",
    "wait_for_text",
}  # which fail if it does not come to that
