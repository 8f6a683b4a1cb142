"""Old names that the program still imports."""  # until app is rewritten

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hdnn.analysis.certificate import Certificate, certify


class Several:
    def named(self) -> list[tuple[str, Certificate]]:
        return []

    @property
    def broken(self) -> tuple[str, ...]:
        return tuple(word for _, part in self.named() for word in part.violations)

    @property
    def unknown(self) -> str:
        return "; ".join(part.trouble for _, part in self.named() if part.trouble)


@dataclass(frozen=True)
class Certificates(Several):
    joined: Certificate

    @property
    def parts(self) -> tuple[Certificate, ...]:
        return tuple(self.joined.parts.values())

    def named(self) -> list[tuple[str, Certificate]]:
        return [("", part) for part in self.parts]

    @property
    def nothing(self) -> str:
        return "" if self.parts else self.joined.summary

    def to_dict(self) -> dict[str, Any]:
        parts = [{**part.to_dict(), "guarantee": part.reason} for part in self.parts]
        return {"summary": self.joined.summary, "certificates": parts}

    def __str__(self) -> str:
        return str(self.joined)


def certify_images(model: Any, x: Any = None, **options: Any) -> Certificates:
    return Certificates(certify(model, x, **options))
