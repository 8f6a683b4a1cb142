"""The doctor: faults in the gradients of any model, and where they are.

A copy of the model runs a few times on some inputs. The states y_j are read from the graph of
automatic differentiation: a tensor is a state if every path from the output back to the input
passes through it. Weights without a gradient are changed, to see whether the output depends on
them.
"""

from __future__ import annotations

import math
import random
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hdnn import plotting
from hdnn.analysis.modules import (
    JSONResult,
    call_module,
    copied,
    mapped,
    random_like,
    running,
    unwrapped,
)
from hdnn.analysis.rules import (
    ActivationCount,
    Examination,
    Finding,
    LayerGain,
    judge,
)
from hdnn.analysis.watch import Watcher
from hdnn.errors import DataError, OptionError, positive_int

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SAMPLES = 8
SEED = 20210527
NUDGES = (0.02, 1.0)  # of the size of weights, to find out what depends on them
SHARE = 0.025  # of the training time that examinations may take
EXPECTED = 300  # steps of training that a first examination takes
SAME = 1e-5  # relative: outputs that differ by less are the same up to rounding
MASKED = 5e3  # logits further below the largest one are masked
HALF = (torch.float16, torch.bfloat16)

# By name: where the slope of an activation is more than a thousandth of the largest slope.
STEEP = {
    "relu": (0.0, math.inf),
    "gelu": (-4.0, math.inf),
    "silu": (-9.5, math.inf),
    "mish": (-11.0, math.inf),
    "hardswish": (-3.0, math.inf),
    "elu": (-7.0, math.inf),
    "softplus": (-7.0, math.inf),
    "relu6": (0.0, 6.0),
    "sigmoid": (-8.3, 8.3),
    "tanh": (-4.15, 4.15),
    "hardtanh": (-1.0, 1.0),
    "hardsigmoid": (-3.0, 3.0),
}


