"""`hdnn train`: read options, load data, build a model, fit, certify, evaluate, write.

A job is a training run on data of one kind. It has a config with all options filled in, data, a
model, and a method `fit`. Everything else is the same for all kinds of data, and is in `train`.
"""

from __future__ import annotations

import io as byte_io
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hdnn import __version__, analysis, io, plotting
from hdnn.app.config import (
    Config,
    ImageConfig,
    PlaneConfig,
    RunOptions,
    TableConfig,
    all_options,
    config_for,
    read_options,
)
from hdnn.app.runs import Run
from hdnn.app.scores import (
    evaluate,
    lines,
    outputs,
    score_rows,
    score_text,
    spread,
)
from hdnn.data import ImageData, load_cifar10, load_mnist, planar
from hdnn.errors import (
    MissingExtraError,
    OptionError,
    choose,
    positive_int,
    require,
)
from hdnn.heads import Augment, Model, SigmoidHead
from hdnn.networks import BY_NAME
from hdnn.training import History, fit, fit_images, recipes

SCORES = (
    "test_accuracy",
    "test_rmse",
    "test_r2",
    "train_accuracy",
    "train_rmse",
)
NETWORK_OPTIONS = ("layers", "features", "activation", "T")
FIT_OPTIONS = (
    "epochs",
    "batch",
    "learning_rate",
    "weight_decay",
    "ridge",
    "smoothness",
)
PLANAR: dict[str, Any] = {
    "features": 4,
    "layers": 64,
    "activation": "tanh",
    "T": 2.4,
    "epochs": 50,
    "batch": 125,
    "learning_rate": 0.05,  # the cosine halves the rate on average
    "weight_decay": 0.0,
    "solver": "newton",
    "ridge": 1e-4,
    "smoothness": 5e-4,
}
RECIPE_OPTIONS = (  # of images
    "batch",
    "learning_rate",
    "weight_decay",
    "smoothness",
    "seed",
)
STEPS = 20  # in an epoch of few images


def plan(values: Mapping[str, Any]) -> list[tuple[Any, Run]]:
    """The config and the folder of each run, all checked before the first run starts."""
    options = dict(values)
    if "config" in options:
        options = {**read_options(options["config"]), **options}
    run_options = all_options(RunOptions)
    own = {k: v for k, v in options.items() if k not in run_options}
    out = options.get("out")
    count = positive_int("seeds", options.get("seeds", 1))
    if "resume" in options and out is not None and count == 1:
        run = Run(out)
        if run.exists or not own:
            return [(run.config(own), run)]
    first = own.get("seed", 0)
    jobs = []
    for seed in range(first, first + count):
        config = config_for({**own, "seed": seed})
        place = Path(out or Path("runs") / config.run_name())
        if out is not None and count > 1:
            place /= f"seed-{seed}"
        jobs.append((config, Run(place)))
    check_folders([run for _, run in jobs], options)
    return jobs


def check_folders(runs: list[Run], options: Mapping[str, Any]) -> None:
    """Refuse to overwrite runs unless asked to."""
    if "resume" in options and "overwrite" in options:
        raise OptionError(
            "--resume continues a run and --overwrite replaces it; use only one."
        )
    if "resume" not in options and "overwrite" not in options:
        for run in runs:
            run.check_free()


