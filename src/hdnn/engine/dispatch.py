"""Which engine, kernels and backprop run a stack, and why."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from hdnn.base import memory
from hdnn.base.shapes import autocasting
from hdnn.engine import Settings
from hdnn.engine.backprop import METHODS, Stored
from hdnn.engine.call import Call
from hdnn.engine.fixed import FixedShears
from hdnn.engine.kernels.blas import BlasKernel
from hdnn.engine.kernels.cpu import CpuKernel
from hdnn.engine.kernels.plain import PlainKernel
from hdnn.engine.kernels.protocol import ACTIVATIONS, Stack, installed
from hdnn.engine.kernels.triton import TritonEuler, TritonShears
from hdnn.engine.kernels.vectors import VECTOR_BYTES
from hdnn.engine.tracing import constant, transformed, watched
from hdnn.errors import MissingExtraError, OptionError

__all__ = [
    "FUSED",
    "EnginePlan",
    "kernel",
    "method",
    "plan",
    "stored_limit",
    "transformed",
    "watched",
]

FUSED = ACTIVATIONS
HALF = (torch.bfloat16, torch.float16)  # converted to float32 on the way in, and back
NOT_REVERSIBLE = (
    'backprop="reversible" needs layers with an explicit inverse (H2, MS1, MS3, Verlet, Yoshida), '
    'which forward Euler has not; use "stored" or "checkpoint".'
)


SHARE = 1 / 32
"""The part of the memory of a GPU, or of the machine, in which `auto` stores a stack's states.

Beyond that it keeps about sqrt(N) checkpoints, and runs the layers between them twice.
"""
TOO_LARGE = f"; all states would take more than 1/{1 / SHARE:.0f} of the memory"

_MACHINE = memory.total_bytes()


@dataclass(frozen=True)
class EnginePlan:
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
    steps: int,
    activation: str,
    traced: bool = False,
) -> EnginePlan:
    """Choose for a stack of that size; what was asked for and cannot run is an error.

    `steps` are layers of forward Euler, or shears, which read half a state each. By default no
    states are rebuilt from later ones: gradients are those of stored states for any weights.
    """
    engine, backprop = settings.engine, settings.backprop
    if backprop == "reversible" and not reversible:
        raise OptionError(NOT_REVERSIBLE)
    if settings.state == "fixed":
        return _fixed_plan(settings, reversible)
    missing, error = _why_not_fused(device, dtype, n, activation)
    if engine == "fused" and missing:
        raise error(f'engine="fused" cannot run here: {missing}.')
    if engine == "auto":
        worth, why = _worth_fusing(device, n, batch, reversible)
        if traced:
            engine, why = "reference", "the call is traced or transformed by PyTorch"
        elif missing:
            engine, why = "reference", missing
        else:
            engine = "fused" if worth else "reference"
    else:
        why = f'engine="{engine}" is asked for'
    if backprop == "auto":
        backprop = "stored"
        states = steps * batch * (n // 2 if reversible else n)
        if engine == "fused" and states * max(4, dtype.itemsize) > stored_limit(device):
            backprop = "checkpoint"
            why += TOO_LARGE
    return EnginePlan(engine, backprop, why)


def plan_of_call(settings: Settings, call: Call, *, traced: bool) -> EnginePlan:
    """The plan for a call."""
    y, n = call.y, call.y.shape[-1]
    return plan(
        settings,
        reversible=call.shears is not None,
        device=y.device,
        dtype=y.dtype,
        n=n,
        batch=y.numel() // n if n else 0,
        steps=len(call.weights[0]) * (1 if call.shears is None else len(call.shears)),
        activation=call.sigma.name,
        traced=traced,
    )


@constant
def stored_limit(device: torch.device) -> float:
    """How many bytes of states `auto` stores at most for one stack or unit on that device."""
    if device.type == "cuda":
        return SHARE * torch.cuda.get_device_properties(device).total_memory
    return SHARE * _MACHINE


def _fixed_plan(settings: Settings, reversible: bool) -> EnginePlan:
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
    return EnginePlan("reference", "reversible", 'state="fixed" is asked for')


def _why_not_fused(
    device: torch.device, dtype: torch.dtype, n: int, activation: str
) -> tuple[str, type[OptionError] | type[MissingExtraError]]:
    """Why no fused kernel can run (empty if one can), and the error to raise if it must."""
    if activation not in FUSED:
        return f"the kernels do not know the activation {activation!r}", OptionError
    if device.type not in FUSED_KERNELS:
        return f"there is no kernel for {device.type}", OptionError
    (shears, _), module, extra = FUSED_KERNELS[device.type]
    why = shears.why_not(dtype, n)
    if not why and not installed(module):
        return f"{module} is not installed: pip install 'hdnn[{extra}]'", MissingExtraError
    return why, OptionError


FUSED_KERNELS: dict[str, tuple[tuple[Any, Any], str, str]] = {
    "cpu": ((CpuKernel, CpuKernel), "numba", "fast"),
    "cuda": ((TritonShears, TritonEuler), "triton", "gpu"),
}
"""By device: the kernels of shears and of forward Euler, the package that compiles, its extra."""


def _worth_fusing(device: torch.device, n: int, batch: int, reversible: bool) -> tuple[bool, str]:
    """The measured rule: where one kernel beats a loop of PyTorch's (docs/results/engine-*.md)."""
    if batch == 0:
        return False, "there are no samples"
    if device.type == "cuda":
        widest = 128 if reversible else 64  # past that the state no longer fits the registers
    else:
        widest = 256  # past that, separate matrix products by BLAS are as fast
    if n > widest:
        return False, f"one kernel is not faster for more than {widest} features"
    return True, "one kernel for all layers is faster than one an operation"


