"""Backward passes that rebuild their states: two halves that move each other, and move back.

A move adds `function(source)` to the target half and leaves the source alone, so it is undone by
subtracting the same value. `run(..., backprop="reversible")` drops the tensors that autograd saves
inside a move as soon as the move is done. When the backward pass reads such a tensor, the move is
computed once more from its source, which the later states still hold; the same result leads back to
the state before. Nothing else of autograd is touched: parameters, further arguments, hooks and
gradients of gradients work as always.

With exact halves, states are whole multiples of 2^-40 in 64-bit integers. A move is rounded to that
grid, so undoing it is exact to the last bit in any precision of the modules.
"""

from __future__ import annotations

import math
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils.checkpoint import checkpoint

from hdnn.engine.backprop import WORTHLESS, drift
from hdnn.errors import GridWarning, OptionError, ReversalWarning, ShapeError

BACKPROPS = ("stored", "checkpoint", "reversible")
GRID = 2.0**40
LIMIT = 2.0**23  # the largest state on the grid: 2^63 multiples
COARSE = 1e-3  # relative rounding to the grid that gives a warning
DIFFERENT = 0.01  # relative error of a repeated move that gives a warning
SAMPLE = 256  # entries by which a move is recognised
ADVICE = 'use state="fixed", whose reversal is exact, or backprop="checkpoint"'
OTHERWISE = "did not compute the same a second time"
REASONS = (
    "it is not deterministic, counts its calls, draws from its own random generator, or its "
    "arguments changed"
)
# Tensors of other types, such as those of `fully_shard`, manage their own memory.
PLAIN = (Tensor, nn.Parameter)


class Move(NamedTuple):
    """The half `target` moves by `function(half source)`; p is 0 and q is 1."""

    source: int
    target: int
    function: Callable[..., Tensor]
    name: str
    module: Any = None  # the owner of weights and statistics

    def modules(self) -> list[nn.Module]:
        """The owner and all modules inside it."""
        owner = self.module
        return [*owner.modules()] if isinstance(owner, nn.Module) else []

    def bind(self, args: Any, options: Any) -> Move:
        """The move with further arguments for its function."""
        function = self.function
        return self._replace(
            function=lambda source: function(source, *args, **options)
        )


class Half(NamedTuple):
    """Half a state; on the grid, `value` is a floating-point copy of integers."""

    value: Tensor
    exact: Tensor | None = None

    def moved(self, move: Tensor, sign: int = 1) -> Half:
        """The half plus or minus a move, with the gradients of a sum."""
        total = self.value + move if sign > 0 else self.value - move
        if self.exact is None:
            return Half(total)
        exact = self.exact + sign * _to_grid(move)
        return _on_grid(total, exact, self.value.dtype)


def halves_of(y: Tensor, dim: int, *, fixed: bool) -> list[Half]:
    """The halves of a state along an axis."""
    values = y.chunk(2, dim)
    if fixed:
        return [_on_grid(half, _to_grid(half), y.dtype) for half in values]
    return [Half(half) for half in values]


def _to_grid(x: Tensor) -> Tensor:
    return torch.round(x.detach().double() * GRID).to(torch.int64)


def _on_grid(total: Tensor, exact: Tensor, dtype: torch.dtype) -> Half:
    """A half with the gradient of `total`; NaN where it is too large for integers."""
    inside = total.detach().abs() < LIMIT
    values = torch.where(inside, (exact.double() / GRID).to(dtype), torch.nan)
    return Half(values + (total - total.detach()).to(dtype), exact)  # adds 0


def check_grid(y: Tensor, y_N: Tensor, dim: int) -> None:
    """Raise if a state left the grid; warn if half a sample is hardly larger than its steps."""
    capturing = y.is_cuda and torch.cuda.is_current_stream_capturing()
    if torch.compiler.is_compiling() or transformed() or y.is_meta or capturing:
        return  # where no value can be read
    if not y.numel():
        return
    rows = [
        torch.atleast_2d(half).flatten(1) for half in y.detach().chunk(2, dim)
    ]
    sizes = torch.cat([half.abs().amax(1) for half in rows]).double()
    smallest = torch.where(sizes > 0, sizes, torch.inf).min()
    finite, size = torch.stack([y_N.isfinite().all(), smallest]).tolist()
    if not finite:
        raise OptionError(
            f'the state left the fixed-point grid: state="fixed" holds values up to +-{LIMIT:.4g}, '
            "and no NaN; normalise the outputs of the modules, use a smaller h, or use "
            'state="float".'
        )
    if size < 0.5 / GRID / COARSE:
        warnings.warn(
            f'state="fixed" keeps multiples of {1 / GRID:.1e}, but a half of some sample of y_0 is '
            f'at most {size:.1e}; scale the state up, or use state="float".',
            GridWarning,
            stacklevel=3,
        )


