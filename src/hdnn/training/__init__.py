"""Training: one loop, its history and callbacks, checkpoints, and image training."""

from hdnn.training.callbacks import (
    Callback as Callback,
)  # the type of what `fit` calls
from hdnn.training.callbacks import (
    EarlyStopping,
    History,
    Moment,
    TensorBoard,
    WellPosed,
)
from hdnn.training.fit import Options, fit
from hdnn.training.images import fit_images
from hdnn.training.parallel import DataParallel, Group
from hdnn.training.recipes import ImageRecipe

__all__ = [
    "DataParallel",
    "EarlyStopping",
    "Group",
    "History",
    "ImageRecipe",
    "Moment",
    "Options",
    "TensorBoard",
    "WellPosed",
    "fit",
    "fit_images",
]
