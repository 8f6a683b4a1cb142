"""Reading CSV and Parquet files, within the memory that there is.

Errors name the line (of a CSV) or row (of a Parquet file), and the column.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from hdnn.base.files import check_regular, reason_of
from hdnn.base.memory import check_memory
from hdnn.errors import CheckpointError, DataError, HDNNError, require

CSV, PARQUET = (".csv", ".tsv", ".txt"), (".parquet", ".pq")
LONGEST = 2**24  # letters of a line: a million columns
MOST_CELLS = 10**8  # values of a table: hours of training
PIECE = 1024  # rows that are read at once

# The values of each column; the line of each row, for a CSV.
ColumnsAndLines = tuple[dict[str, list[Any]], list[int]]


def read_columns(path: Path) -> ColumnsAndLines:
    """The columns of a file, and where each row stands in a CSV."""
    suffix = path.suffix.lower()
    if suffix not in (*CSV, *PARQUET):
        raise DataError(f"{path} ends in {suffix or 'nothing'!r}; give a .csv or a .parquet file.")
    try:
        check_regular(path)
        if not path.stat().st_size:
            raise _empty(path)
        return _read_csv(path) if suffix in CSV else _read_parquet(path)
    except CheckpointError as error:
        raise DataError(str(error)) from error
    except HDNNError:
        raise
    except (OSError, ValueError) as error:
        reason = reason_of(error)
        raise DataError(f"cannot read {path}: {reason}; check its name and folder.") from error


def _read_csv(path: Path) -> ColumnsAndLines:
    # A cell of a few letters is an object of Python, of some 60 bytes.
    check_memory(16 * path.stat().st_size, f"the cells of {path}", "rows or columns")
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        return _csv_columns(path, _lines(path, file))


def _lines(path: Path, file: TextIO) -> Iterator[str]:
    """The lines of a file, each of a length that a table of a million columns may have."""
    number = 0
    while line := file.readline(LONGEST):
        number += 1
        if len(line) == LONGEST:
            raise DataError(f"{path} has a line of more than {LONGEST:,} letters: this is no CSV.")
        try:
            line.encode()
        except UnicodeEncodeError as error:  # bytes that are no letters came as surrogates
            raise DataError(f"{path}, line {number}: the text is not UTF-8; convert it.") from error
        yield line


def _csv_columns(path: Path, lines: Iterator[str]) -> ColumnsAndLines:
    """By Python's csv: pyarrow counts rows, not lines, and accepts quotes that never close."""
    start: list[str] = []
    for line in lines:
        start.append(line)
        if line.strip():
            break
    else:
        raise _empty(path)
    delimiter = next((d for d in (",", ";", "\t") if d in start[-1]), ",")
    reader = csv.reader(itertools.chain(start, lines), delimiter=delimiter, strict=True)
    rows, numbers, header = [], [], []
    try:
        for row in reader:
            if not any(cell.strip() for cell in row) and len(row) <= 1:
                continue  # a blank line
            if not header:
                header = [name.strip() for name in row]
                _check_names(path, header, index="")
                continue
            if len(row) != len(header):
                raise DataError(
                    f"{path}, line {reader.line_num}: there are {len(row)} values, but "
                    f"{len(header)} columns; mend the line."
                )
            rows.append(row)
            numbers.append(reader.line_num)
            if len(rows) % PIECE == 0:
                _check_cells(path, len(rows) * len(header))
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: this is no CSV ({error}).") from error
    if not rows:
        raise DataError(f"{path} has a line of column names, but no rows below it.")
    columns = {name: [row[i] for row in rows] for i, name in enumerate(header)}
    if "" in columns and not _is_index(columns[""]):
        raise _no_name(path, 1)
    return columns, numbers


def _is_index(cells: list[str]) -> bool:
    """Whether cells number the rows: whole numbers, no two alike."""
    return all(cell.strip().isdigit() for cell in cells) and len({*map(int, cells)}) == len(cells)


def _empty(path: Path) -> DataError:
    return DataError(f"{path} is empty; its first line must name the columns.")


def _read_parquet(path: Path) -> ColumnsAndLines:
    arrow = require("pyarrow", extra="cli")
    parquet = require("pyarrow.parquet", extra="cli")
    try:
        with parquet.ParquetFile(path) as file:
            about = file.metadata
            _check_names(path, [str(name) for name in file.schema_arrow.names])
            _check_cells(path, about.num_rows * max(about.num_columns, 1))
            columns = _parquet_columns(path, file)
    except (arrow.ArrowException, OSError, ValueError) as error:
        if isinstance(error, HDNNError):
            raise
        reason = reason_of(error, 120).rstrip(".")
        raise DataError(f"{path} cannot be read as a Parquet file ({reason}).") from error
    if not columns or not next(iter(columns.values())):
        raise DataError(f"{path} has no rows.")
    return columns, []


def _parquet_columns(path: Path, file: Any) -> dict[str, list[Any]]:
    """Read piece by piece: what is packed in a few bytes may be a text of a million letters."""
    columns: dict[str, list[Any]] = {str(name): [] for name in file.schema_arrow.names}
    unpacked = 0
    for piece in file.iter_batches(batch_size=PIECE, use_threads=False):
        unpacked += piece.nbytes
        check_memory(2 * unpacked, f"the values of {path}", "rows or columns")
        for values, column in zip(columns.values(), piece.columns, strict=True):
            values += column.to_pylist()
    return columns


def _check_cells(path: Path, cells: int) -> None:
    if cells >= MOST_CELLS:
        raise DataError(
            f"{path} has {cells:,} values or more, and a table may have {MOST_CELLS:,}; "
            "take fewer rows or columns."
        )
    # A value is an object of Python, of some 32 bytes, in a list, and again as a number.
    check_memory(64 * cells, f"the {cells:,} values of {path}", "rows or columns")


def _no_name(path: Path, index: int) -> DataError:
    return DataError(f"{path}: column {index} has no name in the first line; name it.")


def _check_names(path: Path, names: Sequence[str], index: str | None = None) -> None:
    """Refuse columns without a name, but for a first one that numbers the rows, and name twins."""
    before: dict[str, int] = {}
    for number, name in enumerate(names, 1):
        if not name and not (number == 1 < len(names) and name == index):
            raise _no_name(path, number)
        if name in before:
            raise DataError(
                f"{path}: columns {before[name]} and {number} have the same name, {name!r}; "
                "rename one."
            )
        before[name] = number
