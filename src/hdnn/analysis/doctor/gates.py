"""Rules about weights that get no gradient at all: gates that are closed, for now or for good."""

from __future__ import annotations

from collections.abc import Iterable

from hdnn.analysis.doctor.finding import Finding
from hdnn.analysis.doctor.signals import ParameterSignals, Signals

MANY = 0.25  # of all parameters without a gradient are a fault, whatever the reason


def zero_gates(signals: Signals, found: list[Finding]) -> Iterable[Finding]:
    """Weights that are all 0 and close a branch: a fault if they do not open, or close the trunk.

    What a step of Adam opens is a usual start, such as a last projection of zeros.
    """
    if any(f.fault and f.kind in ("detached", "not finite") for f in found):
        return
    mine = [p for p in signals.parameters if p.trainable and p.called]
    closed = [p for p in mine if p.gradient == 0]
    stuck = [p for p in closed if not p.after]
    gates = [p for p in signals.parameters if p.called and p.norm == 0 and _closes(signals, p)]
    moving = [p for p in gates if p.trainable and p.gradient and not p.last]
    killed = [k for k, one in enumerate(signals.layers[: signals.body + 1]) if _zero(signals, k)]
    explained = any(f.fault and f.kind in ("dead units", "saturated") for f in found)
    if moving and killed and not stuck:
        p = moving[-1]
        yield Finding(
            "zero gate",
            p.module or p.name,
            f"{p.name} is 0 and nothing leads around it: no gradient reaches what comes before "
            "until it has moved. Start it at a value other than 0, or add a skip connection.",
        )
    elif moving:
        names = tuple(dict.fromkeys(p.module or p.name for p in moving))
        more = f" (and {len(moving) - 1} more)" if len(moving) > 1 else ""
        yield Finding(
            "zero gate",
            names[0],
            f"{moving[0].name}{more} starts at 0, so that its branch is closed; its own gradient "
            "is not 0 and opens it in the first step. This is a usual start.",
            {"parameters": float(len(moving))},
            fault=False,
            layers=names,
        )
    if stuck and not explained and not (killed and moving):
        yield from _stuck(signals, stuck, mine)


def _stuck(
    signals: Signals, stuck: list[ParameterSignals], mine: list[ParameterSignals]
) -> Iterable[Finding]:
    """Weights without any gradient, before and after a step: what closes them, if that is seen."""
    zeros = [p for p in signals.parameters if p.called and p.norm == 0 and _closes(signals, p)]
    order = {one.name: one.begun for one in signals.calls}
    matrices = [p for p in stuck if len(p.shape) > 1]
    silent = [one for one in signals.calls if one.leaf and one.rms_out == 0 and one.rms_in > 0]
    closed = [p.name for p in zeros if not p.gradient]
    closed += [
        name
        for name in signals.zero_buffers
        if any(p.name.startswith(name.rpartition(".")[0]) for p in stuck)
    ]
    figures, count = {"parameters": float(len(stuck))}, len(stuck)
    if closed:
        name = closed[-1]
        yield Finding(
            "zero gate",
            name.rpartition(".")[0] or name,
            f"{name} is 0 and stays so, since no gradient moves it: {count} "
            f"parameter{'s' * (count != 1)} of this branch are never trained.",
            figures,
        )
    elif silent and matrices:
        name = silent[0].title
        yield Finding(
            "zero gate",
            name,
            f"{name} gives 0 for all inputs, and {count} parameters get a gradient of exactly 0, "
            "before and after a step.",
            figures,
        )
    elif matrices:
        name = max((p.module for p in matrices), key=lambda m: order.get(m, 0))
        yield Finding(
            "no gradient",
            name or matrices[-1].name,
            f"{count} of {len(mine)} parameters, up to those of {name}, get a gradient of exactly "
            "0, before and after a step: these inputs do not need them, or a factor is 0.",
            figures,
            sure="likely",
            fault=count >= MANY * len(mine),
        )


def _closes(signals: Signals, p: ParameterSignals) -> bool:
    """Whether a parameter of zeros makes what its module gives 0, as a bias does not."""
    calls = [one for one in signals.calls if one.name == p.module]
    if "bias" in p.name.rpartition(".")[2]:
        return False
    if any(one.leaf for one in calls):
        return all(one.rms_out == 0 for one in calls)
    return len(p.shape) <= 3


def _zero(signals: Signals, k: int) -> bool:
    one = signals.layers[k]
    return one.gradient == 0 and k < signals.body
