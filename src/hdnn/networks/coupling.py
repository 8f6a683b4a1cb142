"""Layers of any modules: p moves by a function of q, then q by one of p.

Such a layer is a product of shears, which have determinant 1 whatever the functions are. So the
product of the singular values of dy_N/dy_j is 1 at any depth, its norm is at least 1, and each
layer can be undone. Where the functions are gradients of energies, the layers are symplectic as
well: the paper's case.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from hdnn.engine import chain
from hdnn.engine.chain import HalfMove
from hdnn.engine.tracing import eagerly, hooked, transformed
from hdnn.errors import OptionError, ShapeError, as_float, positive_float, quoted
from hdnn.networks.block_derivatives import BlockDerivative
from hdnn.networks.promise import Guarantee, own_methods, unknown

VOLUME = "each layer is made of shears, det = 1, so the product of all singular values is 1"
GRADIENTS = "each layer is made of shears by gradients of energies: it is symplectic, det = 1"
WHOLE = (
    "at any depth, for any modules and any weights; it is about the whole matrix dy_N/dy_j, not "
    "about one pair of tokens, pixels or nodes"
)


class Block(nn.Module):
    """A layer of shears on states y = (p, q), halves of y along the axis `dim`."""

    certified_at = "calls"

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        if isinstance(dim, bool) or not isinstance(dim, Integral):
            raise OptionError(f"dim must be the number of an axis, but got {quoted(dim)}.")
        self.dim = int(dim)

    def shears(self) -> list[HalfMove]:
        """The shears of this layer, in the order in which they run."""
        raise NotImplementedError

    def fields(self) -> list[Any]:
        """All modules that move a half."""
        raise NotImplementedError

    def forward(self, y: Tensor, *args: Any, **options: Any) -> Tensor:
        """The next state.

        Args:
            y: a state (p, q), halves along the axis `dim`.
            *args: go to all modules: masks, edges, conditions and the like.
            **options: go to all modules.

        Raises:
            ShapeError: if y cannot be halved, or a module returns another shape than a half has.
        """
        return self._run(chain.run, y, args, options)

    def inverse(self, y: Tensor, *args: Any, **options: Any) -> Tensor:
        """The state from the next one, exact up to rounding.

        Args:
            y: the next state.
            *args: what the forward pass was given.
            **options: what the forward pass was given.
        """
        return self._run(chain.undo, y, args, options)

    def _run(
        self, way: Callable[..., list[chain.Half]], y: Tensor, args: Any, options: Any
    ) -> Tensor:
        check_halves(self, y, self.dim)
        halves = way(chain.halves_of(y, self.dim, False), self.shears(), args, options)
        return torch.cat([half.value for half in halves], self.dim)

    def layer_derivatives(self, y: Tensor, *args: Any, **options: Any) -> list[BlockDerivative]:
        """The derivative of this one layer at y, as products with vectors."""
        return [BlockDerivative(self, y, args, options)]

    @property
    def symplectic(self) -> bool:
        """Whether all modules are gradients of energies."""
        return all(isinstance(one, GradientField) and not own_methods(one) for one in self.fields())

    def guarantee(self) -> Guarantee:
        """Whether `norm(dy_N/dy_j) >= 1` is a theorem, and why."""
        own = own_methods(self)
        if own:
            return unknown(self, own)
        return Guarantee(True, GRADIENTS if self.symplectic else VOLUME, WHOLE)

    def form(self) -> str:
        """What it is, in one line."""
        fields = ", ".join(type(one).__name__ for one in self.fields())
        return f"{type(self).__name__}({fields}, {self.extra_repr()})"

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


class Coupling(Block):
    """A layer of any two modules on states y = (p, q): `p += F(q)`, then `q += G(p)`.

    Both updates are shears, with determinant 1 whatever F and G are. So `norm(dy_N/dy_j) >= 1` in a
    stack of such layers, and each can be undone. `layer(y, mask=mask)` hands further arguments to
    both modules. A call raises a `ShapeError` if y cannot be halved, or a module returns another
    shape than that of a half.

    Args:
        F: moves p by a function of q; None moves nothing.
        G: moves q by a function of the new p; None moves nothing.
        dim: the axis along which a state is split into the halves p and q.

    Raises:
        OptionError: if F or G is no module, or `dim` no whole number.

    Examples:
        >>> import torch
        >>> import hdnn
        >>> layer = hdnn.Coupling(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        >>> y = torch.randn(2, 8)
        >>> torch.allclose(layer.inverse(layer(y)), y, atol=1e-5)
        True
    """

    def __init__(self, F: nn.Module | None, G: nn.Module | None = None, *, dim: int = -1) -> None:
        super().__init__(dim)
        self.F, self.G = _module("F", F), _module("G", G)

    def shears(self) -> list[HalfMove]:
        both = [(0, self.F, "F"), (1, self.G, "G")]
        return [HalfMove(half, one, name, one) for half, one, name in both if one is not None]

    def fields(self) -> list[Any]:
        return [one for one in (self.F, self.G) if one is not None]


class Leapfrog(Block):
    """A layer of any module on states y = (p, q): `p += h F(q)`, then `q += h p`.

    With `F = -dV/dq` these are the equations of a mass in the potential V, with the energy
    `H = |p|^2 / 2 + V(q)`. For any F `norm(dy_N/dy_j) >= 1` in a stack of such layers, and each can
    be undone.

    Args:
        F: moves p by a function of q, with a result of the shape of q.
        h: the step size.
        dim: the axis along which a state is split into the halves p and q.

    Raises:
        OptionError: if F is no module, or `dim` no whole number.
        StepError: if h is not finite and > 0.

    Examples:
        >>> import torch
        >>> import hdnn
        >>> layer = hdnn.Leapfrog(torch.nn.Linear(4, 4), h=0.1)
        >>> layer(torch.randn(2, 8)).shape
        torch.Size([2, 8])
        >>> layer.guarantee().holds
        True
    """

    def __init__(self, F: nn.Module, *, h: float = 1.0, dim: int = -1) -> None:
        super().__init__(dim)
        if F is None:
            raise OptionError("Leapfrog needs a module F; hdnn.Coupling takes None.")
        self.F, self.h = _module("F", F), positive_float("h", h)

    def shears(self) -> list[HalfMove]:
        return [HalfMove(0, self._kick, "F", self.F), HalfMove(1, self._drift, "the drift h p")]

    def fields(self) -> list[Any]:
        return [self.F]

    def _kick(self, q: Tensor, *args: Any, **options: Any) -> Tensor:
        move = self.F(q, *args, **options)
        return move if self.h == 1 or not isinstance(move, Tensor) else self.h * move

    def _drift(self, p: Tensor, *args: Any, **options: Any) -> Tensor:
        return self.h * p

    def extra_repr(self) -> str:
        return f"h={self.h}, dim={self.dim}"


class GradientField(nn.Module):
    """The gradient of an energy as a module: `scale * dE/dx`.

    The Jacobian of a gradient is symmetric, and so the layers that it moves are symplectic. A call
    raises a `ShapeError` if the energy is not one number for each sample.

    Args:
        energy: a module that gives one number for each sample, `E = energy(x)`.
        scale: what the gradient is multiplied by; -1 for a force.

    Raises:
        OptionError: if `energy` is no module, `scale` is not finite, or, in a call, the energy has
            no gradient.

    Examples:
        >>> import torch
        >>> import hdnn
        >>> V = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        >>> kick = hdnn.GradientField(V, scale=-1.0)
        >>> layer = hdnn.Leapfrog(kick, h=0.1)  # p -= h dV/dq, then q += h p
        >>> layer.symplectic, layer(torch.randn(2, 8)).shape
        (True, torch.Size([2, 8]))
    """

    def __init__(self, energy: nn.Module, *, scale: float = 1.0) -> None:
        super().__init__()
        number = as_float(scale)
        if number is None or not abs(number) < float("inf"):
            raise OptionError(f"scale must be a finite number, but got {quoted(scale)}.")
        if energy is None:
            raise OptionError("GradientField needs a module that gives an energy, but got None.")
        self.energy, self.scale = _module("energy", energy), number

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Tensor:
        """The gradient at x, in its shape.

        Args:
            x: samples `(*batch, n)`.
            *args: go to the energy.
            **options: go to the energy.
        """
        if torch.is_inference_mode_enabled():  # where no tensor can have a gradient
            with torch.inference_mode(False), torch.no_grad():
                x, args, options = chain.mapped(torch.clone, (x, args, options))
                return self(x, *args, **options)
        compiled = torch.compiler.is_compiling()
        if compiled and hooked():
            return eagerly(partial(self.forward, **options), x, *args)

        def total(x: Tensor) -> Tensor:
            return _checked_energy(self.energy(x, *args, **options), self.energy, x).sum()

        if transformed() or compiled:
            g = torch.func.grad(total)(x)
        else:
            wanted = torch.is_grad_enabled()
            with torch.enable_grad():
                x = x if x.requires_grad else x.detach().requires_grad_()
                E = total(x)
                g = None
                if E.requires_grad:
                    (g,) = torch.autograd.grad(E, x, create_graph=wanted, allow_unused=True)
            if g is None:
                raise OptionError(
                    f"the energy of {_named(self.energy)} has no gradient by its input; compute it "
                    "by differentiable operations of that, without detach(), .data or no_grad()."
                )
        return g if self.scale == 1 else self.scale * g

    def extra_repr(self) -> str:
        return f"scale={self.scale}"


def _module(name: str, given: Any) -> Any:
    if given is not None and not callable(given):
        raise OptionError(f"{name} must be an nn.Module, but got {quoted(given)}.")
    return given


def _named(function: Any) -> str:
    return type(function).__name__ if isinstance(function, nn.Module) else str(function)


def _checked_energy(energy: Any, function: Any, x: Tensor) -> Tensor:
    samples = max(1, x.shape[:-1].numel())
    if not isinstance(energy, Tensor) or energy.numel() > samples:
        given = tuple(energy.shape) if isinstance(energy, Tensor) else f"a {type(energy).__name__}"
        raise ShapeError(
            f"an energy must be one number, or one for each sample, but {_named(function)} "
            f"returned {given} for a half state of shape {tuple(x.shape)}."
        )
    if not energy.is_floating_point():
        raise ShapeError(
            f"an energy must be a real number with a gradient, but {_named(function)} returned "
            f"{energy.dtype}."
        )
    return energy


def check_halves(module: nn.Module, y: Tensor, dim: int) -> None:
    if not isinstance(y, Tensor):
        raise ShapeError(
            f"{type(module).__name__} takes a state as one tensor, but got a {type(y).__name__}."
        )
    if not y.is_floating_point() and not y.is_complex():
        raise ShapeError(f"a state has floating-point numbers, but y is {y.dtype}.")
    if not -y.ndim <= dim < y.ndim:
        raise ShapeError(f"there is no axis {dim} in a state of shape {tuple(y.shape)}.")
    if y.shape[dim] % 2:
        raise ShapeError(
            f"{type(module).__name__} splits the state into (p, q) along axis {dim}, so its size "
            f"there must be even, but got {tuple(y.shape)}; double the state, "
            "y = torch.cat([x, x], dim), or add a zero."
        )
