"""The interface of transports, which move messages between parts; and that of one process.

A transport moves rows of numbers between parts that are linked, and nothing else: there is no
collective operation on all of them. Messages of one pair of parts arrive in the order in which
they were sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from hdnn.base.files import reason_of as short
from hdnn.errors import HDNNError

Message = tuple[int, Tensor]  # to or from a part; contiguous


class DistributedError(HDNNError):
    """Parts of a graph that lost each other, do not fit together, or cannot go on.

    Examples:
        >>> import torch
        >>> import hdnn
        >>> from hdnn.distributed import Graph, GraphNetwork, Plan, Training
        >>> net = GraphNetwork(Plan.whole(Graph.ring(4)), layers=2)
        >>> _ = net.weights["K_p"].fill_(torch.nan)
        >>> x, t = torch.randn(net.rows, 8), torch.zeros(8).long()
        >>> Training(net, hdnn.SigmoidHead(net.features), x, t, epochs=1).run()
        Traceback (most recent call last):
        hdnn.distributed.transport.DistributedError: the loss is not finite in epoch 1: ...
    """


class Pending(Protocol):
    """Messages on their way."""

    def wait(self) -> None:
        """Return when all that was to be received is there, and all that was sent is on its way."""
        ...


class Traffic:
    """How many messages and bytes went to each other part."""

    def __init__(self) -> None:
        self.messages: dict[int, int] = {}
        self.bytes: dict[int, int] = {}

    def count(self, out: Sequence[Message]) -> None:
        """Add these messages to the numbers."""
        for part, tensor in out:
            self.messages[part] = self.messages.get(part, 0) + 1
            self.bytes[part] = self.bytes.get(part, 0) + tensor.nbytes


class Transport:
    """Messages between this part and others; a subclass has to define `start` only.

    `Gloo`, `Mpi` and `Local` are transports. What was sent is counted in `traffic`.

    Args:
        part: the number of this part.
        parts: how many parts there are.

    Examples:
        >>> from hdnn.distributed import Local
        >>> class Talkative(Local):
        ...     def start(self, out, into):
        ...         print(len(out), "messages to send")
        ...         return super().start(out, into)
        >>> Talkative().exchange(out=[], into=[])
        0 messages to send
    """

    def __init__(self, part: int, parts: int) -> None:
        self.part, self.parts, self.traffic = part, parts, Traffic()

    def start(self, out: Sequence[Message], into: Sequence[Message]) -> Pending:
        """Begin to receive `into` and to send `out`: neither may be touched before `wait`.

        Both are pairs of a part and a tensor, which is contiguous and on the CPU.
        """
        raise NotImplementedError

    def start_round(
        self, round: object, out: Sequence[Message], into: Sequence[Message]
    ) -> Pending:
        """The same in a round that all parts start in the same order, even those without peers.

        The same `round` object always has the same peers.
        """
        return self.start(out, into)

    def exchange(self, out: Sequence[Message], into: Sequence[Message]) -> None:
        """Send and receive, and return when both are done."""
        self.start(out, into).wait()

    def cards(self, name: str, card: list[int]) -> list[tuple[str, list[int]]]:
        """Show a list of numbers under a name; return others' that are known before links open."""
        return []

    def report(self, message: str) -> str:
        """Report a fault, unless another one came first; the first one is returned."""
        return message

    def close(self) -> None:
        """Close all connections."""


class Works:
    """Messages on their way by a library whose errors are `RuntimeError`s; `lost` explains them."""

    def __init__(self) -> None:
        self.works: list[tuple[Any, Any]] = []

    def begin(self, parts: Any, start: Callable[..., Any], *arguments: Any) -> None:
        """Begin a message to or from some parts."""
        try:
            self.works.append((parts, start(*arguments)))
        except RuntimeError as error:
            raise self.lost(parts, error) from error

    def wait(self) -> None:
        for parts, work in self.works:
            try:
                self.finish(parts, work)
            except RuntimeError as error:
                raise self.lost(parts, error) from error

    def finish(self, parts: Any, work: Any) -> None:
        work.wait()

    def lost(self, parts: Any, error: RuntimeError) -> DistributedError:
        raise NotImplementedError


class Local(Transport):
    """One process that owns all nodes and sends nothing; the others must agree with its results.

    It is what a `GraphNetwork` has without another transport.

    Examples:
        >>> from hdnn.distributed import Graph, GraphNetwork, Local, Plan
        >>> net = GraphNetwork(Plan.whole(Graph.ring(4)), layers=2, transport=Local())
        >>> net.transport.part, net.transport.parts
        (0, 1)
    """

    def __init__(self) -> None:
        super().__init__(0, 1)

    def start(self, out: Sequence[Message], into: Sequence[Message]) -> Pending:
        """Nothing can be sent: there is no other part."""
        assert not [*out, *into], "one process has no other"
        return Works()


__all__ = ["DistributedError", "Local", "Message", "Pending", "Traffic", "Transport", "short"]
