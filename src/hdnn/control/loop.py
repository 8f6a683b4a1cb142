"""The closed loop of a plant and its controllers, in discrete time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hdnn import engine as engines
from hdnn.control import kernel
from hdnn.control.certificate import Balance, LoopCertificate, balance, certify
from hdnn.control.controller import Controller
from hdnn.control.plant import Plant, times
from hdnn.control.step import System, system
from hdnn.errors import (
    ConvergenceError,
    OptionError,
    ShapeError,
    choose,
    positive_float,
)

ENGINES = ("auto", "fused", "reference")


class ClosedLoop(nn.Module):
    """A plant and its controllers, simulated so that the energy balance of every step is exact.

    The state of an agent is the state of its plant followed by that of its controller: n = p + c
    numbers. For any weights and any step size, the total energy falls by exactly the dissipated
    energy, up to rounding, as long as the weights do not change. Pairs of steps have order 2.

    Args:
        plant: the plant of the agents.
        controller: the controllers of the agents.
        step: h, the duration of one step.
        engine: "reference" (plain PyTorch, any energy and device), "fused" (one kernel: quadratic
            energies in float64 on a CPU, needs numba) or "auto" (fused if possible). By default the
            engine of `hdnn.engine.use`.

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
        self,
        plant: Plant,
        controller: Controller,
        step: float = 0.05,
        *,
        engine: str | None = None,
    ) -> None:
        super().__init__()
        for name in ("agents", "inputs"):
            ours = getattr(plant, name)
            theirs = getattr(controller, name)
            if ours != theirs:
                raise ShapeError(
                    f"the plant has {ours} {name}, but the controller expects {theirs}; use "
                    f"Controller(.., {name}={ours})."
                )
        if engine is not None:
            choose("engine", engine, ENGINES)
        self.plant = plant
        self.controller = controller
        self.step = positive_float("step", step)
        self.engine = engine

    def start(self, z: Tensor, xi: Any = 0.0) -> Tensor:
        """States of the loop, `(*batch, N, n)`, from those of the plant, `(*batch, N, p)`.

        Args:
            z: the states of the plant.
            xi: the states of the controllers: one number, or a tensor that expands to
                `(*batch, N, c)`.
        """
        N = self.plant.agents
        p = self.plant.states
        if z.shape[-2:] != (N, p):
            raise ShapeError(
                f"z must be (*batch, {N}, {p}), but is {tuple(z.shape)}."
            )
        z = z.to(self.controller.K)
        xi = torch.as_tensor(xi).to(z)
        c = self.controller.states
        xi = xi.expand(*z.shape[:-1], c)
        return torch.cat([z, xi], -1)

    def forward(
        self,
        y: Tensor,
        horizons: int = 1,
        forces: Any = None,
    ) -> Tensor:
        """All states, starting from y.

        Args:
            y: states `(*batch, N, n)`.
            horizons: the number of horizons; after the first, the last weights are kept.
            forces: outside forces on the plants' inputs, a tensor that expands to
                `(steps, *batch, N, m)`.

        Returns:
            The trajectory, `(horizons T + 1, *batch, N, n)`.

        Raises:
            ConvergenceError: if no solution of a step could be found.
        """
        steps = horizons * self.controller.steps
        states, _ = self.run(y, steps, forces=forces)
        return states

    def run(
        self,
        y: Tensor,
        steps: int,
        first: int = 0,
        forces: Any = None,
    ) -> tuple[Tensor, Tensor]:
        """States from y at step `first` on, and the states in the middle of each step.

        In the middle of an even step, the agents' own substeps are done and those of the edges are
        not; in an odd step it is the reverse.
        """
        N = self.plant.agents
        n = self.plant.states + self.controller.states
        if y.shape[-2:] != (N, n):
            raise ShapeError(
                f"y must be (*batch, {N}, {n}), but is {tuple(y.shape)}; loop.start(z) adds the "
                "states of the controllers."
            )
        batch = y.shape[:-2]
        y = y.to(self.controller.K)
        y = y.reshape(-1, N * n)
        push = self._push(forces, steps, batch)
        states, middles = self._trajectory(system(self), y, steps, first, push)
        shape = -1, *batch, N, n
        middles = middles.detach()
        return states.reshape(shape), middles.reshape(shape)

    def _trajectory(
        self,
        substeps: System,
        y: Tensor,
        *options,
    ) -> tuple[Tensor, Tensor]:
        engine = self.engine or engines.current().engine
        reason = kernel.unsupported_reason(y, substeps)
        if engine == "fused" and reason:
            raise OptionError(f'engine="fused" cannot run here: {reason}.')
        if engine == "reference" or reason:
            return substeps.trajectory(y, *options)
        try:
            return kernel.trajectory(substeps, y, *options)
        except ConvergenceError:
            if engine == "fused":
                raise
            return substeps.trajectory(y, *options)

    def _push(
        self,
        forces: Any,
        steps: int,
        batch: torch.Size,
    ) -> Tensor | None:
        """`h g w` for forces w, as states `(steps, S, N n)`."""
        if forces is None:
            return None
        w = self._forces(forces, steps, batch)
        g = self.plant.g.to(w)
        moved = self.step * times(g, w)
        padded = nn.functional.pad(moved, (0, self.controller.states))
        return padded.reshape(steps, batch.numel(), -1)

    def _forces(self, forces: Any, steps: int, batch: torch.Size) -> Tensor:
        """Forces for each step and sample, `(steps, *batch, N, m)`."""
        w = torch.as_tensor(forces)
        w = w.to(self.controller.K)
        N = self.plant.agents
        m = self.plant.inputs
        return w.expand(steps, *batch, N, m)

    def energy(self, y: Tensor, t: int | Tensor) -> Tensor:
        """The energy in the states y `(*batch, N, n)` with the weights of step t: `(*batch,)`.

        With a tensor of steps `(L,)`, the states are `(L, *batch, N, n)`.
        """
        p = self.plant.states
        z = y[..., :p]
        xi = y[..., p:]
        own = self.plant.energy(z)
        return own + self.controller.energy(xi, t)

    def inputs(self, trajectory: Tensor) -> Tensor:
        """The inputs `(steps, *batch, N, m)` of the plants along a trajectory, from step 0 on."""
        controller = self.controller
        xi = trajectory[:-1, ..., self.plant.states :]
        t = torch.arange(len(xi), device=xi.device)
        K, _ = controller.weights(t, xi.ndim)
        forces = torch.tanh(controller.rows(xi, t))
        ports = K @ controller.G
        return -times(ports.mT, forces)

    @torch.no_grad()
    def balance(
        self,
        y: Tensor,
        horizons: int = 1,
        forces: Any = None,
    ) -> Balance:
        """The energy before and after every step, and the dissipated energy.

        The arguments are those of `forward`.
        """
        steps = horizons * self.controller.steps
        states, middles = self.run(y, steps, forces=forces)
        if forces is not None:
            forces = self._forces(forces, steps, y.shape[:-2])
        return balance(self, states, middles, forces)

    def certify(
        self,
        y: Tensor,
        horizons: int = 1,
        samples: int = 2,
    ) -> LoopCertificate:
        """Check the energy balance from the states y, and the gradients along the horizon.

        Args:
            y: states `(*batch, N, n)`.
            horizons: the number of horizons; after the first, the last weights are kept.
            samples: the number of states for which norms of `dy_T/dy_t` are computed.
        """
        return certify(self, y, horizons, samples)

    @property
    def gain(self) -> float:
        """A bound on the gain from outside forces to the plants' outputs.

        Forces and outputs are measured as roots of sums of squares over time and agents. The bound
        holds for any weights and any step, apart from the effect of the energy at the start and of
        changing weights. It is 1 / damping for robots, and infinite if an input acts on undamped
        states.
        """
        R = self.plant.R
        g = self.plant.g
        inverse = torch.linalg.pinv(R, rtol=1e-12, hermitian=True)
        damped = inverse @ g
        undamped = (g - R @ damped).abs()
        rounding = 1e-9 * g.abs().amax()
        if bool((undamped > rounding).any()):
            return float("inf")
        gains = torch.linalg.matrix_norm(g.mT @ damped, 2)
        return float(gains.amax())

    def extra_repr(self) -> str:
        return f"step={self.step:g}"
