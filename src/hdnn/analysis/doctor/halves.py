"""What half precision loses: gradients and changes of the state that float32 has."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from hdnn.analysis.doctor.guard import HALVES
from hdnn.analysis.doctor.probe import Probe

LOST = 0.5  # of the entries


def works_in_half(model: nn.Module, device: torch.device) -> bool:
    """Whether a model has weights in half precision or is run by autocast."""
    return torch.is_autocast_enabled(device.type) or any(
        p.dtype in HALVES for p in model.parameters()
    )


def rounding_losses(own: Probe, wide: Probe) -> list[tuple[str, str, float]]:
    """What is lost, where, and the share of its entries: (what, name, share)."""
    found: list[tuple[str, str, float]] = []
    (grads, changes), (exact_grads, exact_changes) = _looked(own), _looked(wide)
    for name, exact in exact_grads.items():
        mine, there = grads.get(name), exact != 0
        if mine is not None and mine.shape == exact.shape and bool(there.any()):
            share = float(((mine == 0) & there).sum() / there.sum())
            if share > LOST:
                found.append(("the gradient of", name, share))
    for (name, mine), (_, exact) in zip(changes, exact_changes, strict=False):
        there = exact != 0
        if mine.shape == exact.shape and bool(there.any()):
            share = float(((mine == 0) & there).sum() / there.sum())
            if share > LOST:
                found.append(("the changes of the state by", name, share))
    return found


def _looked(probe: Probe) -> tuple[dict[str, Tensor], list[tuple[str, Tensor]]]:
    recording = probe.record()
    objective, states = probe.objective(recording.output), probe.chain(recording)
    changes = [
        (b.layer, (b.tensor - a.tensor).detach())
        for a, b in pairwise(states)
        if a.tensor.shape == b.tensor.shape
    ]
    if objective is None or not probe.weights:
        return {}, changes
    weights = probe.weights
    grads = torch.autograd.grad(objective, [*weights.values()], allow_unused=True)
    return {n: g for n, g in zip(weights, grads, strict=True) if g is not None}, changes
