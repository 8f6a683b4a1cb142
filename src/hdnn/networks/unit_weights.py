"""The weights of a Hamiltonian unit, and the shears that they make."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hdnn import activations
from hdnn.activations import Activation
from hdnn.errors import OptionError, ShapeError
from hdnn.networks.initial import Initial
from hdnn.networks.shears import EPS, Kind, ShearWeights
from hdnn.networks.stack import LayerStack
from hdnn.networks.weights import filled, refresh, smoothness, store
from hdnn.operators import block_sparse, conv
from hdnn.sparsity import Sparsity

NORMALISING = ("gamma", "beta", "mean", "var")
MOMENTUM = 0.1  # of the normalisation, as in torch.nn.BatchNorm2d


class UnitWeights(LayerStack):
    """K and b of each half, stacked over layers, and the normalisation between K y + b and sigma.

    If K is block-sparse, only its free entries are stored.
    """

    channels: int
    layers: int
    network: str
    norm: str
    kernel: int
    groups: int
    padding: int
    activation: str
    step: float | tuple[float, ...]
    halves: tuple[str, ...]  # whose weights each shear uses
    init: str
    _shape: tuple[int, ...]  # of K

    def _free(self, sparsity: Sparsity | Tensor) -> Tensor:
        """The free entries of K (r, n, k, k)."""
        given = sparsity if isinstance(sparsity, Sparsity) else Sparsity(sparsity)
        if self.groups > 1 or given.R.ndim != 2:
            raise OptionError("sparsity takes one pattern R (M, M) for all layers, and groups=1.")
        sizes, R = given.node_sizes(self.channels // 2), given.R
        if sum(sizes) != self.channels // 2:
            raise ShapeError(f"node sizes {sizes} must add up to C/2 = {self.channels // 2}.")
        if self.network == "h1":  # node i owns (p[i], q[i])
            sizes, R = sizes * 2, R.tile(2, 2)
        return block_sparse.mask(R, sizes, sizes)[:, :, None, None].expand(self._shape)

    def _initial(self, *options: Any) -> Initial:
        return Initial(self.init, math.prod(self._shape[2:]), *options)

    def _first(self, half: str, initial: Initial) -> Iterator[tuple[str, Tensor]]:
        """The first values of all tensors of one half."""
        N, width, *_ = self._shape
        yield named("K", half), initial.K(*self._shape)
        yield named("b", half), initial.b(N, width)
        if self.normed:
            ones, zeros = torch.ones(N, width), torch.zeros(N, width)
            for name, value in zip(NORMALISING, (ones, zeros, zeros, ones), strict=True):
                yield named(name, half), initial.constant(value)

    def _add(self, half: str, initial: Initial, free: Tensor | None) -> None:
        for name, value in self._first(half, initial):
            if name[0] == "K" and free is not None:
                store(self, name, value, free)
            elif name.startswith(("mean", "var")):
                self.register_buffer(name, value)
            else:
                self.register_parameter(name, nn.Parameter(value))

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Begin again: all weights are drawn as the constructor draws them.

        For a unit that was made on the meta device, as FSDP does it, after `to_empty`.

        Args:
            generator: what they are drawn from; by default PyTorch's global generator.
        """
        b = getattr(self, named("b", self.halves[0]))
        initial = self._initial(generator, b.dtype, b.device)
        for half in self.halves[::-1]:
            for name, value in self._first(half, initial):
                self.assign(name, value)

    def assign(self, name: str, value: Tensor) -> None:
        """Overwrite one stack of weights, or of means and variances, in its own memory.

        Args:
            name: one of `names_by_layer()`, such as "K" or "b_p".
            value: the new numbers, (N, ...).
        """
        if name[0] == "K" and self.sparse:
            value = block_sparse.values(value, self.get_buffer(f"_{name}_index"))
            name = f"{name}_free"
        self.write(name, value)

    def names_by_layer(self) -> tuple[str, ...]:
        """The weights that each layer has of its own, by the names under which they are read."""
        names = ("K", "b", *NORMALISING) if self.normed else ("K", "b")
        return tuple(named(name, half) for half in self.halves[::-1] for name in names)

    def _whole_shape(self, name: str) -> tuple[int, ...]:
        return self._shape

    @property
    def _sigma(self) -> Activation:
        return activations.get(self.activation)

    @property
    def normed(self) -> bool:
        """Whether normalisation stands between K y + b and sigma."""
        return self.norm in ("inside", "both")

    @property
    def sparse(self) -> bool:
        """Whether only the free entries of a block-sparse K are stored."""
        return f"_{named('K', self.halves[0])}_index" in self._buffers

    def weight(self, name: str) -> Tensor:
        """The stack of that name; of a block-sparse K the whole of it, zeros included."""
        refresh(self)
        if name.startswith("K") and self.sparse:
            return filled(self, name, self._shape)
        return getattr(self, name)

    def _parts(self, work: torch.dtype, raw: Sequence[Tensor]) -> list[ShearWeights]:
        """The shears in the order in which they run, for convolutions in the dtype `work`."""
        each = len(raw) // len(self.halves)
        return [
            self._part(half, work, *raw[k * each : (k + 1) * each])
            for k, half in enumerate(self.halves)
        ]

    def _part(
        self,
        half: str,
        work: torch.dtype,
        K: Tensor,
        b: Tensor,
        gamma: Tensor | None = None,
        beta: Tensor | None = None,
    ) -> ShearWeights:
        sign = -1 if half == "q" else 1
        if isinstance(self.step, tuple):
            B = torch.stack([sign * h * one for h, one in zip(self.step, K, strict=True)])
        else:
            B = (sign * self.step) * K
        if self.network == "h1" and self.groups == 1:  # J swaps the halves of what comes out
            B_p, B_q = B.chunk(2, 2)
            B = torch.cat([-B_q, B_p], 2)
        A = K
        if gamma is not None and beta is not None and not self.training:
            # An affine map of each channel, which is merged into A and a.
            mean, var = (self.get_buffer(named(name, half)) for name in ("mean", "var"))
            scale = gamma * (var + EPS).rsqrt()
            A, b = scale[:, :, None, None, None] * K, scale * (b - mean) + beta
            gamma = beta = None
        return ShearWeights(A.to(work), b.to(work), B.to(work), gamma, beta)

    def smoothness(self) -> Tensor:
        """The regulariser `R_K` of this unit's own K and b: see `hdnn.regularization`."""
        stacks = [
            torch.cat([self.weight(named(name, half)).flatten(1) for half in self.halves], 1)
            for name in ("K", "b")
        ]
        return smoothness(stacks[0], stacks[1], self.step)

    @property
    def h(self) -> float | tuple[float, ...]:
        """The step: a float, or one a layer."""
        return self.step

    def smooth_leaves(self) -> list[tuple[str, float]]:
        """Names of weights whose jumps from layer to layer make up R_K, once each."""
        return [(named(n, half), 1.0) for half in self.halves for n in ("K", "b")]

    def norms(self, size: int | tuple[int, int]) -> dict[str, Tensor]:
        """The spectral norm of each layer's K, (N,), by its name.

        Args:
            size: height and width of the images, or one number for both.
        """
        names = [named("K", half) for half in self.halves[::-1]]
        options: dict[str, Any] = {"groups": self.groups, "padding": self.padding}
        return {name: conv.norm(self.weight(name), size, **options) for name in names}

    def _raw(self) -> list[Tensor]:
        """The weights of each half, as the module holds them."""
        names = ("K", "b", "gamma", "beta") if self.normed else ("K", "b")
        return [self.weight(named(name, half)) for half in self.halves for name in names]

    def _kind(self) -> Kind:
        swap = self.network == "h1" and self.groups > 1
        return Kind(self._sigma, self.groups, self.padding, swap)

    @torch.no_grad()
    def _remember(self, count: int, mean: Tensor, scale: Tensor) -> None:
        """Move the running means and variances towards those of this batch: 1 / scale^2 - eps."""
        unbiased = count / max(count - 1, 1)
        for k, half in enumerate(self.halves):
            one = slice(k, None, len(self.halves))
            var = unbiased * (scale[one].pow(-2) - EPS)
            for name, seen in (("mean", mean[one]), ("var", var)):
                running = self.get_buffer(named(name, half))
                kept = [(running[j], running[j].clone()) for j in self.frozen]
                running.lerp_(seen.to(running.dtype), MOMENTUM)
                for now, before in kept:
                    now.copy_(before)


def named(name: str, half: str) -> str:
    return f"{name}_{half}" if half else name
