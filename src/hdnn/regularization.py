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
    "smoothness",
    "spectral",
    "weight_decay",
]


def weight_decay(weights: Iterable[Tensor] | torch.nn.Module) -> Tensor:
    """Half the sum of squares of all weights: the paper's `R_l`.

    Learned steps are left out: they are stored as log h, and decay to zero would pull h to one.

    Args:
        weights: tensors, or a module, whose parameters are meant.

    Returns:
        `R_l`, a tensor of one number, with its gradient.

    Raises:
        OptionError: if there are no weights.

    Examples:
        >>> import torch
        >>> from hdnn import regularization
        >>> regularization.weight_decay([torch.tensor([1.0, 2.0]), torch.tensor([[3.0]])])
        tensor(7.)
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
    """The sum of `|K_j|_2 + |J_j|_2` over all layers, which the paper derives from lem:upper_bound.

    Args:
        net: an H1, H2, MS1 or another network that is a Hamiltonian ODE in steps.

    Returns:
        The sum, a tensor of one number, with its gradient.

    Raises:
        OptionError: if net is no such network.

    Examples:
        >>> import hdnn
        >>> net = hdnn.H2(features=4, layers=8)
        >>> bool(hdnn.regularization.spectral(net) > 8)  # |J| = 1 in each of 8 layers
        True
    """
    _check_network(net)
    field = net.field()
    J = dense.norm(field["J"]).expand(net.layers)
    return (dense.norm(field["K"]) + J).sum()


def gradient_budget(net: Network) -> Tensor:
    """How much any gradient can grow or shrink on its way through the whole stack.

    It is the B with `exp(-B) <= |delta_j| / |delta_N| <= exp(B)` for every gradient, sample and
    layer, for any activation. Each p- or q-update is a shear `I + A`; its singular values lie
    between `exp(-a)` and `exp(a)` with `a = asinh(|A|/2)`, and `|A| <= h S |X| |K|^2`. B is the sum
    over all of them.

    Args:
        net: a network whose layers are shears: H2, MS1, MS3, Verlet or Yoshida.

    Returns:
        B, a tensor of one number, with its gradient.

    Raises:
        OptionError: if net is no such network.

    Examples:
        >>> import torch
        >>> import hdnn
        >>> net, y = hdnn.H2(features=4, layers=8), torch.randn(1, 4, requires_grad=True)
        >>> (g,) = torch.autograd.grad(net(y)[0, 0], y)  # |delta_N| is 1
        >>> B = hdnn.regularization.gradient_budget(net)
        >>> bool(-B <= g.norm().log() <= B)
        True
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
