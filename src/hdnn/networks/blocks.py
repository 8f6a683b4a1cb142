"""Layers made of any modules, on y = (p, q): p moves by a function of q, then q by one of p.

Such moves are shears, with determinant 1 whatever the functions are. So the product of the singular
values of dy_N/dy_j is 1 at any depth, the norm of dy_N/dy_j is at least 1, and each layer can be
undone. Where the functions are gradients of energies, the layers are symplectic as well: the
paper's case.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hdnn.engine import rebuild
from hdnn.engine.rebuild import Half, Move
from hdnn.errors import (
    DtypeError,
    OptionError,
    ShapeError,
    choose,
    positive_float,
)
from hdnn.io import HubModule
from hdnn.networks.network import (
    HOOKS,
    Guarantee,
    hook_reason,
    unknown_reason,
)

VOLUME = "each layer is made of shears, det = 1, so the product of all singular values is 1"
GRADIENTS = "each layer is made of shears along gradients of energies: symplectic, det = 1"
SCOPE = (
    "at any depth, for any modules and any weights; it concerns the whole matrix dy_N/dy_j, not a "
    "single pair of tokens, pixels or nodes"
)


class ShearLayers(HubModule):
    """The moves of the halves of a state along the axis `dim`: the base of blocks and stacks.

    A call passes further arguments (masks, edges, conditions) to all modules. It raises a
    `ShapeError` if y cannot be split in half, or if a module's result does not have the shape of a
    half.
    """

    dim: int
    state = "float"
    backprop = "stored"

    def moves(self) -> list[Move]:
        """The moves of the halves, in the order in which they run."""
        raise NotImplementedError

    def fields(self) -> list[Any]:
        """All modules that move a half."""
        modules = [move.module for move in self.moves()]
        return [module for module in modules if module is not None]

    def forward(self, y: Tensor, *args: Any, **options: Any) -> Tensor:
        """The last state, computed from the first.

        Args:
            y: a state (p, q), halves along the axis `dim`.
            *args: passed to all modules.
            **options: passed to all modules.
        """
        moves = [move.bind(args, options) for move in self.moves()]
        backprop = "stored" if self.backprop == "auto" else self.backprop
        return self._joined(y, rebuild.run(self._halves(y), moves, backprop))

    def inverse(self, y: Tensor, *args: Any, **options: Any) -> Tensor:
        """The first state from the last: exact up to rounding, or on the grid to the last bit.

        Args:
            y: the last state.
            *args: as in the forward pass.
            **options: as in the forward pass.
        """
        moves = [move.bind(args, options) for move in self.moves()]
        return self._joined(y, rebuild.undo(self._halves(y), moves))

    def _halves(self, y: Tensor) -> list[Half]:
        fixed = self.state == "fixed"
        fits = isinstance(y, Tensor) and -y.ndim <= self.dim < y.ndim
        number = fits and (
            y.is_floating_point() or (y.is_complex() and not fixed)
        )
        if not number or y.shape[self.dim] % 2:
            kind = type(y).__name__
            if isinstance(y, Tensor):
                kind = f"{y.dtype} of shape {tuple(y.shape)}"
            error = DtypeError if fits and not number else ShapeError
            raise error(
                f"{type(self).__name__} splits a floating-point state (on the grid, a real state) "
                f"into (p, q) along axis {self.dim}, so its size there must be even, but got "
                f"{kind}; double the state, y = torch.cat([x, x], dim), or add a zero."
            )
        return rebuild.halves_of(y, self.dim, fixed=fixed)

    def _joined(self, y: Tensor, halves: list[Half]) -> Tensor:
        joined = torch.cat([half.value for half in halves], self.dim)
        if self.state == "fixed":
            rebuild.check_grid(y, joined, self.dim)
        return joined

    @property
    def symplectic(self) -> bool:
        """True if all modules are gradients of energies."""
        return all(map(_is_gradient, self.fields()))

    def guarantee(self) -> Guarantee:
        """The theorem that `norm(dy_N/dy_j) >= 1`, or the reason why there is none."""
        reason = unknown_reason(self)
        if reason is not None:
            why = f"nothing is known about this layer: {reason}"
            return Guarantee(False, "none", why)
        return Guarantee(True, GRADIENTS if self.symplectic else VOLUME, SCOPE)

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


class Coupling(ShearLayers):
    """A layer made of any two modules, on states y = (p, q): `p += F(q)`, then `q += G(p)`.

    Both updates are shears, with determinant 1 whatever F and G are. So `norm(dy_N/dy_j) >= 1` in a
    stack of such layers, and each layer can be undone. `layer(y, mask=mask)` passes further
    arguments to both modules.

    Args:
        F: moves p by a function of q; None leaves p as it is.
        G: moves q by a function of the new p; None leaves q as it is.
        dim: the axis along which a state is split into the halves p and q.

    Examples:
        >>> import torch
        >>> import hdnn
        >>> layer = hdnn.Coupling(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        >>> y = torch.randn(2, 8)
        >>> torch.allclose(layer.inverse(layer(y)), y, atol=1e-5)
        True
    """

    def __init__(
        self, F: nn.Module | None, G: nn.Module | None = None, *, dim: int = -1
    ) -> None:
        super().__init__()
        self.dim = dim
        self.F = checked_module("F", F, optional=True)
        self.G = checked_module("G", G, optional=True)

    def moves(self) -> list[Move]:
        both = [
            Move(1, 0, self.F, "F", self.F),
            Move(0, 1, self.G, "G", self.G),
        ]
        return [move for move in both if move.function is not None]


class Leapfrog(ShearLayers):
    """A layer made of any module, on states y = (p, q): `p += h F(q)`, then `q += h p`.

    With `F = -dV/dq` these are the equations of motion of a mass in the potential V, with the
    energy `H = |p|^2 / 2 + V(q)`. For any F, `norm(dy_N/dy_j) >= 1` in a stack of such layers, and
    each layer can be undone.

    Args:
        F: moves p by a function of q; its result has the shape of q.
        h: the step size.
        dim: the axis along which a state is split into the halves p and q.

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
        super().__init__()
        self.dim = dim
        self.F = checked_module("F", F)
        self.h = positive_float("h", h)

    def moves(self) -> list[Move]:
        kick = partial(_kick, self.F, self.h)
        drift = partial(_drift, self.h)
        return [
            Move(1, 0, kick, "F", self.F),
            Move(0, 1, drift, "the drift h p"),
        ]

    def extra_repr(self) -> str:
        return f"h={self.h}, dim={self.dim}"


def _kick(F: Any, h: float, q: Tensor, *args: Any, **options: Any) -> Tensor:
    force = F(q, *args, **options)
    scaled = h != 1 and isinstance(force, Tensor)
    return h * force if scaled else force


def _drift(h: float, p: Tensor, *args: Any, **options: Any) -> Tensor:
    return h * p


class GradientField(nn.Module):
    """The gradient of an energy as a module: `scale * dE/dx`.

    The Jacobian of a gradient is symmetric, so layers moved by it are symplectic. The derivative is
    taken with respect to x alone: further arguments count as constants, even if they depend on x.

    Args:
        energy: a module that gives one number for each sample, `E = energy(x)`.
        scale: the factor of the gradient; -1 for a force.

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
        self.energy = checked_module("energy", energy)
        self.scale = float(scale)

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Tensor:
        """The gradient at x, in its shape.

        Args:
            x: samples `(*batch, n)`.
            *args: passed to the energy.
            **options: passed to the energy.

        Raises:
            ShapeError: if the energy is not one real number for each sample.
            OptionError: if the energy has no gradient with respect to x.
        """

        def total(x: Tensor) -> Tensor:
            return _checked_energy(self.energy(x, *args, **options), x).sum()

        if torch.compiler.is_compiling():
            if (
                rebuild.recording.depth
            ):  # by hooks, which torch.func does not support
                return rebuild.eagerly(
                    partial(self.forward, **options), x, *args
                )
            gradient = torch.func.grad(total)(x)
        elif torch.is_inference_mode_enabled() or rebuild.transformed():
            gradient = torch.func.grad(total)(x)
        else:
            gradient = _gradient(total, x)
        return gradient if self.scale == 1 else self.scale * gradient

    def extra_repr(self) -> str:
        return f"scale={self.scale}"


def _is_gradient(field: Any) -> bool:
    """True if a module is the gradient of an energy, which no hook changes."""
    if not isinstance(field, GradientField) or unknown_reason(field):
        return False
    return not any(map(hook_reason, field.modules()))


def _gradient(total: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The gradient at an alias of x; nothing else depends on the alias."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        alias = x.view_as(x)  # unlike detach(), with the tangent of x
        if not alias.requires_grad:
            alias.requires_grad_()
        E = total(alias)
        gradient = None
        if E.requires_grad:
            (gradient,) = torch.autograd.grad(
                E, alias, create_graph=create_graph, allow_unused=True
            )
    if gradient is None:
        raise OptionError(
            "the energy has no gradient with respect to its input; compute it with differentiable "
            "operations, without detach(), .data or no_grad()."
        )
    return gradient


def _checked_energy(energy: Any, x: Tensor) -> Tensor:
    samples = max(1, math.prod(x.shape[:-1]))
    if (
        isinstance(energy, Tensor)
        and energy.is_floating_point()
        and energy.numel() <= samples
    ):
        return energy
    shape = (
        f"{tuple(energy.shape)}, {energy.dtype}"
        if isinstance(energy, Tensor)
        else energy
    )
    raise ShapeError(
        f"an energy must be one real number, or one for each sample, but it is {shape} for a half "
        f"state of shape {tuple(x.shape)}."
    )


class Reversible(ShearLayers):
    """Blocks (`hdnn.Coupling`, `hdnn.Leapfrog`) one after the other, on states y = (p, q).

    `norm(dy_N/dy_j) >= 1` at any depth, whatever the modules of the blocks are, and memory need not
    grow with depth. `net(y, mask=mask)` passes further arguments to all modules.

    A stack calls the modules of its blocks, not the blocks themselves: apply hooks, `torch.compile`
    and `fully_shard` to each F and G, or to the stack; a hook on a block is an error.
    `torch.compile` compiles a whole stack only if its states are stored; otherwise compile each F
    and G.

    With "reversible", each complete backward pass checks the first state that it rebuilds: slightly
    wrong gradients give a `ReversalWarning`, worthless gradients an error. A module that computes
    something else the second time is noticed in the same way, unless it moves a half by less than
    about 4e-6 (float32) of its size after the first block, or only a few entries in a thousand
    differ.

    Args:
        blocks: the layers, all of which split the state along the same axis.
        backprop: which saved states the backward pass starts from. "stored", the choice of "auto":
            autograd stores all it needs. "checkpoint": about sqrt(N) states are stored, and the
            layers between them run again. "reversible": only the last state is stored, and the
            layers are undone one by one.
        state: "float", or "fixed": all states lie on a fine grid of integers, so undoing is exact
            to the last bit, and gradients equal those of stored states at any depth. A state that
            leaves the grid is an error.

    Examples:
        >>> import torch
        >>> import hdnn
        >>> layers = [hdnn.Leapfrog(torch.nn.Linear(8, 8), h=0.1) for _ in range(64)]
        >>> net = hdnn.Reversible(layers, backprop="reversible", state="fixed")
        >>> y, K = torch.randn(32, 16), layers[0].F.weight
        >>> (rebuilt,) = torch.autograd.grad(net(y).sum(), K)
        >>> (stored,) = torch.autograd.grad(hdnn.Reversible(layers, state="fixed")(y).sum(), K)
        >>> torch.equal(rebuilt, stored)
        True
    """

    def __init__(
        self,
        blocks: Iterable[nn.Module],
        *,
        backprop: str = "auto",
        state: str = "float",
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        for j, block in enumerate(self.blocks):
            if not isinstance(block, ShearLayers) or isinstance(
                block, Reversible
            ):
                raise OptionError(
                    f"block {j} is a {type(block).__name__}; make it a layer with hdnn.Leapfrog(F) "
                    "or hdnn.Coupling(F, G)."
                )
        axes = {block.dim for block in self}
        if len(axes) > 1:
            raise OptionError(
                f"all blocks must split the state along the same axis, but they use {sorted(axes)}."
            )
        self.dim = axes.pop() if axes else -1
        self.backprop = choose(
            "backprop", backprop, ("auto", *rebuild.BACKPROPS)
        )
        self.state = choose("state", state, ("float", "fixed"))

    def moves(self) -> list[Move]:
        moves = []
        for j, block in enumerate(self):
            if _is_hooked(block):
                raise OptionError(
                    f"block {j} has hooks or is sharded, but a stack calls the modules of its "
                    "blocks, not the blocks themselves; hook or shard each F and G, as in "
                    "fully_shard(block.F), or the stack."
                )
            moves += [
                move._replace(name=f"{move.name} of block {j}")
                for move in block.moves()
            ]
        return moves

    def trajectory(self, y: Tensor, *args: Any, **options: Any) -> Tensor:
        """All states, `y_0` to `y_N`, stacked: `(N+1, *y.shape)`.

        Args:
            y: the first state.
            *args: passed to all modules.
            **options: passed to all modules.
        """
        halves = self._halves(y)
        states = [self._joined(y, halves)]
        for block in self:
            moves = [move.bind(args, options) for move in block.moves()]
            halves = rebuild.run(halves, moves)
            states.append(self._joined(y, halves))
        return torch.stack(states)

    def guarantee(self) -> Guarantee:
        """The theorem that `norm(dy_N/dy_j) >= 1`, or the reason why there is none."""
        promises = [super().guarantee(), *(block.guarantee() for block in self)]
        return next(
            (promise for promise in promises if not promise.holds), promises[0]
        )

    def __len__(self) -> int:
        return len(self.blocks)

    def __iter__(self) -> Iterator[ShearLayers]:
        return iter(self.blocks)  # pyright: ignore[reportReturnType]

    def __getitem__(self, j: int) -> ShearLayers:
        return self.blocks[j]  # pyright: ignore[reportReturnType]

    def extra_repr(self) -> str:
        options = f'backprop="{self.backprop}", state="{self.state}"'
        return f"{len(self)} blocks, dim={self.dim}, {options}"


def _is_hooked(block: nn.Module) -> bool:
    """True if a block has hooks, other than the hooks by which hdnn watches all modules."""
    hooks = [hook for kind in HOOKS for hook in getattr(block, kind).values()]
    return not all(str(hook.__module__).startswith("hdnn.") for hook in hooks)


def checked_module(name: str, module: Any, *, optional: bool = False) -> Any:
    """The module, if it can be called."""
    if not callable(module) and not (optional and module is None):
        raise OptionError(f"{name} must be an nn.Module, but got {module!r}.")
    return module
