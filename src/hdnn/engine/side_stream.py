"""A second stream of a GPU, for work whose results are only needed at the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """A `with` block that runs on a second stream, or as usual without a GPU.

    Used for the gradients of weights. It waits for all work given to the first stream so far, so
    the memory it allocates is free by then.
    """

    def __init__(self, device: torch.device | None) -> None:
        there = device is not None and device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if there else None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            yield

    def join(self) -> None:
        """Make the first stream wait for this one."""
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
