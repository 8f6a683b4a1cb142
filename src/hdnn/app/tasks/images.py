"""Trainings on images: train a run, predict with it, certify its gradients.

A checkpoint is written after each epoch.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from hdnn import plotting
from hdnn.analysis import evaluation
from hdnn.analysis.image_certificate import Certificates, certify_images
from hdnn.analysis.words import summary_of_parts
from hdnn.app import progress, results, terminal
from hdnn.app.configs.common import IMAGE_SETS
from hdnn.app.configs.images import ImageConfig
from hdnn.app.progress import TrainingBar
from hdnn.app.runs import Run
from hdnn.app.tasks.answers import Answer
from hdnn.app.tasks.task import OwnTask
from hdnn.data import cifar10, mnist
from hdnn.data.images import ImageData
from hdnn.errors import DataError, OptionError
from hdnn.models import HDNNStar, ImageModel, MNISTNet
from hdnn.training import History, TensorBoard
from hdnn.training.checkpoint import Log
from hdnn.training.images import EVALUATED, ImageTraining, next_epoch
from hdnn.training.images import recipes as image_recipes
from hdnn.training.processes.torchrun import Processes

MODULES = {"mnist": mnist, "cifar10": cifar10}
LOOKED_AT = 100  # test images whose pixels a certificate may take


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


class ImageTask(OwnTask):
    """A training on images."""

    config: ImageConfig

    def load(self, processes: Processes, bar: TrainingBar) -> None:
        self.find_device(processes)
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
        """Train the epochs that are left; after each, write a checkpoint and then a log entry."""
        config, training, log = self.config, self.training, Log(run.folder, 0)
        training.open(run.folder)
        history = self.history = training.history

        def note(epoch: int) -> None:
            scores = {
                "loss": history.loss[epoch],
                "accuracy": history.accuracy[epoch],
                "test_accuracy": history.test[epoch],
            }
            log.write({"epoch": epoch + 1, **scores})
            if board is not None:
                board.write(epoch + 1, scores)

        watch = partial(_show_step, training, bar) if bar.on else None
        for epoch in range(len(history.loss)):  # the log may lack some epochs of the checkpoint
            note(epoch)
        devices = [training.device] if training.cuda else []
        with torch.random.fork_rng(devices):
            while training.epoch < config.epochs and not _is_stuck(history.loss, config.patience):
                # What drops out is drawn from the global state; a resumed run must draw the same.
                torch.manual_seed(config.seed * 100_003 + training.epoch)
                next_epoch([training], [run.folder], watch)
                note(training.epoch - 1)
                if bar.on:
                    reached = f"loss {history.loss[-1]:.4f}, test {history.test[-1]:.2%}"
                    _show(training, bar, training.epoch * training.batches, reached, training.epoch)
        if bar.on:
            bar.show(1, 1, "measuring and drawing")

    def certify(self) -> Certificates:
        return certify_at(self.model, self.data)

    def measured(self, certified: Certificates) -> dict[str, Any]:
        data, history = self.data, self.history
        return {
            "set": data.name,
            "remark": data.remark,
            "task": "classification",
            "network": title(self.model),
            "train_images": len(data.t_train),
            "test_images": len(data.t_test),
            "train_accuracy": self.training.accuracy(data.images_train, data.t_train),
            "test_accuracy": history.test[-1],
            "target": "class",
            "evaluation": self.evaluated(),
            "epoch_seconds": round(history.seconds / len(history.loss), 3),
            "no_certificate_because": certified.nothing,
            "certificates": certified.to_dict()["certificates"],
        }

    def evaluated(self) -> dict[str, Any]:
        """How good the predictions are for the test images."""
        data = self.data
        found = self.training.scores(data.images_test).double()
        told = evaluation.of_classes(
            data.t_test.numpy(force=True),
            found.softmax(1).numpy(),
            data.classes,
            usual=int(torch.bincount(data.t_train.cpu()).argmax()),
        )
        return {"part": "test", **told}

    def pictures(self, certified: Certificates) -> dict[str, Any]:
        curves = History(loss=self.history.loss, accuracy=self.history.accuracy)
        found = {"training": plotting.training_history(curves, test=self.history.test)}
        parts = certified.parts
        if parts and all(math.isfinite(part.largest_norm) for part in parts):
            one = len(parts) == 1
            found["bsm_norms"] = parts[0].plot() if one else plotting.certificates_norms(parts)
        return found

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
    if len(found) == 1:
        return results.gradient_rows(found[0])
    rows = [("gradients", summary_of_parts(found, metrics["no_certificate_because"] or ""))]
    rows += [(f"unit {k}", results.smallest_text(one)) for k, one in enumerate(found, 1)]
    if any(one["guaranteed"] for one in found):
        why = next(one["guarantee"] for one in found if one["guaranteed"])
        rows.append(("", f"guaranteed {why}; for each unit, not for what lies between them"))
    return rows


def _is_stuck(loss: list[float], patience: int | None) -> bool:
    """Whether so many epochs have passed since the lowest loss."""
    return bool(loss) and patience is not None and len(loss) - 1 - loss.index(min(loss)) >= patience


def _show_step(training: ImageTraining, bar: TrainingBar, k: int) -> None:
    """Report progress after step k of an epoch; on a GPU without waiting for the loss."""
    reached = ""
    if not training.cuda:
        loss, accuracy = (training.sums / (k + 1)).tolist()
        reached = f"loss {loss:.4f}, accuracy {accuracy:.1%}"
    _show(training, bar, training.epoch * training.batches + k + 1, reached, training.epoch + 1)


def _show(training: ImageTraining, bar: TrainingBar, step: int, reached: str, epoch: int) -> None:
    epochs = training.recipe.epochs
    course = f"epoch {epoch}/{epochs}"
    bar.show(step, epochs * training.batches, f"{reached}, {course}" if reached else course)


def title(model: ImageModel) -> str:
    """A network in a line."""
    if isinstance(model, HDNNStar):
        units = [str(unit.channels) for unit in model.stages]
        first = f"{model.stages[0].extra_repr()}"  # pyright: ignore
        return f"HDNNStar, units of {', '.join(units)} channels, the first: {first}"
    if isinstance(model, MNISTNet):
        return "no hidden layers" if model.net is None else repr(model.net)
    return type(model).__name__


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
def answer(model: ImageModel, name: str) -> Answer:
    """What a model says of all test images, and what they are."""
    data = test_part(model, name)
    dtype = next(model.parameters()).dtype
    model.eval()
    scores = torch.cat(
        [model(data.normalised(some, dtype)) for some in data.images_test.split(EVALUATED)]
    )
    chances, chosen = scores.double().softmax(1).numpy(), scores.argmax(1).numpy()
    return Answer(
        "class", [*data.classes], chances, chosen, data.t_test.numpy(), {"set": data.name}
    )


def certify(model: ImageModel, name: str | None, *, samples: int) -> Certificates:
    """The certificates of a model, at test images of a set or at random images."""
    if name is None or not model.units:
        return certify_images(model, samples=samples)
    return certify_at(model, test_part(model, name), samples=samples)


def certify_at(model: ImageModel, data: ImageData, **options: Any) -> Certificates:
    """The certificates of a model at the first test images of a set."""
    images = data.normalised(data.images_test[:LOOKED_AT], torch.float32)
    return certify_images(model, images, points=f"test images of {data.name}", **options)
