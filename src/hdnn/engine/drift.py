"""Checks that a backward pass which rebuilds its states returns to where the forward pass began.

When layers are undone one by one, rounding grows as the layers expand. y_0 is kept, so the true y_1
is known and each reversal is checked against it: gradients that are a little off give a warning,
worthless ones an error.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hdnn.engine.tracing import transformed
from hdnn.errors import ReversalWarning, TrainingError

WORTHLESS = 0.1  # relative error of a rebuilt state
ADVICE = (
    'take backprop="auto" or "checkpoint", whose gradients are those of stored states, or smaller '
    "steps or weights"
)


def noticeable(dtype: torch.dtype) -> float:
    """The smallest drift that gives a warning."""
    return torch.finfo(dtype).eps ** 0.5


def drift_of(y_1: Tensor, rebuilt: Tensor, y_N: Tensor) -> Tensor:
    """The relative error of the rebuilt y_1 (B, ...), for the worst sample.

    Tiny samples count as a thousandth of the largest. It is infinite if the rebuilt state is not
    finite, and NaN if y_N is not, from which no state can be rebuilt.
    """
    off, size, end = (t.abs().flatten(1).amax(1) for t in (rebuilt - y_1, y_1, y_N))
    most = size.max()
    size = torch.where(most > 0, torch.maximum(size, 1e-3 * most), 1.0)
    worst = (off / size).nan_to_num(torch.inf, torch.inf).max()
    return torch.where(end.isfinite().all(), worst, torch.nan)


def strict_drift_of(y: Tensor, rebuilt: Tensor, end: Tensor) -> Tensor:
    """The relative error of a rebuilt state (B, n), for its worst entry.

    An entry counts as no smaller than it was at the end, where rounding began, nor than the middle
    of its column (among 128 samples or more): a large feature, or a large sample, does not hide the
    errors of others.
    """
    size = torch.maximum(y.abs(), end.abs())
    some = size[:: max(1, len(size) // 128)]  # sorting all would take longer than the layers
    size = torch.maximum(size, some.median(0).values)
    off = (rebuilt - y).abs()
    # NaN is not 0: a state that was lost counts as infinitely far off.
    return torch.where(off == 0, 0.0, off / size).nan_to_num(torch.inf, torch.inf).max()


def recorded(t: Tensor) -> bool:
    """Whether a CUDA graph records what happens, so that no value can be read."""
    return t.is_cuda and torch.cuda.is_current_stream_capturing()


def check_reversal(drift: Tensor, grads: Sequence[Tensor | None]) -> list[Any]:
    """The gradients; warns if the drift is noticeable, and raises if it is too large.

    Worthless gradients become NaN where values cannot be read (in a CUDA graph, in `torch.compile`
    and under the transforms of `torch.func`), and if y_N is not finite.
    """
    if torch.compiler.is_compiling() or recorded(drift) or transformed():
        return [None if g is None else torch.where(drift < WORTHLESS, g, torch.nan) for g in grads]
    found, wide = float(drift), drift.dtype
    if found <= noticeable(wide):
        return list(grads)
    if found != found:
        return [None if g is None else torch.full_like(g, torch.nan) for g in grads]
    advice = ADVICE if wide is torch.float64 else f"{ADVICE}, or float64"
    what = (
        'the backward pass rebuilt its states from the last, as backprop="reversible" asks for, '
        f"and came back to a y_1 that is off by {found:.2g} of its size"
    )
    if found >= WORTHLESS:
        raise TrainingError(f"{what}, so the gradients would be worthless; {advice}.")
    message = f"{what}, so the gradients are inexact; {advice}."
    warnings.warn(message, ReversalWarning, stacklevel=2)
    return list(grads)
