"""A stack of layers, run by the fastest kernel as one step of autograd.

`Plan` decides what runs a call; calls that agree in sizes and options reuse its decision. Eager
calls go through an autograd function, compiled graphs through an operator; both call the same
kernel. Where PyTorch transforms a call (`vmap`, `jacrev`, second derivatives), the definition in
`hdnn.schemes` runs instead.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, library, nn
from torch.autograd.forward_ad import unpack_dual

from hdnn import activations, schemes
from hdnn.activations import Activation
from hdnn.engine.backprop import METHODS, Checkpoint, Definition
from hdnn.engine.memory import Stack, device_bytes
from hdnn.engine.settings import Settings, current, in_force
from hdnn.errors import MissingExtraError, OptionError
from hdnn.schemes import Force, Scheme

ACTIVATIONS = (
    "tanh",
    "relu",
    "sigmoid",
    "softplus",
    "gelu",
    "silu",
    "sin",
    "identity",
)
DTYPES = {
    "cpu": (torch.float32, torch.float64, torch.bfloat16, torch.float16),
    "cuda": (torch.float32, torch.bfloat16, torch.float16),
}
# Converted to float32 on the way in, and back
HALF = (torch.bfloat16, torch.float16)
PLAIN = (Tensor, nn.Parameter)
# The compiler, and the extra that installs it
EXTRAS = {"cpu": ("numba", "fast"), "cuda": ("triton", "gpu")}
INSTALLED = {
    name: importlib.util.find_spec(name) is not None
    for name, _ in EXTRAS.values()
}
# Features of a state on the CPU; with more, the plain loop is as fast
WIDEST = 192
WIDEST_TILE = 64  # features that a GPU program keeps in registers
WIDEST_ROUNDED_TILE = 128  # the same with rounded factors, on tensor cores
SHARE = 8  # stored states take at most this part of the memory: one in so many
REMEMBERED = 1024

UNCHANGED = nullcontext()

OPERATORS: Any = torch.ops.hdnn

_plans: dict[Any, Plan] = {}


def run(
    scheme: Scheme,
    y: Tensor,
    forces: Sequence[Force],
    h: float | Tensor,
    sigma: Activation,
    *,
    trajectory: bool = False,
    inverse: bool = False,
    engine: str | None = None,
    backprop: str | None = None,
) -> Tensor:
    """Compute the values and gradients of `hdnn.schemes.run` with the fastest kernel.

    Args:
        scheme: how a layer steps.
        y: states `(*batch, n)`.
        forces: the forces, stacked over layers; `forces[i]` reads half i.
        h: the step, one for all layers or `(N,)`.
        sigma: the activation.
        trajectory: return all states, which the definition computes.
        inverse: compute the first state from the last.
        engine: see `Settings`; None means the engine set by `use`.
        backprop: see `Settings`; None means the backprop set by `use`.

    Raises:
        OptionError: if the requested engine or backprop cannot run this stack.

    Examples:
        >>> import torch
        >>> from hdnn import activations, engine, schemes
        >>> force = schemes.Force(torch.randn(8, 2, 2), torch.zeros(8, 2))
        >>> sigma = activations.get("tanh")
        >>> engine.run(schemes.VERLET, torch.randn(5, 4), (force, force), 0.1, sigma).shape
        torch.Size([5, 4])
    """
    if trajectory:
        return schemes.run(
            scheme, y, forces, h, sigma, trajectory=True, inverse=inverse
        )
    call = Call(scheme, y, forces, h, sigma, inverse)
    if torch.compiler.is_compiling():
        return _traced(call, engine, backprop)
    settings = in_force.get()
    if engine is not None or backprop is not None:
        settings = current(engine, backprop)
    key = _key(settings, call)
    plan = _plans.get(key)
    if plan is None:
        plan = Plan(settings, call)
        if len(_plans) >= REMEMBERED:
            _plans.clear()
        if not recording(y):  # its step would lie in memory of the graph
            _plans[key] = plan
    return plan(y, forces, h)


class Call(NamedTuple):
    """The arguments of `run`."""

    scheme: Scheme
    y: Tensor
    forces: Sequence[Force]
    h: float | Tensor
    sigma: Activation
    inverse: bool


def _key(settings: Settings, call: Call) -> tuple[Any, ...]:
    """Everything that decides how a call runs."""
    scheme, y, forces, h, sigma, inverse = call
    key = [
        settings,
        id(scheme),
        id(sigma),
        inverse,
        y.__class__,
        y.shape,
        y.dtype,
        y.device,
    ]
    for force in forces:
        for t in force:
            if t is None:
                key.append(None)
            else:
                key += (t.__class__, t.shape, t.dtype, t.device)
        key.append(force.V is not None and force.V.requires_grad)
    if isinstance(h, Tensor):
        key += (h.__class__, h.shape, h.requires_grad)
    else:
        key.append(h)
    device = "cpu" if y.is_cpu else y.device.type
    key.append(device in DTYPES and torch.is_autocast_enabled(device))
    if device == "cuda":
        key.append(matmul_precision(Settings(), y.dtype))
    return tuple(key)


class Plan:
    """The plan for running calls of certain sizes."""

    def __init__(self, settings: Settings, call: Call) -> None:
        scheme, y, forces, h, sigma, inverse = call
        self.definition = partial(
            schemes.run, scheme, sigma=sigma, inverse=inverse
        )
        fused = is_fused(settings.engine, call)
        self.dtype = torch.float32 if fused and y.dtype in HALF else y.dtype
        half = self.dtype != y.dtype
        self.convert = fused and (
            half or torch.is_autocast_enabled(y.device.type)
        )
        self.h = (
            None
            if isinstance(h, Tensor)
            else self._constant(h, len(forces[0].K), y.device)
        )
        precision = matmul_precision(settings, y.dtype)
        self.how = (fused, replace(settings, precision=precision))
        self.kernel: Any = None  # made by the first call outside a transform
        self.stack: Stack | None = None  # if the definition runs
        if fused or settings.backprop in ("checkpoint", "reversible"):
            self.stack = describe(call, self.dtype)
            backprop_of(self.stack, fused, self.how[1])  # may refuse

    def _constant(self, h: float, layers: int, device: torch.device) -> Tensor:
        # A later call may save it for its backward pass.
        with torch.inference_mode(False):
            return torch.full((layers,), h, dtype=self.dtype, device=device)

    def __call__(
        self, y: Tensor, forces: Sequence[Force], h: float | Tensor
    ) -> Tensor:
        tensors: list[Any] = [h if self.h is None else self.h]
        for force in forces:
            tensors += force
        if self.stack is None or not all_in_memory(y, tensors):
            return self.definition(y, forces, h)
        with self._without_autocast(y) if self.convert else UNCHANGED:
            state = y.to(self.dtype).reshape(-1, y.shape[-1]).contiguous()
            learns = self._lay_out(tensors) or y.requires_grad
            if self.kernel is None:
                self.kernel = method(self.stack, *self.how)
            if not (learns and torch.is_grad_enabled()):
                y_N, _ = self.kernel.forward(state, tuple(tensors), False)
                return y_N.view(y.shape).to(y.dtype)
            try:
                y_N = StackFunction.apply(self.kernel, state, *tensors)
            except RuntimeError as error:
                if "setup_context" not in str(error):
                    raise
                return self.definition(y, forces, h)  # inside a transform
            return y_N.view(y.shape).to(y.dtype)  # pyright: ignore[reportOptionalMemberAccess]

    def _lay_out(self, tensors: list[Any]) -> bool:
        """Convert the tensors for the kernels; True if any tensor needs a gradient."""
        learns = False
        for k, t in enumerate(tensors):
            if t is not None:
                tensors[k] = t.to(self.dtype).contiguous()
                learns = learns or t.requires_grad
        if self.h is None and self.stack is not None:
            tensors[0] = tensors[0].expand(self.stack.layers).contiguous()
        return learns

    def _without_autocast(self, y: Tensor) -> Any:
        return torch.autocast(y.device.type, enabled=False)


def all_in_memory(y: Tensor, tensors: Sequence[Tensor | None]) -> bool:
    """True if kernels can read the memory of all tensors.

    Under the transforms of `torch.func`, tensors have no memory; dual numbers also have a tangent.
    """
    try:
        for t in (y, *tensors):
            if t is not None:
                t.data_ptr()
                if unpack_dual(t).tangent is not None:
                    return False
    except RuntimeError:
        return False
    return not torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]


def recording(y: Tensor) -> bool:
    """True if calls are recorded into a CUDA graph."""
    return y.is_cuda and torch.cuda.is_current_stream_capturing()


# Decisions


def is_fused(engine: str, call: Call) -> bool:
    """True if a kernel should run the stack; raise an error if one must but cannot."""
    if engine == "reference":
        return False
    y = call.y
    reason = unsupported_reason(call)
    module, extra = EXTRAS.get(y.device.type, ("", ""))
    missing = reason is None and not INSTALLED[module]
    if engine == "auto":
        wide = y.is_cpu and y.shape[-1] > WIDEST
        empty = y.numel() == 0 or call.forces[0].K.numel() == 0
        return reason is None and not (missing or wide or empty)
    if missing:
        raise MissingExtraError(
            f"engine=\"fused\" needs {module}: pip install 'hdnn[{extra}]'."
        )
    if reason is not None:
        raise OptionError(
            f'engine="fused" cannot run here: {reason}; use engine="auto".'
        )
    return True


def unsupported_reason(call: Call) -> str | None:
    """The reason why no kernel can run such a stack, or None."""
    scheme, y, forces, _, sigma, _ = call
    device = y.device.type
    if type(scheme) is not Scheme:
        return f"there is no kernel for {scheme.name}"
    if (
        sigma.name not in ACTIVATIONS
        or activations.get(sigma.name) is not sigma
    ):
        return f"there is no kernel for the activation {sigma.name!r}"
    if y.dtype not in DTYPES.get(device, ()):
        return f"there is no kernel for {y.dtype} on {device}"
    width = y.shape[-1] // (2 if scheme.halves else 1)
    for t in itertools.chain((y,), *forces):
        if t is not None and (type(t) not in PLAIN or t.device != y.device):
            return "states and weights are not plain tensors on one device"
    for force in forces:
        if not force.K.shape[-1] == force.output().shape[-1] == width:
            return "a force reads or moves the wrong number of features"
    return None


def describe(call: Call, dtype: torch.dtype) -> Stack:
    """The stack of a call."""
    scheme, y, forces, h, sigma, inverse = call
    n = y.shape[-1]
    return Stack(
        scheme=scheme,
        sigma=sigma,
        inverse=inverse,
        layers=len(forces[0].K),
        samples=y.numel() // n if n else 0,
        features=n,
        rows=tuple([force.K.shape[1] for force in forces]),
        outputs=tuple([output_kind(force.V) for force in forces]),
        dtype=dtype,
        device=y.device,
        learned=isinstance(h, Tensor) and h.requires_grad,
    )


def output_kind(V: Tensor | None) -> str:
    """The entry of `Stack.outputs` for a force."""
    if V is None:
        return "same"
    if V.ndim == 2:
        return "gains"
    return "learned" if V.requires_grad else "fixed"


def matmul_precision(settings: Settings, dtype: torch.dtype) -> str:
    """The precision of GPU products: as set, otherwise from the dtype or PyTorch's own setting."""
    if settings.precision != "auto":
        return settings.precision
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
    if dtype in HALF:
        return "bf16" if dtype == torch.bfloat16 else "tf32"
    try:
        setting = torch.get_float32_matmul_precision()
    except (
        RuntimeError
    ):  # once `torch.backends.cuda.matmul.fp32_precision` was set
        matmul: Any = torch.backends.cuda.matmul
        setting = "high" if matmul.fp32_precision == "tf32" else "highest"
    return {"high": "tf32", "medium": "bf16"}.get(setting, "ieee")


