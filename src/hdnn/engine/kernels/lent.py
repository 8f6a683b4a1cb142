"""Large buffers on the CPU, lent again and again: mapping new memory may take as long as the work.

The C library gives large blocks back to the system, which maps them page by page at the next use:
88 ms for 128 MiB, where filling them takes 11. So a buffer stays here when nobody holds a tensor in
it any more, for the next call that needs about as much, up to a share of the memory.
"""

from __future__ import annotations

import weakref
from collections import deque

import torch
from torch import Tensor

from hdnn.base import memory

LARGE = 2**24  # bytes; smaller blocks stay with the C library
SHARE = 32  # what is kept for later takes at most this part of the memory: one in so many

_free: deque[Tensor] = deque()  # those that were used last at the right
_CPU = torch.device("cpu")  # PyTorch would have to read a string in each call
_most = memory.total_bytes() / SHARE


def empty(size: int, dtype: torch.dtype) -> Tensor:
    """A vector of that many numbers, which may hold anything."""
    count = size * dtype.itemsize
    if count < LARGE:
        return torch.empty(size, dtype=dtype, device=_CPU)
    buffer = _take(count)
    if buffer is None:
        buffer = torch.empty(count, dtype=torch.uint8, device="cpu")
    # The tensor below holds this very array, which is gone when no tensor needs the memory.
    array = buffer.numpy()
    weakref.finalize(array, _give_back, buffer).atexit = False
    return torch.from_numpy(array)[:count].view(dtype)


def _take(count: int) -> Tensor | None:
    """A free buffer of at least that many bytes, and at most twice as many."""
    for _ in range(len(_free)):
        try:
            buffer = _free.pop()
        except IndexError:  # another thread was faster
            return None
        if count <= len(buffer) <= 2 * count:
            return buffer
        _free.appendleft(buffer)
    return None


def _give_back(buffer: Tensor) -> None:
    """May run at any time and in any thread: each operation on the queue is atomic, but for reading
    all of it, during which garbage collection may give back another buffer.
    """
    _free.append(buffer)
    while True:
        try:
            if sum(len(each) for each in tuple(_free)) <= _most:
                return
            _free.popleft()
        except IndexError:
            return
        except RuntimeError:  # the queue has changed while it was read
            continue
