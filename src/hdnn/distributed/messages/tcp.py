"""Messages over plain TCP, to linked parts on the same machine only.

Made for many short messages: the process itself sends and receives, and no thread has to be woken
for it. What the system has room for is on its way when `start` returns, and so short messages
travel while the process computes. The rest of a long one leaves while this process waits, for any
message: a wait moves all that is to leave or that is wanted, by all connections, so that no part
waits in vain for one that waits for another. A process that computes and does not wait sends no
more than the system took. Connections are opened when they are first used, by those who know a word
that the store keeps; the messages are neither encrypted nor authenticated.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from hdnn.base.cores import cores
from hdnn.distributed.messages.stored import StoreTransport
from hdnn.distributed.transport import DistributedError, Message, Pending, short
from hdnn.errors import ShapeError
from hdnn.training.processes import meeting

SPIN = 2e-4  # seconds of looking without a pause: a core that sleeps takes long to wake up
WORD = 16  # bytes
GUESTS = 64  # connections that have not said who they are, at most; none of them is waited for


class Tcp(StoreTransport):
    """Messages over TCP on the loopback, of one process for each part.

    Programs that are started with `HDNN_TRANSPORT=tcp` get one by `connect`.

    Args are those of `Gloo`.

    Raises:
        OptionError: if the timeout is not > 0.
        DistributedError: if no connection can be opened or, later on, a part is lost.
        ShapeError: later on, if a message is no contiguous tensor of the CPU; nothing is sent then.

    Examples:
        >>> import torch
        >>> from hdnn.distributed.messages.tcp import Tcp
        >>> transport = Tcp(part=0, parts=1, store=torch.distributed.HashStore(), timeout=5.0)
        >>> transport.exchange(out=[], into=[])
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
    ) -> None:
        super().__init__(part, parts, store, timeout=timeout, name=name, faults=faults)
        self.lines: dict[int, _Line] = {}
        self.guests: dict[socket.socket, bytes] = {}  # who has connected, and said so much
        self.word = secrets.token_bytes(WORD)
        self.spin = SPIN if parts <= cores() else 0.0
        try:
            self.server = socket.create_server((meeting.LOOPBACK, 0), backlog=max(parts, 8))
            self.server.setblocking(False)
            port = self.server.getsockname()[1]
            store.set(f"line-{part}", json.dumps([port, self.word.hex()]))
        except (OSError, RuntimeError) as error:
            raise DistributedError(
                f"{name(part)} cannot open a connection: {short(error)}"
            ) from error

    def start(self, out: Sequence[Message], into: Sequence[Message]) -> Pending:
        """Send `out` and begin to receive `into`; the first call waits for all parts."""
        leaving, wanted = ([(part, _bytes(t)) for part, t in each] for each in (out, into))
        if not self.met:
            self.meet()
        self.traffic.count(out)
        for part, _ in (*out, *into):
            if part not in self.lines:
                self._open({part for part, _ in (*out, *into)})
                break
        used: dict[int, _Line] = {}
        for part, view in leaving:
            used[part] = line = self.lines[part]
            line.leaving.append(view)
            try:
                line.send()
            except OSError as error:
                raise self.lost(part, error) from error
        for part, view in wanted:
            used[part] = line = self.lines[part]
            line.wanted.append(view)
        return _Pending(self, used)

    def _open(self, parts: set[int]) -> None:
        # Those below first: to connect to them never waits, while those above have to connect.
        for part in sorted(parts - self.lines.keys()):
            try:
                self.lines[part] = self._connected(part) if part < self.part else self._met(part)
            except DistributedError:  # it says already who is lost
                raise
            except (OSError, RuntimeError) as error:
                raise self.lost(part, error) from error

    def _connected(self, part: int) -> _Line:
        """A line to a part whose address is in the store."""
        port, word = json.loads(self.store.get(f"line-{part}"))
        line = socket.create_connection((meeting.LOOPBACK, port), self.timeout)
        line.sendall(bytes.fromhex(word) + self.part.to_bytes(4, "big"))
        return _Line(line)

    def _met(self, part: int) -> _Line:
        """A line from a part that connects to this one; others may come before it."""
        deadline = time.monotonic() + self.timeout
        while True:
            self._receive_guests()
            if part in self.lines:
                return self.lines[part]
            self.move()
            left = deadline - time.monotonic()
            if left < 0:
                raise TimeoutError("timed out")
            self.sleep(left, guests=True)

    def _receive_guests(self) -> None:
        """Hear all that have connected, without waiting: who says the word gets a line."""
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
            while True:
                guest, _ = self.server.accept()
                guest.setblocking(False)
                self.guests[guest] = b""
                self._hear(guest)
                if len(self.guests) > GUESTS:
                    self._dismiss(next(iter(self.guests)))
        for guest in [*self.guests]:
            self._hear(guest)

    def _hear(self, guest: socket.socket) -> None:
        try:
            more = guest.recv(WORD + 4 - len(self.guests[guest]))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        said = self.guests[guest] = self.guests[guest] + more
        if more and len(said) < WORD + 4:
            return
        who = int.from_bytes(said[WORD:], "big")
        if more and hmac.compare_digest(said[:WORD], self.word) and who not in self.lines:
            del self.guests[guest]
            self.lines[who] = _Line(guest)
        else:  # somebody else, who does not say the word
            self._dismiss(guest)

    def _dismiss(self, guest: socket.socket) -> None:
        del self.guests[guest]
        guest.close()

    def move(self) -> set[int]:
        """Send and receive what is possible at once, by all lines; the parts where anything was."""
        moved: set[int] = set()
        for part, line in self.lines.items():
            if line.leaving or line.wanted:
                try:
                    if line.move():
                        moved.add(part)
                except OSError as error:
                    raise self.lost(part, error) from error
        return moved

    def sleep(self, seconds: float, *, guests: bool = False) -> None:
        """Until anything can be sent or received by any line, or by somebody who connects."""
        poll = select.poll()
        for line in self.lines.values():
            if line.leaving or line.wanted:
                wanted = select.POLLIN if line.wanted else 0
                poll.register(line.socket, wanted | (select.POLLOUT if line.leaving else 0))
        for each in (self.server, *self.guests) if guests else ():
            poll.register(each, select.POLLIN)
        poll.poll(1000 * seconds + 1)

    def close(self) -> None:
        """Close all connections."""
        self.server.close()
        for connection in (*self.guests, *(line.socket for line in self.lines.values())):
            connection.close()
        self.lines, self.guests = {}, {}


