"""A second stream of a GPU, for work that nobody waits for before the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """Runs what is done inside of it aside; without a GPU, at once. Here: gradients of weights.

    It always starts after the work that the first stream has been given, so whatever it allocates
    anew is free by then.
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
        """Wait for it."""
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
