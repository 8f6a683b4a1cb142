"""Inside `torch.compile`, a stack that other engines run becomes one operator."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hdnn import activations
from hdnn.activations import Activation
from hdnn.base.shapes import Step
from hdnn.engine import Settings, dispatch
from hdnn.integrators import splitting


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
        """As the calls in `hdnn.engine.calls`; kernels read no products that autocast rounded."""
        with torch.autocast(y.device.type, enabled=False):
            return self._run(y, weights, link, h)

    def _run(self, y: Tensor, weights: tuple[Tensor, ...], link: Tensor | None, h: Step) -> Tensor:
        from hdnn.engine import calls, operators

        fused = self.how.startswith("fused")
        wide = torch.float32 if fused and y.dtype in dispatch.HALF else y.dtype
        link = None if link is None else link.to(wide)
        moving = calls.moving(tuple(w.to(wide) for w in weights), link)
        halves, parts = calls.turns(self.shears, self.inverse)
        coef = calls.coefficients(parts, h, self.layers, self.inverse, wide, y.device)
        tensors = [t.contiguous() for t in (*moving, coef) if t is not None]
        flat = y.reshape(-1, y.shape[-1]).to(wide).contiguous()
        turns = "".join([str(half) for half in halves])
        how = (turns, self.inverse, self.activation, self.kind, self.how)
        return operators.stack(flat, tensors, *how)[0].reshape(y.shape).to(y.dtype)


def make(
    y: Tensor,
    sigma: Activation,
    engine: str | None,
    backprop: str | None,
    kind: str,
    N: int,
    shears: tuple[splitting.Shear, ...] | None,
    inverse: bool,
) -> Compiled | None:
    """The operator, or None if the compiler is to see each layer, as exporters always do."""
    settings = Settings(engine=engine or "auto", backprop=backprop or "auto")
    traced = _exporting() or dispatch.transformed() or not activations.is_registered(sigma)
    plan = dispatch.plan_of_call(settings, y, sigma.name, N, shears, traced)
    if plan.is_reference:
        return None
    return Compiled(sigma.name, kind, N, shears, inverse, f"{plan.engine} {plan.backprop}")


def _exporting() -> bool:
    """Whether the graph is for another program, which has no such operator."""
    is_exporting = getattr(torch.compiler, "is_exporting", None)
    return True if is_exporting is None else is_exporting()  # PyTorch before 2.7 cannot tell
