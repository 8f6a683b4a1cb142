"""Stacks of layers, of which some can be frozen, or trained at rates of their own.

The weights of all layers are stacked in one tensor. What an optimiser must treat differently needs
tensors of its own: `divide` and `freeze` make these, by a parametrisation of PyTorch. The stack is
then computed from the parameters of several groups of layers, and no optimiser can move a group
that is frozen, whatever its momentum or decay.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from numbers import Integral
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from hdnn.errors import OptionError, quoted
from hdnn.networks.layers import Layer, Layers
from hdnn.networks.weights import KeepsConstants, overwrite

# Weights that only belong to single layers if they have so many axes.
SHARED = {"X": 3, "J_upper": 2}


class LayerStack(KeepsConstants):
    """A module of N layers, whose weights are stacked: (N, ...)."""

    layers: int
    tied: bool = False

    # To be said by each kind of stack

    def run_layers(self, y: Tensor, layers: slice, *, trajectory: bool = False) -> Tensor:
        """The state after some layers alone, or all states from the first of them on.

        Args:
            y: the state before the first of these layers.
            layers: which ones.
            trajectory: give all their states, stacked.
        """
        raise NotImplementedError

    def names_by_layer(self) -> tuple[str, ...]:
        """The weights that each layer has of its own, by the names under which they are read."""
        raise NotImplementedError

    def weight(self, name: str) -> Tensor:
        """One stack of weights, by one of the names of `names_by_layer`."""
        raise NotImplementedError

    def _whole_shape(self, name: str) -> tuple[int, ...]:
        """The shape of a stack of which only the free entries are stored."""
        raise NotImplementedError

    # To look at

    def __len__(self) -> int:
        return self.layers

    @overload
    def __getitem__(self, layers: int) -> Layer: ...
    @overload
    def __getitem__(self, layers: slice) -> Layers: ...
    def __getitem__(self, layers: int | slice) -> Layer | Layers:
        """Layer j, or a slice of the layers, as a view that can be run and looked at."""
        return Layers(self, range(self.layers))[layers]

    def __iter__(self) -> Iterator[Layer]:
        return iter(Layers(self, range(self.layers)))

    @torch.no_grad()
    def write(self, name: str, value: Tensor) -> None:
        """Overwrite one parameter or buffer as it is stored, in its own memory.

        Args:
            name: under which it is stored.
            value: the new numbers, in its shape.
        """
        if _divided(self, name):
            parts: Any = self.parametrizations
            values = parts[name][0].right_inverse(value.expand(getattr(self, name).shape))
            for held, part in zip(self._held(name), values, strict=True):
                overwrite(held, part)
        elif parametrize.is_parametrized(self, name):
            setattr(self, name, value)
        else:
            overwrite(getattr(self, name), value)

    # To freeze, and to give rates

    @property
    def frozen(self) -> tuple[int, ...]:
        """The layers that `freeze` keeps as they are."""
        return tuple(sorted(self.__dict__.get("_frozen", ())))

    @property
    def layer_groups(self) -> list[list[int]]:
        """The groups of layers that have parameters of their own."""
        return self.__dict__.get("_groups", [[*range(self.layers)]])

    def freeze(self, layers: Any = None) -> None:
        """Keep some layers as they are.

        No optimiser moves them, not even by weight decay or momentum. The other layers get
        parameters of their own, so freeze before you make the optimiser. What layers share, a
        learned X for instance, is not frozen.

        Args:
            layers: an index, a slice or several indices; by default all.
        """
        self._set({*self.frozen, *self._numbers(layers)}, self.layer_groups)

    def unfreeze(self, layers: Any = None) -> None:
        """Train some layers again: undoes `freeze`.

        Args:
            layers: an index, a slice or several indices; by default all.
        """
        self._set({*self.frozen} - {*self._numbers(layers)}, self.layer_groups)

    def divide(self, *groups: Any) -> list[list[nn.Parameter]]:
        """Give groups of layers parameters of their own, so that they can have rates of their own.

            first, last = net.divide(slice(0, 4), slice(4, 8))
            torch.optim.Adam([{"params": first, "lr": 1e-3}, {"params": last, "lr": 1e-2}])

        What layers share, a learned X for instance, is in no group. `divide()` makes one stack of
        all again.

        Args:
            *groups: each is an index, a slice or several indices; layers in none of them are one
                more group, the last.

        Returns:
            The parameters of each group.

        Raises:
            OptionError: if a layer is in two groups, or a group is empty.
        """
        found = [self._numbers(group) for group in groups]
        numbers = [j for group in found for j in group]
        if len({*numbers}) < len(numbers) or not all(found):
            raise OptionError(f"each layer must be in one group, and no group empty: {found}.")
        rest = sorted({*range(self.layers)} - {*numbers})
        found += [rest] if rest else []
        self._set({*self.frozen}, found)
        held = [*zip(*(self._held(name) for name in self._stored_by_layer()), strict=True)]
        where = self._divisions()
        return [
            [p for part, ps in zip(where, held, strict=True) if part[0] in group for p in ps]
            for group in found
        ]

    def _held(self, name: str) -> list[nn.Parameter]:
        """The parameters that a stack of weights is made of: its own, or one for each division."""
        if not _divided(self, name):
            return [self.get_parameter(name)]
        parts: Any = self.parametrizations
        return [*parts[name].parameters()]

    def _numbers(self, layers: Any) -> list[int]:
        """The layers that a user names."""
        if layers is None:
            return [*range(self.layers)]
        if isinstance(layers, Tensor):
            layers = layers.tolist()
        if isinstance(layers, (Integral, slice)):
            layers = self[layers]  # pyright: ignore[reportCallIssue, reportArgumentType]
        if isinstance(layers, Layers):
            return [*layers.numbers]
        if isinstance(layers, Iterable) and not isinstance(layers, (str, dict)):
            return sorted({j for one in layers for j in self._numbers(one)})
        raise OptionError(
            f"name layers by an index, a slice or several indices, but got {quoted(layers)}."
        )

    def _divisions(self) -> list[list[int]]:
        """The groups as they are stored: what is frozen in a group is apart from the rest."""
        frozen = {*self.frozen}
        parts = [
            [j for j in group if (j in frozen) is cold]
            for group in self.layer_groups
            for cold in (False, True)
        ]
        return [part for part in parts if part]

    def _set(self, frozen: set[int], groups: list[list[int]]) -> None:
        if self.tied and (len(groups) > 1 or 0 < len(frozen) < self.layers):
            raise OptionError(
                "tied layers share one set of weights: freeze all of them or none, and do not "
                "divide them."
            )
        names = self._stored_by_layer()
        wanted = self._joined(names)
        self._frozen, self._groups = frozen, groups
        parts = self._divisions()
        for name in names:
            if len(parts) > 1:
                rows = Divided(self._rows(name, parts), self.get_parameter(name))
                parametrize.register_parametrization(self, name, rows)
            for part, p in zip(parts, self._held(name), strict=True):
                p.requires_grad_(wanted[name] and part[0] not in frozen)
        self._wanted = wanted

    def _stored_by_layer(self) -> list[str]:
        """The names of the parameters that hold each layer's own weights, in their order."""
        computed: Any = getattr(self, "parametrizations", ())
        for name in computed:
            if not _divided(self, name):
                raise OptionError(
                    f"{name} is parametrised by torch.nn.utils.parametrize, so its layers cannot "
                    "be frozen or divided; remove that parametrisation first."
                )
        if not computed:
            self._order = [*self._parameters]
        found = []
        for name in self._order:
            whole = name.removesuffix("_free")
            axes = len(self._whole_shape(whole)) if whole != name else getattr(self, name).ndim
            if axes == SHARED.get(whole, axes):
                found.append(name)
        return found

    def _joined(self, names: list[str]) -> dict[str, bool]:
        """Make plain stacks of what was divided; which of them the user wants to train."""
        if not any(_divided(self, name) for name in names):
            known = self.__dict__.get("_wanted") if self.frozen else None
            return known or {name: self.get_parameter(name).requires_grad for name in names}
        # PyTorch's removal edits the class, which copies of this module share: take one's own.
        own = {k: v for k, v in vars(type(self)).items() if k not in ("__dict__", "__weakref__")}
        self.__class__ = type(type(self).__name__, type(self).__bases__, own)  # pyright: ignore
        for name in names:
            value = getattr(self, name).detach().clone()
            parametrize.remove_parametrizations(self, name)
            delattr(self, name)
            self.register_parameter(name, nn.Parameter(value))
        for name in [name for name in self._order if name in self._parameters]:
            self._parameters[name] = self._parameters.pop(name)  # in the order of before
        return self._wanted

    def _rows(self, name: str, parts: list[list[int]]) -> list[Tensor]:
        """Where the entries of each part lie on the first axis of a parameter."""
        layer = torch.arange(self.layers, device="cpu")
        if name.endswith("_free"):
            size = math.prod(self._whole_shape(name.removesuffix("_free"))[1:])
            index = f"_{name.removesuffix('_free')}_index"
            layer = self.kept_aside.get(index, self.get_buffer(index)).cpu() // size
        wanted = [torch.tensor(part, device="cpu") for part in parts]
        return [torch.isin(layer, part).nonzero()[:, 0] for part in wanted]

    def refine_groups(self, coarse: LayerStack, k: int) -> None:
        """Freeze and divide as in a stack of which each layer is k layers here."""
        mine = dict(coarse.named_parameters(recurse=False))
        wanted = {name: p.requires_grad for name, p in mine.items()}
        for name, trained in (wanted | coarse.__dict__.get("_wanted", {})).items():
            self.get_parameter(name).requires_grad_(trained)

        def finer(layers: Iterable[int]) -> list[int]:
            return [j * k + i for j in layers for i in range(k)]

        if coarse.frozen or len(coarse.layer_groups) > 1:
            self._set({*finer(coarse.frozen)}, [finer(group) for group in coarse.layer_groups])

    def describe_groups(self) -> str:
        """Which layers are frozen, and which have parameters of their own, in words."""
        said = [f"layers {_ranges(self.frozen)} frozen"] if self.frozen else []
        if len(self.layer_groups) > 1:
            said.append(f"layers divided into {' | '.join(map(_ranges, self.layer_groups))}")
        return "; ".join(said)