def train(
    job: Job, run: Run, values: Mapping[str, Any], pictures: bool = True
) -> dict[str, Any]:
    """Train, certify and write one run.

    Args:
        job: the training job.
        run: the run, with its folder.
        values: the options of the command: resume, overwrite, quiet, json.
        pictures: draw pictures.
    """
    start = time.perf_counter()
    resume = "resume" in values
    overwrite = "overwrite" in values
    options = job.config.options()
    with run.opened(options, resume=resume, overwrite=overwrite):
        quiet = "quiet" in values or "json" in values
        history = job.fit(run.training_folder, not quiet)
        data = job.data
        model = job.model.to("cpu")
        certificate = None
        with suppress(OptionError):  # no Hamiltonian layers
            certificate = analysis.certify(
                job.certified or model,
                data.points,
                points=data.place,
            )
        job.history = history
        job.certificate = certificate
        io.save(model, run.model_file, note=data.note())
        metrics = {
            **job.facts,
            "run": str(run.folder),
            **options,
            "network": repr(getattr(model, "net", model)).partition("\n")[0],
            "parameters": sum(p.numel() for p in model.parameters()),
            "common": data.common,
            **data.facts,
        }
        for part, (x, t) in data.parts.items():
            metrics |= data.scores(part, outputs(model, x), t)
        metrics |= {
            "epochs": len(history.loss),
            "best_epoch": history.best_epoch,
            "training_seconds": round(history.seconds, 2),
            "history": history.curves(),
            "certificate": certificate and certificate.to_dict(),
            "pictures": draw(job, run.folder) if pictures else [],
            "versions": {"hdnn": __version__, "torch": torch.__version__},
            "seconds": round(time.perf_counter() - start, 2),
        }
        io.write_json(run.metrics_file, metrics)
    return metrics


def find_device(name: str) -> str:
    """A device of this machine; "auto" is a GPU if there is one."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    choose("device", name.partition(":")[0], ("cpu", "cuda"))
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise OptionError("no CUDA device is available; use --device cpu.")
    return name


# Data


@dataclass
class Data:
    """Rows or images for training and testing; empty if they are on other machines.

    Args:
        parts: the inputs and targets on which the model is scored: "train", "test".
        target: the target that turns outputs into answers.
        encoder: the encoder that turns columns into inputs.
        points: the inputs at which the model is certified; None for random states.
        place: the name of these points in a certificate.
        common: the most frequent label of the training rows, or their mean.
        source: points in the plane, or images.
        facts: the task and the numbers of rows, for the metrics.
    """

    parts: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    target: Any = None
    encoder: Any = None
    points: Tensor | None = None
    place: str = "random states"
    common: float = 0
    source: Any = None
    facts: dict[str, Any] = field(default_factory=dict)

    def project(self, directions: Any) -> None:
        """Project the inputs of a wide table on fewer directions."""
        if directions is None or self.points is None:
            return
        D = torch.tensor(directions).T
        for part, (x, t) in self.parts.items():
            self.parts[part] = (x @ D, t)
        self.points = self.points @ D

    def note(self) -> dict[str, Any] | None:
        """The columns, for the note in the model's file."""
        if self.encoder is None:
            return None
        return {"inputs": self.encoder.config(), "target": self.target.config()}

    def truth(self, t: Tensor) -> np.ndarray:
        """Labels, or values in their original units."""
        if self.target.classes:
            return t.numpy(force=True)
        return self.target.decode(t[:, 0].numpy())

    def scores(
        self, part: str, answers: np.ndarray, t: Tensor
    ) -> dict[str, Any]:
        """The scores of a part, by names such as test_accuracy; baseline and confusion table."""
        classes = self.target.classes
        if not classes:
            answers = self.target.decode(answers)
        scores = evaluate(answers, self.truth(t), classes, self.common)
        for name in ("accuracy", "rmse", "r2"):
            if name in scores:
                scores[f"{part}_{name}"] = scores.pop(name)
        return scores


def rows_to_learn(
    rows: Sequence[Tensor], encoder: Any, target: Any, source: Any = None
) -> Data:
    """The data of encoded rows: x and t for training, x and t for testing."""
    x, t, x_test, t_test = rows
    parts = {"train": (x, t)}
    data = Data(parts, target, encoder, x, "training points", source=source)
    if len(x_test):
        parts["test"] = (x_test, t_test)
        data.points = x_test
        data.place = "test points"
    data.facts = {
        "task": target.task,
        "inputs": len(encoder.names),
        "train_rows": len(x),
        "test_rows": len(x_test),
        "notes": list(encoder.notes),
    }
    truth = data.truth(t)
    if target.classes:
        data.common = int(np.bincount(truth).argmax())
    else:
        data.common = float(truth.mean())
        data.facts["target_mean"] = target.center
        data.facts["target_std"] = target.scale
    return data


