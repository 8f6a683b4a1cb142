"""Image classifiers: the networks of the paper's MNIST and CIFAR-10 tables, from their definitions.

All take images (B, channels, height, width) and give logits (B, classes). `features(x)` is what
the last linear layer sees; `units` are the Hamiltonian parts and `smoothness()` their R_K.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hdnn.engine.kernels import pixels
from hdnn.errors import ShapeError, choose, flag, positive_int, probability
from hdnn.networks import BY_NAME, ODENetwork
from hdnn.networks.initial import Initial
from hdnn.networks.norm import BatchNorm
from hdnn.networks.unit import HamiltonianUnit

MNIST_STEPS = {"h1": 0.5, "h2": 0.5, "ms1": 0.4, "ms2": 0.4, "ms3": 0.4}
PADDINGS = ("end", "halves")
POOLS = ("flatten", "scaled", "mean")


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

    def smoothness(self) -> Tensor:
        """The sum of R_K over all Hamiltonian parts, zero if there are none."""
        found = [unit.smoothness() for unit in self.units]
        return torch.stack(found).sum() if found else self.linear.weight.new_zeros(())


class _Make:
    """Makes layers of one dtype on one device, with weights as PyTorch draws them."""

    def __init__(
        self,
        generator: torch.Generator | None,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
    ) -> None:
        checked = Initial("scaled", 1, generator, dtype, device)
        self.generator = generator
        self.like: dict[str, Any] = {"dtype": checked.dtype, "device": checked.device}
        self.options: dict[str, Any] = {**self.like, "generator": generator}

    def conv(self, inputs: int, outputs: int, kernel: int, **options: Any) -> nn.Conv2d:
        layer = nn.utils.skip_init(nn.Conv2d, inputs, outputs, kernel, **options, **self.like)
        return self._drawn(layer, inputs * kernel**2)

    def linear(self, inputs: int, outputs: int) -> nn.Linear:
        return self._drawn(nn.utils.skip_init(nn.Linear, inputs, outputs, **self.like), inputs)

    def norm(self, channels: int, activation: str = "identity") -> BatchNorm:
        return BatchNorm(channels, activation, **self.like)

    def he(self, layer: Any) -> Any:
        """The same layer with weights of variance 2 / fan-in, as ResNets begin with."""
        inputs = layer.weight[0].numel()
        draw = self._uniform(layer.weight.shape, (6 / inputs) ** 0.5)
        with torch.no_grad():
            layer.weight.copy_(draw)
        return layer

    def _drawn(self, layer: Any, inputs: int) -> Any:
        """Weights and bias uniform in +- 1 / sqrt(fan-in)."""
        with torch.no_grad():
            layer.weight.copy_(self._uniform(layer.weight.shape, inputs**-0.5))
            if layer.bias is not None:
                layer.bias.copy_(self._uniform(layer.bias.shape, inputs**-0.5))
        return layer

    def _uniform(self, shape: Sequence[int], bound: float) -> Tensor:
        if self.like["device"].type == "meta":  # as in `hdnn.networks.initial`
            return torch.empty(shape, device="meta")
        # In float32 and where the generator is, so that one seed is one network.
        g = self.generator
        where = self.like["device"] if g is None else g.device
        draw = torch.rand(shape, generator=g, dtype=torch.float32, device=where)
        return bound * (2 * draw - 1)


class MNISTNet(ImageModel):
    """Convolution, layers that mix the channels of each pixel, linear layer: `mnist_net`."""

    def __init__(
        self, network: str | None, layers: int, options: dict[str, Any], size: int, make: _Make
    ) -> None:
        super().__init__()
        channels, classes = options.pop("channels"), options.pop("classes")
        self.size = size
        self.stem = make.conv(1, channels, 3, padding=1)
        self.net = None if network is None else BY_NAME[network](channels, layers, **options)
        self.linear = make.linear(channels * size**2, classes)

    def features(self, x: Tensor) -> Tensor:
        _check_images(x, 1, self.size)
        y = self.stem(x).movedim(1, -1)  # K acts on the channels of each pixel
        return (y if self.net is None else self.net(y)).flatten(1)


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

    K is a matrix that mixes the channels of each pixel. `step` is 0.5 for "h1" and "h2", 0.4 for
    "ms1" (also "ms2", "ms3") if it is not given; `layers=0` or `network=None` leaves the hidden
    layers out. `net` is the hidden network.
    """
    make = _Make(generator, dtype, device)
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


