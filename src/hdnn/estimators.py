"""The scikit-learn face: a classifier and a regressor that need nothing but numbers in a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from hdnn import analysis, training
from hdnn.errors import DataError, OptionError, as_float, choose, positive_int, require
from hdnn.heads import (
    Augment,
    LinearHead,
    RegressionHead,
    SigmoidHead,
    SoftmaxHead,
)
from hdnn.model import Model
from hdnn.networks import BY_NAME, HamiltonianNet, Network
from hdnn.serialization import describe, restore, weights
from hdnn.training import History
from hdnn.training.table_recipe import CLASSES, VALUES, share, solver_of, width

try:
    from sklearn.base import (
        BaseEstimator,
        ClassifierMixin,
        ClassNamePrefixFeaturesOutMixin,
        MultiOutputMixin,
        RegressorMixin,
        TransformerMixin,
    )
    from sklearn.preprocessing import StandardScaler
    from sklearn.utils import check_random_state, compute_class_weight
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import (
        _check_sample_weight,
        check_is_fitted,
        column_or_1d,
        validate_data,
    )
except ImportError:
    require("sklearn", extra="sklearn")
    raise

NETWORKS: dict[str, Callable[..., Network]] = {
    **BY_NAME,
    "implicit_h2": partial(HamiltonianNet, integrator="semi_implicit_euler_full"),  # has an engine
}

CHUNK = 4096  # samples that go through the network at once
CERTIFIED = 100  # training points that a certificate looks at, at most
CERTIFICATE_NUMBERS = 4 * 2**20  # entries of all its matrices, at most


class _HDNN(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """What classifier and regressor share; they differ in their targets only."""

    network: str
    layers: int
    features: int | None
    activation: str
    T: float
    epochs: int
    batch: int
    learning_rate: float
    weight_decay: float
    solver: str
    ridge: float
    smoothness: float
    engine: str
    device: str
    random_state: Any
    verbose: bool

    scaler_: StandardScaler
    model_: Model
    history_: History
    n_iter_: int

    def transform(self, X: Any) -> np.ndarray:
        """The features y_N that the output layer sees: (samples, features of the network)."""
        check_is_fitted(self)
        return self._run(X, self.model_.features)

    @property
    def certificate_(self) -> analysis.Certificate:
        """What is promised of the gradients, and seen at some of the training points.

        Computed when it is first asked for; print it, plot it, or take its numbers.
        """
        check_is_fitted(self)
        if self._certificate is None:
            x = torch.from_numpy(self._sample)
            self._certificate = analysis.certify(self.model_, x, points="training points")
        return self._certificate

    # Learning

    def _begin(self, inputs: int, outputs: int) -> None:
        """Draw the weights of a new model."""
        self._seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        made: dict[str, Any] = {
            "generator": torch.Generator().manual_seed(self._seed),
            "dtype": torch.float64,
            "device": self.device,
        }
        n = width(inputs) if self.features is None else positive_int("features", self.features)
        kind = choose("network", self.network, NETWORKS)
        options: dict[str, Any] = {"activation": self.activation, **made}
        if kind != "mlp":
            options |= {"T": _plain(self.T), "engine": self.engine}
        net = NETWORKS[kind](n, _plain(self.layers), **options)
        augment = Augment(inputs, n).to(self.device)
        self.model_ = Model(augment, net, self._head(n, outputs, made))
        self.scaler_ = StandardScaler()
        self.history_, self.n_iter_ = History(), 0

    def _learn(self, X: np.ndarray, t: Any, weight: np.ndarray | None, **options: Any) -> Self:
        """Train the model, or go on training it."""
        x = self._inputs(X)
        if weight is not None:
            options["weight"] = torch.tensor(weight, dtype=x.dtype, device=x.device)
        for name in ("batch", "learning_rate", "smoothness"):
            options[name] = _plain(getattr(self, name))
        for name in ("weight_decay", "ridge"):
            options[name] = self._share(name)
        history = training.fit(
            self.model_,
            x,
            torch.tensor(t, device=x.device),
            seed=self._seed + self.n_iter_,
            progress=bool(self.verbose),
            **options,
        )
        for part in fields(history):
            before = getattr(self.history_, part.name)
            setattr(self.history_, part.name, before + getattr(history, part.name))
        self.n_iter_ = len(self.history_.loss)
        self._sample = x[:: -(-len(x) // CERTIFIED)].numpy(force=True)
        self._certificate = None
        return self

    def _share(self, name: str) -> Any:
        """A penalty as `fit` takes it; what is no number goes there as it is, and is refused."""
        given, rows = _plain(getattr(self, name)), float(np.max(self.scaler_.n_samples_seen_))
        number = as_float(given)
        return given if number is None else share(number, rows)

    def _whole(self, X: np.ndarray, t: Any, weight: np.ndarray | None) -> Self:
        """All epochs of `fit`."""
        head, batch = self.model_.head, positive_int("batch", self.batch)
        solver = solver_of(self.solver, batch=batch, features=head.features, outputs=head.outputs)
        return self._learn(X, t, weight, epochs=_plain(self.epochs), solver=solver)

    def _once(self, X: np.ndarray, t: Any, weight: np.ndarray | None) -> Self:
        """The one epoch of `partial_fit`: solving the output layer would forget earlier data."""
        return self._learn(X, t, weight, epochs=1, solver="joint", schedule="constant")

    def _head(self, features: int, outputs: int, made: dict[str, Any]) -> LinearHead:
        raise NotImplementedError

    # Predicting

    def _inputs(self, X: np.ndarray) -> Tensor:
        """X standardised, where the model is."""
        device = next(self.model_.parameters()).device
        return torch.tensor(self.scaler_.transform(X), dtype=torch.float64, device=device)

    @torch.no_grad()
    def _run(self, X: Any, function: Callable[[Tensor], Tensor]) -> np.ndarray:
        """What a function of the model gives for X, in pieces that fit into memory."""
        table: Any = validate_data(self, X, dtype=np.float64, reset=False)
        x = self._inputs(table)
        return torch.cat([function(part) for part in x.split(CHUNK)]).numpy(force=True)

    @property
    def _n_features_out(self) -> int:
        return self.model_.net.features

    def __sklearn_is_fitted__(self) -> bool:
        return getattr(self, "n_iter_", 0) > 0  # none after a training that failed

    # Between processes travel arrays and a description of the model, no objects of PyTorch.

    def __getstate__(self) -> dict[str, Any]:
        state: Any = super().__getstate__()
        if "model_" not in state:
            return state
        arrays = {name: t.numpy(force=True) for name, t in weights(self.model_).items()}
        return {**state, "model_": (describe(self.model_), arrays)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "model_" in state:
            description, arrays = state["model_"]
            tensors = {name: torch.tensor(array) for name, array in arrays.items()}
            self.model_ = restore(description, tensors)
            self.model_.load_state_dict(tensors, assign=True)
            self.model_.net.engine = self.engine


class HDNNClassifier(ClassifierMixin, _HDNN):
    """A deep Hamiltonian network for two or more classes.

    y_0 is the standardised table placed among zeros, y_N goes to a linear output layer. With the
    default network `norm(dy_N/dy_j) >= 1` at any depth: gradients do not vanish.

    Args:
        network: "h1", "h2", "implicit_h2", "verlet", "yoshida4", "midpoint", "ms1", "ms2", "ms3",
            or "mlp".
        layers: N.
        features: n, the width of the network; by default twice that of the table, within limits.
        activation: one of `hdnn.activations`.
        T: the time that the layers span together; a step is T/N. Not for "mlp".
        epochs: passes over the data.
        batch: samples for each step of the optimiser.
        learning_rate: at the start; it falls to zero as a cosine.
        weight_decay: pulls the layers towards the identity, and the model towards a linear one.
            Divided by the number of samples, as scikit-learn's penalties are; so is `ridge`.
        solver: of the output layer, "newton", "adam" or "joint" (see `hdnn.training.fit`);
            "auto" is "newton" where a minibatch determines an output layer of few outputs.
        ridge: penalty on the output layer.
        smoothness: penalty on the differences between neighbouring layers.
        engine: how the layers run, never what they compute (see `hdnn.engine`).
        device: where to train, "cpu" or "cuda".
        random_state: seed of initial weights and order of samples; as in scikit-learn, None takes
            it from NumPy's global random state.
        verbose: show a line of progress to a person at a terminal.
        class_weight: None, "balanced", or a weight for each class as a dictionary.

    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> model = HDNNClassifier(random_state=0).fit(X, y)
    >>> bool(model.score(X, y) > 0.95)
    True
    >>> model.predict_proba(X[:2]).shape, model.transform(X[:2]).shape
    ((2, 3), (2, 16))
    >>> model.certificate_.holds
    True
    """

    classes_: np.ndarray

    def __init__(
        self,
        network: str = "h2",
        *,
        layers: int = CLASSES["layers"],
        features: int | None = None,
        activation: str = CLASSES["activation"],
        T: float = CLASSES["T"],
        epochs: int = CLASSES["epochs"],
        batch: int = CLASSES["batch"],
        learning_rate: float = CLASSES["learning_rate"],
        weight_decay: float = CLASSES["weight_decay"],
        solver: str = CLASSES["solver"],
        ridge: float = CLASSES["ridge"],
        smoothness: float = CLASSES["smoothness"],
        class_weight: Any = None,
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
        self.class_weight = class_weight
        self.engine = engine
        self.device = device
        self.random_state = random_state
        self.verbose = verbose

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Learn from X (samples, features) and labels y of any type, from the beginning."""
        X, y = validate_data(self, X, y, dtype=np.float64)
        y = column_or_1d(y, warn=True)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        _check_classes(self.classes_)
        each = _sample_weight(sample_weight, X)
        weight = self._class_weights(labels, each)
        self._begin(X.shape[1], len(self.classes_))
        _standardise(self.scaler_.fit, "X", X, each)
        return self._whole(X, labels, weight)

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:
        """One epoch more, on these samples; `classes` names all labels at the first call."""
        first = not self.__sklearn_is_fitted__()
        X, y = validate_data(self, X, y, dtype=np.float64, reset=first)
        y = column_or_1d(y, warn=True)
        check_classification_targets(y)
        if isinstance(self.class_weight, str):
            raise OptionError(
                f"partial_fit does not know all samples, as class_weight={self.class_weight!r} "
                "needs; give a dictionary or None."
            )
        if first:
            if classes is None:
                raise DataError(
                    "the first call of partial_fit needs classes: all labels there are."
                )
            self.classes_ = np.unique(classes)
            _check_classes(self.classes_)
        elif classes is not None and not np.array_equal(self.classes_, np.unique(classes)):
            raise DataError(f"classes must be {self.classes_} as in the first call, not {classes}.")
        unknown = np.setdiff1d(y, self.classes_)
        if len(unknown):
            raise DataError(f"y has the labels {unknown}, which are not among the classes.")
        labels = np.searchsorted(self.classes_, y)
        each = _sample_weight(sample_weight, X)
        weight = self._class_weights(labels, each)
        if first:
            self._begin(X.shape[1], len(self.classes_))
        _standardise(self.scaler_.partial_fit, "X", X, each)
        return self._once(X, labels, weight)

    def decision_function(self, X: Any) -> np.ndarray:
        """Scores before the sigmoid (samples,) or the softmax (samples, classes)."""
        check_is_fitted(self)
        scores = self._run(X, self.model_)
        return scores[:, 0] if len(self.classes_) == 2 else scores

    def predict_proba(self, X: Any) -> np.ndarray:
        """The probability of each class, in the order of `classes_`."""
        check_is_fitted(self)
        return self._run(X, self.model_.predict_proba)

    def predict(self, X: Any) -> np.ndarray:
        """The label of each sample."""
        check_is_fitted(self)
        return self.classes_[self._run(X, self.model_.predict)]

    def _head(self, features: int, outputs: int, made: dict[str, Any]) -> LinearHead:
        if outputs == 2:
            return SigmoidHead(features, **made)
        return SoftmaxHead(features, outputs, **made)

    def _class_weights(self, labels: np.ndarray, weight: np.ndarray | None) -> np.ndarray | None:
        """The weight of each sample, times that of its class."""
        if self.class_weight is None:
            return weight
        weight = np.ones(len(labels)) if weight is None else weight
        if isinstance(self.class_weight, str) and self.class_weight == "balanced":
            total = np.bincount(labels, weight, minlength=len(self.classes_))
            factors = total.sum() / (len(total) * np.maximum(total, np.finfo(float).tiny))
        else:
            factors = compute_class_weight(
                self.class_weight, classes=self.classes_, y=self.classes_[labels]
            )
        return weight * factors[labels]


