"""How many cores there are for this process."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path

LIMIT = Path("/sys/fs/cgroup/cpu.max")  # of a container on Linux: microseconds, and in how many


def cores() -> int:
    """The cores of this machine, or as many of them as this process may use."""
    count = os.cpu_count() or 1
    with suppress(AttributeError, OSError):  # only Linux tells
        count = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):
        allowed, period = LIMIT.read_text().split()
        count = min(count, max(1, math.ceil(int(allowed) / int(period))))  # ValueError: "max"
    return count
