"""Implicit layers: solve x = c + B sigma(A x + a) by Newton's method.

Both implicit schemes of this library have this form: the general semi-implicit Euler step in p,
and the implicit midpoint rule in the midpoint. Gradients come from the implicit function theorem
at the solution, never through the iterations, and can be differentiated again. The solver is one
operator to PyTorch, `hdnn::solve_implicit`, so that `torch.compile`, `torch.export` and `vmap`
carry it whole; ONNX has no such operator, and its export says so.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hdnn import activations
from hdnn.activations import Activation
from hdnn.errors import ConvergenceError

MAX_ITER = 50
_STARTS = 16  # to try where Newton's method fails from the explicit guess
_HALVINGS = 12  # of a Newton step that does not reduce the residual
_CHUNK = 2**24  # entries of all Newton matrices at a time


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
) -> Tensor:
    """The x (*batch, k) with x = c + B sigma(A x + a); A (r, k), B (k, r), a (*batch, r).

    Newton's method from the explicit guess c + B sigma(A c + a). Where S |A| |B| < 1 there is
    exactly one solution; past that the one that Newton reaches, from there or, should that fail,
    from one of a few other starts, always the same; or a `ConvergenceError`.
    """
    name = activations.registered(activation).name
    a = a.expand(*c.shape[:-1], a.shape[-1]).to(c.dtype)
    B, A = B.to(c.dtype), A.to(c.dtype)
    run = _solve if torch.compiler.is_compiling() else _Solve.apply
    return run(c, B, A, a, name, tol, max_iter, where)


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
) -> Tensor:
    sigma, k, r = activations.get(activation), c.shape[-1], a.shape[-1]
    work = torch.promote_types(c.dtype, torch.float32)  # no factorisations in half precision
    B, A, chunk = B.to(work), A.to(work), max(1, _CHUNK // (k * k))
    # By default as close as rounding lets it: seldom, that is not quite 4 units in the last place.
    tol, slack = (4 * torch.finfo(work).eps, 8) if tol is None else (tol, 1)
    flat = zip(c.reshape(-1, k).split(chunk), a.reshape(-1, r).split(chunk), strict=True)
    solutions = []
    with torch.autocast(c.device.type, enabled=False):
        for c_i, a_i in flat:
            x, error = _search(c_i.to(work), B, A, a_i.to(work), sigma, tol, slack, max_iter)
            if not bool((error <= slack * tol).all()):
                raise ConvergenceError(_advice(where, c_i, B, A, a_i, sigma, max_iter))
            solutions.append(x)
    return torch.cat(solutions).to(c.dtype).reshape(c.shape)


def _search(
    c: Tensor,
    B: Tensor,
    A: Tensor,
    a: Tensor,
    sigma: Activation,
    tol: float,
    slack: float,
    max_iter: int,
) -> tuple[Tensor, Tensor]:
    """Newton from the explicit guess; samples that it fails are tried from elsewhere."""
    x, error = _newton(c + sigma(c @ A.mT + a) @ B.mT, c, B, A, a, sigma, tol, max_iter)
    generator = torch.Generator(c.device).manual_seed(0)  # the same starts every time
    reach = B.abs().sum(-1)  # for a bounded sigma all solutions lie within it
    for _ in range(_STARTS):
        lost = (~(error <= slack * tol)).nonzero()[:, 0]
        if not len(lost):
            break
        away = torch.rand(c.shape[-1], generator=generator, dtype=c.dtype, device=c.device)
        start = c[lost] + reach * (2 * away - 1)
        x_i, error_i = _newton(start, c[lost], B, A, a[lost], sigma, tol, max_iter)
        x, error = x.index_copy(0, lost, x_i), error.index_copy(0, lost, error_i)
    return x, error


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

    def residual(x: Tensor, c: Tensor, a: Tensor) -> Tensor:
        return x - c - sigma(x @ A.mT + a) @ B.mT

    def relative(F: Tensor, x: Tensor, a: Tensor) -> Tensor:
        # The residual is measured against the size of the terms that it is the difference of.
        z = x @ A.mT + a
        terms = sigma(z).abs() + sigma.slope(z).abs() * (x.abs() @ A.mT.abs() + a.abs())
        return F.abs().amax(-1) / (1 + x.abs().amax(-1) + (terms @ B.mT.abs()).amax(-1))

    eye = torch.eye(A.shape[1], dtype=c.dtype, device=c.device)
    F = residual(x, c, a)
    error = relative(F, x, a)
    for _ in range(max_iter):
        active = (~(error <= tol)).nonzero()[:, 0]  # a NaN is never below
        if not len(active):
            break
        c_i, a_i, x_i, F_i = c[active], a[active], x[active], F[active]
        M = eye - (B * sigma.slope(x_i @ A.mT + a_i)[:, None, :]) @ A
        dx = torch.linalg.solve_ex(M, -F_i.unsqueeze(-1))[0].squeeze(-1)
        size, t = F_i.norm(dim=-1, keepdim=True), torch.ones_like(c_i[:, :1])
        for _ in range(_HALVINGS):
            F_new = residual(x_i + t * dx, c_i, a_i)
            worse = ~(F_new.norm(dim=-1, keepdim=True) < (1 - 1e-4 * t) * size)
            if not bool(worse.any()):
                break
            t = torch.where(worse, 0.5 * t, t)
        x = x.index_copy(0, active, x_i + t * dx)
        F = F.index_copy(0, active, residual(x[active], c_i, a_i))
        error = error.index_copy(0, active, relative(F[active], x[active], a_i))
    return x, error


def coupling(A: Tensor, B: Tensor, S: float) -> Tensor:
    """rho(S |B| |A|), entry by entry: below 1, x = c + B sigma(A x + a) has exactly one solution.

    B diag(sigma') A lies entry by entry below it, so that the right-hand side is a contraction in
    some weighted maximum norm. Never above S | |A| | | |B| |, and 0 where no state meets itself.
    """
    return torch.linalg.eigvals(S * B.abs() @ A.abs()).abs().amax(-1)


def _advice(
    where: str, c: Tensor, B: Tensor, A: Tensor, a: Tensor, sigma: Activation, max_iter: int
) -> str:
    """Why a step did not converge, and what to do."""
    if not all(bool(torch.isfinite(t).all()) for t in (c, A, B, a)):
        return f"{where}: the implicit step has no solution: a state or weight is NaN or infinite."
    factor = float(sigma.S * torch.linalg.matrix_norm(A, 2) * torch.linalg.matrix_norm(B, 2))
    return (
        f"{where}: the implicit step did not converge in max_iter = {max_iter} Newton iterations "
        f"(contraction factor {factor:.3g}; below 1 there is always exactly one solution): "
        "take a smaller h or smaller weights, or raise tol or max_iter."
    )


@_solve.register_fake
def _(c, B, A, a, activation, tol, max_iter, where):
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
    return v.to(dtype), dB.to(dtype), dA.to(dtype), u.to(dtype), None, None, None, None


_solve.register_autograd(_backward, setup_context=_save)


class _Solve(torch.autograd.Function):
    """The same for `torch.func`, which does not see the formulas of an operator."""

    @staticmethod
    def forward(c, B, A, a, activation, tol, max_iter, where):
        return _solve(c, B, A, a, activation, tol, max_iter, where)

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
        c, B, A, a, *options = args
        # Samples are independent: a mapped state is more batch; mapped weights are looped over.
        c, B_all, A_all, a = (
            t.expand(info.batch_size, *t.shape) if d is None else t.movedim(d, 0)
            for t, d in zip((c, B, A, a), in_dims[:4], strict=True)
        )
        if in_dims[1] is None and in_dims[2] is None:
            return _Solve.apply(c, B, A, a, *options), 0
        mapped = zip(c, B_all, A_all, a, strict=True)
        return torch.stack([_Solve.apply(*one, *options) for one in mapped]), 0
