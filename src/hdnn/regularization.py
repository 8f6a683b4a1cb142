"""Regularisers R(theta): smoothness over layers, weight decay, spectral norms, gradient budget."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from hdnn import activations
from hdnn.errors import OptionError
from hdnn.networks import Network, ODENetwork
from hdnn.networks.weights import smoothness as smoothness
from hdnn.operators import dense

__all__ = [
    "gradient_budget",
    "shear_norms",
    "smoothness",
    "spectral",
    "weight_decay",
]


def weight_decay(weights: Iterable[Tensor] | torch.nn.Module) -> Tensor:
    """R_l = 1/2 the sum of squares of all weights: of tensors, or of a module's parameters.

    Learned steps are left out: they are stored as log h, and decay to zero would pull h to one.
    """
    if isinstance(weights, torch.nn.Module):
        tensors = [p for name, p in weights.named_parameters() if not name.endswith("log_h")]
    else:
        tensors = weights
    squares = [weight.square().sum() for weight in tensors]
    if not squares:
        raise OptionError("weight_decay got no weights.")
    return 0.5 * torch.stack(squares).sum()


def spectral(net: ODENetwork) -> Tensor:
    """sum_j |K_j|_2 + |J_j|_2, the form of R_l that the paper derives from lem:upper_bound."""
    _check_network(net)
    field = net.field()
    J = dense.norm(field["J"]).expand(net.layers)
    return (dense.norm(field["K"]) + J).sum()


def gradient_budget(net: Network) -> Tensor:
    """B with exp(-B) <= |delta_j| / |delta_N| <= exp(B) for every gradient, sample and layer.

    Each p- or q-update is a shear I + A; its singular values lie between exp(-a) and exp(a) with
    a = asinh(|A|/2), and |A| <= h S |X| |K|^2. B is the sum over all of them, so it bounds how much
    any gradient grows or shrinks on its way through the whole stack (any activation).
    """
    _check_network(net)
    S = activations.get(net.activation).S
    return torch.asinh(0.5 * S * net.shear_norms()).sum()


def shear_norms(net: Network) -> Tensor:
    """The bounds |A| / S of all shears of all layers."""
    return net.shear_norms()


def _check_network(net: object) -> None:
    if not isinstance(net, Network):
        raise OptionError(
            f"a network is needed, but got {type(net).__name__}; of a Model, its net."
        )
