"""What the commands do with images: train a run, predict with it, certify its gradients.

A run is as those of `hdnn.app.tasks`, with a checkpoint after each epoch. Nothing here needs the
command-line extra.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hdnn import plotting, serialization
from hdnn.analysis.image_certificate import Certificates, certify_images
from hdnn.app.image_runs import ImageConfig
from hdnn.app.runs import IMAGE_SETS, Run, find_device, usable_folder
from hdnn.app.tasks import PICTURES, complete, known_metrics, save_picture
from hdnn.data import cifar10, mnist
from hdnn.data.images import ImageData
from hdnn.errors import DataError, MissingExtraError, OptionError, require
from hdnn.models import HDNNStar, ImageModel, MNISTNet
from hdnn.training import History, TensorBoard
from hdnn.training.checkpoint import Log, locked
from hdnn.training.images import EVALUATED, ImageHistory, ImageTraining, next_epoch
from hdnn.training.images import recipes as image_recipes

MODULES = {"mnist": mnist, "cifar10": cifar10}
LOOKED_AT = 100  # test images whose pixels a certificate may take

Tell = Callable[[int, int, str], None]  # steps done, of how many, and how it goes
Waiting = Callable[[str], AbstractContextManager[None]]
Note = Callable[[dict[str, Any]], None]  # what is kept of an epoch


def nothing_said(_: str) -> AbstractContextManager[None]:
    return nullcontext()


# Data


def load(name: str) -> ImageData:
    """The whole set, from the folder HDNN_DATA."""
    return mnist.load() if name == "mnist" else cifar10.load(progress=False)


def where(name: str) -> str:
    """Whether a set is there, in words."""
    try:
        found = MODULES[name].find()
    except DataError as error:
        return str(error)
    return f"ready ({found[0].parent if name == 'mnist' else found[0]})"


def fewer(data: ImageData, count: int | None, seed: int) -> ImageData:
    """At most `count` images to train on and to test with, each class by its share."""
    if count is None:
        return data
    turned = replace(data, images_train=data.images_test, t_train=data.t_test)
    parts = []
    for part in (data, turned):
        whole = part.images_train, part.t_train
        parts += whole if count >= len(part.t_train) else part.holdout(count, seed)[1]
    names = ("images_train", "t_train", "images_test", "t_test")
    return replace(data, **dict(zip(names, parts, strict=True)))


# Training


def train(
    config: ImageConfig,
    run: Run,
    *,
    tell: Tell | None = None,
    waiting: Waiting = nothing_said,
    tensorboard: bool = False,
) -> dict[str, Any]:
    """Train, measure, draw and save in the folder of `run`; return its metrics.

    A run that was started there with the same config goes on after its last epoch; a complete one
    stays as it is. `tell` is called in the course of the training, and `waiting` makes a sign of
    life beside what has no steps.
    """
    start = time.perf_counter()
    known = known_metrics(run)
    if known is not None:
        return known
    board = TensorBoard(run.folder / "tensorboard") if tensorboard else None
    config = replace(config, device=find_device(config.device))
    config.check_memory()
    with waiting(f"reading {config.data}"):
        data = fewer(load(config.data), config.images, config.seed)
    model = image_recipes.build(
        config.data, config.network, config.hidden(), config.seed, config.epochs
    )
    model.to(config.device)
    if config.device.startswith("cuda") and config.data == "cifar10":
        model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    units = tuple(model.units)
    training = ImageTraining(model, data, config.recipe(), smooth=units)
    size = sum(t.nbytes for t in model.state_dict().values())
    with ExitStack() as stack:
        # The model, and a checkpoint of it with two moments, twice while it is written anew.
        usable_folder(run.folder, PICTURES + 7 * size)
        stack.enter_context(locked(run.folder))
        run.start(config)
        notes: list[Note] = [Log(run.folder, 0).write]
        if board is not None:
            notes.append(partial(_show, stack.enter_context(board)))
        _fit(training, config, run.folder, tell, notes)
        if tell is not None:
            tell(1, 1, "measuring and drawing")
        serialization.save(model, run.model_file)
        return complete(run, _measure(run, config, training), start, config.device)


def _fit(
    training: ImageTraining,
    config: ImageConfig,
    folder: Path,
    tell: Tell | None,
    notes: list[Note],
) -> None:
    """The epochs that are left, with a checkpoint after each, which is then noted."""
    training.open(folder)
    history = training.history

    def note(epoch: int) -> None:
        for each in notes:
            each(_entry(history, epoch))

    watch = None if tell is None else partial(_tell_step, training, tell)
    for epoch in range(len(history.loss)):  # the checkpoint has them all, the notes may not
        note(epoch)
    devices = [training.device] if training.cuda else []
    with torch.random.fork_rng(devices):
        while training.epoch < config.epochs and not _is_stuck(history.loss, config.patience):
            # What drops out is drawn from the global state, and a resumed run must draw the same.
            torch.manual_seed(config.seed * 100_003 + training.epoch)
            next_epoch([training], [folder], watch)
            note(training.epoch - 1)
            if tell is not None:
                _tell_epoch(training, tell)


def _entry(history: ImageHistory, epoch: int) -> dict[str, Any]:
    return {
        "epoch": epoch + 1,
        "loss": history.loss[epoch],
        "accuracy": history.accuracy[epoch],
        "test_accuracy": history.test[epoch],
    }


def _show(board: TensorBoard, entry: dict[str, Any]) -> None:
    board.write(entry["epoch"], {name: v for name, v in entry.items() if name != "epoch"})


def _is_stuck(loss: list[float], patience: int | None) -> bool:
    """Whether so many epochs have passed since the lowest loss."""
    return bool(loss) and patience is not None and len(loss) - 1 - loss.index(min(loss)) >= patience


def _tell_step(training: ImageTraining, tell: Tell, k: int) -> None:
    """How it goes after step k of an epoch; on a GPU nobody waits for the loss of a step."""
    batches, epochs, values = training.batches, training.recipe.epochs, ""
    if not training.cuda:
        loss, accuracy = (training.sums / (k + 1)).tolist()
        values = f"loss {loss:.4f}, accuracy {accuracy:.1%}, "
    values += f"epoch {training.epoch + 1}/{epochs}"
    tell(training.epoch * batches + k + 1, epochs * batches, values)


def _tell_epoch(training: ImageTraining, tell: Tell) -> None:
    history, epochs = training.history, training.recipe.epochs
    values = f"loss {history.loss[-1]:.4f}, test {history.test[-1]:.2%}"
    values += f", epoch {training.epoch}/{epochs}"
    tell(training.epoch * training.batches, epochs * training.batches, values)


def _measure(run: Run, config: ImageConfig, training: ImageTraining) -> dict[str, Any]:
    """All that is to be known of a trained network, and pictures of it."""
    model, data, history = training.model, training.data, training.history
    assert isinstance(model, ImageModel)
    images = data.normalised(data.images_test[:LOOKED_AT], torch.float32)
    certified = certify_images(model, images, points=f"test images of {data.name}")
    return {
        "run": str(run.folder),
        "data": config.data,
        "set": data.name,
        "remark": data.remark,
        "task": "classification",
        "network": title(model),
        "layers": config.layers,
        "parameters": sum(p.numel() for p in model.parameters()),
        "seed": config.seed,
        "epochs": len(history.loss),
        "train_images": len(data.t_train),
        "test_images": len(data.t_test),
        "loss": history.loss[-1],
        "train_accuracy": training.accuracy(data.images_train, data.t_train),
        "test_accuracy": history.test[-1],
        "training_seconds": round(history.seconds, 2),
        "epoch_seconds": round(history.seconds / len(history.loss), 3),
        "no_certificate_because": certified.nothing,
        "certificates": certified.to_dict()["certificates"],
        **_pictures(run.folder, history, certified),
    }


def title(model: ImageModel) -> str:
    """A network in a line."""
    if isinstance(model, HDNNStar):
        units = [str(unit.channels) for unit in model.stages]
        first = f"{model.stages[0].extra_repr()}"  # pyright: ignore
        return f"HDNNStar, units of {', '.join(units)} channels, the first: {first}"
    if isinstance(model, MNISTNet):
        return "no hidden layers" if model.net is None else repr(model.net)
    return type(model).__name__


def _pictures(folder: Path, history: ImageHistory, certified: Certificates) -> dict[str, Any]:
    """PNG files, or the reason why there are none."""
    try:
        require("matplotlib", extra="plot")
    except MissingExtraError as error:
        return {"pictures": {}, "no_pictures_because": str(error)}
    curves = History(loss=history.loss, accuracy=history.accuracy)
    ax = plotting.training_history(curves, test=history.test)
    pictures = {"training": save_picture(ax, folder / "training.png")}
    parts = certified.parts
    if parts and all(math.isfinite(part.largest_norm) for part in parts):
        ax = parts[0].plot() if len(parts) == 1 else plotting.certificates_norms(parts)
        pictures["bsm_norms"] = save_picture(ax, folder / "bsm_norms.png")
    return {"pictures": pictures}


# Predicting and certifying


def test_part(model: ImageModel, name: str) -> ImageData:
    """The set of that name, if the model takes its images."""
    if name not in IMAGE_SETS:
        raise OptionError(
            f"the run is of images: name a set of images, {' or '.join(IMAGE_SETS)}, not {name!r}."
        )
    inputs = next(model.parameters()).shape[1]
    if inputs != len(MODULES[name].MEAN):
        raise DataError(
            f"the images of {name} have {len(MODULES[name].MEAN)} channels, but the network "
            f"takes {inputs}; it was trained on the other set."
        )
    return load(name)


@torch.no_grad()
def predict(model: ImageModel, name: str, *, proba: bool = False) -> dict[str, Any]:
    """The classes of all test images, and how many are right."""
    data = test_part(model, name)
    like = next(model.parameters())
    model.eval()
    scores = torch.cat(
        [model(data.normalised(some, like.dtype)) for some in data.images_test.split(EVALUATED)]
    )
    found = scores.argmax(1)
    result: dict[str, Any] = {
        "rows": len(found),
        "target": "class",
        "set": data.name,
        "predictions": [data.classes[i] for i in found.tolist()],
    }
    if proba:
        chances = scores.double().softmax(1).T.tolist()
        result["probabilities"] = dict(zip(data.classes, chances, strict=True))
    return result | {"accuracy": (found == data.t_test).double().mean().item()}


def certify(model: ImageModel, name: str | None, *, samples: int) -> Certificates:
    """The certificates of a model, at test images of a set or at random images."""
    if name is None or not model.units:
        return certify_images(model, samples=samples)
    data = test_part(model, name)
    images = data.normalised(data.images_test[:LOOKED_AT], torch.float32)
    return certify_images(model, images, samples=samples, points=f"test images of {data.name}")
