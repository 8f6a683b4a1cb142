"""Where the weight gradients of a stack lie, and how sums over samples get there."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hdnn.engine.kernels import compiling, sums, tilings, warps
from hdnn.engine.kernels.launching import Launch
from hdnn.engine.kernels.protocol import Stack

EMITTED_BYTES = 256 * 2**20
"""Memory for the factors of weight gradients: of so many layers at a time, or of one layer."""

PROGRAMS, ROWS = 256, 512
"""Products of factors are split into parts for so many programs, but not for fewer rows."""


class Gradients:
    """How the gradients of a stack share one buffer, each of them contiguous.

    Rows of dK, db and dV have the same order: layer by layer, all of p before all of q.
    """

    def __init__(self, stack: Stack) -> None:
        N, rows, width = stack.layers, stack.rows, stack.width
        self.starts, end = [], 0
        for r in rows:
            self.starts.append(end)
            end = _aligned(end + N * r)
        tails = [(width,), (), (width,)] if stack.kind == "general" else [(width,), ()]
        self.places: list[tuple[tuple[int, ...], tuple[int, ...], int] | None] = []
        self.size = 0
        for tail in tails:
            w = math.prod(tail)
            for r, start in zip(rows, self.starts, strict=True):
                strides = (r * w, w, 1)[: 2 + len(tail)]
                self.places.append(((N, r, *tail), strides, self.size + start * w))
            self.size = _aligned(self.size + end * w)
        self.places += [None] * (3 * len(rows) - len(self.places))
        self.places.append(((stack.steps,), (1,), self.size) if stack.learned else None)
        self.size = _aligned(self.size + stack.steps * stack.learned)
        self.each = len(rows)

    def of(self, buffer: Tensor) -> list[Any]:
        """dK, db, dV (of p and of q each) and dc in a buffer."""
        return [None if at is None else buffer.as_strided(*at) for at in self.places]

    def targets(self, buffer: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """dK, db, dV and dc as kernels take them; any tensor stands in for None."""
        dK, db, dV, dc = self.of(buffer)[:: self.each]
        return dK, db, dK if dV is None else dV, db if dc is None else dc


class Sums:
    """Weight gradients as the lanes of warps add them up (`warps.py`), to be put in order."""

    def __init__(self, stack: Stack, constants: dict[str, Any], gradients: Gradients) -> None:
        BR, BM = constants["BR"], constants["BM"]
        self.of_K, self.of_b = BR * BM, 2 * BR
        sizes = (stack.width, stack.rows[0], stack.rows[-1], gradients.starts[-1])
        kernel: Any = warps.unfold_kernel
        self._launch = Launch(kernel, stack, sizes, constants, num_warps=1, num_stages=1)

    def new(self, like: Tensor, steps: int) -> tuple[Tensor, ...]:
        """Zeros for dK and db of so many steps."""
        return like.new_zeros(steps * (self.of_K + self.of_b)).split(steps * self.of_K)

    def unfold(self, sums: tuple[Tensor, ...], others: tuple[Tensor, ...], steps: int) -> None:
        """Write dK and db, given the schedule and c of the steps."""
        self._launch((steps, 1, 1), (*sums, *others))


class Factors:
    """The factors of weight gradients, for some layers at a time, and their products.

    A product with few others at its side is computed in parts, which are added up in order.
    """

    def __init__(self, stack: Stack, precision: str, kind: str, gradients: Gradients) -> None:
        self.stack, self.turns = stack, len(stack.turns) or 1
        if precision == "ieee" and not compiling.interpreted():
            precision = "tf32x3"  # as exact to rounding, and much faster than without tensor cores
        self.dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        self.rows = stack.samples * (1 if kind in ("identity", "unit") else 2)
        self.widths = (max(stack.rows), stack.width)
        one = self.turns * self.rows * sum(self.widths) * self.dtype.itemsize
        chunks = -(-stack.layers // max(1, EMITTED_BYTES // max(1, one)))
        self.layers = -(-stack.layers // max(1, chunks))
        BR, BM = (min(128, tilings.padded(w)) for w in self.widths)
        blocks = math.prod(-(-w // block) for w, block in zip(self.widths, (BR, BM), strict=True))
        products = 2 if kind == "general" else 1
        programs = max(1, self.layers) * stack.parts * blocks * products
        self.parts = max(1, min(PROGRAMS // programs, self.rows // products // ROWS))
        self.grid = (stack.parts, blocks, self.parts * products)
        constants = {
            "KIND": kind,
            "PREC": precision,
            "PAD": any(r % BR for r in stack.rows) or stack.width % BM != 0,
            "EULER": not stack.turns,
            "PARTS": self.parts,
            "BK": 64 if precision == "bf16" else 32,
            "BR": BR,
            "BM": BM,
        }
        sizes = (self.turns, stack.width, stack.rows[0], stack.rows[-1], gradients.starts[-1])
        roomy = tilings.shared_bytes(stack.device) >= 99 * 2**10
        warps = 8 if BR * BM >= 128 * 128 else 4
        options = {"num_warps": warps, "num_stages": 3 if roomy else 1}
        kernel: Any = sums.weight_kernel
        self._launch = Launch(kernel, stack, (*sizes, gradients.size), constants, **options)

    def new(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Room on the left and on the right."""
        steps = self.layers * self.turns
        left, right = (like.new_empty(steps * self.rows * w, dtype=self.dtype) for w in self.widths)
        return left, right

    def spans(self) -> Iterator[tuple[int, int]]:
        """From which step to which, the last ones first."""
        chunk = self.layers * self.turns
        for high in range(self.stack.steps, 0, -chunk):
            yield max(0, high - chunk), high

    def multiply(self, tensors: tuple[Tensor, ...], low: int, high: int) -> None:
        """The weight gradients of the layers from one step to another."""
        halves, blocks, parts = self.grid
        self._launch(((high - low) // self.turns * halves, blocks, parts), tensors, low)


def _aligned(size: int) -> int:
    """The next multiple of 32 numbers, or 128 bytes."""
    return -(-size // 32) * 32
