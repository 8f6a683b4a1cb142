"""What users give as X: arrays of numbers, data frames, arrays of objects, lists of lists."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.utils.validation import validate_data

from hdnn.data import encoding
from hdnn.data.cells import is_missing, number
from hdnn.data.encoding import Encoded
from hdnn.data.remarks import remarks
from hdnn.data.rows import Frame, listed, short
from hdnn.errors import DataError, OptionError, TableWarning, quoted

PLACE = Path("X")  # what messages call the table
WHOLE_NUMBERS = 2.0**53  # up to here, float64 has them all


def native(X: Any) -> Any:
    """A data frame of another library as one of pandas; anything else as it is."""
    if isinstance(X, np.ndarray) and X.dtype.kind in "mM" and X.ndim == 2:
        # As objects, nanoseconds would be whole numbers.
        return np.array([[*row] for row in X.astype(f"{X.dtype.kind}8[us]")], object)
    convert = getattr(X, "to_pandas", None)
    X = X if convert is None or hasattr(X, "iloc") else convert()
    names = getattr(X, "columns", None) if hasattr(X, "iloc") else None
    if names is None:
        return X
    if names.duplicated().any():
        twin = names[names.duplicated()][0]
        raise DataError(f"X has more than one column of the name {short(twin)}; rename them.")
    spans = [name for name, kind in zip(names, X.dtypes, strict=True) if kind.kind == "m"]
    return X.astype(dict.fromkeys(spans, object)) if spans else X  # NumPy finds no common type


def check_target(y: Any, *, numbers: bool) -> None:
    """Refuse targets that are missing, of two kinds, or texts where `numbers` are needed."""
    labels = np.asarray(y)
    if labels.ndim != 1 or labels.dtype.kind not in "OU":
        return
    first: dict[bool, Any] = {}
    for row, label in enumerate(labels.tolist()):
        where, is_text = f"y, row {row} (counted from 0)", isinstance(label, str)
        if not is_text and is_missing(label):
            raise DataError(f"{where}: the value is missing; remove the row or fill it in.")
        if numbers and is_text and number(label) is None:
            raise DataError(
                f"{where}: {short(label)} is not a number; mend it, or take HDNNClassifier for "
                "classes."
            )
        first.setdefault(is_text, label)
    if not numbers and len(first) > 1:
        raise DataError(
            f"y has labels of text and others, such as {short(first[True])} and "
            f"{short(first[False])}; make all of them text."
        )


def labels(y: Any) -> Any:
    """The same labels; booleans and whole numbers of pandas' nullable types as NumPy has them.

    scikit-learn would make floats of them.
    """
    types = y.dtypes if hasattr(y, "columns") else [getattr(y, "dtype", None)]
    kinds = {getattr(one, "numpy_dtype", np.dtype(object)) for one in types}
    kind = kinds.pop() if len(kinds) == 1 else np.dtype(object)
    return y.astype(kind) if kind.kind in "biu" and not np.any(y.isna()) else y


def checked(estimator: Any, X: Any, *, reset: bool, gaps: bool, **options: Any) -> Any:
    """What scikit-learn's `validate_data` gives, with texts, dates and categories left as they are.

    X (samples, features) becomes float64 where all of it are numbers, else objects; `gaps` says
    whether values may be missing.
    """
    if _is_numeric(X):
        options |= {"dtype": np.float64, "ensure_all_finite": "allow-nan" if gaps else True}
    else:
        options |= {"dtype": object, "ensure_all_finite": False}
    return validate_data(estimator, X, reset=reset, **options)


def frame(X: np.ndarray, names: Any) -> Frame:
    """The columns of a checked X; `names` are those of a data frame, if it had any."""
    given = [] if names is None else list(names)
    named = bool(given) and len(set(given)) == len(given)
    keys = given if named else [str(i) for i in range(X.shape[1])]
    cells = [column if column.dtype.kind == "f" else column.tolist() for column in X.T]
    return Frame(PLACE, dict(zip(keys, cells, strict=True)), [], named)


def categories(X: Any, table: Frame, categorical: Any) -> list[str]:
    """The columns of categories: those that are named, and those that a data frame has as such."""
    names = [*table.columns]
    types = getattr(X, "dtypes", ()) if hasattr(X, "iloc") else ()
    found = [name for name, kind in zip(names, types, strict=False) if str(kind) == "category"]
    if categorical is None:
        return found
    if isinstance(categorical, str) or not hasattr(categorical, "__len__"):
        raise OptionError(
            "categorical must be None or a list of names or positions of columns, but got "
            f"{quoted(categorical)}."
        )
    given = np.asarray(categorical)
    if given.dtype == bool and given.shape == (len(names),):
        chosen = [*np.array(names, object)[given]]
    else:
        chosen = [_named(one, names, table.named) for one in categorical]
    for name in chosen:
        cells = table.column(name)
        if isinstance(cells, np.ndarray) and (np.abs(cells) >= WHOLE_NUMBERS).any():
            raise DataError(
                f"X: {table.label(name)} has numbers beyond 2^53, which float64 cannot tell apart; "
                "give these categories as text."
            )
    return [*found, *chosen]


def numbers(names: Iterable[Any]) -> list[Encoded]:
    """Columns of numbers that may not be missing."""
    plain = {"kind": "number", "gaps": "refused", "fill": None, "constant": False}
    return [Encoded(name=str(name), values=[], numeric=False, **plain) for name in names]


def encoded(X: np.ndarray, names: Any, columns: Sequence[Encoded]) -> tuple[np.ndarray, list[str]]:
    """The inputs (samples, inputs) of a checked X, and what is unusual in it."""
    if X.dtype.kind == "f" and encoding.is_plain(columns) and not np.isnan(X).any():
        constant = {i: column["fill"] for i, column in enumerate(columns) if column["constant"]}
        if constant:
            X = X.copy()
            X[:, [*constant]] = [*constant.values()]
        return X, []
    return encoding.encode(frame(X, names), columns)


def tell(table: Frame, columns: Sequence[Encoded], *, aloud: bool) -> None:
    """Warn of empty columns; all that a person should know goes to stderr where it is wanted."""
    empty = [c["name"] for c in columns if c["kind"] == "nothing" and not c["values"]]
    if empty:
        text = f"X has columns without any value, which are left out: {listed(empty)}."
        warnings.warn(text, TableWarning, stacklevel=5)
    if aloud and sys.stderr is not None:
        for note in remarks(table, columns, encoding.encode(table, columns)[0]):
            sys.stderr.write(f"note: {note}\n")


def _named(one: Any, names: list[str], named: bool) -> str:
    """The name of a column that was given by its name or its position."""
    if isinstance(one, Integral) and not isinstance(one, bool) and -1 < int(one) < len(names):
        return names[int(one)]
    if named and one in names:
        return str(one)
    known = listed(names) if named else f"the positions 0 to {len(names) - 1}, and no names of text"
    raise OptionError(f"categorical has {quoted(one)}, but X has {known}.")


def _is_numeric(X: Any) -> bool:
    """Whether all columns hold numbers or true and false; what NumPy refuses counts as such."""
    if hasattr(X, "iloc") and hasattr(X, "dtypes"):
        kinds = getattr(X.dtypes, "__iter__", lambda: iter([X.dtypes]))()
        return all(getattr(kind, "kind", "O") in "biufc" for kind in kinds)
    if hasattr(X, "toarray"):  # a sparse matrix, which scikit-learn refuses well
        return True
    try:
        return np.asarray(X).dtype.kind in "biufc"
    except (ValueError, TypeError):
        return True
