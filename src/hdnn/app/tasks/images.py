"""Trainings on images: train a run, predict with it, certify its gradients.

A checkpoint is written after each epoch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hdnn import plotting, serialization
from hdnn.analysis.image_certificate import Certificates, certify_images
from hdnn.app import pictures, progress, results, terminal
from hdnn.app.configs.common import IMAGE_SETS
from hdnn.app.configs.images import ImageConfig
from hdnn.app.progress import TrainingBar
from hdnn.app.runs import Run
from hdnn.app.tasks.task import Task
from hdnn.data import cifar10, mnist
from hdnn.data.images import ImageData
from hdnn.errors import DataError, OptionError
from hdnn.models import HDNNStar, ImageModel, MNISTNet
from hdnn.training import History, TensorBoard
from hdnn.training.checkpoint import Log
from hdnn.training.images import EVALUATED, ImageHistory, ImageTraining, next_epoch
from hdnn.training.images import recipes as image_recipes
from hdnn.training.processes.torchrun import Processes

MODULES = {"mnist": mnist, "cifar10": cifar10}
LOOKED_AT = 100  # test images whose pixels a certificate may take

Tell = Callable[[int, int, str], None]  # steps done, of how many, and how it goes
Note = Callable[[dict[str, Any]], None]  # what is kept of an epoch


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


class ImageTask(Task):
    """A training on images."""

    def __init__(self, config: ImageConfig) -> None:
        self.config: ImageConfig = config

    def load(self, processes: Processes, bar: TrainingBar) -> None:
        self.config.check_memory()
        with progress.waiting(f"reading {self.config.data}", bar.on):
            data = load(self.config.data)
            self.data = fewer(data, self.config.images, self.config.seed)

    def build(self) -> None:
        config = self.config
        self.model: ImageModel = image_recipes.build(
            config.data, config.network, config.hidden(), config.seed, config.epochs
        )
        self.model.to(config.device)
        if config.device.startswith("cuda") and config.data == "cifar10":
            self.model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        units = tuple(self.model.units)
        self.training = ImageTraining(self.model, self.data, config.recipe(), smooth=units)

    def room(self) -> int:
        # The model and its checkpoint with two moments, which is there twice while it is replaced.
        return 7 * sum(t.nbytes for t in self.model.state_dict().values())

    def fit(
        self, run: Run, bar: TrainingBar, board: TensorBoard | None, processes: Processes
    ) -> None:
        notes: list[Note] = [Log(run.folder, 0).write]
        if board is not None:
            notes.append(partial(_show, board))
        _fit(self.training, self.config, run.folder, bar.show if bar.on else None, notes)
        if bar.on:
            bar.show(1, 1, "measuring and drawing")

    def write(self, run: Run) -> dict[str, Any]:
        serialization.save(self.model, run.model_file)
        return _measure(run, self.config, self.training)

    @staticmethod
    def text(metrics: dict[str, Any]) -> str:
        trained = f"{metrics['epochs']} epochs in {metrics['training_seconds']:.1f} s, "
        trained += f"{metrics['epoch_seconds']:.3g} s an epoch"
        counts = f"{metrics['train_images']} images, tested on {metrics['test_images']}"
        return terminal.rows_text(
            [
                ("network", f"{metrics['network']}"),
                ("parameters", f"{metrics['parameters']:,}"),
                ("data", f"{metrics['set']}: {counts}"),
                *([("", metrics["remark"])] if metrics["remark"] else []),
                ("trained", trained),
                *results.measure_rows(metrics),
                *_gradient_rows(metrics),
                ("run", metrics["run"]),
                *results.picture_rows(metrics),
            ]
        )


def _gradient_rows(metrics: dict[str, Any]) -> list[tuple[str, str]]:
    """What is promised of each Hamiltonian part, and what was measured."""
    found = metrics["certificates"]
    if not found:
        return [("gradients", metrics["no_certificate_because"])]
    if len(found) == 1:
        return results.gradient_rows(found[0])
    rows = [(f"unit {k}", results.smallest_text(one)) for k, one in enumerate(found, 1)]
    if any(one["guaranteed"] for one in found):
        why = next(one["guarantee"] for one in found if one["guaranteed"])
        rows.append(("", f"guaranteed {why}; for each unit, not for what lies between them"))
    return rows


def _fit(
    training: ImageTraining,
    config: ImageConfig,
    folder: Path,
    tell: Tell | None,
    notes: list[Note],
) -> None:
    """Train the epochs that are left; after each, write a checkpoint and then a log entry."""
    training.open(folder)
    history = training.history

    def note(epoch: int) -> None:
        for each in notes:
            each(_entry(history, epoch))

    watch = None if tell is None else partial(_tell_step, training, tell)
    for epoch in range(len(history.loss)):  # the log may lack some epochs of the checkpoint
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
    """Report progress after step k of an epoch; on a GPU without waiting for the loss."""
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
    """All metrics of a trained network, and pictures of it."""
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
        **pictures.drawn(lambda: _pictures(history, certified), run.folder),
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


def _pictures(history: ImageHistory, certified: Certificates) -> dict[str, Any]:
    curves = History(loss=history.loss, accuracy=history.accuracy)
    found = {"training": plotting.training_history(curves, test=history.test)}
    parts = certified.parts
    if parts and all(math.isfinite(part.largest_norm) for part in parts):
        one = len(parts) == 1
        found["bsm_norms"] = parts[0].plot() if one else plotting.certificates_norms(parts)
    return found


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
    dtype = next(model.parameters()).dtype
    model.eval()
    scores = torch.cat(
        [model(data.normalised(some, dtype)) for some in data.images_test.split(EVALUATED)]
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
