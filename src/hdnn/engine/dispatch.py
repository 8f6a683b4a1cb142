"""Which engine runs a stack, why, and the call itself."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hdnn import activations
from hdnn.activations import Activation
from hdnn.engine import Settings
from hdnn.engine.stacks import EulerStack, Run, SplitStack
from hdnn.errors import MissingExtraError, OptionError
from hdnn.integrators import splitting
from hdnn.shapes import autocasting

ANCHOR = 128  # shears between stored states when drift is to stay that of a shallow stack


@dataclass(frozen=True)
class Plan:
    """What runs, and why."""

    engine: str  # "reference" or "fused"
    backprop: str  # "stored", "checkpoint" or "reversible"
    why: str

    @property
    def is_reference(self) -> bool:
        return self.engine == "reference" and self.backprop == "stored"


def plan(
    settings: Settings,
    *,
    reversible: bool,
    device: torch.device,
    dtype: torch.dtype,
    n: int,
    batch: int,
    layers: int,
    traced: bool = False,
) -> Plan:
    """Choose for a stack of that size; what was asked for and cannot run is an error."""
    engine, backprop = settings.engine, settings.backprop
    if backprop == "reversible" and not reversible:
        raise OptionError(
            'backprop="reversible" needs layers with an explicit inverse (H2, MS1, MS3, Verlet, '
            'Yoshida), which forward Euler has not; use "stored" or "checkpoint".'
        )
    if settings.state == "fixed":
        return _fixed_plan(settings, reversible)
    missing = _why_not_fused(device, dtype, n)
    if engine == "fused" and missing:
        raise (MissingExtraError if "install" in missing else OptionError)(
            f'engine="fused" cannot run here: {missing}.'
        )
    if engine == "fused" and backprop == "stored" and reversible:
        raise OptionError(
            'engine="fused" keeps no states of an invertible stack; use backprop="checkpoint" '
            'or "reversible", or engine="reference".'
        )
    if engine == "auto":
        worth, why = _worth_fusing(device, n, batch, layers)
        if traced:
            engine, why = "reference", "the call is traced or transformed by PyTorch"
        elif missing:
            engine, why = "reference", missing
        elif backprop == "stored" and reversible:
            engine, why = "reference", "stored states are asked for"
        else:
            engine = "fused" if worth else "reference"
    else:
        why = f'engine="{engine}" is asked for'
    if backprop == "auto":
        if engine == "reference":
            backprop = "stored"
        else:
            backprop = "checkpoint" if reversible else "stored"
    return Plan(engine, backprop, why)


def _fixed_plan(settings: Settings, reversible: bool) -> Plan:
    if not reversible:
        raise OptionError(
            'state="fixed" makes reversals exact, but forward Euler has none; use state="float".'
        )
    if settings.engine == "fused":
        raise OptionError(
            'state="fixed" runs on the reference engine only; use engine="auto" or "reference".'
        )
    if settings.backprop not in ("auto", "reversible"):
        raise OptionError(f'state="fixed" is for backprop="reversible", not "{settings.backprop}".')
    return Plan("reference", "reversible", 'state="fixed" is asked for')


def _why_not_fused(device: torch.device, dtype: torch.dtype, n: int) -> str:
    """What is missing for a fused kernel, or nothing."""
    if device.type == "cpu":
        if dtype not in (torch.float32, torch.float64):
            return f"the CPU kernel is for float32 and float64, not {dtype}"
        if not _installed("numba") or not _installed("hdnn.engine.cpu"):
            return "numba is not installed: pip install 'hdnn[fast]'"
        return ""
    if device.type == "cuda":
        if dtype != torch.float32:
            return f"the GPU kernel is for float32, not {dtype}"
        if n > 256:
            return f"the GPU kernel is for up to 256 features, not {n}"
        if not _installed("triton") or not _installed("hdnn.engine.triton"):
            return "triton is not installed: pip install 'hdnn[gpu]'"
        return ""
    return f"there is no kernel for {device.type}"


@lru_cache
def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _worth_fusing(device: torch.device, n: int, batch: int, layers: int) -> tuple[bool, str]:
    """The measured rule: where one kernel beats a loop of PyTorch's."""
    if device.type == "cuda":
        return True, "one kernel launch instead of one an operation"
    if batch == 0:
        return False, "there are no samples"
    return True, "one kernel keeps the state in the cache"


