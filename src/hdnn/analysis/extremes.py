"""Extreme singular values of dy_N/dy_j where the matrix itself is too large to be made."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import jvp, vjp

from hdnn.errors import ShapeError, positive_int


def extreme_singular_values(
    function: Callable[[Tensor], Tensor],
    y: Tensor,
    *,
    steps: int = 30,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """(smallest, largest) singular value of the derivative of `function` at each sample: (B,) each.

    Golub-Kahan-Lanczos bidiagonalisation by products with vectors, forwards and backwards, all
    samples side by side; its vectors are kept orthogonal. With `steps` at least the number of
    features both values are exact; with fewer, the largest one soon is, from below, and the
    smallest one is an upper bound, which comes closer more slowly.

    Args:
        function: states (B, ...) to states (B, ...) of equally many features, sample by sample: a
            network, or the layers from j on.
    """
    positive_int("steps", steps)
    if y.ndim < 2:
        raise ShapeError(f"y must be (B, ...), a state for each sample, but got {tuple(y.shape)}.")
    B, n = len(y), y[0].numel()
    y_N, pull = vjp(function, y)[:2]
    if y_N.reshape(B, -1).shape[1] != n:
        raise ShapeError(
            f"the derivative must be square, but {n} features became "
            f"{y_N.reshape(B, -1).shape[1]}; leave pooling and padding out."
        )

    def forwards(v: Tensor) -> Tensor:
        return jvp(function, (y,), (v.reshape(y.shape),))[1].reshape(B, n)

    def backwards(u: Tensor) -> Tensor:
        return pull(u.reshape(y_N.shape))[0].reshape(B, n)

    with torch.no_grad():
        return _bidiagonal(forwards, backwards, y.new_empty(B, n), min(steps, n), seed)


def _bidiagonal(
    forwards: Callable[[Tensor], Tensor],
    backwards: Callable[[Tensor], Tensor],
    like: Tensor,
    steps: int,
    seed: int,
) -> tuple[Tensor, Tensor]:
    """Singular values of the bidiagonal matrix that Lanczos makes of A: A V = U B."""
    B, n = like.shape
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(n, generator=generator).to(like)
    v = (start / start.norm()).expand(B, n)
    V, U = [v], []
    matrix = like.new_zeros(B, steps, steps)
    u = forwards(v)
    for k in range(steps):
        u = _orthogonal(u, U)
        alpha = u.norm(dim=1)
        matrix[:, k, k] = alpha
        U.append(_scaled(u, alpha))
        if k + 1 == steps:
            break
        v = _orthogonal(backwards(U[-1]), V)
        beta = v.norm(dim=1)
        matrix[:, k, k + 1] = beta
        V.append(_scaled(v, beta))
        u = forwards(V[-1])
    values = torch.linalg.svdvals(matrix)
    return values[:, -1], values[:, 0]


def _orthogonal(x: Tensor, basis: list[Tensor]) -> Tensor:
    """x without its parts along the basis; twice, since rounding leaves some the first time."""
    if not basis:
        return x
    Q = torch.stack(basis, 1)  # (B, k, n)
    for _ in range(2):
        x = x - (Q.mT @ (Q @ x[..., None]))[..., 0]
    return x


def _scaled(x: Tensor, size: Tensor) -> Tensor:
    """x / size; zero where nothing is left of it."""
    tiny = torch.finfo(x.dtype).tiny
    return torch.where(size > tiny, x.T / size.clamp_min(tiny), torch.zeros_like(x.T)).T
