"""A deep Hamiltonian network as a classifier of scikit-learn."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np
from sklearn.base import ClassifierMixin
from sklearn.utils import compute_class_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d

from hdnn.data import class_weights
from hdnn.errors import DataError, OptionError, quoted
from hdnn.estimators.base import HDNNEstimator
from hdnn.heads import SigmoidHead, SoftmaxHead


@dataclass(eq=False, repr=False, kw_only=True)
class HDNNClassifier(ClassifierMixin, HDNNEstimator):
    """A deep Hamiltonian network for two or more classes, as an estimator of scikit-learn.

    `y_0` is the standardised table placed among zeros, `y_N` goes to a linear output layer. With
    the default network `norm(dy_N/dy_j) >= 1` at any depth: from every layer on, some direction of
    the gradient keeps at least its full size. Options are checked by `fit`, as scikit-learn wants
    it.

    Args:
        network: "h1", "h2", "implicit_h2", "verlet", "yoshida4", "midpoint",
            "discrete_gradient", "ms1", "ms2", "ms3" or "mlp".
        layers: N.
        features: n, the width of the network; by default three times the inputs, but at least 16
            and at most 24 more than the inputs.
        activation: one of `hdnn.activations`.
        T: the time that the layers span together; a step is T/N. Not for "mlp".
        epochs: passes over the data; by default 40, or 2560 / `features` if that is less,
            but at least 10.
        batch: samples for each step of the optimiser; by default the square root of twice their
            number, rounded up to a multiple of 32, or all of up to 64.
        learning_rate: at the start; it falls to zero as a cosine. By default 0.02, times
            sqrt(24 / `features`) if there are more than 24.
        weight_decay: pulls the layers towards the identity, and the model towards a linear one; by
            default 0.5 times `features`, or 3.3 times their square root if that is less. Divided by
            the number of samples, as scikit-learn's penalties are; so is `ridge`.
        solver: of the output layer, "newton", "adam" or "joint" (see `hdnn.training.fit`); "auto"
            is "joint". Joint training begins with an output layer fitted to the untrained network.
        ridge: penalty on the output layer; by default 0.01 times `features`.
        smoothness: penalty on the differences between neighbouring layers.
        categorical: names or positions of columns whose numbers are categories; texts, and
            categories of pandas, are so by themselves (see docs/tables.md).
        missing: "fill" missing values by the median, with one more input that says where; or
            "refuse" them.
        early_stopping: hold out some samples, end when their loss has stopped to fall, and keep the
            best model. Their loss, not their score, because probabilities that are too sure show
            there first. `partial_fit` takes one epoch, and holds nothing out.
        validation_fraction: of the samples, of each class alike, that early stopping holds out.
        n_iter_no_change: epochs without a lower loss after which early stopping ends.
        tol: the smallest fall of that loss that counts.
        engine: how the layers run, never what they compute (see `hdnn.engine`).
        device: where to train, "cpu" or "cuda".
        random_state: seed of initial weights and order of samples; as in scikit-learn, None takes
            it from NumPy's global random state.
        verbose: show how the training goes: a line that is redrawn at a terminal, and some twenty
            lines in a notebook, a log or a pipe.
        class_weight: None, "balanced", or a weight for each class as a dictionary.

    Attributes:
        classes_: the labels, in the order of probabilities.
        model_: the trained `hdnn.Model`.
        history_: loss and accuracy of each epoch, a `hdnn.training.History`.
        certificate_: what is promised of the gradients and holds at training points.

    Examples:
        >>> from hdnn import HDNNClassifier
        >>> from sklearn.datasets import load_iris
        >>> X, y = load_iris(return_X_y=True)
        >>> model = HDNNClassifier(random_state=0).fit(X, y)
        >>> bool(model.score(X, y) > 0.95), model.certificate_.holds
        (True, True)
        >>> model.predict_proba(X[:2]).shape, model.transform(X[:2]).shape
        ((2, 3), (2, 16))
    """

    class_weight: Any = None

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:
        """Learn one epoch more, on these samples, from where the model is.

        Args:
            X: a table (samples, columns).
            y: a label for each sample.
            classes: all labels that there are; needed at the first call.
            sample_weight: a weight for each sample.
        """
        if isinstance(self.class_weight, str):
            raise OptionError(
                f"partial_fit does not know all samples, as class_weight={self.class_weight!r} "
                "needs; give a dictionary or None."
            )
        if classes is None and not self.__sklearn_is_fitted__():
            raise DataError("the first call of partial_fit needs classes: all labels there are.")
        return self._fit(X, y, sample_weight, whole=False, classes=classes)

    def decision_function(self, X: Any) -> np.ndarray:
        """Scores before the sigmoid (samples,) or the softmax (samples, classes), for a table X."""
        scores = self._run("forward", X)
        return scores[:, 0] if len(self.classes_) == 2 else scores

    def predict_proba(self, X: Any) -> np.ndarray:
        """The probability of each class for each row of X, in the order of `classes_`."""
        return self._run("predict_proba", X)

    def predict(self, X: Any) -> np.ndarray:
        """The label of each row of X."""
        labels = self._run("predict", X)
        return self.classes_[labels]

    def _targets(
        self, y: np.ndarray, weight: np.ndarray | None, *, first: bool, classes: Any = None
    ) -> tuple[Any, np.ndarray | None]:
        y = column_or_1d(y, warn=True)
        check_classification_targets(y)
        named = np.unique(y if classes is None else classes)
        if first:
            self.classes_ = named
        elif classes is not None and not np.array_equal(self.classes_, named):
            raise DataError(f"classes must be {self.classes_} as in the first call, not {classes}.")
        if len(self.classes_) < 2:
            raise DataError(
                f"a classifier needs at least 2 classes, but there is only one class: {named[0]}."
            )
        unknown = np.setdiff1d(y, self.classes_)
        if len(unknown):
            raise DataError(f"y has the labels {unknown}, which are not among the classes.")
        labels = np.searchsorted(self.classes_, y)
        weight = self._class_weights(labels, weight)
        if first:
            many = partial(SoftmaxHead, classes=len(self.classes_))
            self._begin(SigmoidHead if len(self.classes_) == 2 else many)
        return labels, weight

    def _class_weights(self, labels: np.ndarray, weight: np.ndarray | None) -> np.ndarray | None:
        """The weight of each sample, times that of its class."""
        if self.class_weight is None:
            return weight
        weight = np.ones(len(labels)) if weight is None else weight
        if isinstance(self.class_weight, str) and self.class_weight == "balanced":
            factors = class_weights.balanced(labels, len(self.classes_), weight)
        else:
            factors = compute_class_weight(
                self.class_weight, classes=self.classes_, y=self.classes_[labels]
            )
        if not (np.isfinite(factors).all() and factors.min() >= 0 and factors.any()):
            raise OptionError(
                "class_weight must have finite numbers >= 0, not all of them 0, but got "
                f"{quoted(self.class_weight)}."
            )
        return weight * factors[labels]
