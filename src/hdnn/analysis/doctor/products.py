"""Extreme singular values of the derivative of one state by another, from the graph alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hdnn.analysis.lanczos import Product, bidiagonalise

STEPS = 8
SAME = 1e-2


@dataclass(frozen=True)
class Gain:
    """The largest and the smallest singular value of a matrix that is known by its products.

    `largest` is a lower bound that a few steps bring close, `smallest` an upper bound that can be
    far too large unless `exact`. `why` says why they are NaN, if they are.
    """

    largest: float = math.nan
    smallest: float = math.nan
    exact: bool = False
    why: str = ""


def singular_gain(later: Tensor, earlier: Tensor, steps: int = STEPS, seed: int = 0) -> Gain:
    """Of d later / d earlier, all samples together. The graph between them is kept."""
    if later is earlier:
        return Gain(1.0, 1.0, exact=True)
    try:
        return _by_products(later, earlier, steps, seed)
    except (RuntimeError, NotImplementedError) as error:
        # Operations that have no second derivative, such as fused kernels and custom functions.
        return Gain(why=str(error).strip().partition("\n")[0])


def _agree(forwards: Product, backwards: Product, m: int, like: Tensor) -> bool:
    """Whether u . (M v) = (M^T u) . v: some operations give zeros where they cannot do better."""
    draw = torch.randn(m, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    u = (draw / draw.norm()).to(like.device, like.dtype)
    v = backwards(u)
    size = float(v.double().norm())
    if size == 0 or not math.isfinite(size):
        return True
    return abs(float((u.double() * forwards(v / size).double()).sum()) / size - 1) < SAME


def _by_products(later: Tensor, earlier: Tensor, steps: int, seed: int) -> Gain:
    probe = torch.zeros_like(later, requires_grad=True)
    (pulled,) = torch.autograd.grad(later, earlier, probe, create_graph=True, allow_unused=True)
    if pulled is None:
        return Gain(0.0, 0.0, exact=True)

    def backwards(u: Tensor) -> Tensor:
        u = u.reshape(later.shape)
        return torch.autograd.grad(later, earlier, u, retain_graph=True)[0].reshape(-1)

    def forwards(v: Tensor) -> Tensor:
        # u -> M^T u is linear: its own derivative, backwards, is v -> M v, wherever it is taken.
        v = v.reshape(earlier.shape)
        (pushed,) = torch.autograd.grad(pulled, probe, v, retain_graph=True, allow_unused=True)
        return torch.zeros_like(probe).reshape(-1) if pushed is None else pushed.reshape(-1)

    n, m = earlier.numel(), later.numel()
    if not _agree(forwards, backwards, m, later):
        return Gain(why="an operation in it cannot be differentiated twice")
    maps = (forwards, backwards) if n <= m else (backwards, forwards)
    like = earlier.detach()
    low, high, k = bidiagonalise(*maps, min(n, m), steps, like, seed, rows=max(n, m))
    if not math.isfinite(high.value):
        return Gain(why="a product with it is not finite")
    return Gain(high.value, low.value, exact=k == min(n, m))
