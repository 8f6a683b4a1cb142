"""Weights of classes: classes that are rare, or whose mistakes cost more, can count for more."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from hdnn.errors import SENSIBLE, OptionError, quoted

BALANCED = "balanced"


def read(text: str) -> Mapping[str, float] | str:
    """What `--class-weight` says: balanced, or a number for each class, such as yes=2,no=1."""
    if text.strip() == BALANCED:
        return BALANCED
    found: dict[str, float] = {}
    for part in text.split(","):
        name, sign, number = part.rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not (sign and name.strip() and 0 <= weight <= SENSIBLE):
            raise OptionError(
                "class-weight must be balanced, or a number >= 0 for each class such as "
                f"yes=2,no=1, but got {quoted(text)}."
            )
        if name.strip() in found:
            raise OptionError(f"class-weight names {quoted(name.strip())} twice; name it once.")
        found[name.strip()] = weight
    return found


def balanced(labels: np.ndarray, classes: int, weight: np.ndarray | None = None) -> np.ndarray:
    """A factor for each class, so that all together weigh as much, and their mean stays 1."""
    total = np.bincount(labels, weight, minlength=classes).astype(float)
    return total.sum() / (classes * np.maximum(total, np.finfo(float).tiny))


def named(given: Mapping[str, float], classes: Sequence[str]) -> np.ndarray:
    """The factors that were given by name; 1 for the other classes."""
    unknown = [name for name in given if name not in classes]
    if unknown:
        raise OptionError(
            f"class-weight names {quoted(unknown[0])}, but the classes are "
            f"{', '.join(map(repr, classes[:8]))}{' ..' * (len(classes) > 8)}."
        )
    factors = np.array([given.get(name, 1.0) for name in classes])
    if not factors.any():
        raise OptionError("class-weight is 0 for all classes: there is nothing to learn from.")
    return factors
