"""What layers of images are made of: shears f(s) = B^T sigma(A s + a), and stacks of them.

A shear is one convolution and one transposed; normalisation stands between A s + a and sigma. H1
adds f(y) to y; H2 adds f(q) to p, then f(p) to q.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hdnn.activations import Activation
from hdnn.base.shapes import per_layer
from hdnn.engine.drift import check_reversal, drift_of
from hdnn.engine.units import segment
from hdnn.operators import conv


def _eps() -> float:
    """The eps of the normalisation, as in torch.nn.BatchNorm2d.

    A function, because `torch.compile(dynamic=True)` takes a global for a number that may change,
    and cannot pass that on to a segment which is run again.
    """
    return 1e-5


EPS = _eps()


class ShearWeights(NamedTuple):
    """The weights of the shears of one kind, for one layer or stacked for all (N, ...)."""

    A: Tensor  # (r, n/groups, k, k)
    a: Tensor  # (r,)
    B: Tensor  # (r, n/groups, k, k)
    gamma: Tensor | None = None  # (r,), for normalisation by batch statistics
    beta: Tensor | None = None

    def layers(self) -> Iterator[ShearWeights]:
        """The parts of each layer."""
        some = [t.unbind(0) for t in self if t is not None]
        return (ShearWeights(*one) for one in zip(*some, strict=True))

    def some(self, layers: slice) -> ShearWeights:
        """The stacks of some layers."""
        return ShearWeights(*(t[layers] for t in self if t is not None))


class Kind(NamedTuple):
    """How the shears of a unit are computed."""

    sigma: Activation
    groups: int
    padding: int
    swap: bool  # whether J is still to be applied to f

    def apply(self, K: Tensor, y: Tensor, bias: Tensor | None = None) -> Tensor:
        return conv.apply(K, y, self.groups, bias, self.padding)

    def adjoint(self, K: Tensor, z: Tensor) -> Tensor:
        return conv.adjoint(K, z, self.groups, self.padding)

    def gradient(self, y: Tensor, z: Tensor, K: Tensor) -> Tensor:
        return conv.gradient(y, z, K, self.groups, self.padding)


Layer: TypeAlias = tuple[tuple[ShearWeights, ...], Tensor | None]  # weights, factors of its step

Passed: TypeAlias = tuple[Tensor, ...]
"""The last state, and the batch statistics of all shears that normalise, if there are any.

