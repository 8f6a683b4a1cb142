"""Image classifiers: the networks of the paper's MNIST and CIFAR-10 tables.

All networks take normalised images (B, channels, height, width) and return logits (B, classes).
They share these arguments:

- classes: the number of classes.
- drop: the probability of skipping the last layer for an image in training; earlier layers are
  skipped less often, in proportion to their depth.
- generator: the random generator for the initial weights; by default PyTorch's global one.
- dtype and device: the dtype and device of the weights; by default PyTorch's defaults.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hdnn.errors import OptionError, ShapeError, choose, positive_int
from hdnn.io import HubModule
from hdnn.networks import BY_NAME, HamiltonianUnit, Network

__all__ = [
    "AlexNet",
    "HDNNStar",
    "ImageModel",
    "MNISTNet",
    "ResNet",
    "alexnet",
    "hdnn_star",
    "mnist_conv",
    "mnist_net",
    "resnet56",
]

MNIST_STEPS = {"h1": 0.5, "h2": 0.5, "ms1": 0.4, "ms2": 0.4, "ms3": 0.4}
POOLS = ("flatten", "mean")


class Placement(TypedDict, total=False):
    """The generator, dtype and device of the weights: see the top of this file."""

    generator: torch.Generator | None
    dtype: torch.dtype | None
    device: torch.device | str | None


class ImageModel(HubModule):
    """An image classifier: `features`, and a linear layer on top.

    This is the base class of the models in `hdnn.models`; it has no layers of its own.

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
    arguments: dict[str, Any]

    def features(self, x: Tensor) -> Tensor:
        """The input of the linear layer: (B, features).

        Args:
            x: normalised images (B, channels, height, width).
        """
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, classes).

        Args:
            x: normalised images (B, channels, height, width).

        Raises:
            ShapeError: if the images have the wrong number of channels or the wrong size.
        """
        return self.linear(self.features(x))

    @property
    def units(self) -> list[Any]:
        """The Hamiltonian submodules, first to last."""
        kinds = (Network, HamiltonianUnit)
        return [m for m in self.modules() if isinstance(m, kinds)]

    @torch.no_grad()
    def reset_parameters(
        self, generator: torch.Generator | None = None
    ) -> None:
        """Draw all weights again, as the constructor does.

        Args:
            generator: the random generator for the weights; by default PyTorch's global one.
        """
        for module in self.modules():
            if isinstance(module, (Network, HamiltonianUnit)):
                module.reset_parameters(generator)
            elif isinstance(module, nn.BatchNorm2d):
                module.reset_parameters()
            elif isinstance(module, (nn.Conv2d, nn.Linear)):
                _draw(module, generator)

    def config(self) -> dict[str, Any]:
        """The constructor arguments of this classifier."""
        return dict(self.arguments)

    def smoothness(self) -> Tensor:
        """The sum of `R_K` over all Hamiltonian submodules, zero if there are none."""
        zero = self.linear.weight.new_zeros(())
        return sum([unit.smoothness() for unit in self.units], zero)

    def _start(self, generator: Any = None, **where: Any) -> None:
        """Draw all weights, then move to their dtype and device."""
        self.reset_parameters(generator)
        self.to(**where)


class MNISTNet(ImageModel):
    """The network of the MNIST table: a 3 x 3 convolution to 8 channels, N layers, a linear layer.

    K is a matrix that mixes the channels of each pixel. `model.net` is the hidden network.

    Args:
        network: "h1", "h2", "ms1", "ms2" or "ms3", or a network with as many features as there are
            channels; None leaves the hidden layers out.
        layers: N, the number of hidden layers; 0 leaves them out.
        step: h; by default 0.5 for "h1" and "h2", and 0.4 for the others.
        channels: the number of channels of the convolution.
        size: the height and width of the images.
        **options: options of the network: activation, init, backprop.

    Examples:
        >>> import torch
        >>> import hdnn
        >>> model = hdnn.models.mnist_net("h1", layers=8)
        >>> model(torch.randn(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        network: str | Network | None = "h1",
        layers: int = 8,
        *,
        step: float | None = None,
        channels: int = 8,
        size: int = 28,
        classes: int = 10,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        channels = positive_int("channels", channels)
        self.size = positive_int("size", size)
        self.stem = nn.Conv2d(1, channels, 3, padding=1)
        self.net = network if isinstance(network, Network) else None
        if isinstance(network, str) and layers != 0:
            name = choose("network", network, MNIST_STEPS)
            options["step"] = MNIST_STEPS[name] if step is None else step
            options["generator"] = generator
            self.net = BY_NAME[name](channels, layers, **options)
        self.linear = nn.Linear(
            channels * size**2, positive_int("classes", classes)
        )
        for layer in (self.stem, self.linear):
            _draw(layer, generator)
        self.to(dtype=dtype, device=device)

    def features(self, x: Tensor) -> Tensor:
        """The channels of all pixels after the hidden layers: `(B, size * size * channels)`."""
        _check_images(x, 1, self.size)
        y = self.stem(x).movedim(1, -1)
        if self.net is not None:
            y = self.net(y)
        return y.flatten(1)

    def config(self) -> dict[str, Any]:
        """The constructor arguments of this classifier, including the network."""
        return {
            "network": self.net,
            "channels": self.stem.out_channels,
            "size": self.size,
            "classes": self.linear.out_features,
        }


class HDNNStar(ImageModel):
    """H-DNN* of the CIFAR-10 table: 3 -> 32 channels, three units, 973,930 parameters.

    After each unit the image is averaged over 2 x 2 pixels, and channels of zeros are added at the
    end for the next unit. The options of units are described in `hdnn.HamiltonianUnit`.

    Args:
        network: "h1" or "h2".
        layers: the number of layers in each unit, or one number for all.
        channels: the number of channels in each unit, which may not decrease.
        step: h, the step of all units.
        stem_norm: put batch normalisation after the first convolution.
        pool: the input of the linear layer: all remaining pixels ("flatten"), or their "mean".
        inputs: the number of channels of an image.
        size: the height and width of the images; each unit halves both.
        **options: options of each unit: activation, norm, backprop, init.

    Raises:
        ShapeError: if channels are odd or decrease.
        OptionError: if an option is unknown, or `layers` and `channels` differ in length.

    Examples:
        >>> import torch
        >>> import hdnn
        >>> model = hdnn.models.hdnn_star()
        >>> sum(p.numel() for p in model.parameters())
        973930
        >>> model(torch.randn(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        network: str = "h1",
        layers: int | Sequence[int] = 6,
        channels: Sequence[int] = (32, 64, 112),
        *,
        step: float = 0.1,
        drop: float = 0.0,
        stem_norm: bool = False,
        pool: str = "flatten",
        inputs: int = 3,
        size: int = 32,
        classes: int = 10,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        depths: list[Any] = [layers] * len(channels)
        if not isinstance(layers, int):
            depths = list(layers)
        if len(depths) != len(channels):
            raise OptionError(
                f"layers has {len(depths)} entries for {len(channels)} units; give one per unit."
            )
        if not channels or any(a > b for a, b in pairwise(channels)):
            raise ShapeError(
                f"channels must not decrease from unit to unit, but got {tuple(channels)}."
            )
        self.pool = choose("pool", pool, POOLS)
        self.arguments = {
            "network": network,
            "layers": depths,
            "channels": list(channels),
            "step": step,
            "drop": drop,
            "stem_norm": stem_norm,
            "pool": pool,
            "inputs": positive_int("inputs", inputs),
            "size": positive_int("size", size),
            "classes": positive_int("classes", classes),
            **options,
        }
        self.stem = nn.Conv2d(inputs, channels[0], 3, padding=1)
        self.stem_norm = nn.BatchNorm2d(channels[0]) if stem_norm else None
        drops = _rising(drop, sum(depths))
        self.stages = nn.ModuleList()
        options |= {"network": network, "step": step}
        for C, N in zip(channels, depths, strict=True):
            self.stages.append(HamiltonianUnit(C, N, drop=drops[:N], **options))
            drops = drops[N:]
        pixels = 1 if pool == "mean" else (size // 2 ** len(channels)) ** 2
        self.linear = nn.Linear(channels[-1] * pixels, classes)
        self._start(generator, dtype=dtype, device=device)

    def features(self, x: Tensor) -> Tensor:
        """The result of `pool` for the pixels after the last unit: (B, features)."""
        _check_images(x, self.arguments["inputs"], self.arguments["size"])
        y = self.stem(x)
        if self.stem_norm is not None:
            y = self.stem_norm(y)
        for unit in self.stages:
            assert isinstance(unit, HamiltonianUnit)
            added = unit.channels - y.shape[1]
            y = unit(F.pad(y, (0, 0, 0, 0, 0, added)))
            y = F.avg_pool2d(y, 2)
        return y.mean((2, 3)) if self.pool == "mean" else y.flatten(1)

    def extra_repr(self) -> str:
        return f"pool = {self.pool!r}"


class ResidualBlock(nn.Module):
    """x + F(x): two convolutions with normalisation; the shortcut has no weights."""

    def __init__(self, inputs: int, outputs: int, drop: float) -> None:
        super().__init__()
        self.drop = drop
        self.added = outputs - inputs
        self.stride = 2 if self.added else 1
        self.conv1 = nn.Conv2d(
            inputs, outputs, 3, stride=self.stride, padding=1, bias=False
        )
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        if self.drop and self.training:  # skipped for some images
            y = y * F.dropout(y.new_ones(len(y), 1, 1, 1), self.drop)
        if self.added:  # every other pixel, and zeros for the new channels
            x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, self.added))
        return torch.relu(x + y)


class ResNet(ImageModel):
    """The residual network of He et al. for CIFAR: ResNet-56 with 853,018 parameters by default.

    Three stages of n blocks at 16, 32 and 64 channels.

    Args:
        depth: 6 n + 2, the number of layers.

    Raises:
        ShapeError: if `depth` is not 6 n + 2.

    Examples:
        >>> import torch
        >>> import hdnn
        >>> model = hdnn.models.resnet56()
        >>> sum(p.numel() for p in model.parameters())
        853018
        >>> model(torch.randn(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        classes: int = 10,
        *,
        depth: int = 56,
        drop: float = 0.0,
        **placement: Unpack[Placement],
    ) -> None:
        super().__init__()
        n, remainder = divmod(positive_int("depth", depth) - 2, 6)
        if remainder or n < 1:
            raise ShapeError(
                f"depth must be 6 n + 2 with n >= 1, but got {depth}."
            )
        self.arguments = {"classes": classes, "depth": depth, "drop": drop}
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        widths = [16] * (n + 1) + [32] * n + [64] * n
        pairs = zip(pairwise(widths), _rising(drop, 3 * n), strict=True)
        blocks = [ResidualBlock(a, b, p) for (a, b), p in pairs]
        self.blocks = nn.Sequential(*blocks)
        self.linear = nn.Linear(64, positive_int("classes", classes))
        self._start(**placement)

    def features(self, x: Tensor) -> Tensor:
        """The means over all pixels of the last block: (B, 64)."""
        _check_images(x, 3)
        return self.blocks(torch.relu(self.norm(self.stem(x)))).mean((2, 3))


class AlexNet(ImageModel):
    """AlexNet in its one-column form: 57,044,810 parameters for 10 classes.

    Images of any size are scaled to 224 x 224, the size that AlexNet is made for.

    Examples:
        >>> import torch
        >>> import hdnn
        >>> model = hdnn.models.alexnet(device="meta")  # shapes alone: the weights take 228 MB
        >>> sum(p.numel() for p in model.parameters())
        57044810
        >>> model(torch.empty(2, 3, 32, 32, device="meta")).shape
        torch.Size([2, 10])
    """

    def __init__(
        self, classes: int = 10, **placement: Unpack[Placement]
    ) -> None:
        super().__init__()
        self.arguments = {"classes": positive_int("classes", classes)}
        with torch.device(
            placement.get("device") or torch.get_default_device()
        ):
            self.convolutions = nn.Sequential(
                nn.Conv2d(3, 64, 11, stride=4, padding=2),
                nn.ReLU(),
                nn.MaxPool2d(3, 2),
                nn.Conv2d(64, 192, 5, padding=2),
                nn.ReLU(),
                nn.MaxPool2d(3, 2),
                nn.Conv2d(192, 384, 3, padding=1),
                nn.ReLU(),
                nn.Conv2d(384, 256, 3, padding=1),
                nn.ReLU(),
                nn.Conv2d(256, 256, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(3, 2),
            )
            self.hidden = nn.Sequential(
                nn.Dropout(),
                nn.Linear(256 * 6 * 6, 4096),
                nn.ReLU(),
                nn.Dropout(),
                nn.Linear(4096, 4096),
                nn.ReLU(),
            )
            self.linear = nn.Linear(4096, classes)
        self._start(**placement)

    def features(self, x: Tensor) -> Tensor:
        """The result of the last hidden layer: (B, 4096)."""
        _check_images(x, 3)
        x = F.interpolate(x, (224, 224), mode="bilinear", align_corners=False)
        return self.hidden(self.convolutions(x).flatten(1))


# Models by the names in the paper's tables
mnist_net = MNISTNet
hdnn_star = HDNNStar
resnet56 = ResNet
alexnet = AlexNet


def mnist_conv(
    network: str = "h2",
    layers: int = 4,
    channels: Sequence[int] = (32, 64),
    *,
    step: float = 0.5,
    norm: str = "inside",
    stem_norm: bool = True,
    **options: Any,
) -> HDNNStar:
    """`hdnn_star` for grey images of 28 x 28: two units with 3 x 3 kernels, pooling after each.

    Args:
        network: "h1" or "h2".
        layers: the number of layers in each unit.
        channels: the number of channels in each unit, which may not decrease.
        step: h, the step of all units.
        norm: the places of batch normalisation in units: "none", "inside", "after" or "both".
        stem_norm: put batch normalisation after the first convolution.
        **options: passed to `hdnn_star`.

    Examples:
        >>> import torch
        >>> import hdnn
        >>> model = hdnn.models.mnist_conv("h2", layers=2, channels=(8, 16))
        >>> model(torch.randn(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """
    options = {"inputs": 1, "size": 28, **options}
    options |= {"step": step, "norm": norm, "stem_norm": stem_norm}
    return HDNNStar(network, layers, channels, **options)


@torch.no_grad()
def _draw(
    layer: nn.Conv2d | nn.Linear, generator: torch.Generator | None
) -> None:
    """Draw weights and bias between +- 1 / sqrt(fan-in), as PyTorch does.

    Weights without a bias, as in ResNets, are drawn with variance 2 / fan-in.
    """
    fan_in = layer.weight[0].numel()
    variances = 1 if layer.bias is not None else 6
    bound = (variances / fan_in) ** 0.5
    for tensor in layer.parameters():
        if not tensor.is_meta:
            where = tensor.device if generator is None else generator.device
            draw = torch.empty(tensor.shape, dtype=torch.float32, device=where)
            draw.uniform_(-bound, bound, generator=generator)
            tensor.copy_(draw)


def _rising(drop: float, layers: int) -> list[float]:
    """The probability of skipping each layer, which grows with depth."""
    return [drop * (k + 1) / layers for k in range(layers)]


def _check_images(x: Tensor, channels: int, size: int | None = None) -> None:
    fits = isinstance(x, Tensor) and x.ndim == 4 and x.shape[1] == channels
    if fits and (size is None or x.shape[2:] == (size, size)):
        return
    shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
    sides = "height, width" if size is None else f"{size}, {size}"
    raise ShapeError(
        f"images must be (B, {channels}, {sides}), but got {shape}."
    )
