"""Scipy's adaptive solvers for a state of several tensors: accurate, for analysis only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from hdnn.errors import ConvergenceError, require

METHODS = ("RK23", "RK45", "DOP853", "Radau", "BDF", "LSODA")


def solve(
    rates: Callable[..., Sequence[Tensor]],
    state: Sequence[Tensor],
    times: Sequence[float],
    *,
    method: str,
    rtol: float,
    atol: float,
) -> list[Tensor]:
    """The state at all times, each tensor as (len(times), ...), given the state at the first.

    `rates(t, *state)` must be smooth between the first time and the last, which may run backwards.
    Tensors are float64 on the CPU.
    """
    solve_ivp = require("scipy.integrate", extra="science").solve_ivp
    sizes, shapes = [part.numel() for part in state], [part.shape for part in state]
    if not sum(sizes):  # no samples, no equation
        return [part.expand(len(times), *part.shape) for part in state]

    def join(parts: Sequence[Tensor]) -> np.ndarray:
        return torch.cat([part.reshape(-1) for part in parts]).numpy()

    def split(flat: np.ndarray) -> list[Tensor]:
        parts = torch.from_numpy(flat).split(sizes, -1)
        return [
            part.reshape(*flat.shape[:-1], *shape)
            for part, shape in zip(parts, shapes, strict=True)
        ]

    def rate(t: float, flat: np.ndarray) -> np.ndarray:
        found = join(rates(t, *split(flat)))
        if not np.isfinite(found).all():  # the solver would try ever smaller steps
            raise ConvergenceError(
                f"the solution of the ODE is past the largest float64 at t = {t:g}; "
                "take smaller weights, states or T."
            )
        return found

    span, options = (times[0], times[-1]), {"t_eval": times, "rtol": rtol, "atol": atol}
    with np.errstate(over="ignore", invalid="ignore"):  # `rate` raises one error for it
        done = solve_ivp(rate, span, join(state), method, **options)
    if not done.success:
        raise ConvergenceError(
            f"{method} cannot solve the ODE between t = {times[0]:g} and t = {times[-1]:g}: "
            f"{done.message}"
        )
    return split(np.ascontiguousarray(done.y.T))
