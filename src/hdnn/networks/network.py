"""The base of all networks: parameters stacked over layers, around one scheme."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from hdnn import activations, functional, schemes
from hdnn.activations import Activation, Elementwise
from hdnn.engine import Settings
from hdnn.errors import (
    DtypeError,
    OptionError,
    ShapeError,
    choose,
    positive_float,
    positive_int,
)
from hdnn.io import HubModule, new_tensor
from hdnn.schemes import Force, Scheme

DEFAULT_T = 2.4
SYMPLECTIC = "each layer is symplectic, det = 1"
SHEARS = "each layer is a product of shears, det = 1"
EXPANDING = "det(I + hA) = prod(1 + h^2 w^2) >= 1 in each layer"
ALWAYS = "at any depth, for any weights and any activation"

Steps = float | Sequence[float] | Tensor

# Python calls these by itself, so overriding one can change what a module computes.
CALLS = (
    "__call__",
    "__getattr__",
    "__getattribute__",
    "__getitem__",
    "__iter__",
    "__len__",
    "_call_impl",
)
# A subclass may override these and still compute the same.
HARMLESS = (
    "config",
    "constants",
    "extra_repr",
    "from_pretrained",
    "guarantee",
    "push_to_hub",
    "reset_parameters",
    "save_pretrained",
    "smoothness",
)
HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
OURS = ("hdnn", "torch")


@dataclass(frozen=True)
class Guarantee:
    """The theorem that `norm(dy_N/dy_j) >= 1`, or the reason why there is none.

    Attributes:
        holds: True if it is a theorem for this network.
        theorem: the fact that proves it, or "none".
        why: the depths, weights and activations it holds for, or why nothing is promised.

    Examples:
        >>> import hdnn
        >>> hdnn.H2(features=4, layers=8).guarantee().holds
        True
        >>> hdnn.MLP(features=4, layers=8).guarantee().why
        'no theorem covers perceptron layers: norms below 1 are possible'
    """

    holds: bool
    theorem: str
    why: str


def unknown_reason(module: nn.Module) -> str | None:
    """Why the theorems on a module's class may not hold for it, or None.

    A subclass outside of hdnn that overrides what is computed may change values and gradients, and
    so may hooks, except PyTorch's own hooks.
    """
    kind = type(module)
    own = [cls for cls in kind.__mro__ if _home(cls) not in (*OURS, "object")]
    for name in [name for cls in own for name in vars(cls)]:
        if name in CALLS or _is_computed_by(kind, name):
            return f"{kind.__name__} has its own {name}"
    for name in vars(module):
        if callable(getattr(kind, name, None)):
            return f"{kind.__name__} has its own {name}"
    return hook_reason(module)


def _is_computed_by(kind: type, name: str) -> bool:
    """True if hdnn's classes define this name, and what they compute may depend on it."""
    if name.startswith("__") or name in HARMLESS:
        return False
    ours = [cls for cls in kind.__mro__ if _home(cls) == "hdnn"]
    return any(name in vars(cls) for cls in ours)


def hook_reason(module: nn.Module) -> str | None:
    """Why hooks may change the values or the gradients of a module, or None.

    This covers hooks of the module, of all modules, and of the module's parameters.
    """
    hooks: dict[str, list[Any]] = {}
    for kind in HOOKS:
        everywhere = getattr(nn.modules.module, f"_global{kind}")
        name = kind.strip("_").replace("_", " ")
        hooks[name] = [*getattr(module, kind).values(), *everywhere.values()]
    hooks["hooks of parameters"] = [
        hook
        for parameter in module.parameters()
        for kind in ("_backward_hooks", "_post_accumulate_grad_hooks")
        for hook in (getattr(parameter, kind) or {}).values()
    ]
    for name, functions in hooks.items():
        if any(_home(function) not in OURS for function in functions):
            return f"one of its {name} may change what it computes"
    return None


def _home(thing: Any) -> str:
    """The package where a class or a hook is defined."""
    if thing is object:
        return "object"
    module = getattr(thing, "__module__", None) or type(thing).__module__
    return module.partition(".")[0]