def load(config: Any, encoder: Any = None) -> Data:
    """Read or compute the rows of a config, on the CPU; without an encoder, a file's is learned."""
    if config.data in planar.SETS:
        return load_points(config.data, config.seed)
    table = Table.read(config)
    if encoder is None:
        from hdnn.data.tables import Encoder

        rows = table.inputs.iloc[table.train]
        encoder = Encoder.fit(rows, categorical=config.categorical)
    return table.encoded(encoder)


class Table(NamedTuple):
    """The columns of a file and their targets, with the rows for training and testing."""

    inputs: Any
    labels: np.ndarray
    target: Any
    train: Any
    test: Any

    @classmethod
    def read(cls, config: Any) -> Table:
        """The table of the file that a config names."""
        from hdnn.data import tables

        frame = tables.read(config.data)
        target = tables.Target.fit(frame, config.target, config.task)
        for name in config.drop:
            if name not in frame.columns:
                raise OptionError(
                    f"--drop: {config.data} has no column {name!r}."
                )
        inputs = frame.drop(columns=[target.name, *config.drop])
        labels = target.encode(frame)
        train, test = tables.hold_out(
            labels,
            config.test_fraction,
            config.seed,
            classes=bool(target.classes),
        )
        if not target.classes:  # in units of the training rows
            target = tables.Target.fit(
                frame.iloc[train], config.target, "regression"
            )
            labels = target.encode(frame)[:, None]
        return cls(inputs, labels, target, train, test)

    def encoded(self, encoder: Any) -> Data:
        """The rows, as an encoder returns them."""
        rows: list[Tensor] = []
        for part in (self.train, self.test):
            x = encoder.transform(self.inputs.iloc[part], "float32")
            rows += [torch.from_numpy(x), torch.from_numpy(self.labels[part])]
        return rows_to_learn(rows, encoder, self.target)


def load_points(name: str, seed: int) -> Data:
    """Points in the plane, with two classes."""
    from hdnn.data import tables

    points = planar.load(name, seed=seed)
    plain = {"kind": "number", "gaps": False, "fill": 0.0}
    plain |= {"center": 0.0, "scale": 1.0}
    encoder = tables.Encoder([{"name": x, **plain} for x in ("x1", "x2")])
    target = tables.Target("class", "classification", ["0", "1"])
    rows = (points.x_train, points.t_train, points.x_test, points.t_test)
    return rows_to_learn(rows, encoder, target, points)


# Jobs


class Job:
    """A training run on points in the plane, with the recipe of the paper.

    Attributes:
        certified: the module to certify, if this is not the model.
        facts: further metrics of training.
        history: the history of training.
        certificate: the certificate; None if there are no layers to certify.
    """

    certified: Any = None
    facts: Mapping[str, Any] = MappingProxyType({})
    history: History
    certificate: Any

    def __init__(self, config: PlaneConfig) -> None:
        options = {**PLANAR, **config.options()}
        if config.network == "mlp":
            options["T"] = config.T
        options["device"] = find_device(config.device)
        self.config: Any = replace(config, **options)
        self.data = load(config)
        self.model: Any = self.build()

    def build(self) -> Model:
        """A new model of the config's network."""
        generator = torch.Generator().manual_seed(self.config.seed)
        network = BY_NAME[choose("network", self.config.network, BY_NAME)]
        options = pick(self.config, NETWORK_OPTIONS)
        net = network(init="paper", generator=generator, **options)
        head = SigmoidHead(net.features, generator=generator)
        return Model(Augment(2, net.features), net, head)

    def fit(self, folder: Path, progress: bool) -> History:
        from hdnn.data.tables import hold_out

        config = self.config
        self.model.to(config.device)
        x, t = (part.to(config.device) for part in self.data.parts["train"])
        options = pick(config, (*FIT_OPTIONS, "solver"))
        if config.validation:
            labels = t.numpy(force=True)
            train, held = hold_out(
                labels, config.validation, config.seed, classes=True
            )
            options["validation"] = (x[held], t[held])
            self.facts = {"validation_rows": len(held)}
            x = x[train]
            t = t[train]
        return fit(
            self.model,
            x,
            t,
            patience=config.patience,
            seed=config.seed,
            folder=folder,
            resume=True,
            progress=progress,
            **options,
        )