def kernels(stack: Stack, precision: str) -> Any:
    """The module whose `Kernel` runs a stack; imported late, because its compiler is large."""
    rounded = precision in ("tf32", "bf16")
    widest = WIDEST_ROUNDED_TILE if rounded else WIDEST_TILE
    if stack.device.type == "cpu":
        from hdnn.engine import cpu as module
    elif stack.width <= widest:
        from hdnn.engine import gpu as module
    else:
        from hdnn.engine import wide as module
    return module


def backprop_of(stack: Stack, fused: bool, settings: Settings) -> str:
    """The saved states of the backward pass, if `backprop` is "auto"."""
    backprop = settings.backprop
    if backprop == "reversible" and not stack.scheme.invertible:
        raise OptionError(
            'backprop="reversible" needs layers with an inverse, which forward Euler does not '
            'have; use "stored" or "checkpoint".'
        )
    if backprop != "auto" or not fused:
        return backprop
    precision = settings.precision
    count = kernels(stack, precision).saved_size(stack, precision)
    size = count * stack.dtype.itemsize
    return (
        "checkpoint" if size > device_bytes(stack.device) / SHARE else "stored"
    )


def method(stack: Stack, fused: bool, settings: Settings) -> Any:
    """The kernels of a stack, with their saved states for the backward pass."""
    backprop = backprop_of(stack, fused, settings)
    make: Callable[[Stack], Any] = Definition
    if fused and stack.device.type == "cpu":
        make = kernels(stack, settings.precision).Kernel
    elif fused:
        how = {
            "precision": settings.precision,
            "deterministic": settings.deterministic,
        }
        make = partial(kernels(stack, settings.precision).Kernel, **how)
    return METHODS[backprop](stack, make)