@dataclass(frozen=True)
class Diagnosis(JSONResult):
    """The faults found in the gradients of a model at some inputs.

    Returned by `diagnose`; print it to read it. `plot()` draws the gradient against depth.

    Attributes:
        model: the kind of module.
        findings: every `Finding`, faults first.
        layers: the states y_j inside the model, each with its size and the share of a random
            gradient that reaches this state.
        unknown: the questions that could not be decided.
        samples: the number of samples used.
        seconds: the duration.

    Examples:
        >>> import hdnn, torch
        >>> diagnosis = hdnn.diagnose(hdnn.H2(features=4, layers=8), torch.randn(8, 4))
        >>> diagnosis.healthy, diagnosis.faults
        (True, ())
        >>> print(diagnosis)
        H2: no fault was found; gradients reach every layer...
    """

    derived: ClassVar = ("healthy", "summary")

    model: str
    findings: tuple[Finding, ...]
    layers: tuple[LayerGain, ...] = ()
    unknown: tuple[str, ...] = ()
    samples: int = 0
    seconds: float = field(default=0.0, compare=False)

    @property
    def faults(self) -> tuple[Finding, ...]:
        """The findings that are faults."""
        return tuple(finding for finding in self.findings if finding.fault)

    @property
    def healthy(self) -> bool:
        """True only if no fault was found and nothing is unknown."""
        return not self.faults and not self.unknown

    @property
    def summary(self) -> str:
        """The result in one sentence."""
        places = [f"{fault.kind} at {fault.layer}" for fault in self.faults]
        if places:
            faults = "fault" if len(places) == 1 else "faults"
            where = ", ".join(places)
            return f"{self.model}: {len(places)} {faults} found: {where}."
        if self.unknown:
            return f"{self.model}: no fault was found, but NOT EVERYTHING IS KNOWN."
        return f"{self.model}: no fault was found; gradients reach every layer."

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the share of a gradient that is left at each depth, and mark faulty layers."""
        return plotting.diagnosis_gains(self, ax)

    def __str__(self) -> str:
        lines = [self.summary, *map(str, self.findings)]
        lines += [f"NOT KNOWN: {text}." for text in self.unknown]
        if self.layers:
            width = min(max(len(layer.layer) for layer in self.layers), 40)
            lines += ["", f"{'layer':<{width}}  gradient left"]
            for layer in self.layers:
                name = layer.layer[-width:]
                lines.append(f"{name:<{width}}  {layer.gain:>13.3g}")
        return "\n".join(lines)


def diagnose(
    model: nn.Module,
    x: Any,
    *,
    loss: Callable[..., Tensor] | None = None,
    target: Any = None,
    samples: int = SAMPLES,
) -> Diagnosis:
    """Find out whether and where the gradients of a model vanish, explode or are cut off.

    Copies of the model run a few times on x, in the mode of the model (training or evaluation). The
    model itself and the global random state stay as they are.

    Args:
        model: any `nn.Module` that can be copied.
        x: the inputs: a tensor, a tuple of arguments, or a dict of named arguments.
        loss: a function of the output, or of (output, target) if there is a `target`, that returns
            one number. By default a random projection of the output.
        target: the target of the loss.
        samples: the largest number of samples to use, if all tensors of x have equally many rows.

    Returns:
        A `Diagnosis`; print it to read it.

    Raises:
        OptionError: if the model is not a module, or has no parameters.
        DataError: if x contains NaN or no tensor, or if the model cannot be copied, run on x or
            differentiated.

    Examples:
        >>> import hdnn, torch
        >>> from torch import nn
        >>> layers = [nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()) for _ in range(12)]
        >>> diagnosis = hdnn.diagnose(nn.Sequential(*layers), torch.randn(8, 4))
        >>> diagnosis.healthy, [fault.kind for fault in diagnosis.faults]
        (False, ['vanishing'])
    """
    begun = time.perf_counter()
    model = unwrapped(model)
    if not [*model.parameters()]:
        raise OptionError(
            f"this {type(model).__name__} has no parameters, so there is nothing to train."
        )
    tensors = _tensors(x)
    has_nan = any(bool(tensor.isnan().any()) for tensor in tensors)
    is_empty = not any(tensor.numel() for tensor in tensors)
    if has_nan or is_empty:
        raise DataError(
            "x must be a tensor, a tuple of arguments or a dict of named arguments, with at least "
            f"one sample and no NaN, but got {'NaN' if has_nan else type(x).__name__}."
        )
    positive_int("samples", samples)
    rows = _row_count(x)
    fits = target is None or _row_count(target) == rows
    if rows > samples and fits:
        x, target = mapped(lambda t: t[:samples] if t.ndim else t, (x, target))
    with (
        running(model, "x"),
        warnings.catch_warnings(),
        _random_state_restored(),
        torch.inference_mode(False),
    ):
        warnings.simplefilter("ignore")
        seen = Probe(model, x).examine(loss, target)
    return Diagnosis(
        model=type(model).__name__,
        findings=tuple(judge(seen)),
        layers=tuple(seen.layers),
        unknown=tuple(seen.unknown),
        samples=min(rows, samples),
        seconds=time.perf_counter() - begun,
    )


@contextmanager
def _random_state_restored() -> Iterator[None]:
    """Restore the random states of Python, NumPy and PyTorch afterwards."""
    python = random.getstate()
    numpy = np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


def _tensors(value: Any) -> list[Tensor]:
    """All tensors inside tuples, lists, dicts and the outputs of models, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = [*value.values()]
    elif hasattr(value, "__dataclass_fields__"):
        value = [*vars(value).values()]
    if not isinstance(value, (tuple, list)):
        return []
    return [tensor for each in value for tensor in _tensors(each)]


def _floats(value: Any) -> list[Tensor]:
    tensors = _tensors(value)
    floats = [tensor for tensor in tensors if tensor.is_floating_point()]
    return [tensor for tensor in floats if tensor.numel()]


