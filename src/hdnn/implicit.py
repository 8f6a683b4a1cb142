"""Solutions of `x = c + B sigma(A x + a)`, the equation of every implicit layer.

The general semi-implicit Euler step has this form in p, the midpoint rule in the midpoint, and the
discrete gradient step with a chord of the integral in the place of sigma. Newton's method finds x
without gradients, as one operator that `torch.compile`, `torch.export` and `vmap` carry whole. Two
more Newton steps, in plain PyTorch, then leave x as it is but give it its derivatives: each step
doubles the order up to which they are right, so first, second and third derivatives are exact.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

import torch
from torch import Tensor

from hdnn import activations
from hdnn.activations import Activation
from hdnn.errors import ConvergenceError

__all__ = ["MAX_ITER", "Rows", "chord", "chord_slope", "coupling", "solve", "solve_chord"]

MAX_ITER = 50
HALVINGS = 40  # of a Newton step that does not reduce the residual

# Gauss's rule of ten points from 0 to 1: the distances of its points from 1/2, and their weights.
GAUSS = (
    (0.0744371694908156, 0.1477621123573764),
    (0.2166976970646236, 0.1346333596549983),
    (0.3397047841495122, 0.1095431812579910),
    (0.4325316833444923, 0.0747256745752902),
    (0.4869532642585859, 0.0333356721543441),
)


def solve(
    c: Tensor,
    B: Tensor,
    A: Tensor,
    a: Tensor,
    sigma: Activation | Rows,
    *,
    start: Tensor | None = None,
    tol: float | None = None,
    max_iter: int = MAX_ITER,
    where: str = "implicit layer",
) -> Tensor:
    """The x with `x = c + B sigma(A x + a)`, with its gradients.

    Args:
        c: `(*batch, k)`.
        B: `(k, r)`, or one for each sample, `(*batch, k, r)`.
        A: `(r, k)`, or one for each sample.
        a: `(r,)`, or one for each sample.
        sigma: a registered activation.
        start: z `(*batch, r)`; if given, `chord(sigma, z, .)` takes the place of sigma.
        tol: the largest error of the equation, relative to its terms; by default near rounding.
        max_iter: the most Newton iterations.
        where: the first words of an error.

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
    work = torch.promote_types(c.dtype, torch.float32)  # no factorisations in half precision
    with torch.autocast(c.device.type, enabled=False):
        start = None if start is None else start.expand(*c.shape[:-1], -1).to(work)
        a = a.expand(*c.shape[:-1], -1).to(work)
        equation = c.to(work), B.to(work), A.to(work), a, start
        detached = [None if t is None else t.detach() for t in equation]
        # By default 4 units in the last place, with some slack: rounding may prevent just that.
        limit = 4 * torch.finfo(work).eps if tol is None else tol
        slack = 8.0 if tol is None else 1.0
        name = sigma.name if isinstance(sigma, Rows) else activations.registered(sigma).name
        x = _root(*detached, name, limit, slack, max_iter, where)
        for _ in range(2 if torch.is_grad_enabled() else 0):
            F, slope = _residual(x, *equation, sigma)
            x = x - _newton_step(F, slope, *equation[1:3])
    return x.to(c.dtype)


def solve_chord(
    y: Tensor,
    B: Tensor,
    A: Tensor,
    a: Tensor,
    sigma: Activation | Rows,
    *,
    c: Tensor | None = None,
    **how,
) -> Tensor:
    """The x with `x = c + B chord(sigma, A y + a, A x + a)`; c is y by default.

    The energy `sum s(A x + a)` changes from y to x by exactly what B makes of it: nothing, if B is
    a skew-symmetric matrix times `A^T`. Options are those of `solve`.
    """
    with torch.autocast(y.device.type, enabled=False):
        start = _times(A.to(y.dtype), y) + a.to(y.dtype)
    return solve(y if c is None else c, B, A, a, sigma, start=start, **how)


def coupling(A: Tensor, B: Tensor, S: float) -> Tensor:
    """The spectral radius of `S |B| |A|`, entry by entry; below 1 there is exactly one solution.

    `B diag(sigma') A` lies entry by entry below it, so that the right-hand side is a contraction in
    some weighted maximum norm.
    """
    return torch.linalg.eigvals(S * B.abs() @ A.abs()).abs().amax(-1)


class Rows:
    """An activation for each entry of the last axis: what `solve` and chords need of one.

    Args:
        names: the names of the activations, in order.
    """

    def __init__(self, names: Iterable[str]) -> None:
        names = list(names)
        self.name = ",".join(names)
        runs = [(name, len(list(group))) for name, group in groupby(names)]
        self.widths = [width for _, width in runs]
        self.activations = [activations.get(name) for name, _ in runs]
        self.S = max(sigma.S for sigma in self.activations)

    def _each(self, function: str, x: Tensor) -> Tensor:
        parts = zip(self.activations, x.split(self.widths, -1), strict=True)
        return torch.cat([getattr(sigma, function)(part) for sigma, part in parts], -1)

    def __call__(self, x: Tensor) -> Tensor:
        return self._each("sigma", x)

    def slope(self, x: Tensor) -> Tensor:
        return self._each("slope", x)

    def integral(self, x: Tensor) -> Tensor:
        return self._each("integral", x)


# Newton's method


def _times(A: Tensor, x: Tensor) -> Tensor:
    """A x, for one A or one for each sample."""
    return x @ A.mT if A.ndim == 2 else (A @ x.unsqueeze(-1)).squeeze(-1)


