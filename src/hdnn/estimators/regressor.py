"""A deep Hamiltonian network as a regressor of scikit-learn."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from sklearn.base import MultiOutputMixin, RegressorMixin
from sklearn.preprocessing import StandardScaler
from sklearn.utils.validation import check_is_fitted, validate_data

from hdnn.errors import DataError
from hdnn.estimators.base import HDNNEstimator, sample_weights, standardise
from hdnn.heads import LinearHead, RegressionHead
from hdnn.training.table_recipe import VALUES


class HDNNRegressor(RegressorMixin, MultiOutputMixin, HDNNEstimator):
    """A deep Hamiltonian network for one value or several.

    Targets are standardised inside, as inputs are. Options as in `HDNNClassifier`.

    >>> from sklearn.datasets import load_diabetes
    >>> X, y = load_diabetes(return_X_y=True)
    >>> model = HDNNRegressor(random_state=0).fit(X, y)
    >>> bool(model.score(X, y) > 0.5)
    True
    """

    target_scaler_: StandardScaler

    def __init__(
        self,
        network: str = "h2",
        *,
        layers: int = VALUES["layers"],
        features: int | None = None,
        activation: str = VALUES["activation"],
        T: float = VALUES["T"],
        epochs: int = VALUES["epochs"],
        batch: int = VALUES["batch"],
        learning_rate: float = VALUES["learning_rate"],
        weight_decay: float = VALUES["weight_decay"],
        solver: str = VALUES["solver"],
        ridge: float = VALUES["ridge"],
        smoothness: float = VALUES["smoothness"],
        engine: str = "auto",
        device: str = "cpu",
        random_state: Any = None,
        verbose: bool = False,
    ) -> None:
        self.network = network
        self.layers = layers
        self.features = features
        self.activation = activation
        self.T = T
        self.epochs = epochs
        self.batch = batch
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.solver = solver
        self.ridge = ridge
        self.smoothness = smoothness
        self.engine = engine
        self.device = device
        self.random_state = random_state
        self.verbose = verbose

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Learn from X (samples, features) and y (samples,) or (samples, values)."""
        X, y, weight = self._checked(X, y, sample_weight, reset=True)
        self._begin(X.shape[1], y.shape[1])
        self.target_scaler_ = StandardScaler()
        standardise(self.scaler_.fit, "X", X, weight)
        standardise(self.target_scaler_.fit, "y", y, weight)
        return self._whole(X, self.target_scaler_.transform(y), weight)

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """One epoch more, on these samples."""
        first = not self.__sklearn_is_fitted__()
        X, y, weight = self._checked(X, y, sample_weight, reset=first)
        if first:
            self._begin(X.shape[1], y.shape[1])
            self.target_scaler_ = StandardScaler()
        elif y.shape[1] != self.model_.head.outputs:
            raise DataError(
                f"y has {y.shape[1]} values a sample, but {self.model_.head.outputs} before."
            )
        standardise(self.scaler_.partial_fit, "X", X, weight)
        standardise(self.target_scaler_.partial_fit, "y", y, weight)
        return self._once(X, self.target_scaler_.transform(y), weight)

    def predict(self, X: Any) -> np.ndarray:
        """The values, in the shape of the y that was learned from."""
        check_is_fitted(self)
        values = self.target_scaler_.inverse_transform(self._run(X, self.model_.predict))
        return values[:, 0] if self._flat else values

    def _checked(
        self, X: Any, y: Any, sample_weight: Any, *, reset: bool
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        X, y = validate_data(
            self, X, y, dtype=np.float64, multi_output=True, y_numeric=True, reset=reset
        )
        self._flat = y.ndim == 1
        return X, y.reshape(len(X), -1).astype(np.float64), sample_weights(sample_weight, X)

    def _head(self, features: int, outputs: int, factory: dict[str, Any]) -> LinearHead:
        return RegressionHead(features, outputs, **factory)
