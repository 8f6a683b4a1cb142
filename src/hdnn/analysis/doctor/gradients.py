"""Rules about the size of derivatives along the chain: vanishing, exploding, no path around."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from statistics import median

from hdnn.analysis.doctor.finding import Finding
from hdnn.analysis.doctor.signals import LayerSignals, PeerBlock, Signals

VANISHED, EXPLODED = 1e-4, 1e3
SHRUNK = 1e-2  # no derivative above this counts as vanished
OPENED = 10.0  # gradients that a step of scales makes so much larger were small on purpose
FAINT = 1e-3  # a state this small has died out, in whatever units the inputs are
GROWN = 100.0  # states that grow by so much, and to so much, explode with the gradient
OUTLIER = 100.0
CAUSES = ("dead units", "saturated", "detached", "zero gate", "not finite")


def size(one: LayerSignals) -> float:
    """The norm of a state."""
    return one.rms * math.sqrt(one.size)


def relative(gain: float, later: LayerSignals, earlier: LayerSignals) -> float:
    """A derivative in units of the two states: by how much per cent y_N moves for one of y_j."""
    return gain * size(earlier) / size(later) if size(later) > 0 else math.inf


def vanishing(signals: Signals, found: list[Finding]) -> Iterable[Finding]:
    """dy_N/dy_j that is below 1e-4 in every direction, or that the head then does away with.

    In units of the two states, so that the scale of inputs or of a normalised state is no fault; in
    plain numbers where the state itself dies out.
    """
    if not signals.layers or any(f.fault and f.kind == "not finite" for f in found):
        return
    gates = any(f.kind == "zero gate" for f in found)
    last = signals.layers[signals.body]
    lost = []
    for k, one in enumerate(signals.layers[: signals.body]):
        gain = _whole(signals, k)
        if math.isnan(gain):
            continue
        faint = gain < VANISHED and last.rms < FAINT
        if (relative(gain, last, one) < VANISHED and gain < SHRUNK) or faint:
            lost.append((k, gain, faint))
    cause = next((f for f in found if f.fault and f.kind in CAUSES), None)
    if lost and not (gates and lost[-1][1] == 0):
        k, gain, faint = lost[-1]
        # From the last state that is lost to the end, and the whole way to the first one.
        first, gain, _ = lost[0]
        names = _blamed(signals, first, signals.body, faint or gain < VANISHED)
        told = _vanished(signals, names, gain, signals.layers[first], cause)
        if signals.opened > OPENED:
            more = " It is a scale that is learned: the first step makes it much larger."
            told = replace(told, sentence=told.sentence + more, fault=False)
        yield told
        return
    out = signals.layers[-1]
    if signals.body < len(signals.layers) - 1 and not gates:
        gain = last.gradient / out.gradient if out.gradient > 0 else math.nan
        zeros = [p for p in signals.parameters if p.last and p.norm == 0 and p.gradient]
        tiny = relative(gain, out, last) < VANISHED and gain < SHRUNK
        if (tiny or (gain < VANISHED and out.rms < FAINT * FAINT)) and not zeros:
            names = _blamed(signals, signals.body, len(signals.layers) - 1, not tiny)
            yield _vanished(signals, names, gain, last, cause)


def _whole(signals: Signals, k: int) -> float:
    """The largest singular value of dy_N/dy_j; without it, how far a random gradient shrinks."""
    one, last = signals.layers[k], signals.layers[signals.body]
    if one.whole is not None and not one.whole.why:
        return one.whole.largest
    if last.gradient > 0:
        return one.gradient / last.gradient
    return math.nan


def _own(signals: Signals, k: int, plain: bool) -> float:
    """How far layer k lets gradients through at best."""
    one, before = signals.layers[k], signals.layers[k - 1]
    gain = one.own.largest if one.own is not None and not one.own.why else one.gain
    if math.isnan(gain):
        return 1.0
    return gain if plain else relative(gain, one, before)


def _blamed(signals: Signals, first: int, last: int, plain: bool) -> list[int]:
    """The layers that shrink gradients: the one that stands out, or all that take part."""
    logs = {
        k: math.log(max(min(_own(signals, k, plain), 1.0), 1e-300))
        for k in range(first + 1, last + 1)
    }
    total, worst = sum(logs.values()), min(logs, key=lambda k: logs[k])
    if logs[worst] <= 0.5 * total:
        return [worst]
    return [k for k, log in logs.items() if log <= 0.5 * logs[worst]] or [worst]


def _vanished(
    signals: Signals, blamed: list[int], gain: float, first: LayerSignals, cause: Finding | None
) -> Finding:
    layers = [signals.layers[k] for k in blamed]
    names = tuple(dict.fromkeys(one.blamed for one in layers))
    rate = median(g for k in blamed if (g := _own(signals, k, plain=True)) >= 0)
    whole = f"of what enters {names[0]}" if first.layer == "input" else f"at {first.layer}"
    if len(names) == 1:
        where = f"{names[0]} lets through {_few(rate)} of the gradient at best"
    else:
        where = (
            f"each of {len(names)} layers from {names[0]} to {names[-1]} lets through {_few(rate)} "
            "of the gradient at best"
        )
    why = f" ({cause.kind} in {cause.layer})" if cause else ""
    ways = [x.identity for x in layers if x.identity == x.identity]
    hint = ""
    if not cause and len(names) > 2 and ways and max(map(abs, ways)) < 0.2:
        hint = " No path leads around them: add residual connections, or start with larger weights."
    return Finding(
        "vanishing",
        layers[0].blamed,
        f"The gradient vanishes: {where}{why}, and {_few(gain)} is left {whole}.{hint}",
        {"left": gain, "a layer": rate},
        layers=names,
    )


def _few(value: float) -> str:
    return "nothing" if value == 0 else f"{value:.2g}"


def exploding(signals: Signals, found: list[Finding]) -> Iterable[Finding]:
    """dy_N/dy_j above 1000, and states that grow or react as much; or one layer above all."""
    if not signals.layers or any(f.fault and f.kind == "not finite" for f in found):
        return
    last = signals.layers[signals.body]
    for k, one in enumerate(signals.layers[: signals.body]):
        gain = _whole(signals, k)
        grown = last.rms / one.rms if one.rms > 0 else 0.0
        large = grown > GROWN and last.rms > GROWN
        if gain > EXPLODED and (large or relative(gain, last, one) > EXPLODED):
            yield _exploded(signals, _growing(signals, k, signals.body), gain, one)
            return
    sizes = [one.rms for one in signals.layers]
    high = max(range(len(sizes)), key=lambda k: sizes[k])
    if sizes[high] > EXPLODED * max(median(sizes), min(sizes[: high + 1]), 1.0):
        grow = _growing(signals, 0, high) if high else [0]
        yield _exploded(signals, grow, sizes[high] / max(sizes[0], 1e-300), signals.layers[0])
        return
    yield from _outliers(signals)


def _growing(signals: Signals, first: int, last: int) -> list[int]:
    gains = {k: max(_own(signals, k, plain=True), 1.0) for k in range(first + 1, last + 1)}
    logs = {k: math.log(min(g, 1e300)) for k, g in gains.items()}
    total, most = sum(logs.values()), max(logs, key=lambda k: logs[k])
    if logs[most] >= 0.5 * total:
        return [most]
    return [k for k, log in logs.items() if log >= 0.5 * logs[most]]


def _exploded(signals: Signals, grow: list[int], gain: float, first: LayerSignals) -> Finding:
    names = tuple(dict.fromkeys(signals.layers[k].blamed for k in grow))
    rate = median(_own(signals, k, plain=True) for k in grow)
    each = "multiplies it by" if len(names) == 1 else "and those after it multiply it by"
    return Finding(
        "exploding",
        names[0],
        f"The gradient explodes: {names[0]} {each} up to {rate:.3g}, and by {gain:.2g} in all on "
        f"the way back to {first.layer}. Smaller weights or a normalisation there help.",
        {"in all": gain, "a layer": rate},
        layers=names,
    )


def _outliers(signals: Signals) -> Iterable[Finding]:
    known = [
        (k, one.own.largest)
        for k, one in enumerate(signals.layers)
        if k and one.own is not None and not one.own.why
    ]
    if len(known) < 3:
        return
    usual = median(gain for _, gain in known)
    for k, gain in known:
        if gain > OUTLIER * max(usual, 1.0) and _undone(signals, k):
            yield _exploded(signals, [k], gain, signals.layers[k - 1])


def _undone(signals: Signals, k: int) -> bool:
    """Whether the state after a layer is far from the size of all others."""
    sizes = [one.rms for one in signals.layers]
    return sizes[k] > OUTLIER * max(median(sizes), sizes[k - 1], 1.0)


def missing_residual(signals: Signals, found: list[Finding]) -> Iterable[Finding]:
    """A block without the identity that its peers, blocks of the same shapes, all have."""
    groups: dict[object, list[PeerBlock]] = {}
    for one in signals.blocks:
        groups.setdefault(one.shapes, []).append(one)
    for group in groups.values():
        usual = median(one.identity for one in group)
        if len(group) < 3 or usual < 0.3:
            continue
        for one in group:
            if one.identity < 0.15 * usual:
                yield Finding(
                    "missing residual",
                    one.layer,
                    f"{one.layer} has no path around it, unlike {len(group) - 1} blocks of the "
                    f"same shapes: the identity is {one.identity:.2g} of its derivative, and "
                    f"{usual:.2g} of theirs.",
                    {"identity": one.identity, "usual": usual},
                )
