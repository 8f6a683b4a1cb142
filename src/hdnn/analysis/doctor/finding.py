"""One thing that was found in a model."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

KINDS = (
    "vanishing",
    "exploding",
    "missing residual",
    "dead units",
    "saturated",
    "detached",
    "zero gate",
    "norm hides",
    "frozen",
    "not finite",
    "nan risk",
    "underflow",
    "small step",
    "no gradient",
    "unused",
)


@dataclass(frozen=True)
class Finding:
    """What was found, where, in a sentence, with the figures behind it.

    `kind` is one of `KINDS`. `fault` says whether something is wrong; what is not a fault is worth
    knowing and may well be meant. `sure` is "measured" where the figures are the statement, and
    "likely" where they are explained by it.
    """

    kind: str
    layer: str
    sentence: str
    figures: dict[str, float] = field(default_factory=dict)
    sure: str = "measured"
    fault: bool = True
    layers: tuple[str, ...] = ()  # all layers that it holds for, if they are several

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {**asdict(self), "layers": list(self.layers)}

    def __str__(self) -> str:
        return f"{'FAULT' if self.fault else 'note'}: {self.sentence}"
