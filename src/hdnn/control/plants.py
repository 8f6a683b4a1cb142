"""Plants: agents with a quadratic energy, ports, and skew couplings between neighbours."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hdnn.control.links import Edges, edges, pairs_of
from hdnn.errors import (
    InterconnectionError,
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
LARGEST = 2**30  # numbers in a tensor of a plant or a controller: 8 GiB in float64


class Plant(nn.Module):
    """N agents `z_i' = (J_i - R_i) dH/dz_i + sum_k C_ik dH/dz_k + g_i u_i`, `y_i = g_i^T dH/dz_i`.

    The energy is quadratic, `H = sum_i |A_i z_i + a_i|^2 / 2`. Agents k along an edge of i act on
    it by `C_ik`, and i acts back by `-C_ik^T`, so that they pass energy on and make none. All is
    kept in float64.

    Args:
        A: rows of the energies, `(N, r, p)`.
        J: skew-symmetric, `(N, p, p)`.
        R: dissipation, symmetric and positive semidefinite, `(N, p, p)`.
        g: ports, `(N, p, m)`: where the m inputs of an agent act.
        a: offsets of the rows, `(N, r)`; by default 0.
        links: pairs (i, k) of coupled agents; by default none.
        couplings: `C_ik` for each pair as given, `(E, p, p)`.

    Raises:
        ShapeError: if shapes do not fit together, the port among them, or a value is not finite.
        InterconnectionError: if J is not skew-symmetric, or R not positive semidefinite.
        SparsityError: if a pair does not name two of the agents, or appears twice.

    Examples:
        >>> import torch
        >>> from hdnn import control
        >>> J = torch.tensor([[[0.0, 1.0], [-1.0, 0.0]]])  # one mass on a spring
        >>> plant = control.Plant(torch.eye(2)[None], J, 0 * J, torch.tensor([[[0.0], [1.0]]]))
        >>> plant
        Plant(1 agent of 2 states and 1 input, 0 links)
    """

    A: Tensor
    a: Tensor
    J: Tensor
    R: Tensor
    g: Tensor
    couplings: Tensor

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

    def energy(self, z: Tensor) -> Tensor:
        """The energy of all agents together in the states `(*batch, N, p)`: `(*batch,)`."""
        rows = (self.A @ z.to(self.A).unsqueeze(-1)).squeeze(-1) + self.a
        return 0.5 * rows.square().sum((-2, -1))

    def extra_repr(self) -> str:
        return (
            f"{counted(self.agents, 'agent')} of {counted(self.states, 'state')} and "
            f"{counted(self.inputs, 'input')}, {counted(len(self.links), 'link')}"
        )

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
    own, slots = _owned(links, agents)
    N, p = own
    A = torch.zeros(N, p, p, dtype=torch.float64)
    A[:, 0, 0] = positive_float("spring", spring) ** 0.5
    A[:, 1, 1] = positive_float("mass", mass) ** -0.5
    J, R, g = torch.zeros_like(A), torch.zeros_like(A), A.new_zeros(N, p, 1)
    J[:, 0, 1], J[:, 1, 0], R[:, 1, 1], g[:, 1, 0] = 1, -1, _loss("damping", damping), 1
    C, stiff = A.new_zeros(len(slots), p, p), positive_float("coupling", coupling) ** 0.5
    for e, ((i, _), slot) in enumerate(slots.items()):
        A[i, slot, slot], J[i, slot, 1], J[i, 1, slot], C[e, slot, 1] = stiff, 1, -1, -1
    return Plant(A, J, R, g, links=[*slots], couplings=C)


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
    R[:, 0, 0], g[:, 0, 0] = 1 / positive_float("load", load), 1
    C, inertia = A.new_zeros(len(slots), p, p), positive_float("inductance", inductance) ** -0.5
    heat = _loss("resistance", resistance)
    for e, ((i, _), slot) in enumerate(slots.items()):
        A[i, slot, slot], R[i, slot, slot] = inertia, heat
        J[i, slot, 0], J[i, 0, slot], C[e, slot, 0] = 1, -1, -1
    return Plant(A, J, R, g, links=[*slots], couplings=C)


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
        given = [*given] if isinstance(given, Iterable) else [given]
        ends = (pair for pair in given if isinstance(pair, Iterable))
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
    defects, sizes = (t.abs().amax((-2, -1)) for t in (J + J.mT, J))
    if bool((defects > SKEW * sizes).any()):
        raise InterconnectionError(
            f"{name} must be skew-symmetric ({name} = -{name}^T), but {name} + {name}^T has an "
            f"entry of {float(defects.amax()):.3g}; use ({name} - {name}^T) / 2."
        )


def check_semidefinite(name: str, R: Tensor) -> None:
    """Raise unless all matrices `(..., n, n)` are symmetric and positive semidefinite."""
    _check_finite(name, R)
    defects, sizes = (t.abs().amax((-2, -1)) for t in (R - R.mT, R))
    if bool((defects > SKEW * sizes).any()):
        raise InterconnectionError(f"{name} must be symmetric; use ({name} + {name}^T) / 2.")
    least = torch.linalg.eigvalsh(R.double()).amin(-1)
    if bool((least < -SKEW * sizes).any()):
        raise InterconnectionError(
            f"{name} must be positive semidefinite, for it takes energy away, but has an "
            f"eigenvalue of {float(least.amin()):.3g}."
        )


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
