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

    Attributes:
        kind: such as "vanishing", "exploding", "dead units", "saturated" or "detached".
        layer: the module or parameter where it is.
        sentence: what is wrong, and what to do about it.
        figures: the numbers behind the sentence.
        sure: "measured" where the figures are the statement, "likely" where it explains them.
        fault: whether something is wrong; what is not a fault is worth knowing and may be meant.
        layers: all layers that it holds for, if they are several.

    Examples:
        >>> import hdnn, torch
        >>> from torch import nn
        >>> layers = [nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()) for _ in range(12)]
        >>> fault, = hdnn.diagnose(nn.Sequential(*layers), torch.randn(8, 4)).faults
        >>> fault.kind, fault.sure
        ('vanishing', 'measured')
        >>> print(fault)
        FAULT: The gradient vanishes: ...
    """

    kind: str
    layer: str
    sentence: str
    figures: dict[str, float] = field(default_factory=dict)
    sure: str = "measured"
    fault: bool = True
    layers: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values, for JSON."""
        return {**asdict(self), "layers": list(self.layers)}

    def __str__(self) -> str:
        return f"{'FAULT' if self.fault else 'note'}: {self.sentence}"
