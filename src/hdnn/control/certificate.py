"""What a closed loop promises about its energy and its gradients, checked along trajectories."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hdnn.activations import Activation
from hdnn.control.energies import energies, energy_of, log_cosh
from hdnn.control.plants import counted
from hdnn.control.step import TANH, System
from hdnn.errors import ShapeError, int_from
from hdnn.integrators.chords import Chord, chord

if TYPE_CHECKING:
    from hdnn.control.loop import ClosedLoop

# In float64, what is below this is rounding, relative to what is summed: a step solves many small
# equations. Other dtypes round as much more as their numbers are further apart.
ROUNDING = 1e-12
ACCURATE = ("tanh", "sin", "relu")  # whose energies are accurate near 0 too
MOST = 512  # states of all agents together, up to which norms of dy_T/dy_t are computed


@dataclass(frozen=True, eq=False)
class Balance:
    """The energy of every step, by its weights: `after = before - lost + supplied`.

    Attributes:
        before: at the start of each step, `(steps, *batch)`.
        after: at its end.
        lost: what was dissipated in it, `h f^T R f >= 0`.
        jumps: how much the energy changes when the next weights come in, `(steps - 1, *batch)`.
        bounds: what these changes are bounded by: the sum of `|dK xi + db|`.
        violation: `|after - before + lost - supplied|`, relative to the terms that the energies
            sum up.
        gained: how far `lost` is below 0, relative to the terms that it sums up.
        exceeded: how far jumps are above their bounds, relative to the rows of both weights.
        supplied: what forces from outside gave, `h w^T outputs`; 0 without forces.
        outputs: what the plants' ports give, `g^T f`, `(steps, *batch, N, m)`.
        forces: w, of the same shape; None without forces.

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
    gained: Tensor
    exceeded: Tensor
    supplied: Tensor
    outputs: Tensor
    forces: Tensor | None

    @property
    def gain(self) -> Tensor:
        """How large outputs are against forces, both as roots of sums of squares: `(*batch,)`.

        NaN where there are no forces to compare with. From where the energy is smallest, and as
        long as weights stay the same, it is never above the `gain` of the loop's certificate.
        """
        if self.forces is None:
            return torch.full_like(self.supplied.sum(0), torch.nan)
        squares = (t.square().sum((0, -2, -1)) for t in (self.outputs, self.forces))
        outputs, forces = (each.sqrt() for each in squares)
        return torch.where(forces > 0, outputs / forces, torch.nan)


def balance_of(
    system: System, states: Tensor, ends: Tensor, forces: Tensor | None = None
) -> Balance:
    """The balance of steps 0, 1, .. with these states and ends of the agents' own substeps."""
    K, b = _per_step(system, states)
    p = system.A.shape[2]
    (start, stop), last = (states[:-1], states[1:]), len(ends) - 1
    before, after = _energy(system, K, b, start), _energy(system, K, b, stop)
    odd = torch.arange(len(ends), device=ends.device) % 2 == 1
    odd = odd.view(-1, *[1] * (ends.ndim - 1))
    first, second = torch.where(odd, ends, start), torch.where(odd, stop, ends)
    rows = (_times(system.A, y[..., :p]) + system.a for y in (first, second))
    f = _times(system.slopes, Chord(system.rows).between(*rows))
    rows = (_times(K, y[..., p:]) + b for y in (first, second))
    f_c = _times(K.mT, chord(TANH, *rows))
    h, heat = system.h, (system.R_c * f_c.square()).sum((-2, -1))
    lost = h * ((f * _times(system.R, f)).sum((-2, -1)) + heat)
    terms = h * ((f.abs() * _times(system.R.abs(), f.abs())).sum((-2, -1)) + heat)
    xi, changes = stop[:last, ..., p:], [(K[s], b[s]) for s in (slice(0, last), slice(1, None))]
    old, new = (_times(K, xi) + b for K, b in changes)
    jumps, bounds = (log_cosh(new) - log_cosh(old)).sum((-2, -1)), (new - old).abs().sum((-2, -1))
    rows = [_terms(K, b, xi).sum((-2, -1)) for K, b in changes]
    outputs = _times(system.g.mT, f)
    work = torch.zeros_like(outputs) if forces is None else h * forces * outputs
    supplied, worked = (t.sum((-2, -1)) for t in (work, work.abs()))
    sizes = _sizes(system, K, b, start) + _sizes(system, K, b, stop) + lost.abs() + worked
    return Balance(
        *(before, after, lost, jumps, bounds),
        violation=_relative((after - before + lost - supplied).abs(), sizes),
        gained=_relative(-lost, terms),
        exceeded=_relative(jumps - bounds, rows[0] + rows[1]),
        supplied=supplied,
        outputs=outputs,
        forces=forces,
    )


