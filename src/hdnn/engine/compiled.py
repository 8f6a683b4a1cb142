"""Inside `torch.compile`, a stack that is told how to run becomes one operator."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hdnn.activations import Activation
from hdnn.engine.dispatch import HALF, NOT_REVERSIBLE
from hdnn.errors import OptionError
from hdnn.integrators import splitting
from hdnn.shapes import Step


@dataclass
class Compiled:
    """A stack as one operator of the graph."""

    activation: str
    kind: str
    layers: int
    shears: tuple[splitting.Shear, ...] | None
    inverse: bool
    how: str  # engine and backprop

    def __call__(
        self, y: Tensor, weights: tuple[Tensor, ...], link: Tensor | None, h: Step
    ) -> Tensor:
        """As the calls in `hdnn.engine.calls`."""
        from hdnn.engine import calls, operators

        wide = torch.float32 if self.how.startswith("fused") and y.dtype in HALF else y.dtype
        link = None if link is None else link.to(wide)
        moving = calls.moving(tuple(w.to(wide) for w in weights), link)
        tensors = [None if t is None else t.contiguous() for t in moving]
        flat = y.reshape(-1, y.shape[-1]).to(wide).contiguous()
        how = (self.activation, self.kind, self.how)
        if self.shears is None:
            steps = calls.coefficients((1.0,), h, self.layers, False, wide, y.device)
            out, _ = operators.euler_stack(flat, *tensors, steps, *how)
        else:
            halves, parts = calls.turns(self.shears, self.inverse)
            coef = calls.coefficients(parts, h, self.layers, self.inverse, wide, y.device)
            out, _ = operators.split_stack(flat, *tensors, coef, list(halves), self.inverse, *how)
        return out.reshape(y.shape).to(y.dtype)


def make(
    sigma: Activation,
    engine: str | None,
    backprop: str | None,
    kind: str,
    N: int,
    shears: tuple[splitting.Shear, ...] | None,
    inverse: bool,
) -> Compiled | None:
    """The operator, or None: the compiler sees each layer, unless it is told not to."""
    if engine != "fused" and backprop not in ("checkpoint", "reversible"):
        return None
    if shears is None and backprop == "reversible":
        raise OptionError(NOT_REVERSIBLE)
    usual = "stored" if shears is None else "checkpoint"
    ways = ("fused" if engine == "fused" else "reference", backprop or usual)
    return Compiled(sigma.name, kind, N, shears, inverse, " ".join(ways))
