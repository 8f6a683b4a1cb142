"""The sizes of a stack of layers, and the layout of its gradients."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hdnn import schemes
from hdnn.activations import Activation
from hdnn.schemes import Force, Scheme

Tensors = tuple[Tensor | None, ...]
"""h (N,), then K, b and V of each force, as `hdnn.schemes.Force` has them."""


@dataclass(frozen=True)
class Stack:
    """A stack of layers for states (B, n), without its weights.

    A step is one move of a layer: `target += fraction * h * sigma(source K^T + b) V`.
    """

    scheme: Scheme
    sigma: Activation
    inverse: bool
    layers: int
    samples: int
    features: int
    rows: tuple[int, ...]  # hidden units of each force
    # V of each force: "same" (K), "gains" (of K), "fixed" (no gradient) or "learned"
    outputs: tuple[str, ...]
    dtype: torch.dtype
    device: torch.device
    learned: bool = False  # the steps h need a gradient

    @property
    def width(self) -> int:
        """The number of features that a step reads."""
        return self.features // 2 if self.scheme.halves else self.features

    @property
    def steps(self) -> int:
        return self.layers * len(self.scheme.moves)

    @property
    def order(self) -> list[tuple[int, int, float]]:
        """The half that each step reads, its layer, and its signed fraction of h."""
        layers = range(self.layers)
        if self.inverse:
            layers = reversed(layers)
        moves = list(self.scheme.ordered(self.inverse))
        return [
            (half, layer, fraction)
            for layer in layers
            for half, _, fraction in moves
        ]

    @cached_property
    def places(self) -> list[tuple[int, tuple[int, ...]] | None]:
        """The start and the shape of each tensor's gradient in one buffer."""
        shapes: list[tuple[int, ...] | None] = [
            (self.layers,) if self.learned else None
        ]
        for r, output in zip(self.rows, self.outputs, strict=True):
            b = (self.layers, r)
            K = (*b, self.width)
            V = {"learned": K, "gains": b}.get(output)
            shapes += [K, b, V]
        places = []
        start = 0
        for shape in shapes:
            places.append(None if shape is None else (start, shape))
            if shape is not None:
                start += -(-math.prod(shape) // 32) * 32  # aligned
        return places

    @property
    def size(self) -> int:
        """The count of numbers in the buffer of all gradients."""
        start, shape = [place for place in self.places if place is not None][-1]
        return -(-(start + math.prod(shape)) // 32) * 32

    def gradients(self, buffer: Tensor) -> list[Tensor | None]:
        """Views of a buffer: the gradient of each tensor, or None."""
        views: list[Tensor | None] = []
        for place in self.places:
            if place is None:
                views.append(None)
            else:
                start, shape = place
                size = math.prod(shape)
                views.append(buffer[start : start + size].view(shape))
        return views

    def forces(self, tensors: Sequence[Any]) -> list[Force]:
        """The weights in the form that `hdnn.schemes` uses."""
        return [Force(*tensors[k : k + 3]) for k in range(1, len(tensors), 3)]

    def definition(self, y: Any, tensors: Sequence[Any]) -> Tensor:
        """y_N, computed with the plain loop."""
        forces = self.forces(tensors)
        return schemes.run(
            self.scheme, y, forces, tensors[0], self.sigma, inverse=self.inverse
        )


def process_bytes(root: Path = Path("/")) -> int:
    """The memory that this process may use: the machine's, or less if its cgroup is limited.

    Args:
        root: the folder that holds `proc` and `sys`.
    """
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return size
    mount = root / "sys/fs/cgroup"
    for line in groups:
        _, controllers, group = line.split(":", 2)
        top = mount
        name = "memory.max"
        if controllers:  # version 1
            top = mount / "memory"
            name = "memory.limit_in_bytes"
        if controllers and "memory" not in controllers.split(","):
            continue
        place = top / group.lstrip("/")
        # In a container, its own group can be the top: folders that are not there have no limit.
        for folder in (place, *place.parents):
            if folder.is_relative_to(top):
                size = min(size, _limit(folder / name) or size)
    return size


def _limit(file: Path) -> int | None:
    """The number in a file of a cgroup; None if there is no limit."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # not there, or "max"
        return None


# Read once: kernels ask in every call, and a limit hardly ever changes.
PROCESS_BYTES = process_bytes()


def machine_bytes() -> int:
    """The memory that this process may use."""
    return PROCESS_BYTES


def device_bytes(device: torch.device) -> int:
    """The memory of a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return machine_bytes()
