"""The precision of the factors of matrix products on a GPU, as PyTorch lets one choose it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hdnn.engine.kernels.protocol import Stack

_switch = threading.RLock()


@contextmanager
def multiplying(precision: str, device: torch.device) -> Iterator[None]:
    """Let cuBLAS take factors in float32 as they are, or rounded to tf32.

    PyTorch has one switch for all threads, so that those of ours take turns with it. Products that
    another thread launches meanwhile follow it too.
    """
    if device.type != "cuda" or precision == "bf16":
        yield
        return
    with _switch:
        before = _legacy_setting()
        if before is None:
            matmul: Any = torch.backends.cuda.matmul
            before, wanted = matmul.fp32_precision, "tf32" if precision == "tf32" else "ieee"
            change = partial(setattr, matmul, "fp32_precision")
        else:
            wanted = "high" if precision == "tf32" else "highest"
            change = torch.set_float32_matmul_precision
        if before != wanted:
            change(wanted)
        try:
            yield
        finally:
            if before != wanted:
                change(before)


def float32_setting() -> str:
    """What `torch.get_float32_matmul_precision` says: "highest", "high" or "medium".

    It refuses to, once `torch.backends.cuda.matmul.fp32_precision` was set: then that is read.
    """
    matmul: Any = torch.backends.cuda.matmul
    return _legacy_setting() or ("high" if matmul.fp32_precision == "tf32" else "highest")


def _legacy_setting() -> str | None:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


FEW_ENTRIES = 1024
"""Of a matrix K. In tf32, weight gradients are products of bf16 factors from this many entries on.

The errors of so many average out: 2.4e-3 of the whole, where those of few scatter up to 5e-3.
"""


def for_weights(precision: str, stack: Stack) -> str:
    """The precision of weight gradients, on which no other layer depends."""
    few = min(stack.rows) * stack.width < FEW_ENTRIES
    return "bf16" if precision == "tf32" and not few else precision


def halves(precision: str, stack: Stack) -> bool:
    """Whether weight gradients are products of bf16 factors, which need float32 results."""
    return precision == "bf16" or (
        for_weights(precision, stack) == "bf16" and _knows_wide_products()
    )


@functools.cache
def _knows_wide_products() -> bool:
    return "dtype_out" in torch.ops.aten.addmm.overloads()


def has_wide_products(like: Tensor) -> bool:
    """Whether factors in half precision can give a product in float32, from PyTorch 2.8 on."""
    return like.is_cuda and _knows_wide_products()
