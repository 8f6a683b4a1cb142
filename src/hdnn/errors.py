"""Errors and warnings: each message says what was given, what is needed and what to do."""

from __future__ import annotations

import difflib
import importlib
import math
from collections.abc import Iterable
from numbers import Integral, Real
from types import ModuleType

__all__ = [
    "CheckpointError",
    "ConvergenceError",
    "DataError",
    "DriftWarning",
    "DtypeError",
    "GridWarning",
    "HDNNError",
    "MissingExtraError",
    "OptionError",
    "ReversalWarning",
    "ShapeError",
    "TableWarning",
]


class HDNNError(ValueError):
    """Base class of every error that `hdnn` raises on purpose.

    Examples:
        >>> import hdnn
        >>> try:
        ...     hdnn.H2(features=4, layers=0)
        ... except hdnn.HDNNError as error:
        ...     print(error)
        layers must be a whole number >= 1, but got 0.
    """


class OptionError(HDNNError):
    """A wrong argument: an unknown name, a step that is not positive, conflicting options.

    Examples:
        >>> import hdnn
        >>> hdnn.H2(features=4, layers=2, activation="tahn")
        Traceback (most recent call last):
        hdnn.errors.OptionError: activation 'tahn' is not known; ... Did you mean 'tanh'?
    """


class ShapeError(HDNNError):
    """A tensor of the wrong shape, or on the wrong device."""


class DtypeError(ShapeError, TypeError):
    """A tensor of the wrong dtype."""


class DataError(HDNNError):
    """Data that cannot be learned from: missing, not finite, or of the wrong form."""


class CheckpointError(HDNNError):
    """A file that cannot be written, or that does not hold the expected contents."""


class ConvergenceError(HDNNError):
    """An implicit layer whose equation could not be solved."""


class MissingExtraError(HDNNError):
    """An optional dependency that is not installed."""


class ReversalWarning(UserWarning):
    """A backward pass whose rebuilt states differ from those of the forward pass."""


class GridWarning(UserWarning):
    """A state, or a change of a state, that is hardly larger than the steps of its grid."""


class DriftWarning(UserWarning):
    """Trajectories that a flow map cannot follow: energy is lost, or the times are uneven."""


class TableWarning(UserWarning):
    """New rows that differ from the rows that a model was trained on."""


def choose(name: str, value: object, options: Iterable[str]) -> str:
    """The value, if it is one of the options; otherwise an error that suggests the nearest."""
    names = sorted(options)
    if value in names:
        return str(value)
    message = (
        f"{name} {value!r:.80} is not known; choose one of {', '.join(names)}."
    )
    near = difflib.get_close_matches(str(value).lower(), names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise OptionError(message + hint)


def positive_int(name: str, value: object) -> int:
    """The value as an int >= 1."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise OptionError(
            f"{name} must be a whole number >= 1, but got {value!r:.80}."
        )
    return int(value)


def positive_float(name: str, value: object) -> float:
    """The value as a finite float > 0."""
    number = math.nan
    if isinstance(value, Real) and not isinstance(value, bool):
        number = float(value)
    if not 0 < number < math.inf:
        raise OptionError(
            f"{name} must be a finite number > 0, but got {value!r:.80}."
        )
    return number


def require(module: str, *, extra: str) -> ModuleType:
    """An optional dependency, imported; or an error that says which extra installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"{module} is required here, but cannot be imported ({error}); install it with: pip "
            f"install 'hdnn[{extra}]'"
        ) from error
