"""The network of the paper's MNIST table."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hdnn.errors import choose, positive_int
from hdnn.models.base import ImageModel, LayerMaker, check_images
from hdnn.networks import BY_NAME, Network

MNIST_STEPS = {"h1": 0.5, "h2": 0.5, "ms1": 0.4, "ms2": 0.4, "ms3": 0.4}


class MNISTNet(ImageModel):
    """Convolution, layers that mix the channels of each pixel, linear layer, as of `mnist_net`.

    Args:
        network: "h1", "h2", "ms1", "ms2" or "ms3"; None leaves the hidden layers out.
        layers: N, how many hidden layers there are.
        options: channels, classes, and the options of the hidden network.
        size: height and width of the images.
        make: what makes the other layers, and draws their weights.

    Examples:
        >>> import torch
        >>> import hdnn
        >>> model = hdnn.models.mnist_net("h1", layers=8)
        >>> isinstance(model, hdnn.models.MNISTNet), model.net
        (True, H1(8 features, 8 layers, tanh, h = 0.5, T = 4, 576 parameters))
        >>> model.pixels(torch.randn(2, 1, 28, 28)).shape  # the states that the layers start from
        torch.Size([2, 28, 28, 8])
    """

    def __init__(
        self, network: str | None, layers: int, options: dict[str, Any], size: int, make: LayerMaker
    ) -> None:
        super().__init__()
        channels, classes = options.pop("channels"), options.pop("classes")
        self.size = size
        self.stem = make.conv(1, channels, 3, padding=1)
        self.net = None if network is None else BY_NAME[network](channels, layers, **options)
        self.linear = make.linear(channels * size**2, classes)

    def set_net(self, net: Network) -> None:
        """Put in hidden layers that were made elsewhere.

        Args:
            net: a network with as many features as there are channels.
        """
        linear, self.net = self.linear, net
        del self.linear
        self.linear = linear  # keeps the linear layer last, as in a new model

    def pixels(self, x: Tensor) -> Tensor:
        """The states of all pixels, on whose channels K acts: (B, size, size, channels).

        Args:
            x: normalised images (B, 1, size, size).
        """
        check_images(x, 1, self.size)
        return self.stem(x).movedim(1, -1)

    def features(self, x: Tensor) -> Tensor:
        """The channels of all pixels after the hidden layers: `(B, size * size * channels)`."""
        y = self.pixels(x)
        return (y if self.net is None else self.net(y)).flatten(1)

    def config(self) -> dict[str, Any]:
        """The arguments of `mnist_net` that make this classifier again, without its network."""
        # The hidden network describes itself, as networks do.
        return {"channels": self.stem.out_channels, "size": self.size, **super().config()}


def mnist_net(
    network: str | None = "h1",
    layers: int = 8,
    *,
    step: float | None = None,
    channels: int = 8,
    activation: str = "tanh",
    init: str = "scaled",
    backprop: str = "auto",
    size: int = 28,
    classes: int = 10,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> MNISTNet:
    """The network of the MNIST table: a 3 x 3 convolution to 8 channels, N layers, a linear one.

    K is a matrix that mixes the channels of each pixel. `model.net` is the hidden network.

    Args:
        network: "h1", "h2", "ms1", "ms2" or "ms3"; None leaves the hidden layers out.
        layers: N, how many hidden layers there are; 0 leaves them out.
        step: h; by default 0.5 for "h1" and "h2", and 0.4 for the others.
        channels: how many the convolution makes.
        activation: sigma, the name of one of `hdnn.activations.names()`.
        init: "scaled" draws K from N(0, 1/n) with b = 0; "paper" draws all from N(0, 1).
        backprop: what the backward pass starts from: see `hdnn.H2`.
        size: height and width of the images.
        classes: how many classes there are.
        generator: of the first weights; by default PyTorch's global one.
        dtype: of the weights; by default `torch.get_default_dtype()`.
        device: of the weights; by default `torch.get_default_device()`.

    Returns:
        The model, for images (B, 1, size, size).

    Raises:
        ShapeError: if a size is no whole number >= 1, the channels are odd for a network that
            splits them, or the dtype is no floating-point one.
        StepError: if `step` is not finite and > 0.
        OptionError: if a name is not known, or the device or generator is none.

    Examples:
        >>> import torch
        >>> import hdnn
        >>> model = hdnn.models.mnist_net("h1", layers=8)
        >>> model(torch.randn(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """
    make = LayerMaker(generator, dtype, device)
    options: dict[str, Any] = {"channels": positive_int("channels", channels)}
    options["classes"] = positive_int("classes", classes)
    if network is not None:
        choose("network", network, MNIST_STEPS)
        if layers != 0:
            options |= {"step": MNIST_STEPS[network] if step is None else step, **make.options}
            options |= {"activation": activation, "init": init, "backprop": backprop}
        else:
            network = None
    return MNISTNet(network, layers, options, positive_int("size", size), make)