def _row_count(x: Any) -> int:
    """The number of samples, if all tensors have equally many rows; 1 otherwise."""
    counts = {len(tensor) for tensor in _tensors(x) if tensor.ndim}
    if len(counts) != 1:
        return 1
    return counts.pop()


# A run of a copy


class State(NamedTuple):
    """A tensor on the way through a model, the module that makes it, and when."""

    name: str
    tensor: Tensor
    time: int


@dataclass
class ModuleCall:
    """A call of a module, with its tensors."""

    name: str
    module: nn.Module
    begun: int
    inputs: list[Tensor]
    outputs: list[Tensor] = field(default_factory=list)


class ModelRun:
    """A run of a copy of a model with weights moved: outputs, states and calls of its modules."""

    def __init__(
        self, model: nn.Module, x: Any, moved: Mapping[str, float] | None = None
    ) -> None:
        self.model = copied(model)
        self.calls: list[ModuleCall] = []
        self.open: list[ModuleCall] = []
        self.ended: list[ModuleCall] = []
        self.states: list[State] = []
        self.activations: dict[tuple[str, str], ActivationCount] = {}
        self.read: set[int] = set()  # the ids of all tensors in operations
        self.clock = 0
        self._prepare()
        self._move(moved or {})
        self.x = mapped(_fresh, x)
        inputs = [tensor for tensor in _floats(self.x) if tensor.ndim > 1]
        self._record("input", inputs)
        # Every run has the same dropout.
        torch.manual_seed(SEED)
        random.seed(SEED)
        np.random.seed(SEED)  # noqa: NPY002
        device = next(self.model.parameters()).device.type
        with (
            torch.enable_grad(),
            torch.autocast(device, enabled=False),
            torch.compiler.set_stance("force_eager"),
            ActivationTrace(self),
        ):
            self.output = call_module(self.model, self.x)
        outputs = _floats(self.output)
        large = [tensor for tensor in outputs if tensor.numel() > 1]
        self.outputs = large or outputs

    def _prepare(self) -> None:
        for name, module in self.model.named_modules():
            if getattr(module, "inplace", False) is True:
                module.inplace = False  # pyright: ignore
            if name:
                begin = self._beginner(name)
                module.register_forward_pre_hook(begin, with_kwargs=True)
                module.register_forward_hook(self._end)
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            if tensor.dtype in HALF:
                tensor.data = tensor.data.float()

    def _move(self, moved: Mapping[str, float]) -> None:
        """Move weights by a multiple of their size, in a random direction."""
        self.weights = {}
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                self.weights[name] = parameter
        for name, scale in moved.items():
            weight = self.weights[name].data
            size = weight.norm() / math.sqrt(weight.numel())
            if not size:
                size = 1.0
            weight += scale * size * random_like(weight)

    def _beginner(self, name: str) -> Any:
        def begin(module: nn.Module, args: Any, options: Any) -> None:
            self.clock += 1
            before = self.open or self.ended
            source = before[-1].name if before else "input"
            inputs = _floats([args, options])
            self._record(source, inputs)
            call = ModuleCall(name, module, self.clock, inputs)
            self.calls.append(call)
            self.open.append(call)

        return begin

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self.clock += 1
        call = self.open.pop()
        call.outputs = _floats(output)
        self._record(call.name, call.outputs)
        self.ended.append(call)

    def _record(self, name: str, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            self.states.append(State(name, tensor, self.clock))

    def objective(self, loss: Any, target: Any) -> Tensor | None:
        """The loss, or a random projection of all outputs; None if this has no gradient."""
        if loss is None:
            return self._projection()
        args = () if target is None else (target,)
        value = loss(self.output, *args)
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise OptionError("loss must give one number, as a tensor.")
        return value if value.requires_grad else None

    def _projection(self) -> Tensor | None:
        tensors = [t for t in _floats(self.output) if t.requires_grad]
        products = [(tensor * random_like(tensor)).sum() for tensor in tensors]
        return sum(products[1:], products[0]) if products else None

    def gradients(self, objective: Tensor | None) -> dict[str, Tensor]:
        """The gradients of an objective with respect to the weights that it depends on."""
        if objective is None:
            return {}
        weights = [*self.weights.values()]
        grads = torch.autograd.grad(
            objective, weights, retain_graph=True, allow_unused=True
        )
        pairs = zip(self.weights, grads, strict=True)
        return {name: grad for name, grad in pairs if grad is not None}

    def chain(self) -> list[State]:
        """The states y_j from the input to the output."""
        ends = [tensor for tensor in self.outputs if tensor.requires_grad]
        if not ends:
            return []
        end = ends[0]
        # For each node of the graph, the first tensor that a module received or returned.
        recorded: dict[Any, State] = {}
        last = State("output", end, self.clock + 1)
        for state in [*self.states, last]:
            node = state.tensor.grad_fn
            if node is not None:
                recorded.setdefault(node, state)
        order = _from_leaves_on(end.grad_fn)
        cuts = _cut_nodes(order, _first_node(end, recorded, order), recorded)
        states = [recorded[node] for node in cuts]
        return sorted(states, key=lambda state: state.time)


def _fresh(tensor: Tensor) -> Tensor:
    """A copy that is part of the graph, in float32 instead of half precision."""
    if not tensor.is_floating_point():
        return tensor.detach().clone()
    if tensor.dtype in HALF:
        tensor = tensor.float()
    leaf = tensor.detach().clone()
    leaf.requires_grad_()
    return leaf.clone()


def _first_node(
    end: Tensor, recorded: Mapping[Any, State], order: list[Any]
) -> Any:
    """The first input that a gradient reaches; without inputs, the first state."""
    reached = set(order)
    nodes = [node for node in recorded if node in reached]
    start = recorded[nodes[0]].time
    u = random_like(end)
    for node in nodes:
        state = recorded[node]
        if state.time > start:
            break
        (grad,) = torch.autograd.grad(
            end, state.tensor, u, retain_graph=True, allow_unused=True
        )
        if grad is not None and bool(grad.any()):
            return node
    return nodes[0]


def _cut_nodes(
    order: list[Any], first: Any, recorded: Mapping[Any, State]
) -> list[Any]:
    """The recorded nodes that every path from the end back to the first leads through."""
    leading = _leading(order, first)
    path = [node for node in reversed(order) if node in leading]
    place = {node: k for k, node in enumerate(path)}
    furthest = 0
    cuts = []
    for k, node in enumerate(path[: place[first] + 1]):
        if k >= furthest and node in recorded:  # no edge leads around it
            cuts.append(node)
        for child, _ in node.next_functions:
            furthest = max(furthest, place.get(child, 0))
    return cuts


def _leading(order: list[Any], first: Any) -> set[Any]:
    """The nodes from which a path leads back to the first."""
    leading = {first}
    for node in order:
        if any(child in leading for child, _ in node.next_functions):
            leading.add(node)
    return leading


def _from_leaves_on(end: Any) -> list[Any]:
    """All nodes of the graph, each after those that it is computed from."""
    order: list[Any] = []
    seen: set[Any] = set()
    stack = [(end, False)]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node is not None and node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(child, False) for child, _ in node.next_functions]
    return order


