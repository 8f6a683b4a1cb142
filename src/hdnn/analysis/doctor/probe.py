"""A copy of a model and inputs for it, to be run, differentiated and nudged at will."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hdnn.analysis.doctor.calls import Recording
from hdnn.analysis.doctor.chain import ChainState, find_chain, given_chain
from hdnn.analysis.doctor.guard import float_tensors

LONGEST = 1000003  # random numbers are drawn, and taken again after that
TINY = 1e-30

Loss = Callable[[Any], Tensor]


class Probe:
    """A copy of a model and inputs for it, which is run, differentiated and nudged at will."""

    def __init__(self, model: nn.Module, x: Any, loss: Loss | None, names: Iterable[str] | None):
        self.model, self.x, self.loss = model, x, loss
        self.names = None if names is None else [*names]
        self.weights = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.inputs = [t for t in float_tensors(_plain(x)) if t.is_leaf]
        for tensor in self.inputs:
            tensor.requires_grad_()
        self.kept: Any = None  # what is put back before each call, if the model changes in each
        self.repeats = True  # whether the same inputs and weights give the same values

    def record(self, mode: Any = None) -> Recording:
        if self.kept is not None:
            self.kept.put()
        return Recording(self.model, self.x, mode)()

    def objective(self, output: Any, seed: int = 0) -> Tensor | None:
        """The loss, or a random projection of all that comes out; None if it has no gradient."""
        if self.loss is not None:
            value = self.loss(output)
            return value if value.requires_grad else None
        outs = [t for t in outputs_of(output) if t.requires_grad]
        if not outs:
            return None
        parts = [(t * direction(t, seed)).sum() for t in outs]
        return torch.stack([part.to(parts[0]) for part in parts]).sum()

    def chain(self, recording: Recording) -> list[ChainState]:
        outs = [t for t in outputs_of(recording.output) if t.requires_grad]
        if not outs:
            return []
        if self.names is not None:
            return given_chain(self.model, recording, self.names, outs[0])
        return find_chain(recording, self.inputs, outs[0])


def _plain(x: Any) -> Any:
    return dict(x) if hasattr(x, "keys") else x


def outputs_of(output: Any) -> list[Tensor]:
    """The tensors of real numbers in an output: those of several entries, if there are any."""
    found = float_tensors(output)
    return [t for t in found if t.numel() > 1] or found


def direction(like: Tensor, seed: int) -> Tensor:
    """Random numbers of the shape of a tensor, with norm 1: the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    count = like.numel()
    draw = torch.randn(min(count, LONGEST), generator=generator).to(like.device, like.dtype)
    draw = draw.repeat(-(-count // LONGEST))[:count] if count > LONGEST else draw
    return (draw / draw.norm().clamp_min(TINY)).reshape(like.shape)


def nudged(probe: Probe, scale: float, only: set[str] | None = None) -> dict[str, Tensor]:
    """Move trainable weights by a random direction times `scale`; the direction is returned."""
    moves = {}
    with torch.no_grad():
        for k, (name, weight) in enumerate(probe.weights.items()):
            if only is not None and name not in only:
                continue
            moves[name] = norm(weight) * direction(weight, k)
            weight.data.add_(moves[name], alpha=scale)
    return moves


@contextmanager
def in_float64(probe: Probe) -> Iterator[None]:
    """The weights, buffers and inputs of a probe in float64, and as they were afterwards."""
    tensors = [*probe.model.parameters(), *probe.model.buffers(), *probe.inputs]
    kept = [(t, t.data) for t in tensors if t.is_floating_point()]
    try:
        for tensor, data in kept:
            tensor.data = data.double()
        yield
    finally:
        for tensor, data in kept:
            tensor.data = data


def restored(probe: Probe, kept: dict[str, Tensor]) -> None:
    """The weights as they were."""
    with torch.no_grad():
        for name, weight in probe.weights.items():
            weight.data.copy_(kept[name])


def norm(tensor: Tensor) -> float:
    """The root of the sum of squares, in float64."""
    return float(tensor.detach().double().norm())
