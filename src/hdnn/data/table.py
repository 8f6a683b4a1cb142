"""Tables: columns that become inputs of a model, and a target column to learn."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from hdnn.data import encoding
from hdnn.data.cells import BOOLEANS as BOOLEANS
from hdnn.data.cells import MISSING as MISSING
from hdnn.data.cells import WHOLE as WHOLE
from hdnn.data.cells import number
from hdnn.data.encoding import FEW as FEW
from hdnn.data.encoding import GAPS as GAPS
from hdnn.data.encoding import SCALINGS as SCALINGS
from hdnn.data.encoding import Encoded
from hdnn.data.remarks import remarks
from hdnn.data.rows import INDEX as INDEX
from hdnn.data.rows import Table as Table
from hdnn.data.rows import short
from hdnn.data.table_files import CSV as CSV
from hdnn.data.table_files import LONGEST as LONGEST
from hdnn.data.table_files import MOST_CELLS as MOST_CELLS
from hdnn.data.table_files import PARQUET as PARQUET
from hdnn.data.table_files import PIECE as PIECE
from hdnn.data.table_files import read_columns
from hdnn.errors import CheckpointError, DataError, OptionError, choose
from hdnn.errors import TableWarning as TableWarning

TASKS = ("auto", "classification", "regression")


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
    # What was learned of each column; empty for planar sets and in files of before: all are numbers
    # and may not be missing. `names`, `mean` and `scale` are those of the inputs.
    encoding: list[Encoded] = field(default_factory=list)

    @classmethod
    def learn(
        cls,
        table: Table,
        target: str,
        *,
        task: str = "auto",
        drop: Iterable[str] = (),
        categorical: Iterable[str] = (),
        missing: str = "fill",
        rows: np.ndarray | None = None,
        notes: list[str] | None = None,
    ) -> tuple[Self, np.ndarray, np.ndarray]:
        """The columns, inputs (B, d) not yet standardised, and labels or values (B,).

        Medians and categories are learned from `rows` (default: all). What a person should know is
        added to `notes`.
        """
        drop, categorical = list(drop), list(categorical)
        for name in (target, *drop, *categorical):
            table.column(name)
        for name in categorical:
            if name == target or name in drop:
                what = "the target" if name == target else "left out by --drop"
                raise OptionError(f"--categorical {name} is for an input, but it is {what}.")
        inputs = [name for name in table.columns if name != target and name not in drop]
        names = [name for name in inputs if name not in INDEX]
        if not names:
            raise DataError(f"{table.path} has no column besides the target {target!r}.")
        indexed = len(names) < len(inputs)
        task, classes, t = find_target(table, target, task)
        encoded = encoding.learn(table, names, rows=rows, categorical=categorical, missing=missing)
        names = encoding.input_names(encoded)
        if not names:
            raise DataError(f"{table.path} has no column besides {target!r} that tells anything.")
        x, unusual = encoding.encode(table, encoded)
        if notes is not None:
            notes += ["the index, a column that numbers the rows, is left out."] * indexed
            notes += [*remarks(table, encoded, x, rows), *unusual]
        one, zero = [1.0] * len(names), [0.0] * len(names)
        return cls(task, target, names, zero, one, classes, encoding=encoded), x, t

    @property
    def used(self) -> int:
        """How many columns of a table the inputs are made of."""
        return sum(encoding.width(one) > 0 for one in self.encoding) or len(self.names)

    @property
    def sources(self) -> list[str]:
        """For each input, the column that it is made of."""
        if not self.encoding:
            return self.names
        return [one["name"] for one in self.encoding for _ in range(encoding.width(one))]

    def standardised(self, x: np.ndarray, t: np.ndarray, scaling: str = "deviation") -> Self:
        """The same columns, with the means and spreads of these rows."""
        (mean, scale), (centre, spread) = _moments(x), _moments(t[:, None].astype(float))
        for name, m, s in zip(self.names, mean, scale, strict=True):
            if not (math.isfinite(m) and math.isfinite(s)):
                raise DataError(f"the numbers in column {name!r} are too large to standardise.")
        bounded = choose("scaling", scaling, encoding.SCALINGS) == "bounded"
        far = encoding.farthest(x, mean) if bounded else None
        encoding.rescale(scale, self.encoding, far)
        found = replace(self, mean=mean.tolist(), scale=scale.tolist())
        if self.task != "regression":
            return found
        if not (math.isfinite(centre[0]) and math.isfinite(spread[0])):
            raise DataError(f"the numbers in column {self.target!r} are too large to learn.")
        return replace(found, target_mean=float(centre[0]), target_scale=float(spread[0]))

    def inputs(self, x: np.ndarray) -> np.ndarray:
        """Rows (B, d) of a table as inputs of the model."""
        return _scaled(x, self.mean, self.scale)

    def of(
        self, table: Table, x: np.ndarray | None = None, *, notes: list[str] | None = None
    ) -> np.ndarray:
        """The inputs (B, d) of all rows of a table; `x`: its numbers, where they are known.

        What is unusual in the rows is added to `notes`.
        """
        if x is None and self.encoding:
            x, unusual = encoding.encode(table, self.encoding)
            if notes is not None:
                notes += unusual
        elif x is None:
            x = np.stack([table.numbers(name) for name in self.names], 1)
        return _near(table, self.names, self.inputs(x))

    def agree(self, other: Columns) -> bool:
        """Whether both are of the same rows; files of before lack what was learned of columns."""
        if not (self.encoding and other.encoding):
            return replace(self, encoding=[]) == replace(other, encoding=[])
        return self == other

    def values(self, table: Table, t: np.ndarray) -> np.ndarray:
        """Numbers (B,) of the target as outputs (B, 1) of the model."""
        scaled = _scaled(t[:, None], [self.target_mean], [self.target_scale])
        return _near(table, [self.target], scaled)

    def in_units(self, y: Any) -> Any:
        """Outputs of the model, in an array or a tensor, as numbers of the target."""
        return y * self.target_scale + self.target_mean

    def to_json(self) -> dict[str, Any]:
        """All fields; without an encoding as earlier versions wrote it."""
        found = asdict(self)
        return found if self.encoding else {k: v for k, v in found.items() if k != "encoding"}

    def digest(self) -> str:
        """The same for equal columns only."""
        content = json.dumps(self.to_json(), sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    @classmethod
    def from_json(cls, given: Any, path: Path) -> Self:
        """What `to_json` gave, or an error that names the file it was read from."""
        names = [field.name for field in fields(cls)]
        try:
            made = cls(**{name: given[name] for name in names if name != "encoding"})
            made = replace(made, encoding=given.get("encoding", []))
            numbers = [*made.mean, *made.scale, made.target_mean, made.target_scale]
            sizes = {len(made.names), len(made.mean), len(made.scale)}
            if made.encoding:
                sizes.add(sum(map(encoding.width, made.encoding)))
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


def hold_out(
    t: np.ndarray, fraction: float, seed: int, *, classes: bool, weight: np.ndarray | None = None
) -> tuple[Any, Any]:
    """Row numbers to train on, and to hold out of the training: that fraction of each class.

    Rows of weight 0 count for nothing, and are not held out.
    """
    counted = np.arange(len(t)) if weight is None else np.flatnonzero(weight)
    train, held = split(t[counted], fraction, seed, classes=classes)
    if not len(held):
        what = f"each of {len(np.unique(t[counted]))} classes" if classes else "the rows"
        count = "1 sample is" if len(counted) == 1 else f"{len(counted)} rows are"
        raise DataError(
            f"{count} too few to hold out {fraction:g} of {what}; give more rows, "
            "hold out a larger fraction, or none."
        )
    rest = np.setdiff1d(np.arange(len(t)), counted)
    return np.sort(np.concatenate([counted[train], rest])), counted[held]


def find_target(table: Table, name: str, task: str = "auto") -> tuple[str, list[str], np.ndarray]:
    """The task, the names of the classes, and labels 0 .. classes-1 or values."""
    if choose("task", task, TASKS) == "auto":
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
            f"{table.path}: the target {name!r} has one class only, {short(classes[0])}; "
            "a classifier needs at least two."
        )
    if len(classes) > max(FEW, len(texts) // 2):
        raise DataError(
            f"{table.path}: the target {name!r} has {len(classes)} different values in "
            f"{len(texts)} rows, such as {short(texts[0])}, too many for classes; is it the right "
            "column? Numbers must be written plainly, like 1234.5."
        )
    number = {c: i for i, c in enumerate(classes)}
    return task, classes, np.array([number[text] for text in texts])


def _guess(table: Table, name: str, texts: list[str]) -> str:
    """Texts and few whole numbers are classes; other numbers are values."""
    numeric = [number(v) is not None for v in table.column(name)]
    if not all(numeric):
        if sum(numeric) > len(numeric) / 2:
            row = numeric.index(False)
            raise DataError(
                f"{table.path}, {table.where(row)}, column {name!r}: {short(texts[row])} is not "
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
