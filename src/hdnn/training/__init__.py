"""Training: coordinate descent between the output layer and the hidden layers."""

from hdnn.training.callbacks import EarlyStopping, TensorBoard, WellPosed
from hdnn.training.loop import Callback, History, Moment, fit
from hdnn.training.multilevel import fit_multilevel

__all__ = [
    "Callback",
    "EarlyStopping",
    "History",
    "Moment",
    "TensorBoard",
    "WellPosed",
    "fit",
    "fit_multilevel",
]
