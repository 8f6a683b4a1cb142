"""One call of a stack: its checks and decisions are reused by every later call like it.

Checks, plans and schedules cost more than a small stack itself. They depend on shapes, dtypes,
devices and options alone, so a call that agrees in them with an earlier one goes straight to its
kernels.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hdnn import activations
from hdnn.base.shapes import Step, autocasting
from hdnn.engine import Settings, autograd, compiled, current, dispatch
from hdnn.engine.call import Call, coefficients, with_V
from hdnn.engine.kernels.factors import float32_setting
from hdnn.engine.kernels.protocol import Tensors
from hdnn.engine.tracing import traced, transformed, watched

REMEMBERED = 1024

_known: dict[Any, PreparedCall] = {}


def known(call: Call, engine: str | None, backprop: str | None) -> PreparedCall | None:
    """What ran an earlier call with these sizes and options, if any: then no checks are needed."""
    if torch.compiler.is_compiling():
        return None
    try:
        return _known.get(_key(call, current(engine, backprop)))
    except (AttributeError, TypeError):  # something is not a tensor, or steps are a list
        return None


def choose(call: Call, engine: str | None, backprop: str | None) -> Any:
    """What runs a call that was checked, or None for the reference, layer by layer."""
    if torch.compiler.is_compiling():
        return compiled.choose(call, engine, backprop)
    settings = current(engine, backprop)
    unseen = traced(call.y, *call.weights, call.link) or not activations.is_registered(call.sigma)
    plan = dispatch.plan_of_call(settings, call, traced=unseen)
    if plan.is_reference:
        return None
    found = PreparedCall(call, plan, settings)
    with contextlib.suppress(TypeError):
        key = _key(call, settings)
        if key is not None:
            if len(_known) >= REMEMBERED:
                _known.clear()
            _known[key] = found
    return found


def _key(call: Call, settings: Settings) -> Any:
    """All that decides how a call runs; None if PyTorch traces or transforms the call."""
    if transformed() or watched():
        return None
    shears, kind, inverse, y, weights, link, h, sigma = call
    device = "cpu" if y.is_cpu else y.device.type  # the latter is a new string each time
    if device == "meta":
        return None
    key = [shears, kind, inverse, settings, sigma, y.__class__, y.shape, y.dtype, y.device]
    for t in weights:
        key += (t.__class__, t.shape, t.dtype, t.device)
    if link is not None:
        key += (link.__class__, link.shape, link.dtype, link.device)
    if h.__class__ is float:  # 1, 1.0 and True are equal
        key += (float, h)
    elif isinstance(h, Tensor):
        key += (h.shape, h.dtype, h.device)
    elif isinstance(h, tuple):
        key += (h, *[step.__class__ for step in h])
    else:
        key += (h.__class__, h)
    if torch.is_autocast_enabled(device):
        key.append(torch.get_autocast_dtype(device))
    if device == "cuda":
        key.append(float32_setting())
    elif device == "cpu":
        key.append(dispatch.table_of_threads())
    return tuple(key)


class PreparedCall:
    """A stack of certain sizes, ready to run."""

    def __init__(self, call: Call, plan: dispatch.EnginePlan, settings: Settings) -> None:
        y, h, fused = call.y, call.h, plan.engine == "fused"
        # The kernels have no half precision: such a state is converted to float32 and back.
        self.dtype = torch.float32 if fused and y.dtype in dispatch.HALF else y.dtype
        self.converting = fused and (self.dtype != y.dtype or autocasting(y.device))
        self.fractions, self.stack = call.fractions, call.describe(self.dtype)
        settings = replace(settings, precision=dispatch.precision(settings, y))
        name = dispatch.kernel_name(self.stack, settings.precision) if fused else None
        self.method = dispatch.method(self.stack, plan.engine, plan.backprop, settings, name)
        with torch.inference_mode(False):  # a later call may save it for its backward pass
            self.coef = None if isinstance(h, Tensor) else self._coef(h)

    def _coef(self, h: Step) -> Tensor:
        stack = self.stack
        sizes = (stack.layers, stack.inverse, stack.dtype, stack.device)
        return coefficients(self.fractions, h, *sizes)

    def __call__(self, call: Call) -> Tensor:
        """y_N from y_0, for any batch shape."""
        if not self.converting:
            return self._run(call.y, call.weights, call.link, call.h)
        wide, y, link = self.dtype, call.y, call.link
        with torch.autocast(y.device.type, enabled=False):
            weights = tuple([w.to(wide) for w in call.weights])
            link = None if link is None else link.to(wide)
            return self._run(y.to(wide), weights, link, call.h).to(y.dtype)

    def _run(self, y: Tensor, weights: tuple[Tensor, ...], link: Tensor | None, h: Step) -> Tensor:
        coef, shape = self._coef(h) if self.coef is None else self.coef, y.shape
        if len(shape) != 2:
            y = y.reshape(-1, shape[-1])
        tensors = (*with_V(weights, link), coef)
        for t in tensors:
            if t is not None and not t.is_contiguous():
                tensors = tuple([None if t is None else t.contiguous() for t in tensors])
                break
        record = _recording.record
        if record is not None:
            record.append((self, tensors))
            return y
        y_N = autograd.run(y if y.is_contiguous() else y.contiguous(), tensors, self.method)
        return y_N if len(shape) == 2 else y_N.reshape(shape)


class _Recording(threading.local):
    record: list[tuple[PreparedCall, Tensors]] | None = None


_recording = _Recording()


@contextlib.contextmanager
def recorded() -> Iterator[list[tuple[PreparedCall, Tensors]]]:
    """Record calls instead of running them: each with its tensors, as kernels take them."""
    _recording.record = record = []
    try:
        yield record
    finally:
        _recording.record = None
