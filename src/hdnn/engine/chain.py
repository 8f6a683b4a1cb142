"""Halves that take turns: one moves by any function of the other, and the backward pass undoes it.

A shear adds `move(source)` to its target and leaves its source alone, so it can be undone by
subtracting the same again. Autograd keeps, inside of a move, what its backward pass reads. With
`Rebuilding` that is dropped as soon as the move is done. When the backward pass asks for it, the
move is computed once more, from the source, which the last states still hold. The same result
undoes the shear, and so leads to the source of the one before. Nothing else of autograd is touched:
parameters, extra arguments, hooks and gradients of gradients work as always.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hdnn.engine.drift import WORTHLESS, ReversalWarning, drift_of, noticeable, recorded
from hdnn.engine.fixed import LIMIT, from_grid, to_grid
from hdnn.engine.tracing import eagerly, transformed, untraced
from hdnn.errors import ShapeError, TrainingError


class HalfMove(NamedTuple):
    """`target` (0 for p, 1 for q) moves by `move(other half, *arguments)`."""

    target: int
    move: Callable[..., Tensor]
    name: str
    module: nn.Module | None = None  # what of it may have statistics of its own


class Half(NamedTuple):
    """Half a state, on the fixed-point grid also as integers, of which the floats are a copy."""

    value: Tensor
    exact: Tensor | None = None

    def plus(self, move: Tensor) -> Half:
        if self.exact is None:
            return Half(self.value + move)
        exact = self.exact + to_grid(move.detach())
        total = _where_it_reaches(exact, (self.value + move).detach())
        return Half(_Through.apply(self.value, move, total.to(self.value.dtype)), exact)

    def minus(self, move: Tensor) -> Half:
        """Without autograd."""
        if self.exact is None:
            return Half(self.value - move)
        exact = self.exact - to_grid(move)
        return Half(from_grid(exact, self.value.dtype), exact)

    def detach(self) -> Half:
        return Half(self.value.detach(), self.exact)


class _Through(torch.autograd.Function):
    """A sum that was computed elsewhere, with the gradients of a sum."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, move: Tensor, total: Tensor) -> Tensor:
        ctx.dtype = move.dtype
        return total

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return g, g.to(ctx.dtype), None


def halves_of(y: Tensor, dim: int, fixed: bool) -> list[Half]:
    p, q = y.chunk(2, dim)
    return [on_grid(half) if fixed else Half(half) for half in (p, q)]


def on_grid(half: Tensor) -> Half:
    exact = to_grid(half.detach())
    zero = torch.zeros((), dtype=half.dtype, device=half.device)
    return Half(_Through.apply(half, zero.expand_as(half), _where_it_reaches(exact, half)), exact)


def _where_it_reaches(exact: Tensor, value: Tensor) -> Tensor:
    """The floats of the grid; NaN where a value is too large for it, then and ever after."""
    return torch.where(value.detach().abs() < LIMIT, from_grid(exact, value.dtype), torch.nan)


def check_grid(y_N: Tensor) -> None:
    """Raise if a state has left the grid, unless values cannot be read here."""
    unread = torch.compiler.is_compiling() or transformed() or recorded(y_N)
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
    before = None if source.is_inference() else source._version
    move = shear.move(source, *args, **options)
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
        raise TrainingError(
            f"{shear.name} changed its input in place, which would change the state itself; use "
            "inplace=False."
        )
    return move


class Slot(list[Any]):
    """In the place of a tensor that autograd wanted to keep for the backward pass of a move.

    The tensor, or None once it was dropped; its shape and its dtype; the chain; the number of the
    shear. It is a list because making one calls no Python, which `torch.compile` could stumble on.
    """

    __slots__ = ("__weakref__",)


def _read(slot: Slot) -> Tensor:
    if slot[0] is None:
        _, _, _, chain, k = slot
        eagerly(chain.rebuild, k)
        if slot[0] is None:
            raise TrainingError(f"{chain.shears[k].name} {OTHERWISE}.")
    return slot[0]


OTHERWISE = "did not compute the same a second time as in the forward pass"


