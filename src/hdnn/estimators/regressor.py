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
from hdnn.heads import RegressionHead


@dataclass(eq=False, repr=False, kw_only=True)
class HDNNRegressor(RegressorMixin, MultiOutputMixin, HDNNEstimator):
    """A deep Hamiltonian network for one value or several.

    Targets are standardised inside, as inputs are. Options as in `HDNNClassifier`.

    >>> from sklearn.datasets import load_diabetes
    >>> X, y = load_diabetes(return_X_y=True)
    >>> model = HDNNRegressor(random_state=0).fit(X, y)
    >>> bool(model.score(X, y) > 0.5)
    True
    """

    _y_checks: ClassVar = {"multi_output": True, "y_numeric": True}

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """One epoch more, on these samples."""
        return self._fit(X, y, sample_weight, whole=False)

    def predict(self, X: Any) -> np.ndarray:
        """The values, in the shape of the y that was learned from."""
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
