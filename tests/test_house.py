"""The house that docs/architecture.md describes: what import-linter cannot see of it, by `ast`.

`make lint` checks the floors. Here: no import hidden in a function, no cycle, no module named in a
string, nobody else's private names, no two public classes of one name, few files on the top level,
and no file or list of parameters that has grown too long. Whatever is excepted says why.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from house import SOURCE, imports, inside, modules

LONGEST = 400  # lines of a file, without its docstrings: those are the pages of the site
WIDEST = 12  # parameters of a function
TOP_LEVEL = 16  # files

# A quick start is worth an import inside a function there, and nowhere else.
PROGRAM = ("hdnn.__main__", "hdnn.app")
# Programs that are started by name in a process of their own.
STARTED = {"hdnn.control.worker", "hdnn.distributed.worker", "hdnn.experiments"}
LONG: dict[str, str] = {}
# Kernels and whole files of them: a kernel is one function, whatever it needs.
KERNELS = "hdnn.engine.kernels"
WIDE = {
    "hdnn.functional.split": "the weights of both halves, and the options that all functions have",
    "hdnn.models.star.hdnn_star": "makes a network, and is to it what a constructor is",
    "hdnn.training.loop.fit": "public: each is an option that users give by name",
}


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def lines_of_code(text: str) -> int:
    """All lines of a file but those of its docstrings."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [
        node.body[0]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None
    ]
    spanned = sum((end.end_lineno or 0) - end.lineno + 1 for end in docstrings)
    return len(text.splitlines()) - spanned


def test_no_import_is_hidden_in_a_function():
    hidden = {
        (name, imported)
        for name, tree in modules().items()
        if not inside(name, *PROGRAM)
        for function in functions(tree)
        for imported in imports(function)
    }
    assert not hidden


def test_no_modules_import_each_other_in_a_circle():
    """Each module can be put behind all that it imports, in functions too."""
    left = {name: {*imports(tree)} - {name} for name, tree in modules().items()}
    # A package names what its modules hold, and they may name the package: `hdnn` itself alone.
    left.pop("hdnn")
    while free := [name for name, needed in left.items() if not needed & left.keys()]:
        for name in free:
            del left[name]
    assert not left, f"in circles, or behind one: {sorted(left)}"


def test_no_module_is_named_in_a_string():
    named = {
        (name, node.value)
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.startswith("hdnn.")
        and node.value.rstrip(".") in modules()
        and node.value.rstrip(".") not in STARTED
    }
    assert not named


def test_nobody_uses_the_private_names_of_another_module():
    used = set()
    for name, tree in modules().items():
        known = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and inside(node.module or "", "hdnn"):
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    if _private(alias.name) and full not in modules():
                        used.add((name, full))
                    if full in modules():
                        known[alias.asname or alias.name] = full
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id in known
                and _private(node.attr)
            ):
                used.add((name, f"{known[node.value.id]}.{node.attr}"))
    assert not used


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_no_two_public_classes_have_one_name():
    classes = Counter(
        node.name
        for tree in modules().values()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in classes.items() if count > 1] == []


def test_few_files_lie_on_the_top_level():
    assert len([*(SOURCE / "hdnn").glob("*.py")]) <= TOP_LEVEL


def test_files_are_short_or_say_why_not():
    long = {
        file.relative_to(SOURCE).as_posix(): lines_of_code(file.read_text(encoding="utf-8"))
        for file in SOURCE.rglob("*.py")
        if not inside(".".join(file.relative_to(SOURCE).parts), KERNELS)
    }
    long = {name: count for name, count in long.items() if count > LONGEST}
    assert sorted(long) == sorted(LONG), long
    assert len(LONG) <= 3


def test_functions_take_few_parameters_or_say_why_not():
    wide = {}
    for name, tree in modules().items():
        if inside(name, KERNELS):
            continue
        for function in functions(tree):
            given = function.args
            count = len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs)
            if count > WIDEST and function.name != "__init__":
                wide[f"{name}.{function.name}"] = count
    assert sorted(wide) == sorted(WIDE), wide


def test_every_test_asserts_something():
    """A test checks by an assert, by what must be raised or warned, or by a helper that asserts."""
    silent = []
    for file in sorted(Path(__file__).parent.rglob("test_*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        helpers = {f.name for f in functions(tree) if _asserts(f, set())}
        silent += [
            f"{file.name}::{function.name}"
            for function in functions(tree)
            if function.name.startswith("test_") and not _asserts(function, helpers)
        ]
    assert silent == []


def _asserts(function: ast.AST, helpers: set[str]) -> bool:
    for node in ast.walk(function):
        if isinstance(node, ast.Assert | ast.Raise):
            return True
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            last = called.rpartition(".")[2]
            if last in helpers or last in CHECKING or last.startswith(("assert_", "check")):
                return True
            if any(keyword.arg == "check" for keyword in node.keywords):  # of a process
                return True
    return False


CHECKING = {"raises", "warns", "fail", "gradcheck", "gradgradcheck", "opcheck"}