class HDNNStar(ImageModel):
    """Convolution, Hamiltonian units with pooling between them, linear layer: `hdnn_star`."""

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
        make: _Make,
    ) -> None:
        super().__init__()
        self.padding, self.pool, self.inputs, self.size = padding, pool, inputs, size
        self.stem = make.conv(inputs, channels[0], 3, padding=1)
        self.stem_norm = make.norm(channels[0]) if stem_norm else None
        drops = iter(_rising(options.pop("drop"), sum(layers)))
        self.stages = nn.ModuleList(
            HamiltonianUnit(C, N, drop=list(islice(drops, N)), **options)
            for C, N in zip(channels, layers, strict=True)
        )
        pixels = 1 if pool == "mean" else (size // 2 ** len(channels)) ** 2
        self.linear = make.linear(channels[-1] * pixels, classes)

    def features(self, x: Tensor) -> Tensor:
        _check_images(x, self.inputs, self.size)
        y = self.stem(x)
        if self.stem_norm is not None:
            y = self.stem_norm(y)
        for unit in self.stages:
            assert isinstance(unit, HamiltonianUnit)
            y = _halved(unit(_padded(y, unit.channels, self.padding)))
        if self.pool == "mean":
            return y.mean((2, 3))
        return y.flatten(1) / (y.shape[2] if self.pool == "scaled" else 1)

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

    `layers` are those of each unit, or one number for all. After each unit the image is averaged
    over 2 x 2 pixels, and channels of zeros are added for the next: behind all others
    (`padding="end"`), or behind those of p and behind those of q ("halves"). The linear layer sees
    all pixels that are left (`pool="flatten"`), or these divided by the root of their number, so
    that it can bear higher rates ("scaled"), or their "mean". `drop` is how often the last layer is
    left out while training; the first hardly is. Other options are those of `hdnn.HamiltonianUnit`.
    """
    channels = [positive_int("channels", C) for C in channels]
    if not channels or any(a > b for a, b in pairwise(channels)):
        raise ShapeError(f"channels must grow from unit to unit, but got {tuple(channels)}.")
    if positive_int("size", size) % 2 ** len(channels):
        raise ShapeError(f"size {size} cannot be halved {len(channels)} times.")
    depths = list(layers) if isinstance(layers, (list, tuple)) else [layers] * len(channels)
    if len(depths) != len(channels):
        raise ShapeError(f"layers has {len(depths)} entries for {len(channels)} units.")
    make = _Make(generator, dtype, device)
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
    """H-DNN* for images of 28 x 28 in grey: two units with 3 x 3 kernels and pooling after each."""
    options: dict[str, Any] = {"step": step, "activation": activation, "norm": norm}
    options |= {"generator": generator, "dtype": dtype, "device": device, "stem_norm": stem_norm}
    return hdnn_star(network, layers, channels, inputs=1, size=28, **options)


class _Block(nn.Module):
    """x + F(x): two convolutions with normalisation; the shortcut has no weights."""

    def __init__(self, inputs: int, outputs: int, drop: float, make: _Make) -> None:
        super().__init__()
        self.drop = drop
        self.added, self.stride = outputs - inputs, 1 if inputs == outputs else 2
        first = {"stride": self.stride, "padding": 1, "bias": False}
        self.conv1 = make.he(make.conv(inputs, outputs, 3, **first))
        self.norm1 = make.norm(outputs, "relu")
        self.conv2 = make.he(make.conv(outputs, outputs, 3, padding=1, bias=False))
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

    def __init__(self, depth: int, classes: int, drop: float, make: _Make) -> None:
        super().__init__()
        self.drop = drop
        n, rest = divmod(depth - 2, 6)
        if rest or n < 1:
            raise ShapeError(f"depth must be 6 n + 2 with n >= 1, but got {depth}.")
        self.stem = make.he(make.conv(3, 16, 3, padding=1, bias=False))
        self.norm = make.norm(16, "relu")
        widths = [16] * (n + 1) + [32] * n + [64] * n
        drops = _rising(drop, 3 * n)
        self.blocks = nn.Sequential(
            *(_Block(a, b, q, make) for (a, b), q in zip(pairwise(widths), drops, strict=True))
        )
        self.linear = make.linear(64, classes)

    def features(self, x: Tensor) -> Tensor:
        _check_images(x, 3, None)
        return self.blocks(self.norm(self.stem(x))).mean((2, 3))

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
    make, left_out = _Make(generator, dtype, device), probability("drop", drop)
    return ResNet(positive_int("depth", depth), positive_int("classes", classes), left_out, make)


class AlexNet(ImageModel):
    """Five convolutions and three linear layers, for images of 224 x 224: `alexnet`."""

    def __init__(self, classes: int, resize: bool, dropout: float, make: _Make) -> None:
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
            _check_images(x, 3, None)
            x = F.interpolate(x, (224, 224), mode="bilinear", align_corners=False)
        _check_images(x, 3, 224)
        return self.hidden(self.convolutions(x).flatten(1))

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
    make, left_out = _Make(generator, dtype, device), probability("dropout", dropout)
    return AlexNet(positive_int("classes", classes), flag("resize", resize), left_out, make)


def _rising(drop: float, layers: int) -> list[float]:
    """How often each layer is left out: the later it comes, the more often."""
    return [drop * (k + 1) / layers for k in range(layers)]


def _halved(y: Tensor) -> Tensor:
    """The mean of each 2 x 2 pixels."""
    return pixels.Halve.apply(y) if pixels.fuse(y) else F.avg_pool2d(y, 2)


def _padded(y: Tensor, channels: int, padding: str) -> Tensor:
    """y with channels of zeros added."""
    more = channels - y.shape[1]
    if not more:
        return y
    if padding == "end":
        return F.pad(y, (0, 0, 0, 0, 0, more))
    return torch.cat([F.pad(half, (0, 0, 0, 0, 0, more // 2)) for half in y.chunk(2, 1)], 1)


def _check_images(x: Tensor, channels: int, size: int | None) -> None:
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