# Running the moves


def run(
    halves: list[Half], moves: Sequence[Move], backprop: str = "stored"
) -> list[Half]:
    """The halves after all moves; `backprop` is "stored", "checkpoint" or "reversible"."""
    if backprop == "stored" or not torch.is_grad_enabled():
        return _follow(halves, moves)
    if torch.compiler.is_compiling():
        # A compiler would save other tensors the second time.
        return eagerly(run, halves, moves, backprop)
    once = recording.depth or transformed() or halves[0].value.is_meta
    if once or any(map(_is_lazy, moves)):
        return _follow(halves, moves)
    # Memory of its own: the state may be changed in place before the backward pass.
    halves = [Half(half.value.clone(), half.exact) for half in halves]
    if backprop == "reversible":
        return Rebuild(moves).forward(halves)
    size = math.isqrt(len(moves)) or 1
    for first in range(0, len(moves), size):
        halves = _checkpointed(halves, moves[first : first + size])
    return halves


def undo(halves: list[Half], moves: Sequence[Move]) -> list[Half]:
    """The halves before all moves."""
    return _follow(halves, moves[::-1], -1)


def _follow(
    halves: list[Half], moves: Sequence[Move], sign: int = 1
) -> list[Half]:
    halves = list(halves)
    for move in moves:
        target = halves[move.target]
        step = _evaluate(move, halves[move.source].value, target)
        halves[move.target] = target.moved(step, sign)
    return halves


def _checkpointed(halves: list[Half], moves: Sequence[Move]) -> list[Half]:
    """The halves after some moves; only the halves before these moves are stored."""
    name = f"{moves[0].name} to {moves[-1].name}"
    snapshot = Snapshot(name, moves, halves[0].value.device)

    def follow(halves: list[Half]) -> list[Half]:
        with recording:
            return _follow(halves, moves)

    halves = checkpoint(  # pyright: ignore[reportAssignmentType]
        follow,
        halves,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=lambda: (nullcontext(), snapshot),
    )
    snapshot.finish()
    return halves


def _evaluate(move: Move, source: Tensor, target: Half) -> Tensor:
    """The result of a move's function, with the shape of its target."""
    if torch.compiler.is_compiling():
        step = move.function(source)
    else:
        if source.is_inference():  # which has no version
            source = source.clone()
        version = _version(source)
        step = move.function(source)
        if _version(source) != version:
            raise OptionError(
                f"{move.name} changed its input in place, which would change the state itself; "
                "use inplace=False."
            )
    shape = getattr(step, "shape", type(step).__name__)
    if shape != target.value.shape:
        raise ShapeError(
            f"{move.name} must return one tensor with the shape of the half that it moves, "
            f"{tuple(target.value.shape)}, but returned {shape}."
        )
    return step


# Computing a move again


class Held(NamedTuple):
    """A weight or buffer that a module held in the forward pass."""

    holder: dict[str, Any]
    name: str
    tensor: Tensor
    needs_grad: bool
    version: int

    @property
    def changed(self) -> bool:
        """True if it was changed in place."""
        return _version(self.tensor) != self.version

    @property
    def exchanged(self) -> bool:
        """True if the module now holds a different tensor, or this tensor with other gradients."""
        now = self.holder.get(self.name)
        if type(now) not in (*PLAIN, type(None)):
            return False
        same = now is self.tensor
        return not same or self.tensor.requires_grad != self.needs_grad

    def restore(self, stack: ExitStack, tensor: Tensor) -> None:
        """Put a tensor into its place temporarily."""
        stack.callback(
            self.holder.update, {self.name: self.holder.get(self.name)}
        )
        self.holder[self.name] = tensor


