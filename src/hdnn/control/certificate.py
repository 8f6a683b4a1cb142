"""The guarantee for the energy of a closed loop, and its gradients, checked along trajectories."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hdnn import activations, implicit
from hdnn.control.plant import times

if TYPE_CHECKING:
    from hdnn.control.loop import ClosedLoop

ROUNDING = 1e-12  # in float64: smaller relative errors are rounding
LARGEST = 512  # with more states in all, no norms of dy_T/dy_t are computed


@dataclass(frozen=True, eq=False)
class Balance:
    """The energy of every step, with that step's weights: `after = before - lost + supplied`.

    Attributes:
        before: the energy at the start of each step, `(steps, *batch)`.
        after: the energy at the end of each step.
        lost: the energy that was dissipated, `h f^T R f >= 0`.
        supplied: the energy from outside, `h w^T outputs`; 0 without forces w.
        jumps: the change of energy when the weights change, `(steps - 1, *batch)`.
        bounds: the bounds on these changes: the sums of `|dK xi + db|`.
        violation: `|after - before + lost - supplied|`, relative to the terms of the energies.
        outputs: the outputs of the plants' ports, `g^T f`, `(steps, *batch, N, m)`.
    """

    before: Tensor
    after: Tensor
    lost: Tensor
    supplied: Tensor
    jumps: Tensor
    bounds: Tensor
    violation: Tensor
    outputs: Tensor


def balance(
    loop: ClosedLoop,
    states: Tensor,
    middles: Tensor,
    forces: Tensor | None = None,
) -> Balance:
    """The balance of the steps of a trajectory from step 0 on, as `ClosedLoop.run` returns it."""
    plant = loop.plant
    controller = loop.controller
    p = plant.states
    t = torch.arange(len(middles), device=states.device)
    old = states[:-1]
    new = states[1:]
    before = loop.energy(old, t)
    after = loop.energy(new, t)
    # The ends of the agents' own substeps.
    first = old.clone()
    first[1::2] = middles[1::2]
    second = middles.clone()
    second[1::2] = new[1::2]

    sigma = activations.by_row(plant.activation)
    tanh = activations.get("tanh")
    start = plant.rows(first[..., :p])
    end = plant.rows(second[..., :p])
    chords = implicit.chord(sigma, start, end)
    chords = plant.weights.to(states) * chords
    f = times(plant.A.mT.to(states), chords)
    start = controller.rows(first[..., p:], t)
    end = controller.rows(second[..., p:], t)
    K, _ = controller.weights(t, states.ndim)
    chords = implicit.chord(tanh, start, end)
    f_c = times(K.mT, chords)
    heat = f * times(plant.R.to(states), f)
    heat_c = controller.R.to(states) * f_c.square()
    lost = loop.step * (_total(heat) + _total(heat_c))

    outputs = times(plant.g.mT.to(states), f)
    supplied = torch.zeros_like(lost)
    if forces is not None:
        supplied = loop.step * _total(forces * outputs)
    error = after - before + lost - supplied
    sizes = lost + supplied.abs()
    for y in (old, new):
        sizes = sizes + _terms(loop, y, t)

    xi = states[1:-1, ..., p:]
    start = controller.rows(xi, t[:-1])
    end = controller.rows(xi, t[1:])
    jumps = tanh.integral(end) - tanh.integral(start)
    return Balance(
        before=before,
        after=after,
        lost=lost,
        supplied=supplied,
        jumps=_total(jumps),
        bounds=_total((end - start).abs()),
        violation=error.abs() / (sizes + 1e-290),
        outputs=outputs,
    )


def _total(x: Tensor) -> Tensor:
    """The sum over all agents and their numbers."""
    return x.sum((-2, -1))


def _terms(loop: ClosedLoop, y: Tensor, t: Tensor) -> Tensor:
    """The energy with all terms taken as positive, to which rounding is relative."""
    plant = loop.plant
    z = y[..., : plant.states]
    xi = y[..., plant.states :]
    sigma = activations.by_row(plant.activation)
    rows = plant.rows(z)
    inside = times(plant.A.to(y).abs(), z.abs())
    inside = inside + plant.a.to(y).abs()
    energies = sigma.integral(rows).abs()
    energies = energies + sigma(rows).abs() * inside
    energies = plant.weights.to(y) * energies
    sizes = loop.controller.rows(xi, t).abs()
    sizes = sizes * (1 + sizes)
    return _total(energies) + _total(sizes)


@dataclass(frozen=True)
class LoopCertificate:
    """The guarantee for a closed loop, and the figures that check it; print it to read it.

    Attributes:
        agents: N, the number of agents.
        steps: the number of steps of each trajectory.
        samples: the number of trajectories.
        violation: the largest violation of the energy balance, relative to the energies.
        dissipated: the smallest energy that a step dissipated.
        bound: the largest energy that changing weights can add; after the horizon they add none.
        raised: the largest energy that changing weights did add.
        smallest_norm: the smallest norm of dy_T/dy_t along one horizon; None if not computed.
        largest_norm: the largest norm of dy_T/dy_t.
        gain: the bound on the gain from outside forces to the plants' outputs; infinite if there is
            no bound.
        rounding: the size below which relative errors are rounding.
    """

    agents: int
    steps: int
    samples: int
    violation: float
    dissipated: float
    bound: float
    raised: float
    smallest_norm: float | None
    largest_norm: float | None
    gain: float
    rounding: float = ROUNDING

    @property
    def holds(self) -> bool:
        """True if every step kept its energy balance and added no energy, up to rounding."""
        most = self.bound * (1 + self.rounding) + self.rounding
        return (
            self.violation <= self.rounding
            and self.dissipated >= 0
            and self.raised <= most < math.inf
        )

    def __str__(self) -> str:
        answer = "holds" if self.holds else "does NOT hold"
        norms = "not computed"
        if self.smallest_norm is not None:
            norms = f"{self.smallest_norm:.3g} to {self.largest_norm:.3g}"
        gain = "no bound"
        if math.isfinite(self.gain):
            gain = f"at most {self.gain:.3g}"
        return (
            f"energy balance  {answer} in {self.steps} steps from {self.samples} states of "
            f"{self.agents} agents, to {self.violation:.1e}\nenergy lost     at least "
            f"{self.dissipated:.3g} in each step\nnew weights     add at most {self.raised:.3g} "
            f"(bound {self.bound:.3g}); after the horizon nothing\n"
            f"gain            {gain}, from outside forces to outputs\n"
            f"gradients       norm(dy_T/dy_t) {norms}"
        )


def certify(
    loop: ClosedLoop,
    y: Tensor,
    horizons: int,
    samples: int,
) -> LoopCertificate:
    """The implementation of `ClosedLoop.certify`."""
    checked = loop.balance(y, horizons)
    y = y.reshape(-1, *y.shape[-2:])
    smallest = largest = None
    if samples and y[0].numel() <= LARGEST:
        each = [_norms(loop, state) for state in y[:samples]]
        norms = torch.stack(each)
        smallest = float(norms.amin())
        largest = float(norms.amax())
    bounds = checked.bounds.sum(0)
    raised = checked.jumps.clamp(min=0).sum(0)
    eps = torch.finfo(checked.before.dtype).eps
    coarser = eps / torch.finfo(torch.float64).eps
    return LoopCertificate(
        agents=loop.plant.agents,
        steps=len(checked.before),
        samples=len(y),
        violation=float(checked.violation.amax()),
        dissipated=float(checked.lost.amin()),
        bound=float(bounds.amax()),
        raised=float(raised.amax()),
        smallest_norm=smallest,
        largest_norm=largest,
        gain=loop.gain,
        rounding=ROUNDING * coarser,
    )


@torch.enable_grad()
def _norms(loop: ClosedLoop, y: Tensor) -> Tensor:
    """The spectral norm of dy_T/dy_t for t = 0 .. T - 1, from a copy of y for each row."""
    size = y.numel()
    y = y.detach().to(loop.controller.K)
    copies = y.repeat(size, 1, 1)
    states = [copies.requires_grad_()]
    for t in range(loop.controller.steps):
        trajectory, _ = loop.run(states[-1], 1, t)
        states.append(trajectory[1])
    rows = torch.eye(size).to(y)
    rows = rows.view(size, *y.shape)
    gradients = torch.autograd.grad(states[-1], states[:-1], rows)
    matrices = torch.stack(gradients)
    matrices = matrices.reshape(-1, size, size)
    return torch.linalg.matrix_norm(matrices, 2)