class TableJob(Job):
    """A training run on a file, like that of the estimators, with a folder."""

    def __init__(self, config: TableConfig) -> None:
        config = replace(config, device=find_device(config.device))
        self.data = load(config)
        encoder = self.data.encoder
        self.estimator = estimator(config, self.data.target.classes)
        self.estimator.encoder_ = encoder
        x, t = self.data.parts["train"]
        labels = self.data.truth(t)
        self.estimator._begin(labels)
        rows = self.estimator._rows(x, labels)
        self.choice = self.estimator._choose(rows)
        self.rows = self.estimator._model_for(rows, self.choice)
        self.model = self.estimator.model_
        self.data.project(encoder.directions)
        if self.choice.decay is None:
            encoder.notes.append(
                "a linear model does better on held-out rows: the network is kept small."
            )
            self.data.facts["notes"] = list(encoder.notes)
        options = {k: getattr(self.estimator, k) for k in NETWORK_OPTIONS}
        options["features"] = self.model.net.features
        if config.network == "mlp":
            options["T"] = None
        options["data"] = os.path.abspath(config.data)
        options["task"] = self.data.target.task
        options["weight_decay"] = self.choice.decay
        self.config = replace(config, **options)

    def fit(self, folder: Path, progress: bool) -> History:
        config = self.config
        rows = self.rows
        options: dict[str, Any] = {"patience": config.patience}
        if config.solver is not None:
            options["solver"] = config.solver
        if config.validation:
            rows, held = self.estimator._hold_out(rows, config.validation)
            options["validation"] = held
            self.facts = {"validation_rows": len(held[0])}
        history = self.estimator._train(
            self.model,
            rows,
            self.choice,
            folder=folder,
            resume=True,
            progress=progress,
            **options,
        )
        self.model.double()
        points: Any = self.data.points
        self.data.points = points.double()
        return history


def pick(config: Config, names: Sequence[str]) -> dict[str, Any]:
    """The options with these names that have a value."""
    return {k: v for k, v in config.options().items() if k in names}


def estimator(config: TableConfig, classes: Sequence[str]) -> Any:
    """The estimator with the options of a config."""
    from hdnn.estimators import HDNNClassifier, HDNNRegressor

    names = (*NETWORK_OPTIONS, *FIT_OPTIONS, "network", "categorical", "device")
    options = pick(config, names)
    weights = config.weights()
    if weights is not None:
        if not classes:
            raise OptionError(
                f"{config.target} has values, not classes; leave --class-weight out."
            )
        if isinstance(weights, dict):
            for name in weights:
                choose("class of --class-weight", name, classes)
            weights = {classes.index(k): v for k, v in weights.items()}
        options["class_weight"] = weights
    kind = HDNNClassifier if classes else HDNNRegressor
    return kind(random_state=config.seed, **options)


def load_images(name: str) -> ImageData:
    """MNIST or CIFAR-10, from the folder in HDNN_DATA."""
    return load_mnist() if name == "mnist" else load_cifar10()


def test_images(images: ImageData) -> Data:
    """The test images, on which the model is scored."""
    from hdnn.data.tables import Target

    target = Target("class", "classification", list(images.classes))
    x = images.normalised(images.images_test, torch.float32)
    data = Data({"test": (x, images.t_test)}, target, source=images)
    data.points = x[:20]  # the images for a certificate
    data.place = f"test images of {images.name}"
    data.common = int(torch.bincount(images.t_train.cpu()).argmax())
    data.facts = {
        "task": target.task,
        "target": "class",
        "train_images": len(images.t_train),
        "test_images": len(images.t_test),
    }
    return data


