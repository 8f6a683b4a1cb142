"""Backward passes that rebuild their states: two halves that move each other, and are moved back.

A move adds `function(source)` to the target half and leaves the source alone, so it is undone by
subtracting the same again. `run(..., backprop="reversible")` drops what autograd saves inside a
move as soon as the move is done. When the backward pass reads it, the move is computed once more
from its source, which the later states still hold; the same result leads back to the state before.
Nothing else of autograd is touched: parameters, further arguments, hooks and gradients of gradients
work as always.

With exact halves, states are whole multiples of 2^-40 in 64-bit integers. A move is rounded to that
grid, so undoing it is exact to the last bit in any precision of the modules.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from hdnn.errors import GridWarning, OptionError, ReversalWarning, ShapeError

BACKPROPS = ("stored", "checkpoint", "reversible")
GRID = 2.0**40
LIMIT = 2.0**23  # the largest state on the grid: 2^63 multiples
COARSE = 1e-3  # relative rounding to the grid that gives a warning
WORTHLESS = 0.1  # relative error of a rebuilt state, or of a move that is computed again
DIFFERENT = 0.01  # such an error of a move that gives a warning
SAMPLE = 256  # entries by which a move is recognised
ADVICE = 'take state="fixed", whose reversal is exact, or backprop="checkpoint"'
OTHERWISE = "did not compute the same a second time as in the forward pass"
REASONS = (
    "it is not deterministic, counts its calls, draws from a generator of its own, or its "
    "arguments changed"
)
PLAIN = (
    Tensor,
    nn.Parameter,
)  # others, as those of `fully_shard`, come and go by themselves


class Move(NamedTuple):
    """The half `target` moves by `function(half source, *args, **options)`; p is 0 and q is 1."""

    source: int
    target: int
    function: Callable[..., Tensor]
    name: str
    module: nn.Module | None = None  # the owner of weights and statistics


class Half(NamedTuple):
    """Half a state; on the grid also as integers, of which `value` is a copy in floats."""

    value: Tensor
    exact: Tensor | None = None

    def moved(self, move: Tensor, sign: int = 1) -> Half:
        """The half plus a move, or minus it, with the gradients of a sum."""
        total = self.value + move if sign > 0 else self.value - move
        if self.exact is None:
            return Half(total)
        exact = self.exact + sign * _to_grid(move)
        return Half(_on_grid(total, exact, self.value.dtype), exact)


def halves_of(y: Tensor, dim: int, *, fixed: bool) -> list[Half]:
    """The halves of a state along an axis."""
    halves = [Half(half) for half in y.chunk(2, dim)]
    if not fixed:
        return halves
    exact = [_to_grid(half.value) for half in halves]
    return [
        Half(_on_grid(h.value, e, y.dtype), e)
        for h, e in zip(halves, exact, strict=True)
    ]


def _to_grid(x: Tensor) -> Tensor:
    return torch.round(x.detach().double() * GRID).to(torch.int64)


def _on_grid(total: Tensor, exact: Tensor, dtype: torch.dtype) -> Tensor:
    """The floats of integers, with the gradient of `total`; NaN where it is too large for them."""
    inside = total.detach().abs() < LIMIT
    values = torch.where(inside, (exact.double() / GRID).to(dtype), torch.nan)
    return values + (total - total.detach()).to(dtype)  # adds 0


def check_grid(y: Tensor, y_N: Tensor) -> None:
    """Raise if a state left the grid, and warn if y is hardly larger than its steps."""
    if (
        torch.compiler.is_compiling()
        or transformed()
        or y.is_meta
        or capturing(y)
    ):
        return
    if not y.numel():
        return
    largest, finite = torch.stack(
        [y.detach().abs().max().double(), y_N.isfinite().all()]
    ).tolist()
    if not finite:
        raise OptionError(
            f'the state left the fixed-point grid: state="fixed" holds +-{LIMIT:.4g} only, and no '
            'NaN; normalise what the modules give, take a smaller h, or state="float".'
        )
    if 0 < largest < 0.5 / GRID / COARSE:
        warnings.warn(
            f'state="fixed" keeps multiples of {1 / GRID:.1e}, but y_0 is {largest:.1e} at most; '
            'scale the state up, or use state="float".',
            GridWarning,
            stacklevel=3,
        )


# Running the moves


def run(
    halves: list[Half],
    moves: Sequence[Move],
    args: Any,
    options: Any,
    backprop: str = "stored",
) -> list[Half]:
    """The halves after all moves; `backprop` is "stored", "checkpoint" or "reversible"."""
    if backprop == "stored" or not torch.is_grad_enabled():
        return _stored(halves, moves, args, options)
    if (
        torch.compiler.is_compiling()
    ):  # a compiler would save other tensors the second time
        return eagerly(run, halves, moves, args, options, backprop)
    if (
        recording.depth
        or transformed()
        or halves[0].value.is_meta
        or any(map(_is_lazy, moves))
    ):
        return _stored(halves, moves, args, options)
    # Memory of its own: the state may be changed in place before the backward pass.
    halves = [Half(half.value.clone(), half.exact) for half in halves]
    if backprop == "checkpoint":
        return _checkpointed(halves, moves, args, options)
    if capturing(halves[0].value):
        raise OptionError(
            'backprop="reversible" checks each backward pass, which a CUDA graph cannot; take '
            'backprop="checkpoint" there.'
        )
    return Rebuild(moves, args, options).forward(halves)


def _stored(
    halves: list[Half], moves: Sequence[Move], args: Any, options: Any
) -> list[Half]:
    halves = list(halves)
    for move in moves:
        step = _evaluate(
            move, halves[move.source].value, halves[move.target], args, options
        )
        halves[move.target] = halves[move.target].moved(step)
    return halves


def undo(
    halves: list[Half], moves: Sequence[Move], args: Any, options: Any
) -> list[Half]:
    """The halves before all moves."""
    halves = list(halves)
    for move in reversed(moves):
        step = _evaluate(
            move, halves[move.source].value, halves[move.target], args, options
        )
        halves[move.target] = halves[move.target].moved(step, -1)
    return halves


def _checkpointed(
    halves: list[Half], moves: Sequence[Move], args: Any, options: Any
) -> list[Half]:
    """The halves after all moves, of which about sqrt(N) states are stored."""
    size = math.isqrt(len(moves)) or 1
    for first in range(0, len(moves), size):
        segment = moves[first : first + size]
        name = f"{segment[0].name} to {segment[-1].name}"
        moment = Moment(
            name, [move.module for move in segment], halves[0].value.device
        )

        def again(
            *tensors: Any, segment: Sequence[Move] = segment
        ) -> list[Half]:
            pairs = zip(tensors[::2], tensors[1::2], strict=True)
            with recording:
                return _stored(
                    [Half(*pair) for pair in pairs], segment, args, options
                )

        contexts: Any = lambda moment=moment: (nullcontext(), moment)  # noqa: E731
        tensors = [tensor for half in halves for tensor in half]
        halves = checkpoint(  # pyright: ignore[reportAssignmentType]
            again,
            *tensors,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=contexts,
        )
        moment.done()
    return halves


def _evaluate(
    move: Move, source: Tensor, target: Half, args: Any, options: Any
) -> Tensor:
    """The result of a move's function, with the shape of its target."""
    if torch.compiler.is_compiling():
        step = move.function(source, *args, **options)
    else:
        source = (
            source.clone() if source.is_inference() else source
        )  # which has no version
        version = _version(source)
        step = move.function(source, *args, **options)
        if _version(source) != version:
            raise OptionError(
                f"{move.name} changed its input in place, which would change the state itself; "
                "use inplace=False."
            )
    if not isinstance(step, Tensor):
        raise ShapeError(
            f"{move.name} must return one tensor, but returned a {type(step).__name__}; wrap it in "
            "a module that returns the tensor alone."
        )
    if step.shape != target.value.shape:
        raise ShapeError(
            f"{move.name} must return the shape of the half that it moves, "
            f"{tuple(target.value.shape)}, but returned {tuple(step.shape)}."
        )
    return step


