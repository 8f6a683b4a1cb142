"""Training on images: the whole set on the device, one step as one CUDA graph."""

from hdnn.training.images.recipe import OPTIMIZERS, ImageRecipe
from hdnn.training.images.trainings import (
    EVALUATED,
    WARM,
    ImageHistory,
    ImageTraining,
    next_epoch,
    run_together,
)

__all__ = [
    "EVALUATED",
    "OPTIMIZERS",
    "WARM",
    "ImageHistory",
    "ImageRecipe",
    "ImageTraining",
    "next_epoch",
    "run_together",
]
