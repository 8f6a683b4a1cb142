"""What all image classifiers share.

All take images (B, channels, height, width) and give logits (B, classes). `features(x)` is what
the last linear layer sees; `units` are the Hamiltonian parts and `smoothness()` their R_K.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hdnn.errors import ShapeError
from hdnn.networks import HamiltonianUnit, ODENetwork
from hdnn.networks.initial import Initial
from hdnn.networks.norm import BatchNorm


class ImageModel(nn.Module):
    """A classifier of images: `features`, and a linear layer on top of them."""

    linear: nn.Linear

    def features(self, x: Tensor) -> Tensor:
        """What the linear layer sees: (B, features)."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.features(x))

    @property
    def units(self) -> list[ODENetwork | HamiltonianUnit]:
        """The Hamiltonian parts, first to last."""
        return [m for m in self.modules() if isinstance(m, (ODENetwork, HamiltonianUnit))]

    def config(self) -> dict[str, Any]:
        """The arguments that make this classifier again, as JSON can hold them.

        They are read off the modules themselves: what is saved is what is there.
        """
        return {"classes": self.linear.out_features}

    def smoothness(self) -> Tensor:
        """The sum of R_K over all Hamiltonian parts, zero if there are none."""
        found = [unit.smoothness() for unit in self.units]
        return torch.stack(found).sum() if found else self.linear.weight.new_zeros(())


class LayerMaker:
    """Makes layers of one dtype on one device, with weights as PyTorch draws them."""

    def __init__(
        self,
        generator: torch.Generator | None,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
    ) -> None:
        self.initial = Initial("scaled", 1, generator, dtype, device)
        self.placed: dict[str, Any] = {"dtype": self.initial.dtype, "device": self.initial.device}
        self.options: dict[str, Any] = {**self.placed, "generator": generator}

    def conv(self, inputs: int, outputs: int, kernel: int, **options: Any) -> nn.Conv2d:
        layer = nn.utils.skip_init(nn.Conv2d, inputs, outputs, kernel, **options, **self.placed)
        return self._drawn(layer, inputs * kernel**2)

    def linear(self, inputs: int, outputs: int) -> nn.Linear:
        return self._drawn(nn.utils.skip_init(nn.Linear, inputs, outputs, **self.placed), inputs)

    def norm(self, channels: int, activation: str = "identity") -> BatchNorm:
        return BatchNorm(channels, activation, **self.placed)

    def he(self, layer: Any) -> Any:
        """The same layer with weights of variance 2 / fan-in, as ResNets begin with."""
        inputs = layer.weight[0].numel()
        with torch.no_grad():
            layer.weight.copy_(self.initial.uniform(layer.weight.shape, (6 / inputs) ** 0.5))
        return layer

    def _drawn(self, layer: Any, inputs: int) -> Any:
        """Weights and bias uniform in +- 1 / sqrt(fan-in)."""
        with torch.no_grad():
            layer.weight.copy_(self.initial.uniform(layer.weight.shape, inputs**-0.5))
            if layer.bias is not None:
                layer.bias.copy_(self.initial.uniform(layer.bias.shape, inputs**-0.5))
        return layer


def rising(drop: float, layers: int) -> list[float]:
    """How often each layer is left out: the later it comes, the more often."""
    return [drop * (k + 1) / layers for k in range(layers)]


def check_images(x: Tensor, channels: int, size: int | None) -> None:
    if (
        isinstance(x, Tensor)
        and x.ndim == 4
        and x.shape[1] == channels
        and (size is None or x.shape[2:] == (size, size))
    ):
        return
    given = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
    sides = "height, width" if size is None else f"{size}, {size}"
    raise ShapeError(f"images must be (B, {channels}, {sides}), but got {given}.")
