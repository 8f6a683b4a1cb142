"""What the classifier and the regressor share: they build, train and run a model for a table."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from hdnn import analysis, training
from hdnn.base.parts import PART, in_parts
from hdnn.base.threads import one_thread, threads_for
from hdnn.data import encoding
from hdnn.data.encoding import Encoded
from hdnn.data.table import hold_out
from hdnn.errors import (
    DataError,
    OptionError,
    TableWarning,
    as_float,
    choose,
    flag,
    positive_int,
    quoted,
    require,
)
from hdnn.heads import Augment, LinearHead, RegressionHead
from hdnn.model import Model
from hdnn.networks import BY_NAME, HamiltonianNet, Network
from hdnn.serialization import describe, restore, weights
from hdnn.training import History, table_recipe
from hdnn.training.checks import whole_number
from hdnn.training.heldout import best_epoch
from hdnn.training.multilevel import joined
from hdnn.training.start import begin
from hdnn.training.table_recipe import DEFAULTS, share, solver_of, width

try:
    from sklearn.base import (
        BaseEstimator,
        ClassNamePrefixFeaturesOutMixin,
        TransformerMixin,
    )
    from sklearn.preprocessing import StandardScaler
    from sklearn.utils import check_random_state
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted
except ImportError:
    require("sklearn", extra="sklearn")
    raise

from hdnn.estimators import frames
from hdnn.estimators.verbose import Told

NETWORKS: dict[str, Callable[..., Network]] = {
    **BY_NAME,
    "implicit_h2": partial(HamiltonianNet, integrator="semi_implicit_euler_full"),  # has an engine
}

Data = tuple[Any, ...]  # inputs, targets, and weights of the samples or None

CHUNK = PART  # samples that go through the network at once
CERTIFIED = 100  # training points that a certificate looks at, at most
CERTIFICATE_NUMBERS = 4 * 2**20  # entries of all its matrices, at most


@dataclass(eq=False, repr=False, kw_only=True)
class HDNNEstimator(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """A model for the columns of a table; classifier and regressor differ in their targets only.

    The fields are the parameters that scikit-learn knows. What is learned is no field.
    """

    network: str = field(default="h2", kw_only=False)
    layers: int = DEFAULTS["layers"]
    features: int | None = DEFAULTS["features"]
    activation: str = DEFAULTS["activation"]
    T: float = DEFAULTS["T"]
    epochs: int | None = DEFAULTS["epochs"]
    batch: int | None = DEFAULTS["batch"]
    learning_rate: float | None = DEFAULTS["learning_rate"]
    weight_decay: float | None = DEFAULTS["weight_decay"]
    solver: str = DEFAULTS["solver"]
    ridge: float | None = DEFAULTS["ridge"]
    smoothness: float = DEFAULTS["smoothness"]
    categorical: Any = None
    missing: str = "fill"
    early_stopping: bool = DEFAULTS["early_stopping"]
    validation_fraction: float = DEFAULTS["validation_fraction"]
    n_iter_no_change: int = DEFAULTS["n_iter_no_change"]
    tol: float = 0.0
    engine: str = "auto"
    device: str = "cpu"
    random_state: Any = None
    verbose: bool = False

    _y_checks: ClassVar[dict[str, bool]] = {}  # options of scikit-learn's check of y

    def transform(self, X: Any) -> np.ndarray:
        """The features y_N that the output layer sees, for a table X: (samples, features)."""
        return self._run("features", X)

    @property
    def certificate_(self) -> analysis.Certificate:
        """What is promised of the gradients, and seen at some of the training points.

        Computed when it is first asked for; print it, plot it, or take its numbers.
        """
        check_is_fitted(self)
        if self._certificate is None:
            x = torch.from_numpy(self._sample)
            with one_thread():
                self._certificate = analysis.certify(self.model_, x, points="training points")
        return self._certificate

    # Learning

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Learn from a table, from the beginning.

        Args:
            X: a table (samples, columns): an array, or a data frame with numbers, texts and gaps.
            y: labels of any type, or for a regression values (samples,) or (samples, values).
            sample_weight: a weight for each sample, by default 1.

        Returns:
            The estimator itself.

        Raises:
            DataError: if there is nothing to learn from X and y, such as one class only.
            OptionError: if an option is not known, such as that of the network.
            ShapeError: if `layers` or `features` do not fit.
            StepError: if T is not positive.
            TrainingError: if a number of the training is out of range, or if it diverges.
            ValueError: scikit-learn's own, if X and y are no table of finite numbers.
        """
        return self._fit(X, y, sample_weight, whole=True)

    def _fit(self, X: Any, y: Any, sample_weight: Any, *, whole: bool, **known: Any) -> Self:
        """All epochs of a new model, or one more of the model that there is."""
        first = whole or not self.__sklearn_is_fitted__()
        given = frames.native(X)
        numbers = "y_numeric" in self._y_checks
        frames.check_target(y, numbers=numbers)
        y = y if numbers else frames.labels(y)
        X, y = self._checked(given, reset=first, y=y, **self._y_checks)
        weight = _sample_weights(sample_weight, X)
        self._learn_columns(given, X, weight, first=first, whole=whole)
        X = self._encoded(X)
        t, weight_of_loss = self._targets(y, weight, first=first, **known)
        standardise(self.scaler_, "X", X, weight)
        if whole:  # what partial_fit sees of a column is too little to judge it by
            self._far = encoding.farthest(X, np.asarray(self.scaler_.mean_), weight)
        encoding.rescale(self.scaler_.scale_, self.columns_, getattr(self, "_far", None))
        return self._learn(X, t, weight_of_loss, whole=whole)

    def _targets(
        self, y: np.ndarray, weight: np.ndarray | None, *, first: bool
    ) -> tuple[Any, np.ndarray | None]:
        """What the network learns, and the weight of each sample in the loss.

        At the first time it calls `_begin`, once it knows what output layer is needed.
        """
        raise NotImplementedError

    def _learn_columns(
        self, given: Any, X: np.ndarray, weight: np.ndarray | None, *, first: bool, whole: bool
    ) -> None:
        """Find out what the columns are: `given` knows their types, `X` their values."""
        self.columns_: list[Encoded]
        if first:
            table = frames.frame(X, getattr(self, "feature_names_in_", None))
            self.columns_ = encoding.learn(
                table,
                table.columns,
                rows=None if weight is None else np.flatnonzero(weight),
                weight=weight,
                categorical=frames.categories(given, table, self.categorical),
                missing=self.missing,
            )
            if not sum(map(encoding.width, self.columns_)):
                raise DataError("X has no column that tells anything: all are empty or constant.")
            frames.tell(table, self.columns_, aloud=bool(self.verbose))
        if not whole:  # further rows may differ
            self.columns_ = [Encoded(**{**one, "constant": False}) for one in self.columns_]

    def _begin(self, head: Callable[..., LinearHead]) -> None:
        """Draw the weights of a new model."""
        self._seed = _seed(self.random_state)
        factory: dict[str, Any] = {
            "generator": torch.Generator().manual_seed(self._seed),
            "dtype": torch.float64,
            "device": self.device,
        }
        inputs = sum(map(encoding.width, self.columns_))
        n = width(inputs) if self.features is None else positive_int("features", self.features)
        kind = choose("network", self.network, NETWORKS)
        options = {"activation": self.activation, **factory}
        if kind != "mlp":
            options |= {"T": self.T, "engine": self.engine}
        net = NETWORKS[kind](n, self.layers, **options)
        self.model_ = Model(Augment(inputs, n).to(self.device), net, head(n, **factory))
        self.scaler_ = StandardScaler()
        self._far = None
        self.history_, self.n_iter_ = History(), 0

    def _learn(self, X: np.ndarray, t: np.ndarray, weight: np.ndarray | None, whole: bool) -> Self:
        x = self._inputs(X)
        labels, weights = torch.tensor(t, device=x.device), None
        if weight is not None:
            weights = torch.tensor(weight, dtype=x.dtype, device=x.device)
        data: Data = x, labels, weights
        rows = float(np.max(self.scaler_.n_samples_seen_))
        options: dict[str, Any] = {}
        if whole and flag("early_stopping", self.early_stopping):
            data, options = self._hold_out(t, data)
            counted, held = _counted(weights, t), len(options["validation"][0])
            rows = rows * (counted - held) / counted
        options |= {name: self._penalty(name, rows) for name in table_recipe.PENALTIES}
        options["batch"] = table_recipe.batch(len(x)) if self.batch is None else self.batch
        n, rate = self._n_features_out, self.learning_rate
        options["learning_rate"] = table_recipe.learning_rate(n) if rate is None else rate
        if whole:
            options["epochs"] = table_recipe.epochs(n) if self.epochs is None else self.epochs
            options["solver"] = solver_of(self.solver)
            self._begin_output(options, *data)
        else:  # solving the output layer would forget earlier data
            options |= {"epochs": 1, "solver": "joint", "schedule": "constant"}
        with Told(type(self).__name__, bool(self.verbose)) as told:
            history = training.fit(
                self.model_,
                *data[:2],
                weight=data[2],
                smoothness=self.smoothness,
                seed=self._seed + self.n_iter_,
                progress=False,
                callbacks=[told] if told.wanted else [],
                **options,
            )
            told.end(history)
        self.history_ = joined([self.history_, history])
        self.n_iter_ = len(self.history_.loss)
        self._remember()
        self._sample = x[:: -(-len(x) // CERTIFIED)].numpy(force=True)
        self._certificate = None
        return self

    def _begin_output(self, options: dict[str, Any], x: Tensor, t: Tensor, weight: Any) -> None:
        """Let training begin with a fair output layer, if it is trained with the others."""
        ridge = as_float(options["ridge"])
        if options["solver"] == "joint" and ridge is not None:
            with threads_for(len(x) * self._n_features_out, x.device.type):
                begin(self.model_, x, t, ridge, weight)

    def _penalty(self, name: str, rows: float) -> Any:
        """A penalty as `fit` takes it; what is not a number is passed on, for `fit` to refuse."""
        given = getattr(self, name)
        value = table_recipe.penalty(name, self._n_features_out) if given is None else given
        number = as_float(value)
        return value if number is None else share(number, rows)

    def _hold_out(self, t: np.ndarray, data: Data) -> tuple[Data, dict[str, Any]]:
        """The samples to train on, and options of `fit` that hold the others out."""
        fraction = as_float(self.validation_fraction)
        if fraction is None or not 0 < fraction < 1:
            raise OptionError(
                "validation_fraction must be a number between 0 and 1, but got "
                f"{quoted(self.validation_fraction)}."
            )
        patience = self.n_iter_no_change
        if patience is not None:
            whole_number("n_iter_no_change", patience, 1)
        weight = None if data[2] is None else data[2].numpy(force=True)
        classes = not isinstance(self.model_.head, RegressionHead)
        train, held = hold_out(t, fraction, self._seed, classes=classes, weight=weight)
        rows = torch.as_tensor(train), torch.as_tensor(held)
        taken, out = ([None if one is None else one[i] for one in data] for i in rows)
        options = {
            "validation": tuple(one for one in out if one is not None),
            "patience": patience,
            "tol": self.tol,
        }
        return tuple(taken), options

    def _remember(self) -> None:
        """What scikit-learn's perceptron remembers of its training, by the same names."""
        history = self.history_
        self.loss_curve_, scores = history.loss, history.validation_score
        self.validation_scores_ = scores or None
        best = best_epoch(history.validation_loss)  # also of a fit that partial_fit went on with
        self.best_validation_score_ = scores[best - 1] if best else None
        self.best_loss_ = None if scores else min(history.loss)

    # Predicting

    def _checked(self, X: Any, *, reset: bool, **options: Any) -> Any:
        """X as scikit-learn checks it, with y if it is among the options."""
        return frames.checked(self, X, reset=reset, gaps=self._fills, **options)

    @property
    def _fills(self) -> bool:
        return isinstance(self.missing, str) and self.missing == "fill"

    def _encoded(self, X: np.ndarray) -> np.ndarray:
        """The inputs of all samples; a warning says what is unlike those learned from."""
        x, notes = frames.encoded(X, getattr(self, "feature_names_in_", None), self.columns_)
        for note in notes:
            warnings.warn(f"X: {note}", TableWarning, stacklevel=5)
        return x

    def _inputs(self, X: np.ndarray) -> Tensor:
        """X standardised, where the model is."""
        device = next(self.model_.parameters()).device
        return torch.tensor(self.scaler_.transform(X), dtype=torch.float64, device=device)

    @torch.no_grad()
    def _run(self, method: str, X: Any) -> np.ndarray:
        """What a method of the model gives for X, in pieces that fit into memory."""
        check_is_fitted(self)
        x = self._encoded(self._checked(frames.native(X), reset=False))
        inputs = self._inputs(x)
        with threads_for(min(len(x), CHUNK) * self._n_features_out, inputs.device.type):
            return in_parts(getattr(self.model_, method), inputs).numpy(force=True)

    @property
    def _n_features_out(self) -> int:
        return self.model_.net.features

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = self._fills
        tags.input_tags.categorical = True
        return tags

    def __sklearn_is_fitted__(self) -> bool:
        return getattr(self, "n_iter_", 0) > 0  # none after a training that failed

    # Pickles hold arrays and a description of the model, no PyTorch objects.

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
        if "model_" in state and "columns_" not in state:  # of a version that knew numbers only
            names = state.get("feature_names_in_", range(state["n_features_in_"]))
            self.columns_ = frames.numbers(names)


def _seed(random_state: Any) -> int:
    """A whole number is the seed itself, as that of `hdnn train`; else it is drawn."""
    if isinstance(random_state, Integral) and not isinstance(random_state, bool):
        check_random_state(int(random_state))  # raises if it is not one of NumPy
        return int(random_state)
    return int(check_random_state(random_state).randint(np.iinfo(np.int32).max))


def _counted(weight: Tensor | None, t: np.ndarray) -> int:
    """How many samples have a weight other than 0."""
    return len(t) if weight is None else int(torch.count_nonzero(weight))


def _sample_weights(given: Any, X: np.ndarray) -> np.ndarray | None:
    """The weight of each sample, checked; None where all count alike."""
    if given is None:
        return None
    if not np.asarray(given).any():
        raise DataError("sample_weight is zero for all samples: there is nothing to learn from.")
    return _check_sample_weight(given, X, dtype=np.float64, ensure_non_negative=True)


def standardise(scaler: Any, name: str, X: np.ndarray, weight: np.ndarray | None) -> None:
    """Let a StandardScaler take mean and scale from X, too."""
    with np.errstate(over="ignore", invalid="ignore"):
        scaler.partial_fit(X, sample_weight=weight)
    if not np.isfinite(scaler.var_).all():
        raise DataError(
            f"{name} has values up to {np.abs(X).max():.3g}, too large for their variance to be "
            "a number; rescale them."
        )
