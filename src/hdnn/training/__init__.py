"""Training: one loop, its history and callbacks, checkpoints, and image training."""

from hdnn.training.callbacks import Callback as Callback  # the type of what `fit` calls
from hdnn.training.callbacks import EarlyStopping, History, Moment, TensorBoard, WellPosed
from hdnn.training.fit import Options, fit, fit_multilevel

__all__ = [
    "EarlyStopping",
    "History",
    "Moment",
    "Options",
    "TensorBoard",
    "WellPosed",
    "fit",
    "fit_multilevel",
]
