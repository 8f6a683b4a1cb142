"""One call of a stack: what was checked and decided for it serves every call that is like it.

Checks, plans and schedules cost more than a small stack itself. They depend on shapes, dtypes,
devices and options alone, so a call that is `like` an earlier one goes straight to its kernels.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import threading
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hdnn import activations
from hdnn.activations import Activation
from hdnn.base.shapes import Step, autocasting
from hdnn.engine import Settings, compiled, current, dispatch, stacks
from hdnn.engine.dispatch import Plan
from hdnn.engine.stacks import Run
from hdnn.integrators import splitting
from hdnn.interconnection import times_J, times_X

REMEMBERED = 1024

_known: dict[Any, Any] = {}


class Way:
    """How a call runs other than layer by layer: as an earlier one like it, or as planned."""

    def __init__(
        self,
        scheme: Any,
        y: Tensor,
        tensors: tuple[Any, ...],
        h: Step,
        sigma: Activation,
        engine: str | None,
        backprop: str | None,
        trajectory: bool,
    ) -> None:
        self.call: Any = None
        self.asked: Any = None
        self.given = (engine, backprop, y, tensors, h, sigma)
        if trajectory:
            return
        self.asked = "compiled"
        if not torch.compiler.is_compiling():
            self.asked = current(engine, backprop)
            self.key = like(scheme, self.asked, sigma, h, y, *tensors)
            self.call = known(self.key)

    def plan(
        self,
        kind: str,
        N: int,
        shears: tuple[splitting.Shear, ...] | None = None,
        inverse: bool = False,
    ) -> None:
        """Decide, now that the arguments are known to be sound."""
        if self.asked is None:
            return
        engine, backprop, y, tensors, h, sigma = self.given
        if self.asked == "compiled":
            self.call = compiled.make(y, sigma, engine, backprop, kind, N, shears, inverse)
            return
        made = make(kind, self.asked, y, tensors, sigma, h, N, shears, inverse)
        self.call = remember(self.key, made)


def like(
    scheme: Any, settings: Settings, sigma: Activation, h: Step, y: Tensor, *tensors: Any
) -> Any:
    """What decides how a call runs, or None where PyTorch is transforming it."""
    if dispatch.transformed() or dispatch.watched():
        return None
    try:
        device = y.device.type
        if device == "meta":
            return None
        key = [scheme, settings, sigma, y.__class__, y.shape, y.dtype, y.device]
        for t in tensors:
            key += (t,) if t is None else (t.__class__, t.shape, t.dtype, t.device)
        if isinstance(h, Tensor):
            key += (h.shape, h.dtype, h.device)
        elif isinstance(h, tuple):
            key += (h, *[step.__class__ for step in h])  # 1, 1.0 and True are equal
        else:
            key += (h.__class__, h)
        if torch.is_autocast_enabled(device):
            key.append(torch.get_autocast_dtype(device))
        if device == "cuda":
            key.append(torch.get_float32_matmul_precision())
        return tuple(key)
    except AttributeError:  # some argument is no tensor, which the checks will say
        return None


def known(key: Any) -> Any:
    """The call that was made for this key, or None."""
    try:
        return _known.get(key)
    except TypeError:  # a list of steps, say
        return None


def remember(key: Any, call: Any) -> Any:
    """Keep a call for the next that is like it."""
    if key is not None and call is not None:
        if len(_known) >= REMEMBERED:
            _known.clear()
        with contextlib.suppress(TypeError):
            _known[key] = call
    return call


def make(
    kind: str,
    settings: Settings,
    y: Tensor,
    tensors: tuple[Any, ...],
    sigma: Activation,
    h: Step,
    N: int,
    shears: tuple[splitting.Shear, ...] | None = None,
    inverse: bool = False,
) -> Call | None:
    """How a call runs, or None if the reference is to run it layer by layer."""
    traced = dispatch.traced(y, *tensors) or not activations.is_registered(sigma)
    plan = dispatch.plan_of_call(settings, y, sigma.name, N, shears, traced)
    if plan.is_reference:
        return None
    halves, parts = turns(shears, inverse)
    run = Run(sigma.name, kind, N, halves, inverse, check=settings.check)
    return Call(plan, settings, run, y, h, parts)


class Call:
    """A stack of certain sizes, ready to run."""

    def __init__(
        self,
        plan: Plan,
        settings: Settings,
        run: Run,
        y: Tensor,
        h: Step,
        parts: tuple[float, ...],
    ) -> None:
        learned = isinstance(h, Tensor)
        self.parts = parts  # by which a layer moves, of h
        self.run = lay_out(run, plan.engine, plan.backprop, settings, y, learned=learned)
        # The kernels know no half precision: they take such a state, and give it back, by float32.
        fused = plan.engine == "fused"
        self.dtype = torch.float32 if fused and y.dtype in dispatch.HALF else y.dtype
        self.converting = fused and (self.dtype != y.dtype or autocasting(y.device))
        # Inside of a transform of PyTorch's, all tensors must come as arguments.
        self.given = learned or dispatch.transformed()
        if not self.given:
            self.run.coef = self._coef(h, y)

    def _coef(self, h: Step, y: Tensor) -> Tensor:
        run = self.run
        return coefficients(self.parts, h, run.layers, run.inverse, self.dtype, y.device)

    def __call__(
        self, y: Tensor, weights: tuple[Tensor, ...], link: Tensor | None, h: Step
    ) -> Tensor:
        """y_N from y_0, for any batch shape; X or J is the link."""
        if self.converting:
            with torch.autocast(y.device.type, enabled=False):
                wide = self.dtype
                link = None if link is None else link.to(wide)
                return self._run(y.to(wide), tuple([w.to(wide) for w in weights]), link, h).to(
                    y.dtype
                )
        return self._run(y, weights, link, h)

    def _run(self, y: Tensor, weights: tuple[Tensor, ...], link: Tensor | None, h: Step) -> Tensor:
        coef, shape = self._coef(h, y) if self.given else None, y.shape
        if len(shape) != 2:
            y = y.reshape(-1, shape[-1])
        tensors = [
            t if t is None or t.is_contiguous() else t.contiguous() for t in moving(weights, link)
        ]
        record = getattr(_recording, "record", None)
        if record is not None:
            record.append((self, tensors, coef))
            return y
        y = y if y.is_contiguous() else y.contiguous()
        y_N = stacks.call(y, (*tensors, coef), self.run)
        return y_N if len(shape) == 2 else y_N.reshape(shape)


_recording = threading.local()


@contextlib.contextmanager
def recorded() -> Iterator[list[tuple[Call, list[Tensor | None], Tensor | None]]]:
    """The calls in here are not run but recorded: each with its weights, as kernels take them."""
    _recording.record = record = []
    try:
        yield record
    finally:
        del _recording.record


def moving(weights: tuple[Tensor, ...], link: Tensor | None) -> tuple[Tensor | None, ...]:
    """The weights and V, by which z moves the state: K X^T and so on, or None if that is K."""
    if len(weights) == 2:
        return *weights, None if link is None else times_J(weights[0], link)
    if link is None:
        return *weights, None, None
    K_p, K_q, _, _ = weights
    return *weights, times_X(K_p, link), times_X(K_q, link, adjoint=True)


def lay_out(
    run: Run, engine: str, backprop: str, settings: Settings, y: Tensor, *, learned: bool
) -> Run:
    """Complete how a stack of such states runs: kernels, their options, and stored states."""
    run.backprop, run.grid = backprop, settings.state == "fixed"
    if backprop == "checkpoint":
        run.segment = between(run.layers)
    if engine == "fused":
        run.kernels, run.backward_options = kernels(y.device.type), (learned,)
        if y.is_cuda:
            precision, in_order = _precision(settings, y), settings.deterministic
            run.options, run.backward_options = (precision,), (precision, in_order, learned)
            if run.turns:
                # p and q take turns, which the kernel likes, but not where it adds in order
                alternate = len(run.turns) == 2 and not in_order
                run.options += (alternate,)
                run.backward_options += (alternate,)
    return run.ready(y.device)


def between(N: int) -> int:
    """Layers from one checkpoint to the next."""
    return max(1, math.isqrt(N))


@lru_cache
def kernels(device: str) -> Any:
    return importlib.import_module(f"hdnn.engine.kernels.{'cpu' if device == 'cpu' else 'triton'}")


def _precision(settings: Settings, y: Tensor) -> str:
    """How a GPU multiplies: as asked, else as the dtype or PyTorch's own setting says."""
    if settings.precision != "auto":
        return settings.precision
    dtype = torch.get_autocast_dtype("cuda") if autocasting(y.device) else y.dtype
    if dtype in (torch.bfloat16, torch.float16):
        return "bf16" if dtype == torch.bfloat16 else "tf32"
    wanted = torch.get_float32_matmul_precision()
    return {"high": "tf32", "medium": "bf16"}.get(wanted, "ieee")


def turns(
    shears: tuple[splitting.Shear, ...] | None, inverse: bool
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Of each shear of a layer: which half moves, and by what signed fraction of h.

    Forward Euler has no shears, and moves by h.
    """
    if shears is None:
        return (), (1.0,)
    order = splitting.inverse(shears) if inverse else shears
    return (
        tuple(int(half == "q") for half, _ in order),
        tuple(part if half == "q" else -part for half, part in order),
    )


def coefficients(
    parts: tuple[float, ...], h: Step, N: int, inverse: bool, dtype: torch.dtype, device: Any
) -> Tensor:
    """By how much each shear moves: its fraction of the step of its layer."""
    steps = h if isinstance(h, Tensor) else torch.tensor(h, dtype=torch.float64)
    steps = steps.expand(N)
    if inverse:
        steps = steps.flip(0)
    fraction = torch.tensor(parts, dtype=steps.dtype, device=steps.device)
    return (steps[:, None] * fraction).flatten().to(device, dtype)