def _held(holders: list[Any]) -> list[Held]:
    return [
        Held(holder, name, tensor, tensor.requires_grad, _version(tensor))
        for holder in holders
        for name, tensor in holder.items()
        if type(tensor) in PLAIN
    ]


class Snapshot:
    """Everything besides arguments that moves depend on: random numbers, autocast, modules.

    Modules have weights, statistics, and modes. Inside `torch.func.functional_call`, the weights
    were different from now. What a module counted in the first pass is not counted again.
    """

    def __init__(
        self, name: str, moves: Sequence[Move], device: torch.device
    ) -> None:
        self.name = name
        self.device = device
        self.random = torch.get_rng_state()
        if device.type == "cuda":
            self.cuda_random = torch.cuda.get_rng_state(device)
        self.autocast = {kind: _autocast(kind) for kind in (device.type, "cpu")}
        modules = dict.fromkeys(m for move in moves for m in move.modules())
        self.modes = [(module, module.training) for module in modules]
        self.weights = _held([module._parameters for module in modules])
        self.buffers = _held([module._buffers for module in modules])
        # Batch normalisation does not mark its statistics as changed.
        self.counted = _held(
            [
                module._buffers
                for module in modules
                if getattr(module, "track_running_stats", False)
            ]
        )
        self.stacks: list[ExitStack] = []

    def finish(self) -> None:
        """Record what the modules changed themselves in the first pass."""
        self.weights = [
            held._replace(version=_version(held.tensor))
            for held in self.weights
        ]
        self.counted += [held for held in self.buffers if held.changed]

    def check(self) -> None:
        """Raise if weights were changed in place, for example by an optimiser's step."""
        if any(held.changed for held in self.weights):
            raise OptionError(
                f"the weights of {self.name} changed in place after the forward pass, so the "
                "gradients would be wrong; call the optimiser's step after the backward pass."
            )

    def __enter__(self) -> None:
        """Return to this state temporarily, with gradients enabled."""
        self.check()
        with ExitStack() as stack:
            cuda = [self.device] if self.device.type == "cuda" else []
            stack.enter_context(torch.random.fork_rng(cuda))
            torch.set_rng_state(self.random)
            if cuda:
                torch.cuda.set_rng_state(self.cuda_random, self.device)
            for kind, settings in self.autocast.items():
                if settings != _autocast(kind):
                    stack.enter_context(torch.autocast(kind, *settings))
            stack.enter_context(torch.enable_grad())
            for module, mode in self.modes:
                if module.training != mode:
                    stack.callback(setattr, module, "training", not mode)
                    module.training = mode
            for held in [*self.weights, *self.buffers]:
                if held.exchanged:
                    tensor = held.tensor.detach()
                    held.restore(stack, tensor.requires_grad_(held.needs_grad))
            for held in self.counted:
                held.restore(stack, held.tensor.clone())
            self.stacks.append(stack.pop_all())

    def __exit__(self, *_: object) -> None:
        self.stacks.pop().close()


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _autocast(kind: str) -> tuple[torch.dtype, bool, bool]:
    enabled = torch.is_autocast_enabled(kind)
    cached = torch.is_autocast_cache_enabled()
    return torch.get_autocast_dtype(kind), enabled, cached


