"""The multilayer perceptron, for contrast: its gradients do vanish."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hdnn import functional
from hdnn.networks import jacobians
from hdnn.networks.base import Network
from hdnn.networks.hamiltonian import HamiltonianNet
from hdnn.networks.initial import Initial
from hdnn.networks.options import describes_options
from hdnn.networks.promise import Guarantee


@describes_options(HamiltonianNet)
class MLP(Network):
    """y_{j+1} = sigma(K_j y_j + b_j), the baseline of fig:gradients: K (N, n, n), b (N, n)."""

    stacked = ("K", "b")

    def __init__(
        self,
        features: int,
        layers: int,
        *,
        activation: str = "tanh",
        tied: bool = False,
        init: str = "scaled",
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(features, layers, activation=activation, tied=tied)
        self._draw(Initial(init, self.features, generator, dtype, device))

    @property
    def function(self) -> Callable[..., Tensor]:
        return functional.mlp

    def _promise(self) -> Guarantee:
        return Guarantee(False, "none", "the gradients of a multilayer perceptron can vanish")

    def _jacobians(self, states: Tensor, w: dict[str, Any]) -> Tensor:
        return jacobians.through(states[:-1], w["K"], w["b"], None, self._sigma)
