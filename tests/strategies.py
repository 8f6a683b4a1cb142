"""Random networks for hypothesis: all sizes, depths, steps and activations, with a random X."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

import hdnn
from hdnn.networks import Network

ACTIVATIONS = hdnn.activations.names()
MONOTONE = tuple(a for a in ACTIVATIONS if hdnn.activations.get(a).monotone)

seeds = st.integers(0, 2**31 - 1)
sizes = st.integers(1, 4)  # m = n/2
depths = st.integers(1, 12)
steps = st.floats(0.01, 1.0)
scales = st.floats(0.1, 2.0)


class Random:
    """Reproducible normal tensors in float64."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(
            *shape, generator=self.generator, dtype=torch.float64
        )

    def skew(self, *shape: int) -> Tensor:
        A = self(*shape, shape[-1])
        return A - A.mT


def randomise(net: Network, normal: Random, scale: float) -> Network:
    """Give every parameter a new normal value of the given size, but for X, J and h."""
    with torch.no_grad():
        for name, p in net.named_parameters():
            if name[0] in "Kb":
                p.copy_(scale * normal(*p.shape))
    return net.requires_grad_(False)


def split_net(
    kind: str,
    m: int,
    N: int,
    h: float,
    activation: str,
    normal: Random,
    **options,
):
    """H2, Verlet or Yoshida with a random X, or an X a layer."""
    integrator = {
        "H2": "semi_implicit_euler",
        "Verlet": "verlet",
        "Yoshida": "yoshida4",
    }[kind]
    options.setdefault("X", normal(m, m))
    return hdnn.HamiltonianNet(
        2 * m,
        N,
        integrator,
        step=h,
        activation=activation,
        dtype=torch.float64,
        **options,
    )
