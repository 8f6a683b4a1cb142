"""Model: augmentation, stack and head. What one trains, saves, certifies and predicts with."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hdnn.errors import OptionError, ShapeError
from hdnn.heads import Augment, LinearHead, RegressionHead, SigmoidHead, SoftmaxHead
from hdnn.networks import Network


class Model(nn.Module):
    """x -> augment -> stack of N layers -> head -> scores. Without `augment`, y_0 is x."""

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
        if isinstance(self.head, (RegressionHead, SigmoidHead, SoftmaxHead)):
            return self.head.loss(self(x), t)
        raise self._no("loss")

    @torch.no_grad()
    def predict(self, x: Tensor) -> Tensor:
        """Class labels, or the values of a regression."""
        if isinstance(self.head, (RegressionHead, SigmoidHead, SoftmaxHead)):
            return self.head.predict(self(x))
        raise self._no("predictions")

    @torch.no_grad()
    def predict_proba(self, x: Tensor) -> Tensor:
        """Class probabilities: (*batch, classes)."""
        if isinstance(self.head, (SigmoidHead, SoftmaxHead)):
            return self.head.probabilities(self(x))
        raise self._no("probabilities")

    def _no(self, what: str) -> OptionError:
        return OptionError(
            f"a {type(self.head).__name__} has no {what}; use a SoftmaxHead or a SigmoidHead "
            "for classes, a RegressionHead for values."
        )


def _kind(given: object) -> str:
    return type(given).__name__
