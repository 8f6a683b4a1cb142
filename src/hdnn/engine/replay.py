"""What a module must find to compute once more what it computed: the same random numbers, autocast,
weights and statistics.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from hdnn.errors import TrainingError


class Context:
    """What a move depends on besides its arguments: random numbers, autocast, its module."""

    def __init__(self, like: Tensor, module: Any, random: list[Tensor]) -> None:
        self.device, self.modules, self.random = like.device, AsThen([module]), random
        self.autocast = {kind: _autocast(kind) for kind in (like.device.type, "cpu")}

    @contextmanager
    def again(self) -> Iterator[None]:
        """The same once more; statistics of batches and random generators stay as they are."""
        generators, now = _generators(self.device), random_state(self.device)
        with ExitStack() as stack:
            for one, then, later in zip(generators, self.random, now, strict=True):
                stack.callback(one.set_state, later)
                one.set_state(then)
            for kind, how in self.autocast.items():
                if how != _autocast(kind):
                    enabled, dtype, cached = how
                    stack.enter_context(torch.autocast(kind, dtype, enabled, cached))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(self.modules)
            yield


def random_state(device: torch.device, before: Sequence[Tensor] = ()) -> list[Tensor]:
    """The states of the generators that a module on a device draws from.

    Those that are as they were before are the same tensors, so that many take no memory.
    """
    found = [one.get_state() for one in _generators(device)]
    for k, old in enumerate(before):
        found[k] = old if torch.equal(old, found[k]) else found[k]
    return found


def _generators(device: torch.device) -> list[torch.Generator]:
    there = [torch.cuda.default_generators[device.index]] if device.type == "cuda" else []
    return [torch.default_generator, *there]


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
        self.weights: list[tuple[Any, bool]] = [
            (weight, weight.requires_grad)
            for part in parts
            for weight in cast(Iterable[Any], part._parameters.values())
            if type(weight) in WEIGHTS and not weight.is_inference()
        ]
        self.versions = self._versions()
        self.counting = [part for part in parts if getattr(part, "track_running_stats", False)]
        self.buffers = [
            (part, [(name, x, _version(x)) for name, x in part._buffers.items()])
            for part in parts
            if part._buffers and part not in self.counting
        ]
        self.before: list[list[tuple[dict[str, Any], dict[str, Any]]]] = []

    def done(self) -> None:
        """The modules were called for the first time: what they changed by themselves is known."""
        self.versions = self._versions()
        for part, known in self.buffers:
            if any(part._buffers.get(name) is x and _version(x) != v for name, x, v in known):
                self.counting.append(part)
        self.buffers = []

    def _versions(self) -> list[int]:
        return [weight._version for weight, _ in self.weights]

    def check(self, name: str) -> None:
        """Raise if weights were changed in place, as by the step of an optimiser."""
        if self.versions != self._versions():
            raise TrainingError(
                f"the weights of {name} changed in place after the forward pass, so its "
                "gradients would be those of other weights; take the optimiser's step after the "
                "backward pass."
            )

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
        self.swapped = [w for w, wanted in self.weights if w.requires_grad != wanted and w.is_leaf]
        for weight in self.swapped:
            weight.requires_grad_(not weight.requires_grad)
        for part in self.counting:
            for name, value in part._buffers.items():
                part._buffers[name] = None if value is None else value.clone()

    def __exit__(self, *_: object) -> None:
        for weight in self.swapped:
            weight.requires_grad_(not weight.requires_grad)
        for values, before in reversed(self.before.pop()):
            values.update(before)


class Unchanged(AsThen):
    """The same, and an error if weights have changed in place meanwhile."""

    def __init__(self, modules: Iterable[Any], name: str) -> None:
        super().__init__(modules)
        self.name = name

    def __enter__(self) -> None:
        self.check(self.name)
        super().__enter__()


def _version(x: Any) -> int:
    return 0 if x is None or x.is_inference() else x._version


def _differ(now: dict[str, Any], then: dict[str, Any]) -> bool:
    """Whether these are other tensors; those of `fully_shard` come and go by themselves."""
    for name, value in then.items():
        found = now.get(name)
        if found is not value and type(found) in PLAIN and type(value) in PLAIN:
            return True
    return False


WEIGHTS = (Tensor, nn.Parameter)
PLAIN = (*WEIGHTS, type(None))
