"""x = c + B sigma(A x + a): Newton's method, and when there is just one solution."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hdnn.activations import Activation
from hdnn.integrators.chords import Chord

HALVINGS = 12  # of a Newton step that does not reduce the residual


@dataclass(frozen=True, eq=False)
class Equation:
    """x = c + B sigma(A x + a), how closely to solve it, and whether there is just one x."""

    B: Tensor
    A: Tensor
    sigma: Activation | Chord
    tol: float
    slack: float
    max_iter: int
    unique: bool

    def newton(self, x: Tensor, c: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        """Damped Newton steps from x on each sample, and which samples converged."""
        B, A, sigma = self.B, self.A, self.sigma
        eye = torch.eye(A.shape[1], dtype=c.dtype, device=c.device)
        A_T, B_T = A.mT, B.mT
        A_abs, B_abs = A_T.abs(), B_T.abs()
        least = torch.finfo(c.dtype).tiny / torch.finfo(c.dtype).eps  # below, nothing is relative

        def look(x: Tensor, c: Tensor, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            """The residual, the slope of sigma, and the residual relative to its terms."""
            z = x @ A_T + a
            value, slope = sigma(z), sigma.slope(z)
            F = x - c - value @ B_T
            terms = value.abs() + slope.abs() * (x.abs() @ A_abs + a.abs())
            size = least + x.abs().amax(-1) + (terms @ B_abs).amax(-1)
            return F, slope, F.abs().amax(-1) / size

        F, slope, error = look(x, c, a)
        for _ in range(self.max_iter):
            active = (~(error <= self.tol)).nonzero()[:, 0]  # a NaN is never below
            if not len(active):
                break
            c_i, a_i, x_i, F_i = c[active], a[active], x[active], F[active]
            M = eye - (B * slope[active][:, None, :]) @ A
            dx = torch.linalg.solve_ex(M, -F_i.unsqueeze(-1))[0].squeeze(-1)
            size, t = F_i.norm(dim=-1, keepdim=True), torch.ones_like(c_i[:, :1])
            for _ in range(HALVINGS):
                x_new = x_i + t * dx
                F_new = x_new - c_i - sigma(x_new @ A_T + a_i) @ B_T
                worse = ~(F_new.norm(dim=-1, keepdim=True) < (1 - 1e-4 * t) * size)
                if not bool(worse.any()):
                    break
                t = torch.where(worse, 0.5 * t, t)
            x_i = x_i + t * dx
            x = x.index_copy(0, active, x_i)
            F_i, slope_i, error_i = look(x_i, c_i, a_i)
            F, slope = F.index_copy(0, active, F_i), slope.index_copy(0, active, slope_i)
            error = error.index_copy(0, active, error_i)
        return x, error <= self.slack * self.tol


def one_solution(B: Tensor, A: Tensor, sigma: Activation | Chord) -> bool:
    """Whether x = c + B sigma(A x + a) is known to have exactly one solution, whatever c and a.

    If the `coupling` is below 1; or if u - A B sigma(u), with u = A x + a, is monotone: sigma is
    s_min u and a part of slope 0 .. s_max - s_min, so that it is enough that this slope times the
    symmetric part of (I - s_min A B)^-1 A B is below 1. A midpoint step has A B skew, and so one
    solution for any monotone sigma. What holds for A B holds for its transpose.
    """
    P = (sigma.S * B.abs()) @ A.abs()
    if bool(P.sum(-1).amax() < 1):  # a norm of P: cheap, and mostly enough
        return True
    if not bool(torch.isfinite(P).all()):  # no solution to choose from
        return True
    high = P
    for _ in range(4):
        high = high @ high
    if bool(high.sum(-1).amax() < 1):  # rho(P)^16 is not above it
        return True
    if sigma.s_min == sigma.s_max or bool(coupling(A, B, sigma.S) < 1):
        return True
    M = (A @ B).double()
    eye = torch.eye(len(M), dtype=M.dtype, device=M.device)
    M, info = torch.linalg.solve_ex(eye - sigma.s_min * M, M)
    M = 0.5 * (sigma.s_max - sigma.s_min) * (M + M.mT)
    finite = not bool(info) and bool(torch.isfinite(M).all())
    return finite and bool(torch.linalg.eigvalsh(M)[-1] < 1)


def row_by_row(M: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Where u = c + M phi(u) is known to have one solution at most; M is `(..., r, r)`.

    phi has slopes low .. high, a range a row, `(..., r)`. As in `one_solution`, it is low u and a
    part of slope 0 .. high - low = d. Two solutions would differ by a u with v = e u, 0 <= e <= d,
    and u = N v, where N = (I - M low)^-1 M. Then v^T N v = v^T u >= sum v^2 / d, which is not so if
    the symmetric part of N, with sqrt(d) on both sides, is below 1.
    """
    M, low, root = M.double(), low.double(), (high - low).double().sqrt()
    finite = torch.isfinite(M).all(-1).all(-1)
    M = torch.where(finite[..., None, None], M, 0)  # which eigvalsh would refuse
    eye = torch.eye(M.shape[-1], dtype=M.dtype, device=M.device)
    N, info = torch.linalg.solve_ex(eye - M * low.unsqueeze(-2), M)
    N = 0.5 * root.unsqueeze(-1) * (N + N.mT) * root.unsqueeze(-2)
    finite = finite & (info == 0) & torch.isfinite(N).all(-1).all(-1)
    N = torch.where(finite[..., None, None], N, 0)
    return finite & (torch.linalg.eigvalsh(N)[..., -1] < 1)


def coupling(A: Tensor, B: Tensor, S: float) -> Tensor:
    """rho(S |B| |A|), entry by entry: below 1, x = c + B sigma(A x + a) has exactly one solution.

    B diag(sigma') A lies entry by entry below it, so that the right-hand side is a contraction in
    some weighted maximum norm. Never above S | |A| | | |B| |, and 0 if no entry depends on itself.
    """
    return torch.linalg.eigvals(S * B.abs() @ A.abs()).abs().amax(-1)
