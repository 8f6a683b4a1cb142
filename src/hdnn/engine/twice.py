"""Gradients of a kernel that have gradients themselves: those of its definition."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def differentiable(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], g: Tensor
) -> list[Tensor | None]:
    """The gradients of the inputs by plain PyTorch, of which gradients can be taken again.

    They are those of views of the inputs: one input may have been computed from another, and the
    way from there is not to be followed here, because whoever called does that.
    """
    views = [t.view_as(t) for t in inputs]
    asked = [t for t in views if t.requires_grad]
    value = function(*views)
    found = iter(torch.autograd.grad(value, asked, g, create_graph=True, allow_unused=True))
    return [next(found) if t.requires_grad else None for t in inputs]
