"""Run a model, differentiate it, and collect all that the rules look at."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import stdev
from typing import Any

import torch
from torch import Tensor

from hdnn.analysis.doctor import trials
from hdnn.analysis.doctor.calls import ModuleCall, Recording
from hdnn.analysis.doctor.chain import ChainState
from hdnn.analysis.doctor.probe import Probe, direction, norm
from hdnn.analysis.doctor.products import singular_gain
from hdnn.analysis.doctor.signals import LayerSignals, ParameterSignals, PeerBlock, Signals
from hdnn.analysis.doctor.steady import hold_still
from hdnn.analysis.doctor.trace import OperationTrace

DRAWS = 4
UNSURE = 0.1  # the error of an estimate that is not used any more
MOST_PEERS = 48
MOST_INNER = 12  # modules that are looked at inside of a layer that stands out
SHRINKS, GROWS = 1e-2, 1e2
MOST_WHOLE, MOST_OWN = 5, 8  # matrices dy_N/dy_j and dy_j/dy_{j-1} whose values are computed


def measure(probe: Probe, *, steps: int) -> Signals:
    """Run the model a few times, and collect all that the rules look at."""
    found = Signals()
    traces: list[OperationTrace] = []

    def mode(current: Callable[[], str]) -> OperationTrace:
        traces.append(OperationTrace(current))
        return traces[0]

    hold_still(probe)
    recording = probe.record(mode)
    found.calls = recording.calls
    found.activations = [*traces[0].activations.values()]
    found.exponentials = [*traces[0].exponentials.values()]
    objective = probe.objective(recording.output)
    states = probe.chain(recording)
    if objective is None or not states:
        found.differentiable = False
        _parameters(probe, found, recording, {})
        trials.compared(probe, found, recording, [])
        return found
    tensors = [state.tensor for state in states]
    weights = probe.weights
    grads = torch.autograd.grad(
        objective, [*tensors, *weights.values()], retain_graph=True, allow_unused=True
    )
    sizes = [None if g is None else norm(g) for g in grads]
    by_state = [size or 0.0 for size in sizes[: len(states)]]
    found.bad_gradients = [
        *(s.layer for s, size in zip(states, by_state, strict=True) if not math.isfinite(size)),
        *(n for n, z in zip(weights, sizes[len(states) :], strict=True) if z and z - z != 0),
    ]
    _parameters(probe, found, recording, dict(zip(weights, sizes[len(states) :], strict=True)))
    _layers(found, states, by_state)
    found.body = _body(states, found)
    if all(one.finite_out for one in recording.calls) and not found.bad_gradients:
        _gains(found, states, steps)
        _blocks(found, states)
        if not weights:
            return found
        trials.compared(probe, found, recording, states)
        trials.after_a_step(probe, found, dict(zip(weights, grads[len(states) :], strict=True)))
    return found


def _parameters(
    probe: Probe, found: Signals, recording: Recording, sizes: dict[str, float | None]
) -> None:
    called = {one.name for one in recording.calls}
    with_weights = [
        one.name
        for one in recording.calls
        if next(one.module.parameters(recurse=False), None) is not None
    ]
    inner = {one.name for one in recording.calls if not one.leaf}
    found.zero_buffers = [
        name
        for name, value in probe.model.named_buffers()
        if name.rpartition(".")[0] in inner and value.is_floating_point() and not value.any()
    ]
    for name, weight in probe.model.named_parameters():
        module = name.rpartition(".")[0]
        found.parameters.append(
            ParameterSignals(
                name,
                module,
                module in called or not module,
                weight.requires_grad,
                norm(weight),
                tuple(weight.shape),
                sizes.get(name),
                last=bool(with_weights) and module == with_weights[-1],
            )
        )


def _layers(found: Signals, states: list[ChainState], gradients: list[float]) -> None:
    before: ChainState | None = None
    for k, state in enumerate(states):
        one = LayerSignals(
            state.layer,
            state.parts,
            state.tensor.numel(),
            tuple(state.tensor.shape),
            state.rms,
            gradients[k],
            1.0 if before is None else _ratio(gradients[k - 1], gradients[k]),
        )
        if before is not None and before.tensor.shape == state.tensor.shape:
            was = before.tensor.detach().double()
            moved = state.tensor.detach().double() - was
            one.change = float(moved.norm() / was.norm().clamp_min(1e-300))
            one.identity = _identity(state.tensor, before.tensor)
        found.layers.append(one)
        before = state


def _ratio(a: float, b: float) -> float:
    return a / b if b > 0 else (math.nan if a == 0 else math.inf)


def _identity(later: Tensor, earlier: Tensor) -> float:
    """The mean of the diagonal of d later / d earlier, by Hutchinson's estimate; NaN if unsure."""
    found = []
    for seed in range(DRAWS):
        v = direction(later, seed)
        (g,) = torch.autograd.grad(later, earlier, v, retain_graph=True, allow_unused=True)
        found.append(0.0 if g is None else float((g.double() * v.double()).sum()))
    if not all(map(math.isfinite, found)) or stdev(found) > math.sqrt(DRAWS) * UNSURE:
        return math.nan
    return sum(found) / DRAWS


