"""What a closed loop promises about its energy and its gradients, checked along trajectories."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hdnn import activations
from hdnn.control.controller import log_cosh
from hdnn.control.step import System
from hdnn.errors import int_from
from hdnn.integrators.chords import chord

if TYPE_CHECKING:
    from hdnn.control.loop import ClosedLoop

ROUNDING = 1e-12  # a violation below this is one of rounding: a step solves many small equations
MOST = 512  # states of all agents together, up to which norms of dy_T/dy_t are computed


@dataclass(frozen=True, eq=False)
class Balance:
    """The energy of every step, by the weights of that step: `after = before - lost`.

    Attributes:
        before: at the start of each step, `(steps, *batch)`.
        after: at its end.
        lost: what was dissipated in it, `h f^T R f >= 0`.
        jumps: how much the energy changes when the next weights come in, `(steps - 1, *batch)`.
        bounds: what these changes are bounded by: the sum of `|dK xi + db|`.
        violation: `|after - before + lost|`, relative to the terms that the energies sum up.

    Examples:
        >>> import torch
        >>> from hdnn import control
        >>> plant = control.robots(torch.tensor([[1.0, 0.0]]))
        >>> loop = control.ClosedLoop(plant, control.Controller(1, steps=10))
        >>> balance = loop.balance(loop.start(torch.randn(3, 1, 4)))
        >>> bool((balance.violation < 1e-12).all()), bool((balance.lost >= 0).all())
        (True, True)
    """

    before: Tensor
    after: Tensor
    lost: Tensor
    jumps: Tensor
    bounds: Tensor
    violation: Tensor


def balance_of(system: System, states: Tensor, ends: Tensor) -> Balance:
    """The balance of steps 0, 1, .. with these states and ends of the agents' own substeps."""
    K, b = _per_step(system, states)
    p = system.A.shape[2]
    (start, stop), last = (states[:-1], states[1:]), len(ends) - 1
    before, after = _energy(system, K, b, start), _energy(system, K, b, stop)
    odd = (torch.arange(len(ends)) % 2 == 1).view(-1, *[1] * (ends.ndim - 1)).to(ends.device)
    first, second = torch.where(odd, ends, start), torch.where(odd, stop, ends)
    mean = 0.5 * (first[..., :p] + second[..., :p])
    f = _times(system.A.mT, _times(system.A, mean) + system.a)
    rows = (_times(K, y[..., p:]) + b for y in (first, second))
    f_c = _times(K.mT, chord(activations.get("tanh"), *rows))
    lost = (f * _times(system.R, f)).sum((-2, -1)) + (system.R_c * f_c.square()).sum((-2, -1))
    xi = stop[:last, ..., p:]
    old, new = (_times(K[s], xi) + b[s] for s in (slice(0, last), slice(1, None)))
    jumps, bounds = (log_cosh(new) - log_cosh(old)).sum((-2, -1)), (new - old).abs().sum((-2, -1))
    sizes = _sizes(system, K, b, start) + _sizes(system, K, b, stop) + system.h * lost
    violation = (after - before + system.h * lost).abs() / sizes
    return Balance(before, after, system.h * lost, jumps, bounds, violation)


def _per_step(system: System, states: Tensor) -> tuple[Tensor, Tensor]:
    """K and b of each step, ready for all samples."""
    at = torch.arange(len(states) - 1).clamp(max=len(system.K) - 1)
    lead = [1] * (states.ndim - 3)
    K, b = system.K[at], system.b[at]
    return K.view(len(at), *lead, *K.shape[1:]), b.view(len(at), *lead, *b.shape[1:])


def _times(A: Tensor, x: Tensor) -> Tensor:
    return (A @ x.unsqueeze(-1)).squeeze(-1)


def _energy(system: System, K: Tensor, b: Tensor, y: Tensor) -> Tensor:
    p = system.A.shape[2]
    plant = 0.5 * (_times(system.A, y[..., :p]) + system.a).square()
    return plant.sum((-2, -1)) + log_cosh(_times(K, y[..., p:]) + b).sum((-2, -1))


