"""Extreme singular values of dy_N/dy_j where the matrix itself is too large to be made."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.func import vjp

from hdnn.analysis.lanczos import Product, bidiagonalise, shortfall
from hdnn.analysis.sensitivity import singular_values
from hdnn.errors import ConvergenceError, OptionError, ShapeError, positive_int
from hdnn.networks import Network
from hdnn.networks.promise import own_methods
from hdnn.networks.unit import HamiltonianUnit
from hdnn.networks.unit_derivatives import TOLERANCE, Derivative, Unknown

Function = Callable[[Tensor], Tensor]
STEPS = 48
DENSE = 2048
TINY = 1e-300


class Traced:
    """The derivative of any function at y, by automatic differentiation: traced only once."""

    def __init__(self, function: Function, y: Tensor) -> None:
        self.out, pull = vjp(function, y)[:2]
        self.backwards: Function = lambda u: pull(u)[0]
        # u -> M^T u is linear: its own derivative, backwards, is v -> M v, wherever it is taken.
        push = vjp(self.backwards, torch.zeros_like(self.out))[1]
        self.forwards: Function = lambda v: push(v)[0]

    def dead(self) -> int:
        """How many entries of y_N are 0 for all states nearby: this lowers the rank by as many."""
        generator = torch.Generator().manual_seed(0)
        draw = torch.rand(self.out.shape, generator=generator, dtype=torch.float64).to(self.out)
        # Different numbers of the same sign, so that they do not cancel by chance.
        zeros = self.out == 0
        return 0 if self.backwards(zeros * (1 + draw)).any() else int(zeros.sum())


@overload
def extreme_singular_values(
    function: Function,
    y: Tensor,
    *,
    steps: int = ...,
    seed: int = ...,
    errors: Literal[False] = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def extreme_singular_values(
    function: Function, y: Tensor, *, steps: int = ..., seed: int = ..., errors: Literal[True]
) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...


def extreme_singular_values(
    function: Function, y: Tensor, *, steps: int = 30, seed: int = 0, errors: bool = False
) -> tuple[Tensor, ...]:
    """(smallest, largest) singular value of the derivative of `function` at each sample: (B,) each.

    Golub-Kahan-Lanczos bidiagonalisation by products with vectors, forwards and backwards. With
    `steps` at least the number of features both are right up to the rounding of y's dtype, which is
    relative to the largest: a smallest value below about n eps times that cannot be told from 0.
    With fewer steps the largest is a lower bound that soon becomes accurate, and the smallest is an
    upper bound that converges more slowly. If a network is symplectic by a multiple of the
    canonical J, the smallest is one over the largest, to as many digits. NaN if a product is not
    finite.

    Args:
        function: states (B, ...) to states (B, ...) of equally many features, sample by sample: a
            network, or the layers from j on.
        errors: return (smallest, largest, smallest_error, largest_error) instead, with absolute
        errors: there is a singular value within that distance of the one found.
    """
    positive_int("steps", steps)
    if y.ndim < 2:
        raise ShapeError(f"y must be (B, ...), a state for each sample, but got {tuple(y.shape)}.")
    depth = function.layers if isinstance(function, Network) else 1
    paired = isinstance(function, Network) and symplectic(function)
    found = []
    for one in y.split(1):
        M = Traced(function, one)
        n, out = one.numel(), M.out.numel()
        if n != out:
            raise ShapeError(
                f"the derivative must be square, but {n} features became {out}; "
                "leave pooling and padding out."
            )
        with torch.no_grad():
            products = _product(one, [M.forwards]), _product(M.out, [M.backwards])
            low, high, _ = bidiagonalise(*products, n, steps, one, seed)
        if not bool(M.out.isfinite().all()):
            found.append((math.nan, math.nan, math.inf, math.inf))
            continue
        rounding = _rounding(one, depth) * high.value
        row = (low.value, high.value, low.residual + rounding, high.residual + rounding)
        if paired and high.value > 0:
            row = (1 / high.value, high.value, row[3] / high.value**2, row[3])
        found.append(row)
    table = torch.tensor(found, dtype=torch.float64).reshape(-1, 4).to(y)
    return table.unbind(1)[: 4 if errors else 2]


def symplectic(net: Network) -> bool:
    """Whether dy_N/dy_j is symplectic by the canonical J, so that singular values come in pairs.

    The same for a J that is a number times an orthogonal matrix: its inverse is its transpose then.
    """
    if own_methods(net) or not net.symplectic:
        return False
    J = net.field()["J"].detach().double()
    if J.ndim > 2:
        return False
    square = J @ J.mT
    return torch.allclose(square, square[0, 0] * torch.eye(len(J)).to(J), rtol=0, atol=1e-12) and (
        float(square[0, 0]) > 0
    )


def _rounding(state: Tensor, depth: int) -> float:
    """How far rounding can move a singular value of `depth` factors, relative to the largest."""
    return 8 * (math.sqrt(state.numel()) + depth) * torch.finfo(state.dtype).eps


class Extremes(NamedTuple):
    """The extreme singular values of dy_N/dy_j, for each j that was asked for and each sample.

    `largest` is a lower bound and `smallest` an upper bound, up to rounding. All are (layers, B).
    The errors are relative: there is a singular value within that distance of the one found. They
    include rounding, which is relative to the largest value; past 1, the smallest cannot be told
    from 0. `missed` is how far, relatively and with probability 0.999, the true extreme can lie
    beyond the one found; it is infinite for a smallest value found without an inverse. If a product
    is not finite, values are NaN and errors infinite.
    """

    layers: list[int]
    smallest: Tensor
    largest: Tensor
    smallest_error: Tensor
    largest_error: Tensor
    smallest_missed: Tensor
    largest_missed: Tensor


class _Found(NamedTuple):
    smallest: float
    largest: float
    smallest_error: float = 0.0
    largest_error: float = 0.0
    smallest_missed: float = 0.0
    largest_missed: float = 0.0


def unit_extremes(
    unit: HamiltonianUnit,
    y: Tensor,
    *,
    layers: Iterable[int] | None = None,
    steps: int = STEPS,
    dense: int = DENSE,
    smallest: bool = True,
    seed: int = 0,
) -> Extremes:
    """Extreme singular values of dy_N/dy_j in a unit, along the trajectory of images y (B, ...).

    The trajectory is computed in the dtype of the unit; y_N is the state after its layers, before a
    normalisation `after` them. The smallest value is one over the largest of the inverse, which is
    found just as fast, however small it is: an H2 layer has an explicit inverse, an H1 layer needs
    linear equations solved, to a residual of 1e-4. If that fails, close to a singular layer, it is
    the upper bound that `chain_extremes` would find. For an H2 unit whose whole matrix is made, it
    is one over the largest: the matrix is symplectic.

    Args:
        layers: the j that are wanted, by default 0 .. N-1.
        steps: of Lanczos, for each of the two; 48 miss 1% or less (`missed`).
        dense: for states of up to this many entries, make the whole matrix, which misses nothing.
        smallest: whether to use the inverse; if not, the smallest value is that upper bound too.
    """
    if not isinstance(unit, HamiltonianUnit):
        raise OptionError(
            f"this is for a HamiltonianUnit, but got {type(unit).__name__}; "
            "for other layers take chain_extremes."
        )
    chains = [unit.layer_derivatives(one) for one in y.split(1)]
    how = _of_inverse if smallest else _by_lanczos
    return _extremes(chains, y, how, layers, steps, dense, seed)


def chain_extremes(
    functions: Sequence[Callable[[Tensor], Tensor]],
    y: Tensor,
    *,
    layers: Iterable[int] | None = None,
    steps: int = STEPS,
    dense: int = DENSE,
    seed: int = 0,
) -> Extremes:
    """The same for any chain of functions that keep the shape of a state (B, ...).

    There is no inverse to compute the smallest value from. If entries of y_N are 0 for all states
    nearby, as after ReLU, it is exactly 0; else it comes from Lanczos and can be far too large.
    """
    chains = []
    for state in y.split(1):
        chain: list[Any] = []
        for function in functions:
            chain.append(Traced(function, state))
            if chain[-1].out.shape != state.shape:
                raise ShapeError(
                    f"all states must have one shape, but {tuple(state.shape)} became "
                    f"{tuple(chain[-1].out.shape)}; leave pooling and strides out."
                )
            state = chain[-1].out
        fine = all(bool(M.out.isfinite().all()) for M in chain)
        chains.append(chain if fine else [Unknown()] * len(chain))
    return _extremes(chains, y, _of_zeros, layers, steps, dense, seed)


def _extremes(
    chains: Sequence[Sequence[Any]],
    y: Tensor,
    smallest: Callable[..., _Found],
    layers: Iterable[int] | None,
    steps: int,
    dense: int,
    seed: int,
) -> Extremes:
    positive_int("steps", steps)
    if not chains[0] or not len(y):
        raise ShapeError(f"there are no {'samples' if chains[0] else 'layers'} to look at.")
    N = len(chains[0])
    wanted = list(range(N)) if layers is None else list(layers)
    for j in wanted:
        if not isinstance(j, Integral) or not 0 <= j < N:
            raise ShapeError(f"layers must be whole numbers in 0 .. {N - 1}, but got {j!r}.")
    with torch.no_grad():
        found = [
            [_found(chain[j:], y[:1], smallest, steps, dense, seed) for chain in chains]
            for j in wanted
        ]
    table = torch.tensor(found, dtype=torch.float64).reshape(len(wanted), len(chains), -1)
    return Extremes(wanted, *table.unbind(-1))


def _found(
    chain: Sequence[Any],
    state: Tensor,
    smallest: Callable[..., _Found],
    steps: int,
    dense: int,
    seed: int,
) -> _Found:
    if state.numel() > dense:
        return smallest(chain, state, steps, seed)
    found = _by_matrix(chain, state)
    if smallest is not _of_inverse or not math.isfinite(found.largest):
        return found
    if chain[-1].symplectic:
        return found._replace(smallest=1 / found.largest, smallest_error=found.largest_error)
    if found.smallest_error <= TOLERANCE:
        return found
    return _of_inverse(chain, state, steps, seed)._replace(
        largest=found.largest, largest_error=found.largest_error, largest_missed=0.0
    )


def _by_matrix(chain: Sequence[Any], state: Tensor) -> _Found:
    """By all singular values of the whole matrix."""
    n = state.numel()
    rows = torch.eye(n, dtype=state.dtype, device=state.device).reshape(n, *state.shape)
    for M in chain:
        rows = torch.func.vmap(M.forwards)(rows)
    values = singular_values(rows.reshape(n, n))
    found = _with_errors(float(values[-1]), float(values[0]), state, len(chain))
    if isinstance(chain[-1], Traced) and chain[-1].dead():
        return found._replace(smallest=0.0, smallest_error=0.0)
    return found


def _with_errors(
    low: float, high: float, state: Tensor, depth: int, residuals: tuple[float, float] = (0.0, 0.0)
) -> _Found:
    """The values with their errors, rounding included."""
    if not math.isfinite(high):
        return _Found(math.nan, math.nan, *[math.inf] * 4)
    rounding = _rounding(state, depth) * high
    errors = [
        (residual + rounding) / max(value, TINY)
        for value, residual in zip((low, high), residuals, strict=True)
    ]
    return _Found(low, high, *errors)


def _of_inverse(chain: Sequence[Derivative], state: Tensor, steps: int, seed: int) -> _Found:
    """The largest value, and one over the largest of the inverse."""
    found = _by_lanczos(chain, state, steps, seed)
    if not math.isfinite(found.largest):
        return found
    n = state.numel()
    undo = _product(state, [M.undo for M in reversed(chain)])
    undo_backwards = _product(state, [M.undo_backwards for M in chain])
    try:
        _, inverse, k = bidiagonalise(undo, undo_backwards, n, steps, state, seed)
    except ConvergenceError:  # then the upper bound without an inverse is all there is
        return found
    if not math.isfinite(inverse.value):
        return found
    solved = 0.0 if chain[-1].symplectic else TOLERANCE
    return found._replace(
        smallest=1 / inverse.value,
        smallest_error=inverse.residual / inverse.value + _rounding(state, len(chain)) + solved,
        smallest_missed=shortfall(n, k),
    )


def _of_zeros(chain: Sequence[Traced], state: Tensor, steps: int, seed: int) -> _Found:
    """Both values by one run of Lanczos, unless the smallest is known to be 0."""
    found = _by_lanczos(chain, state, steps, seed)
    if isinstance(chain[-1], Traced) and chain[-1].dead():
        return found._replace(smallest=0.0, smallest_error=0.0, smallest_missed=0.0)
    return found


def _by_lanczos(chain: Sequence[Any], state: Tensor, steps: int, seed: int) -> _Found:
    n = state.numel()
    forwards = _product(state, [M.forwards for M in chain])
    backwards = _product(state, [M.backwards for M in reversed(chain)])
    low, high, k = bidiagonalise(forwards, backwards, n, steps, state, seed)
    found = _with_errors(low.value, high.value, state, len(chain), (low.residual, high.residual))
    if not math.isfinite(found.largest):
        return found
    missed = 0.0 if k == n else math.inf
    return found._replace(smallest_missed=missed, largest_missed=shortfall(n, k))


def _product(state: Tensor, maps: Sequence[Callable[[Tensor], Tensor]]) -> Product:
    """One map after the other, on vectors (n,)."""

    def product(v: Tensor) -> Tensor:
        v = v.reshape(state.shape)
        for each in maps:
            v = each(v)
        return v.reshape(-1)

    return product
