"""Plain loops compiled by numba (extra `fast`), where calls of PyTorch cost more than the work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hdnn.engine.kernels import protocol


def installed() -> bool:
    """Whether numba is installed; it is imported at the first use."""
    return protocol.installed("numba")


def compiled(function: Callable[..., Any]) -> Any:
    """A function compiled by numba, and cached on disk if possible."""
    import numba

    try:
        return numba.njit(cache=True, error_model="numpy", nogil=True)(function)
    except RuntimeError:
        return numba.njit(error_model="numpy", nogil=True)(function)
