"""Rows of named columns, from a file or from an array, and what a single cell can hold.

Errors name the line (of a CSV) or row, the column, and what to do in the words of the caller: by
options of the command line for a file, by arguments for an array.
"""

from __future__ import annotations

import datetime
import difflib
import itertools
import math
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Number
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from hdnn.errors import DataError

MISSING = ("", "na", "n/a", "nan", "null", "none")
MISSING_INPUT = (*MISSING, "#n/a", "<na>", "nat", "?")  # a target may have a class of this name
BOOLEANS = {"true": 1.0, "false": 0.0}
WHOLE = r"[+-]?[0-9]{1,18}"

_MONTH = r"(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?"
_TIME = r"\d{1,2}:\d{2}(:\d{2}([.,]\d+)?)?(\s?[ap]m)?\s?(z|utc|[+-]\d{2}:?\d{2})?"
_DAY = (
    r"\d{4}[-/.]\d{1,2}([-/.]\d{1,2})?|\d{1,2}[-/.]\d{1,2}[-/.](\d{4}|\d{2})"
    rf"|\d{{1,2}}[- ]{_MONTH}[- ,]*\d{{2,4}}|{_MONTH} \d{{1,2}},? \d{{2,4}}|{_MONTH} \d{{4}}"
)
_DATE = re.compile(rf"({_DAY})([t ,]+{_TIME})?|{_TIME}", re.IGNORECASE)
# Numbers with a currency, a percent sign, a decimal comma or groups of thousands.
_DRESSED = re.compile(r"[$€£]?\s?[+-]?\d[\d.,' \u00a0]*\s?[%$€£]?")
_DATES = (datetime.date, datetime.time, datetime.timedelta, np.datetime64, np.timedelta64)


class CellTypeError(DataError, TypeError):
    """A cell that holds neither a number nor a text."""


@dataclass(frozen=True, eq=False)
class Table:
    """Columns of equal length, as they stood in the file: texts, or values of a Parquet file."""

    path: Path
    columns: dict[str, Any]  # lists of cells; an array has arrays of numbers too
    lines: list[int]  # where each row stands in a CSV; empty for a Parquet file

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

    def numbers(self, name: str, gaps: np.ndarray | None = None) -> np.ndarray:
        """One column as finite float64 numbers; true and false count as 1 and 0.

        `gaps` says where values may be missing: there the numbers are NaN.
        """
        values = self.column(name)
        if isinstance(values, np.ndarray):
            numbers = values.astype(np.float64)
            wrong = ~np.isfinite(numbers) if gaps is None else np.isinf(numbers)
            if wrong.any():
                raise self.no_number(name, values)
            return numbers
        there = np.ones(len(values), bool) if gaps is None else ~gaps
        present = values if gaps is None else list(itertools.compress(values, there))
        words = [v.strip().lower() if isinstance(v, str) else v for v in present]
        numbers = np.full(len(values), math.nan)
        try:
            if all(isinstance(word, str) and word in BOOLEANS for word in words):
                numbers[there] = [BOOLEANS[word] for word in words]
            else:
                numbers[there] = [math.nan if is_date(v) else float(v) for v in present]
        except (TypeError, ValueError, OverflowError):
            raise self.no_number(name, values, gaps) from None
        if not np.isfinite(numbers[there]).all():
            raise self.no_number(name, values, gaps)
        return numbers

    def texts(self, name: str) -> list[str]:
        """One column as texts without blanks around them, none of them missing."""
        values = self.column(name)
        for row, value in enumerate(values):
            if is_missing(value, MISSING):
                raise self.missing(name, row)
        return [text(v) for v in values]

    def classes(self, name: str) -> list[str]:
        """One column as names of classes: whole numbers without leading zeros, or texts."""
        texts = self.texts(name)
        if all(re.fullmatch(WHOLE, text) for text in texts):
            return [str(int(text)) for text in texts]
        return texts

    def no_number(
        self, name: str, values: Iterable[Any], gaps: np.ndarray | None = None
    ) -> DataError:
        """What is wrong with the first value that is no finite number."""
        for row, value in enumerate(values):
            if is_missing(value, MISSING if gaps is None else MISSING_INPUT):
                if gaps is not None:
                    continue
                return self.missing(name, row)
            found = number(value)
            if found is None:
                return self.wrong(name, row, self.without(name))
            if not math.isfinite(found):
                return DataError(
                    f"{self.place(name, row)}: {short(value)} is not finite; "
                    "remove the row or replace the value."
                )
        return DataError(f"{self.path}: {self.label(name)} holds no numbers.")

    def wrong(self, name: str, row: int, advice: str) -> DataError:
        """The error for a cell that is no number, where the others are."""
        value = self.column(name)[row]
        if not isinstance(value, (str, bytes, Number)) and not is_date(value):
            return CellTypeError(
                f"{self.place(name, row)}: {short(value)} is a {type(value).__name__}, but a cell "
                "of this argument must be a string or a number."
            )
        return DataError(
            f"{self.place(name, row)}: {short(value)} is not a number; mend it, or {advice}."
        )

    def missing(self, name: str, row: int) -> DataError:
        return DataError(
            f"{self.place(name, row)}: the value is missing; remove the row or fill it in."
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


def number(value: Any) -> float | None:
    """A cell as a number; None if it is none."""
    if is_date(value):  # NumPy would count its nanoseconds
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def is_missing(value: Any, words: Sequence[str] = MISSING_INPUT) -> bool:
    """Whether a cell holds no value: empty, a word for it, None, or what is not equal to itself."""
    if isinstance(value, str):
        return value.strip().lower() in words
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    different = value != value
    return isinstance(different, (bool, np.bool_)) and bool(different)


def find_gaps(values: Any) -> np.ndarray:
    """Where a column has no value (B,)."""
    if isinstance(values, np.ndarray):
        return np.isnan(values) if values.dtype.kind == "f" else np.zeros(len(values), bool)
    return np.array([is_missing(value) for value in values], bool)


def is_boolean(value: Any) -> bool:
    """Whether a cell says true or false."""
    if isinstance(value, str):
        return value.strip().lower() in BOOLEANS
    return isinstance(value, (bool, np.bool_))


def is_date(value: Any) -> bool:
    """Whether a cell is an object that stands for a date or a time."""
    return isinstance(value, _DATES) or type(value).__name__ == "Period"


def looks_like_date(value: Any) -> bool:
    """Whether a cell is a date or a time, or a text that is written as one."""
    return is_date(value) or (isinstance(value, str) and bool(_DATE.fullmatch(value.strip())))


def looks_dressed(value: Any) -> bool:
    """Whether a text is a number with a currency, a percent sign, or commas."""
    return isinstance(value, str) and bool(_DRESSED.fullmatch(value.strip()))


def text(value: Any) -> str:
    """A cell as a text without blanks around it."""
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    return value.strip() if isinstance(value, str) else str(value)


def plain_number(value: Any) -> str:
    """A number as the text of its category: 1, 1.0 and 01 are one; other cells as they are."""
    found = number(value)
    if found is None or not math.isfinite(found):
        return text(value)
    return str(int(found)) if found == int(found) else repr(found)


def listed(names: Iterable[Any]) -> str:
    names = list(names)
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(short(name) for name in names[:8]) + more


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:56]}..."
