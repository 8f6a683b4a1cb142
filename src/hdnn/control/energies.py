"""Energies of rows: integrals of activations, and what they are never below."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hdnn.activations import Activation
from hdnn.integrators.chords import Chord

# What the integrals of activations are never below; of others it is not known, but where they are
# convex enough.
LOWEST = {
    **dict.fromkeys(("identity", "tanh", "sin", "relu", "gelu", "silu"), 0.0),
    "sigmoid": -math.log(2),
    "softplus": -(math.pi**2) / 12,
}


def energies(rows: Sequence[Activation], u: Tensor, weights: Tensor | None = None) -> Tensor:
    """The energy of each row u `(.., r)`, which has an activation of its own."""
    found = Chord(tuple(rows)).each(energy_of, u)
    return found if weights is None else weights * found


def energy_of(sigma: Activation, u: Tensor) -> Tensor:
    """The integral of an activation, to rounding of its own size near 0 where that can be had."""
    return log_cosh(u) if sigma.name == "tanh" else sigma.integral(u)


def log_cosh(x: Tensor) -> Tensor:
    """log cosh x, for any x: to rounding of its own size, and right when derived twice."""
    near = 0.5 * torch.log1p(torch.sinh(x.clamp(-1, 1)).square())  # of x^2/2, nothing cancels
    size = x.abs()
    return torch.where(size < 1, near, size + torch.log1p(torch.expm1(-2 * size) / 2))


def lowest(sigma: Activation) -> float:
    """What the integral of an activation is never below; -inf if that is not known."""
    known = LOWEST.get(sigma.name)
    if known is not None or sigma.s_min <= 0:
        return -math.inf if known is None else known
    start = float(sigma(torch.zeros((), dtype=torch.float64)))
    return -(start**2) / (2 * sigma.s_min)  # s(x) >= sigma(0) x + s_min x^2 / 2
