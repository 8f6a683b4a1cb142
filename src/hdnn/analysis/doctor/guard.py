"""Look at a model without changing it: weights, buffers, gradients, modes and random numbers.

A copy is looked at where the model can be copied. Where it cannot, the model itself is, and all
that it holds is put back afterwards.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from hdnn.analysis.copies import copied
from hdnn.engine.chain import mapped

CONTAINERS = (list, dict, set, deque)
HALVES = (torch.float16, torch.bfloat16)


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    """The random numbers of Python, NumPy and PyTorch go on afterwards as if nobody had drawn."""
    plain, arrays, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        random.setstate(plain)
        np.random.set_state(arrays)  # noqa: NPY002
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)


@contextmanager
def looked_at(model: nn.Module, *, widened: bool = True) -> Iterator[nn.Module]:
    """A copy of the model, or the model itself if it cannot be copied, to do anything with.

    Half precision becomes float32 unless it should not be `widened`, nothing works in place, and
    operations are those that can be differentiated twice.
    """
    with random_numbers_kept(), ExitStack() as stack:
        twin = _copied_or_none(model)
        if twin is None:
            stack.enter_context(put_back(model))
            twin = model
        if widened:
            for tensor in (*twin.parameters(), *twin.buffers()):
                if tensor.dtype in HALVES:
                    tensor.data = tensor.data.float()
        for part in twin.modules():
            if getattr(part, "inplace", False) is True:
                vars(part)["inplace"] = False
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if any(isinstance(part, nn.RNNBase) for part in twin.modules()):
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
            stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.enable_grad())
        if widened:
            stack.enter_context(torch.autocast(_device(twin).type, enabled=False))
        yield twin


class TwiceDifferentiable(TorchFunctionMode):
    """Writes functions without a second derivative by others that have one."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") in ("hardsigmoid", "hardsigmoid_"):
            return F.hardtanh(args[0] + 3, 0.0, 6.0) / 6
        return func(*args, **(kwargs or {}))


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _copied_or_none(model: nn.Module) -> nn.Module | None:
    try:
        twin = copied(model)
    except Exception:  # something in it cannot be copied
        return None
    parts = [*twin.modules()]
    return twin if len(parts) == len([*model.modules()]) else None


@contextmanager
def put_back(model: nn.Module) -> Iterator[None]:
    """What the parts of a model hold, as it was: tensors by value, and containers in containers."""
    parts = [*model.modules()]
    tensors = [*model.parameters(), *model.buffers()]
    values = [(t, t.data, t.detach().clone(), t.requires_grad, t.grad) for t in tensors]
    held = [(part, dict(vars(part))) for part in parts]
    seen: dict[int, tuple[Any, Any]] = {id(t): (t, None) for t in tensors}
    for part in parts:
        for value in vars(part).values():
            _kept(value, seen)
    try:
        yield
    finally:
        for part, attributes in held:
            vars(part).clear()
            vars(part).update(attributes)
        for value, content in seen.values():
            if content is not None:
                _refilled(value, content)
        with torch.no_grad():
            for tensor, data, value, wanted, grad in values:
                tensor.data = data
                if not torch.equal(tensor, value):
                    tensor.copy_(value)
                if tensor.requires_grad is not wanted:
                    tensor.requires_grad_(wanted)
                tensor.grad = grad


def _kept(value: Any, seen: dict[int, tuple[Any, Any]]) -> None:
    """Keep what a container, a tensor or an array holds now, and all that is in it."""
    if id(value) in seen or isinstance(value, nn.Module):
        return
    if isinstance(value, Tensor):
        seen[id(value)] = value, (value.data, value.detach().clone())
    elif isinstance(value, np.ndarray):
        seen[id(value)] = value, value.copy()
    elif isinstance(value, CONTAINERS):
        content = dict(value) if isinstance(value, dict) else [*value]
        seen[id(value)] = value, content
        for each in content.values() if isinstance(content, dict) else content:
            _kept(each, seen)
    elif isinstance(value, tuple):
        seen[id(value)] = value, None
        for each in value:
            _kept(each, seen)


def _refilled(value: Any, content: Any) -> None:
    if isinstance(value, Tensor):
        with torch.no_grad():
            value.data = content[0]
            if not torch.equal(value, content[1]):
                value.data.copy_(content[1])
    elif isinstance(value, np.ndarray):
        value[...] = content
    else:
        value.clear()
        (value.extend if isinstance(value, list | deque) else value.update)(content)


def in_float32(value: Any) -> Any:
    """Tensors in half precision, also those inside of tuples and dicts, as float32."""
    return mapped(lambda t: t.float() if t.dtype in HALVES else t, value)


def call(model: nn.Module, x: Any) -> Any:
    """Run a model on inputs as they are given: a tensor, a tuple of arguments or a dict."""
    with TwiceDifferentiable():
        if isinstance(x, (tuple, list)):
            return model(*x)
        return model(**x) if hasattr(x, "keys") else model(x)


def float_tensors(value: Any) -> list[Tensor]:
    """All tensors of real numbers inside tuples, lists, dicts and outputs of models, in order."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() and value.numel() else []
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, (tuple, list)):
        return [tensor for each in value for tensor in float_tensors(each)]
    if hasattr(value, "__dataclass_fields__"):
        return float_tensors([*vars(value).values()])
    return []
