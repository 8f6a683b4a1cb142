"""The contestants of transfer.py: graph networks of as many layers as there are hops."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hdnn

with warnings.catch_warnings():
    # PyTorch Geometric scripts parts of itself when it is imported.
    warnings.filterwarnings("ignore", r".torch\.jit\.script. is deprecated", DeprecationWarning)
    from torch_geometric.nn import AntiSymmetricConv, GCNConv, GraphConv, SimpleConv

AMPLITUDE = 0.1  # of waves, at which tanh is almost a straight line


class Sum(nn.Module):
    """The sum of V x_j over all neighbours, of which nodes with more neighbours see more."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.lin, self.sum = nn.Linear(d, d, bias=False), SimpleConv(aggr="sum")

    def reset_parameters(self) -> None:
        self.lin.reset_parameters()

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.sum(self.lin(x), edges)


class SWAN(nn.Module):
    """x += h tanh((W - W^T - gamma) x + V sum_j a_ij x_j + beta Z sum_j s_ij x_j + b).

    After Gravina et al., "On Oversquashing in Graph Neural Networks Through the Lens of Dynamical
    Systems": a_ij = (d_i d_j)^(-1/2) with V = -V^T (global and local), or a_ij = 1 with any V
    (bounded), and s_ij = 1/d_i - 1/d_j with Z = Z^T, which is antisymmetric in space. Where all
    nodes have the same degree, as in a ring, s is 0.
    """

    def __init__(self, d: int, h: float, beta: float, bounded: bool, gamma: float = 0.1) -> None:
        super().__init__()
        self.W, self.V, self.Z = (nn.Parameter(torch.empty(d, d)) for _ in range(3))
        for one in (self.W, self.V, self.Z):
            nn.init.kaiming_uniform_(one, a=math.sqrt(5))
        self.b, self.sum = nn.Parameter(torch.zeros(d)), SimpleConv(aggr="sum")
        self.h, self.beta, self.bounded, self.gamma = h, beta, bounded, gamma
        self.known: tuple[Tensor, Tensor | None, Tensor] | None = None  # edges and their weights

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        if self.known is None or self.known[0] is not edges:
            self.known = edges, *self._weights(edges, len(x))
        _, a, s = self.known
        V = self.V if self.bounded else self.V.triu(1) - self.V.triu(1).T
        Z = self.Z.triu() + self.Z.triu().T
        W = self.W - self.W.T - self.gamma * torch.eye(len(self.W))
        near = self.sum(x @ V.T, edges, a) + self.beta * self.sum(x @ Z.T, edges, s)
        return x + self.h * torch.tanh(x @ W.T + near + self.b)

    def _weights(self, edges: Tensor, nodes: int) -> tuple[Tensor | None, Tensor]:
        j, i = edges
        degree = torch.bincount(i, minlength=nodes).float()
        a = None if self.bounded else (degree[i] * degree[j]).rsqrt()
        return a, 1 / degree[i] - 1 / degree[j]


class Tanh(nn.Module):
    """scale * tanh(convolution), the F of a layer."""

    def __init__(self, convolution: nn.Module, scale: float = 1.0) -> None:
        super().__init__()
        self.convolution, self.scale = convolution, scale

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.scale * torch.tanh(self.convolution(x, edges))


class Energy(nn.Module):
    """The sum of log cosh(K x + b), whose gradient is the paper's K^T tanh(K x + b)."""

    def __init__(self, m: int) -> None:
        super().__init__()
        self.convolution = GraphConv(m, m, aggr="mean")

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        z = self.convolution(x, edges).abs()
        return (z + F.softplus(-2 * z) - math.log(2)).sum(-1)


def wave(m: int, layer: int, degree: float, aggr: str) -> GraphConv:
    """Waves in half of the features, and oscillators in the others: q'' = -q.

    With p += F(q), q += p and F(q)_i = 2 (mean of the neighbours' q - q_i), a value goes on by one
    node in each layer and is not damped. Oscillators keep what a node had. The first step is a half
    one, as in Verlet's method.
    """
    one = GraphConv(m, m, aggr=aggr)
    moves = (torch.arange(m) >= m // 2).float() * (1.0 if layer else 0.5)
    stays = (torch.arange(m) < m // 2).float() * (1.0 if layer else 0.5)
    with torch.no_grad():
        one.lin_rel.weight.copy_(torch.diag(2 * moves / (degree if aggr == "sum" else 1.0)))
        one.lin_root.weight.copy_(torch.diag(-2 * moves - stays))
        one.lin_rel.bias.zero_()
    return one


class Network(nn.Module):
    """Encoder, layers and decoder; encoder and decoder are small perceptrons of single nodes.

    `degree` is that of most nodes, `share` says whether all layers have the same weights. The state
    of a node has d features in all models: in those of hdnn, p and q have d / 2 each.
    """

    def __init__(
        self,
        kind: str,
        d: int,
        depth: int,
        *,
        degree: float,
        h: float = 1.0,
        share: bool = False,
        backprop: str = "auto",
        state: str = "float",
        **o: Any,
    ) -> None:
        super().__init__()
        self.kind, m = kind, d // 2
        ours = kind not in ("none", "gcn", "adgn", "swan")
        self.amplitude = AMPLITUDE if kind == "wave" else 1.0
        width = m if ours else d
        self.encoder = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width))
        self.decoder = nn.Sequential(nn.Linear(d, d), nn.Tanh(), nn.Linear(d, 1))
        with torch.no_grad():
            for one in self.encoder[2].parameters():
                one.mul_(self.amplitude)

        def graph_conv() -> nn.Module:
            return (
                GCNConv(m, m, cached=True)
                if o["conv"] == "gcn"
                else GraphConv(m, m, aggr=o["conv"])
            )

        def phi() -> nn.Module:
            return GCNConv(d, d, bias=False, cached=True) if o["conv"] == "gcn" else Sum(d)

        makers: dict[str, Callable[[int], nn.Module]] = {
            "none": lambda j: nn.Linear(d, d),
            "gcn": lambda j: GCNConv(d, d, cached=True),
            "adgn": lambda j: AntiSymmetricConv(d, phi(), epsilon=h),  # pyright: ignore
            "swan": lambda j: SWAN(d, h, o["beta"], o["bounded"]),
            "leapfrog": lambda j: hdnn.Leapfrog(Tanh(graph_conv()), h=h),
            "coupling": lambda j: hdnn.Coupling(Tanh(graph_conv(), h), Tanh(graph_conv(), h)),
            "energy": lambda j: hdnn.Leapfrog(hdnn.GradientField(Energy(m), scale=-1.0), h=h),
            "wave": lambda j: hdnn.Leapfrog(Tanh(wave(m, j, degree, o["conv"])), h=h),
        }
        depth = 3 if kind == "none" else depth
        layers = [makers[kind](0)] * depth if share else [makers[kind](j) for j in range(depth)]
        self.layers: Any = nn.ModuleList(layers)
        if ours:
            self.layers = hdnn.Reversible(layers, backprop=backprop, state=state)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        x = self.encoder(x)
        if isinstance(self.layers, hdnn.Reversible):
            x = self.layers(torch.cat([torch.zeros_like(x), x], -1), edges)
        else:
            for layer in self.layers:
                x = layer(x) if self.kind == "none" else layer(x, edges)
                x = torch.tanh(x) if self.kind in ("none", "gcn") else x
        return self.decoder(x / self.amplitude)
