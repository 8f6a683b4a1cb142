"""Backward sensitivity matrices (BSM): how the last state depends on the earlier ones.

All derivatives are in denominator layout, as in the paper: entry [a, c] of dy/dx is the derivative
of the c-th entry of y by the a-th of x, the transpose of a Jacobian.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from hdnn.analysis.jacobians import layer_jacobians, quick_trajectory
from hdnn.engine import jit
from hdnn.errors import OptionError, ShapeError, choose
from hdnn.networks import Network

SMALL = 16  # features, up to which products by compiled loops are faster
MEMORY = 2**28  # bytes for the matrices of the layers that are looked at together

_ORDERS: dict[str, Any] = {"2": 2, "1": 1, "inf": float("inf"), "fro": "fro"}


@torch.no_grad()
def layer_sensitivity(net: Network, y: Tensor) -> Tensor:
    """dy_{j+1}/dy_j for every sample and layer along the trajectory of y: (N, *batch, n, n)."""
    states = _states(net, y)
    return layer_jacobians(net, states).reshape(net.layers, *y.shape, net.features)


@torch.no_grad()
def backward_sensitivity(
    net: Network, y: Tensor, *, layers: Iterable[int] | None = None, memory: int = MEMORY
) -> Tensor:
    """The BSM dy_N/dy_j for every sample and j = 0 .. N: (N+1, *batch, n, n)   (eq:BSM).

    One pass back by the layers' closed-form Jacobians: dy_N/dy_j = dy_{j+1}/dy_j dy_N/dy_{j+1},
    starting from dy_N/dy_N = I.

    Args:
        layers: the j that are wanted, by default all: (len(layers), *batch, n, n).
        memory: bytes that may be used besides the result; past that, layers are taken in parts.
    """
    states = _states(net, y)
    wanted = _wanted(layers, net.layers)
    if layers is None and _small(states, memory):
        shape = (net.layers + 1, *y.shape, net.features)
        return _product(layer_jacobians(net, states)).reshape(shape)
    result = y.new_empty(len(wanted), *states.shape[1:], net.features)
    places: dict[int, list[int]] = {}
    for place, j in enumerate(wanted):
        places.setdefault(j, []).append(place)
    for j, _, Phi in back(net, states, min(wanted, default=net.layers), memory):
        for place in places.get(j, ()):
            result[place] = Phi
    return result.reshape(len(wanted), *y.shape, net.features)


def _small(states: Tensor, memory: int) -> bool:
    """Whether a compiled loop multiplies such matrices faster than PyTorch does."""
    N, B, n = states.shape
    few = 4 * N * B * n * n * states.element_size() <= memory
    plain = states.device.type == "cpu" and states.dtype in (torch.float32, torch.float64)
    return n <= SMALL and few and plain and jit.installed()


def _product(M: Tensor) -> Tensor:
    """All products M_j M_{j+1} .. M_{N-1}, and I: (N+1, B, n, n)."""
    N, B, n, _ = M.shape
    result = M.new_empty(N + 1, B, n, n)
    result[N] = torch.eye(n, dtype=M.dtype)
    _chain_kernel()(M.contiguous().numpy(), result.numpy())
    return result


@cache
def _chain_kernel() -> Any:
    return jit.compiled(_chain)


def _chain(M, result):  # pragma: kernel
    N, B, n, _ = M.shape
    for j in range(N - 1, -1, -1):
        for i in range(B):
            for a in range(n):
                for c in range(n):
                    s = M[j, i, a, 0] * result[j + 1, i, 0, c]
                    for k in range(1, n):
                        s += M[j, i, a, k] * result[j + 1, i, k, c]
                    result[j, i, a, c] = s


def back(
    net: Network, states: Tensor, low: int = 0, memory: int = MEMORY
) -> Iterator[tuple[int, Tensor | None, Tensor]]:
    """(j, dy_{j+1}/dy_j, dy_N/dy_j) for j = N .. low, a (B, n, n) each: for whom all is too much.

    `states` are y_0 .. y_N of B samples: (N+1, B, n). At j = N there is no layer more.
    """
    B, n = states.shape[1:]
    Phi = torch.eye(n, dtype=states.dtype, device=states.device).expand(B, n, n)
    yield net.layers, None, Phi
    each = 4 * max(1, B * n * n) * states.element_size()  # with what is made on the way
    size = max(1, memory // each)
    for high in range(net.layers, low, -size):
        first = max(low, high - size)
        with torch.no_grad():
            part = layer_jacobians(net, states[first : high + 1], slice(first, high))
        for j in range(high - 1, first - 1, -1):
            Phi = part[j - first] @ Phi
            yield j, part[j - first], Phi


def _states(net: Network, y: Tensor) -> Tensor:
    """y_0 .. y_N as (N+1, B, n)."""
    if not isinstance(net, Network):
        raise OptionError(
            f"sensitivities are those of a network, but got {type(net).__name__}; "
            "of a Model, give model.net and model.embed(x)."
        )
    like = next(net.parameters())
    rows = isinstance(y, Tensor) and y.ndim == 2 and y.shape[1] == net.features
    if rows and (y.dtype, y.device) == (like.dtype, like.device):
        return quick_trajectory(net, y)
    return net.trajectory(y).reshape(net.layers + 1, -1, net.features)


def _wanted(layers: Iterable[int] | None, N: int) -> list[int]:
    if layers is None:
        return list(range(N + 1))
    wanted = list(layers)
    for j in wanted:
        if not isinstance(j, Integral) or not 0 <= j <= N:
            raise ShapeError(f"layers must be whole numbers in 0 .. {N}, but got {j!r}.")
    return [int(j) for j in wanted]


def norms(Phi: Tensor, ord: int | float | str = 2) -> Tensor:
    """The 2-, 1-, inf- or Frobenius norm of each matrix of (..., n, n): (...).

    Infinite for a matrix with entries that are no longer numbers.
    """
    order = _ORDERS[choose("ord", f"{ord:g}" if isinstance(ord, float) else str(ord), _ORDERS)]
    work = torch.promote_types(Phi.dtype, torch.float32)  # no decompositions in half precision
    fine = torch.isfinite(Phi).flatten(-2).all(-1)
    found = torch.linalg.matrix_norm(Phi.to(work).where(fine[..., None, None], 0.0), order)
    return found.where(fine, torch.inf).to(Phi.dtype)


def singular_values(Phi: Tensor) -> Tensor:
    """Of each matrix of (..., n, n), largest first: (..., n)."""
    work = torch.promote_types(Phi.dtype, torch.float32)
    return torch.linalg.svdvals(Phi.to(work)).to(Phi.dtype)
