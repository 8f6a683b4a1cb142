"""Where agents are at rest by themselves: the states in which their energy is smallest."""

from __future__ import annotations

import torch
from torch import Tensor

from hdnn.control.energies import energies
from hdnn.control.plants import Plant
from hdnn.errors import OptionError
from hdnn.integrators.chords import Chord

ITERATIONS = 200
CLOSE = 1e-10  # the force that is left, relative to what it sums up


def rest(plant: Plant) -> Tensor:
    """Where the energy of each agent is smallest, `(N, p)`; states it does not depend on are 0.

    Of a plant whose energy is not quadratic it is a state that no force of the agent itself moves,
    found downhill from where the rows are next to 0: the smallest energy where its activations
    are monotone, and a smallest one among those nearby where they are not (a pendulum hangs).

    Raises:
        OptionError: if there is none, as where a row pushes for ever.
    """
    A, a = plant.A, plant.a
    z = -(torch.linalg.pinv(A) @ a.unsqueeze(-1)).squeeze(-1)
    if plant.quadratic:
        return z
    weights = torch.ones_like(a) if plant.weights is None else plant.weights
    sigma, eye = Chord(plant.rows), torch.eye(A.shape[2], dtype=A.dtype, device=A.device)
    largest = (weights.unsqueeze(-1) * A.square()).sum((-2, -1)).clamp_min(1e-300)
    damping = 1e-3 * largest  # of Newton's steps, an agent each: less where they lead downhill

    def energy(z: Tensor) -> Tensor:
        return energies(plant.rows, _times(A, z) + a, weights).sum(-1)

    for _ in range(ITERATIONS):
        u = _times(A, z) + a
        force, stiff = sigma.between(u, u), 2 * sigma.rate(u, u)  # sigma and its slope
        slope = _times(A.mT, weights * force)
        terms = force.abs() + stiff.abs() * (_times(A.abs(), z.abs()) + a.abs())
        bend = (A.mT * (weights * stiff).unsqueeze(-2)) @ A
        if bool((slope.abs() <= CLOSE * _times(A.mT.abs(), weights * terms)).all()):
            curvatures, along = torch.linalg.eigh(bend)
            falling = curvatures[:, 0] < -CLOSE * largest
            if not bool(falling.any()):
                return z
            z = torch.where(falling.unsqueeze(-1), z + 0.1 * along[..., 0], z)  # off the top
            continue
        M = bend + damping[:, None, None] * eye
        there = z - torch.linalg.solve_ex(M, slope.unsqueeze(-1))[0].squeeze(-1)
        lower = energy(there) <= energy(z)
        z = torch.where(lower.unsqueeze(-1), there, z)
        damping = torch.where(lower, (damping / 8).clamp_min(1e-12 * largest), 4 * damping)
    raise OptionError(
        "the energy of an agent has no smallest value, or none that was found, so that a cost "
        "knows no rest that agents should come to; give Cost state=0."
    )


def _times(A: Tensor, x: Tensor) -> Tensor:
    return (A @ x.unsqueeze(-1)).squeeze(-1)
