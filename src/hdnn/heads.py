"""What stands before and after the stack: feature augmentation and output layers."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hdnn.errors import DataError, ShapeError, choose, positive_int
from hdnn.networks.initial import Initial
from hdnn.networks.options import describes_options
from hdnn.networks.weights import KeepsConstants, overwrite

__all__ = [
    "Augment",
    "LinearHead",
    "RegressionHead",
    "SigmoidHead",
    "SoftmaxHead",
    "roomy_width",
]


class Augment(KeepsConstants):
    """The first state, `y_0`: x placed among zeros, `(*batch, inputs)` to `(*batch, features)`.

    Args:
        inputs: how many features x has.
        features: n of the network that follows; at least `inputs`.
        placement: "split" puts the first half of x at the start of p and the second half at the
            end of q (x1 into the first p-entry, x2 into the last q-entry: the published
            experiments); "first" puts all of x first, (x, 0), as in the paper's text; or give the
            positions themselves.

    Raises:
        ShapeError: if a size is no whole number >= 1, there are fewer features than inputs, or the
            positions are not one for each input, all different and among the features.
        OptionError: if `placement` is another word.

    Examples:
        >>> import torch
        >>> import hdnn
        >>> x = torch.tensor([[1.0, 2.0]])
        >>> hdnn.Augment(inputs=2, features=4)(x)
        tensor([[1., 0., 0., 2.]])
        >>> hdnn.Augment(inputs=2, features=4, placement="first")(x)
        tensor([[1., 2., 0., 0.]])
    """

    positions: Tensor

    def __init__(
        self, inputs: int, features: int, placement: str | Sequence[int] = "split"
    ) -> None:
        super().__init__()
        self.inputs = positive_int("inputs", inputs)
        self.features = positive_int("features", features)
        if features < inputs:
            raise ShapeError(
                f"{inputs} inputs do not fit into {features} features; take features >= {inputs}."
            )
        self.placement = placement if isinstance(placement, str) else _listed(placement)
        positions = _positions(self.placement, inputs, features)
        positions = torch.tensor(positions, device="cpu")
        self.add_constant("positions", positions, torch.empty(()), persistent=False)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Nothing: there is nothing to draw. FSDP asks each part of a model for it.

        Args:
            generator: is not used.
        """

    def forward(self, x: Tensor) -> Tensor:
        """The first state, `(*batch, features)`.

        Args:
            x: inputs `(*batch, inputs)`.

        Raises:
            ShapeError: if x is no tensor of that shape.
        """
        _check_width("Augment takes x", x, self.inputs)
        zeros = x.new_zeros(*x.shape[:-1], self.features)
        return zeros.index_copy(-1, self.positions, x)

    def config(self) -> dict[str, object]:
        """The arguments that make this augmentation again, as JSON can hold them."""
        return {"inputs": self.inputs, "features": self.features, "placement": self.placement}

    def extra_repr(self) -> str:
        return f"{self.inputs} -> {self.features}, placement={self.placement!r}"


LEAST_FEATURES, MORE_FEATURES = 16, 24
WIDE_FEATURES = 128  # the limit of earlier versions, for those who import it


def roomy_width(inputs: int) -> int:
    """How many features suit so many inputs: the width of networks that are made for a table.

    Three times the inputs, to have room to unfold them, but at least 16 and at most 24 more than
    them. Even, as (p, q) needs it.

    Args:
        inputs: how many features x has.

    Returns:
        n, the `features` of a network.

    Examples:
        >>> import hdnn
        >>> [hdnn.heads.roomy_width(inputs) for inputs in (2, 8, 100)]
        [16, 24, 124]
    """
    n = max(LEAST_FEATURES, min(3 * inputs, inputs + MORE_FEATURES))
    return n + n % 2


def _listed(placement: Sequence[int]) -> list[int]:
    if isinstance(placement, (Tensor, np.ndarray)):
        placement = placement.tolist()
    given: list[Any] = list(placement) if isinstance(placement, Sequence) else [None]
    if not all(isinstance(i, Integral) for i in given):
        raise ShapeError(
            'placement must be "split", "first" or whole numbers, a position for each input, '
            f"but got {placement!r}."
        )
    return [int(i) for i in given]


