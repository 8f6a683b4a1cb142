"""What a person should know of the columns that a model learns from, in a line each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from hdnn.data.encoding import FEW, Encoded, width
from hdnn.data.rows import Table, short


def remarks(
    table: Table, encoded: Sequence[Encoded], x: np.ndarray, rows: np.ndarray | None = None
) -> list[str]:
    """What a person should know of the columns; `x` are the inputs, learned from these rows."""
    texts = [c for c in encoded if c["kind"] == "categories"]
    gaps = [c for c in encoded if c["kind"] == "number" and c["gaps"] == "seen"]
    empty = [c for c in encoded if c["kind"] == "nothing" and not c["values"]]
    same = [c for c in encoded if c["constant"] and c["gaps"] != "seen"]
    same += [c for c in encoded if c["kind"] == "nothing" and c["values"]]
    said = []
    if texts:
        many = [f"{short(c['name'])} ({len(c['values'])})" for c in texts]
        said.append(f"columns taken as categories: {_some(many)}.")
    if gaps:
        fills = [f"{short(c['name'])} by {c['fill']:.4g}" for c in gaps]
        said.append(
            "missing values are filled by the median, and one more input says where: "
            f"{_some(fills)}."
        )
    if empty:
        said.append(f"columns without any value are left out: {_some(_names(empty))}.")
    if same:
        said.append(
            f"columns that are the same in every row tell nothing and are ignored: "
            f"{_some(_names(same))}."
        )
    counting, pairs = _counting(encoded, x), _duplicates(encoded, x if rows is None else x[rows])
    if counting:
        said.append(
            f"columns that only count the rows: {_some(map(short, counting))}; "
            f"{table.without(counting[0])}, unless their order means something."
        )
    if pairs:
        alike = [f"{short(first)} and {short(second)}" for first, second in pairs]
        said.append(f"columns that tell the same, so that one is enough: {_some(alike)}.")
    return said


def _parts(encoded: Sequence[Encoded], x: np.ndarray) -> Iterator[tuple[Encoded, np.ndarray]]:
    """Each column that is not constant or left out, with its inputs."""
    start = 0
    for column in encoded:
        if width(column) and not column["constant"]:
            yield column, x[:, start : start + width(column)]
        start += width(column)


def _counting(encoded: Sequence[Encoded], x: np.ndarray) -> list[str]:
    """Columns that number the rows."""
    return [
        column["name"]
        for column, part in _parts(encoded, x)
        if column["kind"] == "number" and len(part) > FEW and (np.diff(part[:, 0]) == 1).all()
    ]


def _duplicates(encoded: Sequence[Encoded], x: np.ndarray) -> list[tuple[str, str]]:
    """Pairs of columns that become the same inputs."""
    first: dict[bytes, str] = {}
    pairs = []
    for column, part in _parts(encoded, x):
        known = first.setdefault(np.ascontiguousarray(part).tobytes(), column["name"])
        if known != column["name"]:
            pairs.append((known, column["name"]))
    return pairs


def _names(columns: Iterable[Encoded]) -> list[str]:
    return [short(column["name"]) for column in columns]


def _some(words: Iterable[str]) -> str:
    words = [*words]
    return ", ".join(words[:8]) + (f" and {len(words) - 8} more" if len(words) > 8 else "")
