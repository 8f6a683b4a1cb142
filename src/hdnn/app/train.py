"""`hdnn train`: load data, build a model, fit, evaluate, certify, write: one path for all data."""

from __future__ import annotations

import io as byte_io
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hdnn import __version__, analysis, io, plotting
from hdnn.app.config import (
    ImageConfig,
    RunOptions,
    TableConfig,
    all_options,
    config_for,
    read_options,
)
from hdnn.app.runs import Run
from hdnn.app.scores import evaluate, outputs, score_lines, score_text
from hdnn.data import ImageData, load_cifar10, load_mnist, planar
from hdnn.errors import (
    CheckpointError,
    MissingExtraError,
    OptionError,
    choose,
    require,
)
from hdnn.heads import Augment, Model, SigmoidHead
from hdnn.networks import BY_NAME
from hdnn.training import History, fit, fit_images, recipes
from hdnn.training.images import image_scores

AnyConfig = TableConfig | ImageConfig
SCORES = (
    "test_accuracy",
    "test_rmse",
    "test_r2",
    "train_accuracy",
    "train_rmse",
)
PLANAR: dict[str, Any] = {
    "features": 4,
    "layers": 64,
    "activation": "tanh",
    "T": 2.4,
    "epochs": 50,
    "batch": 125,
    "learning_rate": 0.05,  # the cosine halves it on average
    "weight_decay": 0.0,
    "solver": "newton",
    "ridge": 1e-4,
    "smoothness": 5e-4,
}
FIT_OPTIONS = (
    *(
        "epochs",
        "batch",
        "learning_rate",
        "weight_decay",
        "solver",
        "ridge",
        "smoothness",
    ),
    *("patience", "seed"),
)
STEPS = 20  # in an epoch of few images
SMALL = 8  # features, up to which a certificate looks at many points
MANY = 1000
FEW = 50


def run(values: Mapping[str, Any]) -> dict[str, Any]:
    """Train what options ask for; the metrics of the run, or of several with mean and spread."""
    quiet = "quiet" in values or "json" in values
    results = []
    for config, folder in plan(values):
        results.append(train(config, folder, values, progress=not quiet))
    if len(results) == 1:
        return results[0]
    return {"runs": results, "summary": spread(results)}


def plan(values: Mapping[str, Any]) -> list[tuple[AnyConfig, Run]]:
    """The config and the folder of each run, all of them checked before the first one starts."""
    options = dict(values)
    if "config" in options:
        options = {**read_options(options["config"]), **options}
    if "resume" in options and "overwrite" in options:
        raise OptionError(
            "--resume goes on with a run and --overwrite replaces it; give one."
        )
    own = {
        name: value
        for name, value in options.items()
        if name not in all_options(RunOptions)
    }
    resume = "resume" in options
    out = options.get("out")
    count = options.get("seeds", 1)
    if count < 1:
        raise OptionError(f"seeds must be at least 1, but got {count}.")
    if resume and out is not None and count == 1 and Run(out).exists:
        Run(out).check_same(own)
        return [(Run(out).config(), Run(out))]
    if resume and "data" not in own:
        raise CheckpointError(f"there is no run in {out} to go on with.")
    jobs = [job_of_seed(own, out, seed, count) for seed in range(count)]
    if not resume and "overwrite" not in options:
        for _, folder in jobs:
            folder.check_free()
    return jobs


def job_of_seed(
    options: Mapping[str, Any], out: str | None, number: int, count: int
) -> tuple[AnyConfig, Run]:
    """One of several runs: its config, and its folder."""
    seed = options.get("seed", 0) + number
    config = config_for({**options, "seed": seed})
    if out is None:
        return config, Run(Path("runs") / config.run_name)
    return config, Run(Path(out) / f"seed-{seed}" if count > 1 else out)


