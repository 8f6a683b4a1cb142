"""Model: augmentation, stack and head. What one trains, saves, certifies and predicts with."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from hdnn.errors import OptionError, ShapeError
from hdnn.heads import Augment, LinearHead
from hdnn.networks import Network


class Model(nn.Module):
    """What one trains, saves and certifies: x -> augment -> stack of N layers -> head -> scores.

    Args:
        augment: a `hdnn.Augment` that makes y_0 from x; without one (None), y_0 is x.
        net: a network of hdnn, such as `hdnn.H2`.
        head: one of `hdnn.heads`, such as `hdnn.SoftmaxHead`.

    Raises:
        OptionError: if a part is not of its kind.
        ShapeError: if the parts have not as many features.

    Examples:
        >>> import hdnn
        >>> data = hdnn.data.planar.double_moons(points=400)
        >>> net = hdnn.H2(features=4, layers=8)
        >>> model = hdnn.Model(hdnn.Augment(2, 4), net, hdnn.SigmoidHead(4))
        >>> model.predict(data.x_test).shape, model.predict_proba(data.x_test).shape
        (torch.Size([200]), torch.Size([200, 2]))
    """

    def __init__(self, augment: Augment | None, net: Network, head: LinearHead) -> None:
        super().__init__()
        if augment is not None and not isinstance(augment, Augment):
            raise OptionError(f"augment must be a hdnn.Augment or None, but got {_kind(augment)}.")
        if not isinstance(net, Network):
            raise OptionError(f"net must be a network of hdnn, but got {_kind(net)}.")
        if not isinstance(head, LinearHead):
            raise OptionError(f"head must be one of hdnn.heads, but got {_kind(head)}.")
        if augment is not None and augment.features != net.features:
            raise ShapeError(
                f"augment gives {augment.features} features, but net takes {net.features}."
            )
        if head.features != net.features:
            raise ShapeError(f"net gives {net.features} features, but head takes {head.features}.")
        self.augment, self.net, self.head = augment, net, head

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Begin again: first the network and then the head draw their weights as when made.

        For a model that was made on the meta device, as FSDP does it, after `to_empty`.

        Args:
            generator: what they are drawn from; by default PyTorch's global generator.
        """
        self.net.reset_parameters(generator)
        self.head.reset_parameters(generator)

    @property
    def inputs(self) -> int:
        """How many features x has."""
        return self.net.features if self.augment is None else self.augment.inputs

    def embed(self, x: Tensor) -> Tensor:
        """The first state, `y_0`: `(*batch, n)`.

        Args:
            x: inputs `(*batch, inputs)`.
        """
        return x if self.augment is None else self.augment(x)

    def features(self, x: Tensor) -> Tensor:
        """The last state, `y_N`, which the head sees: `(*batch, n)`.

        Args:
            x: inputs `(*batch, inputs)`.
        """
        return self.net(self.embed(x))

    def trajectory(self, x: Tensor) -> Tensor:
        """All states, `y_0` to `y_N`: `(N+1, *batch, n)`.

        Args:
            x: inputs `(*batch, inputs)`.
        """
        return self.net.trajectory(self.embed(x))

    def forward(self, x: Tensor) -> Tensor:
        """Scores: logits, or the values of a regression, `(*batch, outputs)`.

        Args:
            x: inputs `(*batch, inputs)`.

        Raises:
            ShapeError: if x is no tensor of that shape, in the dtype of the weights.
        """
        return self.head(self.features(x))

    def loss(self, x: Tensor, t: Tensor) -> Tensor:
        """The head's own loss, a tensor of one number.

        Args:
            x: inputs `(*batch, inputs)`.
            t: labels or target values, as the head takes them.

        Raises:
            DataError: if t does not fit the head.
            OptionError: if the head is a plain `LinearHead`, which has no loss.
        """
        return self._of_head("loss", "loss")(self(x), t)

    @torch.no_grad()
    def predict(self, x: Tensor) -> Tensor:
        """Class labels `(*batch,)`, or the values of a regression; without gradients.

        Args:
            x: inputs `(*batch, inputs)`.

        Raises:
            OptionError: if the head is a plain `LinearHead`, which has no predictions.
        """
        return self._of_head("predict", "predictions")(self(x))

    @torch.no_grad()
    def predict_proba(self, x: Tensor) -> Tensor:
        """Class probabilities `(*batch, classes)`; without gradients.

        Args:
            x: inputs `(*batch, inputs)`.

        Raises:
            OptionError: if the head is not for classes.
        """
        return self._of_head("probabilities", "probabilities")(self(x))

    def _of_head(self, name: str, what: str) -> Callable[..., Tensor]:
        method = getattr(self.head, name, None)
        if method is None:
            raise OptionError(
                f"a {_kind(self.head)} has no {what}; use a SoftmaxHead or a SigmoidHead "
                "for classes, a RegressionHead for values."
            )
        return method


def _kind(given: object) -> str:
    return type(given).__name__