class ActivationTrace(TorchFunctionMode):
    """Counts how many entries of activations are flat, whether modules or functions call them."""

    def __init__(self, run: ModelRun) -> None:
        super().__init__()
        self.run = run

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Any = None,
    ) -> Any:
        options = kwargs or {}
        out = func(*args, **options)
        name = getattr(func, "__name__", "").rstrip("_")
        if name != "__get":  # an attribute, such as the shape
            self.run.read.update(map(id, _tensors([args, kwargs])))
        if name not in STEEP and name != "softmax":
            return out
        x = args[0] if args else None
        if isinstance(x, Tensor) and x.numel() > 1 and x.is_floating_point():
            bounds = STEEP.get(name, ())
            if name == "hardtanh" and options:  # as ReLU6 calls it
                bounds = (options["min_val"], options["max_val"])
            self._count(name, x.detach(), out, bounds)
        return out

    def _count(
        self, name: str, x: Tensor, out: Any, bounds: tuple[float, ...]
    ) -> None:
        module = "output"
        if self.run.open:
            module = self.run.open[-1].name
        new = ActivationCount(module, name)
        a = self.run.activations.setdefault((module, name), new)
        if name == "softmax":
            # With a mask, a row may attend to a single place only: being certain is then correct.
            choices = (x > x.amax(-1, keepdim=True) - MASKED).sum(-1) > 1
            certain = out.detach().amax(-1) > 1 - 1e-4
            flat = certain[choices]
        else:
            low, high = bounds
            a.one_sided = high != -low
            flat = (x <= low) | (x >= high)
        a.entries += flat.numel()
        a.flat += int(flat.sum())
        if a.one_sided:
            _count_units(a, flat)


