"""What was given, what is needed, what to do: every mistake a user can make is an `HDNNError`.

All errors are `ValueError`s, raised before any work starts, with one clear sentence or two.
"""

from __future__ import annotations

import difflib
import importlib
import math
import re
import sys
from collections.abc import Iterable
from numbers import Integral, Real
from types import ModuleType

__all__ = [
    "CheckpointError",
    "ConvergenceError",
    "DataError",
    "HDNNError",
    "InterconnectionError",
    "LayerIndexError",
    "MissingExtraError",
    "NotInvertibleError",
    "OptionError",
    "ShapeError",
    "SparsityError",
    "StepError",
    "TrainingError",
]

LARGEST = sys.float_info.max
SENSIBLE = 1e30  # the largest rate, penalty or time: float32 can still compute with it
MOST = 2**63 - 1  # the largest size, count or seed: what an index can hold
QUOTED = 160  # the longest word in a message: a path or a number may have thousands of letters


class HDNNError(ValueError):
    """Base class of every error that `hdnn` raises on purpose."""

    def __str__(self) -> str:  # not in __init__, which `torch.compile` would trace
        return readable(super().__str__())


class ShapeError(HDNNError):
    """A tensor has the wrong shape, dtype or type."""


class LayerIndexError(HDNNError, IndexError):
    """A layer that a network does not have."""


class StepError(HDNNError):
    """A step size h, a horizon T or a tolerance that no network can have."""


class OptionError(HDNNError):
    """An option that is not one of the known ones, or two that exclude each other."""


class InterconnectionError(HDNNError):
    """A matrix J that is not skew-symmetric, or an X or J that is not finite."""


class SparsityError(HDNNError):
    """Block patterns or node sizes that do not fit together or break the locality condition."""


class ConvergenceError(HDNNError):
    """An implicit layer whose equation could not be solved."""


class NotInvertibleError(HDNNError):
    """The network has no inverse, or the matrix it needs is singular."""


class CheckpointError(HDNNError):
    """A file that cannot be written, or read back as what it should be."""


class DataError(HDNNError):
    """Data that cannot be learned from: missing, not finite, or of the wrong form."""


class TrainingError(HDNNError):
    """A training run that cannot start or cannot go on."""


class MissingExtraError(HDNNError):
    """An optional dependency that is not installed."""


def readable(message: str) -> str:
    """The message with the middle cut out of each word that is too long to read."""
    return re.sub(rf"\S{{{QUOTED + 1},}}", lambda word: _cut(word[0]), message)


def quoted(value: object) -> str:
    """A given value as a message shows it: never more than a line."""
    try:
        return _cut(repr(value))
    except ValueError:  # an int too long for Python to print
        return "a number of thousands of digits"


def _cut(text: str) -> str:
    half = QUOTED // 2 - 2
    return text if len(text) <= QUOTED else f"{text[:half]}...{text[-half:]}"


def choose(what: str, given: str, known: Iterable[str]) -> str:
    """Return `given` if it is one of `known`, else raise an error that suggests the nearest."""
    options = sorted(known)
    if isinstance(given, str) and given in options:
        return given
    message = f"{what} {quoted(given)} is not known; choose one of {', '.join(options)}"
    near = difflib.get_close_matches(quoted(given).strip("'").lower(), options, n=1)
    raise OptionError(f"{message}. Did you mean {near[0]!r}?" if near else f"{message}.")


def as_float(value: object) -> float | None:
    """A real number of Python or NumPy as a float, infinite if it is too large; None for others."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def positive_float(name: str, value: object) -> float:
    """Return `value` as a float > 0, else raise `StepError`."""
    number = as_float(value)
    if number is None:
        raise StepError(f"{name} must be a number > 0, but got {quoted(value)}.")
    if not 0 < number <= LARGEST:  # which torch.compile can trace, unlike isfinite
        raise StepError(
            f"{name} must be finite and > 0, but got {quoted(value)}; choose e.g. {name}=0.1."
        )
    return number


def probability(name: str, value: object) -> float:
    """Return `value` as a float in [0, 1), else raise `OptionError`."""
    number = as_float(value)
    if number is None or not 0 <= number < 1:
        raise OptionError(f"{name} must be at least 0 and below 1, but got {quoted(value)}.")
    return number


def positive_int(name: str, value: object) -> int:
    """Return `value` as an int >= 1, else raise `ShapeError`."""
    return int_from(1, name, value)


def int_from(least: int, name: str, value: object) -> int:
    """Return `value` as an int from `least` to 2^63 - 1, else raise `ShapeError`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ShapeError(f"{name} must be a whole number >= {least}, but got {quoted(value)}.")
    number = int(value)
    if number > MOST:
        raise ShapeError(f"{name} must be a whole number <= {MOST}, but got {quoted(value)}.")
    return number


def flag(name: str, value: object) -> bool:
    """Return `value` if it is True or False, else raise `OptionError`: any word would be true."""
    if not isinstance(value, bool):
        raise OptionError(f"{name} must be True or False, but got {quoted(value)}.")
    return value


def require(module: str, *, extra: str) -> ModuleType:
    """Import an optional dependency, or say which extra installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"{module} is needed here but cannot be imported ({error}); "
            f"install it with: pip install 'hdnn[{extra}]'"
        ) from error
