"""Mechanical systems, whose trajectories are computed when they are needed: nothing is downloaded.

A state is `y = (p, q)`, momenta first, `(*batch, n)`, in float64. A `System` has an energy
`H(p, q)` and moves by Hamilton's equations, to which damping and outer forces u may be added:

    p' = -dH/dq - damping p + u,    q' = dH/dp

| name | features n | what moves | sampled every | error of states, of energy |
| --- | --- | --- | --- | --- |
| `pendulum` | 2 | a mass on a rod, swinging up to 2.2 radians | 0.5 | 1e-13, 2e-13 |
| `double_pendulum` | 4 | a rod below a rod: partly chaotic | 0.5 | 5e-12, 3e-12 |
| `henon_heiles` | 4 | a star in a galaxy: partly chaotic | 1.0 | 3e-13, 6e-14 |
| `kepler` | 4 | a planet in the plane, eccentricities up to 0.6 | 0.25 | 7e-13, 4e-13 |
| `three_bodies` | 12 | equal masses in the plane: chaotic | 0.5 | 5e-10, 3e-9 |
| `chain` | 32 | masses joined by nonlinear springs (FPUT) | 0.5 | 1e-13, 2e-13 |
| `cluster` | 78 | 13 atoms with Lennard-Jones forces, vibrating | 0.05 | 2e-13, 2e-13 |

All masses, lengths, spring constants and gravity are 1. The errors are those of the reference
integrator over 100 samples. Of states: the median of 30 starts, compared with a run in 80-bit
arithmetic whose equations were derived separately. Of the energy: the largest of 100 starts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor
from torch.nn.functional import pad

from hdnn.errors import (
    DataError,
    ShapeError,
    choose,
    positive_float,
    positive_int,
)

__all__ = [
    "System",
    "chain",
    "cluster",
    "double_pendulum",
    "get",
    "henon_heiles",
    "kepler",
    "pendulum",
    "three_bodies",
]

TOLERANCE = 1e-13  # of the error in one step of the reference integrator


@dataclass(frozen=True, eq=False)
class System:
    """A mechanical system: its energy, and starts that are typical of it.

    `dataclasses.replace(system, damping=0.1)` is the same system, damped.

    Attributes:
        name: of the system.
        features: n, twice the degrees of freedom.
        dt: a time between samples that suits learning the map from one to the next.
        energy: H, from states `(*batch, n)` to `(*batch,)`.
        starts: states `(count, n)`, from a count and a `torch.Generator`.
        damping: the force against each unit of momentum. Each canonical area in phase space
            shrinks by `exp(-damping t)`, and volumes by `exp(-damping t n / 2)`.

    Examples:
        >>> from hdnn.dynamics import systems
        >>> systems.kepler()
        System(kepler, 4 features, dt=0.25)
    """

    name: str
    features: int
    dt: float
    energy: Callable[[Tensor], Tensor]
    starts: Callable[[int, Generator], Tensor]
    damping: float = 0.0

    def field(self, y: Tensor, u: Tensor | float = 0.0) -> Tensor:
        """The velocity of states `(*batch, n)`, with forces u `(*batch, n/2)` on the momenta.

        Examples:
            >>> import torch
            >>> from hdnn.dynamics import systems
            >>> y = torch.tensor([0.5, 0.0])  # hanging, and moving at 0.5
            >>> systems.pendulum(damping=0.1).field(y)
            tensor([-0.0500,  0.5000])
        """
        slope = torch.func.grad(lambda y: self.energy(y).sum())(y)
        velocity, pull = slope.chunk(2, -1)
        p, _ = y.chunk(2, -1)
        return torch.cat([u - pull - self.damping * p, velocity], -1)

    def trajectories(
        self,
        count: int | Tensor,
        steps: int,
        *,
        seed: int = 0,
        dt: float | None = None,
        inputs: Tensor | None = None,
    ) -> Tensor:
        """Trajectories from random starts, sampled in time.

        Args:
            count: the number of starts; or starts of your own, `(count, n)`.
            steps: how many samples follow each start.
            seed: of the starts.
            dt: the time between samples; by default the system's.
            inputs: forces on the momenta, `(steps, count, n/2)`, constant from each sample to the
                next.

        Returns:
            States `(steps + 1, count, n)` in float64, the starts first.

        Raises:
            ShapeError: if the starts or the inputs have another shape.
            DataError: if a trajectory cannot be followed, as in a collision.

        Examples:
            >>> from hdnn.dynamics import systems
            >>> system = systems.henon_heiles()
            >>> y = system.trajectories(50, 10, seed=1)
            >>> y.shape
            torch.Size([11, 50, 4])
            >>> bool((system.energy(y[-1]) - system.energy(y[0])).abs().max() < 1e-11)
            True
        """
        dt = positive_float("dt", self.dt if dt is None else dt)
        if isinstance(count, Tensor):
            y = count.double()
        else:
            generator = Generator().manual_seed(seed)
            y = self.starts(positive_int("count", count), generator)
        shape = (positive_int("steps", steps), len(y), self.features // 2)
        u = y.new_zeros(shape) if inputs is None else inputs.to(y)
        if y.shape[1:] != (self.features,) or u.shape != shape:
            raise ShapeError(
                f"starts must be (count, {self.features}) and inputs (steps, count, {shape[2]}), "
                f"but got {tuple(y.shape)} and {tuple(u.shape)} with {steps=}."
            )
        return _follow(self.field, y, u, dt)

    def __repr__(self) -> str:
        return f"System({self.name}, {self.features} features, dt={self.dt})"


# The systems


def pendulum(*, damping: float = 0.0) -> System:
    """A pendulum, `H = p^2/2 - cos q`; its input is a torque.

    The starts are spread evenly over all states with an energy below 0.6: swings up to 2.2 radians.
    Above 1 it turns over.

    Examples:
        >>> import torch
        >>> from hdnn.dynamics import systems
        >>> torques = 0.1 * torch.randn(20, 3, 1)
        >>> systems.pendulum(damping=0.1).trajectories(3, 20, inputs=torques).shape
        torch.Size([21, 3, 2])
    """
    energy = _separable(lambda q: -q.cos().sum(-1))
    starts = _evenly(lambda y: energy(y) < 0.6, [1.8, 2.3])
    return System("pendulum", 2, 0.5, energy, starts, damping)


def double_pendulum() -> System:
    """Two masses on rods, one below the other; q are the angles to the vertical.

    `H = (p1^2 - 2 p1 p2 cos d + 2 p2^2) / (2 + 2 sin^2 d) - 2 cos q1 - cos q2`, `d = q1 - q2`. The
    starts are spread evenly over all states with energies from -3, at rest, to -1.4. Above -1 a rod
    can turn over.

    Examples:
        >>> from hdnn.dynamics import systems
        >>> systems.double_pendulum().trajectories(5, 10).shape
        torch.Size([11, 5, 4])
    """

    def energy(y):
        p1, p2, q1, q2 = y.unbind(-1)
        d = q1 - q2
        kinetic = p1**2 - 2 * p1 * p2 * d.cos() + 2 * p2**2
        kinetic = kinetic / (2 + 2 * d.sin() ** 2)
        return kinetic - 2 * q1.cos() - q2.cos()

    starts = _evenly(lambda y: energy(y) < -1.4, [3.0, 2.0, 1.5, 2.3])
    return System("double_pendulum", 4, 0.5, energy, starts)


def henon_heiles() -> System:
    """A star in a galaxy (Hénon and Heiles 1964).

    `H = (|p|^2 + |q|^2)/2 + q1^2 q2 - q2^3/3`. Orbits are bound below 1/6; from about 1/12 on, a
    growing part of them is chaotic. The starts are spread evenly over all bound states below 1/8.

    Examples:
        >>> from hdnn.dynamics import systems
        >>> system = systems.henon_heiles()
        >>> bool((system.energy(system.trajectories(9, 5)) < 0.126).all())
        True
    """

    def potential(q):
        x, z = q.unbind(-1)
        return (x**2 + z**2) / 2 + x**2 * z - z**3 / 3

    energy = _separable(potential)
    # All states in this box below 1/6 are bound.
    starts = _evenly(lambda y: energy(y) < 1 / 8, [0.5, 0.5, 0.7, 0.7])
    return System("henon_heiles", 4, 1.0, energy, starts)


def kepler() -> System:
    """A planet in the plane, `H = |p|^2/2 - 1/|q|`, on ellipses run through anticlockwise.

    The starts are spread evenly over all states with energies from -0.6 to -0.4 and eccentricities
    up to 0.6. The long half axis is `a = -1 / (2 H)`, the period `2 pi a^1.5`.

    Examples:
        >>> from hdnn.dynamics import systems
        >>> systems.kepler().trajectories(5, 10).shape
        torch.Size([11, 5, 4])
    """
    energy = _separable(lambda q: -1 / q.norm(dim=-1))

    def moderate(y):
        H = energy(y)
        p1, p2, q1, q2 = y.unbind(-1)
        L = q1 * p2 - q2 * p1
        return (1 + 2 * H * L**2 < 0.6**2) & (L > 0) & ((H + 0.5).abs() < 0.1)

    starts = _evenly(moderate, [2.2, 2.2, 2.0, 2.0])
    return System("kepler", 4, 0.25, energy, starts)


def three_bodies() -> System:
    """Three equal masses in the plane that attract each other, `H = |p|^2/2 - sum 1/r`.

    They start on a circle of radius 0.9 to 1.2 with the momenta of circular motion, of which each
    component is multiplied by 0.8 to 1.2, much as for SympNets (Jin et al. 2020). The motion is
    chaotic: in the median of 100 starts, a difference of 1e-8 grows a thousandfold by time 23 and a
    millionfold by time 70. Bodies may meet closely, which takes many small steps, or escape.

    Examples:
        >>> from hdnn.dynamics import systems
        >>> systems.three_bodies().trajectories(5, 10).shape
        torch.Size([11, 5, 12])
    """

    def starts(count, generator):
        numbers = torch.rand(count, 8, generator=generator).double()
        size, turn, factor = numbers.split([1, 1, 6], -1)
        radius = 0.9 + 0.3 * size
        q = radius * torch.exp(2j * math.pi * (3 * turn + torch.arange(3)) / 3)
        p = 1j * q / (math.sqrt(3) * radius**3).sqrt()
        p, q = torch.view_as_real(torch.stack([p, q])).flatten(2)
        return torch.cat([(0.8 + 0.4 * factor) * p, q], -1)

    energy = _separable(lambda q: -(1 / _distances(q, 3)).sum(-1))
    return System("three_bodies", 12, 0.5, energy, starts)


def chain(masses: int = 16) -> System:
    """Masses in a row between two walls (Fermi, Pasta, Ulam and Tsingou 1955).

    A spring that is longer by d than at rest has the energy `d^2/2 + d^3/12 + d^4/4`. The starts
    have the temperature 0.2 and are distributed as for linear springs; later it is about 0.23.

    Examples:
        >>> from hdnn.dynamics import systems
        >>> systems.chain(8).trajectories(5, 10).shape
        torch.Size([11, 5, 16])
    """

    def potential(q):
        d = pad(q, (1, 1)).diff()
        return (d**2 / 2 + d**3 / 12 + d**4 / 4).sum(-1)

    rest = torch.zeros(positive_int("masses", masses), dtype=torch.float64)
    starts = _thermal(potential, rest, 0.2)
    return System("chain", 2 * masses, 0.5, _separable(potential), starts)


def cluster() -> System:
    """Thirteen atoms in space, `H = |p|^2/2 + sum 4 (r^-12 - r^-6)`, near their least energy.

    This is -44.3268, of an icosahedron and its centre. The starts have the temperature 0.1 and are
    distributed as for linear forces. They do not drift and hardly turn. It melts near 0.28.

    Examples:
        >>> from hdnn.dynamics import systems
        >>> systems.cluster().trajectories(2, 5).shape
        torch.Size([6, 2, 78])
    """

    def potential(q):
        sixth = _distances(q, 13) ** -6
        return 4 * (sixth**2 - sixth).sum(-1)

    # Corners of an icosahedron are (0, +-x, +-z), where z is x times the golden ratio, and cyclic
    # permutations. Of all x, this has the least energy.
    x = 0.5687560465731696
    z = x * (1 + math.sqrt(5)) / 2
    half = torch.tensor([[0, x, z], [0, x, -z]], dtype=torch.float64)
    corners = torch.cat([half.roll(k, -1) for k in range(3)])
    rest = torch.cat([0 * half[:1], corners, -corners]).flatten()
    starts = _thermal(potential, rest, 0.1)
    return System("cluster", 78, 0.05, _separable(potential), starts)


SYSTEMS = {
    make.__name__: make
    for make in (
        pendulum,
        double_pendulum,
        henon_heiles,
        kepler,
        three_bodies,
        chain,
        cluster,
    )
}


def get(name: str, **options: Any) -> System:
    """The system with this name, with the options of its function.

    Examples:
        >>> from hdnn.dynamics import systems
        >>> systems.get("chain", masses=4)
        System(chain, 8 features, dt=0.5)
        >>> systems.get("keppler")
        Traceback (most recent call last):
        hdnn.errors.OptionError: system 'keppler' is not known; ... Did you mean 'kepler'?
    """
    return SYSTEMS[choose("system", name, SYSTEMS)](**options)


# Parts of energies and starts


def _separable(potential):
    """The energy `|p|^2/2 + potential(q)`."""

    def energy(y):
        p, q = y.chunk(2, -1)
        return (p**2).sum(-1) / 2 + potential(q)

    return energy


def _distances(q, bodies):
    """The distance of each pair of bodies, `(*batch, pairs)`."""
    places = q.unflatten(-1, (bodies, -1))
    first, second = torch.triu_indices(bodies, bodies, 1, device=q.device)
    between = places.index_select(-2, first) - places.index_select(-2, second)
    return between.norm(dim=-1)


def _evenly(accept, box):
    """Starts of even density over the accepted states, which must all lie in the box.

    Motion preserves volumes. So if conserved quantities alone decide what is accepted, all samples
    of a trajectory are distributed as its start is.
    """
    size = torch.tensor(box, dtype=torch.float64)

    def starts(count, generator):
        y = size.new_empty(0, len(size))
        while len(y) < count:
            unit = torch.rand(1000, len(size), generator=generator)
            drawn = size * (2 * unit - 1)
            y = torch.cat([y, drawn[accept(drawn)]])
        return y[:count]

    return starts


def _thermal(potential, rest, temperature):
    """Starts around a rest, normally distributed as linear forces would have it in equilibrium."""
    stiffness = torch.autograd.functional.hessian(potential, rest)
    squares, modes = torch.linalg.eigh(stiffness)  # squares of frequencies
    # Moving or turning a free body needs no force, and is left out.
    vibrating = squares > 1e-6 * squares.max()
    modes = modes.mT[vibrating]
    frequencies = squares[vibrating].sqrt()

    def starts(count, generator):
        p, q = math.sqrt(temperature) * torch.randn(
            2, count, len(modes), generator=generator, dtype=torch.float64
        )
        return torch.cat([p @ modes, rest + q / frequencies @ modes], -1)

    return starts


# The reference integrator


def _follow(field, y, u, dt):
    """States at all multiples of dt, `(steps + 1, count, n)`.

    Each trajectory has its own clock and its own step, so that a close encounter in one of them
    does not slow down the others.
    """
    states = y.repeat(len(u) + 1, 1, 1)
    y = y.clone()
    time = y.new_zeros(len(y))  # as a multiple of dt, like h
    h = y.new_ones(len(y))
    while len(rows := (time < len(u)).nonzero()[:, 0]):
        k = time[rows].long()
        step = torch.minimum(h[rows], k + 1 - time[rows])
        change, error = _extrapolate(
            field, y[rows], u[k, rows], dt * step[:, None]
        )
        error = (error / (1 + y[rows].abs())).abs().amax(-1) / TOLERANCE
        # The error is of order 11.
        factor = (0.8 * error ** (-1 / 11)).nan_to_num(0).clamp(0.2, 4)
        h[rows] = step * factor
        if bool((h < 1e-9).any()):
            raise DataError(
                "a trajectory cannot be followed: bodies collide, or its start is not finite. "
                "Choose other starts."
            )
        good = error < 1
        y[rows[good]] += change[good]
        time[rows[good]] += step[good]
        states[k + 1, rows] = y[rows]  # the last of these is at time k + 1
    return states


def _extrapolate(field, y, u, h):
    """The change of y in a step h, of order 12, and its error.

    Midpoint rules of 2, 4, .. 12 substeps are extrapolated to infinitely many (Gragg, Bulirsch and
    Stoer).
    """
    first = field(y, u)
    row = []
    for j in range(1, 7):
        before = 0.0
        change = h / (2 * j) * first
        for _ in range(2 * j - 1):
            before, change = change, before + h / j * field(y + change, u)
        finer = [change]
        for k, coarse in enumerate(row, 1):
            ratio = (j / (j - k)) ** 2
            finer.append(finer[-1] + (finer[-1] - coarse) / (ratio - 1))
        row = finer
    return row[-1], row[-1] - row[-2]
