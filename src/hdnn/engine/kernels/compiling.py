"""Triton compiles the functions of kernels when a kernel is first asked for.

Triton reads the names that a kernel uses from the module of the kernel. That is why each such
module has a `tl`, and why functions are exchanged there for what Triton has made of them: those of
the module, and those that it imports from another one.
"""

from __future__ import annotations

import functools
import inspect
import os
from types import ModuleType
from typing import Any

from hdnn.engine.kernels import device, packed, stacks, sums, warps
from hdnn.errors import require

OPEN_ENDED = ("B", "M", "first_q", "low", "high", "rows", "T")
"""Arguments of kernels for whose values Triton does not compile again."""

_compiled: dict[Any, Any] = {}


def compile_functions(module: dict[str, Any], functions: list[Any]) -> None:
    """Import Triton, and exchange these functions of a module for what it makes of them."""
    triton = require("triton", extra="gpu")
    module["tl"] = require("triton.language", extra="gpu")
    module["constexpr"] = module["tl"].constexpr
    for function in functions:
        open_ended = [name for name in inspect.signature(function).parameters if name in OPEN_ENDED]
        _compiled[function] = triton.jit(function, do_not_specialize=open_ended)
    for name, value in module.items():
        if inspect.isfunction(value) and value in _compiled:
            module[name] = _compiled[value]


@functools.cache
def load() -> bool:
    """Import Triton and compile the kernels of stacks, at the first call.

    Whether a compiled kernel can then be called without Triton's check of each argument.
    """
    for module in (device, stacks, sums, packed, warps):
        compile_functions(vars(module), functions_of(module))
    triton = require("triton", extra="gpu")
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return version >= (3, 3) and not interpreted()


def functions_of(module: ModuleType) -> list[Any]:
    """The functions that a module defines."""
    found = vars(module).values()
    return [f for f in found if inspect.isfunction(f) and f.__module__ == module.__name__]


def interpreted() -> bool:
    """Whether Triton runs the kernels in Python, for tests on a CPU."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")
