"""Plants: agents with an energy, ports, and skew-symmetric couplings between neighbours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from hdnn import activations
from hdnn.errors import OptionError, ShapeError

Edge = tuple[int, int]

ROUNDING = 1e-12  # relative deviation allowed in skew and semidefinite matrices


class Plant(nn.Module):
    """N agents `z_i' = (J_i - R_i) dH/dz_i + sum_k C_ik dH/dz_k + g_i u_i`, `y_i = g_i^T dH/dz_i`.

    The energy of an agent is the sum of `s(A_i z_i + a_i)` over its rows, where s is the integral
    of an activation: x^2/2 for the identity, 1 - cos x for sin (a pendulum), log cosh x for tanh (a
    spring with a limited force). A neighbour k acts on agent i through `C_ik`, and i acts back
    through `-C_ik^T`, so couplings pass energy on but create none. All tensors are in float64.

    Args:
        A: the rows of the energies, `(N, r, p)`.
        J: skew-symmetric matrices, `(N, p, p)`.
        R: the dissipation, symmetric and positive semidefinite, `(N, p, p)`.
        g: the ports through which the m inputs of an agent act, `(N, p, m)`.
        a: the offsets of the rows, `(N, r)`; by default 0.
        links: pairs (i, k) of coupled agents.
        couplings: the matrix `C_ik` of each pair, `(E, p, p)`.
        activation: the activation of the rows: one name, or a list of r names.
        weights: factors >= 0 of the rows' energies, `(N, r)`; by default 1.

    Examples:
        >>> import torch
        >>> from hdnn import control
        >>> J = torch.tensor([[[0.0, 1.0], [-1.0, 0.0]]])  # one mass on a spring
        >>> control.Plant(torch.eye(2)[None], J, 0 * J, torch.tensor([[[0.0], [1.0]]]))
        Plant(1 agents of 2 states and 1 inputs, 0 links)
    """

    A: Tensor
    a: Tensor
    J: Tensor
    R: Tensor
    g: Tensor
    couplings: Tensor
    weights: Tensor

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
        A = _matrix("A", A, 3)
        N, r, p = A.shape
        m = g.shape[-1]
        self.agents = N
        self.states = p
        self.inputs = m
        if a is None:
            a = torch.zeros(N, r)
        if weights is None:
            weights = torch.ones(N, r)
        if couplings is None:
            couplings = torch.zeros(len(links), p, p)
        square = (N, p, p)
        shapes = {
            "A": (A, A.shape),
            "J": (J, square),
            "R": (R, square),
            "g": (g, (N, p, m)),
            "a": (a, (N, r)),
            "weights": (weights, (N, r)),
            "couplings": (couplings, (len(links), p, p)),
        }
        for name, (value, shape) in shapes.items():
            matrix = _matrix(name, value, len(shape))
            if matrix.shape != shape:
                raise ShapeError(
                    f"{name} must have shape {shape} to fit A, but has {tuple(matrix.shape)}."
                )
            self.register_buffer(name, matrix)
        check_skew("J", self.J)
        _check_semidefinite(self.R)
        if bool((self.weights < 0).any()):
            raise OptionError(
                "weights must be >= 0, or the energy has no lower bound."
            )
        names = list(activation)
        if isinstance(activation, str):
            names = [activation] * r
        if len(names) != r:
            raise ShapeError(
                f"activation must be one name or {r} names, but got {activation!r}."
            )
        sigmas = map(activations.get, names)
        self.activation = tuple(sigma.name for sigma in sigmas)
        self.links = edges(links, N)
        self.couplings = self._ordered(links)

    def _ordered(self, links: Sequence[tuple[int, int]]) -> Tensor:
        """The couplings in the order of `self.links`, seen from the first agent of each link."""
        by_pair = {}
        for C, (i, k) in zip(self.couplings, links, strict=True):
            by_pair[i, k] = C
            by_pair[k, i] = -C.mT
        ordered = [by_pair[pair] for pair in self.links]
        if not ordered:
            return self.couplings
        return torch.stack(ordered)

    def rows(self, z: Tensor) -> Tensor:
        """The rows `A z + a` for states `(*batch, N, p)`."""
        moved = times(self.A.to(z), z)
        return moved + self.a.to(z)

    def energy(self, z: Tensor) -> Tensor:
        """The total energy of all agents in the states `(*batch, N, p)`: `(*batch,)`."""
        sigma = activations.by_row(self.activation)
        energies = sigma.integral(self.rows(z))
        energies = self.weights.to(z) * energies
        return energies.sum((-2, -1))

    def rest(self) -> Tensor:
        """The rest state `(N, p)`, in which no agent is moved by its own energy."""
        inverse = torch.linalg.pinv(self.A)
        z = -times(inverse, self.a)
        sigma = activations.by_row(self.activation)
        forces = self.weights * sigma(self.rows(z))
        slope = times(self.A.mT, forces)
        slope = slope.abs().amax(-1)
        size = 1 + self.a.abs().sum(-1)
        size = size * self.A.abs().sum((-2, -1))
        if bool((slope > 1e-9 * size).any()):
            raise OptionError(
                "no rest state can be determined from the plant's rows, but a cost on its states "
                "needs one; use Cost(state=0)."
            )
        return z

    def config(self) -> dict[str, Any]:
        """The arguments of the constructor that are not tensors."""
        return {
            "links": [list(pair) for pair in self.links],
            "activation": list(self.activation),
        }

    def constants(self) -> dict[str, Tensor]:
        """The arguments of the constructor that are tensors."""
        names = ("A", "J", "R", "g", "a", "couplings", "weights")
        return {name: getattr(self, name) for name in names}

    def __repr__(self) -> str:
        return (
            f"Plant({self.agents} agents of {self.states} states and {self.inputs} inputs, "
            f"{len(self.links)} links)"
        )


def robots(
    targets: Tensor,
    *,
    mass: float = 1.0,
    spring: float = 1.0,
    damping: float = 0.2,
) -> Plant:
    """Point masses, each damped and pulled to its target by a spring.

    Robots move on a line, in the plane or in space, so targets have one, two or three coordinates.
    The states of a robot are its position and its momentum; its inputs are forces.

    Args:
        targets: the positions of the targets, `(N, d)`.
        mass: the mass of each robot.
        spring: the force towards the target per unit of distance.
        damping: the resisting force per unit of velocity.

    Examples:
        >>> import torch
        >>> from hdnn import control
        >>> control.robots(torch.tensor([[3.0, 1.0], [-3.0, 1.0]]))
        Plant(2 agents of 4 states and 2 inputs, 0 links)
    """
    targets = _matrix("targets", targets, 2)
    N, d = targets.shape
    identity = torch.eye(d, dtype=torch.float64)
    zero = torch.zeros_like(identity)
    pull = spring**0.5
    A = torch.block_diag(pull * identity, mass**-0.5 * identity)
    J = canonical(2 * d)
    R = torch.block_diag(zero, damping * identity)
    g = torch.cat([zero, identity])
    offsets = -pull * targets
    a = torch.cat([offsets, torch.zeros_like(targets)], 1)
    same = (N, 1, 1)
    return Plant(
        A.repeat(same),
        J.repeat(same),
        R.repeat(same),
        g.repeat(same),
        a=a,
    )


def oscillators(
    links: Sequence[tuple[int, int]],
    *,
    agents: int | None = None,
    mass: float = 1.0,
    spring: float = 1.0,
    coupling: float = 1.0,
    damping: float = 0.1,
) -> Plant:
    """Masses, each on its own spring, with a further spring along each link of a graph.

    The states of an agent are its position, its momentum, and the extension of each spring that
    starts at this agent. Agents with fewer springs than others have states that never change. The
    input is a force.

    Args:
        links: pairs of agents.
        agents: N, the number of agents; by default the largest number in `links` plus 1.
        mass: the mass of each agent.
        spring: the stiffness of each agent's own spring.
        coupling: the stiffness of the springs along links.
        damping: the resisting force per unit of velocity.

    Examples:
        >>> from hdnn import control
        >>> control.oscillators([(0, 1), (1, 2), (0, 2)])
        Plant(3 agents of 4 states and 1 inputs, 3 links)
    """
    return Plant(**_chain(links, agents, 1 / mass, damping, coupling, spring))


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

    States are those of `oscillators`, with an angle instead of the position: 0 when a mass hangs,
    pi when it is upright. The input is a torque.

    Args:
        links: pairs of agents.
        agents: N, the number of agents; by default the largest number in `links` plus 1.
        mass: the mass of each agent.
        length: the length of each rod.
        gravity: the gravitational acceleration.
        coupling: the torque of the springs along links, per unit of angle.
        damping: the resisting torque per unit of angular velocity.

    Examples:
        >>> from hdnn import control
        >>> control.pendulums([(0, 1)])
        Plant(2 agents of 3 states and 1 inputs, 1 links)
    """
    inertia = mass * length**2
    arguments = _chain(links, agents, 1 / inertia, damping, coupling, 1.0)
    N, r, _ = arguments["A"].shape
    weights = torch.ones(N, r, dtype=torch.float64)
    weights[:, 0] = mass * gravity * length
    names = ["sin"] + ["identity"] * (r - 1)
    return Plant(**arguments, activation=names, weights=weights)


