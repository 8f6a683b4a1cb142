"""Into which parts kernels split a stack, and which kernels run it."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from hdnn.engine.kernels.protocol import Stack
from hdnn.errors import require


class Tiling(NamedTuple):
    """The sizes of a kernel's parts: samples a tile, rows of K a block, warps a program.

    `stages`: how many blocks of packed weights are on their way at once.
    """

    samples: int
    rows: int
    warps: int
    stages: int = 1


# For the forward and the backward kernel, by the padded width of K; measured on an H200.
_SPLIT: dict[int, dict[str, tuple[Tiling, Tiling]]] = {
    32: {
        "ieee": (Tiling(32, 32, 4), Tiling(32, 32, 4)),
        "tf32": (Tiling(64, 32, 4), Tiling(64, 32, 4)),
        "tf32x3": (Tiling(16, 32, 2), Tiling(32, 32, 2)),
        "bf16": (Tiling(64, 32, 4), Tiling(64, 32, 4)),
    },
    64: {
        "ieee": (Tiling(32, 32, 4), Tiling(32, 32, 4)),
        "tf32": (Tiling(64, 64, 4), Tiling(32, 64, 4)),
        "tf32x3": (Tiling(32, 64, 4), Tiling(32, 64, 8)),
        "bf16": (Tiling(64, 64, 4), Tiling(64, 64, 4)),
    },
    128: {
        "ieee": (Tiling(32, 16, 8), Tiling(16, 32, 8)),
        "tf32": (Tiling(32, 32, 4), Tiling(64, 64, 8)),
        "tf32x3": (Tiling(32, 32, 8), Tiling(32, 32, 8)),  # 64 samples do not fit with V
        "bf16": (Tiling(64, 64, 8), Tiling(64, 64, 8)),
    },
}
_EULER: dict[int, dict[str, tuple[Tiling, Tiling]]] = {
    32: _SPLIT[32],
    64: {
        "ieee": (Tiling(32, 32, 4), Tiling(16, 32, 4)),
        "tf32": (Tiling(64, 64, 8), Tiling(64, 64, 8)),
        "tf32x3": (Tiling(32, 64, 4), Tiling(32, 64, 8)),
        "bf16": (Tiling(64, 64, 4), Tiling(64, 64, 8)),
    },
    128: _SPLIT[128],
    256: {
        "ieee": (Tiling(16, 16, 8), Tiling(16, 16, 8)),
        "tf32": (Tiling(16, 16, 8), Tiling(64, 64, 8)),
        "tf32x3": (Tiling(16, 16, 8), Tiling(16, 16, 8)),
        "bf16": (Tiling(64, 32, 8), Tiling(64, 32, 8)),
    },
}
_CANONICAL = {  # Euler with V = K J^T
    **_EULER,
    64: {
        "ieee": (Tiling(32, 64, 4), Tiling(16, 64, 4)),
        "tf32": (Tiling(64, 64, 4), Tiling(32, 64, 4)),
        "tf32x3": (Tiling(32, 64, 4), Tiling(32, 64, 8)),
        "bf16": (Tiling(64, 64, 4), Tiling(64, 64, 4)),
    },
}


# With packed weights: for up to FEW samples of a shear stack, for more, and for forward Euler.
# Where there is nothing, they were not measured to be faster.
_PACKED_FEW: dict[int, dict[str, tuple[Tiling, Tiling]]] = {
    128: {
        "tf32": (Tiling(16, 64, 4, 2), Tiling(16, 64, 4, 2)),
        "bf16": (Tiling(64, 64, 4, 2), Tiling(64, 64, 8, 2)),
    },
}
_PACKED: dict[int, dict[str, tuple[Tiling, Tiling]]] = {
    128: {
        "tf32": (Tiling(64, 64, 8, 2), Tiling(64, 64, 8, 2)),
        "bf16": (Tiling(64, 64, 4, 2), Tiling(64, 64, 8, 2)),
    },
}
_PACKED_EULER: dict[int, dict[str, tuple[Tiling, Tiling]]] = {
    256: {"tf32": (Tiling(32, 32, 8, 2), Tiling(32, 32, 8, 2))},
}
# A warp has 16 samples; more than two warps would do some of their weight gradients twice.
_WARPS = (Tiling(64, 32, 4, 3), Tiling(32, 32, 2, 3))

FEW = 2048
"""Samples that small tiles spread over the multiprocessors of an H200, one for each."""

SHARED_BYTES = 227 * 2**10
"""Shared memory that a program must have for packed weights: of an H100, and later ones."""


def packed_tilings(stack: Stack, precision: str) -> tuple[Tiling, Tiling] | None:
    """The tilings for packed weights, or None where those are not used."""
    table = (_PACKED_FEW if stack.samples <= FEW else _PACKED) if stack.turns else _PACKED_EULER
    found = table.get(padded(stack.width), {}).get(precision)
    return found if found and shared_bytes(stack.device) >= SHARED_BYTES else None


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that one program may have."""
    if device.type == "cpu":
        return SHARED_BYTES
    driver = require("triton.runtime", extra="gpu").driver
    return driver.active.utils.get_device_properties(device.index)["max_shared_mem"]


def warp_tilings(stack: Stack, precision: str, deterministic: bool) -> tuple[Tiling, Tiling] | None:
    """The tilings for warps on their own, or None where a warp cannot hold what it needs.

    Their weight gradients are added by atomics, in no fixed order. The number of layers must not
    decide: layers are undone in smaller portions than they ran, and to the same rounding.
    """
    alternating = sorted(stack.turns) == [0, 1] and stack.kind == "same"
    narrow = max(stack.width, *stack.rows) <= 32
    exact = deterministic or precision not in ("tf32", "bf16")
    return _WARPS if alternating and narrow and not exact else None


def tiling(
    stack: Stack, precision: str, *, deterministic: bool, backward: bool
) -> tuple[str, Tiling]:
    """Which kernels run a stack: "warps", "packed" or "blocks"; and the tiling of one of them."""
    way, pair = "packed", packed_tilings(stack, precision)
    if pair is None:
        way, pair = "warps", warp_tilings(stack, precision, deterministic)
    if pair is None:
        table = _SPLIT if stack.turns else _CANONICAL if stack.kind == "canonical" else _EULER
        way, pair = "blocks", table[max(32, padded(stack.width))][precision]
    samples, rows, *others = pair[backward]
    if way == "packed" and stack.kind != "same":
        rows = min(rows, 32)  # so that K and V fit into shared memory together
    return way, Tiling(samples, min(rows, padded(max(stack.rows))), *others)


def padded(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())
