"""Messages over TCP by gloo, to linked parts only.

Connections are opened when they are first used, so that there are none between parts that are not
linked. The messages are neither encrypted nor authenticated: use it on networks that you trust.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from hdnn.distributed.messages.stored import StoreTransport
from hdnn.distributed.transport import DistributedError, Message, Pending, Works, short
from hdnn.errors import OptionError
from hdnn.training.processes import meeting


class Gloo(StoreTransport):
    """Messages over TCP by gloo, of one process for each part.

    `connect` makes one as the environment says.

    Args:
        part: the number of this part.
        parts: how many there are.
        store: a `torch.distributed` store that all parts reach.
        timeout: the seconds after which a silent neighbour counts as lost, at the start too.
        name: how to call a part in messages, given its number.
        faults: the store where the first fault is kept; by default the same. Several replicas of
            the graph share one.
        everyone: the processes of all replicas; by default `parts`.

    Raises:
        OptionError: if this build of PyTorch has no gloo, or the timeout is not > 0.
        DistributedError: if no connection can be opened or, later on, a part is lost.

    Examples:
        >>> import torch
        >>> from hdnn.distributed import Gloo
        >>> transport = Gloo(part=0, parts=1, store=torch.distributed.HashStore(), timeout=5.0)
        >>> transport.exchange(out=[], into=[])
        >>> transport.traffic.messages
        {}
        >>> transport.close()
    """

    def __init__(
        self,
        part: int,
        parts: int,
        store: Any,
        *,
        timeout: float = 60.0,
        name: Callable[[int], str] = "part {}".format,
        faults: Any = None,
        everyone: int | None = None,
    ) -> None:
        if not (dist.is_available() and hasattr(dist, "ProcessGroupGloo")):
            raise OptionError("this build of PyTorch has no gloo; use the local transport.")
        common = {"timeout": timeout, "name": name, "faults": faults, "everyone": everyone}
        super().__init__(part, parts, store, **common)
        self.waiting = 0  # exchanges that have begun
        try:
            # Lazy: otherwise everybody would be connected to everybody.
            self.group = meeting.gloo_group(store, part, parts, timeout, lazy=True)
        except RuntimeError as error:
            raise DistributedError(
                f"{name(part)} cannot open a connection: {short(error)}"
            ) from error

    def start(self, out: Sequence[Message], into: Sequence[Message]) -> Pending:
        """Begin to receive `into` and to send `out`; the first call waits for all parts."""
        if not self.met:
            self.meet()
        self.traffic.count(out)
        self.waiting += 1
        pending = _Pending(self)
        for part, tensor in into:  # before anything is sent
            pending.begin(part, self.group.recv, [tensor], part, 0)
        for part, tensor in out:
            pending.begin(part, self.group.send, [tensor], part, 0)
        return pending

    def close(self) -> None:
        """Close all connections; after a fault they stay open until the process ends."""
        with contextlib.suppress(RuntimeError):
            self.group.shutdown()
        if self.faulty or self.waiting:
            # gloo's destructor waits forever if a connection is just being made.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.group))
        del self.group


class _Pending(Works):
    def __init__(self, transport: Gloo) -> None:
        super().__init__()
        self.transport = transport

    def wait(self) -> None:
        super().wait()
        self.transport.waiting -= 1

    def lost(self, parts: int, error: RuntimeError) -> DistributedError:
        return self.transport.lost(parts, error)
