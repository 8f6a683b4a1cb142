"""Two classes in the plane: Swiss roll, double moons, double circles.

Every set is a union of arcs, each with points at equal angles, made in float64 and shuffled once.
After the shuffle the even indices are for training and the odd ones for testing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hdnn.base.devices import as_device
from hdnn.errors import DataError, choose

__all__ = ["PlanarData", "double_circles", "double_moons", "load", "swiss_roll"]

Interval = tuple[float, float]
Curve = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class PlanarData:
    """Points (B, 2) with labels 0 or 1 (B,), half to train on and half to test with.

    Attributes:
        name: of the set.
        x_train: points to train on, (B, 2).
        t_train: their labels, (B,).
        x_test: points to test with, (B, 2).
        t_test: their labels, (B,).
        domain: the least and largest x1, then x2, of a picture of the set.

    Examples:
        >>> import hdnn
        >>> data = hdnn.data.planar.swiss_roll(points=400)
        >>> data
        PlanarData(swiss_roll, 200 train, 200 test)
        >>> data.x_train.shape, data.domain
        (torch.Size([200, 2]), ((-1.2, 1.2), (-1.2, 1.2)))
    """

    name: str
    x_train: Tensor
    t_train: Tensor
    x_test: Tensor
    t_test: Tensor
    domain: tuple[Interval, Interval]

    def __repr__(self) -> str:
        return f"PlanarData({self.name}, {len(self.t_train)} train, {len(self.t_test)} test)"


def swiss_roll(
    points: int = 8000,
    *,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> PlanarData:
    """Two spirals `r(theta)` of two turns: `theta/4pi` (class 1), `0.2 + theta/4pi` (class 0).

    Args:
        points: how many there are in all, at least 8; half are for training.
        seed: what the noise and the order are drawn from.
        dtype: of the points; by default `torch.get_default_dtype()`.
        device: of points and labels; by default that of new tensors.

    Returns:
        The set, split in two.

    Raises:
        DataError: if there are fewer than 8 points, the seed is no whole number >= 0, or the dtype
            is no floating-point one.

    Examples:
        >>> import hdnn
        >>> data = hdnn.data.planar.swiss_roll(seed=0)
        >>> data
        PlanarData(swiss_roll, 4000 train, 4000 test)
        >>> data.x_train.shape, data.t_train.unique()
        (torch.Size([4000, 2]), tensor([0, 1]))
    """

    def spiral(r_0: float) -> Curve:
        return lambda s: _polar(r_0 + s, 4 * math.pi * s)

    arcs = [(spiral(0.0), 1), (spiral(0.2), 0)]
    domain = ((-1.2, 1.2), (-1.2, 1.2))
    return _make("swiss_roll", arcs, 0.0, domain, points, seed, dtype, device)


def double_moons(
    points: int = 8000,
    *,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> PlanarData:
    """Half circles that interlock, (cos, sin) and (1 - cos, 0.5 - sin), and both again at x + 2.

    Args:
        points: how many there are in all, at least 8; half are for training.
        seed: what the noise and the order are drawn from.
        dtype: of the points; by default `torch.get_default_dtype()`.
        device: of points and labels; by default that of new tensors.

    Returns:
        The set, split in two.

    Raises:
        DataError: if there are fewer than 8 points, the seed is no whole number >= 0, or the dtype
            is no floating-point one.

    Examples:
        >>> import hdnn
        >>> data = hdnn.data.planar.double_moons(seed=0)
        >>> data
        PlanarData(double_moons, 4000 train, 4000 test)
        >>> data.x_train.shape, data.t_train.unique()
        (torch.Size([4000, 2]), tensor([0, 1]))
    """

    def upper(shift: float) -> Curve:
        return lambda s: (shift + torch.cos(math.pi * s), torch.sin(math.pi * s))

    def lower(shift: float) -> Curve:
        return lambda s: (shift + 1 - torch.cos(math.pi * s), 0.5 - torch.sin(math.pi * s))

    arcs = [(upper(0.0), 0), (lower(0.0), 1), (upper(2.0), 0), (lower(2.0), 1)]
    domain = ((-2.0, 5.0), (-1.0, 2.0))
    return _make("double_moons", arcs, 0.15, domain, points, seed, dtype, device)


def double_circles(
    points: int = 8000,
    *,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> PlanarData:
    """Rings of radius 1, 2, 3, 4 in the classes 0, 1, 0, 1, each run through twice.

    Args:
        points: how many there are in all, at least 8; half are for training.
        seed: what the noise and the order are drawn from.
        dtype: of the points; by default `torch.get_default_dtype()`.
        device: of points and labels; by default that of new tensors.

    Returns:
        The set, split in two.

    Raises:
        DataError: if there are fewer than 8 points, the seed is no whole number >= 0, or the dtype
            is no floating-point one.

    Examples:
        >>> import hdnn
        >>> data = hdnn.data.planar.double_circles(seed=0)
        >>> data
        PlanarData(double_circles, 4000 train, 4000 test)
        >>> data.x_train.shape, data.t_train.unique()
        (torch.Size([4000, 2]), tensor([0, 1]))
    """

    def ring(radius: float) -> Curve:
        return lambda s: _polar(torch.full_like(s, radius), 4 * math.pi * s)

    arcs = [(ring(1.0), 0), (ring(2.0), 1), (ring(3.0), 0), (ring(4.0), 1)]
    domain = ((-5.0, 5.0), (-5.0, 5.0))
    return _make("double_circles", arcs, 0.3, domain, points, seed, dtype, device)


SETS = {f.__name__: f for f in (swiss_roll, double_moons, double_circles)}


def load(
    name: str,
    points: int = 8000,
    *,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> PlanarData:
    """One of the sets by its name.

    Args:
        name: "swiss_roll", "double_moons" or "double_circles".
        points: how many there are in all, at least 8; half are for training.
        seed: what the noise and the order are drawn from.
        dtype: of the points; by default `torch.get_default_dtype()`.
        device: of points and labels; by default that of new tensors.

    Returns:
        The set, split in two.

    Raises:
        OptionError: if there is no set of that name.
        DataError: if there are fewer than 8 points, the seed is no whole number >= 0, or the dtype
            is no floating-point one.

    Examples:
        >>> import hdnn
        >>> hdnn.data.planar.load("double_moons", points=400)
        PlanarData(double_moons, 200 train, 200 test)
    """
    make = SETS[choose("data set", name, SETS)]
    return make(points, seed=seed, dtype=dtype, device=device)


def _polar(r: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
    return r * torch.cos(theta), r * torch.sin(theta)


def _make(
    name: str,
    arcs: list[tuple[Curve, int]],
    noise: float,
    domain: tuple[Interval, Interval],
    points: int,
    seed: int,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> PlanarData:
    """Run through each arc at s = i/k, i = 0..k-1, add uniform noise, shuffle, split."""
    _check(name, points, seed, dtype)
    device = as_device(device)
    rounded_down, rest = divmod(points, len(arcs))
    xs, ts = [], []
    for index, (curve, label) in enumerate(arcs):
        k = rounded_down + (index < rest)
        s = torch.arange(k, dtype=torch.float64) / k
        xs.append(torch.stack(curve(s), -1))
        ts.append(torch.full((k,), label))
    x, t = torch.cat(xs), torch.cat(ts)

    # Drawn on the CPU in float64 for every dtype and device: one seed is one data set.
    generator = torch.Generator().manual_seed(seed)
    if noise:
        x += noise * (2 * torch.rand(x.shape, generator=generator, dtype=torch.float64) - 1)
    order = torch.randperm(points, generator=generator)
    x = x[order].to(device=device, dtype=dtype or torch.get_default_dtype())
    t = t[order].to(device=device)
    (x_train, x_test), (t_train, t_test) = (
        (every[::2].contiguous(), every[1::2].contiguous()) for every in (x, t)
    )
    return PlanarData(name, x_train, t_train, x_test, t_test, domain)


def _check(name: str, points: object, seed: object, dtype: torch.dtype | None) -> None:
    if isinstance(points, bool) or not isinstance(points, int) or points < 8:
        raise DataError(
            f"{name}: points must be a whole number >= 8, so that each class can be learned and "
            f"tested, but got {points!r}; the paper has points=8000."
        )
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise DataError(
            f"{name}: seed must be a whole number from 0 to 2^63 - 1, but got {seed!r}; "
            "take e.g. seed=0."
        )
    if dtype is not None and not dtype.is_floating_point:
        raise DataError(
            f"{name}: dtype must be floating point, but got {dtype}; use torch.float32."
        )
