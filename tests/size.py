"""The size of the package, which may not rise unnoticed: `python tests/size.py` compares it.

A token of code is what Python's tokenizer gives, without comments, docstrings and line breaks, so
that neither packing lines nor cutting documentation changes the count. Whoever raises a number of
BUDGET says why in the same commit.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path

BUDGET = {"tokens of code": 163_550, "files": 98}

SOURCE = Path(__file__).parents[1] / "src" / "hdnn"
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(text: str) -> set[tuple[int, int]]:
    """Where the docstrings of a file begin."""
    nodes = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, DOCUMENTED)
    ]
    first = [
        node.body[0]
        for node in nodes
        if ast.get_docstring(node, clean=False) is not None
    ]
    return {(node.lineno, node.col_offset) for node in first}


def tokens(text: str) -> int:
    """How many tokens of code a file has."""
    explained = docstrings(text)
    read = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(
        token.type not in LAYOUT and token.start not in explained
        for token in read
    )


def main() -> int:
    files = sorted(SOURCE.rglob("*.py"))
    size = {
        "tokens of code": sum(
            tokens(file.read_text(encoding="utf-8")) for file in files
        ),
        "files": len(files),
    }
    over = [name for name in BUDGET if size[name] > BUDGET[name]]
    for name in BUDGET:
        sys.stdout.write(f"{size[name]:>8,} {name}, at most {BUDGET[name]:,}\n")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
