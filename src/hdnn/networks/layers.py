"""Layers of a stack as views: to look at, and to run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, overload

from torch import Tensor

from hdnn.errors import LayerIndexError, OptionError, quoted


class Layers:
    """Some layers of a stack, as a view: a shorter stack that can be run and looked at.

    It has a length, items and slices; `layers(y)` runs it, `layers.trajectory(y)` gives all its
    states. `layers.K_p` and the like are the stacked weights (L, ...), in the same memory as those
    of the network where they are stored whole. To change a weight, write into it:
    `with torch.no_grad(): net[2].b_p.zero_()`.
    """

    stack: Any
    numbers: range

    def __init__(self, stack: Any, numbers: range) -> None:
        object.__setattr__(self, "stack", stack)
        object.__setattr__(self, "numbers", numbers)

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, layers: int) -> Layer: ...
    @overload
    def __getitem__(self, layers: slice) -> Layers: ...
    def __getitem__(self, layers: int | slice) -> Layer | Layers:
        if isinstance(layers, slice):
            if layers.step is not None and layers.step < 0:
                raise OptionError("layers run forwards: take a slice with a positive step.")
            return Layers(self.stack, self.numbers[layers])
        if isinstance(layers, bool) or not hasattr(layers, "__index__"):
            raise OptionError(f"a layer is named by its index, but got {quoted(layers)}.")
        try:
            return Layer(self.stack, self.numbers[layers])
        except IndexError:
            count = len(self)
            there = f"-{count} .. {count - 1}" if count else "none"
            raise LayerIndexError(f"layer {layers} is not there: there are {there}.") from None

    def __iter__(self) -> Iterator[Layer]:
        return (Layer(self.stack, j) for j in self.numbers)

    def __call__(self, y: Tensor) -> Tensor:
        """The state after these layers, from the state before them."""
        return self.stack.run_layers(y, self._slice) if len(self) else y

    def trajectory(self, y: Tensor) -> Tensor:
        """All states from before the first of these layers to after the last: (L+1, ...)."""
        if not len(self):
            return y[None]
        return self.stack.run_layers(y, self._slice, trajectory=True)

    @property
    def h(self) -> Any:
        """The steps of these layers: one for all, one each, or the learned ones (L,)."""
        h = self.stack.h
        many = isinstance(h, (tuple, Tensor))
        return h[self._slice] if many else h

    @property
    def _slice(self) -> slice:
        numbers = self.numbers
        return slice(numbers.start, numbers.stop, numbers.step)

    def __getattr__(self, name: str) -> Tensor:
        return self._read(name, self._slice)

    def _read(self, name: str, layers: Any) -> Tensor:
        if name not in self.stack.names_by_layer():
            raise AttributeError(
                f"{type(self).__name__} has no attribute {name!r}; a layer of this stack has "
                f"{', '.join(self.stack.names_by_layer())}."
            )
        weight = self.stack.weight(name)
        if self.stack.tied:
            weight = weight.expand(self.stack.layers, *weight.shape[1:])
        return weight[layers]

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"a layer is a view: to change {name}, write into the tensor, "
            f"`with torch.no_grad(): layer.{name}.copy_(value)`."
        )

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.stack.names_by_layer()]

    def __repr__(self) -> str:
        first = f"{self.numbers.start} .. {self.numbers[-1]}" if len(self) else "none"
        every = f", every {self.numbers.step}" if self.numbers.step > 1 else ""
        return f"Layers({first}{every} of {self.stack!r})"


class Layer(Layers):
    """One layer of a stack, as a view: `layer(y)` runs it, `layer.K_p` and the like are its own.

    Its weights are views into those of the network where these are stored whole, `layer.h` is its
    step and `layer.index` its number.
    """

    index: int

    def __init__(self, stack: Any, index: int) -> None:
        super().__init__(stack, range(index, index + 1))
        object.__setattr__(self, "index", index)

    @property
    def h(self) -> Any:
        """The step of this layer."""
        h = self.stack.h
        return h[self.numbers.start] if isinstance(h, (tuple, Tensor)) else h

    def __getattr__(self, name: str) -> Tensor:
        return self._read(name, self.numbers.start)

    def __repr__(self) -> str:
        names = self.stack.names_by_layer()
        parts = [f"{name} {tuple(getattr(self, name).shape)}" for name in names]
        if hasattr(self.stack, "h"):
            parts.append(f"h = {float(self.h):.4g}")
        return f"Layer({self.numbers.start} of {self.stack.layers}: {', '.join(parts)})"
