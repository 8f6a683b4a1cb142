"""Processes that share a training, each with its rows of every minibatch.

`fit` asks a `Group` for all that passes between processes: the features of all rows, from which
every process solves the same output layer, and the sum of the gradients of the hidden layers, by
which every process takes the same step. The training is that of one process, up to rounding.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hdnn.errors import OptionError


class Group:
    """The processes that share a training; this class is one process alone."""

    first = True
    size = 1

    def split(self, rows: Tensor) -> Tensor:
        """The rows of this process."""
        return rows

    def gather(self, y: Tensor, rows: int) -> Tensor:
        """The features of all rows, from those of this process."""
        return y

    def scatter(self, gradient: Tensor) -> Tensor:
        """The gradient of this process's features, from that of all."""
        return self.split(gradient)

    def reduce(self, parameters: list[nn.Parameter]) -> None:
        """Sum the gradients of all processes."""

    def broadcast(self, value: Any) -> Any:
        """The value of the first process."""
        return value

    def share(self, model: nn.Module) -> None:
        """Give all processes the weights of the first."""

    def wait(self) -> None:
        """Wait for all processes."""


class DataParallel(Group):
    """All processes of torch.distributed, each with its rows of every minibatch.

    All call `fit(group=DataParallel())` with the same data and options; callbacks run in each of
    them and must decide alike; only the first process writes files.

    Raises:
        OptionError: if torch.distributed is not initialised.
    """

    def __init__(self) -> None:
        if not dist.is_initialized():
            raise OptionError(
                "DataParallel needs torch.distributed; start the program by torchrun and call "
                "torch.distributed.init_process_group() first."
            )
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.first = self.rank == 0

    def _slice(self, rows: int) -> slice:
        return slice(
            rows * self.rank // self.size, rows * (self.rank + 1) // self.size
        )

    def split(self, rows: Tensor) -> Tensor:
        return rows[self._slice(len(rows))]

    def gather(self, y: Tensor, rows: int) -> Tensor:
        gathered = y.new_zeros(rows, *y.shape[1:])
        gathered[self._slice(rows)] = y
        dist.all_reduce(gathered)
        return gathered

    def reduce(self, parameters: list[nn.Parameter]) -> None:
        for p in parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        gradients = [p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        pieces = flat.split([gradient.numel() for gradient in gradients])
        for gradient, piece in zip(gradients, pieces, strict=True):
            gradient.copy_(piece.view_as(gradient))

    def broadcast(self, value: Any) -> Any:
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def share(self, model: nn.Module) -> None:
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), src=0)

    def wait(self) -> None:
        dist.barrier()


@contextmanager
def joined(
    device: str = "cpu", timeout: float = 300.0
) -> Iterator[tuple[Group, str]]:
    """The group of a program that torchrun may have started, and the device of this process.

    Without torchrun the program is one process. On "cuda" each process has the GPU of its own
    number on its machine.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield Group(), device
        return
    if device == "cuda":
        number = int(os.environ["LOCAL_RANK"])
        if number >= torch.cuda.device_count():
            raise OptionError(
                f"there are {torch.cuda.device_count()} GPUs for more processes than that; start "
                "no more than one process for each GPU."
            )
        torch.cuda.set_device(number)
        device = f"cuda:{number}"
    backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    try:
        yield DataParallel(), device
    finally:
        dist.destroy_process_group()
