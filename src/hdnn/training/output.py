"""The output layer during a training: solved for each minibatch, and at the end for all data."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hdnn.training import coordinate, small_heads
from hdnn.training.coordinate import Head, Outcome

# A few steps suffice where the next minibatch has another optimum anyway.
MINIBATCH_STEPS = {"newton": 5, "adam": 10}
REFIT_STEPS = 50


class Output:
    """An output layer and how it is found: "newton", "adam", or "joint" with the hidden layers."""

    def __init__(self, head: Head, solver: str, ridge: float, rate: float, y: Tensor) -> None:
        self.head, self.solver, self.ridge, self.rate = head, solver, ridge, rate
        self.small = small_heads.SmallHead(head) if small_heads.usable(head, y) else None

    def solve(self, y: Tensor, t: Tensor, weight: Tensor | None = None) -> Outcome:
        """Find the output layer for these features, and what the loss is with it."""
        head, solver, ridge = self.head, self.solver, self.ridge
        if solver == "joint":
            return coordinate.outcome(head, y, t, weight, joint=True)
        # Adam starts from zero each time: a rate that falls would leave it there.
        steps, rate = MINIBATCH_STEPS[solver], self.rate
        if self.small is not None:
            return self.small.solve(y, t, weight, solver, steps, ridge, rate)
        if solver == "newton":
            coordinate.newton(head, y, t, ridge, steps, weight)
        else:
            coordinate.adam(head, [(y, t, weight)], ridge, rate, steps)
        return coordinate.outcome(head, y, t, weight)

    def refit(
        self, y: Tensor, t: Tensor, weight: Tensor | None, generator: torch.Generator, batch: int
    ) -> None:
        """Fit the output layer to all data, in minibatches of an order of their own for Adam."""
        if self.solver == "newton":
            coordinate.newton(self.head, y, t, self.ridge, REFIT_STEPS, weight)
            return
        passes = []
        for _ in range(REFIT_STEPS):
            index = torch.randperm(len(y), generator=generator).to(y.device)
            passes.append((y[index], t[index], None if weight is None else weight[index]))
        if self.small is not None:
            self.small.adam(passes, batch, self.ridge, self.rate)
            return
        parts = [part for whole in passes for part in _parts(whole, batch)]
        coordinate.adam(self.head, parts, self.ridge, self.rate)


def _parts(whole: coordinate.Part, size: int) -> Iterator[coordinate.Part]:
    """The minibatches of a pass over the data, without those whose samples all have weight 0."""
    y, t, weight = whole
    for low in range(0, len(y), size):
        part = slice(low, low + size)
        w = None if weight is None else weight[part]
        if w is None or bool(w.any()):
            yield y[part], t[part], w