# Computing a move again


class Moment:
    """Everything besides arguments that moves depend on: random numbers, autocast, modules.

    Modules have weights, statistics, and modes. Other weights than now were there inside of
    `torch.func.functional_call`. What a module counted in the first pass is not counted again.
    """

    def __init__(
        self, name: str, roots: Sequence[Any], device: torch.device
    ) -> None:
        self.name = name
        self.device = device
        self.random = torch.get_rng_state()
        if device.type == "cuda":
            self.cuda_random = torch.cuda.get_rng_state(device)
        self.autocast = {kind: _autocast(kind) for kind in (device.type, "cpu")}
        roots = [root for root in roots if isinstance(root, nn.Module)]
        modules = {module: None for root in roots for module in root.modules()}
        self.modes = [(module, module.training) for module in modules]
        self.weights = [
            entry
            for module in modules
            for entry in _entries(module._parameters)
        ]
        self.buffers = [
            entry for module in modules for entry in _entries(module._buffers)
        ]
        # Batch normalisation does not mark its statistics as changed.
        norms = [
            module
            for module in modules
            if getattr(module, "track_running_stats", False)
        ]
        self.counted = [
            entry for module in norms for entry in _entries(module._buffers)
        ]
        self.stacks: list[ExitStack] = []

    def done(self) -> None:
        """Note what the modules changed by themselves in the first pass."""
        for entry in self.weights:
            entry.version = _version(entry.tensor)
        self.counted += [
            b for b in self.buffers if b.version != _version(b.tensor)
        ]

    def check(self) -> None:
        """Raise if weights were changed in place, as by the step of an optimiser."""
        if any(
            entry.version != _version(entry.tensor) for entry in self.weights
        ):
            raise OptionError(
                f"the weights of {self.name} changed in place after the forward pass, so the "
                "gradients would be those of other weights; take the optimiser's step after the "
                "backward pass."
            )

    def __enter__(self) -> None:
        """Go back to this moment for a while, with gradients."""
        self.check()
        with ExitStack() as stack:
            self._restore_numbers(stack)
            self._restore_modules(stack)
            self.stacks.append(stack.pop_all())

    def __exit__(self, *_: object) -> None:
        self.stacks.pop().close()

    def _restore_numbers(self, stack: ExitStack) -> None:
        cuda = [self.device] if self.device.type == "cuda" else []
        stack.enter_context(torch.random.fork_rng(cuda))
        torch.set_rng_state(self.random)
        if cuda:
            torch.cuda.set_rng_state(self.cuda_random, self.device)
        for kind, settings in self.autocast.items():
            if settings != _autocast(kind):
                stack.enter_context(torch.autocast(kind, *settings))
        stack.enter_context(torch.enable_grad())

    def _restore_modules(self, stack: ExitStack) -> None:
        for module, mode in self.modes:
            if module.training != mode:
                stack.callback(setattr, module, "training", not mode)
                module.training = mode
        for entry in [*self.weights, *self.buffers]:
            entry.restore(stack)
        for entry in self.counted:
            stack.callback(
                entry.holder.update, {entry.name: entry.holder[entry.name]}
            )
            entry.holder[entry.name] = entry.tensor.clone()