class HDNNRegressor(RegressorMixin, MultiOutputMixin, _HDNN):
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
        _standardise(self.scaler_.fit, "X", X, weight)
        _standardise(self.target_scaler_.fit, "y", y, weight)
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
        _standardise(self.scaler_.partial_fit, "X", X, weight)
        _standardise(self.target_scaler_.partial_fit, "y", y, weight)
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
        return X, y.reshape(len(X), -1).astype(np.float64), _sample_weight(sample_weight, X)

    def _head(self, features: int, outputs: int, made: dict[str, Any]) -> LinearHead:
        return RegressionHead(features, outputs, **made)


def _plain(value: Any) -> Any:
    """A number of NumPy, as a grid of parameters has them, as one of Python."""
    return value.item() if isinstance(value, np.generic) else value


def _check_classes(classes: np.ndarray) -> None:
    if len(classes) < 2:
        raise DataError(
            f"a classifier needs at least 2 classes, but there is only one class: {classes[0]}."
        )


def _sample_weight(given: Any, X: np.ndarray) -> np.ndarray | None:
    if given is None:
        return None
    if not np.asarray(given).any():
        raise DataError("sample_weight is zero for all samples: there is nothing to learn from.")
    return _check_sample_weight(given, X, dtype=np.float64, ensure_non_negative=True)


def _standardise(
    learn: Callable[..., StandardScaler], name: str, X: np.ndarray, weight: np.ndarray | None
) -> None:
    """Take mean and scale from X."""
    with np.errstate(over="ignore", invalid="ignore"):
        scaler: Any = learn(X, sample_weight=weight)
    if not np.isfinite(scaler.var_).all():
        raise DataError(
            f"{name} has values up to {np.abs(X).max():.3g}, too large for their variance to be "
            "a number; rescale them."
        )
