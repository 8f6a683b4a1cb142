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
    """A multilayer perceptron, `y_{j+1} = sigma(K_j y_j + b_j)`: the baseline of fig:gradients.

    Its gradients vanish with depth, which nothing here prevents. Parameters K (N, n, n) and
    b (N, n); the features may be odd.

    Raises:
        ShapeError: if a size is no whole number >= 1, or the dtype is no floating-point one.
        OptionError: if a name is not known, or `tied` is neither True nor False.

    Examples:
        >>> import torch
        >>> import hdnn
        >>> net = hdnn.MLP(features=4, layers=256, dtype=torch.float64)
        >>> y = torch.randn(10, 4, dtype=torch.float64)
        >>> dy = hdnn.analysis.backward_sensitivity(net, y)  # dy_N/dy_j, of which dy_N/dy_0 is gone
        >>> bool(hdnn.analysis.norms(dy[0]).max() < 1e-6)
        True
    """

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
        """The function of `hdnn.functional` that this network runs."""
        return functional.mlp

    def _promise(self) -> Guarantee:
        return Guarantee(False, "none", "the gradients of a multilayer perceptron can vanish")

    def _jacobians(self, states: Tensor, w: dict[str, Any]) -> Tensor:
        return jacobians.through(states[:-1], w["K"], w["b"], None, self._sigma)