def _count_units(a: ActivationCount, flat: Tensor) -> None:
    axis = 1 if flat.ndim > 3 else flat.ndim - 1
    by_unit = flat[:, None]
    if flat.ndim > 1:
        by_unit = flat.movedim(axis, 0).flatten(1)
    dead = by_unit.all(1)
    always = ~by_unit.any(1)
    count = int(dead.sum())
    if a.units and count >= a.dead:
        return  # called again: dead only if dead every time
    a.units = len(dead)
    a.dead = count
    a.always = int(always.sum())
    a.samples = len(flat)
    a.active = 0.0
    living = by_unit[~(dead | always)]
    if living.numel():
        a.active = float((~living).float().mean())


# Measurements


class Probe:
    """A model and inputs for it, which are run on copies with weights moved."""

    def __init__(self, model: nn.Module, x: Any) -> None:
        self.model = model
        self.x = x
        self.seen = Examination()

    def examine(self, loss: Any, target: Any) -> Examination:
        """Run the model, differentiate it, and collect all measurements for the rules."""
        run = ModelRun(self.model, self.x)
        self.seen.activations = [*run.activations.values()]
        self.seen.not_finite = _first_not_finite(run)
        if self.seen.not_finite:
            return self.seen
        objective = run.objective(loss, target)
        if objective is not None:
            self._measure_gains(run)
        self._find_detached(run, run.gradients(objective))
        if objective is None and not self.seen.detached:
            raise DataError(
                f"no gradient flows from the output of this {type(self.model).__name__} back to "
                "its parameters: it cannot be differentiated."
            )
        return self.seen

    def _measure_gains(self, run: ModelRun) -> None:
        """Measure how much of a random gradient at y_N is left at each earlier state."""
        states = run.chain()
        if not states:
            return
        before = states[: _body(run, states) + 1]
        tensors = [state.tensor for state in before]
        y_N = tensors[-1]
        u = random_like(y_N)
        grads = torch.autograd.grad(
            y_N, tensors, u, retain_graph=True, allow_unused=True
        )
        gain = 0.0
        for k, (state, g) in enumerate(zip(before, grads, strict=True)):
            size = _norm(state.tensor)
            rms = size / math.sqrt(state.tensor.numel())
            previous = gain
            gain = 0.0 if g is None else _norm(g) / _norm(u)
            layer = LayerGain(state.name, size, rms, gain)
            if k and gain > 0:
                layer.own = previous / gain
            if not math.isfinite(gain):
                self.seen.bad_gradient = states[k + 1].name
            self.seen.layers.append(layer)

    def _find_detached(
        self, run: ModelRun, gradients: Mapping[str, Tensor]
    ) -> None:
        """Find modules that cut gradients off: move weights and see which inputs change."""
        seen = self.seen
        if not _same(run.outputs, ModelRun(self.model, self.x).outputs):
            seen.unknown.append(
                "whether branches are detached: the model gives different values in each call"
            )
            return
        moved = dict.fromkeys(run.weights, NUDGES[0])
        other = ModelRun(self.model, self.x, moved)
        if len(other.calls) == len(run.calls):
            seen.detached += _severed(run, other)
        else:
            seen.unknown.append(
                "whether branches are detached: different modules run in each call"
            )
        lost = [name for name in run.weights if name not in gradients]
        self._find_lost(run, lost)
        # A gradient of 0 may be due to an initial value of 0, but not after all weights are moved.
        later = other.gradients(other.objective(None, None))
        zero = []
        for name, gradient in gradients.items():
            again = later.get(name)
            if not gradient.any() and (again is None or not again.any()):
                zero.append(name)
        for module, weights in groupby(zero, _module_of):
            names = list(weights)
            if self._matters(run, names):
                seen.blocked.append(module or names[0])

    def _find_lost(self, run: ModelRun, lost: list[str]) -> None:
        """Judge the weights that have no gradient at all."""
        seen = self.seen
        called = {call.name for call in run.calls} | {""}
        for module, weights in groupby(lost, _module_of):
            names = list(weights)
            read = any(id(run.weights[name]) in run.read for name in names)
            if self._matters(run, names):
                seen.detached.append(module or names[0])
            elif read or module in called:
                own = ", ".join(name.rpartition(".")[2] for name in names)
                seen.unknown.append(
                    f"whether {module or names[0]} is trained: it runs, but its {own} get no "
                    "gradient, and changing them did not change the output"
                )
            else:
                seen.unused += names

    def _matters(self, run: ModelRun, names: list[str]) -> bool:
        """True if the output depends on these weights by more than rounding."""
        for scale in NUDGES:
            other = ModelRun(self.model, self.x, dict.fromkeys(names, scale))
            if not _same(run.outputs, other.outputs, SAME):
                return True
        return False


