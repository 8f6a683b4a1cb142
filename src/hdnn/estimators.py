"""For scikit-learn: a classifier and a regressor for tables with numbers, text and gaps.

Rows that are held out decide how much a network is shrunk towards a linear model: networks with
weak and with strong shrinkage are trained, and the best shrinkage is used for all rows.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from hdnn import analysis, training
from hdnn.data.tables import Encoder, class_weights, hold_out
from hdnn.errors import DataError, OptionError, choose, require
from hdnn.heads import (
    Augment,
    Model,
    RegressionHead,
    SigmoidHead,
    SoftmaxHead,
    roomy_width,
)
from hdnn.networks import BY_NAME
from hdnn.training.output import evaluate

require("sklearn", extra="sklearn")

import pandas as pd  # noqa: E402
from pandas.util import hash_pandas_object  # noqa: E402
from sklearn.base import (  # noqa: E402
    BaseEstimator,
    ClassifierMixin,
    ClassNamePrefixFeaturesOutMixin,
    MultiOutputMixin,
    RegressorMixin,
    TransformerMixin,
)
from sklearn.utils import check_random_state  # noqa: E402
from sklearn.utils.multiclass import check_classification_targets  # noqa: E402
from sklearn.utils.validation import (  # noqa: E402
    _check_sample_weight,
    check_consistent_length,
    check_is_fitted,
    column_or_1d,
    validate_data,
)

__all__ = ["HDNNClassifier", "HDNNRegressor"]

SHRINKAGES = (
    1e-1,
    3e-2,
    2e-2,
    1.2e-2,
    6e-3,
    1e-3,
    1e-5,
)  # weight decays, from strong to weak
SHRINKAGE = 2e-2  # for tables that are too small to hold rows out
TINY = 64  # rows, up to which none are held out and all are one minibatch
HELD_OUT = 0.2
WORTH = (
    0.95  # the factor by which weaker shrinkage must lower the held-out loss
)
STEPS = 800  # of the optimiser; half of them for few rows, and fewer for wide networks
FEW = 500  # rows
WIDE = 32  # features
RATE = 1.5e-2
RIDGE = 0.1  # of the weight decay
GAIN = 1.5  # of the initial weights: smaller ones wait long at the identity
WIDEST = 4096  # inputs; a wider network must be asked for
CHUNK = 2**16  # rows that run through the network at once
CERTIFIED = 100  # training rows that a certificate looks at


class Rows(NamedTuple):
    """Inputs, targets and weights (None: all alike)."""

    x: Tensor
    t: Tensor
    weight: Tensor | None

    def take(self, index: np.ndarray) -> Rows:
        rows = torch.as_tensor(index, device=self.x.device)
        weight = None if self.weight is None else self.weight[rows]
        return Rows(self.x[rows], self.t[rows], weight)


@dataclass(eq=False, repr=False, kw_only=True)
class _Estimator(
    ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator
):
    """Options, training and inputs; classifier and regressor differ in their targets."""

    network: str = field(default="h2", kw_only=False)
    layers: int = 16
    features: int | None = None
    activation: str = "tanh"
    T: float = 8.0
    epochs: int | None = None
    batch: int | None = None
    learning_rate: float | None = None
    weight_decay: float | None = None
    ridge: float | None = None
    smoothness: float = 0.0
    categorical: Any = None
    missing: str = "fill"
    early_stopping: bool = False
    validation_fraction: float = 0.1
    n_iter_no_change: int = 10
    device: str = "cpu"
    random_state: Any = None
    verbose: bool = False

    regression: ClassVar[bool] = False

    # Targets

    def _check_target(self, y: Any) -> np.ndarray:
        """y as an array of labels or numbers."""
        raise NotImplementedError

    def _learn_target(self, y: np.ndarray, weight: Any, classes: Any) -> None:
        """Learn the classes, or mean and deviation of the values."""
        raise NotImplementedError

    def _encode_target(
        self, y: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """What the network learns, and a factor of each row's weight."""
        raise NotImplementedError

    def _head(self, features: int, **options: Any) -> Any:
        """A new output layer."""
        raise NotImplementedError

    # Learning

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Learn from a table, from the beginning.

        Args:
            X: a table (samples, columns): an array, or a data frame with numbers, text and gaps.
            y: labels of any type, or for a regression values (samples,) or (samples, values).
            sample_weight: a weight for each sample. Only ratios count: a sample of weight 0 is
                as good as absent, one of weight 2 counts twice.

        Returns:
            The estimator itself.

        Raises:
            DataError: if there is nothing to learn from X and y, such as one class only.
            OptionError: if an option is out of range.
        """
        rows = self._begin(X, y, sample_weight)
        decay = self._shrinkage(rows)
        options: dict[str, Any] = {}
        train = rows
        if self.early_stopping:
            train, held = self._hold_out(rows, self.validation_fraction)
            options = {"validation": held, "patience": self.n_iter_no_change}
        self.history_ = self._train(self.model_, train, decay, **options)
        return self._finish(rows)

    def _begin(
        self, X: Any, y: Any, sample_weight: Any, classes: Any = None
    ) -> Rows:
        """Learn columns and targets, and make a new model."""
        frame, y = self._check(X, y, reset=True)
        y, frame, weight = self._weighted(y, frame, sample_weight)
        categorical = _names(self.categorical, frame)
        self.encoder_ = Encoder.fit(
            frame, categorical=categorical, missing=self.missing, weight=weight
        )
        self._say(*self.encoder_.notes)
        self._learn_target(y, weight, classes)
        self._seed = _seed(self.random_state)
        self.n_iter_ = 0
        self.model_ = self._new_model()
        return self._rows(frame, y, weight)

    def _weighted(self, y: Any, frame: pd.DataFrame, sample_weight: Any) -> Any:
        """Targets, inputs and weights of all rows whose weight is not 0."""
        if sample_weight is None:
            return y, frame, None
        weight = _check_sample_weight(sample_weight, frame, dtype=np.float64)
        if not (
            np.isfinite(weight).all() and weight.min() >= 0 and weight.any()
        ):
            raise DataError(
                "sample_weight must be finite and >= 0, and not 0 for all samples."
            )
        rows = np.flatnonzero(weight)
        weight = None if np.ptp(weight[rows]) == 0 else weight[rows]
        return y[rows], frame.iloc[rows], weight

    def _rows(
        self, frame: pd.DataFrame, y: np.ndarray, weight: np.ndarray | None
    ) -> Rows:
        """What the network learns; weights have the mean 1."""
        t, factor = self._encode_target(y)
        if factor is not None:
            weight = factor if weight is None else weight * factor
        x = self._inputs(frame)
        if weight is not None:
            rows = np.flatnonzero(weight)
            x, t, weight = x[torch.as_tensor(rows)], t[rows], weight[rows]
        targets = torch.as_tensor(t, device=x.device)
        numbers = _row_numbers(x, targets)
        if weight is None and numbers.max() == len(numbers) - 1:
            return Rows(x, targets, None)
        # A row that is repeated is one row with the sum of the weights.
        total = np.bincount(numbers, weight)
        first = np.unique(numbers, return_index=True)[1]
        weights = torch.as_tensor(total / total.mean()).to(x)
        rows = Rows(x, targets, None).take(first)
        return rows if np.ptp(total) == 0 else rows._replace(weight=weights)

    def _new_model(self) -> Model:
        generator = torch.Generator().manual_seed(self._seed)
        factory = {
            "generator": generator,
            "dtype": torch.float64,
            "device": self.device,
        }
        inputs = len(self.encoder_.names)
        features = (
            roomy_width(inputs) if self.features is None else self.features
        )
        if self.features is None and inputs > WIDEST:
            raise OptionError(
                f"{inputs} inputs make a network of {features} features, with "
                f"{features**2 / 2:.2g} weights a layer; leave columns out, or say "
                f"features={features}."
            )
        options = {"activation": self.activation, **factory}
        kind = choose("network", self.network, BY_NAME)
        if kind != "mlp":
            options["T"] = self.T
        net = BY_NAME[kind](features, self.layers, **options)
        if kind != "mlp":
            with torch.no_grad():
                for name, parameter in net.named_parameters():
                    if name.startswith("K"):
                        parameter.mul_(GAIN)
        head = self._head(net.features, **factory)
        return Model(Augment(inputs, features).to(self.device), net, head)

    def _shrinkage(self, rows: Rows) -> float:
        """The weight decay with the lowest loss of held-out rows, in several splits if few."""
        if self.weight_decay is not None:
            return self.weight_decay
        if _row_numbers(rows.x).max() < TINY:
            return SHRINKAGE
        splits = [
            self._hold_out(rows, HELD_OUT, fold)
            for fold in range(_folds(len(rows.x)))
        ]
        best = np.inf
        chosen = SHRINKAGE
        for decay in SHRINKAGES:
            loss = 0.0
            for train, held in splits:
                model = self._new_model()
                self._train(model, train, decay)
                loss += _loss(model, held)
                if loss > best:
                    break
            self._say(
                f"weight decay {decay:g}: held-out loss {loss / len(splits):.4f}"
            )
            if loss < WORTH * best:
                best = loss
                chosen = decay
        return chosen

    def _train(
        self, model: Model, rows: Rows, decay: float, **options: Any
    ) -> training.History:
        count = len(rows.x)
        features = model.net.features
        batches = max(1, min(8, count // TINY), count // 512)
        steps = STEPS * min(1.0, WIDE / features)
        if count < FEW:
            steps /= 2
        if (
            count <= TINY
        ):  # so that rounding does not tell a weight of two from two rows
            steps = min(steps, 60)
        epochs = max(10, round(steps / batches))
        recipe = {
            "epochs": epochs if self.epochs is None else self.epochs,
            "batch": -(-count // batches)
            if self.batch is None
            else self.batch,  # of equal size
            "learning_rate": self._rate(),
            "warmup": 0.2,
            "weight_decay": decay,
            "clip": 1.0,
            "solver": "joint",
            "ridge": RIDGE * decay if self.ridge is None else self.ridge,
            "smoothness": self.smoothness,
            "seed": self._seed + self.n_iter_,
            "progress": bool(self.verbose),
        }
        recipe |= options
        return training.fit(model, rows.x, rows.t, weight=rows.weight, **recipe)

    def _rate(self) -> float:
        if self.learning_rate is not None:
            return self.learning_rate
        return RATE * min(1.0, WIDE / self.model_.net.features) ** 0.5

    def _hold_out(
        self, rows: Rows, fraction: float, fold: int = 0
    ) -> tuple[Rows, Rows]:
        if not 0 < fraction < 1:
            raise OptionError(
                f"validation_fraction must be between 0 and 1, but got {fraction!r}."
            )
        labels = rows.t.numpy(force=True)
        numbers = _row_numbers(rows.x)
        if numbers.max() < TINY:
            numbers = np.arange(len(labels))
        first = np.unique(numbers, return_index=True)[1]
        _, apart = hold_out(
            labels[first],
            fraction,
            self._seed + fold,
            classes=not self.regression,
        )
        is_held = np.isin(numbers, apart)  # rows of equal inputs stay together
        train = np.flatnonzero(~is_held)
        held = np.flatnonzero(is_held)
        if not len(held):
            raise DataError(
                f"{len(labels)} samples are too few to hold out {fraction:g} of them; give more, "
                "or hold out a larger fraction."
            )
        return rows.take(train), rows.take(held)

    def _finish(self, rows: Rows) -> Self:
        self.n_iter_ += len(self.history_.loss)
        self.loss_curve_ = self.history_.loss
        self._sample = rows.x[:: -(-len(rows.x) // CERTIFIED)].cpu()
        self._certificate = None
        return self

    def _more(
        self, X: Any, y: Any, sample_weight: Any, classes: Any = None
    ) -> Self:
        """One epoch on these samples, from where the model is."""
        if not self.__sklearn_is_fitted__():
            rows = self._begin(X, y, sample_weight, classes)
        else:
            frame, y = self._check(X, y, reset=False)
            y, frame, weight = self._weighted(y, frame, sample_weight)
            rows = self._rows(frame, y, weight)
        decay = 0.0 if self.weight_decay is None else self.weight_decay
        options = {"epochs": 1, "schedule": "constant", "warmup": 0.0}
        self.history_ = self._train(self.model_, rows, decay, **options)
        return self._finish(rows)

    # Predicting

    @property
    def certificate_(self) -> analysis.Certificate:
        """What is promised of the gradients, and seen at some of the training samples."""
        check_is_fitted(self)
        if self._certificate is None:
            self._certificate = analysis.certify(
                self.model_, self._sample, points="training points"
            )
        return self._certificate

    def transform(self, X: Any) -> np.ndarray:
        """The features that the output layer sees, for a table X: (samples, features)."""
        return self._run("features", X)

    @torch.no_grad()
    def _run(self, method: str, X: Any) -> np.ndarray:
        """The outputs of a method of the model for a table X."""
        check_is_fitted(self)
        frame, _ = self._check(X, reset=False, learning=False)
        function = getattr(self.model_, method)
        chunks = [
            function(x).numpy(force=True)
            for x in self._inputs(frame).split(CHUNK)
        ]
        return np.concatenate(chunks)

    def _inputs(self, frame: pd.DataFrame) -> Tensor:
        inputs = self.encoder_.transform(frame)
        return torch.as_tensor(
            inputs, device=next(self.model_.parameters()).device
        )

    def _check(
        self, X: Any, y: Any = None, *, reset: bool, learning: bool = True
    ) -> tuple[pd.DataFrame, Any]:
        """X as a data frame with names of text, and y as an array."""
        if hasattr(X, "to_pandas"):
            X = X.to_pandas()
        if isinstance(X, pd.DataFrame):
            validate_data(self, X, reset=reset, skip_check_array=True)  # pyright: ignore[reportArgumentType]
            frame = X
        else:
            numeric = (
                hasattr(X, "toarray") or np.asarray(X).dtype.kind in "biufc"
            )
            X = validate_data(
                self,
                X,
                reset=reset,
                dtype=np.float64 if numeric else object,
                ensure_all_finite="allow-nan" if numeric else False,
                ensure_min_samples=2 if learning else 1,
            )
            frame = pd.DataFrame(X).infer_objects()
        frame = frame.set_axis([str(name) for name in frame.columns], axis=1)
        if not frame.columns.is_unique:
            raise DataError("X has two columns of the same name; rename them.")
        if learning:
            if y is None:
                raise DataError(
                    "fit requires y to be passed, but the target y is None."
                )
            y = self._check_target(y)
            check_consistent_length(frame, y)
        return frame, y

    def _say(self, *lines: str) -> None:
        if self.verbose:
            for line in lines:
                sys.stderr.write(f"{type(self).__name__}: {line}\n")

    @property
    def _n_features_out(self) -> int:
        return self.model_.net.features

    def __sklearn_is_fitted__(self) -> bool:
        return (
            getattr(self, "n_iter_", 0) > 0
        )  # not after a training that failed

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = self.missing == "fill"
        tags.input_tags.categorical = True
        return tags


@dataclass(eq=False, repr=False, kw_only=True)
class HDNNClassifier(ClassifierMixin, _Estimator):
    """A deep Hamiltonian network for two or more classes, as an estimator of scikit-learn.

    Columns are standardised and placed among zeros; the network's last state goes to a linear
    output layer. At every layer of the default network, at least one direction of the gradient is
    not shrunk, at any depth. Options are checked by `fit`.

    Args:
        network: "h1", "h2", "implicit_h2", "verlet", "yoshida4", "midpoint", "discrete_gradient",
            "ms1", "ms2", "ms3" or "mlp".
        layers: the number of layers.
        features: the width of the network; by default three times the inputs, but at least 16 and
            at most 24 more than the inputs.
        activation: one of `hdnn.activations`.
        T: the time that the layers span together. Not for "mlp".
        epochs: passes over the data; by default as many as make 800 steps, fewer for few rows and
            wide networks.
        batch: samples for each step; by default an eighth of them, 64 to 512.
        learning_rate: the largest rate; it rises for a fifth of the steps, then falls to zero.
        weight_decay: shrinks the model towards a linear one. By default held-out rows decide;
            a number is used as it is.
        ridge: penalty on the output layer; by default a tenth of the weight decay.
        smoothness: penalty on the differences between neighbouring layers.
        categorical: names, positions or a mask of columns whose numbers are categories; text is so
            by itself.
        missing: "fill" missing values by the median, with one more input that says where; or
            "refuse" them.
        early_stopping: end when the loss of held-out samples has stopped to fall, and go back to
            the best epoch.
        validation_fraction: of the samples, that early stopping holds out.
        n_iter_no_change: epochs without a lower loss after which early stopping ends.
        device: "cpu" or "cuda".
        random_state: seed of weights, held-out rows and order of samples.
        verbose: write what became of the columns, and how the training goes, to stderr.
        class_weight: None, "balanced", or a weight for each class as a dictionary.

    Attributes:
        classes_: the labels, in the order of probabilities.
        model_: the trained `hdnn.Model`.
        encoder_: what was learned of the columns, a `hdnn.data.tables.Encoder`.
        history_: loss and accuracy of each epoch, a `hdnn.training.History`.
        certificate_: what is promised of the gradients and holds at training samples.

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

    def partial_fit(
        self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None
    ) -> Self:
        """Learn one epoch more, on these samples, from where the model is.

        Args:
            X: a table (samples, columns).
            y: a label for each sample.
            classes: all labels; needed at the first call.
            sample_weight: a weight for each sample.
        """
        if self.class_weight == "balanced":
            raise OptionError(
                'class_weight="balanced" needs all samples at once; give a dictionary or None.'
            )
        if classes is None and not self.__sklearn_is_fitted__():
            raise DataError(
                "the first call of partial_fit needs classes: all labels."
            )
        return self._more(X, y, sample_weight, classes)

    def decision_function(self, X: Any) -> np.ndarray:
        """Scores (samples,) of two classes or (samples, classes), before they are probabilities."""
        scores = self._run("forward", X)
        return scores[:, 0] if len(self.classes_) == 2 else scores

    def predict_proba(self, X: Any) -> np.ndarray:
        """The probability of each class for each row of X, in the order of `classes_`."""
        return self._run("predict_proba", X)

    def predict(self, X: Any) -> np.ndarray:
        """The label of each row of X."""
        labels = self._run("predict", X)
        return self.classes_[labels]

    def _check_target(self, y: Any) -> np.ndarray:
        y = column_or_1d(y, warn=True)
        if pd.isna(y).any():
            raise DataError(
                "y has missing values (NaN); remove these rows or fill them in."
            )
        if y.dtype.kind in "fc" and not np.isfinite(y).all():
            raise DataError(
                "y has infinite values (inf); labels must be finite."
            )
        if (
            y.dtype.kind == "O"
            and len({isinstance(label, str) for label in y}) > 1
        ):
            raise DataError(
                "y has labels of text and others; make all of them text."
            )
        check_classification_targets(y)
        return y

    def _learn_target(self, y: np.ndarray, weight: Any, classes: Any) -> None:
        self.classes_ = np.unique(y if classes is None else classes)
        count = len(self.classes_)
        if count < 2:
            raise DataError(
                "a classifier needs at least 2 classes, but there is only one class: "
                f"{self.classes_[0]!r}."
            )

    def _encode_target(
        self, y: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray | None]:
        unknown = np.setdiff1d(y, self.classes_)
        if len(unknown):
            raise DataError(
                f"y has the labels {unknown}, which are not among the classes."
            )
        labels = np.searchsorted(self.classes_, y)
        return labels, class_weights(
            self.class_weight, labels, self.classes_.tolist()
        )

    def _head(self, features: int, **options: Any) -> Any:
        count = len(self.classes_)
        if count == 2:
            return SigmoidHead(features, **options)
        return SoftmaxHead(features, count, **options)


