"""Weights that hooks compute before each forward pass: pruned ones, or those of a weight norm.

`torch.nn.utils.prune`, `weight_norm` and `spectral_norm` keep the parameter under another name and
set its weight as a plain attribute of the module each time the module is called. To read weights
without a call, run these hooks first. (`torch.nn.utils.parametrize` computes a weight whenever it
is read, and needs nothing.)
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm


def refresh(module: nn.Module) -> None:
    """Run the hooks that compute weights of a module, as a call of the module would."""
    if not module._forward_pre_hooks:
        return
    computed = {name for name, value in vars(module).items() if isinstance(value, Tensor)}
    named = {key: target(hook) for key, hook in module._forward_pre_hooks.items()}
    others = computed - set(named.values())  # made by hooks that do not name their weight
    for key, hook in module._forward_pre_hooks.items():
        if named[key] in computed or (named[key] is None and others):
            _run(module, key, hook)


def target(hook: Any) -> str | None:
    """The name of the tensor that a hook computes, if it has one."""
    return getattr(hook, "_tensor_name", getattr(hook, "name", None))


def _run(module: nn.Module, key: int, hook: Any) -> None:
    if isinstance(hook, SpectralNorm):  # reading must not advance its power iteration
        setattr(module, hook.name, hook.compute_weight(module, do_power_iteration=False))
        return
    weight = next(module.parameters())
    given = (weight.new_zeros(1, getattr(module, "features", 1)),)
    if key in module._forward_pre_hooks_with_kwargs:
        hook(module, given, {})
    else:
        hook(module, given)
