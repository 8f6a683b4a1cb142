"""A training step as one CUDA graph."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

WARM_UP = 3  # steps before a graph is recorded, so that everything is allocated


def recorded(
    step: Callable[[], None],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    count: Tensor,
) -> Callable[[], None]:
    """Record a step on a GPU; the returned function runs the step many times faster.

    Weights and moments stay as they are, and the count of steps is 0.

    Args:
        step: one step of the optimiser, which adds 1 to `count`.
        model: the model whose weights are trained.
        optimizer: the optimiser, with `capturable=True` if it has that option.
        count: the number of steps, a tensor on the GPU.
    """
    weights = copy.deepcopy(model.state_dict())
    before = [value.clone() for value in moments(optimizer)]
    stream = torch.cuda.Stream(count.device)
    stream.wait_stream(torch.cuda.current_stream(count.device))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            count.zero_()
            step()
        count.zero_()
        with torch.cuda.graph(
            graph, stream=stream, capture_error_mode="thread_local"
        ):
            step()
    torch.cuda.current_stream(count.device).wait_stream(stream)
    model.load_state_dict(weights)
    for number, value in enumerate(moments(optimizer)):
        if before:
            value.copy_(before[number])
        else:
            value.zero_()
    count.zero_()
    return graph.replay


def moments(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The state tensors of an optimiser."""
    slots = optimizer.state.values()
    return [value for slot in slots for value in slot.values()]
