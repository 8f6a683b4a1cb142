"""What describes a stack to a kernel, and the methods that a kernel has.

A *shear stack* takes turns: p and q = (0, 1) move one after the other, each by the other half:
target += c sigma(source K^T + b) V. V is K itself ("same"), nothing ("identity"), or given
("general"). An *Euler stack* moves all of y at once, y += c sigma(y K^T + b) V, and there V may
also be K J^T with the canonical J ("canonical").

Kernels take and return tensors in one order: K_p, K_q, b_p, b_q, V_p, V_q and c for a shear stack;
K, b, V and c for an Euler stack. Weights lead with the layer, V is None unless it is given, and c
is the coefficient of each step (a shear, or a layer of forward Euler), in the order in which they
run. All are contiguous, of one dtype and on one device.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from hdnn.engine.tracing import constant

ACTIVATIONS = ("tanh", "relu", "sigmoid", "softplus", "gelu", "silu", "sin", "identity")

Tensors = tuple[Any, ...]


@dataclass(frozen=True)
class Stack:
    """All that is known of a stack without its tensors."""

    activation: str
    kind: str  # what V is
    layers: int
    turns: tuple[int, ...]  # which half moves (0: p, 1: q) in each shear; none: forward Euler
    inverse: bool  # last layer first
    samples: int
    features: int
    rows: tuple[int, ...]  # of K, or of K_p and K_q
    dtype: torch.dtype
    device: torch.device
    learned: bool = True  # whether gradients of c are asked for

    @property
    def steps(self) -> int:
        """Shears, or layers of forward Euler."""
        return self.layers * (len(self.turns) or 1)

    @property
    def width(self) -> int:
        """Features that one step reads."""
        return self.features // 2 if self.turns else self.features

    def part(self, tensors: Tensors, first: int, last: int) -> Tensors:
        """The tensors of the layers from `first` to before `last`."""
        *weights, c = tensors
        begin, end = (self.layers - last, self.layers - first) if self.inverse else (first, last)
        each = len(self.turns) or 1
        cut = [None if w is None else w[first:last] for w in weights]
        return *cut, c[begin * each : end * each]


class Kernel(Protocol):
    """A way to run stacks of one description forwards and backwards, without autograd."""

    def __init__(self, stack: Stack) -> None: ...

    def forward(self, y: Tensor, tensors: Tensors, keep: bool) -> tuple[Tensor, Any]:
        """y_N from y_0 (B, n) and, with `keep`, what `backward` needs of the states."""
        ...

    def backward(self, kept: Tensor, g: Tensor, tensors: Tensors) -> Tensors:
        """The gradients of y_0 and of all tensors, from that of y_N."""
        ...

    @staticmethod
    def kept_size(stack: Stack) -> int:
        """How many numbers `forward` keeps."""
        ...

    @staticmethod
    def why_not(dtype: torch.dtype, features: int) -> str:
        """Why it cannot run such states; empty if it can."""
        ...


class ShearKernel(Kernel, Protocol):
    """A kernel of a shear stack, which can be undone."""

    def undo(self, y_N: Tensor, g: Tensor, tensors: Tensors) -> tuple[Tensor, Tensors]:
        """As `backward`, from y_N instead of what was kept: y_0 rebuilt, and the gradients."""
        ...


@lru_cache(maxsize=256)
def schedule(
    turns: tuple[int, ...], layers: int, inverse: bool, device: torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """For each shear of these layers: which half moves, and by which layer's weights.

    As int64 on the CPU, or as int32 on a device.
    """
    order = torch.arange(layers).flip(0) if inverse else torch.arange(layers)
    half, layer = torch.tensor(turns).repeat(layers), order.repeat_interleave(len(turns))
    if device is None:
        return half, layer
    return half.to(device, torch.int32), layer.to(device, torch.int32)


@constant
def installed(module: str) -> bool:
    """Whether the package that compiles a kernel is installed; it is imported at first use."""
    return _found(module)


@cache
def _found(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
