"""Training: coordinate descent between the output layer and the hidden layers."""

from hdnn.training.callbacks import EarlyStopping, TensorBoard, WellPosed
from hdnn.training.history import Callback as Callback  # the type of what `fit` calls
from hdnn.training.history import History, Moment
from hdnn.training.loop import fit
from hdnn.training.multilevel import fit_multilevel

__all__ = [
    "EarlyStopping",
    "History",
    "Moment",
    "TensorBoard",
    "WellPosed",
    "fit",
    "fit_multilevel",
]
