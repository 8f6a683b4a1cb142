"""Solutions of `x = c + B sigma(A x + a)`, the equation of every implicit layer.

In this form, x is the new p in the general semi-implicit Euler step and the midpoint in the
midpoint rule; the discrete gradient step has a chord of the integral instead of sigma. Newton's
method finds x without gradients, as one operator for `torch.compile`, `torch.export` and `vmap`;
the implicit function theorem then gives x its derivatives, which can be differentiated again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hdnn import activations
from hdnn.activations import Activation
from hdnn.errors import ConvergenceError

__all__ = ["chord", "chord_slope", "coupling", "solve", "solve_chord"]

MAX_ITER = 50
HALVINGS = 40  # halvings of a Newton step that does not reduce the residual
STARTS = 16  # of Newton's method, if the explicit step finds no solution

# Gauss's rule of ten points from 0 to 1: the distances of its points from 1/2, and their weights.
_DISTANCES = (
    (0.0744371694908156, 0.1477621123573764),
    (0.2166976970646236, 0.1346333596549983),
    (0.3397047841495122, 0.1095431812579910),
    (0.4325316833444923, 0.0747256745752902),
    (0.4869532642585859, 0.0333356721543441),
)
GAUSS = [
    (0.5 + side * distance, weight)
    for side in (-1, 1)
    for distance, weight in _DISTANCES
]


def solve(
    c: Tensor,
    B: Tensor,
    A: Tensor,
    a: Tensor,
    sigma: Activation,
    *,
    start: Tensor | None = None,
    tol: float | None = None,
    max_iter: int = MAX_ITER,
    where: str = "implicit layer",
) -> Tensor:
    """The solution x of `x = c + B sigma(A x + a)`, with its gradients.

    Args:
        c: the constant term, `(*batch, k)`.
        B: a matrix `(k, r)`, or one for each sample, `(*batch, k, r)`.
        A: a matrix `(r, k)`, or one for each sample.
        a: a vector `(r,)`, or one for each sample.
        sigma: a registered activation.
        start: z `(*batch, r)`; if given, `chord(sigma, z, .)` takes the place of sigma.
        tol: the largest accepted error, relative to the equation's terms; by default near rounding.
        max_iter: the largest number of Newton iterations.
        where: the first words of an error message.

    Returns:
        x, `(*batch, k)`.

    Raises:
        ConvergenceError: if no solution was found.

    Examples:
        >>> import torch
        >>> from hdnn import activations, implicit
        >>> c, B, A, a = torch.ones(3, 2), torch.eye(2), -torch.eye(2), torch.zeros(2)
        >>> x = implicit.solve(c, B, A, a, activations.get("tanh"))
        >>> torch.allclose(x, 1 - torch.tanh(x))
        True
    """
    # PyTorch has no factorisations in half precision.
    work = torch.promote_types(c.dtype, torch.float32)
    with torch.autocast(c.device.type, enabled=False):
        if start is not None:
            start = start.expand(*c.shape[:-1], -1).to(work)
        a = a.expand(*c.shape[:-1], -1).to(work)
        equation = c.to(work), B.to(work), A.to(work), a, start
        detached = [None if t is None else t.detach() for t in equation]
        name = activations.registered(sigma).name
        x = _root(*detached, name, tol, max_iter, where)
        return _Solution.apply(x, *equation, sigma).to(c.dtype)


def solve_chord(
    y: Tensor,
    B: Tensor,
    A: Tensor,
    a: Tensor,
    sigma: Activation,
    *,
    c: Tensor | None = None,
    **how,
) -> Tensor:
    """The solution x of `x = c + B chord(sigma, A y + a, A x + a)`; c is y by default.

    If B is a skew-symmetric matrix times `A^T`, then x and y have exactly the same energy `sum s(A
    x + a)`. Options are those of `solve`.
    """
    with torch.autocast(y.device.type, enabled=False):
        start = _times(A.to(y.dtype), y) + a.to(y.dtype)
    return solve(y if c is None else c, B, A, a, sigma, start=start, **how)


def coupling(A: Tensor, B: Tensor, S: float) -> Tensor:
    """The spectral radius of `S |B| |A|`, entry by entry; below 1 there is exactly one solution.

    This matrix bounds `B diag(sigma') A` entry by entry, so the right-hand side is a contraction in
    some weighted maximum norm.
    """
    return S * torch.linalg.eigvals(B.abs() @ A.abs()).abs().amax(-1)


# Newton's method


def _times(A: Tensor, x: Tensor) -> Tensor:
    """A x, for one A or one for each sample."""
    if A.ndim == 2:
        return x @ A.mT
    return (A @ x.unsqueeze(-1)).squeeze(-1)


class Equation(NamedTuple):
    """`x = c + B sigma(A x + a)`; with a start, the chord from there replaces sigma."""

    c: Tensor
    B: Tensor
    A: Tensor
    a: Tensor
    start: Tensor | None
    sigma: Activation

    def value_and_slope(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """sigma at A x + a, or its chord, and the derivative there."""
        z = _times(self.A, x) + self.a
        if self.start is None:
            return self.sigma(z), self.sigma.slope(z)
        value = chord(self.sigma, self.start, z)
        return value, chord_slope(self.sigma, self.start, z, value)

    def residual(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`x - c - B sigma(A x + a)`, and the slope of sigma there."""
        value, slope = self.value_and_slope(x)
        return x - self.c - _times(self.B, value), slope

    def matrix(self, slope: Tensor) -> Tensor:
        """`I - B D A` with `D = diag(slope)`."""
        A = self.A
        eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
        BD = self.B * slope.unsqueeze(-2)
        return eye - BD @ A

    def error(self, x: Tensor, F: Tensor, slope: Tensor) -> Tensor:
        """The residual F of each sample, relative to the terms whose rounding it has."""
        argument = _times(self.A.abs(), x.abs()) + self.a.abs()
        if self.start is not None:
            argument = argument + self.start.abs()
        change = slope.abs() * argument
        terms = _times(self.B.abs(), change) + x.abs() + self.c.abs()
        number = torch.finfo(x.dtype)
        least = number.tiny / number.eps  # errors below this size are absolute
        size = terms.amax(-1) + least
        return F.abs().amax(-1) / size


