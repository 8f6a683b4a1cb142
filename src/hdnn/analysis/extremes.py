"""Extreme singular values of dy_N/dy_j where the matrix itself is too large to be made."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vjp

from hdnn.analysis.derivatives import TOLERANCE, Derivative, Unknown, layer_derivatives
from hdnn.analysis.lanczos import Product, Singular, bidiagonalise, shortfall
from hdnn.analysis.sensitivity import chosen_layers, singular_values
from hdnn.errors import ConvergenceError, OptionError, ShapeError, positive_int
from hdnn.networks import HamiltonianUnit, Network
from hdnn.networks.promise import own_methods

Function = Callable[[Tensor], Tensor]
STEPS = 48
DENSE = 2048
TINY = 1e-300


class Traced:
    """The derivative of any function at y, by automatic differentiation: traced only once."""

    def __init__(self, function: Function, y: Tensor) -> None:
        self.out, pull = vjp(function, y)[:2]
        self.backwards: Function = lambda u: pull(u.reshape(self.out.shape))[0]
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


def extreme_singular_values(
    function: Function, y: Tensor, *, steps: int = 30, seed: int = 0, errors: bool = False
) -> tuple[Tensor, ...]:
    """The smallest and the largest singular value of the derivative of a function, for each sample.

    Golub-Kahan-Lanczos bidiagonalisation by products with vectors, forwards and backwards. With
    `steps` at least the number of features both are right up to the rounding of y's dtype, which is
    relative to the largest: a smallest value below about n eps times that cannot be told from 0.
    With fewer steps the largest is a lower bound that soon becomes accurate, and the smallest is an
    upper bound that converges more slowly. If a network is symplectic by a multiple of the
    canonical J, the smallest is one over the largest, to as many digits.

    Args:
        function: states (B, ...) to states (B, ...) of equally many features, sample by sample: a
            network, or the layers from j on.
        y: states (B, ...).
        steps: of Lanczos.
        seed: of the vector that it starts from.
        errors: also return absolute errors of both: there is a singular value within that distance
            of the one found.

    Returns:
        (smallest, largest), (B,) each, or with `errors` (smallest, largest, smallest_error,
        largest_error). NaN if a product is not finite.

    Raises:
        ShapeError: if y has no axis of samples, if the function changes the number of features, or
            if `steps` is not positive.

    Examples:
        >>> import hdnn, torch
        >>> net = hdnn.H2(features=4, layers=16)
        >>> low, high = hdnn.analysis.extreme_singular_values(net, torch.randn(3, 4))
        >>> torch.allclose(low * high, torch.ones(3)), bool((high >= 1).all())
        (True, True)
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
            low, high, _ = _by_lanczos([M], one, steps, seed)
        if not (bool(M.out.isfinite().all()) and math.isfinite(high.value)):
            found.append((math.nan, math.nan, math.inf, math.inf))
            continue
        rounding = _rounding(one, depth) * high.value
        error = high.residual + rounding
        if paired and high.value > 0:
            found.append((1 / high.value, high.value, error / high.value**2, error))
        else:
            found.append((low.value, high.value, low.residual + rounding, error))
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

    All tensors are (layers, B). Errors are relative: there is a singular value within that distance
    of the one found. They include rounding, which is relative to the largest value; past 1, the
    smallest cannot be told from 0. If a product is not finite, values are NaN and errors infinite.

    Attributes:
        layers: the j.
        smallest: an upper bound of the smallest singular value, up to rounding.
        largest: a lower bound of the largest, up to rounding.
        smallest_error: the error of `smallest`.
        largest_error: the error of `largest`.
        smallest_missed: how far, relatively and with probability 0.999, the true smallest value can
            lie beyond the one found; infinite if that was found without an inverse.
        largest_missed: the same for the largest.

    Examples:
        >>> import torch, hdnn
        >>> unit = hdnn.HamiltonianUnit(4, 2)
        >>> found = hdnn.analysis.unit_extremes(unit, torch.randn(3, 4, 5, 5), layers=[0])
        >>> found.layers, found.largest.shape
        ([0], torch.Size([1, 3]))
        >>> bool((found.smallest <= found.largest).all())
        True
    """

    layers: list[int]
    smallest: Tensor
    largest: Tensor
    smallest_error: Tensor
    largest_error: Tensor
    smallest_missed: Tensor
    largest_missed: Tensor


class Value(NamedTuple):
    """A singular value, its error and what it may have missed, as `Extremes` has them."""

    value: float
    error: float = 0.0
    missed: float = 0.0


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
    """Extreme singular values of dy_N/dy_j in a unit, along the trajectory of images.

    The trajectory is computed in the dtype of the unit; y_N is the state after its layers, before a
    normalisation `after` them. The smallest value is one over the largest of the inverse, which is
    found just as fast, however small it is: an H2 layer has an explicit inverse, an H1 layer needs
    linear equations solved, to a residual of 1e-4. If that fails, close to a singular layer, it is
    the upper bound that `chain_extremes` would find. For an H2 unit whose whole matrix is made, it
    is one over the largest: the matrix is symplectic.

    Args:
        unit: a `hdnn.HamiltonianUnit`.
        y: images (B, channels, height, width).
        layers: the j that are wanted, by default 0 .. N-1.
        steps: of Lanczos, for each of the two; 48 miss 1% or less.
        dense: for states of up to this many entries, make the whole matrix, which misses nothing.
        smallest: whether to use the inverse; if not, the smallest value is that upper bound too.
        seed: of the vector that Lanczos starts from.

    Returns:
        `Extremes`, with the values for each layer and image, and their errors.

    Raises:
        OptionError: if it is no `HamiltonianUnit`.
        ShapeError: if y does not fit the unit or is empty, if there is no such layer, or if `steps`
            is not positive.

    Examples:
        >>> import torch, hdnn
        >>> unit = hdnn.HamiltonianUnit(4, 8)
        >>> found = hdnn.analysis.unit_extremes(unit, torch.randn(1, 4, 6, 6), layers=[0, 4])
        >>> found.layers, bool((found.largest >= 1).all())
        ([0, 4], True)
    """
    if not isinstance(unit, HamiltonianUnit):
        raise OptionError(
            f"this is for a HamiltonianUnit, but got {type(unit).__name__}; "
            "for other layers take chain_extremes."
        )
    chains = [layer_derivatives(unit, one) for one in y.split(1)]
    return extremes_of(chains, y, layers, steps, dense, seed, undo=smallest)


def chain_extremes(
    functions: Sequence[Callable[[Tensor], Tensor]],
    y: Tensor,
    *,
    layers: Iterable[int] | None = None,
    steps: int = STEPS,
    dense: int = DENSE,
    seed: int = 0,
) -> Extremes:
    """Extreme singular values of dy_N/dy_j, for any functions that keep the shape of a state.

    There is no inverse to compute the smallest value from. If entries of y_N are 0 for all states
    nearby, as after ReLU, it is exactly 0; else it comes from Lanczos and can be far too large.

    Args:
        functions: the layers, each from states (B, ...) to states (B, ...).
        y: states (B, ...).
        layers: the j that are wanted, by default 0 .. N-1.
        steps: of Lanczos.
        dense: for states of up to this many entries, make the whole matrix, which misses nothing.
        seed: of the vector that Lanczos starts from.

    Returns:
        `Extremes`, with the values for each layer and sample, and their errors.

    Raises:
        ShapeError: if a function changes the shape of the states, if there are no functions or no
            samples, if there is no such layer, or if `steps` is not positive.

    Examples:
        >>> import torch, hdnn
        >>> halves = [torch.nn.Linear(4, 4), lambda y: y / 2]
        >>> found = hdnn.analysis.chain_extremes(halves, torch.randn(3, 4), layers=[1])
        >>> found.smallest, found.largest
        (tensor([[0.5000, 0.5000, 0.5000]], ...), tensor([[0.5000, 0.5000, 0.5000]], ...))
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
    return extremes_of(chains, y, layers, steps, dense, seed, undo=False)


