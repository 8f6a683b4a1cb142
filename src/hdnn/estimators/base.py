"""What the classifier and the regressor share: they build, train and run a model for a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from hdnn import analysis, training
from hdnn.errors import DataError, as_float, choose, positive_int, require
from hdnn.heads import Augment, LinearHead
from hdnn.model import Model
from hdnn.networks import BY_NAME, HamiltonianNet, Network
from hdnn.serialization import describe, restore, weights
from hdnn.training import History
from hdnn.training.table_recipe import share, solver_of, width

try:
    from sklearn.base import (
        BaseEstimator,
        ClassNamePrefixFeaturesOutMixin,
        TransformerMixin,
    )
    from sklearn.preprocessing import StandardScaler
    from sklearn.utils import check_random_state
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
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


class HDNNEstimator(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """A model for numbers in a table; classifier and regressor differ in their targets only."""

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
        factory: dict[str, Any] = {
            "generator": torch.Generator().manual_seed(self._seed),
            "dtype": torch.float64,
            "device": self.device,
        }
        n = width(inputs) if self.features is None else positive_int("features", self.features)
        kind = choose("network", self.network, NETWORKS)
        options: dict[str, Any] = {"activation": self.activation, **factory}
        if kind != "mlp":
            options |= {"T": plain(self.T), "engine": self.engine}
        net = NETWORKS[kind](n, plain(self.layers), **options)
        augment = Augment(inputs, n).to(self.device)
        self.model_ = Model(augment, net, self._head(n, outputs, factory))
        self.scaler_ = StandardScaler()
        self.history_, self.n_iter_ = History(), 0

    def _learn(self, X: np.ndarray, t: Any, weight: np.ndarray | None, **options: Any) -> Self:
        """Train the model, or go on training it."""
        x = self._inputs(X)
        if weight is not None:
            options["weight"] = torch.tensor(weight, dtype=x.dtype, device=x.device)
        for name in ("batch", "learning_rate", "smoothness"):
            options[name] = plain(getattr(self, name))
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
        """A penalty as `fit` takes it; what is not a number is passed on, for `fit` to refuse."""
        given, rows = plain(getattr(self, name)), float(np.max(self.scaler_.n_samples_seen_))
        number = as_float(given)
        return given if number is None else share(number, rows)

    def _whole(self, X: np.ndarray, t: Any, weight: np.ndarray | None) -> Self:
        """All epochs of `fit`."""
        head, batch = self.model_.head, positive_int("batch", self.batch)
        solver = solver_of(self.solver, batch=batch, features=head.features, outputs=head.outputs)
        return self._learn(X, t, weight, epochs=plain(self.epochs), solver=solver)

    def _once(self, X: np.ndarray, t: Any, weight: np.ndarray | None) -> Self:
        """The one epoch of `partial_fit`: solving the output layer would forget earlier data."""
        return self._learn(X, t, weight, epochs=1, solver="joint", schedule="constant")

    def _head(self, features: int, outputs: int, factory: dict[str, Any]) -> LinearHead:
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


def plain(value: Any) -> Any:
    """A NumPy number, such as from a parameter grid, as a Python number."""
    return value.item() if isinstance(value, np.generic) else value


def sample_weights(given: Any, X: np.ndarray) -> np.ndarray | None:
    """The weight of each sample, checked; None where all count alike."""
    if given is None:
        return None
    if not np.asarray(given).any():
        raise DataError("sample_weight is zero for all samples: there is nothing to learn from.")
    return _check_sample_weight(given, X, dtype=np.float64, ensure_non_negative=True)


def standardise(
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
