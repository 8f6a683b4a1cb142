"""Options that networks and units share, checked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from hdnn.errors import OptionError, StepError, positive_float

DEFAULT_T = 2.4


def step_size(
    step: float | Sequence[float] | Tensor | None, T: float | None, layers: int
) -> float | tuple[float, ...]:
    """h from what the user gave: h itself, one a layer, or T with h = T/N."""
    if step is not None and T is not None:
        raise OptionError(f"give step (h) or T, where h = T/N, but not both: {step=}, {T=}.")
    if step is None:
        return positive_float("T", DEFAULT_T if T is None else T) / layers
    if isinstance(step, (Tensor, np.ndarray)):
        step = step.tolist()
    if isinstance(step, (list, tuple)):
        if len(step) != layers:
            raise StepError(f"step has {len(step)} entries for {layers} layers; give one each.")
        return tuple(positive_float("step", h) for h in step)
    return positive_float("step", step)