def _sizes(system: System, K: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """As the energy, with all terms of its rows taken as positive."""
    p, size = system.A.shape[2], y.abs()
    plant = 0.5 * (_times(system.A.abs(), size[..., :p]) + system.a.abs()).square()
    controller = _times(K.abs(), size[..., p:]) + b.abs()
    return plant.sum((-2, -1)) + controller.sum((-2, -1)) + torch.finfo(y.dtype).tiny


@dataclass(frozen=True)
class LoopCertificate:
    """The promise of a closed loop, and what was computed to check it; print it to read it.

    Attributes:
        agents: N.
        steps: how many were looked at.
        samples: how many trajectories.
        violation: the largest violation of the energy balance over all steps and samples, relative
            to what the energies sum up.
        dissipated: the smallest energy that a step took away; never negative.
        bound: by how much changing weights can raise the energy over the horizon at most; 0 where
            they stay the same. After the horizon nothing raises it.
        raised: by how much they did, at most.
        smallest_norm: of dy_T/dy_t along one horizon; None if it was not computed.
        largest_norm: of the same.

    Examples:
        >>> import torch
        >>> from hdnn import control
        >>> plant = control.robots(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
        >>> loop = control.ClosedLoop(plant, control.Controller(2, steps=20, links=[(0, 1)]))
        >>> certificate = loop.certify(loop.start(torch.zeros(1, 2, 4)))
        >>> certificate.holds, certificate.bound
        (True, 0.0)
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

    @property
    def holds(self) -> bool:
        """Whether every step kept its balance to rounding, and took energy away or none."""
        return self.violation <= ROUNDING and self.dissipated >= 0 and self.raised <= self.bound

    @property
    def summary(self) -> str:
        """The certificate in a few sentences."""
        kept = "keeps" if self.violation <= ROUNDING else "does NOT keep"
        text = (
            f"Every one of {self.steps} steps from {self.samples} states {kept} its energy balance "
            f"(violated by {self.violation:.1e} of the energies at most): without new weights the "
            f"energy of the {self.agents} agents and their controllers never grows, so that the "
            "loop is passive. "
        )
        if self.bound:
            text += (
                f"New weights can raise the energy by {self.bound:.3g} over the horizon at most, "
                f"and did so by {self.raised:.3g}; afterwards nothing does. "
            )
        else:
            text += "The weights stay the same. "
        if self.smallest_norm is None:
            return f"{text}Norms of dy_T/dy_t were not computed."
        return f"{text}norm(dy_T/dy_t) is {self.smallest_norm:.3g} .. {self.largest_norm:.3g}."

    def __str__(self) -> str:
        return self.summary


def certify(loop: ClosedLoop, y: Tensor, horizons: int, samples: int) -> LoopCertificate:
    """As `ClosedLoop.certify`."""
    balance, N = loop.balance(y, horizons), loop.plant.agents
    y = y.reshape(-1, *y.shape[-2:])
    norms = None
    if int_from(0, "samples", samples) and y[0].numel() <= MOST:
        norms = torch.stack([_norms(loop, each) for each in y[:samples]])
    return LoopCertificate(
        agents=N,
        steps=len(balance.before),
        samples=len(y),
        violation=float(balance.violation.amax()),
        dissipated=float(balance.lost.amin()),
        bound=float(balance.bounds.sum(0).amax()),
        raised=max(0.0, float(balance.jumps.clamp(min=0).sum(0).amax())),
        smallest_norm=None if norms is None else float(norms.amin()),
        largest_norm=None if norms is None else float(norms.amax()),
    )


def _norms(loop: ClosedLoop, y: Tensor) -> Tensor:
    """The spectral norm of dy_T/dy_t for t = 0 .. T - 1, from a copy of y for each row."""
    T, size = loop.controller.steps, y.numel()
    states = [y.detach().expand(size, *y.shape).clone().requires_grad_()]
    for t in range(T):
        states.append(loop.run(states[-1], 1, t)[0][1])
    rows = torch.eye(size, dtype=states[-1].dtype).view(size, *y.shape)
    found = torch.autograd.grad(states[-1], states[:-1], rows)
    return torch.stack([torch.linalg.matrix_norm(g.reshape(size, size), 2) for g in found])
