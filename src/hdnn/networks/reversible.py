"""A stack of layers of any modules: gradients do not vanish, memory need not grow with depth."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hdnn.engine import chain
from hdnn.engine.drift import recorded
from hdnn.engine.replay import Unchanged
from hdnn.engine.tracing import eagerly, transformed, valueless
from hdnn.errors import OptionError, ShapeError, TrainingError, choose, flag
from hdnn.networks.block_derivatives import BlockDerivative
from hdnn.networks.coupling import GRADIENTS, VOLUME, WHOLE, Block, check_halves
from hdnn.networks.promise import Guarantee, own_methods, unknown

BACKPROPS = ("auto", "stored", "checkpoint", "reversible")


class Reversible(nn.Module):
    """Blocks (`hdnn.Coupling`, `hdnn.Leapfrog`) one after the other, on states y = (p, q).

    `norm(dy_N/dy_j) >= 1` at any depth, whatever the modules of the blocks are, and memory need not
    grow with depth. `net(y, mask=mask)` hands further arguments to all modules.

    A stack calls the modules of its blocks, and not the blocks: hooks, `torch.compile` and
    `fully_shard` belong on each F and G, or on the stack. `torch.compile` of a stack compiles it
    with stored states alone; otherwise compile each F and G.

    Args:
        blocks: the layers, all of which split the state along the same axis.
        backprop: what the backward pass starts from. "stored", which is also what "auto" takes:
            autograd keeps all that it reads. "checkpoint": the states of about sqrt(N) layers, and
            the layers between them run again. "reversible": the last state alone, from which the
            layers are undone one by one.
        state: "float", or "fixed": all states lie on a fine grid of integers, so that undoing is
            exact to the last bit, and gradients are those of stored states, at any depth.
        check: with "reversible", check in each backward pass that it comes back to `y_0`. Gradients
            that are a little off give a warning, worthless ones an error.

    Raises:
        OptionError: if a block is no `Coupling` or `Leapfrog`, they split along several axes, or an
            option is not known.

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

    certified_at = "calls"

    def __init__(
        self,
        blocks: Iterable[nn.Module],
        *,
        backprop: str = "auto",
        state: str = "float",
        check: bool = True,
    ) -> None:
        super().__init__()
        if not isinstance(blocks, Iterable):
            raise OptionError(
                f"Reversible takes a list of blocks, but got one {type(blocks).__name__}."
            )
        self.blocks = nn.ModuleList(blocks)
        for j, block in enumerate(self.blocks):
            if not isinstance(block, Block):
                raise OptionError(
                    f"block {j} is a {type(block).__name__}; make it a layer by hdnn.Leapfrog(F) "
                    "or hdnn.Coupling(F, G)."
                )
        axes = {block.dim for block in self}
        if len(axes) > 1:
            raise OptionError(
                f"all blocks must split the state along one axis, not {sorted(axes)}."
            )
        self.dim = axes.pop() if axes else -1
        self.backprop = choose("backprop", backprop, BACKPROPS)
        self.state = choose("state", state, ("float", "fixed"))
        self.check = flag("check", check)

    # What it does

    def forward(self, y: Tensor, *args: Any, **options: Any) -> Tensor:
        """The last state, `y_N` from `y_0`.

        Args:
            y: a state (p, q), halves along the axis `dim`.
            *args: go to all modules: masks, edges, conditions and the like.
            **options: go to all modules.

        Raises:
            ShapeError: if y cannot be halved, or a module returns another shape than a half has.
            TrainingError: with `state="fixed"`, if a state leaves the grid.
        """
        self._check(y)
        y_N = self._forward(y, args, options)
        if self.state == "fixed":
            chain.check_grid(y_N)
        return y_N

    def _forward(self, y: Tensor, args: Any, options: Any) -> Tensor:
        keeps_all = not torch.is_grad_enabled() or transformed() or chain.rebuilding()
        keeps_all = keeps_all or valueless(y)
        if self.backprop == "reversible" and not keeps_all:
            if recorded(y):
                raise TrainingError(
                    'backprop="reversible" checks each backward pass, which a CUDA graph cannot; '
                    'take backprop="checkpoint" there.'
                )
            # A compiler would keep other tensors the second time.
            return eagerly(self._rebuilt, y, args, options)
        if self.backprop == "checkpoint" and not keeps_all:
            return eagerly(self._by_parts, y, args, options)
        halves = chain.halves_of(y, self.dim, self.state == "fixed")
        return self._join(chain.run(halves, self._shears(), args, options))

    def _rebuilt(self, y: Tensor, args: Any, options: Any) -> Tensor:
        halves = chain.halves_of(y, self.dim, self.state == "fixed")
        stack = chain.Rebuilding(self._shears(), args, options, self.check)
        return self._join(stack.forward(halves))

    def _by_parts(self, y: Tensor, args: Any, options: Any) -> Tensor:
        halves = chain.halves_of(y, self.dim, self.state == "fixed")
        halves = [h._replace(value=h.value.clone()) for h in halves]  # y may change in place
        size = max(1, math.isqrt(len(self.blocks)))
        for first in range(0, len(self.blocks), size):
            halves = self._checkpointed(halves, slice(first, first + size), args, options)
        return self._join(halves)

    def _checkpointed(self, halves: Any, blocks: slice, args: Any, options: Any) -> list[Any]:
        part, fixed = self._shears(blocks), self.state == "fixed"
        last = min(blocks.stop, len(self)) - 1
        then = Unchanged([shear.module for shear in part], f"blocks {blocks.start} to {last}")

        def run(p: Tensor, q: Tensor, *exact: Tensor) -> tuple[Tensor, ...]:
            given = [chain.Half(*pair) for pair in zip((p, q), exact or (None, None), strict=True)]
            found = chain.run(given, part, args, options)
            return (*(h.value for h in found), *(h.exact for h in found if h.exact is not None))

        exact = [half.exact for half in halves] if fixed else []
        values = [half.value for half in halves]
        contexts: Any = lambda: (nullcontext(), then)  # noqa: E731
        p, q, *exact = checkpoint(  # pyright: ignore
            run, *values, *exact, use_reentrant=False, context_fn=contexts
        )
        then.done()
        return [chain.Half(*pair) for pair in zip((p, q), exact or (None, None), strict=True)]

    def inverse(self, y: Tensor, *args: Any, **options: Any) -> Tensor:
        """The first state from the last: exact up to rounding, and to the last bit on the grid.

        Args:
            y: a last state.
            *args: what the forward pass was given.
            **options: what the forward pass was given.
        """
        self._check(y)
        halves = chain.halves_of(y, self.dim, self.state == "fixed")
        y_0 = self._join(chain.undo(halves, self._shears(), args, options))
        if self.state == "fixed":
            chain.check_grid(y_0)
        return y_0

    def trajectory(self, y: Tensor, *args: Any, **options: Any) -> Tensor:
        """All states, `y_0` to `y_N`, stacked: `(N+1, *y.shape)`.

        Args:
            y: a first state.
            *args: go to all modules.
            **options: go to all modules.
        """
        self._check(y)
        halves = chain.halves_of(y, self.dim, self.state == "fixed")
        states = [self._join(halves)]
        for block in self:
            halves = chain.run(halves, block.shears(), args, options)
            states.append(self._join(halves))
        return torch.stack(states)

    def layer_derivatives(self, y: Tensor, *args: Any, **options: Any) -> list[BlockDerivative]:
        """The derivatives of all blocks along the trajectory of y, as products with vectors."""
        found: list[BlockDerivative] = []
        for block in self:
            found += block.layer_derivatives(found[-1].out if found else y, *args, **options)
        return found

    def _shears(self, blocks: slice = slice(None)) -> list[chain.HalfMove]:
        found = []
        for j, block in [*enumerate(self)][blocks]:
            if type(block).__name__.startswith("FSDP"):
                raise TrainingError(
                    f"block {j} is sharded, but a stack calls the modules of its blocks and not "
                    "the blocks; shard each F and G, as in fully_shard(block.F), or the stack."
                )
            found += [s._replace(name=f"{s.name} of block {j}") for s in block.shears()]
        return found

    def _check(self, y: Tensor) -> None:
        check_halves(self, y, self.dim)
        if self.state == "fixed" and y.is_complex():
            raise ShapeError('state="fixed" is for real numbers; take state="float" for complex y.')

    def _join(self, halves: list[chain.Half]) -> Tensor:
        return torch.cat([half.value for half in halves], self.dim)

    # What it is

    def __len__(self) -> int:
        return len(self.blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(self.blocks)  # pyright: ignore[reportReturnType]

    def __getitem__(self, j: int) -> Block:
        return self.blocks[j]  # pyright: ignore[reportReturnType]

    @property
    def symplectic(self) -> bool:
        """Whether all modules are gradients of energies."""
        return all(block.symplectic for block in self)

    def guarantee(self) -> Guarantee:
        """Whether `norm(dy_N/dy_j) >= 1` is a theorem, and why."""
        own = own_methods(self)
        if own:
            return unknown(self, own)
        for promise in (block.guarantee() for block in self):
            if not promise.holds:
                return promise
        return Guarantee(True, GRADIENTS if self.symplectic else VOLUME, WHOLE)

    def form(self) -> str:
        """What it is, in one line."""
        kinds = ", ".join(dict.fromkeys(block.form() for block in self))
        return f"Reversible({len(self)} blocks: {kinds})"

    def extra_repr(self) -> str:
        return (
            f'{len(self)} blocks, dim={self.dim}, backprop="{self.backprop}", state="{self.state}"'
        )
