"""Models that change from call to call: what moves is held still, so that calls can be compared."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hdnn.analysis.doctor.guard import float_tensors
from hdnn.analysis.doctor.probe import Probe

SAME = 1e-6  # of the largest entry: sums in another order differ by less


class HeldValues:
    """Buffers, plain tensors and plain values of all parts of a model, to be put back."""

    def __init__(self, model: nn.Module) -> None:
        self.buffers = [
            (part, name, buffer, buffer.detach().clone())
            for part in model.modules()
            for name, buffer in part.named_buffers(recurse=False)
        ]
        self.plain = [
            (part, name, value, value.detach().clone() if isinstance(value, Tensor) else value)
            for part in model.modules()
            for name, value in vars(part).items()
            if isinstance(value, bool | int | float | str | None)
            or (isinstance(value, Tensor) and value.is_leaf)
        ]

    def moved(self) -> list[tuple[nn.Module, str]]:
        """The buffers that have other values now, each with the part that it belongs to."""
        now = ((part, name, getattr(part, name), was) for part, name, _, was in self.buffers)
        return [(part, name) for part, name, is_, was in now if not torch.equal(is_, was)]

    def put(self) -> None:
        """All as it was, in the dtype that it has now."""
        for part, name, buffer, was in self.buffers:
            buffer.data = was.to(buffer.dtype, copy=True)
            setattr(part, name, buffer)
        for part, name, value, was in self.plain:
            if isinstance(value, Tensor) and isinstance(was, Tensor):
                value.data = was.to(value.dtype, copy=True)
            vars(part)[name] = value


def hold_still(probe: Probe) -> None:
    """Have the model of a probe give the same values in each call on the same inputs.

    A part that moves its buffers, as the power iteration of a spectral norm does, is taken out of
    training mode if it then gives what it gave in training. For others, what they hold is put back
    before each call. If that does not help either, the probe does not repeat.
    """
    before = HeldValues(probe.model)
    first = _values(probe)
    after = HeldValues(probe.model)
    if _same(first, _values(probe)):
        return
    after.put()
    # Running statistics move too, but training does not use them.
    moved = [part for part, name in before.moved() if not name.startswith(("running_", "num_"))]
    parts = [part for part in dict.fromkeys(moved) if part.training]
    for part in parts:
        part.training = False  # not its children
    if parts and _same(first, _values(probe)) and _same(first, _values(probe)):
        return
    for part in parts:
        part.training = True
    probe.kept = before
    probe.repeats = _same(_values(probe), _values(probe))


def _values(probe: Probe) -> list[Tensor]:
    return [t.detach().clone() for t in float_tensors(probe.record().output)]


def _same(one: list[Tensor], two: list[Tensor]) -> bool:
    if [t.shape for t in one] != [t.shape for t in two]:
        return False
    return all(_close(a.double(), b.double()) for a, b in zip(one, two, strict=True))


def _close(a: Tensor, b: Tensor) -> bool:
    size: Any = a.abs().nan_to_num(0.0, 0.0).amax()
    return torch.allclose(a, b, rtol=0.0, atol=SAME * float(size), equal_nan=True)