# Eager calls


class StackFunction(torch.autograd.Function):
    """y_N from y_0, h and the weights.

    Without `setup_context`, which would cost as much as a small stack: PyTorch then refuses to run
    it inside a transform, see `Plan`.
    """

    @staticmethod
    def forward(
        ctx: Any, method: Any, y: Tensor, *tensors: Tensor | None
    ) -> Tensor:
        y_N, saved = method.forward(y, tensors)
        ctx.method = method
        ctx.save_for_backward(y, saved, *tensors)
        return y_N

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        y, saved, *tensors = ctx.saved_tensors
        return None, *gradients(ctx.method, y, saved, grads[0], tensors)


def gradients(
    method: Any,
    y: Tensor,
    saved: Tensor,
    g: Tensor,
    tensors: Sequence[Tensor | None],
) -> Sequence[Any]:
    """The gradients of y_0 and of all tensors, given the gradient of y_N."""
    if torch.is_grad_enabled() or not all_in_memory(
        g, ()
    ):  # second derivatives, many at once
        present = [t is not None for t in tensors]

        def function(y: Tensor, *values: Tensor) -> Tensor:
            rest = iter(values)
            filled = [next(rest) if here else None for here in present]
            return method.stack.definition(y, filled)

        values = [t for t in tensors if t is not None]
        grads = iter(torch.func.vjp(function, y, *values)[1](g))
        return [
            next(grads),
            *[next(grads) if here else None for here in present],
        ]
    y, saved, *tensors = [_readable(t, g.dtype) for t in (y, saved, *tensors)]
    return method.backward(y, saved, g.contiguous(), tuple(tensors))