def train(
    config: AnyConfig,
    run: Run,
    values: Mapping[str, Any],
    *,
    progress: bool = True,
) -> dict[str, Any]:
    """Train, certify and write one run; a complete one that is resumed stays as it is."""
    resume = "resume" in values
    if resume and run.complete:
        return run.metrics()
    start = time.perf_counter()
    config = replace(config, device=find_device(config.device))
    job = start_job(config)
    options = job.config.options()
    with run.opened(
        "train", options, resume=resume, overwrite="overwrite" in values
    ):
        job.fit(run.training_folder, progress)
        certificate = job.certify()
        io.save(job.model, run.model_file, note=job.note())
        metrics = {
            "run": str(run.folder),
            **options,
            "network": repr(getattr(job.model, "net", job.model)).partition(
                "\n"
            )[0],
            "parameters": sum(p.numel() for p in job.model.parameters()),
            **job.metrics(),
            "epochs": len(job.history.loss),
            "training_seconds": round(job.history.seconds, 2),
            "history": job.history.curves(),
            "certificate": None
            if certificate is None
            else certificate.to_dict(),
            "pictures": draw(lambda: job.pictures(certificate), run.folder),
            "versions": {"hdnn": __version__, "torch": torch.__version__},
            "seconds": round(time.perf_counter() - start, 2),
        }
        io.write_json(run.metrics_file, metrics)
    return metrics


def start_job(config: AnyConfig) -> Any:
    """The training that a config asks for, with its data and a new model."""
    if isinstance(config, ImageConfig):
        return ImageJob(config)
    return TableJob(config) if config.is_file else PlaneJob(config)


