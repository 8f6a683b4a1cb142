"""Which engine, kernels and backprop run a stack, and why."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from hdnn.base import memory
from hdnn.base.shapes import autocasting
from hdnn.engine import Settings, choice
from hdnn.engine.backprop import METHODS, Stored
from hdnn.engine.call import Call
from hdnn.engine.fixed import FixedShears
from hdnn.engine.kernels.blas import BlasKernel
from hdnn.engine.kernels.cpu import CpuKernel
from hdnn.engine.kernels.factors import float32_setting
from hdnn.engine.kernels.plain import PlainKernel
from hdnn.engine.kernels.products import ProductsKernel
from hdnn.engine.kernels.protocol import ACTIVATIONS, Stack, installed
from hdnn.engine.kernels.triton import MAX_WIDTH, TritonEuler, TritonShears
from hdnn.engine.tracing import constant, transformed, watched
from hdnn.errors import MissingExtraError, OptionError

__all__ = [
    "FUSED",
    "EnginePlan",
    "kernel",
    "kernel_name",
    "method",
    "plan",
    "stored_limit",
    "table_of_threads",
    "transformed",
    "watched",
]

FUSED = ACTIVATIONS
HALF = (torch.bfloat16, torch.float16)  # converted to float32 on the way in, and back
NOT_REVERSIBLE = (
    'backprop="reversible" needs layers with an explicit inverse (H2, MS1, MS3, Verlet, Yoshida), '
    'which forward Euler has not; use "stored" or "checkpoint".'
)


SHARE, NARROW_SHARE, FEW_SHARE = 32, 80, 16
"""`auto` stores the states of a stack in at most this part of the memory: one in so many.

Beyond that it keeps a few states and rebuilds those between, if the layers can be undone, or keeps
about sqrt(N) checkpoints and runs the layers between them twice. On a GPU the second number holds
for up to 256 features, and the third for up to 8 n samples, whose states are not large beside the
weights.
"""
UNIT_SHARE = 32
"""The same for a unit of an image network, whatever the device."""

_MACHINE = memory.total_bytes()


@dataclass(frozen=True)
class EnginePlan:
    """What runs, and why."""

    engine: str  # "reference" or "fused"
    backprop: str  # "stored", "checkpoint", "reversible" or "checked": see `backprop.py`
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

    `steps` are layers of forward Euler, or shears, which read half a state each. By default
    gradients are those of stored states for any weights: what is rebuilt from later states is
    compared with states that were kept, and computed again where they differ.
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
        worth, why = _worth_fusing(batch)
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
        states = steps * batch * (n // 2 if reversible else n) * max(4, dtype.itemsize)
        if device.type == "cpu":
            states *= 2  # with what their activations give
        elif n > MAX_WIDTH:  # with what their activations read
            states *= {"tf32": 1.5, "bf16": 1.0}.get(_precision(settings, device, dtype), 2.0)
        share = SHARE
        if device.type == "cuda":
            share = FEW_SHARE if batch <= 8 * n else NARROW_SHARE if n <= MAX_WIDTH else SHARE
        if engine == "fused" and states > memory_of(device) / share:
            backprop = "checked" if reversible else "checkpoint"
            why += f"; all states would take more than 1/{share} of the memory"
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
    """How many bytes of states `auto` stores at most for a unit of an image network."""
    return memory_of(device) / UNIT_SHARE


@constant
def memory_of(device: torch.device) -> float:
    """Bytes of the device, or of the machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return _MACHINE


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
    kernels, module, extra = FUSED_KERNELS[device.type]
    why = list(kernels.values())[-1].why_not(dtype, n)
    if not why and not installed(module):
        return f"{module} is not installed: pip install 'hdnn[{extra}]'", MissingExtraError
    return why, OptionError


FUSED_KERNELS: dict[str, tuple[dict[str, Any], str, str]] = {
    "cpu": ({"tiles": CpuKernel, "blas": BlasKernel}, "numba", "fast"),
    "cuda": (
        {"shears": TritonShears, "euler": TritonEuler, "products": ProductsKernel},
        "triton",
        "gpu",
    ),
}
"""By device: the kernels by name, the least picky last, who compiles them, and the extra."""


def _worth_fusing(batch: int) -> tuple[bool, str]:
    """Whether there is anything to run; `choice.py` decides by which kernel."""
    if batch == 0:
        return False, "there are no samples"
    return True, "one launch for all layers is faster than one an operation"


