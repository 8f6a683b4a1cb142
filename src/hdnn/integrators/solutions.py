"""Which of several solutions of x = c + B sigma(A x + a) a layer takes, and its inverse."""

from __future__ import annotations

import torch
from torch import Tensor

from hdnn.integrators import path
from hdnn.integrators.chords import swapped
from hdnn.integrators.newton import Equation

STARTS = 64  # of Newton's method, to find other solutions
LENGTH = 32  # times max_iter / CORRECTIONS: the steps allowed along a curve
CHUNK = 2**24  # entries of all Newton matrices at a time


def search(equation: Equation, c: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """The x of each sample, and whether it was found."""
    methods = (_direct, _connected, _nearest) if equation.unique else (_connected, _nearest)
    x, solved = methods[0](equation, c, a)
    for method in methods[1:]:
        if bool(solved.all()):
            break
        lost = (~solved).nonzero()[:, 0]
        x_i, solved_i = method(equation, c[lost], a[lost])
        x, solved = x.index_copy(0, lost, x_i), solved.index_copy(0, lost, solved_i)
    return x, solved


def _direct(equation: Equation, c: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    return equation.newton(c + equation.sigma(c @ equation.A.mT + a) @ equation.B.mT, c, a)


def _connected(equation: Equation, c: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    steps = LENGTH * (equation.max_iter // path.CORRECTIONS)
    x, arrived = path.follow(equation, c, a, steps)
    x, solved = equation.newton(x, c, a)
    return x, solved & arrived


def _nearest(equation: Equation, c: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    nearest, solved = [], []
    pieces = max(1, CHUNK // (STARTS * c.shape[-1] ** 2))
    for c_i, a_i in zip(c.split(pieces), a.split(pieces), strict=True):
        x, which = from_afar(equation, c_i, a_i)
        first = torch.where(which, (x - c_i).norm(dim=-1), torch.inf).argmin(0)
        nearest.append(x.gather(0, first[None, :, None].expand(1, *c_i.shape))[0])
        solved.append(which.any(0))
    return torch.cat(nearest), torch.cat(solved)


def from_afar(equation: Equation, c: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """Where Newton's method ends from many far starts, (starts, batch, k), and which are solutions.

    Half of the starts are c + B s, where for a bounded sigma all solutions lie. The others solve
    the equation with each sigma(u) replaced by 0 or s_max u, as is right for large states of relu
    and its like.
    """
    B, A, sigma = equation.B, equation.A, equation.sigma
    generator = torch.Generator().manual_seed(0)  # the same starts every time
    s = 2 * torch.rand(STARTS, 1, len(A), generator=generator, dtype=torch.float64).to(c) - 1
    corners, half = s.sign(), STARTS // 2
    s[::2] = corners[::2]
    near = c + (s[:half] * (1 + sigma(c @ A.mT + a).abs())) @ B.mT
    D = sigma.s_max * (0.5 + 0.5 * corners[half:])
    M = torch.eye(c.shape[-1], dtype=c.dtype, device=c.device) - (B * D) @ A
    far = torch.linalg.solve_ex(M, (c + (D * a) @ B.mT).mT)[0].mT
    x = torch.cat([near, far])
    c, a = (t.expand(STARTS, *t.shape).flatten(0, 1) for t in (c, a))
    found, which = equation.newton(x.flatten(0, 1), c, a)
    return found.view_as(x), which.view(x.shape[:-1])


def undo(
    equation: Equation, layer: Equation, c: Tensor, a: Tensor, X: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The x that the layer maps to X, the nearest to c of several; and how many there are.

    Without an X it is x itself.
    """
    x, solved = search(equation, c, a)
    others, which = from_afar(equation, c, a)
    found, left = torch.cat([x.unsqueeze(0), others]), torch.cat([solved.unsqueeze(0), which])
    count, best = torch.zeros_like(solved, dtype=torch.int64), torch.full_like(c[:, 0], torch.inf)
    close = torch.finfo(c.dtype).eps ** 0.5
    order = torch.arange(len(found), device=c.device).unsqueeze(-1)
    while bool(left.any()):  # one solution of each sample after the other
        i = left.any(0).nonzero()[:, 0]
        x_i = found[torch.where(left[:, i], order, len(found)).amin(0), i]
        u, X_i = x_i @ equation.A.mT + a[i], x_i if X is None else X[i]
        c_i = X_i - equation.sigma(u) @ layer.B.mT
        a_i = swapped(equation.sigma, u) - X_i @ layer.A.mT
        again, comes = search(layer, c_i, a_i)
        comes &= (again - X_i).abs().amax(-1) <= close * (1 + X_i.abs().amax(-1))
        count[i] += comes
        far = (x_i - c[i]).norm(dim=-1)
        better = comes & (far < best[i])
        x[i[better]], best[i[better]] = x_i[better], far[better]
        same = (found[:, i] - x_i).abs().amax(-1) <= close * (1 + x_i.abs().amax(-1))
        left[:, i] &= ~same
    return x, count
