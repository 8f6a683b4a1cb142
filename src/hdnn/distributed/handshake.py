"""Before any work: do all parts mean the same training? They compare fingerprints.

A fingerprint has one size whatever goes in, so that it can always be read: a message of another
size than expected would be cut off in silence, or end the process.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

import hdnn
from hdnn.distributed.plan import Plan
from hdnn.distributed.transport import DistributedError, Transport

PROTOCOL = 1
SLOTS = 16
WORDS = {
    "protocol": "protocol of messages",
    "version": "version of hdnn",
    "graph": "graph or another share-out of its nodes",
    "network": "network",
    "layers": "number of layers",
    "dtype": "dtype",
    "batch": "batch size",
    "samples": "number of samples",
    "options": "options of training",
}


def fingerprint(plan: Plan, facts: dict[str, Any]) -> Tensor:
    """Numbers that differ where the facts do."""
    known = {"protocol": PROTOCOL, "version": hdnn.__version__, "graph": plan.digest(), **facts}
    numbers = torch.zeros(SLOTS, dtype=torch.int64)
    for k, name in enumerate(WORDS):
        digest = hashlib.sha256(repr(known.get(name)).encode()).digest()
        numbers[k] = int.from_bytes(digest[:8], "big", signed=True)
    return numbers


def shake_hands(transport: Transport, plan: Plan, facts: dict[str, Any], name: Any) -> None:
    """Open all links, compare fingerprints, and raise where a neighbour has another one."""
    own = fingerprint(plan, facts)
    # Before links are opened: who has another graph would wait for one that has nothing to say.
    first = transport.first(own.tolist())
    if first is not None:
        _compare(transport, own.tolist(), *first, name)
    received = [(peer, torch.empty_like(own)) for peer in plan.peers(transport.part)]
    transport.exchange([(peer, own) for peer, _ in received], received)
    for peer, theirs in received:
        _compare(transport, own.tolist(), peer, theirs.tolist(), name)


def _compare(transport: Transport, own: list[int], part: int, theirs: list[int], name: Any) -> None:
    different = [word for word, a, b in zip(WORDS.values(), own, theirs, strict=False) if a != b]
    if different:
        what = " and another ".join(different)
        message = (
            f"{name(part)} has another {what} than {name(transport.part)}: "
            "start all parts with the same"
        )
        first = transport.report(message)
        raise DistributedError(f"the training did not start because {first}.")
