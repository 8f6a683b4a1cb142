"""Implicit layers: solve x = c + B sigma(A x + a) by Newton's method.

Both implicit schemes of this library have this form: the general semi-implicit Euler step in p,
and the implicit midpoint rule in the midpoint. Where there may be several solutions, a layer takes
the one at the end of the curve that `hdnn.integrators.path` follows, sample by sample, and its
inverse takes the one from which the layer comes back. Gradients come from the implicit function
theorem at the solution, never through the iterations, and can be differentiated again. The solver
is one operator to PyTorch, `hdnn::solve_implicit`, so that `torch.compile`, `torch.export` and
`vmap` carry it whole; ONNX has no such operator, and its export says so.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hdnn import activations
from hdnn.activations import Activation
from hdnn.errors import ConvergenceError
from hdnn.integrators import path

MAX_ITER = 50
_STARTS = 64  # of Newton's method, to find other solutions
_LENGTH = 32  # steps along a curve, in units of what max_iter allows at one point
_HALVINGS = 12  # of a Newton step that does not reduce the residual
_CHUNK = 2**24  # entries of all Newton matrices at a time


class SeveralSolutionsWarning(UserWarning):
    """An inverse that is not unique: a layer takes several states y_0 to the same y_1."""


def solve(
    c: Tensor,
    B: Tensor,
    A: Tensor,
    a: Tensor,
    activation: Activation,
    *,
    tol: float | None = None,
    max_iter: int = MAX_ITER,
    where: str = "implicit layer",
    undo: tuple[Tensor | None, Tensor, Tensor] | None = None,
) -> Tensor:
    """The x (*batch, k) with x = c + B sigma(A x + a); A (r, k), B (k, r), a (*batch, r).

    Where `one_solution` says so there is exactly one, which Newton's method finds from the explicit
    guess c + B sigma(A c + a). Elsewhere it is the one that is connected to x = c by solutions
    with smaller B; should that curve go to infinity, the nearest to c of those that are found from
    a few other starts, always the same; or a `ConvergenceError`.

    `undo` = (X, B', A') makes this the inverse of a layer that solves X = c' + B' sigma(A' X + a')
    with the same argument of sigma, where X is None if it is x. Of several x the one is taken
    from which the layer comes to X again. If none does that is a `ConvergenceError`, and if
    several do a `SeveralSolutionsWarning`.
    """
    name = activations.registered(activation).name
    a = a.expand(*c.shape[:-1], a.shape[-1]).to(c.dtype)
    B, A = B.to(c.dtype), A.to(c.dtype)
    X, *layer = (None, None, None) if undo is None else undo
    layer = [X, *(None if t is None else t.detach().to(c.dtype) for t in layer)]
    if X is not None:
        layer[0] = X.detach().expand(*c.shape[:-1], X.shape[-1]).to(c.dtype)
    run = _solve if torch.compiler.is_compiling() else _Solve.apply
    return run(c, B, A, a, name, tol, max_iter, where, *layer)


@torch.library.custom_op("hdnn::solve_implicit", mutates_args=())
def _solve(
    c: Tensor,
    B: Tensor,
    A: Tensor,
    a: Tensor,
    activation: str,
    tol: float | None,
    max_iter: int,
    where: str,
    X: Tensor | None = None,
    B_layer: Tensor | None = None,
    A_layer: Tensor | None = None,
) -> Tensor:
    sigma, k, r = activations.get(activation), c.shape[-1], a.shape[-1]
    work = torch.promote_types(c.dtype, torch.float32)  # no factorisations in half precision
    B, A, chunk = B.to(work), A.to(work), max(1, _CHUNK // (k * k))
    # By default as close as rounding lets it: seldom, that is not quite 4 units in the last place.
    tol, slack = (4 * torch.finfo(work).eps, 8) if tol is None else (tol, 1)
    equation = _Equation(B, A, sigma, tol, slack, max_iter, one_solution(B, A, sigma))
    layer = None
    if B_layer is not None and A_layer is not None and not equation.unique:
        B_layer, A_layer = B_layer.to(work), A_layer.to(work)
        if not one_solution(B_layer, A_layer, sigma):  # both ways have one solution, or neither
            layer = replace(equation, B=B_layer, A=A_layer)
    if layer is not None:
        chunk = max(1, chunk // _STARTS)
    given = [c.reshape(-1, k), a.reshape(-1, r)]
    given += [] if X is None else [X.reshape(-1, X.shape[-1])]
    solutions, counts = [], []
    with torch.autocast(c.device.type, enabled=False):
        for part in zip(*(t.to(work).split(chunk) for t in given), strict=True):
            c_i, a_i, *X_i = part
            if layer is not None:
                x, count = _undo(equation, layer, c_i, a_i, *X_i)
                counts.append(count)
            else:
                x, solved = _search(equation, c_i, a_i)
                if not bool(solved.all()):
                    raise ConvergenceError(_advice(where, c_i, a_i, equation))
            solutions.append(x)
    if counts:
        _tell(where, torch.cat(counts), equation)
    return torch.cat(solutions).to(c.dtype).reshape(c.shape)


@dataclass(frozen=True, eq=False)
class _Equation:
    """x = c + B sigma(A x + a), how closely to solve it, and whether there is just one x."""

    B: Tensor
    A: Tensor
    sigma: Activation
    tol: float
    slack: float
    max_iter: int
    unique: bool

    def newton(self, x: Tensor, c: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        """Newton's method from x, and where it came to a solution."""
        rest = (self.B, self.A, a, self.sigma, self.tol, self.max_iter)
        x, error = _newton(x, c, *rest)
        return x, error <= self.slack * self.tol


