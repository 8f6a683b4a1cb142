"""The matrices dy_N/dy_j, which carry a gradient from the output back to layer j, and their norms.

All derivatives are in denominator layout, as in the paper: entry [a, c] of dy/dx is the derivative
of the c-th entry of y with respect to the a-th entry of x, the transpose of a Jacobian.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hdnn.errors import OptionError, ShapeError, choose
from hdnn.networks import Network

MEMORY = 2**28  # bytes for the matrices of layers that are computed together
ORDERS: dict[str, Any] = {
    "2": 2,
    "1": 1,
    "inf": float("inf"),
    "fro": "fro",
}


@torch.no_grad()
def layer_sensitivity(net: Network, y: Tensor) -> Tensor:
    """The matrix dy_{j+1}/dy_j of every layer, along the trajectory of each sample.

    Args:
        net: a network; for a `Model`, pass `model.net`.
        y: states `(*batch, n)`.

    Returns:
        Matrices `(N, *batch, n, n)`; NaN if either of the two states is not finite.

    Examples:
        >>> import hdnn, torch
        >>> net = hdnn.H2(features=4, layers=8)
        >>> M = hdnn.analysis.layer_sensitivity(net, torch.randn(3, 4))
        >>> M.shape, torch.allclose(torch.det(M), torch.ones(8, 3), atol=1e-5)
        (torch.Size([8, 3, 4, 4]), True)
    """
    states = trajectory(net, y)
    matrices = net.layer_jacobians(states)
    finite = states.isfinite().all(-1)
    before = finite[:-1]
    after = finite[1:]
    matrices = matrices.where((before & after)[..., None, None], torch.nan)
    return matrices.reshape(net.layers, *y.shape, net.features)


@torch.no_grad()
def backward_sensitivity(net: Network, y: Tensor) -> Tensor:
    """The backward sensitivity matrices dy_N/dy_j for every sample and layer (eq:BSM).

    They are computed in one backward pass with the layers' closed-form Jacobians,
    `dy_N/dy_j = dy_{j+1}/dy_j dy_N/dy_{j+1}`. In denominator layout: a gradient at layer j is
    `dL/dy_j = dy_N/dy_j dL/dy_N`.

    Args:
        net: a network; for a `Model`, pass `model.net`.
        y: states `(*batch, n)`; for a `Model`, pass `model.embed(x)`.

    Returns:
        Matrices `(N+1, *batch, n, n)`; NaN for a sample with a state that is not finite.

    Raises:
        OptionError: if net is not a network.
        ShapeError: if y does not fit the network.

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
    finite = states.isfinite().all(-1).all(0)
    samples, n = states.shape[1:]
    identity = torch.eye(n, dtype=states.dtype, device=states.device)
    Phi = identity.repeat(samples, 1, 1)
    by_layer = [Phi]
    for _, M in backward_factors(net, states):
        Phi = M @ Phi
        by_layer.append(Phi)
    by_layer.reverse()
    result = torch.stack(by_layer)
    result[:-1, ~finite] = torch.nan
    return result.reshape(-1, *y.shape, n)


def trajectory(net: Network, y: Tensor) -> Tensor:
    """The states y_0 .. y_N as (N+1, B, n)."""
    if not isinstance(net, Network):
        raise OptionError(
            f"a network of hdnn is needed, but got {type(net).__name__}; for a Model, pass "
            "model.net and model.embed(x)."
        )
    return net.trajectory(y).reshape(net.layers + 1, -1, net.features)