def _solved(M: Tensor, right: Tensor) -> Tensor:
    """The x with M x = right; not finite where M is singular."""
    x, _ = torch.linalg.solve_ex(M, right.unsqueeze(-1))
    return x.squeeze(-1)


@torch.library.custom_op("hdnn::implicit_root", mutates_args=())
def _root(
    c: Tensor,
    B: Tensor,
    A: Tensor,
    a: Tensor,
    start: Tensor | None,
    activation: str,
    tol: float | None,
    max_iter: int,
    where: str,
) -> Tensor:
    sigma = activations.get(activation)
    equation = Equation(c, B, A, a, start, sigma)
    # 4 units in the last place, with some slack: rounding may prevent just that.
    rounding = 4 * torch.finfo(c.dtype).eps
    limit = 8 * rounding if tol is None else tol
    tol = rounding if tol is None else tol
    x = c - equation.residual(c)[0]  # the explicit step
    for trial in range(STARTS):
        x, error = _newton(x, equation, tol, max_iter)
        solved = (error <= limit).unsqueeze(-1)
        if bool(solved.all()):
            return x
        # Random starts where a bounded sigma has its solutions: the same starts every time.
        generator = torch.Generator().manual_seed(trial)
        z = torch.empty(a.shape[-1], dtype=c.dtype)
        z.uniform_(-1, 1, generator=generator)
        x = torch.where(solved, x, c + _times(B, z.to(c.device).expand_as(a)))
    if not all(bool(t.isfinite().all()) for t in (c, B, A, a)):
        raise ConvergenceError(
            f"{where}: a state or a weight is NaN or infinite."
        )
    factor = float(coupling(A, B, sigma.S).max())
    raise ConvergenceError(
        f"{where}: Newton's method did not converge in max_iter = {max_iter} iterations "
        f"(coupling {factor:.3g}; below 1 there is always exactly one solution). Take a smaller "
        "step or smaller weights, or raise tol or max_iter."
    )


def _newton(
    x: Tensor, equation: Equation, tol: float, max_iter: int
) -> tuple[Tensor, Tensor]:
    """Damped Newton steps from x, and the error of each sample relative to its terms."""
    F, slope = equation.residual(x)
    for _ in range(max_iter):
        error = equation.error(x, F, slope)
        if bool((error <= tol).all()):
            break
        dx = _solved(equation.matrix(slope), F)
        size = F.norm(dim=-1, keepdim=True)
        unsolved = (error > tol).unsqueeze(-1)
        t = torch.ones_like(size)
        for _ in range(HALVINGS):
            F, slope = equation.residual(x - t * dx)
            new_size = F.norm(dim=-1, keepdim=True)
            smaller = new_size < (1 - 1e-4 * t) * size
            worse = unsolved & ~smaller
            if not bool(worse.any()):
                break
            t = torch.where(worse, 0.5 * t, t)
        else:
            F, slope = equation.residual(x - t * dx)
        x = x - t * dx
    return x, equation.error(x, F, slope)


