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

from hdnn import activations, interconnection
from hdnn.activations import Activation
from hdnn.engine import Settings, plain
from hdnn.engine.stacks import EagerEulerStack, EagerSplitStack, EulerStack, Run, SplitStack
from hdnn.errors import MissingExtraError, OptionError
from hdnn.integrators import splitting
from hdnn.shapes import autocasting

FUSED = ("tanh", "relu", "sigmoid", "softplus", "gelu", "silu", "sin", "identity")
ANCHOR = 256  # layers between stored states when drift is to stay that of a shallow stack


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
    activation: str,
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
    missing = _why_not_fused(device, dtype, n, activation)
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
        worth, why = _worth_fusing(device, n, batch, reversible)
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


def _why_not_fused(device: torch.device, dtype: torch.dtype, n: int, activation: str) -> str:
    """What is missing for a fused kernel, or nothing."""
    if activation not in FUSED:
        return f"the kernels do not know the activation {activation!r}"
    if device.type == "cpu":
        if dtype not in (torch.float32, torch.float64):
            return f"the CPU kernel is for float32 and float64, not {dtype}"
        if not _installed("numba"):
            return "numba is not installed: pip install 'hdnn[fast]'"
        return ""
    if device.type == "cuda":
        if dtype != torch.float32:
            return f"the GPU kernel is for float32, not {dtype}"
        if n > 256:
            return f"the GPU kernel is for up to 256 features, not {n}"
        if not _installed("triton"):
            return "triton is not installed: pip install 'hdnn[gpu]'"
        return ""
    return f"there is no kernel for {device.type}"


@lru_cache
def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _worth_fusing(device: torch.device, n: int, batch: int, reversible: bool) -> tuple[bool, str]:
    """The measured rule: where one kernel beats a loop of PyTorch's (docs/results/engine-*.md)."""
    if batch == 0:
        return False, "there are no samples"
    if device.type == "cuda":
        widest = 128 if reversible else 64  # past that the state no longer fits the registers
    else:
        widest = 256  # past that matrix products by BLAS are as fast one by one
    if n > widest:
        return False, f"one kernel is not faster for more than {widest} features"
    return True, "one kernel for all layers is faster than one an operation"


def traced(y: Tensor) -> bool:
    """Whether PyTorch is compiling, exporting or transforming the call, or casting inside it."""
    return torch.compiler.is_compiling() or y.is_meta or autocasting(y.device) or transformed()


def transformed() -> bool:
    """Whether the call is inside of `vmap`, `torch.func.grad` and the like."""
    return torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore[reportAttributeAccessIssue]


@lru_cache
def kernels(device: str) -> Any:
    return importlib.import_module(f"hdnn.engine.{'cpu' if device == 'cpu' else 'triton'}")


def turns(
    shears: tuple[splitting.Shear, ...], inverse: bool
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Of each shear of a layer: which half moves, and by what signed fraction of h."""
    order = splitting.inverse(shears) if inverse else shears
    return (
        tuple(int(half == "q") for half, _ in order),
        tuple(part if half == "q" else -part for half, part in order),
    )


def coefficients(
    parts: tuple[float, ...], h: Sequence[Any], inverse: bool, dtype: torch.dtype, device: Any
) -> Tensor:
    """By how much each shear moves: its fraction of the step of its layer."""
    if isinstance(h[0], Tensor):
        steps = torch.stack([*h][::-1] if inverse else [*h])
        fraction = torch.tensor(parts, dtype=steps.dtype, device=steps.device)
        return (steps[:, None] * fraction).flatten().to(device, dtype)
    return _constants(parts, tuple(h), inverse, dtype, device)


@lru_cache(maxsize=64)
def _constants(
    parts: tuple[float, ...], h: tuple[float, ...], inverse: bool, dtype: torch.dtype, device: Any
) -> Tensor:
    return coefficients(
        parts, torch.tensor(h, dtype=torch.float64).unbind(0), inverse, dtype, device
    )


@dataclass(frozen=True)
class Prepared:
    """A plan for one call, ready to run."""

    plan: Plan
    settings: Settings
    activation: str

    def _run(self, y: Tensor, kind: str, **how: Any) -> Run:
        run = Run(self.activation, kind, check=self.settings.check, **how)
        run.grid = self.settings.state == "fixed"
        if self.plan.engine == "fused":
            run.kernels = kernels(y.device.type)
            if y.is_cuda:
                # p and q take turns, which the GPU kernel likes, but not where it adds in order
                alternate = len(run.turns) == 2 and not self.settings.deterministic
                run.options = (self.settings.precision,)
                run.backward_options = (self.settings.precision, self.settings.deterministic)
                if run.turns:
                    run.options += (alternate,)
                    run.backward_options += (True, alternate)
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
        halves, parts = turns(shears, inverse)
        run = self._run(y, kind, turns=halves, inverse=inverse)
        run.segment = ANCHOR if self.plan.backprop == "checkpoint" else None
        coef = coefficients(parts, h, inverse, y.dtype, y.device)
        tensors = [None if t is None else t.contiguous() for t in (*weights, *V)]
        flat = y.reshape(-1, y.shape[-1]).contiguous()
        stack = SplitStack if transformed() else EagerSplitStack
        return stack.apply(flat, *tensors, coef, run)[0].reshape(y.shape)

    def euler(
        self, y: Tensor, K: Tensor, b: Tensor, V: Tensor | None, h: Sequence[Any], kind: str
    ) -> Tensor:
        """An Euler stack: y_N from y_0, for any batch shape."""
        run = self._run(y, kind)
        run.segment = max(1, math.isqrt(len(K))) if self.plan.backprop == "checkpoint" else None
        steps = coefficients((1.0,), h, False, y.dtype, y.device)
        if kind == "canonical" and run.kernels is not plain and y.is_cuda:
            V, run.kind = interconnection.times_canonical(K), "general"
        tensors = [None if t is None else t.contiguous() for t in (K, b, V)]
        flat = y.reshape(-1, y.shape[-1]).contiguous()
        stack = EulerStack if transformed() else EagerEulerStack
        return stack.apply(flat, *tensors, steps, run)[0].reshape(y.shape)


def prepare(settings: Settings, y: Tensor, sigma: Activation, reversible: bool) -> Prepared | None:
    """The plan for a call, or None if the reference is to run it layer by layer."""
    n = y.shape[-1]
    chosen = plan(
        settings,
        reversible=reversible,
        device=y.device,
        dtype=y.dtype,
        n=n,
        batch=y.numel() // n,
        activation=sigma.name,
        traced=traced(y) or not activations.is_registered(sigma),
    )
    return None if chosen.is_reference else Prepared(chosen, settings, sigma.name)
