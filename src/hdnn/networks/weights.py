"""Weights as modules hold them: constants, free entries, computed by hooks, smooth over layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm

from hdnn.base.shapes import Step, layer_steps
from hdnn.errors import ShapeError
from hdnn.operators import block_sparse


class KeepsConstants(nn.Module):
    """A module whose buffers have their values again after `to_empty`, whatever its device was.

    `to_empty` gives parameters new memory, and `reset_parameters` new values, but nothing would
    give constants theirs. On the meta device, where tensors have no values, they are kept aside.
    """

    def add_constant(
        self, name: str, value: Tensor | None, like: Tensor, *, persistent: bool = True
    ) -> None:
        """Register a buffer, given by its value on the CPU, where the tensor `like` lies."""
        buffer = None if value is None else value.to(like.device, copy=True)
        self.register_buffer(name, buffer, persistent=persistent)
        if value is not None and like.is_meta:
            self.kept_aside[name] = value.clone()

    @property
    def kept_aside(self) -> dict[str, Tensor]:
        """The values of buffers that are on the meta device."""
        return self.__dict__.setdefault("_aside", {})

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        aside = self.kept_aside
        for name, was in before.items():
            now = self._buffers[name]
            if was is None or now is None or now is was:
                continue
            if was.is_meta and not now.is_meta:
                if name in aside:
                    overwrite(now, aside.pop(name))
            elif now.is_meta and not was.is_meta:
                aside[name] = was.detach()
            elif not now.is_meta:
                overwrite(now, was)  # which `to_empty` has not copied
        return self

    def _load_from_state_dict(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)
        # `load_state_dict(assign=True)` replaces tensors on the meta device; some are in no file.
        mine = [t for name, t in state_dict.items() if name.startswith(prefix)]
        for name in [*self.kept_aside] if local_metadata.get("assign_to_params_buffers") else ():
            value, now = self.kept_aside.pop(name), self._buffers[name]
            if now is not None and now.is_meta:
                self._buffers[name] = value.to(mine[0].device if mine else "cpu", copy=True)


@torch.no_grad()
def overwrite(tensor: Tensor, value: Tensor) -> None:
    """Copy values into a tensor, also into one whose rows are shared out among processes."""
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is not None:  # as `torch.distributed.fsdp.fully_shard` does it
        shared: Any = torch.distributed
        value = value.to(tensor.device, tensor.dtype)
        value = shared.tensor.distribute_tensor(value, mesh, tensor.placements)  # pyright: ignore
    tensor.copy_(value)


# Stored by their free entries alone: as `name_free`, for matrices called `name`.


def store(module: KeepsConstants, name: str, matrix: Tensor, free: Tensor) -> None:
    """Store the entries of a matrix where `free` is true, as a parameter of the module."""
    index = block_sparse.indices(free.expand(matrix.shape)).cpu()
    module.add_constant(f"_{name}_index", index, matrix, persistent=False)
    values = block_sparse.values(matrix, module.get_buffer(f"_{name}_index"))
    module.register_parameter(f"{name}_free", nn.Parameter(values))


def filled(module: nn.Module, name: str, shape: Sequence[int]) -> Tensor:
    """The matrices that the stored entries fill, zeros included."""
    values, index = getattr(module, f"{name}_free"), getattr(module, f"_{name}_index")
    return block_sparse.dense(values, index, shape)


# Computed by hooks before each forward pass: `torch.nn.utils.prune`, `weight_norm` and
# `spectral_norm` keep the parameter under another name and set its weight as a plain attribute of
# the module each time the module is called. To read weights without a call, run these hooks first.
# (`torch.nn.utils.parametrize` computes a weight whenever it is read, and needs nothing.)


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


def smoothness(K: Tensor, b: Tensor, h: Step) -> Tensor:
    """The regulariser `R_K`, which is small where weights change little from layer to layer.

        R_K = h/2 sum_{j=1}^{N-1} |K_j - K_{j-1}|_F^2 + |b_j - b_{j-1}|^2

    Where each layer has its own step, `h_j` weighs the difference between layers j and j-1.

    Args:
        K: weights (N, r, n).
        b: biases (N, r).
        h: the step, or one for each layer.

    Returns:
        `R_K`, a tensor of one number, with its gradient.

    Raises:
        ShapeError: if K and b have not as many layers.
        StepError: if a step is not finite and > 0, or there are not as many steps as layers.

    Examples:
        >>> import torch
        >>> import hdnn
        >>> K, b = torch.eye(2).repeat(3, 1, 1), torch.zeros(3, 2)
        >>> hdnn.regularization.smoothness(K, b, h=0.1)
        tensor(0.)
        >>> K[2] = 0  # a jump of |I|^2 = 2 before the last layer
        >>> hdnn.regularization.smoothness(K, b, h=0.1)
        tensor(0.1000)
    """
    if K.shape[0] != b.shape[0]:
        raise ShapeError(f"K has {K.shape[0]} layers, but b has {b.shape[0]}; both must have N.")
    steps = layer_steps("R_K", h, len(K))
    jumps = K.diff(dim=0).square().flatten(1).sum(1) + b.diff(dim=0).square().flatten(1).sum(1)
    if isinstance(h, (int, float)):  # makes no tensor, so that a CUDA graph can record it
        return 0.5 * h * jumps.sum()
    h = h.expand(len(K)) if isinstance(h, Tensor) else K.new_tensor(steps)
    return 0.5 * (h[1:] * jumps).sum()
