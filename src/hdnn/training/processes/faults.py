"""What went wrong first, in a store that processes share: all of them report the same fault."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

KEY = "fault"  # where the store keeps it


class Fault(NamedTuple):
    """What went wrong first; `lost` if all that is known is that a process is gone or silent."""

    text: str
    lost: bool = False


def first_fault(store: Any) -> Fault | None:
    """What went wrong first, if anything did."""
    if not store.check([KEY]):
        return None
    return Fault(*json.loads(store.get(KEY)))


def report_fault(store: Any, fault: Fault) -> Fault:
    """Make a fault known, unless another one came first; that is returned."""
    return Fault(*json.loads(store.compare_set(KEY, "", json.dumps(fault))))