class Rebuilding:
    """Shears whose moves are computed again in the backward pass, last one first."""

    def __init__(
        self, shears: Sequence[HalfMove], args: Any, options: Any, check: bool = True
    ) -> None:
        self.shears, self.check = tuple(shears), check
        self.args, self.options = args, options
        self.slots: list[list[weakref.ref[Slot]]] = []
        self.contexts: list[Context] = []
        self.sources: list[tuple[tuple[int, ...], bool]] = []  # strides, and whether they need g
        self.next = -1  # the shear that is undone next

    def forward(self, halves: list[Half]) -> list[Half]:
        """As `run`."""
        # Copies, since the given state may be changed in place before the backward pass.
        self.start = [Half(h.value.detach().clone(), h.exact) for h in halves]
        halves = list(halves)
        for k, shear in enumerate(self.shears):
            source, target = halves[1 - shear.target], halves[shear.target]
            slots: list[weakref.ref[Slot]] = []

            def pack(x: Tensor, k: int = k, slots: Any = slots) -> Slot:
                # Kept until the move is done, which may read it.
                slot = Slot((x.detach(), x.shape, x.dtype, self, k))
                slots.append(weakref.ref(slot))
                return slot

            self.contexts.append(Context(source.value, shear.module))
            self.sources.append((source.value.stride(), source.value.requires_grad))
            with saved_tensors_hooks(untraced(pack), _read):
                move = _moved(shear, source.value, target.value, self.args, self.options)
            self.slots.append(slots)
            self.contexts[k].done()
            self._forget(k)
            halves[shear.target] = target.plus(move)
        self.end = [half.detach() for half in halves]
        return halves

    def _forget(self, k: int) -> None:
        for slot in (ref() for ref in self.slots[k]):
            if slot is not None:
                slot[0] = None

    def rebuild(self, k: int) -> None:
        """Compute again what the backward pass of shear k reads, and undo it."""
        if k > self.next:  # the first time, or another backward pass
            self.halves, self.next = list(self.end), len(self.shears) - 1
        while self.next >= k:
            if self.next + 1 < len(self.shears):
                self._forget(self.next + 1)
            self._undo(self.next)
            self.next -= 1
        if k == 0:
            self._check()

    def _undo(self, k: int) -> None:
        shear, found = self.shears[k], []
        source, target = self.halves[1 - shear.target].value, self.halves[shear.target]

        def pack(x: Tensor) -> Tensor:
            found.append(x.detach())
            return found[-1]

        stride, needs = self.sources[k]
        if source.stride() != stride:  # on which it depends how PyTorch computes, and what it keeps
            source = torch.empty_strided(
                source.shape, stride, dtype=source.dtype, device=source.device
            ).copy_(source)
        with self.contexts[k].again(), saved_tensors_hooks(untraced(pack), _same):
            source = source.detach().requires_grad_(needs)
            args, options = mapped(_leaf, self.args), mapped(_leaf, self.options)
            move = _moved(shear, source, target.value, args, options)
        if len(found) != len(self.slots[k]):
            raise TrainingError(f"{shear.name} {OTHERWISE}.")
        for ref, value in zip(self.slots[k], found, strict=True):
            slot = ref()
            if slot is not None:
                if slot[1] != value.shape or slot[2] is not value.dtype:
                    raise TrainingError(f"{shear.name} {OTHERWISE}.")
                slot[0] = value
        self.halves[shear.target] = target.minus(move.detach())

    def _check(self) -> None:
        """That undoing has led back to where the forward pass began."""
        if not self.check:
            return
        reason = (
            "a module is not deterministic (see torch.use_deterministic_algorithms), or its "
            "weights, its mode or its arguments changed between the passes"
        )
        if self.start[0].exact is not None:
            pairs = zip(self.start, self.halves, strict=True)
            if not all(torch.equal(a.exact, b.exact) for a, b in pairs):  # pyright: ignore
                raise TrainingError(f"the backward pass did not come back to y_0: {reason}.")
            return
        if not self.start[0].value.numel():
            return
        y_0, rebuilt, y_N = (
            torch.stack([half.value.reshape(len(half.value), -1) for half in which], 1)
            for which in (self.start, self.halves, self.end)
        )
        drift = float(drift_of(y_0, rebuilt, y_N))
        what = f"the backward pass came back to a y_0 that is off by {drift:.2g} of its size"
        advice = 'take state="fixed", whose reversal is exact, or backprop="checkpoint"'
        if drift >= WORTHLESS:
            raise TrainingError(f"{what}: rounding has grown, or {reason}; {advice}.")
        if drift > noticeable(y_0.dtype):
            warnings.warn(
                f"{what}, so the gradients are inexact; {advice}.", ReversalWarning, stacklevel=2
            )


