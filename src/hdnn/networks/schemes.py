"""The integrators that a Hamiltonian network can step by, and what each needs of K and J."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch import Tensor

from hdnn import functional
from hdnn.integrators import splitting


@dataclass(frozen=True)
class Scheme:
    """How a layer steps, and what it needs of K and J."""

    function: Callable[..., Tensor]
    layout: Literal["split", "full"]  # K = diag(K_p, K_q), or any K
    interconnection: Literal["X", "J"]  # J = [[0, -X^T], [X, 0]], or any skew J
    order: int
    symplectic: bool = True
    invertible: bool = True
    implicit: bool = False
    shears: tuple[splitting.Shear, ...] = ()


def _splitting(shears: tuple[splitting.Shear, ...], order: int) -> Scheme:
    return Scheme(partial(functional.split, shears=shears), "split", "X", order, shears=shears)


SCHEMES: dict[str, Scheme] = {
    "forward_euler": Scheme(functional.h1, "full", "J", 1, symplectic=False, invertible=False),
    "semi_implicit_euler": _splitting(splitting.SEMI_IMPLICIT_EULER, 1),
    "semi_implicit_euler_full": Scheme(functional.implicit_h2, "full", "X", 1, implicit=True),
    "verlet": _splitting(splitting.VERLET, 2),
    "yoshida4": _splitting(splitting.YOSHIDA4, 4),
    "midpoint": Scheme(functional.midpoint, "full", "J", 2, implicit=True),
    "discrete_gradient": Scheme(
        functional.discrete_gradient, "full", "J", 2, symplectic=False, implicit=True
    ),
}
