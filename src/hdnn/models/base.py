"""What all image classifiers share.

All take images (B, channels, height, width) and give logits (B, classes). `features(x)` is what
the last linear layer sees; `units` are the Hamiltonian parts and `smoothness()` their R_K.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hdnn.errors import ShapeError
from hdnn.networks import HamiltonianUnit, Network, ODENetwork
from hdnn.networks.initial import Initial
from hdnn.networks.norm import BatchNorm
from hdnn.networks.weights import overwrite


class ImageModel(nn.Module):
    """A classifier of images: `features`, and a linear layer on top of them.

    The models of `hdnn.models` are of this class, which has no layers itself. A model takes images
    (B, channels, height, width) and gives logits (B, classes).

    Examples:
        >>> import torch
        >>> import hdnn
        >>> model = hdnn.models.mnist_net("h2", layers=4)
        >>> isinstance(model, hdnn.models.ImageModel)
        True
        >>> model(torch.randn(2, 1, 28, 28)).shape
        torch.Size([2, 10])
        >>> [unit.guarantee().holds for unit in model.units]
        [True]
    """

    linear: nn.Linear

    def features(self, x: Tensor) -> Tensor:
        """What the linear layer sees: (B, features).

        Args:
            x: normalised images (B, channels, height, width).
        """
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, classes).

        Args:
            x: normalised images (B, channels, height, width).

        Raises:
            ShapeError: if the images have other channels, or another size than the model is for.
        """
        return self.linear(self.features(x))

    @property
    def units(self) -> list[ODENetwork | HamiltonianUnit]:
        """The Hamiltonian parts, first to last."""
        return [m for m in self.modules() if isinstance(m, (ODENetwork, HamiltonianUnit))]

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Begin again: all layers draw their weights, in the order in which they were made.

        For a classifier that was made on the meta device, as FSDP does it, after `to_empty`.

        Args:
            generator: what they are drawn from; by default PyTorch's global generator.
        """
        make = LayerMaker(generator, self.linear.weight.dtype, self.linear.weight.device)
        for part in self.modules():
            if isinstance(part, (Network, HamiltonianUnit)):
                part.reset_parameters(generator)
            elif isinstance(part, nn.BatchNorm2d):
                part.reset_parameters()
            elif isinstance(part, (nn.Conv2d, nn.Linear)):
                make.draw(part)

    def config(self) -> dict[str, Any]:
        """The arguments that make this classifier again, as JSON can hold them.

        They are read off the modules themselves: what is saved is what is there.
        """
        return {"classes": self.linear.out_features}

    def smoothness(self) -> Tensor:
        """The sum of `R_K` over all Hamiltonian parts, zero if there are none."""
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
        return self.draw(layer)

    def linear(self, inputs: int, outputs: int) -> nn.Linear:
        return self.draw(nn.utils.skip_init(nn.Linear, inputs, outputs, **self.placed))

    def norm(self, channels: int, activation: str = "identity") -> BatchNorm:
        return BatchNorm(channels, activation, **self.placed)

    def draw(self, layer: Any) -> Any:
        """The same layer with weights and bias uniform in +- 1 / sqrt(fan-in).

        Weights without a bias, as ResNets have them, are drawn again, with variance 2 / fan-in.
        """
        inputs = layer.weight[0].numel()
        bounds = [(layer.weight, inputs**-0.5), (layer.bias, inputs**-0.5)]
        if layer.bias is None:
            bounds[1] = layer.weight, (6 / inputs) ** 0.5
        for tensor, bound in bounds:
            overwrite(tensor, self.initial.uniform(tensor.shape, bound))
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
