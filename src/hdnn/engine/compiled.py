"""Inside `torch.compile`, a stack that is told how to run becomes one operator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hdnn.engine import dispatch, operators
from hdnn.errors import OptionError
from hdnn.integrators import splitting


@dataclass
class Compiled:
    """A shear stack as one operator of the graph."""

    activation: str
    how: str  # engine and backprop

    def split(
        self,
        y: Tensor,
        weights: tuple[Tensor, Tensor, Tensor, Tensor],
        V: tuple[Tensor | None, Tensor | None],
        h: Sequence[Any],
        shears: tuple[splitting.Shear, ...],
        kind: str,
        inverse: bool,
    ) -> Tensor:
        halves, parts = dispatch.turns(shears, inverse)
        # As tensors: the compiler does not follow the memory of coefficients that are constant.
        steps = h if isinstance(h[0], Tensor) else torch.tensor(h, dtype=torch.float64).unbind(0)
        coef = dispatch.coefficients(parts, steps, inverse, y.dtype, y.device)
        tensors = [None if t is None else t.contiguous() for t in (*weights, *V)]
        flat = y.reshape(-1, y.shape[-1]).contiguous()
        out, _ = operators.split_stack(
            flat, *tensors, coef, list(halves), inverse, self.activation, kind, self.how
        )
        return out.reshape(y.shape)


def prepare(
    activation: str, engine: str | None, backprop: str | None, reversible: bool
) -> Compiled:
    if not reversible:
        raise OptionError(
            "inside torch.compile only invertible stacks (H2, MS1, MS3, Verlet, Yoshida) can be "
            'one operator; leave engine and backprop at "auto".'
        )
    ways = ("fused" if engine == "fused" else "reference", backprop or "checkpoint")
    return Compiled(activation, " ".join(ways))
