"""H-DNN*: Hamiltonian units with pooling between them, for the paper's CIFAR-10 table."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hdnn.engine.kernels import pixels
from hdnn.errors import ShapeError, choose, flag, positive_int, probability
from hdnn.models.base import ImageModel, LayerMaker, check_images, rising
from hdnn.networks import HamiltonianUnit

PADDINGS = ("end", "halves")
POOLS = ("flatten", "scaled", "mean")


class HDNNStar(ImageModel):
    """Convolution, Hamiltonian units with pooling between them, linear layer, as of `hdnn_star`.

    Args:
        channels: those of each unit.
        layers: those of each unit.
        options: those of `hdnn.HamiltonianUnit`, for all units.
        stem_norm: whether batch normalisation follows the first convolution.
        padding: where channels of zeros are added, "end" or "halves".
        pool: what the linear layer sees, "flatten", "scaled" or "mean".
        inputs: how many channels an image has.
        size: height and width of the images.
        classes: how many classes there are.
        make: what makes the other layers, and draws their weights.

    Examples:
        >>> import hdnn
        >>> model = hdnn.models.hdnn_star("h2", layers=2, channels=(4, 8))
        >>> isinstance(model, hdnn.models.HDNNStar)
        True
        >>> [unit.channels for unit in model.units]
        [4, 8]
    """

    def __init__(
        self,
        channels: Sequence[int],
        layers: Sequence[int],
        options: dict[str, Any],
        *,
        stem_norm: bool,
        padding: str,
        pool: str,
        inputs: int,
        size: int,
        classes: int,
        make: LayerMaker,
    ) -> None:
        super().__init__()
        self.padding, self.pool, self.inputs, self.size = padding, pool, inputs, size
        self.stem = make.conv(inputs, channels[0], 3, padding=1)
        self.stem_norm = make.norm(channels[0]) if stem_norm else None
        drops = iter(rising(options.pop("drop"), sum(layers)))
        self.stages = nn.ModuleList(
            HamiltonianUnit(C, N, drop=list(islice(drops, N)), **options)
            for C, N in zip(channels, layers, strict=True)
        )
        pixels = 1 if pool == "mean" else (size // 2 ** len(channels)) ** 2
        self.linear = make.linear(channels[-1] * pixels, classes)

    def features(self, x: Tensor) -> Tensor:
        """What `pool` makes of the pixels after the last unit: (B, features)."""
        check_images(x, self.inputs, self.size)
        y = self.stem(x) if self.stem_norm is None else self.stem_norm.after(self.stem, x)
        for unit in self.stages:
            assert isinstance(unit, HamiltonianUnit)
            y = halved(unit(padded(y, unit.channels, self.padding)))
        if self.pool == "mean":
            return y.mean((2, 3))
        return y.flatten(1) / (y.shape[2] if self.pool == "scaled" else 1)

    def config(self) -> dict[str, Any]:
        """The arguments of `hdnn_star` that make this classifier again."""
        units = [unit for unit in self.stages if isinstance(unit, HamiltonianUnit)]
        first, layers = units[0], [unit.layers for unit in units]
        return {
            "network": first.network,
            "activation": first.activation,
            "norm": first.norm,
            "backprop": first.backprop,
            "step": list(first.step) if isinstance(first.step, tuple) else first.step,
            "layers": layers[0] if len(set(layers)) == 1 else layers,
            "channels": [unit.channels for unit in units],
            "stem_norm": self.stem_norm is not None,
            "drop": units[-1].drop[-1],
            "padding": self.padding,
            "pool": self.pool,
            "inputs": self.inputs,
            "size": self.size,
            **super().config(),
        }

    def extra_repr(self) -> str:
        return f"padding = {self.padding!r}, pool = {self.pool!r}"


def hdnn_star(
    network: str = "h1",
    layers: int | Sequence[int] = 6,
    channels: Sequence[int] = (32, 64, 112),
    *,
    step: float = 0.1,
    activation: str = "relu",
    norm: str = "none",
    reversible: bool | None = None,
    backprop: str = "auto",
    drop: float = 0.0,
    init: str = "scaled",
    stem_norm: bool = False,
    padding: str = "end",
    pool: str = "flatten",
    inputs: int = 3,
    size: int = 32,
    classes: int = 10,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> HDNNStar:
    """H-DNN* of the CIFAR-10 table: 3 -> 32 channels, three units, 973,930 parameters.

    After each unit the image is averaged over 2 x 2 pixels, and channels of zeros are added for the
    next unit. More on the options of units is in `hdnn.HamiltonianUnit`.

    Args:
        network: "h1" or "h2".
        layers: those of each unit, or one number for all.
        channels: those of each unit, never fewer than before.
        step: h of all units.
        activation: sigma, the name of one of `hdnn.activations.names()`.
        norm: where units have batch normalisation: "none", "inside", "after" or "both".
        reversible: True is short for backprop="reversible", False for "stored".
        backprop: what the backward pass starts from: "auto", "stored", "checkpoint" or
            "reversible".
        drop: how often the last layer is left out for an image in training; the first hardly is.
        init: "scaled" draws K from N(0, 1/fan-in) with b = 0; "paper" draws all from N(0, 1).
        stem_norm: put batch normalisation behind the first convolution.
        padding: where channels of zeros are added: after all others ("end"), or half after those of
            p and half after those of q ("halves").
        pool: the linear layer sees all remaining pixels ("flatten"), these divided by the root of
            their number, which allows higher learning rates ("scaled"), or their "mean".
        inputs: how many channels an image has.
        size: height and width of the images; each unit halves them.
        classes: how many classes there are.
        generator: of the first weights; by default PyTorch's global one.
        dtype: of the weights; by default `torch.get_default_dtype()`.
        device: of the weights; by default `torch.get_default_device()`.

    Returns:
        The model, for images (B, inputs, size, size).

    Raises:
        ShapeError: if a size is no whole number >= 1, channels are odd or become fewer, `size`
            cannot be halved for each unit, or there are not as many `layers` as units.
        StepError: if `step` is not finite and > 0.
        OptionError: if a name is not known, a flag is neither True nor False, or `drop` is not in
            `[0, 1)`.

    Examples:
        >>> import torch
        >>> import hdnn
        >>> model = hdnn.models.hdnn_star()
        >>> sum(p.numel() for p in model.parameters())
        973930
        >>> model(torch.randn(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    channels = [positive_int("channels", C) for C in channels]
    if not channels or any(a > b for a, b in pairwise(channels)):
        raise ShapeError(f"channels must grow from unit to unit, but got {tuple(channels)}.")
    if positive_int("size", size) % 2 ** len(channels):
        raise ShapeError(f"size {size} cannot be halved {len(channels)} times.")
    depths = list(layers) if isinstance(layers, (list, tuple)) else [layers] * len(channels)
    if len(depths) != len(channels):
        raise ShapeError(f"layers has {len(depths)} entries for {len(channels)} units.")
    make = LayerMaker(generator, dtype, device)
    options: dict[str, Any] = {"network": network, "step": step, "activation": activation}
    options |= {"norm": norm, "reversible": reversible, "backprop": backprop}
    options |= {"init": init, **make.options}
    options["drop"] = probability("drop", drop)
    return HDNNStar(
        channels,
        [positive_int("layers", N) for N in depths],
        options,
        stem_norm=flag("stem_norm", stem_norm),
        padding=choose("padding", padding, PADDINGS),
        pool=choose("pool", pool, POOLS),
        inputs=positive_int("inputs", inputs),
        size=size,
        classes=positive_int("classes", classes),
        make=make,
    )


def mnist_conv(
    network: str = "h2",
    layers: int = 4,
    channels: Sequence[int] = (32, 64),
    *,
    step: float = 0.5,
    activation: str = "relu",
    norm: str = "inside",
    stem_norm: bool = True,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> HDNNStar:
    """`hdnn_star` for images of 28 x 28 in grey: two units with 3 x 3 kernels, pooling after each.

    Args:
        network: "h1" or "h2".
        layers: those of each unit.
        channels: those of each unit, never fewer than before.
        step: h of all units.
        activation: sigma, the name of one of `hdnn.activations.names()`.
        norm: where units have batch normalisation: "none", "inside", "after" or "both".
        stem_norm: put batch normalisation behind the first convolution.
        generator: of the first weights; by default PyTorch's global one.
        dtype: of the weights; by default `torch.get_default_dtype()`.
        device: of the weights; by default `torch.get_default_device()`.

    Returns:
        The model, for images (B, 1, 28, 28).

    Raises:
        ShapeError: if a size is no whole number >= 1, channels are odd or become fewer, or there
            are more than two units.
        StepError: if `step` is not finite and > 0.
        OptionError: if a name is not known, or `stem_norm` is neither True nor False.

    Examples:
        >>> import torch
        >>> import hdnn
        >>> model = hdnn.models.mnist_conv("h2", layers=2, channels=(8, 16))
        >>> model(torch.randn(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """
    options: dict[str, Any] = {"step": step, "activation": activation, "norm": norm}
    options |= {"generator": generator, "dtype": dtype, "device": device, "stem_norm": stem_norm}
    return hdnn_star(network, layers, channels, inputs=1, size=28, **options)


def halved(y: Tensor) -> Tensor:
    """The means of all blocks of 2 x 2 pixels."""
    return pixels.Halve.apply(y) if pixels.fuse(y) else F.avg_pool2d(y, 2)


def padded(y: Tensor, channels: int, padding: str) -> Tensor:
    """y with channels of zeros added."""
    more = channels - y.shape[1]
    if not more:
        return y
    if padding == "end":
        return F.pad(y, (0, 0, 0, 0, 0, more))
    return torch.cat([F.pad(half, (0, 0, 0, 0, 0, more // 2)) for half in y.chunk(2, 1)], 1)
