"""How a compiled kernel is called with as little work as possible."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hdnn.engine.kernels import compiling
from hdnn.engine.kernels.protocol import Stack


class Launch:
    """A kernel with all that stays the same from call to call."""

    def __init__(
        self,
        kernel: Any,
        stack: Stack,
        sizes: tuple[int, ...],
        constants: dict[str, Any],
        **options: int,
    ) -> None:
        self.calls_directly = compiling.load()
        self.kernel = kernel
        self.B, self.sizes = stack.samples, sizes
        self.constants = {name: constants[name] for name in kernel.arg_names if name in constants}
        # Fusing products and sums is Triton's default now, but may not stay so.
        self.options = {**options, "enable_fp_fusion": True}
        self.device = -1 if stack.device.type == "cpu" else stack.device.index
        self.rest = (*sizes, *self.constants.values())
        self.direct: dict[tuple[int, int, int], Any] = {}

    def __call__(self, grid: tuple[int, int, int], tensors: tuple[Tensor, ...], *span: int) -> None:
        """Run the kernel over a number of steps, or from one step to another."""
        if self.device >= 0 and self.device != torch.cuda.current_device():
            with torch.cuda.device(self.device):
                return self(grid, tensors, *span)
        pointers = [tensor.data_ptr() for tensor in tensors]
        bits = 0
        for pointer in pointers:
            bits |= pointer
        aligned = bits % 16 == 0
        direct = self.direct.get(grid)
        if aligned and direct:
            direct(*pointers, self.B, *span, *self.rest)
            return None
        compiled = self.kernel[grid](
            *tensors, self.B, *span, *self.sizes, **self.constants, **self.options
        )
        if aligned and self.calls_directly:
            # Triton compiles for aligned pointers, and for each different set of constants.
            self.direct[grid] = compiled[grid]
        return None