def _same(x: Tensor) -> Tensor:
    return x


def _leaf(x: Tensor) -> Tensor:
    """With gradients if it had some, so that autograd keeps the same."""
    return x.detach().requires_grad_(x.requires_grad)


def mapped(function: Callable[[Tensor], Tensor], given: Any) -> Any:
    """Arguments with another tensor in the place of each, also inside of tuples, lists, dicts."""
    if isinstance(given, Tensor):
        return function(given)
    if isinstance(given, dict):
        return {name: mapped(function, value) for name, value in given.items()}
    if isinstance(given, tuple) and hasattr(given, "_fields"):
        return type(given)(*(mapped(function, value) for value in given))
    if isinstance(given, tuple | list):
        return type(given)(mapped(function, value) for value in given)
    return given


class Context:
    """What a move depends on besides its arguments: random numbers, autocast, its module."""

    def __init__(self, like: Tensor, module: nn.Module | None) -> None:
        self.device, self.modules = like.device, AsThen([module])
        self.random = random_state(like.device)
        self.drew = True  # until it is known that the move took no random numbers
        self.autocast = {kind: _autocast(kind) for kind in (like.device.type, "cpu")}

    def done(self) -> None:
        """The move was computed for the first time."""
        now = random_state(self.device)
        self.drew = not all(torch.equal(a, b) for a, b in zip(self.random, now, strict=True))

    @contextmanager
    def again(self) -> Iterator[None]:
        """The same once more; statistics of batches stay as they are."""
        with ExitStack() as stack:
            if self.drew:
                devices = [self.device] if len(self.random) > 1 else []
                stack.enter_context(torch.random.fork_rng(devices))
                torch.set_rng_state(self.random[0])
                if devices:
                    torch.cuda.set_rng_state(self.random[1], self.device)
            for kind, how in self.autocast.items():
                if how != _autocast(kind):
                    enabled, dtype, cached = how
                    stack.enter_context(torch.autocast(kind, dtype, enabled, cached))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(self.modules)
            yield


def random_state(device: torch.device) -> list[Tensor]:
    """The states of the generators that a module on a device draws from."""
    found = [torch.get_rng_state()]
    return [*found, torch.cuda.get_rng_state(device)] if device.type == "cuda" else found


def _autocast(kind: str) -> tuple[bool, torch.dtype, bool]:
    how = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return *how, torch.is_autocast_cache_enabled()


class AsThen:
    """Inside, modules have the weights that they had when this was made, and count no batch twice.

    Other weights than now were there in `torch.func.functional_call`. A normalisation moves copies
    of its statistics.
    """

    def __init__(self, modules: Iterable[nn.Module | None]) -> None:
        parts = [one for one in modules if one is not None]
        for one in parts:  # which grows meanwhile; `nn.Module.modules` takes much longer
            parts += [part for part in one._modules.values() if part is not None]
        own: Any = [values for part in parts for values in (part._parameters, part._buffers)]
        self.then = [(values, values.copy()) for values in own if values]
        self.counting = [part for part in parts if getattr(part, "track_running_stats", False)]
        self.before: list[list[tuple[dict[str, Any], dict[str, Any]]]] = []

    def __enter__(self) -> None:
        others = [(values, then) for values, then in self.then if _differ(values, then)]
        changed = [(values, values.copy()) for values, _ in others]
        changed += [(part._buffers, part._buffers.copy()) for part in self.counting]
        self.before.append(changed)
        for values, then in others:
            values.update(then)
        for part in self.counting:
            for name, value in part._buffers.items():
                part._buffers[name] = None if value is None else value.clone()

    def __exit__(self, *_: object) -> None:
        for values, before in reversed(self.before.pop()):
            values.update(before)


def _differ(now: dict[str, Any], then: dict[str, Any]) -> bool:
    """Whether these are other tensors; those of `fully_shard` come and go by themselves."""
    for name, value in then.items():
        found = now.get(name)
        if found is not value and type(found) in PLAIN and type(value) in PLAIN:
            return True
    return False


PLAIN = (Tensor, nn.Parameter, type(None))