def _per_step(system: System, states: Tensor) -> tuple[Tensor, Tensor]:
    """K and b of each step, ready for all samples."""
    at = torch.arange(len(states) - 1, device=states.device).clamp(max=len(system.K) - 1)
    lead = [1] * (states.ndim - 3)
    K, b = system.K[at], system.b[at]
    return K.view(len(at), *lead, *K.shape[1:]), b.view(len(at), *lead, *b.shape[1:])


def _times(A: Tensor, x: Tensor) -> Tensor:
    return (A @ x.unsqueeze(-1)).squeeze(-1)


def _energy(system: System, K: Tensor, b: Tensor, y: Tensor) -> Tensor:
    p = system.A.shape[2]
    rows = _times(system.A, y[..., :p]) + system.a
    plant = energies(system.rows, rows, system.weights).sum((-2, -1))
    return plant + log_cosh(_times(K, y[..., p:]) + b).sum((-2, -1))


def _sizes(system: System, K: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """As the energy, with all terms of its rows taken as positive."""
    z, xi = y.split([system.A.shape[2], K.shape[-1]], -1)
    rows, terms = _times(system.A, z) + system.a, _terms(system.A, system.a, z)
    plant = Chord(system.rows).each(_summed, rows, terms)
    plant = plant if system.weights is None else system.weights * plant
    controllers = _summed(TANH, _times(K, xi) + b, _terms(K, b, xi))
    return plant.sum((-2, -1)) + controllers.sum((-2, -1))


def _summed(sigma: Activation, row: Tensor, terms: Tensor) -> Tensor:
    """What the energy of a row sums up: its own value, and how that changes with the terms."""
    if sigma.name == "identity":
        return 0.5 * terms.square()
    inner = 0 if sigma.name in ACCURATE else 1  # numbers of that size cancel within an integral
    return energy_of(sigma, row).abs() + sigma(row).abs() * terms + inner


def _terms(A: Tensor, a: Tensor, x: Tensor) -> Tensor:
    """The rows A x + a, with all of their terms taken as positive."""
    return _times(A.abs(), x.abs()) + a.abs()


def _relative(above: Tensor, size: Tensor) -> Tensor:
    """What is above 0, relative to a size; NaN where that is not finite and says nothing."""
    found = above.clamp(min=0) / (size + torch.finfo(size.dtype).tiny)
    return torch.where(torch.isfinite(size), found, torch.nan)


@dataclass(frozen=True)
class LoopCertificate:
    """The promise of a closed loop, and what was computed to check it; print it to read it.

    Attributes:
        agents: N.
        steps: how many were looked at.
        samples: how many trajectories.
        violation: the largest violation of the energy balance over all steps and samples, relative
            to what the energies sum up.
        dissipated: the smallest energy that a step took away; never negative, but for rounding.
        bound: by how much changing weights can raise the energy over the horizon at most; 0 where
            they stay the same. After the horizon nothing raises it.
        raised: by how much they did, at most.
        smallest_norm: of dy_T/dy_t along one horizon; None if it was not computed.
        largest_norm: of the same.
        gained: the most that a step made instead of taking it away, relative to what is summed up.
        exceeded: how far new weights raised the energy above their bound at most, likewise.
        rounding: up to where such relative errors are those of rounding, in the loop's dtype.
        lowest: what the plants' energy is never below; -inf if that is not known.
        gain: from forces from outside to the plants' outputs, as roots of sums of squares over
            time, at most; inf if there is no bound of this kind.

    Examples:
        >>> import torch
        >>> from hdnn import control
        >>> plant = control.robots(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
        >>> loop = control.ClosedLoop(plant, control.Controller(2, steps=20, links=[(0, 1)]))
        >>> certificate = loop.certify(loop.start(torch.zeros(1, 2, 4)))
        >>> certificate.holds, certificate.bound, round(certificate.gain, 9)
        (True, 0.0, 5.0)
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
    gained: float = 0.0
    exceeded: float = 0.0
    rounding: float = ROUNDING
    lowest: float = 0.0
    gain: float = math.inf

    @property
    def holds(self) -> bool:
        """Whether every step kept its balance and took energy away or none, to rounding.

        And whether no change of weights raised the energy above its bound. What is NaN or infinite
        never holds.
        """
        return self._computed and not self._broken

    @property
    def _computed(self) -> bool:
        found = (self.violation, self.gained, self.exceeded)
        return all(map(math.isfinite, (*found, self.dissipated, self.bound, self.raised)))

    @property
    def _broken(self) -> list[str]:
        """What does not hold, a clause each."""
        conditions = (
            (
                self.violation,
                f"energies before and after a step differ by {self.violation:.1e} of them from "
                "what was taken away",
            ),
            (
                self.gained,
                f"a step made energy instead of taking it away (it took {self.dissipated:.3g})",
            ),
            (
                self.exceeded,
                f"new weights raised the energy above their bound by {self.exceeded:.1e} of it",
            ),
        )
        return [clause for error, clause in conditions if not error <= self.rounding]

    @property
    def summary(self) -> str:
        """The certificate in a few sentences."""
        text = self._promise
        if not self._computed:
            return text
        if self.bound:
            can, later = ("can", "; afterwards nothing does") if self.holds else ("should", "")
            text += (
                f"New weights {can} raise the energy by {self.bound:.3g} over the horizon at most, "
                f"and did so by {self.raised:.3g}{later}. "
            )
        else:
            text += "The weights stay the same. "
        text += self._about_forces
        if self.smallest_norm is None:
            return f"{text}Norms of dy_T/dy_t were not computed."
        return f"{text}norm(dy_T/dy_t) is {self.smallest_norm:.3g} .. {self.largest_norm:.3g}."

    @property
    def _about_forces(self) -> str:
        """What forces from outside can do; nothing is said where the balance does not hold."""
        if not self.holds:
            return ""
        if self.gain < math.inf:
            return (
                "From forces from outside to outputs the gain is at most "
                f"{self.gain:.3g}, for any weights. "
            )
        why = "not every input of the plants is damped"
        if self.lowest == -math.inf:
            why = "the energy has no lower bound that is known"
        return f"There is no bound on the gain from forces from outside to outputs: {why}. "

    @property
    def _promise(self) -> str:
        steps = "The only step" if self.steps == 1 else f"Every one of {self.steps} steps"
        states, agents = counted(self.samples, "state"), counted(self.agents, "agent")
        theirs = f"{agents} and {'its controller' if self.agents == 1 else 'their controllers'}"
        if self.holds:
            so = "so that the loop is passive"
            if self.lowest == -math.inf:
                so = "but it has no lower bound that is known, so that nothing need be bounded"
            return (
                f"{steps} from {states} keeps its energy balance (violated by "
                f"{self.violation:.1e} of the energies at most): without new weights the energy of "
                f"the {theirs} never grows, {so}. "
            )
        if not self._computed:
            return (
                f"The energy balance of {counted(self.steps, 'step')} from {states} could not be "
                "computed, for some energies are NaN or infinite: nothing is certified."
            )
        return (
            f"The energy balance of the {theirs} does NOT hold in {counted(self.steps, 'step')} "
            f"from {states}: {'; '.join(self._broken)}. "
        )

    def __str__(self) -> str:
        return self.summary


def certify(loop: ClosedLoop, y: Tensor, horizons: int, samples: int) -> LoopCertificate:
    """As `ClosedLoop.certify`."""
    if isinstance(y, Tensor) and not y.numel():
        raise ShapeError(f"a certificate needs a state at least, but y is {tuple(y.shape)}.")
    balance, N = loop.balance(y, horizons), loop.plant.agents
    y = y.reshape(-1, *y.shape[-2:]).to(loop.controller.K.dtype)
    norms = None
    if int_from(0, "samples", samples) and y[0].numel() <= MOST:
        with torch.inference_mode(False), torch.enable_grad():
            norms = torch.stack([_norms(loop, each) for each in y[:samples]])
    apart = torch.finfo(balance.before.dtype).eps / torch.finfo(torch.float64).eps
    return LoopCertificate(
        agents=N,
        steps=len(balance.before),
        samples=len(y),
        violation=_largest(balance.violation),
        dissipated=float(balance.lost.amin()),
        bound=_largest(balance.bounds.sum(0)),
        raised=_largest(balance.jumps.clamp(min=0).sum(0)),
        smallest_norm=None if norms is None else float(norms.amin()),
        largest_norm=None if norms is None else float(norms.amax()),
        gained=_largest(balance.gained),
        exceeded=_largest(balance.exceeded),
        rounding=ROUNDING * apart,
        lowest=loop.plant.lowest,
        gain=loop.gain,
    )


def _largest(found: Tensor) -> float:
    """The largest of some numbers >= 0; 0 where there is none, NaN where one is NaN."""
    return float(found.amax()) if found.numel() else 0.0


def _norms(loop: ClosedLoop, y: Tensor) -> Tensor:
    """The spectral norm of dy_T/dy_t for t = 0 .. T - 1, from a copy of y for each row."""
    T, size = loop.controller.steps, y.numel()
    states = [y.detach().expand(size, *y.shape).clone().requires_grad_()]
    for t in range(T):
        states.append(loop.run(states[-1], 1, t)[0][1])
    last = states[-1]
    rows = torch.eye(size, dtype=last.dtype, device=last.device).view(size, *y.shape)
    found = torch.autograd.grad(states[-1], states[:-1], rows)
    return torch.stack([torch.linalg.matrix_norm(g.reshape(size, size), 2) for g in found])
