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

    Made by `diagnose`. Print it to read it; `plot()` draws the singular values against depth.

    Attributes:
        model: the kind of module.
        findings: every `Finding`, faults and notes.
        layers: the states y_j on the way through the model, each with its name and singular
            values: `largest` and `smallest` of dy_N/dy_j, `own_largest` and `own_smallest` of the
            layer alone.
        body: which of them is y_N: what comes after it is the head.
        unknown: what could not be computed.
        samples: how many were looked at.
        seconds: how long it took.

    Examples:
        >>> import hdnn, torch
        >>> found = hdnn.diagnose(hdnn.H2(features=4, layers=8), torch.randn(8, 4))
        >>> found.healthy, found.faults
        (True, ())
        >>> print(found)
        H2: no fault was found, gradients reach every layer...
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
        """The findings that say that something is wrong."""
        return tuple(one for one in self.findings if one.fault)

    @property
    def notes(self) -> tuple[Finding, ...]:
        """The findings that are worth knowing and may well be meant."""
        return tuple(one for one in self.findings if not one.fault)

    @property
    def healthy(self) -> bool:
        """True only if no fault was found and nothing is unknown."""
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
        """All of it as plain values, for JSON."""
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
        """Draw the singular values against depth, with the layers at fault marked."""
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
