"""What the operations inside of modules see: flat activations, and exponentials that may overflow.

Operations are watched below the modules, so that it makes no difference whether an activation is a
module, a function or an operator.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Where the slope of an activation is less than a thousandth of its largest: (input, further
# arguments) to a mask. Those that are flat on one side are called dead there, the others saturated.
Flat = Callable[..., Tensor]
ONE_SIDED: dict[str, Flat] = {
    "relu": lambda x: x <= 0,
    "threshold": lambda x, t=0.0, v=0.0: x <= t,
    "clamp_min": lambda x, low=0.0: x <= low,
    "gelu": lambda x, **_: x < -4.0,
    "silu": lambda x: x < -9.5,
    "mish": lambda x: x < -11.0,
    "hardswish": lambda x: x <= -3.0,
    "elu": lambda x, *_: x < -7.0,
    "softplus": lambda x, *_: x < -7.0,
}
TWO_SIDED: dict[str, Flat] = {
    "sigmoid": lambda x: x.abs() > 8.3,
    "tanh": lambda x: x.abs() > 4.15,
    "hardtanh": lambda x, low=-1.0, high=1.0: (x <= low) | (x >= high),
    "hardsigmoid": lambda x: x.abs() >= 3.0,
    "erf": lambda x: x.abs() > 2.63,
    "atan": lambda x: x.abs() > 32.0,
}
SOFTMAX = ("_softmax", "_safe_softmax")
MASKED = 5e3  # below the largest logit: what lies further down is masked
EXPONENTIALS = ("exp", "exp2", "expm1")


@dataclass
class ActivationFacts:
    """An activation inside a module: how many of its units and entries are flat."""

    module: str
    operation: str
    entries: int = 0
    flat: int = 0
    units: int = 0
    dead: int = 0  # units that are flat for all samples and positions
    always: int = 0  # units that are flat for none of them
    active: float = 0.0  # the share of samples and positions for which the others are not flat
    samples: int = 0
    one_sided: bool = False

    @property
    def flat_share(self) -> float:
        return self.flat / self.entries if self.entries else 0.0

    @property
    def dead_share(self) -> float:
        return self.dead / self.units if self.units else 0.0


@dataclass
class ExponentialFacts:
    """The largest argument of an exponential inside a module, and where it overflows."""

    module: str
    largest: float
    limit: float


class OperationTrace(TorchDispatchMode):
    """Collects facts about activations and exponentials while a model runs."""

    def __init__(self, current: Callable[[], str]) -> None:
        super().__init__()
        self.current = current
        self.activations: dict[tuple[str, str], ActivationFacts] = {}
        self.exponentials: dict[str, ExponentialFacts] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        operation = func.overloadpacket.__name__.removesuffix("_")
        x = args[0] if args and isinstance(args[0], Tensor) else None
        if x is not None and x.is_floating_point() and x.numel() > 1:
            if operation in ONE_SIDED or operation in TWO_SIDED:
                self._activation(operation, x, args[1:], named)
            elif operation in EXPONENTIALS:
                self._exponential(x, operation)
        out = func(*args, **named)
        if operation in SOFTMAX and isinstance(out, Tensor) and out.ndim and out.numel() > 1:
            self._softmax(args[0], out, args[1] if len(args) > 1 else -1)
        return out

    def _facts(self, operation: str) -> ActivationFacts:
        key = self.current(), operation
        return self.activations.setdefault(key, ActivationFacts(*key))

    def _activation(self, operation: str, x: Tensor, args: Any, named: dict[str, Any]) -> None:
        facts, one_sided = self._facts(operation), operation in ONE_SIDED
        if operation == "hardtanh" and args and args[0] == 0:
            one_sided = True  # ReLU6
        test = (ONE_SIDED if operation in ONE_SIDED else TWO_SIDED)[operation]
        try:
            flat = test(x.detach(), *args, **named)
        except TypeError:  # arguments that the test does not know
            return
        facts.one_sided = one_sided
        facts.entries += flat.numel()
        facts.flat += int(flat.sum())
        axis = 1 if flat.ndim > 3 else flat.ndim - 1
        by_unit = flat.movedim(axis, 0).flatten(1) if flat.ndim > 1 else flat[:, None]
        dead, always = by_unit.all(1), ~by_unit.any(1)
        # A layer that is called again, as in a recurrence, is dead only if it is so every time.
        if not facts.units or int(dead.sum()) < facts.dead:
            facts.dead, facts.always = int(dead.sum()), int(always.sum())
            living = by_unit[~(dead | always)]
            facts.active = float((~living).float().mean()) if living.numel() else 0.0
            facts.samples = len(flat) if flat.ndim > 1 else 1
        facts.units = len(dead)

    def _softmax(self, x: Tensor, out: Tensor, axis: int) -> None:
        logits, rows = (t.detach().movedim(axis, -1) for t in (x, out))
        # With a mask, a row may have one place to look at only: it is certain, and rightly so.
        choices = (logits > logits.amax(-1, keepdim=True) - MASKED).sum(-1) > 1
        if rows.shape[-1] < 2 or not bool(choices.any()):
            return
        certain = (rows.amax(-1) > 1 - 1e-4)[choices]
        facts = self._facts("softmax")
        facts.entries += certain.numel()
        facts.flat += int(certain.sum())

    def _exponential(self, x: Tensor, operation: str) -> None:
        values = x.detach()[x.detach().isfinite()]
        if not values.numel():
            return
        name, limit = self.current(), math.log(torch.finfo(x.dtype).max)
        limit = limit / math.log(2) if operation == "exp2" else limit
        facts = self.exponentials.setdefault(name, ExponentialFacts(name, -math.inf, limit))
        facts.largest = max(facts.largest, float(values.max()))
