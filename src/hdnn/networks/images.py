"""Hamiltonian units: H1 and H2 on images, with K a convolution.

A layer consists of moves B^T sigma(A s + a), each a convolution and a transposed convolution: A is
K, and B is K times the step, with the signs (for H1 also the order of the halves) of J.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hdnn import activations
from hdnn.activations import Elementwise
from hdnn.engine import current, rebuild
from hdnn.engine.memory import device_bytes
from hdnn.engine.rebuild import Half, Move
from hdnn.errors import (
    DtypeError,
    OptionError,
    ShapeError,
    choose,
    positive_int,
)
from hdnn.io import HubModule, new_tensor
from hdnn.networks.network import (
    ALWAYS,
    EXPANDING,
    SYMPLECTIC,
    Guarantee,
    Steps,
    normal,
    step_size,
    unknown_reason,
)

NORMS = ("none", "inside", "after", "both")
MOMENTUM = 0.1  # momentum of the normalisation, as in torch.nn.BatchNorm2d
EPS = 1e-5
# The first values of weights and statistics that are not drawn.
FIRST = {"K": 0.0, "b": 0.0, "gamma": 1.0, "beta": 0.0, "mean": 0.0, "var": 1.0}


class HamiltonianUnit(HubModule):
    """N layers of `y' = J K^T sigma(K y + b)` on images, with K a convolution.

    The first half of the channels is p, the second q. "h1" is forward Euler, with parameters K
    (N, C, C, k, k) and b (N, C); "h2" is semi-implicit Euler, symplectic, with `K_p`, `K_q`
    (N, C/2, C/2, k, k) and `b_p`, `b_q` (N, C/2). `guarantee()` says whether `norm(dy_N/dy_j) >= 1`
    holds with these options. `torch.compile` makes units fast on a GPU.

    Under autocast, or with weights in half precision, the state is kept in float32 inside the unit
    and the convolutions run in the lower precision; `y_N` has the dtype of `y_0`.

    Args:
        channels: C, an even number.
        layers: N, the number of steps.
        network: "h1" or "h2".
        kernel: k, the side of the kernels of K.
        step: the step h: one number, or one for each layer; or give T instead.
        h: another name for `step`.
        T: the time that all layers span, h = T/N; 2.4 if neither is given.
        activation: sigma, one of `hdnn.activations.names()`, or an elementwise function or module.
        padding: the width of the border of zeros inside K, by default k // 2; states keep their
            shape with any padding.
        norm: "inside" puts batch normalisation between K y + b and sigma, "after" puts it after the
            unit, "both" in both places, "none" nowhere.
        backprop: which saved states the backward pass starts from. "stored": the states of all
            layers. "checkpoint": one state every few layers; the layers in between are run again,
            so memory grows with sqrt(N). Both give the same gradients for any weights. "reversible"
            (h2): only `y_N`, from which the other states are rebuilt. Memory then does not grow,
            but rounding errors grow as the layers expand: inexact gradients give a
            `ReversalWarning`, worthless gradients an error. "auto" follows
            `hdnn.engine.use(backprop=...)`; by default it stores all states while they take less
            than 1/32 of the memory, and uses checkpoints beyond that.
        drop: the probability of skipping a layer for an image in training: one for all layers, or
            one per layer. The layers that run have the step h / (1 - drop), so the mean step is h.
            The theorem holds for any steps, including these.
        init: "scaled" draws K from N(0, 1/fan-in) with b = 0; "paper" draws all from N(0, 1).
        generator: the random generator for the initial weights; by default PyTorch's global one.
        dtype: the dtype of the weights; by default `torch.get_default_dtype()`.
        device: the device of the weights; by default PyTorch's default device.

    Raises:
        ShapeError: if the channels are odd.
        OptionError: if an option is unknown or out of range, or two options exclude each other,
            such as "h1" and "reversible".

    Examples:
        >>> import torch
        >>> import hdnn
        >>> unit = hdnn.HamiltonianUnit(8, layers=4, step=0.1)
        >>> y = torch.randn(2, 8, 16, 16)
        >>> unit(y).shape
        torch.Size([2, 8, 16, 16])
        >>> unit.guarantee().holds, torch.allclose(unit.inverse(unit(y)), y, atol=1e-4)
        (True, True)
    """

    def __init__(
        self,
        channels: int,
        layers: int,
        *,
        network: str = "h2",
        kernel: int = 3,
        step: Steps | None = None,
        h: Steps | None = None,
        T: float | None = None,
        activation: str | Elementwise = "relu",
        padding: int | None = None,
        norm: str = "none",
        backprop: str = "auto",
        drop: float | Sequence[float] = 0.0,
        init: str = "scaled",
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.channels = positive_int("channels", channels)
        self.layers = positive_int("layers", layers)
        self.network = choose("network", network, ("h1", "h2"))
        self.norm = choose("norm", norm, NORMS)
        self.kernel = positive_int("kernel", kernel)
        self.padding = self.kernel // 2 if padding is None else padding
        self.activation = activations.registered(activation).name
        self.step = step_size(step, h, T, self.layers)
        self.backprop = choose(
            "backprop", backprop, ("auto", *rebuild.BACKPROPS)
        )
        self.drop = _probabilities(drop, self.layers)
        self.init = choose("init", init, ("scaled", "paper"))
        # The halves whose weights each move reads.
        self.halves = ("q", "p") if network == "h2" else ("",)
        if channels % 2:
            raise ShapeError(
                f"{channels} channels do not split into (p, q); use an even number, for example "
                f"after torch.nn.Conv2d({channels}, {channels + 1}, 1)."
            )
        if network == "h1" and backprop == "reversible":
            raise OptionError(
                'an H1 layer has no explicit inverse; backprop="reversible" is for h2; use '
                '"checkpoint" to save memory.'
            )
        self._add_weights(new_tensor(dtype, device))
        self.after = None
        if norm in ("after", "both"):
            self.after = nn.BatchNorm2d(channels, dtype=dtype, device=device)
        self.reset_parameters(generator)

    # The weights

    @property
    def normed(self) -> bool:
        """True if there is a normalisation between K y + b and sigma."""
        return self.norm in ("inside", "both")

    @property
    def track_running_stats(self) -> bool:
        """True if a training pass updates the running means, as in torch.nn.BatchNorm2d."""
        return self.normed

    @property
    def _shape(self) -> tuple[int, ...]:
        """The shape of a stack K."""
        width = self.channels // len(self.halves)
        return (self.layers, width, width, self.kernel, self.kernel)

    def _add_weights(self, like: Tensor) -> None:
        row = self._shape[:2]
        shapes = {"K": self._shape, "b": row}
        if self.normed:
            shapes |= dict.fromkeys(("gamma", "beta", "mean", "var"), row)
        for half in reversed(self.halves):
            for name, shape in shapes.items():
                tensor = like.new_empty(shape)
                if name in ("mean", "var"):
                    self.register_buffer(named(name, half), tensor)
                else:
                    weight = nn.Parameter(tensor)
                    self.register_parameter(named(name, half), weight)

    @torch.no_grad()
    def reset_parameters(
        self, generator: torch.Generator | None = None
    ) -> None:
        """Draw all weights again, as the constructor does.

        Args:
            generator: the random generator for the weights; by default PyTorch's global one.
        """
        for name, tensor in [*self.named_parameters(), *self.named_buffers()]:
            kind = name.split("_")[0]
            if kind in FIRST and not tensor.is_meta:
                self._start(tensor, kind, generator)
        if self.after is not None:
            self.after.reset_parameters()

    def _start(
        self, tensor: Tensor, kind: str, generator: torch.Generator | None
    ) -> None:
        """Fill a tensor with its first values."""
        paper = self.init == "paper"
        if kind != "K" and not (kind == "b" and paper):
            tensor.fill_(FIRST[kind])
            return
        scale = 1.0 if paper else math.prod(self._shape[2:]) ** -0.5
        tensor.copy_(scale * normal(tensor.shape, generator, tensor.device))

    def weight(self, name: str) -> Tensor:
        """One stack of weights.

        Args:
            name: the name of a parameter, such as "K" or "b_p".
        """
        return getattr(self, name)

    def smoothness(self) -> Tensor:
        """The regulariser `R_K` of this unit: small if neighbouring layers differ little."""
        jumps: Any = 0.0
        for half in self.halves:
            for name in ("K", "b"):
                weight = self.weight(named(name, half))
                jump = weight.diff(dim=0, prepend=weight[:1])
                jumps = jumps + jump.square().flatten(1).sum(1)
        return 0.5 * self._times_step(jumps).sum()

    def _times_step(self, stack: Tensor) -> Tensor:
        """The step of each layer times its entries."""
        if not isinstance(self.step, tuple):
            return self.step * stack
        pairs = zip(self.step, stack, strict=True)
        return torch.stack([h * entries for h, entries in pairs])

    @property
    def h(self) -> float | tuple[float, ...]:
        """The step: a float, or one per layer."""
        return self.step

    def config(self) -> dict[str, Any]:
        """The constructor arguments of this unit."""
        names = "channels layers network kernel step activation padding norm backprop drop init"
        return {name: getattr(self, name) for name in names.split()}

    # The layers

    def forward(self, y: Tensor) -> Tensor:
        """The last state `y_N`, computed from `y_0`.

        Args:
            y: images (B, C, height, width).

        Raises:
            ShapeError: if y has the wrong shape, or is smaller than the kernel.
            DtypeError: if y does not have the dtype of the weights.
        """

        def run(halves: list[Half], moves: list[Move]) -> list[Half]:
            return rebuild.run(halves, moves, self._chosen_backprop(y))

        y_N = self._walk(y, run, training=True)
        return y_N if self.after is None else self.after(y_N)

    def trajectory(self, y: Tensor) -> Tensor:
        """All states, with no layer left out: (N+1, B, C, height, width).

        Args:
            y: images (B, C, height, width).
        """
        return self.run_layers(y, slice(None), trajectory=True)

    def layer(self, y: Tensor, j: int) -> Tensor:
        """The state after layer j alone.

        Args:
            y: the state before layer j, (B, C, height, width).
            j: the number of the layer.
        """
        return self.run_layers(y, slice(j, j + 1 or None))

    def run_layers(
        self, y: Tensor, layers: slice, *, trajectory: bool = False
    ) -> Tensor:
        """The state after running only some layers, or all states along the way.

        Args:
            y: the state before the first of these layers, (B, C, height, width).
            layers: the numbers of the layers.
            trajectory: return all these states, stacked.
        """
        states = [y]

        def run(halves: list[Half], moves: list[Move]) -> list[Half]:
            each = len(self.halves)
            for j in range(self.layers)[layers]:
                halves = rebuild.run(halves, moves[each * j : each * (j + 1)])
                states.append(self._joined(y, halves))
            return halves

        self._walk(y, run)
        return torch.stack(states) if trajectory else states[-1]

    def inverse(self, y: Tensor) -> Tensor:
        """The first state from the last, for h2; with batch statistics, pass the same whole batch.

        Args:
            y: the state after the last layer, (B, C, height, width).

        Raises:
            OptionError: for h1, or if normalisation follows the unit.
        """
        if self.network == "h1" or self.after is not None:
            raise OptionError(
                "neither H1 nor normalisation after the unit has an explicit inverse; use "
                'network="h2" with norm "none" or "inside".'
            )
        return self._walk(y, rebuild.undo)

    def _walk(
        self,
        y: Tensor,
        run: Callable[[list[Half], list[Move]], list[Half]],
        *,
        training: bool = False,
    ) -> Tensor:
        """The state after `run` of all moves.

        If `training` is true and the unit is in training mode, layers are skipped and running means
        are updated.
        """
        self._check_images(y)
        dtype = self._dtype
        device = y.device.type
        if torch.is_autocast_enabled(device) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            factors = self._factors(y) if training else None
            moves = self._moves(dtype, factors, counts=training)
            values = y.to(self._wide).chunk(len(self.halves), 1)
            return self._joined(y, run([Half(half) for half in values], moves))

    def _joined(self, y: Tensor, halves: list[Half]) -> Tensor:
        values = [half.value for half in halves]
        state = values[0] if len(values) == 1 else torch.cat(values, 1)
        return state.to(y.dtype)

    def _moves(
        self, dtype: torch.dtype, factors: Sequence[Tensor] | None, counts: bool
    ) -> list[Move]:
        """The moves of all layers, in the order in which they run, for convolutions in a dtype."""
        last = len(self.halves) - 1
        shears = [self._shears(half, dtype) for half in self.halves]
        moves = []
        for j in range(self.layers):
            factor = None if factors is None else factors[j]
            for target, half in enumerate(self.halves):
                shear = shears[target][j]
                force = partial(self._force, shear, factor, j, half, counts)
                move = Move(last - target, target, force, f"layer {j}", self)
                moves.append(move)
        return moves

    def _shears(self, half: str, dtype: torch.dtype) -> list[Any]:
        """A, a and B of one move of each layer, with gamma and beta if there are any."""
        K = self.weight(named("K", half))
        B = self._times_step(-K if half == "q" else K)
        if self.network == "h1":
            # J swaps the halves of the result.
            B_p, B_q = B.chunk(2, 2)
            B = torch.cat([-B_q, B_p], 2)
        stacks = [
            K.to(dtype),
            self.weight(named("b", half)).to(dtype),
            B.to(dtype),
        ]
        if self.normed:
            names = ("gamma", "beta")
            stacks += [self.weight(named(name, half)) for name in names]
        return list(zip(*[stack.unbind(0) for stack in stacks], strict=True))

    def _force(
        self,
        shear: Sequence[Tensor],
        factor: Tensor | None,
        j: int,
        half: str,
        counts: bool,
        s: Tensor,
    ) -> Tensor:
        """B^T sigma(A s + a)."""
        A, a, B, *affine = shear
        x = F.conv2d(s.to(A.dtype), A, a, padding=self.padding)
        if affine:
            running: list[Any] = [None, None]
            if counts or not self.training:
                names = (named("mean", half), named("var", half))
                running = [self.get_buffer(name)[j] for name in names]
            options = {"momentum": MOMENTUM, "eps": EPS}
            x = F.batch_norm(
                x, *running, *affine, training=self.training, **options
            )
        z = activations.get(self.activation)(x)
        f = F.conv_transpose2d(z, B, padding=self.padding)
        return f if factor is None else factor * f

    def _factors(self, y: Tensor) -> Sequence[Tensor] | None:
        """0 for the layers that are left out, and 1 / (1 - drop): (B, 1, 1, 1) for each layer."""
        if not (self.training and any(self.drop)):
            return None
        draws = torch.rand(
            self.layers, len(y), 1, 1, 1, device=y.device
        ).unbind(0)
        pairs = zip(draws, self.drop, strict=True)
        return [(u >= p).to(self._wide) / (1 - p) for u, p in pairs]

    def _chosen_backprop(self, y: Tensor) -> str:
        backprop = self.backprop
        if torch.compiler.is_compiling():
            # It does not see the settings, and saves less by itself.
            return "stored" if backprop == "auto" else backprop
        if backprop == "auto":
            backprop = current().backprop
        if backprop == "reversible" and self.network == "h1":
            return "checkpoint"
        if backprop != "auto":
            return backprop
        images = 4 if self.normed else 3  # that autograd saves in a layer
        size = images * self.layers * y.numel() * y.dtype.itemsize
        fits = size <= device_bytes(y.device) / 32
        return "stored" if fits else "checkpoint"

    @property
    def _dtype(self) -> torch.dtype:
        return self.weight(named("b", self.halves[0])).dtype

    @property
    def _wide(self) -> torch.dtype:
        """The dtype of states inside the unit."""
        return torch.promote_types(self._dtype, torch.float32)

    def _check_images(self, y: Tensor) -> None:
        kind = type(y).__name__
        error = ShapeError
        if isinstance(y, Tensor):
            autocast = torch.is_autocast_enabled(y.device.type)
            fits = y.dtype == self._dtype or (
                autocast and y.is_floating_point()
            )
            if y.ndim == 4 and y.shape[1] == self.channels:
                if fits:
                    return
                error = DtypeError
            kind = f"{y.dtype} of shape {tuple(y.shape)}"
        raise error(
            f"a unit takes images (B, {self.channels}, height, width) in the dtype of its weights, "
            f"{self._dtype}, but got {kind}; use .to(dtype) on the images or the unit."
        )

    def guarantee(self) -> Guarantee:
        """The theorem that `norm(dy_N/dy_j) >= 1` for this unit as it is now, or why there is none.

        Normalisation after the unit is not part of the Hamiltonian stack, and is not covered. With
        `norm="inside"`, each channel's activation in evaluation is sigma(s x + c): still
        Hamiltonian, and for H1 monotone if s >= 0. In training each sample's gradient depends on
        the batch: the H2 map of the batch preserves volume, but nothing is promised for one sample.
        """
        reason = unknown_reason(self)
        sigma = activations.get(self.activation)
        if self.normed and self.training:
            reason = "batch statistics couple the samples in training; call eval() and ask again"
        elif self.network == "h1" and not sigma.monotone:
            reason = f"forward Euler promises nothing for {self.activation}, which may decrease"
        elif (
            self.network == "h1"
            and self.normed
            and (self.weight("gamma") < 0).any()
        ):
            reason = "a gamma < 0 flips an activation, so that it decreases"
        if reason is not None:
            return Guarantee(False, "none", reason)
        promise = Guarantee(True, SYMPLECTIC, ALWAYS)
        if self.network == "h1":
            why = f"at any depth, because {self.activation} never decreases"
            promise = Guarantee(True, EXPANDING, why)
        if self.after is not None:
            why = f"{promise.why}, for the unit before its normalisation"
            promise = replace(promise, why=why)
        return promise

    def _apply(
        self, fn: Callable[[Tensor], Tensor], recurse: bool = True
    ) -> Self:
        # model.to(memory_format=torch.channels_last) handles tensors of 4 axes alone.
        def each(t: Tensor) -> Tensor:
            return (
                fn(t.flatten(0, 1)).unflatten(0, t.shape[:2])
                if t.ndim == 5
                else fn(t)
            )

        return super()._apply(each, recurse)

    def extra_repr(self) -> str:
        step = (
            f"{self.step:.4g}" if isinstance(self.step, float) else "by layer"
        )
        size = f"{self.channels} channels, {self.layers} layers"
        kind = f"kernel {self.kernel}, {self.activation}, norm {self.norm}"
        return f"{self.network}, {size}, {kind}, h = {step}"


def named(name: str, half: str) -> str:
    """The name of a weight of one half: K_p, or K if there are no halves."""
    return f"{name}_{half}" if half else name


def _probabilities(drop: Any, layers: int) -> tuple[float, ...]:
    """The probability of leaving out each layer."""
    drops = tuple(drop) if isinstance(drop, (list, tuple)) else (drop,) * layers
    if len(drops) != layers or not all(0 <= p < 1 for p in drops):
        raise OptionError(
            f"drop must be at least 0 and below 1, one number or one for each of {layers} layers, "
            f"but got {drop}."
        )
    return drops
