"""Backward sensitivity matrices (BSM): how the last state depends on the earlier ones.

All derivatives are in denominator layout, as in the paper: entry [a, c] of dy/dx is the derivative
of the c-th entry of y by the a-th of x, the transpose of a Jacobian.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from hdnn.engine import jit
from hdnn.errors import OptionError, ShapeError, choose
from hdnn.networks import Network
from hdnn.networks.promise import own_methods

SMALL = 16  # features: up to this many, compiled loops multiply faster
MEMORY = 2**28  # bytes for the matrices of layers that are processed together

_ORDERS: dict[str, Any] = {"2": 2, "1": 1, "inf": float("inf"), "fro": "fro"}


@torch.no_grad()
def layer_sensitivity(net: Network, y: Tensor) -> Tensor:
    """`dy_{j+1}/dy_j` of every layer, along the trajectory of each sample.

    In denominator layout, as in the paper: entry [a, c] is the derivative of the c-th entry of
    `y_{j+1}` by the a-th of `y_j`, the transpose of a Jacobian.

    Args:
        net: a network; of a `Model`, its net.
        y: states `(*batch, n)`; those of a `Model` are `model.embed(x)`.

    Returns:
        Matrices `(N, *batch, n, n)`; NaN where one of the two states is not finite.

    Raises:
        OptionError: if it is no network.
        ShapeError: if y does not fit the network.

    Examples:
        >>> import hdnn, torch
        >>> net = hdnn.H2(features=4, layers=8)
        >>> M = hdnn.analysis.layer_sensitivity(net, torch.randn(3, 4))
        >>> M.shape, torch.allclose(torch.det(M), torch.ones(8, 3), atol=1e-5)
        (torch.Size([8, 3, 4, 4]), True)
    """
    states = trajectory(net, y)
    M, fine = net.layer_jacobians(states), states.isfinite().all(-1)
    M = M.where((fine[:-1] & fine[1:])[..., None, None], torch.nan)
    return M.reshape(net.layers, *y.shape, net.features)


@torch.no_grad()
def backward_sensitivity(
    net: Network, y: Tensor, *, layers: Iterable[int] | None = None, memory: int = MEMORY
) -> Tensor:
    """The backward sensitivity matrices (BSM) dy_N/dy_j for every sample and layer (eq:BSM).

    One pass back by the layers' closed-form Jacobians, `dy_N/dy_j = dy_{j+1}/dy_j dy_N/dy_{j+1}`,
    starting from `dy_N/dy_N = I`. In denominator layout: a gradient at layer j is
    `dL/dy_j = dy_N/dy_j dL/dy_N`.

    Args:
        net: a network; of a `Model`, its net.
        y: states `(*batch, n)`; those of a `Model` are `model.embed(x)`.
        layers: the j that are wanted, by default 0 .. N.
        memory: bytes that may be used besides the result; past that, layers are taken in parts.

    Returns:
        Matrices `(N+1, *batch, n, n)`, or `(len(layers), *batch, n, n)`; NaN for a sample whose
        states do not stay finite.

    Raises:
        OptionError: if it is no network.
        ShapeError: if y does not fit the network, or if it has no such layer.

    Examples:
        >>> import hdnn, torch
        >>> net = hdnn.H2(features=4, layers=64)
        >>> Phi = hdnn.analysis.backward_sensitivity(net, torch.randn(10, 4))
        >>> Phi.shape
        torch.Size([65, 10, 4, 4])
        >>> bool((hdnn.analysis.norms(Phi[:-1]) >= 1).all())
        True
    """
    states = trajectory(net, y)
    wanted = chosen_layers(layers, net.layers)
    lost = ~states.isfinite().all(-1).all(0)
    if layers is None and _small(states, memory):
        shape = (net.layers + 1, *y.shape, net.features)
        result = _product(net.layer_jacobians(states))
        result[:-1, lost] = torch.nan
        return result.reshape(shape)
    result = y.new_empty(len(wanted), *states.shape[1:], net.features)
    places: dict[int, list[int]] = {}
    for place, j in enumerate(wanted):
        places.setdefault(j, []).append(place)
    Phi = torch.eye(net.features, dtype=states.dtype, device=states.device)
    result[places.get(net.layers, [])] = Phi
    for j, M in factors(net, states, low=min(wanted, default=net.layers), memory=memory):
        Phi = M @ Phi
        for place in places.get(j, ()):
            result[place] = Phi
            result[place, lost] = torch.nan
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


def factors(
    net: Network, states: Tensor, *, low: int = 0, memory: int = MEMORY, undone: bool = False
) -> Iterator[tuple[int, Tensor]]:
    """(j, dy_{j+1}/dy_j) for j = N-1 .. low, (B, n, n) each: all at once may not fit into memory.

    `states` are y_0 .. y_N of B samples: (N+1, B, n). With `undone`, the inverse of each; there are
    none of layers that are not made of shears.
    """
    B, n = states.shape[1:]
    each = 4 * max(1, B * n * n) * states.element_size()  # 4: with temporary matrices
    size = max(1, memory // each)
    found = net.inverse_jacobians if undone else net.layer_jacobians
    for high in range(net.layers, low, -size):
        first = max(low, high - size)
        part = found(states[first : high + 1], slice(first, high))
        if part is None:
            return
        for j in range(high - 1, first - 1, -1):
            yield j, part[j - first]


def trajectory(net: Network, y: Tensor) -> Tensor:
    """y_0 .. y_N as (N+1, B, n); layer by layer if a subclass or a hook changes the network."""
    if not isinstance(net, Network):
        raise OptionError(
            f"sensitivities are those of a network, but got {type(net).__name__}; "
            "of a Model, give model.net and model.embed(x)."
        )
    if own_methods(net) or net._forward_hooks or net._forward_pre_hooks:
        return _one_by_one(net, y)
    return net.trajectory(y).reshape(net.layers + 1, -1, net.features)


@torch.no_grad()
def _one_by_one(net: Network, y: Tensor) -> Tensor:
    """By `layer` alone, if the network does the same: dy_N/dy_j is a product over layers."""
    states = [y.reshape(-1, y.shape[-1])]
    for j in range(net.layers):
        states.append(net.layer(states[-1], j))
    end, whole = states[-1], net(y).reshape(states[-1].shape)
    same = (end - whole).abs() <= 1e-3 * whole.abs().amax(-1, keepdim=True)
    if not bool((same | ~whole.isfinite()).all()):
        raise OptionError(
            f"{type(net).__name__} is not its layers one after the other: net(y) differs from "
            "net.layer(.., j) for j = 0 .. N-1; give it a `layer` that is what it computes."
        )
    return torch.stack(states)


def chosen_layers(layers: Iterable[int] | None, last: int) -> list[int]:
    """The layers that are wanted, by default 0 .. last."""
    wanted = list(range(last + 1) if layers is None else layers)
    for j in wanted:
        if not isinstance(j, Integral) or not 0 <= j <= last:
            raise ShapeError(f"layers must be whole numbers in 0 .. {last}, but got {j!r}.")
    return [int(j) for j in wanted]


def norms(Phi: Tensor, ord: int | float | str = 2) -> Tensor:
    """The 2-, 1-, inf- or Frobenius norm of each matrix.

    Args:
        Phi: matrices `(..., n, n)`.
        ord: 2, 1, "inf" or "fro".

    Returns:
        Norms `(...)`: infinite if an entry is too large for its dtype, NaN if an entry is NaN.

    Raises:
        OptionError: if the norm is not one of these.
        ShapeError: if there are no matrices.

    Examples:
        >>> import hdnn, torch
        >>> hdnn.analysis.norms(torch.diag(torch.tensor([3.0, 4.0])), "fro")
        tensor(5.)
    """
    order = _ORDERS[choose("ord", f"{ord:g}" if isinstance(ord, float) else str(ord), _ORDERS)]
    found, fine = _of_finite(Phi, lambda A: torch.linalg.matrix_norm(A, order))
    unknown = Phi.isnan().flatten(-2).any(-1)
    return found.where(fine, torch.inf).where(~unknown, torch.nan)


def singular_values(Phi: Tensor) -> Tensor:
    """The singular values of each matrix, the largest first.

    Args:
        Phi: matrices `(..., n, n)`.

    Returns:
        Values `(..., n)`; NaN for a matrix that is not finite.

    Raises:
        ShapeError: if there are no matrices.

    Examples:
        >>> import hdnn, torch
        >>> hdnn.analysis.singular_values(torch.diag(torch.tensor([3.0, 4.0])))
        tensor([4., 3.])
    """
    found, fine = _of_finite(Phi, torch.linalg.svdvals)
    return found.where(fine[..., None], torch.nan)


def _of_finite(Phi: Tensor, function: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """A function of the finite matrices, with 0 for the others, and which are finite."""
    if Phi.ndim < 2:
        raise ShapeError(f"Phi must be matrices (..., n, n), but got {tuple(Phi.shape)}.")
    work = torch.promote_types(Phi.dtype, torch.float32)  # no decompositions in half precision
    fine = Phi.isfinite().flatten(-2).all(-1)
    return function(Phi.to(work).where(fine[..., None, None], 0.0)).to(Phi.dtype), fine