def _readable(t: Any, dtype: torch.dtype) -> Any:
    """A tensor as kernels read it: hooks on saved tensors may change strides and dtypes."""
    if t is None or (t.dtype == dtype and t.is_contiguous()):
        return t
    return t.to(dtype).contiguous() if t.is_floating_point() else t.contiguous()


# Compiled graphs: one operator, whose backward pass is an operator too


def _traced(call: Call, engine: str | None, backprop: str | None) -> Tensor:
    """A call inside `torch.compile`; exporters get the plain loop, in operators that they know."""
    scheme, y, forces, h, sigma, inverse = call
    # Not `is_exporting`, which PyTorch 2.11 answers with True in every compiled graph.
    exporting = not torch.compiler.is_dynamo_compiling()
    if exporting or not is_fused(engine or "auto", call):
        return schemes.run(scheme, y, forces, h, sigma, inverse=inverse)
    dtype = torch.float32 if y.dtype in HALF else y.dtype
    learned = isinstance(h, Tensor) and h.requires_grad
    words = [sigma.name, backprop or "auto"]
    words += [f"{scheme.halves:d}", f"{inverse:d}", f"{learned:d}"]
    words.append(",".join([f"{half}:{part}" for half, part in scheme.moves]))
    words.append(str(len(forces[0].K)))
    for force in forces:
        words += [str(force.K.shape[1]), output_kind(force.V)]
    text = " ".join(words)
    with torch.autocast(y.device.type, enabled=False):
        if not isinstance(h, Tensor):
            h = y.new_full((), h, dtype=dtype)
        steps = h.expand(len(forces[0].K))
        parts = [steps, *itertools.chain(*forces)]
        tensors = [t.to(dtype).contiguous() for t in parts if t is not None]
        flat = y.reshape(-1, y.shape[-1])
        flat = flat.to(dtype).contiguous()
        y_N = OPERATORS.stack(flat, tensors, text)[0]
        return y_N.reshape(y.shape).to(y.dtype)


def _stack(
    text: str, sizes: Sequence[int], dtype: torch.dtype, device: torch.device
) -> tuple[Stack, str]:
    """The stack of a call of the operator, and its backprop; `_traced` writes the text."""
    sigma, backprop, *flags, moves, layers = text.split()[:7]
    halves, inverse, learned = [flag == "1" for flag in flags]
    forces = text.split()[7:]
    samples, features = sizes
    pairs = []
    for move in moves.split(","):
        half, part = move.split(":")
        pairs.append((int(half), float(part)))
    stack = Stack(
        scheme=Scheme("compiled", 0, tuple(pairs), halves),
        sigma=activations.get(sigma),
        inverse=inverse,
        layers=int(layers),
        samples=samples,
        features=features,
        rows=tuple(map(int, forces[::2])),
        outputs=tuple(forces[1::2]),
        dtype=dtype,
        device=device,
        learned=learned,
    )
    return stack, backprop


