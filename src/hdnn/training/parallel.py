"""Processes that share a training, each with its rows of every minibatch."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class Group:
    """The processes that share a training; this class is one process alone."""

    first = True
    size = 1

    def split(self, rows: Tensor) -> Tensor:
        """The rows of this process."""
        return rows

    def gather(self, y: Tensor) -> Tensor:
        """The features of all processes, from those of this one."""
        return y

    def scatter(self, gradient: Tensor) -> Tensor:
        """The gradient of this process's features, from that of all."""
        return gradient

    def reduce(self, parameters: list[nn.Parameter]) -> None:
        """Sum the gradients of all processes."""

    def broadcast(self, value: Any) -> Any:
        """The value of the first process."""
        return value

    def share(self, model: nn.Module) -> None:
        """Give all processes the weights of the first."""
