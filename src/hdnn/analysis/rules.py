"""The doctor's rules: vanishing, exploding, dead, saturated, detached, unused, not finite.

A rule is a function of an `Examination`, which holds all measurements of a model on some inputs.
The thresholds suit models of any kind: they ignore values that are unusual but harmless.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median

import torch
from torch.distributions import Binomial

from hdnn.analysis.modules import JSONResult

VANISHED = 1e-4
SHRUNK = 1e-2  # no gain above this counts as vanished
FAINT = 1e-3  # a state this small has died out, in any units of inputs
EXPLODED = 1e3
GROWN = 100.0  # states that grow by so much, and to so much, explode with the gradient
DEAD = 0.5  # of the units of a healthy layer of ReLU can be off for all samples
MOSTLY_DEAD = 0.85
RARE = 1e-4  # how unlikely so many dead units must be by chance
SATURATED = 0.8


@dataclass(frozen=True)
class Finding(JSONResult):
    """A fault or a note: where it is, a sentence that describes it, and its figures.

    Attributes:
        kind: "vanishing", "exploding", "dead units", "saturated", "detached", "unused" or "not
            finite".
        layer: the module concerned.
        sentence: the description in words.
        figures: the numbers behind the sentence.
        fault: False for a note, which may describe something intended.
        layers: all layers concerned.
    """

    kind: str
    layer: str
    sentence: str
    figures: dict[str, float] = field(default_factory=dict)
    fault: bool = True
    layers: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{'FAULT' if self.fault else 'note'}: {self.sentence}"


@dataclass
class LayerGain:
    """A state y_j inside a model, and the share of a random gradient that reaches this state.

    Attributes:
        layer: the module that makes the state.
        size: the norm of the state.
        rms: the root of the mean square of its entries.
        gain: the size of the gradient at y_j, if its size at y_N is 1.
        own: the share of the gradient at y_j that the layer passes on to y_{j-1}.
    """

    layer: str
    size: float
    rms: float
    gain: float
    own: float = 1.0


@dataclass
class ActivationCount:
    """The flat units and entries of an activation inside a module."""

    module: str
    operation: str
    one_sided: bool = False
    entries: int = 0
    flat: int = 0
    samples: int = 0
    units: int = 0
    dead: int = 0  # units that are flat for all samples
    always: int = 0  # units that are flat for none
    active: float = 0.0  # the share of samples where other units are not flat


@dataclass
class Examination:
    """All measurements of a model on some inputs.

    Attributes:
        layers: the states up to y_N, which enters the head.
        activations: the flat units and entries of each activation.
        not_finite: the first module that turns finite inputs into NaN or infinity.
        bad_gradient: the last state whose gradient is not finite.
        detached: modules that cut the gradient off.
        blocked: modules whose weights affect the output, but have a gradient of 0.
        unused: parameters that nothing depends on.
        unknown: questions that could not be decided.
    """

    layers: list[LayerGain] = field(default_factory=list)
    activations: list[ActivationCount] = field(default_factory=list)
    not_finite: str = ""
    bad_gradient: str = ""
    detached: list[str] = field(default_factory=list)
    blocked: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def judge(seen: Examination) -> list[Finding]:
    """All findings, faults first."""
    findings = [*not_finite(seen)]
    if not findings:
        for rule in (detached, dead, saturated, vanishing, exploding, unused):
            findings += rule(seen)
    if not any(finding.fault for finding in findings):
        findings += blocked(seen)
    return sorted(findings, key=lambda finding: not finding.fault)


def not_finite(seen: Examination) -> Iterator[Finding]:
    if seen.not_finite:
        yield Finding(
            "not finite",
            seen.not_finite,
            f"{seen.not_finite} turns finite inputs into NaN or infinity; nothing after it can be "
            "trained.",
        )
    elif seen.bad_gradient:
        yield Finding(
            "not finite",
            seen.bad_gradient,
            "The output is finite, but the gradient becomes NaN or infinite on its way back "
            f"through {seen.bad_gradient}: a root, a norm or a division at zero does this.",
        )


def detached(seen: Examination) -> Iterator[Finding]:
    if seen.detached:
        name = seen.detached[-1]
        yield Finding(
            "detached",
            name,
            f"The output depends on weights at {name} or before, but no gradient flows back to "
            "them: look for detach(), no_grad(), .data or argmax there.",
            layers=tuple(seen.detached),
        )


def blocked(seen: Examination) -> Iterator[Finding]:
    """Report gradients of 0 that nothing else explains."""
    if seen.blocked:
        name = seen.blocked[0]
        yield Finding(
            "detached",
            name,
            f"The output depends on the weights of {name}, but their gradient is 0: look for "
            "rounding, signs, comparisons or a wrong backward() behind it.",
            layers=tuple(seen.blocked),
        )


def dead(seen: Examination) -> Iterator[Finding]:
    counts = [a for a in seen.activations if a.one_sided and _is_dead(a)]
    if not counts:
        return
    first = counts[0]
    layers = tuple(dict.fromkeys(count.module for count in counts))
    others = len(layers) - 1
    more = f" (and so in {others} other layers)" if others else ""
    yield Finding(
        "dead units",
        first.module,
        f"{first.dead} of {first.units} units of {first.operation} in {first.module} are off for "
        f"all samples{more}: no gradient passes through them.",
        {"dead": float(first.dead), "units": float(first.units)},
        layers=layers,
    )


def _is_dead(a: ActivationCount) -> bool:
    """True if half of the units or more are dead, and more than chance explains.

    If all samples are alike, half of the units may be off, but then as many are always on. If
    samples differ, chance turns a unit off for every sample as often as live units are off for one
    sample.
    """
    if a.dead < DEAD * a.units:
        return False
    alike = 1.0
    if a.dead >= MOSTLY_DEAD * a.units:
        alike = _tail(a.units, a.dead, DEAD)
    uneven = _tail(a.dead + a.always, a.dead, 0.5)
    unlucky = _tail(a.units, a.dead, (1 - a.active) ** a.samples)
    return min(alike, max(uneven, unlucky)) < RARE


def _tail(n: int, k: int, p: float) -> float:
    """The probability of k or more of n."""
    counts = torch.arange(k, n + 1, dtype=torch.float64)
    probability = torch.tensor(p, dtype=torch.float64)
    return float(Binomial(n, probability).log_prob(counts).exp().sum())


def saturated(seen: Examination) -> Iterator[Finding]:
    for a in seen.activations:
        if a.one_sided or a.entries < 8 or a.flat < SATURATED * a.entries:
            continue
        share = a.flat / a.entries
        yield Finding(
            "saturated",
            a.module,
            f"{share:.0%} of the {a.operation} in {a.module} lie where it is flat, so gradients do "
            "not pass through.",
            {"share": share},
        )


def vanishing(seen: Examination) -> Iterator[Finding]:
    """Judge the gradient in units of the states, so that the scale of inputs is no fault."""
    if not seen.layers:
        return
    last = seen.layers[-1]
    for k, state in enumerate(seen.layers[:-1]):
        relative = state.gain * _ratio(state.size, last.size)
        faint = state.gain < VANISHED and last.rms < FAINT
        if faint or (relative < VANISHED and state.gain < SHRUNK):
            yield _vanished(seen.layers[k + 1 :], state)
            return


def _vanished(between: list[LayerGain], first: LayerGain) -> Finding:
    """The layers that shrink gradients: a single layer that stands out, or all that contribute."""
    logs = [math.log(min(max(layer.own, 1e-300), 1.0)) for layer in between]
    worst = min(logs)
    blamed = [between[logs.index(worst)]]
    if worst > 0.5 * sum(logs):
        pairs = zip(between, logs, strict=True)
        blamed = [layer for layer, log in pairs if log <= 0.5 * worst]
    rate = median(layer.own for layer in blamed)
    names = list(dict.fromkeys(layer.layer for layer in blamed))
    where = f"{names[0]} passes on"
    if len(names) > 1:
        where = f"each of {len(names)} layers from {names[0]} to {names[-1]} passes on"
    return Finding(
        "vanishing",
        names[0],
        f"The gradient vanishes: {where} {_few(rate)} of it, and {_few(first.gain)} of it is left "
        f"at {first.layer}.",
        {"left": first.gain, "a layer": rate},
        layers=tuple(names),
    )


def exploding(seen: Examination) -> Iterator[Finding]:
    if not seen.layers:
        return
    last = seen.layers[-1]
    for k, state in enumerate(seen.layers[:-1]):
        grown = last.rms > GROWN * max(state.rms, 1.0)
        relative = state.gain * _ratio(state.size, last.size)
        if state.gain > EXPLODED and (grown or relative > EXPLODED):
            between = seen.layers[k + 1 :]
            most = max(between, key=lambda layer: layer.own)
            yield Finding(
                "exploding",
                most.layer,
                f"The gradient explodes: {most.layer} multiplies it by {most.own:.3g}; in total it "
                f"grows by a factor of {state.gain:.2g} on the way back to {state.layer}. Use "
                "smaller weights or a normalisation there.",
                {"in all": state.gain, "a layer": most.own},
                layers=tuple(layer.layer for layer in between if layer.own > 1),
            )
            return


def unused(seen: Examination) -> Iterator[Finding]:
    if not seen.unused:
        return
    modules = [name.rpartition(".")[0] or name for name in seen.unused]
    layers = list(dict.fromkeys(modules))
    more = " and more" if len(layers) > 5 else ""
    yield Finding(
        "unused",
        layers[0],
        f"{', '.join(layers[:5])}{more}: not called on these inputs; the output ignores them.",
        {"parameters": float(len(seen.unused))},
        fault=False,
        layers=tuple(layers),
    )


def _ratio(a: float, b: float) -> float:
    return a / b if b > 0 else math.inf


def _few(value: float) -> str:
    return "nothing" if value == 0 else f"{value:.2g}"