def _module_of(weight: str) -> str:
    """The name of the module that a weight is in."""
    return weight.rpartition(".")[0]


def _norm(tensor: Tensor) -> float:
    return float(tensor.detach().double().norm())


def _first_not_finite(run: ModelRun) -> str:
    """The first module that turns finite inputs into NaN or infinity; a mask may hold -inf."""
    for call in run.ended:
        if _finite(call.inputs) and not _finite(call.outputs):
            return call.name
    return "" if _finite(run.outputs) else "output"


def _finite(tensors: list[Tensor]) -> bool:
    bad = [tensor.isnan() | (tensor == math.inf) for tensor in tensors]
    return not any(bool(entries.any()) for entries in bad)


def _body(run: ModelRun, states: list[State]) -> int:
    """The index of y_N: the state that enters the last module with parameters."""
    last = len(states) - 1
    for call in reversed(run.calls):
        if list(call.module.parameters(recurse=False)):
            before = [state for state in states if state.time <= call.begun]
            entering = len(before) - 1
            return entering if entering > 0 else last
    return last


def _same(a: list[Tensor], b: list[Tensor], tolerance: float = 0.0) -> bool:
    """True if all pairs of tensors are equal, up to a fraction of their sizes."""
    for first, second in zip(a, b, strict=False):
        x = first.detach()
        y = second.detach()
        if x.shape != y.shape:
            return False
        if torch.equal(x, y):
            continue
        if not (x - y).norm() <= tolerance * x.norm():
            return False
    return True


def _severed(run: ModelRun, moved: ModelRun) -> list[str]:
    """The first module whose input depends on weights, though no gradient leads back to them."""
    calls = zip(run.calls, moved.calls, strict=True)
    for call, other in calls:
        pairs = zip(call.inputs, other.inputs, strict=False)
        for x, y in pairs:
            if x.requires_grad:
                continue
            if not _same([x], [y]):
                return [call.name]
    return []