def find_device(name: str) -> str:
    """A device of this machine; "auto" is a GPU where there is one."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    choose("device", name.partition(":")[0], ("cpu", "cuda"))
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise OptionError("no CUDA device is available; use --device cpu.")
    return name


# Tables and points of the plane


@dataclass
class Problem:
    """Rows to train on, to hold out and to test with, and how they are made of columns."""

    x: Tensor
    t: Tensor
    x_test: Tensor
    t_test: Tensor
    encoder: Any
    target: Any
    plane: Any = None  # points of the plane
    frame: Any = None  # the rows of a file to train on
    notes: list[str] = field(default_factory=list)

    @property
    def points(self) -> Tensor:
        """The rows that a certificate looks at."""
        return self.x_test if len(self.x_test) else self.x

    def note(self) -> dict[str, Any]:
        """The columns, which the file of the model remembers."""
        return {"inputs": self.encoder.config(), "target": self.target.config()}

    def truth(self, t: Tensor) -> np.ndarray:
        """Labels, or values in their own units."""
        return (
            t.numpy()
            if self.target.classes
            else self.target.decode(t[:, 0].numpy())
        )

    def scores(self, model: Any) -> dict[str, Any]:
        """Scores on training and test rows; baseline and confusion table on the test rows."""
        target = self.target
        train = self.truth(self.t)
        common = (
            int(np.bincount(train).argmax())
            if target.classes
            else float(train.mean())
        )
        metrics: dict[str, Any] = {
            "task": target.task,
            "inputs": len(self.encoder.names),
            "train_rows": len(self.x),
            "test_rows": len(self.x_test),
            "notes": self.notes,
            "common": common,
        }
        if not target.classes:
            metrics |= {
                "target_mean": target.center,
                "target_std": target.scale,
            }
        dtype = next(model.parameters()).dtype
        parts = (("train", self.x, self.t), ("test", self.x_test, self.t_test))
        for name, x, t in parts:
            if len(x):
                answers = outputs(model, x.to(dtype))
                if not target.classes:
                    answers = target.decode(answers)
                scores = evaluate(
                    answers, self.truth(t), target.classes, common
                )
                for score in ("accuracy", "rmse", "r2"):
                    if score in scores:
                        metrics[f"{name}_{score}"] = scores.pop(score)
                metrics |= scores
        return metrics


def load(config: TableConfig) -> Problem:
    """Read or compute the data of a config, on the CPU."""
    return load_table(config) if config.is_file else load_points(config)


def load_table(config: TableConfig) -> Problem:
    """The rows of a file; columns are learned from the rows to train on."""
    from hdnn.data import tables

    frame = tables.read(config.data)
    assert config.target is not None
    target = tables.Target.fit(frame, config.target, config.task)
    for name in config.drop:
        if name not in frame.columns:
            raise OptionError(f"--drop: {config.data} has no column {name!r}.")
    inputs = frame.drop(columns=[target.name, *config.drop])
    labels = target.encode(frame)
    share = 0.2 if config.test_fraction is None else config.test_fraction
    train, test = tables.hold_out(
        labels, share, config.seed, classes=bool(target.classes)
    )
    encoder = tables.Encoder.fit(
        inputs.iloc[train], categorical=config.categorical
    )
    if not target.classes:  # its units are those of the training rows
        target = tables.Target.fit(
            frame.iloc[train], config.target, "regression"
        )
        labels = target.encode(frame)
    x = torch.from_numpy(encoder.transform(inputs))
    t = torch.from_numpy(labels if target.classes else labels[:, None])
    problem = Problem(x[train], t[train], x[test], t[test], encoder, target)
    problem.frame = inputs.iloc[train]
    problem.notes = list(encoder.notes)
    return problem


def load_points(config: TableConfig) -> Problem:
    """Points of the plane, with two classes."""
    from hdnn.data import tables

    points = planar.load(config.data, seed=config.seed)
    plain = {
        "kind": "number",
        "gaps": False,
        "fill": 0.0,
        "center": 0.0,
        "scale": 1.0,
    }
    encoder = tables.Encoder([{"name": "x1", **plain}, {"name": "x2", **plain}])
    target = tables.Target("class", "classification", ["0", "1"])
    rows = (points.x_train, points.t_train, points.x_test, points.t_test)
    return Problem(*rows, encoder, target, plane=points)


class PlaneJob:
    """A training on points of the plane, by the recipe of the paper."""

    def __init__(self, config: TableConfig) -> None:
        self.problem = load(config)
        chosen = {
            name: value
            for name, value in PLANAR.items()
            if getattr(config, name) is None
        }
        if config.network == "mlp":
            chosen.pop("T", None)
        self.config = replace(config, **chosen)
        self.model = build(self.config)
        self.history = History()
        self.held_out: tuple[Tensor, ...] | None = None

    def fit(self, folder: Path | None, progress: bool) -> None:
        config = self.config
        model = self.model.to(config.device)
        x = self.problem.x.to(config.device)
        t = self.problem.t.to(config.device)
        if config.validation:
            from hdnn.data.tables import hold_out

            labels = t.numpy(force=True)
            train, held = hold_out(
                labels, config.validation, config.seed, classes=True
            )
            self.held_out = (x[held], t[held])
            x = x[train]
            t = t[train]
        self.history = fit(
            model,
            x,
            t,
            validation=self.held_out,
            folder=folder,
            resume=folder is not None,
            progress=progress,
            **{name: getattr(config, name) for name in FIT_OPTIONS},
        )
        model.to("cpu")

    def certify(self) -> Any:
        where = "test points" if len(self.problem.x_test) else "training points"
        samples = MANY if self.model.net.features <= SMALL else FEW
        return analysis.certify(
            self.model, self.problem.points, samples=samples, points=where
        )

    def note(self) -> dict[str, Any]:
        return self.problem.note()

    def metrics(self) -> dict[str, Any]:
        metrics = self.problem.scores(self.model)
        if self.held_out is not None:
            metrics["validation_rows"] = len(self.held_out[0])
            metrics["best_epoch"] = self.history.best_epoch
        return metrics

    def pictures(self, certificate: Any) -> dict[str, Any]:
        axes = {"training": plotting.training_history(self.history)}
        if self.problem.plane is not None:
            axes["decision_regions"] = plotting.decision_regions(
                self.model, self.problem.plane
            )
        if certificate.by_layer:
            axes["norms"] = certificate.plot()
        return axes


class TableJob(PlaneJob):
    """A training on a file: the same as that of the estimators, of which it keeps a run."""

    def __init__(self, config: TableConfig) -> None:
        problem = load(config)
        self.problem = problem
        self.estimator = estimator(config, problem)
        labels = problem.truth(problem.t)
        self.rows = self.estimator._begin(problem.frame, labels, None)
        decay = self.estimator._shrinkage(self.rows)
        self.model = self.estimator.model_
        self.history = History()
        self.held_out = None
        names = ("layers", "activation", "T")
        chosen = {name: getattr(self.estimator, name) for name in names}
        if config.network == "mlp":
            chosen["T"] = None
        features = self.model.net.features
        self.config = replace(
            config,
            data=os.path.abspath(config.data),
            task=problem.target.task,
            features=features,
            weight_decay=decay,
            **chosen,
        )

    def fit(self, folder: Path | None, progress: bool) -> None:
        config = self.config
        rows = self.rows
        options: dict[str, Any] = {"patience": config.patience}
        if config.solver is not None:
            options["solver"] = config.solver
        if config.validation:
            rows, self.held_out = self.estimator._hold_out(
                rows, config.validation
            )
            options["validation"] = self.held_out
        options |= {
            "folder": folder,
            "resume": folder is not None,
            "progress": progress,
        }
        self.history = self.estimator._train(
            self.model, rows, config.weight_decay, **options
        )
        self.model.to("cpu")


def estimator(config: TableConfig, problem: Problem) -> Any:
    """The estimator with the options of a config."""
    from hdnn.estimators import HDNNClassifier, HDNNRegressor

    names = (
        *(
            "network",
            "layers",
            "features",
            "activation",
            "T",
            "epochs",
            "batch",
            "learning_rate",
        ),
        *("weight_decay", "ridge", "smoothness", "categorical", "device"),
    )
    options = {name: getattr(config, name) for name in names}
    options = {
        name: value
        for name, value in options.items()
        if value not in (None, [])
    }
    weights = config.weights()
    if weights is not None:
        options["class_weight"] = _by_label(weights, problem.target)
    inputs = problem.x.shape[1]
    if config.features is not None and config.features < inputs:
        raise OptionError(
            f"features must be at least {inputs}, one for each input, but got {config.features}."
        )
    kind = HDNNClassifier if problem.target.classes else HDNNRegressor
    return kind(random_state=config.seed, **options)


def _by_label(weights: Any, target: Any) -> Any:
    """The weights of --class-weight, by label instead of by name."""
    if not target.classes:
        raise OptionError(
            f"{target.name} has values, not classes: no --class-weight."
        )
    if isinstance(weights, str):
        return weights
    for name in weights:
        choose("class of --class-weight", name, target.classes)
    return {
        target.classes.index(name): weight for name, weight in weights.items()
    }


def build(config: TableConfig) -> Model:
    """A model for points of the plane, with the weights of its seed."""
    generator = torch.Generator().manual_seed(config.seed)
    options: dict[str, Any] = {"activation": config.activation, "init": "paper"}
    if config.T is not None:
        options["T"] = config.T
    features = config.features or 0  # filled in
    network = choose("network", config.network, BY_NAME)
    net = BY_NAME[network](
        features, config.layers, generator=generator, **options
    )
    return Model(
        Augment(2, features), net, SigmoidHead(features, generator=generator)
    )


# Images


def load_images(name: str) -> ImageData:
    """MNIST or CIFAR-10, from the folder that HDNN_DATA names."""
    return load_mnist() if name == "mnist" else load_cifar10()


def image_target(images: ImageData) -> Any:
    """The classes of images, as those of a column."""
    from hdnn.data.tables import Target

    return Target("class", "classification", list(images.classes))


class ImageJob:
    """A training on images, by a recipe of the paper's tables."""

    def __init__(self, config: ImageConfig) -> None:
        epochs = config.epochs or 40
        data = load_images(config.data)
        names = ("batch", "learning_rate", "weight_decay", "smoothness")
        options = {name: getattr(config, name) for name in names}
        chosen = {
            name: value for name, value in options.items() if value is not None
        }
        if config.images is not None:
            data = data.first(config.images)
            chosen.setdefault("batch", max(1, config.images // STEPS))
        if config.device == "cpu":
            chosen["bf16"] = False  # slow on most CPUs
        recipe = recipes.image_recipe(
            config.data,
            config.network,
            epochs=epochs,
            seed=config.seed,
            **chosen,
        )
        self.data = data
        self.recipe = recipe
        settings = recipes.image_settings(
            config.data, config.network, epochs=epochs
        )
        if not settings and (config.layers or config.T or config.activation):
            raise OptionError(
                f"{config.network} has no Hamiltonian layers to set."
            )
        if config.layers is not None:
            settings["layers"] = config.layers
        if config.activation is not None:
            settings["activation"] = config.activation
        if config.T is not None:
            settings["step"] = config.T / settings["layers"]
        self.model = recipes.image_network(
            config.data, config.network, seed=config.seed, **settings
        )
        self.config = replace(
            config, epochs=epochs, layers=settings.get("layers")
        )
        self.history = History()

    def fit(self, folder: Path | None, progress: bool) -> None:
        self.model.to(self.config.device)
        self.history = fit_images(
            self.model,
            self.data,
            self.recipe,
            folder=folder,
            resume=folder is not None,
            progress=progress,
        )
        self.model.to("cpu")

    def certify(self) -> Any:
        """The certificate of the Hamiltonian parts; None if there are none."""
        x = self.data.normalised(self.data.images_test[:100], torch.float32)
        try:
            return analysis.certify(
                self.model, x, points=f"test images of {self.data.name}"
            )
        except OptionError:
            return None

    def note(self) -> None:
        return None

    def metrics(self) -> dict[str, Any]:
        data = self.data
        scores = image_scores(self.model, data, data.images_test).double()
        common = int(torch.bincount(data.t_train.cpu()).argmax())
        truth = data.t_test.numpy(force=True)
        tested = evaluate(
            scores.softmax(1).numpy(), truth, data.classes, common
        )
        return {
            "task": "classification",
            "target": "class",
            "train_images": len(data.t_train),
            "test_images": len(data.t_test),
            "common": common,
            "train_accuracy": self.history.accuracy[-1],
            "test_accuracy": tested.pop("accuracy"),
            **tested,
        }

    def pictures(self, certificate: Any) -> dict[str, Any]:
        axes = {"training": plotting.training_history(self.history)}
        if certificate is not None:
            axes["norms"] = certificate.plot()
        return axes


# Results


def draw(pictures: Callable[[], Mapping[str, Any]], folder: Path) -> list[str]:
    """Write pictures as PNG files; none where matplotlib is missing."""
    try:
        require("matplotlib", extra="plot")
    except MissingExtraError:
        return []
    files = []
    for name, axes in pictures().items():
        content = byte_io.BytesIO()
        axes.figure.canvas.print_figure(content, format="png", dpi=120)
        io.write_atomically(folder / f"{name}.png", content.getvalue())
        files.append(f"{name}.png")
    return files


def spread(results: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Mean, standard deviation and extremes of each score over several runs."""
    summary = {}
    for name in SCORES:
        values = [
            result[name] for result in results if result.get(name) is not None
        ]
        if len(values) > 1:
            summary[name] = {
                "mean": statistics.fmean(values),
                "std": statistics.stdev(values),
                "smallest": min(values),
                "largest": max(values),
            }
    return summary


def text(result: Mapping[str, Any]) -> str:
    """A result for people."""
    if "runs" in result:
        lines = [
            f"{each['run']}: {score_lines(each, 'test_')[0]}"
            for each in result["runs"]
        ]
        for name, values in result["summary"].items():
            shown = {
                key: score_text(name, value) for key, value in values.items()
            }
            label = name.replace("_", " ")
            lines.append(
                f"{label:<16} mean {shown['mean']}, std {shown['std']}, from {shown['smallest']} "
                f"to {shown['largest']}"
            )
        return "\n".join(lines)
    lines = [
        f"{'network':<16} {result['network']}",
        f"{'trained':<16} {result['epochs']} epochs in {result['training_seconds']:.1f} s",
    ]
    if result.get("best_epoch"):
        lines.append(
            f"{'held out':<16} lowest loss in epoch {result['best_epoch']}"
        )
    lines += score_lines(result, "test_") or score_lines(result, "train_")
    lines += [f"{'note':<16} {note}" for note in result.get("notes", [])]
    if result["certificate"]:
        lines.append(f"{'gradients':<16} {result['certificate']['summary']}")
    lines.append(f"{'run':<16} {result['run']}")
    return "\n".join(lines)
