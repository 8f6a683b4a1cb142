"""Rows of named columns, from a file or from an array, and what a single cell can hold.

Errors name the line (of a CSV) or row, the column, and what to do in the words of the caller: by
options of the command line for a file, by arguments for an array.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field
from numbers import Number
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from hdnn.data.cells import MISSING, WHOLE, Cells, is_date, is_missing, number, parse, text
from hdnn.errors import DataError

# What pandas and R write beside the columns, to number the rows; in a CSV it has no name.
INDEX = ("", "__index_level_0__")


class CellTypeError(DataError, TypeError):
    """A cell that holds neither a number nor a text."""


@dataclass(frozen=True, eq=False)
class Table:
    """Columns of equal length, as they stood in the file: texts, or values of a Parquet file."""

    path: Path
    columns: dict[str, Any]  # lists of cells; an array has arrays of numbers too
    lines: list[int]  # where each row stands in a CSV; empty for a Parquet file

    parsed: dict[str, Cells] = field(default_factory=dict, init=False, repr=False)

    filling: ClassVar[str] = "--missing fill"

    @property
    def rows(self) -> int:
        return len(next(iter(self.columns.values())))

    def where(self, row: int) -> str:
        """Where to look for a row in the file."""
        return f"line {self.lines[row]}" if self.lines else f"row {row + 1}"

    def label(self, name: str) -> str:
        """A column as messages name it."""
        return f"column {short(name)}"

    def without(self, name: str) -> str:
        """How to leave a column out."""
        return f"leave the column out with --drop {shlex.quote(name)}"

    def insist(self, name: str) -> str:
        """How to say that a column holds categories."""
        return f"say --categorical {shlex.quote(name)}"

    def column(self, name: str) -> Any:
        """The values of one column, or an error that suggests the nearest name."""
        if name in self.columns:
            return self.columns[name]
        near = difflib.get_close_matches(name, self.columns, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {listed(self.columns)}."
        raise DataError(f"{self.path} has no column {name!r}; {hint}")

    def cells(self, name: str) -> Cells:
        """One column, looked at once."""
        if name not in self.parsed:
            self.parsed[name] = parse(self.column(name))
        return self.parsed[name]

    def numbers(self, name: str, *, gaps: bool = False) -> np.ndarray:
        """One column as finite float64 numbers; true and false count as 1 and 0.

        With `gaps`, values may be missing: there the numbers are NaN.
        """
        cells = self.cells(name)
        wrong = cells.other | np.isinf(cells.numbers)
        if not (cells.words | cells.gaps).all():  # true and false among numbers
            wrong |= cells.words
        if not gaps:
            wrong |= cells.gaps
        if wrong.any():
            raise self.no_number(name, int(wrong.argmax()))
        return cells.numbers.copy()

    def texts(self, name: str) -> list[str]:
        """One column as texts without blanks around them, none of them missing."""
        values = self.column(name)
        for row in np.flatnonzero(self.cells(name).gaps).tolist():
            if is_missing(values[row], MISSING):
                raise self.no_class(name, row)
        return [text(v) for v in values]

    def classes(self, name: str) -> list[str]:
        """One column as names of classes: whole numbers without leading zeros, or texts."""
        texts = self.texts(name)
        if all(re.fullmatch(WHOLE, text) for text in texts):
            return [str(int(text)) for text in texts]
        return texts

    def no_number(self, name: str, row: int) -> DataError:
        """What is wrong with a value that is no finite number."""
        value = self.column(name)[row]
        if is_missing(value, MISSING):
            return self.missing(name, row)
        found = number(value)
        if found is None:
            return self.wrong(name, row, self.without(name))
        return DataError(
            f"{self.place(name, row)}: {short(value)} is not finite; remove the row or replace "
            "the value."
        )

    def wrong(self, name: str, row: int, advice: str) -> DataError:
        """The error for a cell that is no number, where the others are."""
        value = self.column(name)[row]
        if not isinstance(value, (str, bytes, Number)) and not is_date(value):
            return CellTypeError(
                f"{self.place(name, row)}: {short(value)} is a {type(value).__name__}, but a cell "
                f"of this argument must be a string or a number; mend it, or {advice}."
            )
        return DataError(
            f"{self.place(name, row)}: {short(value)} is not a number; mend it, or {advice}."
        )

    def missing(self, name: str, row: int) -> DataError:
        return DataError(
            f"{self.place(name, row)}: the value is missing; remove the row or fill it in."
        )

    def no_class(self, name: str, row: int) -> DataError:
        """The error for a class that is missing, or has a name that stands for that."""
        value = self.column(name)[row]
        if not isinstance(value, str) or not value.strip():
            return self.missing(name, row)
        return DataError(
            f"{self.place(name, row)}: {short(value)} counts as a missing value; remove the row or "
            f"fill it in. If it is a class, write it in another way, such as '({value.strip()})'."
        )

    def gap(self, name: str, row: int) -> DataError:
        """The error for a missing value of an input, which could be filled."""
        return DataError(
            f"{self.place(name, row)}: the value is missing; remove the row, fill it in, or train "
            f"with {self.filling}."
        )

    def place(self, name: str, row: int) -> str:
        """A cell as messages name it."""
        return f"{self.path}, {self.where(row)}, {self.label(name)}"


@dataclass(frozen=True, eq=False)
class Frame(Table):
    """The columns of an array or a data frame in Python; names of unnamed ones are positions."""

    named: bool = True

    filling: ClassVar[str] = 'missing="fill"'

    def where(self, row: int) -> str:
        return f"row {row} (counted from 0)"

    def label(self, name: str) -> str:
        return super().label(name) if self.named else f"column {name}"

    def without(self, name: str) -> str:
        return "drop the column"

    def insist(self, name: str) -> str:
        return f"say categorical=[{repr(name) if self.named else name}]"


def listed(names: Iterable[Any]) -> str:
    names = list(names)
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(short(name) for name in names[:8]) + more


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:56]}..."
