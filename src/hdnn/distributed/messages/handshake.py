"""Before any work, all parts compare fingerprints: do they run the same training?

A fingerprint always has the same size, so that it can be read: a message of another
size than expected would be cut off in silence, or end the process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hdnn._version import __version__
from hdnn.distributed.graph.plan import Plan
from hdnn.distributed.transport import DistributedError, Transport

PROTOCOL = 2
SLOTS = 16
RELEASE = ".".join(torch.__version__.split(".")[:2])  # shuffles may differ between releases
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
    "torch": "release of PyTorch",
    "data": "data set",
    "order": "order of samples",
    "test": "number of test samples",
    "init": "way to draw initial weights",
}


def fingerprint(plan: Plan, facts: dict[str, Any]) -> Tensor:
    """Numbers that differ where the facts do."""
    known = {"protocol": PROTOCOL, "version": __version__, "torch": RELEASE}
    known |= {"graph": plan.digest(), **facts}
    numbers = torch.zeros(SLOTS, dtype=torch.int64)
    for k, name in enumerate(WORDS):
        digest = hashlib.sha256(repr(known.get(name)).encode()).digest()
        numbers[k] = int.from_bytes(digest[:8], "big", signed=True)
    return numbers


def shake_hands(
    transport: Transport, plan: Plan, facts: dict[str, Any], name: Callable[[int], str]
) -> None:
    """Open all links, compare fingerprints, and raise if another part has a different one."""
    own = fingerprint(plan, facts)
    me = name(transport.part)
    # Before links are opened: a part with another graph might wait for one that never sends.
    for other, theirs in transport.cards(me, own.tolist()):
        _compare(transport, me, own.tolist(), other, theirs)
    received = [(peer, torch.empty_like(own)) for peer in plan.peers(transport.part)]
    transport.exchange([(peer, own) for peer, _ in received], received)
    for peer, theirs in received:
        _compare(transport, me, own.tolist(), name(peer), theirs.tolist())


def _compare(transport: Transport, me: str, own: list[int], other: str, theirs: list[int]) -> None:
    different = [word for word, a, b in zip(WORDS.values(), own, theirs, strict=False) if a != b]
    if different:
        what = " and another ".join(different)
        first = transport.report(
            f"{other} has another {what} than {me}: start all parts with the same"
        )
        raise DistributedError(f"the training did not start because {first}.")
