"""Regularisers R(theta): smoothness over layers, weight decay, spectral norms, gradient budget."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from hdnn import activations
from hdnn.base.shapes import Step, layer_steps
from hdnn.errors import OptionError, ShapeError
from hdnn.networks import MS1, MS3, HamiltonianNet, Network, ODENetwork
from hdnn.operators import dense


def smoothness(K: Tensor, b: Tensor, h: Step) -> Tensor:
    """R_K = h/2 sum_{j=1}^{N-1} |K_j - K_{j-1}|_F^2 + |b_j - b_{j-1}|^2 for K (N, r, n), b (N, r).

    Where each layer has its own step, h_j weighs the difference between layers j and j-1.
    """
    if K.shape[0] != b.shape[0]:
        raise ShapeError(f"K has {K.shape[0]} layers, but b has {b.shape[0]}; both must have N.")
    steps = layer_steps("R_K", h, len(K))
    jumps = K.diff(dim=0).square().flatten(1).sum(1) + b.diff(dim=0).square().flatten(1).sum(1)
    if isinstance(h, (int, float)):  # no tensor is made: a CUDA graph can record it
        return 0.5 * h * jumps.sum()
    h = h.expand(len(K)) if isinstance(h, Tensor) else K.new_tensor(steps)
    return 0.5 * (h[1:] * jumps).sum()


def weight_decay(weights: Iterable[Tensor] | torch.nn.Module) -> Tensor:
    """R_l = 1/2 the sum of squares of all weights: of tensors, or of a module's parameters.

    The logarithms of learned steps are no weights: pulled to zero, they would pull h to one.
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
    return torch.asinh(0.5 * S * shear_norms(net)).sum()


def shear_norms(net: Network) -> Tensor:
    """The bounds |A| / S of all shears of all layers."""
    w = net.weights()
    if isinstance(net, MS1):  # A = h diag(sigma') K_0, with no K^T in front
        return torch.cat([net.steps() * dense.norm(w["K_0"])] * 2)
    if isinstance(net, MS3):
        return torch.cat([net.steps() * dense.norm(w[name]).square() for name in ("K_1", "K_2")])
    if isinstance(net, HamiltonianNet) and net.scheme.layout == "split":
        X = 1.0 if w["X"] is None else dense.norm(w["X"])
        norms = {"p": dense.norm(w["K_q"]).square(), "q": dense.norm(w["K_p"]).square()}
        h = net.steps()
        return torch.cat([abs(part) * h * X * norms[half] for half, part in net.scheme.shears])
    raise OptionError(
        f"the gradient budget B is for networks whose layers are shears (H2, MS1, MS3, Verlet, "
        f"Yoshida), not for {type(net).__name__}; see hdnn.analysis for its bounds."
    )


def _check_network(net: object) -> None:
    if not isinstance(net, Network):
        raise OptionError(
            f"a network is needed, but got {type(net).__name__}; of a Model, its net."
        )
