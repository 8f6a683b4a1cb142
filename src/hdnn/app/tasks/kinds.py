"""The task for each kind of config, and prediction and certificates for models of all kinds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hdnn import serialization
from hdnn.analysis import Certificate
from hdnn.analysis.certificate import SAMPLES
from hdnn.analysis.image_certificate import Certificates
from hdnn.app.configs.images import ImageConfig
from hdnn.app.configs.table import TableConfig
from hdnn.app.runs import Run
from hdnn.app.tasks import images, table
from hdnn.app.tasks.task import Task
from hdnn.errors import CheckpointError, OptionError
from hdnn.model import Model
from hdnn.models import ImageModel
from hdnn.networks import Network


def task_of(config: TableConfig | ImageConfig) -> Task:
    """The training that a config asks for."""
    if isinstance(config, ImageConfig):
        return images.ImageTask(config)
    return table.TableTask(config)


def load_model(run: Run) -> Model | Network | ImageModel:
    """The trained model of a run, on the CPU."""
    if not run.exists:
        run.config()  # raises: there is no run
    if not run.model_file.is_file():
        raise CheckpointError(
            f"the run in {run.folder} has no model yet; finish it by "
            f"hdnn train --resume --out {run.folder}."
        )
    return serialization.load(run.model_file)


def predict(run: Run, data: str, *, proba: bool = False) -> dict[str, Any]:
    """Predictions for all rows of a file, or for the test images of a set, by its name."""
    model = load_model(run)
    if isinstance(model, ImageModel):
        return images.predict(model, data, proba=proba)
    return table.predict(run, model, data, proba=proba)


def certify(
    checkpoint: str | os.PathLike[str], data: str | None = None, *, samples: int = SAMPLES
) -> Certificate | Certificates:
    """The certificate of a run, or of a saved model, at its own points or at those of a file."""
    if samples < 1:
        raise OptionError(f"samples must be a whole number >= 1, but got {samples}.")
    run = None if Path(checkpoint).is_file() else Run(checkpoint)
    model = serialization.load(checkpoint) if run is None else load_model(run)
    if isinstance(model, ImageModel):
        name = data if run is None or data is not None else run.config().data
        return images.certify(model, name, samples=samples)
    return table.certify(model, run, data, samples=samples)