@dataclass
class Entry:
    """A weight or buffer as a module held it in the forward pass."""

    holder: dict[str, Any]
    name: str
    tensor: Tensor
    needs_grad: bool
    version: int

    def restore(self, stack: ExitStack) -> None:
        """Put it back for a while, if the module holds another tensor, or has frozen this one."""
        now = self.holder.get(self.name)
        if type(now) not in (*PLAIN, type(None)):
            return
        if now is self.tensor and self.tensor.requires_grad == self.needs_grad:
            return
        stack.callback(self.holder.update, {self.name: now})
        self.holder[self.name] = self.tensor.detach().requires_grad_(
            self.needs_grad
        )


def _entries(holder: Any) -> list[Entry]:
    return [
        Entry(holder, name, tensor, tensor.requires_grad, _version(tensor))
        for name, tensor in holder.items()
        if type(tensor) in PLAIN
    ]


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _autocast(kind: str) -> tuple[torch.dtype, bool, bool]:
    enabled = torch.is_autocast_enabled(kind)
    return (
        torch.get_autocast_dtype(kind),
        enabled,
        torch.is_autocast_cache_enabled(),
    )


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

    moment: Moment
    needs_grad: bool  # of its source
    dtype: torch.dtype  # of its target
    saved: list[tuple[torch.Size, torch.dtype]]  # shapes of what autograd saves
    sample: Tensor  # entries of its result
    source: Tensor | None  # stored for the first two moves alone