def _chain(
    links,
    agents,
    inverse_mass,
    damping,
    coupling,
    spring,
) -> dict[str, Any]:
    """The arguments of a plant of masses, with positions, momenta and springs along links."""
    if agents is None:
        last = max((max(pair) for pair in links), default=0)
        agents = last + 1
    N = agents
    pairs = edges(links, N)
    # The springs of an agent come after its position and its momentum.
    states = [2] * N
    slots = []
    for i, _ in pairs:
        slots.append((i, states[i]))
        states[i] += 1
    p = max(states)
    A = torch.zeros(N, p, p, dtype=torch.float64)
    J = torch.zeros_like(A)
    R = torch.zeros_like(A)
    g = torch.zeros(N, p, 1)
    couplings = torch.zeros(len(pairs), p, p)
    A[:, 0, 0] = spring**0.5
    A[:, 1, 1] = inverse_mass**0.5
    J[:, 0, 1] = 1
    J[:, 1, 0] = -1
    R[:, 1, 1] = damping
    g[:, 1, 0] = 1
    for e, (i, slot) in enumerate(slots):
        A[i, slot, slot] = coupling**0.5
        # The difference of the velocities extends the spring.
        J[i, slot, 1] = 1
        J[i, 1, slot] = -1
        couplings[e, slot, 1] = -1
    return {
        "A": A,
        "J": J,
        "R": R,
        "g": g,
        "links": pairs,
        "couplings": couplings,
    }


