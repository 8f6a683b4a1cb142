"""Data parallelism beside the graph: replicas of it, each with its share of every minibatch.

The processes that own the same nodes in different replicas add up their gradients; the roots bring
their features together, so that all find the same output layer. This is the only place where there
are collective operations, and they never cross from one part of the graph to another.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hdnn.distributed.messages.stored import LostError
from hdnn.distributed.transport import short
from hdnn.errors import DataError
from hdnn.training.processes.meeting import gloo_group


class Replicas:
    """The same part of the graph in all replicas; by default there is one."""

    def __init__(
        self, index: int = 0, count: int = 1, store: Any = None, timeout: float = 60.0
    ) -> None:
        self.index, self.count = index, count
        self.group = None if count == 1 else gloo_group(store, index, count, timeout)

    def check(self, samples: int, batch: int) -> None:
        """Raise unless each replica gets a sample of each minibatch."""
        least = min(batch, samples, samples % batch or batch)
        if least < self.count:
            raise DataError(
                f"a minibatch of {least} samples cannot be shared out to {self.count} replicas; "
                "take fewer replicas or another batch."
            )

    def share(self, samples: Tensor) -> Tensor:
        """This replica's samples of a minibatch."""
        return samples.tensor_split(self.count)[self.index]

    def sum(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The same tensors, added up over all replicas."""
        if self.group is None:
            return tensors
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors.values()])
        self._wait(self.group.allreduce([flat], dist.ReduceOp.SUM))
        parts = flat.split([tensor.numel() for tensor in tensors.values()])
        return {k: p.view(t.shape) for (k, t), p in zip(tensors.items(), parts, strict=True)}

    def gather(self, y: Tensor, samples: int) -> Tensor:
        """The rows of all replicas' shares of a minibatch of so many samples, in its order."""
        if self.group is None:
            return y
        counts = [len(part) for part in torch.empty(samples).tensor_split(self.count)]
        room = y.new_zeros(max(counts), y.shape[1])  # all must send as much
        room[: len(y)] = y
        found = [torch.empty_like(room) for _ in counts]
        self._wait(self.group.allgather([found], [room]))
        return torch.cat([part[:count] for part, count in zip(found, counts, strict=True)])

    def _wait(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise LostError(
                "the training stopped because another replica of these nodes is gone "
                f"({short(error, 120)})."
            ) from error

    def close(self) -> None:
        self.group = None
