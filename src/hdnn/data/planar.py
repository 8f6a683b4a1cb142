"""Two classes in the plane: Swiss roll, double moons, double circles.

Every set is a union of arcs with points at equal angles, made in float64 and shuffled once. After
that, points with even indices are for training and the others for testing. All functions take the
number of `points` (at least 8, half of them for training), the `seed` of noise and order, and the
`dtype` and `device` of the tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hdnn.errors import DataError, choose

__all__ = ["PlanarData", "double_circles", "double_moons", "load", "swiss_roll"]

Interval = tuple[float, float]


@dataclass(frozen=True, eq=False)
class PlanarData:
    """Points (B, 2) with labels 0 or 1 (B,), one half for training and one for testing.

    Attributes:
        name: the name of the set.
        x_train: the training points, (B, 2).
        t_train: the training labels, (B,).
        x_test: the test points, (B, 2).
        t_test: the test labels, (B,).
        domain: the smallest and largest x1, then x2, for a picture of the set.

    Examples:
        >>> import hdnn
        >>> hdnn.data.planar.swiss_roll(points=400)
        PlanarData(swiss_roll, 200 train, 200 test)
    """

    name: str
    x_train: Tensor
    t_train: Tensor
    x_test: Tensor
    t_test: Tensor
    domain: tuple[Interval, Interval]

    def __repr__(self) -> str:
        return f"PlanarData({self.name}, {len(self.t_train)} train, {len(self.t_test)} test)"


class Arc(NamedTuple):
    """Points of one class at equal angles; a negative radius turns a half circle over."""

    label: int
    radius: float
    growth: float = 0.0  # of the radius, from start to end
    turns: float = 2.0
    x: float = 0.0
    y: float = 0.0

    def points(self, count: int) -> Tensor:
        """The points of this arc without its end: (count, 2), in float64."""
        s = torch.arange(count, dtype=torch.float64, device="cpu") / count
        r = self.radius + self.growth * s
        theta = 2 * math.pi * self.turns * s
        x = self.x + r * torch.cos(theta)
        y = self.y + r * torch.sin(theta)
        return torch.stack([x, y], -1)


def swiss_roll(points: int = 8000, **options: Any) -> PlanarData:
    """Two spirals r(theta) of two turns: theta/4pi (class 1), 0.2 + theta/4pi (class 0)."""
    arcs = [Arc(1, 0.0, 1.0), Arc(0, 0.2, 1.0)]
    domain = ((-1.2, 1.2), (-1.2, 1.2))
    return _make("swiss_roll", arcs, 0.0, domain, points, **options)


def double_moons(points: int = 8000, **options: Any) -> PlanarData:
    """Half circles (cos, sin) and (1 - cos, 0.5 - sin), and both again, shifted by 2 in x."""
    arcs = []
    for x in (0.0, 2.0):
        arcs.append(Arc(0, 1.0, turns=0.5, x=x))
        arcs.append(Arc(1, -1.0, turns=0.5, x=x + 1, y=0.5))
    domain = ((-2.0, 5.0), (-1.0, 2.0))
    return _make("double_moons", arcs, 0.15, domain, points, **options)


def double_circles(points: int = 8000, **options: Any) -> PlanarData:
    """Rings of radius 1, 2, 3, 4 in the classes 0, 1, 0, 1, each run through twice."""
    arcs = [Arc((radius - 1) % 2, radius) for radius in range(1, 5)]
    domain = ((-5.0, 5.0), (-5.0, 5.0))
    return _make("double_circles", arcs, 0.3, domain, points, **options)


SETS = {
    make.__name__: make for make in (swiss_roll, double_moons, double_circles)
}


def load(name: str, points: int = 8000, **options: Any) -> PlanarData:
    """A planar set by its name: "swiss_roll", "double_moons" or "double_circles"."""
    return SETS[choose("data set", name, SETS)](points, **options)


def _make(
    name: str,
    arcs: list[Arc],
    noise: float,
    domain: tuple[Interval, Interval],
    points: int,
    *,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> PlanarData:
    """Run through each arc, add uniform noise, shuffle, split."""
    if points < 8:
        raise DataError(
            f"{name}: points must be at least 8, but got {points!r}."
        )
    smaller, remainder = divmod(points, len(arcs))
    xs = []
    ts = []
    for index, arc in enumerate(arcs):
        count = smaller + (index < remainder)
        xs.append(arc.points(count))
        ts.append(torch.full((count,), arc.label, device="cpu"))
    x = torch.cat(xs)
    # Drawn on the CPU in float64 for every dtype and device: one seed is one data set.
    generator = torch.Generator().manual_seed(seed)
    draw = {"generator": generator, "device": "cpu"}
    if noise:
        uniform = torch.rand(x.shape, dtype=torch.float64, **draw)
        x += noise * (2 * uniform - 1)
    order = torch.randperm(points, **draw)
    device = torch.get_default_device() if device is None else device
    dtype = dtype or torch.get_default_dtype()
    x = x[order].to(device=device, dtype=dtype)
    t = torch.cat(ts)[order].to(device)
    return PlanarData(
        name,
        x[::2].contiguous(),
        t[::2].contiguous(),
        x[1::2].contiguous(),
        t[1::2].contiguous(),
        domain,
    )
