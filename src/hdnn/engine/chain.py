"""Halves that take turns: one moves by any function of the other, and the backward pass undoes it.

A shear adds `move(source)` to its target and leaves its source alone, so it can be undone by
subtracting the same again. Autograd keeps, inside of a move, what its backward pass reads. With
`Rebuilding` that is dropped as soon as the move is done. When the backward pass asks for it, the
move is computed once more, from the source, which the last states still hold. The same result
undoes the shear, and so leads to the source of the one before. Nothing else of autograd is touched:
parameters, extra arguments, hooks and gradients of gradients work as always.
"""

from __future__ import annotations

import threading
import warnings
from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hdnn.engine.drift import WORTHLESS, drift_of, noticeable, recorded
from hdnn.engine.fixed import LIMIT, from_grid, to_grid
from hdnn.engine.replay import Context, random_state
from hdnn.engine.tracing import eagerly, transformed, untraced, valueless
from hdnn.errors import ReversalWarning, ShapeError, TrainingError


class HalfMove(NamedTuple):
    """`target` (0 for p, 1 for q) moves by `move(other half, *arguments)`."""

    target: int
    move: Callable[..., Tensor]
    name: str
    module: Any = None  # what of it may have weights and statistics of its own


class Half(NamedTuple):
    """Half a state, on the fixed-point grid also as integers, of which the floats are a copy."""

    value: Tensor
    exact: Tensor | None = None

    def plus(self, move: Tensor) -> Half:
        if self.exact is None:
            return Half(self.value + move)
        exact = self.exact + to_grid(move.detach())
        return Half(_Through.apply(self.value, move, exact), exact)

    def minus(self, move: Tensor) -> Half:
        if self.exact is None:
            return Half(self.value - move)
        exact = self.exact - to_grid(move.detach())
        return Half(_Through.apply(self.value, -move, exact), exact)

    def detach(self) -> Half:
        return Half(self.value.detach(), self.exact)


