"""The hidden layers during a training: forward pass, and backward pass to their gradients."""

from __future__ import annotations

from torch import Tensor, nn

from hdnn.engine.direct import DirectGradients
from hdnn.training.processes.parallel import Team


class HiddenLayers:
    """The layers of a network and their gradients, without autograd where possible."""

    def __init__(
        self, net: nn.Module, y_0: Tensor, parameters: list[nn.Parameter], members: Team
    ) -> None:
        self.net, self.parameters, self.team = net, parameters, members
        direct = DirectGradients(net)
        self.direct = direct if direct.usable(y_0) else None
        self.y = y_0

    def forward(self, y_0: Tensor) -> Tensor:
        """y_N, of the minibatches of all processes."""
        return self.team.features(self._forward, y_0)

    def backward(self, g: Tensor) -> None:
        """Set the gradient of each parameter, given that of y_N."""
        self.team.gradients(self._backward, g, self.parameters)

    def _forward(self, y_0: Tensor) -> Tensor:
        if self.direct is not None:
            return self.direct.forward(y_0)
        self.y = self.net(y_0)
        return self.y.detach()

    def _backward(self, g: Tensor) -> None:
        if self.direct is not None:
            self.direct.backward(g)
        elif self.y.requires_grad:
            self.y.backward(g)