@torch.no_grad()
def extremes_of(
    chains: Sequence[Sequence[Any]],
    y: Tensor,
    layers: Iterable[int] | None,
    steps: int,
    dense: int,
    seed: int,
    *,
    undo: bool,
) -> Extremes:
    """The same, given the derivatives of all layers: a chain of them for each sample of y."""
    positive_int("steps", steps)
    if not chains[0] or not len(y):
        raise ShapeError(f"there are no {'samples' if chains[0] else 'layers'} to look at.")
    wanted = chosen_layers(layers, len(chains[0]) - 1)
    found = [
        [_pair(chain[j:], y[:1], steps, dense, seed, undo) for chain in chains] for j in wanted
    ]
    table = torch.tensor(found, dtype=torch.float64).reshape(len(wanted), len(chains), 2, 3)
    return Extremes(wanted, *table.mT.flatten(-2).unbind(-1))


def _pair(
    chain: Sequence[Any], state: Tensor, steps: int, dense: int, seed: int, undo: bool
) -> tuple[Value, Value]:
    """The smallest and the largest singular value of the product of a chain of derivatives."""
    last, whole = chain[-1], state.numel() <= dense
    found = _by_matrix(chain, state) if whole else _by_lanczos(chain, state, steps, seed)
    low, high = _with_errors(*found, state, len(chain))
    if isinstance(last, Traced):
        return Value(0.0) if last.dead() else low, high
    if not undo or not math.isfinite(high.value):
        return low, high
    if whole and last.symplectic:
        return high._replace(value=1 / high.value), high
    if whole and low.error <= TOLERANCE:
        return low, high
    return _by_inverse(chain, state, steps, seed) or low, high


