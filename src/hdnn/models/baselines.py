"""The classifiers that the paper's CIFAR-10 table compares with: ResNet-56 and AlexNet."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hdnn.errors import ShapeError, flag, positive_int, probability
from hdnn.models.base import ImageModel, LayerMaker, check_images, rising


class ResidualBlock(nn.Module):
    """x + F(x): two convolutions with normalisation; the shortcut has no weights."""

    def __init__(self, inputs: int, outputs: int, drop: float, make: LayerMaker) -> None:
        super().__init__()
        self.drop = drop
        self.added, self.stride = outputs - inputs, 1 if inputs == outputs else 2
        first = {"stride": self.stride, "padding": 1, "bias": False}
        self.conv1 = make.conv(inputs, outputs, 3, **first)
        self.norm1 = make.norm(outputs, "relu")
        self.conv2 = make.conv(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = make.norm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(self.norm1(self.conv1(x))))
        if self.drop and self.training:  # for some images it is left out
            y = y * F.dropout(y.new_ones(len(y), 1, 1, 1), self.drop)
        if self.added:  # every other pixel, and zeros for the new channels
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.added))
        return torch.relu(x + y)


class ResNet(ImageModel):
    """The residual network of He et al. for CIFAR, with 6 n + 2 layers, as `resnet56` makes it.

    Args:
        depth: 6 n + 2, how many layers there are.
        classes: how many classes there are.
        drop: how often the last block is left out for an image while training.
        make: what makes the layers, and draws their weights.

    Raises:
        ShapeError: if `depth` is not 6 n + 2.

    Examples:
        >>> import torch
        >>> import hdnn
        >>> model = hdnn.models.resnet56(depth=8)
        >>> isinstance(model, hdnn.models.ResNet), len(model.blocks)
        (True, 3)
    """

    def __init__(self, depth: int, classes: int, drop: float, make: LayerMaker) -> None:
        super().__init__()
        self.drop = drop
        n, rest = divmod(depth - 2, 6)
        if rest or n < 1:
            raise ShapeError(f"depth must be 6 n + 2 with n >= 1, but got {depth}.")
        self.stem = make.conv(3, 16, 3, padding=1, bias=False)
        self.norm = make.norm(16, "relu")
        widths = [16] * (n + 1) + [32] * n + [64] * n
        blocks = zip(pairwise(widths), rising(drop, 3 * n), strict=True)
        self.blocks = nn.Sequential(*(ResidualBlock(a, b, q, make) for (a, b), q in blocks))
        self.linear = make.linear(64, classes)

    def features(self, x: Tensor) -> Tensor:
        """The means over all pixels of the last block: (B, 64)."""
        check_images(x, 3, None)
        return self.blocks(self.norm(self.stem(x))).mean((2, 3))

    def config(self) -> dict[str, Any]:
        """The arguments of `resnet56` that make this classifier again."""
        return {"depth": 2 * len(self.blocks) + 2, "drop": self.drop, **super().config()}

    def extra_repr(self) -> str:
        return f"drop to {self.drop:.4g}" if self.drop else ""


def resnet56(
    classes: int = 10,
    *,
    depth: int = 56,
    drop: float = 0.0,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> ResNet:
    """ResNet-56 for CIFAR: three stages of 9 blocks at 16, 32, 64 channels, 853,018 parameters.

    Args:
        classes: how many classes there are.
        depth: 6 n + 2, for stages of n blocks.
        drop: how often the last block is left out for an image while training; the first hardly is.
        generator: of the first weights; by default PyTorch's global one.
        dtype: of the weights; by default `torch.get_default_dtype()`.
        device: of the weights; by default `torch.get_default_device()`.

    Returns:
        The model, for images (B, 3, height, width).

    Raises:
        ShapeError: if a size is no whole number >= 1, `depth` is not 6 n + 2, or the dtype is no
            floating-point one.
        OptionError: if `drop` is not in `[0, 1)`, or the device or generator is none.

    Examples:
        >>> import torch
        >>> import hdnn
        >>> model = hdnn.models.resnet56()
        >>> sum(p.numel() for p in model.parameters())
        853018
        >>> model(torch.randn(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    make, left_out = LayerMaker(generator, dtype, device), probability("drop", drop)
    return ResNet(positive_int("depth", depth), positive_int("classes", classes), left_out, make)


class AlexNet(ImageModel):
    """Five convolutions and three linear layers, for images of 224 x 224, as `alexnet` makes it.

    Args:
        classes: how many classes there are.
        resize: scale images of any size to 224 x 224.
        dropout: the probability to leave out an input of the hidden linear layers in training.
        make: what makes the layers, and draws their weights.

    Examples:
        >>> import hdnn
        >>> model = hdnn.models.alexnet(classes=5, device="meta")  # shapes alone: it takes 228 MB
        >>> isinstance(model, hdnn.models.AlexNet), model.linear.weight.shape
        (True, torch.Size([5, 4096]))
    """

    def __init__(self, classes: int, resize: bool, dropout: float, make: LayerMaker) -> None:
        super().__init__()
        self.resize = resize
        self.convolutions = nn.Sequential(
            make.conv(3, 64, 11, stride=4, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(3, 2),
            make.conv(64, 192, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(3, 2),
            make.conv(192, 384, 3, padding=1),
            nn.ReLU(),
            make.conv(384, 256, 3, padding=1),
            nn.ReLU(),
            make.conv(256, 256, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(3, 2),
        )
        self.hidden = nn.Sequential(
            nn.Dropout(dropout),
            make.linear(256 * 6 * 6, 4096),
            nn.ReLU(),
            nn.Dropout(dropout),
            make.linear(4096, 4096),
            nn.ReLU(),
        )
        self.linear = make.linear(4096, classes)

    def features(self, x: Tensor) -> Tensor:
        """What the last hidden layer gives: (B, 4096)."""
        if self.resize:
            check_images(x, 3, None)
            x = F.interpolate(x, (224, 224), mode="bilinear", align_corners=False)
        check_images(x, 3, 224)
        return self.hidden(self.convolutions(x).flatten(1))

    def config(self) -> dict[str, Any]:
        """The arguments of `alexnet` that make this classifier again."""
        (dropout,) = {part.p for part in self.hidden if isinstance(part, nn.Dropout)}
        return {"resize": self.resize, "dropout": dropout, **super().config()}

    def extra_repr(self) -> str:
        return f"resize = {self.resize}"


def alexnet(
    classes: int = 10,
    *,
    resize: bool = True,
    dropout: float = 0.5,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> AlexNet:
    """AlexNet in its one-column form: 57,044,810 parameters for 10 classes.

    Args:
        classes: how many classes there are.
        resize: scale images of any size to the 224 x 224 that it is made for.
        dropout: the probability to leave out an input of the hidden linear layers in training.
        generator: of the first weights; by default PyTorch's global one.
        dtype: of the weights; by default `torch.get_default_dtype()`.
        device: of the weights; by default `torch.get_default_device()`.

    Returns:
        The model, for images (B, 3, height, width).

    Raises:
        ShapeError: if `classes` is no whole number >= 1, or the dtype is no floating-point one.
        OptionError: if `dropout` is not in `[0, 1)`, `resize` is neither True nor False, or the
            device or generator is none.

    Examples:
        >>> import torch
        >>> import hdnn
        >>> model = hdnn.models.alexnet(device="meta")  # shapes alone: the weights take 228 MB
        >>> sum(p.numel() for p in model.parameters())
        57044810
        >>> model(torch.empty(2, 3, 32, 32, device="meta")).shape
        torch.Size([2, 10])
    """
    make, left_out = LayerMaker(generator, dtype, device), probability("dropout", dropout)
    return AlexNet(positive_int("classes", classes), flag("resize", resize), left_out, make)
