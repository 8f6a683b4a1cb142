"""Model: augmentation, stack and head. What one trains, saves, certifies and predicts with."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from hdnn.errors import OptionError, ShapeError
from hdnn.heads import Augment, LinearHead
from hdnn.networks import Network


class Model(nn.Module):
    """x -> augment -> stack of N layers -> head -> scores.

    Args:
        augment: a `hdnn.Augment` that makes y_0 from x; without one (None), y_0 is x.
        net: a network of hdnn, such as `hdnn.H2`.
        head: one of `hdnn.heads`, such as `hdnn.SoftmaxHead`.
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
        """
        self.net.reset_parameters(generator)
        self.head.reset_parameters(generator)

    @property
    def inputs(self) -> int:
        """How many features x has."""
        return self.net.features if self.augment is None else self.augment.inputs

    def embed(self, x: Tensor) -> Tensor:
        """y_0."""
        return x if self.augment is None else self.augment(x)

    def features(self, x: Tensor) -> Tensor:
        """y_N."""
        return self.net(self.embed(x))

    def trajectory(self, x: Tensor) -> Tensor:
        """y_0 .. y_N: (N+1, *batch, n)."""
        return self.net.trajectory(self.embed(x))

    def forward(self, x: Tensor) -> Tensor:
        """Scores: logits, or the values of a regression."""
        return self.head(self.features(x))

    def loss(self, x: Tensor, t: Tensor) -> Tensor:
        """The head's own loss."""
        return self._of_head("loss", "loss")(self(x), t)

    @torch.no_grad()
    def predict(self, x: Tensor) -> Tensor:
        """Class labels, or the values of a regression."""
        return self._of_head("predict", "predictions")(self(x))

    @torch.no_grad()
    def predict_proba(self, x: Tensor) -> Tensor:
        """Class probabilities: (*batch, classes)."""
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