These are the means (M, r) and 1 / sqrt(var + eps) (M, r), in the order in which shears run.
"""


class Inner(NamedTuple):
    """A s + a and what follows from it, up to sigma."""

    s: Tensor
    x: Tensor  # A s + a
    v: Tensor  # x normalised, or x itself
    used: list[Tensor]  # the batch statistics, if there are any


def shear(s: Tensor, part: ShearWeights, kind: Kind) -> tuple[Tensor, list[Tensor]]:
    """f(s) = B^T sigma(A s + a), and the batch statistics that it used."""
    inner = _inner(s, part, kind)
    return _outer(inner, part, kind), inner.used


def _inner(s: Tensor, part: ShearWeights, kind: Kind) -> Inner:
    A, a, _, gamma, beta = part
    s = s.to(A.dtype)
    x = kind.apply(A, s, a)
    if gamma is None:
        return Inner(s, x, x, [])
    v, *used = torch.native_batch_norm(x, gamma, beta, None, None, True, 0.0, _eps())
    return Inner(s, x, v, used)


def _outer(inner: Inner, part: ShearWeights, kind: Kind) -> Tensor:
    f = kind.adjoint(part.B, kind.sigma(inner.v))
    return turned(f) if kind.swap else f


def shear_backward(
    inner: Inner, g: Tensor, part: ShearWeights, kind: Kind
) -> tuple[Tensor, ShearWeights]:
    """The gradients of s and of the weights, from the gradient g of f."""
    s, x, v, used = inner
    A, _, B, gamma, _ = part
    g, wide = g.to(A.dtype), torch.promote_types(A.dtype, torch.float32)
    d_x = (kind.apply(B, g) * kind.sigma.slope(v.to(wide))).to(A.dtype)
    d_gamma = d_beta = None
    if gamma is not None:
        d_x, d_gamma, d_beta = torch.ops.aten.native_batch_norm_backward(
            d_x, x, gamma, None, None, *used, True, _eps(), [True, True, True]
        )
    d_A, d_B = kind.gradient(s, d_x, A), kind.gradient(g, kind.sigma(v), B)
    return kind.adjoint(A, d_x), ShearWeights(d_A, d_x.sum((0, 2, 3)), d_B, d_gamma, d_beta)


def turned(f: Tensor) -> Tensor:
    """J f, for the halves of the channels."""
    f_p, f_q = f.chunk(2, 1)
    return torch.cat([-f_q, f_p], 1)


def run(
    y: Tensor,
    parts: Sequence[ShearWeights],
    kind: Kind,
    factors: Tensor | None = None,
    *,
    inverse: bool = False,
    states: list[Tensor] | None = None,
) -> Passed:
    """y_N from y_0 layer by layer, or y_0 from y_N; `states` collects all of them.

    `parts` are the weights of H1, or those of q and of p for H2. `factors` (N, B) scale the step
    of each layer for each image.
    """
    halves, used, layers = list(y.chunk(len(parts), 1)), [], _layers(parts, factors)
    if states is not None:
        states.append(y)
    for layer in reversed(layers) if inverse else layers:
        used += _through(halves, layer, kind, inverse=inverse)
        if states is not None:
            states.append(_joined(halves))
    return _joined(halves), *_statistics(used)


def checkpointed(
    y: Tensor, parts: Sequence[ShearWeights], kind: Kind, factors: Tensor | None = None
) -> Passed:
    """As `run`, but only about sqrt(N) states are kept.

    The backward pass runs the layers between two of them again.
    """
    layers, n, used = _layers(parts, factors), len(parts), []
    halves, size = y.chunk(n, 1), segment(len(layers))
    for first in range(0, len(layers), size):
        again = partial(_segment, layers[first : first + size], kind)
        out = checkpoint(again, *halves, use_reentrant=False, preserve_rng_state=False)
        assert out is not None
        halves, used = out[:n], used + out[n:]
    return _joined(halves), *_statistics(used)


def _segment(layers: Sequence[Layer], kind: Kind, *halves: Tensor) -> list[Tensor]:
    moved = list(halves)
    used = [one for layer in layers for one in _through(moved, layer, kind)]
    return moved + used


def _through(
    halves: list[Tensor],
    layer: Layer,
    kind: Kind,
    *,
    inverse: bool = False,
    read: list[Tensor] | None = None,
) -> list[Tensor]:
    """Move the halves through a layer or back: the batch statistics. `read` collects inputs."""
    (parts, by), used = layer, []
    for target in range(len(parts))[:: -1 if inverse else 1]:
        source = halves[len(parts) - 1 - target]  # H2 is moved by the other half
        if read is not None:
            read.append(source)
        f, seen = shear(source, parts[target], kind)
        move = _times(by, f)
        halves[target] = halves[target] - move if inverse else halves[target] + move
        used += seen
    return used


def _layers(parts: Sequence[ShearWeights], factors: Tensor | None) -> list[Layer]:
    """The parts of each layer, and the factors of its step: (B, 1, 1, 1)."""
    layers = list(zip(*(part.layers() for part in parts), strict=True))
    each = per_layer(None if factors is None else factors[:, :, None, None, None], len(layers))
    return list(zip(layers, each, strict=True))


def _times(by: Tensor | None, f: Tensor) -> Tensor:
    return f if by is None else by * f


def _joined(halves: Sequence[Tensor]) -> Tensor:
    return halves[0] if len(halves) == 1 else torch.cat(list(halves), 1)


def _statistics(used: list[Tensor]) -> tuple[Tensor, ...]:
    return (torch.stack(used[::2]), torch.stack(used[1::2])) if used else ()


class _Reversible(torch.autograd.Function):
    """A stack of H2 layers that keeps y_0 and y_N only; the backward pass rebuilds the rest.

    The rebuilt y_1 is compared with the one computed from y_0; the first layer starts from y_0
    itself. Gradients of gradients start from y_0 too. The y_N that is kept is not the output, which
    may be changed in place.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        y: Tensor, kind: Kind, check: bool, factors: Tensor | None, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        y_N, *statistics = run(y, _paired(weights), kind, factors)
        return y_N, y_N.clone(), *statistics

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        y, ctx.kind, ctx.check, factors, *weights = inputs
        ctx.save_for_backward(y, output[1], factors, *weights)
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        y, y_N, factors, *weights = ctx.saved_tensors
        with torch.autocast(y.device.type, enabled=False):
            layers, kind = _layers(_paired(weights), factors), ctx.kind
            # y_N alone could not give gradients of these gradients, if they will be asked for.
            known = len(layers) if torch.is_grad_enabled() else 1
            read, start = [], list(y.chunk(2, 1))
            for layer in layers[:known]:
                _through(start, layer, kind, read=read)
            halves, g = list(y_N.chunk(2, 1)), list(grads[0].chunk(2, 1))
            found: tuple[list[ShearWeights], list[ShearWeights]] = ([], [])
            for j in reversed(range(len(layers))):
                parts, by = layers[j]
                for target in (1, 0):
                    source, part = 1 - target, parts[target]
                    inner = _inner(read.pop() if j < known else halves[source], part, kind)
                    d_s, d_part = shear_backward(inner, _times(by, g[target]), part, kind)
                    g[source] = g[source] + d_s
                    found[target].append(d_part)
                    if j >= known:
                        move = _times(by, _outer(inner, part, kind))
                        halves[target] = halves[target] - move
            stacks = [
                torch.stack(one[::-1])
                for of_half in found
                for one in zip(*of_half, strict=True)
                if one[0] is not None
            ]
            gradients = [_joined(g), *stacks]
            if ctx.check and known < len(layers) and y.numel():
                drift = drift_of(_joined(start), _joined(halves), y_N)
                gradients = check_reversal(drift, gradients)
            return gradients[0], None, None, None, *gradients[1:]


def rebuilt(
    y: Tensor, parts: Sequence[ShearWeights], kind: Kind, factors: Tensor | None, check: bool
) -> Passed:
    """As `run` for H2, but the backward pass rebuilds all states from the last."""
    weights = [t for part in parts for t in part if t is not None]
    y_N, _, *statistics = _Reversible.apply(y, kind, check, factors, *weights)
    return y_N, *statistics


def _paired(weights: Sequence[Tensor]) -> tuple[ShearWeights, ShearWeights]:
    each = len(weights) // 2
    return ShearWeights(*weights[:each]), ShearWeights(*weights[each:])
