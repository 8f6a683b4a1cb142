"""Batch normalisation and then an activation, in fewer passes over memory on a GPU."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from hdnn import activations
from hdnn.engine import dispatch
from hdnn.engine.kernels import pixels


class BatchNorm(nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d`, and then an activation; its parameters have the same names."""

    def __init__(self, channels: int, activation: str = "identity", **options: Any) -> None:
        super().__init__(channels, **options)
        self.activation = activations.registered(activation).name

    def forward(self, input: Tensor) -> Tensor:
        if not self._fuses(input):
            return activations.get(self.activation)(super().forward(input))
        return self._fused(input)

    def after(self, layer: nn.Conv2d, x: Tensor) -> Tensor:
        """The same of layer(x), whose bias is not added where it would only be taken off again."""
        hooked = layer._forward_hooks or layer._forward_pre_hooks
        if layer.bias is None or hooked or not self._fuses(x):
            return self(layer(x))
        weight, more = layer.weight, -x.shape[1] % 8
        if more and layer.groups == 1:  # cuDNN is slow with three channels, and fast with eight
            x, weight = (F.pad(one, (0, 0, 0, 0, 0, more)) for one in (x, weight))
        return self._fused(layer._conv_forward(x, weight, None), layer.bias)

    def _fused(self, input: Tensor, bias: Tensor | None = None) -> Tensor:
        self.get_buffer("num_batches_tracked").add_(1)
        running = self.get_buffer("running_mean"), self.get_buffer("running_var")
        how = (self.eps, self.activation, running, self.momentum, bias)
        return pixels.Normalise.apply(input, self.weight, self.bias, *how)

    def _fuses(self, input: Tensor) -> bool:
        return (
            self.training
            and self.affine
            and self.track_running_stats
            and self.momentum is not None
            and input.numel() > self.num_features  # else let PyTorch raise its error
            and self.activation in dispatch.FUSED
            and pixels.fuse(input)
        )

    def extra_repr(self) -> str:
        parts = [f"{self.num_features} channels", f"eps = {self.eps:g}"]
        parts += [f"momentum = {self.momentum}"]
        return ", ".join(parts + [self.activation] * (self.activation != "identity"))
