"""Experiments on a copy of a model: what moves when its weights move, and what a step opens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hdnn.analysis.doctor.calls import Recording
from hdnn.analysis.doctor.chain import ChainState
from hdnn.analysis.doctor.probe import (
    Probe,
    direction,
    in_float64,
    norm,
    nudged,
    outputs_of,
    restored,
)
from hdnn.analysis.doctor.signals import Signals

NUDGE = 2e-3  # of the size of weights, for differences instead of derivatives
FINE, FINER = 1e-6, 1e-8  # the same in float64
TRIAL = 1e-3  # the step of Adam that is tried on a copy
DRAWS = 3
DIFFERENT = 0.1  # derivatives this far from differences are wrong
WORTH_A_LOOK = 0.05  # relative differences above this are looked at again
MOST_CHECKED = 16  # modules whose weights are moved one after the other

Difference = tuple[list[Tensor], dict[str, Tensor]]


UNSURE = "whether gradients are the derivative: "


def compared(
    probe: Probe, found: Signals, recording: Recording, states: Sequence[ChainState]
) -> None:
    """What gradients say beside what differences say, where calls can be compared at all."""
    if not probe.repeats:
        found.unknown.append(f"{UNSURE}the model gives other values in each call on the same x")
        return
    severed(probe, found, recording)
    unreached(probe, found, recording)
    if states:
        differences(probe, found, states)
    if probe.kept is not None and any(m > DIFFERENT for m in found.mismatch):
        # What it keeps from call to call may be left out of the gradient on purpose.
        found.mismatch = [math.nan] * len(found.mismatch)
        found.unknown.append(f"{UNSURE}the model changes in each call, and what it gives with it")


def severed(probe: Probe, found: Signals, recording: Recording) -> None:
    """Modules whose input depends on trainable weights, though no gradient leads back to them."""
    kept = {n: w.detach().clone() for n, w in probe.weights.items()}
    nudged(probe, 10 * NUDGE)
    other = probe.record()
    restored(probe, kept)
    if len(other.calls) != len(recording.calls):
        found.unknown.append("whether branches are detached: other modules run in each call")
        return
    for one, two in zip(recording.calls, other.calls, strict=True):
        for was, now in zip(one.inputs, two.inputs, strict=False):
            moved = was.shape == now.shape and not torch.equal(was.detach(), now.detach())
            if moved and not was.requires_grad and one.finite_in:
                found.severed.append(one.title)
                break


def unreached(probe: Probe, found: Signals, recording: Recording) -> None:
    """Weights that no gradient reaches, though what comes out depends on them; or it does not.

    Of a module that is not called, weights can be used all the same.
    """
    lost = [p for p in found.parameters if p.trainable and p.gradient is None]
    before = [t.detach() for t in outputs_of(recording.output)]

    def matter(names: set[str]) -> bool:
        kept = {n: w.detach().clone() for n, w in probe.weights.items()}
        nudged(probe, 10 * NUDGE, only=names)
        after = [t.detach() for t in outputs_of(probe.record().output)]
        restored(probe, kept)
        pairs = zip(before, after, strict=False)
        return any(a.shape != b.shape or not torch.equal(a, b) for a, b in pairs)

    idle = {p.name for p in lost if not p.called}
    if idle and not matter(idle):
        found.unused = [p.name for p in lost if p.name in idle]
        lost = [p for p in lost if p.called]
    for module in [*dict.fromkeys(p.module for p in lost)][-MOST_CHECKED:]:
        names = {p.name for p in lost if p.module == module}
        if matter(names):
            found.unreached += sorted(names)
        elif names <= idle:
            found.unused += sorted(names)


def differences(probe: Probe, found: Signals, states: Sequence[ChainState]) -> None:
    """How far derivatives by the weights are from differences, at the output and then by layer.

    What is far off is looked at again in float64, by differences so small that activations with
    kinks are straight.
    """
    fresh, last = probe.chain(probe.record()), len(states) - 1
    found.mismatch = [math.nan] * len(states)
    if len(fresh) == len(states):
        found.mismatch[last] = _mismatch(probe, fresh[last], _difference(probe, NUDGE), last)
        if found.mismatch[last] < WORTH_A_LOOK:
            return
    try:
        with in_float64(probe):
            _locate(probe, found)
    except RuntimeError as error:  # the model insists on float32 somewhere
        found.mismatch[last] = math.nan
        found.unknown.append(f"whether gradients are the derivative ({error})")


def _locate(probe: Probe, found: Signals) -> None:
    """The first layer from which on derivatives are not what differences say."""
    fresh = probe.chain(probe.record())
    fine = _difference(probe, FINE)
    if len(fresh) != len(found.mismatch) or len(fine[0]) != len(fresh):
        found.unknown.append(f"{UNSURE}other modules run in each call")
        return

    def wrong(k: int) -> bool:
        if not (fresh[k].tensor.requires_grad and fresh[k].time):
            return False
        found.mismatch[k] = _mismatch(probe, fresh[k], fine, k)
        return found.mismatch[k] > DIFFERENT

    low, high = -1, len(fresh) - 1
    if wrong(high):
        # Where values explode, what is small for others is large, and differences say nothing.
        change, finer = fine[0][high], _difference(probe, FINER)[0][high]
        if float((change - finer).norm()) > DIFFERENT * float(change.norm()):
            found.mismatch[high] = math.nan
            found.unknown.append(f"{UNSURE}small changes do not move the output in proportion")
            return
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if wrong(middle) else (middle, high)


def _difference(probe: Probe, scale: float) -> Difference:
    """Differences of all states over those of the weights, and the direction of the weights."""
    kept = {n: w.detach().clone() for n, w in probe.weights.items()}
    moves = nudged(probe, scale)
    up = _values(probe)
    restored(probe, kept)
    nudged(probe, -scale)
    down = _values(probe)
    restored(probe, kept)
    changes = [
        (a.double() - b.double()) / (2 * scale)
        for a, b in zip(up, down, strict=False)
        if a.shape == b.shape
    ]
    return changes, moves


def _mismatch(probe: Probe, state: ChainState, difference: Difference, k: int) -> float:
    """How far a derivative is from a difference, relative to it, along random directions."""
    changes, moves = difference
    if k >= len(changes) or changes[k].shape != state.tensor.shape:
        return 0.0
    change, size = changes[k], float(changes[k].norm())
    if size == 0 or not math.isfinite(size):
        return 0.0
    total = 0.0
    for seed in range(DRAWS):
        u = direction(change, 100 + seed) * math.sqrt(change.numel())
        grads = torch.autograd.grad(
            state.tensor,
            [*probe.weights.values()],
            u.to(state.tensor),
            retain_graph=True,
            allow_unused=True,
        )
        derivative = sum(
            float((g * moves[n]).sum())
            for n, g in zip(probe.weights, grads, strict=True)
            if g is not None
        )
        total += (float((u * change).sum()) - derivative) ** 2
    return math.sqrt(total / DRAWS) / size


def _values(probe: Probe) -> list[Tensor]:
    return [state.tensor.detach().clone() for state in probe.chain(probe.record())]


def after_a_step(probe: Probe, found: Signals, grads: dict[str, Tensor | None]) -> None:
    """What a first step of Adam changes: gates that open, branches that come alive."""
    kept = {n: w.detach().clone() for n, w in probe.weights.items()}
    with torch.no_grad():
        for name, weight in probe.weights.items():
            g = grads.get(name)
            if g is not None:
                weight.data.sub_(g.sign(), alpha=TRIAL)
    recording = probe.record()
    objective, states = probe.objective(recording.output), probe.chain(recording)
    if objective is not None:
        after = torch.autograd.grad(objective, [*probe.weights.values()], allow_unused=True)
        sizes = {n: None if g is None else norm(g) for n, g in zip(kept, after, strict=True)}
        for one in found.parameters:
            one.after = sizes.get(one.name)
        if len(states) == len(found.layers):
            found.changes_after = [_change(states, k) for k in range(len(states))]
    restored(probe, kept)
    found.opened = _opened(probe, grads, kept)


def _opened(probe: Probe, grads: dict[str, Tensor | None], kept: dict[str, Tensor]) -> float:
    """By how much the gradient of the first state grows with a step of vectors: scales, biases."""

    def first() -> float:
        recording = probe.record()
        objective, states = probe.objective(recording.output), probe.chain(recording)
        if objective is None or not states:
            return 0.0
        (g,) = torch.autograd.grad(objective, states[0].tensor, allow_unused=True)
        return 0.0 if g is None else norm(g)

    before = first()
    with torch.no_grad():
        for name, weight in probe.weights.items():
            g = grads.get(name)
            if g is not None and weight.ndim < 2:
                weight.data.sub_(g.sign(), alpha=TRIAL)
    after = first()
    restored(probe, kept)
    return after / before if before > 0 else 1.0


def _change(states: Sequence[ChainState], k: int) -> float:
    if not k or states[k].tensor.shape != states[k - 1].tensor.shape:
        return math.nan
    was = states[k - 1].tensor.detach().double()
    return float((states[k].tensor.detach().double() - was).norm() / was.norm().clamp_min(1e-300))
