"""The mean of sigma between two points: the slope of a chord of its integral s.

    chord(a, b) = (s(b) - s(a)) / (b - a),   and sigma(a) where a = b

The energy sum s(K y + b) changes by K^T chord(K y + b, K y' + b) times y' - y, exactly: that is
its average discrete gradient. Close points are integrated by Gauss's rule, where a difference of s
would lose digits; far points by s, where a rule would not be exact.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from itertools import groupby
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
# sigma(x) = x + sigma(-x): relu and what fades away on both sides. Far from 0 the integrals of
# these are x^2 / 2 and something small, which a difference of them would lose.
BENT = ("softplus", "gelu", "silu")
NODES = (10, 7)
AGREE = 1e-11


@dataclass(frozen=True)
class Chord:
    """chord(z, z') as a function of z' that a Newton solver can use in the place of sigma.

    It takes u = (z', z) and returns (chord(z, z'), 0), so that z can go along as a part of what
    the solver calls `a`; `slope` is that in z'. `rows` has an activation a row, or one for all.
    """

    rows: tuple[Activation, ...]

    @property
    def name(self) -> str:
        if len(self.rows) == 1:
            return CHORD + self.rows[0].name
        return CHORDS + json.dumps([(sigma.name, count) for sigma, count in self.runs])

    @property
    def runs(self) -> list[tuple[Activation, int]]:
        """Activations of rows that follow each other, and how many rows they are."""
        return [(sigma, len([*same])) for sigma, same in groupby(self.rows)]

    # The derivative in z' is the mean of t sigma' for t from 0 to 1.

    @property
    def s_min(self) -> float:
        return min(sigma.s_min for sigma in self.rows) / 2

    @property
    def s_max(self) -> float:
        return max(sigma.s_max for sigma in self.rows) / 2

    @property
    def S(self) -> float:
        return max(sigma.S for sigma in self.rows) / 2

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
        return self.each(chord, before, after)

    def rate(self, before: Tensor, after: Tensor) -> Tensor:
        """Its derivative in z'; with the two swapped, that in z."""
        return self.each(chord_slope, before, after)

    def sides(self, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """chord(z, z'), its derivative in z', and that in z: quicker than one by one."""
        found = self._by_run(chord_sides, before, after)
        value, end, start = (torch.cat(each, -1) for each in zip(*found, strict=True))
        return value, end, start

    def each(self, function: Any, *z: Tensor) -> Tensor:
        """A function of an activation and of rows, for each row with its own activation."""
        return torch.cat(self._by_run(function, *z), -1)

    def _by_run(self, function: Any, *z: Tensor) -> list[Any]:
        if len(self.rows) == 1:
            return [function(self.rows[0], *z)]
        runs = self.runs
        parts = zip(*(t.split([count for _, count in runs], -1) for t in z), strict=True)
        return [function(sigma, *part) for (sigma, _), part in zip(runs, parts, strict=True)]


CHORD, CHORDS = "chord of ", "chords of "


def named(name: str) -> Activation | Chord:
    """An activation or a chord by its name, which is all that an operator can be given."""
    if name.startswith(CHORDS):
        runs = json.loads(name.removeprefix(CHORDS))
        return Chord(tuple(activations.get(of) for of, count in runs for _ in range(count)))
    of = name.removeprefix(CHORD)
    return activations.get(of) if of == name else Chord((activations.get(of),))


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
    if sigma.name not in SMOOTH:
        near = near & _agrees(value, sigma.integral(a), sigma.integral(b), b - a)
    apart = torch.where(near, 1, b - a)
    if sigma.name == "tanh":  # log cosh x = |x| + log(1 + exp(-2 |x|)) - log 2
        rest = _tail(b) - _tail(a)
        return torch.where(near, value, (_size(b) - _size(a) + rest) / apart)
    if sigma.name in BENT:
        bend = chord(activations.get("relu"), a, b)
        return torch.where(near, value, bend + _faded(sigma, a, b, apart))
    if sigma.name == "sigmoid":  # its integral is relu and something that fades away
        rest = sigma.integral(-_size(b)) - sigma.integral(-_size(a))
        return torch.where(near, value, (torch.relu(b) - torch.relu(a) + rest) / apart)
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
    if sigma.name not in (*SMOOTH, "relu"):
        near = near & _agrees(value, chord(sigma, a, b), sigma(b), b - a)
    apart = torch.where(near, 1, b - a)
    if sigma.name in BENT:
        bend = chord_slope(activations.get("relu"), a, b)
        rest = (sigma(-_size(b)) - _faded(sigma, a, b, apart)) / apart
        return torch.where(near, value, bend + rest)
    return torch.where(near, value, (sigma(b) - chord(sigma, a, b)) / apart)


def chord_sides(sigma: Activation, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """chord(a, b), and its derivatives in b and in a."""
    m, d = 0.5 * a + 0.5 * b, 0.5 * b - 0.5 * a
    if sigma.name == "identity":
        half = torch.full_like(m, 0.5)
        return m, half, half
    if sigma.name not in SMOOTH:
        return chord(sigma, a, b), chord_slope(sigma, a, b), chord_slope(sigma, b, a)
    near = d.abs() < NEAR
    apart, every = not bool(near.all()), _rates(m.dtype, m.device)
    step = torch.where(near, d, 0) if apart else d
    z = m.unsqueeze(-1) + step.unsqueeze(-1) * every[0]
    values = sigma(z)
    slopes = 1 - values.square() if sigma.name == "tanh" else sigma.slope(z)
    value, end, start = values @ every[1], slopes @ every[2], slopes @ every[3]
    if not apart:
        return value, end, start
    value = torch.where(near, value, chord(sigma, a, b))
    end = torch.where(near, end, chord_slope(sigma, a, b))
    return value, end, torch.where(near, start, chord_slope(sigma, b, a))


@cache
def _rates(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """Points of Gauss's rule, its weights, and those of t and of 1 - t for t from 0 to 1."""
    points, weights = _gauss(NODES[0])
    t, w = 0.5 * (1 + points), 0.5 * weights
    return tuple(torch.from_numpy(v).to(device, dtype) for v in (points, w, t * w, (1 - t) * w))


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


def _agrees(mean: Tensor, low: Tensor, high: Tensor, apart: Tensor) -> Tensor:
    """Whether a mean of two rules is also (high - low) / apart, as far as rounding tells.

    Both rules look at points inside only, and would not see a kink close to an end.
    """
    rounding = 64 * torch.finfo(mean.dtype).eps * (low.abs() + high.abs())
    return (mean * apart - (high - low)).abs() <= rounding + AGREE * (mean * apart).abs()


def _faded(sigma: Activation, a: Tensor, b: Tensor, apart: Tensor) -> Tensor:
    """The mean of sigma less relu: its integral is s(x) below 0, and -s(-x) above."""
    below = [torch.where(x > 0, -1, 1) * sigma.integral(-_size(x)) for x in (a, b)]
    return (below[1] - below[0]) / apart


def _size(x: Tensor) -> Tensor:
    return torch.where(x < 0, -x, x)


def _tail(x: Tensor) -> Tensor:
    return F.softplus(-2 * _size(x), threshold=40.0)
