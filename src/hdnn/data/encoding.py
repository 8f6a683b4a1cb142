"""How columns of any kind become inputs of a model: learned from rows, applied to new ones.

Numbers stay as they are, and missing ones are filled by the median. Texts become categories, each
an input that is 1 or 0. Where values were missing in the rows learned from, one more input says so.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, TypedDict

import numpy as np

from hdnn.base.memory import check_memory
from hdnn.data.cells import Cells, looks_dressed, looks_like_date, remembered
from hdnn.data.rows import Table, listed, short
from hdnn.errors import DataError, choose

GAPS = ("fill", "refuse")  # what becomes of missing values
KINDS = ("number", "categories", "nothing")
SEEN = ("seen", "none", "refused")  # missing values in the rows learned from
FEW = 20  # categories that any column may have
MOST = 255  # categories of a column that was not named as one
SCALINGS = ("deviation", "bounded")
FARTHEST = 4.0  # from the mean, that a number may be of those to learn from, if they are bounded
HALF = 0.5  # the largest standard deviation that an input of 0 and 1 can have


class Encoded(TypedDict):
    """What was learned of a column; `columns.json` holds it as it is."""

    name: str
    kind: str  # "number", "categories", or "nothing": a column that is left out
    gaps: str  # "seen": an input says where values are missing; "none" were; "refused"
    fill: float | None  # the median of a number
    constant: bool  # a number that is the same in all rows
    values: list[str]  # the categories, in order
    numeric: bool  # whether they are numbers: 1, 1.0 and 01 are one category


def learn(
    table: Table,
    names: Iterable[str],
    *,
    rows: np.ndarray | None = None,
    weight: np.ndarray | None = None,
    categorical: Iterable[str] = (),
    missing: str = "fill",
) -> list[Encoded]:
    """Find out from these rows (default: all) what each of the columns is.

    `weight` of the rows counts in medians, `categorical` names columns of categories, and `missing`
    is "fill" or "refuse".
    """
    choose("missing", missing, GAPS)
    chosen, categorical = np.arange(table.rows) if rows is None else rows, set(categorical)
    found, wrong = [], {}
    for name in names:
        try:
            found.append(_learn(table, name, chosen, weight, name in categorical, missing))
        except DataError as error:
            wrong[name] = error
    if wrong:
        raise _all_wrong(wrong)
    return found


def encode(table: Table, encoded: Sequence[Encoded]) -> tuple[np.ndarray, list[str]]:
    """The inputs (B, d) of all rows, and what is unlike the rows learned from, in words."""
    count, d = table.rows, sum(map(width, encoded))
    check_memory(8 * count * d, f"{d} inputs of {count} rows", "columns or categories")
    x, start, notes = np.zeros((count, d)), 0, []
    for column in encoded:
        if column["kind"] == "nothing":
            continue
        part = x[:, start : start + width(column)]
        fill = _fill_number if column["kind"] == "number" else _fill_categories
        notes += fill(table, column, part)
        start += width(column)
    return x, notes


def width(column: Encoded) -> int:
    """How many inputs a column becomes."""
    own = {"number": 1, "categories": len(column["values"]), "nothing": 0}[column["kind"]]
    return own + (column["gaps"] == "seen" and column["kind"] != "nothing")


def input_names(encoded: Sequence[Encoded]) -> list[str]:
    """A name for each input, no two alike."""
    names: list[str] = []
    for column in encoded:
        name = column["name"]
        own = [name] if column["kind"] == "number" else [f"{name}={v}" for v in column["values"]]
        own += [f"{name} is missing"] if width(column) > len(own) else []
        names += own[: width(column)]
    seen = Counter(names)
    return [name if seen[name] == 1 else f"{name} ({i})" for i, name in enumerate(names)]


def indicators(encoded: Sequence[Encoded]) -> np.ndarray:
    """Which inputs are 1 or 0 by their making (d,): those of categories and of missing values."""
    parts = [
        [column["kind"] != "number", *[True] * (width(column) - 1)]
        for column in encoded
        if width(column)
    ]
    return np.array([*itertools.chain(*parts)], bool)


def farthest(x: np.ndarray, mean: np.ndarray, weight: np.ndarray | None = None) -> np.ndarray:
    """How far the values of mostly constant inputs are from their means (d,); 0 for other inputs.

    A value that few rows have is ordinary there, and must not become a large input. In an input
    that varies it may be a mistake, to which the others must not be adapted.
    """
    weight = np.ones(len(x)) if weight is None else weight
    counted, weight = x[weight > 0], weight[weight > 0]
    half, found = weight.sum() / 2, np.zeros(x.shape[1])
    for k, column in enumerate(counted.T):
        order = np.argsort(column, kind="stable")
        middle = column[order[np.searchsorted(np.cumsum(weight[order]), half)]]
        if weight[column == middle].sum() > half:
            found[k] = np.abs(column - mean[k]).max()
    return found


def rescale(scale: Any, encoded: Sequence[Encoded], far: np.ndarray | None = None) -> None:
    """Give inputs a scale that blows up neither rare categories nor rare values.

    `far` are distances from the means, as of `farthest`: none is more than `FARTHEST` then.
    """
    if far is not None:
        np.maximum(scale, far / FARTHEST, out=scale)
    if encoded:
        scale[indicators(encoded)] = HALF


def is_possible(column: Encoded) -> bool:
    """Whether this may have been learned of a column, and was not edited by hand."""
    if column["kind"] not in KINDS or column["gaps"] not in SEEN:
        return False
    if column["kind"] == "number":
        return column["fill"] is not None and not column["values"]
    known = column["values"]
    return len(set(known)) == len(known) and (bool(known) or column["kind"] == "nothing")


def is_plain(encoded: Sequence[Encoded]) -> bool:
    """Whether each column is a number that never was missing."""
    return all(column["kind"] == "number" and column["gaps"] != "seen" for column in encoded)


def _all_wrong(wrong: dict[str, DataError]) -> DataError:
    """The first error, with the names of all other columns that cannot be used."""
    (_, first), *others = wrong.items()
    if not others:
        return first
    too = listed(name for name, _ in others)
    return type(first)(f"{first} Not usable as they are either: {too}.")


def _learn(
    table: Table,
    name: str,
    rows: np.ndarray,
    weight: np.ndarray | None,
    named: bool,
    missing: str,
) -> Encoded:
    """What a column is."""
    cells = table.cells(name)
    if missing == "refuse" and cells.gaps.any():
        raise table.gap(name, int(cells.gaps.argmax()))
    seen = rows[~cells.gaps[rows]]
    where = "refused" if missing == "refuse" else "seen" if len(seen) < len(rows) else "none"
    found = Encoded(
        name=name, kind="nothing", gaps=where, fill=None, constant=False, values=[], numeric=False
    )
    if not len(seen):
        return found
    if not named and _is_number(table, name, cells, seen):
        numbers = table.numbers(name, gaps=True)[seen]
        found["kind"] = "number"
        found["fill"] = _median(numbers, None if weight is None else weight[seen])
        found["constant"] = bool((numbers == numbers[0]).all())
        return found
    numeric = not (cells.other | cells.words)[seen].any()
    every = cells.texts(numeric)
    texts = {every[row] for row in seen.tolist()}
    if not named:
        _check_categories(table, name, len(texts), seen)
    found["values"], found["numeric"] = sorted(texts, key=_order if numeric else str), numeric
    if len(texts) > 1 or where == "seen":
        found["kind"] = "categories"
    return found


def _order(number: str) -> tuple[float, str]:
    return float(number), number  # the text tells large numbers apart


def _is_number(table: Table, name: str, cells: Cells, seen: np.ndarray) -> bool:
    """Whether a column holds numbers, and not categories; an error if it is neither."""
    if cells.words[seen].all() or not (cells.other | cells.words)[seen].any():
        return True
    others = seen[(cells.other | cells.words)[seen]].tolist()
    values = [cells.values[row] for row in others]
    drop, insist = table.without(name), table.insist(name)
    half, some = len(seen) / 2, len(seen) / 4
    numeric = len(seen) - len(others)
    for like, what, advice in (
        (looks_like_date, "a date or time", "turn it into numbers (such as days)"),
        (looks_dressed, "a number that is not written plainly", "write it like 1234.5"),
    ):
        alike = [*map(remembered(like), values)]
        if sum(alike) > half and numeric < some:
            row = others[alike.index(True)]
            raise DataError(
                f"{table.place(name, row)}: {short(cells.values[row])} is {what}, as most of the "
                f"column; {advice}, {drop}, or {insist} if each is a category."
            )
    for row, value in zip(others, values, strict=True):
        if not isinstance(value, (str, bytes)):
            raise table.wrong(name, row, drop)
    if numeric >= some:
        raise table.wrong(name, others[0], f"{drop}, or {insist} if it holds categories")
    return False


def _check_categories(table: Table, name: str, count: int, seen: np.ndarray) -> None:
    """Refuse texts that hardly ever repeat: names, numbers of orders, remarks."""
    rows, example = len(seen), table.column(name)[int(seen[0])]
    if count <= MOST and not count > max(FEW, rows / 2) and not 10 <= count == rows:
        return
    raise DataError(
        f"{table.path}: {table.label(name)} has {count} different texts in {rows} rows, such as "
        f"{short(example)}: too many for categories; {table.without(name)}, or "
        f"{table.insist(name)} to take them anyway."
    )


def _median(numbers: np.ndarray, weight: np.ndarray | None) -> float:
    """The median; a row with weight two counts as two rows."""
    if weight is None:
        low, high = (len(numbers) - 1) // 2, len(numbers) // 2
        a, b = np.partition(numbers, [low, high])[[low, high]]
    else:
        order = np.argsort(numbers, kind="stable")
        ends = np.cumsum(weight[order])
        low, high = (np.searchsorted(ends, ends[-1] / 2, side) for side in ("left", "right"))
        a, b = numbers[order][[low, min(high, len(numbers) - 1)]]
    return float(a if a == b else a / 2 + b / 2)  # the sum may be too large


def _fill_number(table: Table, column: Encoded, x: np.ndarray) -> list[str]:
    name, fill = column["name"], column["fill"]
    gaps = table.cells(name).gaps
    x[:, 0] = table.numbers(name, gaps=True)
    if gaps.any() and (fill is None or column["gaps"] == "refused"):
        raise table.gap(name, int(gaps.argmax()))
    x[gaps, 0] = fill
    notes = []
    if column["gaps"] == "seen":
        x[:, 1] = gaps
    elif count := int(gaps.sum()):
        notes.append(
            f"{table.label(name)} has no value in {_rows(count)}, but had one in every row "
            f"learned from: its median, {fill:.4g}, is taken."
        )
    if column["constant"]:  # what another value means was not learned
        x[:, 0] = fill
    return notes


def _fill_categories(table: Table, column: Encoded, x: np.ndarray) -> list[str]:
    name, cells = column["name"], table.cells(column["name"])
    gaps = cells.gaps
    if gaps.any() and column["gaps"] == "refused":
        raise table.gap(name, int(gaps.argmax()))
    position = {value: i for i, value in enumerate(column["values"])}
    texts = cells.texts(column["numeric"])
    found = np.array([-1 if t is None else position.get(t, -1) for t in texts])
    known = np.flatnonzero(found >= 0)
    x[known, found[known]] = 1.0
    notes = []
    unseen = np.flatnonzero((found < 0) & ~gaps)
    if len(unseen):
        new = [*dict.fromkeys(texts[i] for i in unseen)]
        notes.append(
            f"{table.label(name)} has categories that were not learned, in {_rows(len(unseen))}: "
            f"{listed(new)}; they count as none of the known ones."
        )
    if column["gaps"] == "seen":
        x[:, -1] = gaps
    elif count := int(gaps.sum()):
        notes.append(
            f"{table.label(name)} has no value in {_rows(count)}, but had one in every row "
            "learned from: it counts as none of the known categories."
        )
    return notes


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"
