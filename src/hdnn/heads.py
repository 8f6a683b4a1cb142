"""Augmentation before a network, output layers after it, and `Model`, which joins the three."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hdnn.errors import DataError, OptionError, ShapeError, choose, positive_int
from hdnn.io import HubModule, new_tensor
from hdnn.networks import Network
from hdnn.networks.network import normal

__all__ = [
    "Augment",
    "LinearHead",
    "Model",
    "RegressionHead",
    "SigmoidHead",
    "SoftmaxHead",
    "roomy_width",
]


class Augment(HubModule):
    """The first state, `y_0`: x placed among zeros, `(*batch, inputs)` to `(*batch, features)`.

    Args:
        inputs: the number of features of x.
        features: n of the network that follows; at least `inputs`.
        placement: "split" puts the first half of x at the start of p and the second half at the end
            of q (x1 into the first p-entry, x2 into the last q-entry, as in the published
            experiments); "first" puts all of x first, (x, 0), as in the paper's text; or give the
            positions themselves.

    Raises:
        ShapeError: if there are fewer features than inputs, or the positions are not different
            features, one for each input.

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
        self,
        inputs: int,
        features: int,
        placement: str | Sequence[int] = "split",
    ) -> None:
        super().__init__()
        self.inputs = positive_int("inputs", inputs)
        self.features = positive_int("features", features)
        self.placement: str | list[int] = (
            placement if isinstance(placement, str) else list(placement)
        )
        positions = self._positions()
        if len(set(positions) & set(range(features))) != inputs:
            raise ShapeError(
                f"{inputs} inputs need as many different positions in 0 .. {features - 1}, but got "
                f"{positions}; use features >= {inputs}."
            )
        self.register_buffer(
            "positions", torch.tensor(positions), persistent=False
        )

    def _positions(self) -> list[int]:
        if not isinstance(self.placement, str):
            return self.placement
        last = self.inputs // 2
        if choose("placement", self.placement, ("split", "first")) == "first":
            last = 0
        return [
            *range(self.inputs - last),
            *range(self.features - last, self.features),
        ]

    def reset_parameters(
        self, generator: torch.Generator | None = None
    ) -> None:
        """Restore the positions, for a module that was made on the meta device.

        Args:
            generator: not used, as there is nothing to draw.
        """
        if not self.positions.is_meta:
            self.positions.copy_(torch.tensor(self._positions()))

    def forward(self, x: Tensor) -> Tensor:
        """The first state, `(*batch, features)`.

        Args:
            x: inputs `(*batch, inputs)`.

        Raises:
            ShapeError: if x is not a tensor of that shape.
        """
        _check_width("Augment takes x", x, self.inputs)
        zeros = x.new_zeros(*x.shape[:-1], self.features)
        return zeros.index_copy(-1, self.positions, x)

    def extra_repr(self) -> str:
        return f"{self.inputs} -> {self.features}, placement={self.placement!r}"


def roomy_width(inputs: int) -> int:
    """The width of a network for this number of inputs, such as the columns of a table.

    The width is three times the number of inputs, which gives room to unfold the data, but at least
    16 and at most 24 more than the inputs. It is even, as (p, q) requires.

    Args:
        inputs: the number of features of x.

    Examples:
        >>> import hdnn
        >>> [hdnn.heads.roomy_width(inputs) for inputs in (2, 8, 100)]
        [16, 24, 124]
    """
    n = max(16, min(3 * inputs, inputs + 24))
    return n + n % 2


class LinearHead(HubModule):
    """Scores `W y + w`, from `(*batch, n)` to `(*batch, outputs)`, without a loss function.

    Args:
        features: n of the network before this head.
        outputs: the number of scores.
        generator: the random generator for the initial weights; by default PyTorch's global one.
        dtype: the dtype of the weights; by default `torch.get_default_dtype()`.
        device: the device of the weights; by default PyTorch's default device.

    Examples:
        >>> import torch
        >>> import hdnn
        >>> head = hdnn.LinearHead(features=4, outputs=3)
        >>> head(torch.randn(10, 4)).shape
        torch.Size([10, 3])
    """

    arguments = ("features", "outputs")

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
        like = new_tensor(dtype, device)
        self.weight = nn.Parameter(like.new_empty(outputs, features))
        self.bias = nn.Parameter(like.new_empty(outputs))
        self.reset_parameters(generator)

    @torch.no_grad()
    def reset_parameters(
        self, generator: torch.Generator | None = None
    ) -> None:
        """Draw W from N(0, 1/n) again, and set w = 0.

        Args:
            generator: the random generator for the weights; by default PyTorch's global one.
        """
        if self.weight.is_meta:
            return
        draw = normal(self.weight.shape, generator, self.weight.device)
        self.weight.copy_(self.features**-0.5 * draw)
        self.bias.zero_()

    def forward(self, y: Tensor) -> Tensor:
        """Scores `(*batch, outputs)`.

        Args:
            y: last states `(*batch, n)`.

        Raises:
            ShapeError: if y is not a tensor of that shape.
        """
        _check_width(f"{type(self).__name__} takes y", y, self.features)
        return F.linear(y, self.weight, self.bias)

    def config(self) -> dict[str, Any]:
        """The constructor arguments of this head."""
        return {name: getattr(self, name) for name in self.arguments}

    def extra_repr(self) -> str:
        return f"{self.features} -> {self.outputs}"