def _positions(placement: str | list[int], inputs: int, features: int) -> list[int]:
    if isinstance(placement, str):
        last = inputs // 2 if choose("placement", placement, ("split", "first")) == "split" else 0
        return [*range(inputs - last), *range(features - last, features)]
    if len(placement) != inputs or len(set(placement)) != inputs:
        raise ShapeError(f"placement must be {inputs} different positions, but got {placement}.")
    if min(placement) < 0 or max(placement) >= features:
        raise ShapeError(f"placement {placement} must lie in 0 .. {features - 1}.")
    return placement


def _check_width(who: str, x: Tensor, width: int) -> None:
    if not isinstance(x, Tensor):
        raise ShapeError(f"{who} as a torch.Tensor, but got {type(x).__name__}.")
    if x.shape[-1:] != (width,):
        raise ShapeError(f"{who} of shape (*batch, {width}), but got {tuple(x.shape)}.")


def _check_targets(t: Tensor, *shapes: torch.Size) -> None:
    if not isinstance(t, Tensor):
        raise DataError(f"targets (or labels) t must be a torch.Tensor, not {type(t).__name__}.")
    if t.shape not in shapes:
        needed = " or ".join(str(tuple(shape)) for shape in dict.fromkeys(shapes))
        raise DataError(
            f"targets (or labels) t have shape {tuple(t.shape)}, but {needed} is needed: "
            "one for each score."
        )


