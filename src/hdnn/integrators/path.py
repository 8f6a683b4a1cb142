"""One solution among several: follow x = c + t B sigma(A x + a) from t = 0 to t = 1.

At t = 0 there is one solution, x = c. A curve of solutions (x, t) begins there. It may turn back
and forth in t, but it does not branch (except for rare numbers), and for a bounded sigma it
always arrives at t = 1. Where it first does is a property of the equation alone: it depends on no
guess, on no other sample, and on rounding no more than any result does. Newton's method from a
guess cannot promise that: which of several solutions it meets is a matter of the last digit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hdnn.integrators.newton import Equation

CORRECTIONS = 4  # Newton steps back onto the curve, at each step along it
LARGEST, SMALLEST = 0.5, 1e-7  # step, in units of the size of B sigma
FAR = 1e6  # units: a curve that gets this far is taken to go to infinity
_BEND = 0.25  # the largest correction, in steps
_TURN = 0.8  # the least cosine between the directions before and after a step


@dataclass(eq=False)
class _Curves:
    """The points z = ((x - c) / unit, t) that the curves of some samples have reached."""

    c: Tensor
    a: Tensor
    unit: Tensor
    z: Tensor
    direction: Tensor  # of unit length
    sign: Tensor  # of det [H_z; direction], which a curve keeps
    step: Tensor

    def some(self, index: Tensor) -> _Curves:
        return _Curves(**{name: value[index] for name, value in vars(self).items()})

    def x(self) -> Tensor:
        return self.c + self.unit * self.z[:, :-1]


def _residual(equation: Equation, curves: _Curves, z: Tensor) -> tuple[Tensor, Tensor]:
    """H(z), which is 0 on the curve, and H_z (batch, k, k + 1)."""
    B, A, sigma = equation.B, equation.A, equation.sigma
    t, u = z[:, -1:], (curves.c + curves.unit * z[:, :-1]) @ A.mT + curves.a
    force = sigma(u) @ B.mT / curves.unit
    D = (B * sigma.slope(u).unsqueeze(-2)) @ A
    eye = torch.eye(D.shape[-1], dtype=D.dtype, device=D.device)
    H_z = torch.cat([eye - t.unsqueeze(-1) * D, -force.unsqueeze(-1)], -1)
    return z[:, :-1] - t * force, H_z


def follow(equation: Equation, c: Tensor, a: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """The ends x (batch, k) of the curves, to most digits, and which arrived within `steps`."""
    dtype, sigma = c.dtype, equation.sigma
    # In float32, rounding could look like a bad step.
    c, B, A, a = (t.double() for t in (c, equation.B, equation.A, a))
    equation = replace(equation, B=B, A=A)
    force = sigma(c @ A.mT + a)
    unit = ((force.abs() + sigma.S) @ B.mT.abs()).amax(-1, keepdim=True).clamp_min(1e-300)
    z = torch.cat([torch.zeros_like(c), torch.zeros_like(unit)], -1)
    curves = _Curves(c, a, unit, z, _upwards(z), torch.ones_like(unit), torch.ones_like(unit))
    curves.direction, _ = _direction(
        _residual(equation, curves, z)[1], curves.direction, curves.sign
    )
    curves.step *= LARGEST
    ends = c.clone()
    # Where B sigma(A c + a) = 0, x = c for all t.
    arrived = ((force @ B.mT) == 0).all(-1)
    index = (~arrived).nonzero()[:, 0]
    curves = curves.some(index)
    for _ in range(steps):
        if not len(index):
            break
        curves, done = _advance(equation, curves)
        ends[index[done]], arrived[index[done]] = curves.x()[done], True
        keep = (~done & (curves.z.abs().amax(-1) < FAR)).nonzero()[:, 0]
        if len(keep) < len(index):
            curves, index = curves.some(keep), index[keep]
    return ends.to(dtype), arrived


def _advance(equation: Equation, curves: _Curves) -> tuple[_Curves, Tensor]:
    """One step along the curves, and which have arrived; a failed step is halved the next time."""
    z, direction, step = curves.z, curves.direction, curves.step
    # A step that would go beyond t = 1 ends there, and is corrected within that plane.
    last = (z + step * direction)[:, -1:] >= 1
    length = torch.where(last, (1 - z[:, -1:]) / direction[:, -1:], step)
    start = z + length * direction
    plane = torch.where(last, _upwards(z), direction)
    point, good, size = start, torch.ones_like(last), None
    rounding = 1e-12 * (1 + start.abs().amax(-1, keepdim=True))
    for _ in range(CORRECTIONS):
        H, H_z = _residual(equation, curves, point)
        off = ((point - start) * plane).sum(-1, keepdim=True)
        dz = torch.linalg.solve_ex(_bordered(H_z, plane), torch.cat([H, off], -1).unsqueeze(-1))[0]
        before, size = size, dz.squeeze(-1).norm(dim=-1, keepdim=True)
        good &= size <= (_BEND * step if before is None else 0.5 * before + rounding)
        point = point - dz.squeeze(-1)
    good &= (point[:, -1:] < 1) | last
    ahead, straight = _direction(_residual(equation, curves, point)[1], direction, curves.sign)
    good &= (straight > _TURN) & torch.isfinite(point).all(-1, keepdim=True)
    sign, onto = curves.sign, torch.zeros_like(good)
    if bool((step < SMALLEST).any()):
        # No step is small enough to follow a kink of sigma: step over it, and go on along H_z.
        onto = (step < SMALLEST) & ~good
        there = z + step * direction
        turned, straight = _direction(_residual(equation, curves, there)[1], direction, sign)
        # If that leads straight back, two curves cross, as symmetric equations can: go straight on.
        cross = onto & (straight < -0.999)
        sign, turned = torch.where(cross, -sign, sign), torch.where(cross, -turned, turned)
        point, ahead = torch.where(onto, there, point), torch.where(onto, turned, ahead)
    moved = good | onto
    largest = LARGEST * (1 + point.abs().amax(-1, keepdim=True))
    longer = torch.where(good, torch.minimum(2 * step, largest), step / 2)
    curves = replace(
        curves,
        z=torch.where(moved, point, z),
        direction=torch.where(moved, ahead, direction),
        sign=sign,
        step=torch.where(onto, 100 * SMALLEST, longer),
    )
    return curves, (good & last)[:, 0]


def _upwards(z: Tensor) -> Tensor:
    """The direction of t."""
    return torch.cat([torch.zeros_like(z[:, :-1]), torch.ones_like(z[:, -1:])], -1)


def _bordered(H_z: Tensor, row: Tensor) -> Tensor:
    return torch.cat([H_z, row.unsqueeze(-2)], -2)


def _direction(H_z: Tensor, before: Tensor, sign: Tensor) -> tuple[Tensor, Tensor]:
    """The unit vector along a curve for which det [H_z; it] has that sign; its cosine to before."""
    LU, pivots, _ = torch.linalg.lu_factor_ex(_bordered(H_z, before))
    along = torch.linalg.lu_solve(LU, pivots, _upwards(before).unsqueeze(-1)).squeeze(-1)
    swaps = (pivots != torch.arange(1, pivots.shape[-1] + 1, device=pivots.device)).sum(-1)
    det = LU.diagonal(dim1=-2, dim2=-1).sign().prod(-1) * (1 - 2 * (swaps % 2))
    along = (sign * det.unsqueeze(-1)) * along / along.norm(dim=-1, keepdim=True)
    return along, (along * before).sum(-1, keepdim=True)
