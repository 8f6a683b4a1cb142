"""Control problems: a closed loop, the start of its agents, and the cost to minimise."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hdnn.control.controller import Controller
from hdnn.control.cost import Cost, collisions
from hdnn.control.loop import ClosedLoop
from hdnn.control.plant import robots
from hdnn.errors import DataError, OptionError, ShapeError

TRIES = 100  # attempts to draw starts without collisions
# Seconds at the start during which controllers push their robots to one side.
SWIRL = 3.0


@dataclass(eq=False)
class LoopProblem:
    """A closed loop, the states in which its agents start, and the cost to minimise.

    Args:
        loop: the agents and their controllers, whose weights are trained.
        z: the states of the plants at the start, `(N, p)`.
        xi: the states of the controllers at the start: one number, `(c,)` or `(N, c)`.
        cost: a `Cost`, or any function of the loop and a trajectory `(steps + 1, *batch, N, n)`
            that returns one number.
        radius: the largest distance of starts from z, in each coordinate of a position.
        collision: the distance below which two agents collide; 0 for no collisions.

    Examples:
        >>> import torch
        >>> from hdnn import control
        >>> z = torch.tensor([[-1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
        >>> plant = control.robots(-z[:, :2])  # two robots that change places
        >>> loop = control.ClosedLoop(plant, control.Controller(2, steps=50, links=[(0, 1)]))
        >>> problem = control.LoopProblem(loop, z, cost=control.Cost(barrier=10.0))
        >>> problem.starts(16).shape
        torch.Size([16, 2, 8])
    """

    loop: ClosedLoop
    z: Tensor
    xi: Any = 0.0
    cost: Callable[[ClosedLoop, Tensor], Tensor] = field(default_factory=Cost)
    radius: float = 0.5
    collision: float = 0.5

    def __post_init__(self) -> None:
        plant = self.loop.plant
        N = plant.agents
        c = self.loop.controller.states
        z = torch.as_tensor(self.z).detach()
        xi = torch.as_tensor(self.xi).detach()
        self.z = z.double()
        self.xi = xi.double().expand(N, c)
        shape = (N, plant.states)
        if self.z.shape != shape:
            raise ShapeError(
                f"z must have shape {shape}, one row per agent, but has {tuple(self.z.shape)}."
            )
        if not callable(self.cost):
            raise OptionError(
                f"cost must be a function of loop and trajectory, not {self.cost!r}."
            )
        colliding = self._colliding(self.z[None])
        if bool(colliding.any()):
            raise DataError(
                f"agents start in a collision, closer than {self.collision:g}."
            )

    @property
    def dimensions(self) -> int:
        """The coordinates of a position: those of the cost, or one for each input of an agent."""
        own = getattr(self.cost, "dimensions", None)
        return own or self.loop.plant.inputs

    def start(self) -> Tensor:
        """The states of the loop at z and xi, `(N, n)`."""
        return self.loop.start(self.z, self.xi)

    def starts(
        self,
        count: int,
        *,
        seed: int = 0,
        draw: int = 0,
        disc: bool = False,
    ) -> Tensor:
        """Random start states: positions within the radius of z, all other states unchanged.

        A sample in which agents collide at the start is drawn again.

        Args:
            count: the number of samples.
            seed: the seed for the random numbers.
            draw: the number of the draw; training uses 0, 1, ..
            disc: draw from a disc (a ball in space) instead of a square.

        Returns:
            States `(count, N, n)`.
        """
        source = np.random.default_rng([seed, draw])
        z = self.z.repeat(count, 1, 1)
        again = torch.arange(count)
        for _ in range(TRIES):
            moves = self._moves(source, len(again), disc)
            moves = self.radius * torch.from_numpy(moves)
            z[again] = self.z
            z[again, :, : self.dimensions] += moves
            colliding = self._colliding(z[again])
            again = again[colliding]
            if not len(again):
                return self.loop.start(z, self.xi)
        raise DataError(
            f"agents collide at random starts within {self.radius:g}; use a smaller radius, or "
            "place the agents further apart."
        )

    def _moves(
        self,
        source: np.random.Generator,
        count: int,
        disc: bool,
    ) -> np.ndarray:
        shape = count, self.loop.plant.agents, self.dimensions
        if not disc:
            return source.uniform(-1, 1, shape)
        way = source.standard_normal(shape)
        *agents, d = shape
        share = source.uniform(0, 1, (*agents, 1))
        size = share ** (1 / d)
        length = np.linalg.norm(way, axis=-1, keepdims=True)
        return size * way / length

    def _colliding(self, z: Tensor) -> Tensor:
        return collisions(
            z[None],
            self.collision,
            dimensions=self.dimensions,
        )


def crossing(
    links: Any = (),
    seed: int = 0,
    *,
    steps: int = 100,
    horizon: float = 5.0,
    cost: Callable[[ClosedLoop, Tensor], Tensor] | None = None,
    engine: str | None = None,
) -> LoopProblem:
    """Twelve robots in two columns, which must all pass through the middle to change places.

    Robots of mass 1 and damping 0.2 start at x = -3 and 3, y = 5, 3, .. -5, and move up or down at
    speed 0.5; a spring of stiffness 1 pulls each robot to its target on the opposite side of the
    middle. Controllers have 4 states and dissipation 12 on their momenta, which start at 3. Before
    training, controllers act as springs and dampers, slightly different from robot to robot, that
    push their robot to its right for the first 3 seconds.

    Args:
        links: the links of the controllers, as in `Controller`, or "ring".
        seed: the seed for the weights.
        steps: T, the number of steps of a horizon.
        horizon: the duration of the horizon.
        cost: the cost; by default `Cost()`.
        engine: the engine of the loop, as in `ClosedLoop`.

    Examples:
        >>> from hdnn import control
        >>> control.crossing("ring").loop.controller
        Controller(12 agents, 100 steps, 4 states, 2 inputs, 12 links)
    """
    source = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        drawn = torch.randn(*shape, generator=source, dtype=torch.float64)
        return 0.1 * drawn

    z = torch.zeros(12, 4, dtype=torch.float64)
    column = torch.arange(5.0, -6.0, -2.0)
    z[:6, 0] = -3
    z[6:, 0] = 3
    z[:, 1] = column.repeat(2)
    z[:, 3] = 0.5 * z[:, 1].sign()
    right, up = z[:, :2].unbind(1)
    if links == "ring":
        angles = torch.atan2(up, right)
        order = angles.argsort(stable=True)
        following = order.roll(-1)
        links = torch.stack([order, following], 1).tolist()
    heat = [0.0, 0.0, 12.0, 12.0]
    with torch.random.fork_rng(devices=[]):
        controller = Controller(12, steps, links=links, dissipation=heat)
    identity = torch.eye(2, dtype=torch.float64)
    springs = torch.block_diag(0.5 * identity, 2 * identity)
    ports = torch.cat([identity, 3 * identity])
    h = horizon / steps
    time = h * torch.arange(steps)
    phase = math.pi * time / 6
    push = -2 * torch.cos(phase)
    push = push.where(time < SWIRL, 0.0)
    aside = torch.stack([-up, right], 1) / 3
    pushes = push.view(-1, 1, 1) * aside
    K = springs + normal(12, 4, 4)
    G = ports + normal(12, 4, 2)
    C = normal(*controller.C.shape)
    with torch.no_grad():
        controller.K.copy_(K)
        controller.G.copy_(G)
        controller.b[..., :2].copy_(pushes)
        controller.C.copy_(C)
    plant = robots(-z[:, :2])
    loop = ClosedLoop(plant, controller, h, engine=engine)
    xi = torch.tensor([0.0, 0.0, 3.0, 3.0])
    return LoopProblem(loop, z, xi, cost or Cost())