class Divided(KeepsConstants):
    """A stack of weights that is made of the parameters of several groups of layers."""

    order: Tensor

    def __init__(self, rows: list[Tensor], like: Tensor) -> None:
        super().__init__()
        self.sizes = [len(part) for part in rows]
        order = torch.cat(rows).argsort()
        self.add_constant("order", order, like, persistent=False)

    def forward(self, *parts: Tensor) -> Tensor:
        return torch.cat(parts).index_select(0, self.order)

    def right_inverse(self, whole: Tensor) -> tuple[Tensor, ...]:
        parts = whole.detach()[self.order.to(whole.device).argsort()].split(self.sizes)
        return tuple(part.clone() for part in parts)

    def extra_repr(self) -> str:
        return str(self.order.argsort().tolist()) if not self.order.is_meta else ""


def _divided(stack: nn.Module, name: str) -> bool:
    """Whether a stack of weights is made of the parameters of groups of layers."""
    if not parametrize.is_parametrized(stack, name):
        return False
    parts: Any = stack.parametrizations
    return len(parts[name]) == 1 and isinstance(parts[name][0], Divided)


def _ranges(layers: Iterable[int]) -> str:
    """Layers in few words: 0..3, 7."""
    runs: list[list[int]] = []
    for j in layers:
        if runs and j == runs[-1][1] + 1:
            runs[-1][1] = j
        else:
            runs.append([j, j])
    return ", ".join(str(a) if a == b else f"{a}..{b}" for a, b in runs)
