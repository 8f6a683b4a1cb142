"""Tables: a file or a data frame is turned into inputs of a model, and a target to learn.

pandas reads the files. An `Encoder` learns the kind of each column and turns rows into standardised
inputs; a `Target` turns one column into labels or values, and model outputs back into answers. Both
are stored as JSON.
"""

from __future__ import annotations

import csv
import difflib
import itertools
import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from hdnn.errors import DataError, OptionError, TableWarning, choose, require

require("pandas", extra="sklearn")

import pandas as pd  # noqa: E402
from scipy.special import ndtri  # noqa: E402

__all__ = ["Encoder", "Target", "class_weights", "hold_out", "read"]

SAMPLE = 2**16  # bytes of a CSV file from which its form is guessed
LARGE = 2**25  # larger files (bytes) are read as float32
# In addition to pandas' own words.
MISSING = ("?", "-", "--", ".", "na", "none", "NONE", "NAN", "NaT", "missing")
Series = Any  # of pandas, whose stubs are stricter than it is

FEW = 20  # up to so many different values are categories, however rarely they repeat
MOST = 255  # categories of a column, at most
MANY = 1000  # classes, at most
HEAVY = 8.0  # standard deviations: a column with a value beyond this is scaled by its ranks
RANKS = 200  # quantiles that describe such a column
# The scale of inputs that are 0 or 1: their largest standard deviation.
HALF = 0.5
IDENTIFIER = re.compile(
    r"(.*[_ .-])?(u?u?id|index|idx|key|nr|no|row|number)|unnamed.*|", re.I
)
SAMPLED = 100_000  # rows used for a median
SIGNS = (
    ".",
    ",",
)  # decimal signs; numbers may look like '$1,234' or '(12 %)'
SEPARATED = r"\w.*[-/. ].*[-/. ].*\d"  # three parts, as in a date
DAYS = ("%m %d %Y", "%d %m %Y", "%Y %m %d", "%d %b %Y", "%b %d %Y")
SHORT = ("%m %d %y", "%d %m %y", "%d %b %y", "%d %B %Y", "%B %d %Y")
TIMES = ("", " %H:%M", " %H:%M:%S")
ISO = "ISO8601"
DATES = (ISO, *map("".join, itertools.product(DAYS + SHORT, TIMES)))


class CellTypeError(DataError, TypeError):
    """A cell that holds neither a number nor text."""


# Files


