"""The runs of one folder of seeds, asked together: all of them are certified."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hdnn.analysis import Certificate
from hdnn.analysis.image_certificate import Certificates, Several
from hdnn.analysis.words import summary_of_several
from hdnn.app import results, terminal


@dataclass(frozen=True)
class RunCertificates(Several):
    """The certificates of several runs, by the names of their folders."""

    of: dict[str, Certificate | Certificates]

    def named(self) -> list[tuple[str, Certificate]]:
        """Each certificate with its run; a classifier of images has one for each unit."""
        found = []
        for run, one in self.of.items():
            parts = one.parts if isinstance(one, Certificates) else (one,)
            found += [(run, part) for part in parts]
        return found

    @property
    def smallest(self) -> tuple[float, str] | None:
        """The smallest norm of all runs, and whose it is."""
        known = [(part.smallest_norm, run) for run, part in self.named()]
        return min((one for one in known if not math.isnan(one[0])), default=None)

    @property
    def summary(self) -> str:
        """What they say in plain words."""
        named = [(run, part.to_dict()) for run, part in self.named()]
        what = "runs" if len(named) == len(self.of) else "Hamiltonian parts of all runs"
        return summary_of_several(named, what) or "No run has Hamiltonian layers: no guarantee."

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        smallest = self.smallest
        return {
            "summary": self.summary,
            "smallest_norm": None if smallest is None else smallest[0],
            "smallest_in": None if smallest is None else smallest[1],
            "broken": list(self.broken),
            "unknown": self.unknown,
            "runs": {run: one.to_dict() for run, one in self.of.items()},
        }

    def __str__(self) -> str:
        rows = [(run, results.smallest_text(part.to_dict())) for run, part in self.named()]
        if (smallest := self.smallest) is not None:
            norm, run = smallest
            rows.append(("of all", f"smallest {results.rounded_down(norm)}, in {run}"))
        if self.broken:
            rows.append(("verdict", "BROKEN: " + "; ".join(self.broken)))
        elif self.unknown:
            rows.append(("verdict", f"COULD NOT BE COMPUTED: {self.unknown}"))
        elif all(part.guaranteed for _, part in self.named()) and self.named():
            rows.append(("verdict", f"guaranteed for all {len(self.of)} runs, and it holds"))
        else:
            rows.append(("verdict", "not all runs have a guarantee"))
        return f"{self.summary}\n\n{terminal.rows_text(rows)}"
