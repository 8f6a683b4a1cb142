"""How much forces from outside can move the outputs of plants, for any weights and any step.

Along a loop the energy H changes by what plants lose, forces w supply and new weights raise:

    H_T - H_0 <= -h sum f^T R f + h sum w^T y + raised,        y = g^T f

If R >= r g g^T for every agent, r |y|^2 <= H_0 - lowest + raised + <w, y>, with sums over steps
times h. So |y| <= |w| / r + sqrt((H_0 - lowest + raised) / r): the gain is 1 / r at most.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

ROUNDING = 1e-12  # relative: an eigenvalue of R below is 0, and so is what g has outside its range


def gain_of(R: Tensor, g: Tensor, A: Tensor) -> float:
    """The smallest 1 / r for which R >= r g g^T in every agent: the largest norm of g^T R^+ g.

    R is `(N, p, p)` and positive semidefinite, g is `(N, p, m)`, and A `(N, r, p)` are the rows of
    the energy. Where g reaches states that R does not damp there is no such r, and the gain is
    infinite; what counts as rounding there is measured in states and in the energy, whose units may
    be far apart.
    """
    R, g, A = (t.detach().double() for t in (R, g, A))
    if not all(bool(torch.isfinite(t).all()) for t in (R, g, A)):
        return math.inf
    damping, along = torch.linalg.eigh(R)
    ports = along.mT @ g
    damped = damping > ROUNDING * R.abs().amax((-2, -1)).unsqueeze(-1)
    left = along @ torch.where(damped.unsqueeze(-1), 0, ports)
    for outside, whole in ((left, g), (A @ left, A @ g)):
        if bool((outside.norm(dim=1) > ROUNDING * whole.norm(dim=1)).any()):
            return math.inf
    inverse = torch.where(damped, 1 / damping, 0)
    return float(torch.linalg.matrix_norm((ports.mT * inverse.unsqueeze(-2)) @ ports, 2).amax())
