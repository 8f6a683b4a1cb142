"""A deep Hamiltonian network as a regressor of scikit-learn."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np
from sklearn.base import MultiOutputMixin, RegressorMixin
from sklearn.preprocessing import StandardScaler

from hdnn.errors import DataError
from hdnn.estimators.base import HDNNEstimator, standardise
from hdnn.estimators.classifier import HDNNClassifier
from hdnn.heads import RegressionHead
from hdnn.networks.options import describes_options


@dataclass(eq=False, repr=False, kw_only=True)
@describes_options(HDNNClassifier)  # before `dataclass`, which gives a docstring where -OO has none
class HDNNRegressor(RegressorMixin, MultiOutputMixin, HDNNEstimator):
    """A deep Hamiltonian network for one value or several, as an estimator of scikit-learn.

    It is the network of `HDNNClassifier` with values instead of classes. Targets are standardised
    inside, as inputs are. Options are checked by `fit`, as scikit-learn wants it.

    Attributes:
        model_: the trained `hdnn.Model`.
        history_: the loss of each epoch, a `hdnn.training.History`.
        certificate_: what is promised of the gradients and holds at training points.

    Examples:
        >>> from hdnn import HDNNRegressor
        >>> from sklearn.datasets import load_diabetes
        >>> X, y = load_diabetes(return_X_y=True)
        >>> model = HDNNRegressor(random_state=0).fit(X, y)
        >>> bool(model.score(X, y) > 0.5), model.predict(X[:3]).shape
        (True, (3,))
    """

    _y_checks: ClassVar = {"multi_output": True, "y_numeric": True}

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Learn one epoch more, on these samples, from where the model is.

        Args:
            X: a table (samples, columns).
            y: values (samples,) or (samples, values).
            sample_weight: a weight for each sample.
        """
        return self._fit(X, y, sample_weight, whole=False)

    def predict(self, X: Any) -> np.ndarray:
        """The values for each row of X, in the shape of the y that was learned from."""
        values = self._run("predict", X)
        values = self.target_scaler_.inverse_transform(values)
        return values[:, 0] if self._flat else values

    def _targets(
        self, y: np.ndarray, weight: np.ndarray | None, *, first: bool
    ) -> tuple[Any, np.ndarray | None]:
        self._flat = y.ndim == 1
        values = y.reshape(len(y), -1).astype(np.float64)
        outputs = values.shape[1]
        if first:
            self._begin(partial(RegressionHead, outputs=outputs))
            self.target_scaler_ = StandardScaler()
        elif outputs != self.model_.head.outputs:
            raise DataError(
                f"y has {outputs} values a sample, but {self.model_.head.outputs} before."
            )
        standardise(self.target_scaler_, "y", values, weight)
        return self.target_scaler_.transform(values), weight
