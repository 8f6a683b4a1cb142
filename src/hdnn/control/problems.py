"""Problems of control: a closed loop, where its agents start, and what is to be minimised."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hdnn.base import tensorfile
from hdnn.base.files import as_path, reason_of, write_atomically
from hdnn.control import costs
from hdnn.control.controller import Controller
from hdnn.control.loop import ClosedLoop
from hdnn.control.objective import Cost
from hdnn.control.plants import Plant, counted
from hdnn.errors import (
    SENSIBLE,
    CheckpointError,
    DataError,
    OptionError,
    ShapeError,
    as_float,
    choose,
    int_from,
    quoted,
)

NAME = "problem.safetensors"
KEY = "hdnn-control"
FORMAT, LATER = 1, 2  # later: energies that are not quadratic, which version 1 knows nothing of
TRIES = 100  # how often colliding starts are drawn again
PLANT = ("A", "J", "R", "g", "a", "couplings")
WEIGHTS = ("K", "b", "G", "C")


@dataclass(eq=False, repr=False)
class LoopProblem:
    """A closed loop, where its agents start, how far from there, and the cost to be minimised.

    Args:
        loop: the agents and their controllers, whose weights a training changes.
        z: states of the plants at the start, `(N, p)`.
        xi: states of the controllers at the start: a number, `(c,)` or `(N, c)`.
        cost: what is minimised.
        radius: how far from z, in each coordinate of their positions, agents may start.
        collision: the distance below which two agents collide; 0 if they cannot.

    Raises:
        ShapeError: if z, xi or the pairs of the cost do not fit the loop, or are no finite numbers.
        OptionError: if radius or collision is negative, or the loop or the cost is none.
        DataError: if agents start in a collision.

    Examples:
        >>> import torch
        >>> from hdnn import control
        >>> z = torch.tensor([[-1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
        >>> plant = control.robots(-z[:, :2])  # two robots that change places
        >>> loop = control.ClosedLoop(plant, control.Controller(2, steps=50, links=[(0, 1)]))
        >>> problem = control.LoopProblem(loop, z, cost=control.Cost(barrier=10.0))
        >>> problem
        LoopProblem(2 agents, 50 steps of 0.05, 1 link, starts within 0.5)
        >>> problem.starts(16).shape
        torch.Size([16, 2, 8])
    """

    loop: ClosedLoop
    z: Tensor
    xi: Any = 0.0
    cost: Cost = field(default_factory=Cost)
    radius: float = 0.5
    collision: float = 0.5

    def __post_init__(self) -> None:
        if not isinstance(self.loop, ClosedLoop):
            raise OptionError(f"loop must be a ClosedLoop, but got {quoted(self.loop)}.")
        if not isinstance(self.cost, Cost):
            raise OptionError(f"cost must be a Cost, but got {quoted(self.cost)}.")
        N, p, c = self.loop.plant.agents, self.loop.plant.states, self.loop.controller.states
        self.z = _finite("z", self.z)
        if self.z.shape != (N, p):
            raise ShapeError(f"z must be {(N, p)}, a row an agent, but is {tuple(self.z.shape)}.")
        xi = _finite("xi", self.xi)
        if xi.shape not in ((), (c,), (N, c)):
            raise ShapeError(f"xi must be a number, {(c,)} or {(N, c)}, but is {tuple(xi.shape)}.")
        self.xi = xi.expand(N, c).clone()
        self.radius = _size("radius", self.radius)
        self.collision = _size("collision", self.collision)
        if self.cost.dimensions > p:
            raise ShapeError(
                f"an agent has {p} states, so that {self.cost.dimensions} of them are no position."
            )
        if self.cost.pairs and max(map(max, self.cost.pairs)) >= N:
            raise ShapeError(f"the pairs of the cost must be of the agents 0 .. {N - 1}.")
        if self.collision:
            costs.check_apart(self.z, self.collision, dimensions=self.cost.dimensions)
        self._near: tuple[Any, list[tuple[int, int]]] = (), []

    @property
    def agents(self) -> int:
        """N."""
        return self.loop.plant.agents

    def __repr__(self) -> str:
        controller = self.loop.controller
        return (
            f"LoopProblem({counted(self.agents, 'agent')}, {counted(controller.steps, 'step')} of "
            f"{self.loop.step:g}, {counted(len(controller.links), 'link')}, starts within "
            f"{self.radius:g})"
        )

    def start(self) -> Tensor:
        """States of the whole loop at z and xi, `(N, n)`."""
        return self.loop.start(self.z, self.xi)

    def starts(self, count: int, *, seed: int = 0, draw: int = 0, shape: str = "square") -> Tensor:
        """Random states to start from: positions within the radius of z, all else as it is.

        What an agent draws follows from the seed, the number of the draw and the agent alone. A
        sample in which agents would collide from the start is drawn again.

        Args:
            count: how many.
            seed: any whole number >= 0.
            draw: the number of the draw: a training takes 0, 1, ..
            shape: "square", each coordinate within the radius, or "disc" (a ball in space), the
                distance within the radius.

        Returns:
            States `(count, N, n)`.

        Raises:
            ShapeError: if a number is not a whole number, or out of range.
            OptionError: if the shape is not known.
            DataError: if starts collide however often they are drawn.
        """
        count, seed = int_from(0, "count", count), int_from(0, "seed", seed)
        draw = int_from(0, "draw", draw)
        choose("shape", shape, ("square", "disc"))
        again = torch.arange(count)
        z = self.z.expand(count, *self.z.shape).clone()
        for attempt in range(TRIES):
            moved = self._moves(count, seed, draw, attempt, shape)[again]
            d = moved.shape[-1]
            z[again, :, :d] = self.z[:, :d] + moved
            again = again[self._colliding(z[again])]
            if not len(again):
                return self.loop.start(z, self.xi)
        raise DataError(
            f"agents collide at random starts within {self.radius:g} however often they are drawn; "
            "take a smaller radius, or let them start further apart."
        )

    def _moves(self, count: int, seed: int, draw: int, attempt: int, shape: str) -> Tensor:
        """How far each agent of each sample is moved, `(count, N, d)`."""
        found, d = np.zeros((count, self.agents, self.cost.dimensions)), self.cost.dimensions
        if not self.radius:
            return torch.from_numpy(found)
        for i in range(self.agents):
            source = np.random.Generator(np.random.Philox(key=seed, counter=[0, attempt, draw, i]))
            if shape == "square":
                found[:, i] = source.uniform(-1, 1, (count, d))
            else:
                way = source.standard_normal((count, d))
                size = source.uniform(0, 1, (count, 1)) ** (1 / d)
                found[:, i] = size * way / np.linalg.norm(way, axis=1, keepdims=True)
        return self.radius * torch.from_numpy(found)

    def _close_pairs(self) -> list[tuple[int, int]]:
        """Agents that may collide at a random start, by all that decides it as it is now."""
        if not self.collision:
            return []
        d = self.cost.dimensions
        given = self.radius, self.collision, d, tensorfile.bits(self.z).tobytes()
        if self._near[0] != given:
            reach, q = self.collision + 2 * self.radius * d**0.5, self.z[:, :d]
            # By differences: the product of matrices that is faster is wrong far from 0.
            near = torch.cdist(q, q, compute_mode="donot_use_mm_for_euclid_dist") < reach
            self._near = given, [(i, k) for i, k in near.triu(1).nonzero().tolist()]
        return self._near[1]

    def _colliding(self, z: Tensor) -> Tensor:
        pairs = self._close_pairs()
        if not pairs:
            return torch.zeros(len(z), dtype=torch.bool)
        options = {"dimensions": self.cost.dimensions, "pairs": pairs}
        return costs.collisions(z[None], self.collision, **options)

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write the problem with its weights as they are now; `load_problem` reads it back.

        Args:
            folder: made if it is not there; a problem in it is replaced, all of it or nothing.

        Returns:
            The file that was written.

        Raises:
            CheckpointError: if it cannot be written.
            OptionError: if its cost is of a class that extends `Cost`.
        """
        path = as_path(folder)
        if type(self.cost) is not Cost:
            raise OptionError(
                f"a problem whose cost is a {type(self.cost).__name__} cannot be kept in a file, "
                "which holds the numbers of a plain Cost only."
            )
        try:
            path.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:  # or a zero byte in its name
            reason = reason_of(error)
            raise CheckpointError(f"cannot make the folder {str(path)!r}: {reason}.") from error
        plant, controller = self.loop.plant, self.loop.controller
        tensors = {f"plant.{name}": getattr(plant, name) for name in PLANT}
        tensors |= {
            f"controller.{name}": getattr(controller, name) for name in (*WEIGHTS, "J", "R")
        }
        if plant.weights is not None:
            tensors["plant.weights"] = plant.weights
        about = {
            "format": FORMAT if plant.quadratic else LATER,
            "step": self.loop.step,
            "engine": self.loop.engine,
            "frozen": [n for n, p in self.loop.named_parameters() if not p.requires_grad],
            "plant_links": [list(pair) for pair in plant.links],
            "links": [list(pair) for pair in controller.links],
            "activation": list(plant.activation),
            "cost": self.cost.to_dict(),
            "radius": self.radius,
            "collision": self.collision,
        }
        content = tensorfile.packed({**tensors, "z": self.z, "xi": self.xi}, KEY, about)
        write_atomically(path / NAME, content)
        return path / NAME


def checked(problem: object) -> LoopProblem:
    """The problem, or an error that says what was given instead."""
    if not isinstance(problem, LoopProblem):
        raise OptionError(f"problem must be a LoopProblem, but got {quoted(problem)}.")
    return problem


def load_problem(folder: str | os.PathLike[str]) -> LoopProblem:
    """The problem that `LoopProblem.save` or a training wrote to a folder.

    Args:
        folder: the folder.

    Returns:
        The problem with its weights.

    Raises:
        CheckpointError: if there is none, or if it is damaged.

    Examples:
        >>> import tempfile, torch
        >>> from hdnn import control
        >>> problem = control.crossing()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = problem.save(folder)
        ...     again = control.load_problem(folder)
        >>> torch.equal(again.loop.controller.K, problem.loop.controller.K)
        True
    """
    path = as_path(folder) / NAME
    with tensorfile.opened(path, "a problem of control") as file:
        try:
            about = file.about(KEY)
            if about["format"] not in (FORMAT, LATER):
                raise ValueError("another format")
            return _rebuilt(about, file.load(about))
        except CheckpointError:
            raise
        except (LookupError, ValueError, TypeError, AttributeError, RuntimeError) as error:
            raise CheckpointError(
                f"{path} cannot be read as a problem of control; it is damaged or of another kind "
                f"({reason_of(error)})."
            ) from error


def _rebuilt(about: dict[str, Any], tensors: dict[str, Tensor]) -> LoopProblem:
    A, J, R, g, a, couplings = (tensors[f"plant.{name}"] for name in PLANT)
    links = [(i, k) for i, k in about["plant_links"]]
    rows = {
        "activation": about.get("activation", "identity"),
        "weights": tensors.get("plant.weights"),
    }
    plant = Plant(A, J, R, g, a=a, links=links, couplings=couplings, **rows)
    K, G = tensors["controller.K"], tensors["controller.G"]
    with torch.random.fork_rng(devices=[]):
        controller = Controller(
            *(K.shape[1], K.shape[0]),
            states=K.shape[2],
            inputs=G.shape[2],
            links=about["links"],
            J=tensors["controller.J"],
            dissipation=tensors["controller.R"],
            dtype=K.dtype,
        )
    controller.load_state_dict(
        {name: tensors[f"controller.{name}"] for name in (*WEIGHTS, "J", "R")}
    )
    # Files of earlier versions have no engine, no frozen weights and no activations of rows.
    loop = ClosedLoop(plant, controller, about["step"], engine=about.get("engine"))
    for name in about.get("frozen", ()):
        loop.get_parameter(name).requires_grad_(False)
    return LoopProblem(
        loop,
        tensors["z"],
        tensors["xi"],
        Cost.from_dict(about["cost"]),
        radius=about["radius"],
        collision=about["collision"],
    )


def _finite(name: str, given: Any) -> Tensor:
    try:
        found = torch.as_tensor(given).detach()
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise ShapeError(f"{name} must be numbers, in rows of one length.") from None
    if found.is_complex():
        raise ShapeError(f"{name} must be real numbers.")
    found = found.double()
    if not bool(torch.isfinite(found).all()):
        raise ShapeError(f"{name} has NaN or infinite entries.")
    return found.clone()


def _size(name: str, given: object) -> float:
    number = as_float(given)
    if number is None or not 0 <= number <= SENSIBLE:
        raise OptionError(f"{name} must be finite and not negative, but got {quoted(given)}.")
    return number
