"""For scikit-learn: a classifier and a regressor for tables with numbers, text and gaps.

Held-out rows choose between a linear model, which is solved for, and networks with weaker and
weaker weight decay; they also decide how much to shrink the scores towards a constant's.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from hdnn import analysis, training
from hdnn.data.tables import MANY, Encoder, class_weights, hold_out
from hdnn.errors import DataError, OptionError, choose, require
from hdnn.heads import (
    Augment,
    Model,
    RegressionHead,
    SigmoidHead,
    SoftmaxHead,
    roomy_width,
)
from hdnn.io import new_tensor
from hdnn.networks import BY_NAME

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
from sklearn.decomposition import PCA  # noqa: E402
from sklearn.linear_model import LogisticRegression, Ridge  # noqa: E402
from sklearn.preprocessing import StandardScaler  # noqa: E402
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

PENALTIES = (1e2, 1e1, 1.0, 1e-1, 1e-2, 1e-3, 1e-4)  # of linear models
DECAYS = (2e-2, 5e-3, 7e-4)  # of networks, from strong to weak
SCALES = np.linspace(0, 1, 21).tolist()
# A more flexible model must lower the held-out loss by this factor,
WORTH = 0.99
# and where it raises the loss by this one, even more flexible ones are not tried.
WORSE = 1.05
HELD_OUT = 0.2
FEW = (300, 600)  # below so many rows, they are held out in more ways
SEARCHED = 10_000  # rows that the choice uses, at most
MERGED = 100_000  # up to so many rows, repeated rows become one with a weight
LEAST = 3  # epochs
SCORES = 2**21  # of a minibatch, at most: rows times classes
INPUTS = 64  # of a network, at most: more columns are projected, or
BEST = (64, 16)  # so many used, those that tell most by themselves
STEPS = 1600  # of the optimiser; fewer for few rows and wide networks
TRIED = 0.5  # share of the steps, in training that only judges a weight decay
SURE = 0.7  # the scale of scores from which longer training does no harm
WIDE = 32  # features
RATE = 1.5e-2
RIDGE = 0.1  # of the weight decay
GAIN = 1.5  # of the initial weights: smaller ones wait long at the identity
FAINT = 1e-3  # of those of a linear model, which can still learn more
CHUNK = 2**16  # rows that run through the network at once
CERTIFIED = 100  # training rows in a certificate
CURVED = ("mlp", "ms1", "ms2")  # not linear, however small their weights are


class Rows(NamedTuple):
    """Inputs, targets and weights (None: all alike)."""

    x: Tensor
    t: Tensor
    weight: Tensor | None

    @property
    def share(self) -> Tensor:
        """The weight of each row in a mean."""
        weight = self.weight
        if weight is None:
            weight = torch.ones(len(self.x)).to(self.x)
        return weight / weight.sum()

    def along(self, directions: Tensor | None) -> Rows:
        """The rows projected on these directions `(inputs, fewer)`; None for all inputs."""
        if directions is None:
            return self
        return self._replace(x=self.x @ directions)

    def take(self, index: Any) -> Rows:
        index = torch.as_tensor(index, device=self.x.device)
        weight = self.weight
        if weight is not None:
            weight = weight[index]
        return Rows(self.x[index], self.t[index], weight)


class Choice(NamedTuple):
    """A choice of model and options that held-out rows made.

    Attributes:
        loss: the loss on the held-out rows.
        columns: the number of inputs that are used, the most informative ones; 0 for all.
        penalty: the penalty of the linear model, for each row.
        decay: the weight decay of the network; None if the linear model is better.
        scale: the factor of the scores' difference from the scores of a constant.
    """

    loss: float = np.inf
    columns: int = 0
    penalty: float = 0.1
    decay: float | None = None
    scale: float = 1.0


@dataclass(eq=False, repr=False, kw_only=True)
class _Estimator(
    ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator
):
    """The options, training and inputs that classifier and regressor share."""

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
    # Learning

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fit the model to a table, starting from scratch.

        Args:
            X: a table (samples, columns): an array, or a data frame with numbers, text and gaps.
            y: labels of any type, or for regression values (samples,) or (samples, values).
            sample_weight: a weight for each sample. Only ratios matter: a sample with weight 0
                counts as absent, one with weight 2 counts twice.

        Returns:
            The estimator itself.

        Raises:
            DataError: if X and y cannot be learned from, for example if there is only one class.
            OptionError: if an option is out of range.
        """
        rows = self._read(X, y, sample_weight)
        choice = self._choose(rows)
        rows = self._model_for(rows, choice)
        options: dict[str, Any] = {}
        if self.early_stopping:
            rows, held = self._hold_out(rows, self.validation_fraction)
            options = {"validation": held, "patience": self.n_iter_no_change}
        self.history_ = self._train(self.model_, rows, choice, **options)
        return self._finish(rows)

    def _read(
        self,
        X: Any,
        y: Any,
        sample_weight: Any,
        classes: Any = None,
        reset: bool = True,
    ) -> Rows:
        """The rows to learn from; `reset` learns columns and targets first."""
        frame = self._frame(X, reset)
        if y is None:
            raise DataError(
                "fit requires y to be passed, but the target y is None."
            )
        own: Any = self  # classifier and regressor differ in their targets
        y = own._check_target(y)
        check_consistent_length(frame, y)
        weight = None
        if sample_weight is not None:
            weight = _check_sample_weight(
                sample_weight, frame, dtype=np.float64
            )
            if weight.min() < 0 or not weight.any():
                raise DataError(
                    "sample_weight must be >= 0, and not 0 for all samples."
                )
            present = np.flatnonzero(weight)
            frame = frame.iloc[present]
            y = y[present]
            weight = weight[present]
            if np.ptp(weight) == 0:
                weight = None
        if reset:
            categorical = _names(self.categorical, frame)
            encoder = self.encoder_ = Encoder.fit(
                frame,
                categorical=categorical,
                missing=self.missing,
                weight=weight,
            )
            self._say(*encoder.notes)
            self._begin(y if classes is None else classes, weight)
        return self._rows(self._inputs(frame), y, weight)

    def _begin(self, y: np.ndarray, weight: Any = None) -> None:
        """Learn the classes or the scale of the targets, and reset everything else."""
        own: Any = self
        self._outputs = own._learn_target(y, weight)
        self._seed = _seed(self.random_state)
        self.n_iter_ = 0

    def _rows(self, x: Tensor, y: np.ndarray, weight: Any = None) -> Rows:
        """The rows to learn from; if there are few rows, equal rows are merged."""
        own: Any = self
        t, factor = own._encode_target(y)
        if factor is not None:
            weight = factor if weight is None else weight * factor
        t = torch.as_tensor(t, device=self.device)
        rows = Rows(x.to(self.device), t, None)
        if len(x) <= MERGED:
            number, first = _row_numbers(rows.x, rows.t)
            rows = rows.take(first)
            weight = np.bincount(number, weight)
        if weight is None or np.ptp(weight) == 0:
            return rows
        mean_one = torch.as_tensor(weight / weight.mean())
        return rows._replace(weight=mean_one.to(rows.x))

    # The choice

    def _choose(self, rows: Rows) -> Choice:
        """The choice with the lowest loss on held-out rows."""
        wide = rows.x.shape[1] > INPUTS
        if self.weight_decay is not None and not wide:
            return Choice(decay=self.weight_decay)
        folds = self._folds(rows)
        if not folds:
            return Choice(decay=self.weight_decay or DECAYS[0])
        best = min(
            self._judged(folds, Choice(columns=columns, penalty=penalty))
            for columns in (0, *BEST)[: 3 if wide else 1]
            for penalty in PENALTIES
        )
        if self.weight_decay is not None:
            return best._replace(decay=self.weight_decay, scale=1.0)
        if self.epochs is not None or self.network in CURVED:
            best = best._replace(loss=np.inf)
        for decay in DECAYS:
            choice = self._judged(folds, best._replace(decay=decay))
            if choice.loss > WORSE * best.loss:
                break
            if choice.loss < WORTH * best.loss:
                best = choice
        return best

    def _folds(self, rows: Rows) -> list[tuple[Rows, Rows, Tensor]]:
        """Rows to train on, rows to hold out and a constant's scores; empty for too few rows."""
        size = len(rows.x)
        if size > SEARCHED:
            labels = rows.t.numpy(force=True)
            unseen = 1 - SEARCHED / size
            seen, _ = hold_out(
                labels, unseen, self._seed, classes=not self.regression
            )
            rows = rows.take(seen)
        count = 1 + sum(size < limit for limit in FEW)
        try:
            halves = [self._hold_out(rows, HELD_OUT, k) for k in range(count)]
        except DataError:
            return []
        return [(train, held, _constant(train)) for train, held in halves]

    def _judged(self, folds: Sequence[Any], choice: Choice) -> Choice:
        """A choice with its held-out loss, at the scale where that loss is lowest."""
        losses = np.zeros(len(SCALES))
        choice = choice._replace(scale=1.0)
        for train, held, constant in folds:
            D, model = self._view(train, choice)
            train = train.along(D)
            held = held.along(D)
            if choice.decay is not None:
                model = self._new_model(train.x.shape[1])
                self._train(model, train, choice, TRIED)
            scores = model(held.x).detach()
            for k, scale in enumerate(SCALES):
                shrunk = constant.lerp(scores, scale)
                losses[k] += _loss(shrunk, held) / len(folds)
        best = int(losses.argmin())
        loss = losses[best]
        scale = SCALES[best]
        model = f"linear model, penalty {choice.penalty:g}"
        if choice.decay is not None:
            model = f"network, weight decay {choice.decay:g}"
        self._say(
            f"{choice.columns or 'all'} inputs, {model}, scores times {scale:.2f}: held-out loss "
            f"{loss:.4f}"
        )
        return choice._replace(loss=loss, scale=scale)

    # The model

    def _model_for(self, rows: Rows, choice: Choice) -> Rows:
        """Make a new model (a linear model is solved at once); return the rows as its inputs."""
        D, linear = self._view(rows, choice)
        if D is not None:
            self.encoder_.directions = D.T.tolist()
        rows = rows.along(D)
        gain = FAINT if choice.decay is None else GAIN
        model = self.model_ = self._new_model(rows.x.shape[1], gain)
        if choice.decay is None:
            head: Any = model.head
            augment: Any = model.augment
            head.weight.data.zero_()
            head.weight.data[:, augment.positions] = linear.weight
            head.bias.data.copy_(linear.bias)
        return rows

    def _view(self, rows: Rows, choice: Choice) -> tuple[Tensor | None, Any]:
        """The directions `(inputs, fewer)` in which a table is seen, and a linear model of these.

        None means all inputs, if there are few. With many inputs, the directions are the inputs
        that tell most about the target, or the scores of the linear model of all inputs and, for a
        network, principal components. A network needs no linear model.
        """
        x = rows.x
        penalty = choice.penalty
        is_linear = choice.decay is None
        D = None
        if choice.columns:
            told = _linear(rows, PENALTIES[0]).weight.norm(dim=0)
            best = told.topk(choice.columns).indices
            D = torch.eye(len(told)).to(x)[:, best]
        elif x.shape[1] > INPUTS and self._outputs > INPUTS:
            D = self._components(x, INPUTS)
        elif x.shape[1] > INPUTS:
            linear = _linear(rows, penalty)
            spread = linear(x).std(0).clamp_min(1e-6)
            D = linear.weight.T / spread
            if is_linear:
                linear.weight.data = spread.diag()
                return D, linear
            more = self._components(x, INPUTS - self._outputs // 2)
            D = torch.cat([D, more], 1)
        linear = _linear(rows.along(D), penalty) if is_linear else None
        return D, linear

    def _components(self, x: Tensor, count: int) -> Tensor:
        """Principal components, the smaller ones enlarged by half."""
        rows = len(x)
        count = min(count, max(8, rows // 4), rows)
        pca: Any = PCA(count, random_state=self._seed)
        pca.fit(x.numpy(force=True))
        values = pca.singular_values_
        sizes = np.sqrt(values * values.mean() / rows)
        present = sizes > 0
        components = pca.components_[present] / sizes[present, None]
        return torch.as_tensor(components.T).to(x)

    def _new_model(self, inputs: int, gain: float = GAIN) -> Model:
        options: dict[str, Any] = {
            "generator": torch.Generator().manual_seed(self._seed),
            "dtype": torch.float32,
            "device": self.device,
        }
        features = self.features or roomy_width(inputs)
        augment = Augment(inputs, features).to(self.device)
        kind = BY_NAME[choose("network", self.network, BY_NAME)]
        own: dict[str, Any] = {"activation": self.activation}
        if self.network != "mlp":
            own["T"] = self.T
        net = kind(features, self.layers, **own, **options)
        if self.network != "mlp":
            for name, parameter in net.named_parameters():
                if name.startswith("K"):
                    parameter.data *= gain
        if self.regression:
            head = RegressionHead(features, self._outputs, **options)
        elif self._outputs == 1:
            head = SigmoidHead(features, **options)
        else:
            head = SoftmaxHead(features, self._outputs, **options)
        return Model(augment, net, head)

    def _train(
        self,
        model: Model,
        rows: Rows,
        choice: Choice,
        share: float = 1.0,
        **options: Any,
    ) -> training.History:
        """Train the model that the held-out rows chose, for a share of the steps.

        If its scores had to be shrunk, it is trained no longer than when it was judged.
        """
        if choice.scale < SURE:
            share = TRIED
        head = model.head
        x = rows.x.to(head.weight.dtype)
        if choice.decay is None:
            loss = _loss(model(x).detach(), rows)
            history = training.History([loss], [np.nan], [0.0], [0.0], [0.0])
        else:
            recipe = self._recipe(model, rows, choice.decay, share) | options
            history = training.fit(
                model, x, rows.t, weight=rows.weight, **recipe
            )
        if choice.scale < 1:
            head.weight.data *= choice.scale
            bias = head.bias.data
            constant = _constant(rows).to(bias)
            head.bias.data = constant.lerp(bias, choice.scale)
        return history

    def _recipe(
        self, model: Model, rows: Rows, decay: float, share: float
    ) -> dict[str, Any]:
        """The options of training; the estimator's options take precedence."""
        count = len(rows.x)
        head: Any = model.head
        narrow = min(1.0, WIDE / head.features)
        few = min(8, count // 64)
        many = max(count // 512, count * head.outputs // SCORES)
        batches = max(1, few, many)
        steps = max(60, 2 * count)
        steps = share * narrow * min(STEPS, steps)
        recipe: dict[str, Any] = {
            "epochs": max(LEAST, round(steps / batches)),
            "batch": -(-count // batches),  # all of equal size
            "learning_rate": RATE * narrow**0.5,
            "warmup": 0.2,
            "weight_decay": decay,
            "clip": 1.0,
            "solver": "joint",
            "ridge": RIDGE * decay,
            "smoothness": self.smoothness,
            "seed": self._seed + self.n_iter_,
            "progress": bool(self.verbose),
        }
        for name in ("epochs", "batch", "learning_rate", "ridge"):
            value = getattr(self, name)
            if value is not None:
                recipe[name] = value
        return recipe

    def _hold_out(
        self, rows: Rows, fraction: float, fold: int = 0
    ) -> tuple[Rows, Rows]:
        """Rows to train on and to hold out; rows with equal inputs are kept together."""
        if not 0 < fraction < 1:
            raise OptionError(
                f"validation_fraction must be between 0 and 1, but got {fraction!r}."
            )
        number, first = _row_numbers(rows.x)
        if len(first) < 10:
            number = first = np.arange(len(rows.x))
        labels = rows.t.numpy(force=True)[first]
        _, apart = hold_out(
            labels, fraction, self._seed + fold, classes=not self.regression
        )
        is_held = np.isin(number, apart)
        if not is_held.any():
            raise DataError(
                f"{len(labels)} samples are too few to hold out {fraction:g} of them; provide "
                "more, or hold out a larger fraction."
            )
        return rows.take(~is_held), rows.take(is_held)

    def _finish(self, rows: Rows) -> Self:
        self.model_.double()
        self.n_iter_ += len(self.history_.loss)
        self.loss_curve_ = self.history_.loss
        step = 1 + (len(rows.x) - 1) // CERTIFIED
        self._sample = rows.x[::step].cpu().double()
        return self

    def _more(
        self, X: Any, y: Any, sample_weight: Any, classes: Any = None
    ) -> Self:
        """Train the present model for one more epoch on these samples."""
        is_new = not self.__sklearn_is_fitted__()
        rows = self._read(X, y, sample_weight, classes, is_new)
        if is_new:
            rows = self._model_for(rows, Choice(decay=0.0))
        choice = Choice(decay=self.weight_decay or 0.0)
        options = {"epochs": 1, "schedule": "constant", "warmup": 0.0}
        self.history_ = self._train(self.model_, rows, choice, **options)
        return self._finish(rows)

    # Predicting

    @property
    def certificate_(self) -> analysis.Certificate:
        """The certificate of the model's gradients at some of the training samples."""
        check_is_fitted(self)
        return analysis.certify(
            self.model_, self._sample, points="training points"
        )

    def transform(self, X: Any) -> np.ndarray:
        """The inputs of the output layer for a table X: (samples, features)."""
        return self._run("features", X)

    @torch.no_grad()
    def _run(self, method: str, X: Any) -> np.ndarray:
        """The outputs of a method of the model for a table X."""
        check_is_fitted(self)
        inputs = self._inputs(self._frame(X, reset=False)).double()
        function = getattr(self.model_, method)
        chunks = [function(x) for x in inputs.split(CHUNK)]
        return torch.cat(chunks).numpy(force=True)

    def _inputs(self, frame: pd.DataFrame) -> Tensor:
        device = new_tensor(None, self.device).device
        inputs = self.encoder_.transform(frame, "float32")
        return torch.as_tensor(inputs, device=device)

    def _frame(self, X: Any, reset: bool) -> pd.DataFrame:
        """X as a data frame whose column names are strings."""
        if isinstance(X, pd.DataFrame):
            validate_data(self, X, reset=reset, skip_check_array=True)  # pyright: ignore[reportArgumentType]
        else:
            numeric = (
                hasattr(X, "toarray") or np.asarray(X).dtype.kind in "biufc"
            )
            X = validate_data(
                self,
                X,
                reset=reset,
                dtype=np.float64 if numeric else object,
                ensure_all_finite="allow-nan",
                ensure_min_samples=1 + reset,
            )
            X = pd.DataFrame(X).infer_objects()
        frame = X.rename(columns=str)
        if not frame.columns.is_unique:
            raise DataError("X has two columns of the same name; rename them.")
        return frame

    def _say(self, *lines: str) -> None:
        if self.verbose:
            for line in lines:
                sys.stderr.write(f"{type(self).__name__}: {line}\n")

    @property
    def _n_features_out(self) -> int:
        return self.model_.net.features

    def __sklearn_is_fitted__(self) -> bool:
        # Not after training that failed.
        return getattr(self, "n_iter_", 0) > 0

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = self.missing == "fill"
        tags.input_tags.categorical = True
        return tags


@dataclass(eq=False, repr=False, kw_only=True)
class HDNNClassifier(ClassifierMixin, _Estimator):
    """A deep Hamiltonian network for two or more classes, as a scikit-learn estimator.

    Columns are standardised and padded with zeros; the network's last state goes to a linear output
    layer. At every layer of the default network, at any depth, at least one direction of the
    gradient is not shrunk. `fit` checks the options.

    Args:
        network: "h1", "h2", "implicit_h2", "verlet", "yoshida4", "midpoint", "discrete_gradient",
            "ms1", "ms2", "ms3" or "mlp".
        layers: the number of layers.
        features: the width of the network; by default three times the inputs, but at least 16 and
            at most 24 more than the inputs.
        activation: one of `hdnn.activations`.
        T: the time that all layers span. Not for "mlp".
        epochs: the number of passes over the data; a given number always trains a network. By
            default enough for 1,600 steps, fewer for few rows and wide networks, and a linear model
            may be chosen instead.
        batch: the number of samples for each step; by default an eighth of all, 64 to 512.
        learning_rate: the largest learning rate, which is reached after a fifth of the steps; the
            rate then falls to zero.
        weight_decay: the penalty that shrinks the model towards a linear one; by default chosen
            with held-out rows.
        ridge: the penalty on the output layer; by default a tenth of the weight decay.
        smoothness: the penalty on the differences between neighbouring layers.
        categorical: names, positions or a mask of columns whose numbers are categories; text
            columns always are.
        missing: "fill" missing values with the median and mark them in an extra input, or "refuse"
            them.
        early_stopping: stop when the loss on held-out samples no longer falls, and restore the
            model of the best epoch.
        validation_fraction: the fraction of the samples that early stopping holds out.
        n_iter_no_change: the number of epochs without a lower loss after which training stops
            early.
        device: "cpu" or "cuda".
        random_state: the seed for weights, held-out rows and the order of samples.
        verbose: report to stderr how columns are used and how training progresses.
        class_weight: None, "balanced", or a weight for each class as a dictionary.

    Attributes:
        classes_: the labels, in the order of the probabilities.
        model_: the trained `hdnn.Model`.
        encoder_: the encoding of the columns, a `hdnn.data.tables.Encoder`.
        history_: the loss and accuracy of each epoch, a `hdnn.training.History`.
        certificate_: the guarantee for the gradients, checked at training samples.

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
        """Train the present model for one more epoch, on these samples.

        Args:
            X: a table (samples, columns).
            y: a label for each sample.
            classes: all labels; needed in the first call.
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
        """Scores before probabilities: (samples,) for two classes, or (samples, classes)."""
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
        if pd.isna(y).any() or np.isin(y, (np.inf, -np.inf)).any():
            raise DataError(
                "y has missing or infinite values (NaN, inf); remove these rows or fill them in."
            )
        is_text = {isinstance(label, str) for label in y}
        if len(is_text) > 1:
            raise DataError(
                "y mixes text labels with others; convert all labels to text."
            )
        check_classification_targets(y)
        return y

    def _learn_target(self, y: Any, weight: Any) -> int:
        self.classes_ = np.unique(y)
        count = len(self.classes_)
        if count < 2:
            raise DataError(
                "a classifier needs at least 2 classes, but there is only one class: "
                f"{self.classes_[0]!r}."
            )
        if count > MANY:
            raise DataError(
                f"y has {count} classes, such as {self.classes_.tolist()[0]!r}, but at most {MANY} "
                "are supported; merge rare classes, or use HDNNRegressor for values."
            )
        return 1 if count == 2 else count

    def _encode_target(
        self, y: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray | None]:
        labels = pd.Index(self.classes_).get_indexer(y)
        if labels.min() < 0:
            unknown = y[labels.argmin()]
            raise DataError(
                f"y has the label {unknown!r}, which is not among the classes."
            )
        names = self.classes_.tolist()
        return labels, class_weights(self.class_weight, labels, names)


@dataclass(eq=False, repr=False, kw_only=True)
class HDNNRegressor(RegressorMixin, MultiOutputMixin, _Estimator):
    """A deep Hamiltonian network for one or several values, as a scikit-learn estimator.

    Options and attributes are those of `HDNNClassifier`, except those about classes. Values are
    standardised internally, like columns.

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
        """Train the present model for one more epoch, on these samples.

        Args:
            X: a table (samples, columns).
            y: values (samples,) or (samples, values).
            sample_weight: a weight for each sample.
        """
        return self._more(X, y, sample_weight)

    def predict(self, X: Any) -> np.ndarray:
        """The values for each row of X, shaped like the y passed to `fit`."""
        outputs = self._run("predict", X)
        values = self._scaler.inverse_transform(outputs)
        return values[:, 0] if self._flat else values

    def _check_target(self, y: Any) -> np.ndarray:
        try:
            y = np.asarray(y, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"y must be numbers, but {error}; use HDNNClassifier for classes."
            ) from error
        is_finite = np.isfinite(y).all()
        if not is_finite or y.ndim not in (1, 2):
            raise DataError(
                "y must be finite numbers (samples,) or (samples, values); it has NaN or infinite "
                "values, or a different shape."
            )
        return y

    def _learn_target(self, y: np.ndarray, weight: Any) -> int:
        self._flat = y.ndim == 1
        values = y.reshape(len(y), -1)
        with np.errstate(over="ignore", invalid="ignore"):
            self._scaler: Any = StandardScaler().fit(values, None, weight)
        if not np.isfinite(self._scaler.scale_).all():
            raise DataError("the numbers in y are too large; rescale them.")
        return values.shape[1]

    def _encode_target(self, y: np.ndarray) -> tuple[np.ndarray, None]:
        values = y.reshape(len(y), -1)
        t = self._scaler.transform(values)
        return t.astype(np.float32), None


def _loss(scores: Tensor, rows: Rows) -> float:
    """The weighted mean loss of rows; targets are values or class labels."""
    t = rows.t
    if t.is_floating_point():
        losses = (scores - t).square().mean(1)
    elif scores.shape[1] > 1:
        losses = F.cross_entropy(scores, t, reduction="none")
    else:
        losses = F.softplus(scores[:, 0] * (1 - 2 * t))
    return float(losses @ rows.share)


def _constant(rows: Rows) -> Tensor:
    """The scores with the lowest loss among scores that are the same for all rows."""
    nothing = torch.zeros(len(rows.x), 1).to(rows.x)
    return _linear(rows._replace(x=nothing), 1.0).bias


def _linear(rows: Rows, penalty: float) -> torch.nn.Linear:
    """The linear model with the lowest loss, as a layer."""
    x = rows.x.double().numpy(force=True)
    share = rows.share.double().numpy(force=True)
    basis = None
    if x.shape[1] > len(x):  # the same problem with as many unknowns as rows
        basis, R = np.linalg.qr(x.T)
        x = R.T
    t = rows.t.numpy(force=True)
    model: Any = LogisticRegression(C=1 / penalty, max_iter=200)
    if rows.t.is_floating_point():
        model = Ridge(penalty)
    with warnings.catch_warnings():
        # Too few iterations of the solver.
        warnings.simplefilter("ignore")
        model.fit(x, t, share)
    W = np.atleast_2d(model.coef_)
    if basis is not None:
        W = W @ basis.T
    bias = np.ravel(model.intercept_)
    outputs, inputs = W.shape
    layer = torch.nn.Linear(inputs, outputs).requires_grad_(False)
    layer.weight.copy_(torch.as_tensor(W))
    layer.bias.copy_(torch.as_tensor(bias))
    return layer.to(rows.x)


def _row_numbers(*columns: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The number of each row, where equal rows share one, and the first row of each number.

    Numbers follow from the values alone, so that the order of the rows does not matter.
    """
    flat = [t.reshape(len(t), -1).double() for t in columns]
    frame = pd.DataFrame(torch.cat(flat, 1).numpy(force=True))
    keys = hash_pandas_object(frame, index=False)  # pyright: ignore[reportCallIssue]
    _, first, number = np.unique(
        keys.to_numpy(), return_index=True, return_inverse=True
    )
    return number, first


def _seed(random_state: Any) -> int:
    """The seed: a whole number as it is, otherwise a drawn number."""
    random = check_random_state(random_state)
    if isinstance(random_state, Integral):
        return int(random_state)
    return int(random.randint(2**31 - 1))


def _names(categorical: Any, frame: pd.DataFrame) -> Sequence[str]:
    """The names of columns given by name, by position or by a mask."""
    if categorical is None:
        return ()
    try:
        chosen = np.asarray(categorical)
        if chosen.dtype.kind in "biu":
            return frame.columns[chosen].tolist()
        return chosen.astype(str).tolist()
    except IndexError as error:
        raise OptionError(
            f"categorical must be names, positions or a mask of {len(frame.columns)} columns, but "
            f"got {categorical!r}."
        ) from error
