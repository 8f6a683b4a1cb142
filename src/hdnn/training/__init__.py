"""Training: one loop, its history and callbacks, checkpoints, and image training."""

from hdnn.training.callbacks import Callback as Callback
from hdnn.training.callbacks import (
    EarlyStopping,
    History,
    Moment,
    TensorBoard,
    WellPosed,
)
from hdnn.training.fit import Options, fit
from hdnn.training.images import fit_images
from hdnn.training.recipes import ImageRecipe

__all__ = [
    "EarlyStopping",
    "History",
    "ImageRecipe",
    "Moment",
    "Options",
    "TensorBoard",
    "WellPosed",
    "fit",
    "fit_images",
]
