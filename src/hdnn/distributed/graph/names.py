"""Names of nodes, and which node has which columns of a table, as a graph file gives them.

names = ["pump", "valve", "tank"]     # instead of nodes = 3; numbers still work

[columns]
flow = "pump"                         # a column and its node, by name or by number
valve = ["opening", "age"]            # or a node and all its columns
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Any

from hdnn.errors import SparsityError, quoted

NAME = re.compile(r"[^\W_]([\w .-]{0,62}[\w-])?")  # files are called by it
LISTED = ("edges", "R", "T")


def names_of(table: dict[str, Any], where: str) -> tuple[str, ...]:
    """The names of the nodes in a graph file, checked; none where it has none."""
    given = table.get("names", [])
    if not isinstance(given, list):
        raise SparsityError(f"names of {where} must be a list of texts, but is {quoted(given)}.")
    seen: dict[str, str] = {}
    for name in given:
        if not isinstance(name, str) or not NAME.fullmatch(name) or name.isdecimal():
            raise SparsityError(
                f"names of {where} has {quoted(name)}, but a name has 1 to 64 letters, digits, "
                "blanks, dots, - and _, begins with a letter or a digit, and is no number."
            )
        if name.casefold() in seen:
            raise SparsityError(
                f"names of {where} has {seen[name.casefold()]!r} and {name!r}; give each node a "
                "name of its own: files are called by it."
            )
        seen[name.casefold()] = name
    nodes = table.get("nodes", len(given))
    if given and nodes != len(given):
        raise SparsityError(
            f"names of {where} are {len(given)}, but there are {quoted(nodes)} nodes; give each "
            "node a name."
        )
    return tuple(given)


def numbered(table: dict[str, Any], names: Sequence[str], where: str) -> dict[str, Any]:
    """The same table with numbers in place of names."""
    if not names:
        return table
    found = {**table, "nodes": len(names)}
    for key in LISTED:
        rows = table.get(key)
        if isinstance(rows, list):
            found[key] = [_numbers(row, names, f"{key} of {where}") for row in rows]
    return found


def _numbers(row: Any, names: Sequence[str], what: str) -> Any:
    if not isinstance(row, list):
        return row
    return [number(end, names, what) if isinstance(end, str) else end for end in row]


def number(node: str | int, names: Sequence[str], where: str) -> int:
    """The number of a node that is called by its name."""
    if node in names:
        return list(names).index(str(node))
    near = difflib.get_close_matches(str(node), names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "add names = [..], one for each node."
    if names and not near:
        hint = f"there are {', '.join(map(repr, names[:8]))}{' ..' if len(names) > 8 else ''}."
    raise SparsityError(f"{where} has {quoted(node)}, but no node has that name; {hint}")


def columns_of(
    table: dict[str, Any], names: Sequence[str], nodes: int, where: str
) -> dict[str, int]:
    """The node of each column, by the name of the column."""
    given, what = table.get("columns", {}), f"columns of {where}"
    if not isinstance(given, dict):
        raise SparsityError(
            f'{what} must say which node has which column, as in [columns] and flow = "pump", but '
            f"is {quoted(given)}."
        )
    pairs: list[tuple[str, Any]] = []
    for key, value in given.items():
        if isinstance(value, list):
            if not all(isinstance(column, str) for column in value):
                raise SparsityError(f"{what} must list names of columns for {key!r}.")
            own = int(key) if key.isdecimal() and key not in names else key
            pairs += [(column, own) for column in value]
        else:
            pairs.append((key, value))
    found: dict[str, int] = {}
    for column, node in pairs:
        if isinstance(node, str) and not (node.isdecimal() and node not in names):
            node = number(node, names, what)
        elif isinstance(node, str):
            node = int(node)
        if isinstance(node, bool) or not isinstance(node, int) or not 0 <= node < nodes:
            raise SparsityError(
                f"{what} gives {column!r} to {quoted(node)}, but nodes are numbers from 0 to "
                f"{nodes - 1}, or their names."
            )
        if found.setdefault(column, node) != node:
            raise SparsityError(f"{what} gives {column!r} to two nodes; give it to one.")
    return found