# Links


def edges(links: Iterable[Edge], agents: int) -> tuple[Edge, ...]:
    """Pairs (i, k), i < k, colour by colour: edges of one colour share no agent."""
    pairs = set()
    for pair in links:
        ends = {i for i in pair if 0 <= i < agents}
        if len(pair) != 2 or len(ends) != 2:
            raise OptionError(
                f"links must be pairs of different agents from 0 .. {agents - 1}, but one is "
                f"{pair!r}."
            )
        i, k = sorted(ends)
        pairs.add((i, k))
    groups = colours(sorted(pairs))
    return tuple(chain.from_iterable(groups))


def colours(pairs: Iterable[Edge]) -> list[list[Edge]]:
    """Groups of pairs that share no agent: each pair joins the first group that fits."""
    groups: list[list[Edge]] = []
    agents: list[set[int]] = []
    for pair in pairs:
        for group, joined in zip(groups, agents, strict=True):
            if joined.isdisjoint(pair):
                group.append(pair)
                joined.update(pair)
                break
        else:
            groups.append([pair])
            agents.append(set(pair))
    return groups


# Matrices


def times(A: Tensor, x: Tensor) -> Tensor:
    """`A x` for matrices `(*batch, r, k)` and vectors `(*batch, k)`."""
    product = A @ x.unsqueeze(-1)
    return product.squeeze(-1)


def blocks(rows: Sequence[Sequence[Tensor]]) -> Tensor:
    """The matrix made of these blocks, row by row."""
    bands = [torch.cat([*row], -1) for row in rows]
    return torch.cat(bands, -2)


def canonical(n: int) -> Tensor:
    """The J of n/2 positions and n/2 momenta."""
    identity = torch.eye(n // 2, dtype=torch.float64)
    zero = torch.zeros_like(identity)
    return blocks([[zero, identity], [-identity, zero]])


def check_skew(name: str, J: Tensor) -> None:
    """Raise unless the matrices `(..., n, n)` are skew-symmetric, to rounding."""
    error = (J + J.mT).abs()
    rounding = ROUNDING * J.abs().amax()
    if bool((error > rounding).any()):
        raise OptionError(
            f"{name} must be skew-symmetric; use ({name} - {name}.mT) / 2."
        )


def _check_semidefinite(R: Tensor) -> None:
    rounding = ROUNDING * R.abs().amax()
    error = (R - R.mT).abs()
    if bool((error > rounding).any()):
        raise OptionError("R must be symmetric; use (R + R.mT) / 2.")
    least = torch.linalg.eigvalsh(R)
    if bool((least < -rounding).any()):
        raise OptionError(
            "R must be positive semidefinite, because it removes energy."
        )


def _matrix(name: str, value: Any, axes: int) -> Tensor:
    """A tensor of finite numbers, in float64."""
    matrix = torch.as_tensor(value).detach().double()
    finite = bool(matrix.isfinite().all())
    if matrix.ndim != axes or not finite:
        shape = tuple(matrix.shape)
        raise ShapeError(
            f"{name} must be a tensor of finite numbers with {axes} axes, but has shape {shape}."
        )
    return matrix.clone()