class Rebuild:
    """Moves that are computed again in the backward pass, last one first.

    In the place of a tensor, autograd saves its number. The tensors of a move are in `values` while
    it is computed, and again from when they were rebuilt until those of another move are.
    """

    def __init__(self, moves: Sequence[Move], args: Any, options: Any) -> None:
        self.moves = tuple(moves)
        self.args = args
        self.options = options
        self.steps: list[Step] = []
        self.values: dict[int, dict[int, Tensor]] = {}
        self.read: set[int] = set()  # numbers of rebuilt tensors that were read
        self.first = -1  # the first move with anything to rebuild
        self.next = -1  # the move that is undone next
        self.doubts: list[
            tuple[str, Tensor]
        ] = []  # relative errors of moves, "" for the state
        self.lock = threading.RLock()  # several threads may go back at once

    def forward(self, halves: list[Half]) -> list[Half]:
        """The halves after all moves."""
        for k, move in enumerate(self.moves):
            source, target = halves[move.source].value, halves[move.target]
            moment = Moment(move.name, [move.module], source.device)
            if k and torch.equal(moment.random, self.steps[-1].moment.random):
                moment.random = self.steps[
                    -1
                ].moment.random  # many take no memory
            values = self.values[k] = {}
            hooks = saved_tensors_hooks(
                partial(_pack, values, None), partial(self._unpack, k)
            )
            with recording, hooks:
                result = _evaluate(
                    move, source, target, self.args, self.options
                )
            moment.done()
            if values and self.first < 0:
                self.first = k
            saved = [(x.shape, x.dtype) for x in values.values()]
            start = source.detach() if 0 <= self.first >= k - 1 else None
            notes = (target.value.dtype, saved, _sample(result), start)
            self.steps.append(Step(moment, source.requires_grad, *notes))
            self.values.clear()
            values.clear()  # which autograd's hook holds
            halves[move.target] = target.moved(result)
            if 0 <= self.first == k - 1:
                self.start = _detached(halves)
        self.end = _detached(halves)
        return halves

    def _unpack(self, k: int, number: int) -> Tensor:
        """The tensor that autograd saved in move k."""
        with self.lock:
            if k not in self.values:
                eagerly(self._rebuild, k)
            elif number in self.read:  # another backward pass, perhaps
                self.steps[k].moment.check()
            if k < len(self.steps):  # else the move itself takes gradients
                self.read.add(number)
            return self.values[k][number]

    def _rebuild(self, k: int) -> None:
        """Compute again what the backward pass of move k reads, and undo all moves from there."""
        if k > self.next:  # the first time, or another backward pass
            self.halves = list(self.end)
            self.next = len(self.moves) - 1
            self.doubts = []
        try:
            while self.next >= k:
                self.values.clear()
                self.read.clear()
                self._undo(self.next)
                self.next -= 1
            if k == self.first:
                self._judge(self.doubts, final=True)
            elif not self.halves[0].value.is_cuda:  # where reading takes time
                self._judge(self.doubts[-2:])
        except Exception:
            self.values.clear()
            self.next = -1
            raise

    def _undo(self, k: int) -> None:
        move, step = self.moves[k], self.steps[k]
        if k == self.first + 1:
            self.doubts.append(("", _drift(self.start, self.halves, self.end)))
        source = (
            self.halves[move.source].value
            if step.source is None
            else step.source
        )
        target = self.halves[move.target]
        values: dict[int, Tensor] = {}
        versions: list[int] = []
        hooks = saved_tensors_hooks(
            partial(_pack, values, versions), values.__getitem__
        )
        with step.moment, recording, hooks:
            source = source.detach().requires_grad_(step.needs_grad)
            result = _evaluate(move, source, target, self.args, self.options)
        if versions != [_version(x) for x in values.values()]:
            raise OptionError(
                f"{move.name} changes in place what its own gradient is computed from; use the "
                "operation that is not in place there."
            )
        if [(x.shape, x.dtype) for x in values.values()] != step.saved:
            raise OptionError(f"{move.name} {OTHERWISE}: {REASONS}.")
        before = target.moved(result.detach(), -1)
        self.halves[move.target] = Half(
            before.value.to(step.dtype), before.exact
        )
        doubt = _difference(step.sample, _sample(result), _sample(target.value))
        if (
            before.exact is not None
        ):  # where the same source gives the very same move
            doubt = torch.where(doubt == 0, doubt, torch.inf)
        self.doubts.append((move.name, doubt))
        self.values[k] = values

    def _judge(
        self, doubts: list[tuple[str, Tensor]], *, final: bool = False
    ) -> None:
        """Raise if a move, or the state, is far from that of the forward pass; at the end warn."""
        finite = torch.stack(
            [half.value.isfinite().all() for half in self.end]
        ).all()
        values = [doubt for _, doubt in doubts]
        finite, *values = torch.stack([finite.to(values[0]), *values]).tolist()
        if not finite:
            return  # from which nothing can be rebuilt: the gradients are not finite either
        for j, (name, _) in enumerate(doubts):
            if name and values[j] <= DIFFERENT:
                values[j] = 0.0
        worst = max(range(len(values)), key=values.__getitem__)
        name, error = doubts[worst][0], values[worst]
        reason = f"the backward pass came back to a state that is off by {error:.2g} of its size"
        noticeable = torch.finfo(self.end[0].value.dtype).eps ** 0.5
        if name:
            noticeable = DIFFERENT
            rounding = (
                "rounding has grown, or " if self.end[0].exact is None else ""
            )
            reason = f"{name} {OTHERWISE}, but was off by {error:.2g}: {rounding}{REASONS}"
        if error >= WORTHLESS:
            raise OptionError(
                f"{reason}, so the gradients would be worthless; {ADVICE}."
            )
        if final and error > noticeable:
            text = f"{reason}, so the gradients are inexact; {ADVICE}."
            warnings.warn(text, ReversalWarning, stacklevel=2)


