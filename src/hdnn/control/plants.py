"""Plants: agents with an energy, ports, and skew couplings between neighbours."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hdnn import activations
from hdnn.activations import Activation
from hdnn.base.listed import listed
from hdnn.control.energies import energies, lowest
from hdnn.control.links import Edges, edges, pairs_of
from hdnn.errors import (
    InterconnectionError,
    OptionError,
    ShapeError,
    SparsityError,
    StepError,
    as_float,
    positive_float,
    positive_int,
    quoted,
)
from hdnn.sparsity import Sparsity

SKEW = 1e-12  # how far from skew or semidefinite a given matrix may be, relative to its entries
LEAST = 1e-300  # what is divided by
LARGEST = 2**30  # numbers in a tensor of a plant or a controller: 8 GiB in float64


class Plant(nn.Module):
    """N agents `z_i' = (J_i - R_i) dH/dz_i + sum_k C_ik dH/dz_k + g_i u_i`, `y_i = g_i^T dH/dz_i`.

    The energy of an agent is the sum of `s(A_i z_i + a_i)` over its rows, where s is the integral
    of an activation: x^2/2 of the identity, 1 - cos x of sin (a pendulum, a power grid), log cosh x
    of tanh (a spring whose force has a limit), max(x, 0)^2/2 of relu (a spring on one side only).
    Agents k along an edge of i act on it by `C_ik`, and i acts back by `-C_ik^T`, so that they
    pass energy on and make none. All is kept in float64.

    Args:
        A: rows of the energies, `(N, r, p)`.
        J: skew-symmetric, `(N, p, p)`.
        R: dissipation, symmetric and positive semidefinite, `(N, p, p)`.
        g: ports, `(N, p, m)`: where the m inputs of an agent act.
        a: offsets of the rows, `(N, r)`; by default 0.
        links: pairs (i, k) of coupled agents; by default none.
        couplings: `C_ik` for each pair as given, `(E, p, p)`.
        activation: of the rows, by name: one for all of them, or a list of r names. By default the
            energy is quadratic.
        weights: what the energies of rows are multiplied by, > 0, `(N, r)`; by default 1.

    Raises:
        ShapeError: if shapes do not fit together, the port among them, or a value is not finite.
        InterconnectionError: if J is not skew-symmetric, or R not positive semidefinite.
        SparsityError: if a pair does not name two of the agents, or appears twice.
        OptionError: if an activation is not known, or a weight is not > 0.

    Examples:
        >>> import torch
        >>> from hdnn import control
        >>> J = torch.tensor([[[0.0, 1.0], [-1.0, 0.0]]])  # one mass on a spring
        >>> plant = control.Plant(torch.eye(2)[None], J, 0 * J, torch.tensor([[[0.0], [1.0]]]))
        >>> plant
        Plant(1 agent of 2 states and 1 input, 0 links)
        >>> pendulum = {"activation": ["sin", "identity"]}  # 1 - cos of the angle, and p^2/2
        >>> control.Plant(plant.A, plant.J, plant.R, plant.g, **pendulum)
        Plant(1 agent of 2 states and 1 input, 0 links, rows of sin, identity)
    """

    A: Tensor
    a: Tensor
    J: Tensor
    R: Tensor
    g: Tensor
    couplings: Tensor
    weights: Tensor | None

    def __init__(
        self,
        A: Tensor,
        J: Tensor,
        R: Tensor,
        g: Tensor,
        *,
        a: Tensor | None = None,
        links: Sequence[tuple[int, int]] = (),
        couplings: Tensor | None = None,
        activation: str | Sequence[str] = "identity",
        weights: Tensor | None = None,
    ) -> None:
        super().__init__()
        A = _finite("A", A)
        if A.ndim != 3 or 0 in A.shape:
            raise ShapeError(f"A must be (N, r, p), rows of N agents, but is {tuple(A.shape)}.")
        N, r, p = A.shape
        J, R, g = (_finite(name, t) for name, t in (("J", J), ("R", R), ("g", g)))
        for name, t in (("J", J), ("R", R)):
            if t.shape != (N, p, p):
                raise ShapeError(f"{name} must be {(N, p, p)} like A, but is {tuple(t.shape)}.")
        if g.ndim != 3 or g.shape[:2] != (N, p) or not g.shape[2]:
            raise ShapeError(
                f"the port g must be (N, p, m) with N = {N} agents of p = {p} states, "
                f"but is {tuple(g.shape)}."
            )
        offsets = A.new_zeros(N, r) if a is None else _finite("a", a)
        if offsets.shape != (N, r):
            raise ShapeError(f"a must be {(N, r)} like A, but is {tuple(offsets.shape)}.")
        self.activation = _names(activation, r)
        A, offsets, rows = _weighted(A, offsets, self.activation, weights)
        check_skew("J", J)
        check_semidefinite("R", R)
        named = pairs_of(_given(links), N)
        known = edges(named, N)
        if len(known) != len(named):
            raise SparsityError("links must name each pair of agents once.")
        C = A.new_zeros(0, p, p) if couplings is None else _finite("couplings", couplings)
        if C.shape != (len(named), p, p):
            raise ShapeError(
                f"couplings must be {(len(named), p, p)}, a matrix a link, but are "
                f"{tuple(C.shape)}."
            )
        self.links: Edges = known
        given = {pair: C[e] for e, pair in enumerate(named)}
        given |= {(k, i): -C[e].mT for e, (i, k) in enumerate(named)}  # as the other end has it
        C = torch.stack([given[pair] for pair in known]) if known else C
        for name, t in (("A", A), ("a", offsets), ("J", J), ("R", R), ("g", g)):
            self.register_buffer(name, t)
        self.register_buffer("couplings", C)
        self.register_buffer("weights", rows)

    @property
    def agents(self) -> int:
        """N."""
        return len(self.A)

    @property
    def states(self) -> int:
        """p, the states of an agent."""
        return self.A.shape[2]

    @property
    def inputs(self) -> int:
        """m, the inputs of an agent."""
        return self.g.shape[2]

    @property
    def rows(self) -> tuple[Activation, ...]:
        """The activation of each row."""
        return tuple(activations.get(name) for name in self.activation)

    @property
    def quadratic(self) -> bool:
        """Whether the energy is `|A z + a|^2 / 2`."""
        return {*self.activation} == {"identity"}

    @property
    def lowest(self) -> float:
        """What the energy of all agents together is never below; -inf if that is not known."""
        least = [lowest(sigma) for sigma in self.rows]
        if self.weights is None or not any(least):
            return self.agents * math.fsum(least) if all(map(math.isfinite, least)) else -math.inf
        return float((self.weights @ self.weights.new_tensor(least)).sum())

    def energy(self, z: Tensor) -> Tensor:
        """The energy of all agents together in the states `(*batch, N, p)`: `(*batch,)`."""
        rows = (self.A @ z.to(self.A).unsqueeze(-1)).squeeze(-1) + self.a
        return energies(self.rows, rows, self.weights).sum((-2, -1))

    def extra_repr(self) -> str:
        text = (
            f"{counted(self.agents, 'agent')} of {counted(self.states, 'state')} and "
            f"{counted(self.inputs, 'input')}, {counted(len(self.links), 'link')}"
        )
        return text if self.quadratic else f"{text}, rows of {_listed(self.activation)}"

    def __repr__(self) -> str:
        return f"Plant({self.extra_repr()})"


def robots(
    targets: Tensor, *, mass: float = 1.0, spring: float = 1.0, damping: float = 0.2
) -> Plant:
    """Point masses in the plane or in space, each pulled to its target by a spring and damped.

    The states of a robot are its position and its momentum; its inputs are forces.

    Args:
        targets: `(N, d)`, with d = 2 in the plane.
        mass: of each robot.
        spring: the force to the target for each unit of distance.
        damping: the force against each unit of velocity.

    Returns:
        A plant of 2 d states and d inputs an agent.

    Raises:
        ShapeError: if targets are not `(N, d)` or not finite.
        StepError: if mass or spring is not > 0, or the damping is no finite number.
        InterconnectionError: if the damping is negative.

    Examples:
        >>> import torch
        >>> from hdnn import control
        >>> control.robots(torch.tensor([[3.0, 1.0], [-3.0, 1.0]]))
        Plant(2 agents of 4 states and 2 inputs, 0 links)
    """
    targets = _finite("targets", targets)
    if targets.ndim != 2 or not targets.numel():
        raise ShapeError(f"targets must be (N, d), a row a robot, but are {tuple(targets.shape)}.")
    stiff, inertia = positive_float("spring", spring) ** 0.5, positive_float("mass", mass) ** -0.5
    N, d = targets.shape
    one, none = torch.eye(d, dtype=targets.dtype), torch.zeros(d, d, dtype=targets.dtype)
    A = torch.block_diag(stiff * one, inertia * one)
    J = torch.cat([torch.cat([none, one], 1), torch.cat([-one, none], 1)])
    R, g = torch.block_diag(none, _loss("damping", damping) * one), torch.cat([none, one])
    a = torch.cat([-stiff * targets, torch.zeros_like(targets)], 1)
    return Plant(*(t.expand(N, *t.shape).clone() for t in (A, J, R, g)), a=a)


def oscillators(
    links: Sequence[tuple[int, int]],
    *,
    agents: int | None = None,
    mass: float = 1.0,
    spring: float = 1.0,
    coupling: float = 1.0,
    damping: float = 0.1,
) -> Plant:
    """Masses on springs of their own, and on a spring along each link of a graph.

    The states of an agent are its position, its momentum, and how far each of its links is drawn
    out; a link belongs to the first agent of its pair as sorted. Agents with fewer links than
    others have states that never move. The input is a force.

    Args:
        links: pairs of agents.
        agents: how many; by default as many as the links name.
        mass: of each agent.
        spring: of each agent's own spring.
        coupling: of the spring along a link.
        damping: the force against each unit of velocity.

    Returns:
        A plant with one input an agent.

    Raises:
        SparsityError: if the links are no pairs of agents.
        ShapeError: if the links name more agents than a plant can have.
        StepError: if mass, spring or coupling is not > 0, or the damping is no finite number.
        InterconnectionError: if the damping is negative.

    Examples:
        >>> from hdnn import control
        >>> control.oscillators([(0, 1), (1, 2), (0, 2)])
        Plant(3 agents of 4 states and 1 input, 3 links)
    """
    heat, own = _loss("damping", damping), positive_float("spring", spring)
    light, stiff = (
        1 / _sensible("mass", positive_float("mass", mass)),
        positive_float("coupling", coupling),
    )
    return Plant(**_masses(links, agents, light, heat, stiff, own**0.5))


def pendulums(
    links: Sequence[tuple[int, int]],
    *,
    agents: int | None = None,
    mass: float = 1.0,
    length: float = 1.0,
    gravity: float = 9.81,
    coupling: float = 1.0,
    damping: float = 0.1,
) -> Plant:
    """Masses on rods in gravity, with a spring along each link of a graph.

    The states of an agent are its angle, 0 where it hangs and pi where it stands, its angular
    momentum, and by how much angles differ along each of its links; a link belongs to the first
    agent of its pair as sorted. Agents with fewer links than others have states that never move.
    The input is a torque. The energy is `m g l (1 - cos q) + p^2 / (2 m l^2)`, and that of springs.

    Args:
        links: pairs of agents.
        agents: how many; by default as many as the links name.
        mass: of each agent.
        length: of its rod.
        gravity: the acceleration of what falls.
        coupling: the torque of the spring along a link for each unit of angle between its ends.
        damping: the torque against each unit of angular velocity.

    Returns:
        A plant with one input an agent.

    Raises:
        SparsityError: if the links are no pairs of agents.
        ShapeError: if the links name more agents than a plant can have.
        StepError: if mass, length, gravity or coupling is not > 0, or the damping is no finite
            number.
        InterconnectionError: if the damping is negative.

    Examples:
        >>> import math, torch
        >>> from hdnn import control
        >>> plant = control.pendulums([(0, 1)])
        >>> plant
        Plant(2 agents of 3 states and 1 input, 1 link, rows of sin, identity, identity)
        >>> up = torch.tensor([[math.pi, 0.0, 0.0], [math.pi, 0.0, 0.0]])
        >>> plant.energy(up)  # 2 m g l each
        tensor(39.2400, dtype=torch.float64)
    """
    m, radius = positive_float("mass", mass), positive_float("length", length)
    heat, stiff = _loss("damping", damping), positive_float("coupling", coupling)
    weight = _sensible("mass * gravity * length", m * positive_float("gravity", gravity) * radius)
    light = 1 / _sensible("mass * length^2", m * radius * radius)
    given = _masses(links, agents, light, heat, stiff, 1.0)
    N, p = given["A"].shape[:2]
    weights = torch.ones(N, p, dtype=torch.float64)
    weights[:, 0] = weight
    return Plant(**given, activation=["sin"] + ["identity"] * (p - 1), weights=weights)


def _masses(
    links: Any, agents: int | None, light: float, heat: float, stiff: float, own: float
) -> dict[str, Any]:
    """Masses that are coupled by springs: what `Plant` takes, with `own` as the first row."""
    (N, p), slots = _owned(links, agents)
    A = torch.zeros(N, p, p, dtype=torch.float64)
    A[:, 0, 0], A[:, 1, 1] = own, light**0.5
    J, R, g = torch.zeros_like(A), torch.zeros_like(A), A.new_zeros(N, p, 1)
    J[:, 0, 1], J[:, 1, 0], R[:, 1, 1], g[:, 1, 0] = 1, -1, heat, 1
    C = A.new_zeros(len(slots), p, p)
    for e, ((i, _), slot) in enumerate(slots.items()):
        A[i, slot, slot], J[i, slot, 1], J[i, 1, slot], C[e, slot, 1] = stiff**0.5, 1, -1, -1
    return {"A": A, "J": J, "R": R, "g": g, "links": [*slots], "couplings": C}


def microgrid(
    links: Sequence[tuple[int, int]],
    *,
    agents: int | None = None,
    capacitance: float = 1.0,
    inductance: float = 1.0,
    resistance: float = 0.1,
    load: float = 10.0,
) -> Plant:
    """Buses with a capacitor and a load, and a line between the two buses of each link.

    The states of an agent are the charge of its bus and the flux of each of its lines, as
    deviations from where the grid should be; a line belongs to the first agent of its pair as
    sorted. Agents with fewer lines than others have states that never move. The input is a current.

    Args:
        links: pairs of agents.
        agents: how many; by default as many as the links name.
        capacitance: of a bus.
        inductance: of a line.
        resistance: of a line.
        load: the resistance of the load of a bus.

    Returns:
        A plant with one input an agent.

    Raises:
        SparsityError: if the links are no pairs of agents.
        ShapeError: if the links name more agents than a plant can have.
        StepError: if capacitance, inductance or load is not > 0, or the resistance is no finite
            number.
        InterconnectionError: if the resistance is negative.

    Examples:
        >>> from hdnn import control
        >>> control.microgrid([(0, 1), (1, 2)])
        Plant(3 agents of 2 states and 1 input, 2 links)
    """
    own, slots = _owned(links, agents, first=1)
    N, p = own
    A = torch.zeros(N, p, p, dtype=torch.float64)
    A[:, 0, 0] = positive_float("capacitance", capacitance) ** -0.5
    J, R, g = torch.zeros_like(A), torch.zeros_like(A), A.new_zeros(N, p, 1)
    R[:, 0, 0], g[:, 0, 0] = 1 / _sensible("load", positive_float("load", load)), 1
    C, inertia = A.new_zeros(len(slots), p, p), positive_float("inductance", inductance) ** -0.5
    heat = _loss("resistance", resistance)
    for e, ((i, _), slot) in enumerate(slots.items()):
        A[i, slot, slot], R[i, slot, slot] = inertia, heat
        J[i, slot, 0], J[i, 0, slot], C[e, slot, 0] = 1, -1, -1
    return Plant(A, J, R, g, links=[*slots], couplings=C)


def _names(given: Any, r: int) -> tuple[str, ...]:
    """The activation of each of r rows, by name."""
    listed = [given] * r if isinstance(given, str | Activation) else given
    if not isinstance(listed, Sequence) or len(listed) != r:
        raise ShapeError(
            f"activation must be a name, or {r} of them for r = {r} rows, but got {quoted(given)}."
        )
    return tuple(activations.registered(each).name for each in listed)


def _listed(names: Sequence[str]) -> str:
    """Names of rows, or the only one."""
    return ", ".join(names if len({*names}) > 1 else names[:1])


def _weighted(
    A: Tensor, a: Tensor, names: Sequence[str], given: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Rows, offsets and weights; those of quadratic rows become a part of the rows."""
    if given is None:
        return A, a, None
    weights = _finite("weights", given)
    if weights.shape != a.shape:
        raise ShapeError(f"weights must be {tuple(a.shape)} like a, but are {tuple(given.shape)}.")
    if not bool((weights > 0).all()):
        raise OptionError("weights must be > 0 in every entry, or the energy has no lower bound.")
    quadratic = torch.tensor([name == "identity" for name in names], device=A.device)
    root = torch.where(quadratic, weights.sqrt(), 1)
    rest = None if bool(quadratic.all()) else torch.where(quadratic, 1, weights)
    return A * root.unsqueeze(-1), a * root, rest


