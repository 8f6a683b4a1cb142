"""The norms of dy_N/dy_j at some states, and the rounding errors in them.

For vectors, the layers' matrices are multiplied in closed form. For images and blocks of any
modules, the matrices are only multiplied by vectors (Lanczos), so the norms are lower bounds. The
module's own result is compared with its layers run in turn: a hook or an overridden method that
changes values or gradients makes the measurement worthless, and `trouble` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hdnn import engine
from hdnn.analysis.lanczos import Chain, Derivative
from hdnn.analysis.modules import random_like, spread
from hdnn.analysis.sensitivity import (
    backward_factors,
    norms,
    singular_values,
    steps_of,
    symplectic_defect,
    trajectory,
)
from hdnn.errors import HDNNError
from hdnn.networks import HamiltonianUnit, Network
from hdnn.progress import Progress

SAME = 1e-6  # relative difference of two ways to compute the same value
HIDDEN = 0.01  # relative: with a larger error bound, nothing can be concluded
LAYERS = 6  # of images and blocks, at the most
FEW = 3  # samples of these, at the most
STEPS = 8  # steps of Lanczos; if they see a norm below 1, take
MORE_STEPS = 64
CHANGED = (
    "its result or gradient differs from that of its layers run in turn, because of a hook, an "
    "overridden method or random numbers"
)


@dataclass
class Measured:
    """Norms (L+1, B) of dy_N/dy_j for some layers j and for j = N; NaN where not computed."""

    layers: list[int]  # the numbers j, with N last
    features: int
    norms: Tensor
    slack: Tensor  # (L, B): the relative error that rounding can have caused in a norm
    trouble: str = ""
    complete: bool = True  # False if norms are lower bounds that may be small
    smallest: float | None = None  # singular value
    defect: float | None = None  # of symplecticity, the largest of all layers
    symplectic: bool | None = None
    end: Tensor | None = None  # dy_N/dy_0: (B, n, n)


# Vectors


@torch.no_grad()
def measure_network(net: Network, call: BlockCall) -> Measured:
    """All norms of a network in float64 at states (B, n)."""
    y = call.y
    with engine.use(engine="reference", backprop="stored"):
        states = trajectory(net, y)
        result = _measure_matrices(net, states)
        if result.end is None:
            return result
        u = random_like(y)
        gradient = (result.end @ u.unsqueeze(-1)).squeeze(-1)
        if _differs(net, y, u, states[-1], gradient):
            result.trouble = CHANGED
    return result


def _measure_matrices(net: Network, states: Tensor) -> Measured:
    N = net.layers
    B, n = states.shape[1:]
    eps = torch.finfo(states.dtype).eps
    J = None
    if net.symplectic:
        J = net.field()["J"]
    factors = _factor_sizes(net)
    Phi = torch.eye(n, dtype=states.dtype).repeat(B, 1, 1)
    moved = states.new_zeros(B)
    sizes = states.new_ones(N + 1, B)
    smallest = states.new_ones(N + 1, B)
    slack = states.new_zeros(N, B)
    defects = states.new_zeros(N, B)
    allowed = states.new_zeros(N, B)
    for j, M in _with_progress(backward_factors(net, states), N):
        Phi = M @ Phi
        values = singular_values(Phi)
        sizes[j] = values[:, 0]
        smallest[j] = values[:, -1]
        # Layer j moves Phi_j by eps |Phi_{j+1}| |Phi_j^-1| times the size of its factors.
        inverse = smallest[j].clamp_min(eps * sizes[j])
        moved = moved + factors[j] * sizes[j + 1] / inverse
        slack[j] = 4 * n * eps * (1 + moved)
        if J is not None and J.ndim == 2:
            defects[j] = symplectic_defect(M, J)
            rounding = 64 * n * eps * factors[j]
            allowed[j] = rounding / norms(M).clamp_min(1.0)
    finite = states.isfinite().all(-1)
    lost = ~finite.all(0)
    sizes[:-1, lost] = torch.nan
    least = smallest.nan_to_num(torch.inf).min()
    result = Measured(
        layers=list(range(N + 1)),
        features=n,
        norms=sizes,
        slack=slack.nan_to_num(torch.inf),
        smallest=float(least),
    )
    if J is not None and J.ndim == 2:
        defects = defects.nan_to_num(0.0)
        result.defect = float(defects.max())
        result.symplectic = _within(defects, allowed)
    if bool(sizes.isfinite().all()):
        result.end = Phi
    elif bool(finite.all()):
        result.trouble = "norms exceed the largest float64"
    else:
        bad = ~finite.all(1)
        first = int(bad.nonzero()[0])
        result.trouble = f"states are not finite from layer {first} on"
    return result


def _within(defects: Tensor, allowed: Tensor) -> bool | None:
    """True if rounding explains all defects; None if it could hide larger ones."""
    if bool((defects > allowed).any()):
        return False
    if bool((allowed > HIDDEN).any()):
        return None
    return True


def _factor_sizes(net: Network) -> Tensor:
    """The product of the norms of all factors of each dy_{j+1}/dy_j: (N,), at least 1."""
    if not hasattr(net, "h"):
        return torch.ones(net.layers)
    if net.scheme.halves:
        shears = net.sigma.S * net.shear_norms()
        return (1 + shears).reshape(-1, net.layers).prod(0)
    size = 1 + steps_of(net) * net.field_rates()
    return size**3 if net.implicit else size


def _differs(
    module: Callable[..., Any],
    y: Tensor,
    u: Tensor,
    end: Tensor,
    grad: Tensor,
) -> bool:
    """True if a module's value, or the gradient of its product with u, is different."""
    with torch.enable_grad():
        leaf = y.detach().clone().requires_grad_()
        try:
            out = module(leaf)
        except HDNNError:
            # A method of another module runs, such as one in another dtype.
            return True
        is_state = isinstance(out, Tensor) and out.shape == end.shape
        if not is_state or not out.requires_grad:
            return True
        (g,) = torch.autograd.grad(
            out,
            leaf,
            u,
            allow_unused=True,
        )
    if g is None or not _close(g, grad):
        return True
    return not _close(out.detach(), end)


