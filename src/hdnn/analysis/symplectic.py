"""Symplecticity: Phi^T J Phi = J, the property that keeps gradients from vanishing."""

from __future__ import annotations

import torch
from torch import Tensor

from hdnn import activations
from hdnn.analysis.sensitivity import norms
from hdnn.errors import ShapeError
from hdnn.networks import Network, ODENetwork


def symplectic_defect(Phi: Tensor, J: Tensor) -> Tensor:
    """|Phi^T J Phi - J| / (|Phi|^2 |J|) for each BSM of (..., n, n), in denominator layout.

    Relative to the sizes of the factors, so that it is a multiple of the rounding error. NaN for a
    matrix that is not finite.
    """
    if Phi.shape[-2:] != J.shape[-2:] or J.ndim != 2:
        raise ShapeError(
            f"J has shape {tuple(J.shape)}, but a single matrix {tuple(Phi.shape[-2:])} is needed: "
            "a stack of BSMs is symplectic with respect to one constant J."
        )
    tiny = torch.finfo(Phi.dtype).tiny
    size, unit = norms(Phi).clamp_min(tiny)[..., None, None], J / norms(J).clamp_min(tiny)
    P = Phi / size  # so that no square is too large
    return norms(P.mT @ unit @ P - unit / size / size)


def is_symplectic(Phi: Tensor, J: Tensor, *, tolerance: float | None = None) -> bool:
    """Whether every BSM is symplectic with respect to J, up to the rounding of its dtype."""
    if tolerance is None:
        tolerance = 64 * Phi.shape[-1] * torch.finfo(Phi.dtype).eps
    return bool((symplectic_defect(Phi, J) <= tolerance).all())


@torch.no_grad()
def energy_along(net: ODENetwork, y: Tensor) -> Tensor:
    """H_j(y_j) along the trajectory, (N+1, *batch): the energy of each layer at its own input.

    At y_N with the weights of the last layer. Where all layers have the same weights, a symplectic
    integrator keeps it close to constant; forward Euler lets it grow.
    """
    field, states = net.field(), net.trajectory(y)
    K, b = (torch.cat([field[name], field[name][-1:]]) for name in ("K", "b"))
    flat = states.reshape(net.layers + 1, -1, net.features)
    integral = activations.get(net.activation).integral
    return integral(flat @ K.mT + b[:, None]).sum(-1).reshape(states.shape[:-1])


@torch.no_grad()
def reconstruction_error(net: Network, y: Tensor) -> Tensor:
    """|inverse(net(y)) - y| / |y| for each sample, (*batch): what rounding costs."""
    back = net.inverse(net(y))
    return (back - y).norm(dim=-1) / y.norm(dim=-1).clamp_min(torch.finfo(y.dtype).tiny)
