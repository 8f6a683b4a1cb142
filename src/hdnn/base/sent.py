"""Which dataclasses may be sent to another process. `hdnn.base.portable` sends them, by PyTorch."""

from __future__ import annotations

from typing import TypeVar

C = TypeVar("C", bound=type)

classes: dict[str, type] = {}


def portable(kind: C) -> C:
    """Let instances of a dataclass be sent; all processes must have registered it."""
    classes[kind.__name__] = kind
    return kind
