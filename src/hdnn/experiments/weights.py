"""Networks of the image tables and their trained weights: one safetensors file for each network.

The file is the plain `state_dict`; its metadata has the job that made it as JSON, so that the
network can be built again.
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from safetensors.torch import save as to_safetensors
from torch import nn

from hdnn.base import tensorfile
from hdnn.base.files import as_path, write_atomically
from hdnn.errors import CheckpointError
from hdnn.experiments.runner import Job
from hdnn.models import ImageModel
from hdnn.training.images import recipes as image_recipes

KEY = "job"


def network(job: Job) -> ImageModel:
    """The network of a job, with the weights that its training begins with."""
    torch.manual_seed(job["seed"])
    return image_recipes.cifar_network(job["network"], job.get("star"))


def save_weights(model: nn.Module, job: Job, path: str | os.PathLike[str]) -> None:
    """Write all parameters and buffers of a trained network, atomically."""
    path = as_path(path)
    tensors = {
        name: t.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, t in model.state_dict().items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, to_safetensors(tensors, metadata={KEY: json.dumps(job)}))


def load_weights(path: str | os.PathLike[str]) -> tuple[Any, Job]:
    """The network of `save_weights`, on the CPU and in evaluation, and its job."""
    path = as_path(path)
    if not path.is_file():
        raise CheckpointError(
            f"{path} is not there: trained weights are made by `hdnn reproduce table-cifar`."
        )
    with tensorfile.opened(path) as file:
        metadata, tensors = file.metadata, file.load()
    try:
        job = json.loads(metadata[KEY])
        int(job["recipe"]["epochs"])
        with torch.random.fork_rng(devices=[]):  # the network is drawn, then overwritten
            model = network(job)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is a safetensors file of another kind: its metadata has no job of "
            "`hdnn reproduce table-cifar`."
        ) from error
    wrong = [n for n, t in tensors.items() if t.is_floating_point() and not t.isfinite().all()]
    if wrong:
        raise CheckpointError(f"{path} is damaged: {wrong[0]} has entries that are not finite.")
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise CheckpointError(
            f"{path} does not hold the weights of the network that its job describes "
            f"({' '.join(str(error).split())[:200]})."
        ) from error
    return model.eval().requires_grad_(False), job
