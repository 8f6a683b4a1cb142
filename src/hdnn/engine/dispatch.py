"""Which engine runs a stack, and why."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from hdnn.base import memory
from hdnn.engine import Settings
from hdnn.errors import MissingExtraError, OptionError
from hdnn.integrators import splitting

FUSED = ("tanh", "relu", "sigmoid", "softplus", "gelu", "silu", "sin", "identity")
HALF = (torch.bfloat16, torch.float16)  # converted to float32 on the way in, and back
NOT_REVERSIBLE = (
    'backprop="reversible" needs layers with an explicit inverse (H2, MS1, MS3, Verlet, Yoshida), '
    'which forward Euler has not; use "stored" or "checkpoint".'
)


SHARE = 1 / 32
"""Of the memory of a GPU, or of the machine: up to which `auto` stores the states of a stack.

Beyond that it keeps about sqrt(N) checkpoints, and runs the layers between them twice.
"""
TOO_LARGE = f"; all states would take more than 1/{1 / SHARE:.0f} of the memory"

_MACHINE = memory.total_bytes()


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
    steps: int,
    activation: str,
    traced: bool = False,
) -> Plan:
    """Choose for a stack of that size; what was asked for and cannot run is an error.

    `steps` are layers of forward Euler, or shears, which read half a state each. By default no
    states are rebuilt from later ones: gradients are those of stored states for any weights.
    """
    engine, backprop = settings.engine, settings.backprop
    if backprop == "reversible" and not reversible:
        raise OptionError(NOT_REVERSIBLE)
    if settings.state == "fixed":
        return _fixed_plan(settings, reversible)
    missing = _why_not_fused(device, dtype, n, activation)
    if engine == "fused" and missing:
        raise (MissingExtraError if "install" in missing else OptionError)(
            f'engine="fused" cannot run here: {missing}.'
        )
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
    return Plan(engine, backprop, why)


def plan_of_call(
    settings: Settings,
    y: Tensor,
    activation: str,
    N: int,
    shears: tuple[splitting.Shear, ...] | None,
    traced: bool,
) -> Plan:
    """The plan for a state y and N layers of shears, or of forward Euler."""
    n = y.shape[-1]
    return plan(
        settings,
        reversible=shears is not None,
        device=y.device,
        dtype=y.dtype,
        n=n,
        batch=y.numel() // n if n else 0,
        steps=N * (1 if shears is None else len(shears)),
        activation=activation,
        traced=traced,
    )


def stored_limit(device: torch.device) -> float:
    """How many bytes of states `auto` stores at most for one stack or unit on that device."""
    if device.type == "cuda":
        return SHARE * torch.cuda.get_device_properties(device).total_memory
    return SHARE * _MACHINE


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
        if dtype not in (torch.float32, torch.float64, *HALF):
            return f"the CPU kernel is not for {dtype}"
        if not _installed("numba"):
            return "numba is not installed: pip install 'hdnn[fast]'"
        return ""
    if device.type == "cuda":
        if dtype not in (torch.float32, *HALF):
            return f"the GPU kernel is for float32 and half precision, not {dtype}"
        if n > 256:
            return f"the GPU kernel is for up to 256 features, not {n}"
        if not _installed("triton"):
            return "triton is not installed: pip install 'hdnn[gpu]'"
        return ""
    return f"there is no kernel for {device.type}"


def has_triton() -> bool:
    """Whether kernels for a GPU can be compiled here."""
    return _installed("triton")


def _installed(module: str) -> bool:
    return _found(module)


@cache
def _found(module: str) -> bool:
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


def traced(*tensors: Tensor | None) -> bool:
    """Whether PyTorch is compiling or transforming the call, or some tensor is no plain one."""
    plain = (Tensor, nn.Parameter, type(None))
    return (
        torch.compiler.is_compiling()
        or any(type(t) not in plain or (t is not None and t.is_meta) for t in tensors)
        or watched()
        or transformed()
    )


def watched() -> bool:
    """Whether PyTorch follows each operation: traced, counted, or with derivatives forwards."""
    return (
        forward_ad._current_level >= 0
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
    )


def transformed() -> bool:
    """Whether the call is inside of `vmap`, `torch.func.grad` and the like."""
    return torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore[reportAttributeAccessIssue]


def batched(g: Tensor) -> bool:
    """Whether g is many gradients at once, by `vmap` or `torch.autograd.grad(is_grads_batched)`."""
    return transformed() or torch._C._functorch.is_legacy_batchedtensor(g)  # pyright: ignore[reportAttributeAccessIssue]


# `torch.compile` asks these while it traces, as torch.compiler.assume_constant_result has it, which
# would import the compiler now. A PyTorch that does not know the mark sees a transform everywhere,
# and so the layers one by one.
for ask in (transformed, stored_limit, _installed):
    ask._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
