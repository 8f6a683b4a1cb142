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
    """The residual network of He et al. for CIFAR, with 6 n + 2 layers: `resnet56`."""

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
        check_images(x, 3, None)
        return self.blocks(self.norm(self.stem(x))).mean((2, 3))

    def config(self) -> dict[str, Any]:
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

    `drop` is how often the last block is left out for an image while training; the first hardly is.
    """
    make, left_out = LayerMaker(generator, dtype, device), probability("drop", drop)
    return ResNet(positive_int("depth", depth), positive_int("classes", classes), left_out, make)


class AlexNet(ImageModel):
    """Five convolutions and three linear layers, for images of 224 x 224: `alexnet`."""

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
        if self.resize:
            check_images(x, 3, None)
            x = F.interpolate(x, (224, 224), mode="bilinear", align_corners=False)
        check_images(x, 3, 224)
        return self.hidden(self.convolutions(x).flatten(1))

    def config(self) -> dict[str, Any]:
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

    `resize` scales images of any size to the 224 x 224 that it is made for.
    """
    make, left_out = LayerMaker(generator, dtype, device), probability("dropout", dropout)
    return AlexNet(positive_int("classes", classes), flag("resize", resize), left_out, make)
