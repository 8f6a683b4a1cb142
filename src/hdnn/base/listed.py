"""What somebody gave as a list: a list, a generator, an array or a tensor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from torch import Tensor


def listed(given: Any) -> list[Any] | None:
    """Its entries, numbers of arrays and tensors as Python's own; None if it has no entries.

    Examples:
        >>> import torch
        >>> listed(torch.tensor([[0, 1]])), listed(iter("ab")), listed(torch.tensor(3))
        ([[0, 1]], ['a', 'b'], None)
    """
    if isinstance(given, Tensor | np.ndarray):
        given = given.tolist()
    return list(given) if isinstance(given, Iterable) else None
