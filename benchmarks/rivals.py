"""The same networks in plain PyTorch, as fast as it can be written: what hdnn is compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from report import say
from torch import Tensor

__all__ = [
    "PLAIN",
    "H",
    "Row",
    "Step",
    "plain_h1",
    "plain_h2",
    "say",
    "step_of",
    "weights",
]

H = 0.1  # the step of every layer

Step = Callable[[], object]
Row = dict[str, Any]


def weights(kind: str, n: int, batch: int, N: int, device: str) -> list[Tensor]:
    """y and the weights of a stack, all with gradients."""
    generator = torch.Generator().manual_seed(0)
    features = n if kind == "h1" else n // 2
    count = 1 if kind == "h1" else 2
    shapes = count * [(N, features, features)] + count * [(N, features)]
    tensors = [torch.randn(batch, n, generator=generator)]
    for shape in shapes:
        scale = features**-0.5 if len(shape) == 3 else 0.1
        tensors.append(scale * torch.randn(shape, generator=generator))
    return [tensor.to(device).requires_grad_() for tensor in tensors]


def plain_h2(
    y: Tensor, K_p: Tensor, K_q: Tensor, b_p: Tensor, b_q: Tensor, h: float
) -> Tensor:
    """The loop that ratios refer to.

    The stacks are taken apart once (the gradient of K_p[j] would be a whole stack for each j), and
    each shear is two fused products with one activation between them.
    """
    p, q = y.chunk(2, -1)
    layers = zip(
        K_p.unbind(), K_q.unbind(), b_p.unbind(), b_q.unbind(), strict=True
    )
    for Kp, Kq, bp, bq in layers:
        p = torch.addmm(p, torch.addmm(bq, q, Kq.T).tanh(), Kq, alpha=-h)
        q = torch.addmm(q, torch.addmm(bp, p, Kp.T).tanh(), Kp, alpha=h)
    return torch.cat([p, q], -1)


def plain_h1(y: Tensor, K: Tensor, b: Tensor, h: float) -> Tensor:
    """The same for forward Euler, with K J^T made once for all layers."""
    K_p, K_q = K.chunk(2, -1)
    moves = torch.cat([-K_q, K_p], -1)
    for Kj, bj, Vj in zip(K.unbind(), b.unbind(), moves.unbind(), strict=True):
        y = torch.addmm(y, torch.addmm(bj, y, Kj.T).tanh(), Vj, alpha=h)
    return y


PLAIN: dict[str, Callable[..., Tensor]] = {"h1": plain_h1, "h2": plain_h2}


def step_of(forward: Callable[[], Tensor], leaves: list[Tensor]) -> Step:
    """A training step without the optimiser; gradients start from None, as after zero_grad."""

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        forward().sum().backward()

    return step
