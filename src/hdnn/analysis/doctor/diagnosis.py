"""What the doctor says of a model: findings, singular values by layer, and what is not known."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hdnn import plotting
from hdnn.analysis.doctor.finding import Finding
from hdnn.base.files import finite

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class LayerGains:
    """Singular values at one layer j: of dy_N/dy_j and of its own dy_j/dy_{j-1}, where known.

    `largest` and `own_largest` are lower bounds that are close, `smallest` and `own_smallest` upper
    bounds. NaN where they were not computed.
    """

    layer: str
    largest: float
    smallest: float
    own_largest: float
    own_smallest: float
    rms: float
    gradient: float


@dataclass(frozen=True)
class Diagnosis:
    """What was found in a model at some inputs.

    `healthy` is True only if no fault was found and nothing is unknown.
    """

    model: str
    findings: tuple[Finding, ...]
    layers: tuple[LayerGains, ...] = ()
    body: int = 0
    unknown: tuple[str, ...] = ()
    samples: int = 0
    seconds: float = field(default=0.0, compare=False)

    @property
    def faults(self) -> tuple[Finding, ...]:
        return tuple(one for one in self.findings if one.fault)

    @property
    def notes(self) -> tuple[Finding, ...]:
        return tuple(one for one in self.findings if not one.fault)

    @property
    def healthy(self) -> bool:
        return not self.faults and not self.unknown

    @property
    def summary(self) -> str:
        """The result in a sentence."""
        count = len(self.faults)
        if count:
            where = ", ".join(dict.fromkeys(f"{f.kind} at {f.layer}" for f in self.faults))
            return f"{self.model}: {count} fault{'s' * (count != 1)} found: {where}."
        if self.unknown:
            return f"{self.model}: no fault was found, but NOT EVERYTHING COULD BE COMPUTED."
        return f"{self.model}: no fault was found, gradients reach every layer."

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {
            "model": self.model,
            "healthy": self.healthy,
            "summary": self.summary,
            "findings": [one.to_dict() for one in self.findings],
            "unknown": list(self.unknown),
            "layers": [dict(vars(one)) for one in self.layers],
            "samples": self.samples,
            "seconds": self.seconds,
        }

    def to_json(self) -> str:
        """One JSON object; a number that is not finite is null."""
        return json.dumps(finite(self.to_dict()), indent=2)

    def plot(self, ax: Axes | None = None) -> Axes:
        """The singular values against depth, with the layers at fault marked."""
        return plotting.diagnosis_gains(self, ax)

    def __str__(self) -> str:
        lines = [self.summary, *map(str, self.findings)]
        lines += [f"NOT KNOWN: {one}." for one in self.unknown]
        known = [one for one in self.layers if one.largest == one.largest]
        if known:
            width = min(max(len(one.layer) for one in known), 40)
            lines += ["", f"{'layer j':<{width}} {'largest':>10} {'smallest':>10}   of dy_N/dy_j"]
            lines += [
                f"{one.layer[-width:]:<{width}} {one.largest:>10.3g} {one.smallest:>10.3g}"
                for one in known
            ]
        return "\n".join(lines)
