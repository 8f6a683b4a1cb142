"""Hamiltonian units: H1 and H2 on images, with K a convolution.

A layer is made of shears B^T sigma(A s + a) (`hdnn.networks.shears`): A = K, and B is K times the
step, with the signs (for H1 also the halves) of J.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from hdnn import activations
from hdnn.base.shapes import autocasting
from hdnn.engine import OPTIONS, Settings, current, dispatch, units
from hdnn.engine.kernels import pixels
from hdnn.errors import (
    NotInvertibleError,
    OptionError,
    ShapeError,
    choose,
    flag,
    int_from,
    positive_int,
    probability,
)
from hdnn.networks import shears
from hdnn.networks.norm import BatchNorm
from hdnn.networks.options import step_size
from hdnn.networks.promise import ALWAYS, SYMPLECTIC, Guarantee, forward_euler
from hdnn.networks.shears import EPS, Kind, ShearWeights
from hdnn.networks.unit_derivatives import Derivative, H1Derivative, H2Derivative, Unknown
from hdnn.networks.unit_weights import MOMENTUM, UnitWeights, named
from hdnn.sparsity import Sparsity

NETWORKS = ("h1", "h2")
NORMS = ("none", "inside", "after", "both")


class HamiltonianUnit(UnitWeights):
    """N layers of `y' = J K^T sigma(K y + b)` on images, with K a convolution.

    The first half of the channels is p, the second q. "h1" is forward Euler (eq:H-DNN_fE), with
    parameters K (N, C, C/groups, k, k) and b (N, C); "h2" semi-implicit Euler (eq:p_update,
    eq:q_update), symplectic, with `K_p`, `K_q` (N, C/2, C/2/groups, k, k) and `b_p`, `b_q`
    (N, C/2). `guarantee()` says whether `norm(dy_N/dy_j) >= 1` holds with the options given.

    Under autocast, or with weights in half precision, the state stays in float32 inside the unit
    and the convolutions run in the lower precision; `y_N` has the dtype of `y_0`.

    Args:
        channels: C, an even number.
        layers: N, how many steps there are.
        network: "h1" or "h2".
        kernel: k, the side of the kernels of K; odd.
        step: h, a number or one for each layer; or give T instead.
        T: the time that all layers span, h = T/N; 2.4 if neither is given.
        activation: sigma, the name of one of `hdnn.activations.names()`.
        groups: into which the channels of K are split, as in `torch.nn.Conv2d`.
        padding: zeros around an image inside of K, by default (k - 1) / 2; states have one shape
            for any.
        norm: "inside" puts batch normalisation between K y + b and sigma, "after" behind the unit,
            "both" at both places, "none" nowhere.
        reversible: True is short for backprop="reversible", False for "stored".
        backprop: what the backward pass starts from: "stored" states of all layers, or a
            "checkpoint" every few layers, with the layers between run a second time, so that
            memory grows with sqrt(N). Both give the same gradients for any weights. "auto" stores
            while that takes less than 1/32 of the memory of the GPU, or of the machine, and takes
            checkpoints beyond; what `hdnn.engine.use(backprop=...)` asks for comes first.
            "reversible" (h2) rebuilds states from `y_N`, so that memory does not grow at all, but
            rounding grows by what the layers expand. Each time, the rebuilt `y_1` is compared with
            `y_1`: gradients that are inexact are a `ReversalWarning`, worthless ones a
            `TrainingError`. Inside of transforms of `torch.func` states are stored unless they are
            rebuilt.
        drop: the probability, one for all or one a layer, to leave a layer out for an image in
            training. If it is not left out, its step is h / (1 - drop), so that the mean step is h.
            The theorem holds for any steps, so it holds for these too.
        sparsity: a pattern R (M, M), or a `hdnn.Sparsity` with it, over M nodes that each own a
            group of channels of p and the same of q: K is zero between nodes that R does not link.
        init: "scaled" draws K from N(0, 1/fan-in) with b = 0; "paper" draws all from N(0, 1).
        generator: of the first weights; by default PyTorch's global one.
        dtype: of the weights; by default `torch.get_default_dtype()`.
        device: of the weights; by default `torch.get_default_device()`.

    Raises:
        ShapeError: if a size is out of range, the channels are odd or do not split into the groups
            or nodes, the kernel is even, `drop` has not one entry a layer, or the dtype is no
            floating-point one.
        StepError: if a step or a time is not finite and > 0, or there are not as many steps as
            layers.
        OptionError: if a name is not known, `drop` is not in `[0, 1)`, or two options exclude each
            other, such as "h1" and "reversible".
        SparsityError: if the pattern does not fit the channels.

    Examples:
        >>> import torch
        >>> import hdnn
        >>> unit = hdnn.HamiltonianUnit(8, layers=4, network="h2", step=0.1)
        >>> y = torch.randn(2, 8, 16, 16)
        >>> unit(y).shape
        torch.Size([2, 8, 16, 16])
        >>> unit.guarantee().holds, torch.allclose(unit.inverse(unit(y)), y, atol=1e-4)
        (True, True)
    """

    certified_at = "images"

    def __init__(
        self,
        channels: int,
        layers: int,
        *,
        network: str = "h1",
        kernel: int = 3,
        step: float | Sequence[float] | Tensor | None = None,
        T: float | None = None,
        activation: str = "relu",
        groups: int = 1,
        padding: int | None = None,
        norm: str = "none",
        reversible: bool | None = None,
        backprop: str = "auto",
        drop: float | Sequence[float] = 0.0,
        sparsity: Sparsity | Tensor | None = None,
        init: str = "scaled",
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.channels = positive_int("channels", channels)
        self.layers = positive_int("layers", layers)
        self.network, self.norm = choose("network", network, NETWORKS), choose("norm", norm, NORMS)
        self.kernel, self.groups = positive_int("kernel", kernel), positive_int("groups", groups)
        self.padding = self.kernel // 2 if padding is None else int_from(0, "padding", padding)
        self.activation = activations.registered(activation).name
        self.step = step_size(step, T, self.layers)
        split = network == "h2"
        self.backprop = _backprop(backprop, reversible)
        self.drop = _probabilities(drop, self.layers)
        self._check(split)
        self.halves = ("q", "p") if split else ("",)  # whose weights each shear uses
        width = channels // 2 if split else channels
        self._shape = (self.layers, width, width // groups, kernel, kernel)
        self.init = init
        initial = self._initial(generator, dtype, device)
        free = None if sparsity is None else self._free(sparsity)
        for half in self.halves[::-1]:
            self._add(half, initial, free)
        placed: dict[str, Any] = {"dtype": initial.dtype, "device": initial.device}
        if any(self.drop):
            rates = torch.tensor(self.drop, dtype=initial.dtype, device="cpu")
            b = self.get_parameter(named("b", self.halves[0]))
            self.add_constant("_drop", rates, b, persistent=False)
        self.after = (
            BatchNorm(channels, eps=EPS, momentum=MOMENTUM, **placed)
            if norm in ("after", "both")
            else None
        )

    def _check(self, split: bool) -> None:
        C, G = self.channels, self.groups
        if C % 2:
            raise ShapeError(f"the channels are split into (p, q), so {C} must be even.")
        if self.kernel % 2 == 0:
            raise ShapeError(f"kernel must be odd, to have a middle, but got {self.kernel}.")
        if (C // 2 if split else C) % G:
            what = f"C/2 = {C // 2}" if split else f"C = {C}"
            raise ShapeError(f"{what} channels do not split into {G} groups.")
        if self.reversible:
            self._check_inverse()

    def _check_inverse(self) -> None:
        if self.network == "h1":
            raise OptionError(
                'an H1 layer has no explicit inverse; backprop="reversible" is for h2, take '
                '"checkpoint" to save memory.'
            )

    @property
    def reversible(self) -> bool:
        """Whether states are rebuilt from the last: `backprop="reversible"`."""
        return self.backprop == "reversible"

    @reversible.setter
    def reversible(self, value: bool | None) -> None:
        self.backprop = _backprop("auto", value)

    # What a unit does

    def forward(self, y: Tensor) -> Tensor:
        """The last state, `y_N` from `y_0`.

        Args:
            y: images (B, C, height, width).

        Raises:
            ShapeError: if y has another shape or dtype, or is smaller than the kernel.
        """
        y_N, *statistics = self._run(y, self._factors(y))
        if statistics:
            self._remember(len(y) * math.prod(self._inner_size(y)), *statistics)
        out = y_N.to(y.dtype)
        return out if self.after is None else self.after(out)

    def trajectory(self, y: Tensor) -> Tensor:
        """All states of the layers, none left out: (N+1, B, C, height, width).

        Args:
            y: images (B, C, height, width).
        """
        states: list[Tensor] = []
        self._run(y, states=states)
        return torch.stack(states).to(y.dtype)

    def run_layers(self, y: Tensor, layers: slice, *, trajectory: bool = False) -> Tensor:
        """The state after some layers alone, or all states from the first of them on.

        Args:
            y: the state before the first of these layers, (B, C, height, width).
            layers: which ones.
            trajectory: give all their states, stacked.
        """
        work, wide = self._dtypes(y)
        with torch.autocast(y.device.type, enabled=False):
            y_0, parts, kind, _ = self._given(y.to(wide), work, self._raw(), None)
            states: list[Tensor] = []
            y_L = shears.run(y_0, [part.some(layers) for part in parts], kind, states=states)[0]
        return (torch.stack(states) if trajectory else y_L).to(y.dtype)

    def inverse(self, y: Tensor) -> Tensor:
        """The first state from the last, for h2; batch statistics need the same batch again.

        Args:
            y: what the last layer gave, (B, C, height, width).

        Raises:
            NotInvertibleError: for h1, and where normalisation stands behind the unit.
        """
        if self.network == "h1" or self.after is not None:
            why = "H1 has no explicit inverse" if self.network == "h1" else "norm='after' has none"
            raise NotInvertibleError(f"{why}; take network='h2' with norm 'none' or 'inside'.")
        return self._run(y, inverse=True)[0].to(y.dtype)

    @torch.no_grad()
    def layer_derivatives(self, y: Tensor) -> list[Derivative]:
        """The derivatives of all layers along the trajectory of one image.

        Args:
            y: the image, (1, C, height, width).
        """
        if self.normed and self.training:
            raise OptionError("batch statistics tie the samples together; call unit.eval() first.")
        states = self.trajectory(y)
        if not bool(states.isfinite().all()):
            return [Unknown()] * self.layers
        kind, parts = self._kind(), self._parts(y.dtype, self._raw())
        layers = zip(states[:-1], *(part.layers() for part in parts), strict=True)
        if self.network == "h1":
            return [H1Derivative(s, part, kind) for s, part in layers]
        return [H2Derivative(s, (of_q, of_p), kind) for s, of_q, of_p in layers]

    def _factors(self, y: Tensor) -> Tensor | None:
        """0 for the layers that are left out, and 1 / (1 - drop): (N, B)."""
        if not (self.training and any(self.drop)):
            return None
        drop = self.get_buffer("_drop")[:, None]
        return (torch.rand(self.layers, len(y), device=y.device) >= drop) / (1 - drop)

    def _run(self, y: Tensor, factors: Tensor | None = None, **options: Any) -> shears.Passed:
        work, wide = self._dtypes(y)
        with torch.autocast(y.device.type, enabled=False):
            backprop = "stored" if options else self._chosen_backprop(y, work)
            if not options and wide is torch.float32 and self._fuses(y):
                return units.run(y, self._schedule(work, backprop), self._raw(), factors)
            given = self._given(y.to(wide), work, self._raw(), factors)
            if options or backprop == "stored" or not torch.is_grad_enabled():
                return shears.run(*given, **options)
            if backprop == "checkpoint":
                return shears.checkpointed(*given)
            return shears.rebuilt(*given, _settings().check)

    def _given(
        self, y: Tensor, work: torch.dtype, raw: Sequence[Tensor], factors: Tensor | None
    ) -> tuple[Tensor, list[ShearWeights], Kind, Tensor | None]:
        """The arguments for the functions of `hdnn.networks.shears`."""
        factors = None if factors is None else factors.to(y.dtype)
        return y, self._parts(work, raw), self._kind(), factors

    def _chosen_backprop(self, y: Tensor, work: torch.dtype) -> str:
        """What the backward pass starts from: "stored", "checkpoint" or "reversible"."""
        backprop = _settings().backprop if self.backprop == "auto" else self.backprop
        if backprop == "reversible":
            self._check_inverse()
        if backprop == "auto":
            size = max(math.prod(y.shape[2:]), math.prod(self._inner_size(y)))
            states = units.IMAGES * self.layers * len(y) * self.channels * size * work.itemsize
            backprop = "stored" if states <= dispatch.stored_limit(y.device) else "checkpoint"
        if backprop == "checkpoint" and not torch.compiler.is_compiling():
            # PyTorch cannot run a segment again inside of its transforms.
            return "stored" if dispatch.transformed() or dispatch.watched() else backprop
        return backprop

    # On a GPU

    def _fuses(self, y: Tensor) -> bool:
        """Whether `hdnn.engine.units` runs the unit, and not plain PyTorch."""
        return (
            self.groups == 1
            and self.padding == self.kernel // 2
            and not (self.normed and not self.training)
            and self.activation in dispatch.FUSED
            and pixels.fuse(y)
        )

    def _schedule(self, work: torch.dtype, backprop: str) -> units.Schedule:
        h = self.step if isinstance(self.step, tuple) else (self.step,) * self.layers
        if self.network == "h1":
            order = [units.Shear(0, 0, 0, j, h[j]) for j in range(self.layers)]
        else:  # q moves p, then p moves q
            order = [
                units.Shear(1 - half, half, half, j, (-h[j], h[j])[half])
                for j in range(self.layers)
                for half in (0, 1)
            ]
        how = (self.activation, self.network == "h1", self.normed, EPS, work, backprop)
        return units.Schedule(tuple(order), *how, _settings().check, partial(self._plain, work))

    def _plain(self, work: torch.dtype, factors: Tensor | None, y: Tensor, *raw: Tensor) -> Tensor:
        """y_N layer by layer, from weights in the order of `_raw`."""
        given = self._given(y.to(torch.float32), work, raw, factors)
        return shears.run(*given)[0].to(y.dtype)

    def _inner_size(self, y: Tensor) -> list[int]:
        """Height and width of K y."""
        return [side + 2 * self.padding - self.kernel + 1 for side in y.shape[2:]]

    def _dtypes(self, y: Tensor) -> tuple[torch.dtype, torch.dtype]:
        """The dtype of the convolutions, and that of the state."""
        if not isinstance(y, Tensor) or y.ndim != 4 or y.shape[1] != self.channels:
            given = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
            raise ShapeError(
                f"HamiltonianUnit takes images (B, {self.channels}, height, width), "
                f"but got {given}."
            )
        if min(self._inner_size(y)) < 1:
            raise ShapeError(
                f"a kernel of {self.kernel} x {self.kernel} with padding {self.padding} does not "
                f"fit into images of {y.shape[2]} x {y.shape[3]}."
            )
        own = getattr(self, named("b", self.halves[0])).dtype
        casts = autocasting(y.device)
        if y.dtype != own and not (casts and y.is_floating_point()):
            raise ShapeError(
                f"HamiltonianUnit has weights in {own}, but y is {y.dtype}; "
                "both must have one dtype: use .to(dtype) on one of them."
            )
        work = own
        if casts and own is not torch.float64:  # as autocast does
            work = torch.get_autocast_dtype(y.device.type)
        return work, torch.promote_types(own, torch.float32)

    def guarantee(self) -> Guarantee:
        """Whether `norm(dy_N/dy_j) >= 1` is a theorem for this unit as it is now, and why.

        `after` is no part of the Hamiltonian stack and not covered. With `norm="inside"`, each
        channel's activation in evaluation is sigma(s x + c): still Hamiltonian, and for H1 monotone
        if s >= 0. In training each sample's gradient depends on the whole batch: the H2 map of the
        batch preserves volume, but nothing is promised for one sample.
        """
        if self.normed and self.training:
            why = "batch statistics tie the samples together while training; see it in eval()"
            return Guarantee(False, "none", why)
        if self.network == "h2":
            found = Guarantee(True, SYMPLECTIC, ALWAYS)
        elif self.normed and self._sigma.monotone and bool((self.weight("gamma") < 0).any()):
            why = "a gamma < 0 turns an activation around, so that it decreases"
            found = Guarantee(False, "none", why)
        else:
            found = forward_euler(self.activation, self._sigma.monotone)
        if found.holds and self.after is not None:
            found = replace(found, why=f"{found.why}, for the unit before its normalisation")
        return found

    # The module

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Begin again: all weights are drawn as the constructor draws them.

        Args:
            generator: what they are drawn from; by default PyTorch's global generator.
        """
        super().reset_parameters(generator)
        if self.after is not None:
            self.after.reset_parameters()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # model.to(memory_format=torch.channels_last) only handles tensors of 4 axes.
        def each(t: Tensor) -> Tensor:
            return fn(t.flatten(0, 1)).unflatten(0, t.shape[:2]) if t.ndim == 5 else fn(t)

        return super()._apply(each, recurse)

    def extra_repr(self) -> str:
        h = f"{self.step:.4g}" if isinstance(self.step, float) else "one a layer"
        parts = [self.network, f"{self.channels} channels", f"{self.layers} layers"]
        parts += [f"kernel {self.kernel}", self.activation, f"h = {h}"]
        parts += [f"padding {self.padding}"] * (self.padding != self.kernel // 2)
        parts += [f"{self.groups} groups"] * (self.groups > 1) + ["sparse"] * self.sparse
        parts += [f"norm {self.norm}"] * (self.norm != "none")
        parts += [groups] if (groups := self.describe_groups()) else []
        parts += [f"drop to {max(self.drop):.4g}"] * any(self.drop)
        if self.backprop != "auto":
            parts += ["reversible" if self.reversible else f"backprop {self.backprop}"]
        return ", ".join(parts)


def _settings() -> Settings:
    """What `hdnn.engine.use` asks for, which `torch.compile` cannot see."""
    return Settings() if torch.compiler.is_compiling() else current()


def _backprop(backprop: str, reversible: bool | None) -> str:
    """The `backprop` that was asked for, by either of the two options."""
    asked = choose("backprop", backprop, OPTIONS["backprop"])
    if reversible is None:
        return asked
    short = "reversible" if flag("reversible", reversible) else "stored"
    if asked not in ("auto", short):
        raise OptionError(
            f'reversible={reversible} is backprop="{short}", but backprop="{asked}" is given too; '
            "give one of them."
        )
    return short


def _probabilities(drop: float | Sequence[float], layers: int) -> tuple[float, ...]:
    """How often each layer is left out."""
    if isinstance(drop, (list, tuple)):
        if len(drop) != layers:
            raise ShapeError(f"drop has {len(drop)} entries for {layers} layers; give one each.")
        return tuple(probability("drop", one) for one in drop)
    return (probability("drop", drop),) * layers
