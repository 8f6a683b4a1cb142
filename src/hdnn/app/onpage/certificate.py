"""A certificate as the page shows it: a sentence, numbers, and theorems behind a fold."""

from __future__ import annotations

from typing import Any

from hdnn.analysis import words
from hdnn.app.onpage.values import dicts, entry, listed, number, text
from hdnn.app.svg_curves import BLUE, GREEN, RED, Curve, Line, curve

STATES = {"holds": "holds", "broken": "broken", "not computed": "unknown"}


class CertificateOnPage:
    """A certificate as it was written to the metrics of a run; `unit` names the part it is for."""

    def __init__(self, given: dict[str, Any], unit: str) -> None:
        self.given = given
        self.unit = unit
        self.smallest = number(given.get("smallest_norm"))
        self.samples = text(given.get("samples"))
        self.state = words.state(given)
        self.verdict = STATES.get(self.state, "none")
        self.why = str(given.get("guarantee", ""))
        if self.verdict == "unknown":
            self.why = str(given.get("unknown") or "nothing is known")

    @property
    def summary(self) -> str:
        return words.summary(self.given)

    @property
    def linear(self) -> bool:
        return self.given.get("linear") is True

    @property
    def numbers(self) -> str:
        """Smallest and largest norm, and where they were measured."""
        largest = text(self.given.get("largest_norm")) or "beyond float64"
        where = words.where(self.given)
        least = "unknown" if self.smallest is None else words.at_least_text(self.smallest, 6)
        return f"Norms from {least} to {largest}, over all layers and {where}."

    @property
    def sentences(self) -> list[str]:
        """The theorem, whether it is symplectic, and its bounds."""
        found = []
        theorem = self.given.get("theorem")
        if theorem and theorem != "none":
            found.append(f"Theorem: {theorem}")
        defect = number(self.given.get("symplectic_defect"))
        if defect is not None:
            symplectic = self.given.get("symplectic")
            word = "yes" if symplectic is True else "NO" if symplectic is False else "not promised"
            found.append(
                f"Symplectic: {word}, norm(Phi^T J Phi - J) is up to {defect:.1e}, relative"
            )
        texts = [str(bound["text"]) for bound in dicts(self.given, "bounds") if bound.get("text")]
        return found + [text[0].upper() + text[1:] for text in texts]

    @property
    def ranges(self) -> list[list[str]]:
        """Smallest and largest norm of several layers each."""
        return [
            [
                " to ".join(dict.fromkeys(text(part.get(end)) for end in ("from", "to"))),
                text(part.get("smallest")),
                text(part.get("largest")),
            ]
            for part in dicts(self.given, "ranges")
        ]

    @property
    def norms(self) -> Curve | None:
        """The norms of dy_N/dy_j against j."""
        by_layer = entry(self.given, "by_layer")
        names = {"largest": (RED, "6 4"), "median": (BLUE, ""), "smallest": (GREEN, "8 3 2 3")}
        layers = [number(j) for j in listed(by_layer, "layers")]
        x = [j for j in layers if j is not None]
        lines = []
        for name, (colour, dash) in names.items():
            y = [number(norm) for norm in listed(by_layer, name)]
            if x and len(x) == len(layers) == len(y):
                lines.append(Line(name, x, y, colour, dash))
        return curve(lines, "layer j", level=1.0) if lines else None


def certificates(metrics: dict[str, Any]) -> list[CertificateOnPage]:
    """The certificates of a run: one, or one for each Hamiltonian part of an image classifier."""
    several, one = dicts(metrics, "certificates"), metrics.get("certificate")
    if not several:
        several = [one] if isinstance(one, dict) and one else []
    units = [f"Unit {k}. " if len(several) > 1 else "" for k in range(1, len(several) + 1)]
    return [CertificateOnPage(one, unit) for one, unit in zip(several, units, strict=True)]