def _owned(
    links: Sequence[tuple[int, int]], agents: int | None, first: int = 2
) -> tuple[tuple[int, int], dict[tuple[int, int], int]]:
    """How many agents of how many states; and which state of its first agent each link is."""
    given: Any = _given(links)
    if isinstance(given, Sparsity):
        given = given.R if given.S is None else given.S
    if isinstance(given, Tensor | np.ndarray):
        named = [given.shape[0] - 1] if given.ndim else [0]
    else:
        entries = listed(given)
        given = [given] if entries is None else entries
        ends = (listed(pair) or [] for pair in given)
        named = [int(i) for pair in ends for i in pair if isinstance(i, Integral)]
    N = max(named, default=0) + 1 if agents is None else positive_int("agents", agents)
    check_size("agents", N, first, first)
    counts, slots = Counter[int](), {}
    for i, k in edges(given, N):
        slots[i, k] = first + counts[i]
        counts[i] += 1
    p = first + max(counts.values(), default=0)
    check_size("agents with so many links", N, p, p)
    return (N, p), slots


def _given(links: Any) -> Any:
    if links is None:
        raise SparsityError("links must be pairs of agents, but got None; for no links give ().")
    return links


def _sensible(name: str, number: float) -> float:
    """A number > 0 that float64 can hold and divide by."""
    if not LEAST < number < math.inf:
        raise StepError(
            f"{name} is {number:.3g}, and must be finite and above {LEAST:g}, to be divided by."
        )
    return number


