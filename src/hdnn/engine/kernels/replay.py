"""The launches of a pass as one CUDA graph, replayed when the same memory is given again.

A graph reads and writes fixed addresses. Nothing is copied to make that so: PyTorch gives out the
same memory again and again as a training goes on, and where it does, the launches of an earlier
pass are just the right ones. A pass whose addresses were not seen before is launched in the
ordinary way, one kernel after the other, and so are all where addresses never come back, since to
record a graph takes as long as a few passes. Results do not depend on it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

REMEMBERED = 64  # sets of addresses, the last ones seen: a deep stack runs in many parts, in turn

WORTH, FREE = 4, 4 * REMEMBERED  # replays of each graph, on average; not asked of the first ones

Launch = Callable[["Streams"], None]


class Streams:
    """The streams of a pass: lanes that do the same for other samples, and one beside them.

    Without any, all lanes are launched in order.
    """

    def __init__(self, count: int, lanes: Sequence[Any] = (), side: Any = None) -> None:
        self._lanes, self._side, self._taken = lanes, side, []
        self.lanes = max(1, count)

    def each(self, parts: Sequence[Any]) -> Iterator[Any]:
        """The parts, each while its lane is the current stream."""
        if not self._lanes:
            yield from parts
            return
        for part, lane in zip(parts, self._lanes, strict=False):
            with torch.cuda.stream(lane):
                yield part

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Launch what comes after all lanes, but need not be waited for."""
        if self._side is None:
            yield
            return
        for lane in self._lanes:
            self._side.wait_stream(lane)
        with torch.cuda.stream(self._side):
            yield
            self._taken.append(self._side.record_event())

    def wait_for_products(self, k: int) -> None:
        """Let all lanes wait for the k-th launch beside them."""
        if self._side is not None and k >= 0:
            for lane in self._lanes:
                lane.wait_event(self._taken[k])


class Replays:
    """The graphs of one pass, by the addresses of all memory that it touches."""

    def __init__(self) -> None:
        self._graphs: OrderedDict[tuple[str | int, ...], Any] = OrderedDict()
        self._recorded = self._replayed = 0

    def run(self, what: str, launch: Launch, used: Sequence[Tensor], *, lanes: int = 1) -> None:
        """Launch what is called so, or replay.

        `used` is all memory touched but what `launch` allocates itself.

        Captured, the launches may use so many lanes and one stream more; with 0, one stream.
        """
        device = used[0].device
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            launch(Streams(lanes))
            return
        with torch.cuda.device(device):
            # cuBLAS has memory of its own for each thread and stream.
            where = threading.get_ident(), torch.cuda.current_stream().cuda_stream
            key = (what, *where, *[t.data_ptr() for t in used])
            seen, graph = key in self._graphs, self._graphs.pop(key, None)
            if graph is None and seen and self._replayed + FREE >= WORTH * self._recorded:
                graph = _captured(launch, lanes)
                self._recorded += 1
            if graph is None:
                launch(Streams(lanes))
            else:
                graph.replay()
                self._replayed += 1
            self._graphs[key] = graph
            if len(self._graphs) > REMEMBERED:
                self._graphs.popitem(last=False)


def _captured(launch: Launch, lanes: int) -> Any:
    """What `launch` would launch, as a graph."""
    current, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
    where = threading.get_ident(), current.cuda_stream
    first, *others = _streams(current.device, where, lanes + 1)
    first.wait_stream(current)
    with torch.cuda.stream(first):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for other in others:
                other.wait_stream(first)
            launch(Streams(lanes, [first, *others[1:]], others[0]) if lanes else Streams(1))
            for other in others:
                first.wait_stream(other)
        finally:
            graph.capture_end()
    current.wait_stream(first)
    return graph


@lru_cache(maxsize=64)
def _streams(device: torch.device, _: tuple[int, int], count: int) -> list[Any]:
    """Streams to capture on, others for each thread and stream: cuBLAS has memory for each."""
    return [torch.cuda.Stream(device) for _ in range(count)]