def _close(a: Tensor, b: Tensor) -> bool:
    finite = a.isfinite() & b.isfinite()
    a = a.where(finite, 0.0)
    b = b.where(finite, 0.0)
    difference = (a - b).abs().max()
    allowed = SAME * b.abs().max() + 1e-290
    return bool(difference <= allowed)


# Images and blocks of any modules


class BlockCall(NamedTuple):
    """The state and the further arguments that a unit or a block is called with."""

    y: Tensor
    args: tuple[Any, ...] = ()
    options: dict[str, Any] = {}  # noqa: RUF012

    def run(self, module: Callable[..., Tensor], y: Tensor) -> Tensor:
        """Call a module or one of its layers with these arguments, at a state y."""
        return module(y, *self.args, **self.options)


def measure_layers(module: Any, call: BlockCall) -> Measured:
    """Norms of a unit or of blocks in float64, for a few layers and samples, by Lanczos.

    Lanczos starts from one sample. If samples do not depend on each other, it sees only that
    sample's matrix; otherwise it sees the matrix of the whole batch, which is one state.
    """
    y = call.y
    if not call.args and not call.options:
        y = y[spread(len(y), FEW)]
    with (
        sdpa_kernel(SDPBackend.MATH),
        engine.use(engine="reference", backprop="stored"),
    ):
        return _measure_chain(module, call, y)


def _measure_chain(module: Any, call: BlockCall, y: Tensor) -> Measured:
    functions = [partial(call.run, layer) for layer in _layers_of(module)]
    chain = Chain(functions, y)
    layers = spread(len(functions), LAYERS)
    sizes = y.new_ones(len(layers) + 1, min(len(y), FEW))
    rounding = 1e-9 + 100 * _rounding(chain, y)
    result = Measured(
        layers=[*layers, len(functions)],
        features=y[0].numel(),
        norms=sizes,
        slack=torch.full_like(sizes[:-1], rounding),
    )
    _measure_norms(chain, y, result, STEPS)
    below = bool((sizes < 1).any())
    if below and not result.complete and module.guarantee().holds:
        _measure_norms(chain, y, result, MORE_STEPS)
    if not bool(sizes.isfinite().all()):
        result.trouble = "a state or a derivative is not finite"
    elif rounding > HIDDEN:
        result.trouble = "the precision of its modules is too low"
    elif _chain_differs(module, call, chain, y):
        result.trouble = CHANGED
    if getattr(module, "symplectic", False):
        result.defect = _block_defect(chain, y, module.dim)
        result.symplectic = result.defect <= rounding
    return result


def _layers_of(module: Any) -> list[Any]:
    """The layers of a unit, the blocks of a stack, or a block alone."""
    if isinstance(module, HamiltonianUnit):
        return [partial(module.layer, j=j) for j in range(module.layers)]
    return list(module) if hasattr(module, "__len__") else [module]


def _measure_norms(
    chain: Chain, y: Tensor, result: Measured, steps: int
) -> None:
    """Fill in the norms, and whether all are exact up to rounding."""
    result.complete = True
    samples = enumerate(spread(len(y), FEW))
    layers = enumerate(result.layers[:-1])
    norms = list(product(samples, layers))
    for (column, i), (row, j) in _with_progress(norms, len(norms)):
        start = torch.zeros_like(y)
        start[i] = random_like(y[i])
        norm, exact = chain.norm(start, j, steps)
        result.norms[row, column] = norm
        if not exact:
            result.complete = False


def _with_progress(measurements: Iterable[Any], total: int) -> Iterator[Any]:
    """The measurements to make, with a progress line at a terminal."""
    with Progress("measuring the gradients", total) as progress:
        for number, measurement in enumerate(measurements):
            progress.update(number)
            yield measurement


def _chain_differs(
    module: Any, call: BlockCall, chain: Chain, y: Tensor
) -> bool:
    """True if the module itself is not the chain of its layers."""
    end = chain.end
    u = random_like(end)
    gradient = u
    # A normalisation may follow the layers of a unit.
    after = getattr(module, "after", None)
    if after is not None:
        M = Derivative(after, end)
        end = M.out
        gradient = M.backwards(u)
    gradient = chain.backwards(gradient)
    return _differs(partial(call.run, module), y, u, end, gradient)


def _rounding(chain: Chain, y: Tensor) -> float:
    """The relative difference of u . (M v) and (M^T u) . v."""
    u = random_like(y)
    v = chain.backwards(u)
    square = float(v.square().sum())
    difference = float((u * chain.forwards(v)).sum()) - square
    return abs(difference) / max(square, 1e-300)


def _block_defect(chain: Chain, y: Tensor, dim: int) -> float:
    """|Phi^T J Phi u - J u| for a random u and the canonical J, relative to |Phi u|^2."""
    u = random_like(y)
    u = u / u.norm()
    v = chain.backwards(u)
    difference = chain.forwards(_turned(v, dim)) - _turned(u, dim)
    return float(difference.norm()) / max(1.0, float(v.norm()) ** 2)


def _turned(v: Tensor, dim: int) -> Tensor:
    """J v for the canonical J."""
    p, q = v.chunk(2, dim)
    return torch.cat([-q, p], dim)