class RegressionHead(LinearHead):
    """Values `W y + w`, trained with the mean squared error. Arguments as in `LinearHead`.

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
            scores: the output of the head, `(*batch, outputs)`.
            t: targets of the same shape; with one output, `(*batch,)` also works.

        Raises:
            DataError: if t is not a tensor of that shape.
        """
        shorter = scores.shape[:-1] if self.outputs == 1 else scores.shape
        _check_targets(t, scores.shape, shorter)
        return F.mse_loss(scores, t.to(scores.dtype).reshape(scores.shape))

    def predict(self, scores: Tensor) -> Tensor:
        """The scores themselves."""
        return scores


class SoftmaxHead(LinearHead):
    """Class probabilities `softmax(W y + w)`, trained with the cross-entropy; labels start at 0.

    Args:
        features: n of the network before this head.
        classes: the number of classes, at least 2.
        **options: the options of `LinearHead`.

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

    arguments = ("features", "classes")

    def __init__(self, features: int, classes: int, **options: Any) -> None:
        super().__init__(features, positive_int("classes", classes), **options)
        if classes < 2:
            raise DataError(
                f"a classifier needs at least 2 classes, but got {classes}."
            )

    @property
    def classes(self) -> int:
        """The number of classes."""
        return self.outputs

    def loss(self, scores: Tensor, t: Tensor) -> Tensor:
        """The cross-entropy.

        Args:
            scores: the output of the head, `(*batch, classes)`.
            t: labels `(*batch,)`, whole numbers from 0 to classes-1.

        Raises:
            DataError: if t is not a tensor of whole numbers of that shape.
        """
        _check_targets(t, scores.shape[:-1])
        if t.is_floating_point() or t.is_complex():
            raise DataError(
                f"labels t must be whole numbers, but are {t.dtype}; use t.long()."
            )
        return F.cross_entropy(
            scores.reshape(-1, self.outputs), t.reshape(-1).long()
        )

    def probabilities(self, scores: Tensor) -> Tensor:
        """The probability of each class, `(*batch, classes)`."""
        return scores.softmax(-1)

    def predict(self, scores: Tensor) -> Tensor:
        """The most probable classes, `(*batch,)`."""
        return scores.argmax(-1)


class SigmoidHead(LinearHead):
    """One probability `sigmoid(W y + w)` for the classes 0 and 1, as in the planar experiments.

    Args:
        features: n of the network before this head.
        **options: the options of `LinearHead`.

    Examples:
        >>> import torch
        >>> import hdnn
        >>> head = hdnn.SigmoidHead(features=4)
        >>> scores = head(torch.randn(10, 4))
        >>> scores.shape, head.probabilities(scores).shape, head.predict(scores).shape
        (torch.Size([10, 1]), torch.Size([10, 2]), torch.Size([10]))
    """

    arguments = ("features",)
    classes = 2

    def __init__(self, features: int, **options: Any) -> None:
        super().__init__(features, 1, **options)

    def loss(self, scores: Tensor, t: Tensor) -> Tensor:
        """The binary cross-entropy.

        Args:
            scores: the output of the head, `(*batch, 1)`.
            t: labels 0 and 1, `(*batch,)` or `(*batch, 1)`.

        Raises:
            DataError: if t is not a tensor of one of these shapes.
        """
        _check_targets(t, scores.shape[:-1], scores.shape)
        target = t.to(scores.dtype).reshape(scores.shape)
        return F.binary_cross_entropy_with_logits(scores, target)

    def probabilities(self, scores: Tensor) -> Tensor:
        """The probabilities of both classes, `(*batch, 2)`."""
        return torch.cat([scores.neg().sigmoid(), scores.sigmoid()], -1)

    def predict(self, scores: Tensor) -> Tensor:
        """The more probable classes, `(*batch,)`."""
        return (scores[..., 0] > 0).long()


HEADS: dict[str, type[LinearHead]] = {
    kind.__name__: kind
    for kind in (LinearHead, RegressionHead, SigmoidHead, SoftmaxHead)
}


class Model(HubModule):
    """A network that can be trained, saved and certified: x -> augment -> N layers -> head.

    Args:
        augment: an `hdnn.Augment` that makes y_0 from x; if None, y_0 is x.
        net: a network of hdnn, such as `hdnn.H2`.
        head: a head of `hdnn.heads`, such as `hdnn.SoftmaxHead`.

    Raises:
        OptionError: if a submodule is of the wrong kind.
        ShapeError: if the submodules differ in their number of features.

    Examples:
        >>> import hdnn
        >>> data = hdnn.data.planar.double_moons(points=400)
        >>> net = hdnn.H2(features=4, layers=8)
        >>> model = hdnn.Model(hdnn.Augment(2, 4), net, hdnn.SigmoidHead(4))
        >>> model.predict(data.x_test).shape, model.predict_proba(data.x_test).shape
        (torch.Size([200]), torch.Size([200, 2]))
    """

    def __init__(
        self, augment: Augment | None, net: Network, head: LinearHead
    ) -> None:
        super().__init__()
        kinds = [("net", net, Network), ("head", head, LinearHead)]
        if augment is not None:
            kinds.append(("augment", augment, Augment))
        for name, module, kind in kinds:
            if not isinstance(module, kind):
                raise OptionError(
                    f"{name} must be a {kind.__name__} of hdnn, but got {type(module).__name__}."
                )
            if module.features != net.features:
                raise ShapeError(
                    f"{name} has {module.features} features, but net has {net.features}."
                )
        self.augment = augment
        self.net = net
        self.head = head

    def reset_parameters(
        self, generator: torch.Generator | None = None
    ) -> None:
        """Draw all weights again, first the network's and then the head's.

        Args:
            generator: the random generator for the weights; by default PyTorch's global one.
        """
        for module in self.children():
            module.reset_parameters(generator)  # pyright: ignore[reportCallIssue]

    @property
    def inputs(self) -> int:
        """The number of features of x."""
        return (
            self.net.features if self.augment is None else self.augment.inputs
        )

    def embed(self, x: Tensor) -> Tensor:
        """The first state, `y_0`: `(*batch, n)`."""
        return x if self.augment is None else self.augment(x)

    def features(self, x: Tensor) -> Tensor:
        """The last state, `y_N`, which the head sees: `(*batch, n)`."""
        return self.net(self.embed(x))

    def trajectory(self, x: Tensor) -> Tensor:
        """All states, `y_0` to `y_N`: `(N+1, *batch, n)`."""
        return self.net.trajectory(self.embed(x))

    def forward(self, x: Tensor) -> Tensor:
        """Scores: logits, or regression values, `(*batch, outputs)`.

        Args:
            x: inputs `(*batch, inputs)`.

        Raises:
            ShapeError: if x is not a tensor of that shape.
            DtypeError: if x does not have the dtype of the weights.
        """
        return self.head(self.net(self.embed(x)))

    def loss(self, x: Tensor, t: Tensor) -> Tensor:
        """The loss of the head, a tensor with one number.

        Args:
            x: inputs `(*batch, inputs)`.
            t: labels or target values, as the head expects them.

        Raises:
            DataError: if t does not fit the head.
            OptionError: if the head is a plain `LinearHead`, which has no loss.
        """
        return self._head_method("loss")(self(x), t)

    @torch.no_grad()
    def predict(self, x: Tensor) -> Tensor:
        """Class labels `(*batch,)`, or regression values; without gradients."""
        return self._head_method("predict")(self(x))

    @torch.no_grad()
    def predict_proba(self, x: Tensor) -> Tensor:
        """Class probabilities `(*batch, classes)`; without gradients."""
        return self._head_method("probabilities")(self(x))

    def _head_method(self, name: str) -> Any:
        method = getattr(self.head, name, None)
        if method is None:
            raise OptionError(
                f"a {type(self.head).__name__} has no {name}; use a SoftmaxHead or a SigmoidHead "
                "for classes, or a RegressionHead for values."
            )
        return method


def _check_width(who: str, x: Tensor, width: int) -> None:
    if not isinstance(x, Tensor) or x.shape[-1:] != (width,):
        raise ShapeError(
            f"{who} as a torch.Tensor of shape (*batch, {width}), but got {_kind(x)}."
        )


def _kind(x: Any) -> str:
    return str(tuple(x.shape)) if isinstance(x, Tensor) else type(x).__name__


def _check_targets(t: Tensor, *shapes: torch.Size) -> None:
    if not isinstance(t, Tensor) or t.shape not in shapes:
        names = [str(tuple(shape)) for shape in dict.fromkeys(shapes)]
        raise DataError(
            f"targets (or labels) t must be a torch.Tensor of shape {' or '.join(names)}, one for "
            f"each score, but got {_kind(t)}."
        )
