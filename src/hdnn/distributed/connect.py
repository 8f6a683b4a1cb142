"""Which part of the graph is this process, and where do all parts find each other?

Started by `hdnn launch`, the environment says so in HDNN_STORE, HDNN_PART, HDNN_PARTS and
HDNN_RESTART. Started by torchrun, its own variables do; the part is then the rank, unless HDNN_PART
says otherwise, because after a restart a process may have another rank but not another node.
Started by hand, this process owns all nodes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed.rendezvous import rendezvous

from hdnn.distributed.gloo import Gloo, PrefixStore, TCPStore
from hdnn.distributed.transport import DistributedError, Local, Transport
from hdnn.errors import OptionError


def parts_here() -> int:
    """How many processes the environment speaks of."""
    return _whole("HDNN_PARTS", _whole("WORLD_SIZE", 1))


def connect(*, timeout: float = 60.0, name: Callable[[int], str] = "part {}".format) -> Transport:
    """The transport that the environment speaks of."""
    parts = parts_here()
    if parts == 1 and "HDNN_STORE" not in os.environ:
        return Local()
    part = _whole("HDNN_PART", _whole("RANK", 0))
    if not 0 <= part < parts:
        raise OptionError(f"HDNN_PART must lie in 0 .. {parts - 1}, but is {part}.")
    store = _store(part, parts, timeout)
    if store.add(f"part-{part}", 1) > 1:
        raise DistributedError(f"{name(part)} was started twice; each part is one process.")
    return Gloo(part, parts, store, timeout=timeout, name=name)


def _store(part: int, parts: int, timeout: float) -> Any:
    """The store of this start: a restart must not find the addresses of the one before."""
    wait = timedelta(seconds=timeout)
    where = os.environ.get("HDNN_STORE")
    restart = os.environ.get("HDNN_RESTART", os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    try:
        if where is not None:
            host, _, port = where.rpartition(":")
            store = TCPStore(host, int(port), is_master=False, timeout=wait)
        else:
            rank = _whole("RANK", part)
            store, _, _ = next(rendezvous("env://", rank, parts, timeout=wait))
    except (ValueError, RuntimeError) as error:
        raise DistributedError(
            f"cannot reach the store {where or 'of torchrun'} "
            f"({' '.join(str(error).split())[:120]})."
        ) from error
    return PrefixStore(f"hdnn-{restart}", store)


def _whole(name: str, otherwise: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return otherwise
    try:
        return int(text)
    except ValueError as error:
        raise OptionError(f"{name} must be a whole number, but is {text!r}.") from error