def _with_errors(
    low: Singular, high: Singular, steps: int, state: Tensor, depth: int
) -> tuple[Value, Value]:
    """What so many steps found, with relative errors."""
    if not math.isfinite(high.value):
        unknown = Value(math.nan, math.inf, math.inf)
        return unknown, unknown
    n, rounding = state.numel(), _rounding(state, depth) * high.value
    low_error, high_error = ((x.residual + rounding) / max(x.value, TINY) for x in (low, high))
    return (
        Value(low.value, low_error, missed=0.0 if steps == n else math.inf),
        Value(high.value, high_error, missed=shortfall(n, steps)),
    )


def _by_matrix(chain: Sequence[Any], state: Tensor) -> tuple[Singular, Singular, int]:
    """From all singular values of the whole matrix, as n steps of Lanczos would find them."""
    n = state.numel()
    rows = torch.eye(n, dtype=state.dtype, device=state.device).reshape(n, *state.shape)
    for M in chain:
        rows = torch.func.vmap(M.forwards)(rows)
    values = singular_values(rows.reshape(n, n))
    return Singular(float(values[-1]), 0.0), Singular(float(values[0]), 0.0), n


def _by_lanczos(
    chain: Sequence[Any], state: Tensor, steps: int, seed: int
) -> tuple[Singular, Singular, int]:
    forwards = _product(state, [M.forwards for M in chain])
    backwards = _product(state, [M.backwards for M in reversed(chain)])
    return bidiagonalise(forwards, backwards, state.numel(), steps, state, seed)


def _by_inverse(chain: Sequence[Derivative], state: Tensor, steps: int, seed: int) -> Value | None:
    """The smallest value as one over the largest of the inverse; None if that is not found."""
    n = state.numel()
    undo = _product(state, [M.undo for M in reversed(chain)])
    undo_backwards = _product(state, [M.undo_backwards for M in chain])
    try:
        _, found, k = bidiagonalise(undo, undo_backwards, n, steps, state, seed)
    except ConvergenceError:
        return None
    if not math.isfinite(found.value):
        return None
    error = found.residual / found.value + _rounding(state, len(chain)) + chain[-1].tolerance
    return Value(1 / found.value, error, shortfall(n, k))


def _product(state: Tensor, maps: Sequence[Callable[[Tensor], Tensor]]) -> Product:
    """One map after the other, on vectors (n,)."""

    def product(v: Tensor) -> Tensor:
        v = v.reshape(state.shape)
        for each in maps:
            v = each(v)
        return v.reshape(-1)

    return product