class Network(HubModule):
    """A stack of N layers on states `(*batch, n)`: the base class of H1, H2, MLP and all others.

    The weights of all layers are stacked, `(N, ...)`. `net[j]` is layer j, and `len(net)` is N.
    Your own network sets `stacked` and defines `forces`.

    Args:
        features: n, the size of a state.
        layers: N, the number of layers.
        scheme: how a layer steps, an `hdnn.schemes.Scheme`.
        step: the step h: one number, or one for each layer; or give T instead.
        h: another name for `step`.
        T: the time that all layers span, h = T/N; 2.4 if neither is given.
        activation: sigma, one of `hdnn.activations.names()`, or an elementwise function or module
            such as `torch.nn.ReLU()`.
        learn_step: train the step of each layer too; it stays positive.
        tied: give all layers the same weights.
        init: "scaled" draws K from N(0, 1/n) with b = 0; "paper" draws all from N(0, 1).
        engine: the engine that runs the layers, "auto", "reference" or "fused": see `hdnn.engine`.
        backprop: which saved states the backward pass starts from, "auto", "stored", "checkpoint"
            or "reversible": see `hdnn.engine`.
        generator: the random generator for the initial weights; by default PyTorch's global one.
        dtype: the dtype of the weights; by default `torch.get_default_dtype()`.
        device: the device of the weights; by default PyTorch's default device.

    Raises:
        OptionError: if an option is unknown, or two options exclude each other, such as `step` and
            `T`.
        ShapeError: if a tensor has the wrong shape, or an odd number of features must be halved.
        DtypeError: if `dtype` is not a floating-point type.

    Examples:
        >>> import hdnn
        >>> nets = [hdnn.H2(features=4, layers=8), hdnn.MLP(features=4, layers=8)]
        >>> [isinstance(net, hdnn.networks.Network) for net in nets]
        [True, True]
        >>> nets[0][2]
        Layer(2 of 8: K_p (2, 2), K_q (2, 2), b_p (2,), b_q (2,), h = 0.3)
    """

    # The weights that each layer has, in the order in which they are drawn
    stacked: tuple[str, ...] = ()
    rows: int | None = None  # rows of K; by default as many as K has columns
    forward_euler = False

    def __init__(
        self,
        features: int,
        layers: int,
        *,
        scheme: Scheme,
        step: Steps | None = None,
        h: Steps | None = None,
        T: float | None = None,
        activation: str | Elementwise = "tanh",
        learn_step: bool = False,
        tied: bool = False,
        init: str = "scaled",
        engine: str = "auto",
        backprop: str = "auto",
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.features = positive_int("features", features)
        self.layers = positive_int("layers", layers)
        self.scheme = scheme
        self.activation = activations.registered(activation).name
        self.tied = tied
        self.init = choose("init", init, ("paper", "scaled"))
        Settings(engine=engine, backprop=backprop)  # raises for unknown names
        if not scheme.moves and (engine, backprop) != ("auto", "auto"):
            self._refuse(
                "runs layer by layer only; leave engine and backprop out."
            )
        self.engine = engine
        self.backprop = backprop
        self.step = step_size(step, h, T, self.layers)
        self.learn_step = learn_step
        if tied and learn_step and isinstance(self.step, tuple):
            self._refuse("tied layers learn one step; give a single step or T.")
        # For matrices that are stored by their free entries
        self._shapes: dict[str, torch.Size] = {}
        self._skew: set[str] = set()
        like = new_tensor(dtype, device)
        if not like.is_floating_point():
            raise DtypeError(
                f"dtype must be a floating-point type, but got {dtype}."
            )
        for name in self.stacked:
            first = self._first(name, generator, like.device)
            self.register_parameter(
                name, nn.Parameter(first.to(like, copy=True))
            )
        if learn_step:
            self.log_h = nn.Parameter(self._first_log_h().to(like))

    # Parameters

    def _half(self, advice: str = "") -> int:
        if self.features % 2:
            raise ShapeError(
                f"{type(self).__name__} splits the features into (p, q), so their number must be "
                f"even, but features = {self.features}; add a zero (hdnn.heads.Augment){advice}."
            )
        return self.features // 2

    def _first(
        self, name: str, generator: torch.Generator | None, device: torch.device
    ) -> Tensor:
        """First values of a stack of weights."""
        n = self._half() if self.scheme.halves else self.features
        r = self.rows or n
        N = 1 if self.tied else self.layers
        shape = (N, r, n) if name.startswith("K") else (N, r)
        if name.startswith("b") and self.init == "scaled":
            return torch.zeros(shape, device=device)
        draw = normal(shape, generator, device)
        return draw if self.init == "paper" else draw * self.features**-0.5

    def _first_log_h(self) -> Tensor:
        # log h is learned, so a step is always positive.
        steps = torch.as_tensor(self.step, dtype=torch.float64)
        return steps.expand(1 if self.tied else self.layers).log()

    def _keep_free(
        self,
        name: str,
        value: Tensor,
        free: Tensor,
        *,
        skew: bool = False,
        learn: bool = True,
    ) -> None:
        """Store matrices by their free entries, `name_free`; `weight` fills in the others."""
        like = next(self.parameters())
        self._parameters.pop(name, None)
        self._shapes[name] = value.shape
        if skew:
            self._skew.add(name)
            free = free.triu(1)
        index = free.cpu().expand(value.shape).flatten().nonzero()[:, 0]
        self.register_buffer(
            f"_{name}_index", index.to(like.device), persistent=False
        )
        entries = value.detach().flatten()[index.to(value.device)]
        entries = entries.to(like, copy=True)
        if learn:
            self.register_parameter(f"{name}_free", nn.Parameter(entries))
        else:
            self.register_buffer(f"{name}_free", entries)

    def weight(self, name: str) -> Tensor:
        """One stack of weights, with zeros outside patterns: `(N, ...)`, or `(1, ...)` if tied.

        Args:
            name: one of `stacked`, or "X" or "J".
        """
        shape = self._shapes.get(name)
        if shape is None:
            return getattr(self, name)
        free = getattr(self, f"{name}_free")
        index = getattr(self, f"_{name}_index")
        flat = free.new_zeros(shape.numel()).scatter(0, index, free)
        matrix = flat.view(shape)
        return matrix - matrix.mT if name in self._skew else matrix

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("_shapes", ()):
            return self.weight(name)
        return super().__getattr__(name)

    @torch.no_grad()
    def assign(self, name: str, value: Tensor) -> None:
        """Overwrite one stack of weights, in its own memory.

        Args:
            name: one of `stacked`, or a learned "X", "J" or "log_h".
            value: the new weights, `(N, ...)`, or `(1, ...)` if tied.
        """
        if name in self._shapes:
            index = getattr(self, f"_{name}_index")
            flat = value.expand(self._shapes[name]).flatten()
            value = flat[index.to(value.device)]
            name = f"{name}_free"
        if parametrize.is_parametrized(self, name):
            setattr(self, name, value)
        else:
            getattr(self, name).copy_(value)

    def reset_parameters(
        self, generator: torch.Generator | None = None
    ) -> None:
        """Draw all weights again, as the constructor does; reset learned steps."""
        device = next(self.parameters()).device
        for name in self.stacked:
            self.assign(name, self._first(name, generator, device))
        if self.learn_step:
            self.assign("log_h", self._first_log_h())

    def stacks(self) -> list[Tensor]:
        """All stacked weights, `(N, ...)`."""
        if self._shapes or self._modules:  # free entries, or parametrisations
            values = [self.weight(name) for name in self.stacked]
        else:
            plain: Any = self._parameters
            values = list(map(plain.__getitem__, self.stacked))
        if self.tied:
            N = self.layers
            return [value.expand(N, *value.shape[1:]) for value in values]
        return values

    def weights(self) -> dict[str, Any]:
        """All weights by name, and the step: `(N, ...)` each."""
        weights = dict(zip(self.stacked, self.stacks(), strict=True))
        return {**weights, "h": self.h} if hasattr(self, "h") else weights

    # The steps

    @property
    def h(self) -> float | tuple[float, ...] | Tensor:
        """The step: one float, one per layer, or the learned steps `(N,)`."""
        if self.learn_step:
            return self.log_h.exp().expand(self.layers)
        return self.step

    def steps(self) -> Tensor:
        """The steps of all layers: `(N,)`."""
        weight = next(self.parameters())
        h = self.h
        if isinstance(h, float):  # filled, for a CUDA graph takes no copies
            return weight.new_full((self.layers,), h)
        return torch.as_tensor(h, dtype=weight.dtype, device=weight.device)

    @property
    def T(self) -> float:
        """The time that the stack spans: the sum of all steps."""
        h = self.h
        if isinstance(h, Tensor):
            return float(h.detach().sum())
        return math.fsum(h) if isinstance(h, tuple) else h * self.layers

    # What a network does

    def forces(self) -> tuple[Force, ...]:
        """The forces of all layers, as the scheme takes them: see `hdnn.schemes`."""
        raise NotImplementedError

    def forward(self, y: Tensor) -> Tensor:
        """The last state, computed from the first; both are `(*batch, n)`."""
        self._check_features(y)
        return functional.run(
            self.scheme,
            y,
            self.forces(),
            getattr(self, "h", 1.0),
            activation=self.activation,
            engine=None if self.engine == "auto" else self.engine,
            backprop=None if self.backprop == "auto" else self.backprop,
        )

    def _check_features(self, y: Tensor) -> None:
        if isinstance(y, Tensor) and y.ndim and y.shape[-1] != self.features:
            advice = (
                "augment the features (hdnn.heads.Augment) or make the network with "
                f"features={y.shape[-1]}"
            )
            if y.ndim == 4:
                advice = (
                    "for images (B, C, height, width) use "
                    f"hdnn.HamiltonianUnit(channels={y.shape[1]}, layers={self.layers})"
                )
            raise ShapeError(
                f"{type(self).__name__} takes y of shape (*batch, {self.features}), but got "
                f"{tuple(y.shape)}; {advice}."
            )

    def trajectory(self, y: Tensor) -> Tensor:
        """All states, `y_0` to `y_N`: `(N+1, *batch, n)`."""
        return self._run(y, trajectory=True)

    def inverse(self, y: Tensor, *, trajectory: bool = False) -> Tensor:
        """The first state from the last state, exact up to rounding; or all, in forward order."""
        if not self.invertible:
            self._refuse(
                "has no explicit inverse; H2, MS1, MS3, Verlet and Yoshida networks have one."
            )
        return self._run(y, trajectory=trajectory, inverse=True)

    def layer(self, y: Tensor, j: int) -> Tensor:
        """One layer alone: `y_{j+1}` from `y_j`."""
        j = range(self.layers)[j]
        return self._run(y, slice(j, j + 1))

    def run_layers(
        self, y: Tensor, layers: slice, *, trajectory: bool = False
    ) -> Tensor:
        """The state after running only some layers, or all states along the way.

        Args:
            y: the state before the first of these layers.
            layers: the numbers of these layers.
            trajectory: return all these states, `(L+1, *batch, n)`.
        """
        numbers = range(self.layers)[layers]
        if not numbers:
            return y[None] if trajectory else y
        if unknown_reason(self) is None:
            return self._run(y, layers, trajectory=trajectory)
        states = [y]
        for j in numbers:
            states.append(self.layer(states[-1], j))
        return torch.stack(states) if trajectory else states[-1]

    def _run(
        self, y: Tensor, layers: slice | None = None, **options: Any
    ) -> Tensor:
        """Run all layers or only some, with further options."""
        self._check_features(y)
        forces = self.forces()
        h: Any = getattr(self, "h", 1.0)
        if layers is not None:
            forces = _sliced(forces, layers)
            h = h if isinstance(h, float) else h[layers]
        return functional.run(
            self.scheme,
            y,
            forces,
            h,
            activation=self.activation,
            engine=None if self.engine == "auto" else self.engine,
            backprop=None if self.backprop == "auto" else self.backprop,
            **options,
        )

    # Properties

    @property
    def invertible(self) -> bool:
        """True if `inverse` can be called."""
        return self.scheme.invertible

    @property
    def symplectic(self) -> bool:
        """True if each layer is symplectic, with one J for all."""
        return self.scheme.symplectic

    @property
    def implicit(self) -> bool:
        """True if a layer solves an equation."""
        return self.scheme.implicit

    @property
    def sigma(self) -> Activation:
        """The activation function."""
        return activations.get(self.activation)

    def guarantee(self) -> Guarantee:
        """The theorem that `norm(dy_N/dy_j) >= 1`, or the reason why there is none.

        The theorem does not cover a subclass that computes in another way (which may define its own
        guarantee), nor a network with hooks, which may change values and gradients.
        """
        why = f"no theorem covers {self.scheme.name} layers: norms below 1 are possible"
        reason = unknown_reason(self)
        if reason is not None:
            why = f"nothing is known about this network: {reason}"
        elif self.symplectic:
            return Guarantee(True, SYMPLECTIC, ALWAYS)
        elif self.scheme.halves:
            return Guarantee(True, SHEARS, ALWAYS)
        elif self.forward_euler and self.sigma.monotone:
            why = f"at any depth, because {self.activation} never decreases"
            return Guarantee(True, EXPANDING, why)
        elif self.forward_euler:
            why = f"forward Euler promises nothing for {self.activation}, which may decrease"
        return Guarantee(False, "none", why)

    def layer_jacobians(
        self, states: Tensor, layers: slice = slice(None)
    ) -> Tensor:
        """The derivatives `dy_{j+1}/dy_j` of all or some layers, `(L, B, n, n)`.

        The layout is denominator layout: the transpose of `torch.autograd.functional.jacobian`. For
        a subclass with its own computation, the layers run one by one.

        Args:
            states: the states before and after these layers, `(L+1, B, n)`, as `trajectory` gives.
            layers: the numbers of the layers; by default all.
        """
        if unknown_reason(self) is None:
            forces = _sliced(self.forces(), layers)
            h = self.steps()[layers].to(states) if hasattr(self, "h") else 1.0
            return schemes.jacobians(self.scheme, states, forces, h, self.sigma)
        pairs = zip(states[:-1], range(self.layers)[layers], strict=True)
        return torch.stack([_differentiated(self, y, j) for y, j in pairs])

    def shear_norms(self) -> Tensor:
        """The bounds `|A| / S` of all shears `I + A` of all layers, move by move."""
        if not self.scheme.halves:
            self._refuse(
                "has no gradient budget: its layers are not shears, unlike those of H2, MS1, MS3, "
                "Verlet and Yoshida."
            )
        h = self.steps()
        norms = []
        for force in self.forces():
            norm = spectral_norm(force.K) * spectral_norm(force.output())
            norms.append(h * norm)
        shears = [abs(part) * norms[half] for half, part in self.scheme.moves]
        return torch.cat(shears)

    def field(self) -> dict[str, Tensor]:
        """J, K `(N, r, n)` and b `(N, r)` of the ODE `y' = J K^T sigma(K y + b)`."""
        self._refuse("does not discretise a Hamiltonian ODE.")

    @property
    def J(self) -> Tensor:
        """The interconnection matrix `(n, n)`, or `(N, n, n)` if it differs from layer to layer."""
        return self.field()["J"]

    def field_rates(self) -> Tensor:
        """A bound on the derivative of the field in each layer: `S |K_j|^2 |J_j|`, `(N,)`.

        With gains, this is multiplied by the largest absolute gain of the layer.
        """
        field = self.field()
        K_norm = spectral_norm(field["K"])
        rates = self.sigma.S * K_norm.square() * spectral_norm(field["J"])
        if "a" in field:
            rates = rates * field["a"].abs().amax(-1)
        return rates

    def smoothness(self) -> Tensor:
        """The regulariser R_K, small where weights change little from layer to layer.

        h/2 sum_{j=1}^{N-1} |K_j - K_{j-1}|_F^2 + |b_j - b_{j-1}|^2, and the same for gains
        """
        jumps: Any = 0.0
        for stack in self._smooth():
            jumps = jumps + stack.diff(dim=0).square().flatten(1).sum(1)
        return 0.5 * (self.steps()[1:] * jumps).sum()

    def _smooth(self) -> list[Tensor]:
        """The stacks whose jumps make up R_K."""
        return self.stacks()

    # Copies

    def config(self) -> dict[str, Any]:
        """The constructor arguments of this network, in a form that JSON can hold."""
        config = {
            "features": self.features,
            "layers": self.layers,
            "activation": self.activation,
            "tied": self.tied,
        }
        if hasattr(self, "h"):
            step = self.step
            config["step"] = list(step) if isinstance(step, tuple) else step
            config["learn_step"] = self.learn_step
        return config

    def constants(self) -> dict[str, Tensor]:
        """Arguments of the constructor that are tensors."""
        return {}

    def refine(self, k: int) -> Self:
        """A network with k times as many layers and steps h/k: the same function in the limit."""
        k = positive_int("k", k)
        weight = next(self.parameters())
        options = self._refined_config(k)
        for name, value in self.constants().items():
            if value.ndim == 3:
                value = value.repeat_interleave(k, 0)
            options[name] = value
        kind: Any = parametrize.type_before_parametrizations(self)
        fine = kind(
            **options,
            engine=self.engine,
            backprop=self.backprop,
            # All drawn weights are overwritten: spare the global generator.
            generator=torch.Generator(),
            dtype=weight.dtype,
            device=weight.device,
        )
        stacks = {name: self.weight(name) for name in self.stacked}
        if self.learn_step:
            stacks["log_h"] = self.log_h - math.log(k)
        for name, value in stacks.items():
            if not self.tied:
                value = value.repeat_interleave(k, 0)
            fine.assign(name, value.detach())
        return fine

    def _refined_config(self, k: int) -> dict[str, Any]:
        config = self.config()
        config["layers"] = k * self.layers
        step = self.step
        if isinstance(step, tuple):
            config["step"] = [h / k for h in step for _ in range(k)]
        else:
            config["step"] = step / k
        return config

    # Views

    def __len__(self) -> int:
        return self.layers

    def __getitem__(self, layers: int | slice) -> Layers:
        """Layer j, or a slice of the layers, as a view that can be run and inspected."""
        return Layers(self, range(self.layers))[layers]

    def extra_repr(self) -> str:
        parts = [
            f"{self.features} features",
            f"{self.layers} layers",
            self.activation,
        ]
        if self.tied:
            parts.append("tied")
        if hasattr(self, "h"):
            parts.append(self._step_text())
        return ", ".join(parts)

    def _step_text(self) -> str:
        if self.learn_step:
            return "h learned"
        text = "one per layer"
        if isinstance(self.step, float):
            text = f"{self.step:.4g}"
        return f"h = {text}, T = {self.T:.4g}"

    def __repr__(self) -> str:
        count = sum(p.numel() for p in self.parameters())
        name = parametrize.type_before_parametrizations(self).__name__
        return f"{name}({self.extra_repr()}, {count} parameters)"

    def _refuse(self, reason: str) -> NoReturn:
        raise OptionError(f"{type(self).__name__} {reason}")


class Layers:
    """Some layers of a network, as a view that can be run: `layers(y)`, `layers.trajectory(y)`.

    `layers.K_p` and other names give the weights `(L, ...)`; the weights of a single layer,
    `net[j]`, have no first axis. To change a weight, write into it:
    `with torch.no_grad(): net[2].b_p.zero_()`.
    """

    def __init__(
        self, net: Network, numbers: range, index: int | None = None
    ) -> None:
        self.net = net
        self.numbers = numbers
        self.index = index

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, layers: int | slice) -> Layers:
        numbers = self.numbers[layers]
        if isinstance(numbers, int):
            return Layers(self.net, range(numbers, numbers + 1), numbers)
        if numbers.step < 1:
            raise OptionError(
                "layers run forwards: use a slice with a positive step."
            )
        return Layers(self.net, numbers)

    def __call__(self, y: Tensor) -> Tensor:
        return self.net.run_layers(y, self._slice)

    def trajectory(self, y: Tensor) -> Tensor:
        """All states from before the first of these layers to after the last."""
        return self.net.run_layers(y, self._slice, trajectory=True)

    @property
    def _slice(self) -> slice:
        return slice(self.numbers.start, self.numbers.stop, self.numbers.step)

    def __getattr__(self, name: str) -> Any:
        if name == "h":
            stack: Any = self.net.steps()
        elif name in self.net.stacked:
            stack = self.net.weight(name)
            stack = stack.expand(self.net.layers, *stack.shape[1:])
        else:
            raise AttributeError(f"a layer has no attribute {name!r}.")
        return stack[self._slice if self.index is None else self.index]

    def __repr__(self) -> str:
        if self.index is None:
            return f"Layers({list(self.numbers)} of {self.net!r})"
        parts = [
            f"{name} {tuple(getattr(self, name).shape)}"
            for name in self.net.stacked
        ]
        if hasattr(self.net, "h"):
            parts.append(f"h = {float(self.h):.4g}")
        return f"Layer({self.index} of {self.net.layers}: {', '.join(parts)})"


