"""Shear stacks on an integer grid: the reversal is exact to the last bit, at any depth.

The state is whole multiples of 2^-40, about 1e-12, held by 64-bit integers, which reach to 8e6. A
shear adds a *rounded* increment, and undoing it subtracts the very same one, because it is computed
from the half that the shear did not touch. The precision of that computation (float32, bf16) does
not matter. A state that leaves the grid is an error; one that is too small for it, a warning.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from hdnn.engine.kernels.plain import PlainKernel, out
from hdnn.engine.kernels.protocol import Tensors, moved_by
from hdnn.errors import GridWarning, TrainingError

GRID = 2.0**40
LIMIT = 2.0**23  # the largest state: 2^63 multiples, the largest integer
COARSE = 1e-3  # relative rounding to the grid that gives a warning


def to_grid(y: Tensor) -> Tensor:
    """The nearest state on the grid, as integers."""
    return torch.round(y.double() * GRID).to(torch.int64)


def from_grid(Y: Tensor, dtype: torch.dtype) -> Tensor:
    """A state on the grid as floats."""
    return (Y.double() / GRID).to(dtype)


class FixedShears(PlainKernel):
    """A shear stack on the grid; what it keeps are the integers of y_N, int64 (B, n)."""

    def forward(
        self, y: Tensor, tensors: Tensors, keep: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        halves, sizes, moves = list(to_grid(y).chunk(2, -1)), [_largest(y)], []
        for (half, j), c in zip(self.order, tensors[-1], strict=True):
            K, b, V = moved_by(half, tensors)
            z = self.sigma(torch.addmm(b[j], from_grid(halves[1 - half], y.dtype), K[j].mT))
            move = c * out(z, K, V, j, self.stack.kind)
            halves[half] = halves[half] + to_grid(move)
            moves.append(_largest(move))
            sizes.append(_largest(from_grid(halves[half], torch.float64)) + moves[-1])
        _check_limit(torch.stack(sizes))
        _check_grain(sizes[0], torch.stack(moves))
        Y_N = torch.cat(halves, -1)
        return from_grid(Y_N, y.dtype), Y_N if keep else None

    def backward(self, kept: Tensor, g: Tensor, tensors: Tensors) -> Tensors:
        return self.undo(kept, g, tensors)[1]

    def undo(self, y_N: Tensor, g: Tensor, tensors: Tensors) -> tuple[Tensor, Tensors]:
        """As in `PlainKernel`, but y_N and y_0 are integers."""
        halves = list(y_N.chunk(2, -1))

        def undo(half: int, increment: Tensor) -> None:
            halves[half] = halves[half] - to_grid(increment)

        def source(s: int, half: int) -> Tensor:
            return from_grid(halves[half], g.dtype)

        gradients = self.gradients(g, tensors, source, undo)
        return torch.cat(halves, -1), gradients


def _largest(x: Tensor) -> Tensor:
    x = x.detach().double()
    return x.abs().max() if x.numel() else x.sum()


def _check_limit(sizes: Tensor) -> None:
    """Raise if a state, or an increment of one, is too large for the integers, or NaN."""
    if not bool((sizes < LIMIT).all()):
        raise TrainingError(
            f"the state left the fixed-point grid: it reached {float(sizes.max()):.4g}, "
            f'but state="fixed" holds +-{LIMIT:.4g} only; take a bounded activation such as '
            'tanh, a smaller h or weights, or state="float".'
        )


def _check_grain(size: Tensor, moves: Tensor) -> None:
    """Warn if rounding to the grid noticeably changes y_0, or all increments.

    An exact 0 is not changed.
    """
    grain = 0.5 / GRID
    for what, found in (("y_0", float(size)), ("what a layer adds", float(moves.max()))):
        if 0 < found < grain / COARSE:
            warnings.warn(
                f'state="fixed" keeps multiples of {2 * grain:.1e}, but {what} is {found:.1e} at '
                f"most, so it is rounded by up to {min(1.0, grain / found):.0%}; scale the state "
                'up, take larger steps, or use state="float".',
                GridWarning,
                stacklevel=2,
            )
            return
