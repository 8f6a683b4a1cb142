"""The flow of a mechanical system over one time step, learned from data."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.polynomial.legendre import leggauss
from torch import Tensor, nn
from torch.func import jacrev, vmap

from hdnn import functional
from hdnn.analysis import symplectic_defect
from hdnn.dynamics import learning
from hdnn.errors import OptionError, ShapeError, positive_float, positive_int
from hdnn.io import HubModule
from hdnn.networks import HamiltonianNet
from hdnn.networks.network import Guarantee
from hdnn.schemes import Force

# The sum of all steps h, times the rows: with it, one learning rate fits any depth and width
SPAN = 64.0
# Standard deviations of first weights; of K for one degree of freedom
FIRST = {"K": 1.5, "b": 1.0, "a": 0.03}
ORBIT = 8  # steps to either side, from which `energy` takes the velocity
NODES = 16  # of the integral from the centre to a state
SMOOTH = 0.02  # the largest change of the energy in a step
NUMBERS = 2**20  # of weights, those of steps that run together
POINTS = 20  # states at which `report` differentiates the map


class FlowMap(HubModule):
    """The map from a state y = (p, q) to the state one time step later, learned from data.

    It scales the state, applies an H2 network with gains, and scales back. So it is symplectic for
    any weights: it preserves volumes, however often it is applied, and energies hardly drift.
    States are `(*batch, n)`, momenta first; trajectories are `(steps+1, *batch, n)`, time first.

    With `damped=True` it is conformally symplectic: momenta shrink by a factor that is learned,
    half before the layers and half after them. Inputs push the momenta at the same two moments.

    Args:
        features: n, twice the degrees of freedom.
        layers: N, layers with weights of their own. More of them fit one step better.
        dt: the time between two states.
        rows: hidden units of each half of a layer.
        substeps: how often all layers are applied in one step. More substeps preserve the energy
            better.
        integrator: "semi_implicit_euler", "verlet" or "yoshida4".
        damped: learn a damping of all momenta.
        inputs: the number of inputs (forces, torques); 0 for none.
        options: options for the layers, as in `hdnn.H2`: `activation`, `generator`, `dtype`,
            `device`, and `backprop`; with "reversible", training memory does not grow with depth.

    Examples:
        >>> from hdnn import dynamics
        >>> pendulum = dynamics.systems.get("pendulum")
        >>> trajectories = pendulum.trajectories(20, 50)
        >>> flow = dynamics.FlowMap(2, dt=pendulum.dt)
        >>> history = flow.fit(trajectories, steps=300)
        >>> flow.rollout(trajectories[0], 1000).shape
        torch.Size([1001, 20, 2])
        >>> flow.guarantee().holds
        True
    """

    scale: Tensor
    centre: Tensor

    def __init__(
        self,
        features: int,
        layers: int = 4,
        dt: float = 1.0,
        *,
        rows: int = 64,
        substeps: int = 4,
        integrator: str = "semi_implicit_euler",
        damped: bool = False,
        inputs: int = 0,
        **options: Any,
    ) -> None:
        super().__init__()
        if positive_int("features", features) % 2:
            raise ShapeError(
                f"a state has as many momenta as positions, but {features=} is odd."
            )
        self.dt = positive_float("dt", dt)
        self.substeps = positive_int("substeps", substeps)
        self.damped = damped
        self.inputs = inputs
        self.net = HamiltonianNet(
            features,
            layers,
            integrator,
            T=SPAN / positive_int("rows", rows) / substeps,
            rows=rows,
            gains=True,
            init="paper",
            **options,
        )
        for name in self.net.stacked:
            size = FIRST[name[0]]
            if name[0] == "K":
                size *= (features // 2) ** -0.5
            self.net.assign(name, size * self.net.weight(name))
        like = self.net.weight("b_p").detach()
        self.register_buffer("scale", like.new_ones(2))  # of p and of q
        self.register_buffer("centre", like.new_zeros(features // 2))  # of q
        if damped:
            self.decay = nn.Parameter(like.new_zeros(()))  # in one step
        if inputs:
            self.port = nn.Parameter(like.new_zeros(inputs, features // 2))

    @property
    def damping(self) -> float:
        """The rate c at which momenta decay, `p' = .. - c p`."""
        return self.decay.item() / self.dt if self.damped else 0.0

    def guarantee(self) -> Guarantee:
        """The promise of the layers; a damped map has none."""
        if self.damped:
            return Guarantee(False, "none", "damping shrinks volumes")
        return self.net.guarantee()

    # One step

    def forward(
        self,
        y: Tensor,
        u: Tensor | None = None,
        dt: float | None = None,
        *,
        inverse: bool = False,
    ) -> Tensor:
        """The states one time step after y.

        Args:
            y: states `(*batch, n)`.
            u: inputs `(*batch, inputs)`, constant over the step.
            dt: another time step, by which all layers are scaled.
            inverse: the states one time step before y instead.
        """
        self._check_inputs("u is", u)
        ratio = 1.0 if dt is None else positive_float("dt", dt) / self.dt
        x = self.move(self.scaled(y), u, ratio, inverse=inverse)
        return self.unscaled(x)

    def inverse(
        self, y: Tensor, u: Tensor | None = None, dt: float | None = None
    ) -> Tensor:
        """The states one time step before y."""
        return self(y, u, dt, inverse=True)

    def _check_inputs(self, name: str, u: Any) -> None:
        if (u is None) == bool(self.inputs):
            raise OptionError(
                f"this map has {self.inputs} inputs, but {name} "
                f"{'missing' if u is None else 'given'}."
            )

    def scaled(self, y: Tensor) -> Tensor:
        """The states as the layers read them: of about unit size."""
        p, q = y.chunk(2, -1)
        return torch.cat([p, q - self.centre], -1) / self._scales()

    def unscaled(self, x: Tensor) -> Tensor:
        """The inverse of `scaled`."""
        p, q = (x * self._scales()).chunk(2, -1)
        return torch.cat([p, q + self.centre], -1)

    def _scales(self) -> Tensor:
        # One for all momenta and one for all positions: with them J only changes its length.
        return self.scale.repeat_interleave(len(self.centre))

    def move(
        self,
        x: Tensor,
        u: Tensor | None = None,
        ratio: Any = 1.0,
        *,
        times: int = 1,
        inverse: bool = False,
    ) -> Tensor:
        """One step of scaled states, or several.

        Args:
            x: scaled states `(*batch, n)`.
            u: inputs `(*batch, inputs)`.
            ratio: the time step divided by dt.
            times: the number of steps, for a map without damping and inputs.
            inverse: go back in time.
        """
        net = self.net
        signed = -ratio if inverse else ratio
        x = self._push(x, u, signed, True)
        x = functional.run(
            net.scheme,
            x,
            [_repeated(force, times * self.substeps) for force in net.forces()],
            ratio * net.step,
            activation=net.activation,
            inverse=inverse,
            backprop=None if net.backprop == "auto" else net.backprop,
        )
        return self._push(x, u, signed, False)

    def _push(self, x: Tensor, u: Any, ratio: Any, first: bool) -> Tensor:
        """Half of the damping and half of what the inputs do, before or after the layers."""
        if not (self.damped or self.inputs):
            return x
        p, q = x.chunk(2, -1)
        decay = torch.exp(-0.5 * ratio * self.decay) if self.damped else 1.0
        push = 0.5 * ratio * (u.to(x) @ self.port) if self.inputs else 0.0
        p = decay * p + push if first else decay * (p + push)
        return torch.cat([p, q], -1)

    # Learning and using it

    def fit(self, trajectories: Any, **options: Any) -> learning.History:
        """Learn the map from trajectories: see `hdnn.dynamics.fit`."""
        return learning.fit(self, trajectories, **options)

    @torch.no_grad()
    def rollout(
        self, y: Any, steps: int, inputs: Any = None, *, every: int = 1
    ) -> Tensor:
        """The trajectory from y on: `(steps // every + 1, *batch, n)`.

        Args:
            y: first states `(*batch, n)`.
            steps: how many time steps.
            inputs: the inputs of each step, `(steps, *batch, inputs)`.
            every: return only every `every`-th state, which makes long rollouts faster and saves
                memory.
        """
        steps = positive_int("steps", steps)
        self._check_inputs("inputs are", inputs)
        x = self.scaled(torch.as_tensor(y).to(self.centre))
        states = [x]
        numbers = self.substeps * sum(w.numel() for w in self.net.parameters())
        most = 1 if self.damped or self.inputs else max(1, NUMBERS // numbers)
        for end in range(every, steps + 1, every):
            for k in range(end - every, end, most):
                u = None if inputs is None else torch.as_tensor(inputs[k])
                x = self.move(x, u, times=min(most, end - k))
            states.append(x)
        return self.unscaled(torch.stack(states))

    @torch.no_grad()
    def energy(self, y: Tensor) -> Tensor:
        """The energy that the map keeps, `(*batch,)`; it is 0 at the centre of the data.

        A symplectic map near the identity is the flow of an energy of its own, close to that of the
        system. The velocity is estimated from 8 steps forward and 8 back. Multiplied by J, it is
        the gradient of the energy, which is integrated along the line from the centre to y.

        Raises:
            OptionError: if the map is damped or has inputs, or its step is too large.
        """
        if self.damped or self.inputs:
            raise OptionError(
                "energy() needs a map without damping or inputs: with them, no energy is conserved."
            )
        x = self.scaled(y)
        energy = self._energy(x)
        change = self._energy(self.move(x)) - energy
        if not bool(change.abs().mean() <= SMOOTH * energy.abs().mean()):
            raise OptionError(
                f"the step dt = {self.dt:g} is too large to compute an energy at these states; "
                "learn the map with a smaller dt."
            )
        return energy

    def _energy(self, x: Tensor) -> Tensor:
        """The work along the line from the centre to scaled states."""
        nodes, weights = torch.from_numpy(np.stack(leggauss(NODES))).to(x)
        line = torch.tensordot(0.5 + 0.5 * nodes[:, None], x[None], 1)
        velocity = torch.zeros_like(line)
        after = before = line
        for k in range(1, ORBIT + 1):
            after = self.move(after)
            before = self.move(before, inverse=True)
            chosen = math.comb(2 * ORBIT, ORBIT - k)
            share = chosen / math.comb(2 * ORBIT, ORBIT) / k
            velocity -= (-1) ** k * share * (after - before)
        p_rate, q_rate = velocity.chunk(2, -1)
        p, q = x.chunk(2, -1)
        slopes = (q_rate * p - p_rate * q).sum(-1)
        work = torch.tensordot(0.5 * weights, slopes, 1)
        return work * self.scale.prod() / self.dt

    def report(
        self,
        y: Tensor,
        steps: int = 1000,
        energy: Callable[[Tensor], Tensor] | None = None,
    ) -> FlowReport:
        """Drift of the energy in a rollout, and errors of volume and symplecticity, in float64.

        Args:
            y: first states `(B, n)`.
            steps: the number of steps in the rollout.
            energy: the energy of the system, a function of states; by default the map's own.
        """
        flow = copy.deepcopy(self).double()
        y = y.to(flow.centre)
        H = energy or flow.energy
        inputs = y.new_zeros(steps, self.inputs) if self.inputs else None
        last = flow.rollout(y, steps, inputs, every=steps)[-1]
        rest = torch.cat([0 * flow.centre, flow.centre])
        size = (H(y) - H(rest[None])).abs().mean()
        drift = (H(last) - H(y)).abs().mean() / size
        u = None if inputs is None else inputs[0]
        matrices = vmap(jacrev(lambda y: flow(y, u)))(y[:POINTS]).detach()
        # A damped map shrinks J by exp(-damping dt).
        matrices = matrices.mT * math.exp(0.5 * self.damping * self.dt)
        J = functional.from_X(torch.eye(len(self.centre)).to(y))
        return FlowReport(
            steps,
            float(drift),
            float(symplectic_defect(matrices, J).max()),
            float(torch.linalg.slogdet(matrices)[1].abs().max()),
            self.damping,
        )

    def config(self) -> dict[str, Any]:
        """The constructor arguments, as JSON can hold them."""
        net = self.net
        return {
            "features": net.features,
            "layers": net.layers,
            "dt": self.dt,
            "rows": net.rows,
            "substeps": self.substeps,
            "integrator": net.integrator,
            "activation": net.activation,
            "damped": self.damped,
            "inputs": self.inputs,
        }


def _repeated(force: Force, times: int) -> Force:
    """The layers of a force, repeated `times` times."""
    if times == 1:
        return force
    parts: list[Any] = [
        None if w is None else w.expand(times, *w.shape).flatten(0, 1)
        for w in force
    ]
    return Force(*parts)


@dataclass(frozen=True)
class FlowReport:
    """Measurements of a learned map, in float64.

    Attributes:
        steps: the number of steps in the rollout.
        drift: the mean change in energy between the first and last states of the rollout, divided
            by the mean energy, counted from the centre.
        defect: the deviation from a symplectic map (a conformally symplectic one if damped).
        volume: the largest change of the logarithm of volumes in a step, beyond the damping.
        damping: the learned damping.
    """

    steps: int
    drift: float
    defect: float
    volume: float
    damping: float

    def __str__(self) -> str:
        lines = [
            f"energy      changes by {self.drift:.2g} of its size in {self.steps:,} steps",
            f"symplectic  to {self.defect:.1e}",
            f"volumes     change by {self.volume:.1e} in a step",
        ]
        if self.damping:
            lines.append(f"damping     {self.damping:.4g} per unit of time")
        return "\n".join(lines)