class ImageJob(Job):
    """A training run on images, with a recipe of the paper's tables."""

    def __init__(self, config: ImageConfig) -> None:
        place = (config.data, config.network)
        epochs = config.epochs or 40
        images = load_images(config.data)
        device = find_device(config.device)
        recipe = pick(config, RECIPE_OPTIONS)
        if config.images is not None:
            images = images.first(config.images)
            recipe.setdefault("batch", max(1, config.images // STEPS))
        if device == "cpu":
            recipe["bf16"] = False  # slow on most CPUs
        self.recipe = recipes.image_recipe(*place, epochs=epochs, **recipe)
        settings = recipes.image_settings(*place, epochs=epochs)
        if not settings and (config.layers or config.T or config.activation):
            raise OptionError(
                f"{config.network} does not accept --layers, --T or --activation."
            )
        settings |= pick(config, ("layers", "activation"))
        layers = settings.get("layers")
        if config.T is not None:
            settings["step"] = config.T / settings["layers"]
        self.model = recipes.image_network(*place, seed=config.seed, **settings)
        self.config = replace(
            config, device=device, epochs=epochs, layers=layers
        )
        self.data = test_images(images)

    def fit(self, folder: Path, progress: bool) -> History:
        self.model.to(self.config.device)
        history = fit_images(
            self.model,
            self.data.source,
            self.recipe,
            folder=folder,
            resume=True,
            progress=progress,
        )
        self.facts = {"train_accuracy": history.accuracy[-1]}
        return history


JOBS: dict[type, Any] = {
    PlaneConfig: Job,
    TableConfig: TableJob,
    ImageConfig: ImageJob,
}

# Results


def draw(job: Job, folder: Path) -> list[str]:
    """Write the pictures of a job as PNG files; none if matplotlib is missing."""
    try:
        require("matplotlib", extra="plot")
    except MissingExtraError:
        return []
    axes: dict[str, Any] = {"training": plotting.training_history(job.history)}
    points = job.data.source
    if isinstance(points, planar.PlanarData) and job.certified is None:
        axes["decision_regions"] = plotting.decision_regions(job.model, points)
    certificate = job.certificate
    if certificate is not None and (certificate.by_layer or certificate.parts):
        axes["norms"] = certificate.plot()
    for name, ax in axes.items():
        write_picture(ax.figure, folder / f"{name}.png")
    return [f"{name}.png" for name in axes]


def write_picture(figure: Any, file: Path) -> None:
    """Write a figure of matplotlib as a PNG file, which is complete or absent."""
    content = byte_io.BytesIO()
    figure.savefig(content, format="png", dpi=120)
    io.write_atomically(file, content.getvalue())


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The result of one run, or of several runs with mean and spread of their scores."""
    if len(results) == 1:
        return results[0]
    scores = {}
    for name in SCORES:
        values = [r[name] for r in results if r.get(name) is not None]
        if len(values) > 1:
            scores[name] = spread(values)
    return {"runs": results, "summary": scores}


def text(result: Mapping[str, Any]) -> str:
    """A result as text."""
    if "runs" in result:
        rows = {}
        for each in result["runs"]:
            scores = score_rows(each, "test_") or score_rows(each, "train_")
            rows[each["run"]] = ", ".join(map(" ".join, scores.items()))
        for name, facts in result["summary"].items():
            shown = [f"{k} {score_text(name, v)}" for k, v in facts.items()]
            rows[name.replace("_", " ")] = ", ".join(shown)
        return lines(rows)
    seconds = result["training_seconds"]
    rows = {
        "network": result["network"],
        "trained": f"{seconds:.1f} s, epochs: {result['epochs']}",
    }
    if "processes" in result:
        rows["network"] += f" on {result['nodes']} nodes"
        rows["trained"] += f" by {result['processes']} processes"
        size = result["bytes"] / 2**20
        count = f"{result['messages']:,}, {size:.1f} MiB"
        rows["messages"] = f"{count}, between neighbours only"
    if result.get("best_epoch"):
        rows["held out"] = f"lowest loss in epoch {result['best_epoch']}"
    rows |= score_rows(result, "test_") or score_rows(result, "train_")
    if result.get("notes"):
        rows["note"] = f"\n{'note':<16} ".join(result["notes"])
    if result["certificate"]:
        rows["gradients"] = result["certificate"]["summary"]
    return lines({**rows, "run": result["run"]})
