"""Parts of a graph as threads of one process, for tests: each with a transport of queues."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from hdnn.distributed.graph.plan import Plan
from hdnn.distributed.transport import Message, Pending, Transport


class Letters(Transport):
    """Messages as copies in queues, one for each pair of parts."""

    def __init__(self, part: int, parts: int, boxes: dict[tuple[int, int], queue.Queue]) -> None:
        super().__init__(part, parts)
        self.boxes = boxes

    def start(self, out: Sequence[Message], into: Sequence[Message]) -> Pending:
        self.traffic.count(out)
        for part, tensor in out:
            self.boxes[self.part, part].put(tensor.clone())
        return _Waiting(self, into)


class _Waiting:
    def __init__(self, letters: Letters, into: Sequence[Message]) -> None:
        self.letters, self.into = letters, into

    def wait(self) -> None:
        for part, tensor in self.into:
            tensor.copy_(self.letters.boxes[part, self.letters.part].get(timeout=60))


def run_parts(plan: Plan, work: Callable[[Transport], Any]) -> list[Any]:
    """What `work` returns for each part."""
    boxes: dict[tuple[int, int], queue.Queue] = {
        (a, b): queue.Queue() for a in range(plan.parts) for b in plan.peers(a)
    }
    return in_threads(plan.parts, lambda part: work(Letters(part, plan.parts, boxes)))


def in_threads(count: int, work: Callable[[int], Any]) -> list[Any]:
    """What `work(k)` returns in each thread k, or the first error of all."""
    results: list[Any] = [None] * count
    errors: list[BaseException] = []

    def one(k: int) -> None:
        try:
            results[k] = work(k)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(k,)) for k in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