class Recording(threading.local):
    """The number of moves around a call that will be computed again, so that it saves nothing."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


recording = Recording()


class Step(NamedTuple):
    """The notes of the forward pass about one move."""

    snapshot: Snapshot
    needs_grad: bool  # of its source
    dtype: torch.dtype  # of its target
    saved: list[tuple[torch.Size, torch.dtype]]  # shapes of what autograd saves
    sample: Tensor  # entries of its result
    source: Tensor | None  # stored if it is a half of the first state


class Rebuild:
    """Moves that are computed again in the backward pass, last move first.

    Instead of a tensor, autograd saves its number. The tensors of a move are in `values` while it
    is computed, and again from the time they are rebuilt until another move is rebuilt. The state
    after the first two moves is stored: an entry is rebuilt only after it first moves later than
    that; before that, it equals the stored entry to the last bit, so that zeros stay zeros.
    """

    def __init__(self, moves: Sequence[Move]) -> None:
        self.moves = tuple(moves)
        self.steps: list[Step] = []
        self.values: dict[int, list[Tensor]] = {}
        self.read: set[int] = set()  # numbers of rebuilt tensors that were read
        self.first = len(self.moves)  # the first move with anything to rebuild
        self.next = -1  # the move that is undone next
        # Relative errors of moves by name, "" for the state.
        self.doubts: list[tuple[str, Tensor]] = []
        self.lock = threading.RLock()  # several threads may go back at once

    def forward(self, halves: list[Half]) -> list[Half]:
        """The halves after all moves."""
        for k, move in enumerate(self.moves):
            source = halves[move.source].value
            target = halves[move.target]
            snapshot = self._snapshot(move, source.device)
            values = self.values[k] = []
            hooks = saved_tensors_hooks(
                partial(_pack, values, []), partial(self._unpack, k)
            )
            with recording, hooks:
                result = _evaluate(move, source, target)
            snapshot.finish()
            if values:
                self.first = min(self.first, k)
            stored = self.first <= k <= self.first + 1
            step = Step(
                snapshot,
                source.requires_grad,
                target.value.dtype,
                [(x.shape, x.dtype) for x in values],
                _sample(result),
                source.detach() if stored else None,
            )
            self.steps.append(step)
            self.values.clear()
            values.clear()  # which autograd's hook holds
            halves[move.target] = target.moved(result)
            if k == self.first + 1:
                self.start = _detached(halves)
                like = halves[0].value
                never = like.new_full((), len(self.moves), dtype=torch.int)
                self.left = [never, never]
            elif k > self.first:
                self._note_moved(k, move.target, halves[move.target])
        self.end = _detached(halves)
        return halves

    def _note_moved(self, k: int, target: int, half: Half) -> None:
        """Record for each entry of a half which move changes it first."""
        left = self.left[target]
        moved = half.value.detach() != self.start[target].value
        self.left[target] = torch.where(moved, left.clamp_max(k), left)

    def _snapshot(self, move: Move, device: torch.device) -> Snapshot:
        snapshot = Snapshot(move.name, [move], device)
        if self.steps:  # many copies of the same random state would take memory
            last = self.steps[-1].snapshot.random
            if torch.equal(snapshot.random, last):
                snapshot.random = last
        return snapshot

    def _unpack(self, k: int, number: int) -> Tensor:
        """The tensor that autograd saved in move k."""
        with self.lock:
            if k not in self.values:
                eagerly(self._rebuild, k)
            elif number in self.read:  # another backward pass, perhaps
                self.steps[k].snapshot.check()
            if k < len(self.steps):  # otherwise the move itself takes gradients
                self.read.add(number)
            return self.values[k][number]

    def _rebuild(self, k: int) -> None:
        """Compute again what the backward pass of move k reads, and undo all moves from there."""
        if k > self.next:  # the first time, or another backward pass
            self.halves = list(self.end)
            self.rebuilt = list(self.end)  # before entries are put back
            self.next = len(self.moves) - 1
            self.doubts = []
        try:
            while self.next >= k:
                self.values.clear()
                self.read.clear()
                self._undo(self.next)
                self.next -= 1
            final = k == self.first
            if final or not self.halves[0].value.is_cuda:
                self._judge(self.doubts if final else self.doubts[-2:], final)
        except Exception:
            self.values.clear()
            self.next = -1
            raise

    def _undo(self, k: int) -> None:
        move = self.moves[k]
        step = self.steps[k]
        if k == self.first + 1:
            self.doubts.append(("", self._drift()))
        source = step.source
        if source is None:
            source = self.halves[move.source].value
        target = self.halves[move.target]
        values: list[Tensor] = []
        versions: list[int] = []
        hooks = saved_tensors_hooks(
            partial(_pack, values, versions), values.__getitem__
        )
        with step.snapshot, recording, hooks:
            source = source.detach().requires_grad_(step.needs_grad)
            result = _evaluate(move, source, target)
        if versions != [_version(x) for x in values]:
            raise OptionError(
                f"{move.name} changes in place a tensor that its own gradient needs; use the "
                "out-of-place operation."
            )
        if [(x.shape, x.dtype) for x in values] != step.saved:
            raise OptionError(f"{move.name} {OTHERWISE}: {REASONS}.")
        half = target.moved(result.detach(), -1)
        half = Half(half.value.to(step.dtype), half.exact)
        self.rebuilt[move.target] = half
        if half.exact is None and k > self.first + 1:
            start = self.start[move.target].value.to(step.dtype)
            unmoved = self.left[move.target] >= k
            half = Half(torch.where(unmoved, start, half.value))
        self.halves[move.target] = half
        self.doubts.append((move.name, _difference(step, result, target)))
        self.values[k] = values

    def _drift(self) -> Tensor:
        """The drift of the worse half at the start; on the grid 0 or infinite.

        A sample whose half is 0 there is judged by its size at the end.
        """
        drifts = []
        for halves in zip(self.start, self.rebuilt, self.end, strict=True):
            if halves[0].exact is not None:
                same = (halves[0].exact == halves[1].exact).all()
                drifts.append(torch.where(same, 0.0, torch.inf))
            else:
                rows = [torch.atleast_2d(half.value) for half in halves]
                start, rebuilt, end = (x.flatten(1) for x in rows)
                size = torch.where(start.any(1, keepdim=True), start, end)
                drifts.append(drift(size + (rebuilt - start), size).float())
        return torch.stack(drifts).max()

    def _judge(self, doubts: list[tuple[str, Tensor]], final: bool) -> None:
        """Raise if a move or the state differs much from the forward pass; at the end, warn."""
        errors = torch.stack([doubt for _, doubt in doubts]).tolist()
        rounding = torch.finfo(self.end[0].value.dtype).eps ** 0.5
        worst, name = 0.0, ""
        for (label, _), error in zip(doubts, errors, strict=True):
            if error > max(worst, DIFFERENT if label else rounding):
                worst, name = error, label
        if not worst or not all(h.value.isfinite().all() for h in self.end):
            return  # gradients of a state that is not finite are not finite either
        reason = f"the first state that the backward pass rebuilt is off by {worst:.2g} of its size"
        if name:
            grown = (
                "rounding errors have grown, or "
                if self.end[0].exact is None
                else ""
            )
            reason = f"{name} {OTHERWISE}, but was off by {worst:.2g}: {grown}{REASONS}"
        if worst >= WORTHLESS:
            raise OptionError(
                f"{reason}, so the gradients would be worthless; {ADVICE}."
            )
        if final:
            text = f"{reason}, so the gradients are inexact; {ADVICE}."
            warnings.warn(text, ReversalWarning, stacklevel=2)


def _difference(step: Step, result: Tensor, target: Half) -> Tensor:
    """The difference of two results of a move in units of the move; on the grid 0 or infinite.

    Rounding of the state is allowed for, unless the source was stored.
    """
    norm = torch.linalg.vector_norm
    error = norm(_sample(result) - step.sample)
    size = norm(step.sample)
    if step.source is None:
        rounding = 32 * torch.finfo(target.value.dtype).eps / WORTHLESS
        size = size + rounding * norm(_sample(target.value))
    ratio = (error / size).nan_to_num(torch.inf, torch.inf)
    if target.exact is not None:
        ratio = torch.inf
    return torch.where(error == 0, 0.0, ratio).float()


def _sample(x: Tensor) -> Tensor:
    """Some entries of a tensor, spread over all of it."""
    stride = x.numel() // SAMPLE | 1
    return x.detach().reshape(-1)[::stride].clone()


def _pack(values: list[Tensor], versions: list[int], x: Tensor) -> int:
    values.append(x.detach())
    versions.append(_version(x))
    return len(values) - 1


def _detached(halves: list[Half]) -> list[Half]:
    return [Half(half.value.detach(), half.exact) for half in halves]


def _is_lazy(move: Move) -> bool:
    """True if a module draws its first weights in this call, which then cannot be repeated."""
    return any(
        isinstance(module, LazyModuleMixin)
        and module.has_uninitialized_params()  # pyright: ignore
        for module in move.modules()
    )


def eagerly(function: Callable[..., Any], *args: Any) -> Any:
    """The result of a function that is excluded from compilation."""
    if (
        "torch._dynamo" in sys.modules
    ):  # otherwise importing it would take a second
        function = torch.compiler.disable(function)
    return function(*args)


def transformed() -> bool:
    """True inside transforms of `torch.func`, which forbid asking for gradients in place."""
    try:
        torch.empty(0).requires_grad_()
    except RuntimeError:
        return True
    return False