@_root.register_fake
def _(c, *arguments):
    return torch.empty_like(c, memory_format=torch.contiguous_format)


@_root.register_vmap
def _(info, in_dims, c, B, A, a, start, *options):
    """Run more samples: the mapped axis becomes the first axis of the batch."""

    def mapped(tensor, dim):
        tensor = tensor[None] if dim is None else tensor.movedim(dim, 0)
        return tensor.expand(info.batch_size, *tensor.shape[1:]).contiguous()

    def matrices(tensor, dim, axes):
        if dim is None:
            return tensor
        tensor = tensor.movedim(dim, 0)
        ones = [1] * (axes - tensor.ndim)
        return tensor.reshape(info.batch_size, *ones, *tensor.shape[1:])

    c = mapped(c, in_dims[0])
    B = matrices(B, in_dims[1], c.ndim + 1)
    A = matrices(A, in_dims[2], c.ndim + 1)
    a = mapped(a, in_dims[3])
    start = None if start is None else mapped(start, in_dims[4])
    return _root(c, B, A, a, start, *options), 0


# Derivatives


class _Solution(torch.autograd.Function):
    """x, which solves the equation already, with its derivatives."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, c, B, A, a, start, sigma):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        _, *tensors, ctx.sigma = inputs
        ctx.save_for_backward(*tensors, output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """With `D = diag(sigma')`: `v = (I - B D A)^-T g`, `dc = v`, `da = u = D B^T v`."""
        c, B, A, a, start, x = ctx.saved_tensors
        sigma = ctx.sigma
        equation = Equation(c, B, A, a, start, sigma)
        value, slope = equation.value_and_slope(x)
        v = _solved(equation.matrix(slope).mT, grads[0])
        w = _times(B.mT, v)
        u = slope * w
        dB = _outer(v, value, B)
        dA = _outer(u, x, A)
        d_start = None
        if start is not None:
            d_start = chord_slope(sigma, _times(A, x) + a, start, value) * w
        return None, v, dB, dA, u, d_start, None


def _outer(u: Tensor, x: Tensor, like: Tensor) -> Tensor:
    """The sum of `u x^T` over all samples that share a matrix."""
    if like.ndim == 2:
        return u.reshape(-1, u.shape[-1]).mT @ x.reshape(-1, x.shape[-1])
    return (u.unsqueeze(-1) * x.unsqueeze(-2)).sum_to_size(like.shape)


# Chords: the mean of sigma between two points


def chord(sigma: Activation, z: Tensor, end: Tensor) -> Tensor:
    """`(s(end) - s(z)) / (end - z)` with `s' = sigma`, up to rounding; sigma(z) if both are equal.

    Close points use Gauss's rule, because a difference of s would lose digits; distant points, and
    points with a kink between them, use s.
    """
    d = end - z
    mean = _mean(sigma, z, d)
    return _quotient(mean, sigma.integral(z), sigma.integral(end), d)


def chord_slope(
    sigma: Activation, z: Tensor, end: Tensor, value: Tensor
) -> Tensor:
    """The derivative of `chord(sigma, z, end)` in `end`; swap both for the derivative in z.

    Args:
        sigma: the activation.
        z: one point.
        end: the other point.
        value: the chord.
    """
    d = end - z
    mean = _mean(sigma.slope, z, d, weighted=True)
    return _quotient(mean, value, sigma(end), d)


def _mean(
    function: Any, z: Tensor, d: Tensor, weighted: bool = False
) -> Tensor:
    """The integral of function(z + t d), or of t function(z + t d), for t from 0 to 1."""
    d = d.clamp(-1, 1)  # the mean is not used for distant points
    total = torch.zeros_like(d)
    for t, weight in GAUSS:
        factor = weight * t if weighted else weight
        total = total + factor * function(z + t * d)
    return total


def _quotient(mean: Tensor, low: Tensor, high: Tensor, d: Tensor) -> Tensor:
    """`(high - low) / d`, by its mean where the two points are close and that is as exact."""
    rise = high - low
    rounding = 64 * torch.finfo(d.dtype).eps * (1 + low.abs() + high.abs())
    as_exact = (mean * d - rise).abs() <= rounding
    close = as_exact & (d.abs() < 1)
    quotient = rise / torch.where(close, 1, d)
    return torch.where(close, mean, quotient)