# Kernels


@lru_cache(maxsize=1024)
def method(stack: Stack, engine: str, backprop: str, settings: Settings) -> Stored:
    """How a stack of such sizes runs: its kernels, and what the backward pass starts from.

    The precision in the settings must not be "auto" any more.
    """
    if settings.state == "fixed":
        return Stored(stack, FixedShears)
    make = partial(kernel, engine=engine, settings=settings)
    return METHODS[backprop](stack, make, check=settings.check)


def kernel(stack: Stack, engine: str, settings: Settings) -> Any:
    """The kernel that runs a stack."""
    if engine == "reference":
        return PlainKernel(stack)
    if stack.device.type == "cpu" and blas_is_faster(stack):
        return BlasKernel(stack)
    made = FUSED_KERNELS[stack.device.type][0][not stack.turns]
    if stack.device.type == "cpu":
        return made(stack)
    return made(stack, settings.precision, settings.deterministic)


# BLAS wins for weights of at least this many elements, if tiles are padded by at least this much.
BLAS_FROM = {
    torch.float32: ((2**16, 1.5), (2**13, 3.0)),
    torch.float64: ((2**13, 4.0),),
}


def blas_is_faster(stack: Stack) -> bool:
    """Whether separate matrix products beat the tiles of the CPU kernels.

    Full tiles are faster at every width measured, up to 512. A last tile costs as much as a full
    one, so that few samples and wide layers are left to BLAS.
    """
    lanes = VECTOR_BYTES // stack.dtype.itemsize
    padded, elements = -(-stack.samples // lanes) * lanes, max(stack.rows) * stack.width
    return any(
        elements >= least and padded > waste * stack.samples
        for least, waste in BLAS_FROM[stack.dtype]
    )


def precision(settings: Settings, y: Tensor) -> str:
    """How a GPU multiplies: as asked, else as the dtype or PyTorch's own setting says."""
    if settings.precision != "auto" or not y.is_cuda:
        return settings.precision
    dtype = torch.get_autocast_dtype("cuda") if autocasting(y.device) else y.dtype
    if dtype in HALF:
        return "bf16" if dtype == torch.bfloat16 else "tf32"
    wanted = torch.get_float32_matmul_precision()
    return {"high": "tf32", "medium": "bf16"}.get(wanted, "ieee")
