"""A call of a function of `hdnn.functional`, and the arguments of kernels for it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hdnn.activations import Activation
from hdnn.base.shapes import Step
from hdnn.engine.kernels.protocol import Stack
from hdnn.integrators import splitting
from hdnn.interconnection import times_J, times_X


class Call(NamedTuple):
    """A stack with its weights, and the state to run it on."""

    shears: tuple[splitting.Shear, ...] | None  # of a layer; None: forward Euler
    kind: str  # what V is: see `kernels.protocol`
    inverse: bool
    y: Tensor
    weights: tuple[Tensor, ...]
    link: Tensor | None  # X or J
    h: Step
    sigma: Activation

    @property
    def turns(self) -> tuple[int, ...]:
        """Which half moves in each shear of a layer, in order; empty for forward Euler."""
        return tuple(int(half == "q") for half, _ in self._order())

    @property
    def fractions(self) -> tuple[float, ...]:
        """The signed fraction of h by which each shear of a layer moves; 1 for forward Euler."""
        if self.shears is None:
            return (1.0,)
        return tuple(part if half == "q" else -part for half, part in self._order())

    def _order(self) -> tuple[splitting.Shear, ...]:
        shears = self.shears or ()
        return splitting.inverse(shears) if self.inverse else shears

    def describe(self, dtype: torch.dtype) -> Stack:
        """The stack, for kernels that compute in that dtype."""
        n, (N, r, _), turns = self.y.shape[-1], self.weights[0].shape, self.turns
        rows = (r, self.weights[1].shape[1] if len(self.weights) == 4 else r) if turns else (r,)
        return Stack(
            activation=self.sigma.name,
            kind=self.kind,
            layers=N,
            turns=turns,
            inverse=self.inverse,
            samples=self.y.numel() // n if n else 0,
            features=n,
            rows=rows,
            dtype=dtype,
            device=self.y.device,
            learned=isinstance(self.h, Tensor),
        )


def with_V(weights: tuple[Tensor, ...], link: Tensor | None) -> tuple[Tensor | None, ...]:
    """The weights and V, which maps sigma to the state: K X^T and so on, or None if it is K."""
    if len(weights) == 2:
        return *weights, None if link is None else times_J(weights[0], link)
    if len(weights) == 3:  # of MS1
        K_0, b_1, b_2 = weights
        return K_0.mT, K_0, b_1, b_2, None, None
    if link is None:
        return *weights, None, None
    K_p, K_q, _, _ = weights
    return *weights, times_X(K_p, link), times_X(K_q, link, adjoint=True)


def coefficients(
    fractions: tuple[float, ...],
    h: Step,
    layers: int,
    inverse: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """The coefficient c of each step: its fraction times the h of its layer."""
    steps = h if isinstance(h, Tensor) else torch.tensor(h, dtype=torch.float64, device="cpu")
    steps = steps.expand(layers)
    if inverse:
        steps = steps.flip(0)
    fraction = torch.tensor(fractions, dtype=steps.dtype, device=steps.device)
    return (steps[:, None] * fraction).flatten().to(device, dtype)