class LinearHead(nn.Module):
    """Scores `W y + w`, from `(*batch, n)` to `(*batch, outputs)`, without a loss of their own.

    Args:
        features: n of the network in front.
        outputs: how many scores there are.
        generator: of the first weights; by default PyTorch's global one.
        dtype: of the weights; by default `torch.get_default_dtype()`.
        device: of the weights; by default `torch.get_default_device()`.

    Raises:
        ShapeError: if a size is no whole number >= 1, or the dtype is no floating-point one.
        OptionError: if the device or generator is none.

    Examples:
        >>> import torch
        >>> import hdnn
        >>> head = hdnn.LinearHead(features=4, outputs=3)
        >>> head(torch.randn(10, 4)).shape
        torch.Size([10, 3])
    """

    def __init__(
        self,
        features: int,
        outputs: int,
        *,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.features = positive_int("features", features)
        self.outputs = positive_int("outputs", outputs)
        initial = Initial("scaled", self.features, generator, dtype, device)
        self.weight, self.bias = map(nn.Parameter, self._first(initial))

    def _first(self, initial: Initial) -> tuple[Tensor, Tensor]:
        return initial.K(self.outputs, self.features), initial.b(self.outputs)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Begin again: weights are drawn as the constructor draws them.

        Args:
            generator: what they are drawn from; by default PyTorch's global generator.
        """
        placed = self.weight.dtype, self.weight.device
        first = self._first(Initial("scaled", self.features, generator, *placed))
        for mine, value in zip((self.weight, self.bias), first, strict=True):
            overwrite(mine, value)

    def forward(self, y: Tensor) -> Tensor:
        """Scores `(*batch, outputs)`.

        Args:
            y: last states `(*batch, n)`.

        Raises:
            ShapeError: if y is no tensor of that shape.
        """
        _check_width(f"{type(self).__name__} takes y", y, self.features)
        return F.linear(y, self.weight, self.bias)

    def config(self) -> dict[str, object]:
        """The arguments that make this head again, as JSON can hold them."""
        return {"features": self.features, "outputs": self.outputs}

    def extra_repr(self) -> str:
        return f"{self.features} -> {self.outputs}"


@describes_options(LinearHead)
class RegressionHead(LinearHead):
    """Values `W y + w`, trained by the mean squared error.

    Examples:
        >>> import torch
        >>> import hdnn
        >>> head = hdnn.RegressionHead(features=4, outputs=1)
        >>> scores = head(torch.randn(10, 4))
        >>> bool(head.loss(scores, torch.zeros(10)) == scores.square().mean())
        True
    """

    def loss(self, scores: Tensor, t: Tensor) -> Tensor:
        """The mean squared error.

        Args:
            scores: `(*batch, outputs)`, as the head gives them.
            t: targets of the same shape; `(*batch,)` will do for one output.

        Raises:
            DataError: if t is no tensor of that shape.
        """
        one = scores.shape[:-1] if self.outputs == 1 else scores.shape
        _check_targets(t, scores.shape, one)
        return F.mse_loss(scores, t.to(scores.dtype).reshape(scores.shape))

    def predict(self, scores: Tensor) -> Tensor:
        """The scores themselves."""
        return scores


@describes_options(LinearHead, classes="how many classes there are, at least 2.")
class SoftmaxHead(LinearHead):
    """Class probabilities `softmax(W y + w)`, trained by the cross-entropy; labels from 0 on.

    Raises:
        ShapeError: if a size is no whole number >= 1, or the dtype is no floating-point one.
        DataError: if there is but one class.
        OptionError: if the device or generator is none.

    Examples:
        >>> import torch
        >>> import hdnn
        >>> head = hdnn.SoftmaxHead(features=4, classes=3)
        >>> scores = head(torch.randn(10, 4))
        >>> torch.allclose(head.probabilities(scores).sum(-1), torch.ones(10))
        True
        >>> head.predict(scores).shape
        torch.Size([10])
    """

    def __init__(
        self,
        features: int,
        classes: int,
        *,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        classes = positive_int("classes", classes)
        super().__init__(features, classes, generator=generator, dtype=dtype, device=device)
        if classes < 2:
            raise DataError(f"a classifier needs at least 2 classes, but got {classes}.")

    @property
    def classes(self) -> int:
        """How many classes there are."""
        return self.outputs

    def config(self) -> dict[str, object]:
        """The arguments that make this head again, as JSON can hold them."""
        return {"features": self.features, "classes": self.classes}

    def loss(self, scores: Tensor, t: Tensor) -> Tensor:
        """The cross-entropy.

        Args:
            scores: `(*batch, classes)`, as the head gives them.
            t: labels `(*batch,)`, whole numbers from 0 to classes-1.

        Raises:
            DataError: if t is no tensor of whole numbers of that shape.
        """
        _check_targets(t, scores.shape[:-1])
        if t.is_floating_point() or t.is_complex():
            raise DataError(f"labels t must be whole numbers, but are {t.dtype}; use t.long().")
        return F.cross_entropy(scores.reshape(-1, self.outputs), t.reshape(-1).long())

    def probabilities(self, scores: Tensor) -> Tensor:
        """The probability of each class, `(*batch, classes)`.

        Args:
            scores: `(*batch, classes)`, as the head gives them.
        """
        return scores.softmax(-1)

    def predict(self, scores: Tensor) -> Tensor:
        """The most probable classes, `(*batch,)`.

        Args:
            scores: `(*batch, classes)`, as the head gives them.
        """
        return scores.argmax(-1)


@describes_options(LinearHead)
class SigmoidHead(LinearHead):
    """One probability `sigmoid(W y + w)` for two classes 0 and 1, as in the planar experiments.

    Examples:
        >>> import torch
        >>> import hdnn
        >>> head = hdnn.SigmoidHead(features=4)
        >>> scores = head(torch.randn(10, 4))
        >>> scores.shape, head.probabilities(scores).shape, head.predict(scores).shape
        (torch.Size([10, 1]), torch.Size([10, 2]), torch.Size([10]))
    """

    classes = 2

    def __init__(
        self,
        features: int,
        *,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(features, 1, generator=generator, dtype=dtype, device=device)

    def config(self) -> dict[str, object]:
        """The arguments that make this head again, as JSON can hold them."""
        return {"features": self.features}

    def loss(self, scores: Tensor, t: Tensor) -> Tensor:
        """The binary cross-entropy.

        Args:
            scores: `(*batch, 1)`, as the head gives them.
            t: labels 0 and 1, `(*batch,)` or `(*batch, 1)`.

        Raises:
            DataError: if t is no tensor of such a shape.
        """
        _check_targets(t, scores.shape[:-1], scores.shape)
        target = t.to(scores.dtype).reshape(scores.shape)
        return F.binary_cross_entropy_with_logits(scores, target)

    def probabilities(self, scores: Tensor) -> Tensor:
        """The probabilities of both classes, `(*batch, 2)`.

        Args:
            scores: `(*batch, 1)`, as the head gives them.
        """
        return torch.cat([scores.neg().sigmoid(), scores.sigmoid()], -1)

    def predict(self, scores: Tensor) -> Tensor:
        """The more probable classes, `(*batch,)`.

        Args:
            scores: `(*batch, 1)`, as the head gives them.
        """
        return (scores[..., 0] > 0).long()


HEADS: dict[str, type[LinearHead]] = {
    kind.__name__: kind for kind in (LinearHead, RegressionHead, SigmoidHead, SoftmaxHead)
}
