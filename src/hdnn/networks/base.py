"""What all networks share: parameters stacked over layers, around one function of the paper."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral
from typing import Any, Self

import torch
from torch import Tensor, nn

from hdnn import activations
from hdnn.activations import Activation
from hdnn.engine import Settings, current, dispatch
from hdnn.errors import NotInvertibleError, OptionError, ShapeError, flag, positive_int
from hdnn.networks import jacobians
from hdnn.networks.initial import Initial
from hdnn.networks.promise import ALWAYS, SYMPLECTIC, Guarantee, forward_euler, own_methods, unknown
from hdnn.networks.stack import LayerStack
from hdnn.networks.weights import refresh
from hdnn.operators import dense


class Network(LayerStack):
    """A stack of N layers on states `(*batch, n)`: what H1, H2, MLP and all others are.

    The weights of all layers are stacked, (N, ...), under the names that they have as arguments of
    the function in `hdnn.functional`; `weights()` gives exactly those arguments. A network has a
    length, and `net[j]` is its layer j. This class itself has no layers: it is here for
    `isinstance` and for networks of your own.

    Args:
        features: n, the size of a state.
        layers: N, how many layers there are.
        activation: sigma, the name of one of `hdnn.activations.names()`.
        tied: give all layers the same weights.

    Raises:
        ShapeError: if a size is no whole number >= 1.
        OptionError: if the activation is not known, or `tied` is neither True nor False.

    Examples:
        >>> import hdnn
        >>> nets = [hdnn.H2(features=4, layers=8), hdnn.MLP(features=4, layers=8)]
        >>> [isinstance(net, hdnn.networks.Network) for net in nets]
        [True, True]
        >>> [net.guarantee().holds for net in nets]
        [True, False]
        >>> nets[0][2]
        Layer(2 of 8: K_p (2, 2), K_q (2, 2), b_p (2,), b_q (2,), h = 0.3)
    """

    stacked: tuple[str, ...] = ()  # the weights with one entry a layer
    split: bool = False  # whether they act on p and q, of m = n/2 features each
    bare_activation: bool = False  # whether the field is sigma(K y + b) itself, as J K^T = I
    invertible: bool = False
    engines: bool = False  # whether it can run other than layer by layer
    turns: int = 1  # how many p- and q-updates a layer has, where p and q take turns
    symplectic: bool = False  # whether each layer is, with one J for all
    implicit: bool = False  # whether its layers solve equations
    certified_at: str = "rows"
    forward_euler: bool = False  # whether its layers are steps of forward Euler
    engine: str = "auto"
    backprop: str = "auto"

    def __init__(
        self, features: int, layers: int, *, activation: str = "tanh", tied: bool = False
    ) -> None:
        super().__init__()
        self.features = positive_int("features", features)
        self.layers = positive_int("layers", layers)
        self.activation = activations.registered(activation).name
        self.tied = flag("tied", tied)

    # What a network is made of

    def _draw(self, initial: Initial) -> None:
        """Draw the stacked weights, in their order."""
        self.init = initial.init
        for name in self.stacked:
            first = self._first(name, initial)
            if name.startswith("K"):
                self._add_K(name, first)
            else:
                self.register_parameter(name, nn.Parameter(first))

    def _first(self, name: str, initial: Initial) -> Tensor:
        """First values for a stack of weights: K (N, n, n) or b (N, n), or m for n."""
        size = self._half() if self.split else self.features
        return (
            initial.K(self.stored, size, size) if name[0] == "K" else initial.b(self.stored, size)
        )

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Begin again: all weights are drawn as the constructor draws them.

        For a network that was made on the meta device, as FSDP does it, after `to_empty`.

        Args:
            generator: what they are drawn from; by default PyTorch's global generator.
        """
        weight = next(self.parameters())
        initial = Initial(self.init, self.features, generator, weight.dtype, weight.device)
        for name in self.stacked:
            self.assign(name, self._first(name, initial))

    def _add_K(self, name: str, K: Tensor) -> None:
        self.register_parameter(name, nn.Parameter(K))

    def _half(self, instead: str = "") -> int:
        """m = n/2, if there are as many features for p as for q; `instead` is more advice."""
        if self.features % 2:
            raise ShapeError(
                f"{type(self).__name__} splits the features into (p, q), so their number must be "
                f"even, but features = {self.features}; augment them by a zero "
                f"(hdnn.heads.Augment){instead}."
            )
        return self.features // 2

    @property
    def function(self) -> Callable[..., Tensor]:
        """The function of `hdnn.functional` that this network runs."""
        raise NotImplementedError

    @property
    def stored(self) -> int:
        """How many layers have weights of their own: N, or 1 if they are tied."""
        return 1 if self.tied else self.layers

    def weight(self, name: str) -> Tensor:
        """One stack of weights as it is stored: (N, ...), or (1, ...) if tied.

        Args:
            name: one of `names_by_layer()`, such as "K" or "b_p".
        """
        refresh(self)
        return getattr(self, name)

    def assign(self, name: str, value: Tensor) -> None:
        """Overwrite one stack of weights, in its own memory.

        Args:
            name: one of `names_by_layer()`, such as "K" or "b_p".
            value: the new weights, (N, ...), or (1, ...) if tied.
        """
        self.write(name, value)

    def weights(self) -> dict[str, Any]:
        """All arguments of `function` except the state, by their names."""
        return {name: self._all_layers(self.weight(name)) for name in self.stacked}

    def _all_layers(self, weight: Tensor) -> Tensor:
        return weight.expand(self.layers, *weight.shape[1:]) if self.tied else weight

    def field(self) -> dict[str, Tensor]:
        """J, K (N, r, n) and b (N, r) of the ODE `y' = J K^T sigma(K y + b)` that is discretised.

        Raises:
            OptionError: for a network that is no discretised Hamiltonian ODE, such as an MLP.
        """
        raise OptionError(f"{type(self).__name__} is no discretised Hamiltonian ODE.")

    def config(self) -> dict[str, Any]:
        """The arguments that make this network again, as JSON can hold them."""
        return {
            "features": self.features,
            "layers": self.layers,
            "activation": self.activation,
            "tied": self.tied,
        }

    def constants(self) -> dict[str, Tensor]:
        """Arguments of the constructor that are tensors."""
        return {}

    # What is known of it

    def guarantee(self) -> Guarantee:
        """Whether `norm(dy_N/dy_j) >= 1` is a theorem for this network, and why.

        It does not hold for a subclass that computes in another way; that may define its own.
        """
        own = own_methods(self)
        return unknown(self, own) if own else self._promise()

    def _promise(self) -> Guarantee:
        if self.symplectic:
            return Guarantee(True, SYMPLECTIC, ALWAYS)
        if self.forward_euler:
            return forward_euler(self.activation, self._sigma.monotone)
        return Guarantee(False, "none", f"nothing is known of {type(self).__name__}")

    def layer_jacobians(self, states: Tensor, layers: slice = slice(None)) -> Tensor:
        """The derivatives `M_j = dy_{j+1}/dy_j` of all or some layers, (L, B, n, n).

        In closed form and in denominator layout: the transpose of what
        `torch.autograd.functional.jacobian` gives. For a subclass that computes in its own way, by
        automatic differentiation of its `layer`.

        Args:
            states: those before and after each of these layers, (L+1, B, n), as `trajectory` gives.
            layers: which ones; by default all.
        """
        if own_methods(self):
            return jacobians.differentiated(self.layer, states[:-1], range(self.layers)[layers])
        return self._jacobians(states, self._weights_of(layers))

    def inverse_jacobians(self, states: Tensor, layers: slice = slice(None)) -> Tensor | None:
        """The inverses of `layer_jacobians`, by undoing each shear.

        Args:
            states: those before and after each of these layers, (L+1, B, n).
            layers: which ones; by default all.

        Returns:
            The matrices (L, B, n, n), or None for layers that are not made of shears.
        """
        return None

    def shear_norms(self) -> Tensor:
        """The bounds `|A| / S` of all shears `I + A` of all layers, in the order in which they run.

        Raises:
            OptionError: for networks whose layers are not made of shears.
        """
        raise OptionError(
            f"the gradient budget B is for networks whose layers are shears (H2, MS1, MS3, Verlet, "
            f"Yoshida), not for {type(self).__name__}; see hdnn.analysis for its bounds."
        )

    def field_rates(self) -> Tensor:
        """A bound on the derivative of the field in each layer: `S |K_j|^2 |J_j|`, (N,)."""
        if self.bare_activation:
            return self._sigma.S * dense.norm(self.weights()[self.stacked[0]])
        field = self.field()
        return self._sigma.S * dense.norm(field["K"]).square() * dense.norm(field["J"])

    def _jacobians(self, states: Tensor, w: dict[str, Any]) -> Tensor:
        """M_j in closed form, given the weights of the layers."""
        raise NotImplementedError

    @property
    def _sigma(self) -> Activation:
        return activations.get(self.activation)

    # What a network does

    def forward(self, y: Tensor) -> Tensor:
        """The last state, `y_N` from `y_0`: what `net(y)` computes.

        Args:
            y: states `(*batch, n)`.

        Returns:
            States of the same shape.

        Raises:
            ShapeError: if y is no tensor of that shape, in the dtype of the weights.
        """
        return self._run(y, self.weights())

    def trajectory(self, y: Tensor) -> Tensor:
        """All states, `y_0` to `y_N`: `(N+1, *batch, n)`.

        Args:
            y: states `(*batch, n)`.
        """
        return self._run(y, self.weights(), trajectory=True)

    def layer(self, y: Tensor, j: int) -> Tensor:
        """One layer alone: `y_{j+1}` from `y_j`.

        Args:
            y: states `(*batch, n)`.
            j: the number of the layer, from 0 to N-1.

        Raises:
            ShapeError: if there is no such layer.
        """
        if not (isinstance(j, Integral) and 0 <= j < self.layers):
            raise ShapeError(f"layer j must be in 0 .. {self.layers - 1}, but got {j!r}.")
        return self._run(y, self.layer_weights(j))

    def run_layers(self, y: Tensor, layers: slice, *, trajectory: bool = False) -> Tensor:
        """The state after some layers alone, or all states from the first of them on.

        Args:
            y: the state before the first of these layers, `(*batch, n)`.
            layers: which ones.
            trajectory: give all their states, `(L+1, *batch, n)`.
        """
        if not own_methods(self):
            return self._run(y, self._weights_of(layers), trajectory=trajectory)
        states = [y]
        for j in range(self.layers)[layers]:
            states.append(self.layer(states[-1], j))
        return torch.stack(states) if trajectory else states[-1]

    def names_by_layer(self) -> tuple[str, ...]:
        """The weights that each layer has of its own, such as "K" and "b"."""
        return self.stacked

    def layer_weights(self, j: int) -> dict[str, Any]:
        """The arguments of `function` for layer j alone, with N = 1."""
        return self._weights_of(slice(j, j + 1))

    def _weights_of(self, layers: slice) -> dict[str, Any]:
        each, shared = self.weights_by_layer()
        return {**shared, **{name: value[layers] for name, value in each.items()}}

    def weights_by_layer(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """`weights()` in two parts: those of each layer, (N, ...), and those that layers share."""
        each, shared = {}, {}
        for name, value in self.weights().items():
            stack = isinstance(value, tuple) or (isinstance(value, Tensor) and value.ndim in (1, 3))
            (each if stack or name in self.stacked else shared)[name] = value
        return each, shared

    def inverse(self, y: Tensor, *, trajectory: bool = False) -> Tensor:
        """The first state from the last: `y_0` from `y_N`, exact up to rounding.

        Args:
            y: states `(*batch, n)` after the last layer.
            trajectory: give all states, `(N+1, *batch, n)`, in forward order.

        Raises:
            NotInvertibleError: if the layers have no explicit inverse (H1, MS2, MLP).
        """
        if not self.invertible:
            raise NotInvertibleError(
                f"{type(self).__name__} has no explicit inverse; H2, MS1, MS3, ImplicitH2, Verlet, "
                "Yoshida and midpoint networks have."
            )
        return self._run(y, self.weights(), inverse=True, trajectory=trajectory)

    def _run(self, y: Tensor, weights: dict[str, Any], **options: Any) -> Tensor:
        if isinstance(y, Tensor) and y.ndim and y.shape[-1] != self.features:
            raise ShapeError(
                f"{type(self).__name__} takes y of shape (*batch, {self.features}), "
                f"but got {tuple(y.shape)}; augment the features (hdnn.heads.Augment) "
                f"or make the network with features={y.shape[-1]}."
            )
        if self.engines:
            options |= self._asked()
        return self.function(y, **weights, activation=self.activation, **options)

    def _asked(self) -> dict[str, str | None]:
        """The engine and backprop that were set here; "auto" leaves them to `hdnn.engine.use`."""
        given = {"engine": self.engine, "backprop": self.backprop}
        return {name: None if value == "auto" else value for name, value in given.items()}

    def _choose_engine(self, engine: str, backprop: str) -> None:
        """Check and set how the stack runs."""
        settings = Settings(engine=engine, backprop=backprop)
        if not self.engines and settings != Settings():
            raise OptionError(
                f"{type(self).__name__} runs layer by layer only; leave engine and backprop out."
            )
        self.engine, self.backprop = engine, backprop

    def engine_report(self, batch: int = 128) -> str:
        """What would run, in one line, and why: see `hdnn.engine`.

        Args:
            batch: how many states run at once.
        """
        weight = next(self.parameters())
        where = f"{self!r} on {weight.device.type}, {weight.dtype}, batch {batch}"
        if not self.engines:
            return f"{where}: reference engine, stored states (it runs layer by layer only)"
        plan = dispatch.plan(
            current(**self._asked()),
            reversible=self.invertible,
            device=weight.device,
            dtype=weight.dtype,
            n=self.features,
            batch=positive_int("batch", batch),
            steps=self.layers * self.turns,
            activation=self.activation,
        )
        return f"{where}: {plan.engine} engine, backprop {plan.backprop} ({plan.why})"

    def refine(self, k: int) -> Self:
        """The network with k times the layers at steps h/k: the same function in the limit.

        Args:
            k: how many layers each one becomes.

        Raises:
            OptionError: for a network that is no discretised ODE, such as an MLP.
            ShapeError: if k is no whole number >= 1.
        """
        raise OptionError(f"{type(self).__name__} is no discretised ODE and cannot be refined.")

    def extra_repr(self, *, learned: bool = True) -> str:
        """What the network is; without `learned`, only what training does not change."""
        parts = [f"{self.features} features", f"{self.layers} layers", self.activation]
        parts += [groups] if (groups := self.describe_groups()) else []
        return ", ".join(parts + (["tied"] if self.tied else []))

    def form(self) -> str:
        """The network in one line that is the same before, during and after a training."""
        return self._line(self.extra_repr(learned=False))

    def __repr__(self) -> str:
        return self._line(self.extra_repr())

    def _line(self, parts: str) -> str:
        count = sum(p.numel() for p in self.parameters())
        return f"{type(self).__name__}({parts}, {count} parameters)"
