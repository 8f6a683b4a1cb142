"""What blocks are called with, in which precision they compute, and whether hooks change it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from hdnn.engine.chain import mapped
from hdnn.errors import DataError

SAME = 1e-3  # relative: what two ways to compute the same may differ by, at the very most


class StateCall(NamedTuple):
    """What a block or a stack was called with: the state first, then what goes to its modules."""

    y: Tensor
    args: tuple[Any, ...] = ()
    options: dict[str, Any] = {}  # noqa: RUF012

    @classmethod
    def of(cls, args: Sequence[Any], options: dict[str, Any]) -> StateCall:
        options = dict(options)
        y, *args = args if args else [options.pop("y", None)]
        if not isinstance(y, Tensor) or not y.numel():
            given = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
            raise DataError(f"blocks are certified at states: give a tensor as y, not {given}.")
        if y.is_complex():
            raise DataError("certificates are for states of real numbers, but y is complex.")
        return cls(y, tuple(args), options)

    def mapped(self, function: Callable[[Tensor], Tensor]) -> StateCall:
        return StateCall(*mapped(function, tuple(self)))

    def on(self, net: Any, *, grad: bool = True) -> Tensor:
        """y_N, with a graph or without one: there are hooks that need it."""
        return self._graph(net, grad=grad)[1].detach()

    def with_gradient(self, net: Any, u: Tensor) -> tuple[Tensor, Tensor]:
        """y_N, and the gradient of its product with u."""
        y, found = self._graph(net, grad=True)
        if not found.requires_grad:
            return found, torch.zeros_like(y)
        (g,) = torch.autograd.grad(found, y, u, allow_unused=True)
        return found.detach(), torch.zeros_like(y) if g is None else g

    def _graph(self, net: Any, *, grad: bool) -> tuple[Tensor, Tensor]:
        y = self.y.detach()
        with torch.set_grad_enabled(grad):
            y = y.clone().requires_grad_() if grad and y.is_floating_point() else y
            found = net(y, *self.args, **self.options)
        if not isinstance(found, Tensor) or found.shape != y.shape:
            given = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise DataError(f"it must give a state as y is, {tuple(y.shape)}, but gave {given}.")
        return y, found

    def rows(self, some: Tensor, *, also: bool) -> StateCall:
        """Some samples alone; `also` of other tensors that have as many rows as the state."""
        B = len(self.y)

        def chosen(x: Tensor) -> Tensor:
            return x[some] if also and x.ndim and len(x) == B else x

        return self.mapped(chosen)._replace(y=self.y[some])


class Inside(TorchDispatchMode):
    """Notes the coarsest dtype that anything is rounded to."""

    def __init__(self) -> None:
        super().__init__()
        self.dtype = torch.float64

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given = [_eps(x) for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        for x in pytree.tree_leaves(found):
            # A constant of another dtype is not rounded, and neither is what is computed of it.
            if isinstance(x, Tensor) and given and _eps(x) > max(_least(given), self._eps):
                self.dtype = x.dtype.to_real()
        return found

    @property
    def _eps(self) -> float:
        return torch.finfo(self.dtype).eps


def _eps(x: Tensor) -> float:
    return torch.finfo(x.dtype).eps if x.is_floating_point() or x.is_complex() else 0.0


def _least(eps: list[float]) -> float:
    return min((one for one in eps if one), default=math.inf)


class Precision(NamedTuple):
    """What modules really compute in, given float64."""

    dtype: torch.dtype = torch.float64

    @classmethod
    def of(cls, net: Any, call: StateCall) -> Precision:
        with Inside() as inside:
            call.with_gradient(net, torch.ones_like(call.y))
        return cls(inside.dtype)

    @property
    def eps(self) -> float:
        """Of a derivative: modules round in their own ways."""
        return (1e3 if self.dtype == torch.float64 else 16) * torch.finfo(self.dtype).eps

    @property
    def name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def coarse(self) -> bool:
        """Whether rounding can be as large as what is looked for."""
        return torch.finfo(self.dtype).eps > torch.finfo(torch.float32).eps


def same(one: Tensor, two: Tensor, share: float = SAME) -> bool:
    """Whether two results agree up to a share, where both are finite."""
    size = two.abs().nan_to_num(0.0, 0.0).max()
    return bool(((one - two).abs().nan_to_num(0.0, 0.0) <= min(SAME, share) * size).all())


def why_not_blocks(net: Any, call: StateCall, chain: Sequence[Any], precision: Precision) -> str:
    """Why the derivatives of blocks are not those of the whole; nothing if they are."""
    u = torch.randn(call.y.shape, dtype=call.y.dtype, generator=torch.Generator().manual_seed(3))
    (y_N, g), (again, _) = call.with_gradient(net, u), call.with_gradient(net, u)
    if not torch.equal(y_N, again):
        return "two calls give two results: a module draws numbers, also in evaluation mode"
    name = type(net).__name__
    if hasattr(net, "__len__"):  # hooks of a block alone are in its derivative
        bare, bare_g = call.with_gradient(net.forward, u)
        changed = f"{name} is not its blocks one after the other: a hook changes"
        if not same(y_N, bare, precision.eps):
            return f"{changed} what it computes"
        if not same(g, bare_g, precision.eps):
            return f"{changed} its gradients"
    v, growth = u, 1.0
    for M in reversed(chain):
        v = M.backwards(v)
        growth = max(growth, math.sqrt(u.numel()) * float(v.norm() / u.norm()))
    # Rounding in one layer grows in those behind it.
    share = precision.eps * len(chain) * growth
    if same(chain[-1].out, y_N, share) and same(v, g, share):
        return ""
    return (
        f"{name} is not its blocks one after the other: a hook or a method of its own changes what "
        "it computes"
    )
