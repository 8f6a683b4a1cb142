"""Inside `torch.compile`, a stack that is told how to run becomes one operator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hdnn.engine import operators
from hdnn.engine.dispatch import ANCHOR
from hdnn.errors import OptionError
from hdnn.integrators import splitting


@dataclass
class Compiled:
    """A shear stack as one operator of the graph."""

    activation: str
    fused: bool
    segment: int

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
        turns = splitting.inverse(shears) if inverse else shears
        order = list(range(len(h)))
        if inverse:
            order.reverse()
        steps = [(half == "q", j, part) for j in order for half, part in turns]
        half = torch.tensor([int(q) for q, _, _ in steps])
        layer = torch.tensor([j for _, j, _ in steps])
        signs = [part if q else -part for q, _, part in steps]
        if isinstance(h[0], Tensor):
            fraction = torch.tensor(signs, dtype=h[0].dtype, device=h[0].device)
            coef = fraction * torch.stack([h[j] for _, j, _ in steps])
        else:
            coef = torch.tensor([s * h[j] for s, (_, j, _) in zip(signs, steps, strict=True)])
        tensors = [None if t is None else t.contiguous() for t in (*weights, *V)]
        flat = y.reshape(-1, y.shape[-1]).contiguous()
        coef = coef.to(dtype=y.dtype, device=y.device)
        how = (self.activation, kind, self.fused, self.segment)
        return operators.split_stack(flat, *tensors, coef, half, layer, *how)[0].reshape(y.shape)


def prepare(
    activation: str, engine: str | None, backprop: str | None, reversible: bool
) -> Compiled:
    if not reversible:
        raise OptionError(
            "inside torch.compile only invertible stacks (H2, MS1, MS3, Verlet, Yoshida) can be "
            'one operator; leave engine and backprop at "auto".'
        )
    segment = 0 if backprop == "reversible" else ANCHOR
    return Compiled(activation, engine == "fused", segment)