# During training


@dataclass
class Look:
    """The norms of the gradients of all parameters after one training step."""

    step: int
    gradient: dict[str, float]


class GradientDoctor(Watcher):
    """A monitor of gradients during training, which sometimes examines the whole model.

    A look records the gradients that training has computed. An examination is a `diagnose` at the
    last inputs; examinations run automatically as long as they take no more than a `share` of the
    training time. `examine()` runs one immediately. Each fault gives a `GradientWarning`. Print the
    doctor to read its findings.

    Args:
        model: any `nn.Module`.
        optimizer: the optimiser whose steps count in a `with` block; without one, call `step()`
            after each step.
        every: the number of steps from one look to the next.
        share: the fraction of the training time that examinations may take; 0 turns them off.
        loss: a function of the output that returns one number, as in `diagnose`.

    Attributes:
        findings: every `Finding` so far, each listed once.
        diagnoses: the `Diagnosis` of each examination.
        looks: the gradients at each look.

    Examples:
        >>> import hdnn, torch
        >>> model, x = torch.nn.Sequential(torch.nn.Linear(4, 1)), torch.randn(8, 4)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with hdnn.analysis.GradientDoctor(model, optimizer=optimizer, share=0.0) as doctor:
        ...     for _ in range(10):
        ...         optimizer.zero_grad()
        ...         model(x).square().mean().backward()
        ...         loss = optimizer.step()
        >>> doctor.examine().healthy, len(doctor.looks)
        (True, 1)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        every: int = 100,
        share: float = SHARE,
        loss: Any = None,
    ) -> None:
        super().__init__(optimizer, every, share)
        self.model = unwrapped(model)
        self.loss = loss
        self.inputs: Any = None
        self.looks: list[Look] = []
        self.diagnoses: list[Diagnosis] = []
        self.handles.append(
            self.model.register_forward_pre_hook(self._store, with_kwargs=True)
        )

    def _store(
        self, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        if not args or not options:
            self.inputs = args or options

    def look(self) -> None:
        """Record the present gradients, and examine the model if there is time."""
        gradients = {
            name: float(parameter.grad.norm())
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None
        }
        self.looks.append(Look(self.steps, gradients))
        for name, size in gradients.items():
            if not math.isfinite(size):
                text = f"At step {self.steps} the gradient of {name} is not finite."
                self._warn_of(Finding("not finite", name, text))
                return
        ready = self.share > 0 and self.inputs is not None
        if ready and self.affordable(self._expected()):
            self.examine()

    def _expected(self) -> float:
        """The expected seconds of an examination: those of the last, or of some training steps."""
        if self.diagnoses:
            return self.diagnoses[-1].seconds
        return EXPECTED * (time.perf_counter() - self.start) / self.steps

    def examine(self) -> Diagnosis:
        """Diagnose the present model at its last inputs."""
        if self.inputs is None:
            raise OptionError(
                "the doctor has seen no inputs yet; run the model once first."
            )
        diagnosis = diagnose(self.model, self.inputs, loss=self.loss)
        self.diagnoses.append(diagnosis)
        for fault in diagnosis.faults:
            self._warn_of(fault)
        return diagnosis

    def _warn_of(self, finding: Finding) -> None:
        self.warn(f"{finding.kind} {finding.layer}", finding.sentence, finding)

    def __str__(self) -> str:
        last = "NOT EXAMINED so far: call examine()."
        if self.diagnoses:
            last = str(self.diagnoses[-1])
        looks = (
            f"{len(self.looks)} looks and {len(self.diagnoses)} examinations"
        )
        lines = [f"{looks} in {self.steps} steps", *map(str, self.findings)]
        return "\n".join([*lines, last])
