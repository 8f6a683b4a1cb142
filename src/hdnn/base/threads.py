"""How many threads PyTorch takes: one for small work, whatever the load of the machine.

Threads that share a small product or a small Cholesky factorisation wait for each other longer than
they compute. On a busy machine, where some of them have to wait for a core, that is a hundred times
as long. And when they are done they look for more work for a while, on cores that kernels with
threads of their own could use.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

SMALL = 100_000  # numbers that go through a layer at once, below which one thread is as fast

_own = threading.local()  # how often this thread is inside
_lock = threading.Lock()
_inside = 0  # threads of Python
_before = 1  # threads of PyTorch, before the first of them came in


def threads_for(numbers: int, device: str = "cpu") -> AbstractContextManager[None]:
    """One thread if so few numbers go through a layer on the CPU, else as many as PyTorch takes."""
    return one_thread() if device == "cpu" and numbers < SMALL else nullcontext()


def threads_allowed() -> int:
    """How many threads PyTorch takes outside of `one_thread`; kernels may take as many inside."""
    return _before if getattr(_own, "depth", 0) else torch.get_num_threads()


@contextmanager
def one_thread() -> Iterator[None]:
    """Run PyTorch on one thread inside the block, also where several threads of Python do."""
    global _inside, _before
    depth = getattr(_own, "depth", 0)
    _own.depth = depth + 1
    if not depth:
        with _lock:
            if not _inside:
                _before = torch.get_num_threads()
            _inside += 1
            torch.set_num_threads(1)
    try:
        yield
    finally:
        _own.depth = depth
        if not depth:
            with _lock:
                _inside -= 1
                torch.set_num_threads(_before)


def _after_fork() -> None:
    """Of all threads only the one that forked is there, and the lock may have been another's."""
    global _lock, _inside
    _lock, _inside = threading.Lock(), int(getattr(_own, "depth", 0) > 0)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
