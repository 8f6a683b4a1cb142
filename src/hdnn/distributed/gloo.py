"""Messages over TCP by gloo, to linked parts only.

Connections are opened when they are first used, so that there are none between parts that are not
linked. A store, one for all parts, tells them each other's addresses and keeps the first fault. The
messages are neither encrypted nor authenticated: use it on networks that you trust.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hdnn.distributed.transport import DistributedError, Message, Pending, Transport
from hdnn.errors import OptionError

TCPStore: Any = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]
PrefixStore: Any = dist.PrefixStore  # pyright: ignore[reportPrivateImportUsage]
FAULT = "fault"  # where the store keeps what went wrong first
PATIENCE = 2.0  # seconds for the first fault to get known


class Gloo(Transport):
    """Point-to-point messages of one process for each part.

    `store` is a torch.distributed store that all parts reach; `timeout` are the seconds after
    which a silent neighbour counts as lost, at the start too. `name` says how to call a part, and
    `faults` is where the first fault is kept, by default the same store.
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
    ) -> None:
        super().__init__(part, parts)
        if not (dist.is_available() and hasattr(dist, "ProcessGroupGloo")):
            raise OptionError("this build of PyTorch has no gloo; use the local transport.")
        if not timeout > 0:
            raise OptionError(f"timeout must be a number of seconds > 0, but got {timeout!r}.")
        self.faults, self.name, self.timeout = faults or store, name, timeout
        before = os.environ.get("TORCH_GLOO_LAZY_INIT")
        os.environ["TORCH_GLOO_LAZY_INIT"] = "1"  # else everybody is connected to everybody
        try:
            self.group: Any = dist.ProcessGroupGloo(  # pyright: ignore[reportPrivateImportUsage]
                store, part, parts, timedelta(seconds=timeout)
            )
        except RuntimeError as error:
            raise DistributedError(
                f"{name(part)} cannot open a connection: {_short(error)}"
            ) from error
        finally:
            if before is None:
                del os.environ["TORCH_GLOO_LAZY_INIT"]
            else:
                os.environ["TORCH_GLOO_LAZY_INIT"] = before

    def start(self, out: Sequence[Message], into: Sequence[Message]) -> Pending:
        self.traffic.count(out)
        pending = _Pending(self)
        for part, tensor in into:  # before anything is sent
            pending.add(part, lambda p=part, t=tensor: self.group.recv([t], p, 0))
        for part, tensor in out:
            pending.add(part, lambda p=part, t=tensor: self.group.send([t], p, 0))
        return pending

    def lost(self, part: int, error: Exception) -> DistributedError:
        """What to tell when a neighbour does not answer: the first fault of all, if it is known."""
        late = "imed out" in str(error)
        what = f"sent nothing for {self.timeout:g} s" if late else "is gone"
        message = f"{self.name(part)} {what}"
        first = self.report(message)
        why = "" if first == message else f" ({message})"
        return DistributedError(f"the training stopped because {first}{why}.")

    def report(self, message: str) -> str:
        with contextlib.suppress(RuntimeError):
            self.faults.set_timeout(timedelta(seconds=PATIENCE))
            return self.faults.compare_set(FAULT, "", message).decode()
        return message

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):
            self.group.shutdown()
        del self.group


class _Pending:
    def __init__(self, transport: Gloo) -> None:
        self.transport = transport
        self.works: list[tuple[int, Any]] = []

    def add(self, part: int, begin: Callable[[], Any]) -> None:
        try:
            self.works.append((part, begin()))
        except RuntimeError as error:
            raise self.transport.lost(part, error) from error

    def wait(self) -> None:
        for part, work in self.works:
            try:
                work.wait()
            except RuntimeError as error:
                raise self.transport.lost(part, error) from error


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
