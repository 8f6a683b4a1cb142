"""One run of a model, as its modules see it: which were called, on what, and what came out."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from hdnn.analysis.doctor.guard import call, float_tensors

SEED = 20210527


@dataclass
class ModuleCall:
    """One call of one module. `inside` says how many other calls it happens in."""

    name: str
    module: nn.Module
    begun: int
    inside: int
    repeat: int  # how many calls of the same module came before
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    ended: int = -1
    leaf: bool = True  # no other module is called in it
    finite_in: bool = True
    finite_out: bool = True
    rms_in: float = math.nan
    rms_out: float = math.nan

    @property
    def title(self) -> str:
        return f"{self.name} (call {self.repeat + 1})" if self.repeat else self.name

    @property
    def state(self) -> Tensor | None:
        """What comes out: the first tensor of more than one entry for each sample, if there is."""
        return next((t for t in self.outputs if t.ndim > 1), next(iter(self.outputs), None))


class Recording:
    """Runs a model once and keeps the calls of its modules, in the order in which they begin."""

    def __init__(self, model: nn.Module, x: Any, mode: Any = None) -> None:
        self.calls: list[ModuleCall] = []
        self.output: Any = None
        self.error: Exception | None = None
        self._open: list[ModuleCall] = []
        self._clock = 0
        self._times: Counter[str] = Counter()
        self._model, self._x, self._mode = model, x, mode

    def __call__(self) -> Self:
        handles = []
        for name, module in self._model.named_modules():
            if module is not self._model:
                before, after = self._hooks(name)
                handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
                handles.append(module.register_forward_hook(after))
        # The same dropout in every run, whoever draws it; afterwards all goes on as it was.
        torch.manual_seed(SEED)
        random.seed(SEED)
        np.random.seed(SEED % 2**32)  # noqa: NPY002
        try:
            if self._mode is None:
                self.output = call(self._model, self._x)
            else:
                with self._mode(self.current):
                    self.output = call(self._model, self._x)
        finally:
            for handle in handles:
                handle.remove()
        return self

    def current(self) -> str:
        """The name of the module that is running."""
        return self._open[-1].title if self._open else ""

    def _hooks(self, name: str) -> tuple[Any, Any]:
        def before(module: nn.Module, args: Any, named: dict[str, Any]) -> None:
            self._clock += 1
            inputs = float_tensors([*args, *named.values()])
            one = ModuleCall(name, module, self._clock, len(self._open), self._times[name], inputs)
            self._times[name] += 1
            one.finite_in, one.rms_in = all(map(finite, inputs)), rms(inputs)
            for outer in self._open:
                outer.leaf = False
            self._open.append(one)
            self.calls.append(one)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            self._clock += 1
            one = self._open.pop()
            one.ended, one.outputs = self._clock, float_tensors(output)
            one.finite_out, one.rms_out = all(map(finite, one.outputs)), rms(one.outputs[:1])

        return before, after


def finite(tensor: Tensor) -> bool:
    """Whether all entries are finite; a mask of an attention may hold -inf, which is meant."""
    tensor = tensor.detach()
    return not bool((tensor.isnan() | (tensor == math.inf)).any())


def rms(tensors: Sequence[Tensor]) -> float:
    """The root of the mean square of the first tensor's entries."""
    if not tensors or not tensors[0].numel():
        return math.nan
    return float(tensors[0].detach().double().square().mean().sqrt())
