"""Plain loops compiled by numba (extra `fast`), where calls of PyTorch cost more than the work."""

from __future__ import annotations

import hashlib
import pkgutil
from collections.abc import Callable
from typing import Any

from hdnn.engine.kernels import protocol
from hdnn.errors import require


def installed() -> bool:
    """Whether numba is installed; it is imported at the first use."""
    return protocol.installed("numba")


def compiled(function: Callable[..., Any], made_of: str = "") -> Any:
    """A function compiled by numba, and cached on disk if possible.

    numba compiles a function anew when its own file changes. `made_of` is a digest of all that it
    is compiled from, where that is more than this file, or may change while a program runs.
    """
    numba: Any = require("numba", extra="fast")
    try:
        found = numba.njit(cache=True, error_model="numpy", nogil=True)(function)
    except RuntimeError:
        return numba.njit(error_model="numpy", nogil=True)(function)
    return _told_apart(found, made_of) if made_of else found


def _told_apart(dispatcher: Any, made_of: str) -> Any:
    """The same function, whose code on disk is found by the digest too."""
    from numba.core.caching import FunctionCache

    class Cache(FunctionCache):
        def _index_key(self, sig: Any, codegen: Any) -> tuple[Any, ...]:
            return (*super()._index_key(sig, codegen), made_of)

    dispatcher._cache = Cache(dispatcher.py_func)
    return dispatcher


def digest(*modules: str) -> str:
    """Of the sources of some modules, by their names; empty where there are none."""
    hashed = hashlib.sha256()
    for name in modules:
        package, _, file = name.rpartition(".")
        try:
            hashed.update(pkgutil.get_data(package, f"{file}.py") or b"")
        except OSError:  # compiled files alone
            return ""
    return hashed.hexdigest()
