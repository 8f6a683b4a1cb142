"""What was given, what is needed, what to do: every mistake a user can make is an `HDNNError`.

All errors are `ValueError`s, raised before any work starts, with one clear sentence or two.
Warnings say what is doubtful, and work goes on.
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
    "GridWarning",
    "HDNNError",
    "InterconnectionError",
    "LayerIndexError",
    "MissingExtraError",
    "NotInvertibleError",
    "OptionError",
    "ReversalWarning",
    "ShapeError",
    "SparsityError",
    "StepError",
    "TableWarning",
    "TrainingError",
]

LARGEST = sys.float_info.max
SENSIBLE = 1e30  # the largest rate, penalty or time: float32 can still compute with it
MOST = 2**63 - 1  # the largest size, count or seed: what an index can hold
QUOTED = 160  # the longest word in a message: a path or a number may have thousands of letters


class HDNNError(ValueError):
    """Base class of every error that `hdnn` raises on purpose; it is a `ValueError`.

    Examples:
        >>> import hdnn
        >>> try:
        ...     hdnn.H2(features=4, layers=0)
        ... except hdnn.HDNNError as error:
        ...     print(error)
        layers must be a whole number >= 1, but got 0.
    """

    def __str__(self) -> str:  # not in __init__, which `torch.compile` would trace
        return readable(super().__str__())


class ShapeError(HDNNError):
    """A tensor has the wrong shape, dtype or type, or a size is not a sensible one.

    Examples:
        >>> import hdnn
        >>> hdnn.H2(features=3, layers=1)
        Traceback (most recent call last):
        hdnn.errors.ShapeError: H2 splits the features into (p, q), so their number must be even ...
    """


class LayerIndexError(HDNNError, IndexError):
    """A layer that a network does not have; it is an `IndexError` too.

    Examples:
        >>> import hdnn
        >>> hdnn.H2(features=4, layers=3)[7]
        Traceback (most recent call last):
        hdnn.errors.LayerIndexError: layer 7 is not there: there are -3 .. 2.
    """


class StepError(HDNNError):
    """A step size h, a horizon T or a tolerance that no network can have.

    Examples:
        >>> import hdnn
        >>> hdnn.H2(features=4, layers=2, T=-1.0)
        Traceback (most recent call last):
        hdnn.errors.StepError: T must be finite and > 0, but got -1.0; choose e.g. T=0.1.
    """


class OptionError(HDNNError):
    """An option that is not one of the known ones, or two that exclude each other.

    Examples:
        >>> import hdnn
        >>> hdnn.H2(features=4, layers=2, activation="tahn")
        Traceback (most recent call last):
        hdnn.errors.OptionError: activation 'tahn' is not known; ... Did you mean 'tanh'?
    """


class InterconnectionError(HDNNError):
    """A matrix J that is not skew-symmetric, or an X or J that is not finite.

    Examples:
        >>> import torch
        >>> import hdnn
        >>> hdnn.H1(features=2, layers=1, J=torch.eye(2))
        Traceback (most recent call last):
        hdnn.errors.InterconnectionError: J must be skew-symmetric (J = -J^T), but ...
    """


class SparsityError(HDNNError):
    """Block patterns or node sizes that do not fit together or break the locality condition.

    Examples:
        >>> import hdnn
        >>> hdnn.Sparsity(R=[[0, 1], [1, 0]])
        Traceback (most recent call last):
        hdnn.errors.SparsityError: every node is its own neighbour, but R has a 0 ...
    """


class ConvergenceError(HDNNError):
    """An implicit layer whose equation could not be solved, such as `p' = p' + 1` below.

    Examples:
        >>> import torch
        >>> from hdnn import functional
        >>> y, K, b = torch.ones(1, 2), torch.tensor([[[1.0, -1.0]]]), torch.ones(1, 1)
        >>> functional.implicit_h2(y, K, b, h=1.0, activation="identity")
        Traceback (most recent call last):
        hdnn.errors.ConvergenceError: implicit_h2, layer 0: the implicit step did not converge ...
    """


class NotInvertibleError(HDNNError):
    """The network has no inverse, or the matrix it needs is singular.

    Examples:
        >>> import torch
        >>> import hdnn
        >>> hdnn.H1(features=4, layers=2).inverse(torch.zeros(1, 4))
        Traceback (most recent call last):
        hdnn.errors.NotInvertibleError: H1 has no explicit inverse; ...
    """


class CheckpointError(HDNNError):
    """A file that cannot be written, or read back as what it should be.

    Examples:
        >>> import hdnn
        >>> hdnn.load("missing.safetensors")
        Traceback (most recent call last):
        hdnn.errors.CheckpointError: missing.safetensors does not exist; check its name and folder.
    """


class DataError(HDNNError):
    """Data that cannot be learned from: missing, not finite, or of the wrong form.

    Examples:
        >>> import torch
        >>> import hdnn
        >>> model = hdnn.Model(None, hdnn.H2(features=2, layers=2), hdnn.SigmoidHead(features=2))
        >>> hdnn.training.fit(model, torch.full((8, 2), torch.nan), torch.zeros(8).long())
        Traceback (most recent call last):
        hdnn.errors.DataError: x has NaN or infinite values in 8 of 8 samples, ...
    """


class TrainingError(HDNNError):
    """A training run that cannot start or cannot go on.

    Examples:
        >>> import torch
        >>> import hdnn
        >>> model = hdnn.Model(None, hdnn.H2(features=2, layers=2), hdnn.SigmoidHead(features=2))
        >>> hdnn.training.fit(model, torch.randn(8, 2), torch.zeros(8).long(), epochs=0)
        Traceback (most recent call last):
        hdnn.errors.TrainingError: epochs must be a whole number >= 1, but got 0.
    """


class MissingExtraError(HDNNError):
    """An optional dependency that is not installed.

    Examples:
        >>> import hdnn
        >>> hdnn.errors.require("no_such_package", extra="plot")
        Traceback (most recent call last):
        hdnn.errors.MissingExtraError: no_such_package is needed here but cannot be imported ...
    """


class ReversalWarning(UserWarning):
    """A backward pass whose rebuilt states differ from those of the forward pass.

    Examples:
        >>> import warnings, hdnn, torch
        >>> net = hdnn.H2(2, 4, step=1.0, activation="identity", backprop="reversible")
        >>> with torch.no_grad():
        ...     for weights in (net.K_p, net.K_q):
        ...         _ = weights.fill_(1.8)  # far too large for such a step
        >>> with warnings.catch_warnings(record=True, action="always") as caught:
        ...     net(torch.tensor([[0.1, 0.3]])).sum().backward()
        >>> caught[0].category.__name__
        'ReversalWarning'
    """


class GridWarning(UserWarning):
    """A state, or an increment of one, that is hardly larger than the grid of `state="fixed"`.

    Examples:
        >>> import warnings, hdnn, torch
        >>> net = hdnn.H2(features=4, layers=2)
        >>> with warnings.catch_warnings(record=True, action="always") as caught:
        ...     with hdnn.engine.use(state="fixed"):
        ...         y = net(1e-11 * torch.ones(1, 4))
        >>> caught[0].category.__name__
        'GridWarning'
    """


class TableWarning(UserWarning):
    """New rows differ from those that a model learned from.

    Examples:
        >>> import warnings, hdnn
        >>> model = hdnn.HDNNClassifier(epochs=1).fit([["a"], ["b"]] * 9, ["yes", "no"] * 9)
        >>> with warnings.catch_warnings(record=True, action="always") as caught:
        ...     answer = model.predict([["c"]])
        >>> caught[0].category.__name__
        'TableWarning'
    """


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