def backward_factors(
    net: Network, states: Tensor
) -> Iterator[tuple[int, Tensor]]:
    """(j, dy_{j+1}/dy_j) for j = N-1 .. 0, (B, n, n) each, a few layers at a time."""
    B, n = states.shape[1:]
    bytes_a_layer = 4 * max(1, B * n * n) * states.element_size()
    size = max(1, MEMORY // bytes_a_layer)
    layers = list(range(net.layers))
    while layers:
        group = layers[-size:]
        del layers[-size:]
        low = group[0]
        high = group[-1] + 1
        matrices = net.layer_jacobians(states[low : high + 1], slice(low, high))
        for j in reversed(group):
            yield j, matrices[j - low]


def steps_of(net: Any) -> Tensor:
    """The steps h of all layers: (N,)."""
    if not hasattr(net, "steps") or not hasattr(net, "h"):
        raise OptionError(
            f"a network that discretises an ODE is needed, but got {type(net).__name__}; for a "
            "Model, pass model.net."
        )
    return net.steps()


# Sizes of matrices


def norms(Phi: Tensor, ord: int | float | str = 2) -> Tensor:
    """The 2-, 1-, inf- or Frobenius norm of each matrix.

    Args:
        Phi: matrices `(..., n, n)`.
        ord: 2, 1, "inf" or "fro".

    Returns:
        Norms `(...)`: infinite if an entry is infinite, NaN if an entry is NaN.

    Examples:
        >>> import hdnn, torch
        >>> hdnn.analysis.norms(torch.diag(torch.tensor([3.0, 4.0])), "fro")
        tensor(5.)
    """
    order = ORDERS[choose("ord", str(ord).removesuffix(".0"), ORDERS)]
    size = partial(torch.linalg.matrix_norm, ord=order)
    sizes, finite = _of_finite(Phi, size)
    unknown = Phi.isnan().flatten(-2).any(-1)
    sizes = sizes.where(finite, torch.inf)
    return sizes.where(~unknown, torch.nan)


def singular_values(Phi: Tensor) -> Tensor:
    """The singular values of each matrix, the largest first.

    Args:
        Phi: matrices `(..., n, n)`.

    Returns:
        Values `(..., n)`; NaN for a matrix that is not finite.

    Examples:
        >>> import hdnn, torch
        >>> hdnn.analysis.singular_values(torch.diag(torch.tensor([3.0, 4.0])))
        tensor([4., 3.])
    """
    values, finite = _of_finite(Phi, torch.linalg.svdvals)
    return values.where(finite.unsqueeze(-1), torch.nan)


def _of_finite(
    Phi: Tensor, function: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Apply a function to the finite matrices (0 for others), and return a mask of these."""
    if Phi.ndim < 2:
        raise ShapeError(
            f"Phi must be matrices (..., n, n), but got {tuple(Phi.shape)}."
        )
    # There are no decompositions in half precision.
    dtype = torch.promote_types(Phi.dtype, torch.float32)
    finite = Phi.isfinite().flatten(-2).all(-1)
    mask = finite[..., None, None]
    matrices = Phi.to(dtype)
    matrices = matrices.where(mask, 0.0)
    return function(matrices).to(Phi.dtype), finite


# Symplecticity: lem:numerical_flow


def symplectic_defect(Phi: Tensor, J: Tensor) -> Tensor:
    """The deviation of matrices from symplectic ones: `|Phi^T J Phi - J| / (|Phi|^2 |J|)`.

    The deviation is relative to the sizes of the factors, so it can be compared with the rounding
    error.

    Args:
        Phi: matrices `(..., n, n)` in denominator layout, such as dy_N/dy_j.
        J: a single skew-symmetric matrix (n, n).

    Returns:
        A number for each matrix `(...)`; NaN if the matrix is not finite.

    Examples:
        >>> import hdnn, torch
        >>> net = hdnn.H2(features=4, layers=8)
        >>> Phi = hdnn.analysis.backward_sensitivity(net, torch.randn(10, 4))
        >>> bool((hdnn.analysis.symplectic_defect(Phi, net.field()["J"]) < 1e-5).all())
        True
    """
    needed = tuple(Phi.shape[-2:])
    if tuple(J.shape) != needed:
        raise ShapeError(
            f"J has shape {tuple(J.shape)}, but must be one matrix {needed}."
        )
    tiny = torch.finfo(Phi.dtype).tiny
    size = norms(Phi).clamp_min(tiny)[..., None, None]
    unit_J = J / norms(J).clamp_min(tiny)
    # Divided first, so that no square is too large.
    P = Phi / size
    product = P.mT @ unit_J @ P
    expected = unit_J / size / size
    return norms(product - expected)


def is_symplectic(
    Phi: Tensor, J: Tensor, *, tolerance: float | None = None
) -> bool:
    """True if every matrix is symplectic with respect to J, up to the rounding of its dtype.

    Args:
        Phi: matrices `(..., n, n)` in denominator layout, such as dy_N/dy_j.
        J: a single skew-symmetric matrix (n, n).
        tolerance: the largest `symplectic_defect`, by default 64 n times the rounding of the dtype.

    Examples:
        >>> import hdnn, torch
        >>> J = hdnn.H2(features=4, layers=8).field()["J"]
        >>> for net in hdnn.H2(features=4, layers=8), hdnn.H1(features=4, layers=8):
        ...     Phi = hdnn.analysis.backward_sensitivity(net, torch.randn(10, 4))
        ...     print(hdnn.analysis.is_symplectic(Phi, J))
        True
        False
    """
    if tolerance is None:
        n = Phi.shape[-1]
        tolerance = 64 * n * torch.finfo(Phi.dtype).eps
    return bool((symplectic_defect(Phi, J) <= tolerance).all())