def one_solution(B: Tensor, A: Tensor, sigma: Activation) -> bool:
    """Whether x = c + B sigma(A x + a) is known to have exactly one solution, whatever c and a.

    By the `coupling` below 1; or because u - A B sigma(u), with u = A x + a, is monotone: sigma is
    s_min u and a part of slope 0 .. s_max - s_min, so that it is enough that this slope times the
    symmetric part of (I - s_min A B)^-1 A B is below 1. A midpoint step has A B skew, and so one
    solution for any monotone sigma. What holds for A B holds for its transpose.
    """
    P = (sigma.S * B.abs()) @ A.abs()
    if bool(P.sum(-1).amax() < 1):  # a norm of P: cheap, and mostly enough
        return True
    if not bool(torch.isfinite(P).all()):  # there is nothing to choose
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


def _search(equation: _Equation, c: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """The x of each sample, and whether it was found."""
    ways = (_direct, _connected, _nearest) if equation.unique else (_connected, _nearest)
    x, solved = ways[0](equation, c, a)
    for way in ways[1:]:
        if bool(solved.all()):
            break
        lost = (~solved).nonzero()[:, 0]
        x_i, solved_i = way(equation, c[lost], a[lost])
        x, solved = x.index_copy(0, lost, x_i), solved.index_copy(0, lost, solved_i)
    return x, solved


def _direct(equation: _Equation, c: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    return equation.newton(c + equation.sigma(c @ equation.A.mT + a) @ equation.B.mT, c, a)


def _connected(equation: _Equation, c: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    steps = _LENGTH * (equation.max_iter // path.CORRECTIONS)
    x, arrived = path.follow(c, equation.B, equation.A, a, equation.sigma, steps)
    x, solved = equation.newton(x, c, a)
    return x, solved & arrived


def _nearest(equation: _Equation, c: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    nearest, solved = [], []
    pieces = max(1, _CHUNK // (_STARTS * c.shape[-1] ** 2))
    for c_i, a_i in zip(c.split(pieces), a.split(pieces), strict=True):
        x, which = _others(equation, c_i, a_i)
        first = torch.where(which, (x - c_i).norm(dim=-1), torch.inf).argmin(0)
        nearest.append(x.gather(0, first[None, :, None].expand(1, *c_i.shape))[0])
        solved.append(which.any(0))
    return torch.cat(nearest), torch.cat(solved)


def _others(equation: _Equation, c: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """All solutions that Newton's method meets from afar, (starts, batch, k), and which are.

    Half of the starts are c + B s, where for a bounded sigma all solutions lie. The others solve
    the equation with each sigma(u) replaced by 0 or s_max u, as is right for large states of relu
    and its like.
    """
    B, A, sigma = equation.B, equation.A, equation.sigma
    generator = torch.Generator().manual_seed(0)  # the same starts every time
    s = 2 * torch.rand(_STARTS, 1, len(A), generator=generator, dtype=torch.float64).to(c) - 1
    corners, half = s.sign(), _STARTS // 2
    s[::2] = corners[::2]
    near = c + (s[:half] * (1 + sigma(c @ A.mT + a).abs())) @ B.mT
    D = sigma.s_max * (0.5 + 0.5 * corners[half:])
    M = torch.eye(c.shape[-1], dtype=c.dtype, device=c.device) - (B * D) @ A
    far = torch.linalg.solve_ex(M, (c + (D * a) @ B.mT).mT)[0].mT
    x = torch.cat([near, far])
    c, a = (t.expand(_STARTS, *t.shape).flatten(0, 1) for t in (c, a))
    found, which = equation.newton(x.flatten(0, 1), c, a)
    return found.view_as(x), which.view(x.shape[:-1])


def _undo(
    equation: _Equation, layer: _Equation, c: Tensor, a: Tensor, X: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The x from which the layer comes to X, the nearest to c of several; and how many there are.

    X itself is x where none is given.
    """
    x, solved = _search(equation, c, a)
    others, which = _others(equation, c, a)
    found, left = torch.cat([x.unsqueeze(0), others]), torch.cat([solved.unsqueeze(0), which])
    count, best = torch.zeros_like(solved, dtype=torch.int64), torch.full_like(c[:, 0], torch.inf)
    close = torch.finfo(c.dtype).eps ** 0.5
    order = torch.arange(len(found), device=c.device).unsqueeze(-1)
    while bool(left.any()):  # one solution of each sample after the other
        i = left.any(0).nonzero()[:, 0]
        x_i = found[torch.where(left[:, i], order, len(found)).amin(0), i]
        u, X_i = x_i @ equation.A.mT + a[i], x_i if X is None else X[i]
        c_i, a_i = X_i - equation.sigma(u) @ layer.B.mT, u - X_i @ layer.A.mT
        again, comes = _search(layer, c_i, a_i)
        comes &= (again - X_i).abs().amax(-1) <= close * (1 + X_i.abs().amax(-1))
        count[i] += comes
        far = (x_i - c[i]).norm(dim=-1)
        better = comes & (far < best[i])
        x[i[better]], best[i[better]] = x_i[better], far[better]
        same = (found[:, i] - x_i).abs().amax(-1) <= close * (1 + x_i.abs().amax(-1))
        left[:, i] &= ~same
    return x, count


def _tell(where: str, count: Tensor, equation: _Equation) -> None:
    """Say what the inverse of a layer could not find, or found more than once."""
    none, several, B = int((count == 0).sum()), int((count > 1).sum()), len(count)
    factor = f"coupling {float(coupling(equation.A, equation.B, equation.sigma.S)):.3g}"
    advice = "below 1 there is always exactly one: take a smaller h or smaller weights"
    if none:
        raise ConvergenceError(
            f"{where}: no state was found that this layer takes to the given one, for {none} of "
            f"{B} samples ({factor}; {advice}, e.g. by limit_coupling())."
        )
    if several:
        warnings.warn(
            f"{where}: several states go to the same one in this layer, for {several} of {B} "
            f"samples, and the inverse is one of them ({factor}; {advice}).",
            SeveralSolutionsWarning,
            stacklevel=2,
        )


def _newton(
    x: Tensor,
    c: Tensor,
    B: Tensor,
    A: Tensor,
    a: Tensor,
    sigma: Activation,
    tol: float,
    max_iter: int,
) -> tuple[Tensor, Tensor]:
    """Damped Newton steps from x on each sample, and the relative residual that is left."""
    eye = torch.eye(A.shape[1], dtype=c.dtype, device=c.device)
    A_T, B_T = A.mT, B.mT
    A_abs, B_abs = A_T.abs(), B_T.abs()

    def look(x: Tensor, c: Tensor, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The residual, the slope of sigma, and the residual against the terms that make it up."""
        z = x @ A_T + a
        value, slope = sigma(z), sigma.slope(z)
        F = x - c - value @ B_T
        terms = value.abs() + slope.abs() * (x.abs() @ A_abs + a.abs())
        return F, slope, F.abs().amax(-1) / (1 + x.abs().amax(-1) + (terms @ B_abs).amax(-1))

    F, slope, error = look(x, c, a)
    for _ in range(max_iter):
        active = (~(error <= tol)).nonzero()[:, 0]  # a NaN is never below
        if not len(active):
            break
        c_i, a_i, x_i, F_i = c[active], a[active], x[active], F[active]
        M = eye - (B * slope[active][:, None, :]) @ A
        dx = torch.linalg.solve_ex(M, -F_i.unsqueeze(-1))[0].squeeze(-1)
        size, t = F_i.norm(dim=-1, keepdim=True), torch.ones_like(c_i[:, :1])
        for _ in range(_HALVINGS):
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
    return x, error


def coupling(A: Tensor, B: Tensor, S: float) -> Tensor:
    """rho(S |B| |A|), entry by entry: below 1, x = c + B sigma(A x + a) has exactly one solution.

    B diag(sigma') A lies entry by entry below it, so that the right-hand side is a contraction in
    some weighted maximum norm. Never above S | |A| | | |B| |, and 0 where no state meets itself.
    """
    return torch.linalg.eigvals(S * B.abs() @ A.abs()).abs().amax(-1)


def _advice(where: str, c: Tensor, a: Tensor, equation: _Equation) -> str:
    """Why a step did not converge, and what to do."""
    A, B, sigma = equation.A, equation.B, equation.sigma
    if not all(bool(torch.isfinite(t).all()) for t in (c, A, B, a)):
        return f"{where}: the implicit step has no solution: a state or weight is NaN or infinite."
    factor = float(sigma.S * torch.linalg.matrix_norm(A, 2) * torch.linalg.matrix_norm(B, 2))
    return (
        f"{where}: the implicit step did not converge in max_iter = {equation.max_iter} Newton "
        f"iterations (contraction factor {factor:.3g}; below 1 there is always exactly one "
        "solution): take a smaller h or smaller weights (hdnn.training.WellPosed keeps them so in "
        "a training), or raise tol or max_iter."
    )


@_solve.register_fake
def _(c, B, A, a, activation, tol, max_iter, where, X=None, B_layer=None, A_layer=None):
    return torch.empty_like(c, memory_format=torch.contiguous_format)


def _linearise(ctx: Any) -> tuple[torch.dtype, tuple[Tensor, ...]]:
    """What the derivatives at the solution are made of: B, x, sigma, D and M = I - B D A."""
    B, A, a, x = ctx.saved_tensors
    sigma = activations.get(ctx.activation)
    dtype, work = x.dtype, torch.promote_types(x.dtype, torch.float32)
    B, A, a, x = (t.to(work) for t in (B, A, a, x))
    z = x @ A.mT + a
    slope = sigma.slope(z)
    M = torch.eye(A.shape[1], dtype=work, device=x.device) - (B * slope.unsqueeze(-2)) @ A
    return dtype, (B, x, sigma(z), slope, M)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    _, B, A, a, ctx.activation, *_ = inputs
    ctx.save_for_backward(B, A, a, output)


def _backward(ctx: Any, *grads: Any) -> Any:
    """With D = diag(sigma'): v = (I - B D A)^-T g, dc = v, da = u = D B^T v, and so on."""
    dtype, (B, x, sigma_z, slope, M) = _linearise(ctx)
    v = torch.linalg.solve(M.mT, grads[0].to(M.dtype).unsqueeze(-1)).squeeze(-1)
    u = slope * (v @ B)
    rows = [t.reshape(-1, t.shape[-1]) for t in (v, sigma_z, u, x)]
    dB, dA = rows[0].mT @ rows[1], rows[2].mT @ rows[3]
    return v.to(dtype), dB.to(dtype), dA.to(dtype), u.to(dtype), *[None] * 7


_solve.register_autograd(_backward, setup_context=_save)


class _Solve(torch.autograd.Function):
    """The same for `torch.func`, which does not see the formulas of an operator."""

    @staticmethod
    def forward(c, B, A, a, *options):
        return _solve(c, B, A, a, *options)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        _save(ctx, inputs, output)
        ctx.save_for_forward(*inputs[1:4], output)

    backward = staticmethod(_backward)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """dx = (I - B D A)^-1 (dc + dB sigma + B D (dA x + da))."""
        dtype, (B, x, sigma_z, slope, M) = _linearise(ctx)
        dc, dB, dA, da = (0 if t is None else t.to(M.dtype) for t in tangents[:4])
        inner = da + (x @ dA.mT if isinstance(dA, Tensor) else 0)
        right = dc + (sigma_z @ dB.mT if isinstance(dB, Tensor) else 0) + (slope * inner) @ B.mT
        return torch.linalg.solve(M, right.unsqueeze(-1)).squeeze(-1).to(dtype)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        # Samples are independent: a mapped state is more batch; mapped weights are looped over.
        c, B, A, a, *options, X, B_layer, A_layer = (
            t
            if not isinstance(t, Tensor)
            else t.expand(info.batch_size, *t.shape)
            if d is None
            else t.movedim(d, 0)
            for t, d in zip(args, in_dims, strict=True)
        )
        weights = [1, 2, 9, 10]
        if all(in_dims[i] is None for i in weights):
            return _Solve.apply(c, args[1], args[2], a, *options, X, *args[9:]), 0
        mapped = [c, B, A, a, *options, X, B_layer, A_layer]
        one = (
            [t[v] if isinstance(t, Tensor) else t for t in mapped] for v in range(info.batch_size)
        )
        return torch.stack([_Solve.apply(*arguments) for arguments in one]), 0
