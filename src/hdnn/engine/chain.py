"""Arguments of modules with other tensors in them. Until analysis is rewritten."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from copy import copy
from typing import Any

from torch import Tensor


def mapped(function: Callable[[Tensor], Tensor], given: Any) -> Any:
    """Arguments with another tensor in the place of each, also inside of tuples, lists, dicts."""
    if isinstance(given, Tensor):
        return function(given)
    if isinstance(given, tuple):
        found = [mapped(function, value) for value in given]
        return type(given)(*found) if hasattr(given, "_fields") else tuple(found)
    if isinstance(given, dict | UserDict | list):
        changed: Any = copy(given)  # of the same class, with whatever else it holds
        for at in range(len(given)) if isinstance(given, list) else given:
            changed[at] = mapped(function, given[at])
        return changed
    return given