def drift_of(y: Tensor, rebuilt: Tensor, end: Tensor) -> Tensor:
    """The relative error of a rebuilt state for its worst sample, along the first axis.

    Each sample is judged by its own size; a sample of zeros by its size at the end.
    """
    rows = [
        x.reshape(1, -1) if x.ndim < 2 else x.flatten(1)
        for x in (rebuilt - y, y, end)
    ]
    error, size, last = (torch.linalg.vector_norm(x, dim=1) for x in rows)
    ratio = error / torch.where(size > 0, size, last)
    ratio = torch.where(error == 0, 0.0, ratio)
    return ratio.nan_to_num(torch.inf, torch.inf).max().float()


def _drift(start: list[Half], halves: list[Half], end: list[Half]) -> Tensor:
    """The drift of the worse half; on the grid 0 or infinite."""
    drifts = []
    for y, rebuilt, last in zip(start, halves, end, strict=True):
        if y.exact is not None and rebuilt.exact is not None:
            same = (y.exact == rebuilt.exact).all()
            drifts.append(torch.where(same, 0.0, torch.inf))
        elif y.value.numel():
            drifts.append(drift_of(y.value, rebuilt.value, last.value))
    return torch.stack(drifts).max() if drifts else torch.zeros(())


def _difference(before: Tensor, after: Tensor, target: Tensor) -> Tensor:
    """The relative difference of two results of a move, beyond the rounding of the state."""
    error, size, state = map(
        torch.linalg.vector_norm, (after - before, before, target)
    )
    rounding = 32 * torch.finfo(target.dtype).eps / WORTHLESS
    ratio = error / (size + rounding * state)
    return (
        torch.where(error == 0, 0.0, ratio)
        .nan_to_num(torch.inf, torch.inf)
        .float()
    )


def _sample(x: Tensor) -> Tensor:
    """Some entries of a tensor, spread over all of it."""
    stride = x.numel() // SAMPLE | 1
    return x.detach().reshape(-1)[::stride].clone()


def _pack(
    values: dict[int, Tensor], versions: list[int] | None, x: Tensor
) -> int:
    number = len(values)
    values[number] = x.detach()
    if versions is not None:
        versions.append(_version(x))
    return number


def _detached(halves: list[Half]) -> list[Half]:
    return [Half(half.value.detach(), half.exact) for half in halves]


def _is_lazy(move: Move) -> bool:
    """True if a module draws its first weights in this call, which cannot be repeated."""
    if not isinstance(move.module, nn.Module):
        return False
    return any(
        nn.parameter.is_lazy(weight) for weight in move.module.parameters()
    )


def eagerly(function: Callable[..., Any], *args: Any) -> Any:
    """The result of a function that a compiled caller leaves alone."""
    if "torch._dynamo" in sys.modules:  # else importing it would take a second
        function = torch.compiler.disable(function)
    return function(*args)


def memory_of(device: torch.device) -> int:
    """The memory of a device in bytes."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def capturing(x: Tensor) -> bool:
    """True if a CUDA graph records the call, so that no value can be read."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def transformed() -> bool:
    """True inside transforms of `torch.func`, which forbid asking for gradients in place."""
    try:
        torch.empty(0).requires_grad_()
    except RuntimeError:
        return True
    return False
