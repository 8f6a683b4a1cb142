"""What a cell of a table can hold: a number, a truth value, a text, a date, or nothing."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

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


@dataclass(frozen=True, eq=False)
class Cells:
    """A column that was read once: what is a number in it, and what is missing."""

    values: Any  # a list, or an array of numbers
    numbers: np.ndarray  # (B,), NaN where there is none; true and false count as 1 and 0
    gaps: np.ndarray  # where the value is missing (B,)
    words: np.ndarray  # where it is true or false, as a text (B,)
    other: np.ndarray  # where it is none of these (B,)

    def texts(self, numeric: bool) -> list[str | None]:
        """The names of categories; None where the value is missing."""
        as_text = remembered(plain_number if numeric else _category)
        return [
            None if gap else as_text(value)
            for value, gap in zip(self.values, self.gaps.tolist(), strict=True)
        ]


def parse(values: Any) -> Cells:
    """Look at every cell of a column."""
    count = len(values)
    gaps, words, other = (np.zeros(count, bool) for _ in range(3))
    if isinstance(values, np.ndarray):
        numbers = values.astype(np.float64)
        return Cells(values, numbers, np.isnan(numbers), words, other)
    dates = any(_is_date_type(kind) for kind in set(map(type, values)))
    # NumPy would count the nanoseconds of a date.
    numbers = _as_numbers([None if is_date(v) else v for v in values] if dates else values)
    missing, boolean = remembered(is_missing), remembered(_truth)
    for row in np.flatnonzero(np.isnan(numbers)).tolist():
        found = boolean(values[row])
        if found is not None:
            numbers[row], words[row] = found, True
        elif missing(values[row]):
            gaps[row] = True
        else:
            other[row] = True
    return Cells(values, numbers, gaps, words, other)


def _as_numbers(values: Sequence[Any]) -> np.ndarray:
    """All cells that are numbers, and NaN for the others."""
    try:
        return np.array([*map(float, values)])
    except (TypeError, ValueError, OverflowError):  # one by one takes longer
        return np.array([_or_nan(value) for value in values])


def _or_nan(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _truth(value: Any) -> float | None:
    return BOOLEANS.get(value.strip().lower()) if isinstance(value, str) else None


def remembered(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same function, which does not compute again what it has told of a text."""
    known: dict[str, Any] = {}

    def ask(value: Any) -> Any:
        if type(value) is not str:
            return function(value)
        if value not in known:
            known[value] = function(value)
        return known[value]

    return ask


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


def is_date(value: Any) -> bool:
    """Whether a cell is an object that stands for a date or a time."""
    return _is_date_type(type(value))


def _is_date_type(kind: type) -> bool:
    return issubclass(kind, _DATES) or kind.__name__ == "Period"


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
    if found != int(found):
        return repr(found)
    try:
        return str(int(value))  # every digit of a number that float64 would round
    except ValueError:  # such as 1e3
        return str(int(found))


def _category(value: Any) -> str:
    """A cell beside texts; a gap in the column, or a frame of numbers, makes 1.0 of 1."""
    return plain_number(value) if isinstance(value, float) else text(value)
