"""Backward sensitivity matrices (BSM): how the last state depends on the earlier ones.

All derivatives are in denominator layout, as in the paper: entry [a, c] of dy/dx is the derivative
of the c-th entry of y by the a-th of x, the transpose of a Jacobian.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.func import jacrev, vmap

from hdnn.errors import OptionError, choose
from hdnn.networks import Network

_ORDERS: dict[str, Any] = {"2": 2, "1": 1, "inf": float("inf"), "fro": "fro"}


@torch.no_grad()
def layer_sensitivity(net: Network, y: Tensor) -> Tensor:
    """dy_{j+1}/dy_j for every sample and layer along the trajectory of y: (N, *batch, n, n)."""
    if not isinstance(net, Network):
        raise OptionError(
            f"sensitivities are those of a network, but got {type(net).__name__}; "
            "of a Model, give model.net and model.embed(x)."
        )
    states = net.trajectory(y)[:-1].reshape(net.layers, -1, net.features)
    each, shared = net.weights_by_layer()
    if isinstance(each.get("h"), tuple):
        each["h"] = torch.tensor(each["h"], dtype=y.dtype, device=y.device)

    def layer(y: Tensor, one: dict[str, Tensor]) -> Tensor:
        stacked = {name: weight.unsqueeze(0) for name, weight in one.items()}
        return net.function(y, **stacked, **shared, activation=net.activation)

    jacobians = vmap(vmap(jacrev(layer), in_dims=(0, None)))(states, each)
    return jacobians.mT.reshape(net.layers, *y.shape, net.features)


@torch.no_grad()
def backward_sensitivity(net: Network, y: Tensor) -> Tensor:
    """The BSM dy_N/dy_j for every sample and j = 0 .. N: (N+1, *batch, n, n)   (eq:BSM).

    One pass back: dy_N/dy_j = dy_{j+1}/dy_j dy_N/dy_{j+1}, starting from dy_N/dy_N = I.
    """
    layers = layer_sensitivity(net, y)
    Phi = torch.eye(net.features, dtype=y.dtype, device=y.device).expand(layers.shape[1:])
    result = [Phi]
    for layer in layers.flip(0):
        Phi = layer @ Phi
        result.append(Phi)
    return torch.stack(result[::-1])


def norms(Phi: Tensor, ord: int | float | str = 2) -> Tensor:
    """The 2-, 1-, inf- or Frobenius norm of each matrix of (..., n, n): (...)."""
    order = _ORDERS[choose("ord", f"{ord:g}" if isinstance(ord, float) else str(ord), _ORDERS)]
    work = torch.promote_types(Phi.dtype, torch.float32)  # no decompositions in half precision
    return torch.linalg.matrix_norm(Phi.to(work), order).to(Phi.dtype)
