"""What one would write or install instead of a fused stack: the contestants of engine.py."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

H = 0.1  # the step of every layer

Step = Callable[[], object]
Forward = Callable[[], Tensor]
Row = dict[str, Any]


def say(line: str) -> None:
    print(line, flush=True)


def weights(kind: str, n: int, batch: int, N: int, device: str) -> list[Tensor]:
    """y and the weights of a stack, all with gradients."""
    generator = torch.Generator().manual_seed(0)
    m = n // 2
    shapes = [(N, n, n), (N, n)] if kind == "h1" else [(N, m, m), (N, m, m), (N, m), (N, m)]
    scale = (n if kind == "h1" else m) ** -0.5
    tensors = [torch.randn(batch, n, generator=generator)]
    tensors += [
        (scale if len(shape) == 3 else 0.1) * torch.randn(shape, generator=generator)
        for shape in shapes
    ]
    return [t.to(device).requires_grad_() for t in tensors]


def plain_h2(y: Tensor, K_p: Tensor, K_q: Tensor, b_p: Tensor, b_q: Tensor, h: float) -> Tensor:
    """The loop that all ratios refer to, as well as plain PyTorch can be written.

    The stacks are taken apart once (the gradient of K_p[j] would be a whole stack for each j), and
    each shear is two fused products with one activation between them.
    """
    p, q = y.chunk(2, -1)
    for Kp, Kq, bp, bq in zip(*(t.unbind() for t in (K_p, K_q, b_p, b_q)), strict=True):
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


def training_step(
    function: Callable[..., Tensor], tensors: list[Tensor], h: float = H, **options: Any
) -> Step:
    """Forward and backward pass of a training."""

    def forward() -> Tensor:
        return function(*tensors, h, **options)

    return step_of(forward, tensors)


def step_of(forward: Forward, leaves: list[Tensor]) -> Step:
    """A training step without the optimiser; gradients start from None, as after zero_grad."""

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        forward().sum().backward()

    return step


def checkpointed(tensors: list[Tensor]) -> tuple[Forward, list[Tensor]]:
    """The plain loop in pieces of about the root of its depth, by torch.utils.checkpoint."""
    from torch.utils.checkpoint import checkpoint

    def forward() -> Tensor:
        y, *stacks = tensors
        for pieces in zip(*(w.split(8) for w in stacks), strict=True):
            y = checkpoint(plain_h2, y, *pieces, H, use_reentrant=False)
        return y  # pyright: ignore[reportReturnType]

    return forward, tensors


def torchdiffeq(tensors: list[Tensor]) -> tuple[Forward, list[Tensor]]:
    """Forward Euler on the field of H2 with the continuous adjoint: p and q move together."""
    from torchdiffeq import odeint_adjoint  # pyright: ignore[reportMissingImports]

    class Field(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.ParameterList([torch.nn.Parameter(t.detach()) for t in tensors[1:]])

        def forward(self, t: Tensor, y: Tensor) -> Tensor:
            K_p, K_q, b_p, b_q = self.w
            j = min(int(t), len(K_p) - 1)  # time counts layers
            p, q = y.chunk(2, -1)
            f_p = -torch.tanh(q @ K_q[j].T + b_q[j]) @ K_q[j]
            return H * torch.cat([f_p, torch.tanh(p @ K_p[j].T + b_p[j]) @ K_p[j]], -1)

    y, field = tensors[0], Field()
    grid = torch.arange(len(tensors[1]) + 1, dtype=y.dtype, device=y.device)

    def forward() -> Tensor:
        path: Any = odeint_adjoint(field, y, grid, method="euler")
        return path[-1]

    return forward, [y, *field.parameters()]


class Half(torch.nn.Module):
    """One half step, for reversible wrappers."""

    def __init__(self, K: Tensor, b: Tensor, sign: float) -> None:
        super().__init__()
        self.K = torch.nn.Parameter(K.detach().clone())
        self.b = torch.nn.Parameter(b.detach().clone())
        self.h = sign * H

    def forward(self, x: Tensor) -> Tensor:
        return self.h * torch.tanh(x @ self.K.T + self.b) @ self.K


def memcnn(tensors: list[Tensor]) -> tuple[Forward, list[Tensor]]:
    """Each layer as an additive coupling that frees its input and rebuilds it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # names that PyTorch has since changed
        import memcnn  # pyright: ignore[reportMissingImports]
    warnings.filterwarnings("ignore", "TypedStorage is deprecated")

    y, K_p, K_q, b_p, b_q = tensors
    couplings = [
        memcnn.AdditiveCoupling(Half(K_q[j], b_q[j], -1), Half(K_p[j], b_p[j], 1), split_dim=-1)
        for j in range(len(K_p))
    ]
    net = torch.nn.Sequential(
        *(memcnn.InvertibleModuleWrapper(c, keep_input=False) for c in couplings)
    )
    # A copy, because memcnn empties the storage of its input, and adds to its gradient twice.
    return lambda: net(y.clone()), [y, *net.parameters()]


def revlib(tensors: list[Tensor]) -> tuple[Forward, list[Tensor]]:
    """Each half step as a reversible module; the two streams swap after each."""
    import revlib  # pyright: ignore[reportMissingImports]

    y, K_p, K_q, b_p, b_q = tensors
    halves = [
        half
        for j in range(len(K_p))
        for half in (Half(K_q[j], b_q[j], -1), Half(K_p[j], b_p[j], 1))
    ]
    net = revlib.ReversibleSequential(*halves, split_dim=-1)
    return lambda: net(y), [y, *net.parameters()]


def compiled(tensors: list[Tensor]) -> tuple[Forward, list[Tensor]]:
    """torch.compile of the plain loop, all layers in one graph."""
    torch._dynamo.reset()
    function: Callable[..., Tensor] = torch.compile(plain_h2, fullgraph=True)
    return lambda: function(*tensors, H), tensors


RIVALS: dict[str, Callable[[list[Tensor]], tuple[Forward, list[Tensor]]]] = {
    "torch.compile": compiled,
    "torch.utils.checkpoint": checkpointed,
    "torchdiffeq, adjoint": torchdiffeq,
    "memcnn": memcnn,
    "revlib": revlib,
}


def why_not(error: Exception) -> str:
    """Why a rival does not run here, in a short sentence."""
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:120] if lines else 'no reason given'}"
