"""How much memory there is, so that what cannot fit is refused before it is allocated."""

from __future__ import annotations

import os
from pathlib import Path

from hdnn.errors import OptionError

LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def total_bytes() -> float:
    """The memory of this machine, or of its container, in bytes; infinite if unknown."""
    try:
        whole = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):  # pragma: no cover - not on this system
        whole = float("inf")
    for file in LIMITS:
        try:
            whole = min(whole, float(Path(file).read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return whole


def check_memory(needed: float, what: str, less: str) -> None:
    """Raise an error for what does not fit into memory: the system would kill the process."""
    most = total_bytes()
    if needed > most:
        raise OptionError(
            f"{what} need about {_gib(needed)}, but this machine has {_gib(most)}; "
            f"take fewer {less}."
        )


def _gib(count: float) -> str:
    size = count / 2**30
    return f"{size:.3g} GiB" if not 100 <= size < 1e6 else f"{size:.0f} GiB"
