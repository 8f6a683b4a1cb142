"""Implicit layers: solve x = c + B sigma(A x + a) by Newton's method.

All implicit schemes of this library have this form: the general semi-implicit Euler step in p, the
implicit midpoint rule in the midpoint, and the discrete gradient step, whose sigma is a chord of
its integral (`hdnn.integrators.chords`). Where there may be several solutions, a layer takes
the one at the end of the curve that `hdnn.integrators.path` follows, sample by sample, and its
inverse takes the one from which the layer comes back. Gradients come from the implicit function
theorem at the solution, never through the iterations, and can be differentiated again. The solver
is one operator to PyTorch, `hdnn::solve_implicit`, so that `torch.compile`, `torch.export` and
`vmap` carry it whole; ONNX has no such operator, and its export says so.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hdnn import activations
from hdnn.activations import Activation
from hdnn.errors import ConvergenceError
from hdnn.integrators import chords, solutions
from hdnn.integrators.chords import Chord
from hdnn.integrators.newton import Equation, coupling, one_solution

MAX_ITER = 50


class SeveralSolutionsWarning(UserWarning):
    """An inverse that is not unique: a layer takes several states y_0 to the same y_1.

    Examples:
        >>> import warnings, hdnn, torch
        >>> like = {"generator": torch.Generator().manual_seed(1), "dtype": torch.float64}
        >>> y = 2 * torch.randn(30, 4, **like)
        >>> net = hdnn.ImplicitH2(4, 1, step=1.0, activation="sin", init="paper", **like)
        >>> with warnings.catch_warnings(record=True, action="always") as caught:
        ...     start = net.inverse(net(y))
        >>> caught[0].category.__name__
        'SeveralSolutionsWarning'
    """


def solve(
    c: Tensor,
    B: Tensor,
    A: Tensor,
    a: Tensor,
    activation: Activation | Chord,
    *,
    tol: float | None = None,
    max_iter: int = MAX_ITER,
    where: str = "implicit layer",
    undo: tuple[Tensor | None, Tensor, Tensor] | None = None,
) -> Tensor:
    """The x (*batch, k) with x = c + B sigma(A x + a); A (r, k), B (k, r), a (*batch, r).

    If `one_solution` is true, Newton's method finds the only x from the explicit guess
    c + B sigma(A c + a). Otherwise x is the solution that is connected to x = c by solutions with
    smaller B. If that curve goes to infinity, x is the nearest to c among the solutions found from
    a few fixed starts; if there are none, this is a `ConvergenceError`.

    `undo` = (X, B', A') makes this the inverse of a layer that solves X = c' + B' sigma(A' X + a')
    with the same argument of sigma; X is None if it is x itself. Of several x, it returns the one
    that the layer maps back to X. If none does, this is a `ConvergenceError`; if several do, a
    `SeveralSolutionsWarning`.
    """
    for known in {*activation.rows} if isinstance(activation, Chord) else (activation,):
        activations.registered(known)
    a = a.expand(*c.shape[:-1], a.shape[-1]).to(c.dtype)
    B, A = B.to(c.dtype), A.to(c.dtype)
    X, *layer = (None, None, None) if undo is None else undo
    layer = [X, *(None if t is None else t.detach().to(c.dtype) for t in layer)]
    if X is not None:
        layer[0] = X.detach().expand(*c.shape[:-1], X.shape[-1]).to(c.dtype)
    run = _solve if torch.compiler.is_compiling() else _Solve.apply
    return run(c, B, A, a, activation.name, tol, max_iter, where, *layer)


def solve_chord(
    y: Tensor,
    B: Tensor,
    A: Tensor,
    a: Tensor,
    chord: Chord,
    *,
    where: str,
    c: Tensor | None = None,
    inverse: bool = False,
    **newton: Any,
) -> Tensor:
    """The x (*batch, k) with x = c + B chord(A y + a, A x + a); A (r, k), B (k, r), a (r,).

    By default c is y. `inverse` makes it the inverse of the layer with -B.
    """
    z = y @ A.mT + a
    # A chord has two ends. The solver moves the one that it knows; the other goes along with a.
    A, B = torch.cat([A, torch.zeros_like(A)], -2), torch.cat([B, torch.zeros_like(B)], -1)
    undo = (y, -B, A) if inverse else None
    a = torch.cat([a.expand_as(z), z], -1)
    return solve(y if c is None else c, B, A, a, chord, where=where, undo=undo, **newton)


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
    sigma, k, r = chords.named(activation), c.shape[-1], a.shape[-1]
    work = torch.promote_types(c.dtype, torch.float32)  # no factorisations in half precision
    B, A, chunk = B.to(work), A.to(work), max(1, solutions.CHUNK // (k * k))
    # By default 4 units in the last place, with some slack: rounding rarely prevents just that.
    tol, slack = (4 * torch.finfo(work).eps, 8) if tol is None else (tol, 1)
    equation = Equation(B, A, sigma, tol, slack, max_iter, one_solution(B, A, sigma))
    layer = None
    if B_layer is not None and A_layer is not None and not equation.unique:
        B_layer, A_layer = B_layer.to(work), A_layer.to(work)
        if not one_solution(B_layer, A_layer, sigma):  # both unique, or neither
            layer = replace(equation, B=B_layer, A=A_layer)
    if layer is not None:
        chunk = max(1, chunk // solutions.STARTS)
    given = [c.reshape(-1, k), a.reshape(-1, r)]
    given += [] if X is None else [X.reshape(-1, X.shape[-1])]
    found, counts = [], []
    with torch.autocast(c.device.type, enabled=False):
        for part in zip(*(t.to(work).split(chunk) for t in given), strict=True):
            c_i, a_i, *X_i = part
            if layer is not None:
                x, count = solutions.undo(equation, layer, c_i, a_i, *X_i)
                counts.append(count)
            else:
                x, solved = solutions.search(equation, c_i, a_i)
                if not bool(solved.all()):
                    raise ConvergenceError(_advice(where, c_i, a_i, equation))
            found.append(x)
    if counts:
        _tell(where, torch.cat(counts), equation)
    return torch.cat(found).to(c.dtype).reshape(c.shape)


def _tell(where: str, count: Tensor, equation: Equation) -> None:
    """Raise or warn where the inverse of a layer found no solution, or several."""
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


def _advice(where: str, c: Tensor, a: Tensor, equation: Equation) -> str:
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


def _linearise(ctx: Any) -> tuple[Activation | Chord, torch.dtype, tuple[Tensor, ...]]:
    """What the derivatives at the solution need: sigma, B, x, z and M = I - B D A."""
    B, A, a, x = ctx.saved_tensors
    sigma = chords.named(ctx.activation)
    dtype, work = x.dtype, torch.promote_types(x.dtype, torch.float32)
    B, A, a, x = (t.to(work) for t in (B, A, a, x))
    z = x @ A.mT + a
    D = sigma.slope(z).unsqueeze(-2)
    M = torch.eye(A.shape[1], dtype=work, device=x.device) - (B * D) @ A
    return sigma, dtype, (B, x, z, M)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    _, B, A, a, ctx.activation, *_ = inputs
    ctx.save_for_backward(B, A, a, output)


def _backward(ctx: Any, *grads: Any) -> Any:
    """With D = diag(sigma'): v = (I - B D A)^-T g, dc = v, da = u = D B^T v, and so on."""
    sigma, dtype, (B, x, z, M) = _linearise(ctx)
    v = torch.linalg.solve(M.mT, grads[0].to(M.dtype).unsqueeze(-1)).squeeze(-1)
    u = chords.pulled(sigma, z, v @ B)
    rows = [t.reshape(-1, t.shape[-1]) for t in (v, sigma(z), u, x)]
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
        sigma, dtype, (B, x, z, M) = _linearise(ctx)
        dc, dB, dA, da = (0 if t is None else t.to(M.dtype) for t in tangents[:4])
        inner = da + (x @ dA.mT if isinstance(dA, Tensor) else 0)
        inner = inner if isinstance(inner, Tensor) else torch.zeros_like(z)
        right = dc + (sigma(z) @ dB.mT if isinstance(dB, Tensor) else 0)
        right = right + chords.pushed(sigma, z, inner) @ B.mT
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
