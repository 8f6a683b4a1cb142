"""What layers of images are made of: shears f(s) = B^T sigma(A s + a), and stacks of them.

A shear is one convolution and one transposed; normalisation stands between A s + a and sigma. H1
adds f(y) to y; H2 adds f(q) to p, then f(p) to q.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hdnn.activations import Activation
from hdnn.operators import conv
from hdnn.shapes import per_layer

EPS = 1e-5  # of the normalisation, as in torch.nn.BatchNorm2d


class Part(NamedTuple):
    """What the shears of one kind are made of, for one layer or stacked for all (N, ...)."""

    A: Tensor  # (r, n/groups, k, k)
    a: Tensor  # (r,)
    B: Tensor  # (r, n/groups, k, k)
    gamma: Tensor | None = None  # (r,), for normalisation by batch statistics
    beta: Tensor | None = None

    def layers(self) -> Iterator[Part]:
        """The parts of each layer."""
        some = [t.unbind(0) for t in self if t is not None]
        return (Part(*one) for one in zip(*some, strict=True))


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


class Statistics(NamedTuple):
    """The batch statistics of all shears that normalise, in the order in which they run."""

    mean: Tensor  # (M, r)
    scale: Tensor  # (M, r), 1 / sqrt(var + eps)


def shear(s: Tensor, part: Part, kind: Kind) -> tuple[Tensor, list[Tensor]]:
    """f(s) = B^T sigma(A s + a), and the batch statistics that it used."""
    x, used = _inner(s, part, kind)
    f = kind.adjoint(part.B, kind.sigma(x))
    return (turned(f) if kind.swap else f), used


def shear_backward(s: Tensor, g: Tensor, part: Part, kind: Kind) -> tuple[Tensor, Tensor, Part]:
    """From s and the gradient g of f: f itself, the gradient of s, and those of the weights."""
    A, a, B, gamma, _ = part
    s, g = s.to(A.dtype), g.to(A.dtype)
    x = kind.apply(A, s, a)
    v, mean, scale = x, None, None
    if gamma is not None:
        v, (mean, scale) = _normalised(x, part)
    z = kind.sigma(v)
    d_v = kind.apply(B, g) * kind.sigma.slope(v)
    d_x, d_gamma, d_beta = d_v, None, None
    if gamma is not None:
        d_x, d_gamma, d_beta = torch.ops.aten.native_batch_norm_backward(
            d_v, x, gamma, None, None, mean, scale, True, EPS, [True, True, True]
        )
    d_A, d_B = kind.gradient(s, d_x, A), kind.gradient(g, z, B)
    found = Part(d_A, d_x.sum((0, 2, 3)), d_B, d_gamma, d_beta)
    return kind.adjoint(B, z), kind.adjoint(A, d_x), found


def _inner(s: Tensor, part: Part, kind: Kind) -> tuple[Tensor, list[Tensor]]:
    x = kind.apply(part.A, s.to(part.A.dtype), part.a)
    return (x, []) if part.gamma is None else _normalised(x, part)


def _normalised(x: Tensor, part: Part) -> tuple[Tensor, list[Tensor]]:
    v, mean, scale = torch.native_batch_norm(x, part.gamma, part.beta, None, None, True, 0.0, EPS)
    return v, [mean, scale]


def turned(f: Tensor) -> Tensor:
    """J f, for the halves of the channels."""
    f_p, f_q = f.chunk(2, 1)
    return torch.cat([-f_q, f_p], 1)


def h1(
    y: Tensor, part: Part, kind: Kind, factors: Tensor | None = None, *, keep: bool = False
) -> tuple[list[Tensor], Statistics | None]:
    """y + J K^T sigma(K y + b), layer by layer: y_N, or all states, and the batch statistics.

    `factors` (N, B) of the steps are for each layer and each image.
    """
    states, used = [y], []
    for one, by in zip(part.layers(), _each(factors, len(part.a)), strict=True):
        f, seen = shear(states[-1], one, kind)
        states = (states if keep else []) + [states[-1] + _times(by, f)]
        used += seen
    return states, _statistics(used)


def h2(
    y: Tensor,
    parts: Sequence[Part],
    kind: Kind,
    factors: Tensor | None = None,
    *,
    inverse: bool = False,
    keep: bool = False,
) -> tuple[list[Tensor], Statistics | None]:
    """p + f(q), then q + f(p), layer by layer, or back from y_N; `parts`: of q, then of p."""
    halves, states, used = list(y.chunk(2, 1)), [y] * keep, []
    for layer, by in _h2_layers(parts, factors, back=inverse):
        for half in (1, 0) if inverse else (0, 1):
            f, seen = shear(halves[1 - half], layer[half], kind)
            move = _times(by, f)
            halves[half] = halves[half] - move if inverse else halves[half] + move
            used += seen
        if keep:
            states.append(torch.cat(halves, 1))
    return (states if keep else [torch.cat(halves, 1)]), _statistics(used)


def _h2_layers(
    parts: Sequence[Part], factors: Tensor | None, *, back: bool
) -> list[tuple[tuple[Part, Part], Tensor | None]]:
    """Both parts of each layer, and the factors of its step, first to last or `back`."""
    layers = list(zip(*(part.layers() for part in parts), strict=True))
    found = list(zip(layers, _each(factors, len(layers)), strict=True))
    return found[::-1] if back else found


def _each(factors: Tensor | None, N: int) -> Sequence[Tensor | None]:
    """The factors of each layer: (B, 1, 1, 1)."""
    return per_layer(None if factors is None else factors[:, :, None, None, None], N)


def _times(by: Tensor | None, f: Tensor) -> Tensor:
    return f if by is None else by * f


def _statistics(used: list[Tensor]) -> Statistics | None:
    return Statistics(torch.stack(used[::2]), torch.stack(used[1::2])) if used else None


class _Reversible(torch.autograd.Function):
    """A stack of H2 layers that keeps y_N only; the backward pass rebuilds the rest from it.

    Made of differentiable operations, so that gradients of gradients are right as well.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        y: Tensor, kind: Kind, factors: Tensor | None, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        states, used = h2(y, _paired(weights), kind, factors)
        return (states[-1],) if used is None else (states[-1], *used)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, ctx.kind, factors, *weights = inputs
        ctx.save_for_backward(output[0], factors, *weights)
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        y, factors, *weights = ctx.saved_tensors
        with torch.autocast(y.device.type, enabled=False):
            halves, g = list(y.chunk(2, 1)), list(grads[0].chunk(2, 1))
            found: tuple[list[Part], list[Part]] = ([], [])
            for layer, by in _h2_layers(_paired(weights), factors, back=True):
                for half in (1, 0):
                    s = halves[1 - half]
                    f, d_s, d_part = shear_backward(s, _times(by, g[half]), layer[half], ctx.kind)
                    halves[half] = halves[half] - _times(by, f)
                    g[1 - half] = g[1 - half] + d_s
                    found[half].append(d_part)
            stacks = [
                torch.stack(one[::-1])
                for of_half in found
                for one in zip(*of_half, strict=True)
                if one[0] is not None
            ]
            return torch.cat(g, 1), None, None, *stacks


def h2_rebuilt(
    y: Tensor, parts: Sequence[Part], kind: Kind, factors: Tensor | None = None
) -> tuple[list[Tensor], Statistics | None]:
    """As `h2`, but the backward pass rebuilds all states from the last."""
    weights = [t for part in parts for t in part if t is not None]
    return ended(*_Reversible.apply(y, kind, factors, *weights))


def ended(y: Tensor, *statistics: Tensor) -> tuple[list[Tensor], Statistics | None]:
    """What a pass gives that knows its last state only."""
    return [y], Statistics(*statistics) if statistics else None


def _paired(weights: Sequence[Tensor]) -> tuple[Part, Part]:
    each = len(weights) // 2
    return Part(*weights[:each]), Part(*weights[each:])