@lru_cache(maxsize=REMEMBERED)
def _kernel(precision: str, *call: Any) -> Any:
    """The kernel that runs the stack of a call."""
    stack, backprop = _stack(*call)
    settings = Settings(backprop=backprop, precision=precision)
    return method(stack, True, settings)


def _ready(y: Tensor, tensors: Sequence[Tensor], text: str) -> tuple[Any, Any]:
    """The kernel that runs a call, and the tensors as it reads them."""
    precision = matmul_precision(Settings(), y.dtype)
    kernel = _kernel(precision, text, y.shape, y.dtype, y.device)
    return kernel, _filled(tensors, kernel.stack)


def _filled(tensors: Sequence[Tensor], stack: Stack) -> tuple[Any, ...]:
    """The tensors, with None for each V that is K."""
    rest = iter(tensors)
    filled: list[Any] = [next(rest)]
    for output in stack.outputs:
        filled += [next(rest), next(rest)]
        filled.append(None if output == "same" else next(rest))
    return tuple(filled)


# Lighter than `custom_op`, whose overhead takes longer than a small stack.
library.define(
    "hdnn::stack", "(Tensor y, Tensor[] tensors, str text) -> (Tensor, Tensor)"
)
library.define(
    "hdnn::stack_backward",
    "(Tensor g, Tensor y, Tensor saved, Tensor[] tensors, str text) -> (Tensor, Tensor)",
)


@library.impl("hdnn::stack", "default")
def _forward(
    y: Tensor, tensors: Sequence[Tensor], text: str
) -> tuple[Tensor, Tensor]:
    """y_N, and what the backward pass needs."""
    kernel, weights = _ready(y, tensors, text)
    return kernel.forward(y, weights)


@library.register_fake("hdnn::stack")
def _(y: Tensor, tensors: Sequence[Tensor], text: str) -> Any:
    stack, backprop = _stack(text, y.shape, y.dtype, y.device)
    precision = matmul_precision(Settings(), y.dtype)
    settings = Settings(backprop=backprop, precision=precision)
    backprop = backprop_of(stack, True, settings)
    if backprop == "stored":
        shape = (kernels(stack, precision).saved_size(stack, precision),)
    elif backprop == "checkpoint":
        shape = (len(Checkpoint.bounds(stack.layers)) - 1, *y.shape)
    else:
        shape = y.shape
    return torch.empty_like(y), y.new_empty(shape)


@library.impl("hdnn::stack_backward", "default")
def _backward(
    g: Tensor, y: Tensor, saved: Tensor, tensors: Sequence[Tensor], text: str
) -> tuple[Tensor, Tensor]:
    """The gradient of y, and of each tensor that needs one, in one copy."""
    kernel, weights = _ready(y, tensors, text)
    with torch.no_grad():
        g_y, *grads = gradients(kernel, y, saved, g, weights)
    needed = itertools.compress(grads, kernel.stack.places)
    return g_y, torch.cat([grad.reshape(-1) for grad in needed])


@library.register_fake("hdnn::stack_backward")
def _(g: Tensor, y: Tensor, saved: Tensor, tensors: Any, text: str) -> Any:
    stack, _ = _stack(text, y.shape, y.dtype, y.device)
    shapes = [place[1] for place in stack.places if place is not None]
    return torch.empty_like(y), y.new_empty(sum(map(math.prod, shapes)))


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    y, tensors, ctx.text = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(y, output[1], *tensors)


def _differentiate(ctx: Any, g: Tensor, _: Any) -> Any:
    y, saved, *tensors = ctx.saved_tensors
    g_y, flat = OPERATORS.stack_backward(g, y, saved, tensors, ctx.text)
    stack, _ = _stack(ctx.text, y.shape, y.dtype, y.device)
    grads: list[Any] = []
    for t, place in zip(_filled(tensors, stack), stack.places, strict=True):
        if place is not None:
            count = math.prod(place[1])
            grads.append(flat[:count].view(place[1]))
            flat = flat[count:]
        elif t is not None:
            grads.append(None)
    return g_y, grads, None


library.register_autograd("hdnn::stack", _differentiate, setup_context=_save)
