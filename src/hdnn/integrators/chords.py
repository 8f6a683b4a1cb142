"""The mean of sigma between two points: the slope of a chord of its integral s.

    chord(a, b) = (s(b) - s(a)) / (b - a),   and sigma(a) where a = b

The energy sum s(K y + b) changes by K^T chord(K y + b, K y' + b) times y' - y, exactly: that is
its average discrete gradient. Close points are integrated by Gauss's rule, where a difference of s
would lose digits; far points by s, where a rule would not be exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from hdnn import activations
from hdnn.activations import Activation

NEAR = 0.5  # half the distance of two points from which on the difference of s is taken
# Up to there Gauss's rule of ten points is exact to rounding for what is smooth as these are. For
# others it is compared with a smaller rule: where they differ, there is a kink between the points.
SMOOTH = ("tanh", "sigmoid", "softplus", "gelu", "silu", "sin")
NODES = (10, 7)
AGREE = 1e-11


@dataclass(frozen=True)
class Chord:
    """chord(z, z') as a function of z' that a Newton solver can use in the place of sigma.

    It takes u = (z', z) and returns (chord(z, z'), 0), so that z can go along as a part of what
    the solver calls `a`; `slope` is that in z'. The first `linear` rows are chords of the identity,
    whatever sigma is: those of a quadratic part of the energy.
    """

    sigma: Activation
    linear: int = 0

    @property
    def name(self) -> str:
        return f"{CHORD}{f'{self.linear} x ' if self.linear else ''}{self.sigma.name}"

    # The derivative in z' is the mean of t sigma' for t from 0 to 1.

    @property
    def s_min(self) -> float:
        return min(self.sigma.s_min, 1 if self.linear else self.sigma.s_min) / 2

    @property
    def s_max(self) -> float:
        return max(self.sigma.s_max, 1 if self.linear else self.sigma.s_max) / 2

    @property
    def S(self) -> float:
        return max(self.sigma.S, 1 if self.linear else self.sigma.S) / 2

    def __call__(self, u: Tensor) -> Tensor:
        after, before = u.chunk(2, -1)
        value = self.between(before, after)
        return torch.cat([value, torch.zeros_like(value)], -1)

    def slope(self, u: Tensor) -> Tensor:
        after, before = u.chunk(2, -1)
        value = self.rate(before, after)
        return torch.cat([value, torch.zeros_like(value)], -1)

    def between(self, before: Tensor, after: Tensor) -> Tensor:
        """chord(z, z') row by row."""
        return self._rows(chord, before, after)

    def rate(self, before: Tensor, after: Tensor) -> Tensor:
        """Its derivative in z'; with the two swapped, that in z."""
        return self._rows(chord_slope, before, after)

    def _rows(self, function: Any, before: Tensor, after: Tensor) -> Tensor:
        k = self.linear
        if not k:
            return function(self.sigma, before, after)
        linear = function(activations.get("identity"), before[..., :k], after[..., :k])
        return torch.cat([linear, function(self.sigma, before[..., k:], after[..., k:])], -1)


CHORD = "chord of "


def named(name: str) -> Activation | Chord:
    """An activation or a chord by its name, which is all that an operator can be given."""
    of = name.removeprefix(CHORD)
    if of == name:
        return activations.get(of)
    count, _, sigma = of.rpartition(" x ")
    return Chord(activations.get(sigma), int(count or 0))


def pulled(sigma: Activation | Chord, u: Tensor, w: Tensor) -> Tensor:
    """The gradient in u of the scalar product of w and sigma(u)."""
    if isinstance(sigma, Activation):
        return sigma.slope(u) * w
    (after, before), w = u.chunk(2, -1), w.chunk(2, -1)[0]
    sides = sigma.rate(before, after), sigma.rate(after, before)
    return torch.cat([side * w for side in sides], -1)


def pushed(sigma: Activation | Chord, u: Tensor, du: Tensor) -> Tensor:
    """The change of sigma(u) when u changes by du."""
    if isinstance(sigma, Activation):
        return sigma.slope(u) * du
    (after, before), (d_after, d_before) = u.chunk(2, -1), du.chunk(2, -1)
    change = sigma.rate(before, after) * d_after + sigma.rate(after, before) * d_before
    return torch.cat([change, torch.zeros_like(change)], -1)


def swapped(sigma: Activation | Chord, u: Tensor) -> Tensor:
    """u as the inverse of a layer has it: of a chord, both ends change places."""
    return u if isinstance(sigma, Activation) else torch.cat(u.chunk(2, -1)[::-1], -1)


def chord(sigma: Activation, a: Tensor, b: Tensor) -> Tensor:
    """(s(b) - s(a)) / (b - a), to rounding for any two points; sigma(a) where a = b."""
    m, d = 0.5 * a + 0.5 * b, 0.5 * b - 0.5 * a
    if sigma.name == "identity":
        return m
    if sigma.name == "relu":
        same = d == 0
        rise = (torch.relu(b) - torch.relu(a)) / torch.where(same, 1, b - a)
        return 0.5 * (torch.relu(a) + torch.relu(b)) * torch.where(same, 1, rise)
    near, value = _mean(sigma, "sigma", m, d)
    apart = torch.where(near, 1, b - a)
    if sigma.name == "tanh":  # log cosh x = |x| + log(1 + exp(-2 |x|)) - log 2
        rest = _tail(b) - _tail(a)
        return torch.where(near, value, (_size(b) - _size(a) + rest) / apart)
    return torch.where(near, value, (sigma.integral(b) - sigma.integral(a)) / apart)


def chord_slope(sigma: Activation, a: Tensor, b: Tensor) -> Tensor:
    """The derivative of chord(a, b) in b."""
    m, d = 0.5 * a + 0.5 * b, 0.5 * b - 0.5 * a
    if sigma.name == "identity":
        return torch.full_like(m, 0.5)
    if sigma.name == "relu":
        near, value = (a > 0) == (b > 0), 0.5 * sigma.slope(m)  # both on one side of the kink
    else:
        near, value = _mean(sigma, "slope", m, d)
    return torch.where(near, value, (sigma(b) - chord(sigma, a, b)) / torch.where(near, 1, b - a))


def _mean(sigma: Activation, name: str, m: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of sigma, or of t times its slope, over m - d .. m + d; and where it is exact."""
    near = d.abs() < NEAR
    step, function = torch.where(near, d, 0), getattr(sigma, name)
    found = []
    for nodes in NODES[: 1 if sigma.name in SMOOTH else 2]:
        points, weights = _gauss(nodes)
        t = 0.5 * (1 + points)
        rate = 0.5 * weights * (t if name == "slope" else 1)
        x, rate = (torch.from_numpy(v).to(m).view(-1, *[1] * m.ndim) for v in (points, rate))
        found.append((rate * function(m + x * step)).sum(0))
    if len(found) > 1:
        tol = max(AGREE, 16 * torch.finfo(m.dtype).eps)
        near &= (found[0] - found[1]).abs() <= tol * (1 + found[0].abs())
    return near, found[0]


@cache
def _gauss(nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Points and weights of Gauss's rule; not at import, as NumPy loads its polynomials for it."""
    return np.polynomial.legendre.leggauss(nodes)


def _size(x: Tensor) -> Tensor:
    return torch.where(x < 0, -x, x)


def _tail(x: Tensor) -> Tensor:
    return F.softplus(-2 * _size(x), threshold=40.0)
