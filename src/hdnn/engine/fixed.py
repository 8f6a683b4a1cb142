"""Shear stacks on an integer grid: the reversal is exact to the last bit, at any depth.

The state is whole multiples of 2^-20. A shear adds a *rounded* increment, and undoing it subtracts
the very same one, because it is computed from the half that the shear did not touch. What the
arithmetic inside is (float32, bf16) does not matter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hdnn import activations
from hdnn.engine.plain import Shears, out, split_gradients
from hdnn.errors import TrainingError

GRID = 2.0**20
LIMIT = 2**31  # what a 32-bit integer holds: values up to 2048


def to_grid(y: Tensor) -> Tensor:
    """The nearest state on the grid, as integers."""
    return torch.round(y.double() * GRID).to(torch.int64)


def from_grid(Y: Tensor, dtype: torch.dtype) -> Tensor:
    """A state on the grid as numbers."""
    return (Y.double() / GRID).to(dtype)


def split_forward(y: Tensor, stack: Shears) -> Tensor:
    """The integers of y_N, int32 (B, n), from y_0."""
    sigma = activations.get(stack.activation)
    parts = list(to_grid(y).chunk(2, -1))
    largest = torch.stack([part.abs().max() if part.numel() else part.sum() for part in parts])
    for half, j, c in zip(stack.half.tolist(), stack.layer.tolist(), stack.coef, strict=True):
        K, b, V = stack.part(half)
        z = sigma(torch.addmm(b[j], from_grid(parts[1 - half], y.dtype), K[j].mT))
        parts[half] = parts[half] + to_grid(c * out(z, K, V, j, stack.kind))
        if parts[half].numel():
            largest[half] = torch.maximum(largest[half], parts[half].abs().max())
    if not bool((largest < LIMIT).all()):
        raise TrainingError(
            f"the state left the fixed-point grid: it reached {float(largest.max()) / GRID:.4g}, "
            f'but state="fixed" holds +-{LIMIT / GRID:.0f} only; take a bounded activation such as '
            'tanh, a smaller h or weights, or state="float".'
        )
    return torch.cat(parts, -1).to(torch.int32)


def split_backward(Y: Tensor, g: Tensor, stack: Shears) -> tuple[Tensor | None, ...]:
    """As `plain.split_backward`, from the integers of y_N; y_0 comes back as integers too."""
    parts = list(Y.to(torch.int64).chunk(2, -1))

    def undo(half: int, increment: Tensor) -> None:
        parts[half] = parts[half] - to_grid(increment)

    def source(half: int) -> Tensor:
        return from_grid(parts[half], g.dtype)

    gradients = split_gradients(g, stack, source, undo)
    return torch.cat(parts, -1).to(torch.int32), *gradients
