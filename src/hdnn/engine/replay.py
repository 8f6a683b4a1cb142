"""What a module must find to compute once more what it computed: the same random numbers, autocast,
weights and statistics.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn


class Context:
    """What a move depends on besides its arguments: random numbers, autocast, its module."""

    def __init__(self, like: Tensor, module: Any, random: list[Tensor]) -> None:
        self.device, self.modules, self.random = like.device, AsThen([module]), random
        self.drew = True  # until it is known that the move took no random numbers
        self.autocast = {kind: _autocast(kind) for kind in (like.device.type, "cpu")}

    def done(self) -> list[Tensor]:
        """The move was computed for the first time: the random state now."""
        now = random_state(self.device)
        self.drew = not all(torch.equal(a, b) for a, b in zip(self.random, now, strict=True))
        self.random = self.random if self.drew else []
        return now

    @contextmanager
    def again(self) -> Iterator[None]:
        """The same once more; statistics of batches stay as they are."""
        with ExitStack() as stack:
            if self.drew:
                devices = [self.device] if len(self.random) > 1 else []
                stack.enter_context(torch.random.fork_rng(devices))
                torch.set_rng_state(self.random[0])
                if devices:
                    torch.cuda.set_rng_state(self.random[1], self.device)
            for kind, how in self.autocast.items():
                if how != _autocast(kind):
                    enabled, dtype, cached = how
                    stack.enter_context(torch.autocast(kind, dtype, enabled, cached))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(self.modules)
            yield


def random_state(device: torch.device) -> list[Tensor]:
    """The states of the generators that a module on a device draws from."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index])
    return [one.get_state() for one in generators]


def _autocast(kind: str) -> tuple[bool, torch.dtype, bool]:
    how = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return *how, torch.is_autocast_cache_enabled()


class AsThen:
    """Inside, modules have the weights and modes that they had then, and count no batch twice.

    Other weights than now were there in `torch.func.functional_call`. A normalisation moves copies
    of its statistics.
    """

    def __init__(self, modules: Iterable[Any]) -> None:
        parts = [one for one in modules if isinstance(one, nn.Module)]
        known = {id(one) for one in parts}
        for one in parts:  # which grows meanwhile; `nn.Module.modules` takes much longer
            for part in one._modules.values():
                if part is not None and id(part) not in known:
                    known.add(id(part))
                    parts.append(part)
        own: Any = [values for part in parts for values in (part._parameters, part._buffers)]
        self.then = [(values, values.copy()) for values in own if values]
        self.modes = [(part, part.training) for part in parts]
        self.versions: list[tuple[Any, int]] = [
            (weight, weight._version)
            for part in parts
            for weight in cast(Iterable[Any], part._parameters.values())
            if type(weight) in WEIGHTS and not weight.is_inference()
        ]
        self.counting = [part for part in parts if getattr(part, "track_running_stats", False)]
        self.before: list[list[tuple[dict[str, Any], dict[str, Any]]]] = []

    def changed(self) -> bool:
        """Whether weights were changed in place, as by the step of an optimiser."""
        return any(weight._version != version for weight, version in self.versions)

    def __enter__(self) -> None:
        others = [(values, then) for values, then in self.then if _differ(values, then)]
        changed = [(values, values.copy()) for values, _ in others]
        changed += [(part._buffers, part._buffers.copy()) for part in self.counting]
        modes = [(part, mode) for part, mode in self.modes if part.training != mode]
        changed += [(vars(part), {"training": not mode}) for part, mode in modes]
        for part, mode in modes:
            part.training = mode
        self.before.append(changed)
        for values, then in others:
            values.update(then)
        for part in self.counting:
            for name, value in part._buffers.items():
                part._buffers[name] = None if value is None else value.clone()

    def __exit__(self, *_: object) -> None:
        for values, before in reversed(self.before.pop()):
            values.update(before)


def _differ(now: dict[str, Any], then: dict[str, Any]) -> bool:
    """Whether these are other tensors; those of `fully_shard` come and go by themselves."""
    for name, value in then.items():
        found = now.get(name)
        if found is not value and type(found) in PLAIN and type(value) in PLAIN:
            return True
    return False


WEIGHTS = (Tensor, nn.Parameter)
PLAIN = (*WEIGHTS, type(None))
