"""Many samples are run through a network in parts that fit into memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

PART = 4096  # samples that go through a network at once


def in_parts(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """What `run` gives for all samples x (B, ...), computed part by part."""
    return torch.cat([run(part) for part in x.split(PART)])
