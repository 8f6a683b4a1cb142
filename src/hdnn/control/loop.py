"""The closed loop of a plant and its controllers, in discrete time."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from hdnn import engine as engines
from hdnn.control import batched, fused, step
from hdnn.control.certificate import Balance, LoopCertificate, balance_of, certify
from hdnn.control.controller import Controller
from hdnn.control.gains import gain_of
from hdnn.control.plants import Plant
from hdnn.control.step import System
from hdnn.engine.tracing import transformed
from hdnn.errors import (
    ConvergenceError,
    OptionError,
    ShapeError,
    choose,
    int_from,
    positive_float,
    quoted,
)

ENGINES = (*engines.OPTIONS["engine"], "batched")


class ClosedLoop(nn.Module):
    """A plant and its controllers, simulated so that the energy balance of every step is exact.

    The state of an agent is that of its plant, then that of its controller: n = p + c numbers. One
    step is made of average-discrete-gradient substeps. For any weights and any step size the total
    energy falls by just what is dissipated, to rounding, as long as the weights stay the same.
    Steps are of order 2, two by two.

    Args:
        plant: the agents.
        controller: their controllers.
        step: h, the time of one step.
        engine: "fused" (one kernel for all steps: quadratic energies in float64 on a CPU, needs
            numba), "batched" (plain PyTorch, all agents at once, on any device), "reference" (the
            definition, one agent after the other, slow) or "auto": fused where it runs and finds
            a solution, else batched; inside of `torch.func.vmap` and the like the reference. By
            default what `hdnn.engine.use` says.

    Raises:
        ShapeError: if the plant and the controllers are not for the same agents and inputs.
        StepError: if the step is not > 0.
        OptionError: if the engine is not known, or cannot run here.

    Examples:
        >>> import torch
        >>> from hdnn import control
        >>> plant = control.robots(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
        >>> loop = control.ClosedLoop(plant, control.Controller(2, steps=20, links=[(0, 1)]))
        >>> trajectory = loop(loop.start(torch.zeros(5, 2, 4)))  # 5 samples
        >>> trajectory.shape
        torch.Size([21, 5, 2, 8])
        >>> bool((loop.energy(trajectory[-1], 19) <= loop.energy(trajectory[0], 0)).all())
        True
    """

    def __init__(
        self, plant: Plant, controller: Controller, step: float = 0.05, *, engine: str | None = None
    ) -> None:
        super().__init__()
        for name, part, kind in (("plant", plant, Plant), ("controller", controller, Controller)):
            if not isinstance(part, kind):
                raise ShapeError(
                    f"{name} must be a {kind.__name__}, but got {type(part).__name__}."
                )
        for name in ("agents", "inputs"):
            ours, theirs = getattr(plant, name), getattr(controller, name)
            if ours != theirs:
                raise ShapeError(
                    f"the plant has {ours} {name}{' an agent' if name == 'inputs' else ''}, but "
                    f"the controller is for {theirs}; give Controller {name}={ours}."
                )
        if engine is not None:
            choose("engine", engine, ENGINES)
        self.plant, self.controller = plant, controller
        self.step, self.engine = positive_float("step", step), engine

    def start(self, z: Tensor, xi: Any = 0.0) -> Tensor:
        """States of the whole loop, `(*batch, N, n)`, from those of the plant, `(*batch, N, p)`.

        Args:
            z: states of the plant.
            xi: states of the controllers, a number or anything that expands to `(*batch, N, c)`.
        """
        N, p, c = self.plant.agents, self.plant.states, self.controller.states
        z = _states("z", z, N, p).to(self.controller.K.dtype)
        try:
            rest = torch.as_tensor(xi)
            if rest.is_complex():
                raise TypeError("complex")
            rest = rest.to(z).expand(*z.shape[:-1], c)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ShapeError(
                f"xi must be a real number, or expand to {(*z.shape[:-1], c)}, but got "
                f"{quoted(xi)}."
            ) from error
        return torch.cat([z, rest], -1)

    def forward(self, y: Tensor, horizons: int = 1, forces: Any = None) -> Tensor:
        """All states from y on.

        Args:
            y: states `(*batch, N, n)`.
            horizons: how many; after the first one the last weights stay.
            forces: from outside, as `run` takes them.

        Returns:
            The trajectory, `(horizons T + 1, *batch, N, n)`.

        Raises:
            ShapeError: if y or forces have another shape, or forces are not finite.
            ConvergenceError: if a step has no solution, with the step and the agent.
        """
        steps = int_from(1, "horizons", horizons) * self.controller.steps
        return self.run(y, steps, forces=forces)[0]

    def run(
        self, y: Tensor, steps: int, first: int = 0, forces: Any = None
    ) -> tuple[Tensor, Tensor]:
        """States from y at step `first` on, and the other ends of the agents' own substeps.

        Args:
            y: states `(*batch, N, n)`.
            steps: how many.
            first: the number of the first one.
            forces: from outside, which act on the plants' inputs beside the controllers: a number
                or anything that expands to `(steps, *batch, N, m)`; by default none.

        Returns:
            States, `(steps + 1, *batch, N, n)`, and ends without gradients, `(steps, *batch, N,
            n)`.
        """
        y, (N, n) = self._whole(y), self._shape
        steps, first = int_from(0, "steps", steps), int_from(0, "first", first)
        system, pushes = self.system(), self._forces(forces, steps, y.shape[:-2])
        batch, y = y.shape[:-2], y.to(system.K).reshape(-1, N, n)
        if pushes is not None:
            pushes = pushes.reshape(steps, len(y), N, self.plant.inputs)
        engine = self.engine or engines.current().engine
        if engine == "auto" and transformed():
            engine = "reference"  # the only one that `torch.func` can look into
        missing = fused.why_not(y, system)
        if pushes is not None:
            missing = "it knows no forces from outside"
        if engine == "fused" and missing:
            raise OptionError(f'engine="fused" cannot run here: {missing}.')
        found = None
        if engine in ("auto", "fused") and not missing and len(y):
            try:
                found = fused.trajectory(system, y, steps, first)
            except ConvergenceError:
                if engine == "fused":
                    raise  # others solve stiff plants too
        if found is None:
            plain = step if engine == "reference" else batched
            found = plain.trajectory(system, y, steps, first, pushes)
        states, ends = (t.reshape(len(t), *batch, N, n) for t in found)
        return states, ends.detach()

    def system(self) -> System:
        """The plant and the weights as a step takes them, in the dtype of the controllers."""
        plant, controller, dtype = self.plant, self.controller, self.controller.K.dtype
        given = (plant.A, plant.a, plant.J, plant.R, plant.g)
        return System(
            *(t.to(dtype) for t in given),
            plant_links=plant.links,
            couplings=plant.couplings.to(dtype),
            K=controller.K,
            b=controller.b,
            G=controller.G,
            J_c=controller.J.to(dtype),
            R_c=controller.R.to(dtype),
            links=controller.links,
            C=controller.C,
            h=self.step,
            activation=plant.activation,
            weights=None if plant.weights is None else plant.weights.to(dtype),
        )

    def energy(self, y: Tensor, t: int) -> Tensor:
        """The energy of plants and controllers in the states y by the weights of step t.

        Args:
            y: states `(*batch, N, n)`.
            t: a step; after the last one its weights stay.

        Returns:
            Energies, `(*batch,)`.
        """
        p, y = self.plant.states, self._whole(y)
        t = int_from(0, "t", t)
        xi = y[..., p:].to(self.controller.K.dtype)
        return self.plant.energy(y[..., :p]) + self.controller.energy(xi, t)

    def inputs(self, trajectory: Tensor) -> Tensor:
        """What drives the plants in the states of a trajectory, by the weights of each step.

        Args:
            trajectory: states `(steps + 1, *batch, N, n)`; the last one drives nothing any more.

        Returns:
            The inputs u, `(steps, *batch, N, m)`.
        """
        controller, T = self.controller, self.controller.steps
        xi = trajectory[:-1, ..., self.plant.states :]
        K, b = controller.K, controller.b
        if len(xi) != T:
            at = torch.arange(len(xi), device=xi.device).clamp(max=T - 1)
            K, b = K[at], b[at]
        samples = xi.flatten(1, -3) if xi.ndim > 3 else xi.unsqueeze(1)
        slopes = torch.tanh(K @ samples.permute(0, 2, 3, 1) + b.unsqueeze(-1))
        u = -((K @ controller.G).mT @ slopes).permute(0, 3, 1, 2)
        return u.reshape(*xi.shape[:-1], controller.inputs)

    def balance(self, y: Tensor, horizons: int = 1, forces: Any = None) -> Balance:
        """The energy of every step before and after it, and what was dissipated.

        Args:
            y: states `(*batch, N, n)` to start from.
            horizons: how many; after the first one the last weights stay.
            forces: from outside, as `run` takes them.

        Returns:
            The balance of each step and sample.
        """
        steps = int_from(1, "horizons", horizons) * self.controller.steps
        with torch.no_grad():
            found = self.run(y, steps, forces=forces)
            given = self._forces(forces, steps, y.shape[:-2])
            return balance_of(self.system(), *found, given)

    def certify(self, y: Tensor, horizons: int = 1, samples: int = 2) -> LoopCertificate:
        """Check the energy balance from the given states, and the gradients along the horizon.

        Args:
            y: states `(*batch, N, n)` to start from.
            horizons: over how many; after the first one the last weights stay.
            samples: for how many of the first states the norms of `dy_T/dy_t` are computed.

        Returns:
            A certificate; print it to read it.
        """
        return certify(self, y, horizons, samples)

    @property
    def gain(self) -> float:
        """How much larger than forces from outside the plants' outputs can become, at most.

        Both are measured as roots of sums of squares over all steps and agents, beside what the
        energy at the start and new weights add; it holds for any weights and any step. Infinite
        where there is no such bound: an input acts on states that R does not damp, or the energy
        has no lower bound that is known. For robots it is 1 / damping.
        """
        known = self.plant.lowest > -math.inf
        return gain_of(self.plant.R, self.plant.g, self.plant.A) if known else math.inf

    def _forces(self, given: Any, steps: int, batch: torch.Size) -> Tensor | None:
        """Forces as `(steps, *batch, N, m)` of the controllers' dtype, or None."""
        if given is None:
            return None
        shape = (steps, *batch, self.plant.agents, self.plant.inputs)
        try:
            forces = torch.as_tensor(given)
            if forces.is_complex():
                raise TypeError("complex")
            forces = forces.to(self.controller.K).expand(shape)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            shown = tuple(given.shape) if isinstance(given, Tensor) else quoted(given)
            raise ShapeError(
                f"forces must be real numbers that expand to (steps, *batch, N, m) = {shape}, but "
                f"are {'complex' if str(error) == 'complex' else shown}."
            ) from error
        if not bool(torch.isfinite(forces).all()):
            raise ShapeError("forces have NaN or infinite entries.")
        return forces

    @property
    def _shape(self) -> tuple[int, int]:
        """N and n."""
        return self.plant.agents, self.plant.states + self.controller.states

    def _whole(self, y: Tensor) -> Tensor:
        return _states("y", y, *self._shape, "; loop.start(z) adds those of the controllers")

    def extra_repr(self) -> str:
        return f"step={self.step:g}"


def _states(name: str, given: Any, N: int, n: int, advice: str = "") -> Tensor:
    """States `(*batch, N, n)` as they were given, or an error that says what is needed."""
    shown = f"a {type(given).__name__}"
    if isinstance(given, Tensor):
        shown = "complex" if given.is_complex() else tuple(given.shape)
        if not given.is_complex() and given.ndim >= 2 and given.shape[-2:] == (N, n):
            return given
    raise ShapeError(f"{name} must be a real tensor (*batch, {N}, {n}), but is {shown}{advice}.")