def _residual(
    x: Tensor,
    c: Tensor,
    B: Tensor,
    A: Tensor,
    a: Tensor,
    start: Tensor | None,
    sigma: Activation | Rows,
) -> tuple[Tensor, Tensor]:
    """`x - c - B sigma(A x + a)`, and the slope of sigma there."""
    z = _times(A, x) + a
    if start is None:
        return x - c - _times(B, sigma(z)), sigma.slope(z)
    return x - c - _times(B, chord(sigma, start, z)), chord_slope(sigma, start, z)


def _newton_step(F: Tensor, slope: Tensor, B: Tensor, A: Tensor) -> Tensor:
    """`(I - B D A)^-1 F` with `D = diag(slope)`."""
    eye = torch.eye(F.shape[-1], dtype=F.dtype, device=F.device)
    M = eye - (B * slope.unsqueeze(-2)) @ A
    return torch.linalg.solve_ex(M, F.unsqueeze(-1))[0].squeeze(-1)


@torch.library.custom_op("hdnn::implicit_root", mutates_args=())
def _root(
    c: Tensor,
    B: Tensor,
    A: Tensor,
    a: Tensor,
    start: Tensor | None,
    activation: str,
    tol: float,
    slack: float,
    max_iter: int,
    where: str,
) -> Tensor:
    sigma = Rows(activation.split(",")) if "," in activation else activations.get(activation)
    equation = c, B, A, a, start, sigma
    explicit = c - _residual(c, *equation)[0]
    for guess in (explicit, c):
        x, error = _newton(guess, equation, tol, max_iter)
        if bool((error <= slack * tol).all()):
            return x if x is not c else c.clone()
    finite = all(bool(t.isfinite().all()) for t in (c, B, A, a))
    if not finite:
        raise ConvergenceError(f"{where}: a state or a weight is NaN or infinite.")
    factor = float(coupling(A, B, sigma.S).max())
    raise ConvergenceError(
        f"{where}: Newton's method did not converge in max_iter = {max_iter} iterations "
        f"(coupling {factor:.3g}; below 1 there is always exactly one solution). Take a smaller "
        "step or smaller weights, or raise tol or max_iter."
    )


def _newton(x: Tensor, equation: tuple, tol: float, max_iter: int) -> tuple[Tensor, Tensor]:
    """Damped Newton steps from x, and the error of each sample relative to its terms."""
    _, B, A, *_ = equation
    F, slope = _residual(x, *equation)
    for _ in range(max_iter):
        error = _error(x, F, slope, equation)
        if bool((error <= tol).all()):
            break
        dx = _newton_step(F, slope, B, A)
        size = F.norm(dim=-1, keepdim=True)
        t = torch.ones_like(size)
        for _ in range(HALVINGS):
            F, slope = _residual(x - t * dx, *equation)
            worse = ~(F.norm(dim=-1, keepdim=True) < (1 - 1e-4 * t) * size)
            worse &= (error > tol).unsqueeze(-1)
            if not bool(worse.any()):
                break
            t = torch.where(worse, 0.5 * t, t)
        x = x - t * dx
        F, slope = _residual(x, *equation)
    return x, _error(x, F, slope, equation)


def _error(x: Tensor, F: Tensor, slope: Tensor, equation: tuple) -> Tensor:
    """The residual of each sample, relative to the terms whose rounding it has."""
    c, B, A, a, start, _ = equation
    argument = _times(A.abs(), x.abs()) + a.abs()
    if start is not None:
        argument = argument + start.abs()
    terms = _times(B.abs(), slope.abs() * argument) + x.abs() + c.abs()
    least = torch.finfo(x.dtype).tiny / torch.finfo(x.dtype).eps  # below, nothing is relative
    return F.abs().amax(-1) / (terms.amax(-1) + least)


@_root.register_fake
def _(c, B, A, a, start, activation, tol, slack, max_iter, where):
    return torch.empty_like(c, memory_format=torch.contiguous_format)


@_root.register_vmap
def _(info, in_dims, c, B, A, a, start, *options):
    """More samples: what is mapped becomes the first axis of the batch."""

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


# Chords: the mean of sigma between two points


def chord(sigma: Activation | Rows, z: Tensor, end: Tensor) -> Tensor:
    """`(s(end) - s(z)) / (end - z)` with `s' = sigma`, to rounding; sigma(z) where both are equal.

    Close points are integrated by Gauss's rule, where a difference of s would lose digits; far
    points, and points with a kink between them, by s.
    """
    low = sigma.integral(z)
    high = sigma.integral(end)
    mean = _mean(sigma, z, end - z)
    return _quotient(mean, low, high, end - z)


def chord_slope(sigma: Activation | Rows, z: Tensor, end: Tensor) -> Tensor:
    """The derivative of `chord(sigma, z, end)` in `end`; with both swapped, that in z."""
    mean = _mean(sigma.slope, z, end - z, weighted=True)
    return _quotient(mean, chord(sigma, z, end), sigma(end), end - z)


def _mean(function, z: Tensor, d: Tensor, weighted: bool = False) -> Tensor:
    """The integral of function(z + t d), or of t times it, for t from 0 to 1."""
    d = d.clamp(-1, 1)  # far points do not need it
    total = torch.zeros_like(z)
    for distance, weight in GAUSS:
        for t in (0.5 - distance, 0.5 + distance):
            total = total + (weight * t if weighted else weight) * function(z + t * d)
    return total


def _quotient(mean: Tensor, low: Tensor, high: Tensor, d: Tensor) -> Tensor:
    """`(high - low) / d`, by its mean where the two points are close and that is as exact."""
    rise = high - low
    rounding = 64 * torch.finfo(d.dtype).eps * (1 + low.abs() + high.abs())
    close = (d.abs() < 1) & ((mean * d - rise).abs() <= rounding)
    return torch.where(close, mean, rise / torch.where(close, 1, d))