class _Line:
    """A connection, what is to leave by it, and where what comes is wanted; each in its order."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
        self.socket = connection
        self.leaving: deque[memoryview] = deque()
        self.wanted: deque[memoryview] = deque()

    def send(self) -> bool:
        """Send what is possible at once; whether anything was."""
        return self._move(self.leaving, self.socket.send)

    def move(self) -> bool:
        """Send and receive what is possible at once; whether anything was."""
        moved = bool(self.leaving) and self.send()
        return self._move(self.wanted, self._receive) or moved

    def _receive(self, view: memoryview) -> int:
        count = self.socket.recv_into(view)
        if not count:
            raise ConnectionResetError("the connection was closed")
        return count

    def _move(self, queue: deque[memoryview], move: Callable[[memoryview], int]) -> bool:
        moved = False
        try:
            while queue:
                view = queue[0]
                count = move(view) if len(view) else 0
                moved = True
                if count == len(view):
                    queue.popleft()
                else:
                    queue[0] = view[count:]
        except BlockingIOError:
            pass
        return moved


class _Pending:
    """Messages on their way, by some lines."""

    def __init__(self, transport: Tcp, used: dict[int, _Line]) -> None:
        self.transport, self.used = transport, used

    def wait(self) -> None:
        """Return when all is there; messages that were begun before on the same lines are, too.

        Messages on other lines move on meanwhile: others may wait for them.
        """
        since, transport = time.monotonic(), self.transport
        while True:
            moved = transport.move()
            left = [p for p, line in self.used.items() if line.leaving or line.wanted]
            if not left:
                return
            now = time.monotonic()
            if not moved.isdisjoint(self.used):
                since = now
            elif now - since > transport.timeout:
                raise transport.lost(left[0], TimeoutError("timed out"))
            elif now - since > transport.spin and not moved:
                transport.sleep(transport.timeout - (now - since))


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a tensor."""
    if not tensor.numel():
        return memoryview(b"")
    try:
        return memoryview(cast(Any, tensor.numpy())).cast("B")
    except (TypeError, ValueError, RuntimeError) as error:  # of a type that NumPy does not know
        if not _plain(tensor):
            kind = f"{tuple(tensor.shape)} on {tensor.device.type}"
            raise ShapeError(
                f"a message must be a contiguous tensor of the CPU, but one is {kind} with strides "
                f"{tensor.stride()}; send a copy by .contiguous()."
            ) from error
        return memoryview(cast(Any, tensor.detach().view(-1).view(torch.uint8).numpy()))


def _plain(tensor: Tensor) -> bool:
    """Whether the memory of a tensor is its numbers, one after the other."""
    lazy = tensor.is_conj() or tensor.is_neg()
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not lazy