class _Through(torch.autograd.Function):
    """value + move as the floats of the grid, with the gradients of a sum.

    NaN where the sum is too large for the grid, then and ever after.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, move: Tensor, exact: Tensor) -> Tensor:
        inside = (value + move).abs() < LIMIT
        return torch.where(inside, from_grid(exact, value.dtype), torch.nan)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.dtypes = inputs[0].dtype, inputs[1].dtype

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return g, g.to(ctx.dtypes[1]), None

    @staticmethod
    def jvp(ctx: Any, value: Tensor, move: Tensor, _: None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return value + move.to(ctx.dtypes[0])


def halves_of(y: Tensor, dim: int, fixed: bool) -> list[Half]:
    p, q = y.chunk(2, dim)
    return [on_grid(half) if fixed else Half(half) for half in (p, q)]


def on_grid(half: Tensor) -> Half:
    exact = to_grid(half.detach())
    zero = torch.zeros((), dtype=half.dtype, device=half.device).expand_as(half)
    return Half(_Through.apply(half, zero, exact), exact)


def check_grid(y_N: Tensor) -> None:
    """Raise if a state has left the grid, unless values cannot be read here."""
    unread = torch.compiler.is_compiling() or transformed() or recorded(y_N) or valueless(y_N)
    if not unread and not bool(y_N.isfinite().all()):
        raise TrainingError(
            f'the state left the fixed-point grid: state="fixed" holds +-{LIMIT:.4g} only, and no '
            'NaN; normalise what the modules give, take a smaller h, or state="float".'
        )


def run(halves: list[Half], shears: Sequence[HalfMove], args: Any, options: Any) -> list[Half]:
    """The halves after all shears; autograd keeps what it wants."""
    halves = list(halves)
    for shear in shears:
        source, target = halves[1 - shear.target], halves[shear.target]
        halves[shear.target] = target.plus(_moved(shear, source.value, target.value, args, options))
    return halves


def undo(halves: list[Half], shears: Sequence[HalfMove], args: Any, options: Any) -> list[Half]:
    """The halves before all shears."""
    halves = list(halves)
    for shear in reversed(shears):
        source, target = halves[1 - shear.target], halves[shear.target]
        halves[shear.target] = target.minus(
            _moved(shear, source.value, target.value, args, options)
        )
    return halves


def _moved(shear: HalfMove, source: Tensor, target: Tensor, args: Any, options: Any) -> Tensor:
    """What a shear adds, of the right shape."""
    unseen = source.is_inference()  # whether nobody can see changes in place
    before = None if unseen else source._version
    try:
        move = shear.move(source.clone() if unseen else source, *args, **options)
    except RuntimeError as error:  # of autograd, whose words are about its views
        if "view" in str(error) and ("inplace" in str(error) or "in-place" in str(error)):
            raise TrainingError(f"{shear.name} {IN_PLACE}") from error
        raise
    if not isinstance(move, Tensor):
        raise ShapeError(
            f"{shear.name} must return one tensor, but returned a {type(move).__name__}; wrap it "
            "in a module that returns the tensor alone."
        )
    if move.shape != target.shape:
        raise ShapeError(
            f"{shear.name} must return the shape of the half that it moves, {tuple(target.shape)}, "
            f"but returned {tuple(move.shape)}."
        )
    if before is not None and source._version != before:
        raise TrainingError(f"{shear.name} {IN_PLACE}")
    return move


IN_PLACE = "changed its input in place, which would change the state itself; use inplace=False."


OTHERWISE = "did not compute the same a second time as in the forward pass"
REASON = (
    "a module is not deterministic (see torch.use_deterministic_algorithms), keeps a count of its "
    "own, or its arguments changed between the passes"
)


class Rebuilding:
    """Shears whose moves are computed again in the backward pass, last one first."""

    def __init__(
        self, shears: Sequence[HalfMove], args: Any, options: Any, check: bool = True
    ) -> None:
        self.shears, self.check = tuple(shears), check
        self.args, self.options = args, options
        # In the place of a tensor, autograd keeps its number. The tensors of a move are here while
        # it is computed, and again from when they were rebuilt until those of another one are.
        self.values: dict[int, list[Tensor]] = {}
        self.likes: list[list[tuple[torch.Size, torch.dtype]]] = []
        self.contexts: list[Context] = []
        self.sources: list[tuple[tuple[int, ...], bool]] = []  # strides, and whether they need g
        self.targets: list[tuple[torch.dtype, Tensor | None]] = []  # and their sums on the grid
        self.first: int | None = None  # the first shear with anything to rebuild
        self.next = -1  # the shear that is undone next
        self.one_by_one = threading.RLock()  # several threads may go back at once

    def forward(self, halves: list[Half]) -> list[Half]:
        """As `run`."""
        halves = [h._replace(value=_apart(h.value)) for h in halves]
        random = random_state(halves[0].value.device)
        for k, shear in enumerate(self.shears):
            source, target = halves[1 - shear.target], halves[shear.target]
            values = self.values[k] = []

            def pack(x: Tensor, values: list[Tensor] = values) -> int:
                values.append(x.detach())
                return len(values) - 1

            random = random_state(source.value.device, random)
            context = Context(source.value, shear.module, random)
            self.contexts.append(context)
            self.sources.append((source.value.stride(), source.value.requires_grad))
            self.targets.append((target.value.dtype, self._sum(target)))
            with _rebuilding(), saved_tensors_hooks(untraced(pack), partial(self._read, k)):
                move = _moved(shear, source.value, target.value, self.args, self.options)
            self.likes.append([(x.shape, x.dtype) for x in values])
            if values and self.first is None:
                # Copies, since the given state may be changed in place before the backward pass.
                self.first = k
                self.start = [
                    h.value.detach().clone() if h.exact is None else h.exact for h in halves
                ]
            context.modules.done()
            self.values.clear()
            values.clear()  # which autograd's hook holds
            halves[shear.target] = target.plus(move)
        self.end = [half.detach() for half in halves]
        return halves

    def _read(self, k: int, number: int) -> Tensor:
        """What autograd wants to have kept of shear k."""
        with self.one_by_one:
            if k not in self.values:
                eagerly(self.rebuild, k)
            return self.values[k][number]

    def _sum(self, half: Half) -> Tensor | None:
        """By which another state on the grid is recognised at once."""
        return half.exact.sum() if self.check and half.exact is not None else None

    def rebuild(self, k: int) -> None:
        """Compute again what the backward pass of shear k reads, and undo it."""
        if k > self.next:  # the first time, or another backward pass
            self.halves, self.next = list(self.end), len(self.shears) - 1
            self.compared: list[tuple[int, Tensor]] = []
            if torch._C._current_graph_task_id() >= 0:  # else someone looks at what is kept
                torch.autograd.Variable._execution_engine.queue_callback(self._finish)  # pyright: ignore
        while self.next >= k:
            self.values.clear()
            self._undo(self.next)
            self.next -= 1
        if k == self.first:
            self._check()

    def _finish(self) -> None:
        """The backward pass has ended: another one starts anew."""
        with self.one_by_one:
            self.values.clear()
            self.next = -1
            self._compare()

    def _undo(self, k: int) -> None:
        shear, found, versions = self.shears[k], [], []
        source, target = self.halves[1 - shear.target].value, self.halves[shear.target]
        self.contexts[k].modules.check(shear.name)

        def pack(x: Tensor) -> int:
            found.append(x.detach())
            versions.append(None if x.is_inference() else x._version)
            return len(found) - 1

        stride, needs = self.sources[k]
        if source.stride() != stride:  # on which it depends how PyTorch computes, and what it keeps
            source = torch.empty_strided(
                source.shape, stride, dtype=source.dtype, device=source.device
            ).copy_(source)
        hooks = saved_tensors_hooks(untraced(pack), found.__getitem__)
        with self.contexts[k].again(), _rebuilding(), hooks:
            source = source.detach().requires_grad_(needs)
            args, options = mapped(_leaf, self.args), mapped(_leaf, self.options)
            move = _moved(shear, source, target.value, args, options)
        if any(v is not None and x._version != v for x, v in zip(found, versions, strict=True)):
            raise TrainingError(
                f"{shear.name} changes in place what its own gradient is computed from; use the "
                "operation that is not in place there."
            )
        if [(x.shape, x.dtype) for x in found] != self.likes[k]:
            raise TrainingError(f"{shear.name} {OTHERWISE}.")
        dtype, wanted = self.targets[k]
        before = target.minus(move.detach())
        self.halves[shear.target] = before._replace(value=before.value.to(dtype))
        if wanted is not None and before.exact is not None:
            self.compared.append((k, before.exact.sum() != wanted))
            if not _deferred(before.value):
                self._compare()
        self.values[k] = found

    def _compare(self) -> None:
        """That the states on the grid were those of the forward pass."""
        compared, self.compared = self.compared, []
        for (k, _), off in zip(compared, _read_all([off for _, off in compared]), strict=True):
            if off:
                raise TrainingError(f"{self.shears[k].name} {OTHERWISE}: {REASON}.")

    def _check(self) -> None:
        """That undoing has led back to where the forward pass began."""
        if not self.check:
            return
        if self.halves[0].exact is not None:
            self._compare()
            pairs = zip(self.start, self.halves, strict=True)
            if not all(torch.equal(a, b.exact) for a, b in pairs):  # pyright: ignore
                raise TrainingError(f"the backward pass did not come back to y_0: {REASON}.")
            return
        if not self.start[0].numel():
            return
        rebuilt, y_N = ([half.value for half in halves] for halves in (self.halves, self.end))
        drift = max(map(_off, self.start, rebuilt, y_N), key=lambda off: (off != off, off))
        what = f"the backward pass came back to a y_0 that is off by {drift:.2g} of its size"
        advice = 'take state="fixed", whose reversal is exact, or backprop="checkpoint"'
        if drift >= WORTHLESS:
            raise TrainingError(f"{what}: rounding has grown, or {REASON}; {advice}.")
        if drift > noticeable(rebuilt[0].dtype):
            warnings.warn(
                f"{what}, so the gradients are inexact; {advice}.", ReversalWarning, stacklevel=2
            )


def _off(half: Tensor, rebuilt: Tensor, end: Tensor) -> float:
    """The relative error of a rebuilt half for its worst row; of zeros, relative to their end."""
    whole = half.ndim < 2
    rows = [x.reshape(1, -1) if whole else x.flatten(0, -2) for x in (half, rebuilt, end)]
    if rows[0].any():
        return float(drift_of(*rows))
    size = rows[2].abs().max()
    return float((rows[1].abs().max() / size.clamp_min(1e-30)).nan_to_num(torch.nan, torch.inf))


_inside = threading.local()


def rebuilding() -> bool:
    """Whether this is a move that will be computed again: what is inside need not be, one by one.

    A stack inside of a module of another stack keeps nothing then.
    """
    return getattr(_inside, "depth", 0) > 0


@contextmanager
def _rebuilding() -> Iterator[None]:
    _inside.depth = getattr(_inside, "depth", 0) + 1
    try:
        yield
    finally:
        _inside.depth -= 1


def _deferred(like: Tensor) -> bool:
    """Whether to read what was compared at the end of a backward pass only: reading takes time."""
    return like.is_cuda


def _read_all(flags: list[Tensor]) -> list[bool]:
    return torch.stack(flags).tolist() if flags else []


def _apart(x: Tensor) -> Tensor:
    """A copy if entries share memory, as after `expand` or `unfold`: it has no strides to keep."""
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride <= reach:
            return x.contiguous()
        reach += (size - 1) * stride
    return x


def _leaf(x: Tensor) -> Tensor:
    """With gradients if it had some, so that autograd keeps the same."""
    return x.detach().requires_grad_(x.requires_grad)


def mapped(function: Callable[[Tensor], Tensor], given: Any) -> Any:
    """Arguments with another tensor in the place of each, also inside of tuples, lists, dicts."""
    if isinstance(given, Tensor):
        return function(given)
    if isinstance(given, tuple):
        found = [mapped(function, value) for value in given]
        return type(given)(*found) if hasattr(given, "_fields") else tuple(found)
    if isinstance(given, dict | UserDict | list):
        changed: Any = copy(given)  # of the same class, with whatever else it holds
        for at in range(len(given)) if isinstance(given, list) else given:
            changed[at] = mapped(function, given[at])
        return changed
    return given