@dataclass(eq=False, repr=False, kw_only=True)
class HDNNRegressor(RegressorMixin, MultiOutputMixin, _Estimator):
    """A deep Hamiltonian network for one value or several, as an estimator of scikit-learn.

    Options and attributes are those of `HDNNClassifier`, without classes. Values are standardised
    inside, as columns are.

    Examples:
        >>> from hdnn import HDNNRegressor
        >>> from sklearn.datasets import load_diabetes
        >>> X, y = load_diabetes(return_X_y=True)
        >>> model = HDNNRegressor(random_state=0).fit(X, y)
        >>> bool(model.score(X, y) > 0.5), model.predict(X[:3]).shape
        (True, (3,))
    """

    regression: ClassVar[bool] = True

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Learn one epoch more, on these samples, from where the model is.

        Args:
            X: a table (samples, columns).
            y: values (samples,) or (samples, values).
            sample_weight: a weight for each sample.
        """
        return self._more(X, y, sample_weight)

    def predict(self, X: Any) -> np.ndarray:
        """The values for each row of X, in the shape of the y that was learned from."""
        values = self._run("predict", X) * self._scale + self._center
        return values[:, 0] if self._flat else values

    def _check_target(self, y: Any) -> np.ndarray:
        try:
            y = np.asarray(y, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"y must be numbers, but {error}; use HDNNClassifier for classes."
            ) from error
        if y.ndim not in (1, 2) or not np.isfinite(y).all():
            raise DataError(
                "y must be finite numbers (samples,) or (samples, values); it has missing values, "
                "NaN or infinity, or another shape."
            )
        return y

    def _learn_target(self, y: np.ndarray, weight: Any, classes: Any) -> None:
        self._flat = y.ndim == 1
        values = y.reshape(len(y), -1)
        self._center = np.average(values, axis=0, weights=weight)
        with np.errstate(over="ignore"):
            variance = np.average(
                np.square(values - self._center), axis=0, weights=weight
            )
        if not np.isfinite(variance).all():
            raise DataError("the numbers in y are too large; rescale them.")
        self._scale = np.where(variance > 0, np.sqrt(variance), 1.0)

    def _encode_target(self, y: np.ndarray) -> tuple[np.ndarray, None]:
        values = y.reshape(len(y), -1)
        if values.shape[1] != len(self._center):
            raise DataError(
                f"y has {values.shape[1]} values a sample, but {len(self._center)} before."
            )
        return (values - self._center) / self._scale, None

    def _head(self, features: int, **options: Any) -> Any:
        return RegressionHead(features, len(self._center), **options)


@torch.no_grad()
def _loss(model: Model, rows: Rows) -> float:
    head: Any = model.head
    y = torch.cat([model.features(x) for x in rows.x.split(CHUNK)])
    return evaluate(head, (y, rows.t, rows.weight)).loss


def _row_numbers(*columns: Tensor) -> np.ndarray:
    """Numbers of rows from 0, in the order they appear; equal rows have the same."""
    parts = [part.reshape(len(part), -1).numpy(force=True) for part in columns]
    frames = [pd.DataFrame(part) for part in parts]
    frame = pd.concat(frames, axis=1)
    keys = hash_pandas_object(frame, index=False)  # pyright: ignore[reportCallIssue]
    return pd.factorize(keys)[0]


def _folds(rows: int) -> int:
    """The number of splits into training rows and held-out rows."""
    return 2 if rows < 2 * FEW else 1


def _seed(random_state: Any) -> int:
    """A whole number is the seed itself; else it is drawn."""
    if isinstance(random_state, Integral) and not isinstance(
        random_state, bool
    ):
        check_random_state(int(random_state))
        return int(random_state)
    return int(check_random_state(random_state).randint(np.iinfo(np.int32).max))


def _names(categorical: Any, frame: pd.DataFrame) -> Sequence[str]:
    """Names of columns that were given by name, by position or by a mask."""
    if categorical is None:
        return ()
    names = np.array(frame.columns, object)
    try:
        chosen = np.asarray(categorical)
        if chosen.dtype.kind in "biu":
            return names[chosen].tolist()
        return [str(name) for name in chosen.tolist()]
    except (IndexError, TypeError) as error:
        raise OptionError(
            f"categorical must be names, positions or a mask of {len(names)} columns, but got "
            f"{categorical!r}."
        ) from error
