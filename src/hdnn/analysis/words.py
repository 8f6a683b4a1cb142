"""What a certificate says in plain words, the same wherever it is shown.

The theorem is about a matrix: norm(dy_N/dy_j) >= 1 says that some direction of the gradient keeps
at least its size on the way back to layer j. It does not say that no single gradient can shrink.
Certificates come as they are written to JSON; those of older versions have fewer entries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

KEPT = "some direction of the gradient keeps at least its full size"
LINEAR = 1e-3  # of how much outputs vary: a network this near to a linear one counts as such
NO_PROMISE = "Nothing is promised for this network, it was only measured"


def summary(told: Mapping[str, Any]) -> str:
    """What a certificate says, in a sentence; a network that is linear is said to be in another."""
    return " ".join(filter(None, (linear_text(told), _gradients(told))))


def summary_of_parts(parts: Sequence[Mapping[str, Any]], nothing: str = "") -> str:
    """The same for the Hamiltonian parts of a network, first to last."""
    if len(parts) < 2:
        return summary(parts[0]) if parts else sentence(nothing or "there is no certificate")
    named = [(f"Part {k}", part) for k, part in enumerate(parts, 1)]
    found = summary_of_several(named, "Hamiltonian parts")
    return f"{found} Of what lies between the parts nothing is said."


def summary_of_several(named: Sequence[tuple[str, Mapping[str, Any]]], what: str) -> str:
    """The same for several networks by name: those that need no words of their own come first."""
    fine = [told for _, told in named if state(told) == "holds" and not told.get("linear")]
    found = []
    if fine:
        norms = [number(told.get("smallest_norm")) for told in fine]
        least = _held(min((norm for norm in norms if norm is not None), default=None))
        many = "each" if len(fine) == len(named) else str(len(fine))
        found.append(
            f"In {many} of the {len(named)} {what}, from every layer on, {KEPT}: the smallest "
            f"norm measured is {least}."
        )
    found += [f"{name}: {summary(told)}" for name, told in named if told not in fine]
    return " ".join(found)


def state(told: Mapping[str, Any]) -> str:
    """ "broken", "not computed", "holds" or "not guaranteed"; nothing else counts as holding."""
    holds, guaranteed = told.get("holds"), told.get("guaranteed")
    if told.get("broken") or holds is False:
        return "broken"
    if told.get("unknown") or (guaranteed is True and holds is not True):
        return "not computed"
    if guaranteed is True:
        return "holds"
    return "not computed" if number(told.get("smallest_norm")) is None else "not guaranteed"


def linear_text(told: Mapping[str, Any]) -> str:
    """That a network is linear, if it is known to be; otherwise nothing."""
    if told.get("linear") is not True:
        return ""
    does = "pass their input on"
    if told.get("idle") is not True:
        does = "act as one and the same matrix"
    return (
        f"The network is linear, to within {LINEAR:.1%} at {where(told)}: its layers {does}. "
        "A linear model would do the same."
    )


def _gradients(told: Mapping[str, Any]) -> str:
    norm = number(told.get("smallest_norm"))
    match state(told):
        case "broken":
            return f"A GUARANTEE DOES NOT HOLD HERE: {_broken(told, norm)}."
        case "not computed":
            return f"It is NOT KNOWN whether the gradient keeps its size: {_unknown(told)}."
        case "holds":
            return f"From every layer on, {KEPT}: the smallest norm measured is {_held(norm)}."
    if norm is not None and norm >= 1 - 1e-9:
        seen = f"some direction of the gradient kept at least its full size at {where(told)}"
        return f"{NO_PROMISE}: {seen}, and the smallest norm is {_text(norm)}."
    among = where(told) if told.get("samples") == 1 else f"one or more of {where(told)}"
    seen = f"the gradient shrinks in every direction at {among}"
    return f"{NO_PROMISE}: {seen}, and the smallest norm is {_text(norm)}."


def _broken(told: Mapping[str, Any], norm: float | None) -> str:
    if told.get("holds") is False:
        return f"the smallest norm measured is {_text(norm)}, where at least 1 is promised"
    return "; ".join(map(str, told.get("broken") or ()))


def _unknown(told: Mapping[str, Any]) -> str:
    samples, computed = number(told.get("samples")), number(told.get("computed"))
    if samples is not None and computed is not None and computed < samples:
        of = "all" if computed == 0 else f"{samples - computed:g} of"
        why = told.get("trouble") or "something is not finite"
        return f"the norms could not be computed at {of} {samples:g} points, because {why}"
    return str(told.get("unknown") or "the norms could not be computed")


def where(told: Mapping[str, Any]) -> str:
    """The points that were looked at, in words."""
    samples = number(told.get("samples"))
    points = str(told.get("points") or "points").partition(",")[0]
    if samples is None:
        return f"the {points}"
    return f"one of the {points}" if samples == 1 else f"{samples:g} {points}"


def sentence(text: str) -> str:
    """Text with a capital and a full stop."""
    text = text.strip().rstrip(".")
    return f"{text[:1].upper()}{text[1:]}."


def at_least_text(norm: float, digits: int = 3) -> str:
    """A few digits, rounded down: what is printed as 1 is at least 1, up to rounding."""
    norm = norm * (1 + 1e-12)
    if not (math.isfinite(norm) and norm > 0):
        return f"{norm:g}"
    unit = 10.0 ** (math.floor(math.log10(norm)) - digits + 1)
    return f"{math.floor(norm / unit * (1 + 1e-15)) * unit:.{digits}g}" if unit > 0 else "0"


def _text(norm: float | None) -> str:
    return "beyond float64" if norm is None or norm == math.inf else at_least_text(norm)


def _held(norm: float | None) -> str:
    """The smallest norm where the promise was found to hold: below 1 it is so by rounding only."""
    return "1, up to rounding" if norm is not None and norm < 1 - 1e-12 else _text(norm)


def number(value: Any) -> float | None:
    """A number, if it is one: files may hold anything."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return None if math.isnan(value) else float(value)
    except OverflowError:
        return None