def spectral_norm(K: Tensor) -> Tensor:
    """The largest singular value of each matrix, also in half precision."""
    work = torch.promote_types(K.dtype, torch.float32)
    return torch.linalg.matrix_norm(K.to(work), 2).to(K.dtype)


def _sliced(forces: tuple[Force, ...], layers: slice) -> tuple[Force, ...]:
    return tuple(
        Force(K[layers], b[layers], None if V is None else V[layers])
        for K, b, V in forces
    )


@torch.enable_grad()
def _differentiated(net: Network, y: Tensor, j: int) -> Tensor:
    """dy_{j+1}/dy_j by a backward pass for each entry of y_{j+1}; samples must not mix."""

    def total(y: Tensor) -> Tensor:
        return net.layer(y, j).sum(0)

    jacobian: Any = torch.autograd.functional.jacobian(total, y)
    return jacobian.permute(1, 2, 0)


def normal(
    shape: Sequence[int],
    generator: torch.Generator | None,
    device: torch.device,
) -> Tensor:
    """Numbers from N(0, 1), in float32: a seed gives the same numbers for weights of any dtype."""
    where = device if generator is None else generator.device
    return torch.randn(
        shape, generator=generator, dtype=torch.float32, device=where
    )


def step_size(
    step: Steps | None, h: Steps | None, T: float | None, layers: int
) -> float | tuple[float, ...]:
    """The step: one number or one per layer, from `step` or `h`, or from T with h = T/N."""
    if sum(value is not None for value in (step, h, T)) > 1:
        raise OptionError(
            f"give step (also called h) or T, where h = T/N, not both: {step=}, {h=}, {T=}."
        )
    step = h if step is None else step
    if step is None:
        return positive_float("T", DEFAULT_T if T is None else T) / layers
    if isinstance(step, Tensor) and step.requires_grad:
        raise OptionError(
            "step requires a gradient, but a network keeps its steps as numbers; use "
            "learn_step=True, or a function of hdnn.functional, whose h may require gradients."
        )
    if isinstance(step, (Tensor, np.ndarray)):
        step = step.tolist()
    if not isinstance(step, Sequence):
        return positive_float("step", step)
    if len(step) != layers:
        raise OptionError(
            f"step has {len(step)} entries for {layers} layers; give one per layer."
        )
    return tuple(positive_float("step", h) for h in step)
