"""Networks whose layers are time steps of an ODE."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from hdnn.errors import OptionError, flag, positive_int
from hdnn.networks import jacobians
from hdnn.networks.base import Network
from hdnn.networks.initial import Initial
from hdnn.networks.jacobians import ShearLayers
from hdnn.networks.options import step_size
from hdnn.networks.promise import own_methods
from hdnn.networks.weights import refresh, smoothness


class ODENetwork(Network):
    """A network whose layers are time steps of an ODE: it has a step size h = T/N.

    All networks but the MLP are of this kind. The class itself has no layers: it is here for
    `isinstance` and for networks of your own.

    Args:
        features: n, the size of a state.
        layers: N, how many steps there are.
        step: h, a number or one for each layer; or give T instead.
        T: the time that all layers span, h = T/N; 2.4 if neither is given.
        learn_step: train the step of each layer too; it stays positive.
        activation: sigma, the name of one of `hdnn.activations.names()`.
        tied: give all layers the same weights.
        initial: what draws the first weights, a `hdnn.networks.initial.Initial`.

    Raises:
        ShapeError: if a size is no whole number >= 1.
        StepError: if a step or a time is not finite and > 0, or there are not as many steps as
            layers.
        OptionError: if the activation is not known, a flag is neither True nor False, or both
            `step` and `T` are given.

    Examples:
        >>> import hdnn
        >>> net = hdnn.H2(features=4, layers=8, T=2.0)
        >>> isinstance(net, hdnn.networks.ODENetwork), net.h
        (True, 0.25)
        >>> net.refine(2)  # the same ODE in smaller steps, to continue training from
        H2(4 features, 16 layers, tanh, h = 0.125, T = 2, 192 parameters)
    """

    def __init__(
        self,
        features: int,
        layers: int,
        *,
        step: float | Sequence[float] | Tensor | None = None,
        T: float | None = None,
        learn_step: bool = False,
        activation: str = "tanh",
        tied: bool = False,
        initial: Initial,
    ) -> None:
        super().__init__(features, layers, activation=activation, tied=tied)
        self.step = step_size(step, T, self.layers)
        self.learn_step = flag("learn_step", learn_step)
        if learn_step:
            if self.tied and isinstance(self.step, tuple) and len({*self.step}) > 1:
                raise OptionError("tied layers learn one step; give a single step or T.")
            self.log_h = nn.Parameter(initial.constant(self._log_steps()))

    def _log_steps(self) -> Tensor:
        """Where learning starts. It learns log h: a step stays positive whatever happens to it."""
        steps = self.step if isinstance(self.step, tuple) else (self.step,) * self.stored
        logs = [math.log(h) for h in steps[: self.stored]]
        return torch.tensor(logs, dtype=torch.float64, device="cpu")

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Begin again: all weights are drawn as the constructor draws them, and learned
        steps are what they were at first.

        Args:
            generator: what they are drawn from; by default PyTorch's global generator.
        """
        super().reset_parameters(generator)
        if self.learn_step:
            self.assign("log_h", self._log_steps())

    @property
    def h(self) -> float | tuple[float, ...] | Tensor:
        """The step: a float, one a layer, or the learned ones (N,)."""
        refresh(self)
        return self._all_layers(self.log_h.exp()) if self.learn_step else self.step

    def steps(self) -> Tensor:
        """The steps of all layers: (N,)."""
        weight = next(self.parameters())
        return torch.as_tensor(self.h, dtype=weight.dtype, device=weight.device).expand(self.layers)

    @property
    def T(self) -> float:
        """The time that the stack spans: the sum of all steps."""
        h = self.h
        if isinstance(h, Tensor):
            return float(h.detach().sum())
        return math.fsum(h) if isinstance(h, tuple) else h * self.layers

    @property
    def J(self) -> Tensor:
        """The interconnection matrix (n, n), or (N, n, n) where it differs from layer to layer."""
        return self.field()["J"]

    def weights(self) -> dict[str, Any]:
        """All arguments of `function` except the state, by their names."""
        return {**super().weights(), "h": self.h}

    def _shears(self, w: dict[str, Any]) -> ShearLayers | None:
        """The layers as p- and q-updates, or None if they are not made of these."""
        return None

    def _jacobians(self, states: Tensor, w: dict[str, Any]) -> Tensor:
        shears = self._shears(w)
        assert shears is not None
        return jacobians.of_shears(shears, states, jacobians.steps(w["h"], states), self._sigma)

    def inverse_jacobians(self, states: Tensor, layers: slice = slice(None)) -> Tensor | None:
        """The inverses of `layer_jacobians`, by undoing each shear.

        Args:
            states: those before and after each of these layers, (L+1, B, n).
            layers: which ones; by default all.

        Returns:
            The matrices (L, B, n, n), or None for layers that are not made of shears.
        """
        if own_methods(self):
            return None
        w = self._weights_of(layers)
        shears = self._shears(w)
        if shears is None:
            return None
        h = jacobians.steps(w["h"], states)
        return jacobians.of_shears(shears, states, h, self._sigma, undone=True)

    def shear_norms(self) -> Tensor:
        """The bounds `|A| / S` of all shears `I + A` of all layers, in the order in which they run.

        Raises:
            OptionError: for networks whose layers are not made of shears.
        """
        shears = self._shears(self.weights())
        return super().shear_norms() if shears is None else shears.norms(self.steps())

    def smoothness(self) -> Tensor:
        """The regulariser `R_K` of this network's own K and b: see `hdnn.regularization`."""
        return smoothness(*self._smooth(), self.h)

    def smooth_leaves(self) -> list[tuple[str, float]]:
        """Names of weights whose jumps from layer to layer make up R_K, and how often each counts.

        Empty where R_K is not such a sum: for learned steps or tied weights.
        """
        return [] if self.learn_step or self.tied else self._counted()

    def _counted(self) -> list[tuple[str, float]]:
        """The names of stacked parameters, and how often their entries are in K and b."""
        return [(name, 1.0) for name in self.stacked]

    def _smooth(self) -> tuple[Tensor, Tensor]:
        """K and b in any form with the same Frobenius norms as in the paper."""
        stacks = {name: self._all_layers(self.weight(name)) for name in self.stacked}
        K, b = ([stacks[name] for name in stacks if name.startswith(kind)] for kind in "Kb")
        return (K[0], b[0]) if len(K) == 1 else (torch.cat(K, -1), torch.cat(b, -1))

    def config(self) -> dict[str, Any]:
        """The arguments that make this network again, as JSON can hold them."""
        step = list(self.step) if isinstance(self.step, tuple) else self.step
        return {**super().config(), "step": step, "learn_step": self.learn_step}

    def refine(self, k: int) -> Self:
        """The network with k times the layers at steps h/k: the same function in the limit.

        Args:
            k: how many layers each one becomes.

        Raises:
            ShapeError: if k is no whole number >= 1.
        """
        k = positive_int("k", k)
        config = self.config()
        step = self.step
        config["step"] = (
            [h / k for h in step for _ in range(k)] if isinstance(step, tuple) else step / k
        )
        config["layers"] = k * self.layers
        fine = self._refined(config, k)
        fine.engine, fine.backprop = self.engine, self.backprop
        for name in self.stacked:
            value = self.weight(name).detach()
            fine.assign(name, value if self.tied else value.repeat_interleave(k, 0))
        if self.learn_step:
            log_h = self.log_h.detach() - math.log(k)
            fine.assign("log_h", log_h if self.tied else log_h.repeat_interleave(k, 0))
        fine.refine_groups(self, k)
        return fine

    def _refined(self, config: dict[str, Any], k: int) -> Self:
        weight = next(self.parameters())
        options = {**config, "dtype": weight.dtype, "device": weight.device}
        # All that it draws is overwritten: spare the global generator.
        options["generator"] = torch.Generator()
        for name, value in self.constants().items():
            options[name] = value.repeat_interleave(k, 0) if value.ndim == 3 else value
        return parametrize.type_before_parametrizations(self)(**options)  # pyright: ignore

    def extra_repr(self, *, learned: bool = True) -> str:
        parts = super().extra_repr(learned=learned)
        if self.learn_step and (not learned or self.log_h.is_meta):
            return f"{parts}, h learned"
        steps = self.steps().detach().tolist() if self.learn_step else self.step
        steps = {*steps} if isinstance(steps, (list, tuple)) else {steps}
        h = f"{steps.pop():.4g}" if len(steps) == 1 else "one a layer"
        return f"{parts}, h = {h}{', learned' * self.learn_step}, T = {self.T:.4g}"