def traced(y: Tensor) -> bool:
    """Whether PyTorch is compiling, exporting or transforming the call, or casting inside it."""
    return (
        torch.compiler.is_compiling()
        or y.is_meta
        or autocasting(y.device)
        or torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore[reportAttributeAccessIssue]
    )


@lru_cache
def kernels(device: str) -> Any:
    return importlib.import_module(f"hdnn.engine.{'cpu' if device == 'cpu' else 'triton'}")


@lru_cache(maxsize=64)
def _schedule(
    shears: tuple[splitting.Shear, ...], N: int, inverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """half, layer and signed fraction of h of every shear, in the order they are taken."""
    turns = splitting.inverse(shears) if inverse else shears
    order = reversed(range(N)) if inverse else range(N)
    steps = [(half == "q", j, part) for j in order for half, part in turns]
    half = torch.tensor([int(q) for q, _, _ in steps])
    layer = torch.tensor([j for _, j, _ in steps])
    sign = [part if q else -part for q, _, part in steps]
    return half, layer, torch.tensor(sign, dtype=torch.float64)


def _coefficients(fraction: Tensor, layer: Tensor, h: Sequence[Any], like: Tensor) -> Tensor:
    if isinstance(h[0], Tensor):
        steps = torch.stack([*h])
        index = layer.to(steps.device)
        return (fraction.to(steps) * steps[index]).to(like)
    if h[0] == h[-1] and len(set(h)) == 1:
        return (fraction * h[0]).to(like)
    return (fraction * torch.tensor(h, dtype=torch.float64)[layer]).to(like)


@dataclass(frozen=True)
class Prepared:
    """A plan for one call, ready to run."""

    plan: Plan
    settings: Settings
    activation: str

    def _run(self, y: Tensor, kind: str, half: Tensor, layer: Tensor) -> Run:
        run = Run(half, layer, self.activation, kind, check=self.settings.check)
        run.grid = self.settings.state == "fixed"
        if self.plan.engine == "fused":
            run.kernels = kernels(y.device.type)
            if y.is_cuda:
                run.options = (self.settings.precision,)
                run.backward_options = (self.settings.precision, self.settings.deterministic)
        return run

    def split(
        self,
        y: Tensor,
        weights: tuple[Tensor, Tensor, Tensor, Tensor],
        V: tuple[Tensor | None, Tensor | None],
        h: Sequence[Any],
        shears: tuple[splitting.Shear, ...],
        kind: str,
        inverse: bool,
    ) -> Tensor:
        """A shear stack: y_N from y_0, for any batch shape."""
        half, layer, fraction = _schedule(shears, len(weights[0]), inverse)
        run = self._run(y, kind, half, layer)
        run.segment = ANCHOR if self.plan.backprop == "checkpoint" else None
        coef = _coefficients(fraction, layer, h, y)
        tensors = [None if t is None else t.contiguous() for t in (*weights, *V)]
        flat = y.reshape(-1, y.shape[-1]).contiguous()
        return SplitStack.apply(flat, *tensors, coef, run)[0].reshape(y.shape)

    def euler(
        self, y: Tensor, K: Tensor, b: Tensor, V: Tensor | None, h: Sequence[Any], kind: str
    ) -> Tensor:
        """An Euler stack: y_N from y_0, for any batch shape."""
        run = self._run(y, kind, _NONE, _NONE)
        run.segment = max(1, math.isqrt(len(K))) if self.plan.backprop == "checkpoint" else None
        steps = torch.stack([*h]) if isinstance(h[0], Tensor) else torch.tensor(h).double()
        tensors = [None if t is None else t.contiguous() for t in (K, b, V)]
        flat = y.reshape(-1, y.shape[-1]).contiguous()
        return EulerStack.apply(flat, *tensors, steps.to(y), run)[0].reshape(y.shape)


def prepare(
    settings: Settings, y: Tensor, K: Tensor, sigma: Activation, reversible: bool
) -> Prepared | None:
    """The plan for a call, or None if the reference is to run it layer by layer."""
    n = y.shape[-1]
    chosen = plan(
        settings,
        reversible=reversible,
        device=y.device,
        dtype=y.dtype,
        n=n,
        batch=y.numel() // n,
        layers=len(K),
        traced=traced(y) or not activations.is_registered(sigma),
    )
    return None if chosen.is_reference else Prepared(chosen, settings, sigma.name)


_NONE = torch.empty(0, dtype=torch.int64)