def read(path: str | os.PathLike[str]) -> pd.DataFrame:
    """The table in a CSV, Parquet or Excel file.

    The delimiter of a CSV file (comma, semicolon, tab or bar) and its decimal sign are detected;
    its first line names the columns.

    Raises:
        DataError: if the file does not exist, is of another kind, or has lines of different
            lengths.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    choose(
        "a table must be a file of a known kind; the ending", suffix, READERS
    )
    if not path.is_file():
        raise DataError(
            f"{path} does not exist or is not a file; check its name and folder."
        )
    try:
        frame = READERS[suffix](path)
    except (ImportError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise DataError(
            f"{path} cannot be read as a table: {reason[:200]}"
        ) from error
    if frame.empty:
        raise DataError(
            f"{path} has no rows; a table needs a line of column names, and rows below it."
        )
    return frame


def _read_csv(path: Path) -> pd.DataFrame:
    with path.open("rb") as file:
        raw = file.read(SAMPLE)
    end = raw.rfind(b"\n") + 1
    encoding = _encoding(raw[: end or None])
    text = raw.decode(encoding, "ignore")
    lines = [line for line in text.splitlines() if line.strip()][:100]
    if not lines:
        raise DataError("it is empty.")
    separator = _delimiter(lines)
    first = next(csv.reader(lines, delimiter=separator))
    names = [name.strip() for name in first]
    if all(re.fullmatch(r"-?[\d.]+", name) for name in names):
        raise DataError(
            "it has numbers in its first line, which must name the columns."
        )
    twice = {name for name in names if name and names.count(name) > 1}
    if twice:
        raise DataError(f"it names two columns {min(twice)!r}; rename one.")
    options: dict[str, Any] = {
        "sep": separator,
        "encoding": encoding,
        "skipinitialspace": True,
        "na_values": list(MISSING),
    }
    has_comma, has_point = (
        re.search(
            rf"""^(.*[;|\t])?["\s]*-?\d+{mark}\d+["\s]*($|[;|\t])""", text, re.M
        )
        for mark in (",", r"\.")
    )
    if separator != "," and has_comma and not has_point:
        options["decimal"] = ","
    types = {}
    if path.stat().st_size > LARGE:
        first = pd.read_csv(path, nrows=1000, **options)
        is_float = first.dtypes == "float64"
        types = dict.fromkeys(first.columns[is_float], "float32")
    with warnings.catch_warnings():
        warnings.simplefilter("error", pd.errors.DtypeWarning)
        try:
            frame = pd.read_csv(path, dtype=types, **options)
        except (ValueError, pd.errors.DtypeWarning):  # text further down
            frame = pd.read_csv(path, low_memory=False, **options)
    return frame.rename(columns=str.strip)


def _encoding(raw: bytes) -> str:
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16"
    try:
        raw.decode()
    except UnicodeDecodeError:
        return "latin-1"
    return "utf-8-sig"


def _delimiter(lines: Sequence[str]) -> str:
    """The delimiter that splits the most lines into equally many cells, and into the most cells."""

    def score(delimiter: str) -> tuple[int, int]:
        rows = csv.reader(lines, delimiter=delimiter)
        lengths = [len(row) for row in rows]
        width = lengths[0]
        return lengths.count(width) if width > 1 else 0, width

    return max(",;\t|", key=score)


READERS: Mapping[str, Any] = {
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".txt": _read_csv,
    ".parquet": pd.read_parquet,
    ".pq": pd.read_parquet,
    ".xlsx": pd.read_excel,
    ".xls": pd.read_excel,
}


# Columns


@dataclass
class Encoder:
    """An encoding of table columns as inputs of a model, learned by `fit` and stored as JSON.

    Numbers, dates (as days) and truth values become one standardised input each; if a few values
    lie far from the others, their ranks are used. A text column becomes one input for each
    category. Missing numbers are filled with the median and marked in an extra input. Columns that
    are empty, constant or identify rows are left out, as listed in `notes`.

    Examples:
        >>> import pandas as pd
        >>> from hdnn.data.tables import Encoder
        >>> frame = pd.DataFrame({"size": [1.0, None, 3.0], "kind": ["a", "b", "a"]})
        >>> encoder = Encoder.fit(frame)
        >>> encoder.names
        ['size', 'size is missing', 'kind = a', 'kind = b']
        >>> encoder.transform(frame).shape
        (3, 4)
    """

    columns: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    directions: list[list[float]] | None = None

    @classmethod
    def fit(
        cls,
        frame: pd.DataFrame,
        *,
        categorical: Iterable[str] = (),
        missing: str = "fill",
        weight: np.ndarray | None = None,
    ) -> Self:
        """Learn the columns of a table.

        Args:
            frame: the inputs, without the target.
            categorical: the names of columns whose numbers are categories.
            missing: "fill" missing values, or "refuse" them.
            weight: the weight of each row in means and deviations.
        """
        choose("missing", missing, ("fill", "refuse"))
        categorical = list(categorical)
        for name in categorical:
            _column(frame, name)
        encoder = cls()
        for name in frame.columns:
            series: Series = frame[name]
            gaps = series.isna().to_numpy()
            if missing == "refuse" and gaps.any():
                row = int(gaps.argmax()) + 1
                raise DataError(
                    f"column {name!r}, row {row}: the value is missing."
                )
            encoder._learn(str(name), series, name in categorical, weight)
        if not encoder.columns:
            raise DataError(
                "the table has no usable column: all are empty or constant."
            )
        return encoder

    def _learn(
        self,
        name: str,
        series: Series,
        categorical: bool,
        weight: np.ndarray | None,
    ) -> None:
        """Add a column, or a note that says why it is left out."""
        is_gap = series.isna()
        if is_gap.all():
            self._leave_out(name, "has no value")
            return
        column = {"name": name, "gaps": bool(is_gap.any())}
        if categorical or series.dtype == "category":
            column["kind"] = "category"
        else:
            column |= _described(name, series)
        if column["kind"] == "category":
            self._learn_categories(column, series, categorical, weight)
        else:
            self._learn_numbers(column, _numbers(column, series), weight)

    def _leave_out(self, name: str, reason: str) -> None:
        self.notes.append(f"column {name!r} {reason} and is left out.")

    def _learn_categories(
        self,
        column: dict[str, Any],
        series: Series,
        categorical: bool,
        weight: np.ndarray | None,
    ) -> None:
        codes, texts = _cells(series)
        values, place = np.unique(texts, return_inverse=True)
        name = column["name"]
        many = len(values) > FEW and len(values) > len(codes) / 2
        if not categorical and (many or len(values) > MOST):
            self._leave_out(
                name,
                f"has {len(values)} different texts, such as {values[0][:40]!r}; it looks like "
                "names or identifiers",
            )
        elif len(values) == 1 and not column["gaps"]:
            self._leave_out(name, "is the same in every row")
        else:
            place = np.append(place, len(values))  # of missing cells
            counts = np.bincount(place[codes], weight, len(values) + 1)
            shares = counts / counts.sum()
            *column["shares"], column["share"] = shares.tolist()
            column["values"] = values.tolist()
            self.columns.append(column)

    def _learn_numbers(
        self,
        column: dict[str, Any],
        numbers: np.ndarray,
        weight: np.ndarray | None,
    ) -> None:
        name = column["name"]
        if IDENTIFIER.fullmatch(name) and _counts(numbers):
            self._leave_out(name, "only numbers the rows")
            return
        present = numbers[~np.isnan(numbers)]
        step = len(present) // SAMPLED + 1
        fill = float(np.median(present[::step]))
        filled = np.where(np.isnan(numbers), fill, numbers)
        with np.errstate(over="ignore", invalid="ignore"):
            center = _mean(filled, weight)
            scale = _mean(np.square(filled - center), weight) ** 0.5
        if not np.isfinite(scale):
            raise DataError(
                f"the numbers in column {name!r} are too large; rescale them."
            )
        constant = scale <= 1e-12 * abs(center)
        if constant and not column["gaps"]:
            self._leave_out(name, "is the same in every row")
            return
        column["fill"] = fill
        column["center"] = center
        column["scale"] = 1.0 if constant else scale
        column["share"] = _mean(np.isnan(numbers), weight)
        farthest = np.abs(filled - center).max()
        if not constant and farthest > HEAVY * scale:
            column["ranks"] = _ranks(filled)
        self.columns.append(column)

    @property
    def names(self) -> list[str]:
        """The names of all inputs."""
        if self.directions is not None:
            count = len(self.directions)
            return [f"direction {number + 1}" for number in range(count)]
        return [
            name for column in self.columns for name in _input_names(column)
        ]

    @property
    def sources(self) -> list[str]:
        """The column from which each input is made."""
        return [
            column["name"]
            for column in self.columns
            for _ in _input_names(column)
        ]

    def transform(
        self, frame: pd.DataFrame, dtype: str = "float64"
    ) -> np.ndarray:
        """The inputs `(rows, inputs)` of a model.

        Values that `fit` has not seen are handled and reported in a `TableWarning`: a new category
        counts as none of the known categories, a new gap as the median.
        """
        width = len(self.sources)
        inputs = np.empty((width, len(frame)), dtype)
        position = 0
        for column in self.columns:
            series = _column(frame, column["name"])
            is_category = column["kind"] == "category"
            encode = _encode_categories if is_category else _encode_numbers
            for values in encode(column, series):
                inputs[position] = values
                position += 1
            if column["gaps"]:
                gaps = series.isna().to_numpy()
                inputs[position] = (gaps - column["share"]) / HALF
                position += 1
        if self.directions is not None:
            inputs = np.array(self.directions, dtype) @ inputs
        return inputs.T

    def config(self) -> dict[str, Any]:
        """The encoding as plain values for JSON: `Encoder(**config)` is this encoder."""
        return asdict(self)


def _mean(values: np.ndarray, weight: np.ndarray | None) -> float:
    return float(np.average(values, weights=weight))


def _column(frame: pd.DataFrame, name: str) -> Series:
    if name in frame.columns:
        return frame[name]
    names = [str(label) for label in frame.columns]
    if name in names:
        return frame.iloc[:, names.index(name)]
    near = difflib.get_close_matches(str(name), names, n=1)
    hint = (
        f"did you mean {near[0]!r}?"
        if near
        else f"it has {', '.join(map(repr, names[:8]))}."
    )
    raise DataError(f"the table has no column {name!r}; {hint}")


def _described(name: str, series: Series) -> dict[str, Any]:
    """The name of a column, its kind, and the form of its numbers or dates."""
    if pd.api.types.is_numeric_dtype(series):
        form = "."
    else:
        _, texts = _cells(series)
        form = _form(texts)
    kind = "category"
    if form:
        kind = "number" if form in SIGNS else "date"
    return {"name": name, "kind": kind, "form": form}


def _form(texts: Series) -> str:
    """The decimal sign of numbers, or the order of the parts of dates; "" for other texts."""
    sample = texts.iloc[:1000]
    dates = sample[sample.str.contains(SEPARATED)]
    tries = (DATES, dates, len(sample)), (SIGNS, texts, len(texts))
    for forms, cells, total in tries:
        if 2 * len(cells) > total:
            counts = [np.isfinite(_parsed(cells, form)).sum() for form in forms]
            best = int(np.argmax(counts))
            if 2 * counts[best] > total:
                return forms[best]
    return ""


def _numbers(column: Mapping[str, Any], series: Series) -> np.ndarray:
    """The numbers in a column, or its dates as days; NaN where they are missing."""
    types = pd.api.types
    is_date = column["kind"] == "date"
    if is_date and types.is_datetime64_any_dtype(series):
        values = _days(series, ISO)
    elif types.is_numeric_dtype(series) and not is_date:
        values = series.to_numpy(np.float64, na_value=np.nan)
    else:
        codes, texts = _cells(series)
        parsed = _parsed(texts, column["form"])
        values = np.append(parsed, np.nan)[codes]
    wrong = np.isnan(values) & series.notna().to_numpy()
    wrong |= np.isinf(values)
    if wrong.any():
        row = int(wrong.argmax())
        raise DataError(
            f"column {column['name']!r}, row {row + 1}: {str(series.iloc[row])[:40]!r} is not a "
            f"finite {column['kind']}, unlike most of the column; correct it, leave the column "
            "out, or name the column as categorical."
        )
    return values


def _cells(series: Series) -> tuple[np.ndarray, Series]:
    """The position of each cell among a column's different texts (-1: missing), and these.

    1 and 1.0 count as the same text.
    """
    try:
        codes, values = pd.factorize(series)
    except TypeError as error:
        raise CellTypeError(
            f"column {series.name!r} holds a list or a similar object ({error}), but a cell of "
            "this argument must be a string or a number; leave the column out."
        ) from error
    values = pd.Series(np.asarray(values)).infer_objects()
    if values.dtype.kind in "iuf":
        texts = pd.Series([f"{value:.15g}" for value in values], dtype="str")
    else:
        texts = values.astype("str").str.strip()
    return codes, texts


def _parsed(texts: Series, form: str) -> np.ndarray:
    """Numbers of texts such as '$1,234', '(12 %)', '1,5' and '1.234,5', or days of dates."""
    if form not in SIGNS:
        return _days(texts, form)
    other = SIGNS[form == "."]
    thousands = rf"\{other}(?=\d{{3}}(?:\D|$))"
    texts = texts.str.replace(r"[\s$€£¥%')]", "", regex=True)
    texts = texts.str.replace("(", "-", regex=False)
    texts = texts.str.replace(thousands, "", regex=True)
    texts = texts.str.replace(form, ".", regex=False)
    numbers: Series = pd.to_numeric(texts, errors="coerce")
    return numbers.to_numpy(np.float64)


def _days(dates: Series, form: str) -> np.ndarray:
    """Dates as days since 1970, NaN where a date is missing or unreadable."""
    if form != ISO:
        dates = dates.str.replace(r"[-/., ]+", " ", regex=True)
    times = pd.to_datetime(dates, format=form, errors="coerce", utc=True)
    origin = pd.Timestamp(0, tz="UTC")
    days = (times - origin) / pd.Timedelta(days=1)
    return days.to_numpy(np.float64)


def _counts(numbers: np.ndarray) -> bool:
    """True if whole numbers identify the rows: each number occurs once."""
    is_whole = np.array_equal(numbers, np.round(numbers))
    different = len(np.unique(numbers))
    return is_whole and FEW < len(numbers) == different


def _ranks(numbers: np.ndarray) -> list[list[float]]:
    """Quantiles of a column, and the normal score of each."""
    shares = (np.arange(RANKS) + 0.5) / RANKS
    scores = ndtri(shares)
    steps = np.linspace(0, 1, RANKS)
    quantiles = np.quantile(numbers, steps)
    values, position = np.unique(quantiles, return_inverse=True)
    means = np.bincount(position, scores) / np.bincount(position)
    return [values.tolist(), means.tolist()]


def _input_names(column: Mapping[str, Any]) -> list[str]:
    name = column["name"]
    if column["kind"] == "category":
        names = [f"{name} = {value}" for value in column["values"]]
    else:
        names = [name]
    return [*names, f"{name} is missing"] if column["gaps"] else names


def _encode_numbers(
    column: Mapping[str, Any], series: Series
) -> Iterable[np.ndarray]:
    numbers = _numbers(column, series)
    gaps = np.isnan(numbers)
    if gaps.any() and not column["gaps"]:
        _warn(
            column,
            f"{gaps.sum()} rows have no value, which is taken as {column['fill']:g}",
        )
    filled = np.where(gaps, column["fill"], numbers)
    if "ranks" in column:
        yield np.interp(filled, *column["ranks"])
    else:
        yield (filled - column["center"]) / column["scale"]


def _encode_categories(
    column: Mapping[str, Any], series: Series
) -> Iterable[np.ndarray]:
    codes = _codes(column["values"], series)
    gaps = series.isna().to_numpy()
    unknown = (codes < 0) & ~(gaps & column["gaps"])
    if unknown.any():
        row = int(unknown.argmax())
        value = str(series.iloc[row])[:40]
        _warn(
            column,
            f"{unknown.sum()} rows have a value that is new, such as {value!r}",
        )
    for code, share in enumerate(column["shares"]):
        yield ((codes == code) - share) / HALF


def _codes(values: Sequence[str], series: Series) -> np.ndarray:
    """The position of each cell among texts; -1 where it is none of them."""
    codes, texts = _cells(series)
    places = pd.Index(values, dtype="str").get_indexer(texts)
    return np.append(places, -1)[codes]


def _warn(column: Mapping[str, Any], message: str) -> None:
    warnings.warn(
        f"column {column['name']!r}: {message}.", TableWarning, stacklevel=4
    )


# Targets


@dataclass
class Target:
    """The column to learn: class labels, or values in units of their standard deviation."""

    name: str
    task: str
    classes: list[str] = field(default_factory=list)
    center: float = 0.0
    scale: float = 1.0

    @classmethod
    def fit(cls, frame: pd.DataFrame, name: str, task: str = "auto") -> Self:
        """Learn a target: texts and few whole numbers are classes, other numbers are values.

        Args:
            frame: the table.
            name: the column to learn.
            task: "classification", "regression", or "auto" to decide by the values.
        """
        series = _column(frame, name)
        _check_target(name, series)
        choose("task", task, ("auto", "classification", "regression"))
        if task == "auto":
            task = _guess_task(name, series)
        if task == "regression":
            values = _values(name, series)
            scale = float(values.std())
            if scale == 0:
                raise DataError(
                    f"the target {name!r} is the same in every row."
                )
            center = float(values.mean())
            return cls(name, task, center=center, scale=scale)
        _, texts = _cells(series)
        classes = _sorted(set(texts))
        if len(classes) < 2:
            raise DataError(
                f"the target {name!r} has one class only, {classes[0]!r}; two are needed."
            )
        most = max(FEW, len(series) // 2)
        if len(classes) > min(MANY, most):
            raise DataError(
                f"the target {name!r} has {len(classes)} different values in {len(series)} rows, "
                f"such as {classes[0]!r}, too many for classes; is this the right column?"
            )
        return cls(name, task, classes)

    def encode(self, frame: pd.DataFrame) -> np.ndarray:
        """The labels 0, 1, .. `(rows,)`, or standardised values `(rows,)`, of a table."""
        series = _column(frame, self.name)
        _check_target(self.name, series)
        if self.task == "regression":
            values = _values(self.name, series)
            return (values - self.center) / self.scale
        labels = _codes(self.classes, series)
        if (labels < 0).any():
            row = int((labels < 0).argmax())
            value = series.iloc[row]
            raise DataError(
                f"the target {self.name!r} has the value {value!r}, which is not among the classes "
                f"{', '.join(self.classes[:8])}."
            )
        return labels.astype(np.int64)

    def decode(self, outputs: np.ndarray) -> np.ndarray:
        """The names of the classes for labels, or values in their original units."""
        if self.task == "regression":
            return outputs * self.scale + self.center
        return np.array(self.classes, object)[outputs]

    def config(self) -> dict[str, Any]:
        """The target as plain values for JSON: `Target(**config)` is this target."""
        return asdict(self)


def _values(name: str, series: Series) -> np.ndarray:
    column = _described(name, series)
    if column["form"] not in SIGNS:
        column = {"name": name, "kind": "number", "form": "."}
    return _numbers(column, series)


def _check_target(name: str, series: Series) -> None:
    gaps = series.isna().to_numpy()
    if gaps.any():
        raise DataError(
            f"the target {name!r} is missing in {gaps.sum()} rows, first in row "
            f"{gaps.argmax() + 1}; remove these rows or fill them in."
        )


def _guess_task(name: str, series: Series) -> str:
    column = _described(name, series)
    if column["kind"] != "number" or pd.api.types.is_bool_dtype(series):
        return "classification"
    values = _numbers(column, series)
    whole = np.array_equal(values, np.round(values))
    different = len(np.unique(values))
    half = max(2, len(values) // 2)
    if whole and different <= min(FEW, half):
        return "classification"
    return "regression"


def _sorted(texts: Iterable[str]) -> list[str]:
    try:
        return sorted(texts, key=float)
    except ValueError:
        return sorted(texts)


# Rows and classes


def hold_out(
    t: np.ndarray, fraction: float, seed: int, *, classes: bool
) -> tuple[Any, Any]:
    """Row numbers to train on and to hold out, by class; each class keeps one for training."""
    random = np.random.default_rng(seed)
    labels = t if classes else np.zeros(len(t))
    is_held = np.zeros(len(t), bool)
    for label in np.unique(labels):
        group = np.flatnonzero(labels == label)
        size = len(group)
        count = min(round(fraction * size), size - 1)
        is_held[random.permutation(group)[:count]] = True
    return np.flatnonzero(~is_held), np.flatnonzero(is_held)


def class_weights(
    weight: str | Mapping[Any, float] | None,
    labels: np.ndarray,
    classes: Sequence[Any],
) -> np.ndarray | None:
    """The weight of each row: "balanced", or a number for each class (1 for classes not named)."""
    if weight is None:
        return None
    if isinstance(weight, Mapping):
        unknown = set(weight).difference(classes)
        if unknown:
            shown = ", ".join(map(repr, classes[:8]))
            raise OptionError(
                f"class_weight names {min(unknown)!r}, but the classes are {shown}."
            )
        factors = np.array([weight.get(name, 1.0) for name in classes])
    else:
        choose("class_weight", weight, ("balanced",))
        counts = np.bincount(labels, minlength=len(classes))
        factors = len(labels) / (len(classes) * np.maximum(counts, 1))
    if not (factors.min() >= 0 and 0 < factors.sum() < np.inf):
        raise OptionError(
            f"class_weight must be finite, >= 0 and not all 0, but got {weight!r}."
        )
    return factors[labels]
