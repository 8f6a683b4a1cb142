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
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from hdnn.engine.tracing import constant

ACTIVATIONS = ("tanh", "relu", "sigmoid", "softplus", "gelu", "silu", "sin", "identity")
KINDS = ("same", "identity", "general", "canonical")  # of V

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
    def parts(self) -> int:
        """How many parts of the state move in turns: p and q, or y as one."""
        return 2 if self.turns else 1

    @property
    def steps(self) -> int:
        """Shears, or layers of forward Euler."""
        return self.layers * (len(self.turns) or 1)

    @property
    def width(self) -> int:
        """Features that one step reads."""
        return self.features // self.parts

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

    def undo(self, y_N: Tensor, g: Tensor, tensors: Tensors) -> tuple[Tensor, Tensors]:
        """As `backward` of a shear stack, from y_N alone: y_0 rebuilt, and the gradients."""
        ...

    @staticmethod
    def kept_size(stack: Stack, precision: str = "") -> int:
        """How many numbers `forward` keeps."""
        ...

    @staticmethod
    def why_not(dtype: torch.dtype, features: int) -> str:
        """Why it cannot run such states; empty if it can."""
        ...


@lru_cache(maxsize=256)
def order(turns: tuple[int, ...], layers: int, inverse: bool) -> tuple[tuple[int, int], ...]:
    """The part i that each step moves, and its layer. It reads part i - 1: of one, the same."""
    through = reversed(range(layers)) if inverse else range(layers)
    return tuple((part, layer) for layer in through for part in turns or (0,))


@lru_cache(maxsize=256)
def schedule(
    turns: tuple[int, ...], layers: int, inverse: bool, device: torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """The parts of `order`, and its layers: as int64 on the CPU, or as int32 on a device.

    For kernels that are made outside of transforms: inside, PyTorch wraps new tensors, and what is
    remembered here would be useless afterwards.
    """
    dtype = torch.int64 if device is None else torch.int32
    steps = torch.tensor(order(turns, layers, inverse), dtype=dtype, device=device or "cpu")
    part, layer = steps.reshape(-1, 2).unbind(1)
    return part.contiguous(), layer.contiguous()


def moved_by(part: int, tensors: Sequence[Any]) -> tuple[Any, Any, Any]:
    """K, b and V of the steps that move a part: p (0) moves by the weights of q, and q by p's."""
    if len(tensors) == 4:
        return tensors[0], tensors[1], tensors[2]
    K_p, K_q, b_p, b_q, V_p, V_q, _ = tensors
    return (K_p, b_p, V_p) if part else (K_q, b_q, V_q)


@constant
def installed(module: str) -> bool:
    """Whether the package that compiles a kernel is installed; it is imported at first use."""
    return _found(module)


@cache
def _found(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
