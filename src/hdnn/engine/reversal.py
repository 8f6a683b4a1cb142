"""Whether a backward pass that rebuilt its states came back to where the forward pass began.

Undoing layers one by one lets rounding grow by what the layers expand. The state that comes out at
the end is known, so that each reversal can be checked.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from hdnn.errors import TrainingError

WORTHLESS = 0.1  # of a state, by which the rebuilt one is off: then gradients say nothing

ADVICE = (
    'use backprop="auto" or "checkpoint", whose gradients are those of stored states, '
    'hdnn.engine.use(state="fixed"), float64, or smaller steps or weights'
)


class ReversalWarning(UserWarning):
    """A reversible stack whose rebuilt states are no longer those that it passed through."""


def noticeable(dtype: torch.dtype) -> float:
    """From how large a drift on gradients are said to be inexact."""
    return torch.finfo(dtype).eps ** 0.5


def drift_of(y: Tensor, y_0: Tensor) -> Tensor:
    """By how much y_0 differs from y (B, ...), of the largest entry: the worst sample's."""
    off, size = ((t.abs().flatten(1).amax(1)) for t in (y_0 - y, y))
    return (off / size.clamp_min(1e-3 * size.max()).clamp_min(torch.finfo(y.dtype).tiny)).max()


def check_reversal(y: Tensor, y_0: Tensor, y_N: Tensor, grads: list[Any]) -> list[Any]:
    """The gradients, if the rebuilt y_0 is y: else a warning, or an error where they are worthless.

    Nothing can be looked at while a CUDA graph is recorded: there, worthless gradients become NaN.
    """
    drift = drift_of(y, y_0)
    if y.is_cuda and torch.cuda.is_current_stream_capturing():
        poison = torch.where(drift < WORTHLESS, 0.0, torch.nan).to(y.dtype)
        return [None if g is None else g + poison for g in grads]
    found = float(drift)
    if found <= noticeable(y.dtype):
        return grads
    if not bool(torch.isfinite(y_N).all()):  # so is the loss, and gradients are NaN by themselves
        return grads
    if not found < WORTHLESS:
        raise TrainingError(
            f"the backward pass rebuilt its states, and came back to a y_0 that is off by "
            f"{found:.2g} of its size, so the gradients would be worthless; {ADVICE}."
        )
    warnings.warn(
        f"the backward pass rebuilt its states, and came back to a y_0 that is off by {found:.2g} "
        f"of its size, so the gradients are inexact; {ADVICE}.",
        ReversalWarning,
        stacklevel=2,
    )
    return grads
