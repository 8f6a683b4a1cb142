"""From what was measured to what is wrong: one rule for each kind of finding.

Rules look at figures, never at the names of classes. Each says in its docstring what it takes for a
fault; what can be meant is a note.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from statistics import median

from hdnn.analysis.doctor.finding import Finding
from hdnn.analysis.doctor.gates import zero_gates
from hdnn.analysis.doctor.gradients import exploding, missing_residual, vanishing
from hdnn.analysis.doctor.signals import Signals
from hdnn.analysis.doctor.trace import ActivationFacts
from hdnn.analysis.doctor.trials import DIFFERENT

HALF_OFF = 0.5  # of the units of a healthy layer of ReLU can be off for all samples
MOSTLY = 0.85  # more than that is looked into however few samples there are
RARE = 1e-4  # how unlikely so many dead units must be by chance
SATURATED = 0.8
AMPLIFIED, TINY_SIGNAL = 100.0, 1e-3
SMALL_CHANGE, SMALL_TOTAL = 1e-4, 1e-3
ROUNDED = 1e-8  # changes of a state that are no more than rounding, also where they come up


def judge(signals: Signals) -> list[Finding]:
    """All findings: faults first, each with the layers in the order of the model."""
    found: list[Finding] = []
    for rule in RULES:
        found += rule(signals, found)
    return sorted(found, key=lambda one: not one.fault)


def not_finite(signals: Signals, found: list[Finding]) -> Iterable[Finding]:
    """A module that makes NaN or infinity of finite inputs, forwards or backwards."""
    ends = sorted((one for one in signals.calls if one.ended > 0), key=lambda one: one.ended)
    first = next((one for one in ends if one.finite_in and not one.finite_out), None)
    if first is not None:
        yield Finding(
            "not finite",
            first.title,
            f"{first.title} gives NaN or infinity for inputs that are finite (of size "
            f"{first.rms_in:.2g}); nothing after it can be trained.",
            {"input": first.rms_in},
        )
    elif signals.bad_gradients:
        layers = [one.layer for one in signals.layers]
        bad = [k for k, one in enumerate(signals.layers) if not math.isfinite(one.gradient)]
        name = layers[min(max(bad) + 1, len(layers) - 1)] if bad else signals.bad_gradients[-1]
        yield Finding(
            "not finite",
            name,
            f"The output is finite, but the gradient becomes NaN or infinite on its way back "
            f"through {name}: a root, a norm or a division at zero does that.",
        )


def nan_risk(signals: Signals, found: list[Finding]) -> Iterable[Finding]:
    """An exponential of more than a quarter of what overflows: logits need to grow by 4 only."""
    for one in signals.exponentials:
        if one.largest > one.limit / 4:
            name = one.module or "the model itself"
            yield Finding(
                "nan risk",
                one.module or "output",
                f"{name} takes exp of {one.largest:.3g}, and infinity comes out past "
                f"{one.limit:.3g}; subtract the largest entry first, as torch.softmax does.",
                {"largest": one.largest, "limit": one.limit},
            )


def detached(signals: Signals, found: list[Finding]) -> Iterable[Finding]:
    """What depends on weights, by differences, but has no gradient, or not the right one."""
    name, how = _cut(signals), ""
    if name and signals.severed:
        how = "is given values that depend on trainable weights, but no gradient leads back to them"
        if name not in signals.severed:
            how = "lets nothing of the gradient back, although its output depends on weights"
    elif name:
        how = "has weights that the output depends on, but that no gradient reaches"
    if name:
        lost = len(signals.unreached)
        more = f" ({lost} parameter{'s' * (lost != 1)} get no gradient)" if lost else ""
        yield Finding(
            "detached",
            name,
            f"{name} {how}{more}: look for detach(), torch.no_grad(), .data or .item() there.",
            {"parameters": float(lost)},
        )
        return
    wrong = [k for k, m in enumerate(signals.mismatch) if m > DIFFERENT]
    if wrong and signals.mismatch[-1] > DIFFERENT:
        k = wrong[0]
        one = signals.layers[k]
        yield Finding(
            "detached",
            one.layer,
            f"The gradient is not the derivative from {one.layer} on: small changes of the weights "
            f"move its output otherwise than the gradient says, by {signals.mismatch[k]:.0%}. Look "
            "for detach(), torch.no_grad() or a hand-written backward there.",
            {"difference": signals.mismatch[k]},
        )


def _cut(signals: Signals) -> str:
    """The module at which gradients end, or nothing."""
    ends = {one.title: one for one in signals.calls}
    if signals.severed:
        first = ends[signals.severed[0]]
        around = [c for c in signals.calls if c.begun < first.begun and c.ended > first.ended]
        before = [c for c in signals.calls if c.ended < first.begun and c.inside == first.inside]
        inner = around[-1].begun if around else 0
        before = [c for c in before if c.begun > inner]
        if before and before[-1].outputs and not before[-1].outputs[0].requires_grad:
            return before[-1].title
        return first.title
    if signals.unreached:
        modules = [name.rpartition(".")[0] for name in signals.unreached]
        order = {one.name: one.begun for one in signals.calls}
        return max(modules, key=lambda name: order.get(name, 0)) or signals.unreached[-1]
    return ""


def dead_units(signals: Signals, found: list[Finding]) -> Iterable[Finding]:
    """Half of the units or more are off for all samples, and more than chance explains."""
    if any(f.kind == "not finite" for f in found):
        return
    dead = []
    for one in signals.activations:
        if not one.one_sided or one.dead_share < HALF_OFF:
            continue
        chance = _chance(one)
        if chance < RARE or one.dead == one.units > 1:
            dead.append((one, chance))
    if not dead:
        return
    names = [*dict.fromkeys(one.module or "output" for one, _ in dead)]
    first = dead[0][0]
    more = f" (so it is in {len(names) - 1} others)" if len(names) > 1 else ""
    yield Finding(
        "dead units",
        names[0],
        f"{first.dead} of {first.units} units of {first.operation} in {names[0]} are off for all "
        f"samples{more}: their weights get no gradient, and those before them none through them.",
        {"dead": float(first.dead), "units": float(first.units)},
        fault=any(chance < RARE for _, chance in dead) or _blocked(signals),
        layers=tuple(names),
    )


def _chance(one: ActivationFacts) -> float:
    """How likely so many dead units are where nothing is wrong.

    Half of the units may be off where all samples are alike; but then as many are always on. Where
    samples differ, a unit is off for all of them as often as those that live are off for one.
    """
    alike = _tail(one.units, one.dead, HALF_OFF) if one.dead_share >= MOSTLY else 1.0
    uneven = _tail(one.dead + one.always, one.dead, 0.5)
    unlucky = _tail(one.units, one.dead, (1 - one.active) ** one.samples)
    return min(alike, max(uneven, unlucky))


def _tail(n: int, k: int, p: float) -> float:
    """The chance of k or more of n."""
    if n > 1000:  # by a normal distribution, which is close for so many
        spread = math.sqrt(max(n * p * (1 - p), 1e-300))
        return 0.5 * math.erfc((k - 0.5 - n * p) / spread / math.sqrt(2))
    return sum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k, n + 1))


def _blocked(signals: Signals) -> bool:
    return any(one.gradient == 0 for one in signals.layers)


def saturated(signals: Signals, found: list[Finding]) -> Iterable[Finding]:
    """An activation that is flat on both sides, with most of its entries on the flat parts."""
    for one in signals.activations:
        if one.one_sided or one.entries < 8 or one.flat_share < SATURATED:
            continue
        name = one.module or "output"
        what = "rows are certain of one entry" if one.operation == "softmax" else "entries are flat"
        yield Finding(
            "saturated",
            name,
            f"{one.flat_share:.0%} of the {one.operation} {what} in {name}: its slope there is "
            "below a thousandth of the largest, and gradients do not come through.",
            {"share": one.flat_share},
        )


def norm_hides(signals: Signals, found: list[Finding]) -> Iterable[Finding]:
    """A leaf that makes a signal of normal size from one that has almost died out."""
    for one in signals.calls:
        if not (one.leaf and 0 < one.rms_in < TINY_SIGNAL and one.finite_out):
            continue
        grown = one.rms_out / one.rms_in
        if grown < AMPLIFIED or any(len(p.shape) > 1 for p in one.module.parameters()):
            continue
        earlier = [c for c in signals.calls if c.leaf and c.ended < one.begun and c.rms_in > 0]
        if not earlier:  # the inputs are as small: nothing has died out
            continue
        worst = min(earlier, key=lambda c: c.rms_out / c.rms_in)
        yield Finding(
            "norm hides",
            one.title,
            f"{one.title} makes a signal of size {one.rms_out:.2g} out of {one.rms_in:.2g}, which "
            f"hides that it has died out before. The signal shrinks most in {worst.title}.",
            {"before": one.rms_in, "after": one.rms_out},
            layers=(one.title, worst.title),
        )
        return  # those after it would say the same


def frozen(signals: Signals, found: list[Finding]) -> Iterable[Finding]:
    """Modules with no trainable parameter, in a model that has some. A note: it may be meant."""
    still = [p.name for p in signals.parameters if not p.trainable]
    if not still:
        return
    if len(still) == len(signals.parameters):
        yield Finding("frozen", "", "No parameter of this model is trainable.", fault=False)
        return
    free = [p.name for p in signals.parameters if p.trainable]
    tops = [*dict.fromkeys(_top(name, free) for name in still)]
    listed = ", ".join(tops[:5]) + (f" and {len(tops) - 5} more" if len(tops) > 5 else "")
    yield Finding(
        "frozen",
        tops[0],
        f"{listed} {'is' if len(tops) == 1 else 'are'} frozen: requires_grad is False.",
        {"parameters": float(len(still))},
        fault=False,
        layers=tuple(tops),
    )


def unused(signals: Signals, found: list[Finding]) -> Iterable[Finding]:
    """Modules that are not called, and whose weights nothing depends on: a note."""
    if not signals.unused:
        return
    others = [p.name for p in signals.parameters if p.name not in signals.unused]
    tops = [*dict.fromkeys(_top(name, others) for name in signals.unused)]
    listed = ", ".join(tops[:5]) + (f" and {len(tops) - 5} more" if len(tops) > 5 else "")
    yield Finding(
        "unused",
        tops[0],
        f"{listed} {'is' if len(tops) == 1 else 'are'} not called on these inputs, and the output "
        "does not depend on the weights there: they are not trained.",
        {"parameters": float(len(signals.unused))},
        fault=False,
        layers=tuple(tops),
    )


def _top(name: str, others: list[str]) -> str:
    """The outermost module around a parameter that has none of the others in it."""
    words = name.split(".")
    for k in range(1, len(words)):
        prefix = ".".join(words[:k])
        if not any(other.startswith(prefix + ".") for other in others):
            return prefix
    return name


def small_step(signals: Signals, found: list[Finding]) -> Iterable[Finding]:
    """Layers that hardly move the state, and still do not after a step of Adam; or tiny updates."""
    weighty = {p.module for p in signals.parameters}
    # A step that rounding takes away has a gradient still; a branch that is switched off has none.
    trained = {p.module for p in signals.parameters if p.called and p.gradient}
    moves = [
        k
        for k, one in enumerate(signals.layers)
        if one.change >= 0
        and abs(one.identity - 1) < 0.05
        and _has_weights(one.parts, weighty if one.change else trained)
    ]
    after = signals.changes_after or [math.nan] * len(signals.layers)
    # What a step makes ten times larger is a scale that is learned, and soon large enough.
    slow = [
        k
        for k in moves
        if signals.layers[k].change < SMALL_CHANGE
        and not after[k] > max(10 * signals.layers[k].change, ROUNDED)
    ]
    others = [signals.layers[k].change for k in moves if k not in slow]
    total = sum(signals.layers[k].change for k in moves)
    if slow and (total < SMALL_TOTAL or (others and median(others) > 100 * SMALL_CHANGE)):
        one = signals.layers[slow[0]]
        names = tuple(dict.fromkeys(signals.layers[k].layer for k in slow))
        yield Finding(
            "small step",
            one.layer,
            f"{one.layer} changes its state by "
            + (f"a factor of {one.change:.1g} only" if one.change else "less than rounding does")
            + (f" (so do {len(names) - 1} others)" if len(names) > 1 else "")
            + ", and a step of the optimiser does not change that: it could as well be left out. "
            "Take a larger step or scale.",
            {"change": one.change, "after a step": after[slow[0]]},
            layers=names,
        )
    lost = [(name, share) for name, share, limit in signals.steps if share < limit]
    if lost and len(lost) >= 0.5 * len(signals.steps):
        name, share = min(lost, key=lambda pair: pair[1])
        yield Finding(
            "small step",
            name,
            f"A step of the optimiser changes {len(lost)} of {len(signals.steps)} parameters by "
            f"less than rounding does (by {share:.1g} of {name}): nothing is learned. Take a "
            "larger learning rate.",
            {"update": share},
            layers=tuple(name for name, _ in lost),
        )


def _has_weights(parts: tuple[str, ...], weighty: set[str]) -> bool:
    names = [part.partition(" (call")[0] for part in parts]
    return any(m == n or m.startswith(n + ".") for n in names for m in weighty)


def underflow(signals: Signals, found: list[Finding]) -> Iterable[Finding]:
    """In half precision: gradients or updates that are lost though float32 has them."""
    seen: dict[str, list[tuple[str, float]]] = {}
    for what, name, share in signals.rounding:
        seen.setdefault(what, []).append((name, share))
    for what, pairs in seen.items():
        name, share = max(pairs, key=lambda pair: pair[1])
        yield Finding(
            "underflow",
            name,
            f"In the precision of this model {share:.0%} of {what} {name} are lost to rounding "
            "that float32 keeps. Keep them in float32, or scale the loss.",
            {"share": share},
            layers=tuple(name for name, _ in pairs),
        )


Rule = Callable[[Signals, list[Finding]], Iterable[Finding]]
RULES: tuple[Rule, ...] = (
    not_finite,
    nan_risk,
    detached,
    dead_units,
    saturated,
    zero_gates,
    vanishing,
    exploding,
    missing_residual,
    norm_hides,
    small_step,
    underflow,
    frozen,
    unused,
)
