"""Initial weights: the paper's N(0, 1), or N(0, 1/n), for layers of one size at any n."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hdnn.base.devices import as_device
from hdnn.errors import OptionError, ShapeError, choose

INITS = ("paper", "scaled")


class Initial:
    """Draws initial weights of one dtype, on one device, from one generator."""

    def __init__(
        self,
        init: str,
        features: int,
        generator: torch.Generator | None,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
    ) -> None:
        self.init = choose("init", init, INITS)
        if generator is not None and not isinstance(generator, torch.Generator):
            raise OptionError(
                f"generator must be a torch.Generator or None, but got {type(generator).__name__}."
            )
        self.scale = 1.0 if init == "paper" else features**-0.5
        self.generator = generator
        self.dtype = torch.get_default_dtype() if dtype is None else dtype
        self.device = as_device(device)
        if not (isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point):
            raise ShapeError(
                f"dtype must be a floating-point type such as torch.float32, but got {dtype}."
            )

    def K(self, *shape: int) -> Tensor:
        """Entries from N(0, 1) or N(0, 1/n)."""
        return self._drawn(torch.randn, shape, lambda draw: self.scale * draw)

    def b(self, *shape: int) -> Tensor:
        """Entries from N(0, 1), or zeros."""
        return self.K(*shape) if self.init == "paper" else self.constant(torch.zeros(shape))

    def uniform(self, shape: Sequence[int], bound: float) -> Tensor:
        """Entries between -bound and bound."""
        return self._drawn(torch.rand, shape, lambda draw: bound * (2 * draw - 1))

    def _drawn(
        self,
        sample: Callable[..., Tensor],
        shape: Sequence[int],
        made_of: Callable[[Tensor], Tensor],
    ) -> Tensor:
        if self.device.type == "meta":  # shapes alone; drawing would make PyTorch import much more
            return torch.empty(shape, dtype=self.dtype, device=self.device)
        # Drawn in float32 whatever the dtype, so that a seed gives the same network in all of them.
        g = self.generator
        where = self.device if g is None else g.device
        return self.constant(made_of(sample(shape, generator=g, dtype=torch.float32, device=where)))

    def constant(self, values: Tensor) -> Tensor:
        """A constant in the dtype and on the device of the weights, and never the same storage."""
        return values.detach().to(dtype=self.dtype, device=self.device, copy=True)
