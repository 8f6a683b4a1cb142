"""Training on images: the whole set on the device, one step as one CUDA graph."""

from hdnn.training.images.recipe import OPTIMIZERS as OPTIMIZERS
from hdnn.training.images.recipe import ImageRecipe
from hdnn.training.images.trainings import EVALUATED as EVALUATED
from hdnn.training.images.trainings import WARM as WARM
from hdnn.training.images.trainings import (
    ImageHistory,
    ImageTraining,
    next_epoch,
    run_together,
)

__all__ = [
    "ImageHistory",
    "ImageRecipe",
    "ImageTraining",
    "next_epoch",
    "run_together",
]