# Kernels


@lru_cache(maxsize=1024)
def method(
    stack: Stack, engine: str, backprop: str, settings: Settings, name: str | None = None
) -> Stored:
    """How a stack of such sizes runs: its kernels, and what the backward pass starts from.

    The precision in the settings must not be "auto" any more. `name` is that of the kernel, by
    default the best of `kernel_name`.
    """
    if settings.state == "fixed":
        return Stored(stack, FixedShears)
    name = name or kernel_name(stack, settings.precision)
    make = partial(kernel, engine=engine, settings=settings, name=name)
    return METHODS[backprop](stack, make, check=settings.check, limit=limit(settings, stack.dtype))


def limit(settings: Settings, dtype: torch.dtype) -> float:
    """The relative error of a rebuilt state's worst entry that counts as rounding.

    Where factors of products are rounded, it is one unit in their last place: of two entries that
    differ by a float32 rounding, a few are rounded to different sides.
    """
    coarse = {"tf32": 2.0**-10, "bf16": 2.0**-7}
    return coarse.get(settings.precision, 64 * torch.finfo(dtype).eps)


def kernel_name(stack: Stack, precision: str) -> str:
    """The fastest fused kernel for a stack."""
    if stack.device.type == "cpu":
        n = stack.parts * math.isqrt(max(stack.rows) * stack.width)
        return cpu_kernel(stack.turns, stack.dtype, n, stack.samples, stack.layers)
    return gpu_kernel(stack.turns, precision, stack.features, stack.samples, stack.layers)


def cpu_kernel(
    turns: tuple[int, ...], dtype: torch.dtype, n: int, samples: int, layers: int
) -> str:
    """The fastest kernel of a CPU."""
    wide = "float64" if dtype == torch.float64 else "float32"
    table, scheme = table_of_threads(), choice.scheme(turns)
    return choice.best(table, scheme, wide, max(1, n), max(1, samples), layers)


@constant
def table_of_threads() -> str:
    """Which times of the table hold for the number of threads that PyTorch takes now."""
    return "cpu" if torch.get_num_threads() > 1 else choice.ONE_THREAD


def cpu_kernel_about(turns: tuple[int, ...], dtype: torch.dtype, n: int, samples: int) -> str:
    """The same; compilers may leave the sizes open."""
    return cpu_kernel(
        turns, dtype, choice.nearest_width(n), choice.nearest_batch(samples, "cpu"), 16
    )


def gpu_kernel(turns: tuple[int, ...], precision: str, n: int, samples: int, layers: int) -> str:
    """The fastest kernel of a GPU."""
    if turns and {*turns} != {0, 1}:  # one half never moves
        return "shears" if n <= MAX_WIDTH else "plain"
    if n <= MAX_WIDTH:
        scheme, batch = choice.scheme(turns), max(1, samples)
        if choice.best("cuda", scheme, precision, n, batch, layers) == "one kernel":
            return "shears" if turns else "euler"
    return "products"


def gpu_kernel_about(
    turns: tuple[int, ...], precision: str, n: int, samples: Any, layers: int
) -> str:
    """The same; compilers may leave the number of samples open."""
    return gpu_kernel(turns, precision, n, choice.nearest_batch(samples, "cuda"), layers)


def kernel(stack: Stack, engine: str, settings: Settings, name: str | None = None) -> Any:
    """The kernel that runs a stack."""
    if engine == "reference":
        return PlainKernel(stack)
    name = name or kernel_name(stack, settings.precision)
    if name == "plain":
        return PlainKernel(stack)
    made = FUSED_KERNELS[stack.device.type][0][name]
    if stack.device.type == "cpu":
        return made(stack)
    return made(stack, settings.precision, settings.deterministic)


def precision(settings: Settings, y: Tensor) -> str:
    """How a GPU multiplies: as asked, else as the dtype or PyTorch's own setting says."""
    return _precision(settings, y.device, y.dtype)


def _precision(settings: Settings, device: torch.device, dtype: torch.dtype) -> str:
    if settings.precision != "auto" or device.type != "cuda":
        return settings.precision
    dtype = torch.get_autocast_dtype("cuda") if autocasting(device) else dtype
    if dtype in HALF:
        return "bf16" if dtype == torch.bfloat16 else "tf32"
    wanted = _matmul_setting()
    return {"high": "tf32", "medium": "bf16"}.get(wanted, "ieee")


@constant
def _matmul_setting() -> str:
    return float32_setting()