def _blocks(found: Signals, states: list[ChainState]) -> None:
    """For modules of equal shapes in one list: the states around each, and their identity."""
    groups: dict[Any, list[ModuleCall]] = {}
    for one in found.calls:
        shapes = tuple((n, tuple(p.shape)) for n, p in one.module.named_parameters())
        if any(len(shape) > 1 for _, shape in shapes) and one.ended > 0 and not one.repeat:
            groups.setdefault((one.name.rpartition(".")[0], shapes), []).append(one)
    for (parent, shapes), group in groups.items():
        for one in group[:MOST_PEERS] if len(group) > 2 else ():
            before = [s for s in states if s.time <= one.begun]
            ends = [t.grad_fn for t in one.outputs if t.grad_fn is not None]
            after = [s for s in states if s.time >= one.ended or s.tensor.grad_fn in ends]
            if before and after and before[-1].tensor.shape == after[0].tensor.shape:
                share = _identity(after[0].tensor, before[-1].tensor)
                if not math.isnan(share):
                    found.blocks.append(PeerBlock(one.title, (parent, *shapes), share))


def _body(states: list[ChainState], found: Signals) -> int:
    """The index of y_N: the state that enters the last module with parameters."""
    with_weights = [
        one for one in found.calls if next(one.module.parameters(recurse=False), None) is not None
    ]
    if not with_weights:
        return len(states) - 1
    heads = [k for k, s in enumerate(states) if s.time <= with_weights[-1].begun]
    return heads[-1] if heads and heads[-1] > 0 else len(states) - 1


def _inner(state: ChainState, steps: int, *, grows: bool) -> str:
    """The module inside of a layer that shrinks or grows gradients most."""
    gains: dict[str, float] = {}
    for one in state.calls:
        out, into = one.state, next(iter(one.inputs), None)
        if one.leaf and one.name not in gains and len(gains) < MOST_INNER and out is not None:
            # Of a module that is called again, a later call shows what it does to a state.
            same = [c for c in state.calls if c.name == one.name]
            out, into = same[-1].state, next(iter(same[-1].inputs), into)
            if out is not None and into is not None and out.requires_grad and into.requires_grad:
                gain = singular_gain(out, into, steps)
                if not gain.why:
                    gains[one.name] = gain.largest
    if not gains:
        return ""
    return (max if grows else min)(gains, key=lambda name: gains[name])


def _spread(count: int, most: int) -> set[int]:
    """So many of 0 .. count - 1, evenly spread, with the first and the last."""
    if count <= most:
        return {*range(count)}
    return {round(k * (count - 1) / (most - 1)) for k in range(most)}


def _extreme(found: Signals) -> set[int]:
    """The layers that shrink or grow a random gradient most."""
    gains = [(one.gain, k) for k, one in enumerate(found.layers) if k and one.gain == one.gain]
    order = [k for _, k in sorted(gains)]
    return {*order[:3], *order[-3:]}


def _gains(found: Signals, states: list[ChainState], steps: int) -> None:
    last = states[found.body].tensor
    for k in sorted(_spread(found.body + 1, MOST_WHOLE)):
        gain = singular_gain(last, states[k].tensor, steps)
        found.layers[k].whole = gain
        if gain.why:
            break
    for k in sorted(_spread(len(states), MOST_OWN) | _extreme(found)):
        if k:
            found.layers[k].own = singular_gain(states[k].tensor, states[k - 1].tensor, steps)
    for one, state in zip(found.layers[1:], states[1:], strict=True):
        gain = one.own.largest if one.own is not None and not one.own.why else one.gain
        if len(one.parts) > 1 and not (SHRINKS < gain < GROWS):
            one.inner = _inner(state, steps, grows=gain > 1)
    told = {g.why for one in found.layers for g in (one.whole, one.own) if g and g.why}
    for why in sorted(told):
        names = [o.layer for o in found.layers if any(g and g.why == why for g in (o.whole, o.own))]
        found.unknown.append(f"the singular values of {', '.join(dict.fromkeys(names))} ({why})")