def _loss(name: str, value: object) -> float:
    """Return `value` as a number >= 0: what takes energy away."""
    number = as_float(value)
    if number is None or not math.isfinite(number):
        raise StepError(f"{name} must be a finite number >= 0, but got {quoted(value)}.")
    if number < 0:
        raise InterconnectionError(
            f"{name} must be >= 0, for it takes energy away, but got {quoted(value)}."
        )
    return number


def check_size(what: str, *shape: int) -> None:
    """Raise if a tensor of that shape is too large to work with."""
    if math.prod(shape) > LARGEST:
        raise ShapeError(
            f"there are too many {what}: a tensor {shape} has more than {LARGEST} numbers."
        )


def check_skew(name: str, J: Tensor) -> None:
    """Raise unless all matrices `(..., n, n)` are skew-symmetric to rounding."""
    _check_finite(name, J)
    defects = (J + J.mT).abs()
    if bool((defects > SKEW * _sizes(J)).any()):
        raise InterconnectionError(
            f"{name} must be skew-symmetric ({name} = -{name}^T), but {name} + {name}^T has an "
            f"entry of {float(defects.amax()):.3g}; use ({name} - {name}^T) / 2."
        )


def check_semidefinite(name: str, R: Tensor) -> None:
    """Raise unless all matrices `(..., n, n)` are symmetric and positive semidefinite."""
    _check_finite(name, R)
    sizes = _sizes(R)
    if bool(((R - R.mT).abs() > SKEW * sizes).any()):
        raise InterconnectionError(f"{name} must be symmetric; use ({name} + {name}^T) / 2.")
    # In units in which all states count alike; that changes no sign of an eigenvalue.
    scaled = (R / torch.where(sizes > 0, sizes, 1)).double()
    if bool((torch.linalg.eigvalsh(scaled).amin(-1) < -SKEW).any()):
        least = float(torch.linalg.eigvalsh(R.double()).amin())
        raise InterconnectionError(
            f"{name} must be positive semidefinite, for it takes energy away, but has an "
            f"eigenvalue of {least:.3g}."
        )


def _sizes(matrix: Tensor) -> Tensor:
    """What rounding of each entry is measured by: the largest entries of its row and its column."""
    size = torch.maximum(matrix.abs().amax(-1), matrix.abs().amax(-2)).sqrt()
    return size.unsqueeze(-1) * size.unsqueeze(-2)


def _check_finite(name: str, matrix: Tensor) -> None:
    if not bool(torch.isfinite(matrix).all()):
        raise InterconnectionError(f"{name} has NaN or infinite entries.")


def _finite(name: str, given: Any) -> Tensor:
    if not isinstance(given, Tensor) or not given.is_floating_point():
        raise ShapeError(f"{name} must be a tensor of floating-point numbers; use torch.tensor.")
    if not bool(torch.isfinite(given).all()):
        raise ShapeError(f"{name} has NaN or infinite entries.")
    return given.detach().double()


def counted(number: int, what: str) -> str:
    """So many of something, in words: `1 link`, `2 links`."""
    return f"{number} {what}{'' if number == 1 else 's'}"
