"""Tables: columns of numbers, and a target column to learn.

Errors name the line (of a CSV) or row (of a Parquet file), and the column.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from hdnn.data.table_files import CSV as CSV
from hdnn.data.table_files import LONGEST as LONGEST
from hdnn.data.table_files import MOST_CELLS as MOST_CELLS
from hdnn.data.table_files import PARQUET as PARQUET
from hdnn.data.table_files import PIECE as PIECE
from hdnn.data.table_files import read_columns
from hdnn.errors import CheckpointError, DataError, choose

MISSING = ("", "na", "n/a", "nan", "null", "none")
BOOLEANS = {"true": 1.0, "false": 0.0}
TASKS = ("auto", "classification", "regression")
WHOLE = r"[+-]?[0-9]{1,18}"
FEW = 20  # different whole numbers, up to which a target is taken for classes


@dataclass(frozen=True, eq=False)
class Table:
    """Columns of equal length, as they stood in the file: texts, or values of a Parquet file."""

    path: Path
    columns: dict[str, list[Any]]
    lines: list[int]  # where each row stands in a CSV; empty for a Parquet file

    @property
    def rows(self) -> int:
        return len(next(iter(self.columns.values())))

    def where(self, row: int) -> str:
        """Where to look for a row in the file."""
        return f"line {self.lines[row]}" if self.lines else f"row {row + 1}"

    def column(self, name: str) -> list[Any]:
        """The values of one column, or an error that suggests the nearest name."""
        if name in self.columns:
            return self.columns[name]
        near = difflib.get_close_matches(name, self.columns, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {_listed(self.columns)}."
        raise DataError(f"{self.path} has no column {name!r}; {hint}")

    def numbers(self, name: str) -> np.ndarray:
        """One column as finite float64 numbers; true and false count as 1 and 0."""
        values = self.column(name)
        words = [v.strip().lower() if isinstance(v, str) else v for v in values]
        if all(isinstance(word, str) and word in BOOLEANS for word in words):
            return np.array([BOOLEANS[word] for word in words])
        try:
            numbers = np.array([float(v) for v in values])
        except (TypeError, ValueError, OverflowError):
            numbers = np.array([math.nan])
        if not np.isfinite(numbers).all():
            raise self._no_number(name, values)
        return numbers

    def texts(self, name: str) -> list[str]:
        """One column as texts without blanks around them, none of them missing."""
        values = self.column(name)
        for row, value in enumerate(values):
            if _is_missing(value):
                raise self._missing(name, row)
        return [v.strip() if isinstance(v, str) else str(v) for v in values]

    def classes(self, name: str) -> list[str]:
        """One column as names of classes: whole numbers without leading zeros, or texts."""
        texts = self.texts(name)
        if all(re.fullmatch(WHOLE, text) for text in texts):
            return [str(int(text)) for text in texts]
        return texts

    def _no_number(self, name: str, values: Sequence[Any]) -> DataError:
        """What is wrong with the first value that is no finite number."""
        for row, value in enumerate(values):
            if _is_missing(value):
                return self._missing(name, row)
            number = _number(value)
            if number is None:
                return DataError(
                    f"{self.path}, {self.where(row)}, column {name!r}: {_short(value)} is not a "
                    f"number; mend it, or leave the column out with --drop {name}."
                )
            if not math.isfinite(number):
                return DataError(
                    f"{self.path}, {self.where(row)}, column {name!r}: {_short(value)} is not "
                    "finite; remove the row or replace the value."
                )
        return DataError(f"{self.path}: column {name!r} holds no numbers.")

    def _missing(self, name: str, row: int) -> DataError:
        return DataError(
            f"{self.path}, {self.where(row)}, column {name!r}: the value is missing; "
            "remove the row or fill it in."
        )


def is_file_name(data: str) -> bool:
    """Whether `data` names a file, rather than one of the data sets of the package."""
    return Path(data).suffix.lower() in (*CSV, *PARQUET) or os.path.exists(data)


def read(path: str | os.PathLike[str]) -> Table:
    """Read a CSV (comma, semicolon or tab; header in the first line) or a Parquet file."""
    path = Path(path)
    return Table(path, *read_columns(path))


@dataclass(frozen=True)
class Columns:
    """How rows of a table become inputs of a model, and its outputs values of the target."""

    task: str  # "classification" or "regression"
    target: str
    names: list[str]
    mean: list[float]
    scale: list[float]
    classes: list[str]  # empty for a regression
    target_mean: float = 0.0
    target_scale: float = 1.0

    @classmethod
    def learn(
        cls, table: Table, target: str, *, task: str = "auto", drop: Iterable[str] = ()
    ) -> tuple[Self, np.ndarray, np.ndarray]:
        """The columns, inputs (B, d) not yet standardised, and labels or values (B,)."""
        table.column(target)
        for name in drop:
            table.column(name)
        names = [name for name in table.columns if name != target and name not in drop]
        if not names:
            raise DataError(f"{table.path} has no column besides the target {target!r}.")
        task, classes, t = _target(table, target, choose("task", task, TASKS))
        x = np.stack([table.numbers(name) for name in names], 1)
        one, zero = [1.0] * len(names), [0.0] * len(names)
        return cls(task, target, names, zero, one, classes), x, t

    def standardised(self, x: np.ndarray, t: np.ndarray) -> Self:
        """The same columns, with the means and spreads of these rows."""
        (mean, scale), (centre, spread) = _moments(x), _moments(t[:, None].astype(float))
        for name, m, s in zip(self.names, mean, scale, strict=True):
            if not (math.isfinite(m) and math.isfinite(s)):
                raise DataError(f"the numbers in column {name!r} are too large to standardise.")
        found = replace(self, mean=mean.tolist(), scale=scale.tolist())
        if self.task != "regression":
            return found
        if not (math.isfinite(centre[0]) and math.isfinite(spread[0])):
            raise DataError(f"the numbers in column {self.target!r} are too large to learn.")
        return replace(found, target_mean=float(centre[0]), target_scale=float(spread[0]))

    def inputs(self, x: np.ndarray) -> np.ndarray:
        """Rows (B, d) of a table as inputs of the model."""
        return _scaled(x, self.mean, self.scale)

    def of(self, table: Table, x: np.ndarray | None = None) -> np.ndarray:
        """The inputs (B, d) of all rows of a table; `x`: its numbers, where they are known."""
        x = np.stack([table.numbers(name) for name in self.names], 1) if x is None else x
        return _near(table, self.names, self.inputs(x))

    def values(self, table: Table, t: np.ndarray) -> np.ndarray:
        """Numbers (B,) of the target as outputs (B, 1) of the model."""
        scaled = _scaled(t[:, None], [self.target_mean], [self.target_scale])
        return _near(table, [self.target], scaled)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, given: Any, path: Path) -> Self:
        """What `to_json` gave, or an error that names the file it was read from."""
        names = [field.name for field in fields(cls)]
        try:
            made = cls(**{name: given[name] for name in names})
            numbers = [*made.mean, *made.scale, made.target_mean, made.target_scale]
            sizes = {len(made.names), len(made.mean), len(made.scale)}
            if len(sizes) != 1 or not all(math.isfinite(n) for n in numbers):
                raise ValueError("its lists do not fit together")
            choose("task", made.task, TASKS[1:])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} is damaged or was edited ({error}).") from error
        return made


def split(t: np.ndarray, fraction: float, seed: int, *, classes: bool) -> tuple[Any, Any]:
    """Row numbers to train on and to test with; each class in both, as far as it has rows."""
    random = np.random.default_rng(seed)
    groups = [np.flatnonzero(t == c) for c in np.unique(t)] if classes else [np.arange(len(t))]
    train, test = [], []
    for group in groups:
        shuffled = random.permutation(group)
        count = min(round(fraction * len(group)), len(group) - 1)
        test.append(shuffled[:count])
        train.append(shuffled[count:])
    return np.sort(np.concatenate(train)), np.sort(np.concatenate(test))


def _target(table: Table, name: str, task: str) -> tuple[str, list[str], np.ndarray]:
    """The task, the names of the classes, and labels 0 .. classes-1 or values."""
    if task == "auto":
        task = _guess(table, name, table.classes(name))
    if task == "regression":
        values = table.numbers(name)
        if len(np.unique(values)) < 2:
            raise DataError(
                f"{table.path}: the target {name!r} is {values[0]:g} in every row; "
                "there is nothing to learn."
            )
        return task, [], values
    texts = table.classes(name)
    whole = all(re.fullmatch(WHOLE, text) for text in texts)
    classes = sorted(set(texts), key=int if whole else str)
    if len(classes) < 2:
        raise DataError(
            f"{table.path}: the target {name!r} has one class only, {_short(classes[0])}; "
            "a classifier needs at least two."
        )
    if len(classes) > max(FEW, len(texts) // 2):
        raise DataError(
            f"{table.path}: the target {name!r} has {len(classes)} different values in "
            f"{len(texts)} rows, too many for classes; is it the right column?"
        )
    number = {c: i for i, c in enumerate(classes)}
    return task, classes, np.array([number[text] for text in texts])


def _guess(table: Table, name: str, texts: list[str]) -> str:
    """Texts and few whole numbers are classes; other numbers are values."""
    numeric = [_number(v) is not None for v in table.column(name)]
    if not all(numeric):
        if sum(numeric) > len(numeric) / 2:
            row = numeric.index(False)
            raise DataError(
                f"{table.path}, {table.where(row)}, column {name!r}: {_short(texts[row])} is not "
                "a number, unlike most of the target; mend it, or say --task classification."
            )
        return "classification"
    if any(isinstance(v, bool) for v in table.column(name)):
        return "classification"
    whole = all(re.fullmatch(WHOLE, text) for text in texts)
    few = len(set(texts)) <= min(FEW, max(2, len(texts) // 2))
    return "classification" if whole and few else "regression"


def _moments(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Means and standard deviations of the columns; a constant column has 1."""
    with np.errstate(over="ignore", invalid="ignore"):
        mean, deviation = x.mean(0), x.std(0)
    constant = deviation <= 1e-12 * np.abs(mean)
    return mean, np.where(constant, 1.0, deviation)


def _scaled(x: np.ndarray, mean: list[float], scale: list[float]) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        return (x - np.array(mean)) / np.array(scale)


def _near(table: Table, names: list[str], x: np.ndarray) -> np.ndarray:
    """The same numbers, if float32 can compute with them."""
    far = ~(np.abs(x) <= 1e30)
    if far.any():
        row, column = (int(i[0]) for i in far.nonzero())
        raise DataError(
            f"{table.path}, {table.where(row)}, column {names[column]!r}: the value is "
            "too far from all that the model was trained on."
        )
    return x


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _is_missing(value: Any) -> bool:
    if isinstance(value, str):
        return value.strip().lower() in MISSING
    return value is None or (isinstance(value, float) and math.isnan(value))


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(_short(name) for name in names[:8]) + more


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:56]}..."
