"""The precision of the factors of matrix products on a GPU, as PyTorch lets one choose it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def multiplying(precision: str, device: torch.device) -> Iterator[None]:
    """Let cuBLAS take factors in float32 as they are, or rounded to tf32.

    PyTorch has one switch for all threads. It is not touched where it stands right.
    """
    if device.type != "cuda" or precision == "bf16":
        yield
        return
    matmul: Any = torch.backends.cuda.matmul
    name = "fp32_precision" if hasattr(matmul, "fp32_precision") else "allow_tf32"
    tf32 = precision == "tf32"
    wanted = ("tf32" if tf32 else "ieee") if name == "fp32_precision" else tf32
    before = getattr(matmul, name)
    if before == wanted:
        yield
        return
    setattr(matmul, name, wanted)
    try:
        yield
    finally:
        setattr(matmul, name, before)


def halves(precision: str) -> bool:
    """Whether weight gradients are products of bf16 factors."""
    return precision == "bf16" or (precision == "tf32" and _knows_wide_products())


@functools.cache
def _knows_wide_products() -> bool:
    return "dtype_out" in torch.ops.aten.addmm.overloads()


def has_wide_products(like: Tensor) -> bool:
    """Whether factors in half precision can give a product in float32, from PyTorch 2.8 on."""
    return like.is_cuda and _knows_wide_products()
